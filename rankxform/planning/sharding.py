"""How tensors lie in source files: which file holds which cell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from math import lcm
from typing import TypeVar

from rankxform.geometry.grid import Cell, Grid, Stored
from rankxform.geometry.pieces import PieceGrid
from rankxform.layout.layout import Layout, whole
from rankxform.values import dataclass

K = TypeVar("K")
V = TypeVar("V")


class Shared(dict[K, V]):
    """A mapping that many tensors share; it equals itself alone, so that it can be a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    __ne__ = object.__ne__


Targets = Shared[Cell, "tuple[int, ...]"]
"""By cell of a grid the files that hold it, or the global ranks that get it; ascending."""


@dataclass(frozen=True, eq=False)
class Sharding:
    """How tensors that are stored alike lie in the source files; one object for all of them.

    grid: its cells are what files hold, in the full tensor's elements.
    layout: how the stage that starts at global rank `first_rank` shards the tensor.
    holders: ids of the files that hold a cell, ascending. ranks: of which global rank each is.
    listed: whether the source strategy speaks of it; if not, every holder has it whole.
    """

    grid: Grid
    layout: Layout
    first_rank: int
    holders: tuple[int, ...]
    ranks: tuple[int, ...]
    listed: bool = True

    def rank(self, file: int) -> int:
        """Return the global rank whose slice a file holds."""
        return self._rank_of[file]

    @cached_property
    def _rank_of(self) -> Mapping[int, int]:
        return dict(zip(self.holders, self.ranks))

    @cached_property
    def file_of(self) -> Mapping[int, int]:
        """By global rank the file that holds its slice."""
        return dict(zip(self.ranks, self.holders))

    def cell(self, file: int) -> Cell:
        """Return the cell that a file holds."""
        if not self.listed:
            return (0,) * len(self.grid.edges)
        return self.layout.cell(self.rank(file) - self.first_rank)

    @cached_property
    def files(self) -> Targets:
        """For each cell the files that hold it, ascending."""
        found: dict[Cell, list[int]] = {}
        for file in self.holders:
            found.setdefault(self.cell(file), []).append(file)
        return Shared({cell: tuple(files) for cell, files in found.items()})

    @cached_property
    def period(self) -> int:
        """After how many replicas a choice among equal copies repeats."""
        return lcm(*map(len, self.files.values()))


class Composed:
    """How tensors lie in the source files that are made of others in one way; one object for all.

    grid: its cells are (number of the piece, cell of the source's grid). parts: by number of the
    source, how that is sharded. Stands where a `Sharding` stands.
    """

    def __init__(self, grid: PieceGrid, parts: Sequence[Sharding]) -> None:
        self.grid: Stored = grid
        self.pieces, self.parts = grid, tuple(parts)
        self.layout = whole(len(grid.shape))
        self.first_rank = parts[0].first_rank
        of_file = {file: one.rank(file) for one in parts for file in one.holders}
        self.holders = tuple(sorted(of_file))
        self.ranks = tuple(of_file[file] for file in self.holders)
        self._rank_of = of_file
        self.listed = any(one.listed for one in parts)

    def rank(self, file: int) -> int:
        """Return the global rank of a file."""
        return self._rank_of[file]

    @cached_property
    def files(self) -> Targets:
        """For each cell the files that hold it, ascending."""
        return Shared(
            {
                (number, *cell): files
                for number, piece in enumerate(self.pieces.assembly.pieces)
                for cell, files in self.parts[piece.source].files.items()
                if piece.inside_source(self.parts[piece.source].grid.box(cell)) is not None
            }
        )

    @cached_property
    def period(self) -> int:
        """After how many replicas a choice among equal copies repeats."""
        return lcm(*(one.period for one in self.parts))
