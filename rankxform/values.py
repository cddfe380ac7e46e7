"""`dataclass` and `NamedTuple`, as the standard library's, without generated source.

For every class the standard library writes and compiles methods anew, at each start: half a
millisecond a dataclass, and half of what rankxform's import takes; a quarter for a named tuple.
Here the methods of dataclasses are closures over the names of the fields, and `__new__` of named
tuples is compiled when the first one is made. `fields`, `replace` and `asdict` work as ever.

`decode_json` is how a JSON document becomes values, whoever wrote it.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import re
from codecs import BOM_UTF8
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from functools import cache, lru_cache
from importlib import import_module
from math import inf
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from .errors import FormatError

if TYPE_CHECKING:
    from dataclasses import dataclass as dataclass
    from hashlib import blake2b as blake2b
    from typing import NamedTuple as NamedTuple
else:
    from collections import _tuplegetter

    try:  # hashlib would load OpenSSL, which takes 3 ms
        import _blake2 as hashes
    except ImportError:
        import hashlib as hashes
    blake2b = hashes.blake2b

    def dataclass(cls=None, /, *, frozen=False, eq=True, repr=True, kw_only=False):
        """Make a class a dataclass. The options are the standard library's of these names."""

        def decorated(cls):
            defined = set(cls.__dict__)
            if "__eq__" in defined and cls.__dict__.get("__hash__") is None:
                defined.discard("__hash__")
            if not cls.__doc__:
                cls.__doc__ = cls.__name__  # else the standard library works out a signature
            texts = vars(cls).get("__annotations__", {})
            # In texts it would look for types by patterns, for a third of its time.
            cls.__annotations__ = {
                name: ClassVar[Any] if text.startswith("ClassVar") else object
                for name, text in texts.items()
            }
            decorate = dataclasses.dataclass(init=False, repr=False, eq=False, kw_only=kw_only)
            dataclass_ = decorate(cls)
            cls.__annotations__ = texts
            for name, method in _methods(dataclass_, frozen, eq, repr).items():
                if name not in defined:
                    setattr(dataclass_, name, method)
            return dataclass_

        return decorated if cls is None else decorated(cls)

    class _NamedTuples(tuple):
        """What all named tuples have."""

        __slots__ = ()

        def __new__(cls, /, *args, **keywords):
            """Compile the class's own, for this and all further objects."""
            owner = next(base for base in cls.__mro__ if "_fields" in vars(base))
            names = "".join(f"{name}, " for name in owner._fields)
            new = eval(f"lambda cls, {names}: make(cls, ({names}))", {"make": tuple.__new__})
            new.__defaults__ = tuple(owner._field_defaults.values())
            owner.__new__ = staticmethod(new)
            return new(cls, *args, **keywords)

        def _replace(self, /, **changed):
            return type(self)(**{**self._asdict(), **changed})

        def _asdict(self):
            return dict(zip(self._fields, self))

        def __repr__(self):
            values = ", ".join(f"{name}={value!r}" for name, value in self._asdict().items())
            return f"{type(self).__name__}({values})"

        def __getnewargs__(self):
            return tuple(self)

    class _NamedTupleType(type):
        """Makes a class of named tuples of a body with annotations."""

        def __new__(cls, name, bases, body):
            if not bases:
                return type.__new__(cls, name, bases, body)
            names = tuple(body.get("__annotations__", ()))
            defaults = {field: body.pop(field) for field in names if field in body}
            getters = {field: _tuplegetter(place, None) for place, field in enumerate(names)}
            facts = {"_fields": names, "_field_defaults": defaults, "__match_args__": names}
            return type(name, (_NamedTuples,), {**body, **getters, **facts, "__slots__": ()})

    class NamedTuple(metaclass=_NamedTupleType):
        """The base of named tuples, as `typing.NamedTuple`."""


T = TypeVar("T")


@cache
def _crc32() -> Callable[..., int]:
    from importlib.util import find_spec

    module: Any = import_module("isal.isal_zlib" if find_spec("isal") else "zlib")
    return module.crc32  # type: ignore[no-any-return]


def crc32(content: Any, crc: int = 0) -> int:
    """Return the CRC-32 of bytes, continued from `crc`: by isal where it is installed, or zlib."""
    return _crc32()(content, crc)


class ScatteredCrc:
    """The CRC-32 of content whose parts come in any order, as those of an exchange do."""

    def __init__(self) -> None:
        self._parts: dict[int, tuple[int, int]] = {}  # by their end: their start and sum
        self.nbytes = 0  # that were added

    def add(self, start: int, part: Any) -> None:
        """Add the bytes from `start` on."""
        first, crc = self._parts.pop(start, (start, 0))
        self._parts[start + len(part)] = first, crc32(part, crc)
        self.nbytes += len(part)

    @property
    def whole(self) -> int:
        """The sum, once every byte was added."""
        crc = 0
        for end, (start, part_crc) in sorted(self._parts.items()):
            crc = crc_with(crc, part_crc, end - start)
        return crc


