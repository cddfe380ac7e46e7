"""A destination in object storage: what is being made there, how far it came, and that it is done.

::

    DST/rankxform.json              the manifest: appears last; its files are done then
    DST/.rankxform/lock             who works here (`publish.object_lock`)
    DST/.rankxform/job.json         what is being made, of what, and the uploads of its files

Files are uploads in parts until all are whole, and then get their keys, one after another. What was
sent the store itself knows, by upload; each upload has the job's token with it, so that a file that
got its key is known as this job's. Process 0 keeps the records.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.errors import FormatError, StorageError
from rankxform.layout.names import first_texts
from rankxform.statements import require
from rankxform.storage.objects.places import ObjectMeta
from rankxform.storage.objects.writing import WritablePrefix
from rankxform.storage.posix import random_hex
from rankxform.storage.store import FOLDER, Listing
from rankxform.values import NamedTuple, decode_json

from .files import copied, digest_of
from .folder_records import (
    JOB_NAME,
    MANIFEST_NAME,
    decide_earlier,
    keeping_fingerprints,
    with_recorded_sources,
)
from .object_lock import ObjectLock
from .records import JOB, MANIFEST, check_record, format_document

JOB_KEY = f".rankxform/{JOB_NAME}"
TOKEN_NOTE = "rankxform"
"""What an object's note is called that says which job made it."""


class BegunUpload(NamedTuple):
    """An upload of a file: its id, and a digest of the file's layout."""

    upload: str
    layout: str


class ObjectState(NamedTuple):
    """What was found at an address; every process gets it."""

    token: str
    seed: int  # of fingerprints
    part_bytes: int | None  # of the smallest parts; None: nothing was begun
    complete_files: frozenset[int]
    uploads: Mapping[int, BegunUpload]  # of files that are not complete
    resumed: bool  # whether a stopped run is continued
    etags: Mapping[int, str]  # of objects that have the keys of files
    is_exclusive: bool  # whether the store keeps other runs away


