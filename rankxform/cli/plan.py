"""The verb ``plan``, for the running processes or for a simulated cluster."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from rankxform.display.text import (
    first_of_ranks,
    format_buffer,
    format_seconds,
    format_size,
    labelled_lines,
    read_and_needed,
    short_table,
    table,
)
from rankxform.errors import UsageError
from rankxform.planning.reads import LATENCIES, RANGES, SHARE, SIEVING, TWO_PHASE, Costs
from rankxform.publish.options import WRITERS_NODE
from rankxform.storage.bandwidth import MEASURED_BYTES
from rankxform.transport import Team

from .options import Parsed
from .screen import Screen, header, left_out, notice_lines, warning_lines

if TYPE_CHECKING:
    from rankxform.planning.simulate import MethodUse, Simulation
    from rankxform.request import Request
    from rankxform.target.target import Conversion
    from rankxform.verbs.picture import FlowMatrix, TensorKind
    from rankxform.verbs.plan import Cluster, Plan, PlanResult


def run(options: Parsed, team: Team) -> int:
    """Plan; of ``transform --dry-run`` too, which predicts how long it takes."""
    from rankxform.verbs.plan import plan

    screen = Screen(options, team)
    request = screen.request()
    if getattr(options, "simulate", None):
        return _simulate(request, options, team, screen)
    if getattr(options, "nodes", None) or getattr(options, "src_placement", None):
        raise UsageError("--nodes and --src-placement are for --simulate P")
    processes = getattr(options, "processes", None)
    planned = plan(request, team, processes, timed=options.verb == "transform")
    predicted = planned.prediction[0] if planned.prediction else None
    team.bcast(lambda: _write_page(options, planned.conversion, planned.plan, predicted=predicted))
    screen.result("plan", partial(_facts, planned), partial(_table, planned, screen))
    return 0


def _simulate(request: Request, options: Parsed, team: Team, screen: Screen) -> int:
    from rankxform.target.node_folders import PLACEMENT_SHARED
    from rankxform.verbs.plan import Cluster, simulate, summarize_simulated

    processes = options.simulate
    nodes = options.nodes or -(-processes // 8)
    cluster = Cluster(processes, nodes, options.src_placement or PLACEMENT_SHARED)
    conversion, simulation = simulate(request, team, cluster)
    facts = cache(partial(_simulation_facts, conversion, cluster, simulation))

    def write() -> None:
        plan = summarize_simulated(conversion, simulation)
        _write_page(options, conversion, plan, simulated=facts())

    if options.report:
        team.bcast(write)
    screen.result("simulation", facts, lambda: _simulation_table(conversion, simulation, facts()))
    return 0


def _write_page(options: Parsed, conversion: Conversion, plan: Plan, **outcome: Any) -> None:
    if options.report:
        from .page import write_page

        write_page(options, conversion, plan, **outcome)


# -- planned --------------------------------------------------------------------------------------

COUNTS = ("reads", "messages", "slices")
NAMES = {
    "read": "read from files",
    "sent": "sent to other nodes",
    "sent_nearby": "sent on its node",
    "received": "received from other nodes",
    "received_nearby": "received on its node",
    "written": "written",
    "reads": "reads, at least",
    "messages": "messages, at least",
    "slices": "slices",
}


def _facts(planned: PlanResult) -> dict[str, Any]:
    """Return a plan for JSON, with the time it would take if that is known."""
    prediction = planned.prediction
    return {**planned.plan.as_dict(), "predicted_seconds": prediction[0] if prediction else None}


def _table(planned: PlanResult, screen: Screen) -> str:
    """Write a plan for people; of many ranks by stage."""
    from rankxform.verbs.picture import byte_flow, kinds, kinds_to_draw

    conversion, plan, prediction = planned
    source, target = conversion.source, conversion.target
    verdict = _verdict(plan, prediction)
    head = header(conversion, plan.processes, verdict)
    head = "\n".join(verdict) if screen.is_quiet else head
    between, verbose = byte_flow(plan, target), screen.is_verbose
    by_stage = between.row == "stage" and not verbose
    lines = [
        head,
        *([] if screen.is_quiet else screen.defaults()),
        "",
        _stages_table(between) if by_stage else _shards_table(plan, verbose),
        "",
        *_sharding(kinds_to_draw(kinds(target))[0]),
        methods_table(plan.methods),
    ]
    if {use.method for use in plan.methods} & {RANGES, SIEVING} and plan.read_latency_bytes:
        gap = format_size(plan.read_latency_bytes)
        lines.append(
            f"Ranges are read separately where that saves more than {gap} a read (its latency)."
        )
    processes = plan.processes
    lines += [
        "",
        labelled_lines(
            "in all",
            f"reads {read_and_needed(plan.bytes_read, plan.bytes_needed)}; writes "
            f"{format_size(plan.bytes_written)}; buffers of at most "
            f"{format_buffer(plan.buffer_bytes)} on "
            + (f"each of {processes:,} processes" if processes > 1 else "one process"),
        ),
    ]
    if plan.reads_again:
        lines.append(labelled_lines("read less", f"--read-method {TWO_PHASE} reads each byte once"))
    lines += left_out(plan.left_out, plan.absent, verbose)
    lines += notice_lines(plan.notices)
    if prediction:
        expected, slowest = prediction
        text = (
            f"the move would take about {format_seconds(expected)}: the slowest process reads "
            f"{format_size(slowest.read)}/s and writes {format_size(slowest.write)}/s, measured "
            f"with {format_buffer(MEASURED_BYTES)}"
        )
        lines.append(labelled_lines("time", text))
    if target.dst is not None and source.paths and not _is_short(plan):
        run = screen.command("transform", without=("--dry-run",))
        timed = [] if prediction else ["with --dry-run: how long that would take, measured"]
        lines.append(labelled_lines("next", run, *timed))
    return "\n".join(lines + warning_lines(plan.warnings))


def _is_short(plan: Plan) -> bool:
    return None not in (plan.bytes_stored, plan.bytes_free) and (
        (plan.bytes_stored or 0) > (plan.bytes_free or 0)
    )


def _verdict(plan: Plan, prediction: tuple[float, Costs] | None) -> list[str]:
    """Say whether there is room, what is needed, what is missing, and whose processes write."""
    suffix = " a process" if plan.processes > 1 else ""
    clauses = [
        f"needs {describe_space(plan)}",
        f"{format_buffer(plan.buffer_bytes)} of buffers{suffix}",
    ]
    if prediction:
        clauses.append(f"about {format_seconds(prediction[0])}")
    if plan.absent:
        clauses.append(f"{len(plan.absent):,} tensors are in no file")
    lines = [labelled_lines("NO ROOM" if _is_short(plan) else "fits", ", ".join(clauses))]
    if plan.written_by == WRITERS_NODE:
        lines.append(labelled_lines("written", "each file by processes of one node"))
    return lines


def describe_space(plan: Plan) -> str:
    """Say how much room a destination takes, and how much there is."""
    stored_bytes, free = plan.bytes_stored, plan.bytes_free
    prefix = "at least " if stored_bytes is not None and stored_bytes < plan.bytes_written else ""
    size_text = (
        f"{prefix}{format_size(plan.bytes_written if stored_bytes is None else stored_bytes)}"
    )
    return size_text + (f" ({format_size(free)} free)" if free is not None else "")


def _sharding(kinds: Sequence[TensorKind]) -> list[str]:
    """Say in words how the largest kinds of tensor are sharded before and after."""
    lines: list[str] = []
    for kind in kinds:
        states = f", with {', '.join(kind.states)}" if kind.states else ""
        runs = f"; runs of {format_size(min(kind.runs))} or more" if kind.runs else ""
        lines.append(
            labelled_lines(
                "" if lines else "sharded",
                f"{kind.name} ({format_size(kind.nbytes)}{states}):",
                f"  {kind.change}{runs}",
            )
        )
    return [*lines, ""] if lines else []


def _shards_table(plan: Plan, verbose: bool) -> str:
    """Write a row for each file, of many for the first and last."""
    first = "file" if any(r.file for r in plan.shards) else "rank"
    titles = (first, "process", "parameters", "copies", "needs", "writes", "from source ranks")
    rows = [
        (
            r.file or r.rank, first_of_ranks(r.writers), r.parameters, r.copies,
            format_size(r.bytes_needed),
            format_size(r.bytes_written), first_of_ranks([*map(int, r.bytes_from)]),
        )
        for r in plan.shards
    ]  # fmt: skip
    return (table if verbose else short_table)(titles, rows)


def _stages_table(between: FlowMatrix) -> str:
    """Write a row for each destination stage."""
    rows = []
    for row, (stage, nbytes) in enumerate(zip(between.rows, between.written)):
        read = [n for c, n in enumerate(between.columns) if (row, c) in between.cells]
        number = between.sizes[row]
        rows.append(
            (
                stage,
                f"{number:,}",
                format_size(nbytes),
                format_size(nbytes / number),
                ", ".join(read),
            )
        )
    head = ("stage", "ranks", "writes", "a rank", f"from source {between.column}s")
    return table(head, rows) + "\n(-v prints a row for each rank)"


def methods_table(methods: Iterable[MethodUse]) -> str:
    """Write how source files are read."""
    rows = [
        (use.in_words, f"{len(use.names):,}", format_size(use.bytes_read), use.which)
        for use in methods
    ]
    return table(("how files are read", "parameters", "reads", "which"), rows)


# -- simulated ----------------------------------------------------------------------------------


def _simulation_facts(
    conversion: Conversion, cluster: Cluster, simulation: Simulation
) -> dict[str, Any]:
    """Return what was simulated for JSON."""
    _, source, target = conversion
    request, planner = conversion.request, target.planner
    from rankxform.planning.simulate import spread_of

    measured = vars(simulation.workloads[0])
    names = {name: name if name in COUNTS else f"bytes_{name}" for name in measured}
    spread = {names[name]: three for name, three in spread_of(simulation.workloads).items()}
    return {
        "src": source.where.path,
        "step": source.selected.step_name,
        "processes": cluster.processes,
        "nodes": cluster.nodes,
        "src_ranks": planner.catalog.ranks,
        "dst_ranks": planner.dst.ranks,
        "src_placement": cluster.src_placement,
        "dst_placement": request.dst_placement,
        "read_method": request.read_method,
        "methods": [asdict(use) for use in simulation.methods],
        "costs": vars(request.costs or Costs()),
        "predicted_seconds": simulation.total,
        "seconds_of_processes": list(simulation.seconds),
        "seconds_of_networks": list(simulation.network),
        "between_nodes": [asdict(traffic) for traffic in simulation.between],
        "workloads": [
            {names[name]: value for name, value in vars(w).items()} for w in simulation.workloads
        ],
        "least": {name: smallest for name, (smallest, _, _) in spread.items()},
        "mean": {name: mean for name, (_, mean, _) in spread.items()},
        "largest": {name: largest for name, (_, _, largest) in spread.items()},
        "buffer_bytes": request.memory,
        "peak_memory_bytes": simulation.memory,
        "notices": target.notices,
        "warnings": target.warnings,
    }


def _simulation_table(conversion: Conversion, simulation: Simulation, facts: dict[str, Any]) -> str:
    """Write what was simulated for people."""
    from rankxform.planning.simulate import spread_of

    rows = []
    for name, (smallest, mean, largest) in spread_of(simulation.workloads).items():
        show = "{:,.0f}".format if name in COUNTS else format_size
        times = f"{largest / mean:.2f}" if mean else ""
        total = sum(getattr(workload, name) for workload in simulation.workloads)
        rows.append((NAMES[name], show(smallest), show(mean), show(largest), times, show(total)))
    costs = ", ".join(f"{name} {_cost(name, value)}" for name, value in facts["costs"].items())
    lines = [
        header(conversion, facts["processes"]),
        f"on           {facts['nodes']:,} nodes; source {facts['src_placement']}, destination "
        f"{facts['dst_placement']}",
        "",
        table(("of a process", "least", "mean", "largest", "over mean", "all"), rows),
        "",
        methods_table(simulation.methods),
        "",
        *_idle(simulation),
        f"about {format_seconds(simulation.total)}: the busiest process "
        f"{format_seconds(max(simulation.seconds))}, the "
        f"busiest node's network {format_seconds(max(simulation.network))}",
        f"if {costs}",
        f"Peak memory per process: {format_size(simulation.memory)} "
        f"({format_buffer(facts['buffer_bytes'])} buffers, the rest plan), excluding MPI.",
    ]
    target = conversion.target
    return "\n".join([*lines, *notice_lines(target.notices), *warning_lines(target.warnings)])


def _idle(simulation: Simulation) -> list[str]:
    """Say how many processes have nothing to write, and why."""
    slices = [workload.slices for workload in simulation.workloads]
    idle = slices.count(0)
    if not idle:
        return []
    many = f"{idle:,} of {len(slices):,} processes write nothing"
    reason = f"{sum(slices):,} slices are shared out by bytes, each whole to one process"
    return [labelled_lines("idle", f"{many}: {reason}")]


def _cost(name: str, value: float) -> str:
    if name == SHARE:
        return f"{value:.0%}"
    return format_seconds(value) if name in LATENCIES else f"{format_size(value)}/s"
