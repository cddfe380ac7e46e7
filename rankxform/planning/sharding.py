"""How tensors lie in source files: which file holds which cell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from math import lcm
from typing import TypeVar

from rankxform.geometry.grid import Cell, Grid
from rankxform.layout.layout import Layout

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
