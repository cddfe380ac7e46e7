"""The document of facts of --report: what --json prints, and beside it what is drawn of it."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from posixpath import basename
from typing import TYPE_CHECKING, Any, NamedTuple

import rankxform
from rankxform.display.units import buffer, count, seconds, size
from rankxform.job.efficiency import floor_of, in_words
from rankxform.job.picture import as_drawn, flow, kinds, node_flow, shown
from rankxform.layout.names import patterns, summarize_names
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
    results: dict[str, Any] = {"simulation": simulated} if simulated else {"plan": planned}
    if done is not None:
        results["transform"] = done.as_dict()
    if verdict is not None:
        results["verify"] = verdict.as_dict()
    told = [
        *plan.warnings,
        *(done.warnings if done else ()),
        *(verdict.warnings if verdict else ()),
    ]
    return {
        "result": "page",
        "head": _head(source, target, plan, outcome),
        "warnings": list(dict.fromkeys(told)),
        **stages(plan.layers()),
        "flow": _flow(plan, target),
        **_kinds(target),
        **_time(outcome),
        **_nodes(source, plan, simulated),
        **_left_out(plan),
        "made": _made(source, target, plan, command, done),
        "results": results,
    }


def _head(source: Source, target: Target, plan: Plan, outcome: Outcome) -> dict[str, Any]:
    done, verdict, simulated, predicted = outcome
    least, most = _fan_in(plan)
    amounts = {
        "time": "not measured",
        "reads": f"{least if least == most else f'{least} to {most}'} of {plan.src_ranks:,} "
        f"source {'ranks' if source.table.strategy else 'files'}, for each file written",
        "disk": needs(plan),
        "memory": f"{buffer(plan.buffer_bytes)} of buffers a process",
        "tensors": f"{plan.parameters:,}",
        "processes": f"{plan.processes:,}",
    }
    state, told = "plan", "a plan; nothing was read but headers and samples"
    if simulated is not None:
        told, predicted = "simulated, by the cost model", simulated["predicted_seconds"]
        amounts["processes"] = f"{plan.processes:,} on {count(simulated['nodes'], 'node')}"
    if predicted is not None:
        amounts["time"] = f"about {seconds(predicted)}"
    if done is not None:
        state, told = "right", "done, every byte written once; not compared"
        if done.fingerprints:
            told = "done, and fingerprints are kept"
        amounts["time"] = f"{seconds(done.seconds)}; {seconds(done.move_seconds)} to move bytes"
        amounts["memory"] = f"{size(done.peak_memory_bytes)} in the largest process"
    if verdict is not None:
        state, told = _STATES[verdict.same], verdict.in_short()
        if verdict.same and verdict.checked == "bytes":
            told = f"the same, every byte compared: {size(verdict.bytes_compared)}"
        amounts["time"] = seconds(verdict.seconds)
    step = f", step {plan.step}" if plan.step else ""
    src = _name(plan.src, source.table.label)
    dst = _name(target.dst, target.planner.dst.label)
    return {
        "title": f"{src} -> {dst}",
        "what": f"{source.table.extent}{step} -> {target.planner.dst.extent}",
        "told": told,
        "state": state,
        "amounts": list(amounts.items()),
    }


def _name(folder: str | None, label: str) -> str:
    """Return what a side is called: its folder, or what states how it is sharded."""
    return basename((folder or label).rstrip("/"))


def _fan_in(plan: Plan) -> tuple[int, int]:
    """Return from how many source ranks a file takes bytes, at least and at most."""
    every = [len(one.bytes_from) for one in plan.shards]
    return min(every, default=0), max(every, default=0)


def _flow(plan: Plan, target: Target) -> dict[str, Any]:
    told = (
        "Darker is more, and bars are the sums. A slice that several ranks need counts for each of "
        "them; of equal copies in the source one is read, chosen to spread the load."
    )
    return {"told": told, **flow(plan, target).as_dict()}


def _kinds(target: Target) -> dict[str, Any]:
    every = kinds(target)
    changed = [kind for kind in every if kind.changed]
    if not every:
        return {}
    told = "Each colour is the first rank that holds a slice. "
    if not changed:
        told = "Every rank holds the elements that it held before. "
    same = [kind.name for kind in every if not kind.changed]
    if same and changed:
        told += f"As before: {summarize_names(same, 3)}. "
    drawn = shown(changed)
    if len(changed) > len(drawn):
        told += f"{len(drawn)} of {count(len(changed), 'kind')} that change are drawn."
    return {"kinds": {"told": told, "drawn": [as_drawn(kind) for kind in drawn]}}


def _time(outcome: Outcome) -> dict[str, Any]:
    done, _, simulated, predicted = outcome
    if simulated is not None:
        every = simulated["seconds_of_processes"] or [0.0]
        told = f"About {seconds(simulated['predicted_seconds'])} in all; the busiest process "
        told += f"{seconds(max(every))}, the idlest {seconds(min(every))}, by the cost model."
        return {"time": {"told": [told], "floor": None, "phases": None}}
    if done is None or done.files_kept == len(done.files):
        if predicted is None:
            return {}
        told = f"The move would take about {seconds(predicted)}, at bandwidths that were measured."
        return {"time": {"told": [told], "floor": None, "phases": None}}
    floor = floor_of(done)
    ordered = sorted(range(done.processes), key=lambda p: done.phases[p].get("wait", 0.0))
    rows = {f"process {p}": done.phases[p] for p in range(done.processes)}
    if done.processes > _MOST_BARS:
        at = {"busiest": 0, "median": len(ordered) // 2, "idlest": -1}
        rows = {f"{name} ({ordered[i]})": done.phases[ordered[i]] for name, i in at.items()}
    names = [name for name in done.phases[0] if any(row[name] for row in rows.values())]
    phases = [{"name": name, "seconds": [row[n] for n in names]} for name, row in rows.items()]
    return {
        "time": {
            "told": in_words(floor) if floor else [],
            "floor": [one._asdict() for one in floor.rows] if floor else None,
            "phases": {"names": names, "rows": phases},
        }
    }


def _nodes(source: Source, plan: Plan, simulated: Mapping[str, Any] | None) -> dict[str, Any]:
    if not plan.between_nodes:
        return {}
    nodes = simulated["nodes"] if simulated else len(source.reach.files)
    crossing = size(sum(one.nbytes for one in plan.between_nodes))
    told = f"{crossing} from one node (columns) to another (rows)."
    return {"nodes": {"told": told, **node_flow(plan.between_nodes, nodes).as_dict()}}


def _left_out(plan: Plan) -> dict[str, Any]:
    every = [
        (f"{one.why}: {count(len(one.names), 'tensor')}, {size(one.nbytes)}", one.names)
        for one in plan.left_out
    ]
    if plan.absent:
        text = f"in the strategies, not in the checkpoint: {count(len(plan.absent), 'tensor')}"
        every.append((text, plan.absent))
    found = [{"why": why, "names": patterns(names)} for why, names in every]
    return {"left_out": found} if found else {}


def _made(
    source: Source, target: Target, plan: Plan, command: Sequence[str], done: Report | None
) -> dict[str, Any]:
    from rankxform.target.manifest import described, digest

    src, dst = source.table, target.planner.dst
    versions = f"rankxform {rankxform.__version__}, Python {platform.python_version()}"
    when = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} on {platform.node()}"
    notices = [*target.notices, *(done.notices if done else ())]
    return {
        "rows": [
            ["source", plan.src or "shapes alone"],
            ["source strategy", f"{src.label} ({src.extent}), digest {described(src)}"],
            ["destination", target.dst or "-"],
            ["destination strategy", f"{dst.label} ({dst.extent}), digest {digest(dst)}"],
            ["made", f"{when}, {versions}"],
        ],
        "notices": list(dict.fromkeys(notices)),
        "command": shlex.join(["rankxform", *command]),
    }
