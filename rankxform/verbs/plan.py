"""`plan`, `--dry-run`, `--simulate`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from rankxform.display.text import format_buffer, format_count, format_size, read_and_needed
from rankxform.engine.sinks import part_of
from rankxform.errors import UsageError
from rankxform.formats.container import content_bytes, item_size
from rankxform.layout.names import layers_by_stage
from rankxform.planning.assign import assign, assign_within_nodes, share_among_nodes
from rankxform.planning.exchange import assign_readers, find_exchanges, operand_moves
from rankxform.planning.plan import needed_bytes
from rankxform.planning.reads import (
    AUTO,
    READ_METHODS,
    TWO_PHASE,
    AutoReadMethod,
    Costs,
    ReadPolicy,
)
from rankxform.planning.selection import OmittedParameters
from rankxform.planning.simulate import MethodUse, NodeTraffic, Simulation, simulate_work
from rankxform.planning.transfers import FilePlan, Reach
from rankxform.process import peak_memory
from rankxform.publish.files import LINK_NONE as NO_LINKS
from rankxform.publish.files import status_of_name
from rankxform.request import Request
from rankxform.results import Result
from rankxform.statements import as_warning
from rankxform.storage.bandwidth import measure_storage
from rankxform.storage.posix import free_bytes
from rankxform.storage.store import scheme_of
from rankxform.target.node_folders import PLACEMENT_AUTO as FOUND_OUT
from rankxform.target.node_folders import (
    PLACEMENT_NODE,
    PLACEMENT_SHARED,
    hosts_of,
    ranks_to_nodes_in_order,
    writers_of,
)
from rankxform.target.resolve import resolve
from rankxform.target.target import Conversion
from rankxform.transport import Team
from rankxform.transport.team import Nodes
from rankxform.values import dataclass

from .evidence import with_evidence
from .transform import by_pattern
from .work import choose_policy


def predict(
    conversion: Conversion, simulation: Simulation, policy: ReadPolicy, team: Team
) -> tuple[float, Costs]:
    """Measure storage on every process at once, and predict how long the move will take.

    Returns the seconds from the finished plan to the last file, and the costs of the slowest.

    `simulation` is what they will do, read by `policy`. The slowest process counts. Writes and
    removes a file of 64 MiB a process.
    """
    speeds = storage_speeds(conversion, team)
    costs = policy.costs or Costs()
    seconds = [
        workload.seconds(replace(costs, read=speed.read, write=speed.write))
        for workload, speed in zip(simulation.workloads, speeds)
    ]
    slowest = Costs(min(speed.read for speed in speeds), min(speed.write for speed in speeds))
    return costs.overlapped(max(seconds), max(simulation.network)), slowest


def storage_speeds(conversion: Conversion, team: Team) -> list[Costs]:
    """Measure, by process, how fast source and destination are, all at the same time. Collective.

    Writes and removes a file of 64 MiB a process.
    """
    request, source, target = conversion.request, conversion.source, conversion.target
    visible = sorted(source.reach.of(team.rank))
    path = source.paths[visible[team.rank % len(visible)]] if visible else None
    team.barrier()  # so that all measure at the same time
    return team.allgather(lambda: measure_storage(path, target.folder, durable=request.fsync))


def predict_loads(
    conversion: Conversion, processes: int, team: Team
) -> tuple[Simulation, ReadPolicy]:
    """Work out what so many processes would do: those of the team, or others on one node.

    Measures what the choice of a read method depends on. Collective.
    """
    _, source, target = conversion
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
    policy, _ = choose_policy(conversion, assignment, separate, team)

    def work_out() -> Simulation:
        requests = find_exchanges(planner, assignment, reach, policy)
        exchanges = assign_readers(requests, reach)
        costs, first = policy.costs or Costs(), None
        if processes == team.size:
            operand_source = target.adapter or source
            first = operand_moves(
                planner,
                assignment,
                operand_source.require_catalog(),
                operand_source.reach,
                policy.method,
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


def simulate_cluster(conversion: Conversion, cluster: Cluster) -> Simulation:
    """Work out what the processes of a cluster would do.

    The request says where destination files go; "auto" is taken for "shared". The memory is what
    planning takes here, and the buffers. Raises UsageError for numbers that make no sense.
    """
    request, source, target = conversion.request, conversion.source, conversion.target
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
        first = operand_moves(planner, assignment, source.require_catalog(), reach, method)
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


@dataclass(frozen=True)
class FileSummary:
    """One destination file."""

    rank: int  # the rank whose slices it holds, or the file's id
    file: str | None  # its name; None in rank folders
    writers: tuple[int, ...]  # processes that write it
    parameters: int  # number of its parameters
    copies: int  # number of regions that are copied into it
    bytes_needed: int  # bytes of source files that it needs
    bytes_written: int  # content of its tensors
    bytes_from: Mapping[str, int]  # source rank -> bytes of it


@dataclass(frozen=True, repr=False)
class Plan(Result):
    """A whole plan, for so many `processes`. Sizes are bytes."""

    src: str  # the source, as it was named
    src_ranks: int  # ranks of the source's strategy
    dst_ranks: int  # ranks of the destination's strategy
    processes: int  # number of processes that it is for
    step: str | None  # training step; None: no name declares one
    parameters: int  # number of parameters, optimizer states included
    bytes_needed: int  # distinct bytes of the source
    bytes_read: int  # by all processes
    bytes_sent: int  # from one process to another
    bytes_written: int  # by all processes
    between_nodes: tuple[NodeTraffic, ...]  # part of `bytes_sent`, by pair of nodes
    methods: tuple[MethodUse, ...]  # how files are read
    # Bytes that could be read in the latency of one read; it decides between ranges and whole rows.
    read_latency_bytes: int | None
    buffer_bytes: int  # buffers of each process
    shards: tuple[FileSummary, ...]  # one for each destination file
    left_out: tuple[OmittedParameters, ...]  # parameters that are not written, and why
    absent: tuple[str, ...]  # names that the strategies list and no file holds
    notices: tuple[str, ...]  # what was assumed
    warnings: tuple[str, ...]  # what may be wrong
    # Least that its files take, with equal ones linked; None: no destination was named.
    bytes_stored: int | None = None
    bytes_free: int | None = None  # free at the destination, and taken there by what it replaces
    # "node": processes that write one file must be of one node; or "any".
    written_by: str | None = None
    derivation: Mapping[str, Any] | None = None  # how the destination's strategy was derived
    src_layers: tuple[str, ...] = ()  # for each pipeline stage its layers, such as "0-15"
    dst_layers: tuple[str, ...] = ()  # for each pipeline stage its layers, such as "0-15"

    @property
    def reads_again(self) -> bool:
        """Whether several processes read the same bytes, which they could exchange instead."""
        if self.processes == 1 or self.bytes_read <= 1.05 * self.bytes_needed:
            return False
        return any(use.method != TWO_PHASE for use in self.methods)

    def in_short(self) -> str:
        ranks = f"{self.src_ranks} -> {format_count(self.dst_ranks, 'rank')}"
        tensors = format_count(self.parameters, "tensor")
        return f"{ranks}: {format_size(self.bytes_written)} to write, {tensors}"

    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"before": self.src_layers, "after": self.dst_layers}

    @property
    def fan_in(self) -> tuple[int, int]:
        """From how many source ranks, or files, a file takes bytes, at least and at most."""
        source_counts = [len(shard.bytes_from) for shard in self.shards]
        return min(source_counts, default=0), max(source_counts, default=0)

    def amounts(self) -> dict[str, str]:
        omitted_count = sum(len(omitted.names) for omitted in self.left_out)
        amounts = {
            "read": read_and_needed(self.bytes_read, self.bytes_needed),
            "sent": format_size(self.bytes_sent),
            "processes": f"{self.processes:,}, buffers of {format_buffer(self.buffer_bytes)} each",
        }
        for use in self.methods:
            tensors = format_count(len(use.names), "tensor")
            use_text = f"{tensors}, {format_size(use.bytes_read)}: {use.which}"
            amounts[use.in_words] = use_text
        if self.reads_again:
            amounts["read less"] = f"read_method={TWO_PHASE!r} reads each byte once, and exchanges"
        if self.bytes_free is not None:
            amounts["disk"] = f"{format_size(self.bytes_free)} free"
        if omitted_count:
            amounts["left out"] = format_count(omitted_count, "tensor")
        if self.absent:
            amounts["absent"] = format_count(len(self.absent), "tensor")
        return amounts

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as ``plan --json`` prints it: names by pattern."""
        return {**asdict(self), **by_pattern(self.left_out, self.absent)}


