"""The page of `--report`: its facts, and the file."""

from __future__ import annotations

import platform
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from posixpath import basename
from typing import TYPE_CHECKING, Any

import rankxform
from rankxform.display.text import (
    format_buffer,
    format_count,
    format_seconds,
    format_size,
    read_and_needed,
    warn,
)
from rankxform.errors import RankxformError, UsageError
from rankxform.request import Request
from rankxform.results import as_document, stage_layers
from rankxform.statements import join
from rankxform.storage.identity import inodes_of, is_below_any
from rankxform.storage.posix import open_for_reading, range_reader, write_atomically
from rankxform.storage.user_files import output_path
from rankxform.transport import Team
from rankxform.values import NamedTuple
from rankxform.verbs.picture import (
    as_drawn,
    byte_flow,
    kinds,
    kinds_to_draw,
    node_flow,
    storage_notes,
)

from .options import Parsed

if TYPE_CHECKING:
    from rankxform.target.target import Conversion, Target
    from rankxform.verbs.plan import Plan, SimulationResult
    from rankxform.verbs.transform import Report
    from rankxform.verbs.verdict import Verdict


_MOST_BARS = 16
_STATES = {True: "right", False: "wrong", None: "open"}


class PageResults(NamedTuple):
    """What came of a plan: of what was done, verified or simulated."""

    done: Report | None = None
    verdict: Verdict | None = None
    simulated: SimulationResult | None = None


def page_document(
    conversion: Conversion, plan: Plan, command: Sequence[str], outcome: PageResults
) -> dict[str, Any]:
    """Return the facts of a plan, and of what came of it; docs/page.schema.json states them."""
    report, verdict, simulated = outcome
    source, target = conversion.source, conversion.target
    planned = plan.as_dict()
    del planned["shards"]  # by file: as many as there are ranks; `byte_flow` has their sums
    results: dict[str, Any] = {"plan": planned}
    for name, result in (("simulation", simulated), ("transform", report), ("verify", verdict)):
        results[name] = None if result is None else result.as_dict()
    nodes = simulated.nodes if simulated else len(source.reach.files)
    between = node_flow(plan.between_nodes, nodes).as_dict() if plan.between_nodes else None
    shown = next(r for r in (verdict, report, simulated, plan) if r is not None)
    words = as_document(shown)
    sections = {
        "head": _head(conversion, plan, outcome),
        "layers": stage_layers(plan.src_layers, plan.dst_layers).facts,
        "flow": byte_flow(plan, target).as_dict(),
        "kinds": _kinds(target),
        "time": _time(outcome, plan.predicted_seconds),
        "nodes": between,
        "words": words["head"]["amounts"],
        "tables": words.get("tables"),
        "made": _describe_conversion(conversion, plan, command),
        "results": {name: result_facts for name, result_facts in results.items() if result_facts},
    }
    return {"result": "page", **{name: section for name, section in sections.items() if section}}


def _head(conversion: Conversion, plan: Plan, outcome: PageResults) -> dict[str, Any]:
    source, target = conversion.source, conversion.target
    (report, verdict, simulated), predicted = outcome, plan.predicted_seconds
    lower, upper = plan.fan_in
    catalog = source.require_catalog()
    amounts = {
        "time": "not measured",
        "reads": f"{lower if lower == upper else f'{lower} to {upper}'} of {plan.src_ranks:,} "
        f"source {'ranks' if catalog.strategy else 'files'}, for each file written",
        "read": read_and_needed(plan.bytes_read, plan.bytes_needed),
        "disk": plan.space,
        "memory": f"{format_buffer(plan.buffer_bytes)} of buffers a process",
        "tensors": f"{plan.parameters:,}",
        "processes": f"{plan.processes:,}",
    }
    state, summary = "plan", "a plan; nothing was read but headers and samples"
    if simulated is not None:
        summary, predicted = "simulated, by the cost model", simulated.predicted_seconds
        amounts["processes"] = f"{plan.processes:,} on {format_count(simulated.nodes, 'node')}"
    if predicted is not None:
        amounts["time"] = f"about {format_seconds(predicted)}"
    if report is not None:
        state, summary = "right", "done, every byte written once; not compared"
        if report.files_kept == len(report.files):
            summary = "complete already; nothing was written"
        elif report.fingerprints:
            summary = "done, and fingerprints are kept"
        amounts["time"] = (
            f"{format_seconds(report.seconds)}; {format_seconds(report.move_seconds)} to move bytes"
        )
        amounts["memory"] = f"{format_size(report.peak_memory_bytes)} in the largest process"
    if verdict is not None:
        state, summary = _STATES[verdict.same], verdict.in_short()
        if verdict.same and verdict.checked == "bytes":
            summary = f"the same, every byte compared: {format_size(verdict.bytes_compared)}"
        amounts["time"] = format_seconds(verdict.seconds)
    step = f", step {plan.step}" if plan.step else ""
    sides = (plan.src, catalog.declared_by), (target.dst, target.planner.dst.label)
    src, dst = (basename((folder or label).rstrip("/")) for folder, label in sides)
    compared = verdict is not None and report is None
    return {
        "title": f"{dst}, compared with {src}" if compared else f"{src} -> {dst}",
        "what": f"{catalog.extent}{step} -> {target.planner.dst.extent}",
        "told": summary,
        "state": state,
        "amounts": list(amounts.items()),
    }


