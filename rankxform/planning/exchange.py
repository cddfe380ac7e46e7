"""What crosses between processes: who reads, who sends what to whom, and operands that move first.

A process reads what its node sees. What it does not see, another process reads and sends, exactly
the part that is needed. Where all nodes see the same storage, an exchange is used if it is cheaper
than separate reads, by costs that are measured or given. On one node the page cache is the
exchange.

Every process works out all exchanges, with the same result, and takes part in those that concern
it. So no process tells another what to do, and no message says what it holds.

1. **A byte is read once on a node.** What one node has and another needs also goes to the reader's
   neighbours that need it. A pair (source cell, destination cell) is sent to a node once; if
   several of its processes need it, one of them, in rotation, forwards it.
2. **One order.** All processes take exchanges, and their tiles, in the same order. Exchanges with
   the same senders and receivers stay in file order; these queues are interleaved in proportion to
   their lengths. Neighbours whose senders are different processes are mixed tile by tile, but for
   slices in memory. Otherwise one node after the other would send, and most links would be idle.
3. **Who reads** is one of the processes whose node has a file with the cell. Loads are balanced by
   descent on the sum of load squared over speed (`planning.assign`): on 384 nodes with disks of
   their own the busiest of 3,072 processes reads 1.02 times what the fullest disk requires.

Operands of computations (an adapter, factors of 8-bit blocks) are read in boxes where every process
sees them. Where one does not, they are moved whole before anything else, by the same planner, as
slices of a destination of one rank in memory: no tile ever waits for an operand.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from math import inf, nextafter
from typing import Any, TypeVar

from rankxform.formats.container import item_size
from rankxform.geometry.box import bounding_boxes
from rankxform.geometry.tiling import Cell, Grid, overlaps
from rankxform.layout.strategy import WholeStrategy
from rankxform.values import NamedTuple, dataclass

from .assign import LARGE_READ_BYTES, Assignment, WorkAssigner, balance, runs_of
from .catalog import Catalog, IdentityDict, Parameter
from .plan import Planner, TransferGroup, transfer_groups
from .reads import IoEstimate, ReadCounter, ReadMethod, ReadPolicy, estimate_io
from .selection import Selection
from .transfers import Exchange, Processes, Reach, Receivers, Senders, Transfer, bytes_to_write

T = TypeVar("T")

Order = Callable[[Parameter], Any]
"""Where a parameter stands among others, as a key to sort by."""


@dataclass(frozen=True)
class SharedRead:
    """The processes that need a source cell, the files with it, and who could read one of them."""

    receivers: tuple[int, ...]
    files: tuple[int, ...]
    able: Processes


@dataclass(frozen=True, eq=False)
class ExchangeGroup:
    """What the exchanges of all tensors of a transfer group have in common."""

    transfers: TransferGroup
    receivers: Receivers  # those of the group that the exchange serves
    # By source cell those of them that read it for themselves.
    local_readers: Mapping[Cell, Sequence[int]]
    required: Sequence[tuple[Cell, SharedRead]]  # what one process reads for them, by source cell
    # To whom, by the place of a requirement and its reader, as far as that was asked for.
    sender_cache: dict[object, dict[int, tuple[int, int]]] = field(default_factory=dict)

    @cached_property
    def nbytes(self) -> Sequence[int]:
        """The bytes of the source cell of each requirement."""
        src, item = self.transfers.src, self.transfers.item
        return [src.box(cell).size * item for cell, _ in self.required]


@dataclass(frozen=True)
class PendingExchange:
    """An exchange before readers are chosen. replica: which of equal copies is read."""

    parameter: Parameter
    replica: int
    group: ExchangeGroup

    @property
    def grid(self) -> Grid:
        return self.group.transfers.grid


@dataclass(frozen=True)
class PendingExchanges:
    """What must be exchanged, and by process the bytes that it reads for itself, and writes, as so
    many that are read."""

    requests: Sequence[PendingExchange]
    read: Sequence[float]
    written: Sequence[float]


def find_exchanges(
    planner: Planner, assignment: Assignment, reach: Reach, policy: ReadPolicy
) -> PendingExchanges:
    """Return what must be exchanged where process p writes ``assignment[p]``.

    A process takes part as a receiver if it needs a file that it does not see; and, if the policy
    weighs costs, if an exchange is cheaper than reading a file that all nodes see on each of them.
    If the policy's method exchanges, each distinct byte is read by one process for all. Raises
    CheckpointError if no file has what is needed.
    """
    read, written = ([0.0] * len(assignment) for _ in range(2))
    may_exchange = policy.method.exchanges or policy.may_exchange
    if len(assignment) == 1 or (reach.is_full and not may_exchange):
        return PendingExchanges((), read, written)
    counter, placed_requests = ReadCounter(policy.method), []
    for transfers in transfer_groups(planner, assignment):
        group = _group(planner, transfers, reach, policy, counter)
        _add_own(transfers, group, read, counter)
        _add_written(transfers, written, policy.writing)
        if group is not None:
            placed_requests += [
                (place, PendingExchange(parameter, planner.replica(parameter), group))
                for place, parameter in transfers.parameters
            ]
    ordered = sorted(placed_requests, key=lambda placed: placed[0])
    return PendingExchanges([request for _, request in ordered], read, written)


def _add_own(
    transfers: TransferGroup, group: ExchangeGroup | None, loads: list[float], counter: ReadCounter
) -> None:
    """Add what each process reads for itself of a transfer group, whoever reads for others."""
    src, dst, item = transfers.src, transfers.grid, transfers.item
    number = len(transfers.parameters)
    cells_of: dict[int, list[Cell]] = {}
    for cell, files_by_process in transfers.receivers.items():
        for process in files_by_process:
            cells_of.setdefault(process, []).append(cell)
    receivers_by_cell: dict[Cell, set[int]] = {}
    for src_cell, requirement in group.required if group is not None else ():
        receivers_by_cell.setdefault(src_cell, set()).update(requirement.receivers)
    members = set().union(*receivers_by_cell.values())
    for process, cells in cells_of.items():
        if process not in members:
            reads = counter.of_cells(src, dst, cells, item)
            loads[process] += number * sum(read.nbytes for read in reads)
            continue
        copies = (copy for cell in cells for copy in overlaps(src, dst, cell))
        for src_cell, box in bounding_boxes(copies).items():
            if process not in receivers_by_cell.get(src_cell, ()):
                loads[process] += number * counter.of_box(src, src_cell, box, item).nbytes


def _add_written(transfers: TransferGroup, loads: list[float], writing: float) -> None:
    """Add what each process writes of a transfer group, a byte as so many that are read."""
    cost = item_size(transfers.first.dtype) * len(transfers.parameters) * writing
    for cell, files_by_process in transfers.receivers.items() if writing else ():
        nbytes = transfers.grid.box(cell).size * cost
        for process, files in files_by_process.items():
            loads[process] += nbytes * len(files)


def bytes_with_several_readers(pending_exchanges: PendingExchanges, reach: Reach) -> float:
    """Return the bytes to be sent that processes of more than one node could read."""
    node = reach.node
    amounts = _amounts(pending_exchanges.requests)
    return sum(nbytes for able, nbytes in amounts.items() if len({node[p] for p in able}) > 1)


def _amounts(requests: Iterable[PendingExchange]) -> dict[Processes, float]:
    """Return the bytes that are required, by who could read them."""
    amounts: dict[Processes, float] = {}
    tensors = Counter(request.group for request in requests)
    for group, number in tensors.items():
        for nbytes, (_, requirement) in zip(group.nbytes, group.required):
            amounts[requirement.able] = amounts.get(requirement.able, 0.0) + number * nbytes
    return amounts


def estimate_reads(
    planner: Planner, assignment: Assignment, reach: Reach, method: ReadMethod
) -> IoEstimate:
    """Return what it comes to if every node reads for itself, and if each byte is read once."""
    counter, total = ReadCounter(method), IoEstimate()
    for transfers in transfer_groups(planner, assignment):
        estimate = estimate_io(transfers, reach.node, counter)
        total += estimate.times(len(transfers.parameters))
    return total


def _group(
    planner: Planner,
    transfers: TransferGroup,
    reach: Reach,
    policy: ReadPolicy,
    counter: ReadCounter,
) -> ExchangeGroup | None:
    """Sort out who receives, who reads for itself, and what is required of others."""
    needs, files_by_cell = transfers.needs, transfers.files
    planner.require_holders(transfers)
    always = policy.method.exchanges
    if policy.may_exchange and policy.costs and not always:
        estimate = estimate_io(transfers, reach.node, counter)
        sizes = len(reach.node), len(reach.files)
        always = estimate.exchange_is_cheaper(policy.costs, *sizes)
    required: list[tuple[Cell, SharedRead]] = []
    for cell, elements_by_process in needs.items():
        if always:
            able = [p for p in elements_by_process if reach.sees(p, files_by_cell[cell])]
            readers = tuple(sorted(able)) or reach.processes_seeing(files_by_cell[cell])
            required.append(
                (cell, SharedRead(tuple(elements_by_process), files_by_cell[cell], readers))
            )
        else:
            required += (
                (cell, requirement) for requirement in _find_shared_reads(transfers, cell, reach)
            )
    receivers_by_cell: dict[Cell, set[int]] = {}
    for cell, requirement in required:
        receivers_by_cell.setdefault(cell, set()).update(requirement.receivers)
    members = set().union(*receivers_by_cell.values())
    if not members:
        return None
    local_readers = {
        cell: [
            process
            for process in elements_by_process
            if process in members and process not in receivers_by_cell.get(cell, ())
        ]
        for cell, elements_by_process in needs.items()
    }
    return ExchangeGroup(
        transfers, _receivers_among(transfers.receivers, members), local_readers, required
    )


def _find_shared_reads(transfers: TransferGroup, cell: Cell, reach: Reach) -> Iterator[SharedRead]:
    """Yield who must be sent what they need of a source cell.

    Those that do not see it; their neighbours too where one node alone has it, for it is read there
    in any case; and those of one node that want the same of it. A second read of a byte on a node
    costs more than a message between neighbours.
    """
    elements_by_process, files = transfers.needs[cell], transfers.files[cell]
    if reach.is_full:
        return
    nodes = reach.nodes_with(files)
    far = [process for process in elements_by_process if reach.node[process] not in nodes]
    if far and len(nodes) == 1:
        yield SharedRead(tuple(elements_by_process), files, reach.processes_seeing(files))
        return
    processes_by_node: dict[int, list[int]] = {}
    for process in elements_by_process:
        if reach.node[process] in nodes:
            processes_by_node.setdefault(reach.node[process], []).append(process)
    size = transfers.src.box(cell).size
    groups = [
        (node, processes)
        for node, processes in processes_by_node.items()
        if sum(elements_by_process[process] for process in processes) > size
    ]
    if far and groups:  # one of the nodes that read it anyway; tensors take turns
        groups[(transfers.parameters[0][0] + sum(cell)) % len(groups)][1].extend(far)
    elif far:
        yield SharedRead(tuple(far), files, reach.processes_seeing(files))
    for node, processes in groups:
        yield SharedRead(tuple(processes), files, reach.processes_on(node))


def _receivers_among(receivers: Receivers, members: set[int]) -> Receivers:
    """Return the part of `receivers` that is for some processes."""
    member_receivers: Receivers = IdentityDict()
    for cell, files_by_process in receivers.items():
        if files_by_process.keys() <= members:
            member_receivers[cell] = files_by_process  # not copied for every tensor
        elif member_files := {p: r for p, r in files_by_process.items() if p in members}:
            member_receivers[cell] = member_files
    return member_receivers


_FEW_PIECES = 64
"""Of a process: with more, what cannot be divided evens out."""


# -- who reads, and when ------------------------------------------------------------------------


def assign_readers(
    pending_exchanges: PendingExchanges,
    reach: Reach,
    speeds: Sequence[float] = (),
    order: Order | None = None,
) -> list[Exchange]:
    """Return the exchanges, with their readers, in the order in which they are made.

    Where several processes could read the same bytes, times are balanced by their `speeds`
    (default: equal), with what each reads for itself and writes; see
    `rankxform.planning.assign.balance`. The forwarder rotates over parameters that are sharded
    alike.
    """
    requests = pending_exchanges.requests
    if not requests:
        return []
    if order is not None:
        requests = sorted(requests, key=lambda request: order(request.parameter))
    speeds = speeds or [1.0] * len(reach.node)
    chosen_of = _balanced_readers(requests, pending_exchanges, speeds)
    endpoint_cache: dict[object, tuple[Receivers, Senders]] = {}
    fan_out: dict[ExchangeGroup, int] = {}
    names_by_sharding: dict[object, dict[str, int]] = {}  # by name, in their order
    exchanges = []
    for request, readers in zip(requests, chosen_of):
        parameter, group = request.parameter, request.group
        names = names_by_sharding.setdefault((parameter.sharding, request.grid), {})
        number = names.setdefault(parameter.name, len(names))
        if group not in fan_out:
            fan_out[group] = max(
                max(Counter(reach.node[process] for process in receivers).values())
                for receivers in group.receivers.values()
            )
        key = group, request.replica, readers
        if key not in endpoint_cache:
            endpoint_cache[key] = _with_readers(request, readers, reach)
        forwarder = number % fan_out[group]
        exchanges.append(
            Exchange(parameter, request.grid, *endpoint_cache[key], reach.node, forwarder)
        )
    return _in_order(exchanges)


def _balanced_readers(
    requests: Sequence[PendingExchange], pending: PendingExchanges, speeds: Sequence[float]
) -> list[tuple[int, ...]]:
    """Return for each request the readers, so that the busiest process is done early.

    Pieces cannot be divided: where they are few, what is balanced without what is written may end
    earlier, and the better of the two is taken.
    """
    amounts, read, written = _amounts(requests), pending.read, pending.written
    loads = [sum(both) for both in zip(read, written)]
    chosen_of = _choose_readers(requests, WorkAssigner(balance(amounts, speeds, loads)))
    pieces = sum(len(request.group.required) for request in requests)
    if not any(written) or pieces > _FEW_PIECES * len(speeds):
        return chosen_of

    def longest(readers_of: Sequence[tuple[int, ...]]) -> float:
        total = [*loads]
        for request, readers in zip(requests, readers_of):
            for reader, nbytes in zip(readers, request.group.nbytes):
                total[reader] += nbytes
        return float(max(load / speed for load, speed in zip(total, speeds)))

    others = _choose_readers(requests, WorkAssigner(balance(amounts, speeds, read)))
    return min(chosen_of, others, key=longest)


def _choose_readers(
    requests: Sequence[PendingExchange], assigner: WorkAssigner
) -> list[tuple[int, ...]]:
    """Return for each request the readers of what it requires.

    Large pieces come first, each pass in the order of requests: what is left uneven by pieces that
    cannot be divided, small ones make even.
    """
    all_readers = [[0] * len(request.group.required) for request in requests]
    for large in (True, False):
        for request, readers in zip(requests, all_readers):
            required = zip(request.group.nbytes, request.group.required)
            for number, (nbytes, (_, requirement)) in enumerate(required):
                if (nbytes > LARGE_READ_BYTES) == large:
                    readers[number] = assigner.next(requirement.able, nbytes)
    return list(map(tuple, all_readers))


def _with_readers(
    request: PendingExchange, readers: Sequence[int], reach: Reach
) -> tuple[Receivers, Senders]:
    """Return who receives what, and who sends what to whom, or reads it for itself.

    A process that reads for others, and sees all that it needs itself, takes part as a receiver
    too, so that it reads what it needs in the same pass.
    """
    group, senders = request.group, _senders(request, readers, reach)
    transfers = group.transfers
    members = {
        process for files_by_process in group.receivers.values() for process in files_by_process
    }
    extra_members = {
        process
        for process in set(readers) - members
        if any(process in files_by_process for files_by_process in transfers.receivers.values())
    }
    if not extra_members:
        return group.receivers, senders
    for cell, elements_by_process in transfers.needs.items():
        for process in extra_members.intersection(elements_by_process):
            files, cell_senders = (
                reach.files_in_reach(process, transfers.files[cell]),
                senders.get(cell, {}),
            )
            read = {file for reader, file in cell_senders.values() if reader == process}
            file = min(read) if read else files[request.replica % len(files)]
            senders[cell] = {**cell_senders, process: (process, file)}
    return _receivers_among(transfers.receivers, members | extra_members), senders


def _senders(request: PendingExchange, readers: Sequence[int], reach: Reach) -> Senders:
    """Return who sends what to whom, or reads it for itself."""
    senders: Senders = IdentityDict()
    for cell, processes in request.group.local_readers.items():
        holders = request.group.transfers.files[cell]
        if processes:
            cell_senders = senders[cell] = {}
            for process in processes:
                files = reach.files_in_reach(process, holders)
                cell_senders[process] = process, files[request.replica % len(files)]
    for number, ((cell, requirement), reader) in enumerate(zip(request.group.required, readers)):
        files = reach.files_in_reach(reader, requirement.files)
        sender = reader, files[request.replica % len(files)]
        key = number, sender  # what many tensors have in common is kept once
        if key not in request.group.sender_cache:
            request.group.sender_cache[key] = dict.fromkeys(requirement.receivers, sender)
        shared_senders = request.group.sender_cache[key]
        senders[cell] = {**senders[cell], **shared_senders} if cell in senders else shared_senders
    return senders


def _in_order(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Order exchanges so that all who read or write have something to do until the end.

    Those of the same senders and receivers stay in their order, and such queues are interleaved in
    proportion to their length. Neighbours whose senders are different processes get one position,
    and are made in turn: where several nodes have replicas, each sends some tensors, and if a large
    one were made after the other, the links of one node at a time would be busy.
    """
    queues: dict[object, list[tuple[int, Exchange]]] = {}
    senders_by_id = {id(exchange.senders): exchange.senders for exchange in exchanges}
    to_others = {key: _senders_to_others(senders) for key, senders in senders_by_id.items()}
    for exchange in exchanges:
        receivers = frozenset(
            p for files_by_process in exchange.receivers.values() for p in files_by_process
        )
        queues.setdefault((to_others[id(exchange.senders)], receivers), []).append(
            (exchange.nbytes, exchange)
        )
    placed = []
    for number, queue in enumerate(queues.values()):
        for queue_position, (middle, exchange) in enumerate(interleave(queue)):
            placed.append((middle, number, queue_position, exchange))
    placed.sort(key=lambda slot: slot[:3])
    ordered, start, count, senders_in_turn = list[Exchange](), -1.0, 0, frozenset[int]()
    for position, *_, exchange in placed:
        senders = to_others[id(exchange.senders)]
        is_in_turn = senders and senders_in_turn and senders_in_turn.isdisjoint(senders)
        if not is_in_turn or count == _MOST_IN_TURN:
            start = position if position > start else nextafter(start, inf)
            count, senders_in_turn = 0, frozenset()
        count, senders_in_turn = count + 1, senders_in_turn | senders
        ordered.append(replace(exchange, position=start))
    return ordered


