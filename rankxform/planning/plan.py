"""The plan: for every destination rank, the copies that make up its slices.

A copy is the overlap of a source rank's box and a destination rank's box. Where several source
ranks hold the same box, one is chosen. The plan holds integers only; it can be printed, counted
and compared without touching a tensor byte, and is the same on every process.

For a 4x4 tensor cut by rows on 2 ranks and wanted by columns on 2::

    rank 0  w [0:4, 0:2]  <- rank 0 [0:2, 0:2]  <- rank 1 [2:4, 0:2]
    rank 1  w [0:4, 2:4]  <- rank 0 [0:2, 2:4]  <- rank 1 [2:4, 2:4]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.formats.dtype import content_bytes, item_size
from rankxform.geometry.box import Box
from rankxform.geometry.grid import Cell, Grid
from rankxform.layout.layout import Layout, mindspore_replica
from rankxform.layout.strategy import Strategy

from .selection import Selection, destination_layout
from .source import Parameter, Source

REPLICAS = ("spread", "mindspore")


@dataclass(frozen=True)
class Copy:
    """A region, in the full parameter's elements, and the global source rank to take it from."""

    src_rank: int
    box: Box


@dataclass(frozen=True)
class Slice:
    """What one destination rank holds of one parameter.

    box: its region in the full parameter; copies: their boxes tile it.
    """

    parameter: Parameter
    box: Box
    copies: tuple[Copy, ...]

    @property
    def nbytes(self) -> int:
        return content_bytes(self.parameter.dtype, self.box.shape)


@dataclass(frozen=True)
class RankPlan:
    """All slices of one destination rank, in the order of its file."""

    rank: int
    slices: tuple[Slice, ...]

    @property
    def nbytes(self) -> int:
        """Content bytes of the rank's file."""
        return sum(s.nbytes for s in self.slices)

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """Source ranks whose bytes are used, ascending."""
        return tuple(sorted({c.src_rank for s in self.slices for c in s.copies}))


class Planner:
    """Plans any destination rank of one conversion.

    The choice among replicas looks at all `dst_ranks` together: each distinct source box is read
    from one rank, and the ranks share the bytes evenly.
    """

    def __init__(
        self,
        source: Source,
        dst: Strategy,
        selection: Selection,
        dst_ranks: Sequence[int],
        replicas: str = "spread",
    ) -> None:
        self._source, self._dst, self._selection = source, dst, selection
        self._layouts = {
            stage: self._stage_layouts(stage)
            for stage in sorted({dst.stage_of(rank) for rank in dst_ranks})
        }
        self._choose = (
            self._mindspore_choice if replicas == "mindspore" else self._spread_choice(dst_ranks)
        )

    def plan(self, rank: int) -> RankPlan:
        """Plan global destination `rank`. Raises RequestError where nothing lands on it."""
        stage = self._dst.stage_of(rank)
        slices = tuple(
            self._slice(rank, name, layout) for name, layout in self._layouts[stage].items()
        )
        if not slices:
            raise RequestError(
                f"destination rank {rank} would get no parameter: no file holds one of those "
                f"that {self._dst.label} lists for pipeline stage {stage}"
            )
        return RankPlan(rank, slices)

    def nbytes(self, rank: int) -> int:
        """Return the content bytes of a destination rank's file, without planning it."""
        total = 0
        for name, layout in self._layouts[self._dst.stage_of(rank)].items():
            parameter = self._parameter(name)
            box = layout.grid(parameter.shape).box(layout.cell(rank % self._dst.stage_size))
            total += content_bytes(parameter.dtype, box.shape)
        return total

    def _stage_layouts(self, stage: int) -> dict[str, Layout]:
        """Return the layouts of the names that land in destination `stage`, in file order.

        MindSpore writes first what both strategies list and then the rest, each in the order of
        the source files that it loads for the stage, highest rank first.
        """
        cut, rest = {}, {}
        for name in self._source.names_in(needed_stages(self._source.strategy, self._dst, stage)):
            if name in self._selection.everywhere:
                rest[name] = self._layout(name, stage)
            elif name in self._selection.cut:
                layout = self._layout(name, stage)
                if layout is not None:
                    cut[name] = layout
        return {name: layout for name, layout in [*cut.items(), *rest.items()] if layout}

    def _layout(self, name: str, stage: int) -> Layout | None:
        layout = destination_layout(self._selection, self._dst, name, stage)
        if layout is None:
            return None
        parameter = self._parameter(name)
        try:
            layout = layout.fold(parameter.shape, slices=False)
            layout.grid(parameter.shape)
        except RequestError as error:
            raise RequestError(f"{self._dst.label}: {name!r}: {error}") from error
        return layout

    def _parameter(self, name: str) -> Parameter:
        return self._selection.cut.get(name) or self._selection.everywhere[name]

    def _slice(self, rank: int, name: str, layout: Layout) -> Slice:
        parameter = self._parameter(name)
        local = rank % self._dst.stage_size
        box = layout.grid(parameter.shape).box(layout.cell(local))
        if not parameter.listed:
            return Slice(parameter, box, (Copy(self._unlisted_rank(parameter, rank), box),))
        overlaps = _overlaps(parameter.layout, layout, parameter.shape, layout.cell(local))
        copies = tuple(Copy(self._choose(parameter, cell, local), part) for cell, part in overlaps)
        return Slice(parameter, box, copies)

    def _unlisted_rank(self, parameter: Parameter, dst_rank: int) -> int:
        """Return the rank whose copy of an unlisted parameter `dst_rank` gets, as MindSpore does.

        It is the one that is congruent to the destination's stage-local rank, in the lowest
        stage that MindSpore loads for the destination's stage.
        """
        src = self._source.strategy
        stages = needed_stages(src, self._dst, self._dst.stage_of(dst_rank))
        local = dst_rank % self._dst.stage_size % src.stage_size
        holders = set(parameter.holders)
        for stage in stages:
            if src.ranks_in(stage)[local] in holders:
                return src.ranks_in(stage)[local]
        return next(r for s in stages for r in src.ranks_in(s) if r in holders)

    def _mindspore_choice(self, parameter: Parameter, cell: Cell, dst_local: int) -> int:
        rank = parameter.first_rank + mindspore_replica(parameter.layout, cell, dst_local)
        return (
            rank
            if rank in parameter.ranks_by_cell.get(cell, ())
            else self._held(parameter, cell)[0]
        )

    def _held(self, parameter: Parameter, cell: Cell) -> tuple[int, ...]:
        """Return the ranks that hold `cell`. Raises CheckpointError where there are none."""
        ranks = parameter.ranks_by_cell.get(cell)
        if ranks:
            return ranks
        should = [parameter.first_rank + r for r in parameter.layout.holders[cell]]
        raise CheckpointError(
            f"no source file holds {parameter.grid.box(cell)} of {parameter.name!r}: it should be "
            f"in rank {' or '.join(map(str, should))} ({self._source.strategy.label}); "
            "bring the missing rank folder, or use another checkpoint"
        )

    def _spread_choice(self, dst_ranks: Sequence[int]) -> Callable[[Parameter, Cell, int], int]:
        """Give every needed cell to the least loaded of the ranks that hold it."""
        locals_by_stage: dict[int, set[int]] = {}
        for rank in dst_ranks:
            stage = self._dst.stage_of(rank)
            locals_by_stage.setdefault(stage, set()).add(rank % self._dst.stage_size)
        chosen: dict[tuple[str, Cell], int] = {}
        loads: dict[int, int] = {}
        for stage, layouts in self._layouts.items():
            for name, layout in layouts.items():
                parameter = self._parameter(name)
                if not parameter.listed:
                    continue
                for cell in _needed_cells(parameter, layout, locals_by_stage[stage]):
                    if (name, cell) not in chosen:
                        ranks = self._held(parameter, cell)
                        rank = min(ranks, key=lambda r: loads.get(r, 0))
                        chosen[name, cell] = rank
                        nbytes = parameter.grid.box(cell).size * item_size(parameter.dtype)
                        loads[rank] = loads.get(rank, 0) + nbytes
        return lambda parameter, cell, dst_local: chosen[parameter.name, cell]


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