class ObjectRecords:
    """A destination, as process 0 holds it during a run."""

    state: ObjectState
    begun: bool
    """Whether there is something to continue."""
    resumed: bool
    """Whether this run continues another."""

    def __init__(
        self,
        prefix: WritablePrefix,
        identity: Mapping[str, Any],
        names: Mapping[int, str],
        *,
        form: str,
        overwrite: bool,
        locks: bool = True,
    ) -> None:
        """Take the address and find out what is to be done there.

        identity: what is made of what. names: of files, by id. locks: whether other runs are kept
        away. Raises StorageError where another run is at work, or objects would be lost.
        """
        self._prefix, self._names, self._form = prefix, names, form
        self._identity = dict(identity)
        self._files: dict[str, dict[str, Any]] = {}
        self._companions: dict[str, str] = {}
        self._stale: set[str] = set()  # names of objects that go when this run's get their keys
        self._digests: Mapping[int, str] = MappingProxyType({})
        self._publishes = False  # whether files may have got their keys
        self._manifest: Mapping[str, Any] | None = None  # of the same conversion
        self._lock = ObjectLock(prefix) if locks else None
        try:
            self._open(overwrite)
        except BaseException:
            if self._lock is not None:
                self._lock.release()
            raise

    def _open(self, overwrite: bool) -> None:
        manifest, job = (
            _record(self._prefix, MANIFEST, MANIFEST_NAME),
            _record(self._prefix, JOB, JOB_KEY),
        )
        present = self._prefix.objects()
        earlier = decide_earlier(
            job, manifest, self._identity, overwrite=overwrite, folder=self._prefix.address
        )
        if earlier.refusal is not None:
            require([earlier.refusal])
        self.begun, self.resumed = job is not None, earlier.job is not None
        records = [*filter(None, (manifest, job))]
        if not records and not overwrite:
            self._refuse_foreign(present)
        self._identity = with_recorded_sources(self._identity, earlier)
        self._is_proved = self._identity["options"].get("verify") and earlier.is_proved(overwrite)
        token = str((earlier.job or {}).get("token") or random_hex(8))
        for record in records:
            if record is not earlier.manifest and record is not earlier.job:
                self._stale |= {*_made_by(self._prefix, record, present)}
                self._stale |= {*record.get("companions", {})} & {*present}
        if earlier.discarded is not None:
            self._abandon(earlier.discarded["files"])
        self._stale |= {*job.get("replaces", ())} & {*present} if job else set()
        if self._lock is not None:
            self._look_for_uploads(job)
        self._manifest = earlier.manifest
        complete = self._complete_files(earlier.manifest, token, present, overwrite)
        job_files = earlier.job["files"] if earlier.job else {}
        self._files = {
            name: {**job_files.get(name, {}), "id": file}
            for file, name in self._names.items()
            if file not in complete
        }
        self._digests = {
            file: job_files[self._names[file]]["digest"]
            for file in complete
            if "digest" in job_files.get(self._names[file], {})
        }
        self._files |= {n: f for n, f in job_files.items() if n not in self._names.values()}
        uploads = {
            file: BegunUpload(entry["upload"], entry.get("layout", ""))
            for file, name in self._names.items()
            if "upload" in (entry := self._files.get(name, {}))
        }
        seed = (earlier.job or earlier.manifest or {"seed": int(random_hex(8), 16) >> 1})["seed"]
        part_bytes = earlier.job.get("part bytes") if earlier.job else None
        is_exclusive = self._lock is None or self._lock.is_exclusive
        self.state = ObjectState(
            token, seed, part_bytes, complete, uploads, self.resumed,
            {f: present[n].etag or "" for f, n in self._names.items() if n in present},
            is_exclusive,
        )  # fmt: skip
        self.begun |= bool(self._files)
        if self._files:
            self._write_job()

    def _refuse_foreign(self, present: Mapping[str, ObjectMeta]) -> None:
        """Refuse a place where somebody else's checkpoint lies, of which readers would take files.

        Raises StorageError.
        """
        form = FORMS[self._form]
        tops = dict.fromkeys(name.partition("/")[0] for name in present)
        folders = frozenset(name.partition("/")[0] for name in present if "/" in name)
        listing = Listing(self._prefix.address, FOLDER, (*present,), (*tops,), folders)
        names = [*self._names.values()]
        foreign = [*form.foreign_files(listing, names), *({*names} & {*present})]
        foreign += {*form.companion_names(names)} & {*present}
        if foreign:
            raise StorageError(
                f"holds checkpoint files that rankxform did not write ({first_texts(foreign, 1)})",
                "name an address where nothing is",
                "say --overwrite to write beside them",
                where=self._prefix.address,
            )

    def _look_for_uploads(self, job: Mapping[str, Any] | None) -> None:
        """Refuse keys to which something else uploads; abandon what this job began and did not
        note. Raises StorageError."""
        noted = {entry.get("upload") for entry in job["files"].values()} if job else set()
        for name, upload in _uploads_to(self._prefix, self._names.values()):
            if job is not None and upload not in noted:
                self._prefix.uploads.abort(self._prefix.key(name), upload)
            elif job is None:
                raise StorageError(
                    "an upload to it was begun, which this run does not know",
                    f"abort it, if nothing works there: its id is {upload}",
                    "--no-lock, if it may go on beside this run",
                    where=f"{self._prefix.address}/{name}",
                )

    def _complete_files(
        self,
        manifest: Mapping[str, Any] | None,
        token: str,
        present: Mapping[str, ObjectMeta],
        overwrite: bool,
    ) -> frozenset[int]:
        """Return the files that are complete. Raises StorageError for one that is another's."""
        complete, listed = set[int](), manifest["files"] if manifest else {}
        for file, name in self._names.items():
            if name not in present:
                continue
            meta, entry = present[name], listed.get(name, {})
            version = meta.version
            is_listed = (entry.get("size"), entry.get("modified")) == version[:2]
            if (is_listed and not overwrite) or (
                self.resumed and name not in listed and token_of(self._prefix, name) == token
            ):
                complete.add(file)
            elif not overwrite and name not in self._stale:
                text = "was changed after it was written" if entry else "is already there"
                raise StorageError(
                    text,
                    "remove it",
                    "choose another address",
                    "say --overwrite",
                    where=f"{self._prefix.address}/{name}",
                )
        return frozenset(complete)

    def _abandon(self, files: Mapping[str, Mapping[str, Any]]) -> None:
        """Let the store forget the uploads of some files."""
        for name, entry in files.items():
            if "upload" in entry:
                self._prefix.uploads.abort(self._prefix.key(name), entry["upload"])

    # -- while the work goes on -----------------------------------------------------------------

    def note_uploads(self, uploads: Mapping[int, BegunUpload], part_bytes: int) -> bool:
        """Take note of the uploads of all files that are made; return whether the store keeps what
        is noted with an object."""
        for file, (upload, layout) in uploads.items():
            entry = self._files[self._names[file]]
            if entry.get("upload") not in (None, upload):
                self._abandon({self._names[file]: entry})
            entry.update(upload=upload, layout=layout)
        if not uploads:
            return True
        self.state = self.state._replace(part_bytes=part_bytes)
        self._write_job()
        return token_of(self._prefix, JOB_KEY) == self.state.token

    def _write_job(self) -> None:
        content = {
            "form": self._form,
            "identity": self._identity,
            "seed": self.state.seed,
            "token": self.state.token,
            "part bytes": self.state.part_bytes,
            "files": self._files,
            "companions": self._companions,
            "replaces": sorted(self._stale),
            "proved": self._is_proved,
        }
        notes = {TOKEN_NOTE: self.state.token}
        self._prefix.put(JOB_KEY, format_document(JOB, content), notes)

    def begin_publishing(self, digests: Mapping[int, str]) -> None:
        """Make way for files that are whole, and are about to get their keys.

        digests: their fingerprints. Raises StorageError if another run has taken the address.
        """
        if self._lock is not None:
            self._lock.check()
        self._digests = {**self._digests, **digests}
        for file, digest in digests.items():
            self._files[self._names[file]]["digest"] = digest
        self._publishes = True
        if digests or self._stale:  # for a run that goes on, if this one is stopped now
            self._write_job()
        replaced = {*self._names.values()} & {*self._files}
        old = _record(self._prefix, MANIFEST, MANIFEST_NAME)
        readers_names = {*self._stale} - {*self._names.values()}
        if old is not None and replaced:
            companions = FORMS[old.get("form", DEFAULT_FORM)].companion_names([*old["files"]])
            kept = {n: f for n, f in old["files"].items() if n not in replaced}
            if not kept or self._manifest is None:
                self._prefix.remove([MANIFEST_NAME])
            elif kept != old["files"]:
                self._prefix.put(MANIFEST_NAME, format_document(MANIFEST, {**old, "files": kept}))
            self._prefix.remove(companions)  # nothing leads to files that go next
        self._prefix.remove(sorted(readers_names))

    def finish(
        self,
        contents: Mapping[str, Any],
        published: Mapping[int, Mapping[str, Any]],
        complete: Collection[str],
        make_companions: Callable[[], Mapping[str, Iterable[bytes]]],
    ) -> None:
        """Write the manifest: the files of this run are done. `contents` is recorded as it is.

        published: facts of all its files. What `make_companions` returns is written before it, if
        the files with `complete` names are all there.
        """
        old = self._manifest or {}
        files = dict(old.get("files", {}))
        for file, entry in published.items():
            name = self._names[file]
            earlier = files.get(name, {})
            is_same = earlier.get("modified") == entry["modified"]
            files[name] = {**(earlier if is_same else {}), "id": file, **entry}
            if file in self._digests:
                files[name]["digest"] = self._digests[file]
        if files.keys() >= {*complete}:
            for name, chunks in make_companions().items():
                data = b"".join(chunks)
                self._prefix.put(name, data)
                self._companions[name] = digest_of(data)
        command = self._identity.pop("continued_by", None)
        content = {
            "form": self._form,
            "command": command or [],
            "identity": self._identity,
            "seed": self.state.seed,
            "files": files,
            "companions": self._companions,
            **contents,
        }
        if not self._is_proved:
            content.pop("proof", None)
        if "stages" in contents:
            content["stages"] = {**old.get("stages", {}), **contents["stages"]}
        for key in ("stages", "parts", "stage size", "stage count", "undeclared"):
            if key in old and key not in content:
                content[key] = old[key]
        data = format_document(MANIFEST, keeping_fingerprints(content))
        self._prefix.put(MANIFEST_NAME, data)
        published_names = {self._names[file] for file in published}
        self._files = {n: f for n, f in self._files.items() if n not in published_names}
        self._publishes = False
        if self._lock is not None:  # whose answers were lost when they were begun
            for name, upload in _uploads_to(self._prefix, published_names):
                self._prefix.uploads.abort(self._prefix.key(name), upload)
        self.close(keep=False)

    def close(self, keep: bool) -> None:
        """Release the address; with `keep`, what is needed to continue stays."""
        try:
            if not self._publishes and not (keep and self.begun):
                own_names = {*self._names.values()}
                self._abandon({n: f for n, f in self._files.items() if n in own_names})
                self._files = {n: f for n, f in self._files.items() if n not in own_names}
                if self._files:
                    self._write_job()
                else:
                    self._prefix.remove([JOB_KEY])
        finally:
            if self._lock is not None:
                self._lock.release()


