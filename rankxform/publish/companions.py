"""Small files beside a destination's own: its index, and the mark by which readers find it.

They are the last to appear, and the first to go when files are replaced: without them, no reader
takes a folder for complete that is not.
"""

# What a stopped run had replaced is noted in its job, so that the next one removes what is left
# of it.

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.errors import StorageError
from rankxform.storage.posix import (
    open_for_reading,
    range_reader,
    read_bytes,
    remove,
    write_atomically,
)
from rankxform.storage.store import store_at

from .facts import status_of_name

_DIGEST, _BLOCK, _MOST_DIGITS = 16, 1 << 20, 20


def check_index_is_own(
    folder: Path, form: str, files: Iterable[str], companion_digests: Mapping[str, str]
) -> None:
    """Refuse an index of somebody else's files, which the destination's own would replace.

    `companion_digests` are those that are its own, with their digests; "" is of one that a stopped
    run was about to write. Raises StorageError.
    """
    for name in FORMS[form].companion_names(list(files)):
        path = folder / name
        if status_of_name(path) is None:
            continue
        digest = companion_digests.get(name)
        if not path.is_file() or digest is None or digest not in ("", _digest_of(path)):
            raise StorageError(
                "is already there, of other files than these",
                "remove it",
                "choose another folder",
                "say --overwrite",
                where=path,
            )


def check_places(folder: Path, form: str, files: Iterable[str], mark: Path | None) -> None:
    """Refuse folders where companion files belong. Raises StorageError."""
    companion_paths = [folder / name for name in FORMS[form].companion_names(list(files))]
    for path in [*companion_paths, *([mark] if mark is not None else [])]:
        if path.is_dir():
            raise StorageError(
                "is a folder, where a file is to be written", "remove it", where=path
            )


def check_no_foreign_files(
    folder: Path, form: str, output_paths: Iterable[Path], own_paths: Collection[Path]
) -> None:
    """Refuse files of others that readers would take for a destination's own.

    A reader of rank folders chooses among a rank's files, which is no more than a warning. Raises
    StorageError.
    """
    if not FORMS[form].described:
        return
    listing = store_at(str(folder)).list("*")
    names = [str(path.relative_to(folder)) for path in output_paths]
    foreign_names = FORMS[form].foreign_files(listing, names)
    foreign_paths = [path for name in foreign_names if (path := folder / name) not in own_paths]
    if foreign_paths:
        more_text = f" and {len(foreign_paths) - 1} more" if foreign_paths[1:] else ""
        raise StorageError(
            "loaders would read it as a part of the checkpoint that is to be written here",
            "choose another folder",
            "move other checkpoints' files away",
            where=f"{foreign_paths[0]}{more_text}",
        )


def write_companion(path: Path, content: Iterable[bytes], *, durable: bool) -> str:
    """Write a companion file; return its digest."""
    state = blake2b(digest_size=_DIGEST)

    def parts() -> Iterator[bytes]:
        for chunk in content:
            state.update(chunk)
            yield chunk

    write_atomically(path, parts(), durable=durable)
    return state.hexdigest()


def remove_all(folder: Path, form: str, files: Iterable[str]) -> None:
    """Remove the companions of files with these names."""
    for name in FORMS[form].companion_names(list(files)):
        remove(folder / name)


def remove_mark(mark: tuple[Path, bytes] | None) -> None:
    """Remove a mark that says that a folder is complete, if it says so of this one."""
    if mark is not None:
        path, content = mark
        if path.is_file() and _number(read_bytes(path)) == _number(content):
            remove(path)


def set_mark(path: Path, content: bytes, *, durable: bool) -> None:
    """Write a mark, if there is none of a later folder."""
    present_mark = read_bytes(path) if path.is_file() else b""
    if present_mark != content and _number(present_mark) <= _number(content):
        write_atomically(path, content, durable=durable)


def means(present_mark: bytes, mark: bytes) -> bool:
    """Tell whether a mark that is there leads readers to a checkpoint, or to a later one."""
    return _number(present_mark) >= _number(mark)


def _number(mark: bytes) -> int:
    text = mark.strip()
    return int(text) if text.isdigit() and len(text) < _MOST_DIGITS else -1


def _digest_of(path: Path) -> str:
    with open_for_reading(path) as (fd, status):
        read_at, state = range_reader(fd, path), blake2b(digest_size=_DIGEST)
        for start in range(0, status.st_size, _BLOCK):
            state.update(read_at(start, _BLOCK))
    return state.hexdigest()


def digest_of(content: bytes) -> str:
    """Return the digest of a small file by its content."""
    return blake2b(content, digest_size=_DIGEST).hexdigest()


def copied(folder: Path, record: Mapping[str, Any]) -> frozenset[str]:
    """Return the small files of a model that are as they were copied into a folder."""
    digests_by_name, listed = record.get("beside", {}), record.get("copied", ())
    if not isinstance(digests_by_name, dict) or not isinstance(listed, (list, tuple)):
        return frozenset()
    copied_digests = {n: d for n, d in digests_by_name.items() if n in listed and Path(n).name == n}
    paths_by_name = {name: folder / name for name in copied_digests}
    return frozenset(
        name
        for name, path in paths_by_name.items()
        if path.is_file() and not path.is_symlink() and _digest_of(path) == copied_digests[name]
    )


def changed_model_files(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Return which of a model's small files are not as they were copied, in words.

    People change a config.json, and may mean it.
    """
    messages, digests_by_name = [], record.get("beside", {})
    for name, digest in digests_by_name.items() if isinstance(digests_by_name, dict) else ():
        path = folder / name
        if not path.is_file():
            messages.append(f"{path}: is gone since it was copied there")
        elif _digest_of(path) != digest:
            messages.append(f"{path}: was changed since it was copied there")
    return messages


def wrong_companions(folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong with companion files that a manifest lists, by name."""
    digests_by_name = record.get("companions", {})
    names = FORMS[record.get("form", DEFAULT_FORM)].companion_names(list(record["files"]))
    reasons_by_name = {}
    for name in names:
        path = folder / name
        if name in digests_by_name and not path.is_file():
            reasons_by_name[name] = "is missing"
        elif name in digests_by_name and _digest_of(path) != digests_by_name[name]:
            reasons_by_name[name] = "was changed since it was written"
        elif name not in digests_by_name and path.exists():
            reasons_by_name[name] = "is not listed in the manifest"
    return reasons_by_name
