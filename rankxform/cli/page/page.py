"""The report as one page of HTML: drawings, tables and facts; nothing is fetched."""

from __future__ import annotations

import platform
import shlex
import time
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import rankxform
from rankxform.display.units import buffer, count, seconds, size
from rankxform.job.picture import flow, kinds, marginals, node_flow
from rankxform.layout.names import patterns
from rankxform.storage.posix import read_bytes

from ..plan import COUNTS, METHODS, NAMES
from . import charts

if TYPE_CHECKING:
    from rankxform.job.efficiency import PlainCopy
    from rankxform.job.picture import Flow
    from rankxform.job.plan import Plan
    from rankxform.job.report import Report
    from rankxform.job.verdict import Verdict
    from rankxform.source.opening import Source
    from rankxform.target.target import Target

_START = "start"
_MOST_BARS = 16
_SPREAD = ("least", "mean", "largest")
_MOST_CELLS = 1024
_MOST_NAMES = 200


class Outcome(NamedTuple):
    """What came of a plan: of what was done, verified or simulated; `copy` is what `done` is
    compared with."""

    done: Report | None = None
    verdict: Verdict | None = None
    copy: PlainCopy | None = None
    simulated: Mapping[str, Any] | None = None


def page(
    source: Source, target: Target, plan: Plan, command: Sequence[str], outcome: Outcome
) -> str:
    """Return the page of a plan, and of what came of it."""
    done, verdict, copy, simulated = outcome
    found = flow(plan, target)
    what = "Verification" if verdict else "Conversion" if done else "Plan"
    step = f", step {plan.step}" if plan.step else ""
    to = f" to {target.dst}" if target.dst else ""
    title = f"{what} of {plan.src or 'shapes alone'}{to}"
    src, dst = target.planner.catalog, target.planner.dst
    lead = (
        f"{src.extent}{step} to {dst.extent}; {count(plan.parameters, 'tensor')}; "
        f"{size(plan.bytes_needed)} of the "
        f"source needed, {size(plan.bytes_written)} written; {count(plan.processes, 'process')}"
    )
    sections = [
        _outcome(done, verdict),
        _section("Who takes what from whom", _flow(found)),
        _section("How tensors are sharded, before and after", _tensors(target)),
        _section("Where the time goes", _time(done, copy, simulated)),
        _section("What is not in the destination, and why", _left_out(plan)),
        _section("Between processes and nodes", _traffic(source, plan, done, simulated)),
        _section("Checks, and how this was made", _made(target, plan, command, done, verdict)),
    ]
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_style()}</style></head><body>"
        f'<h1>{escape(title)}</h1><p class="lead">{escape(lead)}</p>{"".join(sections)}'
        "</body></html>\n"
    )


def _style() -> str:
    return read_bytes(Path(__file__).with_name("page.css")).decode()


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _outcome(done: Report | None, verdict: Verdict | None) -> str:
    if verdict is not None:
        words = {True: "The same", False: "DIFFERENT", None: "Not verified"}[verdict.same]
        facts = f"{size(verdict.bytes_compared)} compared in {seconds(verdict.seconds)}"
        return f'<p><span class="big">{words}</span> {escape(facts)}</p>'
    if done is None:
        return ""
    files = count(len(done.files), "file")
    facts = f"{size(done.bytes_written)} in {files}, {seconds(done.seconds)}"
    facts += "" if done.fingerprints else "; not verified (rankxform verify compares every byte)"
    return f'<p><span class="big">Done</span> {escape(facts)}</p>' + _warnings(done.warnings)


def _warnings(texts: Sequence[str]) -> str:
    return "".join(f'<p class="warn">{escape(text)}</p>' for text in texts)


def _flow(found: Flow) -> str:
    rows, columns = marginals(found)
    note = (
        f"Bytes of each destination {found.row} (rows) by source {found.column} (columns); darker "
        "is more, and bars are the sums. A slice that several ranks need counts for each of them, "
        "and is read once; of equal copies in the source one is read, chosen to spread the load."
    )
    table = ""
    if len(found.cells) <= _MOST_CELLS:
        cells = [
            (found.rows[row], found.columns[column], f"{nbytes:,}")
            for (row, column), nbytes in sorted(found.cells.items())
        ]
        head = (f"destination {found.row}", f"source {found.column}", "bytes")
        table = f"<details><summary>as numbers</summary>{_table(head, cells)}</details>"
    most, least = max(rows, default=0), min(rows, default=0)
    spread = (
        f"Largest row {size(most)}, smallest {size(least)}; largest column "
        f"{size(max(columns, default=0))}."
    )
    return f"<p>{escape(note)} {escape(spread)}</p>{charts.matrix(found)}{table}"