def clean(prefix: WritablePrefix) -> list[str]:
    """Remove what stopped runs left at an address; return what that was, in words.

    What a manifest lists stays, and uploads to keys that no record has. Raises StorageError where
    a run is at work.
    """
    lock = ObjectLock(prefix)
    try:
        return _clean(prefix)
    finally:
        lock.release()


def _clean(prefix: WritablePrefix) -> list[str]:
    """Do as `clean` does, under the lock."""
    removed = list[str]()
    job, manifest = _record(prefix, JOB, JOB_KEY), _record(prefix, MANIFEST, MANIFEST_NAME)
    listed = manifest["files"] if manifest else {}
    names = {*listed, *(job["files"] if job else {})}
    for name, upload in _uploads_to(prefix, names):
        prefix.uploads.abort(prefix.key(name), upload)
        removed.append(f"{name}: an upload that was not completed was abandoned")
    if job is not None:
        own_names = {*_made_by(prefix, job, prefix.objects())}
        prefix.remove(own_names.difference(listed))
        prefix.remove([JOB_KEY])
        removed.append(f"{prefix.address}: the job of a stopped run was removed")
    return removed


def remove_conversion(prefix: WritablePrefix) -> bool:
    """Remove the objects of a conversion that its records list; return whether there was one.

    Raises StorageError where a run is at work.
    """
    lock = ObjectLock(prefix)
    try:
        is_begun = bool(_clean(prefix))
        manifest = _record(prefix, MANIFEST, MANIFEST_NAME)
        if manifest is None:
            return is_begun
        names = {*_made_by(prefix, manifest, prefix.objects()), *manifest["companions"]}
        prefix.remove(sorted({*names, *copied(prefix.address, manifest)}))
        prefix.remove([MANIFEST_NAME])
        return True
    finally:
        lock.release()


