"""What each process has to do, and how: what reading, sending and copying cost here is measured in
a moment, where something depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from time import perf_counter

from rankxform.engine.file_sink import safetensors_order
from rankxform.planning.catalog import Parameter
from rankxform.planning.cost_model import AUTO, Choice, Costs
from rankxform.planning.demand import both_ways, demand, freedom
from rankxform.planning.exchange import deal, work_of
from rankxform.planning.transfers import Move, Portion, bytes_to_read
from rankxform.storage.bandwidth import Sample, copying, reading_for
from rankxform.storage.index import SAFETENSORS
from rankxform.storage.posix import Tick
from rankxform.transport import Team

from .prepare import Conversion

_WORTH_A_LOOK = 1.05
"""How much more one way must read than the other for a choice to be worth measuring."""

_WORTH_MEASURING = 128 << 20
"""Bytes of a process for which the moment it takes is little."""

_SLOW_CALL = 1e6
_READING_SECONDS = 0.12
_NOISE = 1.5
_TOGETHER = 0.05, 0.3
"""Seconds to read, at least and at most, so that what several nodes share is seen to be shared."""
_BOTH_SECONDS = 0.1
_LETTER, _BAND, _ROUNDS = 2 << 20, 256 << 10, 4


@dataclass(frozen=True)
class Task:
    """What one process has to do, in order. trades: whether any process sends to another."""

    moves: list[Move]
    trades: bool
    choice: Choice


def task(conversion: Conversion, shares: Sequence[Sequence[Portion]], team: Team) -> Task:
    """Return what this process has to do for ``shares``, by process. Collective.

    In the order of the destination files, as far as can be.
    """
    planner, sight = conversion.planner, conversion.sight
    order = _in_safetensors if conversion.format == SAFETENSORS else None
    with team.together():
        alone = planner.moves(shares[team.rank], None if sight.is_full else sight.of(team.rank))
    choice, speeds = choose(conversion, shares, alone, team)
    with team.together():
        drafts = demand(planner, shares, sight, choice)
    if freedom(drafts, sight) < _WORTH_MEASURING * team.size:
        speeds = []
    elif not speeds:
        speeds = _measured_speeds(conversion, team)
    with team.together():
        trades = deal(drafts, sight, _told_apart(speeds), order)
        return Task(work_of(team.rank, alone, trades, order), bool(trades), choice)
    raise AssertionError("together() raises or returns")


def _in_safetensors(parameter: Parameter) -> tuple[int, str]:
    return safetensors_order((parameter.name, parameter.dtype, ()))


def choose(
    conversion: Conversion,
    shares: Sequence[Sequence[Portion]],
    alone: Sequence[Move],
    team: Team,
) -> tuple[Choice, list[float]]:
    """Return how files are read: as was asked for, or by what things cost, given or measured.

    shares: by process; others than the team's are those of one node. alone: what this process
    would do, or some of them, if each read all for itself. Also how fast each process reads, in
    bytes a second, if that was measured. Collective; the same on every process.
    """
    request, sight = conversion.request, conversion.sight
    choice = Choice.of(request.reading)
    if request.reading != AUTO or (request.shapes is not None and request.costs is None):
        return replace(choice, costs=request.costs), []
    here = team.nodes.count > 1 and sight.is_full and len(shares) == team.size
    exchanges = here and _repeats(conversion, shares)
    picks = any(team.gather(lambda: _depends_on_calls(alone)))
    if not exchanges and not picks:
        return replace(choice, costs=request.costs), []
    speeds: list[float] = []
    costs = request.costs
    if costs is None:
        costs, speeds = measured(conversion, team, network=exchanges)
    return Choice(costs.call_bytes, costs, weighed=exchanges), speeds


def _depends_on_calls(alone: Sequence[Move]) -> bool:
    """Tell whether what a read of little costs makes a difference to how much is read."""
    return bytes_to_read(alone, _SLOW_CALL) > _WORTH_A_LOOK * bytes_to_read(alone, 0.0)


def _repeats(conversion: Conversion, shares: Sequence[Sequence[Portion]]) -> bool:
    """Tell whether nodes that read for themselves would read the same rows."""
    found = both_ways(conversion.planner, shares, conversion.sight, _SLOW_CALL)
    return found.each.nbytes > _WORTH_A_LOOK * found.once.nbytes


def _measured_speeds(conversion: Conversion, team: Team) -> list[float]:
    """Return how fast each process reads, in bytes a second; 0 if it sees no file. Collective."""
    paths = conversion.shards.paths
    own = min(conversion.sight.of(team.rank), default=None)
    return team.gather(
        lambda: reading_for(paths[own], _READING_SECONDS) if own is not None else 0.0
    )


def _told_apart(speeds: Sequence[float]) -> list[float]:
    """Let differences that are no more than the measurement's own count as none."""
    known = sorted(speed for speed in speeds if speed)
    usual = known[len(known) // 2] if known else 0.0
    return [usual if speed > usual / _NOISE else max(speed, usual / 1e3) for speed in speeds]


def measured(
    conversion: Conversion, team: Team, *, network: bool = True
) -> tuple[Costs, list[float]]:
    """Read a little on every process, and, with `network`, send and copy a little. Collective.

    With `network`, all processes must see all of the source. Also how fast each process reads, in
    bytes a second; 0 if it sees no file.
    """
    own = sorted(conversion.sight.of(team.rank))
    place = team.rank * len(own) / team.size  # so that no two read the same
    path = conversion.shards.paths[own[int(place)]] if own else None
    with team.together():
        pass  # so that all read at the same time
    with Sample(path, place % 1) if path else nullcontext() as sample:
        found = team.gather(
            lambda: sample.speed(*(_TOGETHER if network else ())) if sample else None
        )
        known = [one for one in found if one is not None]
        speeds = [one.read if one else 0.0 for one in found]
        read, call = sum(speeds) / len(known), sum(one.call for one in known) / len(known)
        if not network:
            return Costs(read, call=call), speeds
        assert sample is not None
        copy = min(team.gather(copying))
        costs = _network(Costs(read, copy=copy, call=call), sample, speeds[team.rank], team)
    return costs, speeds


def _network(costs: Costs, sample: Sample, speed: float, team: Team) -> Costs:
    """Measure what every node sends to the next while it receives, what a letter takes which is
    nearly empty, and how much of that goes on beside reading. Collective.

    speed: of this process, in bytes that it reads a second.
    """
    nodes = team.nodes
    speaks, node = nodes.speaks(team.rank), nodes.of[team.rank]
    mail = team.mail()
    after = nodes.processes[(node + 1) % nodes.count][0]
    before = nodes.processes[node - 1][0]

    out, room = (memoryview(bytearray(b"." * _LETTER)) for _ in range(2))

    def exchange(nbytes: int, tick: Tick, beside: int = 0, rounds: int = _ROUNDS) -> float:
        """Return the mean seconds of some rounds, in each of which `beside` bytes are read too; one
        more comes first, to connect and to begin together."""
        began = 0.0
        for number in range(-1, rounds):
            began = perf_counter() if number == 0 else began
            letters = [mail.receive(before, room[:nbytes]), mail.send(after, out[:nbytes])]
            for _ in range(0, beside if number >= 0 else 0, _BAND):
                sample.more(_BAND)
                mail.poke()
            mail.settle(letters, tick)
        return (perf_counter() - began) / rounds

    def sending(tick: Tick) -> tuple[float, float] | None:
        return (exchange(_LETTER, tick), exchange(1, tick)) if speaks else None

    def both(tick: Tick) -> float | None:
        """Return how much of the shorter of reading and sending the longer hides."""
        if not speaks:
            sample.more(rounds * _LETTER)
            return None
        reading = _LETTER / speed
        seconds = exchange(_LETTER, tick, _LETTER, rounds)
        return min(1.0, max(-1.0, (reading + full - seconds) / min(reading, full)))

    sent = [one for one in team.gather_work(sending) if one is not None]
    full, empty = max(one[0] for one in sent), max(one[1] for one in sent)
    rounds = max(1, min(_ROUNDS, int(_BOTH_SECONDS / (_LETTER / costs.read + full))))
    hidden = [one for one in team.gather_work(both) if one is not None]
    return replace(costs, network=_LETTER / full, letter=empty, overlap=sum(hidden) / len(hidden))
