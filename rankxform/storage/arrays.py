"""Arrays of processes as a kind of storage: each process's are the one file that it sees."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from itertools import accumulate
from typing import Any

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import INT4, ITEM_SIZE, Index, Schema, content_bytes
from rankxform.values import NamedTuple

from .posix import Buffer
from .store import (
    STORAGE,
    USUAL_BUFFERS,
    FileVersion,
    HeaderReader,
    Listing,
    RangeReader,
    ReadEach,
    Store,
)

_NAMES = {name.lower(): name for name in ITEM_SIZE}
_WORDS = "uiV"
"""Kinds of numpy types that may stand for another type of MindSpore's."""


class ArrayFile(NamedTuple):
    """Arrays laid out as a file: the content of one after that of the other."""

    table: Index
    arrays: dict[int, Any]  # by position in the table
    slices: MutableMapping[str, Any]  # the caller's


def array_file(slices: MutableMapping[str, Any], dtypes: Mapping[str, str]) -> ArrayFile | None:
    """Return arrays as a file; None if there are none.

    dtypes: MindSpore's names of types that numpy's do not tell, such as BFloat16 of its words.
    Raises UsageError for what is no array, or has a type that MindSpore does not have.
    """
    unnamed = [name for name in slices if not isinstance(name, str)]
    if unnamed:
        raise UsageError(f"slices has the key {unnamed[0]!r}; expected names of parameters")
    kinds = {name: _type_of(name, part, dtypes.get(name)) for name, part in slices.items()}
    shapes = [tuple(part.shape) for part in slices.values()]
    sizes = [content_bytes(kind, shape) for kind, shape in zip(kinds.values(), shapes)]
    starts = array("q", [0, *accumulate(sizes)])
    schema = Schema((*slices,), (*kinds.values(),), (*shapes,))
    index = Index(schema, starts[:-1], {}, starts[-1])
    return ArrayFile(index, dict(enumerate(slices.values())), slices) if slices else None


def _type_of(name: str, part: Any, type_name: Any) -> str:
    """Return MindSpore's name of an array's type; type_name: if it was given."""
    methods = ("dtype", "shape", "reshape", "view", "flags")
    is_array = all(hasattr(part, method) for method in methods) and not hasattr(part, "mask")
    if not is_array or part[tuple(slice(1) for _ in part.shape)].reshape(-1).ndim != 1:
        raise UsageError(f"slice {name!r} is a {type(part).__name__}; expected a numpy array")
    kind = part.dtype
    if not kind.isnative:
        raise UsageError(
            f"slice {name!r} has its bytes in another order ({kind.str})",
            ".astype(array.dtype.newbyteorder('='))",
        )
    own_name = _NAMES.get(str(kind).replace("_", ""))
    dtype = own_name if own_name != INT4 else None  # numpy's has one value in each byte
    wanted_name = None if type_name is None else _NAMES.get(str(type_name).lower(), "")
    if wanted_name and kind.kind in _WORDS and kind.names is None:
        dtype = wanted_name
    fits = dtype is not None and ITEM_SIZE[dtype] == kind.itemsize
    if dtype is None or not fits or wanted_name not in (None, dtype):
        raise UsageError(
            f"slice {name!r} has the type {kind}" + (f", and not {type_name}" if type_name else ""),
            f"an array of {', '.join(ITEM_SIZE)}",
            "dtypes={NAME: TYPE} where words stand for such values",
        )
    return dtype


class ArrayStorage:
    """The arrays of this process during one call (`Storage`); no process sees those of another.

    releases: whether arrays are let go of while they are read; the same on all processes, which
    must divide their memory alike.
    """

    buffers = USUAL_BUFFERS
    has_versions = False
    has_folders = False
    is_shared = True
    read_each: ReadEach | None = None

    def __init__(self, file: ArrayFile | None, *, releases: bool) -> None:
        self.file, self.releases = file, releases

    def store(self, place: str) -> Store:
        return _NoDocuments(place)

    def is_reached(self, address: str) -> bool:
        return True

    def ranges(self) -> RangeReader:
        return ArrayRangeReader(self.file, self.releases)


