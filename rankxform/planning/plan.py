"""The plan: for every destination rank, the copies that make up its slices.

A copy is the overlap of a source rank's box and a destination rank's box. Where several source
ranks hold the same box, one is chosen. The plan holds integers only; it can be printed, counted
and compared without touching a tensor byte, and is the same on every process.

For a 4x4 tensor cut by rows on 2 ranks and wanted by columns on 2::

    rank 0  w [0:4, 0:2]  <- rank 0 [0:2, 0:2]  <- rank 1 [2:4, 0:2]
    rank 1  w [0:4, 2:4]  <- rank 0 [0:2, 2:4]  <- rank 1 [2:4, 2:4]

The plan is kept as moves (`rankxform.planning.transfers`), and written out rank by rank for people.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import lcm
from typing import NoReturn

from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.formats.dtype import content_bytes
from rankxform.geometry.grid import Cell
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import Strategy

from .catalog import Parameter, Source
from .losses import losses_message
from .selection import Selection, destination_layout
from .transfers import Copy, Move, Portion, RankPlan, Readers, Slice, Targets, overlaps

REPLICAS = ("spread", "mindspore")


class Planner:
    """Plans any destination ranks of one conversion.

    The choice among replicas does not depend on the ranks asked for: the parameters of one layout
    are read from the source's replicas in long runs of equal bytes, so that each distinct source
    box is read from one rank, and the ranks share the bytes evenly.
    """

    def __init__(
        self, source: Source, dst: Strategy, selection: Selection, replicas: str = "spread"
    ) -> None:
        self._source, self._dst, self._selection = source, dst, selection
        self._mindspore = replicas == "mindspore"
        self._turns = _turns(source.listed.values())
        self._stages: dict[int, dict[str, Layout]] = {}
        self._slices: dict[object, list[tuple[Parameter, tuple[int, ...]]]] = {}
        self._targets: dict[object, Targets] = {}
        self._readers: dict[object, Readers] = {}
        self._held: dict[object, tuple[Targets, int]] = {}
        self._only: dict[object, Targets] = {}

    def names(self, rank: int) -> Mapping[str, Layout]:
        """Return the layouts of what lands on global destination `rank`, in file order.

        MindSpore writes first what both strategies list and then the rest, each in the order of
        the source files that it loads for the stage, highest rank first. Raises RequestError
        where nothing lands on the rank.
        """
        stage = self._dst.stage_of(rank)
        if stage not in self._stages:
            self._stages[stage] = self._stage_layouts(stage)
        if not self._stages[stage]:
            raise RequestError(
                f"destination rank {rank} would get no parameter: no file holds one of those "
                f"that {self._dst.label} lists for pipeline stage {stage}"
            )
        return self._stages[stage]

    def slices(self, rank: int) -> list[tuple[Parameter, tuple[int, ...]]]:
        """Return what lands on a rank and the shapes of its slices, in file order."""
        stage, local = self._dst.stage_of(rank), rank % self._dst.stage_size
        layouts = self.names(rank)
        uneven = any(layout.split_rows for layout in layouts.values())
        key = stage, local if uneven else None  # even cuts give all ranks of a stage one shape
        if key not in self._slices:
            self._slices[key] = [
                (parameter, layout.grid(parameter.shape).box(layout.cell(local)).shape)
                for name, layout in layouts.items()
                if (parameter := self.parameter(name))
            ]
        return self._slices[key]

    def likeness(self, rank: int) -> tuple[int, tuple[Cell, ...]]:
        """Return what ranks have in common that hold the same boxes: stage and cells."""
        stage, local = self._dst.stage_of(rank), rank % self._dst.stage_size
        layouts = dict.fromkeys(self.names(rank).values())
        return stage, tuple(layout.cell(local) for layout in layouts)

    def plan(self, rank: int) -> RankPlan:
        """Write out the plan of one global destination rank."""
        slices = []
        for move in self.moves([Portion(rank, 0, len(self.names(rank)))]):
            (cell,) = move.targets
            copies = tuple(Copy(move.readers[at], part) for at, part in move.copies(cell))
            box = move.layout.grid(move.parameter.shape).box(cell)
            slices.append(Slice(move.parameter, box, copies))
        return RankPlan(rank, tuple(slices))

    def moves(self, portions: Iterable[Portion], seen: frozenset[int] | None = None) -> list[Move]:
        """Plan parts of some destination files, parameter by parameter in file order.

        Files of the ranks in `seen` are read where they serve as well as others (None: all are).
        Raises CheckpointError where no source file holds what is needed.
        """
        wanted: dict[tuple[str, Layout], list[int]] = {}
        for portion in portions:
            names = list(self.names(portion.rank).items())[portion.first : portion.stop]
            for key in names:
                wanted.setdefault(key, []).append(portion.rank)
        return [
            Move(parameter, layout, self._targets_of(layout, ranks), readers)
            for (name, layout), every in wanted.items()
            if (parameter := self.parameter(name))
            for readers, ranks in self._read_alike(parameter, layout, tuple(every), seen)
        ]

    def parameter(self, name: str) -> Parameter:
        """Return the parameter that is converted under this name."""
        return self._selection.cut.get(name) or self._selection.everywhere[name]

    def wanted(
        self, shares: Sequence[Sequence[Portion]]
    ) -> dict[tuple[str, Layout], tuple[tuple[int, int], ...]]:
        """Return (process, rank) for all that want a parameter in one destination layout.

        `shares` are by process; parameters are in file order.
        """
        alike: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for process, portions in enumerate(shares):
            for portion in portions:
                key = id(self.names(portion.rank)), portion.first, portion.stop
                alike.setdefault(key, []).append((process, portion.rank))
        found: dict[tuple[str, Layout], tuple[tuple[int, int], ...]] = {}
        for (_, first, stop), every in alike.items():
            pairs = tuple(every)
            for entry in list(self.names(pairs[0][1]).items())[first:stop]:
                found[entry] = found[entry] + pairs if entry in found else pairs
        ranks = sorted({portion.rank for portions in shares for portion in portions})
        stages = {id(self.names(rank)): self.names(rank) for rank in ranks}
        order = dict.fromkeys(key for names in stages.values() for key in names.items())
        return {key: found[key] for key in order if key in found}

    def held_alike(
        self, parameter: Parameter, layout: Layout, pairs: tuple[tuple[int, int], ...]
    ) -> Iterator[tuple[Targets, tuple[tuple[int, int], ...]]]:
        """Yield by source cell the ranks whose file will do, and the `pairs` for which they do.

        `pairs` are (process, destination rank).
        """
        if parameter.listed and not self._mindspore:
            yield self._held_by(parameter)[0], pairs
            return
        ranks = tuple(rank for _, rank in pairs)
        for readers, alike in self._read_alike(parameter, layout, ranks):
            key = tuple(sorted(readers.items()))
            held = self._only.setdefault(key, {cell: (rank,) for cell, rank in key})
            among = set(alike)
            yield held, tuple(pair for pair in pairs if pair[1] in among)

    def _targets_of(self, layout: Layout, ranks: tuple[int, ...]) -> Targets:
        key = layout, ranks
        if key not in self._targets:
            found: dict[Cell, tuple[int, ...]] = {}
            for rank in ranks:
                cell = layout.cell(rank % self._dst.stage_size)
                found[cell] = (*found.get(cell, ()), rank)
            self._targets[key] = found
        return self._targets[key]

    def _read_alike(
        self,
        parameter: Parameter,
        layout: Layout,
        ranks: tuple[int, ...],
        seen: frozenset[int] | None = None,
    ) -> Iterator[tuple[Readers, tuple[int, ...]]]:
        """Yield the readers of `parameter`, and the destination ranks that share them."""
        if not parameter.listed:
            by_reader: dict[int, list[int]] = {}
            for rank in ranks:
                by_reader.setdefault(self._unlisted_rank(parameter, rank), []).append(rank)
            nowhere = (0,) * len(parameter.shape)
            for reader, alike in by_reader.items():
                yield {nowhere: reader}, tuple(alike)
        elif self._mindspore:
            alike_by: dict[int, list[int]] = {}
            for rank in ranks:
                own = rank % self._dst.stage_size % parameter.layout.ranks
                alike_by.setdefault(parameter.layout.replica(own), []).append(rank)
            for replica, alike in alike_by.items():
                yield self._readers_of(parameter, layout, tuple(alike), replica), tuple(alike)
        else:
            yield self._readers_of(parameter, layout, ranks, None, seen), ranks

    def _readers_of(
        self,
        parameter: Parameter,
        layout: Layout,
        ranks: tuple[int, ...],
        replica: int | None,
        seen: frozenset[int] | None = None,
    ) -> Readers:
        """Choose a reader for every source cell that `ranks` need, one of those in `seen` if any.

        With `replica`, the rank of that number among the replicas of each cell, if it holds it.
        """
        held, _ = self._held_by(parameter)
        turn = self.turn(parameter)
        key = (
            parameter.layout, parameter.first_rank, parameter.holders, parameter.shape,
            layout, ranks, turn if replica is None else ~replica, seen,
        )  # fmt: skip
        if key not in self._readers:
            readers = {}
            for dst_cell in self._targets_of(layout, ranks):
                for cell, _ in overlaps(parameter.layout, layout, parameter.shape, dst_cell):
                    if cell not in readers:
                        found = held.get(cell) or self.nobody(parameter, cell)
                        near = [r for r in found if seen and r in seen] or found
                        readers[cell] = near[turn % len(near)]
                        if replica is not None:
                            rank = parameter.first_rank + parameter.layout.holders[cell][replica]
                            readers[cell] = rank if rank in found else found[0]
            self._readers[key] = readers
        return self._readers[key]

    def cell(self, layout: Layout, rank: int) -> Cell:
        """Return the cell of a destination layout that global `rank` gets."""
        return layout.cell(rank % self._dst.stage_size)

    def turn(self, parameter: Parameter) -> int:
        """Return which of the equal copies of a parameter is read, as a number to be reduced."""
        return self._turns.get(parameter.name, 0) % self._held_by(parameter)[1]

    def _held_by(self, parameter: Parameter) -> tuple[Targets, int]:
        """Return for each source cell the ranks whose file holds it, and after how many turns
        the choice among them repeats."""
        key = parameter.layout, parameter.first_rank, parameter.holders
        if key not in self._held:
            held = parameter.ranks_by_cell
            self._held[key] = held, lcm(*map(len, held.values()))
        return self._held[key]

    def nobody(self, parameter: Parameter, cell: Cell) -> NoReturn:
        """Raise CheckpointError for a slice that no file holds, and all others like it."""
        assert cell not in parameter.ranks_by_cell
        raise CheckpointError(losses_message(self._source, self._selection.cut.values(), {}))

    def _unlisted_rank(self, parameter: Parameter, dst_rank: int) -> int:
        """Return the rank whose copy of an unlisted parameter `dst_rank` gets, as MindSpore does.

        It is the one that is congruent to the destination's stage-local rank, in the lowest
        stage that MindSpore loads for the destination's stage.
        """
        src = self._source.strategy
        stages = self.source_stages(self._dst.stage_of(dst_rank))
        local = dst_rank % self._dst.stage_size % src.stage_size
        for stage in stages:
            if src.ranks_in(stage)[local] in parameter.holders:
                return src.ranks_in(stage)[local]
        return next(r for s in stages for r in src.ranks_in(s) if r in parameter.holders)

    def source_stages(self, dst_stage: int) -> list[int]:
        """Return the source stages that a destination stage draws on.

        Those that MindSpore loads, ascending, and then any that alone hold what the destination
        stage lists and the source strategy does not, if that is taken as whole.
        """
        needed = needed_stages(self._source.strategy, self._dst, dst_stage)
        there = set(self._source.names_in(needed))
        more = {
            self._source.strategy.stage_of(parameter.holders[0])
            for name, parameter in self._selection.cut.items()
            if not parameter.listed and name not in there
            and dst_stage in self._dst.stages_of.get(name, ())
        }  # fmt: skip
        return [*needed, *sorted(more.difference(needed))]

    def _stage_layouts(self, stage: int) -> dict[str, Layout]:
        cut: dict[str, Layout] = {}
        rest: dict[str, Layout] = {}
        for name in self._source.names_in(self.source_stages(stage)):
            everywhere = name in self._selection.everywhere
            if everywhere or name in self._selection.cut:
                layout = self._layout(name, stage)
                if layout is not None:
                    (rest if everywhere else cut)[name] = layout
        return {**cut, **rest}

    def _layout(self, name: str, stage: int) -> Layout | None:
        layout = destination_layout(self._selection, self._dst, name, stage)
        if layout is None:
            return None
        parameter = self.parameter(name)
        try:
            layout = layout.fold(parameter.shape, slices=False)
            layout.grid(parameter.shape)
        except RequestError as error:
            raise RequestError(
                f"{self._dst.label}: {name!r}: {error} (the shape is what "
                f"{self._source.strategy.label} makes of the source's slices)"
            ) from error
        return layout


def _turns(parameters: Iterable[Parameter]) -> dict[str, int]:
    """Tell for each parameter which of its equal copies is read.

    The parameters of one stage and layout are taken in file order and cut into as many runs of
    equal bytes as there are copies, so that each file is read in long stretches: what is skipped
    in between would be read ahead by the system for nothing.
    """
    kinds: dict[tuple[int, Layout], list[Parameter]] = {}
    for p in parameters:
        kinds.setdefault((p.first_rank, p.layout), []).append(p)
    turns = {}
    for (_, layout), alike in kinds.items():
        sizes = [content_bytes(p.dtype, p.shape) + 1 for p in alike]
        total, before = sum(sizes), 0
        copies = layout.free_ranks // layout.opt_shards
        for p, nbytes in zip(alike, sizes):
            turns[p.name] = (2 * before + nbytes) * copies // (2 * total)
            before += nbytes
    return turns


def needed_stages(src: Strategy, dst: Strategy, dst_stage: int) -> list[int]:
    """Return the source stages that MindSpore loads for a destination stage, ascending.

    Those of every parameter that the source lists, but for what the destination lists in other
    stages only.
    """
    if not src.stages_of:
        return [0]
    elsewhere = {name for name, stages in dst.stages_of.items() if dst_stage not in stages}
    return sorted(
        {s for name, stages in src.stages_of.items() if name not in elsewhere for s in stages}
    )


def check_ranks(ranks: Iterable[int], dst: Strategy) -> tuple[int, ...]:
    """Return the destination ranks to make, ascending: those asked for, or all."""
    wanted = tuple(sorted(set(ranks))) or tuple(range(dst.ranks))
    if wanted[-1] >= dst.ranks or wanted[0] < 0:
        raise UsageError(
            f"destination rank {wanted[-1]} does not exist: {dst.label} has ranks 0 to "
            f"{dst.ranks - 1}"
        )
    return wanted
