"""What is removed of a folder again: what a stopped run left there, or a whole conversion."""

from __future__ import annotations

from pathlib import Path

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.engine.sinks import part_of
from rankxform.errors import FormatError, RankxformError
from rankxform.storage.posix import claim_folders, read_own_record, remove_if_possible
from rankxform.values import decode_json

from .files import copied, matches_entry, stat_or_none
from .folder_records import FOLDER_NAME, JOB_NAME, MANIFEST_NAME, read_manifest
from .lock import FolderLock
from .options import SUMS
from .records import JOB, check_record


def remove_unfinished(folder: Path) -> bool:
    """Remove what a stopped run left of a conversion, and return whether there was one.

    Raises StorageError where a run is at work.
    """
    records = folder / FOLDER_NAME
    try:
        claim_folders(folder, [records])
        try:
            job = check_record(JOB, decode_json(read_own_record(records / JOB_NAME)))
        except (FormatError, OSError):
            return False
        claim_folders(folder, [(folder / name).parent for name in job["files"]])
        lock = FolderLock(records / "lock")
        try:
            for name, file_entry in job["files"].items():
                path = folder / name
                remove_if_possible(part_of(path))
                if matches_entry(file_entry, stat_or_none(path), "inode", "size", "modified"):
                    remove_if_possible(path)
            for path in (*records.glob("journal-*.jsonl"), records / JOB_NAME):
                remove_if_possible(path)
        finally:
            lock.release()
        return True
    finally:
        claim_folders(folder, None)


def remove_conversion(folder: Path) -> bool:
    """Remove the files of a conversion that its records list, and folders that are empty then.

    Returns whether there was one. Raises StorageError where a run is at work.
    """
    if folder.is_symlink():  # it was moved, and is another's now
        return False
    # An iteration has a folder of its own.
    places = [folder, *(place for place in folder.glob("*/") if not place.is_symlink())]
    unfinished = [remove_unfinished(place) for place in places if (place / FOLDER_NAME).is_dir()]
    place = next((place for place in places if (place / MANIFEST_NAME).exists()), None)
    if place is None:
        _remove_empty(folder)
        return any(unfinished)
    try:
        record = read_manifest(place)
    except RankxformError:  # it is no conversion any more
        return False
    form = FORMS[record.get("form", DEFAULT_FORM)]
    companion_names = {*form.companion_names([*record["files"]]), *SUMS.values()}
    names = {*record["files"], *companion_names.intersection(record.get("companions", {}))}
    names |= copied(place, record)
    try:
        claim_folders(place, [(place / name).parent for name in names])
        for name in (*names, MANIFEST_NAME):
            remove_if_possible(place / name)
    finally:
        claim_folders(place, None)
    _remove_empty(folder)
    tracker = form.tracker
    if tracker is not None and folder.is_dir() and [*folder.iterdir()] == [folder / tracker]:
        remove_if_possible(folder / tracker)  # it names the iteration that was there
        _remove_empty(folder)
    return True


def _remove_empty(folder: Path) -> None:
    for below in (*sorted(folder.rglob("*"), reverse=True), folder):
        if below.is_dir() and not below.is_symlink() and not any(below.iterdir()):
            below.rmdir()
