"""Pickles of plain values and of names, written word by word."""

from __future__ import annotations

import struct
from collections.abc import Mapping

_SMALL, _MIDDLE, _LARGE = 1 << 8, 1 << 16, 1 << 31


class PickleWriter:
    """A pickle while it is written. What is written twice, texts and names, is remembered."""

    def __init__(self, protocol: int = 2) -> None:
        self._words = bytearray((0x80, protocol))
        self._memo: dict[tuple[str, str], int] = {}

    def values(self, *plain_values: object) -> None:
        """Push numbers, texts, None, truth values, and tuples of these."""
        words = self._words
        for plain_value in plain_values:
            if plain_value is None:
                words += b"N"
            elif plain_value is True or plain_value is False:
                words += b"\x88" if plain_value else b"\x89"
            elif type(plain_value) is int:
                words += _number(plain_value)
            elif type(plain_value) is str:
                data = plain_value.encode()
                self._once("text", plain_value, b"X" + struct.pack("<I", len(data)) + data)
            else:
                assert type(plain_value) is tuple
                self._tuple_of(plain_value)

    def _tuple_of(self, elements: tuple[object, ...]) -> None:
        if not elements:
            self._words += b")"
        elif len(elements) <= 3:
            self.values(*elements)
            self._words += b"\x85\x86\x87"[len(elements) - 1 : len(elements)]
        else:
            self.mark()
            self.values(*elements)
            self.tuple()

    def name(self, full: str) -> None:
        """Push what is named."""
        module, _, short_name = full.rpartition(".")
        self._once("name", full, f"c{module}\n{short_name}\n".encode())

    def _once(self, kind: str, text: str, words: bytes) -> None:
        slot = self._memo.get((kind, text))
        if slot is None:
            slot = self._memo[kind, text] = len(self._memo)
            put = b"q" + bytes((slot,)) if slot < _SMALL else b"r" + struct.pack("<I", slot)
            self._words += words + put
        else:
            self._words += (
                b"h" + bytes((slot,)) if slot < _SMALL else b"j" + struct.pack("<I", slot)
            )

    def mark(self) -> None:
        self._words += b"("

    def tuple(self) -> None:
        """Make a tuple of what is above the mark."""
        self._words += b"t"

    def reduce(self) -> None:
        """Call a name with a tuple."""
        self._words += b"R"

    def persistent(self) -> None:
        self._words += b"Q"

    def made(self, name: str, state: Mapping[str, object] | None) -> None:
        """Push an object of a class; a state of values alone is given, else `build` follows."""
        self.name(name)
        self._words += b")\x81"
        if state is not None:
            self.begin_dict()
            for key, value in state.items():
                self.values(key, value)
            self.end_dict()
            self.build()

    def begin_dict(self) -> None:
        self._words += b"}("

    def end_dict(self) -> None:
        self._words += b"u"

    def begin_list(self) -> None:
        self._words += b"]("

    def end_list(self) -> None:
        self._words += b"e"

    def build(self) -> None:
        """Give an object its state."""
        self._words += b"b"

    @property
    def size(self) -> int:
        """Bytes that were written since the last call of `taken`."""
        return len(self._words)

    def taken(self) -> bytes:
        """Return what was written since the last call."""
        words, self._words = bytes(self._words), bytearray()
        return words

    def stop(self) -> bytes:
        """Return the rest, with the end."""
        self._words += b"."
        return self.taken()


def _number(value: int) -> bytes:
    if 0 <= value < _SMALL:
        return b"K" + bytes((value,))
    if 0 <= value < _MIDDLE:
        return b"M" + struct.pack("<H", value)
    if -_LARGE <= value < _LARGE:
        return b"J" + struct.pack("<i", value)
    data = value.to_bytes((value.bit_length() + 8) // 8, "little", signed=True)
    return b"\x8a" + bytes((len(data),)) + data
