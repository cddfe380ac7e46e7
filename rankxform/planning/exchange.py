"""Which parameters cross between processes, who reads them, and when.

What all nodes see is read by each, unless an exchange is asked for or cheaper; what a process does
not see, another process reads and sends. Every process works out all exchanges, alike, and takes
its part in those that concern it, in one order that is the same for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from rankxform.formats.dtype import item_size
from rankxform.geometry.grid import Cell, Grid, overlaps
from rankxform.values import dataclass

from .assign import Assigner, Assignment, balance
from .catalog import Parameter
from .cost_model import IoEstimate, IoPolicy, estimate_io
from .plan import Planner
from .read_method import ReadMethod
from .sharding import Shared, Targets
from .transfers import (
    Exchange,
    Receivers,
    Senders,
    Transfer,
    bytes_to_write,
)
from .visibility import Processes, Visibility

T = TypeVar("T")

Order = Callable[[Parameter], Any]
"""Where a parameter stands among others, as a key to sort by."""


@dataclass(frozen=True)
class Requirement:
    """The processes that need a source cell, the files with it, and who could read one of them."""

    by: tuple[int, ...]
    files: tuple[int, ...]
    able: Processes


@dataclass(frozen=True, eq=False)
class ExchangeGroup:
    """What the exchanges of all parameters that are sharded alike have in common.

    wanted: by destination cell all processes that write it; needs: by source cell all that need
    some of it; held: by source cell the files that hold it. receivers: the part of `wanted` that
    the exchange serves; own: what these processes read for themselves; required: what others must
    read for them.
    """

    wanted: Receivers
    needs: Mapping[Cell, Mapping[int, None]]
    held: Targets
    receivers: Receivers
    own: Senders
    required: Mapping[Cell, Requirement]


@dataclass(frozen=True)
class ExchangeRequest:
    """An exchange before readers are chosen. replica: which of equal copies is read."""

    parameter: Parameter
    grid: Grid
    replica: int
    group: ExchangeGroup

    def nbytes(self, cell: Cell) -> int:
        return self.parameter.grid.box(cell).size * item_size(self.parameter.src_dtype)


def request_exchanges(
    planner: Planner, assignment: Assignment, visibility: Visibility, policy: IoPolicy
) -> list[ExchangeRequest]:
    """Return what must be exchanged where process p writes ``assignment[p]``.

    A process takes part as a receiver if it needs a file that it does not see; and, if the policy
    weighs costs, if an exchange is cheaper than reading a file that all nodes see on each of them.
    If the policy's method exchanges, each distinct byte is read by one process for all. Raises
    CheckpointError if no file has what is needed.
    """
    may_exchange = policy.method.exchanges or policy.weighed
    if len(assignment) == 1 or (visibility.is_full and not may_exchange):
        return []
    return list(_requests(planner, assignment, visibility, policy))


def bytes_with_choice(requests: Iterable[ExchangeRequest], visibility: Visibility) -> float:
    """Return the bytes to be sent that processes of more than one node could read."""
    node = visibility.node
    amounts = _amounts(requests)
    return sum(nbytes for able, nbytes in amounts.items() if len({node[p] for p in able}) > 1)


def _amounts(requests: Iterable[ExchangeRequest]) -> dict[Processes, float]:
    """Return the bytes that are required, by who could read them."""
    amounts: dict[Processes, float] = {}
    for request in requests:
        for cell, requirement in request.group.required.items():
            nbytes = amounts.get(requirement.able, 0.0) + request.nbytes(cell)
            amounts[requirement.able] = nbytes
    return amounts


def estimate_all(
    planner: Planner, assignment: Assignment, visibility: Visibility, method: ReadMethod
) -> IoEstimate:
    """Return what it comes to if every node reads for itself, and if each byte is read once."""
    known: dict[object, IoEstimate] = {}
    total = IoEstimate()
    for (name, layout), pairs in planner.wanted(assignment).items():
        parameter = planner.parameter(name)
        grid = layout.grid(parameter.shape)
        key = parameter.grid, parameter.src_dtype, layout, pairs
        if key not in known:
            wanted = planner.receivers(layout, pairs)
            known[key] = estimate_io(parameter, grid, wanted, visibility.node, method)
        total += known[key]
    return total


def _requests(
    planner: Planner, assignment: Assignment, visibility: Visibility, policy: IoPolicy
) -> Iterator[ExchangeRequest]:
    known: dict[object, ExchangeGroup | None] = {}
    for (name, layout), every in planner.wanted(assignment).items():
        parameter = planner.parameter(name)
        replica, grid = planner.replica(parameter), layout.grid(parameter.shape)
        for held, pairs in planner.held_alike(parameter, layout, every):
            item = item_size(parameter.src_dtype)
            key = parameter.sharding, item, layout, held, pairs, replica
            if key not in known:
                wanted = planner.receivers(layout, pairs)
                needs = _needs(parameter, grid, wanted)
                for cell in needs:
                    if not held.get(cell):
                        planner.raise_lost(parameter, cell)
                always = policy.method.exchanges
                if policy.weighed and policy.costs and not always:
                    found = estimate_io(parameter, grid, wanted, visibility.node, policy.method)
                    sizes = len(visibility.node), len(visibility.files)
                    always = found.exchange_is_cheaper(policy.costs, *sizes)
                known[key] = _group(wanted, needs, held, replica, visibility, always)
            group = known[key]
            if group is not None:
                yield ExchangeRequest(parameter, grid, replica, group)


def _needs(parameter: Parameter, grid: Grid, wanted: Receivers) -> dict[Cell, dict[int, None]]:
    """Return by source cell the processes that need of it."""
    needs: dict[Cell, dict[int, None]] = {}
    for cell, by in wanted.items():
        for at, _ in overlaps(parameter.grid, grid, cell):
            needs.setdefault(at, {}).update(dict.fromkeys(by))
    return needs


def _group(
    wanted: Receivers,
    needs: Mapping[Cell, Mapping[int, None]],
    held: Targets,
    replica: int,
    visibility: Visibility,
    always: bool,
) -> ExchangeGroup | None:
    """Sort out who receives, who reads for itself, and what is required of others."""
    members = {process for by in wanted.values() for process in by}
    if not always:
        members = {
            process
            for cell, by in needs.items()
            for process in by
            if visibility.of(process).isdisjoint(held[cell])
        }
    if not members:
        return None
    own: Senders = Shared()
    required: dict[Cell, Requirement] = {}
    for cell, by in needs.items():
        needing = [process for process in by if process in members]
        near = {p: [f for f in held[cell] if f in visibility.of(p)] for p in needing}
        if not always:
            own[cell] = {p: (p, files[replica % len(files)]) for p, files in near.items() if files}
            needing = [p for p in needing if not near[p]]
        if needing:
            able = tuple(sorted(p for p in needing if near[p]))
            able = able or visibility.processes_seeing(held[cell])
            required[cell] = Requirement(tuple(needing), held[cell], able)
    return ExchangeGroup(wanted, needs, held, _only(wanted, members), own, required)


def _only(wanted: Receivers, members: set[int]) -> Receivers:
    return Shared(
        {
            cell: mine
            for cell, by in wanted.items()
            if (mine := {process: ranks for process, ranks in by.items() if process in members})
        }
    )


# -- who reads, and when ------------------------------------------------------------------------


def assign_readers(
    requests: Sequence[ExchangeRequest],
    visibility: Visibility,
    speeds: Sequence[float] = (),
    order: Order | None = None,
) -> list[Exchange]:
    """Return the exchanges, with their readers, in the order in which they are made.

    Where several processes could read the same bytes, reading times are balanced by their `speeds`
    (default: equal); see `rankxform.planning.assign.balance`. The forwarder rotates over parameters
    that are sharded alike.
    """
    if order is not None:
        requests = sorted(requests, key=lambda request: order(request.parameter))
    assigner = Assigner(balance(_amounts(requests), speeds or [1.0] * len(visibility.node)))
    known: dict[object, tuple[Receivers, Senders]] = {}
    fan_out: dict[ExchangeGroup, int] = {}
    alike: dict[object, dict[str, int]] = {}  # by name, in their order
    exchanges = []
    for request in requests:
        parameter, group = request.parameter, request.group
        names = alike.setdefault((parameter.sharding, request.grid), {})
        number = names.setdefault(parameter.name, len(names))
        if group not in fan_out:
            fan_out[group] = _max_fan_out(group.receivers, visibility.node)
        chosen = {
            cell: assigner.next(one.able, request.nbytes(cell))
            for cell, one in group.required.items()
        }
        key = group, request.replica, tuple(chosen.values())
        if key not in known:
            known[key] = _with_readers(request, chosen, visibility)
        forwarder = number % fan_out[group]
        exchanges.append(Exchange(parameter, request.grid, *known[key], visibility.node, forwarder))
    return _in_order(exchanges)


def _max_fan_out(receivers: Receivers, node: Sequence[int]) -> int:
    """Return how many processes of one node want the same, at most."""
    return max(max(Counter(node[p] for p in by).values()) for by in receivers.values())


def _with_readers(
    request: ExchangeRequest, chosen: Mapping[Cell, int], visibility: Visibility
) -> tuple[Receivers, Senders]:
    """Return who receives what, and who sends what to whom, or reads it for itself.

    A process that reads for others, and sees all that it needs itself, takes part as a receiver
    too, so that it reads what it needs in the same pass.
    """
    group, senders = request.group, _senders(request, chosen, visibility)
    members = {process for by in group.receivers.values() for process in by}
    more = {
        process
        for process in set(chosen.values()) - members
        if any(process in by for by in group.wanted.values())
    }
    if not more:
        return group.receivers, senders
    for cell, by in group.needs.items():
        for process in more.intersection(by):
            files = [file for file in group.held[cell] if file in visibility.of(process)]
            read = {file for reader, file in senders.get(cell, {}).values() if reader == process}
            file = min(read) if read else files[request.replica % len(files)]
            senders.setdefault(cell, {})[process] = process, file
    return _only(group.wanted, members | more), senders


def _senders(
    request: ExchangeRequest, chosen: Mapping[Cell, int], visibility: Visibility
) -> Senders:
    """Return who sends what to whom, or reads it for itself."""
    senders: Senders = Shared({cell: dict(own) for cell, own in request.group.own.items()})
    for cell, one in request.group.required.items():
        visible = visibility.of(chosen[cell])
        files = [file for file in one.files if file in visible]
        sender = chosen[cell], files[request.replica % len(files)]
        senders.setdefault(cell, {}).update(dict.fromkeys(one.by, sender))
    return senders


def _in_order(exchanges: Sequence[Exchange]) -> list[Exchange]:
    """Order exchanges so that all who read or write have something to do until the end.

    Those of the same readers and receivers stay in their order, and such queues are interleaved in
    proportion to their length.
    """
    queues: dict[object, list[tuple[int, Exchange]]] = {}
    for exchange in exchanges:
        readers = frozenset(p for by in exchange.senders.values() for p, _ in by.values())
        receivers = frozenset(p for by in exchange.receivers.values() for p in by)
        queues.setdefault((readers, receivers), []).append((exchange.nbytes, exchange))
    placed = []
    for number, queue in enumerate(queues.values()):
        for at, (middle, exchange) in enumerate(interleave(queue)):
            placed.append((middle, number, at, exchange))
    placed.sort(key=lambda one: one[:3])
    return [replace(exchange, position=position) for position, *_, exchange in placed]


def interleave(queue: Sequence[tuple[int, T]]) -> Iterator[tuple[float, T]]:
    """Yield (position of the middle, thing) for (bytes, thing); positions are parts of all bytes.

    >>> list(interleave([(1, "a"), (3, "b")]))
    [(0.125, 'a'), (0.625, 'b')]
    """
    total, before = sum(nbytes for nbytes, _ in queue) or 1, 0
    for nbytes, thing in queue:
        yield (before + nbytes / 2) / total, thing
        before += nbytes


class Exchanged:
    """Tells which slices exchanges make, so that no process makes them by itself too."""

    def __init__(self, exchanges: Iterable[Exchange]) -> None:
        self._receivers: dict[tuple[str, Grid], list[Receivers]] = {}
        for exchange in exchanges:
            key = exchange.parameter.name, exchange.grid
            self._receivers.setdefault(key, []).append(exchange.receivers)

    def local(self, process: int, transfers: Iterable[Transfer]) -> list[Transfer]:
        """Return those of the process's own transfers that no exchange makes."""
        return [transfer for transfer in transfers if not self._covers(process, transfer)]

    def _covers(self, process: int, transfer: Transfer) -> bool:
        cell, ranks = next(iter(transfer.targets.items()))
        return any(
            ranks[0] in receivers.get(cell, {}).get(process, ())
            for receivers in self._receivers.get((transfer.parameter.name, transfer.grid), ())
        )


def transfers_of(
    process: int,
    separate: Sequence[Transfer],
    exchanges: Sequence[Exchange],
    order: Order | None = None,
) -> list[Transfer]:
    """Return what `process` does, in order, if all `exchanges` are made.

    `separate` is what it would do by itself. What is left of that comes in between its parts in
    exchanges, so that it has something to do while messages are in flight.
    """
    own = list(separate)
    if order is not None:
        own.sort(key=lambda transfer: order(transfer.parameter))
    if not exchanges:
        return own
    local = Exchanged(exchanges).local(process, own)
    queue = [(bytes_to_write([transfer]), transfer) for transfer in local]
    placed = [(position, 0, transfer) for position, transfer in interleave(queue)]
    for exchange in exchanges:
        part = exchange.part(process)
        if part is not None:
            placed.append((exchange.position, 1, part))
    return [transfer for *_, transfer in sorted(placed, key=lambda one: one[:2])]


@dataclass(frozen=True)
class WorkPlan:
    """What one process has to do, in order. exchanges: whether any process sends to another."""

    transfers: Sequence[Transfer]
    policy: IoPolicy
    exchanges: bool = False
