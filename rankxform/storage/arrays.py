"""Arrays of processes as a kind of storage: each process's are the one file that it sees."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, NamedTuple

from rankxform.errors import UsageError
from rankxform.formats.container import ITEM_SIZE, Index, Schema, content_bytes

from .posix import Buffer
from .store import STORAGE, FileVersion, RangeReader, Store

SCHEME = "arrays"
_NAMES = {name.lower(): name for name in ITEM_SIZE}


class ArrayFile(NamedTuple):
    """Arrays laid out as a file: the content of one after that of the other."""

    table: Index
    buffers: dict[int, Buffer]  # by position in the index
    release_from: MutableMapping[str, Any] | None  # lets go of what is no longer needed


def array_file(
    slices: MutableMapping[str, Any], dtypes: Mapping[str, str], *, release: bool
) -> ArrayFile | None:
    """Return arrays as a file; None if there are none.

    dtypes: MindSpore's names of types that numpy's do not tell, such as BFloat16 of its words.
    Raises UsageError for what is no array, or has a type that MindSpore does not have.
    """
    unknown = [name for name in dtypes if name not in slices]
    if unknown:
        raise UsageError(f"dtypes: there is no slice {unknown[0]!r}")
    kinds = {name: _type_of(name, part, dtypes.get(name)) for name, part in slices.items()}
    shapes = [tuple(part.shape) for part in slices.values()]
    sizes = [content_bytes(kind, shape) for kind, shape in zip(kinds.values(), shapes)]
    starts = array("q", [0, *accumulate(sizes)])
    schema = Schema((*slices,), (*kinds.values(),), (*shapes,))
    # An array that is not contiguous is copied here.
    buffers = {i: part.reshape(-1).view("u1").data for i, part in enumerate(slices.values())}
    index = Index(schema, starts[:-1], {}, starts[-1])
    return ArrayFile(index, buffers, slices if release else None) if slices else None


def _type_of(name: str, part: Any, type_name: str | None) -> str:
    """Return MindSpore's name of an array's type; type_name: if it was given."""
    if not all(hasattr(part, method) for method in ("dtype", "shape", "reshape", "view")):
        raise UsageError(f"slice {name!r} is a {type(part).__name__}; expected a numpy array")
    own_name = _NAMES.get(str(part.dtype).replace("_", ""))
    dtype = _NAMES.get(type_name.lower()) if type_name is not None else own_name
    fits = dtype is not None and ITEM_SIZE[dtype] == part.dtype.itemsize
    if dtype is None or not fits:
        raise UsageError(
            f"slice {name!r} has the type {type_name or part.dtype} ({part.dtype.itemsize} bytes)",
            f"dtypes={{{name!r}: one of {', '.join(ITEM_SIZE)}}}",
        )
    return dtype


class ArrayStorage:
    """Arrays by the address that they have during a call (`Storage`)."""

    def __init__(self) -> None:
        self.files: dict[str, ArrayFile] = {}

    def store(self, place: str) -> Store:
        raise UsageError("arrays are given to a call, and are at no place", where=place)

    def ranges(self) -> RangeReader:
        return ArrayRangeReader(self.files)


ARRAYS = STORAGE[SCHEME] = ArrayStorage()


@contextmanager
def holding(path: str, file: ArrayFile | None) -> Iterator[None]:
    """Let arrays be read at an address as long as the block runs."""
    if file is not None:
        ARRAYS.files[path] = file
    try:
        yield
    finally:
        ARRAYS.files.pop(path, None)


class ArrayRangeReader(RangeReader):
    """Reads arrays; all reads are announced where arrays are released behind the last one."""

    keeps_announced = False

    def __init__(self, files: Mapping[str, ArrayFile]) -> None:
        self._files = files
        self._awaited: Counter[tuple[str, int]] = Counter()
        self._has_begun = False
        if any(file.release_from is not None for file in files.values()):
            self.ahead = sys.maxsize

    def version(self, path: str, sparse: bool = False) -> FileVersion:
        return FileVersion(self._files[path].table.size, 0)

    def named(self, path: str) -> FileVersion | None:
        return self.version(path)

    def announce(self, path: str, offset: int, nbytes: int) -> None:
        for position, _, part_bytes in self._parts(path, offset, nbytes):
            self._awaited[path, position] += part_bytes

    def read(self, path: str, offset: int, room: Buffer, sparse: bool = False) -> None:
        file, done = self._files[path], 0
        if self._awaited and not self._has_begun:
            self._has_begun = True
            self._release(path, [i for i in file.buffers if (path, i) not in self._awaited])
        for position, start, nbytes in self._parts(path, offset, len(room)):
            content = file.buffers[position][start : start + nbytes]
            room[done : done + nbytes] = content
            done += nbytes
            if self._has_begun:
                self._awaited[path, position] -= nbytes
                if not self._awaited[path, position]:
                    self._release(path, [position])

    def _parts(self, path: str, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield of which arrays a range is: position, first byte there, number of bytes."""
        index, stop = self._files[path].table, offset + nbytes
        position = bisect_right(index.offsets, offset) - 1
        while offset < stop:
            start = offset - index.offsets[position]
            part_bytes = min(stop - offset, index.schema.nbytes(position) - start)
            if part_bytes:
                yield position, start, part_bytes
            offset, position = offset + part_bytes, position + 1

    def _release(self, path: str, positions: list[int]) -> None:
        """Let go of arrays of which nothing will be read any more."""
        file = self._files[path]
        for position in positions:
            del file.buffers[position]
            if file.release_from is not None:
                file.release_from.pop(file.table.schema.names[position], None)

    def close(self) -> None:
        self._awaited.clear()
