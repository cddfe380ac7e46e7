"""Source files, read by file, tensor and content byte."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from rankxform.errors import CheckpointError
from rankxform.formats.base import Index, spans_of_range

from .posix import Buffer
from .reflink import Position
from .store import FileVersion, RangeReader, storage_of


class TensorRead(NamedTuple):
    """A read of the content of a tensor in a file, by its entry there, in bytes."""

    file: int
    entry: str
    start: int
    nbytes: int


class SourceReader:
    """The source files of one process.

    paths, indexes: by file. recheck: called with the id of a file of which something was changed
    that may not concern its content; raises CheckpointError if it does. nbytes: read so far. ahead:
    how many reads may be in flight if they are announced; 0 where that gains nothing.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        indexes: Mapping[int, Index],
        recheck: Callable[[int], None] = lambda file: None,
    ) -> None:
        self._paths, self._indexes, self._recheck = paths, indexes, recheck
        kinds = dict.fromkeys(map(storage_of, paths.values()))
        self._ranges = {kind: kind.ranges() for kind in kinds}
        self._open: dict[tuple[int, bool], tuple[RangeReader, str, Index]] = {}
        self._versions: dict[int, FileVersion] = {}
        self._coming: Iterator[TensorRead] = iter(())
        self._next: TensorRead | None = None  # of those to come
        self._flight: deque[tuple[TensorRead, int]] = (
            deque()
        )  # each with how many requests it takes
        self._memory = self._free_requests = self._free_bytes = 0
        self.nbytes, self.ahead = (
            0,
            max((ranges.ahead for ranges in self._ranges.values()), default=0),
        )

    def read(self, file: int, name: str, start: int, room: Buffer, sparse: bool = False) -> None:
        """Fill `room` with what a file holds of `name`, from byte `start` on.

        `name` is the source's own, and `start` counts in the tensor's content. Raises StorageError,
        and CheckpointError where the file has changed since it was indexed. sparse: out of bytes
        that nobody wants.
        """
        ranges, path, index = self._opened(file, sparse)
        i = index.schema.position[name]
        if i not in index.pieces:
            ranges.read(path, index.offsets[i] + start, room, sparse)
        else:
            done = 0
            for span in spans_of_range(index.spans(name), start, len(room)):
                ranges.read(path, span.offset, room[done : done + span.nbytes], sparse)
                done += span.nbytes
        self.nbytes += len(room)
        if self._flight:
            self._passed(TensorRead(file, name, start, len(room)))

    def expect(self, coming: Iterator[TensorRead], memory: int) -> None:
        """Announce what `read` will be called for, all of it and in this order.

        As many are in flight as the storage can have, and no more of their bytes than `memory`.
        """
        self._coming, self._next = coming, next(coming, None)
        self._memory, self._free_requests, self._free_bytes = memory, self.ahead, memory
        self._announce()

    def _announce(self) -> None:
        """Announce as much as there is room for; what never has room is not announced."""
        while (read := self._next) is not None:
            ranges, path, index = self._opened(read.file)
            spans = list(spans_of_range(index.spans(read.entry), read.start, read.nbytes))
            if len(spans) <= ranges.ahead and read.nbytes <= self._memory:
                if len(spans) > self._free_requests or read.nbytes > self._free_bytes:
                    return
                for span in spans:
                    ranges.announce(path, span.offset, span.nbytes)
                self._flight.append((read, len(spans)))
                self._free_requests -= len(spans)
                self._free_bytes -= read.nbytes
            self._next = next(self._coming, None)

    def _passed(self, read: TensorRead) -> None:
        """Announce more, if this was the first in flight; other reads are not announced."""
        if self._flight[0][0] == read:
            _, requests = self._flight.popleft()
            self._free_requests += requests
            self._free_bytes += read.nbytes
            self._announce()

    def place(self, file: int, name: str, start: int) -> Position | None:
        """Return the descriptor, path and byte at which content byte `start` of `name` lies.

        None where the content lies in several parts of the file, or in no file system. Raises as
        `read` does.
        """
        ranges, path, index = self._opened(file)
        i = index.schema.position[name]
        return None if i in index.pieces else ranges.position(path, index.offsets[i] + start)

    def read_runs(
        self, file: int, name: str, start: int, room: Buffer, sparse: bool, run: int, stride: int
    ) -> None:
        """Fill `room` with runs of `run` bytes, each `stride` bytes behind the start of the last.

        The rest is as for `read`.
        """
        ranges, path, index = self._opened(file, sparse)
        spans = index.spans(name)
        if len(spans) > 1:
            for done in range(0, len(room), run):
                first = start + done // run * stride
                self.read(file, name, first, room[done : done + run], sparse)
            return
        offset, read = spans[0].offset + start, ranges.read
        for done in range(0, len(room), run):
            read(path, offset, room[done : done + run], sparse)
            offset += stride
            if self._flight:
                self._passed(TensorRead(file, name, start + done // run * stride, run))
        self.nbytes += len(room)

    def _opened(self, file: int, sparse: bool = False) -> tuple[RangeReader, str, Index]:
        """Return how a file is read, its path and index. Raises CheckpointError if it has changed.

        What is sparse may be read through a descriptor of its own, which may be of another file.
        """
        opened = self._open.get((file, sparse))
        if opened is None:
            path, index = self._paths[file], self._indexes[file]
            ranges = self._ranges[storage_of(path)]
            version = ranges.version(path, sparse)
            check_same(path, version, index)
            self._versions.setdefault(file, version)
            opened = self._open[file, sparse] = ranges, path, index
        return opened

    def check_unchanged(self) -> tuple[str, ...]:
        """See that every file that was read still is what was indexed; return what to know.

        A file of another size or time was written while it was read, and may have been read half
        before and half after. Raises CheckpointError.
        """
        touched = []
        opened_files = {file: opened for (file, _), opened in self._open.items()}
        for file, (ranges, path, index) in opened_files.items():
            named = ranges.named(path)
            if named is None:
                touched.append(f"{path}: was removed while it was read")
                continue
            check_same(path, named, index)
            if (named.inode, named.changed) != (index.inode, index.changed):
                self._recheck(file)
            if named != self._versions[file]:
                touched.append(f"{path}: its name, mode or links were changed while it was read")
        return tuple(touched)

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(self, *_: object) -> None:
        for ranges in self._ranges.values():
            ranges.close()


def check_same(path: str, version: FileVersion, index: Index) -> None:
    """Raise CheckpointError where a source file is no longer the one that was indexed."""
    if (version.size, version.modified) != (index.size, index.modified):
        raise CheckpointError(
            f"was changed after it was first read ({index.size} bytes then, {version.size} now); "
            "training still writes there?",
            "wait until the checkpoint is complete and run again",
            where=path,
        )
