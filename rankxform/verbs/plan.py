"""`plan`, `--dry-run`, `--simulate`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from math import isfinite
from pathlib import Path
from typing import Any

from rankxform.display.text import (
    first_of_ranks,
    format_buffer,
    format_count,
    format_seconds,
    format_size,
    read_and_needed,
)
from rankxform.engine.sinks import part_of
from rankxform.errors import UsageError
from rankxform.layout.names import layers_by_stage, patterns
from rankxform.layout.states import state_of_name
from rankxform.planning.assign import Assignment, Due, Writers, assignment_of
from rankxform.planning.bound import bound_of
from rankxform.planning.budget import MemoryBudget
from rankxform.planning.catalog import Catalog
from rankxform.planning.certificate import PlanProof
from rankxform.planning.exchange import OperandPlan, assign_readers, find_exchanges, operand_moves
from rankxform.planning.plan import Planner, needed_bytes
from rankxform.planning.reads import (
    AUTO,
    LATENCIES,
    OF_STORES,
    RANGES,
    READ_METHODS,
    SHARE,
    SIEVING,
    TWO_PHASE,
    AutoReadMethod,
    Costs,
    ReadPolicy,
)
from rankxform.planning.selection import OmittedParameters
from rankxform.planning.simulate import MethodUse, NodeTraffic, Simulation, simulate_work, spread_of
from rankxform.planning.store_requests import StoreRequests
from rankxform.planning.transfers import Exchange, Reach
from rankxform.planning.upload_parts import UploadMemory
from rankxform.process import peak_memory
from rankxform.publish.files import status_of_name
from rankxform.publish.options import LINK_HARD, WRITERS_NODE
from rankxform.request import Request
from rankxform.results import NORMAL, QUIET, VERBOSE, Result, Section, Table, lines, stage_layers
from rankxform.source.source import PlaceUse
from rankxform.statements import as_warning
from rankxform.storage.bandwidth import MEASURED_BYTES, measure_storage
from rankxform.storage.posix import free_bytes
from rankxform.storage.store import storage_of
from rankxform.target.folder import check_apart, equal_files
from rankxform.target.node_folders import (
    PLACEMENT_NODE,
    PLACEMENT_SHARED,
    expected_writers,
    files_by_node,
    writers_of,
)
from rankxform.target.resolve import resolve
from rankxform.target.target import Conversion
from rankxform.transport import Team
from rankxform.values import NamedTuple, dataclass, no_garbage_collection

from .evidence import with_evidence
from .proof import prove_all
from .transform import omitted
from .work import choose_policy, measure_costs


def predict(conversion: Conversion, work: PredictedWork, team: Team) -> tuple[float, Costs]:
    """Measure storage on every process at once, and the network if bytes cross it, and predict how
    long the move will take. Collective.

    Returns the seconds from the finished plan to the last file, and what was measured on the
    process that takes longest. Writes and removes a file of 64 MiB a process.
    """
    speeds, simulation = measure_speeds(conversion, team), work.simulation
    costs = work.policy.costs or Costs()
    bytes_crossing = max(simulation.network) * simulation.costs.network
    asked_costs = conversion.request.costs
    is_given = asked_costs is not None and not asked_costs.of_stores_alone
    if bytes_crossing and not (work.policy.may_exchange or is_given):
        costs, _ = measure_costs(conversion.source, team)
    seconds = [
        workload.seconds(replace(costs, read=speed.read, write=speed.write))
        for workload, speed in zip(simulation.workloads, speeds)
    ]
    longest = max(range(len(seconds)), key=seconds.__getitem__)
    return costs.overlapped(seconds[longest], bytes_crossing / costs.network), speeds[longest]


def measure_speeds(conversion: Conversion, team: Team) -> list[Costs]:
    """Measure, by process, how fast source and destination are, all at the same time. Collective.

    Writes and removes a file of 64 MiB a process.
    """
    request, source, target = conversion.request, conversion.source, conversion.target
    visible = sorted(source.reach.of(team.rank))
    path = source.paths[visible[team.rank % len(visible)]] if visible else None
    team.barrier()  # so that all measure at the same time
    return team.allgather(lambda: measure_storage(path, target.folder, durable=request.fsync))


class PredictedWork(NamedTuple):
    """What processes would do."""

    assignment: Assignment  # who writes what
    groups: Mapping[int, Sequence[int]]  # by a file that is written those that are links to it
    simulation: Simulation  # what each reads, sends and writes
    policy: ReadPolicy  # how files are read
    reach: Reach  # which process can read which source file
    writers: Writers  # which process may write which destination file
    exchanges: Sequence[Exchange]  # what processes would send each other
    moves: OperandPlan | None  # what brings them their operands first

    def prove(self, planner: Planner) -> PlanProof:
        """Compare what processes would do with what files are to hold. Raises RankxformError."""
        due = Due([*self.groups], {}, self.writers)
        return prove_all(planner, self.reach, due, self.assignment, self.exchanges, self.moves)


def simulate_here(conversion: Conversion, processes: int, team: Team) -> PredictedWork:
    """Work out what so many processes would do: those of the team, or others on one node.

    Measures what the choice of a read method depends on. Collective.
    """
    request, source, target = conversion.request, conversion.source, conversion.target
    planner, reach, node = target.planner, source.reach, team.nodes.node_of
    if processes != team.size:
        node = (0,) * processes
        reach = Reach.full(node, source.indexes)
    writers = team.bcast(lambda: expected_writers(request, target, node))
    groups = linked_files(conversion, writers)
    assignment = team.agree(lambda: assignment_of(planner, [*groups], writers))
    local_ranges = [
        slice_range
        for process_ranges in assignment[team.rank :: team.size]
        for slice_range in process_ranges
    ]
    visible_files = None if reach.is_full else reach.of(team.rank)
    separate = team.agree(lambda: planner.transfers(local_ranges, visible_files))
    policy, _ = choose_policy(conversion, assignment, separate, team)
    operand_source = target.adapter or source
    exchanges = team.agree(
        lambda: assign_readers(find_exchanges(planner, assignment, reach, policy), reach)
    )

    def simulate() -> tuple[OperandPlan | None, Simulation]:
        catalog = operand_source.require_catalog()
        operands = (catalog, operand_source.reach) if processes == team.size else None
        return workloads_of(planner, assignment, reach, policy, exchanges, operands)

    moves, simulation = team.agree(simulate)
    return PredictedWork(assignment, groups, simulation, policy, reach, writers, exchanges, moves)


def linked_files(conversion: Conversion, writers: Writers) -> dict[int, list[int]]:
    """Return which files would be written, each with those that would be hard links to it.

    Whether a file system can share blocks (--link reflink) is found out by a conversion.
    """
    request, target = conversion.request, conversion.target
    if request.link != LINK_HARD:
        return {file: [file] for file in target.files}
    folders = dict.fromkeys(writers.reach.files)
    return equal_files(request, target.planner, target.files, folders)


def workloads_of(
    planner: Planner,
    assignment: Assignment,
    reach: Reach,
    policy: ReadPolicy,
    exchanges: Sequence[Exchange],
    operands: tuple[Catalog, Reach] | None,
) -> tuple[OperandPlan | None, Simulation]:
    """Work out what the process of each assignment does, and which node sends what to which; and
    what brings it its operands first.

    operands: where the tensors are that are brought into memory first.
    """
    moves = operand_moves(planner, assignment, *operands, policy.method) if operands else None
    costs = policy.costs or Costs()
    method = policy.method
    return moves, simulate_work(planner, assignment, reach, exchanges, costs, method, moves)


class Cluster(NamedTuple):
    """Processes that need not be there: on so many nodes, each with an equal number.

    src_placement: "shared" if every node sees every source file, "node" if each has those of its
    part of the source ranks.
    """

    processes: int
    nodes: int
    src_placement: str = PLACEMENT_SHARED


@no_garbage_collection()
def simulate_cluster(conversion: Conversion, cluster: Cluster) -> PredictedWork:
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
        reach = Reach(node, files_by_node(home, nodes))
    writers = expected_writers(request, target, node)
    groups = linked_files(conversion, writers)
    assignment = assignment_of(planner, [*groups], writers)
    costs, method = request.costs or Costs(), READ_METHODS[request.read_method]
    policy = ReadPolicy(method, costs, writing=costs.writing)
    if request.read_method == AUTO:
        method = method.with_latency(costs.latency_bytes)
        may_exchange = nodes > 1 and reach.is_full
        policy = ReadPolicy(method, costs, may_exchange, costs.writing)
    # An adapter is taken to be where all nodes see it.
    operands = None if target.adapter else (source.require_catalog(), reach)
    exchanges = assign_readers(find_exchanges(planner, assignment, reach, policy), reach)
    moves, simulation = workloads_of(planner, assignment, reach, policy, exchanges, operands)
    planner.transfers(assignment[0])  # so that it counts in the peak memory
    simulation = replace(simulation, memory=peak_memory() + request.buffers)
    return PredictedWork(assignment, groups, simulation, policy, reach, writers, exchanges, moves)


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
    predicted_seconds: float | None = None  # of the move, if that was measured
    # How the largest kinds of tensor are sharded: kind and change, in words.
    sharding: tuple[tuple[str, str], ...] = ()
    stage_rows: tuple[tuple[str, ...], ...] = ()  # head and rows of a table, of many ranks
    # What is needed of each place, if there are several.
    places: tuple[PlaceUse, ...] = ()
    requests: StoreRequests | None = None  # to object storage; None: both are folders
    request_costs: Costs | None = None  # what they cost, if that was given
    upload: UploadPlan | None = None  # how object storage is written; None: DST is a folder
    # Bandwidths of the process that takes longest, if they were measured.
    speeds: Costs | None = None
    next: tuple[str, ...] = ()  # the command that does it
    # How many different boxes were compared to prove it; None: that was not asked for.
    boxes_proved: int | None = None

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

    @property
    def fan_in(self) -> tuple[int, int]:
        """From how many source ranks, or files, a file takes bytes, at least and at most."""
        source_counts = [len(shard.bytes_from) for shard in self.shards]
        return min(source_counts, default=0), max(source_counts, default=0)

    json_without = ("sharding", "stage_rows", "speeds", "next", "request_costs")

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as ``plan --json`` prints it: names by pattern."""
        return {**super().as_dict(), "absent": patterns(self.absent)}

    @property
    def is_short(self) -> bool:
        """Whether less is free than the destination takes."""
        return None not in (self.bytes_stored, self.bytes_free) and (
            (self.bytes_stored or 0) > (self.bytes_free or 0)
        )

    @property
    def space(self) -> str:
        """How much room a destination takes, and how much there is, in words."""
        stored_bytes, free = self.bytes_stored, self.bytes_free
        is_least = stored_bytes is not None and stored_bytes < self.bytes_written
        size_text = format_size(self.bytes_written if stored_bytes is None else stored_bytes)
        suffix = f" ({format_size(free)} free)" if free is not None else ""
        return f"{'at least ' if is_least else ''}{size_text}{suffix}"

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield whether there is room and what is needed, and then what is read from whom."""
        suffix = " a process" if self.processes > 1 else ""
        buffers = format_buffer(self.buffer_bytes)
        clauses = [f"needs {self.space}", f"{buffers} of buffers{suffix}"]
        if self.predicted_seconds is not None:
            clauses.append(f"about {format_seconds(self.predicted_seconds)}")
        weights = [name for name in self.absent if state_of_name(name) is None]
        if weights:
            clauses.append(f"{format_count(len(weights), 'weight')} in no file")
        yield lines("NO ROOM" if self.is_short else "fits", ", ".join(clauses))
        if self.boxes_proved is not None:
            yield lines("proved", proof_in_words(self.boxes_proved))
        if self.written_by == WRITERS_NODE:
            yield lines("written", "each file by processes of one node")
        if level > QUIET:
            yield from self._in_detail(level)

    def _memory(self) -> Iterator[str]:
        """Yield what the buffers of a process are for, of the one that writes most files."""
        budget = MemoryBudget.of(self.buffer_bytes, exchanges=self.bytes_sent > 0)
        files = Counter(process for shard in self.shards for process in shard.writers)
        texts = [*budget.in_words(max(files.values(), default=0))]
        if self.upload is not None:
            texts[-1] = f"{format_buffer(self.upload.memory_bytes)} for parts that fill or are sent"
        yield from texts
        yield "beside these: the plan, headers, and what MPI and Python take"

    def _in_detail(self, level: int) -> Iterator[Section]:
        yield stage_layers(self.src_layers, self.dst_layers)
        if self.stage_rows and level < VERBOSE:
            head, *rows = self.stage_rows
            yield Table(head, rows, "")
            yield lines("", "(-v prints a row for each rank)")
        else:
            yield self._shards("" if level == VERBOSE else "ranks")
        if self.sharding:
            texts = ((kind, f"  {change}") for kind, change in self.sharding)
            yield lines("sharded", *chain.from_iterable(texts))
        yield methods_table(self.methods)
        if {use.method for use in self.methods} & {RANGES, SIEVING} and self.read_latency_bytes:
            gap = format_size(self.read_latency_bytes)
            yield lines(
                "ranges", f"are read separately where that saves more than {gap} a read (latency)"
            )
        where = f"each of {self.processes:,} processes" if self.processes > 1 else "one process"
        yield lines(
            "in all",
            f"reads {read_and_needed(self.bytes_read, self.bytes_needed)}; writes "
            f"{format_size(self.bytes_written)}; buffers of at most "
            f"{format_buffer(self.buffer_bytes)} on {where}",
        )
        if self.requests is not None:
            yield lines("requests", self.requests.in_words(self.request_costs))
        if self.upload is not None:
            yield lines("uploads", self.upload.in_words)
        if level == VERBOSE:
            yield lines("memory", *self._memory())
        if self.places:
            yield lines("places", *(place.in_words for place in self.places))
        if self.reads_again:
            yield lines("read less", f"--read-method {TWO_PHASE} reads each byte once")
        yield from omitted(self.left_out, self.absent, level)
        yield from self.notes()
        if self.speeds is not None and self.predicted_seconds is not None:
            yield lines(
                "time",
                f"the move would take about {format_seconds(self.predicted_seconds)}: the "
                f"busiest process reads {format_size(self.speeds.read)}/s and writes "
                f"{format_size(self.speeds.write)}/s, measured with "
                f"{format_buffer(MEASURED_BYTES)}",
            )
        if self.next:
            yield lines("next", *self.next)

    def _shards(self, noun: str) -> Table:
        """Return a row for each file."""
        first = "file" if any(shard.file for shard in self.shards) else "rank"
        titles = (first, "process", "tensors", "copies", "needs", "writes", "from source")
        rows = [
            (
                r.file or r.rank, first_of_ranks(r.writers), r.parameters, r.copies,
                format_size(r.bytes_needed), format_size(r.bytes_written),
                first_of_ranks([*map(int, r.bytes_from)]),
            )
            for r in self.shards
        ]  # fmt: skip
        return Table(titles, rows, noun)


def proof_in_words(boxes: int) -> str:
    """Say of a plan that was proved what that means."""
    return (
        f"each element of each file comes from its place, and once ({boxes:,} different boxes "
        "were compared by sums)"
    )


def methods_table(methods: Iterable[MethodUse]) -> Table:
    """Return how source files are read."""
    rows = [
        (use.in_words, f"{len(use.names):,}", format_size(use.bytes_read), use.which)
        for use in methods
    ]
    return Table(("how files are read", "tensors", "reads", "which"), rows)


def plan(
    request: Request,
    team: Team,
    processes: int | None = None,
    *,
    timed: bool = False,
    proves: bool = False,
) -> tuple[Conversion, Plan]:
    """Plan for so many processes (None: those of the team). Collective.

    Of the tensors a few samples are read, by which the source's strategy is believed.
    timed: measure storage, and predict how long it takes. proves: compare what processes would do
    with what files are to hold.
    """
    conversion = with_evidence(resolve(request, team), team)
    return plan_target(conversion, team, processes, timed=timed, proves=proves)


def plan_target(
    conversion: Conversion,
    team: Team,
    processes: int | None = None,
    *,
    timed: bool = False,
    with_room: bool = True,
    proves: bool = False,
) -> tuple[Conversion, Plan]:
    """Plan what is made of a source, as `plan` does. Collective.

    with_room: say whether there is room for it, which is no question once it is made. proves: prove
    it.
    """
    target = conversion.target
    if with_room and target.in_folder and target.dst is not None:
        request, leads = conversion.request, team.nodes.is_leader(team.rank)
        team.agree(lambda: check_apart(request, conversion.source, target) if leads else None)
    work = simulate_here(conversion, processes or team.size, team)
    prediction = None
    has_many_nodes = team.nodes.count > 1  # each node may have a folder of its own
    room = None if has_many_nodes or not with_room else team.bcast(lambda: room_of(conversion))
    if room is not None and room.is_short:
        conversion = conversion.with_findings([as_warning(room.in_words)])
    elif timed and conversion.target.in_folder:
        prediction = predict(conversion, work, team)
    written = team.agree(lambda: summarize(conversion, work))
    written_by = team.bcast(lambda: writers_of(conversion.request, conversion.target))
    written = replace(written, written_by=written_by)
    if room is not None:
        written = replace(written, bytes_stored=room.needed, bytes_free=room.free)
    written = _in_storage(written, work, conversion)
    if proves:
        proof = team.bcast(lambda: work.prove(conversion.planner))
        written = replace(written, boxes_proved=proof.boxes)
    if prediction is not None:
        written = replace(written, predicted_seconds=prediction[0], speeds=prediction[1])
    return conversion, written


class UploadPlan(NamedTuple):
    """What a destination in object storage takes of the process that writes most files."""

    part_bytes: int  # of the smallest parts
    memory_bytes: int  # for parts that fill, or are sent
    files_at_once: int  # that a process fills at a time
    most_files: int  # that a process writes

    @property
    def in_words(self) -> str:
        counts = f"{self.files_at_once} of {self.most_files}"
        order = f"; a process writes {counts} files at a time"
        order = order if self.files_at_once < self.most_files else ""
        return (
            f"in parts of {format_buffer(self.part_bytes)} at least; "
            f"{format_buffer(self.memory_bytes)} of the buffers for parts{order}"
        )


def _in_storage(written: Plan, work: PredictedWork, conversion: Conversion) -> Plan:
    """Return a plan with what object storage is asked, where source or destination are there."""
    request, target = conversion.request, conversion.target
    is_read = not storage_of(request.src).has_folders
    is_written = target.dst is not None and not target.in_folder
    if not is_read and not is_written:
        return written
    files = Counter(process for shard in written.shards for process in shard.writers)
    most_files = max(files.values(), default=0)
    memory = UploadMemory.of(request.buffers, most_files)
    bytes_by_file = [shard.bytes_written for shard in written.shards]
    requests = StoreRequests.of(work.simulation, bytes_by_file, memory)
    upload = UploadPlan(memory.part_bytes, memory.nbytes, memory.files, most_files)
    return replace(
        written,
        requests=StoreRequests(requests.reads * is_read, requests.writes * is_written),
        request_costs=request.costs,
        upload=upload if is_written else None,
    )


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
    if not target.in_folder:
        return None
    planner, files = target.planner, target.files
    stored = equal_files(request, planner, files, [files])
    paths = target.paths.values()
    names = [*map(part_of, paths), *(() if request.overwrite else paths)]
    bytes_by_inode = {
        status.st_ino: status.st_blocks * 512 for path in names if (status := status_of_name(path))
    }
    free = free_bytes(target.folder) + sum(bytes_by_inode.values())
    return DiskSpace(target.folder, sum(map(planner.content_bytes, stored)), free)


@dataclass(frozen=True, repr=False)
class SimulationResult(Result):
    """What a cluster would do. Sizes are bytes; `workloads` and what sums them up have their keys
    by what is counted."""

    src: str  # the source, as it was named
    step: str | None  # training step; None: no name declares one
    processes: int  # number of processes
    nodes: int  # number of nodes
    src_ranks: int  # ranks of the source's strategy
    dst_ranks: int  # ranks of the destination's strategy
    src_placement: str  # where source files are
    dst_placement: str  # where destination files go
    read_method: str  # as it was asked for
    methods: tuple[MethodUse, ...]  # how files are read
    costs: Mapping[str, float]  # those that were assumed
    predicted_seconds: float  # from the finished plan to the last file
    # What no other division of the work could be faster than, and what is busy for so long.
    bound_seconds: float
    bound_by: str
    balance: float  # `bound_seconds` over `predicted_seconds`
    seconds_of_processes: tuple[float, ...]  # what each process would take by itself
    seconds_of_networks: tuple[float, ...]  # of each node
    between_nodes: tuple[NodeTraffic, ...]  # by pair of nodes
    workloads: tuple[Mapping[str, int], ...]  # by process
    least: Mapping[str, float]  # of a process
    mean: Mapping[str, float]  # of a process
    largest: Mapping[str, float]  # of a process
    buffer_bytes: int  # buffers of each process
    peak_memory_bytes: int  # of a process, without MPI's
    # To object storage, if source and destination are there.
    requests: StoreRequests
    notices: tuple[str, ...]  # what was assumed
    warnings: tuple[str, ...]  # what may be wrong
    # How many different boxes were compared to prove it; None: that was not asked for.
    boxes_proved: int | None = None

    def in_short(self) -> str:
        nodes = format_count(self.nodes, "node")
        return f"about {format_seconds(self.predicted_seconds)} on {nodes}"

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield how long it takes, and what processes read, send and write."""
        busiest, network = max(self.seconds_of_processes), max(self.seconds_of_networks)
        yield lines(
            "time",
            f"about {format_seconds(self.predicted_seconds)}: the busiest process "
            f"{format_seconds(busiest)}, the busiest node's network {format_seconds(network)}",
        )
        bound = f"bound {format_seconds(self.bound_seconds)}, {self.bound_by}"
        yield lines("balance", f"{self.balance:.0%}: {bound}")
        if self.boxes_proved is not None:
            yield lines("proved", proof_in_words(self.boxes_proved))
        if level > QUIET:
            places = f"source {self.src_placement}, destination {self.dst_placement}"
            yield lines("on", f"{format_count(self.nodes, 'node')}; {places}")
            head = ("of a process", "least", "mean", "largest", "over mean", "all")
            yield Table(head, [*map(self._row, self.least)])
            yield methods_table(self.methods)
            slices = [workload["slices"] for workload in self.workloads]
            if idle := slices.count(0):
                many = f"{idle:,} of {len(slices):,} processes write nothing"
                reason = (
                    f"{sum(slices):,} slices are shared out by bytes, each whole to one process"
                )
                yield lines("idle", f"{many}: {reason}")
            if any(self.costs[name] for name in OF_STORES):
                yield lines("requests", self.requests.in_words(Costs(**self.costs)))
            texts = {
                name: f"{name} {value:.0%}"
                if name == SHARE
                else f"{name} {format_seconds(value)}"
                if name in LATENCIES
                else f"{name} {format_size(value)}/s"
                for name, value in self.costs.items()
                if name not in OF_STORES
            }
            of_node = texts.pop("network")
            yield lines("if", f"of a process {', '.join(texts.values())}; of a node {of_node}")
            buffers = (
                f"{format_buffer(self.buffer_bytes)} of buffers, the rest plan, headers and Python"
            )
            peak = format_size(self.peak_memory_bytes)
            yield lines("memory", f"{peak} a process at most, {buffers}; MPI's own is not counted")
            yield from self.notes()

    def _row(self, name: str) -> tuple[str, ...]:
        least, mean, largest = self.least[name], self.mean[name], self.largest[name]
        show = "{:,.0f}".format if name in _COUNTS else format_size
        total = sum(workload[name] for workload in self.workloads)
        times = f"{largest / mean:.2f}" if mean else ""
        return _TITLES[name], show(least), show(mean), show(largest), times, show(total)


