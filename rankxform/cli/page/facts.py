"""The document of facts of --report: what --json prints, and beside it what is drawn of it."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from posixpath import basename
from typing import TYPE_CHECKING, Any, NamedTuple

import rankxform
from rankxform.display.units import (
    format_buffer,
    format_count,
    format_seconds,
    format_size,
    read_and_needed,
)
from rankxform.job.efficiency import floor_of, in_words
from rankxform.job.picture import as_drawn, flow, kinds, node_flow, shown
from rankxform.results import stages

from ..plan import needs

if TYPE_CHECKING:
    from rankxform.job.plan import Plan
    from rankxform.job.report import Report
    from rankxform.job.verdict import Verdict
    from rankxform.source.opening import Source
    from rankxform.target.target import Target

_MOST_BARS = 16
_STATES = {True: "right", False: "wrong", None: "open"}


class Outcome(NamedTuple):
    """What came of a plan: of what was done, verified or simulated."""

    done: Report | None = None
    verdict: Verdict | None = None
    simulated: Mapping[str, Any] | None = None
    predicted: float | None = None


def facts_of(
    source: Source, target: Target, plan: Plan, command: Sequence[str], outcome: Outcome
) -> dict[str, Any]:
    """Return the facts of a plan, and of what came of it; docs/page.schema.json states them."""
    done, verdict, simulated, predicted = outcome
    planned = {**plan.as_dict(), "predicted_seconds": predicted}
    del planned["shards"]  # by file: as many as there are ranks; `flow` has their sums
    results: dict[str, Any] = {"plan": planned, "simulation": simulated}
    for name, result in (("transform", done), ("verify", verdict)):
        results[name] = None if result is None else result.as_dict()
    nodes = simulated["nodes"] if simulated else len(source.reach.files)
    between = node_flow(plan.between_nodes, nodes).as_dict() if plan.between_nodes else None
    facts = {
        "head": _head(source, target, plan, outcome),
        **stages(plan.layers()),
        "flow": flow(plan, target).as_dict(),
        "kinds": _kinds(target),
        "time": _time(outcome),
        "nodes": between,
        "made": _made(source, target, plan, command),
        "results": {name: found for name, found in results.items() if found},
    }
    return {"result": "page", **{name: found for name, found in facts.items() if found}}


def _head(source: Source, target: Target, plan: Plan, outcome: Outcome) -> dict[str, Any]:
    done, verdict, simulated, predicted = outcome
    least, most = plan.fan_in
    amounts = {
        "time": "not measured",
        "reads": f"{least if least == most else f'{least} to {most}'} of {plan.src_ranks:,} "
        f"source {'ranks' if source.table.strategy else 'files'}, for each file written",
        "read": read_and_needed(plan.bytes_read, plan.bytes_needed),
        "disk": needs(plan),
        "memory": f"{format_buffer(plan.buffer_bytes)} of buffers a process",
        "tensors": f"{plan.parameters:,}",
        "processes": f"{plan.processes:,}",
    }
    state, told = "plan", "a plan; nothing was read but headers and samples"
    if simulated is not None:
        told, predicted = "simulated, by the cost model", simulated["predicted_seconds"]
        amounts["processes"] = f"{plan.processes:,} on {format_count(simulated['nodes'], 'node')}"
    if predicted is not None:
        amounts["time"] = f"about {format_seconds(predicted)}"
    if done is not None:
        state, told = "right", "done, every byte written once; not compared"
        if done.files_kept == len(done.files):
            told = "complete already; nothing was written"
        elif done.fingerprints:
            told = "done, and fingerprints are kept"
        amounts["time"] = (
            f"{format_seconds(done.seconds)}; {format_seconds(done.move_seconds)} to move bytes"
        )
        amounts["memory"] = f"{format_size(done.peak_memory_bytes)} in the largest process"
    if verdict is not None:
        state, told = _STATES[verdict.same], verdict.in_short()
        if verdict.same and verdict.checked == "bytes":
            told = f"the same, every byte compared: {format_size(verdict.bytes_compared)}"
        amounts["time"] = format_seconds(verdict.seconds)
    step = f", step {plan.step}" if plan.step else ""
    sides = (plan.src, source.table.label), (target.dst, target.planner.dst.label)
    src, dst = (basename((folder or label).rstrip("/")) for folder, label in sides)
    compared = verdict is not None and done is None
    return {
        "title": f"{dst}, compared with {src}" if compared else f"{src} -> {dst}",
        "what": f"{source.table.extent}{step} -> {target.planner.dst.extent}",
        "told": told,
        "state": state,
        "amounts": list(amounts.items()),
    }


def _kinds(target: Target) -> dict[str, Any]:
    every = kinds(target)
    drawn, more = shown([kind for kind in every if kind.changed])
    same = dict.fromkeys(kind.name for kind in every if not kind.changed)
    found = {"drawn": [*map(as_drawn, drawn)], "more": [*map(as_drawn, more)], "same": [*same]}
    return found if every else {}


def _time(outcome: Outcome) -> dict[str, Any]:
    done, _, simulated, predicted = outcome
    told = ""
    if simulated is not None:
        every = simulated["seconds_of_processes"] or [0.0]
        told = (
            f"About {format_seconds(simulated['predicted_seconds'])} in all; the busiest process "
        )
        told += f"{format_seconds(max(every))}, the idlest {format_seconds(min(every))}, "
        told += "by the cost model."
    elif predicted is not None:
        told = f"The move would take about {format_seconds(predicted)}, "
        told += "at bandwidths that were measured."
    if done is None or done.files_kept == len(done.files):
        return {"told": [told], "floor": None, "phases": None} if told else {}
    floor = floor_of(done)
    ordered = sorted(range(done.processes), key=lambda p: done.phases[p].get("wait", 0.0))
    rows = {f"process {p}": done.phases[p] for p in range(done.processes)}
    if done.processes > _MOST_BARS:
        at = {"busiest": 0, "median": len(ordered) // 2, "idlest": -1}
        rows = {f"{name} ({ordered[i]})": done.phases[ordered[i]] for name, i in at.items()}
    names = [name for name in done.phases[0] if any(row[name] for row in rows.values())]
    phases = [{"name": name, "seconds": [row[n] for n in names]} for name, row in rows.items()]
    return {
        "told": in_words(floor) if floor else [],
        "floor": [one._asdict() for one in floor.rows] if floor else None,
        "phases": {"names": names, "rows": phases},
    }


def _made(source: Source, target: Target, plan: Plan, command: Sequence[str]) -> dict[str, Any]:
    from rankxform.target.manifest import described, digest

    src, dst = source.table, target.planner.dst
    versions = f"rankxform {rankxform.__version__}, Python {platform.python_version()}"
    when = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} on {platform.node()}"
    return {
        "rows": [
            ["source", plan.src or "shapes alone"],
            ["source strategy", f"{src.label} ({src.extent}), digest {described(src)}"],
            ["destination", target.dst or "-"],
            ["destination strategy", f"{dst.label} ({dst.extent}), digest {digest(dst)}"],
            ["made", f"{when}, {versions}"],
        ],
        "command": shlex.join(["rankxform", *command]),
    }
