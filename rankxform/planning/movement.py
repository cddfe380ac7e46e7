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
from .plan import Planner, ProcessRankPairs
from .sharding import IdsByCell
from .transfers import Receivers, SliceRange


@dataclass(frozen=True, eq=False)
class TransferGroup:
    """Tensors that go from one source sharding to the cells of one destination layout.

    parameters: the tensors, each with its place in the order of destination files. layout, grid:
    the destination's. files: by source cell the files that may be read. receivers: by destination
    cell the processes that write it, each with its ranks.
    """

    parameters: tuple[tuple[int, Parameter], ...]
    layout: Layout
    grid: Grid
    files: IdsByCell
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
        elements_by_cell: dict[Cell, dict[int, int]] = {}
        for cell, ranks_by_process in self.receivers.items():
            for src_cell, box in overlaps(self.src, self.grid, cell):
                of_cell, size = elements_by_cell.setdefault(src_cell, {}), box.size
                for process in ranks_by_process:
                    of_cell[process] = of_cell.get(process, 0) + size
        return elements_by_cell


def transfer_groups(
    planner: Planner, assignment: Sequence[Sequence[SliceRange]]
) -> Iterator[TransferGroup]:
    """Yield what moves where process p writes ``assignment[p]``."""
    groups_by_key: dict[
        object, tuple[IdsByCell, ProcessRankPairs, list[tuple[int, Parameter]], Layout]
    ] = {}
    numbers = count()
    for (name, layout), all_pairs in planner.wanted(assignment).items():
        parameter = planner.parameter(name)
        for files_by_cell, pairs in planner.groups_by_holders(parameter, layout, all_pairs):
            has_all_pairs = files_by_cell is parameter.sharding.files
            key = (
                id(parameter.sharding), item_size(parameter.src_dtype), parameter.dtype, layout,
                id(files_by_cell), id(all_pairs) if has_all_pairs else pairs,
            )  # fmt: skip
            entry = groups_by_key.setdefault(key, (files_by_cell, pairs, [], layout))
            entry[2].append((next(numbers), parameter))
    receivers_cache: dict[tuple[Layout, int], Receivers] = {}
    for files_by_cell, pairs, parameters, layout in groups_by_key.values():
        receivers = receivers_cache.get((layout, id(pairs)))
        if receivers is None:
            receivers = receivers_cache[layout, id(pairs)] = planner.receivers(layout, pairs)
        grid = layout.grid(parameters[0][1].shape)
        yield TransferGroup(tuple(parameters), layout, grid, files_by_cell, receivers)


def needed_bytes(planner: Planner, slice_ranges: Sequence[SliceRange]) -> int:
    """Return the distinct source bytes that parts of destination files need.

    A region that two destination layouts of a shared parameter want counts for both.
    """
    return sum(
        len(m.parameters) * m.item * sum(m.grid.box(cell).size for cell in m.receivers)
        for m in transfer_groups(planner, [slice_ranges])
    )
