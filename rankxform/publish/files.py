"""Part files, equal files, companion files: recognized, linked, read back.

Companion files are the last to appear, and the first to go when files are replaced: without them no
reader takes a folder for complete that is not.
"""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from stat import S_ISREG
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.errors import StorageError
from rankxform.layout.names import first_texts
from rankxform.storage.identity import sample_at, sample_digest
from rankxform.storage.posix import (
    CANNOT,
    AnyPath,
    create,
    make_folder,
    name_in_folder,
    nameless_file,
    open_for_reading,
    open_for_writing,
    read_bytes,
    remove_if_possible,
    write_atomically,
    write_from,
)
from rankxform.storage.store import FOLDER, Store, address_of, store_at
from rankxform.transport.team import Nodes
from rankxform.values import blake2b

from .options import LINK_HARD, SUMS

if TYPE_CHECKING:
    from .records import PartFile

FileStat = dict[str, Any]
"""Of a file: its inode, its size in bytes, when it was modified, and when anything of it was
changed, in nanoseconds; of a complete one a digest of samples, too."""


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


def stat_at(address: str) -> FileStat | None:
    """Return the facts of a file, through links and wherever it is; None if there is none."""
    version = store_at(address).version("")
    return None if version is None else dict(version._asdict())


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


def is_unchanged(path: AnyPath, file_entry: Mapping[str, Any], file_stat: FileStat) -> bool:
    """Tell whether a file is the one that a manifest lists: its size and samples decide.

    Nothing is read where no time was changed either.
    """
    if matches_entry(file_entry, file_stat, "inode", "size", "modified", "changed"):
        return True
    has_size = file_entry.get("size") == file_stat["size"]
    return has_size and file_entry.get("sample") == sample_at(str(path))


def matches_entry(file_entry: Mapping[str, Any], file_stat: FileStat | None, *keys: str) -> bool:
    """Tell whether there is a file, with what a record's entry states under `keys`."""
    return file_stat is not None and all(file_entry.get(key) == file_stat[key] for key in keys)


_FICLONE = 0x40049409


def can_reflink(folder: Path) -> bool:
    """Tell by trying whether files below `folder` can share their blocks, copy on write."""
    make_folder(folder)
    with nameless_file(folder) as old, nameless_file(folder) as new:
        write_from(old, folder, 0, memoryview(bytes(4096)))
        return _clone(old, new, folder)


def _clone(source: int, target: int, path: Path) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno in CANNOT:
            return False
        raise StorageError.of(error, path, "share blocks in") from error
    return True


def link(part: Path, target: Path, kind: str) -> None:
    """Make `target` another name of `part`, or a copy that shares its blocks."""
    make_folder(target.parent)
    remove_if_possible(target)
    try:
        if kind == LINK_HARD:
            with name_in_folder(part) as (old, old_folder), name_in_folder(target) as (new, folder):
                os.link(old, new, src_dir_fd=old_folder, dst_dir_fd=folder)
            return
        create(target)
        with open_for_reading(part) as (old_fd, _), open_for_writing(target) as new_fd:
            if not _clone(old_fd, new_fd, target):
                raise StorageError(
                    "this file system cannot share blocks",
                    "say --link none or --link hard",
                    where=target,
                )
    except OSError as error:
        raise StorageError.of(error, target, f"link {part}") from error


_SECONDS, _PAUSE = 60.0, 0.2
"""How long a node may see what was there before: as long as NFS keeps attributes."""


def files_to_read_back(
    written: Sequence[Mapping[Path, FileStat]], processes: Sequence[int], process: int, nodes: Nodes
) -> Iterator[tuple[Path, FileStat, str]]:
    """Yield the files that `process` reads back, with the name of the node that wrote each.

    written: by process the files that it wrote, with size and sample ("" if they need not be
    compared); processes: those that share
    their folder. Files that no other node sees are read back by none.
    """
    elsewhere: dict[int, list[int]] = {}
    for writer in processes:
        node = nodes.node_of[writer]
        if written[writer] and node not in elsewhere:
            elsewhere[node] = [reader for reader in processes if nodes.node_of[reader] != node]
        readers = elsewhere.get(node, [])
        for number, (path, file_stat) in enumerate(written[writer].items()):
            if readers and readers[number % len(readers)] == process:
                yield path, file_stat, nodes.names[node]


def read_back(
    path: Path, file_stat: FileStat, writer: str, clock: Callable[[], float] = time.monotonic
) -> None:
    """See that a file is here what `writer` says of it: its size, and samples if they are known.

    Caches of this node are waited for. Raises StorageError.
    """
    deadline = clock() + _SECONDS
    while (wrong := _wrong(path, file_stat)) is not None:
        if clock() > deadline:
            remove_if_possible(path)  # or a run that goes on would take it for complete
            raise StorageError(
                f"{wrong}, {file_stat['size']:,} bytes were written on {writer}; it was removed",
                "run again with --writers node",
                "run again with processes of one node",
                "choose a folder elsewhere",
                where=path,
                details="the file system loses what nodes write, or shows other nodes something "
                "else",
            )
        time.sleep(_PAUSE)


