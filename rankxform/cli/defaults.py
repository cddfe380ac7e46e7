"""Options from a file and from the environment, where the command line does not give them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankxform.errors import UsageError, did_you_mean
from rankxform.formats.documents import parse_toml
from rankxform.options import CONVERSIONS, flag_of
from rankxform.storage.posix import read_bytes

from .parser import COMMANDS, commands_with_actions, parser

FILE, FLAG = "rankxform.toml", "--config-file"
_PREFIX = "RANKXFORM_"
_FOLDERS = ("src_option", "dst_option")
"""Other spellings of SRC and DST, which belong to one command."""


class DefaultOption(NamedTuple):
    """An option that was not given on the command line: its words there, and what states it."""

    words: tuple[str, ...]
    origin: str


def without_file(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the words without ``--config-file FILE``, and the file. Raises UsageError."""
    for position, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag == FLAG:
            values = [value] if equals else argv[position + 1 : position + 2]
            if not values:
                raise UsageError("expected a file", where=FLAG)
            return [*argv[:position], *argv[position + (1 if equals else 2) :]], values[0]
    return list(argv), None


def defaults(
    verb_parser: argparse.ArgumentParser, words: Sequence[str], file: str | None
) -> list[DefaultOption]:
    """Return the options of a verb that the environment or a file states, and `words` does not.

    verb_parser: the verb's parser. words: the words of the command, the verb first. file: what
    ``--config-file`` names; else ``rankxform.toml`` is looked for here and in the folders above.
    Raises UsageError.
    """
    flags = {word.partition("=")[0] for word in words}
    given_dests = {a.dest for a in verb_parser._actions if flags & {*a.option_strings}}
    for group in verb_parser._mutually_exclusive_groups:
        names = {action.dest for action in group._group_actions}
        given_dests |= names if names & given_dests else set()
    file = os.environ.get(f"{_PREFIX}CONFIG_FILE") if file is None else file
    paths = (folder / FILE for folder in (Path.cwd(), *Path.cwd().parents))
    path = Path(file) if file is not None else next((p for p in paths if p.is_file()), None)
    declared_options = [
        *_environment(verb_parser),
        *(_options(words[0], verb_parser, path) if path is not None else ()),
    ]
    default_options = []
    for flag, value, origin in declared_options:
        action = verb_parser._option_string_actions[flag]
        if action.dest not in given_dests:
            given_dests.add(action.dest)
            default_options.append(DefaultOption(_words(action, flag, value, origin), origin))
    return [default for default in default_options if default.words]


def _environment(verb_parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Yield flag, value and origin of the options that the environment states."""
    flags = _flags(verb_parser)
    for variable, value in sorted(os.environ.items()):
        flag = flag_of(variable.removeprefix(_PREFIX).lower())
        if variable.startswith(_PREFIX) and flag in flags:
            yield flag, value, variable


def _flags(verb_parser: argparse.ArgumentParser) -> list[str]:
    """Return the flags that something else than the command line may state."""
    per_call_flags = ("--help", "--help-all", "--json", FLAG)  # what a program asks for each time
    flag_actions = verb_parser._option_string_actions.items()
    return [
        flag
        for flag, action in flag_actions
        if flag.startswith("--") and flag not in per_call_flags and action.dest not in _FOLDERS
    ]


def _options(
    verb: str, verb_parser: argparse.ArgumentParser, path: Path
) -> Iterator[tuple[str, Any, str]]:
    """Yield flag, value and origin of what a file states; what is in the verb's table first.

    What stands above all tables may be an option of another verb.
    """
    if not path.is_file():
        raise UsageError("no such file of options", where=path)
    document = parse_toml(read_bytes(path), str(path))
    tables = {name: table for name, table in document.items() if isinstance(table, dict)}
    for name in tables:
        if name not in COMMANDS:
            raise UsageError(f"there is no verb {name}{did_you_mean(name, COMMANDS)}", where=path)
    common = {name: value for name, value in document.items() if name not in tables}
    verb_flags, conversion_flags = _flags(verb_parser), set[str]()
    for table, is_of_verb in ((tables.get(verb, {}), True), (common, False)):
        for key, value in table.items():
            flag = flag_of(key.replace("-", "_"))
            if flag in verb_flags:
                yield flag, value, str(path)
                continue
            if not is_of_verb and not conversion_flags:
                parsers = (dict(commands_with_actions(parser(name)))[name] for name in CONVERSIONS)
                conversion_flags = {flag for subparser in parsers for flag in _flags(subparser)}
            if is_of_verb or flag not in conversion_flags:
                message = f"{verb} has no option {flag}{did_you_mean(flag, verb_flags)}"
                raise UsageError(message, where=path)


def _words(action: argparse.Action, flag: str, value: Any, origin: str) -> tuple[str, ...]:
    """Return an option as the command line has it; () for a flag that is off. Raises UsageError."""
    if action.nargs == 0:
        on = {"true": True, "1": True, "false": False, "0": False, "": False}
        is_on = value if isinstance(value, bool) else on.get(str(value).lower())
        if is_on is None:
            raise UsageError(f"{flag} is {value!r}; expected true or false", where=origin)
        return (flag,) if is_on else ()
    if isinstance(value, (dict, bool)):
        raise UsageError(f"{flag} is {value!r}; expected its value", where=origin)
    is_repeated = isinstance(action, argparse._AppendAction)
    values = value if isinstance(value, list) else [value]
    if not is_repeated and len(values) > 1:
        values = [",".join(map(str, values))]
    return tuple(f"{flag}={option_value}" for option_value in values)
