"""The verb ``inspect``."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from rankxform.display.text import (
    format_count,
    format_size,
    labelled_lines,
    short_table,
    shown_path,
    table,
    warning_lines,
)
from rankxform.errors import CheckpointError, UsageError
from rankxform.layout.names import natural_sort_key, pattern_of
from rankxform.options import flag_of
from rankxform.request import Request
from rankxform.results import DictResult
from rankxform.transport import Team

from .maps import show_names
from .options import Parsed, refuse_given_options, request_options
from .screen import Screen


def run(options: Parsed, team: Team) -> int:
    screen = Screen(options, team)
    _check_page(options)
    if options.compare_replicas or options.check:
        from rankxform.verbs.check import check, compare_replicas

        if options.compare_replicas:
            request = team.bcast(lambda: _request(options, options.src_strategy))
            replicas = compare_replicas(request, team, screen.progress)
            return screen.show("replicas", lambda: replicas)
        request = team.bcast(lambda: _request(options, "none"))
        checked = check(request, options.full, team, screen.progress)
        return screen.show("check", lambda: checked)
    if options.full:
        raise UsageError("--full is for --check", "give both")
    if options.page is not None:
        return _write_page(options, team, screen)
    if options.src_strategy is not None and options.map is None:
        from rankxform.verbs.check import compare_samples

        samples = compare_samples(team.bcast(lambda: _request(options, "none")), team)
        return screen.show("evidence", lambda: samples)
    if options.map is not None:
        return show_names(team.bcast(lambda: _request(options, "none")), team, screen)
    from rankxform.inspection import inspect

    def look() -> DictResult:
        refuse_given_options(
            options, "is for --replicas, --src-strategy or --map", ("src_pattern",)
        )
        facts = inspect(options.path, options.src_pattern)
        code = CheckpointError.exit_code if facts.get("faults") else 0
        return DictResult(facts, inspection(facts, options.verbose, options.raw), code)

    return screen.show("inspect", look)


def _request(options: Parsed, dst: str | None) -> Request:
    return Request(options.path, None, options.src_strategy, dst, **request_options(options))


def _check_page(options: Parsed) -> None:
    """Refuse what does not belong to a page, and what belongs to one alone."""
    needs = {"beside": "page", "beside_strategy": "beside"}
    for name, needed_name in needs.items():
        if getattr(options, name) is not None and getattr(options, needed_name) is None:
            flag, needed_flag = flag_of(name), flag_of(needed_name)
            raise UsageError(f"{flag} is for {needed_flag}", f"{flag} and {needed_flag}")
    for name in ("check", "compare_replicas", "full", "map", "raw", "verbose"):
        if options.page is not None and getattr(options, name):
            flag = flag_of(name.removeprefix("compare_"))
            raise UsageError(f"--page and {flag}: a page does not show that", "leave one out")


def _write_page(options: Parsed, team: Team, screen: Screen) -> int:
    """Write a page of what one checkpoint holds, or two."""
    from rankxform.verbs.contents import contents

    from .page import check_page_path, save_page

    def asked() -> list[Request]:
        first = _request(options, "none")
        requests = [first]
        if options.beside is not None:
            requests.append(Request(options.beside, None, options.beside_strategy, "none"))
        for request in requests:
            check_page_path(options.page, request, "--page")
        return requests

    checkpoints = [contents(request, team) for request in team.bcast(asked)]
    faults = [text for checkpoint in checkpoints for text in checkpoint.faults]
    head: dict[str, Any] = {
        "title": " | ".join(checkpoint.src for checkpoint in checkpoints),
        "what": "Contents",
        "told": " | ".join(checkpoint.in_short() for checkpoint in checkpoints),
        "state": "wrong" if faults else "plan",
        "amounts": [],
    }
    drawn = [checkpoint.facts for checkpoint in checkpoints]
    team.bcast(
        lambda: save_page(options.page, {"result": "contents", "head": head, "contents": drawn})
    )
    lines = [f"{shown_path(checkpoint.src)}: {checkpoint.in_short()}" for checkpoint in checkpoints]
    lines += [*(f"  {text}" for text in faults), labelled_lines("page", shown_path(options.page))]
    facts = {"page": options.page, "faults": faults}
    code = CheckpointError.exit_code if faults else 0
    return screen.show("contents", lambda: DictResult(facts, "\n".join(lines), code))


def inspection(facts: Mapping[str, Any], verbose: bool = False, raw: bool = False) -> str:
    """Write what `inspect` found.

    verbose: each parameter of a file has a row, and each of many files; raw: device matrices and
    tensor maps too.
    """
    files_table = table if verbose else partial(short_table, noun="files")
    tables: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "strategy": lambda facts: _strategy(facts, raw),
        "strategies": _parts_table,
        "collection": _parts_table,
        "checkpoint": lambda facts: _checkpoint_table(facts, verbose),
        "folder": lambda facts: _folder_table(facts, files_table),
        "described": lambda facts: _described_table(facts, files_table),
        "files": lambda facts: _files_table(facts, files_table),
        "destination": lambda facts: _destination_table(facts, files_table),
        "json": lambda facts: (
            f"{shown_path(facts['path'])}: JSON, and no strategy; "
            f"{format_size(facts['file_bytes'])}"
        ),
    }
    return tables[facts["kind"]](facts)


def _checkpoint_table(facts: Mapping[str, Any], verbose: bool) -> str:
    """Write what a file holds: a row for all layers' parameters of one kind, or for each."""
    entries_by_kind: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for entry in sorted(facts["entries"], key=lambda entry: natural_sort_key(entry["name"])):
        name = entry["name"] if verbose else pattern_of(entry["name"])
        entries_by_kind.setdefault((name, entry["dtype"], str(entry["shape"])), []).append(entry)
    rows = [
        (dtype, shape, format_size(sum(e["nbytes"] for e in entries)),
         entries[0]["name"] if len(entries) == 1 else f"{name} ({len(entries):,})")
        for (name, dtype, shape), entries in entries_by_kind.items()
    ]  # fmt: skip
    extra = ", with a checksum" if facts["checksum"] else ""
    head = (
        f"{shown_path(facts['path'])}: {facts['format']}, "
        f"{format_count(facts['parameters'], 'parameter')}, {format_size(facts['nbytes'])}{extra}"
    )
    return "\n\n".join([head, table(("type", "shape", "bytes", "parameter"), rows)])


