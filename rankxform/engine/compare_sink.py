"""A sink that compares a destination file with what it should hold, as that is assembled."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

import numpy as np

from rankxform.formats.base import Index
from rankxform.formats.dtype import item_size
from rankxform.geometry.box import Box
from rankxform.storage.posix import Buffer
from rankxform.storage.reflink import Position
from rankxform.storage.sources import SourceReader
from rankxform.values import dataclass

_BLOCK = 1 << 20


@dataclass
class Difference:
    """Where one rank's slice is not what it should be.

    index: of the first element that differs, in the full parameter; None where there is nothing to
    compare, which `why` then says. count: of elements that differ; size: of all in the slice.
    whole_file: what differs is the file `name` as a whole.
    """

    name: str
    rank: int
    why: str
    index: tuple[int, ...] | None = None
    count: int = 0
    size: int = 0
    whole_file: bool = False


@dataclass(frozen=True)
class ExpectedSlice:
    """What one destination rank should hold of a parameter: its type, and its box of the whole."""

    dtype: str
    box: Box


class ComparingSink:
    """One destination file, compared with what is put."""

    def __init__(
        self, rank: int, file: SourceReader, index: Index, slices: Mapping[str, ExpectedSlice]
    ):
        """`slices` are what the file should hold; its headers are compared with them at once."""
        self._rank, self._file, self._slices = rank, file, slices
        self.differences: dict[str, Difference] = {}
        self.written = 0
        self._room = memoryview(bytearray(_BLOCK))
        for difference in header_differences(index, rank, slices):
            self.differences[difference.name] = difference

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Compare content of `name` from its content byte `start` on."""
        difference = self.differences.get(name)
        if difference is not None and difference.index is None:
            return
        for offset in range(0, len(data), _BLOCK):
            part = data[offset : offset + _BLOCK]
            room = self._room[: len(part)]
            self._file.read(self._rank, name, start + offset, room)
            self.written += len(part)
            if not _equal(part, room):
                self._note(name, start + offset, part, room)

    def share(self, name: str, start: int, source: Position, nbytes: int) -> bool:
        return False

    def finish(self) -> None:
        """Nothing is kept back."""

    def _note(self, name: str, start: int, data: Buffer, file_content: Buffer) -> None:
        expected = self._slices[name]
        item = item_size(expected.dtype)
        first = start % item  # a block may start within an element; so may its end be
        differ = np.flatnonzero(
            np.frombuffer(data, np.uint8) != np.frombuffer(file_content, np.uint8)
        )
        elements = np.unique((differ + first) // item)
        difference = self.differences.get(name)
        if difference is None:
            place = np.unravel_index(start // item + int(elements[0]), expected.box.shape or (1,))
            index = tuple(int(i) + o for i, o in zip(place, expected.box.start))
            difference = Difference(name, self._rank, "differs", index, 0, prod(expected.box.shape))
            self.differences[name] = difference
        difference.count += len(elements)


def header_differences(
    index: Index, rank: int, slices: Mapping[str, ExpectedSlice]
) -> list[Difference]:
    """Return the parameters that are missing, unexpected, or of a wrong type or shape."""
    file_schema = index.schema
    schema = {
        n: (d, s) for n, d, s in zip(file_schema.names, file_schema.dtypes, file_schema.shapes)
    }
    reasons = {name: _mismatch(schema.get(name), expected) for name, expected in slices.items()}
    reasons.update((name, "should not be here") for name in schema if name not in slices)
    return [Difference(name, rank, reason) for name, reason in reasons.items() if reason]


def _mismatch(header_entry: tuple[str, tuple[int, ...]] | None, expected: ExpectedSlice) -> str:
    if header_entry is None:
        return "is missing"
    if header_entry[0] != expected.dtype:
        return f"is of type {header_entry[0]}, not {expected.dtype}"
    if header_entry[1] != expected.box.shape:
        return f"has shape {list(header_entry[1])}, not {list(expected.box.shape)}"
    return ""


def _equal(a: Buffer, b: Buffer) -> bool:
    word = 8 if len(a) % 8 == 0 else 1
    kind = np.dtype(f"u{word}")
    return bool((np.frombuffer(a, kind) == np.frombuffer(b, kind)).all())
