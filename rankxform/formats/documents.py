"""JSON documents in parts, TOML documents, and files of shapes.

A `metadata.json` of a thousand ranks has hundreds of megabytes, most of which says the same again.
Only one member of it is decoded at a time, by the standard library.

A file of shapes is ``{name: {"shape": [rows, columns], "dtype": "Float32"}}``; the type may be left
out. What `inspect --json` prints of one complete checkpoint file is understood too.
"""

from __future__ import annotations

import json
import sys
from codecs import getincrementaldecoder
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rankxform.errors import FormatError, RankxformError, UsageError
from rankxform.geometry.box import Shape
from rankxform.values import MOST_VALUES, check_plain, decode_json, without_duplicate_names

from .container import ReadAt, content_bytes

_BLOCK, _BATCH = 1 << 22, 1 << 18
MOST_BYTES, MOST_OF_ONE = 1 << 32, 1 << 26
"""Of a whole document, and of one member."""

_BLANKS = " \t\n\r"


_KIND_TITLES = {
    str: "a text",
    int: "a number",
    bool: "true or false",
    dict: "a table",
    list: "a list",
}


def check_value(value: Any, spec: Any, where: str, error: type[RankxformError] = UsageError) -> Any:
    """Return a value of a document if it fits a spec. Raises `error`, which names `where`.

    `spec`: a type; ``[spec]`` for a list of such values; ``{key: spec}`` for a table that has no
    other keys, and need not have all; `object` for anything.

    >>> check_value({"names": ["a"]}, {"names": [str], "depth": int}, "rules.toml")
    {'names': ['a']}
    """
    kind = spec if isinstance(spec, type) else type(spec)
    if kind is not object and type(value) is not kind:  # true is no number
        raise error(f"expected {_KIND_TITLES[kind]}, found {value!r}", where=where)
    for key in value if kind is dict and spec is not dict else ():
        if key not in spec:
            raise error(f"{key!r} is none of {', '.join(sorted(spec))}", where=where)
        check_value(value[key], spec[key], f"{where}, {key}", error)
    for element in value if kind is list and spec is not list else ():
        check_value(element, spec[0], where, error)
    return value


class _Text:
    """The part of a document that has been read and not yet used."""

    def __init__(self, read_at: ReadAt) -> None:
        self._read_at, self._decoder = read_at, getincrementaldecoder("utf-8")()
        self._decode = json.JSONDecoder(object_pairs_hook=without_duplicate_names).raw_decode
        self._offset, self._ended = 0, False
        self._buffer, self._at = "", 0

    def _read_on(self) -> bool:
        """Read on; twice as much if the buffer did not suffice. Return whether there was more."""
        if self._ended:
            return False
        want = max(_BLOCK, len(self._buffer) - self._at)
        data = self._read_at(self._offset, want)
        self._offset += len(data)
        self._ended = len(data) < want
        if self._offset > MOST_BYTES:
            raise FormatError(f"has over {MOST_BYTES} bytes")
        try:
            text = self._decoder.decode(data, self._ended)
        except UnicodeDecodeError as error:
            raise FormatError(f"is not UTF-8: {error}") from None
        self._buffer, self._at = self._buffer[self._at :] + text, 0
        return True

    def peek(self) -> str:
        """Return the next character that is no blank; "" at the end."""
        while True:
            while self._at < len(self._buffer) and self._buffer[self._at] in _BLANKS:
                self._at += 1
            if self._at < len(self._buffer):
                return self._buffer[self._at]
            if not self._read_on():
                return ""

    def take(self, expected: str) -> None:
        character = self.peek()
        if character != expected:
            raise FormatError(
                f"is not JSON: expected {expected!r}, found {character or 'its end'!r}"
            )
        self._at += 1

    def value(self) -> Any:
        """Decode the next value.

        One that ends where the buffer does may go on, as a number may, so more is read first.
        """
        self.peek()
        while True:
            try:
                decoded, end = self._decode(self._buffer, self._at)
            except json.JSONDecodeError as error:
                if len(self._buffer) - self._at > MOST_OF_ONE or not self._read_on():
                    raise FormatError(f"is not JSON: {error.msg}") from None
                continue
            except ValueError:
                raise FormatError("has a number of too many digits") from None
            except RecursionError:
                raise FormatError("is not JSON: nested too deeply") from None
            if end < len(self._buffer) or self._ended or not self._read_on():
                self._at = end
                try:
                    check_plain(decoded)
                except ValueError as error:
                    raise FormatError(str(error)) from None
                return decoded

    def members(self) -> Iterator[str]:
        """Yield the names of an object's members; the value is to be taken before the next."""
        self.take("{")
        names: set[str] = set()
        while self.peek() != "}":
            if names:
                self.take(",")
            name = self.value()
            if not isinstance(name, str) or name in names:
                raise FormatError(f"names {name!r} twice, or by no text")
            names.add(name)
            self.take(":")
            yield name
        self.take("}")

    def pairs(self, mark: str) -> Iterator[tuple[str, Any]]:
        """Yield the members of an object, many decoded at once.

        `mark` mostly is the end of a member, and the comma behind it. Where it is not, in a name or
        inside of a value, the text does not make an object, and one member is decoded by itself.
        """
        self.take("{")
        names: set[str] = set()
        while self.peek() != "}":
            if names:
                self.take(",")
                self.peek()
            for name, value in self._many(mark) or [self._next_member()]:
                if name in names:
                    raise FormatError(f"names {name!r} twice")
                names.add(name)
                yield name, value
        self.take("}")

    def _many(self, mark: str) -> list[tuple[str, Any]]:
        end = self._buffer.rfind(mark, self._at, self._at + _BATCH)
        if end < 0:
            return []
        text = self._buffer[self._at : end + len(mark) - 1]
        try:
            members = decode_json("{" + text + "}")
        except FormatError as error:
            if not error.what.startswith("is not JSON"):
                raise
            return []
        self._at = end + len(mark) - 1
        return list(members.items())

    def _next_member(self) -> tuple[str, Any]:
        name = self.value()
        if not isinstance(name, str):
            raise FormatError(f"names {name!r}, which is no text")
        self.take(":")
        return name, self.value()


