"""Movements: tensors that are stored alike and wanted alike, by whom.

A model has thousands of tensors and a few hundred pairs of a source sharding and a destination
layout. What is planned for one tensor of a movement holds for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import count

from rankxform.formats.dtype import item_size
from rankxform.geometry.tiling import Cell, Grid, SourceTiling, overlaps
from rankxform.layout.layout import Layout
from rankxform.values import dataclass

from .catalog import Parameter
from .plan import Pairs, Planner
from .sharding import Targets
from .transfers import Receivers, SliceRange


@dataclass(frozen=True, eq=False)
class Movement:
    """Tensors that go from one source sharding to the cells of one destination layout.

    parameters: the tensors, each with its place in the order of destination files. layout, grid:
    the destination's. held: by source cell the files that may be read. receivers: by destination
    cell the processes that write it, each with its ranks.
    """

    parameters: tuple[tuple[int, Parameter], ...]
    layout: Layout
    grid: Grid
    held: Targets
    receivers: Receivers

    @property
    def first(self) -> Parameter:
        """One of the tensors, for what they have in common."""
        return self.parameters[0][1]

    @property
    def src(self) -> SourceTiling:
        """How they are stored."""
        return self.first.grid

    @property
    def item(self) -> int:
        """Bytes of an element, as it is stored."""
        return item_size(self.first.src_dtype)

    @cached_property
    def needs(self) -> Mapping[Cell, Mapping[int, int]]:
        """By source cell the processes that need some of it, each with how many elements."""
        found: dict[Cell, dict[int, int]] = {}
        for cell, by in self.receivers.items():
            for at, box in overlaps(self.src, self.grid, cell):
                of_cell, size = found.setdefault(at, {}), box.size
                for process in by:
                    of_cell[process] = of_cell.get(process, 0) + size
        return found


def movements(planner: Planner, assignment: Sequence[Sequence[SliceRange]]) -> Iterator[Movement]:
    """Yield what moves where process p writes ``assignment[p]``."""
    alike: dict[object, tuple[Targets, Pairs, list[tuple[int, Parameter]], Layout]] = {}
    numbers = count()
    for (name, layout), every in planner.wanted(assignment).items():
        parameter = planner.parameter(name)
        for held, pairs in planner.groups_by_holders(parameter, layout, every):
            key = (
                id(parameter.sharding), item_size(parameter.src_dtype), parameter.dtype, layout,
                id(held), id(every) if held is parameter.sharding.files else pairs,
            )  # fmt: skip
            entry = alike.setdefault(key, (held, pairs, [], layout))
            entry[2].append((next(numbers), parameter))
    known: dict[tuple[Layout, int], Receivers] = {}
    for held, pairs, parameters, layout in alike.values():
        receivers = known.get((layout, id(pairs)))
        if receivers is None:
            receivers = known[layout, id(pairs)] = planner.receivers(layout, pairs)
        grid = layout.grid(parameters[0][1].shape)
        yield Movement(tuple(parameters), layout, grid, held, receivers)


def needed_bytes(planner: Planner, slice_ranges: Sequence[SliceRange]) -> int:
    """Return the distinct source bytes that parts of destination files need.

    A region that two destination layouts of a shared parameter want counts for both.
    """
    return sum(
        len(movement.parameters)
        * movement.item
        * sum(movement.grid.box(cell).size for cell in movement.receivers)
        for movement in movements(planner, [slice_ranges])
    )
