"""The destination that is a folder: claimed, filled, published.

1. **Nothing has a final name before all is complete.** Files are written as part files. When every
   process has written and synced its own, their inodes, sizes and times are noted in the job; then
   all are renamed, and the manifest is written last. The job is done when the manifest exists in
   the folder with the files (`target.folder`), and no `.rankxform` beside it.
2. **A file with a final name is ours only if the manifest or the job lists it.** Any other is
   somebody else's, and is refused.
3. **To continue is to subtract.** Journals say which slices are on the device. A later run merges
   them, drops what they cannot prove, and shares out the rest among its own processes, however
   many.
4. After a failure of storage or a stop, part files and journals stay. After any other failure what
   this run began is removed; what an earlier run had done stays, unless a fingerprint differs.

Where nodes have folders of their own, each folder has its own lock, job, journals and manifest, and
is written by the processes of its nodes.

Collective, in this order: `claim` (finds which nodes share a folder, locks each on its first
process, gathers what lies there, and shares out the work); `begin` (creates part files); `fill`
(local work); `publish` (gathers the part files' inodes, sizes and times, notes them, renames, reads
back what other nodes wrote, and writes the manifests, process 0's last).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from posixpath import relpath
from typing import TYPE_CHECKING, TypeVar

from rankxform.display.text import format_size
from rankxform.engine.checksum import MODULUS, IntegrityChecker
from rankxform.engine.pipeline import Traffic, WorkInputs
from rankxform.engine.sinks import (
    OutputFile,
    add_checksum,
    files_made_alike,
    part_descriptors,
    part_of,
)
from rankxform.errors import DifferenceError, RankxformError, StoppedError, StorageError, UsageError
from rankxform.formats.container import container_suffixes, content_bytes
from rankxform.layout.names import first_texts
from rankxform.planning.assign import Assignment, Due, assignment_of, remaining
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange, Transfer
from rankxform.process import usable_cores
from rankxform.publish.files import (
    FileStat,
    can_reflink,
    files_to_read_back,
    link,
    matches_entry,
    read_back,
    stat_file,
    stat_or_none,
)
from rankxform.publish.folder_records import (
    FOLDER_NAME,
    JOB_NAME,
    MANIFEST_NAME,
    FolderRecords,
    read_manifest,
    recorded_names,
    refused_file,
)
from rankxform.publish.journal import Journal, write_parts
from rankxform.publish.lock import taking_turns
from rankxform.publish.options import LINK_HARD, LINK_NONE, LINK_REFLINK, SUMS
from rankxform.publish.records import FolderState
from rankxform.request import Request
from rankxform.source.place import listing_at
from rankxform.source.source import Source
from rankxform.statements import PLAN, Finding, as_notice, as_warning, require
from rankxform.storage.identity import inode, inodes_of, is_below_any, is_same_file, sample_digest
from rankxform.storage.posix import (
    claim_folders,
    create,
    make_folder,
    publish_file,
    remove_if_possible,
    sync,
    write_atomically,
)
from rankxform.storage.store import FOLDER, Listing, address_of, storage_of, store_at
from rankxform.transport import Team
from rankxform.transport.team import OnProgress, show_nothing

from .destination import Destination, FileLayoutCache, StoredFiles
from .manifest import (
    check_strategy_file,
    conversion_identity,
    manifest_statements,
    transform_command,
    write_companions_near,
)
from .model_files import check_model_files, new_copies, stale
from .node_folders import NodeFolder, Placement, find_placement
from .target import Conversion, Target

if TYPE_CHECKING:
    from rankxform.engine.helper_thread import HelperThread
    from rankxform.publish.digests import WrittenDigest


def equal_files(
    request: Request, planner: Planner, files: Sequence[int], folders: Iterable[Collection[int]]
) -> dict[int, list[int]]:
    """Return which of `files` are written, each with those that get its bytes by links.

    folders: the files of each folder that a destination consists of; links are within one. That
    its file system can make them is taken for granted.
    """
    if request.link == LINK_NONE:
        return {file: [file] for file in files}
    files_by_folder = [[file for file in files if file in folder] for folder in folders]
    groups_by_folder = map(planner.equal_files, files_by_folder)
    return {first: group for groups in groups_by_folder for first, group in groups.items()}


def plan_output_files(
    target: Target,
    slice_ranges: Sequence[SliceRange],
    groups: Mapping[int, Sequence[int]],
    layouts: FileLayoutCache,
) -> dict[int, OutputFile]:
    """Plan the files of this process's part; `groups` are equal files, by the first."""
    outputs_by_file = {}
    for slice_range in slice_ranges:
        final, *equal_paths = map(target.path, groups[slice_range.file])
        outputs_by_file[slice_range.file] = OutputFile(
            final,
            layouts.of(slice_range.file),
            is_created_here=slice_range.first == 0,
            equal=tuple(equal_paths),
        )
    return outputs_by_file


