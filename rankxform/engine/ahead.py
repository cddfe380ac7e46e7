"""Reading ahead: what the next tiles will read is announced while earlier ones are carried out.

The system's own read-ahead follows one file that is read from front to back, and begins anew at
every file and every gap. Tiles are known long before they are read, so the device can be kept busy
while memory is copied and files are written.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

from rankxform.planning.transfers import Transfer
from rankxform.storage.sources import Sources

from .cache import Step
from .tile_work import TileWork

AHEAD = 16 << 20
"""Bytes that are announced and not read yet, at most; two tiles where tiles are large."""
_MOST_WAITING = 256


class Turn(NamedTuple):
    """A repetition of a step of a transfer, or, with no step, the end of all its steps."""

    transfer: Transfer
    step: Step | None = None
    repeat: int = 0


def announced(
    turns: Iterator[Turn], sources: Sources, reads: Callable[[TileWork], bool]
) -> Iterator[Turn]:
    """Yield turns in their order, each after what those behind it will read was announced.

    reads: tells whether a tile will be read at all.
    """
    waiting: deque[tuple[Turn, int]] = deque()
    ahead = 0
    for turn in turns:
        nbytes = 0
        if turn.step is not None and reads(work := turn.step.on(0)):
            nbytes = _announce(turn, work, sources)
        waiting.append((turn, nbytes))
        ahead += nbytes
        while len(waiting) > 1 and (ahead > AHEAD or len(waiting) > _MOST_WAITING):
            first, nbytes = waiting.popleft()
            ahead -= nbytes
            yield first
    for turn, _ in waiting:
        yield turn


def _announce(turn: Turn, work: TileWork, sources: Sources) -> int:
    """Announce what a tile reads in one piece; return the bytes."""
    total, readers, entry = 0, turn.transfer.readers, turn.transfer.parameter.entry
    for cell, start, step, room, sparse, run, _ in work.fetches:
        if not sparse and not run:
            file = readers[cell]
            place = start + turn.repeat * step
            sources.announce(file, entry(cell, file), place, len(room))
            total += len(room)
    return total
