"""The index of a checkpoint file on disk."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from rankxform.errors import CheckpointError, FormatError
from rankxform.formats.base import Format, Index, ReadAt, format_of, gaps

from .posix import opened, range_reader


def container(path: Path) -> Format:
    """Return the container of a checkpoint file, which its name tells."""
    return format_of(path.suffix)


def index(path: Path) -> Index:
    """Read the table of contents of `path` from its headers. Raises CheckpointError."""
    return Indexer().index(path)


class Indexer:
    """Indexes files; a file laid out like an earlier one is recognized by comparing headers.

    The ranks of a stage mostly save the same parameters in the same shapes, so their files differ
    in content alone: all other bytes are the same in the same places, and so is the
    table of contents. Comparing is several times faster than parsing, and alike files share one
    table in memory.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[_Template]] = {}

    def index(self, path: Path) -> Index:
        """Read the table of contents of `path`. Raises CheckpointError."""
        kind = container(path)
        with opened(path) as (fd, status):
            read_at = range_reader(fd, path)
            templates = self._seen.setdefault((kind.name, status.st_size), [])
            found = next((t.index for t in templates if t.fits(read_at)), None)
            if found is None:
                try:
                    found = kind.read_index(read_at, status.st_size)
                except FormatError as error:
                    raise CheckpointError(f"{path}: {error}") from error
                templates.append(_Template(found, path))
        return replace(found, modified=status.st_mtime_ns)


class _Template:
    """The bytes of a file that are no content, read when a second file may be alike."""

    def __init__(self, found: Index, path: Path) -> None:
        self.index = found
        self._path = path
        self._headers: list[tuple[int, bytes]] | None = None

    def fits(self, read_at: ReadAt) -> bool:
        """Whether another file of the same size has the same bytes outside of its content."""
        if self._headers is None:
            with opened(self._path) as (fd, _):
                own = range_reader(fd, self._path)
                self._headers = [(s.offset, own(s.offset, s.nbytes)) for s in gaps(self.index)]
        return all(read_at(offset, len(data)) == data for offset, data in self._headers)
