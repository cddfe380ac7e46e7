"""What it costs to move bytes, and which way of reading is cheaper by that.

Where all nodes see the same storage, two nodes that want the same rows of a source slice either
both read them, or one reads them and sends the other its part. The first costs storage, the
second the network and two more copies in memory. Files on a node's own disk leave no choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf

from rankxform.formats.dtype import item_size
from rankxform.geometry.box import Box, hulls
from rankxform.geometry.grid import Cell
from rankxform.geometry.runs import CALL_BYTES
from rankxform.layout.layout import Layout

from .catalog import Parameter
from .transfers import EXCHANGE, RANGES, ROWS, copies_of, pieces, read_of

AUTO = "auto"
READINGS = (AUTO, RANGES, ROWS, EXCHANGE)
"""What can be asked for: what costs least, or one way of reading for all that leaves a choice."""

_GAIN = 0.9
"""What an exchange may cost over reading for oneself: of the two its estimate is the rougher."""

_LEAST_CALL = 4 << 10
"""Bytes below which nothing is read faster."""


@dataclass(frozen=True)
class Costs:
    """Bytes a second, and seconds.

    read, write: of one process, while all are at work; network: out of one node, and into it; copy:
    in memory, by one process. call: what a process waits for a read of little; letter: for one
    that is sent. overlap: of reading and sending, which part of the shorter the longer hides; none
    where one link carries both, and less where they hinder each other, as on too few cores.
    """

    read: float = 1e9
    write: float = 1e9
    network: float = 10e9
    copy: float = 5e9
    call: float = 100e-6
    letter: float = 30e-6
    overlap: float = 1.0

    @property
    def call_bytes(self) -> float:
        """Bytes that could be read in the time a read of little takes."""
        return max(_LEAST_CALL, self.call * self.read)

    def together(self, reading: float, sending: float) -> float:
        """Return the seconds of both, of which each takes so long by itself."""
        return max(reading, sending) + (1 - self.overlap) * min(reading, sending)


@dataclass(frozen=True)
class Choice:
    """How source files are read; the same on all processes.

    call: what a read of little costs, in bytes. costs: what is known of what things cost. weighed:
    an exchange is weighed by them against reading for oneself; else only what a node does not see
    is exchanged. always: each byte is read by one process for all.
    """

    call: float = CALL_BYTES
    costs: Costs | None = None
    weighed: bool = False
    always: bool = False

    @classmethod
    def of(cls, reading: str) -> Choice:
        """Return what was asked for, as one of READINGS."""
        call = {RANGES: 0.0, ROWS: inf}.get(reading, CALL_BYTES)
        return cls(call, always=reading == EXCHANGE)


@dataclass(frozen=True)
class Side:
    """One way to read or send: bytes, and in how many calls or letters."""

    nbytes: int = 0
    calls: int = 0

    def __add__(self, other: Side) -> Side:
        return Side(self.nbytes + other.nbytes, self.calls + other.calls)


@dataclass(frozen=True)
class Reading:
    """What two ways to read one parameter come to.

    each: read where every node reads for itself; once: where each byte is read by one process;
    crossing: sent from node to node then.
    """

    each: Side = Side()
    once: Side = Side()
    crossing: Side = Side()

    def __add__(self, other: Reading) -> Reading:
        return Reading(
            self.each + other.each, self.once + other.once, self.crossing + other.crossing
        )

    def exchanges(self, costs: Costs, processes: int, nodes: int) -> bool:
        """Tell whether it is cheaper to exchange."""

        def reading(side: Side) -> float:
            return (side.nbytes / costs.read + side.calls * costs.call) / processes

        sending = self.crossing.nbytes / (costs.network * nodes)
        copied = 2 * (self.once.nbytes + self.crossing.nbytes)
        work = (copied / costs.copy + self.crossing.calls * costs.letter) / processes
        return costs.together(reading(self.once), sending) + work < _GAIN * reading(self.each)


def reading_of(
    parameter: Parameter,
    layout: Layout,
    served: Mapping[Cell, Iterable[int]],
    node: tuple[int, ...],
    call: float = CALL_BYTES,
) -> Reading:
    """Count both ways, for processes that serve the cells of a destination `layout`.

    node: by process its node. call: what a call costs, in bytes.
    """
    item = item_size(parameter.dtype)
    parts: list[tuple[tuple[Cell, int | None], Box]] = []  # of a source cell, for a node or all
    wanted: dict[Cell, dict[int, int]] = {}
    for cell, processes in served.items():
        nodes = {node[process] for process in processes}
        for at, box in copies_of(parameter, layout, cell):
            parts += [((at, where), box) for where in (None, *nodes)]
            by_node = wanted.setdefault(at, {})
            for one in nodes:
                by_node[one] = by_node.get(one, 0) + box.size
    each = once = crossing = Side()
    for (at, where), hull in hulls(parts).items():
        _, *read = read_of(hull, parameter.grid.box(at), item, call)
        if where is None:
            once += Side(*read)
        else:
            each += Side(*read)
    for by in wanted.values():
        for elements in by.values():
            nbytes = elements * item * (len(by) - 1) // len(by)
            crossing += Side(nbytes, pieces(nbytes))
    return Reading(each, once, crossing)