def read_members(
    read_at: ReadAt, sections: Mapping[str, tuple[Callable[[str, Any], None], str]]
) -> dict[str, Any]:
    """Read a document that is one object; call a section's function with each of its members.

    With the function goes the text that mostly ends a member, such as "],". Return the members
    that are no sections, and None for each section that was there. Raises FormatError.
    """
    text = _Text(read_at)
    members: dict[str, Any] = {}
    if text.peek() != "{":
        raise FormatError("is no JSON object")
    for name in text.members():
        if name not in sections:
            members[name] = text.value()
            continue
        members[name] = None
        take, mark = sections[name]
        for member, value in text.pairs(mark):
            take(member, value)
    if text.peek():
        raise FormatError("goes on after its end")
    return members


def parse_shapes(data: bytes) -> dict[str, tuple[Shape, str]]:
    """Return (full shape, type) by name. Raises FormatError."""
    try:
        document = decode_json(data)
        if not isinstance(document, dict) or document.get("shards"):
            raise ValueError("neither shapes by name nor what `inspect` says of one complete file")
        if isinstance(document.get("entries"), list):
            entries = [item for item in document["entries"] if isinstance(item, dict)]
            document = {str(item.get("name")): item for item in entries}
        return {name: _entry(name, item) for name, item in document.items()}
    except (ValueError, FormatError) as error:
        raise FormatError(
            f'not {{name: {{"shape": [...], "dtype": "Float32"}}}}: {error}'
        ) from None


def _entry(name: str, item: object) -> tuple[Shape, str]:
    if not isinstance(item, dict) or "shape" not in item:
        raise ValueError(f"{name!r} has no shape")
    shape, dtype = item["shape"], item.get("dtype", "Float32")
    if not isinstance(shape, list) or not all(type(n) is int and 0 <= n < 1 << 48 for n in shape):
        raise ValueError(f"shape {shape!r}")
    if not isinstance(dtype, str):
        raise ValueError(f"dtype {dtype!r}")
    if content_bytes(dtype, tuple(shape)) >= 1 << 63:
        raise ValueError(f"shape {shape!r}, of over 2**63 bytes")
    return tuple(shape), dtype


def parse_toml(data: bytes, label: str) -> dict[str, Any]:
    """Return what a file says; `label` is what messages call it. Raises UsageError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document: dict[str, Any] = tomllib.loads(data.decode())
        check_plain(document, MOST_VALUES)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not TOML: {error}", where=label) from None
    return document
