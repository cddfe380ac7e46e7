"""What --help and --version print."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import Field
from textwrap import indent, wrap
from typing import Any

import rankxform
from rankxform.display.text import wrap_text
from rankxform.options import GROUP_STRATEGIES, flags_of, option_info

from .parser import (
    COMMANDS,
    HELP_FLAGS,
    VERBS,
    Command,
    command_of,
    is_flag,
    refuse_unknown,
    spell_with_dashes,
    split_program,
    verb_names,
)

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
    "found a difference, or did not compare every byte; 70 a bug of rankxform's own; 75 stopped, "
    "run again."
)
GROUP_NOTES = {
    GROUP_STRATEGIES: "a file; a folder of stage files; none: whole tensors; or "
    "shard:REGEX=AXIS,...@RANKS: equal slices by pattern, optimizer states too; of a source "
    "also REGEX=0:32/16/16, rows of each part of a fused tensor"
}
_COMMON = frozenset((
    "src", "dst", "src_strategy", "dst_strategy", "dst_parallel", "dst_config", "step",
    "weights_only", "dst_form", "map", "dry_run", "verify", "overwrite", "json", "number",
    "verbose", "quiet", "processes", "output", "simulate", "ranks", "hostfile", "report",
    "shapes", "uses_mpi", "watch", "keep", "settle", "keep_fingerprints",
))  # fmt: skip
"""What --help shows of commands with many options; --help-all shows all."""

_MANY, _NARROWEST, _WIDEST, _COLUMN = 20, 30, 100, 24


def help_text(argv: Sequence[str]) -> str:
    """Return what arguments that ask for help print. Raises UsageError."""
    line = [spell_with_dashes(word) for word in split_program(argv)[0]]
    if line[:1] == ["help"] or (line and is_flag(line[0]) and line[0] not in HELP_FLAGS):
        line = [*line[1:], "--help"] if line[0] == "help" else ["transform", *line]
    if "-V" in line or "--version" in line:
        return f"rankxform {rankxform.__version__}"
    verb = next((word for word in line[:1] if not is_flag(word)), None)
    if verb is None:
        return _overview()
    if verb not in verb_names():
        refuse_unknown(verb, verb_names(), "there is no verb", "rankxform --help")
    actions = [command for name, command in COMMANDS.items() if name.startswith(f"{verb} ")]
    if actions and (len(line) < 2 or is_flag(line[1])):
        rows = ((command.name.partition(" ")[2], command.summary) for command in actions)
        usage = f"usage: rankxform {verb} ACTION ... [options]"
        return "\n\n".join([usage, VERBS[verb], _group("actions", rows)])
    command, _ = command_of(line)
    return _command_help(command, "--help-all" in line)


def width() -> int:
    """Return how many columns help takes."""
    return max(_NARROWEST, min(shutil.get_terminal_size().columns - 2, _WIDEST))


def _overview() -> str:
    rows = (
        (verb, VERBS[verb] if verb in VERBS else COMMANDS[verb].summary) for verb in verb_names()
    )
    parts = (
        "usage: rankxform VERB ...", _filled(DESCRIPTION), _group("verbs", rows),
        _group("options", [
            ("-h, --help", "print this; behind a verb: its options"),
            ("-V, --version", "print the version"),
        ]), _filled(EPILOG),
    )  # fmt: skip
    return "\n\n".join(parts)


def _command_help(command: Command, with_all: bool) -> str:
    shown = [option for option in command.options if option_info(option).help]
    hidden_count = 0
    if len(shown) > _MANY and not with_all:
        common = [option for option in shown if option.name in _COMMON]
        hidden_count, shown = len(shown) - len(common), common
    parts = [f"usage: {usage_of(command)}", _filled(command.summary)]
    if command.places:
        parts.append(_group("arguments", ((p.title.strip("[]"), p.help) for p in command.places)))
    for title in dict.fromkeys(option_info(option).group for option in shown):
        options = [option for option in shown if option_info(option).group == title]
        note = GROUP_NOTES.get(title, "")
        parts.append(_group(title, map(row_of, options), note))
    parts += [_filled(command.epilog)] if command.epilog else []
    parts += [f"--help-all shows {hidden_count} more options."] if hidden_count else []
    parts += [f"example:\n  {command.example}"] if command.example else []
    return "\n\n".join(parts)


def usage_of(command: Command) -> str:
    """Return in short how a command is called."""
    program = "-- PROGRAM ..." if command.name == "launch" else ""
    titles = (place.title for place in command.places)
    return " ".join(filter(None, ("rankxform", command.name, *titles, "[options]", program)))


def row_of(option: Field[Any], all_flags: bool = False) -> tuple[str, str]:
    """Return an option as help writes it: its flags with its value, and its text."""
    info, flags = option_info(option), flags_of(option)
    names = ", ".join(flags if all_flags or len(flags) < 3 else flags[:1])
    value = "" if info.kind.stands_for is not None else f" {value_of(option)}"
    return names + value, info.help.replace("%(default)s", str(option.default))


def value_of(option: Field[Any]) -> str:
    """Return what stands for an option's value."""
    info = option_info(option)
    choices = "{" + ",".join(map(str, info.kind.choices)) + "}" if info.kind.choices else ""
    return info.metavar or choices or option.name.upper()


def _group(title: str, rows: Iterator[tuple[str, str]] | Sequence[Any], note: str = "") -> str:
    lines = [f"{title}:"]
    lines += [indent("\n".join(wrap(note, width() - 2)), "  "), ""] if note else []
    for head, text in rows:
        body = wrap(text, max(width() - _COLUMN, 20), break_on_hyphens=False)
        first = f"  {head}"
        if len(first) < _COLUMN - 1 and body:
            first = first.ljust(_COLUMN) + body.pop(0)
        lines += [first, *(" " * _COLUMN + line for line in body)]
    return "\n".join(lines)


def _filled(text: str) -> str:
    return "\n".join(wrap_text(line, width(), 0) for line in text.splitlines())