def _has_idle_core(team: Team) -> bool:
    """Tell whether the cores of this process are two or more for each process that shares them.
    Collective."""
    cores = usable_cores()
    shared = team.nodes.node_of[team.rank], cores[0], len(cores)
    return len(cores) >= 2 * team.allgather(lambda: shared).count(shared)


T = TypeVar("T")


class FolderDestination(Destination):
    """A folder of a file system, with part files, journals and a manifest."""

    conversion: Conversion
    request: Request
    target: Target
    places: Placement  # which nodes have which folder
    root: NodeFolder  # the folder of this process
    folder: FolderRecords | None  # its records; None: this is not its first process
    state: FolderState  # what was found in all folders

    def __init__(self) -> None:
        # Id of the file that is written -> ids of files with equal bytes.
        self.groups: Mapping[int, Sequence[int]] = {}
        self.outputs: Mapping[int, OutputFile] = {}  # destination files of this process
        self._compared_count = 0  # complete files that were compared with their fingerprints
        self._digests: Mapping[Path, str] = {}  # of files in this folder, if they were asked for
        self._written_digests: dict[int, WrittenDigest] = {}  # of files that are written here
        self._undigested: Sequence[str] = ()  # names of other runs' files that have none
        self._bytes_digested = 0  # that this process read back for these
        self._journal: Journal | None = None
        self._is_helped = False  # whether a thread sums beside this process

    @property
    def journal(self) -> Journal:
        assert self._journal is not None, "begin() opens it"
        return self._journal

    @property
    def stored_before(self) -> StoredFiles:
        completed, planner, nbytes = self.state.completed.names_of_file, self.target.planner, 0
        for file, names in completed.items():
            slices = zip(planner.layouts_of_file(file), planner.slices(file))
            nbytes += sum(content_bytes(p.dtype, s) for name, (p, s) in slices if name in names)
        return StoredFiles(
            linked=sum(len(ranks) - 1 for ranks in self.groups.values()),
            kept=len(self.state.complete_files),
            resumed=self.state.resumed,
            continued=len(completed),
            bytes_before=nbytes,
            compared=self._compared_count,
            placement=self.places.describe(),
        )

    @property
    def _files_created_here(self) -> dict[int, OutputFile]:
        """The outputs that this process creates, finishes and publishes."""
        return {file: output for file, output in self.outputs.items() if output.is_created_here}

    def _in_root(self, stats_by_process: Sequence[Mapping[Path, T]]) -> dict[Path, T]:
        """Return what the processes of this folder found, of what all did."""
        root_stats = [stats_by_process[process] for process in self.root.processes]
        return {path: stat for stats_by_path in root_stats for path, stat in stats_by_path.items()}

    # -- before the first byte ------------------------------------------------------------------

    def check_free(self, conversion: Conversion, team: Team) -> Sequence[Finding]:
        """See that writing will harm nothing, on every node; return what lies there. Collective.

        Raises UsageError or StorageError.
        """
        request, source, target = conversion.request, conversion.source, conversion.target

        def check() -> None:
            dst, step_folder = Path(request.dst or ""), target.arrangement.folder
            any_step = re.sub(r"[0-9]+", "[0-9]+", step_folder)
            if step_folder and re.fullmatch(any_step, dst.name):
                text = f"name the folder above it, {dst.parent}"
                raise UsageError("is one iteration's folder", text, where=dst)
            if request.digests is not None:
                from rankxform.publish.digests import new_digest

                new_digest(request.digests)
            if team.nodes.is_leader(team.rank):
                check_apart(request, source, target)

        team.agree(check)
        _check_foreign_files(request, target, team)
        return [as_notice(text) for text in team.bcast(lambda: check_model_files(conversion))]

    @contextmanager
    def claim(self, conversion: Conversion, team: Team) -> Iterator[Conversion]:
        """Lock the folder, and yield with what is left to be done. Collective.

        After a storage failure or a stop, everything is kept so that it can be continued; after any
        other failure, only what an earlier run had done.
        """
        self.conversion = conversion
        self.request = conversion.request
        self.target = conversion.target
        self.places = find_placement(self.request, self.target, team)
        self.root = root = self.places.of(team.rank)
        locked_folders: list[FolderRecords] = []

        def lock() -> FolderState | None:
            if team.rank != root.processes[0]:
                return None
            processes = team.size if team.nodes.count == 1 else 1  # or else hosts belong to it
            locked_folders.append(_lock_folder(conversion, root, processes))
            if self.request.digests is not None and not self.request.overwrite:
                locked_folders[0].require_own(SUMS[self.request.digests])
            return locked_folders[0].state

        try:
            states = team.allgather(lock)
            folder_state = states[root.processes[0]]
            assert folder_state is not None
            self.state = folder_state.with_all(s for s in states if s is not None)
            self.folder = locked_folders[0] if locked_folders else None
            if self.state.complete_files:
                self._compare_complete_files(team)
            self._share_out(team)
            yield conversion
        except BaseException as error:
            keep = isinstance(error, (StorageError, StoppedError))
            keep = keep or not isinstance(error, Exception)
            for locked_folder in locked_folders:
                locked_folder.close(
                    keep or (locked_folder.resumed and not isinstance(error, DifferenceError))
                )
                if keep and locked_folder.begun and isinstance(error, RankxformError):
                    error.resumable = True
            raise
        finally:
            claim_folders(self.target.folder, None)

    def _compare_complete_files(self, team: Team) -> None:
        """Compare files that are complete already with the fingerprints of their manifest: all if
        this run keeps some, else those with another time, of which samples alone were looked at.
        Collective.

        Raises StorageError for one that was changed.
        """
        files, processes = sorted(self.state.complete_files & self.root.files), self.root.processes
        local_files = files[processes.index(team.rank) :: len(processes)]
        by_process = team.allgather_work(
            lambda tick: self._compare_with_manifest(local_files, tick)
        )
        changed = [name for part in by_process for name, is_same in part.items() if not is_same]
        paths = [self.target.folder / name for name in changed]
        require(
            Finding(refused_file(p, is_ours=True), error=StorageError, need=PLAN) for p in paths
        )
        self._compared_count = sum(map(len, by_process))

    def _compare_with_manifest(
        self, files: Iterable[int], on_progress: OnProgress
    ) -> dict[str, bool]:
        """Return by the names of files, if a fingerprint is kept, whether they are as written."""
        from rankxform.source.written import declared_files_of, read_listed_file

        folder = self.target.folder
        if not (folder / MANIFEST_NAME).is_file():  # a run ended before it
            return {}
        record, same_by_name = read_manifest(folder), dict[str, bool]()
        declared_files = declared_files_of(folder, record)
        for name in (str(self.target.path(file).relative_to(folder)) for file in files):
            entry = record["files"].get(name, {})
            is_touched = not matches_entry(entry, stat_or_none(folder / name), "modified")
            if "digest" in entry and (self.request.verify or is_touched):
                read = read_listed_file(folder, name, record, declared_files, on_progress)
                is_same = read.is_as_listed and not read.is_changed
                if read.fingerprint is not None or not is_same:  # or the form's table is missing
                    same_by_name[name] = is_same
        return same_by_name

    def _share_out(self, team: Team) -> None:
        """Say who writes what of what is left. Collective."""
        planner, placement = self.target.planner, self.places
        layouts = FileLayoutCache(
            planner, self.conversion.source.indexes, self.target, self.request.crc
        )
        files = [file for file in self.target.files if file not in self.state.complete_files]
        groups = equal_files(self.request, planner, files, [root.files for root in placement.roots])
        if len(groups) < len(files) and self.request.link == LINK_REFLINK:
            first, folder = team.rank == self.root.processes[0], self.target.folder
            if not all(team.allgather(lambda: not first or can_reflink(folder))):
                groups = {file: [file] for file in files}
        self.groups = groups
        self._keep_same_layouts(layouts, team)
        done = self.state.completed.names_of_file

        def assign() -> tuple[Assignment, Assignment]:
            self.due = Due([*groups], done, placement.writers)
            assignment = assignment_of(planner, self.due.files, placement.writers, done)
            return assignment, [remaining(planner, r, done) for r in assignment]

        assignment, self.left = team.agree(assign)
        self._slices_here, self._rank = self.left[team.rank], team.rank
        local_slices = assignment[team.rank]
        self.outputs = team.agree(
            lambda: plan_output_files(self.target, local_slices, groups, layouts)
        )

    def _keep_same_layouts(self, layouts: FileLayoutCache, team: Team) -> None:
        """Drop part files whose layout has changed, for example because a missing shard is back."""
        parts = self.state.completed.parts
        local_files = sorted(parts)[team.rank :: team.size]
        unchanged_by_process = team.allgather(
            lambda: [r for r in local_files if layouts.of(r).digest == parts[r].layout]
        )
        completed = self.state.completed.limited_to(
            rank for ranks in unchanged_by_process for rank in ranks
        )
        self.state = replace(self.state, completed=completed)

    def begin(self, team: Team) -> None:
        """See that there is room, and create part files and a journal. Collective."""
        first = self.folder is not None
        team.agree(lambda: check_strategy_file(self.request, self.target) if first else None)
        sizes = team.allgather(
            lambda: {o.part: o.layout.size for o in self._files_created_here.values()}
        )
        folder, continued_files = self.folder, self.state.completed.names_of_file
        spare = team.allgather(
            lambda: folder.make_room(self._in_root(sizes), continued_files) if folder else 0
        )
        if self.request.verify or self.request.digests is not None:
            self._is_helped = _has_idle_core(team)
        journal_spare = spare[self.root.processes[0]] // (2 * len(self.root.processes))
        self._journal = team.agree(lambda: self._create_parts(team.rank, journal_spare))

    def _create_parts(self, process: int, spare: int) -> Journal:
        """Create the part files that are not there yet, and a journal of all."""
        folder, outputs = self.target.folder, self.outputs.values()
        parents = {path.parent for output in outputs for path in output.output_paths}
        claim_folders(folder, [folder / FOLDER_NAME, *parents], keeps_root=True)
        for file, output in self._files_created_here.items():
            if file not in self.state.completed.names_of_file:
                make_folder(output.final.parent)
                create(output.part)
        parts = {
            file: (output.part, output.layout.digest)
            for file, output in self._files_created_here.items()
        }
        return Journal(self.state, process, parts, durable=self.request.fsync, spare=spare)

    # -- filled -----------------------------------------------------------------------------------

    def fill(self, work: WorkPlan, inputs: WorkInputs, on_progress: OnProgress) -> Traffic:
        """Carry out this process's work, and note what is complete."""
        checker = coverage = None
        outputs = self.outputs
        with self._helper() as helper:
            if self.request.digests is not None:
                outputs = self._summed_outputs(work.transfers, helper)
            if self.request.verify:
                from rankxform.engine.coverage import Coverage

                checker = IntegrityChecker(self.state.seed, helper)
                coverage = Coverage.of(self.target.planner, self._slices_here)
            return write_parts(work, inputs, outputs, on_progress, self.journal, checker, coverage)

    def _helper(self) -> AbstractContextManager[HelperThread | None]:
        """Return a thread that sums beside this process, if a core is idle."""
        if not self._is_helped:
            return nullcontext()
        from rankxform.engine.helper_thread import helper_thread

        return helper_thread()

    def _summed_outputs(
        self, transfers: Sequence[Transfer], helper: HelperThread | None
    ) -> Mapping[int, OutputFile]:
        """Return what is written here, with digests of what comes in order, one for all files that
        get the same; a checksum that follows later is none of it."""
        from rankxform.publish.digests import WrittenDigest

        outputs = {**self.outputs}
        for files in files_made_alike(outputs, transfers) if not self.request.crc else ():
            created_files = [file for file in files if file in self._files_created_here]
            digest = WrittenDigest(self.request.digests or "")
            self._written_digests |= dict.fromkeys(created_files, digest)
            for file in created_files[:1]:
                add = digest.add if helper is None else partial(digest.add_beside, helper)
                outputs[file] = replace(outputs[file], on_written=add)
        return outputs

    # -- published --------------------------------------------------------------------------------

    def publish(self, team: Team) -> None:
        """Give complete files their names, and write the manifests, process 0's last. Collective.

        Which files are complete is noted before the first is renamed. What a node wrote, another
        one reads back before and after that.
        """
        if self.request.crc:
            team.work(self._add_checksums, show_nothing)
        sums = team.allgather(lambda: self.journal.sums) if self.request.verify else []
        part_stats = self._stats_of_parts(team)
        noted_stats = team.allgather(lambda: self._link(part_stats))
        parts = [{part_of(final): stat for final, stat in p.items()} for p in noted_stats]
        self._read_back(parts, team)
        team.agree(lambda: self._note_complete(self._in_root(noted_stats), sums))
        now = self._stats_of_parts(team)
        published = team.allgather(lambda: self._rename(noted_stats[team.rank], now))
        self._read_back(published, team)
        published_stats = self._in_root(published)
        if self.request.digests is not None:
            self._digests = self._in_root(team.allgather_work(self._sum_files))
        team.agree(lambda: self._finish(published_stats) if team.rank != 0 else None)
        team.bcast(lambda: self._finish(published_stats))

    def _sum_files(self, on_progress: OnProgress) -> dict[Path, str]:
        """Return digests of what this process made, and of its share of what was there before: as
        it was written, if that was in order, otherwise read back."""
        from rankxform.publish.digests import digest_at

        def count(nbytes: int) -> None:
            self._count_digested(nbytes)
            on_progress(nbytes)

        digests, paths = dict[Path, str](), self.target.paths
        for file, output in self._files_created_here.items():
            summed = self._written_digests.get(file)
            digest = summed.of_file(output.layout.size) if summed is not None else None
            if digest is None:
                digest = digest_at(self.request.digests or "", output.final, count)
            digests |= dict.fromkeys(output.output_paths, digest)
        number = self.root.processes.index(self._rank)
        kept_files = sorted(self.state.complete_files & {*self.root.files})
        for file in kept_files[number :: len(self.root.processes)]:
            digests[paths[file]] = digest_at(self.request.digests or "", paths[file], count)
        return digests

    def _count_digested(self, nbytes: int) -> None:
        self._bytes_digested += nbytes

    def _digests_of(
        self, copied_names: Iterable[str], names: Iterable[str]
    ) -> Mapping[str, Iterable[bytes]]:
        """Return the document of the digests of all files that a manifest lists; those of other
        runs are read here."""
        from rankxform.publish.digests import digest_at, format_sums

        kind, place = self.request.digests or "", self.target.folder
        digests = {str(path.relative_to(place)): d for path, d in self._digests.items()}
        for name in (*names, *copied_names):
            if name not in digests:
                digests[name] = digest_at(kind, place / name, self._count_digested)
        return {SUMS[kind]: [format_sums(kind, digests)]}

    def _read_back(self, written: Sequence[Mapping[Path, FileStat]], team: Team) -> None:
        """See that other nodes have what each process has written. Collective.

        Content is compared where its sample is known.
        """
        written_elsewhere = files_to_read_back(
            written, self.root.processes, team.rank, self.places.nodes
        )

        def read() -> None:
            for path, file_stat, writer in written_elsewhere:
                read_back(path, file_stat, writer)

        team.agree(read)

    def _add_checksums(self, on_progress: OnProgress) -> None:
        """Add what needs the complete file, once every process has written its slices."""
        parts = part_descriptors()
        try:
            for output in self._files_created_here.values():
                add_checksum(output, self.target.container, parts, on_progress)
                if self.request.fsync:
                    sync(output.part)
        finally:
            parts.close()

    def _stats_of_parts(self, team: Team) -> dict[int, FileStat]:
        """Return size and time of the part files, as the last to write has them. Collective.

        In bytes and nanoseconds; a file that no process sees is left out.

        On a network file system a node may not know yet what another has written to the same file:
        it sees it shorter, and older.
        """

        def stat_parts() -> dict[int, FileStat]:
            stats_by_file = {f: stat_or_none(o.part) for f, o in self.outputs.items()}
            return {file: stat for file, stat in stats_by_file.items() if stat is not None}

        part_stats: dict[int, FileStat] = {}
        for local_stats in team.allgather(stat_parts):
            for file, file_stat in local_stats.items():
                part_stat = part_stats.setdefault(file, {"size": 0, "modified": 0})
                part_stat.update((key, max(part_stat[key], file_stat[key])) for key in part_stat)
        return part_stats

    def _part_stat(self, output: OutputFile, final: Path, part_stat: FileStat) -> FileStat:
        """Return the facts of `final`'s part file; `part_stat` are those of the output's own."""
        is_same_inode = final == output.final or self.request.link == LINK_HARD
        return {**stat_file(part_of(final)), **(part_stat if is_same_inode else {})}

    def _link(self, part_stats: Mapping[int, FileStat]) -> dict[Path, FileStat]:
        """Make part files for equal files too; return what is known of each complete part file.

        Raises StorageError where a part file is not the one that was made, or not of its size.
        """
        request, stats_by_path = self.request, {}
        for file, output in self._files_created_here.items():
            nbytes = output.layout.size
            part_stat = {
                **stat_file(output.part),
                **part_stats[file],
                "sample": sample_digest(output.part),
            }
            _check_part(output.part, part_stat, self.journal.parts[file].inode, nbytes)
            for equal_part in map(part_of, output.equal):
                link(output.part, equal_part, request.link)
                if request.fsync and request.link == LINK_REFLINK:
                    sync(equal_part)
            for final in output.output_paths:
                final_stat = self._part_stat(output, final, part_stats[file])
                stats_by_path[final] = {**final_stat, "sample": part_stat["sample"]}
                _check_part(part_of(final), final_stat, final_stat["inode"], nbytes)
        return stats_by_path

    def _note_complete(
        self, stats_by_path: Mapping[Path, FileStat], sums: Sequence[Mapping[int, int]]
    ) -> None:
        """Note which files are complete, with the fingerprints of all processes and runs added up.

        On the first process of a folder.
        """
        if self.folder is None:
            return
        all_sums = [self.state.completed.sums, *sums]
        digests = {
            self.target.path(
                file
            ): f"{sum(file_sums.get(first, 0) for file_sums in all_sums) % MODULUS:016x}"
            for first, files in self.groups.items()
            for file in files
            if self.request.verify and file in self.root.files
        }
        copies = new_copies(self.target) if self.target.companions else {}
        self.folder.complete(stats_by_path, digests, stale(self.conversion), copies)

    def _rename(
        self, noted_stats: Mapping[Path, FileStat], part_stats: Mapping[int, FileStat]
    ) -> dict[Path, FileStat]:
        """Give every complete part file its final name, if it still is what was noted.

        Returns the facts of each file under its name, as the node that wrote it has them.
        """
        published, replaced = dict[Path, FileStat](), set[Path]()
        for file, output in self._files_created_here.items():
            for final in output.output_paths:
                part_stat = self._part_stat(output, final, part_stats.get(file, {}))
                noted_stat = noted_stats[final]
                _check_part(part_of(final), part_stat, noted_stat["inode"], noted_stat["size"])
                if stat_or_none(final) is not None:  # what another node may still see
                    replaced.add(final)
                publish_file(part_of(final), final, durable=self.request.fsync)
        # renaming a link changes the times of the others
        for output in self._files_created_here.values():
            for final in output.output_paths:
                sample = noted_stats[final]["sample"] if final in replaced else ""
                published[final] = {**stat_file(final), "sample": sample}
        return published

    def _finish(self, published: Mapping[Path, FileStat]) -> None:
        """Write the folder's manifest, on its first process, of what its processes published.

        A derived strategy comes before it, when the files that it describes have their names.
        """
        if self.folder is None:
            return
        target = self.target
        copied_names = write_companions_near(target)
        has_digests = self.request.digests is not None
        self._undigested = self.folder.finish(
            manifest_statements(self.conversion, copied_names, self.proof),
            target.arrangement.names.values(),
            lambda: target.form.companions(target.planner, target.arrangement, target.training),
            published,
            partial(self._digests_of, copied_names) if has_digests else None,
        )

    def remove_unfinished(self, dst: str) -> Sequence[str]:
        from rankxform.publish.removal import remove_unfinished

        below = [path.parent for path in Path(dst).glob(f"*/{FOLDER_NAME}")]
        places = [Path(dst), *(place for place in below if not place.is_symlink())]
        return [
            f"{place}: part files and journals of a stopped run were removed"
            for place in places
            if remove_unfinished(place)
        ]

    def remove_conversion(self, place: str) -> bool:
        from rankxform.publish.removal import remove_conversion

        return remove_conversion(Path(place))

    def change_record(
        self, place: str, name: str, change: Callable[[bytes | None], bytes | None]
    ) -> None:
        path = Path(place, name)
        try:
            with taking_turns(path.parent / FOLDER_NAME / "lock"):
                content = change(path.read_bytes() if path.is_file() else None)
                if content is None:
                    remove_if_possible(path)
                else:
                    write_atomically(path, content)
        finally:
            claim_folders(path.parent, None)

    def findings(self, team: Team) -> Sequence[Finding]:
        kind = self.request.digests
        foreign = foreign_files(self.target, self.target.paths.values(), team)
        if kind is None:
            return foreign
        nbytes = sum(team.allgather(lambda: self._bytes_digested))
        how = f"{format_size(nbytes)} were read back for it" if nbytes else "summed while written"
        text = f"{SUMS[kind]}: {how}"
        changed_names = [
            name for names in team.allgather(lambda: self._undigested) for name in names
        ]
        changed = as_warning(
            f"{SUMS[kind]} does not list {first_texts(changed_names)}: an earlier run made it, and "
            "it was changed since or is gone; run with all ranks and --overwrite to make it anew"
        )
        return [*foreign, as_notice(text), *([changed] if changed_names else [])]


