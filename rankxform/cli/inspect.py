"""The verb ``inspect``."""

from __future__ import annotations

import argparse
import shlex
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import FORMS
from rankxform.display.terminal import labelled_lines, red, shown_path
from rankxform.display.units import (
    first_of_ranks,
    format_count,
    format_seconds,
    format_size,
    short_table,
    table,
)
from rankxform.errors import CheckpointError, DifferenceError, UsageError
from rankxform.layout.names import natural_sort_key, pattern_of
from rankxform.options import flag_of
from rankxform.request import Request
from rankxform.transport import Team

from .maps import show_names
from .options import add_json, add_option, given, option, refuse
from .report import catalog_words, notes, samples_in_words, warnings
from .screen import Screen

if TYPE_CHECKING:
    from rankxform.job.check import Check
    from rankxform.job.replicas import ReplicaVerdict
    from rankxform.planning.consistency import Evidence
    from rankxform.source.opening import Source

SUMMARY = "Print what a checkpoint file or folder, or a strategy, holds."
EXAMPLE = "rankxform inspect output"


def add_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", help="a checkpoint file or folder, or a strategy")
    verb.add_argument(
        "--replicas",
        dest="compare_replicas",
        action="store_true",
        help="compare all bytes that several ranks should hold alike; needs --src-strategy",
    )
    verb.add_argument(
        "--check", action="store_true", help="look for all that is wrong with a checkpoint"
    )
    verb.add_argument("--full", action="store_true", help="with --check: read every byte")
    verb.add_argument("-v", "--verbose", action="store_true", help="print each parameter of a file")
    verb.add_argument(
        "--raw", action="store_true", help="print a strategy's matrices and tensor maps too"
    )
    verb.add_argument(
        "--page",
        metavar="FILE.html",
        help="write a page to search tensors and boxes in",
    )
    verb.add_argument(
        "--beside", metavar="OTHER", help="with --page: another checkpoint beside this one"
    )
    verb.add_argument(
        "--beside-strategy", metavar="STRATEGY", help="with --beside: how OTHER is sharded"
    )
    verb.add_argument(
        "--src-strategy", "--src-ckpt-strategy", metavar="STRATEGY", help="how PATH is sharded"
    )
    for name in ("src_pattern", "step", "suffix", "map", "config"):
        add_option(verb, option(name))
    add_json(verb)


def run(options: argparse.Namespace, team: Team) -> int:
    screen = Screen(options, team)
    _check_page(options)
    if options.compare_replicas:
        return _compare_replicas(options, team, screen)
    if options.check:
        return _check(options, team, screen)
    if options.full:
        raise UsageError("--full is for --check", "give both")
    if options.page is not None:
        return _write_page(options, team, screen)
    if options.src_strategy is not None and options.map is None:
        return _examine(options, team, screen)
    if options.map is not None:
        return show_names(team.bcast(lambda: _request(options, "none")), team, screen)
    from rankxform.inspection import inspect

    def look() -> dict[str, Any]:
        refuse(options, "is for --replicas, --src-strategy or --map", ("src_pattern",))
        return inspect(options.path, options.src_pattern)

    found = team.bcast(look)
    screen.result(
        "inspect", lambda: found, partial(inspection, found, options.verbose, options.raw)
    )
    return CheckpointError.exit_code if found.get("faults") else 0


def _request(options: argparse.Namespace, dst: str | None) -> Request:
    return Request(options.path, None, options.src_strategy, dst, **given(options))


def _check_page(options: argparse.Namespace) -> None:
    """Refuse what does not belong to a page, and what belongs to one alone."""
    needs = {"beside": "page", "beside_strategy": "beside"}
    for name, other in needs.items():
        if getattr(options, name) is not None and getattr(options, other) is None:
            flag, wanted = flag_of(name), flag_of(other)
            raise UsageError(f"{flag} is for {wanted}", f"{flag} and {wanted}")
    for name in ("check", "compare_replicas", "full", "map", "raw", "verbose"):
        if options.page is not None and getattr(options, name):
            flag = flag_of(name.removeprefix("compare_"))
            raise UsageError(f"--page and {flag}: a page does not show that", "leave one out")


