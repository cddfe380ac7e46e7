"""`verify SRC DST --keep-fingerprints`: fingerprints of a destination in which nothing differs.

They are taken of what the source makes, under the seed of the manifest, while the files' bytes are
compared with it; so no byte is read twice. Where nodes have folders of their own, each manifest
gets those of its files, from its first process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from posixpath import relpath
from typing import Any

from rankxform.engine.checksum import MODULUS, IntegrityChecker
from rankxform.errors import FormatError, StorageError, UsageError
from rankxform.publish.folder_records import FOLDER_NAME, MANIFEST_NAME, with_fingerprints
from rankxform.publish.lock import FolderLock, RunLock
from rankxform.publish.records import expected_slices, manifest_contents
from rankxform.storage.identity import sample_at
from rankxform.storage.posix import write_atomically
from rankxform.storage.store import address_of, storage_of
from rankxform.target.existing import ExistingDestination, expected_of_file
from rankxform.target.target import Conversion
from rankxform.transport import Team

from .verify_folder import manifests_of_nodes

_WITHOUT = "leave out --keep-fingerprints"


class FingerprintedDestination(ExistingDestination):
    """A destination with a manifest, which gets fingerprints of its files if nothing differs."""

    @contextmanager
    def claim(self, conversion: Conversion, team: Team) -> Iterator[Conversion]:
        with super().claim(conversion, team) as claimed, ExitStack() as stack:
            self._place, self._planner = claimed.target.place, claimed.planner
            paths, indexes = self.existing.paths, self.existing.indexes
            self._file_of = {relpath(paths[file], self._place): file for file in indexes}
            manifests, groups = manifests_of_nodes(self._place, team)
            group = next((n for n, processes in enumerate(groups) if team.rank in processes), 0)
            self._manifest, processes = manifests[group], groups[group]
            self._leads = team.rank == processes[0]
            first = processes.index(team.rank) if team.rank in processes else len(self._file_of)
            names = [name for name in self._manifest["files"] if name in self._file_of]
            self._local_names = names[first :: len(processes)]
            self.checker = IntegrityChecker(self._manifest["seed"])
            team.agree(lambda: self._prepare(manifests, stack))
            yield claimed

    def _prepare(self, manifests: Sequence[Mapping[str, Any]], stack: ExitStack) -> None:
        """Take the folder where this process writes. Raises UsageError where manifests do not list
        each file once, or one states another file than is compared."""
        path = address_of(self._place, MANIFEST_NAME)
        listed = [name for manifest in manifests for name in manifest["files"]]
        if len(listed) != len({*listed}):
            raise UsageError("several nodes have manifests of the same files", _WITHOUT, where=path)
        if unlisted := sorted(self._file_of.keys() - {*listed}):
            raise UsageError(f"does not list {unlisted[0]}", _WITHOUT, where=path)
        for name in self._local_names:
            boxes = expected_of_file(self._planner, self._file_of[name])
            slices = {n: (self._planner.parameter(n).shape, box) for n, box in boxes.items()}
            try:
                file = self._manifest["files"][name]["id"]
                manifest_slices = expected_slices(self._manifest, file)
            except FormatError as error:
                raise StorageError.of_parts(error.at(path)) from error
            if manifest_slices not in (None, slices):
                raise UsageError(
                    f"states other slices of {name} than the strategies make",
                    "give the strategies and options that DST was made with",
                    _WITHOUT,
                    where=path,
                )
        if self._leads:
            self._write = stack.enter_context(_locked(self._place))

    def publish(self, team: Team) -> None:
        super().publish(team)
        assert self.checker is not None
        sums_by_process = team.allgather(self.checker.take)
        if not self.differences:
            team.agree(self._check_samples)
            team.agree(lambda: self._keep(sums_by_process) if self._leads else None)

    def _check_samples(self) -> None:
        """Raise StorageError for a file that is as SRC makes it, and was not written so."""
        for name in self._local_names:
            path, entry = address_of(self._place, name), self._manifest["files"][name]
            if entry.get("sample") not in (None, sample_at(path)):
                raise StorageError(
                    f"is what SRC makes, and not what was written, by {MANIFEST_NAME}",
                    _WITHOUT,
                    "convert again, with --overwrite --verify",
                    where=path,
                    details="SRC and DST were both changed since, or the manifest was",
                )

    def _keep(self, sums_by_process: Sequence[Mapping[int, int]]) -> None:
        """Write the fingerprints, and what a file holds where the manifest does not say it."""
        old, contents = self._manifest, dict[str, Any]()
        id_of = {
            file: old["files"][n]["id"] for n, file in self._file_of.items() if n in old["files"]
        }
        if "stages" not in old:
            contents = manifest_contents(self._planner, (*id_of,))
            parts = contents.get("parts", {})
            contents["parts"] = {f"{id_of[int(file)]}": part for file, part in parts.items()}
        digests = {
            name: f"{sum(sums.get(file, 0) for sums in sums_by_process) % MODULUS:016x}"
            for name, file in self._file_of.items()
            if file in id_of
        }
        self._write(with_fingerprints(self._place, old, digests, contents))


@contextmanager
def _locked(place: str) -> Iterator[Callable[[bytes], object]]:
    """Keep other runs away from a destination, and yield what writes its manifest."""
    lock: RunLock
    write: Callable[[bytes], object]
    if storage_of(place).has_folders:
        lock = FolderLock(Path(place, FOLDER_NAME, "lock"))
        write = partial(write_atomically, Path(place, MANIFEST_NAME))
    else:
        from rankxform.publish.object_lock import ObjectLock
        from rankxform.storage.objects.writing import WritablePrefix

        prefix = WritablePrefix(place)
        lock = ObjectLock(prefix)
        write = partial(prefix.put, MANIFEST_NAME)
    try:
        yield write
    finally:
        lock.release()
