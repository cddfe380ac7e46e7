"""The table of commands, and the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, cast

import rankxform
from rankxform.display.text import wrap_text
from rankxform.errors import UsageError, did_you_mean
from rankxform.transport import Team

if TYPE_CHECKING:
    from .launch import Program


class Command(Protocol):
    """A module of this package: what the verb takes, does and prints.

    SUMMARY: one sentence; EXAMPLE: a command.
    """

    SUMMARY: str
    EXAMPLE: str

    def add_options(self, verb: argparse.ArgumentParser) -> None:
        """Declare the verb's options."""

    def run(self, options: argparse.Namespace, team: Team) -> int | Program:
        """Do it; return the exit code, or what this process becomes. Collective."""


COMMANDS: dict[str, str] = {
    name: f"{__package__}.{name}"
    for name in (
        "transform", "verify", "launch", "plan", "ranks", "merge", "strategy", "maps", "inspect",
        "hostfile",
    )
}  # fmt: skip
"""The module of each verb, in the order of --help."""


def command_named(name: str) -> Command:
    """Return a verb's module."""
    return cast(Command, import_module(COMMANDS[name]))


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

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            flag = "/".join(action.option_strings) or str(action.metavar or action.dest)
            choices_text = ", ".join(map(str, action.choices))
            raise UsageError(
                f"{flag} {value!r} is none of "
                f"{choices_text}{did_you_mean(str(value), action.choices)}",
                details=f"see: {self.prog} --help",
            )


_COMMON = frozenset((
    "help", "src", "dst", "src_strategy", "dst_strategy", "dst_parallel", "dst_config", "step",
    "weights_only", "dst_form", "map", "dry_run", "verify", "overwrite", "json", "number",
    "verbose", "quiet", "processes", "load", "output", "simulate", "ranks", "path",
    "compare_replicas", "hostfile", "report",
))  # fmt: skip
"""What --help shows of verbs with many options; --help-all shows all."""

_MANY, _FEW_FLAGS = 20, 2
_WIDEST = 100


class _Help(argparse.RawDescriptionHelpFormatter):
    """Keeps lines as they are written where they fit, and names the value of an option once."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = (
            wrap_text(line, min(width, _WIDEST) - len(indent), 0) for line in text.splitlines()
        )
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


class _HelpWithoutWidth(_Help):
    """For parsers that print no help: does not find out how wide the terminal is."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, width=80)


def parser(only: str | None = None, common: bool = False) -> argparse.ArgumentParser:
    """Build the command's parser; its errors are raised as UsageError.

    With `only`, that verb's options alone are known, and no help can be printed. common: help shows
    the common options alone.
    """
    facts: dict[str, Any] = {"formatter_class": _HelpWithoutWidth} if only in COMMANDS else {}
    main_parser = _Parser(
        "rankxform",
        description=DESCRIPTION,
        epilog=EPILOG,
        allow_abbrev=False,
        **{"formatter_class": _Help, **facts},
    )
    version = f"rankxform {rankxform.__version__}"
    main_parser.add_argument(
        "-V", "--version", action="version", version=version, help="print the version"
    )
    verbs = main_parser.add_subparsers(
        dest="verb", metavar="VERB", required=True, parser_class=_Parser
    )
    for name in COMMANDS:
        if only in COMMANDS and only != name:
            verbs.add_parser(name, **facts)
            continue
        module = command_named(name)
        verb = verbs.add_parser(
            name, help=module.SUMMARY, description=module.SUMMARY, allow_abbrev=False,
            **{"formatter_class": _Help, **facts},
        )  # fmt: skip
        module.add_options(verb)
        if common and len(verb._actions) > _MANY:
            _hide_uncommon(verb)
        if module.EXAMPLE and only not in COMMANDS:
            verb.epilog = "\n\n".join(
                [*([verb.epilog] if verb.epilog else []), f"example:\n  {module.EXAMPLE}"]
            )
    return main_parser


def commands_with_actions(
    main_parser: argparse.ArgumentParser,
) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    """Yield every verb with its parser; in place of one with actions, these."""
    for name, verb in _inner(main_parser):
        actions = list(_inner(verb))
        yield from ((f"{name} {action}", action_parser) for action, action_parser in actions)
        if not actions:
            yield name, verb


def _inner(parent_parser: argparse.ArgumentParser) -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in parent_parser._actions:
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
