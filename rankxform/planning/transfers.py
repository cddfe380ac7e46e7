"""Moves: the plan as data, and what can be counted of it.

A model has many parameters and few ways to cut them, so a move names a parameter and shares
everything else with all parameters that are cut alike. `RankPlan` is the same written out for
one destination rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import NamedTuple

from rankxform.formats.dtype import content_bytes, item_size
from rankxform.geometry.box import Box, hulls
from rankxform.geometry.grid import Cell
from rankxform.geometry.runs import CALL_BYTES, contiguous_runs, worth_picking
from rankxform.layout.layout import Layout

from .catalog import Parameter

Readers = Mapping[Cell, int]
"""For every cell of a parameter's source grid that is needed, the global rank to read it from."""


Targets = Mapping[Cell, "tuple[int, ...]"]
"""For every wanted cell of a destination grid the global ranks that get it, ascending."""

Copies = tuple[tuple[Cell, Box], ...]
"""(source cell, region in the full parameter), for all that makes up a destination cell."""


@dataclass(frozen=True)
class Portion:
    """A run of the slices of one destination rank's file: those from `first` to `stop` - 1."""

    rank: int
    first: int
    stop: int


@dataclass(frozen=True)
class Move:
    """One parameter, from its source layout to one destination layout.

    layout: the destination's. targets: by cell of its grid the global destination ranks that get
    it. readers: by cell of the source's grid the rank to take it from.
    """

    parameter: Parameter
    layout: Layout
    targets: Targets
    readers: Readers

    def copies(self, cell: Cell) -> Copies:
        """Return (source cell, region) for all that makes up destination `cell`."""
        return copies_of(self.parameter, self.layout, cell)


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


def needed_bytes(moves: Iterable[Move]) -> int:
    """Return the distinct source bytes that `moves` need, of all destination ranks together.

    A region that two destination layouts of a shared parameter want counts for both.
    """
    known: dict[object, int] = {}
    total = 0
    for move in moves:
        key = move.layout, move.parameter.shape, id(move.targets)
        if key not in known:
            grid = move.layout.grid(move.parameter.shape)
            known[key] = sum(grid.box(cell).size for cell in move.targets)
        total += known[key] * item_size(move.parameter.dtype)
    return total


def bytes_to_read(moves: Iterable[Move], call: float = CALL_BYTES) -> int:
    """Return the bytes that one process reads to carry out `moves`.

    Each source slice is read where its rows are wanted: whole rows where the cut leaves only
    short runs of them, for what a `call` costs, in bytes.
    """
    return sum(read.nbytes for _, reads in reads_of(moves, call) for read in reads)


def reads_of(
    moves: Iterable[Move], call: float = CALL_BYTES
) -> Iterator[tuple[Move, Sequence[Read]]]:
    """Yield with each move what one process reads for it."""
    known: dict[object, list[Read]] = {}
    for move in moves:
        parameter, item = move.parameter, item_size(move.parameter.dtype)
        key = (
            parameter.layout, parameter.listed, move.layout, parameter.shape, item,
            id(move.targets),
        )  # fmt: skip
        if key not in known:
            wanted = hulls(copy for cell in move.targets for copy in move.copies(cell))
            known[key] = [
                read_of(hull, parameter.grid.box(cell), item, call) for cell, hull in wanted.items()
            ]
        yield move, known[key]


def bytes_to_write(moves: Iterable[Move]) -> int:
    """Return the content bytes that `moves` write, in all destination files together."""
    known: dict[object, int] = {}
    total = 0
    for move in moves:
        key = move.layout, move.parameter.shape, id(move.targets)
        if key not in known:
            grid = move.layout.grid(move.parameter.shape)
            known[key] = sum(grid.box(cell).size * len(r) for cell, r in move.targets.items())
        total += known[key] * item_size(move.parameter.dtype)
    return total


WHOLE, RANGES, ROWS, EXCHANGE = WAYS = ("whole", "ranges", "rows", "exchange")
"""Ways to read of a slice: all in one piece, where no others' bytes lie in between; the runs that
are wanted; the rows that hold them; or either by one process, for all that want some of it."""

_PIECE = 4 << 20


class Read(NamedTuple):
    """What is read of a slice: how, how many bytes, and in how many calls, at least."""

    way: str
    nbytes: int
    calls: int


def read_of(hull: Box, held: Box, item: int, call: float = CALL_BYTES) -> Read:
    """Return how `hull` is got out of the slice `held`, of elements of `item` bytes."""
    if not hull.size:
        return Read(WHOLE, 0, 0)
    frame, nbytes = hull.relative_to(held), hull.size * item
    runs = hull.size // next(contiguous_runs(frame, held.shape))[1]
    if runs == 1:
        return Read(WHOLE, nbytes, pieces(nbytes))
    rows = (hull.shape[0], *held.shape[1:])
    frame = Box((0, *frame.start[1:]), (rows[0], *frame.stop[1:]))
    if worth_picking(frame, rows, item, call):
        return Read(RANGES, nbytes, max(runs, pieces(nbytes)))
    return Read(ROWS, prod(rows) * item, pieces(prod(rows) * item))


def pieces(nbytes: int) -> int:
    """Return in how many pieces so many bytes are read or sent, at least."""
    return -(-nbytes // _PIECE)


def read_by_rank(moves: Iterable[Move]) -> dict[int, int]:
    """Return for each source rank the bytes that `moves` read of its file."""
    found: dict[int, int] = {}
    for move in moves:
        item = item_size(move.parameter.dtype)
        for dst_cell in move.targets:
            for cell, box in move.copies(dst_cell):
                rank = move.readers[cell]
                found[rank] = found.get(rank, 0) + box.size * item
    return found


def copies_of(parameter: Parameter, layout: Layout, cell: Cell) -> Copies:
    """Return what makes up `cell` of the destination `layout` of a parameter."""
    if not parameter.listed:
        box = layout.grid(parameter.shape).box(cell)
        return ((parameter.cell(0), box),) if box.size else ()
    return overlaps(parameter.layout, layout, parameter.shape, cell)


@cache
def overlaps(src: Layout, dst: Layout, shape: tuple[int, ...], dst_cell: Cell) -> Copies:
    """Return (source cell, common region) for every source cell that `dst_cell` overlaps."""
    box = dst.grid(shape).box(dst_cell)
    if not box.size:
        return ()
    grid = src.grid(shape)
    found = []
    for cell in grid.cells_over(box):
        common = grid.box(cell).intersect(box)
        assert common is not None
        found.append((cell, common))
    return tuple(found)
