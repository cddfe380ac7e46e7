"""What a manifest says of the files of a destination, and what is read of them.

A process reads a file once, and completely (`read_listed_file`): headers, samples, fingerprint.
What all processes read is one value, `WrittenRead`, and the rules below find in it what differs. So
no comparison depends on which other one came before it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from posixpath import dirname, relpath
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, CheckpointRef
from rankxform.engine.checksum import Fingerprint, file_fingerprint
from rankxform.engine.sinks import header_findings
from rankxform.errors import CheckpointError, FormatError, StorageError, UsageError
from rankxform.formats.container import DeclaredFile, EntryView
from rankxform.publish.folder_records import MANIFEST_NAME, read_manifest
from rankxform.publish.records import expected_slices
from rankxform.statements import (
    FILE_IDENTITY,
    HEADERS,
    WRITTEN,
    Finding,
    as_difference,
    as_warning,
    rule,
)
from rankxform.storage.identity import sample_at
from rankxform.storage.posix import AnyPath
from rankxform.storage.source_reader import Indexer, SourceReader, describe_wrong_crc
from rankxform.storage.store import address_of, store_at
from rankxform.transport import Team
from rankxform.transport.team import OnProgress, ShowProgress, show_nothing
from rankxform.values import NamedTuple

from .checks import changed_file_message
from .place import list_and_select
from .source import SourceManifest

if TYPE_CHECKING:
    from .source import Source

HEADERS_ALONE, SAMPLES_ALONE, FINGERPRINTS, DIGESTS, BYTES = CHECKED = (
    "headers", "samples", "fingerprints", "digests", "bytes",
)  # fmt: skip
"""What of files was compared, the weakest comparison first; "bytes" with a source."""
_MOST_FILES = 1 << 24
_CHANGED = "was changed since it was written"


class FileRead(NamedTuple):
    """A file that a manifest lists, and what was read of it.

    None, or "": it could not be read, or the manifest has nothing to compare it with.
    """

    path: str
    entry: Mapping[str, Any]  # what the manifest says of it
    size: int | None = None  # in bytes; None: there is no such file
    samples: str | None = None
    fingerprint: str | None = None
    fault: str = ""  # why it is no checkpoint
    header: tuple[Finding, ...] = ()  # where types, shapes and names are others
    wrong_checksum: str = ""  # that the file carries
    # Of what the document of digests states, and of what the file is.
    digests: tuple[str, str] | None = None
    is_sampled: bool = False  # whether its bytes were left for another run

    @property
    def compared(self) -> str:
        """What its content was compared with; of a file that differs already, what there is."""
        is_read = self.is_as_listed
        if self.fingerprint is not None or ("digest" in self.entry and not is_read):
            return FINGERPRINTS
        if self.digests is not None:
            return DIGESTS
        return SAMPLES_ALONE if self.samples is not None or not is_read else HEADERS_ALONE

    @property
    def is_as_listed(self) -> bool:
        """Whether it has the size and the headers that the manifest states."""
        return self.size == self.entry["size"] and not self.fault and not self.header

    @property
    def is_changed(self) -> bool:
        """Whether its content is not what was written, as far as it was read."""
        was, entry = (self.fingerprint, self.samples), self.entry
        compared = zip(was, (entry.get("digest"), entry.get("sample")))
        has_other_digest = self.digests is not None and self.digests[0] != self.digests[1]
        return has_other_digest or any(now is not None and now != then for now, then in compared)


class WrittenRead(NamedTuple):
    """What manifests say of a destination, and what lies there; the subject of WRITTEN rules."""

    record: Mapping[str, Any]  # the manifest, with the files of all nodes
    files: Sequence[FileRead]
    strays: Sequence[str] = ()  # addresses of checkpoint files that no manifest lists
    companions: Mapping[str, str] = {}  # address of an index or the like -> what is wrong with it
    tracker: Sequence[tuple[str, str]] = ()  # its address, and what is wrong with it
    model_files: Sequence[str] = ()  # what is wrong with a model's small files, in words


def read_listed_file(
    place: AnyPath,
    name: str,
    record: Mapping[str, Any],
    declared_files: Mapping[str, DeclaredFile] | None,
    on_progress: OnProgress,
    stated_digest: tuple[str, str] | None = None,
    *,
    is_sampled: bool = False,
) -> FileRead:
    """Read all of a file that a manifest, `record`, has something to compare with.

    declared_files: what the form's own table says of the files; None: it cannot be used, and only
    a file's size and samples are compared. stated_digest: kind and digest that a document beside
    the manifest states, for a file without fingerprint. is_sampled: its bytes are not read. Raises
    StorageError for a manifest that makes no sense.
    """
    path, entry = address_of(str(place), name), record["files"][name]
    version = store_at(str(place)).version(name)
    size = None if version is None else version.size
    if size != entry["size"]:
        return FileRead(path, entry, size)
    samples, digests = sample_at(path) if "sample" in entry else None, None
    if stated_digest is not None and "digest" not in entry and not is_sampled:
        from rankxform.publish.digests import digest_at

        digests = stated_digest[1], digest_at(stated_digest[0], path, on_progress)
    file_read = partial(
        FileRead, path, entry, size, samples, digests=digests, is_sampled=is_sampled
    )
    if declared_files is None:
        return file_read()
    try:
        index = Indexer().index(path, declared_files.get(name) or DeclaredFile())
    except CheckpointError as error:
        return file_read(fault=str(error))
    try:
        slices = expected_slices(record, entry["id"])
    except FormatError as error:
        raise StorageError(
            f"damaged: {path}: {error}",
            "compare with the source instead (verify SRC DST)",
            where=MANIFEST_NAME,
        ) from error
    if slices is None:  # a form that describes itself, without fingerprints
        return file_read()
    header = header_findings(index, path, {name: box for name, (_, box) in slices.items()})
    if header or "digest" not in entry or is_sampled:
        return file_read(header=(*header,))
    with SourceReader({0: path}, {0: index}) as sources:
        prints = Fingerprint(record["seed"])
        fingerprint = f"{file_fingerprint(prints, sources, 0, slices, on_progress):016x}"
    wrong = describe_wrong_crc(path, index, on_progress) or ""
    return file_read(fingerprint=fingerprint, wrong_checksum=wrong)


def declared_files_of(place: AnyPath, record: Mapping[str, Any]) -> dict[str, DeclaredFile] | None:
    """Return what a destination's own table says of its files; None if it cannot be used.

    Other forms' files say all of themselves. Each file has one box of a tensor at most, which the
    manifest calls as the tensor.
    """
    form = FORMS[record.get("form", DEFAULT_FORM)]
    if not form.has_table:
        return {}
    with suppress(CheckpointError, UsageError):  # that it was changed, its digest tells
        where = CheckpointRef(str(place), form.name)
        selected = list_and_select(where, missing_names=record["files"]).selected
        assert selected.description is not None
        return {
            selected.names[f]: d._replace(views=tuple(map(EntryView.unplaced, d.views)))
            for f, d in selected.description.declared_files.items()
        }
    return None


def with_fingerprint(paths: Mapping[int, str], manifest: SourceManifest) -> list[int]:
    """Return the files of which a manifest has a fingerprint."""
    return [file for file, entry in manifest.entries(paths).items() if "digest" in entry]


def compare_fingerprints(
    source: Source, files: Sequence[int], team: Team, show: ShowProgress = show_nothing
) -> list[Finding]:
    """Read all bytes of some files of a source, and compare them with its manifest. Collective."""
    manifest = source.manifest
    assert manifest is not None
    folder, description = dirname(manifest.label), source.selected.description
    declared_files = description.declared_files if description is not None else {}

    def find_changed(on_progress: OnProgress) -> list[Finding]:
        record, findings = read_manifest(folder), []
        for file in source.reach.partition(files)[team.rank]:
            path, declared = source.paths[file], declared_files.get(file, DeclaredFile())
            views = tuple(map(EntryView.unplaced, declared.views))
            name = relpath(path, folder)
            declared_by_name = {name: declared._replace(views=views)}
            read = read_listed_file(folder, name, record, declared_by_name, on_progress)
            if read.is_changed or not read.is_as_listed:
                message = changed_file_message(path, manifest.label)
                findings.append(Finding(message, id=FILE_IDENTITY, file=path, need=HEADERS))
        return findings

    local_findings = team.work(find_changed, show)
    return [*chain.from_iterable(team.allgather(lambda: local_findings))]


@rule(WRITTEN)
def listed_files_are_there(read: WrittenRead) -> Iterator[Finding]:
    """Each file that the manifest lists is there."""
    yield from (as_difference("is missing", f.path) for f in read.files if f.size is None)


@rule(WRITTEN)
def files_have_their_size(read: WrittenRead) -> Iterator[Finding]:
    """A file has as many bytes as were written."""
    for file in read.files:
        if file.size not in (None, file.entry["size"]):
            text = f"has {file.size:,} bytes, and {file.entry['size']:,} were written"
            yield as_difference(text, file.path)


@rule(WRITTEN)
def headers_are_as_written(read: WrittenRead) -> Iterator[Finding]:
    """A file can be read, and has the tensors, types and shapes that were written."""
    for file in read.files:
        if file.fault:
            yield as_difference(f"cannot be read: {file.fault}", file.path)
        yield from file.header


@rule(WRITTEN)
def content_is_unchanged(read: WrittenRead) -> Iterator[Finding]:
    """Fingerprints and samples are those of what was written."""
    for file in read.files:
        if file.is_as_listed and file.is_changed and not file.wrong_checksum:
            yield as_difference(_CHANGED, file.path)


@rule(WRITTEN)
def carried_checksums_match(read: WrittenRead) -> Iterator[Finding]:
    """The checksums that a file carries are those of its content."""
    for file in read.files:
        if file.wrong_checksum:
            yield as_difference(file.wrong_checksum, file.path)


@rule(WRITTEN)
def nothing_else_is_there(read: WrittenRead) -> Iterator[Finding]:
    """No checkpoint file is there that the manifest does not list."""
    yield from (as_difference("is not listed in the manifest", path) for path in read.strays)


@rule(WRITTEN)
def companions_are_as_written(read: WrittenRead) -> Iterator[Finding]:
    """Indexes, tables and trackers, by which readers find the files, are as they were written."""
    for path, text in (*read.companions.items(), *read.tracker):
        yield as_difference(text, path)


@rule(WRITTEN)
def all_files_were_made(read: WrittenRead) -> Iterator[Finding]:
    """The destination has all files of its strategy, and not only those of --ranks."""
    total, file_count = read.record.get("ranks"), len(read.files)
    if isinstance(total, int) and file_count < total < _MOST_FILES:
        is_described = FORMS[read.record.get("form", DEFAULT_FORM)].described
        unit = "files" if is_described else "ranks"
        yield as_warning(f"{file_count} of {total} {unit} were made; what was compared is these")


@rule(WRITTEN)
def model_files_are_as_copied(read: WrittenRead) -> Iterator[Finding]:
    """A model's small files are as they were copied; people change config.json, and may mean it."""
    yield from map(as_warning, read.model_files)
