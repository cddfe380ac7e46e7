"""What to convert, and how: the options of every room, gathered; only the verbs see them whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field
from functools import cache, partial
from typing import Any

from rankxform.checkpoints.base import FORMS
from rankxform.checkpoints.options import FormOptions
from rankxform.derivation.options import DeriveOptions
from rankxform.engine.options import ReadOptions
from rankxform.layout.strategy import Strategy
from rankxform.operations.base import OPERATIONS
from rankxform.operations.options import OperationOptions
from rankxform.planning.options import SelectionOptions
from rankxform.publish.options import PublishOptions
from rankxform.source.options import SourceOptions
from rankxform.storage.store import storage_of

from .errors import UsageError
from .options import GROUPS, check_options, option_info, options_of
from .values import dataclass


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

    The fields that it inherits are options; see the help of each. Raises UsageError if one has a
    value that it cannot have.
    """

    src: str  # a folder or a file
    dst: str | None  # a folder; None: nothing is written
    # A file, a folder of stage files, "none" for whole tensors, ``shard:REGEX=AXIS@RANKS``; or a
    # Strategy, as it comes from a network. None: not given, which means whole tensors, but is an
    # error if the source has files of several ranks.
    src_strategy: str | Strategy | None = None
    dst_strategy: str | Strategy | None = None
    # rank -> its source file, instead of those in `src`.
    files: Mapping[int, str] | None = None

    def __new__(cls, *_: Any, **__: Any) -> Request:
        return super().__new__(_class_of(_own_option_classes()) if cls is Request else cls)

    def __reduce__(self) -> Any:
        return partial(Request, **vars(self)), ()

    def __post_init__(self) -> None:
        check_options(self)
        for name in ("src", "dst", "src_strategy", "dst_strategy"):
            text = getattr(self, name)
            if isinstance(text, str) and "\0" in text:
                raise UsageError(f"{name} {text!r}: holds a NUL, which no name can have")
        if self.prefix is not None and ("/" in self.prefix or self.prefix.startswith(".")):
            raise UsageError(f"prefix {self.prefix!r} must be the start of a file's name")
        if self.prefix is not None and not self.prefix.isprintable():
            raise UsageError(f"prefix {self.prefix!r} has characters that no file's name should")
        if self.memory is not None and self.memory < 1 << 20:
            raise UsageError(f"memory of {self.memory} bytes is too little; 1 MiB is the least")
        if self.throttle is not None and not self.throttle >= 1:
            raise UsageError(f"throttle is {self.throttle}; expected a byte a second at least")

    @property
    def buffers(self) -> int:
        """Bytes of a process's buffers: what is asked for, or what storage needs on both sides."""
        return self.memory or max(storage_of(place).buffers for place in (self.src, self.dst or ""))


def _own_option_classes() -> tuple[type, ...]:
    """Return the classes of options that registered forms and operations have of their own."""
    registered = (*FORMS.loaded(), *OPERATIONS.values())
    options = (getattr(entry, "own_options", None) for entry in registered)
    return tuple(part for part in options if part is not None)


@cache
def _class_of(parts: tuple[type, ...]) -> type[Request]:
    """Return the class of requests that also have the options of `parts`."""
    return dataclass(frozen=True)(type("Request", (*parts, Request), {})) if parts else Request


def all_options() -> tuple[Field[Any], ...]:
    """Return all options, in the order in which help shows them."""
    return _table(_own_option_classes())


@cache
def _table(parts: tuple[type, ...]) -> tuple[Field[Any], ...]:
    options = options_of(_class_of(parts))
    return tuple(sorted(options, key=lambda option: GROUPS.index(option_info(option).group)))


def options_in_group(title: str) -> list[str]:
    """Return the names of the options of a group."""
    return [option.name for option in all_options() if option_info(option).group == title]


def options_affecting(aspect: str) -> list[str]:
    """Return the names of the options that affect `aspect`, such as `options.AFFECTS_BYTES`."""
    return [option.name for option in all_options() if aspect in option_info(option).affects]


@cache
def options_in_words(names: frozenset[str]) -> str:
    """Return the options' descriptions, by group, as a section of a docstring."""
    from textwrap import wrap

    lines: list[str] = []
    for group in GROUPS:
        shown = [name for name in options_in_group(group) if name in names]
        options = [option for option in all_options() if option.name in shown]
        lines += ["", f"{group}:"] if options else []
        for option in options:
            kind = option_info(option).kind
            default = "" if option.default in (None, ()) else f" = {option.default!r}"
            head = f"{option.name}: {kind.hint}{default}"
            text = option_info(option).help % {"default": option.default}
            if kind.stands_for is False:
                text = f"False: {text}"
            lines += [
                f"  {head}",
                *wrap(text, 88, initial_indent=" " * 6, subsequent_indent=" " * 6),
            ]
    return "\n".join(lines[1:])


def default_of(name: str) -> Any:
    """Return the default value of an option."""
    return next(option.default for option in all_options() if option.name == name)
