"""A destination folder's own records: who works there, how far it came, and that it is done.

::

    DST/rankxform.json              the manifest: appears last here; its files are done then
    DST/<index and the like>        a form's companion files, which appear just before it
    DST/.rankxform/lock             who works here
    DST/.rankxform/job.json         what is being made, of what
    DST/.rankxform/journal-*.jsonl  what each process has written and synced

Process 0 opens and closes a target; the others write their journals. A mark, such as the tracker
outside the folder that leads readers to it, is set after the manifest.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import filterfalse
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.engine.sinks import part_of
from rankxform.errors import (
    CheckpointError,
    FormatError,
    Message,
    StorageError,
    raising_storage_errors,
)
from rankxform.statements import FILE_IDENTITY, PLAN, UNFIT, Finding, require
from rankxform.storage.posix import (
    AnyPath,
    claim_folders,
    free_bytes,
    random_hex,
    read_bytes,
    read_own_record,
    remove_if_possible,
    sync,
    write_atomically,
)
from rankxform.storage.store import address_of, store_at
from rankxform.values import NamedTuple, decode_json

from .files import (
    FileStat,
    check_index_is_own,
    check_no_foreign_files,
    check_own,
    check_places,
    copied,
    is_noted_part_file,
    is_unchanged,
    matches_entry,
    remove_all,
    remove_mark,
    set_mark,
    stat_or_none,
    status_of_name,
    write_companion,
)
from .lock import FolderLock, boot_id, is_held, is_of_lock
from .options import SUMS
from .records import (
    JOB,
    MANIFEST,
    CompletedSlices,
    FolderState,
    check_record,
    format_document,
    format_moved,
    format_start,
    identity_differences,
    merge_journals,
)

MANIFEST_NAME = "rankxform.json"
FOLDER_NAME = ".rankxform"
JOB_NAME = "job.json"
_RANKS = "--ranks"


class FolderRecords:
    """A destination folder, as process 0 holds it during a run.

    The job lists the files that are being made, by all runs since the manifest was written. Just
    before files get their final names their inodes are noted; a file is complete if the manifest
    or such a note lists it, and any other file with a final name is refused.
    """

    state: FolderState
    begun: bool
    """Whether there is something to continue: part files, or files of a stopped run."""
    resumed: bool
    """Whether this run continues another."""

    def __init__(
        self,
        folder: Path,
        identity: Mapping[str, Any],
        output_paths: Mapping[int, Path],
        *,
        form: str = DEFAULT_FORM,
        mark: tuple[Path, bytes] | None = None,
        overwrite: bool,
        durable: bool,
    ) -> None:
        """Take the folder and find out what is to be done there.

        `identity` says what is made of what; `output_paths` are the files by id. `mark` is a file
        outside the folder, with its content, that says to readers that the folder is complete.
        Raises StorageError where another run is at work, or files would be lost.
        """
        self._folder, self._own, self._durable = folder, folder / FOLDER_NAME, durable
        self._form, self._mark = form, mark
        self._companions: dict[str, str] = {}
        self._copied: dict[str, str] = {}  # small files of a model that are a run's own -> digests
        self._stale_files: dict[str, Any] = {}
        self._finals = output_paths
        self._identity = dict(identity)
        self._files: dict[str, dict[str, Any]] = {}
        self._made = [path for path in (folder, *folder.parents) if not path.exists()]
        claim_folders(folder, [self._own, *(final.parent for final in output_paths.values())])
        self._lock = FolderLock(self._own / "lock")
        try:
            claim_folders(folder, [self._own], keeps_root=True)
            self._open(overwrite)
        except BaseException:
            self._let_go()
            raise

    # -- opening ----------------------------------------------------------------------------

    def _open(self, overwrite: bool) -> None:
        """Decide by the records what becomes of earlier work, then by the files what is left."""
        manifest, job = self._read(MANIFEST), self._read(JOB)
        earlier = decide_earlier(
            job, manifest, self._identity, overwrite=overwrite, folder=str(self._folder)
        )
        if earlier.refusal is not None:
            require([earlier.refusal])
        self.begun, self.resumed = job is not None, earlier.job is not None
        self._copied, self._stale_files = dict(earlier.copied), dict(earlier.stale)
        if earlier.discarded is not None:
            self._discard(earlier.discarded)
        self._identity = with_recorded_sources(self._identity, earlier)
        self._is_proved = self._identity["options"].get("verify") and earlier.is_proved(overwrite)
        names = {file: self._name(final) for file, final in self._finals.items()}
        mark = None if self._mark is None else self._mark[0]
        check_places(self._folder, self._form, list(names.values()), mark)
        job_files = dict(earlier.job["files"]) if earlier.job else {}
        companions = {
            name: digest
            for record in filter(None, (earlier.manifest, earlier.job))
            for name, digest in record.get("companions", {}).items()
        }
        self._own_sums = {n: d for n, d in companions.items() if n in SUMS.values()}
        if not overwrite:
            check_index_is_own(self._folder, self._form, list(names.values()), companions)
        ours = {*(manifest or {}).get("files", {}), *job_files, *self._stale_files}
        recorded_files = {self._folder / name for name in (*ours, *companions)}
        check_no_foreign_files(self._folder, self._form, self._finals.values(), recorded_files)
        self._files = job_files
        listed = earlier.manifest["files"] if earlier.manifest and not overwrite else {}
        complete_files = frozenset(
            r for r, f in self._finals.items() if self._is_kept(f, listed, overwrite)
        )
        self._files, dropped_names = files_to_make(names, self._files, complete_files)
        for name in dropped_names:
            remove_if_possible(part_of(self._folder / name))
        seed = (earlier.job or earlier.manifest or {"seed": int(random_hex(8), 16) >> 1})["seed"]
        self.state = FolderState(
            self._folder, random_hex(4), seed, complete_files, CompletedSlices(), self.resumed
        )
        self._write_job()
        completed = self._completed().limited_to(r for r in self._finals if r not in complete_files)
        self.state = replace(self.state, completed=completed)

    def _is_kept(self, final: Path, listed: Mapping[str, Any], overwrite: bool) -> bool:
        """Tell whether a file is complete. Raises StorageError if it may not be replaced."""
        name, file_stat = self._name(final), stat_or_none(final)
        if file_stat is None:
            return False
        file_entry = self._files.get(name)
        if file_entry is not None and matches_entry(
            file_entry, file_stat, "inode", "size", "modified"
        ):
            if file_entry["boot"] not in ("", boot_id()):
                return False  # it was not synced, and the machine was started anew
            if self._durable:
                sync(final.parent)  # a run may have ended between its name and this
            return True
        if name in listed and is_unchanged(final, listed[name], file_stat):
            return True
        if overwrite:
            return False
        raise StorageError.of_parts(refused_file(final, is_ours=name in listed))

    def _read(self, kind: str) -> dict[str, Any] | None:
        path = self._folder / MANIFEST_NAME if kind == MANIFEST else self._own / JOB_NAME
        if status_of_name(path) is None:
            return None
        try:
            record = check_record(kind, decode_json(_read_record(path)))
            claim_folders(self._folder, [(self._folder / n).parent for n in record["files"]])
            return record
        except FormatError as error:
            tries = error.tries or ("choose another folder", "remove this file")
            problem = f"{error.what}; cannot tell what this folder contains"
            raise StorageError(problem, *tries, where=path) from error

    def require_own(self, name: str) -> None:
        """Refuse a document of digests that another program wrote. Raises StorageError."""
        check_own(self._folder / name, self._own_sums.get(name))

    def _discard(self, job: Mapping[str, Any]) -> None:
        """Remove what a stopped run left that is not to be continued, but files with names."""
        for name in job["files"]:
            remove_if_possible(part_of(self._folder / name))
        names = FORMS[job.get("form", DEFAULT_FORM)].companion_names(list(job["files"]))
        for name in {*names, *SUMS.values()}.intersection(job.get("companions", {})):
            remove_if_possible(self._folder / name)
        for path in self._journals():
            remove_if_possible(path)

    def _journals(self) -> list[Path]:
        return sorted(self._own.glob("journal-*.jsonl"))

    def _completed(self) -> CompletedSlices:
        """Return what is on the device, and write it down in place of all journals.

        A part file is continued if it is the one that a journal speaks of, not shorter than it was,
        and no file shares its bytes.
        """
        old = self._journals()
        completed = merge_journals({path.name: _read_record(path) for path in old}, boot_id())
        parts_by_file = {f["id"]: part_of(self._folder / n) for n, f in self._files.items()}
        completed = completed.limited_to(
            file
            for file, part in parts_by_file.items()
            if file in completed.names_of_file
            and is_noted_part_file(part, completed.parts.get(file), completed.sizes.get(file, 0))
        )
        if old:
            self._consolidate(completed, old)
        return completed

    def _consolidate(self, completed: CompletedSlices, old: Sequence[Path]) -> None:
        """Write down what is on the device in place of `old` journals."""
        moved_names = [((file,), sorted(names)) for file, names in completed.names_of_file.items()]
        first = format_start(
            completed.parts, completed.durable, boot_id(), [path.name for path in old]
        )
        moved_line = format_moved(moved_names, completed.sums, completed.sizes)
        fresh = self._own / f"journal-{random_hex(4)}.jsonl"
        write_atomically(fresh, first + moved_line, durable=self._durable)
        for path in old:
            remove_if_possible(path)

    def _name(self, final: Path) -> str:
        return str(final.relative_to(self._folder))

    # -- while the work goes on -------------------------------------------------------------

    def make_room(self, sizes: Mapping[Path, int], continued_files: Iterable[int]) -> int:
        """Return how many bytes are free beyond `sizes`, of part files; all but `continued_files`
        start over.

        Raises StorageError where they will not fit.
        """
        present_bytes = sum(
            status.st_blocks * 512 for part in sizes if (status := status_of_name(part))
        )
        free, needed_bytes = free_bytes(self._folder), sum(sizes.values()) - present_bytes
        if needed_bytes > free:
            more_text = "more " if present_bytes else ""
            details = f"{present_bytes / 1e6:,.1f} MB are there already"
            raise StorageError(
                f"{needed_bytes / 1e6:,.1f} MB {more_text}are to be written, {free / 1e6:,.1f} MB "
                "are free",
                "make room",
                "choose another folder",
                where=self._folder,
                details=details if present_bytes else "",
            )
        self.begun = True
        # Before any part file is created: a new one may get the inode of an old one that the
        # journals list.
        completed = self.state.completed.limited_to(continued_files)
        if completed.names_of_file.keys() != self.state.completed.names_of_file.keys():
            self.state = replace(self.state, completed=completed)
            self._consolidate(completed, self._journals())
        return free - needed_bytes

    def complete(
        self,
        stats_by_path: Mapping[Path, FileStat],
        digests: Mapping[Path, str],
        stale: Collection[str] = (),
        copies: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Record the facts of the complete part files, which are about to get final names.

        Files that these replace are removed from the manifest, and `stale`, small files that go
        with their tensors. `copies` are those that are about to be written, with their digests.
        Raises StorageError if another run has taken the folder.
        """
        self._lock.check()
        self._copied |= copies
        boot = "" if self._durable else boot_id()
        for final, file_stat in stats_by_path.items():
            file_entry = self._files[self._name(final)]
            file_entry.update(file_stat, boot=boot)
            if final in digests:
                file_entry["digest"] = digests[final]
        self._write_job()
        if self._durable:  # the job's own folder, which a power loss may take from what follows
            sync(self._folder)
            for folder in self._folder.parents:  # this run, or a killed one, may have made them
                with suppress(StorageError):  # not all can be read
                    sync(folder)
        if stats_by_path:
            if self._mark is not None and remove_mark(*self._mark) and self._durable:
                sync(self._mark[0].parent)  # nothing that it leads to is removed before
            remove_all(self._folder, self._form, map(self._name, stats_by_path))
            for name in self._own_sums:  # of files that are replaced
                remove_if_possible(self._folder / name)
            self._own_sums = {}
        old = self._read(MANIFEST)
        if old is not None:
            replaced_names = {self._name(final) for final in stats_by_path}
            remaining_files = {n: f for n, f in old["files"].items() if n not in replaced_names}
            if identity_differences(old["identity"], self._identity):
                self._stale_files.update(remaining_files)
                self._write_job()
                remove_all(self._folder, old.get("form", DEFAULT_FORM), old["files"])
                for name in stale:
                    remove_if_possible(self._folder / name)
                remove_if_possible(self._folder / MANIFEST_NAME)
            elif not remaining_files:
                remove_if_possible(self._folder / MANIFEST_NAME)
            elif remaining_files != old["files"]:
                self._write_manifest({**old, "files": remaining_files})
        if self._durable:  # no reader may find the index of files that are gone
            sync(self._folder)
        # What other conversions made here, and nobody has changed since: their ranks beyond this
        # one's would be taken for ranks of it.
        for name, file_entry in self._stale_files.items():
            path = self._folder / name
            if name not in self._files and matches_entry(
                file_entry, stat_or_none(path), "size", "modified"
            ):
                remove_if_possible(path)
                with suppress(OSError):
                    path.parent.rmdir()

    def _write_job(self) -> None:
        content = {
            "form": self._form,
            "identity": self._identity,
            "seed": self.state.seed,
            "files": self._files,
            "companions": self._companions,
            "stale": self._stale_files,
            "beside": self._copied,
            "copied": [*self._copied],
            "proved": self._is_proved,
        }
        write_atomically(self._own / JOB_NAME, format_document(JOB, content), durable=self._durable)

    def _write_manifest(self, content: Mapping[str, Any]) -> None:
        data = format_document(MANIFEST, content)
        write_atomically(self._folder / MANIFEST_NAME, data, durable=self._durable)

    # -- closing ----------------------------------------------------------------------------

    def finish(
        self,
        contents: Mapping[str, Any],
        complete: Collection[str] = (),
        make_companions: Callable[[], Mapping[str, Iterable[bytes]]] = dict,
        published: Mapping[Path, FileStat] = MappingProxyType({}),
        make_sums: Callable[[Collection[str]], Mapping[str, Iterable[bytes]]] | None = None,
    ) -> list[str]:
        """Write the manifest: the files of this run are done. `contents` is recorded as it is.

        Returns the names of files that the document of digests does not list: other runs' that
        are gone, or were changed since.

        published: facts of files as those have them who wrote them, perhaps on other nodes.

        What `make_companions` returns is written before it, by name, if the files with `complete`
        names are all there. make_sums: returns the document of digests of some files, if any is
        to be written.
        """
        own_names = set(map(self._name, self._finals.values()))
        old_manifest = self._read(MANIFEST) or {}
        files = dict(old_manifest.get("files", {}))
        finished_names = []
        for name, file_entry in self._files.items():
            path = self._folder / name
            file_stat = published.get(path) or stat_or_none(path)
            if name in own_names or matches_entry(
                file_entry, file_stat, "inode", "size", "modified"
            ):
                keys = ("id", "size", "sample", "digest")
                now = {
                    key: (file_stat or file_entry)[key] for key in ("inode", "modified", "changed")
                }
                files[name] = {**{key: file_entry[key] for key in keys if key in file_entry}, **now}
                finished_names.append(name)
        if files.keys() >= set(complete):
            self._add_companions(make_companions())
        changed_names = list[str]()
        if make_sums is not None:
            others = {name: files[name] for name in files if name not in finished_names}
            for name, entry in others.items():
                file_stat = stat_or_none(self._folder / name)
                if file_stat is None or not is_unchanged(self._folder / name, entry, file_stat):
                    changed_names.append(name)
            listed_names = [name for name in files if name not in changed_names]
            self._add_companions(make_sums([*listed_names, *self._companions]))
        elif self._own_sums:
            self._keep_sums(old_manifest, contents)
        command = self._identity.pop("continued_by", None)  # it is done
        content = {
            "form": self._form,
            "command": command or [],  # by which it can be made again
            "identity": self._identity,
            "seed": self.state.seed,
            "files": files,
            "companions": self._companions,
            **contents,
        }
        if not self._is_proved:
            content.pop("proof", None)
        if "copied" in contents:  # what an earlier run copied is still its own
            content["copied"] = sorted({*self._copied, *contents["copied"]})
        if "stages" in contents:
            content["stages"] = {**old_manifest.get("stages", {}), **contents["stages"]}
        self._write_manifest(keeping_fingerprints(content))
        # Not before it.
        self._files = {n: f for n, f in self._files.items() if n not in finished_names}
        if self._mark is not None and self._companions:
            set_mark(*self._mark, durable=self._durable)
        self.close(keep=False)
        return changed_names

    def _add_companions(self, contents: Mapping[str, Iterable[bytes]]) -> None:
        """Write companion files; the job knows them first, so that a stopped run is continued."""
        self._companions |= dict.fromkeys(contents, "")
        if contents:
            self._write_job()
        for name, data in contents.items():
            path = self._folder / name
            self._companions[name] = write_companion(path, data, durable=self._durable)

    def _keep_sums(self, old: Mapping[str, Any], contents: Mapping[str, Any]) -> None:
        """Keep an earlier run's document of digests, if all that it lists is as it was."""
        was = {n: d for n, d in old.get("companions", {}).items() if n not in self._own_sums}
        is_same = not contents.get("copied") and was == self._companions
        for name, digest in self._own_sums.items():
            if is_same and digest and (self._folder / name).is_file():
                self._companions[name] = digest
            else:
                remove_if_possible(self._folder / name)

    def close(self, keep: bool) -> None:
        """Release the folder; with `keep`, what is needed to continue stays.

        Without `keep`, what this run began is removed; other runs' unfinished files stay.
        """
        if not (keep and self.begun):
            for name in set(map(self._name, self._finals.values())) & set(self._files):
                if "inode" not in self._files[name]:
                    remove_if_possible(part_of(self._folder / name))
                    del self._files[name]
            if self._files:
                self._write_job()
            else:
                with suppress(FileNotFoundError):  # somebody has removed it
                    for path in filterfalse(is_of_lock, self._own.iterdir()):
                        remove_if_possible(path)
        self._let_go()

    def _let_go(self) -> None:
        self._lock.release()
        with suppress(OSError):
            for folder in self._made:
                folder.rmdir()  # where nothing came of it