_MOST_IN_TURN = 16
"""Exchanges of one position: a process has the tiles of all at hand, and none is done before."""


def _senders_to_others(senders: Senders) -> frozenset[int]:
    """Return the processes that read for others."""
    return frozenset(
        sender
        for senders_by_process in senders.values()
        for process, (sender, _) in senders_by_process.items()
        if sender != process
    )


def interleave(queue: Sequence[tuple[int, T]]) -> Iterator[tuple[float, T]]:
    """Yield (position of the middle, thing) for (bytes, thing); positions are parts of all bytes.

    >>> list(interleave([(1, "a"), (3, "b")]))
    [(0.125, 'a'), (0.625, 'b')]
    """
    total, bytes_before = sum(nbytes for nbytes, _ in queue) or 1, 0
    for nbytes, payload in queue:
        yield (bytes_before + nbytes / 2) / total, payload
        bytes_before += nbytes


class ExchangeCoverage:
    """Tells which slices exchanges make, so that no process makes them by itself too."""

    def __init__(self, exchanges: Iterable[Exchange]) -> None:
        self._receivers: dict[tuple[str, Grid], list[Receivers]] = {}
        for exchange in exchanges:
            key = exchange.parameter.name, exchange.grid
            self._receivers.setdefault(key, []).append(exchange.receivers)

    def receivers(self, parameter: Parameter, grid: Grid) -> Sequence[Receivers]:
        """Return whom exchanges give cells of a tensor, in one destination grid."""
        return self._receivers.get((parameter.name, grid), ())

    def covers(self, parameter: Parameter, grid: Grid, cell: Cell, process: int, file: int) -> bool:
        """Tell whether an exchange makes a cell on a process for a file."""
        return any(
            file in r.get(cell, {}).get(process, ()) for r in self.receivers(parameter, grid)
        )

    def local(self, process: int, transfers: Iterable[Transfer]) -> list[Transfer]:
        """Return those of the process's own transfers that no exchange makes."""
        local_transfers = []
        for transfer in transfers:
            cell, files = next(iter(transfer.targets.items()))
            if not self.covers(transfer.parameter, transfer.grid, cell, process, files[0]):
                local_transfers.append(transfer)
        return local_transfers


