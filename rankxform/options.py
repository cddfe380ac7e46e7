"""How an option is declared: where it is used, with its help, its kind, and what depends on it.

Each room that options are for has them in its `options` module, and `rankxform.request` gathers
them: the command line, the keywords of the API, the identity of a job, the command that verifies
its result and docs/cli.md are made of these declarations; no option is stated twice.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import Field, field, fields
from types import MappingProxyType
from typing import Any

from .errors import UsageError
from .values import Registry, dataclass

AFFECTS_BYTES, AFFECTS_COMPARISON, AFFECTS_FIT, AFFECTS_LOAD = "bytes", "compare", "fit", "load"
"""What depends on an option: the bytes of the output; the `verify` that compares it; whether a
checkpoint fits as it is; and what `load`, which writes no files, takes."""

GROUP_SELECTION = "what is converted"
GROUP_OPERATIONS = "operations on the way"
GROUP_DERIVATION = "destination strategy, derived instead of given"
GROUP_SOURCE = "which source files"
GROUP_DESTINATION = "output"
GROUP_IO = "reading and memory"
GROUP_RUN = "how it is done"
GROUP_COMMAND = "options"
GROUP_STRATEGIES = "strategies"
GROUP_CLUSTER = "simulated, for any cluster"

GROUPS = (
    GROUP_COMMAND,
    GROUP_STRATEGIES,
    GROUP_SELECTION,
    GROUP_OPERATIONS,
    GROUP_DERIVATION,
    GROUP_SOURCE,
    GROUP_DESTINATION,
    GROUP_IO,
    GROUP_RUN,
    GROUP_CLUSTER,
)
"""The groups of options, in the order in which help shows them."""

CONVERSIONS = ("transform", "verify", "plan", "launch")
WRITERS = ("transform", "launch")

_FACTORS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_MOST_RANKS = 1 << 20
_MOST_BYTES = 1 << 62


# -- texts that stand for values: each raises ValueError ------------------------------------------


def parse_size(text: str) -> int:
    """Read bytes such as ``256M`` or ``1.5GiB``; the prefixes mean powers of 1024.

    >>> parse_size("64M"), parse_size("1.5GiB"), parse_size("4096")
    (67108864, 1610612736, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(text)
    nbytes = float(match[1]) * _FACTORS[match[2].upper()]
    if nbytes > _MOST_BYTES:
        raise ValueError(text)
    return int(nbytes)


def parse_limit(text: str) -> int:
    """Read bytes, more than none, whose unit says of which power it is.

    >>> parse_limit("5GB"), parse_limit("3GiB"), parse_limit("4096")
    (5000000000, 3221225472, 4096)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:(?:([KMGT])(i?))?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise ValueError(text)
    power = " KMGT".index((match[2] or " ").upper())
    nbytes = float(match[1]) * (1024 if match[3] else 1000) ** power
    if not 1 <= nbytes <= _MOST_BYTES:
        raise ValueError(text)
    return int(nbytes)


def number_ranges(text: str) -> tuple[int, ...]:
    """Read rank numbers such as ``0,2-5``.

    >>> number_ranges("0,2-5")
    (0, 2, 3, 4, 5)
    """
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,9})(?:-(\d{1,9}))?\s*", part)
        if not match:
            raise ValueError(text)
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < _MOST_RANKS:
            raise ValueError(text)
        numbers += range(first, last + 1)
    return tuple(numbers)


def _number(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise ValueError(text)
    return int(text)


def _decimal(text: str) -> float:
    number = float(text)
    if not 0 < number < 1e9:
        raise ValueError(text)
    return number


# -- kinds ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OptionType:
    """A kind of values."""

    item: type = str  # the type of a value, or of each of several
    title: str = "a text"  # what messages call a value that a program gives
    hint: str = "str"  # the type for editors
    read: Callable[[str], Any] = str  # makes a value of a text, or raises ValueError
    example: str = ""  # what messages say was expected ("": the error's own words)
    is_tuple: bool = False  # values are tuples
    repeated: bool = False  # on the command line the option is, and each time gives one
    stands_for: bool | None = None  # what an option without a value means
    choices: Any = ()  # the values that there are, or a registry of them; none: any

    def parse(self, text: str) -> Any:
        """Return the value that a text means. Raises ValueError, which says what was expected."""
        try:
            return self.read(text)
        except ValueError as error:
            message = f"{text!r}: expected {self.example}" if self.example else str(error)
            raise ValueError(message) from None

    def accepts(self, value: Any) -> bool:
        """Tell whether a program may give this value."""
        if self.is_tuple:
            return isinstance(value, tuple) and all(type(item) is self.item for item in value)
        if self.item is float and type(value) is int:
            return True
        return isinstance(value, self.item) and (
            self.item is not int or not isinstance(value, bool)
        )


TYPE_TEXT = OptionType()
TYPE_FLAG = OptionType(bool, "true or false", "bool", stands_for=True)
TYPE_OFF = OptionType(bool, "true or false", "bool", stands_for=False)
TYPE_REPEATED = OptionType(title="texts", hint="str | Sequence[str]", is_tuple=True, repeated=True)
TYPE_NUMBER = OptionType(int, "a number", "int", _number, "a number from 0 on")
TYPE_NUMBERS = OptionType(
    int,
    "numbers",
    "Sequence[int]",
    lambda text: tuple(map(int, text.split(","))),
    "numbers such as 1,0,0",
    is_tuple=True,
)
TYPE_RANKS = OptionType(
    int, "numbers", "Sequence[int]", number_ranges, "numbers such as 0,2-5", is_tuple=True
)
TYPE_SIZE = OptionType(int, "a number of bytes", "int", parse_size, "a size such as 256M")
TYPE_LIMIT = OptionType(int, "a number of bytes", "int", parse_limit, "a size such as 5GB or 3GiB")
TYPE_DECIMAL = OptionType(float, "a number", "float", _decimal, "a number above zero")


class _RegisteredNames:
    """The names in a registry whose objects have a true attribute, whenever one looks."""

    def __init__(self, registry: Registry[Any], attribute: str) -> None:
        self._registry, self._attribute = registry, attribute

    def __iter__(self) -> Iterator[str]:
        registry = self._registry
        return (name for name in registry if registry.attribute(name, self._attribute))

    def __contains__(self, name: object) -> bool:
        return name in [*self]


def choice_of(
    choices: Any, attribute: str | None = None, also: Mapping[str, str] = MappingProxyType({})
) -> OptionType:
    """Return the type of options that take one of `choices`, texts or names in a registry.

    `attribute`: of the registry's objects, those that have it. `also`: other words for some.
    """
    allowed_choices = choices if attribute is None else _RegisteredNames(choices, attribute)
    return OptionType(
        choices=allowed_choices, read=(lambda text: also.get(text, text)) if also else str
    )


# -- declarations ---------------------------------------------------------------------------------


def flag_of(name: str) -> str:
    """Return how the command line writes an option.

    >>> flag_of("lora_rank")
    '--lora-rank'
    """
    return "--" + name.replace("_", "-")


def flags_of(option: Field[Any]) -> tuple[str, ...]:
    """Return all spellings of an option on the command line, the first one first."""
    info = option_info(option)
    prefix = "no_" if info.kind is TYPE_OFF else ""
    return info.flags or (flag_of(prefix + option.name),)


@dataclass(frozen=True)
class OptionInfo:
    """What is declared of an option beside its name and default (`option`)."""

    group: str
    help: str
    affects: frozenset[str]
    kind: OptionType
    metavar: str | None
    verbs: Sequence[str]
    flags: tuple[str, ...]


def option(
    default: Any,
    group: str,
    help: str,
    *affects: str,
    kind: OptionType = TYPE_TEXT,
    metavar: str | None = None,
    verbs: Sequence[str] = CONVERSIONS,
    flags: Sequence[str] = (),
) -> Any:
    """Declare an option.

    help: empty for one that help does not show. flags: in place of the one that its name makes.
    """
    info = OptionInfo(group, help, frozenset(affects), kind, metavar, verbs, tuple(flags))
    return field(default=default, metadata={"option": info})


def options_of(part: Any) -> list[Field[Any]]:
    """Return the options of a class or a value: its fields that are declared by `option`."""
    return [field for field in fields(part) if field.metadata]


def option_info(option: Field[Any]) -> OptionInfo:
    """Return what is declared of an option."""
    info: OptionInfo = option.metadata["option"]
    return info


def is_default(part: Any, name: str) -> bool:
    """Return whether an option has its default value."""
    return bool(getattr(part, name) == getattr(type(part), name))


def check_options(part: Any) -> None:
    """Raise UsageError for values that options cannot have."""
    for declared in options_of(part):
        name, value, kind = declared.name, getattr(part, declared.name), option_info(declared).kind
        if value is declared.default:
            continue
        if not kind.accepts(value):
            raise UsageError(f"{name} is {value!r}; expected {kind.title}")
        if kind.choices and value not in kind.choices:
            choices = " or ".join(map(str, kind.choices))
            raise UsageError(f"{name} is {value!r}; expected {choices}")
        for text in value if isinstance(value, tuple) else (value,):
            if isinstance(text, str):
                _check_text(name, text, value is not text)
                if kind.item is str and kind.read is not str:
                    try:
                        kind.parse(text)
                    except ValueError as error:
                        raise UsageError(f"{name} {error}") from error


def _check_text(name: str, text: str, is_element: bool) -> None:
    if "\0" in text:
        raise UsageError(f"{name} {text!r}: holds a NUL, which no name can have")
    try:
        text.encode("utf-8", "strict" if is_element else "surrogateescape")
    except UnicodeEncodeError as error:
        raise UsageError(f"{name} {text!r}: is not UTF-8") from error
