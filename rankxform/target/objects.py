"""The destination that is an address of object storage: each file an upload in parts.

1. **Nothing has a key before all is whole.** Each file is one upload, to which several processes
   send parts (`planning.upload_parts`); no reader finds it. When every process has sent its own,
   the uploads are completed, and the manifest is written last.
2. **An object is ours only if the manifest lists it, or it has the job's token.** Any other is
   somebody else's, and is refused.
3. **To continue is to ask the store.** It knows which parts it has. What they lack is shared out
   anew, among however many processes; where parts begin does not depend on them.
4. After a failure of storage or a stop, uploads and the job stay; `rankxform clean` abandons them.

Every process reaches the store by itself, but for those of nodes that cannot: others write for
them. Collective, in this order: `claim` (process 0 takes the address; all ask for parts that are
there), `begin` (uploads are begun, and noted), `fill` (local work), `publish` (uploads are
completed; process 0 writes companions and the manifest).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain
from pathlib import Path
from posixpath import splitext
from typing import Any

from rankxform.checkpoints.base import FORMS
from rankxform.engine.checksum import MODULUS, IntegrityChecker
from rankxform.engine.pipeline import Traffic, WorkInputs, execute
from rankxform.engine.sinks import FileSink, FileWriter
from rankxform.errors import DifferenceError, RankxformError, StoppedError, StorageError, UsageError
from rankxform.formats.container import container_of, content_bytes
from rankxform.planning.assign import Assignment, Due, Writers, assignment_of, remaining
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.upload_parts import MOST_PARTS, UploadMemory, UploadParts, divide
from rankxform.publish.folder_records import MANIFEST_NAME
from rankxform.publish.object_records import (
    JOB_KEY,
    TOKEN_NOTE,
    BegunUpload,
    ObjectRecords,
    ObjectState,
    clean,
    remove_conversion,
)
from rankxform.source.copies import reach_of_storage
from rankxform.statements import Finding, as_notice
from rankxform.storage.identity import SAMPLE_BYTES, digest_of_samples, sample_starts
from rankxform.storage.objects.multipart import SentPart
from rankxform.storage.objects.part_writer import PartBuffers, PartWriter
from rankxform.storage.objects.places import version_of
from rankxform.storage.objects.summed_writer import SpanSum, SummedWriter
from rankxform.storage.objects.writing import WritablePrefix
from rankxform.storage.store import address_of
from rankxform.storage.user_files import encode_strategy
from rankxform.transport import Team
from rankxform.transport.team import OnProgress, show_nothing

from .destination import Destination, FileLayoutCache, StoredFiles
from .manifest import (
    check_companions,
    conversion_identity,
    label_beside,
    manifest_statements,
    transform_command,
)
from .target import Conversion

_FOLDERS_ALONE = "dst_placement", "writers", "digests"
"""Options that say something of folders."""


class ObjectDestination(Destination):
    """An address of object storage, with uploads in parts and a manifest."""

    state: ObjectState

    def __init__(self) -> None:
        self._records: ObjectRecords | None = None  # process 0's
        self._present: dict[int, Mapping[int, SentPart]] = {}  # by file the parts that were there
        self._sums: Mapping[int, int] = {}  # fingerprints of what this process put, by file
        self._parts: Mapping[int, UploadParts] = {}
        self._writers: Mapping[
            int, SummedWriter
        ] = {}  # of files that this process writes, by --crc
        self._buffers: PartBuffers | None = None

    @property
    def records(self) -> ObjectRecords:
        assert self._records is not None, "process 0 has them"
        return self._records

    # -- before the first byte ------------------------------------------------------------------

    def check_free(self, conversion: Conversion, team: Team) -> Sequence[Finding]:
        request, source, target = conversion.request, conversion.source, conversion.target

        def check() -> None:
            for name in _FOLDERS_ALONE:
                if getattr(request, name) != type(request).__dataclass_fields__[name].default:
                    flag = f"--{name.replace('_', '-')}"
                    text = f"{flag} is for a folder, and DST is an address"
                    raise UsageError(text, f"leave out {flag}", where=target.dst)
            place = f"{target.place}/"
            for path in source.paths.values():
                if path.startswith(place) or place.startswith(f"{source.where.path}/"):
                    text = f"lies in the source {source.where.path}, which is never written to"
                    raise UsageError(text, "choose another destination", where=target.dst)
            if team.rank == 0:
                check_companions(request, target)
                self._check_strategy(conversion)

        team.agree(check)
        self._reach, noticed = reach_of_storage(team, target.place, target.files)
        return [finding for finding in noticed if finding not in source.findings]

    def _check_strategy(self, conversion: Conversion) -> None:
        """Refuse what lies where a derived strategy belongs. Raises StorageError, UsageError."""
        derived, dst = conversion.target.derived, conversion.target.dst or ""
        if derived is None:
            return
        address = label_beside(dst)
        folder, _, name = address.rpartition("/")
        if folder.endswith(":/"):
            text = "is a bucket, beside which its strategy cannot be kept"
            raise UsageError(text, f"{dst.rstrip('/')}/NAME", where=dst)
        present = WritablePrefix(folder).read(name)
        ours = encode_strategy(derived.strategy, Path(name))[Path(name)]
        if present not in (None, ours) and not conversion.request.overwrite:
            raise StorageError(
                "is there already, and another than this destination's strategy",
                "remove it",
                "say --overwrite",
                where=address,
            )

    @contextmanager
    def claim(self, conversion: Conversion, team: Team) -> Iterator[Conversion]:
        """Lock the address, and yield with what is left to be done. Collective.

        After a storage failure or a stop, everything is kept so that it can be continued; after any
        other failure, only what an earlier run had done.
        """
        self.conversion, self._team = conversion, team
        self.request, self.target = conversion.request, conversion.target
        self._prefix = team.agree(lambda: WritablePrefix(self.target.place))
        try:
            self.state = team.bcast(self._take_address)
            self._divide(team)
            self._ask_for_parts(team)
            self._share_out(team)
            yield conversion
        except BaseException as error:
            records = self._records
            keep = isinstance(error, (StorageError, StoppedError))
            keep = keep or not isinstance(error, Exception)
            if records is not None:
                keep = keep or (records.resumed and not isinstance(error, DifferenceError))
                if keep and records.begun and isinstance(error, RankxformError):
                    error.resumable = True
                self._records = None
                self._prefix.hurry()
                with suppress(StorageError):  # that there is one is said already
                    records.close(keep)
            raise
        finally:
            if self._buffers is not None:
                self._buffers.close()
            self._prefix.close()

    def _take_address(self) -> ObjectState:
        target = self.target
        identity = {
            **conversion_identity(self.conversion),
            "continued_by": transform_command(self.conversion, self._team.size),
        }
        names = {file: target.arrangement.names[file] for file in target.files}
        self._records = ObjectRecords(
            self._prefix,
            identity,
            names,
            form=target.form.name,
            overwrite=self.request.overwrite,
            locks=not self.request.no_lock,
        )
        return self._records.state

    @property
    def _files(self) -> list[int]:
        """The files that are made, by all processes."""
        complete = self.state.complete_files
        return [file for file in self.target.files if file not in complete]

    def _divide(self, team: Team) -> None:
        """Find out in which parts the files are sent. Collective; the same on all."""
        planner, request = self.target.planner, self.request
        indexes = self.conversion.source.indexes
        self._layouts = FileLayoutCache(planner, indexes, self.target, request.crc)
        memory = UploadMemory.of(request.buffers, -(-len(self._files) // team.size))
        self.memory = memory._replace(part_bytes=self.state.part_bytes or memory.part_bytes)
        self._parts = team.agree(self._divided_files)
        largest = max((p.size for p in self._parts.values()), default=0) // MOST_PARTS
        largest = max(largest, self.memory.part_bytes)
        largest *= 2 if request.crc else 1  # a file's part with its checksum stays until the end
        self.files_at_once = self.memory._replace(part_bytes=largest).files

    def _divided_files(self) -> dict[int, UploadParts]:
        by_layout, parts = dict[int, UploadParts](), {}
        for file in self._files:
            layout = self._layouts.of(file)  # one for all files with the same
            if id(layout) not in by_layout:
                by_layout[id(layout)] = divide(layout, self.memory.part_bytes)
            parts[file] = by_layout[id(layout)]
        return parts

    def _ask_for_parts(self, team: Team) -> None:
        """Ask the store which parts of begun files it has. Collective.

        Fingerprints and checksums of what was sent are not known any more: with them, files are
        begun anew.
        """

        def ask() -> dict[int, Mapping[int, SentPart] | None]:
            begun = sorted({*self.state.uploads} & {*self._files})
            return {file: self._parts_of(file) for file in self._files_here(begun)}

        for parts_by_file in team.allgather(ask):
            present = {file: parts for file, parts in parts_by_file.items() if parts is not None}
            self._present |= present

    def _parts_of(self, file: int) -> Mapping[int, SentPart] | None:
        """Return the parts that the store has of a begun file; None if it is begun anew."""
        upload, layout = self.state.uploads[file]
        if self.request.verify or self.request.crc or layout != self._layouts.of(file).digest:
            return None
        present = self._prefix.uploads.parts(self._key(file), upload)
        if present is None:
            return None
        nbytes = self._parts[file].nbytes
        return {n: part for n, part in present.items() if part.nbytes == nbytes.get(n)}

    def _share_out(self, team: Team) -> None:
        """Say who sends what of what is left. Collective."""
        planner = self.target.planner
        done = {
            file: self._parts[file].complete_names({n: p.nbytes for n, p in present.items()})
            for file, present in self._present.items()
        }
        self._done = done
        units = {}
        for file, parts in self._parts.items():
            positions = {name: i for i, name in enumerate(planner.layouts_of_file(file))}
            units[file] = [[positions[name] for name in unit.names] for unit in parts.units]

        def assign() -> Assignment:
            self.due = Due(self._files, done, Writers(self._reach))
            assignment = assignment_of(planner, self._files, self.due.writers, done, units)
            return [remaining(planner, ranges, done) for ranges in assignment]

        self.left = team.agree(assign)
        files = [{ranges.file for ranges in of_process} for of_process in self.left]
        self._own_files = [*dict.fromkeys(ranges.file for ranges in self.left[team.rank])]
        counts = Counter(chain.from_iterable(files))
        self._shared_files = {file for file, processes in counts.items() if processes > 1}

    def _files_here(self, files: Iterable[int]) -> list[int]:
        """Return those of `files` of which this process asks and tells the store."""
        return self._reach.partition(files)[self._team.rank]

    def _key(self, file: int) -> str:
        return self._prefix.key(self.target.arrangement.names[file])

    @property
    def stored_before(self) -> StoredFiles:
        planner, nbytes = self.target.planner, 0
        for file, names in self._done.items():
            slices = zip(planner.layouts_of_file(file), planner.slices(file))
            nbytes += sum(content_bytes(p.dtype, s) for name, (p, s) in slices if name in names)
        return StoredFiles(
            kept=len(self.state.complete_files),
            resumed=self.state.resumed,
            continued=sum(map(bool, self._present.values())),
            bytes_before=nbytes,
        )

    def begin(self, team: Team) -> None:
        """Begin the uploads that are not there, and note all. Collective."""
        new_files = [file for file in self._files if file not in self._present]
        notes = {TOKEN_NOTE: self.state.token}

        def begin_uploads() -> dict[int, BegunUpload]:
            return {
                file: BegunUpload(
                    self._prefix.uploads.begin(self._key(file), notes),
                    self._layouts.of(file).digest,
                )
                for file in self._files_here(new_files)
            }

        begun = {f: u for f, u in self.state.uploads.items() if f in self._present}
        for uploads in team.allgather(begin_uploads):
            begun |= uploads
        self._uploads = begun

        self._keeps_notes = team.bcast(
            lambda: self.records.note_uploads(begun, self.memory.part_bytes)
        )

    # -- filled -----------------------------------------------------------------------------------

    def fill(self, work: WorkPlan, inputs: WorkInputs, on_progress: OnProgress) -> Traffic:
        """Carry out this process's work, and send what is full."""
        checker = IntegrityChecker(self.state.seed) if self.request.verify else None
        self._buffers = PartBuffers(self.memory.nbytes, on_progress)
        writers = {file: self._writer_of(file, self._buffers) for file in self._own_files}
        sinks = {file: FileSink(self._layouts.of(file), w) for file, w in writers.items()}
        coverage = None
        if checker:
            from rankxform.engine.coverage import Coverage

            coverage = Coverage.of(self.target.planner, self.left[self._team.rank])
        covered_sinks = coverage.over(sinks) if coverage else sinks
        traffic = execute(work, inputs, covered_sinks, on_progress, checker)
        if coverage:
            coverage.check()
        for file, parts in self._parts.items():
            if not parts.size and file in writers:  # nothing was put, and a part is needed
                self._send(file, 1, memoryview(b""))
        self._buffers.finish()
        self._sums = checker.take() if checker else {}
        return traffic

    def _writer_of(self, file: int, buffers: PartBuffers) -> FileWriter:
        parts, send = self._parts[file], partial(self._send, file)
        if not self.request.crc:
            return PartWriter(parts, buffers, send, self._present.get(file, {}))
        container = container_of(splitext(self.target.arrangement.names[file])[1])
        is_alone = file not in self._shared_files
        writer = SummedWriter(
            self._layouts.of(file), container, parts, buffers, send, is_alone=is_alone
        )
        self._writers = {**self._writers, file: writer}
        return writer

    def _send(self, file: int, number: int, data: memoryview) -> None:
        self._prefix.uploads.send(self._key(file), self._uploads[file].upload, number, data)

    # -- published --------------------------------------------------------------------------------

    def publish(self, team: Team) -> None:
        """Complete the uploads, and write the manifest. Collective."""
        if self.request.crc:
            self._put_checksums(team)
        digests = {}
        if self.request.verify:
            sums = team.allgather(lambda: self._sums)
            totals = {file: sum(of.get(file, 0) for of in sums) % MODULUS for file in self._files}
            digests = {file: f"{total:016x}" for file, total in totals.items()}
        team.bcast(lambda: self._make_way(digests))
        files = self._files_here(self.target.files)
        published = team.allgather(lambda: {file: self._complete(file) for file in files})
        team.bcast(lambda: self._finish({f: e for part in published for f, e in part.items()}))

    def _put_checksums(self, team: Team) -> None:
        """Put the checksums of files to which several processes sent parts. Collective."""
        shared = sorted(self._shared_files & {*self._writers})
        noted = team.allgather(lambda: [(file, self._writers[file].sums) for file in shared])
        sums: dict[int, dict[int, SpanSum]] = {file: {} for file in shared}
        for file, sums_of_process in chain.from_iterable(noted):
            sums.get(file, {}).update(sums_of_process)

        def complete_files(on_progress: OnProgress) -> None:
            if self._buffers is not None:  # whose progress was that of `fill`
                self._buffers.on_progress = on_progress
            for file, sums_of_file in sums.items():
                self._writers[file].complete(sums_of_file)
                self._writers[file].flush()
            if self._buffers is not None:
                self._buffers.finish()

        team.work(complete_files, show_nothing)

    def _make_way(self, digests: Mapping[int, str]) -> None:
        """Remove what leads readers to files that are replaced, on process 0."""
        mark = self.target.arrangement.mark
        if mark is not None and self.state.etags:
            above = WritablePrefix(self.target.dst or "")
            if (above.read(mark[0]) or b"").strip() == mark[1].strip():
                above.remove([mark[0]])
        self.records.begin_publishing(digests)

    def _complete(self, file: int) -> Mapping[str, Any]:
        """Give a file its key, if it has none, and return what the manifest says of it.

        Raises StorageError where the store has not all that was sent.
        """
        uploads, key, where = self._prefix.uploads, self._key(file), self.target.address(file)
        try_again = "the same command again, when nothing else writes there"
        is_new, size = file in self._parts, self._layouts.of(file).size
        before = uploads.head(key)
        if (before.etag if before else "") != self.state.etags.get(file, ""):
            text = "was written by something else while this run was at work"
            raise StorageError(text, "remove it, and the same command again", where=where)
        if is_new:
            parts, upload = self._parts[file], self._uploads[file].upload
            sent = uploads.parts(key, upload) or {}
            nbytes_by_part = {number: part.nbytes for number, part in sent.items()}
            expected = parts.nbytes
            if nbytes_by_part != expected:
                lacking = sum(nbytes_by_part.get(n) != nbytes for n, nbytes in expected.items())
                text = f"the store lacks {lacking} of {len(expected)} parts that were sent"
                raise StorageError(text, try_again, where=where)
            uploads.complete(key, upload, sent)
        head = uploads.head(key)
        token = "" if self._keeps_notes else self.state.token  # of an object that states none
        is_ours = head is not None and head.notes.get(TOKEN_NOTE, token) == self.state.token
        if head is None or head.size != size or (is_new and not is_ours):
            state = "nothing is" if head is None else f"{head.size:,} bytes of another object are"
            text = f"{state} there after {size:,} bytes were sent and completed"
            raise StorageError(text, try_again, where=where)
        starts = sample_starts(size)
        name = self.target.arrangement.names[file]
        samples = self._prefix.read_ranges(name, starts, SAMPLE_BYTES) if size else [b""]
        by_start = dict(zip(starts, samples))
        digest = digest_of_samples(size, lambda start, nbytes: by_start[start])
        version = version_of(size, head.etag, head.written)
        return {**version._asdict(), "etag": head.etag, "sample": digest}

    def _finish(self, published: Mapping[int, Mapping[str, Any]]) -> None:
        """Write companions and the manifest, on process 0."""
        target = self.target
        for name, content in target.companions.items():
            self._prefix.put(name, content)
        if target.derived is not None:
            folder, _, file_name = label_beside(target.dst or "").rpartition("/")
            encoded = encode_strategy(target.derived.strategy, Path(file_name))
            WritablePrefix(folder).put(file_name, encoded[Path(file_name)])
        self.records.finish(
            manifest_statements(self.conversion, [*target.companions], self.proof),
            published,
            target.arrangement.names.values(),
            lambda: target.form.companions(target.planner, target.arrangement, target.training),
        )
        if target.arrangement.mark is not None:
            name, content = target.arrangement.mark
            above = WritablePrefix(target.dst or "")
            mark = above.read(name) or b""
            if not mark.strip().isdigit() or int(mark) <= int(content):
                above.put(name, content)

    def remove_unfinished(self, dst: str) -> Sequence[str]:
        prefix = WritablePrefix(dst)
        below = [name.removesuffix(JOB_KEY) for name in prefix.objects() if name.endswith(JOB_KEY)]
        texts = list[str]()
        for place in dict.fromkeys((*(address_of(dst, name) for name in below if name), dst)):
            prefix = WritablePrefix(place)
            try:
                texts += clean(prefix)
            finally:
                prefix.close()
        return texts

    def remove_conversion(self, place: str) -> bool:
        prefixes, ends = [WritablePrefix(place)], (f"/{MANIFEST_NAME}", f"/{JOB_KEY}")
        below = {n.removesuffix(e) for n in prefixes[0].objects() for e in ends if n.endswith(e)}
        prefixes += [WritablePrefix(address_of(place, name)) for name in sorted(below)]
        try:
            removed = [remove_conversion(prefix) for prefix in prefixes]
            left, trackers = [*prefixes[0].objects()], {form.tracker for form in FORMS.values()}
            if len(left) == 1 and {*left} <= trackers:  # it names the iteration that was there
                prefixes[0].remove(left)
            return any(removed)
        finally:
            for prefix in prefixes:
                prefix.close()

    def change_record(
        self, place: str, name: str, change: Callable[[bytes | None], bytes | None]
    ) -> None:
        WritablePrefix(place).change(name, change)

    def findings(self, team: Team) -> Sequence[Finding]:
        texts = []
        if not self.state.is_exclusive:
            texts.append("this store cannot lock: do not start two runs into one DST")
        if not self._prefix.takes_parts and self._files:
            texts.append("parts were objects meanwhile, so that each byte was sent twice")
        return [as_notice(f"{self.target.place}: {text}") for text in texts]
