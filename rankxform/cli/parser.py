"""The options of every verb, and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

from rankxform.errors import UsageError
from rankxform.execution.engine import DEFAULT_MEMORY
from rankxform.execution.folder import DEFAULT_PATTERN
from rankxform.execution.headers import FORMATS
from rankxform.execution.links import LINKS, REFLINK
from rankxform.planning.plan import REPLICAS
from rankxform.planning.selection import ONE_SIDED
from rankxform.transport import Team

from .stopping import parse_time
from .units import number_ranges, parse_size

DESCRIPTION = """\
Move a distributed MindSpore checkpoint between parallel strategies.

  mpirun -n P python -m rankxform transform SRC DST --src-strategy A --dst-strategy B

reads SRC/rank_0 .. rank_M-1, which strategy A cut, and writes DST/rank_0 .. rank_N-1 for
strategy B. P processes share the work; P, M and N need not be equal nor divide one another.
Without mpirun one process does it all, and no MPI is needed. A strategy is a file that
MindSpore saved, a folder with the files of all pipeline stages, or "none" (whole tensors
on one rank).
"""
EPILOG = """\
The arguments of MindSpore's and MindFormers' conversion scripts are understood too
(--src_ckpt_dir, --src_checkpoints_dir, --src_ckpt_strategy, --src_strategy_file, ...);
"-" and "_" are the same in an option. Without a verb, options mean transform.

exit codes: 0 done; 2 usage, or launcher and MPI library disagree; 3 the strategy or the
checkpoint is at fault; 4 reading or writing failed; 6 verify found a difference; 70 a bug
of rankxform's own; 75 stopped, run again.
"""


class _Parser(argparse.ArgumentParser):
    """Raises UsageError, so that one process speaks for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: python -m {self.prog} --help)")


class _Version(argparse.Action):
    """Prints the installed version; the metadata are read only when somebody asks."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        from importlib.metadata import version

        print(f"rankxform {version('rankxform')}")
        parser.exit()


def parser() -> argparse.ArgumentParser:
    """Build the command's parser; its errors are raised as UsageError."""
    whole = _Parser(
        "rankxform",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    whole.add_argument("--version", action=_Version, nargs=0, help="print the version")
    verbs = whole.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for name, (summary, add_options) in _VERBS.items():
        add_options(verbs.add_parser(name, help=summary, description=summary, allow_abbrev=False))
    return whole


_PROCESS_COUNTS = ("--transform-process-num", "--process-num")


def _transform(verb: argparse.ArgumentParser) -> None:
    _add_conversion(verb)
    run = verb.add_argument_group("how it is done")
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the time it would take, convert nothing; measures with a file of "
        "64 MiB a process in DST, which is removed",
    )
    run.add_argument("--profile", action="store_true", help="print where each process's time went")
    run.add_argument("--overwrite", action="store_true", help="replace destination files")
    run.add_argument(
        "--crc", action="store_true", help="write the checksum that MindSpore's crc_check expects"
    )
    run.add_argument(
        "--check-replicas",
        choices=("warn", "error"),
        help="read all source replicas first; say, or refuse, where they differ",
    )
    run.add_argument(
        "--verify",
        action="store_true",
        help="compare fingerprints of what is read with those of what is written, and keep the "
        "latter for `verify DST`",
    )
    run.add_argument(
        "--no-fsync",
        action="store_true",
        help="do not wait for the device before a file gets its name",
    )
    _add_limits(run)
    _add_progress(run)
    for ignored in ("--rank-id", "--world-size", *_PROCESS_COUNTS, "--transform-by-rank"):
        verb.add_argument(ignored, help=argparse.SUPPRESS)


def _verify(verb: argparse.ArgumentParser) -> None:
    _add_conversion(
        verb, dst="folder whose rank_N/ are compared; one folder alone: with its own manifest"
    )
    run = verb.add_argument_group("how it is done")
    _add_limits(run)
    _add_progress(run)
    _add_json(verb)


def _add_progress(run: argparse._ArgumentGroup) -> None:
    run.add_argument(
        "--progress",
        choices=("auto", "bar", "lines", "none"),
        default="auto",
        help="a bar on a terminal, lines in a log (default: auto)",
    )


def _add_limits(run: argparse._ArgumentGroup) -> None:
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


