"""Read methods: which bytes of a block are read where a region of it is wanted.

A block is a region of a source slice that lies in one piece in its file. The field's names: the
wanted ranges one by one (list I/O); all that lies between them too (data sieving); or each byte by
one process, which sends it to those that want it (two-phase I/O).

Counting and reading ask one object, so that a plan says what will be done.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import NamedTuple, Protocol

from rankxform.geometry.box import Box, count_runs
from rankxform.values import dataclass

USUAL_LATENCY = 60_000.0
"""Bytes that could be read in the latency of a read, for a file in the page cache."""

WHOLE, RANGES, SIEVING, TWO_PHASE = "whole", "ranges", "sieving", "two-phase"
AUTO = "auto"

_PIECE = 4 << 20


class ReadMethod(Protocol):
    """Chooses what to read. Pure, and the same on every process.

    name: what plans and reports call it where it reads more than the wanted ranges. exchanges:
    whether each byte is read by one process for all that want it.
    """

    @property
    def name(self) -> str:
        """See above."""

    @property
    def exchanges(self) -> bool:
        """See above."""

    def with_latency(self, nbytes: float) -> ReadMethod:
        """Return the method for files of which so many bytes could be read in a read's latency."""

    def box(self, need: Box, block: Box, item: int) -> Box:
        """Return the box to read: it holds `need`, and `block` holds it.

        All in one frame, in elements of `item` bytes; `need` is not empty. What is read are the
        contiguous runs of that box in the block.
        """


@dataclass(frozen=True)
class AutoReadMethod:
    """The wanted ranges one by one, or whole rows of which they are picked in memory, whichever
    takes less time.

    latency: bytes that could be read in the time that one more read takes; with 0 ranges are always
    read, with infinity rows. fixed: whether the user asked for that, so that no measurement changes
    it.

    >>> rows, half = Box((0, 0), (9, 8192)), Box((0, 0), (9, 4096))
    >>> AutoReadMethod().box(half, rows, item=4) == rows
    True
    >>> AutoReadMethod(10_000).box(half, rows, item=4) == half
    True
    """

    latency: float = USUAL_LATENCY
    fixed: bool = False
    exchanges: bool = False
    name: str = SIEVING

    def with_latency(self, nbytes: float) -> AutoReadMethod:
        return self if self.fixed else replace(self, latency=nbytes)

    def box(self, need: Box, block: Box, item: int) -> Box:
        runs = _runs(need, block)
        if runs == 1 or (runs - 1) * self.latency + need.size * item < block.size * item:
            return need
        return block


READ_METHODS: dict[str, ReadMethod] = {
    AUTO: AutoReadMethod(),
    RANGES: AutoReadMethod(0.0, fixed=True),
    SIEVING: AutoReadMethod(inf, fixed=True),
    TWO_PHASE: AutoReadMethod(exchanges=True),
}
"""What can be asked for, by name; a new method is one object and one entry."""


METHOD_TITLES = {
    WHOLE: "each slice in one read",
    RANGES: "wanted ranges",
    SIEVING: "whole rows (sieving)",
    TWO_PHASE: "once, and exchanged (two-phase)",
}


class ReadCount(NamedTuple):
    """What is read of a slice: how, how many bytes, and in how many reads, at least."""

    method: str
    nbytes: int
    reads: int


def count_reads(method: ReadMethod, need: Box, stored: Box, item: int) -> ReadCount:
    """Count what `method` reads where `need` is taken out of the slice `stored`, row by row.

    Both in the full parameter's elements of `item` bytes.
    """
    nbytes = need.size * item
    if not nbytes:
        return ReadCount(WHOLE, 0, 0)
    if _runs(need, stored) == 1:
        return ReadCount(WHOLE, nbytes, messages_of(nbytes))
    rows = Box(need.start[:1] + stored.start[1:], need.stop[:1] + stored.stop[1:])
    box = method.box(need, rows, item)
    name, read = (RANGES, nbytes) if box == need else (method.name, box.size * item)
    return ReadCount(name, read, max(_runs(box, rows), messages_of(read)))


def messages_of(nbytes: int) -> int:
    """Return in how many reads or messages so many bytes move, at least."""
    return -(-nbytes // _PIECE)


def _runs(box: Box, block: Box) -> int:
    return count_runs(box.relative_to(block), block.shape)
