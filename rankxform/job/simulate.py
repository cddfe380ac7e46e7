"""A conversion by any number of processes on any number of nodes, on paper."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from rankxform.errors import UsageError
from rankxform.planning.assign import share_seen
from rankxform.planning.cost_model import AUTO, Choice, Costs
from rankxform.planning.demand import demand
from rankxform.planning.exchange import deal
from rankxform.planning.simulate import Simulation, simulate
from rankxform.planning.visibility import Sight
from rankxform.transport import Team
from rankxform.transport.nodes import Nodes

from .measure import choose
from .memory import peak_memory
from .placement import AUTO as FOUND_OUT
from .placement import NODE, SHARED, hosts_of, in_order
from .prepare import Conversion

PLACES = (SHARED, NODE)


def on_paper(
    conversion: Conversion, processes: int, nodes: int, src_placement: str = SHARED
) -> Simulation:
    """Work out what `processes` on `nodes` would do, each with an equal number.

    `src_placement`: "shared" if every node sees every source file, "node" if each has those of
    its share of the source ranks. The request says where destination files go; "auto" is taken
    for "shared". The memory is what planning takes here, and the buffers. Raises UsageError for
    numbers that make no sense.
    """
    request = conversion.request
    if not 0 < nodes <= processes:
        raise UsageError(f"{processes} processes cannot be on {nodes} nodes")
    node = tuple(process * nodes // processes for process in range(processes))
    sources = sorted(conversion.indexes)
    sight = Sight.full(node, sources)
    if src_placement == NODE:
        home = {rank: at * nodes // len(sources) for at, rank in enumerate(sources)}
        sight = Sight(node, _by_node(home, nodes))
    shares = share_seen(conversion.planner, conversion.ranks, _destination(conversion, node, nodes))
    costs, choice = request.costs or Costs(), Choice.of(request.reading)
    if request.reading == AUTO:
        choice = Choice(costs.call_bytes, costs, weighed=nodes > 1 and sight.is_full)
    planner = conversion.planner
    trades = deal(demand(planner, shares, sight, choice), sight)
    planner.moves(shares[0])  # what a process keeps beside
    memory = peak_memory() + request.memory
    return replace(simulate(planner, shares, sight, trades, costs, choice.call), memory=memory)


def foreseen(conversion: Conversion, processes: int, team: Team) -> tuple[Simulation, Choice]:
    """Work out what so many processes would do: those of the team, or others on one node.

    Measures what a choice among ways of reading depends on. Collective.
    """
    planner, sight = conversion.planner, conversion.sight
    with team.together():
        shares = conversion.shares(processes)
        if processes != team.size:
            sight = Sight.full((0,) * processes, conversion.indexes)
        mine = [portion for some in shares[team.rank :: team.size] for portion in some]
        alone = planner.moves(mine, None if sight.is_full else sight.of(team.rank))
    choice, _ = choose(conversion, shares, alone, team)
    with team.together():
        trades = deal(demand(planner, shares, sight, choice), sight)
        costs = choice.costs or Costs()
        return simulate(planner, shares, sight, trades, costs, choice.call), choice
    raise AssertionError("together() raises or returns")


def _destination(conversion: Conversion, node: tuple[int, ...], nodes: int) -> Sight:
    placement, ranks = conversion.request.dst_placement, conversion.dst.ranks
    if placement in (FOUND_OUT, SHARED):
        return Sight.full(node, conversion.ranks)
    hosts = hosts_of(placement, ranks)
    if hosts is None:
        home = in_order(ranks, Nodes(node, tuple(map(str, range(nodes)))))
        return Sight(node, _by_node(home, nodes))
    number = {host: at for at, host in enumerate(dict.fromkeys(hosts))}
    if len(number) != nodes:
        raise UsageError(f"{placement}: names {len(number)} hosts, and there are {nodes} nodes")
    return Sight(node, _by_node({r: number[h] for r, h in enumerate(hosts)}, nodes))


def _by_node(home: Mapping[int, int], nodes: int) -> tuple[frozenset[int], ...]:
    found: list[set[int]] = [set() for _ in range(nodes)]
    for rank, at in home.items():
        found[at].add(rank)
    return tuple(map(frozenset, found))
