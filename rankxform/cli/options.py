"""Options that commands have in common, and when to stop.

A stop is requested here and carried out by the code that does the work: it syncs and records what
is complete, and the command exits with 75.
"""

from __future__ import annotations

import argparse
import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import Field
from typing import Any

from rankxform.errors import UsageError
from rankxform.options import GROUP_RUN, TYPE_OFF, OptionType, flag_of, option_info
from rankxform.process import Signals
from rankxform.request import all_options
from rankxform.transport import Team

from .defaults import FILE, FLAG

_MARGIN_SECONDS, _MARGIN_SHARE = 30.0, 0.1


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
    days, hours, minutes, seconds = (int(part or 0) for part in match.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def seconds_left(environ: Mapping[str, str] = os.environ) -> float | None:
    """Return what Slurm says is left of the job's time, in seconds, if it says so.

    >>> seconds_left({})
    """
    end = environ.get("SLURM_JOB_END_TIME", "")
    return max(0.0, float(end) - time.time()) if end.isdigit() else None


STRATEGIES_EXAMPLE = "--src-strategy output/strategy --dst-strategy new/strategy"


def add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print JSON")


def add_strategies(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "strategies",
        "a file; a folder of stage files; none: whole tensors; or shard:REGEX=AXIS,...@RANKS: "
        "equal slices by pattern, optimizer states too",
    )
    group.add_argument(
        "--src-strategy", "--src-ckpt-strategy", "--src-strategy-file", "--src-strategy-dir",
        dest="src_strategy", metavar="STRATEGY", action=_Once,
        help="how SRC is sharded; required (it may be none) if SRC holds files of several ranks",
    )  # fmt: skip
    group.add_argument(
        "--dst-strategy", "--dst-ckpt-strategy", "--dst-strategy-file", "--dst-strategy-dir",
        dest="dst_strategy", metavar="STRATEGY", action=_Once,
        help="how DST is sharded (default: none)",
    )  # fmt: skip


def add_folders(parser: argparse.ArgumentParser, dst: str = "folder to write rank_N/ into") -> None:
    parser.add_argument(
        "src", nargs="?", metavar="SRC", help="folder with rank_N/ folders, or one complete file"
    )
    parser.add_argument("dst", nargs="?", metavar="DST", help=dst)
    for flags, where in (
        (("--src-ckpt-dir", "--src-checkpoints-dir", "--src-checkpoint"), "src_option"),
        (
            ("--dst-ckpt-dir", "--dst-checkpoints-dir", "--dst-checkpoint-dir", "--dst-checkpoint"),
            "dst_option",
        ),
    ):
        parser.add_argument(*flags, dest=where, help=argparse.SUPPRESS)
    add_strategies(parser)


def add_table(parser: argparse.ArgumentParser, verb: str) -> dict[str, argparse._ArgumentGroup]:
    """Add the table's options of a verb; return their groups by title."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option_field in all_options():
        if verb in option_info(option_field).verbs:
            title = option_info(option_field).group
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            add_option(groups[title], option_field)
    groups.get(GROUP_RUN, parser).add_argument(
        FLAG,
        metavar="FILE.toml",
        help=f"options that are not given here (default: {FILE} here or in a folder above; "
        "RANKXFORM_NAME in the environment comes first)",
    )
    return groups


def add_option(
    group: argparse._ActionsContainer, option_field: Field[Any], **overrides: Any
) -> None:
    """Add one option of the table; `overrides` goes to `argparse` before what the table says."""
    facts = option_info(option_field)
    flags = (_flag(option_field), *facts.aliases)
    keywords: dict[str, Any] = {
        "dest": option_field.name,
        "default": option_field.default,
        "help": facts.help,
    }
    keywords.update(overrides)
    if facts.kind.stands_for is not None:
        action = "store_true" if facts.kind.stands_for else "store_false"
        group.add_argument(*flags, action=action, **keywords)
        return
    if facts.kind.repeated:
        keywords.update(action="append", default=[])
    if facts.kind.choices:
        keywords["choices"] = tuple(facts.kind.choices)
    if option_field.name in _ONCE:
        keywords["action"] = _Once
    group.add_argument(*flags, type=_parse(facts.kind), metavar=facts.metavar, **keywords)


_ONCE = (
    "src_strategy", "dst_strategy", "src_pattern", "step", "map", "config", "like", "lora",
    "lora_strategy", "src_config", "dst_config",
)  # fmt: skip
"""Options that name what is read or written; of others the last one holds, as wrappers rely on."""


class _Once(argparse.Action):
    """Refuses a second, different value."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, value: Any, flag: str | None = None
    ) -> None:
        values_by_dest = vars(namespace).setdefault("given_once", {})
        if values_by_dest.setdefault(self.dest, value) != value:
            raise UsageError(
                f"{flag} is given twice: {values_by_dest[self.dest]!s} and {value!s}",
                f"give one {flag}",
            )
        setattr(namespace, self.dest, value)


