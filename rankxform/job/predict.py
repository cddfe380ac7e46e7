"""Predicts what a conversion would take, on the running processes or on a simulated cluster."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from rankxform.errors import UsageError
from rankxform.metrics import peak_memory
from rankxform.planning.assign import assign, assign_within_nodes, share_among_nodes
from rankxform.planning.cost_model import Costs, ReadPolicy
from rankxform.planning.exchange import assign_readers, find_exchanges
from rankxform.planning.operands import operand_moves
from rankxform.planning.reach import Reach
from rankxform.planning.read_method import AUTO, READ_METHODS
from rankxform.planning.simulate import Simulation, simulate_work
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.storage.bandwidth import measure_storage
from rankxform.target.placement import PLACEMENT_AUTO as FOUND_OUT
from rankxform.target.placement import (
    PLACEMENT_NODE,
    PLACEMENT_SHARED,
    hosts_of,
    ranks_to_nodes_in_order,
    writers_of,
)
from rankxform.target.target import Target
from rankxform.transport import Team
from rankxform.transport.nodes import Nodes

from .measure import choose_policy


def predict(
    request: Request,
    source: Source,
    target: Target,
    simulation: Simulation,
    policy: ReadPolicy,
    team: Team,
) -> tuple[float, Costs]:
    """Measure storage on every process at once, and predict how long the move will take.

    Returns the seconds from the finished plan to the last file, and the costs of the slowest.

    `simulation` is what they will do, read by `policy`. The slowest process counts. Writes and
    removes a file of 64 MiB a process.
    """
    speeds = storage_speeds(request, source, target, team)
    costs = policy.costs or Costs()
    seconds = [
        workload.seconds(replace(costs, read=speed.read, write=speed.write))
        for workload, speed in zip(simulation.workloads, speeds)
    ]
    slowest = Costs(min(speed.read for speed in speeds), min(speed.write for speed in speeds))
    return costs.overlapped(max(seconds), max(simulation.network)), slowest


def storage_speeds(request: Request, source: Source, target: Target, team: Team) -> list[Costs]:
    """Measure, by process, how fast source and destination are, all at the same time. Collective.

    Writes and removes a file of 64 MiB a process.
    """
    visible = sorted(source.reach.of(team.rank))
    path = source.paths[visible[team.rank % len(visible)]] if visible else None
    team.barrier()  # so that all measure at the same time
    return team.allgather(lambda: measure_storage(path, target.folder, durable=request.fsync))


def predict_loads(
    request: Request, source: Source, target: Target, processes: int, team: Team
) -> tuple[Simulation, ReadPolicy]:
    """Work out what so many processes would do: those of the team, or others on one node.

    Measures what the choice of a read method depends on. Collective.
    """
    planner, reach = target.planner, source.reach
    assignment = team.agree(lambda: assign(planner, target.files, processes))
    if processes != team.size:
        reach = Reach.full((0,) * processes, source.indexes)
    local_ranges = [
        slice_range
        for process_ranges in assignment[team.rank :: team.size]
        for slice_range in process_ranges
    ]
    visible_files = None if reach.is_full else reach.of(team.rank)
    separate = team.agree(lambda: planner.transfers(local_ranges, visible_files))
    policy, _ = choose_policy(request, source, planner, assignment, separate, team)

    def work_out() -> Simulation:
        requests = find_exchanges(planner, assignment, reach, policy)
        exchanges = assign_readers(requests, reach)
        costs, first = policy.costs or Costs(), None
        if processes == team.size:
            operand_source = target.adapter or source
            first = operand_moves(
                planner, assignment, operand_source.table, operand_source.reach, policy.method
            )
        return simulate_work(planner, assignment, reach, exchanges, costs, policy.method, first)

    return team.agree(work_out), policy


class Cluster(NamedTuple):
    """Processes that need not be there: on so many nodes, each with an equal number.

    src_placement: "shared" if every node sees every source file, "node" if each has those of its
    part of the source ranks.
    """

    processes: int
    nodes: int
    src_placement: str = PLACEMENT_SHARED


def simulate_cluster(
    request: Request, source: Source, target: Target, cluster: Cluster
) -> Simulation:
    """Work out what the processes of a cluster would do.

    The request says where destination files go; "auto" is taken for "shared". The memory is what
    planning takes here, and the buffers. Raises UsageError for numbers that make no sense.
    """
    planner, processes, nodes = target.planner, cluster.processes, cluster.nodes
    if not 0 < nodes <= processes:
        raise UsageError(f"{processes} processes cannot be on {nodes} nodes")
    node = tuple(process * nodes // processes for process in range(processes))
    sources = sorted(source.indexes)
    reach = Reach.full(node, sources)
    if cluster.src_placement == PLACEMENT_NODE:
        home = {file: number * nodes // len(sources) for number, file in enumerate(sources)}
        reach = Reach(node, _by_node(home, nodes))
    placement = request.dst_placement
    destination = _destination(placement, planner.dst.ranks, target.files, node, nodes)
    if destination.is_full and writers_of(request, target) == PLACEMENT_NODE:
        home_of = share_among_nodes(planner, target.files, node)
        destination = Reach(node, _by_node(home_of, nodes))
    assignment = assign_within_nodes(planner, target.files, destination)
    costs, method = request.costs or Costs(), READ_METHODS[request.read_method]
    policy = ReadPolicy(method)
    if request.read_method == AUTO:
        method = method.with_latency(costs.latency_bytes)
        policy = ReadPolicy(method, costs, may_exchange=nodes > 1 and reach.is_full)
    requests = find_exchanges(planner, assignment, reach, policy)
    exchanges = assign_readers(requests, reach)
    planner.transfers(assignment[0])  # so that it counts in the peak memory
    memory = peak_memory() + request.memory
    first = None
    if target.adapter is None:  # one is taken to be where all nodes see it
        first = operand_moves(planner, assignment, source.table, reach, method)
    simulation = simulate_work(planner, assignment, reach, exchanges, costs, method, first)
    return replace(simulation, memory=memory)


def _destination(
    placement: str, all_ranks: int, ranks: tuple[int, ...], node: tuple[int, ...], nodes: int
) -> Reach:
    if placement in (FOUND_OUT, PLACEMENT_SHARED):
        return Reach.full(node, ranks)
    hosts = hosts_of(placement, all_ranks)
    if hosts is None:
        home = ranks_to_nodes_in_order(all_ranks, Nodes(node, tuple(map(str, range(nodes)))))
        return Reach(node, _by_node(home, nodes))
    number = {host: node_number for node_number, host in enumerate(dict.fromkeys(hosts))}
    if len(number) != nodes:
        raise UsageError(f"names {len(number)} hosts, and there are {nodes} nodes", where=placement)
    return Reach(node, _by_node({r: number[h] for r, h in enumerate(hosts)}, nodes))


def _by_node(home: Mapping[int, int], nodes: int) -> tuple[frozenset[int], ...]:
    ranks_by_node: list[set[int]] = [set() for _ in range(nodes)]
    for rank, node in home.items():
        ranks_by_node[node].add(rank)
    return tuple(map(frozenset, ranks_by_node))
