"""Source files, read by file, tensor and content byte."""

from __future__ import annotations

from collections.abc import Mapping

from rankxform.errors import CheckpointError
from rankxform.formats.base import Index, locate

from .posix import Buffer
from .sharing import Position
from .store import Ranges, storage_of


class Sources:
    """The source files of one process.

    paths, indexes: by file. nbytes: read so far. ahead: how many reads may be in flight if they are
    announced; 0 where that gains nothing.
    """

    def __init__(self, paths: Mapping[int, str], indexes: Mapping[int, Index]) -> None:
        self._paths, self._indexes = paths, indexes
        kinds = dict.fromkeys(map(storage_of, paths.values()))
        self._ranges = {kind: kind.ranges() for kind in kinds}
        self._open: dict[tuple[int, bool], tuple[Ranges, str, Index]] = {}
        self.nbytes, self.ahead = 0, max((one.ahead for one in self._ranges.values()), default=0)

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
            self.nbytes += len(room)
            return
        done = 0
        for span in locate(index.spans(name), start, len(room)):
            ranges.read(path, span.offset, room[done : done + span.nbytes], sparse)
            done += span.nbytes
        self.nbytes += done

    def announce(self, file: int, name: str, start: int, nbytes: int) -> None:
        """Say that `read` will be called for this, after what was announced before it."""
        ranges, path, index = self._opened(file)
        for span in locate(index.spans(name), start, nbytes):
            ranges.announce(path, span.offset, span.nbytes)

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
            for at in range(0, len(room), run):
                self.read(file, name, start + at // run * stride, room[at : at + run], sparse)
            return
        offset, read = spans[0].offset + start, ranges.read
        for at in range(0, len(room), run):
            read(path, offset, room[at : at + run], sparse)
            offset += stride
        self.nbytes += len(room)

    def _opened(self, file: int, sparse: bool = False) -> tuple[Ranges, str, Index]:
        """Return how a file is read, its path and index. Raises CheckpointError if it has changed.

        What is sparse may be read through a descriptor of its own, which may be of another file.
        """
        found = self._open.get((file, sparse))
        if found is None:
            path, index = self._paths[file], self._indexes[file]
            ranges = self._ranges[storage_of(path)]
            check_unchanged(path, ranges.version(path, sparse), index)
            found = self._open[file, sparse] = ranges, path, index
        return found

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for ranges in self._ranges.values():
            ranges.close()


def check_unchanged(path: str, version: tuple[int, int], index: Index) -> None:
    """Raise CheckpointError where a source file is no longer the one that was indexed.

    version: its size in bytes, and its time, as they are now.
    """
    if version != (index.size, index.modified):
        raise CheckpointError(
            f"{path}: was changed after it was first read ({index.size} bytes then, "
            f"{version[0]} now); wait until the checkpoint is complete and run again"
        )