def _needed_cells(parameter: Parameter, layout: Layout, local_ranks: set[int]) -> Iterator[Cell]:
    """Yield the source cells that the destination's `local_ranks` need, in order."""
    cells = dict.fromkeys(layout.cell(rank) for rank in sorted(local_ranks))
    needed = {
        cell: None
        for dst_cell in cells
        for cell, _ in _overlaps(parameter.layout, layout, parameter.shape, dst_cell)
    }
    return iter(sorted(needed))


@cache
def _overlaps(
    src: Layout, dst: Layout, shape: tuple[int, ...], dst_cell: Cell
) -> tuple[tuple[Cell, Box], ...]:
    """Return (source cell, common region) for every source cell that `dst_cell` overlaps."""
    box = dst.grid(shape).box(dst_cell)
    if not box.size:
        return ((src.cell(0), box),)
    grid: Grid = src.grid(shape)
    found = []
    for cell in grid.cells_over(box):
        common = grid.box(cell).intersect(box)
        assert common is not None
        found.append((cell, common))
    return tuple(found)


def share_out(weights: Sequence[int], processes: int) -> list[list[int]]:
    """Give each process a run of neighbouring destination ranks, balanced by bytes.

    Neighbours mostly need the same source files. The largest share is as small as it can be.
    Returns for each process its positions in `weights`; there may be none.

    >>> share_out([5, 5, 5, 5], 3)
    [[0, 1], [2, 3], []]
    >>> share_out([9, 1, 1, 1], 2)
    [[0], [1, 2, 3]]
    """
    low, high = max(weights, default=0), sum(weights)
    while low < high:
        limit = (low + high) // 2
        if len(_runs_within(weights, limit)) <= processes:
            high = limit
        else:
            low = limit + 1
    shares = _runs_within(weights, low)
    return [*shares, *([] for _ in range(processes - len(shares)))]


def _runs_within(weights: Sequence[int], limit: int) -> list[list[int]]:
    runs: list[list[int]] = []
    total = limit + 1
    for position, weight in enumerate(weights):
        if total + weight > limit:
            runs.append([])
            total = 0
        runs[-1].append(position)
        total += weight
    return runs


def check_ranks(ranks: Iterable[int], dst: Strategy) -> tuple[int, ...]:
    """Return the destination ranks to make, ascending: those asked for, or all."""
    wanted = tuple(sorted(set(ranks))) or tuple(range(dst.ranks))
    if wanted[-1] >= dst.ranks or wanted[0] < 0:
        raise UsageError(
            f"destination rank {wanted[-1]} does not exist: {dst.label} has ranks 0 to "
            f"{dst.ranks - 1}"
        )
    return wanted


def distinct_bytes(plans: Iterable[RankPlan]) -> Mapping[int, int]:
    """Return for each source rank the bytes that must be read from it, each counted once."""
    seen: set[tuple[str, Copy]] = set()
    totals: dict[int, int] = {}
    for plan in plans:
        for piece in plan.slices:
            for copy in piece.copies:
                if (piece.parameter.name, copy) not in seen:
                    seen.add((piece.parameter.name, copy))
                    nbytes = copy.box.size * item_size(piece.parameter.dtype)
                    totals[copy.src_rank] = totals.get(copy.src_rank, 0) + nbytes
    return totals