def order_transfers(
    process: int,
    separate: Sequence[Transfer],
    exchanges: Sequence[Exchange],
    order: Order | None = None,
) -> list[Transfer]:
    """Return what `process` does, in order, if all `exchanges` are made.

    `separate` is what it would do by itself. What is left of that comes in between its parts in
    exchanges, so that it has something to do while messages are in flight.
    """
    all_transfers = list(separate)
    if order is not None:
        all_transfers.sort(key=lambda transfer: order(transfer.parameter))
    if not exchanges:
        return all_transfers
    local = ExchangeCoverage(exchanges).local(process, all_transfers)
    queue = [(bytes_to_write([transfer]), transfer) for transfer in local]
    placed = [(position, 0, transfer) for position, transfer in interleave(queue)]
    for exchange in exchanges:
        part = exchange.part(process)
        if part is not None:
            placed.append((exchange.position, 1, part))
    return [transfer for *_, transfer in sorted(placed, key=lambda slot: slot[:2])]


@dataclass(frozen=True)
class WorkPlan:
    """What one process has to do, in order."""

    transfers: Sequence[Transfer]
    policy: ReadPolicy
    exchanges: bool  # whether any process sends to another
    memory: int  # bytes for its buffers
    nbytes: int = 0  # that all processes write
    ascending: bool = False  # whether a file's bytes come strictly in their order
    # What brings the operands of its steps first, into memory, where it may not see their files.
    operands: WorkPlan | None = None


