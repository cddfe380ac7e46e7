"""What it costs to move bytes, and whether an exchange is cheaper by that.

Where all nodes see the same storage, two nodes that want the same rows of a source slice either
both read them, or one reads them and sends the other its part. The first costs storage, the
second the network and two more copies in memory. Files on a node's own disk leave no choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import fields
from numbers import Real

from rankxform.errors import UsageError
from rankxform.geometry.tiling import Cell, overlaps
from rankxform.options import OptionType, parse_size
from rankxform.values import dataclass

from .movement import TransferGroup
from .read_method import ReadCount, ReadMethod, messages_of
from .reads import ReadCounter

_GAIN = 0.9
"""An exchange must cost less than this part of separate reads: its estimate is the rougher one."""

_LEAST_LATENCY = 4 << 10
"""Bytes below which nothing is read faster."""


@dataclass(frozen=True)
class Costs:
    """Bandwidths in bytes a second, and latencies in seconds.

    read, write: of one process, while all are at work; network: out of one node, and into it; copy:
    in memory, by one process. read_latency: of a read; latency: of a message. overlap: which part
    of the shorter of reading and sending the longer hides; 0 where one link carries both, and less
    where they hinder each other, as on too few cores.
    """

    read: float = 1e9
    write: float = 1e9
    network: float = 10e9
    copy: float = 5e9
    read_latency: float = 100e-6
    latency: float = 30e-6
    overlap: float = 1.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, Real) and not isinstance(value, bool)
            if name == "overlap":
                range_text, good = "from -1 to 1", number and -1 <= value <= 1
            elif name in ("read_latency", "latency"):
                range_text, good = "from zero on", number and value >= 0
            else:
                range_text, good = "above zero", number and value > 0
            if not good:
                raise UsageError(f"costs: {name} is {value!r}; expected a number {range_text}")

    @property
    def latency_bytes(self) -> float:
        """Bytes that could be read in the latency of a read."""
        return max(_LEAST_LATENCY, self.read_latency * self.read)

    def overlapped(self, reading: float, sending: float) -> float:
        """Return the seconds for both at once, given what each would take by itself."""
        return max(reading, sending) + (1 - self.overlap) * min(reading, sending)


LATENCIES, SHARE = ("read_latency", "latency"), "overlap"
"""What of `Costs` is in seconds, and what has no unit."""

_MOMENTS = {"s": 1, "ms": 1e3, "us": 1e6}


def parse_seconds(text: str) -> float:
    """Read seconds such as ``0.5ms``. Raises ValueError.

    >>> parse_seconds("100us"), parse_seconds("2s")
    (0.0001, 2.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(us|ms|s)", text.strip())
    if not match:
        raise ValueError(f"{text!r}: expected a time such as 100us")
    return float(match[1]) / _MOMENTS[match[2]]


def parse_costs(text: str) -> Costs:
    """Read costs such as ``read=2G,latency=30us``. Raises ValueError, with what was expected."""
    cost_names = [field.name for field in fields(Costs)]
    costs_by_name: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        if name not in cost_names or name in costs_by_name or not equals:
            raise ValueError(f"{part!r}: expected one =VALUE each of {', '.join(cost_names)}")
        costs_by_name[name] = _parse_cost(name, value)
        if not costs_by_name[name] and name != SHARE:
            raise ValueError(f"{part!r}: expected more than nothing")
    return Costs(**costs_by_name)


def _parse_cost(name: str, text: str) -> float:
    if name in LATENCIES:
        return parse_seconds(text)
    if name == SHARE:
        if not re.fullmatch(r"0*(\d*\.\d+|[01]\.?)", text) or not 0 <= float(text) <= 1:
            raise ValueError(f"{text!r}: expected a share from 0 to 1")
        return float(text)
    try:
        return parse_size(text)
    except ValueError:
        raise ValueError(f"{text!r}: expected a size such as 256M") from None


COSTS = OptionType(Costs, "rankxform.Costs", "Costs", parse_costs)


@dataclass(frozen=True)
class ReadPolicy:
    """How source files are read; the same on all processes.

    costs: what is known of them. may_exchange: for each kind of parameter an exchange is weighed
    against separate reads; otherwise only what a node does not see is exchanged, unless the method
    exchanges everything.
    """

    method: ReadMethod
    costs: Costs | None = None
    may_exchange: bool = False


@dataclass(frozen=True)
class IoVolume:
    """What is read or sent: bytes, and in how many reads or messages."""

    nbytes: int = 0
    count: int = 0

    def __add__(self, other: IoVolume) -> IoVolume:
        return IoVolume(self.nbytes + other.nbytes, self.count + other.count)

    def times(self, number: int) -> IoVolume:
        """Return so many times as much."""
        return IoVolume(self.nbytes * number, self.count * number)


@dataclass(frozen=True)
class IoEstimate:
    """What separate reads and an exchange of the same parameters come to.

    separate: read where every node reads for itself; once: where each byte is read by one process;
    crossing: sent from node to node then.
    """

    separate: IoVolume = IoVolume()
    once: IoVolume = IoVolume()
    crossing: IoVolume = IoVolume()

    def __add__(self, other: IoEstimate) -> IoEstimate:
        return IoEstimate(
            self.separate + other.separate, self.once + other.once, self.crossing + other.crossing
        )

    def times(self, number: int) -> IoEstimate:
        """Return what so many tensors come to."""
        return IoEstimate(
            *(volume.times(number) for volume in (self.separate, self.once, self.crossing))
        )

    def exchange_is_cheaper(self, costs: Costs, processes: int, nodes: int) -> bool:
        def reading(volume: IoVolume) -> float:
            seconds = volume.nbytes / costs.read + volume.count * costs.read_latency
            return seconds / processes

        sending = self.crossing.nbytes / (costs.network * nodes)
        copied = 2 * (self.once.nbytes + self.crossing.nbytes)
        work = (copied / costs.copy + self.crossing.count * costs.latency) / processes
        return costs.overlapped(reading(self.once), sending) + work < _GAIN * reading(self.separate)


def estimate_io(movement: TransferGroup, node: tuple[int, ...], counter: ReadCounter) -> IoEstimate:
    """Estimate reads and messages of one tensor of a movement: bytes and counts, not seconds.

    If every node reads for itself, and if each byte is read once. node: by process its node.
    """
    src, dst, item = movement.src, movement.grid, movement.item
    cells_of: dict[int, list[Cell]] = {}
    elements_by_cell: dict[Cell, dict[int, int]] = {}
    for cell, ranks_by_process in movement.receivers.items():
        nodes = {node[process] for process in ranks_by_process}
        for node_number in nodes:
            cells_of.setdefault(node_number, []).append(cell)
        for src_cell, box in overlaps(src, dst, cell):
            by_node = elements_by_cell.setdefault(src_cell, {})
            for node_number in nodes:
                by_node[node_number] = by_node.get(node_number, 0) + box.size
    once = _volume(counter.of_cells(src, dst, tuple(movement.receivers), item))
    separate = crossing = IoVolume()
    for cells in cells_of.values():
        separate += _volume(counter.of_cells(src, dst, cells, item))
    for by_node in elements_by_cell.values():
        for elements in by_node.values():
            nbytes = elements * item * (len(by_node) - 1) // len(by_node)
            crossing += IoVolume(nbytes, messages_of(nbytes))
    return IoEstimate(separate, once, crossing)


def _volume(reads: Iterable[ReadCount]) -> IoVolume:
    read_counts = list(reads)
    return IoVolume(
        sum(read.nbytes for read in read_counts), sum(read.reads for read in read_counts)
    )
