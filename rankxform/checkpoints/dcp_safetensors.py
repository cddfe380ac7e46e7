"""Safetensors files with boxes of tensors, as PyTorch's Hugging Face writer saves them; read only.

::

    shard-00001-model-00001-of-00001.safetensors ...   of rank 0

Each file's metadata says where its tensors lie in the whole (``DCP_SHARDING_INFO``); nothing says
how large that is, so that a file which is missing at the end cannot be told.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from contextlib import suppress

from rankxform.checkpoints.boxes import box_table, describe_boxes
from rankxform.checkpoints.folder import SUFFIX, check_no_step, tensor_files
from rankxform.errors import CheckpointError, FormatError, RankxformError
from rankxform.facts import HEADER, TYPE, Statement
from rankxform.formats.base import Index
from rankxform.formats.json_stream import decode_json
from rankxform.formats.safetensors import read_index
from rankxform.formats.torch_metadata import DcpMetadata, StoredItem
from rankxform.geometry.box import Box, Shape
from rankxform.layout.names import format_ranges
from rankxform.planning.description import Description
from rankxform.storage.store import FOLDER, Listing, Store

from .base import CheckpointRef, RankFilter, ReadOnlyForm, SelectedFiles
from .dcp import begins_with

KEY = "DCP_SHARDING_INFO"
_LOOKED_AT = 4
SHARD = re.compile(r"shard-([0-9]{5,9})-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")


class DcpSafetensorsForm(ReadOnlyForm):
    """A folder of safetensors files with boxes of tensors (`checkpoints.base.Form`)."""

    name = "dcp_safetensors"
    title = "sharded safetensors of DCP"
    container: str | None = "safetensors"

    def pattern(self, where: CheckpointRef) -> str:
        return "*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        """By files' names, or by what the first states; a Hugging Face folder's are whole."""
        if listing.kind != FOLDER:
            return None
        named = next((name for name in listing.entries if SHARD.fullmatch(name)), None)
        return named or holds_boxes(listing, store)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        check_no_step(self.name, where)
        names = tensor_files(listing.files)
        if not names:
            raise CheckpointError(
                f"holds no safetensors file{listing.searched}", where=listing.path
            )
        boxes_by_file = {name: _read(store, listing, name) for name in names}
        table, differing = _table(boxes_by_file)
        label = f"{KEY} of {listing.at(names[0])}"
        described = Description(label, warnings=_gaps(listing, names), facts=differing)
        names_by_id, description = describe_boxes(
            listing, box_table(table), lambda item, nbytes: item.key, (SUFFIX,), "",
            described,
        )  # fmt: skip
        return SelectedFiles(names_by_id, description=description)


def holds_boxes(listing: Listing, store: Store) -> str | None:
    """Return a safetensors file by which a folder holds boxes of tensors; whole ones begin at 0."""
    for name in tensor_files(listing.files)[:_LOOKED_AT]:
        if not begins_with(store, name, KEY.encode()):  # a header's metadata stand first
            continue
        with suppress(RankxformError, FormatError):
            with store.open(name) as file:
                index = read_index(file.read_at, file.version.size)
            if KEY in index.metadata and any(any(b.start) for _, b in _boxes(index).values()):
                return name
    return None


def _read(store: Store, listing: Listing, name: str) -> dict[str, tuple[str, Box]]:
    """Return type and box of each tensor of a file. Raises CheckpointError."""
    path = listing.at(name)
    try:
        with store.open(name) as file:
            index = read_index(file.read_at, file.version.size)
        return _boxes(index)
    except FormatError as error:
        raise CheckpointError.of_parts(error.at(path)) from error


def _boxes(index: Index) -> dict[str, tuple[str, Box]]:
    sharding_info = (
        decode_json(index.metadata.get(KEY, "").encode()) if KEY in index.metadata else None
    )
    if not isinstance(sharding_info, dict):
        raise FormatError(f"has no {KEY}, which other files of the folder have")
    boxes_by_name = {}
    schema = index.schema
    for name, dtype, shape in zip(schema.names, schema.dtypes, schema.shapes):
        tensor_info = sharding_info.get(name)
        offsets = tensor_info.get("saved_offsets") if isinstance(tensor_info, dict) else None
        if (
            not isinstance(offsets, list)
            or len(offsets) != len(shape)
            or not all(map(_is_place, offsets))
        ):
            raise FormatError(f"{KEY} does not say where {name!r} lies")
        start = tuple(offsets)
        boxes_by_name[name] = dtype, Box(start, tuple(a + n for a, n in zip(start, shape)))
    return boxes_by_name


def _is_place(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _table(
    boxes_by_file: Mapping[str, Mapping[str, tuple[str, Box]]],
) -> tuple[DcpMetadata, tuple[Statement, ...]]:
    """Return the table of boxes, and types that differ; a tensor ends where its last box does."""
    lying: dict[str, list[StoredItem]] = {}
    types: dict[str, str] = {}
    differing = list[Statement]()
    for file, tensors in boxes_by_file.items():
        for name, (dtype, box) in tensors.items():
            first_dtype = types.setdefault(name, dtype)
            if dtype != first_dtype:
                differing.append(Statement(TYPE, name, first_dtype, HEADER, "other files"))
                differing.append(Statement(TYPE, name, dtype, HEADER, file))
            stored_items = lying.setdefault(name, [])
            if box not in (i.box for i in stored_items if box.size):  # a replica
                stored_items.append(StoredItem(file, 0, -1, name, box))
    shapes: dict[str, Shape] = {}
    for name, stored_items in lying.items():
        stops = [i.box.stop for i in stored_items if i.box is not None]
        shapes[name] = tuple(max(ends) for ends in zip(*stops))
    typed_shapes = {name: (types[name], shape) for name, shape in shapes.items()}
    return DcpMetadata(
        typed_shapes, {name: tuple(tensor_items) for name, tensor_items in lying.items()}
    ), tuple(differing)


def _gaps(listing: Listing, names: Iterable[str]) -> tuple[str, ...]:
    """Return that numbers of shards are left out; a rank that has nothing writes none."""
    matches = (SHARD.fullmatch(name) for name in names)
    numbers = {int(match[1]) for match in matches if match}
    missing_shards = sorted(set(range(1, max(numbers, default=0) + 1)) - numbers)
    if not missing_shards:
        return ()
    return (
        f"{listing.path}: no shard {format_ranges(missing_shards)}; is it missing, or had its rank "
        "nothing to save?",
    )
