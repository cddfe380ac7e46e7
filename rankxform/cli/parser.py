"""The options of every verb, and their help."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from typing import Any, NoReturn

import rankxform
from rankxform.errors import UsageError
from rankxform.options import RUN, facts_of
from rankxform.request import OPTIONS

from .maps import add_actions as add_maps
from .options import (
    PLACES,
    add_detail,
    add_folders,
    add_json,
    add_limits,
    add_number,
    add_option,
    add_progress,
    add_report,
    add_strategies,
    add_table,
    count,
    option,
)
from .strategy import add_actions
from .terminal import folded

DESCRIPTION = (
    "Move a distributed MindSpore checkpoint between parallel strategies.\n\n"
    "  rankxform transform -n P SRC DST --src-strategy A --dst-strategy B\n\n"
    "reads SRC/rank_0 .. rank_M-1, sharded by strategy A, and writes DST/rank_0 .. rank_N-1 for "
    "strategy B. P processes share the work; P, M and N need not be equal nor divide one another. "
    "-n starts them with mpirun; leave it out under mpirun or srun. Without either, one process "
    "does it all, and no MPI is needed.\n\n"
    "A strategy is a file that MindSpore saved, a folder with the files of all pipeline stages, or "
    '"none" (whole tensors on one rank).'
)
EPILOG = (
    "The arguments of MindSpore's and MindFormers' conversion scripts are understood too "
    '(--src_ckpt_dir, --src_ckpt_strategy, --src_strategy_file, ...); "-" and "_" are '
    "interchangeable in options. If the first argument is an option, the verb is transform, as on "
    "those scripts' command lines.\n\n"
    "exit codes: 0 done; 2 usage, or launcher and MPI library disagree; 3 the strategy or the "
    "checkpoint is at fault; 4 reading or writing failed, or DST holds something else; 6 verify "
    "found a difference, or compared no byte; 70 a bug of rankxform's own; 75 stopped, run again."
)


class _Parser(argparse.ArgumentParser):
    """Raises UsageError, so that one process speaks for all."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message} (see: {self.prog} --help)")


_COMMON = frozenset((
    "help", "src", "dst", "src_strategy", "dst_strategy", "dst_parallel", "dst_config", "step",
    "weights_only", "dst_form", "map", "dry_run", "verify", "overwrite", "json", "number",
    "verbose", "quiet", "processes", "load", "output", "simulate", "ranks", "path",
    "compare_replicas", "hostfile", "report",
))  # fmt: skip
"""What --help shows of verbs with many options; --help-all shows all."""

_MANY, _FEW_FLAGS = 20, 2
_WIDEST = 100

_STRATEGIES = "--src-strategy output/strategy --dst-strategy new/strategy"
EXAMPLES = {
    "transform": f"rankxform transform -n 8 output/checkpoint new_ckpt \\\n      {_STRATEGIES}",
    "verify": f"rankxform verify -n 8 output/checkpoint new_ckpt \\\n      {_STRATEGIES}",
    "plan": f"rankxform plan output/checkpoint \\\n      {_STRATEGIES}",
    "launch": "mpirun -n 8 python -m rankxform launch --load trained/checkpoint \\\n"
    "      --src-strategy trained/strategy --dst-strategy new/strategy -- \\\n"
    "      python train.py --load_checkpoint {checkpoint}",
    "ranks": f"rankxform ranks {_STRATEGIES} --ranks 0-3",
    "merge": "rankxform merge output/strategy merged.ckpt",
    "inspect": "rankxform inspect output",
    "hostfile": "rankxform hostfile rank_table.json --style mpich > hosts",
}


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps lines as they are written where they fit, and names the value of an option once."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (folded(line, min(width, _WIDEST) - len(indent), 0) for line in text.splitlines())
        return "\n".join(indent + part for line in lines for part in (line.splitlines() or [""]))

    def _format_action_invocation(self, action: argparse.Action) -> str:
        flags = action.option_strings
        if not flags:
            return super()._format_action_invocation(action)
        if len(flags) > _FEW_FLAGS:
            flags = flags[:1]
        values = "" if action.nargs == 0 else " " + self._format_args(action, _value_of(action))
        return ", ".join(flags) + values


def _value_of(action: argparse.Action) -> str:
    if action.choices and not action.metavar:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return str(action.metavar or action.dest.upper())


