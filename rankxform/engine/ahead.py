"""What tiles will read, told before it is needed, where the storage carries out many reads at a
time."""

# Files are not announced: POSIX_FADV_WILLNEED 16 or 48 MiB ahead was tried, and a cold read of 2
# GB by two processes took 2.5 s either way, because the system reads ahead itself. Where each
# read takes 30 ms and 64 may be in flight, only announcing keeps as many in flight.

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rankxform.planning.transfers import Transfer
from rankxform.storage.sources import TensorRead

from .tile_work import TileWork

Turn = tuple[Transfer, TileWork | None, int]
"""A tile of a transfer, with the number of its repetition; None: the transfer has no more."""


class ArenaReuse:
    """Tells which tiles need no reads, because the tile before has left in the arena what they
    need; it is told of all tiles, in order."""

    def __init__(self) -> None:
        self._left: object = None

    def forget(self) -> None:
        """Take note that the arena holds something else."""
        self._left = None

    def has(self, transfer: Transfer, work: TileWork) -> bool:
        """Tell whether everything that a tile reads is in the arena already."""
        if not work.arena:
            self._left = None
            return False
        readers, entry = transfer.readers, transfer.parameter.entry
        read = work.arena, [
            (f.cell, readers[f.cell], entry(f.cell, readers[f.cell]), f.start, len(f.room), f.run,
             f.stride)
            for f in work.fetches
        ]  # fmt: skip
        is_in_arena, self._left = read == self._left, read
        return is_in_arena


def coming_reads(turns: Iterable[Turn]) -> Iterator[TensorRead]:
    """Yield what tiles read, in order."""
    repeats = ArenaReuse()
    for transfer, work, repeat in turns:
        if work is None or repeats.has(transfer, work):
            continue
        for cell, start, step, room, _, run, stride in work.fetches:
            file = transfer.readers[cell]
            entry, nbytes = transfer.parameter.entry(cell, file), len(room)
            if not run:
                yield TensorRead(file, entry, start + repeat * step, nbytes)
            for number in range(nbytes // run if run else 0):
                yield TensorRead(file, entry, start + number * stride, run)
