"""From the command line to an exit code, the same on every process."""

from __future__ import annotations

import errno
import gc
import os
import re
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import rankxform
from rankxform.display.progress import PLANNING, await_first_word, clear_pending_output, style_of
from rankxform.display.text import STDERR, format_count, printable, red, width, wrap_text
from rankxform.errors import (
    Message,
    RankxformError,
    StoppedError,
    StorageError,
    UsageError,
    exit_code,
)
from rankxform.options import CONVERSIONS, flags_of
from rankxform.process import Signals, seconds_since_start
from rankxform.storage.store import ACCESS
from rankxform.transport import Team, team
from rankxform.transport.launcher import before_another_mpi, launched_rank, launched_size

from .options import CommandStop, Parsed, seconds_left
from .parser import COMMANDS, Command, command_of, parse_arguments, wants_help
from .screen import as_json, show_text

if TYPE_CHECKING:
    from .launch import Program

_SPEAK_SECONDS = 1.0
_LABEL = 7
"""Columns before what can be tried."""


def main(argv: Sequence[str] | None = None, signals: Signals | None = None) -> int:
    """Run the command; return its exit code (`rankxform.errors` lists them).

    signals: what listens already.
    """
    argv = sys.argv[1:] if argv is None else list(argv)
    if wants_help(argv):
        return _help(argv)
    try:
        os.getcwd()
    except FileNotFoundError:
        error = UsageError("the working folder is gone", "cd to one that is there")
        return error.exit_code if launched_rank() else _print_error(error, argv)
    if _is_alone() and any(re.match("-[a-z]*n|--processes|--hostfile", word) for word in argv):
        try:
            _start_processes(argv)
        except RankxformError as error:
            return _print_error(error, argv)
    doing = PLANNING if argv[0] in CONVERSIONS or argv[0][:1] == "-" else "at work"
    style = "none" if launched_rank() else style_of(argv)
    await_first_word(style, seconds_since_start(), doing)
    try:
        with before_another_mpi("--uses-mpi" in argv):
            processes = team()
    except RankxformError as error:
        if launched_rank():
            time.sleep(_SPEAK_SECONDS)  # a launcher that loses a process ends the others
            return exit_code(error)
        return _print_error(error, argv)
    is_ours = signals is not None  # or else this process goes on when the command has ended
    signals = signals or Signals()
    signals.ready(processes.leave)
    try:
        outcome = _run(argv, processes, signals)
    except RankxformError as error:
        outcome = _print_error(error, argv) if processes.rank == 0 else exit_code(error)
    except BaseException as error:
        message, code = _describe(error)
        if "--json" in argv and processes.rank == 0:
            _print_document({"kind": type(error).__name__, "code": code, "message": message})
        processes.abort(message, code)
        raise
    clear_pending_output()
    gc.freeze()  # what is there now is not looked through again when the interpreter ends
    if isinstance(outcome, int):
        if is_ours:
            signals.ignore_signals()
        return processes.finish(outcome)
    signals.ready(os._exit)  # from here on there is no MPI that could end the others
    processes.finish(0)
    try:
        outcome.start()
    except OSError as error:
        return _print_error(
            UsageError(f"cannot be started: {error.strerror}", where=outcome.command[0])
        )


def _is_alone() -> bool:
    """Whether this process may start others: no launcher did, but for Slurm's of one task."""
    environment = {name: text for name, text in os.environ.items() if not name.startswith("SLURM_")}
    return launched_size(environment) is None and launched_size() in (None, 1)


def _start_processes(argv: Sequence[str]) -> None:
    """Become the mpirun of as many processes as -n or a hostfile says, if one is given."""
    options = parse_arguments(argv)
    number, hosts = getattr(options, "number", None), getattr(options, "hostfile", None)
    if number is None and hosts is None:
        return
    from rankxform.transport import mpirun

    line = mpirun.command(number, argv, hosts, rankxform.__version__)
    os.execve(line[0], line, mpirun.environment())


def _help(argv: Sequence[str]) -> int:
    from .help import help_text

    if launched_rank() > 0:
        return 0
    try:
        show_text(help_text(argv))
    except RankxformError as error:
        return _print_error(error, argv)
    except OSError as error:
        return _print_error(StorageError.of(error, "standard output", "write"), argv)
    return 0


def _print_error(error: BaseException, argv: Sequence[str] = ()) -> int:
    clear_pending_output()
    if "--json" in argv:
        _print_document(
            {
                "kind": type(error).__name__,
                "code": exit_code(error),
                "message": str(error),
                "fault": getattr(error, "fault", None),
                "rule": getattr(error, "rule", None),
                **(_parts(error, argv)._asdict() if isinstance(error, RankxformError) else {}),
            }
        )
    text = _in_lines(error, argv).encode(errors="backslashreplace")
    with suppress(OSError):
        os.write(2, text)  # one call: lines never mix
    return exit_code(error)


