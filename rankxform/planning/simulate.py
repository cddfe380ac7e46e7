"""What each of any number of processes would have to do, worked out without running them.

Reads, messages and bytes follow from the plan; times follow from costs that are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from typing import TypeVar

from rankxform.formats.dtype import item_size
from rankxform.geometry.box import bounding_boxes
from rankxform.geometry.grid import overlaps
from rankxform.values import dataclass

from .assign import Assignment
from .cost_model import Costs
from .exchange import Exchanged
from .plan import Planner
from .read_method import RANGES, SIEVING, TWO_PHASE, WHOLE, ReadMethod, count_reads
from .routes import Peers, routes_of
from .transfers import Exchange, bytes_to_write, reads_of
from .visibility import Visibility

Key = TypeVar("Key")

_MESSAGE = 2 << 20
_SECONDS_A_SLICE = 8e-6


@dataclass
class Workload:
    """What one process does, in bytes: read from files; sent to other nodes and on its own node,
    received from these; written. In numbers: reads and messages, at least, and slices."""

    read: int = 0
    sent: int = 0
    sent_nearby: int = 0
    received: int = 0
    received_nearby: int = 0
    written: int = 0
    reads: int = 0
    messages: int = 0
    slices: int = 0

    def add(self, other: Workload) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def seconds(self, costs: Costs) -> float:
        """Return how long it takes, if nothing is waited for."""
        crossing = self.sent + self.sent_nearby + self.received + self.received_nearby
        return (
            self.read / costs.read
            + self.reads * costs.read_latency
            + self.written / costs.write
            + (crossing + self.written) / costs.copy
            + self.slices * _SECONDS_A_SLICE
            + self.messages * costs.latency
        )


@dataclass(frozen=True)
class MethodUse:
    """A read method: the bytes that all processes read by it, and the parameters they are of."""

    method: str
    bytes_read: int
    names: tuple[str, ...]


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes that the processes on one node send to those on another."""

    src_node: int
    dst_node: int
    nbytes: int


@dataclass(frozen=True)
class Simulation:
    """What a simulation found, for each process and node.

    workloads: by process; seconds: what each process would take by itself; network: by node, the
    seconds to send or receive all that it must; between: what nodes send each other; methods: how
    files are read; costs: those that were assumed; memory: most bytes that a process takes, if
    that is known.
    """

    workloads: tuple[Workload, ...]
    seconds: tuple[float, ...]
    network: tuple[float, ...]
    between: tuple[NodeTraffic, ...]
    methods: tuple[MethodUse, ...]
    costs: Costs
    memory: int = 0

    @property
    def total(self) -> float:
        """Seconds from the finished plan to the last file: messages travel while processes work, as
        far as one hides the other."""
        return self.costs.overlapped(max(self.seconds), max(self.network))


def simulate(
    planner: Planner,
    assignment: Assignment,
    visibility: Visibility,
    exchanges: Sequence[Exchange],
    costs: Costs,
    method: ReadMethod,
) -> Simulation:
    """Work out what every process does for ``assignment``, by process.

    `exchanges` are those of the same assignment and visibility; files are read by `method`.
    """
    workloads = [Workload() for _ in assignment]
    used: dict[str, dict[str, int]] = {name: {} for name in (WHOLE, RANGES, SIEVING, TWO_PHASE)}
    crossing: dict[tuple[int, int], int] = {}
    _add_exchanges(exchanges, workloads, crossing, used[TWO_PHASE], method)
    exchanged = Exchanged(exchanges)
    for process, slice_ranges in enumerate(assignment):
        workload = workloads[process]
        visible = None if visibility.is_full else visibility.of(process)
        transfers = planner.transfers(slice_ranges, visible)
        for transfer, reads in reads_of(exchanged.local(process, transfers), method):
            for read in reads:
                workload.read += read.nbytes
                workload.reads += read.reads
                _add(used[read.method], transfer.parameter.name, read.nbytes)
        workload.written += bytes_to_write(transfers)
        workload.slices += sum(len(r) for transfer in transfers for r in transfer.targets.values())
    leaving = [0] * len(visibility.files)
    arriving = [0] * len(visibility.files)
    for (src, dst), nbytes in crossing.items():
        leaving[src] += nbytes
        arriving[dst] += nbytes
    return Simulation(
        tuple(workloads),
        tuple(workload.seconds(costs) for workload in workloads),
        tuple(max(a, b) / costs.network for a, b in zip(leaving, arriving)),
        tuple(NodeTraffic(*nodes, crossing[nodes]) for nodes in sorted(crossing)),
        tuple(MethodUse(m, sum(by.values()), tuple(by)) for m, by in used.items() if by),
        costs,
    )