class _Unmeasured(_Help):
    """For parsers that print no help: does not find out how wide the terminal is."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=80)


def parser(only: str | None = None, common: bool = False) -> argparse.ArgumentParser:
    """Build the command's parser; its errors are raised as UsageError.

    With `only`, that verb's options alone are known, and no help can be printed. common: help shows
    the common options alone.
    """
    facts: dict[str, Any] = {"formatter_class": _Unmeasured} if only in VERBS else {}
    whole = _Parser(
        "rankxform",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        **{"formatter_class": _Help, **facts},
    )
    version = f"rankxform {rankxform.__version__}"
    whole.add_argument(
        "-V", "--version", action="version", version=version, help="print the version"
    )
    verbs = whole.add_subparsers(dest="verb", metavar="VERB", required=True, parser_class=_Parser)
    for name, (summary, add_options) in VERBS.items():
        verb = verbs.add_parser(
            name, help=summary, description=summary, allow_abbrev=False,
            **{"formatter_class": _Help, **facts},
        )  # fmt: skip
        if only in (None, name) or only not in VERBS:
            add_options(verb)
        if common and len(verb._actions) > _MANY:
            _hide_uncommon(verb)
        if name in EXAMPLES and only not in VERBS:
            verb.epilog = "\n\n".join(
                [*([verb.epilog] if verb.epilog else []), f"example:\n  {EXAMPLES[name]}"]
            )
    return whole


def leaves(whole: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every verb with its parser; in place of one with actions, these."""
    for name, verb in _inner(whole):
        actions = list(_inner(verb))
        yield from ((f"{name} {action}", one) for action, one in actions)
        if not actions:
            yield name, verb


def _inner(one: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in one._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


def _hide_uncommon(verb: argparse.ArgumentParser) -> None:
    """Leave what is seldom needed out of help."""
    hidden = 0
    for action in verb._actions:
        if action.dest not in _COMMON and action.help is not argparse.SUPPRESS:
            action.help = argparse.SUPPRESS
            hidden += 1
    places = [
        f"[{a.metavar}]" if verb.prog.endswith("plan") and a.dest == "dst" else a.metavar
        for a in verb._actions
        if not a.option_strings and a.help != argparse.SUPPRESS
    ]
    verb.usage = f"{verb.prog} {' '.join(map(str, places))} [options]"
    verb.epilog = (verb.epilog or "") + f"\n--help-all shows {hidden} more options."


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
    add_detail(run)
    add_json(verb)
    add_number(verb)
    add_report(verb)
    for ignored in ("--rank-id", "--world-size", *_PROCESS_COUNTS, "--transform-by-rank"):
        verb.add_argument(ignored, help=argparse.SUPPRESS)


def _ignore_writing(verb: argparse.ArgumentParser) -> None:
    """Accept, and ignore, options that concern writing alone, so that `verify` takes the same
    command as `transform`."""
    for one in OPTIONS:
        verbs = facts_of(one).verbs
        if "transform" in verbs and "verify" not in verbs:
            add_option(verb, one, dest="ignored_" + one.name, help=argparse.SUPPRESS)
    verb.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)


def _verify(verb: argparse.ArgumentParser) -> None:
    add_folders(
        verb, dst="folder to verify; with one folder alone, it is compared with its own manifest"
    )
    add_table(verb, "verify")
    _ignore_writing(verb)
    run = verb.add_argument_group(RUN)
    add_limits(run)
    add_progress(run)
    add_detail(run)
    add_json(verb)
    add_number(verb)
    add_report(verb)


def _launch(verb: argparse.ArgumentParser) -> None:
    verb.epilog = (
        "-- PROGRAM ... replaces each process once the checkpoint is ready. {checkpoint}\n"
        "and {rank} in its arguments are filled in. LOAD_CHECKPOINT is set in its\n"
        "environment, and RANK_ID, RANK_SIZE and DEVICE_ID if they were not set."
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
    add_detail(run)
    add_json(verb)


def _plan(verb: argparse.ArgumentParser) -> None:
    add_folders(verb)
    add_table(verb, "plan")
    verb.add_argument(
        "-n",
        "--processes",
        type=count,
        metavar="P",
        help="plan for P processes (default: as many as run this command)",
    )
    verb.add_argument("-v", "--verbose", action="store_true", help="print the names too")
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
    add_report(verb)


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
    add_json(verb)


def _inspect(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("path", metavar="PATH", help="a checkpoint file or folder, or a strategy")
    verb.add_argument(
        "--replicas",
        dest="compare_replicas",
        action="store_true",
        help="compare all bytes that several ranks should hold alike; needs --src-strategy",
    )
    verb.add_argument("-v", "--verbose", action="store_true", help="print each parameter of a file")
    verb.add_argument(
        "--raw", action="store_true", help="print a strategy's matrices and tensor maps too"
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
    add_json(verb)


VERBS: dict[str, tuple[str, Callable[[argparse.ArgumentParser], None]]] = {
    "transform": ("Convert a checkpoint.", _transform),
    "verify": ("Compare a destination with its source, or with its own manifest.", _verify),
    "launch": ("Convert a checkpoint if the job needs other shards, then start the job.", _launch),
    "plan": ("Print what would be read, written and held in memory; read headers only.", _plan),
    "ranks": ("Print the source ranks whose bytes each destination rank needs.", _ranks_options),
    "merge": ("Write the strategy files of all stages as one that MindSpore reads.", _merge),
    "strategy": ("Derive, explain, show, convert or compare strategies.", add_actions),
    "maps": ("List, print or check the tables of names that --map uses.", add_maps),
    "inspect": ("Print what a checkpoint file or folder, or a strategy, holds.", _inspect),
    "hostfile": ("Print a hostfile made from an HCCL rank table.", _hostfile),
}
