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
from rankxform.storage.posix import opened, range_reader, read_bytes, remove, write_small
from rankxform.storage.store import store_at

from .facts import status_of_name

_DIGEST, _BLOCK, _MOST_DIGITS = 16, 1 << 20, 20


def check(folder: Path, form: str, files: Iterable[str], noted: Mapping[str, str]) -> None:
    """Refuse an index of somebody else's files, which the destination's own would replace.

    `noted` are those that are its own, with their digests; "" is of one that a stopped run was
    about to write. Raises StorageError.
    """
    for name in FORMS[form].companion_names(list(files)):
        path = folder / name
        if status_of_name(path) is None:
            continue
        known = noted.get(name)
        if not path.is_file() or known is None or known not in ("", _digest_of(path)):
            raise StorageError(
                "is already there, of other files than these",
                "remove it",
                "choose another folder",
                "say --overwrite",
                where=path,
            )


def check_places(folder: Path, form: str, files: Iterable[str], mark: Path | None) -> None:
    """Refuse folders where companion files belong. Raises StorageError."""
    own = [folder / name for name in FORMS[form].companion_names(list(files))]
    for path in [*own, *([mark] if mark is not None else [])]:
        if path.is_dir():
            raise StorageError(
                "is a folder, where a file is to be written", "remove it", where=path
            )


def check_alone(
    folder: Path, form: str, output_paths: Iterable[Path], known: Collection[Path]
) -> None:
    """Refuse files of others that readers would take for a destination's own.

    A reader of rank folders chooses among a rank's files, which is no more than a warning. Raises
    StorageError.
    """
    if not FORMS[form].described:
        return
    listing = store_at(str(folder)).list("*")
    names = [str(path.relative_to(folder)) for path in output_paths]
    found = FORMS[form].foreign_files(listing, names)
    others = [path for name in found if (path := folder / name) not in known]
    if others:
        more = f" and {len(others) - 1} more" if others[1:] else ""
        raise StorageError(
            "loaders would read it as a part of the checkpoint that is to be written here",
            "choose another folder",
            "move other checkpoints' files away",
            where=f"{others[0]}{more}",
        )


def write(path: Path, content: Iterable[bytes], *, durable: bool) -> str:
    """Write a companion file; return its digest."""
    state = blake2b(digest_size=_DIGEST)

    def parts() -> Iterator[bytes]:
        for some in content:
            state.update(some)
            yield some

    write_small(path, parts(), durable=durable)
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
    there = read_bytes(path) if path.is_file() else b""
    if there != content and _number(there) <= _number(content):
        write_small(path, content, durable=durable)


def means(there: bytes, mark: bytes) -> bool:
    """Tell whether a mark that is there leads readers to a checkpoint, or to a later one."""
    return _number(there) >= _number(mark)


def _number(mark: bytes) -> int:
    text = mark.strip()
    return int(text) if text.isdigit() and len(text) < _MOST_DIGITS else -1


def _digest_of(path: Path) -> str:
    with opened(path) as (fd, status):
        read_at, state = range_reader(fd, path), blake2b(digest_size=_DIGEST)
        for start in range(0, status.st_size, _BLOCK):
            state.update(read_at(start, _BLOCK))
    return state.hexdigest()


def digest_of(content: bytes) -> str:
    """Return the digest of a small file by its content."""
    return blake2b(content, digest_size=_DIGEST).hexdigest()


def copied(folder: Path, record: Mapping[str, Any]) -> frozenset[str]:
    """Return the small files of a model that are as they were copied into a folder."""
    known, listed = record.get("beside", {}), record.get("copied", ())
    if not isinstance(known, dict) or not isinstance(listed, (list, tuple)):
        return frozenset()
    own = {n: d for n, d in known.items() if n in listed and Path(n).name == n}
    there = {name: folder / name for name in own}
    return frozenset(
        name
        for name, path in there.items()
        if path.is_file() and not path.is_symlink() and _digest_of(path) == own[name]
    )


def doubts(folder: Path, record: Mapping[str, Any]) -> list[str]:
    """Return which of a model's small files are not as they were copied, in words.

    People change a config.json, and may mean it.
    """
    found, known = [], record.get("beside", {})
    for name, digest in known.items() if isinstance(known, dict) else ():
        path = folder / name
        if not path.is_file():
            found.append(f"{path}: is gone since it was copied there")
        elif _digest_of(path) != digest:
            found.append(f"{path}: was changed since it was copied there")
    return found


def faults(folder: Path, record: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong with companion files that a manifest lists, by name."""
    known = record.get("companions", {})
    names = FORMS[record.get("form", DEFAULT_FORM)].companion_names(list(record["files"]))
    found = {}
    for name in names:
        path = folder / name
        if name in known and not path.is_file():
            found[name] = "is missing"
        elif name in known and _digest_of(path) != known[name]:
            found[name] = "was changed since it was written"
        elif name not in known and path.exists():
            found[name] = "is not listed in the manifest"
    return found