CellPair = tuple[Cell, Cell]
"""(source cell, destination cell): the region that both hold."""

Peers = dict[int, list[CellPair]]
"""By process the pieces that go to it, or come from it, in order."""


@dataclass
class Routes:
    """Which pieces one process reads for itself, and exchanges with each other process."""

    read_here: list[CellPair] = field(default_factory=list)  # read for itself
    # sends, recvs: sent by the process that reads them.
    sends: Peers = field(default_factory=dict)
    recvs: Peers = field(default_factory=dict)
    # forwards, forwarded: sent by the process of the same node that received them from another
    # node.
    forwards: Peers = field(default_factory=dict)
    forwarded: Peers = field(default_factory=dict)

    @property
    def read(self) -> list[CellPair]:
        """What is read here, in part for others."""
        return [*self.read_here, *(piece for pieces in self.sends.values() for piece in pieces)]

    @property
    def in_messages(self) -> list[CellPair]:
        """What messages from and to here hold, once for each message."""
        all_peers = (self.sends, self.recvs, self.forwards, self.forwarded)
        return [piece for peers in all_peers for pieces in peers.values() for piece in pieces]


def routes_of(exchange: Exchange) -> dict[int, Routes]:
    """Sort all pieces of an exchange by process."""
    routes_by_process: dict[int, Routes] = {}
    for piece, sender, receiver, first in message_hops(exchange):
        if sender == receiver:
            routes_by_process.setdefault(sender, Routes()).read_here.append(piece)
        elif first == receiver:
            _route(routes_by_process, sender, receiver).sends.setdefault(receiver, []).append(piece)
            routes_by_process[receiver].recvs.setdefault(sender, []).append(piece)
        else:
            _route(routes_by_process, first, receiver).forwards.setdefault(receiver, []).append(
                piece
            )
            routes_by_process[receiver].forwarded.setdefault(first, []).append(piece)
    return routes_by_process


