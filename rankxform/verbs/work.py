"""What each process has to do, and how files are read.

The costs of reading, sending and copying are measured briefly, if a choice depends on them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rankxform.errors import UsageError
from rankxform.formats.container import Container
from rankxform.planning.assign import Assignment
from rankxform.planning.catalog import Parameter
from rankxform.planning.exchange import (
    PendingExchanges,
    WorkPlan,
    assign_readers,
    bytes_with_several_readers,
    estimate_reads,
    find_exchanges,
    operand_moves,
    order_transfers,
)
from rankxform.planning.reads import (
    AUTO,
    READ_METHODS,
    AutoReadMethod,
    Costs,
    ReadPolicy,
    bytes_to_read,
)
from rankxform.planning.transfers import SliceRange, Transfer, bytes_to_write
from rankxform.source.source import Source
from rankxform.target.target import Conversion
from rankxform.transport import Team
from rankxform.transport.team import OnProgress

if TYPE_CHECKING:
    from rankxform.storage.bandwidth import ReadTimer

_WORTH_A_LOOK = 1.05
"""How much more one method must read than another for a choice to be worth measuring."""

_WORTH_MEASURING = 128 << 20
"""Bytes of a process from which on the time to measure is negligible."""

_LATENCIES = AutoReadMethod(0.0), AutoReadMethod(1e6)
"""The read method for a latency of zero, and for a high one."""

_READING_SECONDS = 0.12
_NOISE = 1.5
_TOGETHER = 0.05, 0.3
"""Seconds to read, at least and at most, so that what several nodes share is seen to be shared."""
_BOTH_SECONDS = 0.1
_MESSAGE, _TILE, _ROUNDS = 2 << 20, 256 << 10, 4


def plan_work(
    conversion: Conversion,
    assignment: Assignment,
    team: Team,
    files_at_once: int | None = None,
    *,
    is_ascending: bool = False,
    in_memory: bool = False,
) -> WorkPlan:
    """Return what this process has to do if process p makes ``assignment[p]``. Collective.

    In the order of destination files, as far as can be, and no more than `files_at_once` where
    nothing is exchanged; strictly so if `is_ascending`. in_memory: whether it stays there. Raises
    UsageError where that cannot be.
    """
    at_once = files_at_once or 0  # 0: any number
    source, planner = conversion.source, conversion.planner
    reach, order = source.reach, file_order(conversion.target.container)
    visible = None if reach.is_full else reach.of(team.rank)

    def plan_transfers() -> tuple[WorkPlan | None, list[Transfer]]:
        first = _plan_operands(conversion, assignment, team.rank)
        return first, planner.transfers(assignment[team.rank], visible)

    first, separate = team.agree(plan_transfers)
    request = conversion.request
    memory = request.buffers
    if first is not None:
        # The tiles of an exchange follow from memory, and must be the same on all of its processes.
        operand_bytes = first.nbytes
        memory -= max(team.allgather(lambda: operand_bytes))
        first = replace(first, memory=memory)
    policy, speeds = choose_policy(conversion, assignment, separate, team)
    policy = replace(policy, writing=0.0) if in_memory else policy
    requests, most_files = (
        PendingExchanges((), (), ()),
        max(len({part.file for part in parts}) for parts in assignment),
    )
    exchanges_anyway = READ_METHODS[request.read_method].exchanges or not reach.is_full
    if not is_ascending and (exchanges_anyway or most_files <= at_once):
        at_once = 0
    if not at_once:
        requests = team.agree(lambda: find_exchanges(planner, assignment, reach, policy))
    if bytes_with_several_readers(requests, reach) < _WORTH_MEASURING * team.size:
        speeds = []
    elif not speeds:
        speeds = _measured_speeds(source, team)

    def plan() -> WorkPlan:
        if at_once:
            transfers = _few_files_at_once(conversion, assignment[team.rank], at_once)
            return WorkPlan(transfers, policy, False, memory, ascending=True)
        significant = _significant(speeds) if speeds else ()
        exchanges = assign_readers(requests, reach, significant, order)
        transfers = order_transfers(team.rank, separate, exchanges, order)
        # What fills parts is put in their order, or more of them were open at a time.
        is_in_order = files_at_once is not None and not exchanges
        return WorkPlan(transfers, policy, bool(exchanges), memory, ascending=is_in_order)

    work = team.agree(plan)
    nbytes = sum(team.allgather(lambda: bytes_to_write(work.transfers)))
    exchanges = work.exchanges or (first is not None and first.exchanges)
    return replace(work, nbytes=nbytes, operands=first, exchanges=exchanges)


def _plan_operands(conversion: Conversion, assignment: Assignment, process: int) -> WorkPlan | None:
    """Return what brings a process its operands, where not every process sees their files.

    Raises UsageError where they leave too little memory for the rest.
    """
    request, operand_source = conversion.request, conversion.target.adapter or conversion.source
    policy = ReadPolicy(READ_METHODS[request.read_method])
    moves = operand_moves(
        conversion.planner,
        assignment,
        operand_source.require_catalog(),
        operand_source.reach,
        policy.method,
    )
    if moves is None:
        return None
    separate = moves.planner.transfers(moves.assignment[process], operand_source.reach.of(process))
    transfers = order_transfers(process, separate, moves.exchanges)
    nbytes = bytes_to_write(transfers)
    if nbytes > request.buffers // 2:
        raise UsageError(
            f"process {process} needs {nbytes:,} bytes of factors or adapters, which are whole",
            f"raise --memory to {-(-2 * nbytes >> 20)}M",
            "put their files where all nodes see them",
            details="some of them are on one node only",
        )
    return WorkPlan(transfers, policy, bool(moves.exchanges), request.buffers - nbytes, nbytes)


def _few_files_at_once(
    conversion: Conversion, slice_ranges: Sequence[SliceRange], count: int
) -> list[Transfer]:
    """Return what a process moves if it makes some files after the others, each in its order.

    Raises UsageError where that takes messages of other processes, whose order is their own.
    """
    request = conversion.request
    if READ_METHODS[request.read_method].exchanges:
        raise UsageError(
            f"{request.dst} takes each file from its first byte to its last, and "
            "processes exchange in another order",
            f"leave out --read-method {request.read_method}",
        )
    if not conversion.source.reach.is_full:
        raise UsageError(
            f"{request.dst} takes each file from its first byte to its last, and nodes send in "
            "another order",
            "put the checkpoint where all nodes see it",
        )
    planner, order = conversion.planner, file_order(conversion.target.container)
    of_file: dict[int, list[SliceRange]] = {}
    for slice_range in slice_ranges:
        of_file.setdefault(slice_range.file, []).append(slice_range)
    ranges, transfers = [*of_file.values()], list[Transfer]()
    for first in range(0, len(ranges), count):
        some_ranges = chain.from_iterable(ranges[first : first + count])
        transfers += sorted(planner.transfers(some_ranges), key=lambda t: order(t.parameter))
    return transfers


def file_order(container: Container) -> Callable[[Parameter], Any]:
    """Return the order of parameters in files, as a key to sort by."""
    return lambda parameter: container.order(parameter.name, parameter.dtype)


def choose_policy(
    conversion: Conversion, assignment: Assignment, separate: Sequence[Transfer], team: Team
) -> tuple[ReadPolicy, list[float]]:
    """Return how files are read, and how fast each process reads, if that was measured.

    The method is the one that was asked for, or the cheapest by costs that are given or measured;
    speeds are in bytes a second. assignment: by process; if it is not for as many processes as the
    team has, they are taken to be on one node. separate: the transfers of this process, or some of
    them, if each process reads for itself. Collective; the same on every process.
    """
    request, source, planner = conversion.request, conversion.source, conversion.planner
    reach, method = source.reach, READ_METHODS[request.read_method]
    costs = None if request.costs and request.costs.of_stores_alone else request.costs
    policy = ReadPolicy(method, costs, writing=costs.writing if costs else 1.0)
    imagined = request.shapes is not None and costs is None
    if request.read_method != AUTO or imagined:
        return policy, []
    may_exchange = team.nodes.count > 1 and reach.is_full and len(assignment) == team.size
    exchanges = False  # unless nodes that read for themselves would read the same rows
    if may_exchange:
        estimate = estimate_reads(planner, assignment, reach, _LATENCIES[1])
        exchanges = estimate.separate.nbytes > _WORTH_A_LOOK * estimate.once.nbytes

    def depends_on_latency() -> bool:
        least_bytes, most_bytes = (bytes_to_read(separate, latency) for latency in _LATENCIES)
        return most_bytes > _WORTH_A_LOOK * least_bytes

    if not exchanges and not any(team.allgather(depends_on_latency)):
        return policy, []
    speeds = list[float]()
    if costs is None:
        costs, speeds = measure_costs(source, team, network=exchanges)
    method = method.with_latency(costs.latency_bytes)
    return ReadPolicy(method, costs, exchanges, policy.writing), speeds


def _measured_speeds(source: Source, team: Team) -> list[float]:
    """Return how fast each process reads, in bytes a second; 0 if it sees no file. Collective."""
    from rankxform.storage.bandwidth import measure_reading

    visible_file = min(source.reach.of(team.rank), default=None)
    return team.allgather(
        lambda: (
            measure_reading(source.paths[visible_file], _READING_SECONDS)
            if visible_file is not None
            else 0.0
        )
    )


def _significant(speeds: Sequence[float]) -> list[float]:
    """Set speeds to the median, except those that are lower by more than the measurement noise.

    In bytes a second, by process; none of the result is below a thousandth of the median.

    >>> _significant([4.0, 5.0, 6.0, 1.0, 0.0])
    [5.0, 5.0, 5.0, 1.0, 0.005]
    """
    nonzero_speeds = sorted(speed for speed in speeds if speed)
    usual = nonzero_speeds[len(nonzero_speeds) // 2] if nonzero_speeds else 0.0
    return [usual if speed > usual / _NOISE else max(speed, usual / 1e3) for speed in speeds]


def measure_costs(source: Source, team: Team, *, network: bool = True) -> tuple[Costs, list[float]]:
    """Read a little on every process that sees a file, and, with `network`, send and copy a little.
    Collective.

    Also how fast each process reads, in bytes a second; 0 if it sees no file.
    """
    from rankxform.storage.bandwidth import ReadTimer, measure_copying

    files = sorted(source.reach.of(team.rank))
    number = team.rank * len(files) / team.size  # a file, and a place in it: no other process's
    path, place = (source.paths[files[int(number)]] if files else None), number % 1
    team.barrier()  # so that all read at the same time
    with ReadTimer(path, place) if path else nullcontext() as timer:
        costs_by_process = team.allgather(
            lambda: timer.speed(*(_TOGETHER if network else ())) if timer else None
        )
        measured_costs = [c for c in costs_by_process if c is not None] or [Costs()]
        speeds = [c.read if c else 0.0 for c in costs_by_process]
        read, latency = (
            sum(column) / len(measured_costs)
            for column in zip(*((s.read, s.read_latency) for s in measured_costs))
        )
        if not network:
            return Costs(read, read_latency=latency), speeds
        copy = min(team.allgather(measure_copying))
        costs = Costs(read, copy=copy, read_latency=latency)
        return _network(costs, timer, speeds[team.rank], team), speeds


def _network(costs: Costs, timer: ReadTimer | None, speed: float, team: Team) -> Costs:
    """Measure what every node sends to the next while it receives, the latency of a message, and
    how much of that goes on beside reading. Collective.

    timer: reads a file, if this process sees one. speed: in bytes that it reads a second then.
    """
    nodes = team.nodes
    leader, node = nodes.is_leader(team.rank), nodes.node_of[team.rank]
    p2p = team.p2p()
    after = nodes.processes[(node + 1) % nodes.count][0]
    previous_leader = nodes.processes[node - 1][0]

    send_buffer, room = (memoryview(bytearray(b"." * _MESSAGE)) for _ in range(2))

    def exchange(
        nbytes: int, on_progress: OnProgress, extra_read_bytes: int = 0, rounds: int = _ROUNDS
    ) -> float:
        """Return the mean seconds of some rounds, each of which reads `extra_read_bytes` too.

        One more round comes first, to connect and to begin at once.
        """
        began = 0.0
        for number in range(-1, rounds):
            began = perf_counter() if number == 0 else began
            messages = [
                p2p.receive(previous_leader, room[:nbytes]),
                p2p.send(after, send_buffer[:nbytes]),
            ]
            for _ in range(0, extra_read_bytes if number >= 0 else 0, _TILE):
                if timer is not None:
                    timer.read_more(_TILE)
                p2p.progress()
            p2p.wait_all(messages, on_progress)
        return (perf_counter() - began) / rounds

    def time_messages(on_progress: OnProgress) -> tuple[float, float] | None:
        return (exchange(_MESSAGE, on_progress), exchange(1, on_progress)) if leader else None

    def measure_overlap(on_progress: OnProgress) -> float | None:
        """Return how much of the shorter of reading and sending the longer hides."""
        if not leader:
            if timer is not None:
                timer.read_more(rounds * _MESSAGE)
            return None
        seconds = exchange(_MESSAGE, on_progress, _MESSAGE, rounds)
        if not speed:
            return None
        reading = _MESSAGE / speed
        return min(1.0, max(-1.0, (reading + full - seconds) / min(reading, full)))

    sent = [timing for timing in team.allgather_work(time_messages) if timing is not None]
    full, empty = max(timing[0] for timing in sent), max(timing[1] for timing in sent)
    rounds = max(1, min(_ROUNDS, int(_BOTH_SECONDS / (_MESSAGE / costs.read + full))))
    hidden = [overlap for overlap in team.allgather_work(measure_overlap) if overlap is not None]
    overlap = sum(hidden) / len(hidden) if hidden else costs.overlap
    return replace(costs, network=_MESSAGE / full, latency=empty, overlap=overlap)
