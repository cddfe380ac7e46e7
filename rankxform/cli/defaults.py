"""Options from a file and from the environment, where the command line does not give them."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from rankxform.errors import UsageError, nearest
from rankxform.formats.toml_document import toml_document
from rankxform.options import flag_of
from rankxform.request import option_table
from rankxform.storage.posix import read_bytes

from .verbs import VERBS

FILE, FLAG = "rankxform.toml", "--config-file"
_PREFIX = "RANKXFORM_"


class Default(NamedTuple):
    """An option that was not given on the command line: its words there, and what states it."""

    words: tuple[str, ...]
    origin: str


def without_file(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Return the words without ``--config-file FILE``, and the file. Raises UsageError."""
    for at, word in enumerate(argv):
        flag, equals, value = word.partition("=")
        if flag == FLAG:
            rest = argv[at + 1 :]
            if not equals and not rest:
                raise UsageError("expected a file", where=FLAG)
            return [*argv[:at], *(rest if equals else rest[1:])], value if equals else rest[0]
    return list(argv), None


def defaults(
    known: argparse.ArgumentParser, given: Sequence[str], file: str | None
) -> list[Default]:
    """Return the options of a verb that the environment or a file states, and `given` does not.

    known: the verb's parser. given: the words of the command, the verb first. file: what
    ``--config-file`` names; else ``rankxform.toml`` is looked for here and in the folders above.
    Raises UsageError.
    """
    stated = {name: (value, f"{_PREFIX}{name.upper()}") for name, value in _environment(known)}
    path = Path(file) if file is not None else _found()
    if path is not None:
        for name, value in _options(given[0], known, path):
            stated.setdefault(name, (value, str(path)))
    flags = {word.partition("=")[0] for word in given}
    found = []
    for name, (value, origin) in stated.items():
        action = known._option_string_actions[flag_of(name)]
        if not flags & {*action.option_strings}:
            found.append(Default(_words(action, value, origin), origin))
    return [one for one in found if one.words]


def _found() -> Path | None:
    here = Path.cwd()
    return next((path for one in (here, *here.parents) if (path := one / FILE).is_file()), None)


def _environment(known: argparse.ArgumentParser) -> Iterator[tuple[str, str]]:
    for variable, value in os.environ.items():
        name = variable.removeprefix(_PREFIX).lower()
        if variable.startswith(_PREFIX) and flag_of(name) in known._option_string_actions:
            yield name, value


def _options(verb: str, known: argparse.ArgumentParser, path: Path) -> Iterator[tuple[str, Any]]:
    """Yield the options of a verb that a file states; those in the verb's table first."""
    if not path.is_file():
        raise UsageError("no such file of options", where=path)
    document = toml_document(read_bytes(path), str(path))
    tables = {name: one for name, one in document.items() if isinstance(one, dict)}
    for name in tables:
        if name not in VERBS:
            raise UsageError(f"there is no verb {name}{nearest(name, VERBS)}", where=path)
    every = {one.name for one in option_table()}
    common = {name: value for name, value in document.items() if name not in tables}
    for some, is_of_verb in ((tables.get(verb, {}), True), (common, False)):
        for key, value in some.items():
            name = key.replace("-", "_")
            flags = [one for one in known._option_string_actions if one.startswith("--")]
            if flag_of(name) in flags:
                yield name, value
            elif is_of_verb or name not in every:
                what = f"{verb} has no option {flag_of(name)}{nearest(flag_of(name), flags)}"
                raise UsageError(what, where=path)


def _words(action: argparse.Action, value: Any, origin: str) -> tuple[str, ...]:
    """Return an option as the command line has it; () for a flag that is off. Raises UsageError."""
    flag = action.option_strings[0]
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
    return tuple(f"{flag}={one}" for one in values)
