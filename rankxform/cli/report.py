"""What the command prints: before, after, and instead of the work."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.layout.names import more_patterns, patterns
from rankxform.ops.drop import NOT_CHOSEN

from .units import abbreviate, seconds, size, table, truncate

if TYPE_CHECKING:
    from rankxform.checkpoints.base import Shards
    from rankxform.job.prepare import Conversion, SourceFiles
    from rankxform.job.replicas import ReplicaVerdict
    from rankxform.job.transform import Report
    from rankxform.job.verify import Verdict
    from rankxform.layout.strategy import Strategy
    from rankxform.planning.selection import LeftOut


def header(conversion: Conversion, processes: int) -> str:
    """Say which files were found and what is about to happen."""
    files, request = conversion.files, conversion.request
    source, dst, shards = conversion.planner.catalog, conversion.planner.dst, files.shards
    where = f"{request.dst}: " if request.dst else ""
    some, every = len(conversion.ranks), dst.ranks
    ranks = _count(every, "rank") if some == every else f"{some} of {_count(every, 'rank')}"
    if conversion.target.arrangement.parts:
        made = _count(len(conversion.made), "file")
        ranks = f"{conversion.target.form.title}, {made}" + (f" of {ranks}" if every > 1 else "")
    derived = []
    if conversion.derived is not None:
        from .strategy_report import derived_table

        derived = [derived_table(conversion.derived), ""]
    return "\n".join(
        (
            *derived,
            *warnings(conversion.warnings),
            f"source       {request.src or 'imagined from shapes'}: {_found(files)}{_step(shards)}",
            f"             sharded by {_strategy(source.strategy)}",
            f"destination  {where}{ranks}",
            f"             sharded by {_strategy(dst)}",
            *([f"names        {conversion.naming}"] if conversion.naming else []),
            f"processes    {processes:,} (need not equal the number of ranks)",
        )
    )


def _found(files: SourceFiles) -> str:
    said = files.shards.said
    if said is None:
        return _count(len(files.indexes), "rank")
    ranks = len({said.ranks[file] for file in files.indexes if file in said.ranks})
    found = f"{files.form.title}, {_count(len(files.indexes), 'file')}"
    return found + (f" of {_count(ranks, 'rank')}" if ranks > 1 else "")


def _step(shards: Shards) -> str:
    if not shards.step:
        return ""
    if len(shards.step) == 1:
        return f", iteration {shards.step[0]}"
    return f", epoch {shards.step[0]} step {shards.step[1]}"


def warnings(texts: Sequence[str]) -> list[str]:
    """Write warnings, which are said first and last."""
    return [f"WARNING: {text}" for text in texts]


def _strategy(strategy: Strategy) -> str:
    if strategy.label == "none":
        return "none (whole tensors)"
    return f"{strategy.label} ({strategy.extent})"


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def summary(done: Report) -> str:
    """Say what was moved, what was left out, and what deserves a look."""
    times = done.read / done.needed if done.needed else 1
    why = ""
    if times > 1.05:
        why = "; equal slices are read by every process that writes one, or whole rows for a part"
    linked = f" ({done.linked} linked to equal ones)" if done.linked else ""
    lines = []
    if done.kept == len(done.files):
        lines.append(f"all {_count(done.kept, 'file')} were complete already; nothing was written")
        return "\n".join(lines + warnings(done.warnings))
    if done.kept or done.continued:
        lines.append(
            f"continued an earlier run: {_count(done.kept, 'file')} complete, "
            f"{done.continued} begun"
        )
    if done.placement:
        lines.append(f"destination on several nodes, a folder of each: {done.placement}")
    sent = f", sent {size(done.sent)} between processes" if done.sent else ""
    lines += [
        f"read {size(done.read)}, {times:.2f} times the {size(done.needed)} needed{why}{sent}",
        f"wrote {size(done.written)} in {_count(len(done.files) - done.kept, 'file')}{linked}, "
        f"{seconds(done.seconds)}, {size(done.written / max(done.seconds, 1e-9))}/s, "
        f"peak memory {size(done.peak_memory)} a process",
    ]
    if done.strategy:
        lines.append(f"strategy of the destination: {done.strategy}")
    if done.compared:
        names = done.compared_names
        some = ", ".join(names[:4]) + (", ..." if len(names) > 4 else "")
        lines.append(f"compared between ranks, in no strategy: {some} ({size(done.compared)})")
    lines += [left_out(left) for left in done.left_out]
    if done.absent:
        lines.append(some_names("in the strategies, not in the checkpoint", done.absent))
    lines += [f"note: {notice}" for notice in done.notices]
    return "\n".join(lines + warnings(done.warnings))


def verdict(found: Verdict) -> str:
    """Say whether source and destination hold the same model, and where they do not."""
    what = f"{size(found.compared)} in {_count(found.files, 'file')}, {seconds(found.seconds)}"
    notes = [*(f"note: {notice}" for notice in found.notices), *warnings(found.warnings)]
    if found.same is None:
        return (
            f"NOT VERIFIED: no byte was compared. {_count(found.files, 'file')} of the right size "
            "with sound headers; the manifest has no fingerprints (transform --verify keeps them)\n"
            f"to compare every byte: {found.command}"
        )
    if found.same:
        return "\n".join([f"the same: every byte compared, {what}", *notes])
    rows = [
        (
            one.name,
            found.names.get(one.rank, "-") if found.names else one.rank,
            one.why,
            "" if one.index is None else str(list(one.index)),
            "" if one.index is None else f"{one.count:,} of {one.size:,}",
        )
        for one in found.differences
    ]
    head = ("what", "file" if found.names else "rank", "", "first at", "elements")
    slices = [one for one in found.differences if not one.whole_file]
    files = {one.rank for one in found.differences if one.whole_file or found.by_manifest}
    names = {one.name for one in slices}
    told = [_count(len(names), "parameter"), _count(len(slices), "slice")]
    where = ", ".join(
        ([] if found.by_manifest or not slices else told)
        + ([_count(len(files), "file")] if files else [])
    )
    last = f"DIFFERENT: {where}; compared {what}"
    return "\n".join([truncate(table(head, rows), "slices"), *notes, last])


def replicas(found: ReplicaVerdict) -> str:
    """Say where source ranks that should hold the same bytes do not."""
    what = f"{size(found.compared)} in {_count(found.files, 'file')}, {seconds(found.seconds)}"
    notes = "".join(f"\n{line}" for line in warnings(found.warnings))
    if found.same is None:
        return f"NOTHING COMPARED: no bytes are held by several ranks, {what}{notes}"
    if found.same:
        return f"the same: all bytes that several ranks hold, {what}{notes}"
    rows = [
        (one.name, one.box, " | ".join(abbreviate(list(ranks)) for ranks in one.groups))
        for one in found.unequal
    ]
    lines = truncate(table(("parameter", "region", "ranks with equal bytes"), rows), "places")
    return f"{lines}\nDIFFERENT: {_count(len(rows), 'place')}; compared {what}{notes}"


def replica_facts(found: ReplicaVerdict) -> dict[str, Any]:
    """Return a comparison of replicas for JSON."""
    return {
        "same": found.same,
        "files": found.files,
        "bytes_compared": found.compared,
        "warnings": list(found.warnings),
        "differences": [
            {"parameter": one.name, "start": one.box.start, "stop": one.box.stop,
             "ranks": one.groups}
            for one in found.unequal
        ],
    }  # fmt: skip


def verdict_facts(found: Verdict) -> dict[str, Any]:
    """Return a verdict for JSON."""
    return {
        "same": found.same,
        "checked": found.checked,
        "step": found.step,
        "files": found.files,
        "bytes_compared": found.compared,
        "command": found.command,
        "differences": [
            {"parameter": one.name, "rank": one.rank, "why": one.why, "first_index": one.index,
             "elements": one.count, "of": one.size}
            for one in found.differences
        ],
        "notices": list(found.notices),
        "warnings": list(found.warnings),
    }  # fmt: skip


def profile(done: Report) -> str:
    """Write the seconds that each process spent in each phase."""
    names = [n for n in done.phases[0] if any(seconds[n] >= 5e-5 for seconds in done.phases)]
    rows = [
        (process, *(f"{seconds[n]:.4f}" for n in names), f"{sum(seconds.values()):.4f}")
        for process, seconds in enumerate(done.phases)
    ]
    moved = f"moved in {done.move_seconds:.4f} s, from the finished plan to the last file's name"
    return f"\n{table(('process', *names, 'all'), rows)}\n{moved}"


def left_out(left: LeftOut) -> str:
    most = 0 if left.reason == NOT_CHOSEN else 8
    return some_names(f"left out, {size(left.nbytes)}: {left.reason}", left.names, most)


def some_names(title: str, names: tuple[str, ...], most: int = 8) -> str:
    shown = patterns(names) if most else []
    more = [f"  and {more_patterns(len(shown) - most)}"] if len(shown) > most else []
    lines = [f"{title} ({_count(len(names), 'parameter')})", *(f"  {p}" for p in shown[:most])]
    return "\n".join(lines + more)


def ranks_table(found: Mapping[int, tuple[int, ...]]) -> str:
    """Write which source ranks each destination rank needs."""
    rows = [(rank, ", ".join(map(str, ranks))) for rank, ranks in found.items()]
    return table(("rank", "needs source ranks"), rows)


def merged(target: Path, strategy: Strategy) -> str:
    """Say what was merged, and what MindSpore will make of it."""
    text = f"{target}: {_strategy(strategy)}"
    dashes = [name for name in strategy.stages_of if "-" in name]
    if dashes:
        text += (
            "\nnote: MindSpore's own reader does not take names with a dash, such as "
            f"{dashes[0]!r}; rankxform does"
        )
    return text


def inspection(found: Mapping[str, Any]) -> str:
    """Write what `inspect` found."""
    tables: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "strategy": _strategy_table,
        "strategies": _parts_table,
        "collection": _parts_table,
        "checkpoint": _checkpoint_table,
        "folder": _folder_table,
        "described": _described_table,
        "files": _files_table,
        "destination": _destination_table,
        "json": lambda found: f"{found['path']}: JSON, and no strategy; {size(found['size'])}",
    }
    return tables[found["kind"]](found)


def _strategy_table(found: Mapping[str, Any]) -> str:
    rows: dict[tuple[Any, ...], list[str]] = {}
    for layout in found["layouts"]:
        shard = layout["opt_size"] if layout["opt_step"] else 0
        facts = (
            layout["stage"], layout["device_matrix"], layout["tensor_map"],
            "-" if not shard else "all" if shard == -1 else shard,
            layout["slices"], layout["replicas"],
        )  # fmt: skip
        rows.setdefault(tuple(map(str, facts)), []).append(layout["name"])
    lines = [(*facts, pattern) for facts, names in rows.items() for pattern in patterns(names)]
    head = (
        "stage",
        "device matrix",
        "tensor map",
        "optimizer shard",
        "slices",
        "replicas",
        "parameter",
    )
    return (
        f"{found['path']}: strategy, {_count(found['stages'], 'stage')} of "
        f"{_count(found['ranks_in_a_stage'], 'rank')}, "
        f"{_count(len(found['layouts']), 'layout')}\n\n" + table(head, lines)
    )


def _checkpoint_table(found: Mapping[str, Any]) -> str:
    head = ("type", "shape", "bytes", "parameter")
    rows = [(e["dtype"], e["shape"], size(e["nbytes"]), e["name"]) for e in found["entries"]]
    extra = ", with a checksum" if found["checksum"] else ""
    return (
        f"{found['path']}: {found['format']}, {_count(found['parameters'], 'parameter')}, "
        f"{size(found['nbytes'])}{extra}\n\n" + table(head, rows)
    )


def _folder_table(found: Mapping[str, Any]) -> str:
    ranks = len({r["rank"] for r in found["ranks"]})
    step = f", step {found['step']}" if found["step"] else ""
    others = [one for one in found.get("steps", ()) if one != found["step"]]
    also = f" (there are {', '.join(others)} too)" if others else ""
    lines = [f"{found['path']}: checkpoint of {_count(ranks, 'rank')}{step}{also}, {_sum(found)}"]
    lines += [f"not clear: {found['unclear']}"] if "unclear" in found else []
    lines += warnings([found["warning"]]) if "warning" in found else []
    return "\n".join([*lines, "", _rank_rows(found)])


def _described_table(found: Mapping[str, Any]) -> str:
    step = f", iteration {found['step']}" if found["step"] else ""
    others = [one for one in found["steps"] if one != found["step"]]
    also = f" (there are {', '.join(others)} too)" if others else ""
    ranks = f" of {_count(found['ranks'], 'rank')}" if found.get("ranks") else ""
    files = found["files"]
    total = size(sum(one.get("nbytes", 0) for one in files))
    what = f"{found['form']}{step}{also}, {_count(len(files), 'file')}{ranks}, {total}"
    lines = [f"{found['path']}: {what}"]
    lines += [f"WRONG: {fault}" for fault in found["faults"]]
    lines += [f"note: {notice}" for notice in found.get("notices", ())]
    head: tuple[str, ...] = ("parameters", "bytes", "file")
    rows: list[tuple[object, ...]] = [_numbers(one) for one in files]
    if any("rank" in one for one in files):
        head = ("rank", *head)
        rows = [(one.get("rank", "-"), *row) for one, row in zip(files, rows)]
    return "\n".join([*lines, "", table(head, rows)])


def _rank_rows(found: Mapping[str, Any]) -> str:
    head = ("rank", "parameters", "bytes", "file")
    if found.get("form"):
        return table(head[1:], [_numbers(r) for r in found["ranks"]])
    return table(head, [(r["rank"], *_numbers(r)) for r in found["ranks"]])


def _numbers(one: Mapping[str, Any]) -> tuple[object, object, str]:
    if "error" in one:
        return "-", "-", f"{one['file']}: {one['error'].removeprefix(one['file'] + ': ')}"
    return one["parameters"], size(one["nbytes"]), one["file"]


def _sum(found: Mapping[str, Any]) -> str:
    return size(sum(one.get("nbytes", 0) for one in found["ranks"]))


def _files_table(found: Mapping[str, Any]) -> str:
    rows = [_numbers(one) for one in found["files"]]
    what = _count(len(rows), "checkpoint file")
    return f"{found['path']}: {what}\n\n" + table(("parameters", "bytes", "file"), rows)


def _parts_table(found: Mapping[str, Any]) -> str:
    if not found["parts"]:
        return f"{found['path']}: holds no checkpoint and no strategy"
    rows = [(Path(part["path"]).name, part["what"]) for part in found["parts"]]
    why = f"\nnot one thing: {found['why']}" if "why" in found else ""
    return f"{found['path']}: {_count(len(rows), 'thing')}{why}\n\n{table(('name', 'is'), rows)}"


def _destination_table(found: Mapping[str, Any]) -> str:
    if found["source"] is None:
        why = found.get("unclear") or "a run that was stopped; the same command continues it"
        return f"{found['path']}: unfinished work of rankxform ({why})"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found["written"]))
    number = len(found["ranks"])
    what = f"checkpoint of {_count(number, 'rank')}"
    if found["form"]:
        what = f"{found['form']}, {_count(number, 'file')}"
    state = "complete" if found["complete"] else "NOT COMPLETE"
    kept = "kept (verify can compare all bytes with them)" if found["fingerprints"] else "none"
    lines = [
        f"{found['path']}: {what}, {_sum(found)}, {state}",
        f"written       by rankxform, {when}",
        f"from          {found['source']}",
        f"options       {shlex.join(found['options']) or '-'}",
        f"fingerprints  {kept}",
    ]
    lines += [f"WRONG: {fault}" for fault in found["faults"]]
    if found["begun"]:
        lines.append("a run into this folder was stopped; the same command continues it")
    return "\n".join([*lines, "", _rank_rows(found)])


def as_json(value: Any) -> str:
    """Write facts, or a dataclass of them, as JSON."""
    return json.dumps(asdict(value) if is_dataclass(value) else value, indent=1)  # type: ignore