def _write_page(options: argparse.Namespace, team: Team, screen: Screen) -> int:
    """Write a page of what one checkpoint holds, or two."""
    from rankxform.job.contents import contents

    from .page.file import check, save

    def asked() -> list[Request]:
        first = _request(options, "none")
        every = [first]
        if options.beside is not None:
            every.append(Request(options.beside, None, options.beside_strategy, "none"))
        for one in every:
            check(options.page, one, "--page")
        return every

    every = [contents(one, team) for one in team.bcast(asked)]
    faults = [text for one in every for text in one.faults]
    head: dict[str, Any] = {
        "title": " | ".join(one.src for one in every),
        "what": "Contents",
        "told": " | ".join(one.in_short() for one in every),
        "state": "wrong" if faults else "plan",
        "amounts": [],
    }
    drawn = [one.facts for one in every]
    team.bcast(lambda: save(options.page, {"result": "contents", "head": head, "contents": drawn}))
    lines = [f"{shown_path(one.src)}: {one.in_short()}" for one in every]
    lines += [*(f"  {text}" for text in faults), labelled_lines("page", shown_path(options.page))]
    facts = {"page": options.page, "faults": faults}
    screen.result("contents", lambda: facts, lambda: "\n".join(lines))
    return CheckpointError.exit_code if faults else 0


def _compare_replicas(options: argparse.Namespace, team: Team, screen: Screen) -> int:
    from rankxform.job.replicas import compare_replicas

    request = team.bcast(lambda: _request(options, options.src_strategy))
    found = compare_replicas(request, team, screen.progress)
    screen.result("replicas", found.as_dict, partial(_replicas, found))
    return 0 if found.same else DifferenceError.exit_code


def _examine(options: argparse.Namespace, team: Team, screen: Screen) -> int:
    """Say whether what files hold bears a strategy out."""
    from rankxform.job.evidence import examine_source

    request = team.bcast(lambda: _request(options, "none"))
    source, evidence = examine_source(request, team)
    facts = {
        "src": source.where.path,
        "src_ranks": source.table.ranks,
        "evidence": evidence.facts,
        "notices": (*source.notices, *evidence.notices),
        "warnings": (*source.warnings, *evidence.warnings),
    }
    screen.result("evidence", lambda: facts, partial(_evidence, source, evidence, facts))
    return 0 if evidence.samples else DifferenceError.exit_code


def _check(options: argparse.Namespace, team: Team, screen: Screen) -> int:
    """Say all that is wrong with a checkpoint."""
    from rankxform.job.check import check

    request = team.bcast(lambda: _request(options, "none"))
    found = check(request, options.full, team, screen.progress)
    screen.result("check", found.as_dict, partial(_checked, found))
    if found.same is None:
        return DifferenceError.exit_code
    return 0 if found.same else CheckpointError.exit_code


def _checked(found: Check) -> str:
    """Write what a check found, what is wrong first."""
    order = ("wrong", "doubtful", "right", "not checked")
    rows = sorted(found.rows, key=lambda row: order.index(row.state))
    told = {
        True: "nothing wrong was found",
        False: red("WRONG"),
        None: "nothing could be compared with anything",
    }[found.same]
    what = f"{FORMS[found.form].title}, {format_count(found.files_compared, 'file')}: {told}"
    reads, passed = format_count(found.reads, "read"), format_seconds(found.seconds)
    read = f"{reads}, {format_size(found.bytes_read)}, {passed}"
    lines = [f"{shown_path(found.src)}: {what}"]
    lines += [labelled_lines(row.check, f"{row.state}: {row.text}") for row in rows]
    return "\n".join([*lines, labelled_lines("looked at", read)])