def _plan(verb: argparse.ArgumentParser) -> None:
    _add_conversion(verb)
    verb.add_argument(
        "--shapes",
        metavar="FILE",
        help='plan without a checkpoint: JSON {name: {"shape": [...], "dtype": "Float32"}}',
    )
    verb.add_argument(
        "--processes",
        type=_count,
        metavar="P",
        help="plan for so many processes (default: those that run)",
    )
    _add_json(verb)


def _ranks_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "src", nargs="?", metavar="SRC", help="the checkpoint, for the exact choice among replicas"
    )
    _add_strategies(verb)
    verb.add_argument(
        "--ranks", type=_ranks, default=(), metavar="N,N-N", help="destination ranks (default: all)"
    )
    _add_json(verb)


def _merge(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "folder", metavar="FOLDER", help="the stages' strategy files, all protobuf or all JSON"
    )
    verb.add_argument("target", metavar="FILE", help="the merged file; .json for JSON stages")
    verb.add_argument("--overwrite", action="store_true", help="replace FILE")


def _inspect(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH")
    verb.add_argument(
        "--replicas",
        action="store_true",
        help="compare all bytes that several ranks should hold alike; needs --src-strategy",
    )
    verb.add_argument(
        "--src-strategy", "--src-ckpt-strategy", metavar="STRATEGY", help="how PATH is cut"
    )
    verb.add_argument("--src-pattern", default=DEFAULT_PATTERN, metavar="PATTERN")
    _add_json(verb)


def _hostfile(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "table", metavar="RANK_TABLE", help="rank table (JSON), version 0, 1.0 or 1.2"
    )
    verb.add_argument("--style", choices=("openmpi", "mpich"), default="openmpi")
    verb.add_argument(
        "--slots", type=_count, metavar="N", help="processes on each host (default: its devices)"
    )


_VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "transform": ("Convert a checkpoint.", _transform),
    "verify": ("Compare a destination with its source, or with its own manifest.", _verify),
    "plan": ("Print what would be read, written and held in memory; touch no tensor.", _plan),
    "ranks": ("Print the source ranks whose bytes each destination rank needs.", _ranks_options),
    "merge": ("Write the strategy files of all stages as one that MindSpore reads.", _merge),
    "inspect": ("Print what a checkpoint file or folder, or a strategy, holds.", _inspect),
    "hostfile": ("Print a hostfile made from an HCCL rank table.", _hostfile),
}


def _add_json(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--json", action="store_true", help="print JSON")


def _add_strategies(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group(
        "strategies",
        "a file; a folder of stage files; none: whole tensors; or cut:REGEX=AXIS@RANKS, in equal "
        "slices by hand, states too",
    )
    group.add_argument(
        "--src-strategy", "--src-ckpt-strategy", "--src-strategy-file", "--src-strategy-dir",
        dest="src_strategy", metavar="STRATEGY", help="how SRC is cut (default: none)",
    )  # fmt: skip
    group.add_argument(
        "--dst-strategy", "--dst-ckpt-strategy", "--dst-strategy-file", "--dst-strategy-dir",
        dest="dst_strategy", metavar="STRATEGY", help="how DST shall be cut (default: none)",
    )  # fmt: skip


def _add_conversion(
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
    _add_strategies(parser)
    _add_choice(parser)
    _add_source(parser)
    _add_output(parser)


def _add_choice(parser: argparse.ArgumentParser) -> None:
    what = parser.add_argument_group("what is converted")
    what.add_argument(
        "--ranks",
        type=_ranks,
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


def _add_source(parser: argparse.ArgumentParser) -> None:
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
        help="epoch and step to take, such as 10_73 (default: the newest that all ranks have)",
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


def _add_output(parser: argparse.ArgumentParser) -> None:
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


def _ranks(text: str) -> tuple[int, ...]:
    try:
        return number_ranges(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: numbers such as 0,2-5 are wanted") from None


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a size such as 256M is wanted") from None


def _time(text: str) -> float:
    try:
        seconds = parse_time(text)
    except ValueError:
        seconds = 0.0
    if not seconds:
        raise argparse.ArgumentTypeError(f"{text!r}: a time such as 90m is wanted")
    return seconds


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text[:9]) <= 1 << 20:
        raise argparse.ArgumentTypeError(f"{text!r}: a number from 1 on is wanted")
    return int(text)
