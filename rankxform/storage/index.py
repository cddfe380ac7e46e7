"""The index of a checkpoint file on disk."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from dataclasses import replace

from rankxform.errors import CheckpointError, FormatError
from rankxform.formats.base import (
    Container,
    DeclaredFile,
    Index,
    ReadAt,
    container_of,
    non_tensor_spans,
)
from rankxform.formats.signatures import FIRST_BYTES, file_signature

from .posix import AnyPath
from .store import store_at


def container_of_path(path: AnyPath) -> Container:
    """Return the container of a checkpoint file, which its name tells."""
    return container_of(os.path.splitext(path)[1])


def index_file(path: AnyPath) -> Index:
    """Read the table of contents of `path` from its headers. Raises CheckpointError."""
    return Indexer().index(path)


_TICK = 10_000_000
"""Nanoseconds after which the clock of a file system has ticked."""


_NOTHING = DeclaredFile()


class Indexer:
    """Indexes files; a file laid out like an earlier one is recognized by comparing headers.

    The ranks of a stage mostly save the same parameters in the same shapes, so their files differ
    in content alone: all other bytes are the same in the same places, and so is the
    table of contents. Comparing is several times faster than parsing, and alike files share one
    table in memory.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[_Template]] = {}

    def index(self, path: AnyPath, declared: DeclaredFile = _NOTHING) -> Index:
        """Read the table of contents of `path`. Raises CheckpointError if it is not as declared."""
        kind = container_of_path(path)
        with store_at(str(path)).open("") as file:
            size, modified, inode, changed = file.version
            templates = (
                self._seen.setdefault((kind.name, size), []) if kind.has_equal_headers else []
            )
            index = next((t.index for t in templates if t.fits(file.read_at)), None)
            if size < declared.nbytes:
                raise CheckpointError(
                    f"is shorter than {declared.source} says: {size:,} of {declared.nbytes:,} "
                    "bytes",
                    "copy it again",
                    where=path,
                )
            try:
                if index is None:
                    index = kind.read_index(file.read_at, size)
                    templates.append(_Template(index, str(path)))
                index = index.viewed(declared.views)
            except FormatError as error:
                signature = file_signature(file.read_at(0, min(FIRST_BYTES, size)))
                if signature is None or not kind.alone:
                    raise CheckpointError.of_parts(error.at(path)) from error
                raise CheckpointError(
                    f"expected a {kind.name} file, and it is {signature.title}", *signature.tries,
                    where=path,
                ) from error  # fmt: skip
        return replace(index, modified=modified, inode=inode, changed=changed)


def wait_for_newer_mtime(indexes: Iterable[Index]) -> None:
    """Wait until a later write gets a later modification time than these files have.

    A file system's clock ticks every few milliseconds. Two writes within a tick get equal times.
    """
    newest, now = max((index.modified for index in indexes), default=0), time.time_ns()
    if now - _TICK < newest <= now:
        time.sleep(_TICK / 1e9)


class _Template:
    """The bytes of a file outside its content. They are read when a second file may equal them."""

    def __init__(self, index: Index, path: str) -> None:
        self.index = index
        self._path = path
        self._headers: list[tuple[int, bytes]] | None = None

    def fits(self, read_at: ReadAt) -> bool:
        """Whether another file of the same size has the same bytes outside of its content."""
        if self._headers is None:
            with store_at(self._path).open("") as file:
                spans = non_tensor_spans(self.index)
                self._headers = [(s.offset, file.read_at(s.offset, s.nbytes)) for s in spans]
        return all(read_at(offset, len(data)) == data for offset, data in self._headers)