def _add_exchanges(
    exchanges: Iterable[Exchange],
    workloads: Sequence[Workload],
    crossing: dict[tuple[int, int], int],
    by_name: dict[str, int],
    method: ReadMethod,
) -> None:
    """Add to `workloads`, to the bytes between nodes, and to those read by name, what exchanges
    come to."""
    known: dict[object, tuple[dict[int, Workload], dict[tuple[int, int], int]]] = {}
    for exchange in exchanges:
        parameter = exchange.parameter
        key = (
            exchange.receivers, exchange.senders, exchange.forwarder, parameter.grid,
            item_size(parameter.src_dtype),
        )  # fmt: skip
        if key not in known:
            known[key] = _workloads_of(exchange, method)
        by_process, by_nodes = known[key]
        for process, workload in by_process.items():
            workloads[process].add(workload)
            _add(by_name, parameter.name, workload.read)
        for nodes, nbytes in by_nodes.items():
            _add(crossing, nodes, nbytes)


def _add(sums: dict[Key, int], key: Key, nbytes: int) -> None:
    sums[key] = sums.get(key, 0) + nbytes


def _workloads_of(
    exchange: Exchange, method: ReadMethod
) -> tuple[dict[int, Workload], dict[tuple[int, int], int]]:
    """Return what each process reads, sends and receives, and what nodes send each other."""
    grid, node = exchange.parameter.grid, exchange.node
    item = item_size(exchange.parameter.src_dtype)
    boxes = {
        (at, cell): box
        for cell in exchange.receivers
        for at, box in overlaps(grid, exchange.grid, cell)
    }
    found = {}
    crossing: dict[tuple[int, int], int] = {}
    for process, routes in routes_of(exchange).items():

        def nbytes(peers: Peers, nearby: bool, here: int = node[process]) -> int:
            some = (pieces for peer, pieces in peers.items() if (node[peer] == here) == nearby)
            return item * sum(boxes[piece].size for pieces in some for piece in pieces)

        wanted = bounding_boxes((piece[0], boxes[piece]) for piece in routes.read)
        reads = [
            count_reads(method, grid.stored(at, box), grid.held(at), item)
            for at, box in wanted.items()
        ]
        messages = [
            item * sum(boxes[piece].size for piece in pieces)
            for peers in (routes.sends, routes.forwards)
            for pieces in peers.values()
        ]
        sent = 0
        for peer, pieces in routes.sends.items():
            if node[peer] != node[process]:
                across = item * sum(boxes[piece].size for piece in pieces)
                _add(crossing, (node[process], node[peer]), across)
                sent += across
        found[process] = Workload(
            read=sum(read.nbytes for read in reads),
            sent=sent,
            sent_nearby=nbytes(routes.sends, True) + nbytes(routes.forwards, True),
            received=nbytes(routes.recvs, False),
            received_nearby=nbytes(routes.recvs, True) + nbytes(routes.forwarded, True),
            reads=sum(read.reads for read in reads),
            messages=sum(max(1, -(-size // _MESSAGE)) for size in messages),
        )
    return found, crossing


def spread_of(workloads: Sequence[Workload]) -> dict[str, tuple[int, float, int]]:
    """Return for every number of a workload the least, the mean and the largest."""
    columns = zip(*(astuple(workload) for workload in workloads))
    return {
        one.name: (min(column), sum(column) / len(workloads), max(column))
        for one, column in zip(fields(Workload), columns)
    }
