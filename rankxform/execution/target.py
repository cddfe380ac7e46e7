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
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from rankxform.errors import StorageError
from rankxform.formats import records
from rankxform.formats.records import JOB, MANIFEST, Progress, RecordError
from rankxform.planning.moves import Targets

from .files import (
    Tick,
    create,
    fsync,
    make_folder,
    opened_to_write,
    read_bytes,
    remove,
    sync,
    write_from,
    write_small,
)
from .lock import Lock, boot_id
from .output import part_of

MANIFEST_NAME = "rankxform.json"
FOLDER_NAME = ".rankxform"
JOURNAL_SECONDS = 30.0
"""Between two entries of a journal: what is lost at most when a run is killed."""


@dataclass(frozen=True)
class State:
    """What was found in a target when it was opened; every process gets it.

    kept: what the manifest says of files that are complete, by rank, or {} for those that were
    complete when a run was stopped. progress: of those that are not. seed: of fingerprints.
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
            job = {"in the way": {}, "files": []}
            job["seed"] = manifest["seed"] if manifest else secrets.randbits(63)
        self._claimed = {*job["files"], *map(self._name, finals.values())}
        job = {
            "identity": identity,
            "files": sorted(self._claimed),
            "in the way": {**job["in the way"], **in_the_way},
            "seed": job["seed"],
        }
        data = records.document(JOB, job)
        write_small(self._own / "job.json", data, durable=self._durable)
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
    ) -> tuple[dict[int, Mapping[str, Any]], dict[str, list[int]]]:
        """Return which files are complete, and the facts of those that are to be replaced.

        A file is complete if the manifest lists it as it is, or if it has come to be since the
        stopped run began: nothing else gives a file its final name.
        """
        kept: dict[int, Mapping[str, Any]] = {}
        in_the_way: dict[str, list[int]] = {}
        before = job["in the way"] if job else {}
        for rank, final in finals.items():
            name, facts = self._name(final), _facts(final)
            if facts is None or before.get(name) == facts:
                continue
            if name in listed and listed[name]["facts"] == facts:
                kept[rank] = listed[name]
            elif job is not None and name in job["files"] and name not in listed:
                kept[rank] = {}
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

    # -- closing ----------------------------------------------------------------------------

    def finish(self, files: Mapping[Path, Mapping[str, Any]]) -> None:
        """Write the manifest: everything is done. `files` are facts to record of each."""
        described: dict[str, Any] = {}
        with suppress(StorageError):
            described = (self._read(MANIFEST) or {}).get("files", {})
        for final, facts in files.items():
            described[self._name(final)] = {**facts, "facts": _facts(final)}
        content = {"identity": self._identity, "seed": self.state.seed, "files": described}
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


def _facts(final: Path) -> list[int] | None:
    """Return what tells whether a file is still the same: size and time of modification."""
    try:
        status = final.lstat()
    except OSError:
        return None
    return [status.st_size, status.st_mtime_ns]


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


class Journal:
    """What one process has written: an entry every half minute, after what it says is synced."""

    def __init__(
        self, state: State, process: int, owned: Iterable[tuple[int, Path]], durable: bool
    ) -> None:
        """Begin a journal; `owned` are the (rank, part file) that this process created."""
        self._path = state.folder / FOLDER_NAME / f"journal-{state.token}-{process}.jsonl"
        self._durable, self._last = durable, monotonic()
        self._fresh: dict[tuple[int, ...], list[str]] = {}
        self._ranks: dict[int, tuple[int, ...]] = {}
        self._known: list[Targets] = []
        create(self._path)
        self._end = 0
        inodes = {rank: part.stat().st_ino for rank, part in owned}
        self._append(records.started(inodes, durable, boot_id(), ()))
        if durable:
            sync(self._path.parent)

    def moved(self, name: str, targets: Targets) -> None:
        """Take note that the slices of `name` in the files of `targets` are put."""
        ranks = self._ranks.get(id(targets))
        if ranks is None:
            ranks = tuple(sorted(rank for some in targets.values() for rank in some))
            self._ranks[id(targets)] = ranks
            self._known.append(targets)  # so that its id stays its own
        self._fresh.setdefault(ranks, []).append(name)

    @property
    def due(self) -> bool:
        return bool(self._fresh) and monotonic() - self._last >= JOURNAL_SECONDS

    def settle(self, parts: Iterable[Path], tick: Tick = lambda done: None) -> None:
        """Sync `parts`, which hold all that was moved, and write down what that is."""
        if self._durable:
            for part in parts:
                sync(part)
                tick(0)
        if self._fresh:
            self._append(records.moved(list(self._fresh.items()), {}))
            self._fresh = {}
        self._last = monotonic()

    def _append(self, line: bytes) -> None:
        with opened_to_write(self._path) as fd:
            write_from(fd, self._path, self._end, memoryview(line))
            if self._durable:
                fsync(fd, self._path)
        self._end += len(line)