def _lock_folder(conversion: Conversion, root: NodeFolder, processes: int) -> FolderRecords:
    request, target = conversion.request, conversion.target
    mark = target.arrangement.mark
    return FolderRecords(
        target.folder,
        {
            **conversion_identity(conversion),
            "continued_by": transform_command(conversion, processes),
        },
        {file: final for file, final in target.paths.items() if file in root.files},
        form=target.form.name,
        mark=None if mark is None else (Path(target.dst or "") / mark[0], mark[1]),
        overwrite=request.overwrite,
        durable=request.fsync,
    )


def _check_part(part: Path, part_stat: FileStat, inode: int, nbytes: int) -> None:
    """Raise StorageError for a part file that was changed; it is removed, to be made anew."""
    if (part_stat["inode"], part_stat["size"]) != (inode, nbytes):
        remove_if_possible(part)
        raise StorageError(
            f"something else has changed or replaced it ({part_stat['size']:,} bytes, "
            f"{nbytes:,} were written); it was removed, to be made anew",
            where=part,
        )


# -- what lies in the folder ----------------------------------------------------------------------

# Checkpoint files that rankxform did not write, where it has written nothing yet, mean one of two
# things: SRC and DST were exchanged, or files are to be put beside others. Both are for the user
# to say.


def _check_foreign_files(request: Request, target: Target, team: Team) -> None:
    """Refuse a destination that holds another's checkpoint files, and nothing of rankxform's.

    Raises StorageError. Collective.
    """
    dst = Path(request.dst or "")
    folders = dst, target.folder  # which is one iteration's
    marks = [
        folder / name for folder in folders for name in (MANIFEST_NAME, f"{FOLDER_NAME}/{JOB_NAME}")
    ]
    if request.overwrite or any(team.allgather(lambda: any(mark.exists() for mark in marks))):
        return
    other_paths = _foreign_paths(target, target.paths.values(), team)
    if other_paths:
        raise StorageError(
            f"holds checkpoint files that rankxform did not write ({first_texts(other_paths, 1)})",
            "name an empty folder",
            "move them away"
            if target.form.described or any(path.exists() for path in target.paths.values())
            else "say --overwrite to write beside them",
            "exchange SRC and DST, if they are in another order than meant",
            where=dst,
        )


