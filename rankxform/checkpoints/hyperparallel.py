"""HyperParallel's distributed checkpoints: a safetensors file of each rank, and a table of boxes.

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
from dataclasses import replace
from typing import Any

from rankxform import facts
from rankxform.checkpoints.boxes import DEFAULT_BYTES, box_table, describe_boxes, parts_of, table_of
from rankxform.errors import CheckpointError, UsageError
from rankxform.facts import SHAPE, TYPE, Statement
from rankxform.formats.dtype import BYTES
from rankxform.formats.torch_metadata import (
    HYPER_FLAVOR,
    DcpMetadata,
    StoredItem,
    format_dcp_metadata,
)
from rankxform.layout.names import format_ranges
from rankxform.planning.description import Description
from rankxform.planning.parts import FileContent
from rankxform.planning.plan import Planner
from rankxform.storage.store import FOLDER, Listing, Store

from . import folder
from .base import CheckpointRef, DestinationFiles, FileNaming, RankFilter, SelectedFiles
from .boxes import DCP_METADATA
from .dcp import DISTCP_SUFFIX, begins_with, read_table
from .folder import SUFFIX as TENSORS
from .iterations import SelectedIteration, StepFolders, iteration_of

TRACKER = "latest_checkpoint_iteration.txt"
ITEMS = ".bytes"
_STEP = re.compile(r"global_step_([0-9]{1,18})")
_RANK_FILE = re.compile(r"_rank([0-9]{1,9})_(\.safetensors|\.bytes)")
_OWN_TABLE = re.compile(r"(?:([0-9]{1,9})\.metadata|\.rank([0-9]{1,9})_metadata)")


def _files(names: Iterable[str]) -> list[str]:
    return [name for name in names if name == DCP_METADATA or _RANK_FILE.fullmatch(name)]


def _is_complete(names: Iterable[str]) -> bool:
    return any(name == DCP_METADATA or _OWN_TABLE.fullmatch(name) for name in names)


STEPS_OF = StepFolders("step", _STEP, "global_step_{}", TRACKER, _files, _is_complete)


class HyperParallelForm:
    """A step of HyperParallel's, or the root of its steps (`checkpoints.base.Form`)."""

    name = "hyperparallel"
    title = "HyperParallel"
    options: tuple[str, ...] = ("iteration", "max_part")
    container: str | None = "safetensors"
    described = True
    training: str | None = None
    counters = False
    configured = False
    items = "hyperparallel"
    is_written = True

    def pattern(self, where: CheckpointRef) -> str:
        return "global_step_*/*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        if listing.kind != FOLDER or any(name.endswith(DISTCP_SUFFIX) for name in listing.entries):
            return None
        return next(
            (
                name
                for name in listing.entries
                if name == TRACKER
                or (name == DCP_METADATA and begins_with(store, DCP_METADATA, b"hyper_parallel"))
                or any(pattern.fullmatch(name) for pattern in (_RANK_FILE, _STEP, _OWN_TABLE))
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
        notices = (*iteration.notices, *base_description.notices)
        base_description = replace(
            base_description, items=self.items, training=training, notices=notices
        )
        names, description = describe_boxes(
            listing,
            box_table(table),
            _entry_of,
            (TENSORS, ITEMS),
            iteration.below,
            base_description,
        )
        return SelectedFiles(
            names, iteration.step, iteration.skipped_steps, description=description
        )

    def arrange(self, planner: Planner, naming: FileNaming) -> DestinationFiles:
        """Two files for each rank: what is no tensor has one of its own."""
        names, parts = {}, {}
        max_bytes = naming.options["max_part"] or DEFAULT_BYTES
        for number, part in enumerate(parts_of(planner, max_bytes)):
            assert part.names is not None
            non_tensors = frozenset(n for n in part.names if planner.parameter(n).dtype == BYTES)
            for kind, kind_names in enumerate((part.names - non_tensors, non_tensors)):
                if kind_names:
                    names[2 * number + kind] = f"_rank{number}_{(TENSORS, ITEMS)[kind]}"
                    parts[2 * number + kind] = FileContent(part.rank, kind_names)
        step = naming.options["iteration"]
        step = naming.step if step is None else step
        if step is None:
            return DestinationFiles(names, parts)
        mark = TRACKER, f"{step}\n".encode()
        return DestinationFiles(names, parts, f"global_step_{step}", mark)

    def metadata(self, source: Mapping[str, str]) -> Mapping[str, str]:
        return {}

    def owns(self, name: str, file: int) -> bool:
        match = _RANK_FILE.fullmatch(name)
        return match is not None and 2 * int(match[1]) + (match[2] == ITEMS) == file

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        return (DCP_METADATA,)

    def companions(
        self, planner: Planner, arrangement: DestinationFiles, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        table = table_of(planner, arrangement.names, places=False)
        return {DCP_METADATA: format_dcp_metadata(table, HYPER_FLAVOR)}

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        return folder.foreign_files(listing, dst_names, (TENSORS, ITEMS))


def _entry_of(item: StoredItem, nbytes: int) -> str:
    """Return what a file calls an item: a tensor's key; a ``.bytes`` file is one entry."""
    return item.key if item.box is not None else ""


def _tables_of_ranks(iteration: SelectedIteration, store: Store) -> tuple[DcpMetadata, Description]:
    """Read the table of a step, or the tables of all its ranks; return also what states it."""
    tables_by_rank = {
        int(match[1] or match[2]): name
        for name in iteration.names
        if (match := _OWN_TABLE.fullmatch(name))
    }
    if DCP_METADATA in iteration.names or not tables_by_rank:
        name, unused_tables = iteration.below + DCP_METADATA, [*tables_by_rank.values()][:1]
        notices = tuple(
            f"{iteration.at(unused_table)}: was not used; {DCP_METADATA} says it"
            for unused_table in unused_tables
        )
        description = Description(iteration.listing.at(name), notices=notices)
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
    return merged_table, Description(iteration.at(tables_by_rank[0]), facts=tuple(differing))


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
            yield Statement(TYPE, name, dtype, facts.METADATA, source)
            yield Statement(SHAPE, name, shape, facts.METADATA, source)
    for name, stored_items in added_table.items.items():
        merged_table.items[name] = (*merged_table.items.get(name, ()), *stored_items)
