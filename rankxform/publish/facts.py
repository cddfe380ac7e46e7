"""What tells a destination file from another: inode, size and time of modification."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from stat import S_ISREG
from typing import Any

from rankxform.errors import StorageError
from rankxform.storage.identity import sample_digest

from .records import PartFile

FileStat = dict[str, Any]
"""Of a file: its inode, its size in bytes, when it was modified, and when anything of it was
changed, in nanoseconds; of a complete one a digest of samples, too."""


def refuse_link(path: Path) -> None:
    """Raise StorageError where a folder of a destination is a link: what is there is another's."""
    if path.is_symlink():
        raise StorageError(
            "is a link, and inside a destination none is followed",
            "remove it",
            "choose another folder",
            where=path,
        )


def stat_file(part: Path) -> FileStat:
    """Return the facts by which a part file is recognized later. Raises StorageError."""
    file_stat = stat_or_none(part)
    if file_stat is None:
        raise StorageError("is gone; does something else clean up this folder?", where=part)
    return file_stat


def stat_or_none(path: Path) -> FileStat | None:
    """Return the facts that distinguish a file from others, or None if there is no file."""
    status = status_of_name(path)
    if status is None:
        return None
    return {
        "inode": status.st_ino,
        "size": status.st_size,
        "modified": status.st_mtime_ns,
        "changed": status.st_ctime_ns,
    }


def status_of_name(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except OSError:
        return None


def is_noted_part_file(path: Path, noted_part: PartFile | None, size: int) -> bool:
    """Tell whether a part file is the one that was noted, and has the bytes it had at least."""
    status = status_of_name(path)
    if status is None or noted_part is None or not S_ISREG(status.st_mode):
        return False
    return (status.st_ino, status.st_nlink) == (noted_part.inode, 1) and status.st_size >= size


def is_unchanged(path: Path, file_entry: Mapping[str, Any], facts: FileStat) -> bool:
    """Tell whether a file is the one that a manifest lists: its size and samples decide.

    Nothing is read where no time was changed either.
    """
    if is_same_file(file_entry, facts, "inode", "size", "modified", "changed"):
        return True
    return file_entry.get("size") == facts["size"] and file_entry.get("sample") == sample_digest(
        path
    )


def is_same_file(file_entry: Mapping[str, Any], facts: FileStat | None, *keys: str) -> bool:
    return facts is not None and all(file_entry.get(key) == facts[key] for key in keys)
