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

from rankxform.errors import CheckpointError, FormatError, RankxformError
from rankxform.facts import HEADER, TYPE, Fact
from rankxform.formats import safetensors
from rankxform.formats.base import Index
from rankxform.formats.json_stream import load
from rankxform.formats.torch_metadata import Item, Table
from rankxform.geometry.box import Box, Shape
from rankxform.layout.names import format_ranges
from rankxform.planning.description import Description
from rankxform.storage.store import FOLDER, Listing, Store

from . import boxes, folder
from .base import Needed, ReadOnly, Selected, Where
from .dcp import begins_with

KEY = "DCP_SHARDING_INFO"
_LOOKED_AT = 4
SHARD = re.compile(r"shard-([0-9]{5,9})-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")


class DcpSafetensors(ReadOnly):
    """A folder of safetensors files with boxes of tensors (`checkpoints.base.Form`)."""

    name = "dcp_safetensors"
    title = "sharded safetensors of DCP"
    container: str | None = "safetensors"

    def pattern(self, where: Where) -> str:
        return "*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        """By files' names, or by what the first states; a Hugging Face folder's are whole."""
        if listing.kind != FOLDER:
            return None
        named = next((name for name in listing.entries if SHARD.fullmatch(name)), None)
        return named or holds_boxes(listing, store)

    def select(self, listing: Listing, where: Where, store: Store, needed: Needed) -> Selected:
        folder.check_no_step(self.name, where)
        names = folder.tensor_files(listing.files)
        if not names:
            raise CheckpointError(
                f"holds no safetensors file{listing.searched}", where=listing.path
            )
        stated = {name: _read(store, listing, name) for name in names}
        table, differing = _table(stated)
        label = f"{KEY} of {listing.at(names[0])}"
        described = Description(label, warnings=_gaps(listing, names), facts=differing)
        found, description = boxes.described(
            listing, boxes.as_stored(table), lambda item, nbytes: item.key, (folder.SUFFIX,), "",
            described,
        )  # fmt: skip
        return Selected(found, description=description)


def holds_boxes(listing: Listing, store: Store) -> str | None:
    """Return a safetensors file by which a folder holds boxes of tensors; whole ones begin at 0."""
    for name in folder.tensor_files(listing.files)[:_LOOKED_AT]:
        if not begins_with(store, name, KEY.encode()):  # a header's metadata stand first
            continue
        with suppress(RankxformError, FormatError):
            with store.open(name) as file:
                index = safetensors.read_index(file.read_at, file.version.size)
            if KEY in index.metadata and any(any(b.start) for _, b in _boxes(index).values()):
                return name
    return None


def _read(store: Store, listing: Listing, name: str) -> dict[str, tuple[str, Box]]:
    """Return type and box of each tensor of a file. Raises CheckpointError."""
    path = listing.at(name)
    try:
        with store.open(name) as file:
            index = safetensors.read_index(file.read_at, file.version.size)
        return _boxes(index)
    except FormatError as error:
        raise CheckpointError.of_parts(error.at(path)) from error


def _boxes(index: Index) -> dict[str, tuple[str, Box]]:
    stated = load(index.metadata.get(KEY, "").encode()) if KEY in index.metadata else None
    if not isinstance(stated, dict):
        raise FormatError(f"has no {KEY}, which other files of the folder have")
    found = {}
    schema = index.schema
    for name, dtype, shape in zip(schema.names, schema.dtypes, schema.shapes):
        one = stated.get(name)
        at = one.get("saved_offsets") if isinstance(one, dict) else None
        if not isinstance(at, list) or len(at) != len(shape) or not all(map(_is_place, at)):
            raise FormatError(f"{KEY} does not say where {name!r} lies")
        start = tuple(at)
        found[name] = dtype, Box(start, tuple(a + n for a, n in zip(start, shape)))
    return found


def _is_place(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _table(
    stated: Mapping[str, Mapping[str, tuple[str, Box]]],
) -> tuple[Table, tuple[Fact, ...]]:
    """Return the table of boxes, and types that differ; a tensor ends where its last box does."""
    lying: dict[str, list[Item]] = {}
    types: dict[str, str] = {}
    differing = list[Fact]()
    for file, tensors in stated.items():
        for name, (dtype, box) in tensors.items():
            known = types.setdefault(name, dtype)
            if dtype != known:
                differing.append(Fact(TYPE, name, known, HEADER, "other files"))
                differing.append(Fact(TYPE, name, dtype, HEADER, file))
            some = lying.setdefault(name, [])
            if box not in (one.box for one in some if box.size):  # a replica
                some.append(Item(file, 0, -1, name, box))
    shapes: dict[str, Shape] = {}
    for name, some in lying.items():
        stops = [one.box.stop for one in some if one.box is not None]
        shapes[name] = tuple(max(ends) for ends in zip(*stops))
    whole = {name: (types[name], shape) for name, shape in shapes.items()}
    return Table(whole, {name: tuple(some) for name, some in lying.items()}), tuple(differing)


def _gaps(listing: Listing, names: Iterable[str]) -> tuple[str, ...]:
    """Return that numbers of shards are left out; a rank that has nothing writes none."""
    matches = (SHARD.fullmatch(name) for name in names)
    numbers = {int(match[1]) for match in matches if match}
    gone = sorted(set(range(1, max(numbers, default=0) + 1)) - numbers)
    if not gone:
        return ()
    return (
        f"{listing.path}: no shard {format_ranges(gone)}; is it missing, or had its rank "
        "nothing to save?",
    )
