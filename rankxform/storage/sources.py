"""Source files, read by rank, parameter and content byte."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from rankxform.errors import CheckpointError
from rankxform.formats.base import Index, locate

from .posix import Buffer, Descriptors, read_into, sparse_descriptors, status_of
from .sharing import Position


class Sources:
    """The source files of one process.

    paths, indexes: by rank. nbytes: read so far.
    """

    def __init__(self, paths: Mapping[int, Path], indexes: Mapping[int, Index]) -> None:
        self._paths, self._indexes = paths, indexes
        self._descriptors = {False: Descriptors(os.O_RDONLY), True: sparse_descriptors()}
        self._checked: dict[bool, set[int]] = {False: set(), True: set()}
        self.nbytes = 0

    def read(self, rank: int, name: str, start: int, room: Buffer, sparse: bool = False) -> None:
        """Fill `room` with what the file of `rank` (its id) holds of `name`, from byte `start` on.

        `name` is the source's own, and `start` counts in the tensor's content. Raises StorageError,
        and CheckpointError where the file has changed since it was indexed.

        What is `sparse` out of bytes that nobody wants is read through a descriptor of its own,
        on which the system reads nothing ahead.
        """
        fd, path, index = self._opened(rank, sparse)
        i = index.schema.position[name]
        if i not in index.pieces:
            read_into(fd, path, index.offsets[i] + start, room)
            self.nbytes += len(room)
            return
        done = 0
        for span in locate(index.spans(name), start, len(room)):
            read_into(fd, path, span.offset, room[done : done + span.nbytes])
            done += span.nbytes
        self.nbytes += done

    def place(self, rank: int, name: str, start: int) -> Position | None:
        """Return the descriptor, path and byte at which content byte `start` of `name` lies.

        None where the content lies in several parts of the file. Raises as `read` does.
        """
        fd, path, index = self._opened(rank, False)
        i = index.schema.position[name]
        return None if i in index.pieces else (fd, path, index.offsets[i] + start)

    def read_runs(
        self, rank: int, name: str, start: int, room: Buffer, sparse: bool, run: int, stride: int
    ) -> None:
        """Fill `room` with runs of `run` bytes, each `stride` bytes behind the start of the last.

        The rest is as for `read`.
        """
        fd, path, index = self._opened(rank, sparse)
        spans = index.spans(name)
        if len(spans) > 1:
            for at in range(0, len(room), run):
                self.read(rank, name, start + at // run * stride, room[at : at + run], sparse)
            return
        offset = spans[0].offset + start
        for at in range(0, len(room), run):
            read_into(fd, path, offset, room[at : at + run])
            offset += stride
        self.nbytes += len(room)

    def _opened(self, rank: int, sparse: bool) -> tuple[int, Path, Index]:
        """Return a file's descriptor, path and index. Raises CheckpointError if it has changed."""
        path, index, checked = self._paths[rank], self._indexes[rank], self._checked[sparse]
        fd = self._descriptors[sparse].get(path)
        if rank not in checked:
            check_unchanged(path, status_of(fd, path), index)
            checked.add(rank)
        return fd, path, index

    def __enter__(self) -> Sources:
        return self

    def __exit__(self, *_: object) -> None:
        for descriptors in self._descriptors.values():
            descriptors.close()


def check_unchanged(path: Path, status: os.stat_result, index: Index) -> None:
    """Raise CheckpointError where a source file is no longer the one that was indexed."""
    if (status.st_size, status.st_mtime_ns) != (index.size, index.modified):
        raise CheckpointError(
            f"{path}: was changed after it was first read ({index.size} bytes then, "
            f"{status.st_size} now); wait until the checkpoint is complete and run again"
        )