def message_hops(exchange: Exchange) -> Iterator[tuple[CellPair, int, int, int]]:
    """Yield (piece, process that reads it, process that wants it, process that gets it from the
    reader).

    Where several processes of another node want a piece, one of them gets it, and passes it on to
    the others, each in a hop of its own; it comes last.
    """
    src, dst, node = exchange.parameter.grid, exchange.grid, exchange.node
    for turn, (cell, files_by_process) in enumerate(
        sorted(exchange.receivers.items()), exchange.forwarder
    ):
        for number, (src_cell, _) in enumerate(overlaps(src, dst, cell), turn):
            piece = src_cell, cell
            for sender, receivers in _by_sender_and_node(exchange, src_cell, files_by_process):
                if sender in receivers:
                    yield piece, sender, sender, sender
                other_receivers = [process for process in receivers if process != sender]
                if other_receivers and node[other_receivers[0]] != node[sender]:
                    first = other_receivers[number % len(other_receivers)]
                    for other_receiver in other_receivers:
                        if other_receiver != first:
                            yield piece, sender, other_receiver, first
                    other_receivers = [first]
                for other_receiver in other_receivers:
                    yield piece, sender, other_receiver, other_receiver


def _route(routes_by_process: dict[int, Routes], sender: int, receiver: int) -> Routes:
    routes_by_process.setdefault(receiver, Routes())
    return routes_by_process.setdefault(sender, Routes())