def _folder_table(facts: Mapping[str, Any], files_table: Callable[..., str]) -> str:
    ranks = len({r["rank"] for r in facts["shards"]})
    step = f", step {facts['step']}" if facts["step"] else ""
    other_steps = [step_name for step_name in facts.get("steps", ()) if step_name != facts["step"]]
    also = f" (there are {', '.join(other_steps)} too)" if other_steps else ""
    summary = f"checkpoint of {format_count(ranks, 'rank')}{step}{also}, {_sum(facts)}"
    lines = [f"{shown_path(facts['path'])}: {summary}"]
    lines += [f"not clear: {facts['unclear']}"] if "unclear" in facts else []
    lines += warning_lines(facts.get("warnings", ()))
    return "\n".join([*lines, "", _rank_rows(facts, files_table)])


def _described_table(facts: Mapping[str, Any], files_table: Callable[..., str]) -> str:
    step = f", iteration {facts['step']}" if facts["step"] else ""
    other_steps = [step_name for step_name in facts["steps"] if step_name != facts["step"]]
    also = f" (there are {', '.join(other_steps)} too)" if other_steps else ""
    ranks = f" of {format_count(facts['ranks'], 'rank')}" if facts.get("ranks") else ""
    files = facts["shards"]
    total = format_size(sum(file.get("nbytes", 0) for file in files))
    summary = (
        f"{facts['form_title']}{step}{also}, {format_count(len(files), 'file')}{ranks}, {total}"
    )
    lines = [f"{shown_path(facts['path'])}: {summary}"]
    lines += [f"WRONG: {fault}" for fault in facts["faults"]]
    lines += [f"note: {notice}" for notice in facts.get("notices", ())]
    head: tuple[str, ...] = ("parameters", "bytes", "file")
    rows: list[tuple[object, ...]] = [_numbers(file, facts["path"]) for file in files]
    if any("rank" in file for file in files):
        head = ("rank", *head)
        rows = [(file.get("rank", "-"), *row) for file, row in zip(files, rows)]
    return "\n".join([*lines, "", files_table(head, rows)])


