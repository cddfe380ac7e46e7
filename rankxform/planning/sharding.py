"""How tensors lie in source files: a tiling of the tensor, and which files hold each cell.

A model has many tensors and few ways to store them, so both are shared: tensors that are stored
alike have one `Sharding`, and those of other shapes that lie in the same files one `Placement`.
Both equal themselves alone, so that what is planned for one is found again by its identity.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import cached_property
from math import lcm
from typing import TypeVar

from rankxform.geometry.pieces import PieceTiling
from rankxform.geometry.tiling import BoxTiling, Cell, Grid
from rankxform.values import dataclass

K = TypeVar("K")
V = TypeVar("V")


class IdentityDict(dict[K, V]):
    """A mapping that many tensors share; it equals itself alone, so that it can be a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    __ne__ = object.__ne__


IdsByCell = IdentityDict[Cell, "tuple[int, ...]"]
"""By cell of a tiling the files that hold it, or the global ranks that get it; ascending."""


@dataclass(frozen=True, eq=False)
class Holders:
    """Which files hold each cell, whatever the tensor's shape.

    files: by cell, ids of files, ascending. suffixes: by (cell, file) what stands behind the
    tensor's name in that file's table of contents, where anything does. lacking: by cell that no
    file holds the ranks whose files should. is_per_rank: whether each holder may have a value of
    its own, as of a counter; otherwise they agree.
    """

    files: IdsByCell
    suffixes: Mapping[tuple[Cell, int], str] = field(default_factory=dict)
    lacking: Mapping[Cell, tuple[int, ...]] = field(default_factory=dict)
    is_per_rank: bool = False

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """All files that hold a cell, ascending."""
        return tuple(sorted({file for files in self.files.values() for file in files}))

    @cached_property
    def cells_of(self) -> Mapping[int, tuple[Cell, ...]]:
        """By file the cells that it holds."""
        cells: dict[int, tuple[Cell, ...]] = {}
        for cell, files in self.files.items():
            for file in files:
                cells[file] = (*cells.get(file, ()), cell)
        return cells

    @cached_property
    def copies(self) -> int:
        """How many files should hold a cell, at most."""
        holders = (*self.files.values(), *self.lacking.values())
        return max(map(len, holders), default=1)

    @cached_property
    def period(self) -> int:
        """After how many replicas a choice among equal copies repeats."""
        return lcm(*map(len, self.files.values()))


@dataclass(frozen=True, eq=False)
class Sharding:
    """How tensors that are stored alike lie in the source files; one object for all of them.

    grid: its cells are what files hold, in the full tensor's elements. declared: whether the
    checkpoint's description speaks of it; if not, every holder has it whole.
    """

    grid: Grid | BoxTiling
    placement: Holders
    declared: bool = True

    @property
    def files(self) -> IdsByCell:
        """For each cell the files that hold it, ascending."""
        return self.placement.files

    @property
    def holders(self) -> tuple[int, ...]:
        return self.placement.holders

    @property
    def period(self) -> int:
        return self.placement.period


class ComposedSharding:
    """How tensors lie in the source files that are made of others in one way; one object for all.

    grid: its cells are (number of the piece, cell of the source's tiling). parts: by number of the
    source, how that is sharded. Stands where a `Sharding` stands.
    """

    def __init__(self, grid: PieceTiling, parts: Sequence[Sharding]) -> None:
        self.grid = grid
        self.pieces, self.parts = grid, tuple(parts)
        self.holders = tuple(sorted({file for part in parts for file in part.holders}))
        self.declared = any(part.declared for part in parts) and bool(grid.assembly.pieces)

    @cached_property
    def files(self) -> IdsByCell:
        """For each cell the files that hold it, ascending."""
        return IdentityDict(
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
        return lcm(*(part.period for part in self.parts))