def _by_sender_and_node(
    exchange: Exchange, src_cell: Cell, receivers: Collection[int]
) -> Iterable[tuple[int, Sequence[int]]]:
    """Return (sender, processes of one node that get what they want of a source cell from it)."""
    senders, node = exchange.senders[src_cell], exchange.node
    if len(receivers) == 1:
        (process,) = receivers
        return ((senders[process][0], (process,)),)
    processes_by_sender: dict[tuple[int, int], list[int]] = {}
    for process in receivers:
        processes_by_sender.setdefault((senders[process][0], node[process]), []).append(process)
    return [(sender, processes) for (sender, _), processes in processes_by_sender.items()]


class OperandPlan(NamedTuple):
    """What is moved first: what each process gets of `planner`, and what crosses between them."""

    planner: Planner
    assignment: Assignment
    exchanges: Sequence[Exchange]
    reach: Reach


def operand_moves(
    planner: Planner, assignment: Assignment, catalog: Catalog, reach: Reach, method: ReadMethod
) -> OperandPlan | None:
    """Return how processes get the operands that they need if process p writes ``assignment[p]``.

    None: every process sees the files, or no tensor needs an operand. `catalog`, `reach`: of the
    checkpoint that holds the operands. Raises CheckpointError if no file has a needed operand.
    """
    if reach.is_full or not any(any(parameter.steps) for parameter in planner.selection.parameters):
        return None
    names_by_process: list[set[str]] = [set() for _ in assignment]
    for (name, _), pairs in planner.receivers_by_tensor(assignment).items():
        steps = (step for step in planner.parameter(name).steps if step is not None)
        operands = [operand for step in steps for operand in step.operands]
        for process, _ in pairs if operands else ():
            names_by_process[process].update(operands)
    needed_names = set().union(*names_by_process)
    if not needed_names:
        return None
    parameters_by_name = {p.src_name: p for p in catalog.parameters if p.src_name in needed_names}
    selection = Selection(
        parameters_by_name, {}, (), (), {name: (name,) for name in parameters_by_name}
    )
    operand_planner = Planner(catalog, WholeStrategy(), selection)
    positions = {name: position for position, name in enumerate(operand_planner.layouts_of_file(0))}
    runs = [runs_of(0, sorted(positions[name] for name in names)) for names in names_by_process]
    requests = find_exchanges(operand_planner, runs, reach, ReadPolicy(method))
    return OperandPlan(operand_planner, runs, assign_readers(requests, reach), reach)