def _evidence(source: Source, evidence: Evidence, facts: Mapping[str, Any]) -> str:
    if evidence.samples:
        told = f"fits, by {samples_in_words(evidence.facts)}"
    else:
        told = "nothing could be compared: no two files hold slices of one tensor"
    read = f"{format_count(evidence.reads, 'read')} of {format_size(evidence.bytes_read)}"
    lines = [
        labelled_lines("from", shown_path(source.where.path), catalog_words(source.table)),
        labelled_lines("strategy", f"{told} ({read})"),
        *notes(facts["notices"]),
        *warnings(facts["warnings"]),
    ]
    return "\n".join(lines)


def inspection(found: Mapping[str, Any], verbose: bool = False, raw: bool = False) -> str:
    """Write what `inspect` found.

    verbose: each parameter of a file has a row; raw: device matrices and tensor maps too.
    """
    tables: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "strategy": lambda found: _strategy(found, raw),
        "strategies": _parts_table,
        "collection": _parts_table,
        "checkpoint": lambda found: _checkpoint_table(found, verbose),
        "folder": _folder_table,
        "described": _described_table,
        "files": _files_table,
        "destination": _destination_table,
        "json": lambda found: (
            f"{shown_path(found['path'])}: JSON, and no strategy; "
            f"{format_size(found['file_bytes'])}"
        ),
    }
    return tables[found["kind"]](found)


def _checkpoint_table(found: Mapping[str, Any], verbose: bool) -> str:
    """Write what a file holds: a row for all layers' parameters of one kind, or for each."""
    alike: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for entry in sorted(found["entries"], key=lambda entry: natural_sort_key(entry["name"])):
        name = entry["name"] if verbose else pattern_of(entry["name"])
        alike.setdefault((name, entry["dtype"], str(entry["shape"])), []).append(entry)
    rows = [
        (dtype, shape, format_size(sum(e["nbytes"] for e in some)),
         some[0]["name"] if len(some) == 1 else f"{name} ({len(some):,})")
        for (name, dtype, shape), some in alike.items()
    ]  # fmt: skip
    extra = ", with a checksum" if found["checksum"] else ""
    head = (
        f"{shown_path(found['path'])}: {found['format']}, "
        f"{format_count(found['parameters'], 'parameter')}, {format_size(found['nbytes'])}{extra}"
    )
    return "\n\n".join([head, table(("type", "shape", "bytes", "parameter"), rows)])


def _folder_table(found: Mapping[str, Any]) -> str:
    ranks = len({r["rank"] for r in found["shards"]})
    step = f", step {found['step']}" if found["step"] else ""
    others = [one for one in found.get("steps", ()) if one != found["step"]]
    also = f" (there are {', '.join(others)} too)" if others else ""
    what = f"checkpoint of {format_count(ranks, 'rank')}{step}{also}, {_sum(found)}"
    lines = [f"{shown_path(found['path'])}: {what}"]
    lines += [f"not clear: {found['unclear']}"] if "unclear" in found else []
    lines += warnings(found.get("warnings", ()))
    return "\n".join([*lines, "", _rank_rows(found)])


def _described_table(found: Mapping[str, Any]) -> str:
    step = f", iteration {found['step']}" if found["step"] else ""
    others = [one for one in found["steps"] if one != found["step"]]
    also = f" (there are {', '.join(others)} too)" if others else ""
    ranks = f" of {format_count(found['ranks'], 'rank')}" if found.get("ranks") else ""
    files = found["shards"]
    total = format_size(sum(one.get("nbytes", 0) for one in files))
    what = f"{found['form_title']}{step}{also}, {format_count(len(files), 'file')}{ranks}, {total}"
    lines = [f"{shown_path(found['path'])}: {what}"]
    lines += [f"WRONG: {fault}" for fault in found["faults"]]
    lines += [f"note: {notice}" for notice in found.get("notices", ())]
    head: tuple[str, ...] = ("parameters", "bytes", "file")
    rows: list[tuple[object, ...]] = [_numbers(one, found["path"]) for one in files]
    if any("rank" in one for one in files):
        head = ("rank", *head)
        rows = [(one.get("rank", "-"), *row) for one, row in zip(files, rows)]
    return "\n".join([*lines, "", table(head, rows)])


