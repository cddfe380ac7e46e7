"""Options that several verbs have, and the forms of their values."""

from __future__ import annotations

import argparse
from dataclasses import fields

from rankxform.checkpoints.rank_folders import DEFAULT_PATTERN
from rankxform.engine.pipeline import DEFAULT_MEMORY
from rankxform.planning.cost_model import AUTO, READINGS, Costs
from rankxform.planning.plan import REPLICAS
from rankxform.planning.selection import ONE_SIDED
from rankxform.publish.links import LINKS, REFLINK
from rankxform.storage.index import FORMATS
from rankxform.transport import Team

from .stopping import parse_time
from .units import number_ranges, parse_moment, parse_size

MOMENTS, SHARE = ("call", "letter"), "overlap"
"""What of `Costs` is in seconds, and what has no unit."""


def add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print JSON")


def add_strategies(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "strategies",
        "a file; a folder of stage files; none: whole tensors; or cut:REGEX=AXIS@RANKS, in equal "
        "slices by hand, states too",
    )
    group.add_argument(
        "--src-strategy", "--src-ckpt-strategy", "--src-strategy-file", "--src-strategy-dir",
        dest="src_strategy", metavar="STRATEGY",
        help="how SRC is cut; to be given, be it as none, where SRC holds files of several ranks",
    )  # fmt: skip
    group.add_argument(
        "--dst-strategy", "--dst-ckpt-strategy", "--dst-strategy-file", "--dst-strategy-dir",
        dest="dst_strategy", metavar="STRATEGY", help="how DST shall be cut (default: none)",
    )  # fmt: skip


def add_conversion(
    parser: argparse.ArgumentParser, dst: str = "folder to write rank_N/ into"
) -> None:
    parser.add_argument(
        "src", nargs="?", metavar="SRC", help="folder with rank_N/ folders, or one complete file"
    )
    parser.add_argument("dst", nargs="?", metavar="DST", help=dst)
    for flags, where in (
        (("--src-ckpt-dir", "--src-checkpoints-dir", "--src-checkpoint"), "src_option"),
        (("--dst-ckpt-dir", "--dst-checkpoints-dir", "--dst-checkpoint-dir"), "dst_option"),
    ):
        parser.add_argument(*flags, dest=where, help=argparse.SUPPRESS)
    add_strategies(parser)
    add_choice(parser)
    add_source(parser)
    add_output(parser)


