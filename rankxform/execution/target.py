"""A destination folder's own records: who works there, how far it came, and that it is done.

::

    DST/rankxform.json              the manifest: appears last, and means that its files are done
    DST/.rankxform/lock             who works here
    DST/.rankxform/job.json         what is being made, of what
    DST/.rankxform/journal-*.jsonl  what each process has written and synced

Process 0 opens and closes a target; the others write their journals.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rankxform.errors import StorageError
from rankxform.formats import records
from rankxform.formats.records import JOB, MANIFEST, Progress, RecordError

from .files import (
    make_folder,
    read_bytes,
    remove,
    write_small,
)
from .lock import Lock, boot_id
from .output import part_of

MANIFEST_NAME = "rankxform.json"
FOLDER_NAME = ".rankxform"


@dataclass(frozen=True)
class State:
    """What was found in a target when it was opened; every process gets it.

    kept: what the manifest says of files that are complete, by rank; of those that were complete
    when a run was stopped, what that run knew. progress: of those that are not. seed: of
    fingerprints.
    """

    folder: Path
    token: str
    seed: int
    kept: Mapping[int, Mapping[str, Any]]
    progress: Progress

    @property
    def resumed(self) -> int:
        """Number of files that an earlier run left unfinished, with something in them."""
        return len(self.progress.done)


class Target:
    """A destination folder, as process 0 holds it during a run."""

    state: State
    begun: bool
    """Whether there is something to continue: part files, or files of a stopped run."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        finals: Mapping[int, Path],
        *,
        overwrite: bool,
        durable: bool,
    ) -> None:
        """Take the folder and find out what is to be done there.

        `identity` says what is made of what; `finals` are the files by destination rank. Raises
        StorageError where another run is at work, or files would be lost.
        """
        self._folder, self._own, self._durable = folder, folder / FOLDER_NAME, durable
        self._identity = identity
        self._claimed: set[str] = set()
        self.begun = False
        make_folder(self._own)
        self._lock = Lock(self._own / "lock")
        try:
            self.state = self._open(identity, finals, overwrite)
        except BaseException:
            self._lock.release()
            if not (self._own / "job.json").exists():
                self._remove_records()
            raise

    # -- opening ----------------------------------------------------------------------------

    def _open(
        self, identity: Mapping[str, Any], finals: Mapping[int, Path], overwrite: bool
    ) -> State:
        manifest, job = self._read(MANIFEST), self._read(JOB)
        self.begun = job is not None
        if job is not None and self._changed(job, overwrite, "a run that was stopped"):
            self._discard(job)
            job = None
        if manifest is not None and self._changed(
            manifest, overwrite or job is not None, "an earlier run"
        ):
            manifest = None
        listed = manifest["files"] if manifest and (job or not overwrite) else {}
        kept, in_the_way = self._sort_out(finals, listed, job, overwrite)
        if job is None:
            job = {"in the way": {}, "files": [], "digests": {}}
            job["seed"] = manifest["seed"] if manifest else secrets.randbits(63)
        self._claimed = {*job["files"], *map(self._name, finals.values())}
        job = {
            "identity": identity,
            "files": sorted(self._claimed),
            "in the way": {**job["in the way"], **in_the_way},
            "seed": job["seed"],
            "digests": job["digests"],
        }
        self._job = job
        self._write_job()
        if not listed:
            remove(self._folder / MANIFEST_NAME)
        progress = self._progress({r: f for r, f in finals.items() if r not in kept})
        return State(self._folder, secrets.token_hex(4), job["seed"], kept, progress)

    def _sort_out(
        self,
        finals: Mapping[int, Path],
        listed: Mapping[str, Any],
        job: Mapping[str, Any] | None,
        overwrite: bool,
    ) -> tuple[dict[int, Mapping[str, Any]], dict[str, dict[str, int]]]:
        """Return which files are complete, and the facts of those that are to be replaced.

        A file is complete if the manifest lists it as it is, or if it has come to be since the
        stopped run began: nothing else gives a file its final name.
        """
        kept: dict[int, Mapping[str, Any]] = {}
        in_the_way: dict[str, dict[str, int]] = {}
        before = job["in the way"] if job else {}
        for rank, final in finals.items():
            name, facts = self._name(final), _facts(final)
            if facts is None or before.get(name) == facts:
                continue
            if name in listed and _known(listed[name]) == facts:
                kept[rank] = listed[name]
            elif job is not None and name in job["files"] and name not in listed:
                kept[rank] = {"rank": rank, **job["digests"].get(name, {})}
            elif overwrite:
                in_the_way[name] = facts
            else:
                what = "was changed after it was written" if name in listed else "is already there"
                raise StorageError(
                    f"{final}: {what}; remove it, choose another folder, or say --overwrite"
                )
        return kept, in_the_way

    def _read(self, kind: str) -> dict[str, Any] | None:
        path = self._folder / MANIFEST_NAME if kind == MANIFEST else self._own / "job.json"
        try:
            return records.parse(kind, path.read_bytes())
        except FileNotFoundError:
            return None
        except RecordError as error:
            raise StorageError(
                f"{path}: {error}; it is not known what this folder holds, choose another or "
                "remove it"
            ) from error

    def _changed(self, record: Mapping[str, Any], allowed: bool, whose: str) -> bool:
        """Tell whether a record is of another conversion. Raises StorageError if not `allowed`."""
        changed = records.differences(record["identity"], self._identity)
        if changed and not allowed:
            more = f", and {len(changed) - 3} things more" if len(changed) > 3 else ""
            raise StorageError(
                f"{self._folder}: holds the work of {whose}, and since then "
                f"{'; '.join(changed[:3])}{more}. Run with what it was begun with, choose another "
                "folder, or say --overwrite to begin anew"
            )
        return bool(changed)

    def _discard(self, job: Mapping[str, Any]) -> None:
        """Remove what a stopped run left that is not to be continued."""
        for name in job["files"]:
            remove(part_of(self._folder / name))
        for path in self._journals():
            remove(path)
        remove(self._own / "job.json")

    def _journals(self) -> list[Path]:
        return sorted(self._own.glob("journal-*.jsonl"))

    def _progress(self, finals: Mapping[int, Path]) -> Progress:
        """Return what is on the device of `finals`, and write it down in place of all journals."""
        old = self._journals()
        found = records.progress({path.name: read_bytes(path) for path in old}, boot_id())
        good = [
            rank
            for rank, final in finals.items()
            if rank in found.done and _inode(part_of(final)) == found.inodes.get(rank)
        ]
        found = found.only(good)
        if old:
            done = [((rank,), sorted(names)) for rank, names in found.done.items()]
            names = [path.name for path in old]
            first = records.started(found.inodes, found.durable, boot_id(), names)
            fresh = self._own / f"journal-{secrets.token_hex(4)}.jsonl"
            write_small(fresh, first + records.moved(done, found.sums), durable=self._durable)
            for path in old:
                remove(path)
        return found

    def _name(self, final: Path) -> str:
        return str(final.relative_to(self._folder))

    # -- while the work goes on -------------------------------------------------------------

    def check_room(self, sizes: Mapping[Path, int]) -> None:
        """Raise StorageError where `sizes`, of part files, will not fit."""
        there = sum(_allocated(part) for part in sizes)
        room = os.statvfs(self._folder)
        free, needed = room.f_bavail * room.f_frsize, sum(sizes.values()) - there
        if needed > free:
            raise StorageError(
                f"{self._folder}: {needed / 1e6:,.1f} MB are to be written, {free / 1e6:,.1f} MB "
                "are free; make room, or choose another folder"
            )
        self.begun = True

    def check(self) -> None:
        """Raise StorageError where another run has taken the folder."""
        self._lock.check()

    def note_digests(self, digests: Mapping[Path, str]) -> None:
        """Write down the fingerprints of files that are about to get their final names."""
        for final, digest in digests.items():
            self._job["digests"][self._name(final)] = {"digest": digest}
        self._write_job()

    def _write_job(self) -> None:
        data = records.document(JOB, self._job)
        write_small(self._own / "job.json", data, durable=self._durable)

    # -- closing ----------------------------------------------------------------------------

    def finish(self, files: Mapping[Path, int], contents: Mapping[str, Any]) -> None:
        """Write the manifest: everything is done.

        `files` are the destination ranks by file; `contents` is recorded as it is.
        """
        known: dict[str, Any] = {}
        with suppress(StorageError):
            known = self._read(MANIFEST) or {}
        described = known.get("files", {})
        for final, rank in files.items():
            name = self._name(final)
            facts = _facts(final) or {}
            if _known(described.get(name, {})) != facts:
                digest = self._job["digests"].get(name, {})
                described[name] = {"rank": rank, **facts, **digest}
        content = {"identity": self._identity, "seed": self.state.seed, "files": described}
        content.update(contents)
        if "stages" in contents:
            content["stages"] = {**known.get("stages", {}), **contents["stages"]}
        data = records.document(MANIFEST, content)
        write_small(self._folder / MANIFEST_NAME, data, durable=self._durable)
        self.close(keep=False)

    def close(self, keep: bool) -> None:
        """Let the folder go; with `keep`, what is needed to continue stays.

        Where no file was begun there is nothing to keep.
        """
        keep &= self.begun
        if not keep:
            for name in self._claimed:
                remove(part_of(self._folder / name))
        self._lock.release()
        if not keep:
            self._remove_records()

    def _remove_records(self) -> None:
        with suppress(OSError):
            shutil.rmtree(self._own)
        with suppress(OSError):
            self._folder.rmdir()  # where it was made for this run and is empty


def _facts(final: Path) -> dict[str, int] | None:
    """Return what tells whether a file is still the same: size and time of modification."""
    try:
        status = final.lstat()
    except OSError:
        return None
    return {"size": status.st_size, "modified": status.st_mtime_ns}


def _known(described: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that a manifest states of a file."""
    return {key: described.get(key) for key in ("size", "modified")}


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except OSError:
        return None


def _allocated(path: Path) -> int:
    try:
        return path.stat().st_blocks * 512
    except OSError:
        return 0


def manifest(folder: Path) -> dict[str, Any]:
    """Return a folder's manifest. Raises StorageError where there is none that can be read."""
    path = folder / MANIFEST_NAME
    try:
        return records.parse(MANIFEST, read_bytes(path))
    except RecordError as error:
        raise StorageError(f"{path}: {error}") from error