class _NoDocuments(Store):
    """The place of arrays, where no documents lie."""

    def __init__(self, place: str) -> None:
        self._place = place

    def list(self, pattern: str) -> Listing:
        return Listing(self._place)

    def read(self, name: str, searched: str = "") -> bytes:
        raise CheckpointError("there are arrays, and no documents", where=self._place)

    def version(self, name: str) -> FileVersion | None:
        return None

    def has(self, name: str) -> bool:
        return False

    def open(self, name: str) -> AbstractContextManager[HeaderReader]:
        raise CheckpointError("there are arrays, and no files", where=self._place)


@contextmanager
def holding(scheme: str, file: ArrayFile | None, *, releases: bool = False) -> Iterator[None]:
    """Let arrays be read at addresses of a scheme as long as the block runs."""
    STORAGE[scheme] = ArrayStorage(file, releases=releases)
    try:
        yield
    finally:
        del STORAGE[scheme]


class ArrayRangeReader(RangeReader):
    """Reads arrays; all reads are announced where arrays are released behind the last one."""

    keeps_announced, is_memory = False, True

    def __init__(self, file: ArrayFile | None, releases: bool) -> None:
        self._file = file
        self._awaited: Counter[int] = Counter()
        self._is_releasing = False
        self._contiguous: tuple[int, Any] | None = None  # the last array that was not, copied
        self.ahead = sys.maxsize if releases else 0

    def version(self, path: str, sparse: bool = False) -> FileVersion:
        assert self._file is not None
        return FileVersion(self._file.table.size, 0)

    def version_now(self, path: str) -> FileVersion | None:
        return self.version(path)

    def announce(self, path: str, offset: int, nbytes: int) -> None:
        for position, _, part_bytes in self._parts(offset, nbytes):
            self._awaited[position] += part_bytes

    def all_announced(self) -> None:
        self._is_releasing = True
        if self._file is not None:
            self._release([i for i in self._file.arrays if not self._awaited[i]])

    def read(self, path: str, offset: int, room: Buffer, sparse: bool = False) -> None:
        done = 0
        for position, start, nbytes in self._parts(offset, len(room)):
            room[done : done + nbytes] = self._content(position).data[start : start + nbytes]
            done += nbytes
            self._passed(position, nbytes)

    def memory_of(self, entry: int) -> Any:
        content = self._content(entry)
        self._passed(entry, content.nbytes)
        return content

    def _passed(self, entry: int, nbytes: int) -> None:
        """Let go of an array if these were the last of its bytes that were announced."""
        if self._is_releasing:
            self._awaited[entry] -= nbytes
            if not self._awaited[entry]:
                self._release([entry])

    def _content(self, entry: int) -> Any:
        """Return an array's bytes in row-major order; of one that is not contiguous a copy."""
        assert self._file is not None
        part = self._file.arrays[entry]
        if part.flags.c_contiguous:
            return part.reshape(-1).view("u1")
        if self._contiguous is None or self._contiguous[0] != entry:
            self._contiguous = entry, part.copy(order="C").reshape(-1).view("u1")
        return self._contiguous[1]

    def _parts(self, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield of which arrays a range is: position, first byte there, number of bytes."""
        assert self._file is not None
        index, stop = self._file.table, offset + nbytes
        position = bisect_right(index.offsets, offset) - 1
        while offset < stop:
            start = offset - index.offsets[position]
            part_bytes = min(stop - offset, index.schema.nbytes(position) - start)
            if part_bytes:
                yield position, start, part_bytes
            offset, position = offset + part_bytes, position + 1

    def _release(self, positions: list[int]) -> None:
        """Let go of arrays of which nothing will be read any more."""
        assert self._file is not None
        for position in positions:
            del self._file.arrays[position]
            self._file.slices.pop(self._file.table.schema.names[position], None)
            if self._contiguous is not None and self._contiguous[0] == position:
                self._contiguous = None

    def close(self) -> None:
        self._awaited.clear()
