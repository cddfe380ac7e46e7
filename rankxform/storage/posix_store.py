"""File systems: the kind of storage whose addresses are paths."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from rankxform.errors import CheckpointError, StorageError

from .posix import (
    Buffer,
    Descriptors,
    open_for_reading,
    range_reader,
    read_bytes,
    read_into,
    sparse_descriptors,
    status_of,
)
from .reflink import Position
from .store import (
    FILE,
    FOLDER,
    RANK,
    FileVersion,
    HeaderReader,
    Listing,
    RangeReader,
    Store,
    address_of,
    expression_of,
    is_hidden,
    is_litter,
)

_LARGEST_DOCUMENT = 1 << 30


class PosixStorage:
    """Paths of file systems (`Storage`)."""

    def store(self, place: str) -> Store:
        return PosixStore(Path(place))

    def ranges(self) -> RangeReader:
        return PosixRangeReader()


class PosixRangeReader:
    """Files of file systems (`RangeReader`); the system reads ahead of what is read in a row.

    What is sparse is read through a descriptor of its own, on which the system reads nothing ahead.
    """

    ahead = 0

    def __init__(self) -> None:
        self._files, self._sparse = Descriptors(os.O_RDONLY), sparse_descriptors()

    def version(self, path: str, sparse: bool = False) -> FileVersion:
        return _version(status_of(self._descriptor(path, sparse), path))

    def named(self, path: str) -> FileVersion | None:
        try:
            return _version(os.stat(path))
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StorageError.of(error, path, "look at") from error

    def announce(self, path: str, offset: int, nbytes: int) -> None:
        """Nothing is gained (docs/decisions.md, "Tiles")."""

    def read(self, path: str, offset: int, room: Buffer, sparse: bool = False) -> None:
        read_into(self._descriptor(path, sparse), path, offset, room)

    def _descriptor(self, path: str, sparse: bool) -> int:
        return (self._sparse if sparse else self._files).get(path)

    def position(self, path: str, offset: int) -> Position | None:
        return self._files.get(path), path, offset

    def close(self) -> None:
        self._files.close()
        self._sparse.close()


class PosixStore:
    """A place in a file system: a folder, or one file (`Store`)."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def list(self, pattern: str) -> Listing:
        root = self._root
        if root.is_file():
            return Listing(str(root), FILE)
        if not root.is_dir():
            return Listing(str(root))
        with os.scandir(root) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
        entries = [entry for entry in entries if not is_hidden(entry.name)]
        folders = [entry.name for entry in entries if _is_folder(entry)]
        names = tuple(entry.name for entry in entries)
        parts = [expression_of(part) for part in os.path.normpath(pattern).split("/")]
        files, inside = tuple(_walk(str(root), "", parts)), {}
        if not files and RANK in pattern:
            with suppress(OSError):
                inside = {f: len(list(_walk(str(root / f), "", parts))) for f in folders}
        return Listing(str(root), FOLDER, files, names, frozenset(folders), inside=inside)

    def read(self, name: str, searched: str = "") -> bytes:
        path = self._root / name if name else self._root
        if not path.is_file():
            raise CheckpointError(
                f"process 0 does not see it, and another node does{searched}",
                "copy it to the first node",
                where=path,
            )
        if path.stat().st_size > _LARGEST_DOCUMENT:
            raise CheckpointError(
                f"has over {_LARGEST_DOCUMENT} bytes, and is no index", where=path
            )
        return read_bytes(path)

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    @contextmanager
    def open(self, name: str) -> Iterator[HeaderReader]:
        path = address_of(str(self._root), name)
        with open_for_reading(path) as (fd, status):
            yield HeaderReader(range_reader(fd, path), _version(status))


def _version(status: os.stat_result) -> FileVersion:
    return FileVersion(status.st_size, status.st_mtime_ns, status.st_ino, status.st_ctime_ns)


def _walk(root: str, below: str, parts: list[re.Pattern[str] | None]) -> Iterator[str]:
    """Yield the names of files that match the parts of a pattern, folder by folder."""
    part, *deeper = parts
    if part is None:
        yield from _walk(root, below + "../", deeper)
        return
    with os.scandir(os.path.join(root, below)) as scan:
        entries = sorted(scan, key=lambda entry: entry.name)
    names = {entry.name for entry in entries}
    names_hidden = part.pattern.startswith(r"\.")  # the user's pattern does
    for entry in entries:
        if not part.fullmatch(entry.name) or (is_litter(entry.name) and not names_hidden):
            continue
        if deeper and _is_folder(entry):
            yield from _walk(root, f"{below}{entry.name}/", deeper)
        elif not deeper and _is_file(entry) and not _repeats(entry, names, part):
            yield below + entry.name


def _repeats(entry: os.DirEntry[str], names: Collection[str], part: re.Pattern[str]) -> bool:
    """Tell whether an entry is a link to another one of the same rank, such as ``latest``.

    A link to another rank's file is a replica that is stored once.
    """
    if not entry.is_symlink():
        return False
    target = os.readlink(entry.path)
    match, target_match = part.fullmatch(entry.name), part.fullmatch(target)
    if target not in names or is_litter(target) or match is None or target_match is None:
        return False
    return match.groups() == target_match.groups()


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _is_file(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) or (
        entry.is_symlink() and os.path.isfile(entry.path)
    )
