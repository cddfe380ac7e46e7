"""The command's own options, and when to stop.

A stop is requested here and carried out by the code that does the work: it syncs and records what
is complete, and the command exits with 75.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import Field, is_dataclass, replace
from types import SimpleNamespace
from typing import Any

from rankxform.display.text import warn
from rankxform.errors import UsageError
from rankxform.options import (
    GROUP_CLUSTER,
    GROUP_COMMAND,
    GROUP_RUN,
    GROUP_STRATEGIES,
    TYPE_FLAG,
    TYPE_NUMBER,
    OptionType,
    choice_of,
    flags_of,
    option,
    options_of,
)
from rankxform.process import Signals
from rankxform.request import all_options
from rankxform.transport import Team
from rankxform.transport.launcher import launched_rank

_MARGIN_SECONDS, _MARGIN_SHARE, _LONGEST = 30.0, 0.1, 1 << 40
CONFIG_FILE = "rankxform.toml"


class CommandStop:
    """Tells the work whether to stop, and why.

    While work is done, the first signal asks for a stop; a second one ends the process at once,
    which loses what was done since the journals' last entry and nothing else.
    """

    def __init__(self, signals: Signals, seconds: float | None = None) -> None:
        """With `seconds`, stop some time before they have passed."""
        self._signals = signals
        self._until: float | None = None
        if seconds is not None:
            margin = min(_MARGIN_SECONDS, seconds * _MARGIN_SHARE)
            self._until = time.monotonic() + seconds - margin

    def reason(self) -> str | None:
        """Return why to stop, or None."""
        signal_reason = self._signals.reason
        if signal_reason is None and self._until is not None and time.monotonic() > self._until:
            return "stopped: the time limit is near"
        return signal_reason

    def at_work(self, is_at_work: bool) -> None:
        """Say whether work is done that ends by itself when it is asked to."""
        self._signals.at_work = is_at_work


def parse_time(text: str) -> float:
    """Read a time span: seconds, ``M:SS``, ``H:MM:SS``, ``D-H:MM:SS``, or ``90m``, ``2h``.

    >>> parse_time("90"), parse_time("1:30:00"), parse_time("1-0:0:0"), parse_time("1.5h")
    (90.0, 5400.0, 86400.0, 5400.0)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd]?)", text.strip().lower())
    if match:
        return float(match[1]) * {"": 1, "s": 1, "m": 60, "h": 3600, "d": 86400}[match[2]]
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", text.strip())
    if not match:
        raise ValueError(text)
    days, hours, minutes, seconds = (min(int(part or 0), _LONGEST) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def _parse_limit(text: str) -> float:
    seconds = parse_time(text)
    if not 0 < seconds < _LONGEST:
        raise ValueError(text)
    return seconds


def seconds_left(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return what Slurm says is left of the job's time, in seconds, if it says so.

    >>> seconds_left({})
    """
    end = environ.get("SLURM_JOB_END_TIME", "")
    left = float(end) - time.time() if end.isdecimal() else None
    if left is not None and left <= 0:  # of a job that has ended, whose environment is left
        if launched_rank(environ) == 0:
            warn(f"SLURM_JOB_END_TIME={end} is past; the run has no limit (--time-limit sets one)")
        return None
    return left


def _parse_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1 << 20:
        raise ValueError(text)
    return int(text)


_COUNT = replace(TYPE_NUMBER, read=_parse_count, example="a number from 1 on")
_TIME = OptionType(float, "a time", "float", _parse_limit, "a time such as 90m")
_TIME_OR_NONE = replace(_TIME, read=lambda text: float(parse_time(text) and _parse_limit(text)))


# -- declarations: a class for options that commands have together ---------------------------------


class Json:
    json = option(False, GROUP_COMMAND, "print JSON", kind=TYPE_FLAG)


class SourceStrategy:
    """Of commands that have no destination."""

    src_strategy = option(
        None, GROUP_COMMAND, "how it is sharded", metavar="STRATEGY",
        flags=("--src-strategy", "--src-ckpt-strategy"),
    )  # fmt: skip


class Strategies:
    src_strategy = option(
        None, GROUP_STRATEGIES, "how SRC is sharded; required (it may be none) if SRC holds files "
        "of several ranks", metavar="STRATEGY",
        flags=("--src-strategy", "--src-ckpt-strategy", "--src-strategy-file",
               "--src-strategy-dir"),
    )  # fmt: skip
    dst_strategy = option(
        None, GROUP_STRATEGIES, "how DST is sharded (default: none)", metavar="STRATEGY",
        flags=("--dst-strategy", "--dst-ckpt-strategy", "--dst-strategy-file",
               "--dst-strategy-dir"),
    )  # fmt: skip


class Configuration:
    config_file = option(
        None, GROUP_RUN, f"options that are not given here (default: {CONFIG_FILE} here or in a "
        "folder above; RANKXFORM_NAME in the environment comes first)", metavar="FILE.toml",
    )  # fmt: skip


class Folders(Strategies, Configuration):
    """Of verbs with SRC and DST, and other spellings of these."""

    report = option(
        None, GROUP_COMMAND, "write a page with pictures of what is read from whom",
        metavar="FILE.html",
    )  # fmt: skip

    src_option = option(
        None, GROUP_COMMAND, "",
        flags=("--src-ckpt-dir", "--src-checkpoints-dir", "--src-checkpoint"),
    )  # fmt: skip
    dst_option = option(
        None, GROUP_COMMAND, "",
        flags=("--dst-ckpt-dir", "--dst-checkpoints-dir", "--dst-checkpoint-dir",
               "--dst-checkpoint"),
    )  # fmt: skip


class Start:
    number = option(
        None, GROUP_COMMAND, "start P processes with the mpirun of this Python's MPI library",
        kind=_COUNT, metavar="P", flags=("-n", "--processes"),
    )  # fmt: skip
    hostfile = option(
        None, GROUP_COMMAND, "start on these hosts, in the form of MPICH's or Open MPI's mpirun; "
        "all slots without -n", metavar="FILE",
    )  # fmt: skip


class Work(Json):
    """Of verbs that move bytes: when they end early, and what they print."""

    time_limit = option(
        None, GROUP_RUN, "stop shortly before this much time has passed (3600, 90m, 2:30:00), so "
        "that the same command can continue (default: until SLURM_JOB_END_TIME if Slurm sets it, "
        "else no limit)", kind=_TIME, metavar="TIME",
    )  # fmt: skip
    stall_limit = option(
        Team.stall_seconds, GROUP_RUN, "end all processes if one has not answered for this long "
        "(default: 15m)", kind=_TIME, metavar="TIME",
    )  # fmt: skip
    progress = option(
        "auto", GROUP_RUN, "a bar on a terminal, lines in a log (default: auto)",
        kind=choice_of(("auto", "bar", "lines", "none")),
    )  # fmt: skip
    verbose = option(
        False, GROUP_RUN, "print the names of parameters too", kind=TYPE_FLAG,
        flags=("-v", "--verbose"),
    )  # fmt: skip
    quiet = option(
        False, GROUP_RUN, "print errors, warnings and the last line only", kind=TYPE_FLAG,
        flags=("-q", "--quiet"),
    )  # fmt: skip


EXCLUDED = {"verbose": "quiet", "quiet": "verbose"}
"""Options that cannot be given with another."""


class Profile:
    profile = option(False, GROUP_RUN, "print where each process's time went", kind=TYPE_FLAG)


class DryRun:
    dry_run = option(
        False, GROUP_RUN, "print the plan and the predicted time, convert nothing; to measure, "
        "each process writes a file of 64 MiB in DST and removes it", kind=TYPE_FLAG,
    )  # fmt: skip


class Script:
    """Options of MindSpore's and MindFormers' scripts that mean nothing here."""

    rank_id = option(None, GROUP_COMMAND, "")
    world_size = option(None, GROUP_COMMAND, "")
    transform_process_num = option(None, GROUP_COMMAND, "")
    process_num = option(None, GROUP_COMMAND, "")
    transform_by_rank = option(None, GROUP_COMMAND, "")


class Follow:
    watch = option(
        False, GROUP_COMMAND, "go on as new steps appear, until it is stopped", kind=TYPE_FLAG
    )
    settle = option(
        10.0, GROUP_COMMAND, "with --watch: for how long the files of a step must not have changed "
        "(default: 10s)", kind=_TIME_OR_NONE, metavar="TIME",
    )  # fmt: skip
    keep = option(
        None, GROUP_COMMAND, "keep the newest N steps that this command has written to DST, and "
        "remove its files of the others (default: all)", kind=_COUNT, metavar="N",
    )  # fmt: skip


class Verifying:
    subset = option(
        None, GROUP_COMMAND, "of one folder, read every byte of a share of its files alone: 3/10 "
        "is the third of ten, and ten such runs read all", metavar="N/T",
    )  # fmt: skip


class Launch:
    src = option(
        None, GROUP_COMMAND, "what the program is to load", metavar="CKPT", flags=("--load",)
    )
    output = option(
        "output", GROUP_COMMAND, "where transformed_checkpoint/ and strategy/ are made (default: "
        "%(default)s)", metavar="DIR",
    )  # fmt: skip
    uses_mpi = option(
        False, GROUP_COMMAND, "the program uses MPI itself, for example through rankxform.load",
        kind=TYPE_FLAG,
    )  # fmt: skip
    any_world_size = option(
        False, GROUP_COMMAND, "start the program although processes are not as many as the "
        "destination's ranks", kind=TYPE_FLAG,
    )  # fmt: skip


class Planning:
    processes = option(
        None, GROUP_COMMAND, "plan for P processes (default: as many as run this command)",
        kind=_COUNT, metavar="P", flags=("-n", "--processes"),
    )  # fmt: skip
    verbose = option(
        False, GROUP_COMMAND, "print the names too", kind=TYPE_FLAG, flags=("-v", "--verbose")
    )
    prove = option(
        False, GROUP_COMMAND, "compare what all processes would do with what files are to hold, by "
        "an arithmetic of its own", kind=TYPE_FLAG,
    )  # fmt: skip
    simulate = option(
        None, GROUP_CLUSTER, "print what each of P processes would read, send and write, and how "
        "long it takes", kind=_COUNT, metavar="P",
    )  # fmt: skip
    nodes = option(
        None, GROUP_CLUSTER, "on N nodes (default: of 8 processes each)", kind=_COUNT, metavar="N"
    )
    src_placement = option(
        None, GROUP_CLUSTER, "all nodes see all source files, or each has its own part (default: "
        "shared)", kind=choice_of(("shared", "node")),
    )  # fmt: skip


class Inspecting:
    compare_replicas = option(
        False, GROUP_COMMAND, "compare all bytes that several ranks should hold alike; needs "
        "--src-strategy", kind=TYPE_FLAG, flags=("--replicas",),
    )  # fmt: skip
    check = option(
        False, GROUP_COMMAND, "look for all that is wrong with a checkpoint", kind=TYPE_FLAG
    )
    full = option(False, GROUP_COMMAND, "with --check: read every byte", kind=TYPE_FLAG)
    verbose = option(
        False, GROUP_COMMAND, "print each parameter of a file, or each of many files",
        kind=TYPE_FLAG, flags=("-v", "--verbose"),
    )  # fmt: skip
    page = option(
        None, GROUP_COMMAND, "write a page to search tensors and boxes in", metavar="FILE.html"
    )
    beside = option(
        None, GROUP_COMMAND, "with --page: another checkpoint beside this one", metavar="OTHER"
    )
    beside_strategy = option(
        None, GROUP_COMMAND, "with --beside: how OTHER is sharded", metavar="STRATEGY"
    )


class Matrices:
    raw = option(
        False, GROUP_COMMAND, "print a strategy's matrices and tensor maps too", kind=TYPE_FLAG
    )


class Shapes:
    shapes = option(
        None, GROUP_COMMAND, "full shapes: a JSON file, or the checkpoint, whose headers are read",
        metavar="WHERE",
    )  # fmt: skip


OUTPUT_HELP = (
    "file to write, .ckpt or .json, or a folder for one file of each stage; must not exist"
)


class Derivation:
    source = option(
        "none", GROUP_COMMAND, "the source's strategy (default: none, for whole parameters)",
        metavar="STRATEGY", flags=("--from", "--src-strategy"),
    )  # fmt: skip
    output = option(None, GROUP_COMMAND, OUTPUT_HELP, metavar="OUT", flags=("-o", "--output"))


class Merging:
    overwrite = option(False, GROUP_COMMAND, "replace FILE", kind=TYPE_FLAG)


class Hosts:
    style = option(
        "openmpi", GROUP_COMMAND, "whose mpirun reads it (default: %(default)s)",
        kind=choice_of(("openmpi", "mpich")),
    )  # fmt: skip
    slots = option(
        None, GROUP_COMMAND, "processes on each host (default: its devices)", kind=_COUNT,
        metavar="N",
    )  # fmt: skip


def declared_options(part: type) -> list[Field[Any]]:
    """Return the options that a class and its bases declare."""
    if is_dataclass(part):  # of the table
        return options_of(part)
    options: list[Field[Any]] = []
    for base in reversed(part.__mro__):
        for name, declared in vars(base).items():
            if isinstance(declared, Field):
                declared.name = name
                options.append(declared)
    return options


def option_named(name: str) -> Field[Any]:
    """Return an option of the table."""
    return next(option_field for option_field in all_options() if option_field.name == name)


class Parsed(SimpleNamespace):
    """A command line: each option and place of its command by name, and

    verb, action: which command. program: what stands behind ``--``. words: all as they were given.
    defaults: options that a file or the environment states. ignored: given flags of other tools
    that mean nothing here.
    """


def request_options(options: Parsed) -> dict[str, Any]:
    """Return the options of the table that a command has, as `Request` takes them."""
    return {f.name: getattr(options, f.name) for f in all_options() if hasattr(options, f.name)}


def refuse_given_options(options: Parsed, reason: str, allowed_names: Sequence[str] = ()) -> None:
    """Raise UsageError for a given option of the table that is not among `allowed_names`."""
    for name, value in request_options(options).items():
        if name not in allowed_names and value not in (option_named(name).default, ()):
            raise UsageError(f"{flags_of(option_named(name))[0]} {reason}")
