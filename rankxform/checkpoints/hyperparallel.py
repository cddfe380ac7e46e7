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
from rankxform.errors import CheckpointError, UsageError
from rankxform.facts import SHAPE, TYPE, Fact
from rankxform.formats import torch_metadata
from rankxform.formats.dtype import BYTES
from rankxform.formats.torch_metadata import HYPER_FLAVOR, Item, Table
from rankxform.layout.names import format_ranges
from rankxform.planning.description import Description
from rankxform.planning.parts import Part
from rankxform.planning.plan import Planner
from rankxform.storage.store import FOLDER, Listing, Store

from . import boxes, folder
from .base import Arrangement, Naming, Needed, Selected, Where
from .boxes import METADATA
from .dcp import SUFFIX, begins_with, read_table
from .folder import SUFFIX as TENSORS
from .iterations import Iteration, Steps, iteration_of

TRACKER = "latest_checkpoint_iteration.txt"
ITEMS = ".bytes"
_STEP = re.compile(r"global_step_([0-9]{1,18})")
_FILE = re.compile(r"_rank([0-9]{1,9})_(\.safetensors|\.bytes)")
_OWN_TABLE = re.compile(r"(?:([0-9]{1,9})\.metadata|\.rank([0-9]{1,9})_metadata)")


def _files(names: Iterable[str]) -> list[str]:
    return [name for name in names if name == METADATA or _FILE.fullmatch(name)]


def _is_complete(names: Iterable[str]) -> bool:
    return any(name == METADATA or _OWN_TABLE.fullmatch(name) for name in names)


STEPS_OF = Steps("step", _STEP, "global_step_{}", TRACKER, _files, _is_complete)


class HyperParallel:
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

    def pattern(self, where: Where) -> str:
        return "global_step_*/*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        if listing.kind != FOLDER or any(name.endswith(SUFFIX) for name in listing.entries):
            return None
        return next(
            (
                name
                for name in listing.entries
                if name == TRACKER
                or (name == METADATA and begins_with(store, METADATA, b"hyper_parallel"))
                or any(one.fullmatch(name) for one in (_FILE, _STEP, _OWN_TABLE))
            ),
            None,
        )

    def select(self, listing: Listing, where: Where, store: Store, needed: Needed) -> Selected:
        if where.suffix is not None:
            raise UsageError("--suffix chooses among rank files; HyperParallel has --step N")
        chosen = iteration_of(listing, where, store, STEPS_OF)
        table, stated = _table(chosen, store)
        training = {} if chosen.number is None else {"global_step": chosen.number}
        notices = (*chosen.notices, *stated.notices)
        stated = replace(stated, items=self.items, training=training, notices=notices)
        names, description = boxes.described(
            listing, boxes.as_stored(table), _entry_of, (TENSORS, ITEMS), chosen.below, stated
        )
        return Selected(names, chosen.step, chosen.others, description=description)

    def arrange(self, planner: Planner, naming: Naming) -> Arrangement:
        """Two files for each rank: what is no tensor has one of its own."""
        names, parts = {}, {}
        most = naming.options["max_part"] or boxes.DEFAULT_BYTES
        for number, part in enumerate(boxes.parts_of(planner, most)):
            assert part.names is not None
            rest = frozenset(n for n in part.names if planner.parameter(n).dtype == BYTES)
            for kind, some in enumerate((part.names - rest, rest)):
                if some:
                    names[2 * number + kind] = f"_rank{number}_{(TENSORS, ITEMS)[kind]}"
                    parts[2 * number + kind] = Part(part.rank, some)
        step = naming.options["iteration"]
        step = naming.step if step is None else step
        if step is None:
            return Arrangement(names, parts)
        mark = TRACKER, f"{step}\n".encode()
        return Arrangement(names, parts, f"global_step_{step}", mark)

    def metadata(self, source: Mapping[str, str]) -> Mapping[str, str]:
        return {}

    def owns(self, name: str, file: int) -> bool:
        match = _FILE.fullmatch(name)
        return match is not None and 2 * int(match[1]) + (match[2] == ITEMS) == file

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        return (METADATA,)

    def companions(
        self, planner: Planner, arrangement: Arrangement, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        table = boxes.table_of(planner, arrangement.names, places=False)
        return {METADATA: torch_metadata.written(table, HYPER_FLAVOR)}

    def foreign_files(self, listing: Listing, own: Collection[str]) -> list[str]:
        return folder.foreign_files(listing, own, (TENSORS, ITEMS))


def _entry_of(item: Item, nbytes: int) -> str:
    """Return what a file calls an item: a tensor's key; a ``.bytes`` file is one entry."""
    return item.key if item.box is not None else ""


def _table(chosen: Iteration, store: Store) -> tuple[Table, Description]:
    """Read the table of a step, or the tables of all its ranks; return also what states it."""
    own = {
        int(match[1] or match[2]): name
        for name in chosen.names
        if (match := _OWN_TABLE.fullmatch(name))
    }
    if METADATA in chosen.names or not own:
        name, others = chosen.below + METADATA, [*own.values()][:1]
        told = tuple(f"{chosen.at(other)}: was not used; {METADATA} says it" for other in others)
        description = Description(chosen.listing.at(name), notices=told)
        return read_table(chosen.listing, store, name), description
    gone = sorted(set(range(max(own) + 1)) - {*own})
    if gone:
        raise CheckpointError(
            f"has tables of ranks {format_ranges(sorted(own))}, and none of rank "
            f"{format_ranges(gone)}",
            f"copy {own[max(own)].replace(str(max(own)), str(gone[0]))} into it",
            where=chosen.path,
        )
    found, differing = Table(), list[Fact]()
    for _, name in sorted(own.items()):
        more = read_table(chosen.listing, store, chosen.below + name)
        differing += _join(found, more, (chosen.at(own[0]), chosen.at(name)))
    return found, Description(chosen.at(own[0]), facts=tuple(differing))


def _join(found: Table, more: Table, sources: tuple[str, str]) -> Iterator[Fact]:
    """Add a rank's table, and yield what it and others' state of one tensor, if that differs.

    A box that several ranks have is a replica. sources: paths of the others' tables and of this
    one.
    """
    for name, stated in more.tensors.items():
        both = found.tensors.setdefault(name, stated), stated
        for source, (dtype, shape) in zip(sources, both if len({*both}) > 1 else ()):
            yield Fact(TYPE, name, dtype, facts.METADATA, source)
            yield Fact(SHAPE, name, shape, facts.METADATA, source)
    for name, some in more.items.items():
        found.items[name] = (*found.items.get(name, ()), *some)