class PlanResult(NamedTuple):
    """A plan, with what it is of; prediction: the seconds that it would take, and the costs of the
    slowest process, if that was measured."""

    conversion: Conversion
    plan: Plan
    prediction: tuple[float, Costs] | None = None


def plan(
    request: Request, team: Team, processes: int | None = None, *, timed: bool = False
) -> PlanResult:
    """Plan for so many processes (None: those of the team). Collective.

    Of the tensors no more is read than a few samples, by which the source's strategy is believed.
    timed: measure storage, and predict how long it takes.
    """
    return plan_target(with_evidence(resolve(request, team), team), team, processes, timed=timed)


def plan_target(
    conversion: Conversion,
    team: Team,
    processes: int | None = None,
    *,
    timed: bool = False,
    with_room: bool = True,
) -> PlanResult:
    """Plan what is made of a source, as `plan` does. Collective.

    with_room: say whether there is room for it, which is no question once it is made.
    """
    simulation, policy = predict_loads(conversion, processes or team.size, team)
    prediction = None
    has_many_nodes = team.nodes.count > 1  # each node may have a folder of its own
    room = None if has_many_nodes or not with_room else team.bcast(lambda: room_of(conversion))
    if room is not None and room.is_short:
        conversion = conversion.with_findings([as_warning(room.in_words)])
    elif timed and conversion.target.dst is not None:
        prediction = predict(conversion, simulation, policy, team)
    written = team.agree(lambda: summarize(conversion, simulation, policy))
    written_by = team.bcast(lambda: writers_of(conversion.request, conversion.target))
    written = replace(written, written_by=written_by)
    if room is not None:
        written = replace(written, bytes_stored=room.needed, bytes_free=room.free)
    return PlanResult(conversion, written, prediction)


