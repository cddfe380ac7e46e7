"""Small files beside a destination's own: its index, and the mark by which readers find it.

They are the last to appear, and the first to go when files are replaced: without them, no reader
takes a folder for complete that is not.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import FORMS, USUAL
from rankxform.errors import StorageError
from rankxform.storage.posix import read_bytes, remove, write_small

from .facts import status_of_name


def check(folder: Path, form: str, files: Iterable[str], noted: Mapping[str, str]) -> None:
    """Refuse an index of somebody else's files, which the destination's own would replace.

    `noted` are the digests of those that are its own. Raises StorageError.
    """
    for name in FORMS[form].companion_names(list(files)):
        path = folder / name
        if status_of_name(path) is None:
            continue
        if not path.is_file() or noted.get(name) != digest(read_bytes(path)):
            raise StorageError(
                f"{path}: is already there, of other files than these; remove it, choose another "
                "folder, or say --overwrite"
            )


def remove_all(folder: Path, form: str, files: Iterable[str]) -> None:
    """Remove the companions of files with these names."""
    for name in FORMS[form].companion_names(list(files)):
        remove(folder / name)


def remove_mark(mark: tuple[Path, bytes] | None) -> None:
    """Remove a mark that says that a folder is complete, if it says so of this one."""
    if mark is not None:
        path, content = mark
        if path.is_file() and read_bytes(path) == content:
            remove(path)


def set_mark(path: Path, content: bytes, *, durable: bool) -> None:
    """Write a mark, if there is none of a later folder."""
    there = read_bytes(path) if path.is_file() else b""
    later = there.isdigit() and content.isdigit() and int(there) > int(content)
    if there != content and not later:
        write_small(path, content, durable=durable)


def digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def faults(folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong with companion files that a manifest lists, by name."""
    known = record.get("companions", {})
    names = FORMS[record.get("form", USUAL)].companion_names(list(record["files"]))
    found = {}
    for name in names:
        path = folder / name
        if name in known and not path.is_file():
            found[name] = "is missing"
        elif name in known and digest(read_bytes(path)) != known[name]:
            found[name] = "was changed since it was written"
        elif name not in known and path.exists():
            found[name] = "is in no manifest of this folder"
    return found