def check_apart(request: Request, source: Source, target: Target) -> None:
    """Refuse destination files that are, or lie among, source files, whatever their paths.

    Raises UsageError, or StorageError where something else is in the way.
    """
    src, dst = Path(request.src), Path(request.dst or "")
    if dst.exists() and not dst.is_dir():
        raise StorageError("is a file, and DST must be a folder", "name another", where=dst)
    if dst.suffix in container_suffixes() and not dst.is_dir():
        folder_try = f"name a folder: {dst.with_suffix('')}"
        raise UsageError("is named like a file, and DST is a folder", folder_try, where=dst)
    sources = [*map(Path, source.paths.values())]
    files = {number: path for path in sources if (number := inode(path)) is not None}
    folders = {folder for path in sources if (folder := inode(path.parent)) is not None}
    places = [*map(Path, source.where.places if source.where.fallbacks else ())]
    problems = {}
    for place in [*places, *([src] if src.is_dir() else [])]:
        if dst == place or is_below_any(dst, inodes_of(place) | folders):
            problems[dst] = f"lies in the source folder {place}, which is never written to"
    for option in ("lora", "like"):
        option_path = getattr(request, option)
        if option_path is not None and is_below_any(dst, inodes_of(Path(option_path))):
            problems[dst] = f"is the folder of --{option}, which is never written to"
    for final in target.paths.values():
        if inode(final.parent) in folders:
            problems[final] = f"lies in the source folder {src}, which is never written to"
        elif (number := inode(final)) in files:
            source_file = files[number]
            text = f"is the source file {source_file} under another name, which is never replaced"
            problems[final] = text
        if final.is_dir():
            raise StorageError("is a folder, where a checkpoint file is to be written", where=final)
    is_nested = any(is_same_file(path.parent.parent, dst) for path in sources if path.parent != src)
    place = target.folder  # an iteration has one of its own
    recorded_files = recorded_names(place) if place.is_dir() else ()
    if is_nested or any(inode(place / name) in files for name in recorded_files):
        problems.setdefault(dst, "holds the source in its rank folders, which are never written to")
    for path, text in problems.items():
        raise UsageError(text, "choose another destination", where=path)