def _kinds(target: Target) -> dict[str, Any]:
    all_kinds = kinds(target)
    drawn, undrawn_kinds = kinds_to_draw([kind for kind in all_kinds if kind.changed])
    unchanged_names = dict.fromkeys(kind.name for kind in all_kinds if not kind.changed)
    kind_facts = {
        "drawn": [*map(as_drawn, drawn)],
        "more": [*map(as_drawn, undrawn_kinds)],
        "same": [*unchanged_names],
    }
    return kind_facts if all_kinds else {}


def _time(outcome: PageResults, predicted: float | None) -> dict[str, Any]:
    report, _, simulated = outcome
    summary = ""
    if simulated is not None:
        seconds = simulated.seconds_of_processes or (0.0,)
        summary = (
            f"About {format_seconds(simulated.predicted_seconds)} in all; the busiest process "
        )
        summary += f"{format_seconds(max(seconds))}, the idlest {format_seconds(min(seconds))}, "
        summary += "by the cost model."
    elif predicted is not None:
        summary = f"The move would take about {format_seconds(predicted)}, "
        summary += "at bandwidths that were measured."
    if report is None or report.files_kept == len(report.files):
        return {"told": [summary], "phases": None} if summary else {}
    ordered = sorted(range(report.processes), key=lambda p: report.phases[p].get("wait", 0.0))
    rows = {f"process {p}": report.phases[p] for p in range(report.processes)}
    if report.processes > _MOST_BARS:
        positions_by_name = {"busiest": 0, "median": len(ordered) // 2, "idlest": -1}
        rows = {
            f"{name} ({ordered[i]})": report.phases[ordered[i]]
            for name, i in positions_by_name.items()
        }
    names = [name for name in report.phases[0] if any(row[name] for row in rows.values())]
    phases = [{"name": name, "seconds": [row[n] for n in names]} for name, row in rows.items()]
    return {"told": storage_notes(report), "phases": {"names": names, "rows": phases}}


def _describe_conversion(
    conversion: Conversion, plan: Plan, command: Sequence[str]
) -> dict[str, Any]:
    from rankxform.target.manifest import description_digest, strategy_digest

    target = conversion.target
    src, dst = target.planner.catalog, target.planner.dst
    versions = f"rankxform {rankxform.__version__}, Python {platform.python_version()}"
    when = f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} on {platform.node()}"
    return {
        "rows": [
            ["source", plan.src or "shapes alone"],
            [
                "source strategy",
                f"{src.declared_by} ({src.extent}), digest {description_digest(src)}",
            ],
            ["destination", target.dst or "-"],
            ["destination strategy", f"{dst.label} ({dst.extent}), digest {strategy_digest(dst)}"],
            ["made", f"{when}, {versions}"],
        ],
        "command": join(["rankxform", *command]),
    }


_START_OF_PAGE = b"<!doctype html>"


def check_page_path(path: str | None, request: Request, flag: str = "--report") -> None:
    """See that a page may be written there, if one is asked for, before the work.

    Raises UsageError.
    """
    if path is None:
        return
    src, dst = request.src, request.dst
    target = output_path(path).absolute()
    wrong = None
    if target.suffix not in (".html", ".htm"):
        wrong = "name a file that ends in .html"
    elif not target.parent.is_dir() and (dst is None or target.parent != Path(dst).absolute()):
        wrong = "name a file in a folder that is there"
    elif src and is_below_any(target, inodes_of(Path(src), with_folders=True)):
        wrong = "lies in SRC, which is never written to; name a file elsewhere"
    elif target.exists() and not _is_page(target):
        wrong = "is there already, and is no page; name another file"
    if wrong:
        raise UsageError(f"{flag} {path}: {wrong}")


def _is_page(path: Path) -> bool:
    if not path.is_file():
        return False
    with open_for_reading(path) as (fd, _):
        return range_reader(fd, path)(0, len(_START_OF_PAGE)).lower() == _START_OF_PAGE


def save_page(file: str, fields: Mapping[str, Any]) -> None:
    """Write the page that draws fields, which gets its name once whole. Raises StorageError."""
    from rankxform.results.html import page

    text = page(fields["head"]["title"], fields)
    write_atomically(Path(file).absolute(), text.encode(errors="backslashreplace"), durable=False)


def write_page(options: Parsed, conversion: Conversion, plan: Plan, **outcome: Any) -> None:
    """Write the page of a plan, and of what came of it. Raises StorageError."""

    save_page(
        options.report, page_document(conversion, plan, options.words, PageResults(**outcome))
    )


def write_page_of_work(options: Parsed, conversion: Conversion, team: Team, **outcome: Any) -> None:
    """Write the page of what was done, and has been told. Collective.

    What fails now is a warning: the work is done.
    """
    from rankxform.verbs.plan import plan_target

    try:
        _, plan = plan_target(conversion, team, with_room=False)
        team.bcast(lambda: write_page(options, conversion, plan, **outcome))
    except Exception as error:
        if team.rank == 0:
            error_prefix = "" if isinstance(error, RankxformError) else f"{type(error).__name__}: "
            warn(f"no page was written: {error_prefix}{error}")
