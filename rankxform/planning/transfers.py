"""Transfers: the plan as data, and what can be counted of it.

A model has many parameters and few ways to shard them, so a transfer names a parameter and shares
everything else with all parameters that are sharded alike. `FilePlan` is the same written out for
one destination rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rankxform.formats.dtype import content_bytes, item_size
from rankxform.geometry.box import Box
from rankxform.geometry.tiling import Cell, Grid, Overlaps, overlaps
from rankxform.values import dataclass

from .catalog import Parameter
from .sharding import IdentityDict, IdsByCell

Receivers = IdentityDict[Cell, "Mapping[int, tuple[int, ...]]"]
"""By destination cell the processes that put it into files, each with its global ranks."""

Senders = IdentityDict[Cell, "dict[int, tuple[int, int]]"]
"""By source cell, for each process that wants of it: (process that reads it, id of the file)."""


@dataclass(frozen=True)
class SliceRange:
    """Consecutive slices of one destination rank's file: those from `first` to `stop` - 1."""

    rank: int
    first: int
    stop: int


@dataclass(frozen=True)
class Exchange:
    """One parameter's movement between processes: who reads it, and who puts it into files.

    grid: the destination's. node: by process its node. forwarder: which of a node's processes that
    want the same piece receives it for all, modulo their number. position: when it is made, from 0
    to 1 of the whole.
    """

    parameter: Parameter
    grid: Grid
    receivers: Receivers
    senders: Senders
    node: tuple[int, ...]
    forwarder: int = 0
    position: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter."""
        return content_bytes(self.parameter.src_dtype, self.parameter.shape)

    def part(self, process: int) -> Transfer | None:
        """Return what `process` has to do with it, if anything."""
        targets = {c: p[process] for c, p in self.receivers.items() if process in p}
        readers = {
            cell: file
            for cell, senders_by_process in self.senders.items()
            for reader, file in senders_by_process.values()
            if reader == process
        }
        if not targets and not readers:
            return None
        return Transfer(self.parameter, self.grid, IdentityDict(targets), readers, self, process)


@dataclass(frozen=True)
class Transfer:
    """One process's part in one parameter's movement from its source grid to a destination grid.

    targets: by cell of the destination's grid the global ranks that this process makes. readers: by
    cell of the source's grid the id of the file to read it from. exchange: all processes' part, if
    any takes part beside this one; `process` is this one's number there.
    """

    parameter: Parameter
    grid: Grid
    targets: IdsByCell
    readers: Mapping[Cell, int]
    exchange: Exchange | None = None
    process: int = 0

    def copies(self, cell: Cell) -> Overlaps:
        """Return (source cell, region) for all that makes up destination `cell`."""
        return overlaps(self.parameter.grid, self.grid, cell)

    def whole_exchange(self) -> Exchange:
        """Return the exchange that this is part of; a local transfer has one of its own."""
        if self.exchange is not None:
            return self.exchange
        receivers = {cell: {0: ranks} for cell, ranks in self.targets.items()}
        senders = {cell: {0: (0, file)} for cell, file in self.readers.items()}
        return Exchange(
            self.parameter, self.grid, IdentityDict(receivers), IdentityDict(senders), (0,)
        )


@dataclass(frozen=True)
class SourceRegion:
    """A region, in the full parameter's elements, and the global source rank to take it from."""

    src_rank: int
    box: Box


@dataclass(frozen=True)
class PlannedSlice:
    """What one destination rank holds of one parameter.

    box: its region in the full parameter; copies: their boxes tile it.
    """

    parameter: Parameter
    box: Box
    copies: tuple[SourceRegion, ...]

    @property
    def nbytes(self) -> int:
        return content_bytes(self.parameter.dtype, self.box.shape)


@dataclass(frozen=True)
class FilePlan:
    """All slices of one destination rank, in the order of its file.

    As a text it has a line for each slice: what the rank holds, and what that is copied from.
    """

    rank: int
    slices: tuple[PlannedSlice, ...]

    def __str__(self) -> str:
        return "\n".join(
            f"rank {self.rank}  {slice_.parameter.name} {slice_.box}"
            + "".join(f"  <- rank {copy.src_rank} {copy.box}" for copy in slice_.copies)
            for slice_ in self.slices
        )

    @property
    def nbytes(self) -> int:
        """Content bytes of the rank's file."""
        return sum(s.nbytes for s in self.slices)

    @property
    def src_ranks(self) -> tuple[int, ...]:
        """Source ranks whose bytes are used, ascending."""
        return tuple(sorted({c.src_rank for s in self.slices for c in s.copies}))


def bytes_to_write(transfers: Iterable[Transfer]) -> int:
    """Return the content bytes that `transfers` write, in all destination files."""
    elements: dict[tuple[Grid, IdsByCell], int] = {}
    total = 0
    for transfer in transfers:
        grid, targets = transfer.grid, transfer.targets
        if (grid, targets) not in elements:
            sizes = (grid.box(cell).size * len(ranks) for cell, ranks in targets.items())
            elements[grid, targets] = sum(sizes)
        total += elements[grid, targets] * item_size(transfer.parameter.dtype)
    return total