def crc_with(crc: int, next_crc: int, nbytes: int) -> int:
    """Return the CRC-32 of content and of so many bytes behind it, by the sums of both."""
    return next_crc ^ (_polynomial_product(_power_of_x(8 * nbytes), crc) if crc else 0)


def _polynomial_product(a: int, b: int) -> int:
    """Return a * b modulo CRC-32's polynomial; the highest bit is the coefficient of x**0."""
    product = 0
    for bit in range(31, -1, -1):
        product ^= b if a >> bit & 1 else 0
        b = b >> 1 ^ (0xEDB88320 if b & 1 else 0)
    return product


@lru_cache(1024)
def _power_of_x(exponent: int) -> int:
    """Return x**exponent, as `_polynomial_product` does."""
    if exponent < 32:
        return 1 << 31 - exponent
    half = _power_of_x(exponent // 2)
    return _polynomial_product(_polynomial_product(half, half), _power_of_x(exponent % 2))


class Registry(MutableMapping[str, T]):
    """Objects by name. Those of rankxform are imported when they are first looked up.

    `places`: name -> "module:class". `early`: name -> attributes of the object that are asked for
    before it is imported, with their values.
    """

    def __init__(
        self,
        places: Mapping[str, str],
        early: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
    ) -> None:
        self._places, self._early = dict(places), early
        self._objects: dict[str, T] = {}

    def __getitem__(self, name: str) -> T:
        if name not in self._objects:
            module, _, class_name = self._places[name].partition(":")
            self._objects[name] = getattr(import_module(module), class_name)()
        return self._objects[name]

    def __setitem__(self, name: str, value: T) -> None:
        self._places.setdefault(name, "")
        self._objects[name] = value

    def __delitem__(self, name: str) -> None:
        del self._places[name]
        self._objects.pop(name, None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, name: object) -> bool:
        return name in self._places

    def loaded(self) -> Collection[T]:
        """Return the objects that are imported, or were added."""
        return self._objects.values()

    def attribute(self, name: str, attribute: str) -> Any:
        """Return an attribute of an object, without importing it if it is an early one."""
        early = self._early.get(name, {})
        if name not in self._objects and attribute in early:
            return early[attribute]
        return getattr(self[name], attribute)


def pattern_on_use(text: Any, flags: int = 0) -> Callable[[], re.Pattern[Any]]:
    """Return a function that returns the pattern, compiled when it is first called.

    The patterns of all modules take 6 ms to compile, and a conversion uses few of them.
    """
    return cache(lambda: re.compile(text, flags))


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Let no garbage be collected while millions of values are made, none of which is any.

    The collector would look at all of them again and again.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _methods(cls: type, frozen: bool, eq: bool, repr_: bool) -> dict[str, Any]:
    """Return the methods of a dataclass, by name."""
    fields = dataclasses.fields(cls)
    methods: dict[str, Any] = {"__init__": _init(cls, fields)}
    if repr_:
        methods["__repr__"] = _repr([field.name for field in fields if field.repr])
    if eq:
        compared = [field.name for field in fields if field.compare]
        methods["__eq__"] = _eq(compared)
        methods["__hash__"] = _hash(compared) if frozen else None
    if frozen:
        methods["__setattr__"], methods["__delattr__"] = _set_frozen, _delete_frozen
    return methods


def _init(cls: type, fields: tuple[dataclasses.Field[Any], ...]) -> Any:
    missing = dataclasses.MISSING
    positional = tuple(field.name for field in fields if not field.kw_only)
    names, count = tuple(field.name for field in fields), len(positional)
    defaults = {field.name: field.default for field in fields if field.default is not missing}
    factories = {f.name: f.default_factory for f in fields if f.default_factory is not missing}
    has_post_init, all_names = hasattr(cls, "__post_init__"), frozenset(names)
    tails: dict[int, dict[str, Any]] = {}  # by number of arguments the defaults of all others
    for number in range(count, -1, -1) if count == len(names) else ():
        tails[number] = {name: defaults[name] for name in positional[number:]}
        if number and positional[number - 1] not in defaults:
            break

    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        values = self.__dict__
        values.update(zip(positional, args))
        if not keywords and len(args) in tails:
            values.update(tails[len(args)])
        elif not args and keywords.keys() == all_names:  # as `replace` calls it
            values.update(keywords)
        else:
            if len(args) > count:
                raise TypeError(f"{cls.__name__}() takes {count} positional arguments")
            for name in names[len(args) :] if count == len(names) else names:
                if name in keywords:
                    if name in values:
                        raise TypeError(f"{cls.__name__}() got several values for {name!r}")
                    values[name] = keywords.pop(name)
                elif name in values:
                    pass
                elif name in defaults:
                    values[name] = defaults[name]
                elif name in factories:
                    values[name] = factories[name]()
                else:
                    raise TypeError(f"{cls.__name__}() lacks {name!r}")
            if keywords:
                raise TypeError(f"{cls.__name__}() takes no {', '.join(map(repr, keywords))}")
        if has_post_init:
            self.__post_init__()

    return __init__


def _repr(names: list[str]) -> Any:
    def __repr__(self: Any) -> str:
        values = (f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({', '.join(values)})"

    return __repr__


def _eq(names: list[str]) -> Any:
    key = _key(names)

    def __eq__(self: Any, other: object) -> Any:
        if other.__class__ is not self.__class__:
            return NotImplemented
        return key(self) == key(other)

    return __eq__


def _hash(names: list[str]) -> Any:
    key = _key(names)

    def __hash__(self: Any) -> int:
        return hash(key(self))

    return __hash__


def _key(names: list[str]) -> Any:
    return attrgetter(*names) if names else lambda self: ()


def _set_frozen(self: Any, name: str, value: object) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")


def _delete_frozen(self: Any, name: str) -> None:
    raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")


# -- values of documents -------------------------------------------------------------------------


def without_duplicate_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a dictionary of the members of a JSON object. Raises FormatError for a name twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = set[str]()
        for name, _ in pairs:
            if name in names:
                raise FormatError(f"names {name!r} twice in one object")
            names.add(name)
    return members


_MOST_INTEGER, MOST_VALUES, _MOST_DEPTH = 10**20, 1 << 20, 100
_DIGITS = bytes(48 if 48 <= byte < 58 else 32 for byte in range(256))
_NO_BRACKETS = bytes(byte for byte in range(256) if byte not in b"[]{}")
_LONG_NUMBER, _ESCAPED = b"0" * 21, pattern_on_use(rb"\\u[dD][89a-fA-F]")
_SURROGATE = pattern_on_use("[\ud800-\udfff]")
_SHALLOW, _FEW, _SMALL = 8, 180, 1 << 14


def decode_json(data: bytes | str, *, any_texts: bool = False) -> Any:
    """Decode a small document, whoever wrote it: of a JSON document no other way leads to values.

    Integers have at most 20 digits, texts are Unicode, no object names a member twice, and nothing
    is nested more than 100 times. any_texts: they may have halves of characters too, as escapes
    can state them. Raises FormatError.
    """
    content = data.encode(errors="surrogatepass") if isinstance(data, str) else data
    content = content.removeprefix(BOM_UTF8)
    try:
        encoding = json.detect_encoding(content)
        text = content.decode(encoding)
        value = json.loads(text, object_pairs_hook=without_duplicate_names)
        content = content if encoding == "utf-8" else text.encode()
        brackets = content.translate(None, _NO_BRACKETS)
        for _ in range(_SHALLOW):  # what is nested no deeper goes
            brackets = brackets.replace(b"[]", b"").replace(b"{}", b"")
        has_escapes = b"\\u" in content and _ESCAPED().search(content)
        is_odd = len(brackets) > _FEW or has_escapes or _LONG_NUMBER in content.translate(_DIGITS)
        if is_odd or len(content) < _SMALL:
            check_plain(value, any_texts=any_texts)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise FormatError(f"is not JSON: {error}") from None
    except RecursionError:
        raise FormatError("is nested too deeply") from None
    except ValueError as error:  # of too long a number it speaks of Python's own limit
        is_own = not str(error).startswith("Exceeds")
        raise FormatError(str(error) if is_own else "has a number of over 20 digits") from None
    return value


def check_plain(value: Any, most: float = inf, *, any_texts: bool = False) -> None:
    """Raise ValueError for a document with a number of over 20 digits, a text that is no Unicode,
    values that are nested more than 100 times, or more than `most` once all references are put in.
    """
    sizes: dict[int, tuple[int, int]] = {}  # of a list or table: values in it, and how deep
    todo, entered = [value], set[int]()
    while todo:
        here = todo[-1]
        if type(here) not in (dict, list) or id(here) in sizes:
            todo.pop()
            if type(here) is int and abs(here) > _MOST_INTEGER:
                raise ValueError("has a number of over 20 digits")
            if type(here) is str and not any_texts and _SURROGATE().search(here):
                raise ValueError(f"has a text that is no Unicode: {here[:80]!a}")
            continue
        parts = [*here, *here.values()] if type(here) is dict else here
        waiting = [p for p in parts if type(p) in (dict, list) and id(p) not in sizes]
        if not waiting:
            todo.pop()
            below = [sizes.get(id(part), (1, 0)) for part in parts]
            size, depth = 1 + sum(n for n, _ in below), 1 + max((d for _, d in below), default=0)
            sizes[id(here)] = size, depth
            if size > most or depth > _MOST_DEPTH:
                text = "is too large once what it refers to is put in"
                raise ValueError("is nested too deeply" if depth > _MOST_DEPTH else text)
            todo += [part for part in parts if type(part) in (int, str)]
        elif id(here) in entered:  # what is in it waits for it
            raise ValueError("is in itself")
        else:
            entered.add(id(here))
            todo += waiting