def foreign_files(target: Target, dst_paths: Iterable[Path | str], team: Team) -> list[Finding]:
    """Return a warning of checkpoint files beside a destination's own, if any. Collective."""
    other_paths = _foreign_paths(target, dst_paths, team)
    warnings = [*map(as_warning, team.bcast(lambda: _later_mark(target)))]
    if other_paths:
        warning = as_warning(
            f"{first_texts(other_paths, 1)}: another checkpoint file lies beside those of this "
            "destination, and may be loaded instead; remove what does not belong there"
        )
        warnings.append(warning._replace(file=other_paths[0]))
    return warnings


def _later_mark(target: Target) -> list[str]:
    """Return, as a warning, that a mark tells readers to take a later checkpoint than this."""
    if target.arrangement.mark is None or target.dst is None:
        return []
    name, content = target.arrangement.mark
    path, number, store = address_of(target.dst, name), int(content), store_at(target.dst)
    text = store.read(name).strip() if store.has(name) else b""
    if not text.isdigit() or int(text) <= number:
        return []
    return [f"{path}: says {int(text)}, and {number} was written: a job takes {int(text)}"]


def _foreign_paths(target: Target, dst_paths: Iterable[Path | str], team: Team) -> list[str]:
    """Return other checkpoint files that may be taken for a destination's own. Collective."""
    form, place = target.form, target.place
    names = [*(relpath(path, place) for path in dst_paths), *target.arrangement.names.values()]

    def find_here() -> list[str]:
        is_shared = storage_of(place).is_shared
        looks = team.rank == 0 if is_shared else team.nodes.is_leader(team.rank)
        listing = listing_at(place, form) if looks else Listing(place)
        if listing.kind != FOLDER:
            return []
        return [address_of(place, name) for name in form.foreign_files(listing, names)]

    paths_by_process = team.allgather(find_here)
    return sorted({path for paths in paths_by_process for path in paths})
