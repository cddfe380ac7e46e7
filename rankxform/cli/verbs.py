"""The verbs of the command: what is asked for, done and printed. Modules are imported as needed."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.errors import (
    CheckpointError,
    DifferenceError,
    StorageError,
    UsageError,
)
from rankxform.request import Request
from rankxform.transport import Team

from . import arguments, page_file, report
from .json_output import as_json
from .options import given, refuse
from .progress import Progress, speak

if TYPE_CHECKING:
    from rankxform.target.aim import Conversion
    from rankxform.transport.team import Show

    from .launch import Program


def _transform(options: argparse.Namespace, processes: Team) -> None:
    if options.dry_run:
        _plan(options, processes)
        return
    from rankxform.job.transform import convert
    from rankxform.metrics import Phases
    from rankxform.target.aim import prepare

    def begin(conversion: Conversion, nbytes: int) -> Show:
        if not options.json:
            _begin(options, conversion, processes)
            flags = arguments.ignored(options)
            if flags and not options.quiet:
                text = f"{', '.join(flags)}: not needed, the work is shared among the processes"
                _print_quietly("\n".join(report.notes([text])))
        return Progress(nbytes, options.progress)

    phases = Phases()
    request = processes.bcast(lambda: arguments.request(options))
    processes.bcast(lambda: page_file.check(options.report, request))
    conversion = prepare(request, processes, phases)
    done = convert(conversion, processes, begin, phases)
    if processes.rank == 0:
        text = partial(report.summary, done, **_detail(options))
        _tell(options, "transform", done.as_dict, text, _print_quietly)
        if options.profile and not options.json:
            _print_quietly(report.profile(done))
    page_file.report(options, processes, lambda: conversion, done)


def _begin(options: argparse.Namespace, conversion: Conversion, processes: Team) -> None:
    """Say what is about to happen."""
    if not options.quiet:
        _print_quietly(report.header(conversion, processes.size))


def _detail(options: argparse.Namespace) -> dict[str, bool]:
    """Return how much is to be printed."""
    return {"verbose": options.verbose, "quiet": options.quiet}


def _launch(options: argparse.Namespace, processes: Team) -> Program:
    from .launch import launch

    def begin(conversion: Conversion, nbytes: int) -> Show:
        if not options.json:
            _begin(options, conversion, processes)
        return Progress(nbytes, options.progress)

    def tell(text: str) -> None:
        if not options.json:
            _print_quietly(text)

    request = processes.bcast(lambda: arguments.request(options))
    done, program = launch(options, request, processes, begin, tell)
    if processes.rank == 0 and options.json:
        facts = {"checkpoint": program.checkpoint, "transform": done.as_dict() if done else None}
        _print_quietly(as_json("launch", facts))
    elif processes.rank == 0 and done is not None:
        _print_quietly(report.summary(done, **_detail(options)))
    return program


def _verify(options: argparse.Namespace, processes: Team) -> int:
    from rankxform.job.verify import verify
    from rankxform.job.verify_manifest import verify_alone
    from rankxform.target.aim import prepare

    from . import verdict_report

    def begin(conversion: Conversion, nbytes: int) -> Show:
        if not options.json:
            _begin(options, conversion, processes)
        return Progress(nbytes, options.progress)

    if processes.bcast(lambda: arguments.means_manifest(options)):
        if options.report:
            raise UsageError("--report is for a comparison with the source: verify SRC DST")
        found = verify_alone(
            options.src, processes, lambda nbytes: Progress(nbytes, options.progress)
        )
    else:
        request = processes.bcast(lambda: arguments.request(options))
        processes.bcast(lambda: page_file.check(options.report, request))
        found = verify(request, processes, begin)
    if processes.rank == 0:
        text = partial(verdict_report.verdict, found, **_detail(options))
        _tell(options, "verify", found.as_dict, text)
    if not found.by_manifest:
        again = partial(prepare, request, processes)  # of what was asked for, not of what is there
        page_file.report(options, processes, again, verdict=found)
    return 0 if found.same else DifferenceError.exit_code


def _plan(options: argparse.Namespace, processes: Team) -> None:
    from rankxform.job.picture import flow, kinds
    from rankxform.job.plan import summarize
    from rankxform.job.predict import predict, predict_loads
    from rankxform.target.aim import prepare

    from . import planned

    request = processes.bcast(lambda: arguments.request(options))
    simulate = getattr(options, "simulate", None)
    if not simulate and (
        getattr(options, "nodes", None) or getattr(options, "src_placement", None)
    ):
        raise UsageError("--nodes and --src-placement are for --simulate P")
    conversion = prepare(request, processes)
    processes.bcast(lambda: page_file.check(options.report, request))
    if simulate:
        processes.bcast(lambda: _simulate(conversion, options))
        return
    count = getattr(options, "processes", None) or processes.size
    found, policy = predict_loads(conversion, count, processes)
    prediction = None
    if options.verb == "transform" and request.dst is not None:
        prediction = predict(conversion, found, policy, processes)

    def show() -> None:
        plan = summarize(conversion, found, policy)
        if options.report:
            page_file.write(options, conversion, plan)
        head = "" if getattr(options, "quiet", False) else report.header(conversion, count)

        def text() -> str:
            between, sharded = flow(plan, conversion), kinds(conversion)
            return planned.plan_table(head, plan, prediction, between, sharded, options.verbose)

        _tell(options, "plan", partial(planned.plan_facts, plan, prediction), text)

    processes.bcast(show)


def _simulate(conversion: Conversion, options: argparse.Namespace) -> None:
    """Print what a cluster would do, and write its page."""
    from rankxform.job.plan import summarize
    from rankxform.planning.cost_model import ReadPolicy
    from rankxform.planning.read_method import READ_METHODS

    from . import planned

    found, facts = planned.simulated(conversion, options)
    if options.report:
        policy = ReadPolicy(READ_METHODS[conversion.request.read_method])
        page_file.write(options, conversion, summarize(conversion, found, policy), simulated=facts)
    text = partial(planned.simulation_table, conversion, found, facts)
    _tell(options, "simulation", lambda: facts, text)


def _ranks(options: argparse.Namespace, processes: Team) -> None:
    from rankxform.ops.base import Derivation
    from rankxform.planning.needed import needed_ranks
    from rankxform.storage import strategies
    from rankxform.target.aim import prepare

    if options.src:
        request = processes.bcast(
            lambda: Request(
                options.src, None, options.src_strategy, options.dst_strategy, **given(options)
            )
        )  # fmt: skip
        conversion = prepare(request, processes)
        planner = conversion.planner
        found = {rank: planner.plan(rank).src_ranks for rank in conversion.ranks}
        if processes.rank == 0:
            os.write(2, "".join(f"{w}\n" for w in report.warnings(conversion.warnings)).encode())
    else:
        processes.bcast(lambda: refuse(options, "needs SRC", ("ranks", "rename")))
        derivation = processes.agree(lambda: Derivation.of({"rename": options.rename}))
        found = processes.bcast(
            lambda: needed_ranks(
                derivation.strategy(strategies.load(options.src_strategy)),
                strategies.load(options.dst_strategy),
                options.ranks,
            )
        )
    if processes.rank == 0:
        facts = {"needed_ranks": found}
        _tell(options, "ranks", lambda: facts, partial(report.ranks_table, found))


def _merge(options: argparse.Namespace, processes: Team) -> None:
    from rankxform.storage import strategies

    def merge() -> None:
        target = Path(options.target)
        if target.exists() and not options.overwrite:
            raise StorageError(f"{target}: is already there; remove it, or say --overwrite")
        merged = strategies.merge(Path(options.folder), target)
        facts = {"files": [str(target)], **merged.facts}
        _tell(options, "merge", lambda: facts, partial(report.merged, target, merged))

    processes.bcast(merge)


def _strategy(options: argparse.Namespace, processes: Team) -> int:
    from .strategy import ACTIONS

    def act() -> int:
        text, code = ACTIONS[options.action][2](options)
        _print(text)
        return code

    return processes.bcast(act)


def _maps(options: argparse.Namespace, processes: Team) -> None:
    from . import maps

    if options.action == maps.CHECK:
        _show_names(options, processes, lambda: maps.request(options))
        return

    def show() -> None:
        text, facts = maps.shown(options.map) if options.action == maps.SHOW else maps.listed()
        _tell(options, f"maps {options.action}", lambda: facts, lambda: text)

    processes.bcast(show)


def _show_names(
    options: argparse.Namespace, processes: Team, request: Callable[[], Request]
) -> None:
    """Print what becomes of each name by a map."""
    from rankxform.target.aim import prepare

    from . import maps

    conversion = prepare(processes.bcast(request), processes)

    def show() -> None:
        text, facts = maps.checked(conversion)
        lines = [text, *report.notes(conversion.notices)]
        text = "\n".join(lines + report.warnings(conversion.warnings))
        _tell(options, "maps check", lambda: facts, lambda: text)

    processes.bcast(show)


def _inspect(options: argparse.Namespace, processes: Team) -> int:
    if options.compare_replicas:
        from rankxform.job.replicas import compare_replicas

        from . import verdict_report

        strategy = options.src_strategy
        request = processes.bcast(
            lambda: Request(options.path, None, strategy, strategy, **given(options))
        )
        found = compare_replicas(request, processes, Progress)
        if processes.rank == 0:
            text = partial(verdict_report.replicas, found)
            _tell(options, "replicas", found.as_dict, text)
        return DifferenceError.exit_code if found.differences else 0
    if options.map is not None:
        strategy = options.src_strategy
        _show_names(
            options, processes,
            lambda: Request(options.path, None, strategy, "none", **given(options)),
        )  # fmt: skip
        return 0
    processes.bcast(lambda: refuse(options, "is for --replicas or --map", ("src_pattern",)))
    if options.src_strategy is not None:
        raise UsageError("--src-strategy is for --replicas or --map")
    from rankxform.inspection import inspect

    from .inspect_report import inspection

    def show() -> int:
        facts = inspect(Path(options.path), options.src_pattern)
        text = partial(inspection, facts, options.verbose, options.raw)
        _tell(options, "inspect", lambda: facts, text)
        return CheckpointError.exit_code if facts.get("faults") else 0

    return processes.bcast(show)


def _hostfile(options: argparse.Namespace, processes: Team) -> None:
    from rankxform.storage.posix import read_bytes
    from rankxform.transport import hostfile

    def convert() -> None:
        path = Path(options.table)
        hosts = hostfile.from_rank_table(read_bytes(path), str(path))
        text = hostfile.text(hosts, options.style, options.slots)
        facts = {"hosts": list(map(vars, hosts))}
        _tell(options, "hostfile", lambda: facts, lambda: text)

    processes.bcast(convert)


def _tell(
    options: argparse.Namespace,
    result: str,
    facts: Callable[[], Mapping[str, Any]],
    text: Callable[[], str],
    write: Callable[[str], None] | None = None,
) -> None:
    """Print a result for people, or as JSON."""
    (write or _print)(as_json(result, facts()) if options.json else text())


def _print(text: str) -> None:
    """Print a result; a reader that went away, as `head` does, is no error."""
    speak()
    try:
        sys.stdout.buffer.write((text + "\n").encode(errors="backslashreplace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _print_quietly(text: str) -> None:
    """Print what goes along with the work, which goes on if nobody can read it."""
    try:
        _print(text)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


VERBS: dict[str, Callable[[argparse.Namespace, Team], int | Program | None]] = {
    "launch": _launch,
    "transform": _transform,
    "verify": _verify,
    "plan": _plan,
    "ranks": _ranks,
    "merge": _merge,
    "strategy": _strategy,
    "maps": _maps,
    "inspect": _inspect,
    "hostfile": _hostfile,
}
