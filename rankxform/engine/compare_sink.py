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
from rankxform.storage.sources import Sources
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
class Expected:
    """What one destination rank should hold of a parameter: its type, and its box of the whole."""

    dtype: str
    box: Box


class ComparingSink:
    """One destination file, compared with what is put."""

    def __init__(self, rank: int, file: Sources, index: Index, slices: Mapping[str, Expected]):
        """`slices` are what the file should hold; its headers are compared with them at once."""
        self._rank, self._file, self._slices = rank, file, slices
        self.differences: dict[str, Difference] = {}
        self.written = 0
        self._room = memoryview(bytearray(_BLOCK))
        for one in mismatches(index, rank, slices):
            self.differences[one.name] = one

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Compare content of `name` from its content byte `start` on."""
        known = self.differences.get(name)
        if known is not None and known.index is None:
            return
        for at in range(0, len(data), _BLOCK):
            part = data[at : at + _BLOCK]
            room = self._room[: len(part)]
            self._file.read(self._rank, name, start + at, room)
            self.written += len(part)
            if not _equal(part, room):
                self._note(name, start + at, part, room)

    def share(self, name: str, start: int, source: Position, nbytes: int) -> bool:
        return False

    def finish(self) -> None:
        """Nothing is kept back."""

    def _note(self, name: str, start: int, data: Buffer, found: Buffer) -> None:
        expected = self._slices[name]
        item = item_size(expected.dtype)
        first = start % item  # a block may start within an element; so may its end be
        differ = np.flatnonzero(np.frombuffer(data, np.uint8) != np.frombuffer(found, np.uint8))
        elements = np.unique((differ + first) // item)
        known = self.differences.get(name)
        if known is None:
            place = np.unravel_index(start // item + int(elements[0]), expected.box.shape or (1,))
            index = tuple(int(i) + o for i, o in zip(place, expected.box.start))
            known = Difference(name, self._rank, "differs", index, 0, prod(expected.box.shape))
            self.differences[name] = known
        known.count += len(elements)


def mismatches(index: Index, rank: int, slices: Mapping[str, Expected]) -> list[Difference]:
    """Return the parameters that are missing, unexpected, or of a wrong type or shape."""
    found = index.schema
    schema = {n: (d, s) for n, d, s in zip(found.names, found.dtypes, found.shapes)}
    reasons = {name: _mismatch(schema.get(name), one) for name, one in slices.items()}
    reasons.update((name, "should not be here") for name in schema if name not in slices)
    return [Difference(name, rank, why) for name, why in reasons.items() if why]


def _mismatch(found: tuple[str, tuple[int, ...]] | None, expected: Expected) -> str:
    if found is None:
        return "is missing"
    if found[0] != expected.dtype:
        return f"is of type {found[0]}, not {expected.dtype}"
    if found[1] != expected.box.shape:
        return f"has shape {list(found[1])}, not {list(expected.box.shape)}"
    return ""


def _equal(a: Buffer, b: Buffer) -> bool:
    word = 8 if len(a) % 8 == 0 else 1
    kind = np.dtype(f"u{word}")
    return bool((np.frombuffer(a, kind) == np.frombuffer(b, kind)).all())
