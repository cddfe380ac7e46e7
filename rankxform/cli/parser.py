"""The options of every verb, and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any, NoReturn

import rankxform
from rankxform.errors import UsageError
from rankxform.job.option import PLACES, RUN

from .maps import add_actions as add_maps
from .options import (
    add_folders,
    add_json,
    add_limits,
    add_option,
    add_progress,
    add_strategies,
    add_table,
    count,
    option,
)
from .strategy import add_actions

DESCRIPTION = """\
Move a distributed MindSpore checkpoint between parallel strategies.

  mpirun -n P python -m rankxform transform SRC DST \\
      --src-strategy A --dst-strategy B

reads SRC/rank_0 .. rank_M-1, sharded by strategy A, and writes
DST/rank_0 .. rank_N-1 for strategy B. P processes share the work; P, M and N
need not be equal nor divide one another. Without mpirun one process does it
all, and no MPI is needed. A strategy is a file that MindSpore saved, a folder
with the files of all pipeline stages, or "none" (whole tensors on one rank).
"""
EPILOG = """\
The arguments of MindSpore's and MindFormers' conversion scripts are
understood too (--src_ckpt_dir, --src_ckpt_strategy, --src_strategy_file, ...);
"-" and "_" are interchangeable in options. The default verb is transform.

exit codes: 0 done; 2 usage, or launcher and MPI library disagree; 3 the
strategy or the checkpoint is at fault; 4 reading or writing failed, or DST
holds something else; 6 verify found a difference; 70 a bug of rankxform's
own; 75 stopped, run again.
"""


class _Parser(argparse.ArgumentParser):
    """Raises UsageError, so that one process speaks for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: python -m {self.prog} --help)")


