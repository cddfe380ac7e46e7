"""What `inspect` prints: strategies, checkpoint files, folders and destinations."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rankxform.layout.names import patterns

from .report import warnings
from .units import count, size, table


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
        f"{found['path']}: strategy, {count(found['stages'], 'stage')} of "
        f"{count(found['ranks_in_a_stage'], 'rank')}, "
        f"{count(len(found['layouts']), 'layout')}\n\n" + table(head, lines)
    )


def _checkpoint_table(found: Mapping[str, Any]) -> str:
    head = ("type", "shape", "bytes", "parameter")
    rows = [(e["dtype"], e["shape"], size(e["nbytes"]), e["name"]) for e in found["entries"]]
    extra = ", with a checksum" if found["checksum"] else ""
    return (
        f"{found['path']}: {found['format']}, {count(found['parameters'], 'parameter')}, "
        f"{size(found['nbytes'])}{extra}\n\n" + table(head, rows)
    )


def _folder_table(found: Mapping[str, Any]) -> str:
    ranks = len({r["rank"] for r in found["ranks"]})
    step = f", step {found['step']}" if found["step"] else ""
    others = [one for one in found.get("steps", ()) if one != found["step"]]
    also = f" (there are {', '.join(others)} too)" if others else ""
    lines = [f"{found['path']}: checkpoint of {count(ranks, 'rank')}{step}{also}, {_sum(found)}"]
    lines += [f"not clear: {found['unclear']}"] if "unclear" in found else []
    lines += warnings([found["warning"]]) if "warning" in found else []
    return "\n".join([*lines, "", _rank_rows(found)])


def _described_table(found: Mapping[str, Any]) -> str:
    step = f", iteration {found['step']}" if found["step"] else ""
    others = [one for one in found["steps"] if one != found["step"]]
    also = f" (there are {', '.join(others)} too)" if others else ""
    ranks = f" of {count(found['ranks'], 'rank')}" if found.get("ranks") else ""
    files = found["files"]
    total = size(sum(one.get("nbytes", 0) for one in files))
    what = f"{found['form']}{step}{also}, {count(len(files), 'file')}{ranks}, {total}"
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
    what = count(len(rows), "checkpoint file")
    return f"{found['path']}: {what}\n\n" + table(("parameters", "bytes", "file"), rows)


def _parts_table(found: Mapping[str, Any]) -> str:
    if not found["parts"]:
        return f"{found['path']}: holds no checkpoint and no strategy"
    rows = [(Path(part["path"]).name, part["what"]) for part in found["parts"]]
    why = f"\nnot one thing: {found['why']}" if "why" in found else ""
    return f"{found['path']}: {count(len(rows), 'thing')}{why}\n\n{table(('name', 'is'), rows)}"


def _destination_table(found: Mapping[str, Any]) -> str:
    if found["source"] is None:
        why = found.get("unclear") or "a run that was stopped; the same command continues it"
        return f"{found['path']}: unfinished work of rankxform ({why})"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found["written"]))
    number = len(found["ranks"])
    what = f"checkpoint of {count(number, 'rank')}"
    if found["form"]:
        what = f"{found['form']}, {count(number, 'file')}"
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