# -- what records say; pure ------------------------------------------------------------------------


class EarlierWork(NamedTuple):
    """What earlier runs noted in a folder, and what becomes of it."""

    job: Mapping[str, Any] | None  # of the run that is continued
    manifest: Mapping[str, Any] | None  # whose files may stay
    discarded: Mapping[str, Any] | None = None  # the job of a run whose work is removed
    # Files that they gave names, to be removed when others take their place.
    stale: Mapping[str, Any] = MappingProxyType({})
    copied: Mapping[str, str] = MappingProxyType({})  # a model's small files -> digests
    refusal: Finding | None = None  # why nothing may be done here

    def is_proved(self, overwrite: bool) -> bool:
        """Return whether the plan of each run whose work is kept was proved."""
        kept_records = filter(None, (self.job, None if overwrite else self.manifest))
        return all(record.get("proved") or "proof" in record for record in kept_records)


def decide_earlier(
    job: Mapping[str, Any] | None,
    manifest: Mapping[str, Any] | None,
    identity: Mapping[str, Any],
    *,
    overwrite: bool,
    folder: str,
) -> EarlierWork:
    """Decide what becomes of the work of a stopped run, `job`, and of a complete one, `manifest`.

    What is of the same conversion, by `identity`, is continued or kept. Other work is removed if
    `overwrite` says so, or a job shows that this was decided before; else it is refused.
    """
    copied = {
        name: record["beside"][name]
        for record in filter(None, (manifest, job))
        for name in record.get("copied", ())
        if name in record.get("beside", {})
    }
    stale = dict(job.get("stale", {})) if job else {}
    discarded = None
    if job and identity_differences(job["identity"], identity, is_begun=True):
        if not overwrite:
            refusal = _refusal_of(job, identity, folder, is_begun=True)
            return EarlierWork(job, manifest, refusal=refusal)
        stale |= {name: entry for name, entry in job["files"].items() if "inode" in entry}
        job, discarded = None, job
    if manifest is not None and identity_differences(manifest["identity"], identity):
        if not overwrite and job is None:
            refusal = _refusal_of(manifest, identity, folder, is_begun=False)
            return EarlierWork(job, manifest, refusal=refusal)
        manifest = None
    return EarlierWork(job, manifest, discarded, stale, copied)