_COUNTS = ("reads", "messages", "slices")
_TITLES = {
    "bytes_read": "read from files",
    "bytes_sent": "sent to other nodes",
    "bytes_sent_nearby": "sent on its node",
    "bytes_received": "received from other nodes",
    "bytes_received_nearby": "received on its node",
    "bytes_written": "written",
    "reads": "reads, at least",
    "messages": "messages, at least",
    "slices": "slices",
}


def simulate(
    request: Request, team: Team, cluster: Cluster, *, proves: bool = False
) -> tuple[Conversion, PredictedWork, SimulationResult]:
    """Work out what a cluster that need not be there would do: of what, and in sum. Collective.

    proves: compare that with what files are to hold.
    """
    conversion = resolve(request, team)
    return conversion, *team.bcast(lambda: _simulated(conversion, cluster, proves))


def _simulated(
    conversion: Conversion, cluster: Cluster, proves: bool
) -> tuple[PredictedWork, SimulationResult]:
    work = simulate_cluster(conversion, cluster)
    simulation = work.simulation
    request, source, target = conversion.request, conversion.source, conversion.target
    planner, costs = target.planner, request.costs or Costs()
    names = {n: n if n in _COUNTS else f"bytes_{n}" for n in vars(simulation.workloads[0])}
    bytes_by_file = [planner.content_bytes(file) for file in work.groups]
    memory = UploadMemory.of(request.buffers, -(-len(bytes_by_file) // cluster.processes))
    requests = StoreRequests.of(simulation, bytes_by_file, memory)
    spread = {names[n]: three for n, three in spread_of(simulation.workloads).items()}
    predicted_seconds = max(simulation.total, requests.seconds(costs))
    bound = bound_of(planner, work.assignment, work.reach, work.writers, costs)
    least, mean, largest = ({n: three[i] for n, three in spread.items()} for i in range(3))
    outcome = SimulationResult(
        src=source.where.path,
        step=source.selected.step_name,
        processes=cluster.processes,
        nodes=cluster.nodes,
        src_ranks=planner.catalog.ranks,
        dst_ranks=planner.dst.ranks,
        src_placement=cluster.src_placement,
        dst_placement=request.dst_placement,
        read_method=request.read_method,
        methods=simulation.methods,
        costs=vars(costs),
        predicted_seconds=predicted_seconds,
        bound_seconds=bound.seconds,
        bound_by=bound.resource,
        balance=bound.seconds / predicted_seconds if predicted_seconds else 1.0,
        seconds_of_processes=simulation.seconds,
        seconds_of_networks=simulation.network,
        between_nodes=simulation.between,
        workloads=tuple(
            {names[n]: value for n, value in vars(w).items()} for w in simulation.workloads
        ),
        least=least,
        mean=mean,
        largest=largest,
        buffer_bytes=request.buffers,
        peak_memory_bytes=simulation.memory,
        requests=requests,
        notices=target.notices,
        warnings=target.warnings,
        boxes_proved=work.prove(planner).boxes if proves else None,
    )
    return work, outcome


def summarize(conversion: Conversion, work: PredictedWork) -> Plan:
    """Write out the plan of a conversion, of which `work` is what each process does."""
    request, source, target = conversion.request, conversion.source, conversion.target
    assignment, groups, simulation, policy, *_ = work
    planner, arrangement = target.planner, target.arrangement
    selection, processes = planner.selection, len(simulation.workloads)
    strategy = planner.catalog.strategy
    totals = planner.file_totals(target.files)
    writers: dict[int, list[int]] = {}
    for process, slice_ranges in enumerate(assignment):
        for slice_range in slice_ranges:
            for file in groups[slice_range.file]:
                writers.setdefault(file, []).append(process)
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
        bytes_written=sum(totals[file].written for file in groups),
        between_nodes=simulation.between,
        methods=simulation.methods,
        read_latency_bytes=latency,
        buffer_bytes=request.buffers,
        shards=tuple(
            FileSummary(
                planner.content_of_file(file).rank,
                arrangement.names[file] if arrangement.parts else None,
                tuple(writers[file]),
                total.slices,
                total.copies,
                sum(total.read_by_rank.values()),
                total.written,
                {str(rank): total.read_by_rank[rank] for rank in sorted(total.read_by_rank)},
            )
            for file, total in totals.items()
        ),
        left_out=selection.left_out,
        absent=selection.absent,
        notices=target.notices,
        warnings=target.warnings,
        derivation=target.derived.facts if target.derived else None,
        src_layers=layers_by_stage(strategy.stages if strategy else ()),
        dst_layers=layers_by_stage(planner.dst.stages),
        places=source.places_used(planner, everything),
    )