class DiskSpace(NamedTuple):
    """The bytes that a destination takes at least, and that are free for it."""

    folder: Path
    needed: int
    free: int

    @property
    def is_short(self) -> bool:
        return self.needed > self.free

    @property
    def in_words(self) -> str:
        return (
            f"{self.folder}: at least {self.needed / 1e6:,.1f} MB are to be written, "
            f"{self.free / 1e6:,.1f} MB are free; make room, or choose another folder"
        )


def room_of(conversion: Conversion) -> DiskSpace | None:
    """Return how much room a destination needs and has; None where it is no folder."""
    request, target = conversion.request, conversion.target
    if target.dst is None or scheme_of(target.dst):
        return None
    planner, files = target.planner, target.files
    stored = files if request.link == NO_LINKS else planner.equal_files(files)
    paths = target.paths.values()
    names = [*map(part_of, paths), *(() if request.overwrite else paths)]
    bytes_by_inode = {
        status.st_ino: status.st_blocks * 512 for path in names if (status := status_of_name(path))
    }
    stored_bytes = 0
    for file in stored:
        stored_bytes += sum(content_bytes(p.dtype, shape) for p, shape in planner.slices(file))
    return DiskSpace(
        target.folder, stored_bytes, free_bytes(target.folder) + sum(bytes_by_inode.values())
    )


def simulate(request: Request, team: Team, cluster: Cluster) -> tuple[Conversion, Simulation]:
    """Plan for a cluster that need not be there; return of what, and what it does. Collective."""
    conversion = resolve(request, team)
    return conversion, team.bcast(lambda: simulate_cluster(conversion, cluster))


def summarize_simulated(conversion: Conversion, simulation: Simulation) -> Plan:
    """Write out the plan of a cluster."""
    method = READ_METHODS[conversion.request.read_method]
    return summarize(conversion, simulation, ReadPolicy(method))


def summarize(conversion: Conversion, simulation: Simulation, policy: ReadPolicy) -> Plan:
    """Write out the plan of a conversion, of which `simulation` is what each process does."""
    request, source, target = conversion.request, conversion.source, conversion.target
    planner, arrangement = target.planner, target.arrangement
    selection, processes = planner.selection, len(simulation.workloads)
    strategy = planner.catalog.strategy
    assignment = assign(planner, target.files, processes)
    plans = [planner.plan(file) for file in target.files]
    writers: dict[int, list[int]] = {}
    for process, slice_ranges in enumerate(assignment):
        for slice_range in slice_ranges:
            writers.setdefault(slice_range.rank, []).append(process)
    method, latency = policy.method, None
    if isinstance(method, AutoReadMethod) and not method.fixed and isfinite(method.latency):
        latency = round(method.latency)
    everything = [planner.whole_file(file) for file in target.files]
    return Plan(
        src=source.where.path,
        src_ranks=planner.catalog.ranks,
        dst_ranks=planner.dst.ranks,
        processes=processes,
        step=source.selected.step_name,
        parameters=len(selection.parameters),
        bytes_needed=needed_bytes(planner, everything),
        bytes_read=sum(workload.read for workload in simulation.workloads),
        bytes_sent=sum(workload.sent + workload.sent_nearby for workload in simulation.workloads),
        bytes_written=sum(plan.nbytes for plan in plans),
        between_nodes=simulation.between,
        methods=simulation.methods,
        read_latency_bytes=latency,
        buffer_bytes=request.memory,
        shards=tuple(
            _summary(
                plan,
                planner.part(plan.rank).rank,
                arrangement.names[plan.rank] if arrangement.parts else None,
                tuple(writers[plan.rank]),
            )
            for plan in plans
        ),
        left_out=selection.left_out,
        absent=selection.absent,
        notices=target.notices,
        warnings=target.warnings,
        derivation=target.derived.facts if target.derived else None,
        src_layers=layers_by_stage(strategy.stages if strategy else ()),
        dst_layers=layers_by_stage(planner.dst.stages),
    )


def _summary(plan: FilePlan, rank: int, file: str | None, writers: tuple[int, ...]) -> FileSummary:
    copies = sum(len(planned_slice.copies) for planned_slice in plan.slices)
    bytes_by_rank = bytes_from(plan)
    bytes_needed = sum(bytes_by_rank.values())
    return FileSummary(
        rank, file, writers, len(plan.slices), copies, bytes_needed, plan.nbytes, bytes_by_rank
    )


def bytes_from(plan: FilePlan) -> dict[str, int]:
    """Return how many bytes of a file come from each source rank."""
    bytes_by_rank: dict[int, int] = {}
    for planned_slice in plan.slices:
        item = item_size(planned_slice.parameter.src_dtype)
        for copy in planned_slice.copies:
            bytes_by_rank[copy.src_rank] = (
                bytes_by_rank.get(copy.src_rank, 0) + copy.box.size * item
            )
    return {str(rank): bytes_by_rank[rank] for rank in sorted(bytes_by_rank)}