def _refusal_of(
    record: Mapping[str, Any], identity: Mapping[str, Any], folder: str, *, is_begun: bool
) -> Finding:
    """Return that a folder holds the work of another conversion."""
    owner_text = "a run that was stopped" if is_begun else "an earlier run"
    changed = identity_differences(record["identity"], identity, is_begun=is_begun)
    more_text = f", and {len(changed) - 3} things more" if len(changed) > 3 else ""
    message = Message(
        f"holds the work of {owner_text} with other inputs or options: "
        f"{'; '.join(changed[:3])}{more_text}",
        ("name another folder", "say --overwrite to begin anew", "run with what it was begun with"),
        folder,
    )
    other_changes = identity_differences(record["identity"], {**identity, "source files": {}})
    is_of_files = is_begun and not other_changes
    fault = FILE_IDENTITY if is_of_files else UNFIT
    return Finding(message, id=fault, error=StorageError, need=PLAN)


def with_recorded_sources(identity: Mapping[str, Any], earlier: EarlierWork) -> dict[str, Any]:
    """Return an identity with what earlier runs noted of source files that they needed, and not
    this one; without the command that continues it, where no one command finishes all of it."""
    new = dict(identity)
    for record in filter(None, (earlier.job, earlier.manifest)):
        new["source files"] = {**record["identity"]["source files"], **new["source files"]}
    if earlier.job and _ranks_of(earlier.job["identity"]) != _ranks_of(new):
        new["continued_by"] = []
    return new


