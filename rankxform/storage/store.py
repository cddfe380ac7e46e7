"""Stores: what lists files and reads small documents, whatever kind of storage it is.

Forms see plain names relative to a checkpoint's place, and never a path: a listing may be merged of
what several nodes have, and a store need be no file system.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import field
from pathlib import Path
from typing import Protocol

from rankxform.errors import CheckpointError
from rankxform.formats.base import ReadAt
from rankxform.values import dataclass

from .posix import opened, range_reader, read_bytes

NOTHING, FILE, FOLDER = "nothing", "file", "folder"
RANK = "{rank}"
_LARGEST_DOCUMENT = 1 << 30


@dataclass(frozen=True)
class Listing:
    """What lies at a place: a file, or a folder with entries, or nothing.

    path: the place, for messages. files: names relative to a folder, of those that were asked for.
    entries, folders: what lies directly in it, and which of these are folders. searched: for
    messages, on which nodes was looked, if on several. inside: where no file matches, how many do
    so in each folder, if that were the place.
    """

    path: str
    kind: str = NOTHING
    files: tuple[str, ...] = ()
    entries: tuple[str, ...] = ()
    folders: frozenset[str] = frozenset()
    searched: str = ""
    inside: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The last part of the place's own name."""
        return os.path.basename(self.path)

    def at(self, name: str) -> str:
        """Return the path of a file, for messages; "" is the place itself."""
        return os.path.join(self.path, name) if name else self.path

    def joined(self, other: Listing) -> Listing:
        """Return this listing merged with that of the same place on another node."""
        kind = max(self.kind, other.kind, key=(NOTHING, FOLDER, FILE).index)
        files = sorted({*self.files, *other.files}, key=lambda name: name.split("/"))
        entries = tuple(sorted({*self.entries, *other.entries}))
        folders = self.folders | other.folders
        inside = {**other.inside, **self.inside}
        return Listing(self.path, kind, tuple(files), entries, folders, self.searched, inside)


class Store(Protocol):
    """Lists a place, and reads small documents there. Names are relative to the place."""

    def list(self, pattern: str) -> Listing:
        """Return what lies at the place, with the files that match a pattern.

        In each part of the pattern ``*`` stands for any text, and ``{rank}`` for a rank's number.
        """

    def read(self, name: str, searched: str = "") -> bytes:
        """Return a small document. Raises CheckpointError, StorageError.

        `searched` says, for messages, which nodes were searched for it.
        """

    def has(self, name: str) -> bool:
        """Tell whether a file is there, as this process sees it."""

    def open(self, name: str) -> AbstractContextManager[ReadAt]:
        """Yield a function that reads byte ranges of a file."""


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
        with os.scandir(root) as found:
            own = sorted(found, key=lambda entry: entry.name)
        folders = [entry.name for entry in own if _is_folder(entry)]
        names = tuple(entry.name for entry in own)
        parts = [expression_of(part) for part in os.path.normpath(pattern).split("/")]
        files, inside = tuple(_walk(str(root), "", parts)), {}
        if not files and RANK in pattern:
            with suppress(OSError):
                inside = {one: len(list(_walk(str(root / one), "", parts))) for one in folders}
        return Listing(str(root), FOLDER, files, names, frozenset(folders), inside=inside)

    def read(self, name: str, searched: str = "") -> bytes:
        path = self._root / name if name else self._root
        if not path.is_file():
            raise CheckpointError(
                f"{path}: process 0 does not see it, and another node does{searched}; copy it to "
                "the first node"
            )
        if path.stat().st_size > _LARGEST_DOCUMENT:
            raise CheckpointError(f"{path}: has over {_LARGEST_DOCUMENT} bytes, and is no index")
        return read_bytes(path)

    def has(self, name: str) -> bool:
        return (self._root / name).is_file()

    @contextmanager
    def open(self, name: str) -> Iterator[ReadAt]:
        path = self._root / name
        with opened(path) as (fd, _):
            yield range_reader(fd, path)


def expression_of(part: str) -> re.Pattern[str] | None:
    """Return what a part of a pattern matches; None for the folder above.

    The numbers of ranks are its groups.
    """
    if part == "..":
        return None
    literal = re.escape(part).replace(re.escape(RANK), r"(\d{1,9})").replace(r"\*", ".*")
    return re.compile(literal)


def _walk(root: str, below: str, parts: list[re.Pattern[str] | None]) -> Iterator[str]:
    """Yield the names of files that match the parts of a pattern, folder by folder."""
    part, *rest = parts
    if part is None:
        yield from _walk(root, below + "../", rest)
        return
    with os.scandir(os.path.join(root, below)) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        if not part.fullmatch(entry.name):
            continue
        if rest and _is_folder(entry):
            yield from _walk(root, f"{below}{entry.name}/", rest)
        elif not rest and _is_file(entry):
            yield below + entry.name


def _is_folder(entry: os.DirEntry[str]) -> bool:
    return entry.is_dir(follow_symlinks=False) or (entry.is_symlink() and os.path.isdir(entry.path))


def _is_file(entry: os.DirEntry[str]) -> bool:
    return entry.is_file(follow_symlinks=False) or (
        entry.is_symlink() and os.path.isfile(entry.path)
    )
