"""Reads that are announced before they are needed, where the storage carries out many at a time.

Tiles are handed on in their order. Those that come next are worked out before, and what they read
is announced, as many reads as the storage has in flight and as many bytes as there is memory for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from rankxform.planning.transfers import Transfer
from rankxform.storage.sources import Sources

from .tile_work import TileWork

Turn = tuple[Transfer, TileWork | None, int]
"""A tile of a transfer, with the number of its repetition; None: the transfer has no more."""


class Repeats:
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
        same, self._left = read == self._left, read
        return same


def announced(turns: Iterable[Turn], sources: Sources, memory: int) -> Iterator[Turn]:
    """Yield `turns`, and announce to `sources` what those read that come next.

    What is announced and not read takes no more than `memory`, in bytes.
    """
    repeats = Repeats()
    waiting: deque[tuple[Turn, int, int]] = deque()
    reads = nbytes = 0
    for turn in turns:
        transfer, work, _ = turn
        wanted = [] if work is None or repeats.has(transfer, work) else list(_wanted(*turn))
        count, room = len(wanted), sum(size for *_, size in wanted)
        if count > sources.ahead or room > memory:
            wanted, count, room = [], 0, 0
        while waiting and (reads + count > sources.ahead or nbytes + room > memory):
            first, done, size = waiting.popleft()
            yield first
            reads, nbytes = reads - done, nbytes - size
        for one in wanted:
            sources.announce(*one)
        reads, nbytes = reads + count, nbytes + room
        waiting.append((turn, count, room))
    for turn, _, _ in waiting:
        yield turn


def _wanted(
    transfer: Transfer, work: TileWork | None, repeat: int
) -> Iterator[tuple[int, str, int, int]]:
    """Yield what a tile reads: file, entry, first content byte, and how many."""
    for cell, start, step, room, _, run, stride in work.fetches if work else ():
        file = transfer.readers[cell]
        entry, nbytes = transfer.parameter.entry(cell, file), len(room)
        if not run:
            yield file, entry, start + repeat * step, nbytes
        for number in range(nbytes // run if run else 0):
            yield file, entry, start + number * stride, run