def _tensors(target: Target) -> str:
    every = kinds(target)
    if not every:
        return ""
    note = (
        "The largest kinds of tensor that are sharded, and the one that is moved in the smallest "
        "pieces. Each colour is the first rank that holds a slice, or ranks next to each other "
        "where there are many."
    )
    half = -(-len(every) // 2)
    drawings = [charts.tensors(some) for some in (every[:half], every[half:]) if some]
    return f'<p>{escape(note)}</p><div class="two">{"".join(drawings)}</div>'


def _time(done: Report | None, copy: PlainCopy | None, simulated: Mapping[str, Any] | None) -> str:
    if simulated is not None:
        every = simulated["seconds_of_processes"]
        busiest = seconds(max(every, default=0.0))
        return (
            f"<p>About {seconds(simulated['predicted_seconds'])} in all; the busiest process "
            f"{busiest}, the idlest {seconds(min(every, default=0.0))}, by the cost model.</p>"
        )
    if done is None or done.files_kept == len(done.files):
        return ""
    names = [
        n for n in done.phases[0] if n != _START and any(one[n] >= 5e-5 for one in done.phases)
    ]
    ordered = sorted(range(len(done.phases)), key=lambda p: -_busy(done.phases[p]))
    if len(ordered) > _MOST_BARS:
        shown = {
            "slowest": done.phases[ordered[0]],
            "median": done.phases[ordered[len(ordered) // 2]],
            "fastest": done.phases[ordered[-1]],
        }
    else:
        shown = {f"process {p}": phases for p, phases in enumerate(done.phases)}
    shown = {name: {n: phases[n] for n in names} for name, phases in shown.items()}
    start = max(phases.get(_START, 0.0) for phases in done.phases)
    text = (
        f"{_efficiency(done, copy)}<p>The move took {seconds(done.move_seconds)}, from the "
        "finished plan to the last file's name; the busiest process spent "
        f"{seconds(max(map(_busy, done.phases)))} on reading, copying, sending, writing and "
        "syncing. "
        f"Before all that, {seconds(start)} for Python and MPI to start.</p>"
    )
    head = ("process", *names, "all")
    rows = [
        (str(p), *(f"{one[n]:.4f}" for n in names), f"{sum(one[n] for n in names):.4f}")
        for p, one in enumerate(done.phases[:_MOST_CELLS])
    ]
    table = f"<details><summary>as numbers, in seconds</summary>{_table(head, rows)}</details>"
    return text + charts.bars(shown, names) + table


def _efficiency(done: Report, copy: PlainCopy | None) -> str:
    """Say how near the move came to a plain copy."""
    if copy is None or not done.move_seconds:
        return ""
    how = "measured after it with 64 MiB a process" if copy.measured else "as --costs says"
    return (
        f'<p><span class="big">{copy.seconds / done.move_seconds:.0%}</span> efficiency: a plain '
        f"copy of as many bytes would take {seconds(copy.seconds)}, reading {size(copy.read)}/s "
        f"and then writing {size(copy.write)}/s in sum over all processes ({how}).</p>"
    )


def _busy(phases: Mapping[str, float]) -> float:
    return sum(phases.get(name, 0.0) for name in ("read", "copy", "write", "exchange", "fsync"))


def _left_out(plan: Plan) -> str:
    told = [
        (f"{one.why}: {count(len(one.names), 'tensor')}, {size(one.nbytes)}", one.names)
        for one in plan.left_out
    ]
    if plan.absent:
        text = f"in the strategies, not in the checkpoint: {count(len(plan.absent), 'tensor')}"
        told.append((text, plan.absent))
    if not told:
        return "<p>Everything that the source holds is in the destination.</p>"
    parts = []
    for text, names in told:
        every = patterns(names)
        shown = "".join(f"<li><code>{escape(name)}</code></li>" for name in every[:_MOST_NAMES])
        more = "" if len(every) <= _MOST_NAMES else f"<li>{len(every) - _MOST_NAMES} more</li>"
        parts.append(
            f"<p>{escape(text)}</p><details><summary>names</summary><ul>{shown}{more}</ul></details>"
        )
    return "".join(parts)


def _traffic(
    source: Source,
    plan: Plan,
    done: Report | None,
    simulated: Mapping[str, Any] | None,
) -> str:
    rows = [
        (METHODS.get(u.method, u.method), f"{len(u.names):,}", size(u.bytes_read))
        for u in plan.methods
    ]
    head = ("how files are read", "tensors", "reads")
    text = _table(head, rows)
    if simulated is not None:
        facts = [
            (title, *(size(simulated[which][f"bytes_{name}"]) for which in _SPREAD))
            for name, title in NAMES.items()
            if name not in COUNTS
        ]
        text += _table(("of a process", *_SPREAD), facts)
    sent = plan.bytes_sent if done is None else done.bytes_sent
    text += f"<p>Sent from one process to another: {size(sent)}"
    if not plan.between_nodes:
        return f"{text}; nothing from one node to another.</p>"
    nodes = simulated["nodes"] if simulated else len(source.reach.files)
    found = node_flow(plan.between_nodes, nodes)
    crossing = size(sum(one.nbytes for one in plan.between_nodes))
    return f"{text}; {crossing} from one node (columns) to another (rows).</p>" + charts.matrix(
        found
    )


def _made(
    target: Target,
    plan: Plan,
    command: Sequence[str],
    done: Report | None,
    verdict: Verdict | None,
) -> str:
    from rankxform.target.manifest import described, digest

    source, dst = target.planner.catalog, target.planner.dst
    rows = [
        ("source", plan.src or "shapes alone"),
        ("source strategy", f"{source.label} ({source.extent}), digest {described(source)}"),
        ("destination", target.dst or "-"),
        ("destination strategy", f"{dst.label} ({dst.extent}), digest {digest(dst)}"),
        ("read of the source", f"{plan.bytes_read:,} bytes, {plan.bytes_needed:,} needed"),
        ("written", f"{plan.bytes_written:,} bytes of tensors"),
        ("buffers of a process", buffer(plan.buffer_bytes)),
    ]
    if done is not None:
        kept = "kept (rankxform verify DST compares them)" if done.fingerprints else "not kept"
        rows += [
            ("peak memory of a process", size(done.peak_memory_bytes)),
            ("fingerprints", kept),
            ("compared between ranks", size(done.bytes_compared)),
        ]
    if verdict is not None:
        rows.append(("differences", f"{len(verdict.differences):,}"))
    versions = f"rankxform {rankxform.__version__}, Python {platform.python_version()}"
    rows += [("made", f"{time.strftime('%Y-%m-%d %H:%M:%S %z')} on {platform.node()}, {versions}")]
    facts = _table(("", ""), rows)
    notices = [*target.notices, *(done.notices if done else ())]
    told = "".join(f"<li>{escape(text)}</li>" for text in dict.fromkeys(notices))
    words = shlex.join(["rankxform", *command])
    return (
        f"{facts}{f'<ul>{told}</ul>' if told else ''}{_warnings(plan.warnings)}"
        f"<p>Command:</p><pre>{escape(words)}</pre>{_differences(verdict)}"
    )


def _differences(verdict: Verdict | None) -> str:
    if verdict is None or not verdict.differences:
        return ""
    rows = [
        (one.name, str(one.rank), one.why, "" if one.index is None else str(list(one.index)))
        for one in verdict.differences[:_MOST_NAMES]
    ]
    more = len(verdict.differences) - len(rows)
    note = f"<p>and {more:,} more (--json has all)</p>" if more else ""
    return _table(("what", "rank", "", "first at"), rows) + note


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    numbers = [
        bool(rows) and all(row[i][:1].isdigit() or not row[i] for row in rows)
        for i in range(len(head))
    ]
    kinds = [' class="n"' if number else "" for number in numbers]
    top = "".join(f"<th{kind}>{escape(text)}</th>" for kind, text in zip(kinds, head))
    body = "".join(
        "<tr>" + "".join(f"<td{k}>{escape(str(c))}</td>" for k, c in zip(kinds, row)) + "</tr>"
        for row in rows
    )
    shown = f"<tr>{top}</tr>" if any(head) else ""
    return f'<div class="scroll"><table>{shown}{body}</table></div>'
