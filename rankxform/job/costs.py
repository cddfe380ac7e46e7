"""What reading, sending and copying cost here, measured in a moment."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

from rankxform.execution.files import Tick
from rankxform.execution.recipes import AUTO
from rankxform.execution.speed import copying, reading, reading_for
from rankxform.planning.costs import Costs
from rankxform.planning.moves import Portion
from rankxform.planning.trades import both_ways, freedom
from rankxform.transport import Team

from .prepare import Conversion

_REPEATED = 1.05
"""How often nodes must read the same bytes for a choice to be worth measuring."""

_WORTH_MEASURING = 128 << 20
"""Bytes of a process for which the moment it takes is little."""

_READING_SECONDS = 0.12
_NOISE = 1.5
_READ, _LETTER = 16 << 20, 4 << 20
_ROUNDS = 2


def costs_of(
    conversion: Conversion, shares: Sequence[Sequence[Portion]], team: Team
) -> Costs | None:
    """Return what bytes cost, if there is something to choose: given, or else measured.

    Collective; the same on every process.
    """
    request, sight = conversion.request, conversion.sight
    if request.reading != AUTO or team.nodes.count == 1 or not sight.is_full:
        return None
    found = both_ways(conversion.planner, shares, sight)
    if found.each <= _REPEATED * found.once:
        return None
    given = request.bandwidth
    return given.costs(team.size) if given else measured(conversion, team)


def speeds_of(
    conversion: Conversion,
    shares: Sequence[Sequence[Portion]],
    team: Team,
    costs: Costs | None,
) -> list[float]:
    """Return how fast each process reads, if there is a choice among nodes; else nothing.

    Collective. Differences that are no more than the measurement's own count as none.
    """
    sight = conversion.sight
    if team.nodes.count == 1 or (sight.is_full and costs is None):
        return []
    if freedom(conversion.planner, shares, sight, costs) < _WORTH_MEASURING * team.size:
        return []
    paths = conversion.shards.paths
    own = min(sight.of(team.rank), default=None)
    speeds = team.gather(
        lambda: reading_for(paths[own], _READING_SECONDS) if own is not None else 0.0
    )
    known = sorted(speed for speed in speeds if speed)
    usual = known[len(known) // 2]
    return [usual if speed > usual / _NOISE else max(speed, usual / 1e3) for speed in speeds]


def measured(conversion: Conversion, team: Team) -> Costs:
    """Read, send and copy a little on every process."""
    paths = list(conversion.shards.paths.values())
    place = team.rank * len(paths) / team.size  # so that no two read the same
    path = paths[int(place)]
    with team.together():
        pass  # so that all read at the same time
    read = sum(team.gather(lambda: reading(path, _READ, place % 1)))
    copy = min(team.gather(copying))
    return Costs(read, _network(team), copy)


def _network(team: Team) -> float:
    """Return the bytes a second that every node sends to the next while it receives."""
    nodes, mail = team.nodes, team.mail()
    speaks, node = nodes.speaks(team.rank), nodes.of[team.rank]
    out, room = memoryview(bytearray(_LETTER)), memoryview(bytearray(_LETTER))
    after = nodes.processes[(node + 1) % nodes.count][0]
    before = nodes.processes[node - 1][0]

    def exchange(tick: Tick) -> float:
        if not speaks:
            return 0.0
        best = 0.0
        for _ in range(_ROUNDS):
            began = perf_counter()
            requests = [mail.receive(before, room), mail.send(after, out)]
            mail.settle(requests, tick)
            best = max(best, _LETTER / (perf_counter() - began))
        return best

    return min(speed for speed in team.gather_work(exchange) if speed)