def add_choice(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is converted")
    what.add_argument(
        "--ranks",
        type=ranks,
        default=(),
        metavar="N,N-N",
        help="destination ranks to make (default: all)",
    )
    what.add_argument(
        "--include",
        action="append",
        default=[],
        metavar="REGEX",
        help="convert only parameters whose name has this; repeatable",
    )
    what.add_argument(
        "--exclude",
        action="append",
        default=[],
        metavar="REGEX",
        help="leave out parameters whose name has this; repeatable",
    )
    what.add_argument(
        "--one-sided",
        choices=ONE_SIDED,
        default="error",
        help="parameters that only one strategy lists: leave them out, or take them to be "
        "whole on the other side (default: error)",
    )
    what.add_argument(
        "--unlisted",
        choices=("error", "take-one"),
        default="error",
        help="parameters in no strategy that differ between ranks: take one's (default: error)",
    )
    what.add_argument(
        "--replicas",
        choices=REPLICAS,
        default="spread",
        help="which of equal source copies is read: one for all, or MindSpore's (default: spread)",
    )


def add_source(parser: argparse.ArgumentParser) -> None:
    source = parser.add_argument_group("which source files")
    source.add_argument(
        "--src-pattern",
        default=DEFAULT_PATTERN,
        metavar="PATTERN",
        help="where rank files lie in SRC (default: %(default)s)",
    )
    source.add_argument(
        "--step",
        metavar="E_S",
        help="epoch and step to take, such as 10_73; latest: the newest, an error if a rank lacks "
        "it (default: the newest that all ranks have; of launch: latest)",
    )
    source.add_argument(
        "--suffix", metavar="TEXT", help="end of the files' names before .ckpt, such as _breakpoint"
    )
    source.add_argument(
        "--check-crc",
        action="store_true",
        help="compare source files with the checksums they carry",
    )
    source.add_argument(
        "--allow-extra-ranks",
        action="store_true",
        help="do not use ranks beyond the strategy's, whatever they hold",
    )
    source.add_argument(
        "--allow-equal-slices",
        action="store_true",
        help="accept that every rank holds the same bytes of cut parameters",
    )


def add_output(parser: argparse.ArgumentParser) -> None:
    out = parser.add_argument_group("output")
    out.add_argument(
        "--prefix", default="checkpoint_", help="files are rank_N/<prefix>N (default: %(default)s)"
    )
    out.add_argument("--format", choices=FORMATS, help="default: the source's")
    out.add_argument(
        "--link",
        choices=LINKS,
        default=REFLINK,
        help="equal files: shared blocks where the file system can, hard links, or each written "
        "(default: reflink)",
    )
    out.add_argument(
        "--memory",
        type=_size,
        default=DEFAULT_MEMORY,
        metavar="SIZE",
        help="buffers on each process (default: 64M)",
    )
    out.add_argument(
        "--dst-placement",
        default="auto",
        metavar="WHERE",
        help="with processes on several nodes: shared, if DST must be one folder for all; node, "
        "for a folder of each node; or a hostfile or rank table that says which ranks belong on "
        "which node (default: auto, finds out)",
    )
    out.add_argument(
        "--costs",
        type=_costs,
        metavar="WHAT=VALUE,..",
        help="bytes a second that a process reads and writes, a node sends, and a process copies "
        "in memory; seconds for a read of little and a letter; how much of the shorter of reading "
        "and sending the longer hides; such as read=1G,write=1G,network=10G,copy=5G,call=100us,"
        "letter=30us,overlap=1 (default: measured; if some are given, these for the others)",
    )
    out.add_argument(
        "--reading",
        choices=READINGS,
        default=AUTO,
        help="how source files are read: the wanted ranges, the rows that hold them, or each byte "
        "by one process that sends it to the others (exchange); auto: what costs least, exchange "
        "for files that a process's node does not have",
    )


def add_progress(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--progress",
        choices=("auto", "bar", "lines", "none"),
        default="auto",
        help="a bar on a terminal, lines in a log (default: auto)",
    )


def add_limits(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--time-limit",
        type=_time,
        metavar="TIME",
        help="stop in time before so long has passed (3600, 90m, 2:30:00), so that the same "
        "command can continue; default: what Slurm gives (SLURM_JOB_END_TIME), else none",
    )
    run.add_argument(
        "--stall-limit",
        type=_time,
        default=Team.stall_seconds,
        metavar="TIME",
        help="end all processes when one has not answered for so long (default: 15m)",
    )


def ranks(text: str) -> tuple[int, ...]:
    try:
        return number_ranges(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers such as 0,2-5 are wanted") from None


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a size such as 256M is wanted") from None


def _costs(text: str) -> Costs:
    known = [field.name for field in fields(Costs)]
    given = {}
    for one in text.split(","):
        name, equals, value = one.partition("=")
        if name not in known or name in given or not equals:
            raise argparse.ArgumentTypeError(f"{one!r}: one =VALUE each of {', '.join(known)}")
        parse = _share if name == SHARE else _moment if name in MOMENTS else _size
        given[name] = parse(value)
        if not given[name] and name != SHARE:
            raise argparse.ArgumentTypeError(f"{one!r}: more than nothing is wanted")
    return Costs(**given)


def _moment(text: str) -> float:
    try:
        return parse_moment(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a time such as 100us is wanted") from None


def _share(text: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a share from 0 to 1 is wanted")
    return share


def _time(text: str) -> float:
    try:
        seconds = parse_time(text)
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r}: a time such as 90m is wanted")
    return seconds


def count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 on is wanted")
    return int(text)
