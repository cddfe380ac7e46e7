"""From the command line to an exit code, the same on every process."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from rankxform import hostfile, inspection, job
from rankxform.errors import (
    DifferenceError,
    RankxformError,
    StoppedError,
    StorageError,
    UsageError,
    exit_code,
)
from rankxform.storage import strategies
from rankxform.storage.posix import read_bytes
from rankxform.transport import Team, team
from rankxform.transport.launcher import launched_rank

from . import arguments, planned, report
from .launch import Program, launch
from .progress import Progress, await_first_word, speak, style_of
from .simulation import simulated
from .stopping import Stopping, seconds_left


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit code (`rankxform.errors` lists them)."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if arguments.wants_help(argv):
        return _help(argv)
    await_first_word("none" if launched_rank() else style_of(argv), job.since_process_start())
    try:
        processes = team()
    except RankxformError as error:
        return exit_code(error) if launched_rank() else _say(error)
    try:
        outcome = _run(argv, processes)
    except RankxformError as error:
        outcome = _say(error) if processes.rank == 0 else exit_code(error)
    except BaseException as error:
        processes.abort(*_describe(error))
        raise
    speak()
    if not isinstance(outcome, Program):
        return processes.finish(outcome)
    processes.finish(0)
    try:
        outcome.start()
    except OSError as error:
        return _say(UsageError(f"{outcome.command[0]}: cannot be started: {error.strerror}"))


def _help(argv: Sequence[str]) -> int:
    if launched_rank() > 0:
        return 0
    try:
        arguments.parse(argv or ["--help"])
    except SystemExit as end:
        return int(end.code or 0)
    except RankxformError as error:
        return _say(error)
    return 0


def _say(error: BaseException) -> int:
    speak()
    text = f"rankxform: error: {error}\n"
    if isinstance(error, RankxformError) and error.resumable:
        text += "rankxform: what is complete is kept; run the same command again to continue\n"
    with suppress(OSError):
        os.write(2, text.encode(errors="backslashreplace"))  # one call: lines never mix
    return exit_code(error)


def _describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return (
            "interrupted; no unfinished file bears a final name, run again",
            StoppedError.exit_code,
        )
    traceback.print_exception(type(error), error, error.__traceback__)
    return f"a bug of rankxform's own: {type(error).__name__}: {error}", exit_code(error)


def _run(argv: Sequence[str], processes: Team) -> int | Program:
    options = processes.share(lambda: arguments.parse(argv))
    if options.verb in ("transform", "verify", "launch"):
        limit = options.time_limit
        processes.stop_reason = Stopping(seconds_left() if limit is None else limit)
        processes.stall_seconds = options.stall_limit
    run: Callable[[argparse.Namespace, Team], int | Program | None] = _VERBS[options.verb]
    return run(options, processes) or 0


def _transform(options: argparse.Namespace, processes: Team) -> None:
    if options.dry_run:
        _plan(options, processes)
        return

    def begin(conversion: job.Conversion, nbytes: int) -> Progress:
        _tell(report.opening(conversion, processes.size))
        for flag in arguments.ignored(options):
            _tell(f"note: {flag} means nothing here: the work is shared among the processes")
        return Progress(nbytes, options.progress)

    request = processes.share(lambda: arguments.request(options))
    done = job.transform(request, processes, begin)
    if processes.rank == 0:
        _tell(report.closing(done))
        if options.profile:
            _tell(report.profile(done))


def _launch(options: argparse.Namespace, processes: Team) -> Program:
    def begin(conversion: job.Conversion, nbytes: int) -> Progress:
        _tell(report.opening(conversion, processes.size))
        return Progress(nbytes, options.progress)

    request = processes.share(lambda: arguments.request(options))
    done, program = launch(options, request, processes, begin, _tell)
    if processes.rank == 0 and done is not None:
        _tell(report.closing(done))
    return program


def _verify(options: argparse.Namespace, processes: Team) -> int:
    def begin(conversion: job.Conversion, nbytes: int) -> Progress:
        if not options.json:
            _tell(report.opening(conversion, processes.size))
        return Progress(nbytes, options.progress)

    if processes.share(lambda: arguments.means_manifest(options)):
        found = job.verify_alone(
            options.src, processes, lambda nbytes: Progress(nbytes, options.progress)
        )
    else:
        request = processes.share(lambda: arguments.request(options))
        found = job.verify(request, processes, begin)
    if processes.rank == 0:
        _print(
            report.as_json(report.verdict_facts(found)) if options.json else report.verdict(found)
        )
    return DifferenceError.exit_code if found.differences else 0


def _plan(options: argparse.Namespace, processes: Team) -> None:
    request = processes.share(lambda: arguments.request(options))
    conversion = job.prepare(request, processes)
    paper = getattr(options, "simulate", None)
    if not paper and (getattr(options, "nodes", None) or getattr(options, "src_placement", None)):
        raise UsageError("--nodes and --src-placement are for --simulate P")
    if paper:
        processes.share(lambda: _print(simulated(conversion, options)))
        return
    count = getattr(options, "processes", None) or processes.size
    dry_run = options.verb == "transform" and request.dst is not None
    found, choice = job.foreseen(conversion, count, processes)
    told = planned.prediction(job.predict(conversion, found, choice, processes)) if dry_run else ""

    def show() -> None:
        summary = planned.plan_summary(conversion, found, choice.call)
        as_json = getattr(options, "json", False)
        _print(report.as_json(summary) if as_json else planned.plan_table(conversion, summary))
        if told:
            _print(told)

    processes.share(show)


def _ranks(options: argparse.Namespace, processes: Team) -> None:
    if options.src:
        request = processes.share(
            lambda: job.Request(
                options.src, None, options.src_strategy, options.dst_strategy, ranks=options.ranks
            )
        )
        conversion = job.prepare(request, processes)
        found = {rank: conversion.planner.plan(rank).src_ranks for rank in conversion.ranks}
        if processes.rank == 0:
            os.write(2, "".join(f"{w}\n" for w in report.warnings(conversion.warnings)).encode())
    else:
        found = processes.share(
            lambda: inspection.needed_ranks(
                strategies.load(options.src_strategy),
                strategies.load(options.dst_strategy),
                options.ranks,
            )
        )
    if processes.rank == 0:
        _print(report.as_json(found) if options.json else report.ranks_table(found))


def _merge(options: argparse.Namespace, processes: Team) -> None:
    def merge() -> None:
        target = Path(options.target)
        if target.exists() and not options.overwrite:
            raise StorageError(f"{target}: is already there; remove it, or say --overwrite")
        merged = strategies.merge(Path(options.folder), target)
        _print(report.merged(target, merged))

    processes.share(merge)


def _inspect(options: argparse.Namespace, processes: Team) -> int:
    if options.replicas:
        strategy = options.src_strategy
        request = processes.share(
            lambda: job.Request(
                options.path, None, strategy, strategy, src_pattern=options.src_pattern
            )
        )
        agreement = job.compare_replicas(request, processes, Progress)
        if processes.rank == 0:
            text = report.as_json(report.agreement_facts(agreement)) if options.json else ""
            _print(text or report.agreement(agreement))
        return DifferenceError.exit_code if agreement.unequal else 0

    def inspect() -> None:
        found = inspection.inspect(Path(options.path), options.src_pattern)
        _print(report.as_json(found) if options.json else report.inspection(found))

    processes.share(inspect)
    return 0


def _hostfile(options: argparse.Namespace, processes: Team) -> None:
    def convert() -> None:
        path = Path(options.table)
        hosts = hostfile.from_rank_table(read_bytes(path), str(path))
        _print(hostfile.text(hosts, options.style, options.slots))

    processes.share(convert)


def _print(text: str) -> None:
    """Print a result; a reader that went away, as `head` does, is no error."""
    speak()
    try:
        sys.stdout.buffer.write((text + "\n").encode(errors="backslashreplace"))
        sys.stdout.buffer.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _tell(text: str) -> None:
    """Print what goes along with the work, which goes on if nobody can read it."""
    try:
        _print(text)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


_VERBS: dict[str, Callable[[argparse.Namespace, Team], int | Program | None]] = {
    "launch": _launch,
    "transform": _transform,
    "verify": _verify,
    "plan": _plan,
    "ranks": _ranks,
    "merge": _merge,
    "inspect": _inspect,
    "hostfile": _hostfile,
}
