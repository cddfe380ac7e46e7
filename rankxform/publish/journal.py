"""What one process has written and synced: lines that it appends to a file of its own.

Each process syncs its part files, and then appends which slices they hold; after a sync that failed
it appends nothing more, because a later sync may succeed without the lost bytes. Each line carries
a digest of itself: if one is damaged, it and all later ones are dropped. No process reads another
one's journal while it works; process 0 of the next run merges them (`publish.records`).
Fingerprints in journals are partial sums over slices, so that the manifest of a continued run is
complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import TYPE_CHECKING

from rankxform.engine.checksum import MODULUS, IntegrityChecker
from rankxform.engine.pipeline import Traffic, WorkInputs, execute
from rankxform.engine.sinks import OutputFile, file_sinks, files_made_alike, part_descriptors
from rankxform.errors import RankxformError, StorageError
from rankxform.planning.budget import MemoryBudget
from rankxform.planning.catalog import IdsByCell
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.transfers import Transfer
from rankxform.storage.posix import (
    create,
    fsync,
    open_for_writing,
    preallocate,
    sync,
    truncate,
    write_from,
)
from rankxform.transport.team import OnProgress

from .files import stat_file
from .folder_records import FOLDER_NAME
from .lock import boot_id
from .records import FolderState, PartFile, format_moved, format_start

if TYPE_CHECKING:
    from rankxform.engine.coverage import Coverage

# State is on the device and never in a signal's handler: what a journal says is synced before it is
# said, and after a sync that failed nothing more is. Each line carries a digest of itself; from a
# damaged one on, all are dropped. To continue is to subtract what journals prove.

_ENTRY = 256 << 10
"""Room for the entry that is written when the device is full."""

JOURNAL_SECONDS = 5.0
"""Between two entries of a journal: what is lost at most when a run is killed, beside the tensors
that are being moved."""
_ENTRY_SECONDS, _MOST_TIMES = 0.05, 6.0
"""An entry may take a hundredth of that time; where it takes longer, entries are rarer, down to so
many times the seconds between two."""


class Journal:
    """What one process has written: an entry every few seconds.

    durable: whether what it says is synced. parts: the part files that this process created, by
    file. seconds: what syncing took. sums:
    fingerprints of all that it says is moved, by file.
    """

    def __init__(
        self,
        state: FolderState,
        process: int,
        owned: Mapping[int, tuple[Path, str]],
        durable: bool,
        spare: int = 0,
    ) -> None:
        """Begin a journal.

        `owned` are, by file, the part files that this process created, and digests of their
        layouts; `spare`, in bytes, is what it may take of the device beyond them.
        """
        self._spare = spare
        self._path = state.folder / FOLDER_NAME / f"journal-{state.token}-{process}.jsonl"
        self.durable, self._last, self._pause = durable, monotonic(), JOURNAL_SECONDS
        self.seconds = 0.0
        self.sums: dict[int, int] = {}
        self._fresh: dict[tuple[int, ...], list[str]] = {}
        self._fresh_sums: dict[int, int] = {}
        self._failed = False
        self._files_of_targets: dict[IdsByCell, tuple[int, ...]] = {}
        create(self._path)
        self._end = 0
        self.parts = {
            file: PartFile(path.stat().st_ino, layout) for file, (path, layout) in owned.items()
        }
        self._append(format_start(self.parts, durable, boot_id(), ()))
        if durable:
            sync(self._path.parent)

    def moved(self, name: str, targets: IdsByCell) -> None:
        """Take note that the slices of `name` in the files of `targets` are put."""
        if targets not in self._files_of_targets:
            files = (file for cell_files in targets.values() for file in cell_files)
            self._files_of_targets[targets] = tuple(sorted(files))
        self._fresh.setdefault(self._files_of_targets[targets], []).append(name)

    def take_room(self, nbytes: int) -> None:
        """Take room, behind what is written, for what is held back when the device is full.

        A reader drops the zeros there, as it does a line that was cut off.
        """
        room = self._end + _ENTRY + nbytes
        if nbytes and room <= self._spare:
            preallocate(self._path, room)

    def give_room(self) -> None:
        """Give room back, but for a last entry."""
        with suppress(StorageError):
            truncate(self._path, self._end + _ENTRY)

    def close(self) -> None:
        """Let the journal end where it does."""
        with suppress(StorageError):
            truncate(self._path, self._end)

    @property
    def due(self) -> bool:
        return bool(self._fresh) and monotonic() - self._last >= self._pause

    def commit(
        self, parts: Mapping[int, Path], sums: Mapping[int, int], on_progress: OnProgress
    ) -> None:
        """Sync `parts`, which hold all that was moved, and write down what that is.

        parts: by file. sums: fingerprints of what was moved since the last time, by file. A commit
        that `on_progress` interrupts can be repeated. A failed sync cannot: after an error the
        kernel treats pages that it could not write as clean, and the next sync succeeds; so nothing
        more is recorded.
        """
        for file, value in sums.items():
            self._fresh_sums[file] = (self._fresh_sums.get(file, 0) + value) % MODULUS
        if self._failed:
            return
        began = monotonic()
        try:
            if self.durable:
                for part in parts.values():
                    sync(part)
                    on_progress(0)
            if self._fresh:
                sizes = {file: stat_file(part)["size"] for file, part in parts.items()}
                moved_names = list(self._fresh.items())
                self._append(format_moved(moved_names, self._fresh_sums, sizes))
        except StorageError:
            self._failed = True
            raise
        for file, value in self._fresh_sums.items():
            self.sums[file] = (self.sums.get(file, 0) + value) % MODULUS
        self._fresh, self._fresh_sums = {}, {}
        self._last = monotonic()
        seconds = self._last - began
        self._pause = JOURNAL_SECONDS * min(max(1.0, seconds / _ENTRY_SECONDS), _MOST_TIMES)
        self.seconds += seconds

    def _append(self, line: bytes) -> None:
        with open_for_writing(self._path) as fd:
            write_from(fd, self._path, self._end, memoryview(line))
            if self.durable:
                fsync(fd, self._path)
        self._end += len(line)


def write_parts(
    work: WorkPlan,
    inputs: WorkInputs,
    outputs: Mapping[int, OutputFile],
    on_progress: OnProgress,
    journal: Journal | None = None,
    checker: IntegrityChecker | None = None,
    coverage: Coverage | None = None,
) -> Traffic:
    """Carry out `work`; write into the existing part files of `outputs`, by destination file.

    What is complete is noted in the `journal`, also when the work ends early; on a device that is
    full what is in buffers by then takes the room that the journal held. With one that is durable
    the device writes while the work goes on.
    """
    parts, made_alike = part_descriptors(), files_made_alike(outputs, work.transfers)
    is_durable = journal is not None and journal.durable
    is_announced = bool(inputs.sources.ahead)
    budget = MemoryBudget.of(work.memory, exchanges=work.exchanges, is_announced=is_announced)
    room = budget.file_buffer(len(outputs))
    file_writers = file_sinks(outputs, made_alike, parts, room, is_durable)
    sinks = coverage.over(file_writers) if coverage else file_writers
    if journal:
        journal.take_room(room * len(sinks))

    def commit(on_progress: OnProgress = on_progress) -> None:
        for sink in sinks.values():
            sink.finish()
        if journal:
            sums = checker.take() if checker else {}
            journal.commit(
                {file: output.part for file, output in outputs.items()}, sums, on_progress
            )

    def complete(transfer: Transfer) -> None:
        if journal and transfer.targets:
            journal.moved(transfer.parameter.name, transfer.targets)
            if journal.due:
                commit()

    try:
        traffic = execute(work, inputs, sinks, on_progress, checker, complete)
        commit()
        if coverage:
            coverage.check()
        traffic.seconds["fsync"] = journal.seconds if journal else 0.0
        return traffic
    except RankxformError:
        with suppress(StorageError):
            if journal:
                journal.give_room()
            commit(lambda nbytes: None)
        raise
    finally:
        if journal:
            journal.close()
        parts.close()
