"""Equal destination files, written once: reflinks where the file system has them, or hard links."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterable
from pathlib import Path

from rankxform.engine.file_sink import part_of
from rankxform.errors import StorageError
from rankxform.storage.posix import create, make_folder, remove, sync, unique_name
from rankxform.storage.reflink import CANNOT

LINK_NONE, LINK_REFLINK, LINK_HARD = "none", "reflink", "hard"
LINKS = (LINK_REFLINK, LINK_HARD, LINK_NONE)

_FICLONE = 0x40049409


def can_reflink(folder: Path) -> bool:
    """Tell by trying whether files below `folder` can share their blocks, copy on write."""
    make_folder(folder)
    a, b = (unique_name(folder / f".rankxform-{n}") for n in "ab")
    try:
        create(a)
        create(b)
        a.write_bytes(bytes(4096))
        return _clone(a, b)
    finally:
        remove(a)
        remove(b)


def _clone(source: Path, target: Path) -> bool:
    with source.open("rb") as old, target.open("r+b") as new:
        try:
            fcntl.ioctl(new.fileno(), _FICLONE, old.fileno())
        except OSError as error:
            if error.errno in CANNOT:
                return False
            raise StorageError.of(error, target, f"clone {source}") from error
    return True


def link(part: Path, target: Path, kind: str) -> None:
    """Make `target` another name of `part`, or a copy that shares its blocks."""
    make_folder(target.parent)
    remove(target)
    try:
        if kind == LINK_HARD:
            os.link(part, target)
            return
        create(target)
        if not _clone(part, target):
            raise StorageError(
                "this file system cannot share blocks",
                "say --link none or --link hard",
                where=target,
            )
    except OSError as error:
        raise StorageError.of(error, target, f"link {part}") from error


def link_all(part: Path, output_paths: Iterable[Path], kind: str, *, durable: bool) -> None:
    """Link the complete file `part` to the part file of each of `output_paths`, as `kind` says."""
    for final in output_paths:
        linked_part = part_of(final)
        link(part, linked_part, kind)
        if durable and kind == LINK_REFLINK:
            sync(linked_part)