def _print_document(facts: dict[str, Any]) -> None:
    """Print an error as the one document of ``--json``."""
    with suppress(OSError):
        os.write(1, (as_json("error", facts) + "\n").encode(errors="backslashreplace"))


def _parts(error: BaseException, argv: Sequence[str]) -> Message:
    """Return the parts of an error; of a run that can be continued, how.

    What can be tried are options that the command of `argv` has.
    """
    if not isinstance(error, RankxformError):
        return Message(str(error))
    parts = error.parts
    with suppress(UsageError, ValueError):  # of a line that begins with no command
        flags = {flag for option in command_of(argv)[0].options for flag in flags_of(option)}
        named = ((text, re.match("--[a-z-]+", text)) for text in parts.tries)
        known_tries = tuple(text for text, flag in named if flag is None or flag[0] in flags)
        parts = parts._replace(tries=known_tries)
    is_full = any(os.strerror(code) in parts.what for code in (errno.ENOSPC, errno.EDQUOT))
    if not error.resumable:
        return parts._replace(tries=("make room",) if is_full and not parts.tries else parts.tries)
    again = f"{'make room, then ' if is_full else ''}run the same command again to continue"
    return parts._replace(tries=(*parts.tries, f"{again}; what is complete is kept"))


def _in_lines(error: BaseException, argv: Sequence[str] = ()) -> str:
    """Write what was found where; below it what can be tried, and then details."""
    parts = _parts(error, argv)
    process = getattr(error, "process", "")
    details = [*parts.details.splitlines(), *([f"met by {process}"] if process else [])]
    columns, cwd_prefix = width(STDERR), ""
    with suppress(FileNotFoundError):  # it is gone
        cwd_prefix = os.getcwd() + os.sep
    first = "\n".join(map(printable, parts.line.splitlines()))
    lines = [wrap_text(f"{red('rankxform: error:', STDERR)} {first}", columns)]
    for number, text in enumerate(map(printable, parts.tries)):
        lines.append(wrap_text(f"  {'or   ' if number else 'try  '}{text}", columns, _LABEL))
    for text in map(printable, details):
        lines.append(wrap_text(text if text.startswith("  ") else f"  {text}", columns, 4))
    text = "\n".join(lines) + "\n"
    is_given = any(word.startswith(cwd_prefix) or f"={cwd_prefix}" in word for word in sys.argv)
    cwd_pattern = rf"(?<![\w/.~-]){re.escape(cwd_prefix)}(?!-)"  # not in the middle of another path
    return text if is_given or len(cwd_prefix) < 3 else re.sub(cwd_pattern, "", text)


def _describe(error: BaseException) -> tuple[str, int]:
    if isinstance(error, KeyboardInterrupt):
        return (
            "interrupted; no unfinished file bears a final name, run again",
            StoppedError.exit_code,
        )
    import traceback

    traceback.print_exception(type(error), error, error.__traceback__)
    return f"a bug of rankxform's own: {type(error).__name__}: {error}", exit_code(error)


def _run(argv: Sequence[str], processes: Team, signals: Signals) -> int | Program:
    options = processes.bcast(lambda: parse_arguments(argv))
    if getattr(options, "endpoint_url", None) or getattr(options, "storage_option", ()):
        processes.agree(lambda: ACCESS.state(options.endpoint_url, options.storage_option))
    if getattr(options, "number", None) not in (None, processes.size):
        origins = (d.origin for d in options.defaults if d.words[0].startswith("--processes"))
        raise UsageError(
            f"the launcher has started {format_count(processes.size, 'process')}",
            f"leave out -n {options.number}",
            where=next(origins, ""),
        )
    if getattr(options, "hostfile", None) and options.number is None:
        raise UsageError("--hostfile: the launcher has hosts of its own", "leave it out")
    if hasattr(options, "time_limit"):
        limit = options.time_limit
        seconds = seconds_left() if limit is None else limit
        processes.stopping = CommandStop(signals, seconds)
        processes.stall_seconds = options.stall_limit
    return run_of(COMMANDS[f"{options.verb} {options.action}".strip()])(options, processes)


def run_of(command: Command) -> Callable[[Parsed, Team], int | Program]:
    """Return what does a command, collectively: it returns the exit code, or what this process
    becomes."""
    name = command.module or f"{__package__}.{command.name.partition(' ')[0]}"
    return cast("Callable[[Parsed, Team], int | Program]", import_module(name).run)