def files_to_make(
    names: Mapping[int, str], job_files: Mapping[str, dict[str, Any]], complete: Collection[int]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """Return what a job notes of its files, and of which files it drops the part that was begun.

    names: of this run's files. A file that is complete by the manifest is not the job's any more.
    """
    files, dropped_names = dict(job_files), list[str]()
    for file, name in names.items():
        if file not in complete:
            files[name] = {"id": file}
        elif "inode" not in files.get(name, {"inode": 0}):  # the manifest's, after all
            dropped_names.append(name)
            del files[name]
    return files, dropped_names


# -- records of a folder that this process does not hold ------------------------------------------


def _read_record(path: Path) -> bytes:
    with raising_storage_errors(path, "read, as a file of its own"):
        return read_own_record(path)


def read_manifest(place: AnyPath) -> dict[str, Any]:
    """Return a place's manifest. Raises StorageError where there is none that can be read."""
    store = store_at(str(place))
    if not store.has(MANIFEST_NAME):
        raise StorageError("is not there", where=address_of(str(place), MANIFEST_NAME))
    try:
        return check_record(MANIFEST, decode_json(store.read(MANIFEST_NAME)))
    except FormatError as error:
        tries = error.tries or ("compare with the source instead (verify SRC DST)",)
        path = address_of(str(place), MANIFEST_NAME)
        raise StorageError.of_parts(error.at(path)._replace(tries=tries)) from error


def recorded_names(folder: Path) -> set[str]:
    """Return the names of all files that a folder's records list, which runs may remove there."""
    names = set[str]()
    for kind, path in ((MANIFEST, folder / MANIFEST_NAME), (JOB, folder / FOLDER_NAME / JOB_NAME)):
        with suppress(FormatError, OSError):
            record = check_record(kind, decode_json(read_own_record(path)))
            beside = {name for name in record.get("companions", {}) if Path(name).name == name}
            names |= {*record["files"], *record["stale"], *beside}
    return names


def copied_files(place: AnyPath) -> frozenset[str]:
    """Return the small files of a model that runs have copied to a place, and nobody changed."""
    names, store = frozenset[str](), store_at(str(place))
    for kind, name in ((MANIFEST, MANIFEST_NAME), (JOB, f"{FOLDER_NAME}/{JOB_NAME}")):
        with suppress(FormatError, StorageError, CheckpointError):
            names |= copied(place, check_record(kind, decode_json(store.read(name))))
    return names


def _ranks_of(identity: Mapping[str, Any]) -> str:
    """Return which ranks the command that a job states makes; "": all, or that of a run without."""
    words = words_of(identity.get("continued_by"))
    return words[words.index(_RANKS) + 1] if _RANKS in words[:-1] else ""


def with_fingerprints(
    place: AnyPath, old: Mapping[str, Any], digests: Mapping[str, str], contents: Mapping[str, Any]
) -> bytes:
    """Return a place's manifest with fingerprints of files, by name, and `contents` that it lacks.

    The caller has the lock. Raises StorageError where the manifest is not `old` any more.
    """
    path = address_of(str(place), MANIFEST_NAME)
    if read_manifest(place) != old:
        raise StorageError("was changed meanwhile; nothing is kept", "run it again", where=path)
    new = {**contents, **old}
    new["files"] = {
        name: {**entry, "digest": digests[name]} if name in digests else entry
        for name, entry in old["files"].items()
    }
    return format_document(MANIFEST, keeping_fingerprints(new))


def keeping_fingerprints(content: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a manifest by which files are made with fingerprints again, if all of them have one,
    whatever they were made with."""
    identity, command = content["identity"], words_of(content.get("command"))
    if not all("digest" in entry for entry in content["files"].values()):
        return content
    option = ["--verify"] if command and "--verify" not in command else []
    options = {**identity["options"], "verify": True}
    return {**content, "identity": {**identity, "options": options}, "command": [*command, *option]}


class BegunJob(NamedTuple):
    """A conversion that was begun in a folder, and is at work or was stopped."""

    command: Sequence[str] = ()  # words of the command that continues it; (): it is not known
    is_at_work: bool = False  # whether a live run has the folder
    names: frozenset[str] = frozenset()  # of the files that are made
    complete_names: frozenset[str] = frozenset()  # of those that have their names
    part_bytes: int = 0  # that others take on the device
    part_slices: int = 0  # that journals note in them, and a run that continues it keeps


def begun_job(folder: Path) -> BegunJob:
    """Return what was begun in a folder. Raises StorageError for a job that cannot be read."""
    path = folder / FOLDER_NAME / JOB_NAME
    try:
        job = check_record(JOB, decode_json(read_bytes(path)))
    except FormatError as error:
        raise StorageError.of_parts(error.at(path)) from error
    complete_names = frozenset(
        name
        for name, file_entry in job["files"].items()
        if matches_entry(file_entry, stat_or_none(folder / name), "inode", "size", "modified")
    )
    parts = (status_of_name(part_of(folder / name)) for name in job["files"])
    part_bytes = sum(status.st_blocks * 512 for status in parts if status)
    command = words_of(job["identity"].get("continued_by"))
    journals = (folder / FOLDER_NAME).glob("journal-*.jsonl")
    slices = merge_journals({path.name: _read_record(path) for path in journals}, boot_id())
    return BegunJob(
        command,
        is_held(folder / FOLDER_NAME / "lock"),
        frozenset(job["files"]),
        complete_names,
        part_bytes,
        sum(map(len, slices.names_of_file.values())),
    )


def refused_file(path: Path, *, is_ours: bool) -> Message:
    """Return why a file is not replaced: this destination's was changed, or it is another's."""
    text = "was changed after it was written" if is_ours else "is already there"
    return Message(text, ("remove it", "choose another folder", "say --overwrite"), str(path))


def words_of(command: object) -> list[str]:
    """Return a command that a document states; [] if it is no list of texts."""
    is_command = isinstance(command, list) and all(isinstance(word, str) for word in command)
    return command if is_command else []  # type: ignore[return-value]