def _parse(kind: OptionType) -> Callable[[str], Any]:
    """Return a function that reads values of a kind, with errors as `argparse` has them."""

    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return str if kind.read is str else parse


def _flag(option_field: Field[Any]) -> str:
    return flag_of(
        f"no_{option_field.name}"
        if option_info(option_field).kind is TYPE_OFF
        else option_field.name
    )


def refuse_given_options(
    options: argparse.Namespace, reason: str, allowed_names: Sequence[str] = ()
) -> None:
    """Raise UsageError for a given option of the table that is not among `allowed_names`."""
    for name, value in request_options(options).items():
        if name not in allowed_names and value not in (option_named(name).default, ()):
            raise UsageError(f"{_flag(option_named(name))} {reason}")


def option_named(name: str) -> Field[Any]:
    """Return an option of the table."""
    return next(option_field for option_field in all_options() if option_field.name == name)


def request_options(options: argparse.Namespace) -> dict[str, Any]:
    """Return the options of the table that a verb has, as `Request` takes them."""
    values_by_name = {
        f.name: getattr(options, f.name) for f in all_options() if hasattr(options, f.name)
    }
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values_by_name.items()}


def add_number(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "-n",
        "--processes",
        dest="number",
        type=parse_count,
        metavar="P",
        help="start P processes with the mpirun of this Python's MPI library",
    )
    verb.add_argument(
        "--hostfile",
        metavar="FILE",
        help="start on these hosts, in the form of MPICH's or Open MPI's mpirun; all slots\n"
        "without -n",
    )


def add_report(verb: argparse._ActionsContainer) -> None:
    verb.add_argument(
        "--report", metavar="FILE.html", help="write a page with pictures of what is read from whom"
    )


def add_progress(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--progress",
        choices=("auto", "bar", "lines", "none"),
        default="auto",
        help="a bar on a terminal, lines in a log (default: auto)",
    )


def add_detail(run: argparse._ActionsContainer) -> None:
    detail_group = run.add_mutually_exclusive_group()
    detail_group.add_argument(
        "-v", "--verbose", action="store_true", help="print the names of parameters too"
    )
    detail_group.add_argument(
        "-q", "--quiet", action="store_true", help="print errors, warnings and the last line only"
    )


def add_work(verb: argparse.ArgumentParser, run: argparse._ArgumentGroup) -> None:
    """Add what every verb has that moves bytes: when it ends early, and what it prints."""
    add_limits(run)
    add_progress(run)
    add_detail(run)
    add_json(verb)


def add_limits(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--time-limit",
        type=_time,
        metavar="TIME",
        help="stop shortly before this much time has passed (3600, 90m, 2:30:00), so that the same "
        "command can continue (default: until SLURM_JOB_END_TIME if Slurm sets it, else no limit)",
    )
    run.add_argument(
        "--stall-limit",
        type=_time,
        default=Team.stall_seconds,
        metavar="TIME",
        help="end all processes if one has not answered for this long (default: 15m)",
    )


def _time(text: str) -> float:
    try:
        seconds = parse_time(text)
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 90m")
    return seconds


def parse_count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 1 on")
    return int(text)