def _wrong(path: Path, file_stat: FileStat) -> str | None:
    local_stat = stat_or_none(path)
    if local_stat is None:
        return "is not seen on another node"
    if local_stat["size"] != file_stat["size"]:
        return f"has {local_stat['size']:,} bytes as another node sees it"
    if not file_stat["sample"]:
        return None
    try:
        is_same = sample_digest(path) == file_stat["sample"]
        return None if is_same else "has other bytes on another node"
    except StorageError as error:
        return f"cannot be read on another node ({error})"


# What a stopped run had replaced is noted in its job, so that the next one removes what is left
# of it.

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
        if status_of_name(path) is not None:
            check_own(path, companion_digests.get(name))


def check_own(path: Path, digest: str | None) -> None:
    """Refuse a companion file that is there, and is not what a destination's records state."""
    is_file = path.is_file()
    if is_file and digest in ("", _digest_at(store_at(str(path)), "")):
        return
    if is_file or status_of_name(path) is not None:
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
        raise StorageError(
            "loaders would read it as a part of the checkpoint that is to be written here",
            "choose another folder",
            "move other checkpoints' files away",
            where=first_texts(foreign_paths, 1),
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
        remove_if_possible(folder / name)


def remove_mark(path: Path, content: bytes) -> bool:
    """Remove a mark that leads readers to the folder of `content`; return whether there was one."""
    is_of_folder = path.is_file() and _number(read_bytes(path)) == _number(content)
    if is_of_folder:
        remove_if_possible(path)
    return is_of_folder


def set_mark(path: Path, content: bytes, *, durable: bool) -> None:
    """Write a mark, if there is none of a later folder."""
    present_mark = read_bytes(path) if path.is_file() else b""
    if present_mark != content and _number(present_mark) <= _number(content):
        write_atomically(path, content, durable=durable)


def means(present_mark: bytes, mark: bytes, step_folder: str) -> bool:
    """Tell whether a mark that is there leads readers to a step's folder, or to a later one's."""
    present_step, step = _number(present_mark), _number(mark)
    later = re.sub(r"\d+$", lambda digits: f"{present_step:0{len(digits[0])}}", step_folder)
    is_there = present_step > step and store_at(later).list("*").kind == FOLDER
    return present_step == step or is_there


def _number(mark: bytes) -> int:
    text = mark.strip()
    return int(text) if text.isdigit() and len(text) < _MOST_DIGITS else -1


def _digest_at(store: Store, name: str) -> str:
    with store.open(name) as file:
        state = blake2b(digest_size=_DIGEST)
        for start in range(0, file.version.size, _BLOCK):
            state.update(file.read_at(start, _BLOCK))
    return state.hexdigest()


def digest_of(content: bytes) -> str:
    """Return the digest of a small file by its content."""
    return blake2b(content, digest_size=_DIGEST).hexdigest()


def copied(place: AnyPath, record: Mapping[str, Any]) -> frozenset[str]:
    """Return the small files of a model that are as they were copied to a place."""
    digests_by_name, listed = record.get("beside", {}), record.get("copied", ())
    if not isinstance(digests_by_name, dict) or not isinstance(listed, (list, tuple)):
        return frozenset()
    copied_digests = {n: d for n, d in digests_by_name.items() if n in listed and Path(n).name == n}
    store = store_at(str(place))
    return frozenset(
        name
        for name, digest in copied_digests.items()
        if store.has(name) and not Path(place, name).is_symlink()
        if _digest_at(store, name) == digest
    )


def changed_model_files(place: AnyPath, record: Mapping[str, Any]) -> list[str]:
    """Return which of a model's small files are not as they were copied, in words.

    People change a config.json, and may mean it.
    """
    messages, digests_by_name, store = [], record.get("beside", {}), store_at(str(place))
    for name, digest in digests_by_name.items() if isinstance(digests_by_name, dict) else ():
        path = address_of(str(place), name)
        if not store.has(name):
            messages.append(f"{path}: is gone since it was copied there")
        elif _digest_at(store, name) != digest:
            messages.append(f"{path}: was changed since it was copied there")
    return messages


def wrong_companions(place: AnyPath, record: Mapping[str, Any]) -> dict[str, str]:
    """Return what is wrong with companion files that a manifest lists, by address."""
    digests_by_name, store = record.get("companions", {}), store_at(str(place))
    names = FORMS[record.get("form", DEFAULT_FORM)].companion_names(list(record["files"]))
    names = (*names, *(name for name in SUMS.values() if name in digests_by_name))
    reasons = {}
    for name in names:
        path = address_of(str(place), name)
        if name in digests_by_name and not store.has(name):
            reasons[path] = "is missing"
        elif name in digests_by_name and _digest_at(store, name) != digests_by_name[name]:
            reasons[path] = "was changed since it was written"
        elif name not in digests_by_name and store.has(name):
            reasons[path] = "is not listed in the manifest"
    return reasons
