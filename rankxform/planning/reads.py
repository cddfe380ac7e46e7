"""Read methods, the one counter of what is read, and what reads and messages cost.

A block is a region of a source slice that lies in one piece in its file. The field's names: the
wanted ranges one by one (list I/O); all that lies between them too (data sieving); or each byte by
one process, which sends it to those that want it (two-phase I/O).

Counting and reading ask one `ReadMethod`, so that a plan says what will be done.

Counts depend on where cells lie and not on tensors' names, so tensors that are stored alike and
wanted alike are counted once.

Where all nodes see the same storage, two nodes that want the same rows of a source slice either
both read them, or one reads them and sends the other its part. The first costs storage, the
second the network and two more copies in memory. Files on a node's own disk leave no choice.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from math import inf
from numbers import Real
from typing import Protocol

from rankxform.errors import UsageError
from rankxform.formats.container import item_size
from rankxform.geometry.box import Box, bounding_boxes, count_runs
from rankxform.geometry.tiling import Cell, SourceTiling, Tiling, overlaps
from rankxform.options import OptionType
from rankxform.values import NamedTuple, dataclass

from .plan import TransferGroup
from .transfers import Transfer

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


class ReadCounter:
    """Counts what a process reads of source cells, by one method."""

    def __init__(self, method: ReadMethod) -> None:
        self._method = method
        self._cells: dict[object, tuple[ReadCount, ...]] = {}
        self._parts: dict[object, ReadCount] = {}

    def of_box(self, src: SourceTiling, cell: Cell, box: Box, item: int) -> ReadCount:
        """Count what is read of a source cell for a region of it. `item`: bytes of an element."""
        return count_reads(self._method, src.box_in_source(cell, box), src.source_box(cell), item)

    def of_part(
        self, src: SourceTiling, src_cell: Cell, dst: Tiling, cells: Sequence[Cell], item: int
    ) -> ReadCount:
        """Count what is read of a source cell, in one read, for all of some destination cells."""
        key = src, src_cell, dst, tuple(cells), item
        if key not in self._parts:
            common = (pair for cell in cells for pair in overlaps(src, dst, cell))
            bounds = bounding_boxes(pair for pair in common if pair[0] == src_cell)
            self._parts[key] = self.of_box(src, src_cell, bounds[src_cell], item)
        return self._parts[key]

    def of_cells(
        self, src: SourceTiling, dst: Tiling, cells: Sequence[Cell], item: int
    ) -> tuple[ReadCount, ...]:
        """Count what a process reads that makes some destination cells.

        It reads each source cell once, for all of them.
        """
        key = src, dst, tuple(cells), item
        if key not in self._cells:
            bounds = bounding_boxes(pair for cell in cells for pair in overlaps(src, dst, cell))
            self._cells[key] = tuple(self.of_box(src, c, box, item) for c, box in bounds.items())
        return self._cells[key]


def bytes_to_read(transfers: Iterable[Transfer], method: ReadMethod) -> int:
    """Return the bytes that one process reads to carry out `transfers`."""
    counter, nbytes = ReadCounter(method), 0
    for transfer in transfers:
        src, item = transfer.parameter.grid, item_size(transfer.parameter.src_dtype)
        reads = counter.of_cells(src, transfer.grid, tuple(transfer.targets), item)
        nbytes += sum(read.nbytes for read in reads)
    return nbytes


_GAIN = 0.9
"""An exchange must cost less than this part of separate reads: its estimate is the rougher one."""

_LEAST_LATENCY = 4 << 10
"""Bytes below which nothing is read faster."""


@dataclass(frozen=True)
class Costs:
    """Bandwidths in bytes a second, and latencies in seconds."""

    read: float = 1e9  # bytes per second that one process reads while all read
    write: float = 1e9  # bytes per second that one process writes while all write
    network: float = 10e9  # bytes per second out of one node, and into it
    copy: float = 5e9  # bytes per second that one process copies in memory
    read_latency: float = 100e-6  # seconds of one read
    latency: float = 30e-6  # seconds of one message
    # Which part of the shorter of reading and sending the longer hides; 0 where one link carries
    # both, and less where they hinder each other, as on too few cores.
    overlap: float = 1.0
    get_rate: float = 0.0  # requests to read a second that a store takes under a prefix; 0: any
    put_rate: float = 0.0  # requests to write, of the same kind
    get_price: float = 0.0  # of a million requests to read
    put_price: float = 0.0  # of a million requests to write

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            number = isinstance(value, Real) and not isinstance(value, bool)
            if name == "overlap":
                range_text, good = "from -1 to 1", number and -1 <= value <= 1
            elif name in (*LATENCIES, *OF_STORES):
                range_text, good = "from zero on", number and value >= 0
            else:
                range_text, good = "above zero", number and value > 0
            if not good:
                raise UsageError(f"costs: {name} is {value!r}; expected a number {range_text}")

    @property
    def of_stores_alone(self) -> bool:
        """Whether something is said of object storage, and nothing of processes and nodes."""
        stated_names = {name for name, value in vars(self).items() if value != getattr(Costs, name)}
        return bool(stated_names) and stated_names <= {*OF_STORES}

    @property
    def latency_bytes(self) -> float:
        """Bytes that could be read in the latency of a read."""
        return max(_LEAST_LATENCY, self.read_latency * self.read)

    @property
    def writing(self) -> float:
        """What a byte costs to write over what one costs to read."""
        return self.read / self.write + self.read / self.copy

    def overlapped(self, reading: float, sending: float) -> float:
        """Return the seconds for both at once, given what each would take by itself."""
        return max(reading, sending) + (1 - self.overlap) * min(reading, sending)


LATENCIES, SHARE = ("read_latency", "latency"), "overlap"
"""What of `Costs` is in seconds, and what has no unit."""

OF_STORES = "get_rate", "put_rate", "get_price", "put_price"
"""What of `Costs` is about requests to object storage; 0: it is not known, and does not count."""

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
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(f"{text!r}: expected bytes a second such as 2G (10^9) or 2Gi (2^30)")
    power = " KMGT".index(match[2].upper() or " ")
    return float(match[1]) * (1024.0 if match[3] else 1000.0) ** power


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
    writing: float = 0.0  # what a byte costs to write over what one costs to read; 0 in memory


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
    """What separate reads and an exchange of the same parameters come to."""

    separate: IoVolume = IoVolume()  # read where every node reads for itself
    once: IoVolume = IoVolume()  # where each byte is read by one process
    crossing: IoVolume = IoVolume()  # sent from node to node then

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


def estimate_io(
    transfers: TransferGroup, node: tuple[int, ...], counter: ReadCounter
) -> IoEstimate:
    """Estimate reads and messages of one tensor of a transfer group: bytes and counts, not seconds.

    If every node reads for itself, and if each byte is read once. node: by process its node.
    """
    src, dst, item = transfers.src, transfers.grid, transfers.item
    cells_of: dict[int, list[Cell]] = {}
    elements_by_cell: dict[Cell, dict[int, int]] = {}
    for cell, files_by_process in transfers.receivers.items():
        nodes = {node[process] for process in files_by_process}
        for node_number in nodes:
            cells_of.setdefault(node_number, []).append(cell)
        for src_cell, box in overlaps(src, dst, cell):
            by_node = elements_by_cell.setdefault(src_cell, {})
            for node_number in nodes:
                by_node[node_number] = by_node.get(node_number, 0) + box.size
    once = _volume(counter.of_cells(src, dst, tuple(transfers.receivers), item))
    separate = _volume(
        read for cells in cells_of.values() for read in counter.of_cells(src, dst, cells, item)
    )
    sent_bytes = [
        elements * item * (len(by_node) - 1) // len(by_node)
        for by_node in elements_by_cell.values()
        for elements in by_node.values()
    ]
    crossing = IoVolume(sum(sent_bytes), sum(map(messages_of, sent_bytes)))
    return IoEstimate(separate, once, crossing)


def _volume(reads: Iterable[ReadCount]) -> IoVolume:
    read_counts = list(reads)
    return IoVolume(
        sum(read.nbytes for read in read_counts), sum(read.reads for read in read_counts)
    )