class _Unmeasured(argparse.RawDescriptionHelpFormatter):
    """For parsers that print no help: does not find out how wide the terminal is."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=80)


def parser(only: str | None = None) -> argparse.ArgumentParser:
    """Build the command's parser; its errors are raised as UsageError.

    With `only`, that verb's options alone are known, and no help can be printed.
    """
    facts: dict[str, Any] = {"formatter_class": _Unmeasured} if only in VERBS else {}
    whole = _Parser(
        "rankxform",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        **{"formatter_class": argparse.RawDescriptionHelpFormatter, **facts},
    )
    version = f"rankxform {rankxform.__version__}"
    whole.add_argument("--version", action="version", version=version, help="print the version")
    verbs = whole.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for name, (summary, add_options) in VERBS.items():
        verb = verbs.add_parser(
            name, help=summary, description=summary, allow_abbrev=False, **facts
        )
        if only in (None, name) or only not in VERBS:
            add_options(verb)
    return whole


_PROCESS_COUNTS = ("--transform-process-num", "--process-num")


def _transform(verb: argparse.ArgumentParser) -> None:
    add_folders(verb)
    run = add_table(verb, "transform")[RUN]
    run.add_argument(
        "--dry-run",
        action="store_true",
        help="print the plan and the predicted time, convert nothing; to measure, each process "
        "writes a file of 64 MiB in DST and removes it",
    )
    run.add_argument("--profile", action="store_true", help="print where each process's time went")
    add_limits(run)
    add_progress(run)
    add_json(verb)
    for ignored in ("--rank-id", "--world-size", *_PROCESS_COUNTS, "--transform-by-rank"):
        verb.add_argument(ignored, help=argparse.SUPPRESS)


def _verify(verb: argparse.ArgumentParser) -> None:
    add_folders(verb, dst="folder to verify; without it, SRC is compared with its own manifest")
    add_table(verb, "verify")
    run = verb.add_argument_group(RUN)
    add_limits(run)
    add_progress(run)
    add_json(verb)


def _launch(verb: argparse.ArgumentParser) -> None:
    verb.epilog = (
        "-- PROGRAM ... replaces each process once the checkpoint is ready. {checkpoint} and "
        "{rank} in its arguments are filled in. LOAD_CHECKPOINT is set in its environment, and "
        "RANK_ID, RANK_SIZE and DEVICE_ID if they were not set."
    )
    verb.add_argument(
        "--load", dest="src", required=True, metavar="CKPT", help="what the program is to load"
    )
    verb.add_argument(
        "--output",
        default="output",
        metavar="DIR",
        help="where transformed_checkpoint/ and strategy/ are made (default: %(default)s)",
    )
    verb.add_argument(
        "--uses-mpi",
        action="store_true",
        help="the program uses MPI itself, for example through rankxform.load",
    )
    add_strategies(verb)
    run = add_table(verb, "launch")[RUN]
    add_limits(run)
    add_progress(run)


def _plan(verb: argparse.ArgumentParser) -> None:
    add_folders(verb)
    add_table(verb, "plan")
    verb.add_argument(
        "--processes",
        type=count,
        metavar="P",
        help="plan for P processes (default: as many as run this command)",
    )
    cluster = verb.add_argument_group("simulated, for any cluster")
    cluster.add_argument(
        "--simulate",
        type=count,
        metavar="P",
        help="print what each of P processes would read, send and write, and how long it takes",
    )
    cluster.add_argument(
        "--nodes", type=count, metavar="N", help="on N nodes (default: of 8 processes each)"
    )
    cluster.add_argument(
        "--src-placement",
        choices=PLACES,
        help="all nodes see all source files, or each has its own part (default: shared)",
    )
    add_json(verb)


_OF_RANKS = (
    "ranks", "include", "exclude", "rename", "unmatched", "src_pattern", "step", "suffix"
)  # fmt: skip


def _ranks_options(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "src", nargs="?", metavar="SRC", help="the checkpoint, for the exact choice among replicas"
    )
    add_strategies(verb)
    for name in _OF_RANKS:
        add_option(verb, option(name))
    add_json(verb)


def _merge(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "folder", metavar="FOLDER", help="the stages' strategy files, all protobuf or all JSON"
    )
    verb.add_argument("target", metavar="FILE", help="the merged file; .json for JSON stages")
    verb.add_argument("--overwrite", action="store_true", help="replace FILE")


def _inspect(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", help="a checkpoint file or folder, or a strategy")
    verb.add_argument(
        "--replicas",
        dest="compare_replicas",
        action="store_true",
        help="compare all bytes that several ranks should hold alike; needs --src-strategy",
    )
    verb.add_argument(
        "--src-strategy", "--src-ckpt-strategy", metavar="STRATEGY", help="how PATH is sharded"
    )
    for name in ("src_pattern", "step", "suffix", "map", "config"):
        add_option(verb, option(name))
    add_json(verb)


def _hostfile(verb: argparse.ArgumentParser) -> None:
    verb.add_argument(
        "table", metavar="RANK_TABLE", help="rank table (JSON), version 0, 1.0 or 1.2"
    )
    verb.add_argument(
        "--style",
        choices=("openmpi", "mpich"),
        default="openmpi",
        help="whose mpirun reads it (default: %(default)s)",
    )
    verb.add_argument(
        "--slots", type=count, metavar="N", help="processes on each host (default: its devices)"
    )


VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "transform": ("Convert a checkpoint.", _transform),
    "verify": ("Compare a destination with its source, or with its own manifest.", _verify),
    "launch": ("Convert a checkpoint if it does not fit, then start a program.", _launch),
    "plan": ("Print what would be read, written and held in memory; touch no tensor.", _plan),
    "ranks": ("Print the source ranks whose bytes each destination rank needs.", _ranks_options),
    "merge": ("Write the strategy files of all stages as one that MindSpore reads.", _merge),
    "strategy": ("Derive, explain, show, convert or compare strategies.", add_actions),
    "maps": ("List, print or check the tables of --map, other names of a model.", add_maps),
    "inspect": ("Print what a checkpoint file or folder, or a strategy, holds.", _inspect),
    "hostfile": ("Print a hostfile made from an HCCL rank table.", _hostfile),
}
