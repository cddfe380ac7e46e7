"""What to convert, and how: the options of every room, gathered; only the verbs see them whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from functools import cache
from typing import Any

from rankxform.checkpoints.base import FORMS
from rankxform.checkpoints.options import FormOptions
from rankxform.derivation.options import DeriveOptions
from rankxform.engine.options import ReadOptions
from rankxform.errors import UsageError
from rankxform.layout.strategy import Strategy
from rankxform.ops.base import OPERATIONS
from rankxform.ops.options import OperationOptions
from rankxform.options import GROUPS, check, facts_of, options_of
from rankxform.planning.options import SelectionOptions
from rankxform.publish.options import PublishOptions
from rankxform.source.options import SourceOptions
from rankxform.values import dataclass


@dataclass(frozen=True)
class Request(
    PublishOptions,
    ReadOptions,
    FormOptions,
    SourceOptions,
    DeriveOptions,
    OperationOptions,
    SelectionOptions,
):
    """What to convert, and how. Paths are resolved by process 0.

    src, dst: source folder or file; destination folder (None: nothing is written).
    files: the source file of each rank, in place of those that are found in `src`.
    src_strategy, dst_strategy: a file, a folder of stage files, "none" for whole tensors,
        ``shard:REGEX=AXIS@RANKS``; or a Strategy, as it comes from a network. None: none was given,
        which means whole tensors, but is an error where the source holds files of several ranks.
    The other fields are options; see their help. Raises UsageError for what they cannot be.
    """

    src: str
    dst: str | None
    src_strategy: str | Strategy | None = None
    dst_strategy: str | Strategy | None = None
    files: Mapping[int, str] | None = None

    def __new__(cls, *_: Any, **__: Any) -> Request:
        return super().__new__(_class_of(_declared()) if cls is Request else cls)

    def __reduce__(self) -> Any:
        return _remade, (vars(self),)

    def __post_init__(self) -> None:
        check(self)
        for name in ("src", "dst", "src_strategy", "dst_strategy"):
            text = getattr(self, name)
            if isinstance(text, str) and "\0" in text:
                raise UsageError(f"{name} {text!r}: holds a NUL, which no name can have")
        if self.prefix is not None and ("/" in self.prefix or self.prefix.startswith(".")):
            raise UsageError(f"prefix {self.prefix!r} must be the start of a file's name")
        if self.prefix is not None and not self.prefix.isprintable():
            raise UsageError(f"prefix {self.prefix!r} has characters that no file's name should")
        if self.memory < 1 << 20:
            raise UsageError(f"memory of {self.memory} bytes is too little; 1 MiB is the least")


def _remade(values: Mapping[str, Any]) -> Request:
    return Request(**values)


def _declared() -> tuple[type, ...]:
    """Return the classes of options that registered forms and operations have of their own."""
    every = (*FORMS.values(), *OPERATIONS.values())
    return tuple(part for one in every if (part := getattr(one, "own_options", None)) is not None)


@cache
def _class_of(parts: tuple[type, ...]) -> type[Request]:
    """Return the class of requests that have the options of `parts` too."""
    return dataclass(frozen=True)(type("Request", (*parts, Request), {})) if parts else Request


def option_table() -> tuple[Field[Any], ...]:
    """Return the one table of options, as help shows them."""
    return _table(_declared())


@cache
def _table(parts: tuple[type, ...]) -> tuple[Field[Any], ...]:
    found = options_of(_class_of(parts))
    return tuple(sorted(found, key=lambda one: GROUPS.index(facts_of(one).group)))


def in_group(title: str) -> list[str]:
    """Return the names of the options of a group."""
    return [one.name for one in option_table() if facts_of(one).group == title]


def affecting(what: str) -> list[str]:
    """Return the names of the options on which something depends."""
    return [one.name for one in option_table() if what in facts_of(one).affects]


@cache
def options_in_words(names: frozenset[str]) -> str:
    """Return what options are, by group, for a person who reads a docstring."""
    from textwrap import wrap

    lines: list[str] = []
    for group in GROUPS:
        some = [one for one in option_table() if one.name in names and facts_of(one).group == group]
        lines += ["", f"{group}:"] if some else []
        for one in some:
            kind = facts_of(one).kind
            default = "" if one.default in (None, ()) else f" = {one.default!r}"
            head = f"{one.name}: {kind.hint}{default}"
            text = facts_of(one).help % {"default": one.default}
            if kind.stands_for is False:
                text = f"False: {text}"
            lines += [
                f"  {head}",
                *wrap(text, 88, initial_indent=" " * 6, subsequent_indent=" " * 6),
            ]
    return "\n".join(lines[1:])


def default_of(name: str) -> Any:
    """Return what an option is where it is not given."""
    return next(one.default for one in option_table() if one.name == name)
