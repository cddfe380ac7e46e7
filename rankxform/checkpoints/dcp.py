"""PyTorch's distributed checkpoints, and HyperParallel's.

::

    .metadata                  every tensor's boxes, and where each lies; written last
    __0_0.distcp ...           items as `torch.save` writes them, of rank 0, file 0

::

    shard-00001-model-00001-of-00001.safetensors ...   of rank 0

Each file's metadata says where its tensors lie in the whole (``DCP_SHARDING_INFO``); nothing says
how large that is, so that a file which is missing at the end cannot be told.

::

    latest_checkpoint_iteration.txt                the number, which is written last
    global_step_100/.metadata                      every tensor's boxes, and where each lies
                    _rank0_.safetensors ...        boxes of tensors, of rank 0
                    _rank0_.bytes ...              what is no tensor, one behind the other

Saved without collective calls, a step has a table for each rank (``0.metadata``) instead of one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from rankxform.checkpoints import folders
from rankxform.errors import CheckpointError, FormatError, RankxformError, UsageError
from rankxform.formats.container import BLOCK, BYTES, Index
from rankxform.formats.dcp_containers import is_extent
from rankxform.formats.dcp_metadata import (
    HYPER_FLAVOR,
    TORCH_FLAVOR,
    DcpMetadata,
    StoredItem,
    format_dcp_metadata,
    parse_dcp_metadata,
)
from rankxform.formats.safetensors import read_index
from rankxform.geometry.box import Box, Shape
from rankxform.layout.names import format_ranges
from rankxform.planning.catalog import Description
from rankxform.planning.plan import FileContent, Planner
from rankxform.statements import SHAPE, TYPE, Statement, as_notice, as_warning
from rankxform.storage.store import FOLDER, Listing, Store
from rankxform.values import decode_json, pattern_on_use

from .base import CheckpointRef, DestinationFiles, Form, RankFilter, SelectedFiles
from .folders import (
    DCP_METADATA,
    DEFAULT_BYTES,
    SUFFIX,
    SelectedIteration,
    StepFolders,
    box_table,
    check_no_step,
    describe_boxes,
    iteration_of,
    parts_of,
    table_of,
    tensor_files,
)
from .folders import SUFFIX as TENSORS

DISTCP_SUFFIX = ".distcp"
_FIRST_FILE = f"__0_0{DISTCP_SUFFIX}"
BACKEND = "metadata.json"
_FILE = pattern_on_use(r"__([0-9]{1,9})_0\.distcp")


class DcpForm(Form):
    """A folder of PyTorch's DCP (`checkpoints.base.Form`)."""

    name = "dcp"
    title = "PyTorch DCP"
    options = ("max_part",)
    container = "distcp"
    items = "torch"
    has_table = True
    is_written = True

    def pattern(self, where: CheckpointRef) -> str:
        return "*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        if listing.kind != FOLDER or is_megatrons(listing, store):
            return None
        if begins_with(store, DCP_METADATA, b"torch.distributed"):
            return DCP_METADATA
        return next((name for name in listing.entries if name.endswith(DISTCP_SUFFIX)), None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        folders.check_no_step(self.name, where)
        table = read_table(listing, store, DCP_METADATA)
        base_description = Description(listing.at(DCP_METADATA), items=self.items)
        names, description = describe_boxes(
            listing, box_table(table), entry_of, (DISTCP_SUFFIX,), "", base_description
        )
        return SelectedFiles(names, description=description)

    def destination_files(
        self, planner: Planner, options: Mapping[str, Any], step: int | None, suffix: str
    ) -> DestinationFiles:
        parts = parts_of(planner, options["max_part"] or DEFAULT_BYTES)
        names = {number: f"__{number}_0{DISTCP_SUFFIX}" for number in range(len(parts))}
        return DestinationFiles(names, dict(enumerate(parts)))

    def owns(self, name: str, file: int) -> bool:
        return file_number(name) == file

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        return (DCP_METADATA,)

    def companions(
        self, planner: Planner, arrangement: DestinationFiles, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        table = table_of(planner, arrangement, places=True)
        return {DCP_METADATA: format_dcp_metadata(table, TORCH_FLAVOR)}

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        return folders.foreign_files(listing, dst_names, (DISTCP_SUFFIX,))


def file_number(name: str) -> int | None:
    """Return the number of a destination's file; None: it is no such file."""
    match = _FILE().fullmatch(name)
    return int(match[1]) if match else None


def is_megatrons(listing: Listing, store: Store) -> bool:
    """Tell whether a folder is Megatron-Core's, which has a file on its backend beside the items.

    `listing` has what lies in it.
    """
    return BACKEND in listing.entries and begins_with(store, BACKEND, b"sharded_backend")


def begins_with(store: Store, name: str, words: bytes) -> bool:
    """Tell whether words are among the first bytes of a file, if it is there."""
    if not store.has(name):
        return False
    with store.open(name) as file:
        return words in file.read_at(0, BLOCK)


def entry_of(item: StoredItem, nbytes: int) -> str:
    """Return what a ``.distcp`` calls an item: its first byte, and its key in a safetensors file.

    Such a file, at the end, has all tensors, and what is stated are a tensor's own bytes.
    """
    return f"{item.offset}/{item.key}" if item.nbytes == nbytes else str(item.offset)


def read_table(listing: Listing, store: Store, name: str) -> DcpMetadata:
    """Read a ``.metadata``. Raises CheckpointError."""
    on_another_node = name in listing.entries or name in listing.files
    if not store.has(name) and not on_another_node:
        interrupted = name + ".tmp"
        reason = (
            f"; {interrupted} lies there, of a save that was interrupted"
            if interrupted in listing.entries or store.has(interrupted)
            else ""
        )
        raise CheckpointError(
            f"is not there{listing.searched}, and without it nothing says where each "
            f"tensor lies{reason}",
            "take another step",
            "save again",
            where=listing.at(name),
        )
    try:
        return parse_dcp_metadata(store.read(name, listing.searched))
    except FormatError as error:
        raise CheckpointError(f"{DCP_METADATA} {error}", where=listing.at(name)) from error


KEY = "DCP_SHARDING_INFO"
_LOOKED_AT = 4
SHARD = re.compile(r"shard-([0-9]{5,9})-model-[0-9]{5,9}-of-[0-9]{5,9}\.safetensors")


class DcpSafetensorsForm(Form):
    """A folder of safetensors files with boxes of tensors (`checkpoints.base.Form`)."""

    name = "dcp_safetensors"
    title = "sharded safetensors of DCP"
    container = "safetensors"

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
        described = Description(
            label, findings=tuple(map(as_warning, _gaps(listing, names))), statements=differing
        )
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
            or not all(map(is_extent, offsets))
        ):
            raise FormatError(f"{KEY} does not say where {name!r} lies")
        start = tuple(offsets)
        boxes_by_name[name] = dtype, Box(start, tuple(a + n for a, n in zip(start, shape)))
    return boxes_by_name


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
                differing.append(Statement(TYPE, name, first_dtype, "other files"))
                differing.append(Statement(TYPE, name, dtype, file))
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


TRACKER = "latest_checkpoint_iteration.txt"
ITEMS = ".bytes"
_STEP = pattern_on_use(r"global_step_([0-9]{1,18})")
_RANK_FILE = pattern_on_use(r"_rank([0-9]{1,9})_(\.safetensors|\.bytes)")
_OWN_TABLE = pattern_on_use(r"(?:([0-9]{1,9})\.metadata|\.rank([0-9]{1,9})_metadata)")


def _files(names: Iterable[str]) -> list[str]:
    return [name for name in names if name == DCP_METADATA or _RANK_FILE().fullmatch(name)]


def _is_complete(names: Iterable[str]) -> bool:
    return any(name == DCP_METADATA or _OWN_TABLE().fullmatch(name) for name in names)


STEPS_OF = StepFolders("step", _STEP(), "global_step_{}", TRACKER, _files, _is_complete)


class HyperParallelForm(Form):
    """A step of HyperParallel's, or the root of its steps (`checkpoints.base.Form`)."""

    name = "hyperparallel"
    title = "HyperParallel"
    options = ("iteration", "max_part")
    tracker = TRACKER
    container = "safetensors"
    items = "hyperparallel"
    has_table = True
    is_written = True

    def pattern(self, where: CheckpointRef) -> str:
        return "global_step_*/*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        if listing.kind != FOLDER or any(name.endswith(DISTCP_SUFFIX) for name in listing.entries):
            return None
        steps = [name for name in listing.folders if _STEP().fullmatch(name)]
        if any(store.has(f"{name}/{_FIRST_FILE}") for name in steps[:_LOOKED_AT]):
            return None  # steps of PyTorch's DCP
        return next(
            (
                name
                for name in listing.entries
                if name == TRACKER
                or (name == DCP_METADATA and begins_with(store, DCP_METADATA, b"hyper_parallel"))
                or any(pattern.fullmatch(name) for pattern in (_RANK_FILE(), _STEP(), _OWN_TABLE()))
            ),
            None,
        )

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        if where.suffix is not None:
            raise UsageError("--suffix chooses among rank files; HyperParallel has --step N")
        iteration = iteration_of(listing, where, store, STEPS_OF)
        table, base_description = _tables_of_ranks(iteration, store)
        training = {} if iteration.number is None else {"global_step": iteration.number}
        findings = (*iteration.findings, *base_description.findings)
        base_description = replace(
            base_description, items=self.items, training=training, findings=findings
        )
        names, description = describe_boxes(
            listing,
            box_table(table),
            # A file calls a tensor by its key; a .bytes file is one entry.
            lambda item, nbytes: item.key if item.box is not None else "",
            (TENSORS, ITEMS),
            iteration.below,
            base_description,
        )
        return SelectedFiles(
            names, iteration.step, iteration.skipped_steps, description=description
        )

    def destination_files(
        self, planner: Planner, options: Mapping[str, Any], step: int | None, suffix: str
    ) -> DestinationFiles:
        """Two files for each rank: what is no tensor has one of its own."""
        names, parts = {}, {}
        max_bytes = options["max_part"] or DEFAULT_BYTES
        for number, part in enumerate(parts_of(planner, max_bytes)):
            assert part.names is not None
            non_tensors = frozenset(n for n in part.names if planner.parameter(n).dtype == BYTES)
            for kind, kind_names in enumerate((part.names - non_tensors, non_tensors)):
                if kind_names:
                    names[2 * number + kind] = f"_rank{number}_{(TENSORS, ITEMS)[kind]}"
                    parts[2 * number + kind] = FileContent(part.rank, kind_names)
        step = step if options["iteration"] is None else options["iteration"]
        if step is None:
            return DestinationFiles(names, parts)
        mark = TRACKER, f"{step}\n".encode()
        return DestinationFiles(names, parts, f"global_step_{step}", mark)

    def owns(self, name: str, file: int) -> bool:
        match = _RANK_FILE().fullmatch(name)
        return match is not None and 2 * int(match[1]) + (match[2] == ITEMS) == file

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        return (DCP_METADATA,)

    def companions(
        self, planner: Planner, arrangement: DestinationFiles, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        table = table_of(planner, arrangement, places=False)
        return {DCP_METADATA: format_dcp_metadata(table, HYPER_FLAVOR)}

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        return folders.foreign_files(listing, dst_names, (TENSORS, ITEMS))


def _tables_of_ranks(iteration: SelectedIteration, store: Store) -> tuple[DcpMetadata, Description]:
    """Read the table of a step, or the tables of all its ranks; return also what states it."""
    tables_by_rank = {
        int(match[1] or match[2]): name
        for name in iteration.names
        if (match := _OWN_TABLE().fullmatch(name))
    }
    if DCP_METADATA in iteration.names or not tables_by_rank:
        name, unused_tables = iteration.below + DCP_METADATA, [*tables_by_rank.values()][:1]
        findings = tuple(
            as_notice(f"{iteration.at(unused_table)}: was not used; {DCP_METADATA} says it")
            for unused_table in unused_tables
        )
        description = Description(iteration.listing.at(name), findings=findings)
        return read_table(iteration.listing, store, name), description
    missing_ranks = sorted(set(range(max(tables_by_rank) + 1)) - {*tables_by_rank})
    if missing_ranks:
        last_rank = max(tables_by_rank)
        missing_name = tables_by_rank[last_rank].replace(str(last_rank), str(missing_ranks[0]))
        raise CheckpointError(
            f"has tables of ranks {format_ranges(sorted(tables_by_rank))}, and none of rank "
            f"{format_ranges(missing_ranks)}",
            f"copy {missing_name} into it",
            where=iteration.path,
        )
    merged_table, differing = DcpMetadata(), list[Statement]()
    for _, name in sorted(tables_by_rank.items()):
        added_table = read_table(iteration.listing, store, iteration.below + name)
        differing += _join(
            merged_table, added_table, (iteration.at(tables_by_rank[0]), iteration.at(name))
        )
    return merged_table, Description(iteration.at(tables_by_rank[0]), statements=tuple(differing))


def _join(
    merged_table: DcpMetadata, added_table: DcpMetadata, sources: tuple[str, str]
) -> Iterator[Statement]:
    """Add a rank's table, and yield what it and others' state of one tensor, if that differs.

    A box that several ranks have is a replica. sources: paths of the others' tables and of this
    one.
    """
    for name, typed_shape in added_table.tensors.items():
        typed_shapes = merged_table.tensors.setdefault(name, typed_shape), typed_shape
        for source, (dtype, shape) in zip(
            sources, typed_shapes if len({*typed_shapes}) > 1 else ()
        ):
            yield Statement(TYPE, name, dtype, source)
            yield Statement(SHAPE, name, shape, source)
    for name, stored_items in added_table.items.items():
        merged_table.items[name] = (*merged_table.items.get(name, ()), *stored_items)
