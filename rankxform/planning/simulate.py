"""What each of any number of processes would have to do, worked out without running them.

Reads, messages and bytes follow from the plan; times follow from costs that are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import astuple, fields
from typing import TypeVar

from rankxform.formats.container import item_size
from rankxform.geometry.tiling import Cell, overlaps
from rankxform.layout.names import summarize_names
from rankxform.layout.states import find_states
from rankxform.values import dataclass

from .assign import Assignment
from .catalog import Parameter
from .exchange import CellPair, ExchangeCoverage, OperandPlan, message_hops
from .plan import Planner, TransferGroup, transfer_groups
from .reads import METHOD_TITLES, RANGES, SIEVING, TWO_PHASE, WHOLE, Costs, ReadCounter, ReadMethod
from .transfers import Exchange, Reach

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

    @property
    def in_words(self) -> str:
        return METHOD_TITLES.get(self.method, self.method)

    @property
    def which(self) -> str:
        """The names in short; those of states only where their parameters are not among them."""
        states = find_states(dict.fromkeys(self.names))
        weight_names = [name for name in self.names if states.of(name) is None]
        text = summarize_names(weight_names or self.names, 2)
        return (
            f"{text}, and states" if weight_names and len(weight_names) < len(self.names) else text
        )


@dataclass(frozen=True)
class NodeTraffic:
    """Bytes that the processes on one node send to those on another."""

    src_node: int
    dst_node: int
    nbytes: int


@dataclass(frozen=True)
class Simulation:
    """What a simulation found, for each process and node."""

    workloads: tuple[Workload, ...]  # by process
    seconds: tuple[float, ...]  # what each process would take by itself
    network: tuple[float, ...]  # by node, the seconds to send or receive all that it must
    between: tuple[NodeTraffic, ...]  # what nodes send each other
    methods: tuple[MethodUse, ...]  # how files are read
    costs: Costs  # those that were assumed
    memory: int = 0  # most bytes that a process takes, if that is known

    @property
    def total(self) -> float:
        """Seconds from the finished plan to the last file: messages travel while processes work, as
        far as one hides the other."""
        return self.costs.overlapped(max(self.seconds), max(self.network))


def simulate_work(
    planner: Planner,
    assignment: Assignment,
    reach: Reach,
    exchanges: Sequence[Exchange],
    costs: Costs,
    method: ReadMethod,
    first: OperandPlan | None = None,
) -> Simulation:
    """Work out what every process does for ``assignment``, by process.

    `exchanges` are those of the same assignment and reach; files are read by `method`.
    `first`: what is moved into memory before.
    """
    workloads = [Workload() for _ in assignment]
    bytes_by_method: dict[str, dict[str, int]] = {
        name: {} for name in (WHOLE, RANGES, SIEVING, method.name, TWO_PHASE)
    }
    crossing: dict[tuple[int, int], int] = {}
    counter = ReadCounter(method)
    moved = OperandPlan(planner, assignment, exchanges, reach)
    for moves in (moved,) if first is None else (first, moved):
        _add_exchanges(moves.exchanges, workloads, crossing, bytes_by_method[TWO_PHASE], counter)
        exchanged = ExchangeCoverage(moves.exchanges)
        local: list[tuple[int, str, str, int]] = []
        for transfers in transfer_groups(moves.planner, moves.assignment):
            if moves is moved:
                _add_written(transfers, workloads)
            for names, cells_by_process in _local(transfers, exchanged):
                by_method = _add_local(transfers, cells_by_process, len(names), workloads, counter)
                local += [
                    (*name, method_name, n)
                    for method_name, n in by_method.items()
                    for name in names
                ]
        for _, name, method_name, nbytes in sorted(local):
            _add(bytes_by_method[method_name], name, nbytes)
    leaving = [0] * len(reach.files)
    arriving = [0] * len(reach.files)
    for (src, dst), nbytes in crossing.items():
        leaving[src] += nbytes
        arriving[dst] += nbytes
    return Simulation(
        tuple(workloads),
        tuple(workload.seconds(costs) for workload in workloads),
        tuple(max(a, b) / costs.network for a, b in zip(leaving, arriving)),
        tuple(NodeTraffic(*nodes, crossing[nodes]) for nodes in sorted(crossing)),
        tuple(MethodUse(m, sum(n.values()), tuple(n)) for m, n in bytes_by_method.items() if n),
        costs,
    )


Cells = dict[int, list[Cell]]
"""By process the destination cells that it makes by itself."""


def _local(
    transfers: TransferGroup, exchanged: ExchangeCoverage
) -> Iterator[tuple[list[tuple[int, str]], Cells]]:
    """Yield (place and name of tensors, what each process makes of each by itself)."""
    groups_by_receivers: dict[tuple[int, ...], tuple[list[tuple[int, str]], Parameter]] = {}
    for place, parameter in transfers.parameters:
        receiver_ids = tuple(map(id, exchanged.receivers(parameter, transfers.grid)))
        groups_by_receivers.setdefault(receiver_ids, ([], parameter))[0].append(
            (place, parameter.name)
        )
    for names, first in groups_by_receivers.values():
        cells_by_process: Cells = {}
        for cell, files_by_process in transfers.receivers.items():
            for process, files in files_by_process.items():
                if not exchanged.covers(first, transfers.grid, cell, process, files[0]):
                    cells_by_process.setdefault(process, []).append(cell)
        yield names, cells_by_process


def _add_written(transfers: TransferGroup, workloads: Sequence[Workload]) -> None:
    number, item = len(transfers.parameters), item_size(transfers.first.dtype)
    for cell, files_by_process in transfers.receivers.items():
        nbytes = transfers.grid.box(cell).size * item * number
        for process, files in files_by_process.items():
            workloads[process].written += nbytes * len(files)
            workloads[process].slices += number * len(files)


def _add_local(
    transfers: TransferGroup,
    cells_by_process: Cells,
    number: int,
    workloads: Sequence[Workload],
    counter: ReadCounter,
) -> dict[str, int]:
    """Add what processes read for themselves of so many tensors; return the bytes of each by
    method."""
    by_method: dict[str, int] = {}
    for process, cells in cells_by_process.items():
        for read in counter.of_cells(transfers.src, transfers.grid, cells, transfers.item):
            workloads[process].read += read.nbytes * number
            workloads[process].reads += read.reads * number
            _add(by_method, read.method, read.nbytes)
    return by_method


def _add_exchanges(
    exchanges: Iterable[Exchange],
    workloads: Sequence[Workload],
    crossing: dict[tuple[int, int], int],
    by_name: dict[str, int],
    counter: ReadCounter,
) -> None:
    """Add to `workloads`, to the bytes between nodes, and to those read by name, what exchanges
    come to."""
    sizes: dict[object, dict[CellPair, int]] = {}
    for exchange in exchanges:
        parameter = exchange.parameter
        key = parameter.grid, exchange.grid, item_size(parameter.src_dtype)
        previous_bytes = by_name.get(parameter.name, 0)
        nbytes = _add_exchange(exchange, sizes.setdefault(key, {}), workloads, crossing, counter)
        by_name[parameter.name] = previous_bytes + nbytes


def _add_exchange(
    exchange: Exchange,
    sizes: dict[CellPair, int],
    workloads: Sequence[Workload],
    crossing: dict[tuple[int, int], int],
    counter: ReadCounter,
) -> int:
    """Add what one exchange comes to; return the bytes read. sizes: of pieces, in bytes."""
    grid, node = exchange.parameter.grid, exchange.node
    item = item_size(exchange.parameter.src_dtype)
    read: dict[tuple[int, Cell], dict[Cell, None]] = {}
    sent: dict[tuple[int, int], int] = {}
    passed_on: dict[tuple[int, int], int] = {}
    for piece, sender, receiver, first in message_hops(exchange):
        if piece not in sizes:
            copies = overlaps(grid, exchange.grid, piece[1])
            sizes.update(((src_cell, piece[1]), box.size * item) for src_cell, box in copies)
        if first != receiver:
            _add(passed_on, (first, receiver), sizes[piece])
            continue
        read.setdefault((sender, piece[0]), {})[piece[1]] = None
        if sender != receiver:
            _add(sent, (sender, receiver), sizes[piece])
    total = 0
    for (process, src_cell), cells in read.items():
        read_count = counter.of_part(grid, src_cell, exchange.grid, tuple(cells), item)
        workloads[process].read += read_count.nbytes
        workloads[process].reads += read_count.reads
        total += read_count.nbytes
    for (sender, receiver), nbytes in sent.items():
        source, target = workloads[sender], workloads[receiver]
        source.messages += max(1, -(-nbytes // _MESSAGE))
        nodes = node[sender], node[receiver]
        if nodes[0] == nodes[1]:
            source.sent_nearby += nbytes
            target.received_nearby += nbytes
        else:
            source.sent += nbytes
            target.received += nbytes
            _add(crossing, nodes, nbytes)
    for (first, receiver), nbytes in passed_on.items():
        workloads[first].messages += max(1, -(-nbytes // _MESSAGE))
        workloads[first].sent_nearby += nbytes
        workloads[receiver].received_nearby += nbytes
    return total


def _add(sums: dict[Key, int], key: Key, nbytes: int) -> None:
    sums[key] = sums.get(key, 0) + nbytes


def spread_of(workloads: Sequence[Workload]) -> dict[str, tuple[int, float, int]]:
    """Return for every number of a workload the least, the mean and the largest."""
    columns = zip(*(astuple(workload) for workload in workloads))
    return {
        f.name: (min(c), sum(c) / len(workloads), max(c)) for f, c in zip(fields(Workload), columns)
    }