def _rank_rows(found: Mapping[str, Any]) -> str:
    head = ("rank", "parameters", "bytes", "file")
    if found.get("form_title"):
        return table(head[1:], [_numbers(r, found["path"]) for r in found["shards"]])
    return table(head, [(r["rank"], *_numbers(r, found["path"])) for r in found["shards"]])


def _numbers(one: Mapping[str, Any], folder: str) -> tuple[object, object, str]:
    file = one["file"].removeprefix(folder.rstrip("/") + "/")
    if "error" in one:
        return "-", "-", f"{file}: {one['error'].removeprefix(one['file'] + ': ')}"
    return one["parameters"], format_size(one["nbytes"]), file


def _sum(found: Mapping[str, Any]) -> str:
    return format_size(sum(one.get("nbytes", 0) for one in found["shards"]))


def _files_table(found: Mapping[str, Any]) -> str:
    rows = [_numbers(one, found["path"]) for one in found["shards"]]
    what = format_count(len(rows), "checkpoint file")
    head = f"{shown_path(found['path'])}: {what}"
    return "\n\n".join([head, table(("parameters", "bytes", "file"), rows)])


def _parts_table(found: Mapping[str, Any]) -> str:
    if not found["items"]:
        return f"{shown_path(found['path'])}: holds no checkpoint and no strategy"
    rows = [(Path(part["path"]).name, part["what"]) for part in found["items"]]
    why = f"\ncannot be read as one: {found['why']}" if "why" in found else ""
    head = f"{shown_path(found['path'])}: {format_count(len(rows), 'entry')}{why}"
    return "\n\n".join([head, table(("name", "is"), rows)])


def _destination_table(found: Mapping[str, Any]) -> str:
    if found["src"] is None:
        why = (
            found.get("unclear")
            or "a run that is at work or was stopped; the same command continues it"
        )
        return f"{shown_path(found['path'])}: unfinished work of rankxform ({why})"
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(found["written_at"]))
    number = len(found["shards"])
    what = f"checkpoint of {format_count(number, 'rank')}"
    if found["form_title"]:
        what = f"{found['form_title']}, {format_count(number, 'file')}"
    state = "complete" if found["complete"] else "NOT COMPLETE"
    checks = "fingerprints are kept: verify can compare all bytes with them"
    lines = [
        f"{shown_path(found['path'])}: {what}, {_sum(found)}, {state}",
        labelled_lines("written", f"by rankxform, {when}"),
        labelled_lines("from", found["src"]),
        labelled_lines("options", shlex.join(found["options"]) or "-"),
        labelled_lines("checks", checks if found["fingerprints"] else "no fingerprints are kept"),
    ]
    lines += [f"WRONG: {fault}" for fault in found["faults"]]
    if found["begun"]:
        lines.append(
            "a run into this folder is at work or was stopped; the same command continues it"
        )
    return "\n".join([*lines, "", _rank_rows(found)])


def _strategy(found: Mapping[str, Any], raw: bool) -> str:
    from rankxform.storage import strategies

    from .strategy_report import shown

    return shown(found["path"], strategies.load(found["path"]), raw)


def _replicas(found: ReplicaVerdict) -> str:
    """Say where source ranks that should hold the same bytes do not."""
    files = format_count(found.files_compared, "file")
    what = f"{format_size(found.bytes_compared)} in {files}, {format_seconds(found.seconds)}"
    told = warnings(found.warnings)
    if found.same is None:
        return "\n".join([f"NOTHING COMPARED: no bytes are held by several ranks, {what}", *told])
    if found.same:
        return "\n".join(
            [*told, labelled_lines("same", f"all bytes that several ranks hold, {what}")]
        )
    rows = [
        (one.name, one.box, " | ".join(first_of_ranks(list(ranks)) for ranks in one.groups))
        for one in found.differences
    ]
    lines = short_table(("parameter", "region", "ranks with equal bytes"), rows, "places")
    last = f"{red('DIFFERENT')}: {format_count(len(rows), 'place')}; compared {what}"
    return "\n".join([lines, *told, last])