def _rank_rows(facts: Mapping[str, Any], files_table: Callable[..., str]) -> str:
    head = ("rank", "parameters", "bytes", "file")
    if facts.get("form_title"):
        return files_table(head[1:], [_numbers(r, facts["path"]) for r in facts["shards"]])
    return files_table(head, [(r["rank"], *_numbers(r, facts["path"])) for r in facts["shards"]])


def _numbers(file_facts: Mapping[str, Any], folder: str) -> tuple[object, object, str]:
    file = file_facts["file"].removeprefix(folder.rstrip("/") + "/")
    if "error" in file_facts:
        return "-", "-", f"{file}: {file_facts['error'].removeprefix(file_facts['file'] + ': ')}"
    return file_facts["parameters"], format_size(file_facts["nbytes"]), file


def _sum(facts: Mapping[str, Any]) -> str:
    return format_size(sum(shard.get("nbytes", 0) for shard in facts["shards"]))


def _files_table(facts: Mapping[str, Any], files_table: Callable[..., str]) -> str:
    rows = [_numbers(shard, facts["path"]) for shard in facts["shards"]]
    files_text = format_count(len(rows), "checkpoint file")
    head = f"{shown_path(facts['path'])}: {files_text}"
    return "\n\n".join([head, files_table(("parameters", "bytes", "file"), rows)])


def _parts_table(facts: Mapping[str, Any]) -> str:
    if not facts["items"]:
        return f"{shown_path(facts['path'])}: holds no checkpoint and no strategy"
    rows = [(Path(part["path"]).name, part["what"]) for part in facts["items"]]
    reason = f"\ncannot be read as one: {facts['why']}" if "why" in facts else ""
    head = f"{shown_path(facts['path'])}: {format_count(len(rows), 'entry')}{reason}"
    return "\n\n".join([head, table(("name", "is"), rows)])


def _destination_table(facts: Mapping[str, Any], files_table: Callable[..., str]) -> str:
    if facts["src"] is None:
        reason = (
            facts.get("unclear")
            or "a run that is at work or was stopped; the same command continues it"
        )
        return f"{shown_path(facts['path'])}: unfinished work of rankxform ({reason})"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(facts["written_at"]))
    number = len(facts["shards"])
    summary = f"checkpoint of {format_count(number, 'rank')}"
    if facts["form_title"]:
        summary = f"{facts['form_title']}, {format_count(number, 'file')}"
    state = "complete" if facts["complete"] else "NOT COMPLETE"
    checks = "fingerprints are kept: verify can compare all bytes with them"
    lines = [
        f"{shown_path(facts['path'])}: {summary}, {_sum(facts)}, {state}",
        labelled_lines("written", f"by rankxform, {when}"),
        labelled_lines("from", facts["src"]),
        labelled_lines("options", shlex.join(facts["options"]) or "-"),
        labelled_lines("checks", checks if facts["fingerprints"] else "no fingerprints are kept"),
    ]
    lines += [f"WRONG: {fault}" for fault in facts["faults"]]
    if facts["begun"]:
        lines.append(
            "a run into this folder is at work or was stopped; the same command continues it"
        )
    return "\n".join([*lines, "", _rank_rows(facts, files_table)])


def _strategy(facts: Mapping[str, Any], raw: bool) -> str:
    from rankxform.storage.user_files import load_strategy

    from .strategy import describe_strategy

    return describe_strategy(facts["path"], load_strategy(facts["path"]), raw)