def _record(prefix: WritablePrefix, kind: str, name: str) -> dict[str, Any] | None:
    data = prefix.read(name)
    try:
        return None if data is None else check_record(kind, decode_json(data))
    except FormatError as error:
        tries = error.tries or ("choose another address", "remove this object")
        problem = f"{error.what}; cannot tell what lies here"
        raise StorageError(problem, *tries, where=f"{prefix.address}/{name}") from error


def _uploads_to(prefix: WritablePrefix, names: Iterable[str]) -> list[tuple[str, str]]:
    """Return the names of those files to which uploads were begun, and the ids of these."""
    names_by_key = {prefix.key(name): name for name in names}
    below = prefix.key("x").removesuffix("x")
    begun = prefix.uploads.begun(below) if names_by_key else ()
    return [(names_by_key[key], upload) for key, upload in begun if key in names_by_key]


def _made_by(
    prefix: WritablePrefix, record: Mapping[str, Any], present: Mapping[str, ObjectMeta]
) -> Iterator[str]:
    """Yield the names of files that a record speaks of, and nobody has changed since."""
    token = record.get("token")
    for name, entry in record["files"].items():
        if name in present:
            is_listed = (entry.get("size"), entry.get("modified")) == present[name].version[:2]
            if is_listed or (token and token_of(prefix, name) == token):
                yield name


def token_of(prefix: WritablePrefix, name: str) -> str | None:
    """Return the token of the job that made an object, if one did."""
    head = prefix.uploads.head(prefix.key(name))
    return head.notes.get(TOKEN_NOTE) if head is not None else None
