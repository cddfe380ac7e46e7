"""A conversion by any number of processes on any number of nodes, on paper."""

from __future__ import annotations

from collections.abc import Mapping

from rankxform.errors import UsageError
from rankxform.execution.recipes import EXCHANGE
from rankxform.planning.costs import Bandwidth
from rankxform.planning.sharing import share_seen
from rankxform.planning.sight import Sight
from rankxform.planning.simulate import Simulation, simulate
from rankxform.transport.nodes import Nodes

from .placement import AUTO, NODE, SHARED, hosts_of, in_order
from .prepare import Conversion

PLACES = (SHARED, NODE)


def on_paper(
    conversion: Conversion, processes: int, nodes: int, src_placement: str = SHARED
) -> Simulation:
    """Work out what `processes` on `nodes` would do, each with an equal number.

    `src_placement`: "shared" if every node sees every source file, "node" if each has those of
    its share of the source ranks. The request says where destination files go; "auto" is taken
    for "shared". Raises UsageError for numbers that make no sense.
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
    return simulate(
        conversion.planner,
        shares,
        sight,
        request.bandwidth or Bandwidth(),
        always=request.reading == EXCHANGE,
    )


def _destination(conversion: Conversion, node: tuple[int, ...], nodes: int) -> Sight:
    placement, ranks = conversion.request.dst_placement, conversion.dst.ranks
    if placement in (AUTO, SHARED):
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
