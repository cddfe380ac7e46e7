"""`verify`: a destination compared with its source, or with its manifest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import field, replace
from itertools import chain
from pathlib import Path
from shlex import quote
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, DEFAULT_PATTERN, FORMS, CheckpointRef
from rankxform.checkpoints.folders import tensor_files
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.display.text import first_of_ranks, format_count, format_seconds, format_size
from rankxform.engine.checksum import Fingerprint, file_fingerprint
from rankxform.engine.sinks import Difference, header_differences
from rankxform.errors import (
    CheckpointError,
    DifferenceError,
    FormatError,
    RankxformError,
    StorageError,
    UsageError,
)
from rankxform.formats.container import DeclaredFile, EntryView
from rankxform.layout.names import format_ranges, pattern_of
from rankxform.planning.evidence import samples_text
from rankxform.publish.files import changed_model_files, wrong_companions
from rankxform.publish.folder_records import FOLDER_NAME, JOB_NAME, MANIFEST_NAME, read_manifest
from rankxform.publish.records import expected_slices
from rankxform.request import Request
from rankxform.results import NORMAL, QUIET, VERBOSE, Result, Section, Table, lines
from rankxform.source.choose import form_at, list_and_select, listing_at
from rankxform.statements import WARNING
from rankxform.storage.identity import file_digest, sample_digest
from rankxform.storage.posix import OnProgress
from rankxform.storage.source_reader import Indexer, SourceReader
from rankxform.target.existing import (
    ExistingDestination,
    unreadable_file,
    wrong_checksums,
    wrong_tracker,
)
from rankxform.target.manifest import verify_command, verify_options
from rankxform.target.target import Conversion
from rankxform.transport import Team
from rankxform.transport.team import ShowProgress, show_nothing
from rankxform.values import dataclass
from rankxform.verbs.convert import OnStart, convert, start_silently

_MOST_FILES = 1 << 24


@dataclass(frozen=True, repr=False)
class Verdict(Result):
    """What a verification found, over all processes."""

    src: str | None  # the source, as it was named; None: compared with the manifest
    dst: str  # the destination
    differences: tuple[Difference, ...]  # by parameter and rank
    files_compared: int  # number of destination files
    bytes_compared: int  # bytes of destination files, by all processes
    seconds: float  # of the whole call
    processes: int  # number of processes that it ran on
    notices: tuple[str, ...]  # what was assumed
    # Compared with fingerprints of the manifest: differences are of files.
    by_manifest: bool = False
    sizes_only: bool = False  # headers and samples alone were compared
    warnings: tuple[str, ...] = ()  # what may be wrong
    command: str | None = None  # what would compare all
    step: str | None = None  # training step of the source; None: no name declares one
    # Samples of the source that were compared, with the reads and bytes that it took.
    evidence: Mapping[str, int | None] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)  # file id -> its name; {}: ids are ranks

    @property
    def checked(self) -> str:
        """What was compared: "bytes" with the source, "fingerprints" or "sizes" with a manifest."""
        return "sizes" if self.sizes_only else "fingerprints" if self.by_manifest else "bytes"

    @property
    def same(self) -> bool | None:
        """Whether both sides hold the same; None where no difference was found and no byte of
        content compared."""
        if self.differences:
            return False
        return None if self.sizes_only else True

    def __bool__(self) -> bool:
        """Whether every byte was compared and is the same.

        Raises DifferenceError where nothing was found to differ and not every byte was compared.
        """
        if self.same is None:
            raise DifferenceError(
                "not every byte was compared, so it is not known whether it is the same",
                "look at `same` and `checked`",
                where=self.dst,
            )
        return self.same

    def in_short(self) -> str:
        text_by_verdict = {
            True: "the same",
            False: "DIFFERENT",
            None: "not every byte was compared",
        }
        compared = (
            f"{format_size(self.bytes_compared)} in {format_count(self.files_compared, 'file')}"
        )
        return f"{text_by_verdict[self.same]}: {compared}, {format_seconds(self.seconds)}"

    json_first = ("same", "checked")
    json_without = ("by_manifest", "sizes_only", "names")

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows it."""
        return 0 if self.same else DifferenceError.exit_code

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as ``verify --json`` prints it.

        A difference has the name of its file where that is not the file of a rank.
        """
        document = super().as_dict()
        for difference in document["differences"]:
            difference["file"] = self.names.get(difference["rank"])
            difference["rank"] = None if self.names else difference["rank"]
        return document

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield whether both sides hold the same, and where they do not; at `VERBOSE` a row for
        each slice."""
        files_text = format_count(self.files_compared, "file")
        size_text, duration = format_size(self.bytes_compared), format_seconds(self.seconds)
        compared = f"{size_text} in {files_text}, {duration}"
        if self.same is None:
            yield lines(
                "NOT VERIFIED:",
                f"samples alone were compared. {files_text} of the right size with sound headers; "
                "the manifest has no fingerprints (transform --verify --overwrite keeps them)",
            )
            yield lines("", f"to compare every byte: {self.command}")
        if self.same is False and level > QUIET:
            yield self._rows(level)
        if level > QUIET:
            yield from self.notes()
        if self.same:
            stands = samples_text(self.evidence) if self.evidence.get("samples") else ""
            basis = f"; SRC's strategy stands on {stands}" if stands else ""
            if self.by_manifest:
                basis = "; with the fingerprints of the conversion"
            yield lines("same", f"every byte compared, {compared}{basis}")
        if self.same is False:
            yield lines("DIFFERENT:", f"{self._where()}; compared {compared}")

    def _where(self) -> str:
        slices = [difference for difference in self.differences if not difference.whole_file]
        files = {d.rank for d in self.differences if d.whole_file or self.by_manifest}
        names = {difference.name for difference in slices}
        count_texts = [format_count(len(names), "parameter"), format_count(len(slices), "slice")]
        return ", ".join(
            ([] if self.by_manifest or not slices else count_texts)
            + ([format_count(len(files), "file")] if files else [])
        )

    def _rows(self, level: int) -> Table:
        """Return a row for each difference, or for all of one kind."""
        by_key: dict[object, list[Difference]] = {}
        for difference in self.differences:
            key = difference.name if difference.whole_file else pattern_of(difference.name)
            is_apart = level == VERBOSE
            by_key.setdefault(
                id(difference) if is_apart else (key, difference.why, difference.whole_file), []
            ).append(difference)
        head = ("file" if self.names else "rank", "first at", "elements", "what differs")
        noun = "slices" if level == VERBOSE else "kinds of difference"
        return Table(head, [*map(self._row, by_key.values())], noun)

    def _row(self, differences: Sequence[Difference]) -> tuple[object, ...]:
        first = differences[0]
        names = {difference.name for difference in differences}
        title = first.name if len(names) == 1 else f"{pattern_of(first.name)} ({len(names):,})"
        ranks = sorted({difference.rank for difference in differences})
        where = (
            first_of_ranks([self.names.get(rank, "-") for rank in ranks])
            if self.names
            else format_ranges(ranks)
        )
        if first.index is None:
            return where, "", "", f"{title}: {first.why}"
        differ = sum(difference.count for difference in differences)
        all_elements = sum(difference.size for difference in differences)
        return where, str(list(first.index)), f"{differ:,} of {all_elements:,}", title


def _refuse_begun(folder: Path, is_begun: bool, kind: type[RankxformError]) -> None:
    if is_begun:
        raise kind(
            "a conversion into this folder was stopped, or is at work",
            "run its command again to complete it, unless it is at work",
            where=folder,
        )


def find_record_folder(folder: Path) -> tuple[Path, tuple[str, ...], list[Difference]]:
    """Return where the records of a destination are, in it or with the files that readers find;
    and what may be wrong with the way there, and what is."""
    if (folder / MANIFEST_NAME).exists() or not folder.is_dir():
        return folder, (), []
    where = CheckpointRef(str(folder))
    form = form_at(where, "--dst-form")
    if not form.described:
        return folder, (), []
    _, _, selected = list_and_select(replace(where, form=form.name))
    assert selected.description is not None
    record_folder = (folder / next(iter(selected.names.values()), "")).parent
    findings = selected.description.findings if record_folder != folder else ()
    doubts = tuple(finding.text for finding in findings if finding.severity == WARNING)
    if form.tracker is None or record_folder == folder or selected.step is None:
        return record_folder, doubts, []
    faults = wrong_tracker(folder, form.tracker, str(selected.step[0]).encode(), record_folder)
    return record_folder, doubts, [Difference(n, -1, text, whole_file=True) for n, text in faults]


def verify_alone(
    folder: str, team: Team, begin: Callable[[int], ShowProgress] = lambda total: show_nothing
) -> Verdict:
    """Compare a destination with its own manifest: sizes and headers, and fingerprints if kept.

    Where nodes have folders of their own, each is compared with its own manifest. Checkpoint files
    in rank folders that no manifest lists are differences.
    """
    began = time.monotonic()
    where, doubts, tracker_faults = team.bcast(lambda: find_record_folder(Path(folder).absolute()))
    manifests, leaders = _manifests(where, team)
    is_begun = team.bcast((where / FOLDER_NAME / JOB_NAME).exists)
    _refuse_begun(where, is_begun, StorageError)
    declared_by_name = team.bcast(lambda: _declared_files(where, manifests[0]))
    facts_of_all = [facts for record in manifests for facts in record["files"].values()]
    with_digests = all("digest" in facts for facts in facts_of_all)
    local_files = []
    listed_by: Mapping[str, Any] | None = None  # of the first process that has this manifest
    for record, processes in zip(manifests, leaders):
        files = sorted(record["files"].items(), key=lambda item: item[1]["rank"])
        if team.rank in processes:
            process_files = files[processes.index(team.rank) :: len(processes)]
            local_files += [(name, facts, record) for name, facts in process_files]
        if team.rank == processes[0]:
            listed_by = record
    strange = team.allgather(lambda: [] if listed_by is None else _not_listed(where, listed_by))[
        team.rank
    ]
    total = sum(facts["size"] for facts in facts_of_all) if with_digests else 0
    show = begin(total) if team.rank == 0 else show_nothing
    differences: list[Difference] = []

    def check(on_progress: OnProgress) -> int:
        compared_bytes = 0
        for name, facts, record in local_files:
            wrong, nbytes = _check_file(
                where / name, facts, record, declared_by_name.get(name), on_progress
            )
            differences.extend(wrong)
            compared_bytes += nbytes
        return compared_bytes

    names = {facts["rank"]: name for name, facts in manifests[0]["files"].items()}
    compared = team.work(check, show)
    by_process = team.allgather(lambda: (compared, differences + strange))
    return Verdict(
        None,
        str(where),
        tuple(sorted(chain(tracker_faults, *(d for _, d in by_process)), key=lambda d: d.rank)),
        len(facts_of_all),
        sum(nbytes for nbytes, _ in by_process),
        time.monotonic() - began,
        team.size,
        (),
        by_manifest=True,
        sizes_only=not with_digests,
        command=verify_command(_merge_manifests(manifests), folder),
        names=names if FORMS[manifests[0].get("form", DEFAULT_FORM)].described else {},
        warnings=(
            *doubts,
            *_incomplete(_merge_manifests(manifests)),
            *team.bcast(lambda: changed_model_files(where, manifests[0])),
        ),
    )


def _declared_files(folder: Path, record: Mapping[str, Any]) -> dict[str, DeclaredFile]:
    """Return what a destination's own table says of its files, of a form that has one.

    Each of them has one box of a tensor at most, which the manifest calls as the tensor.
    """
    form = FORMS[record.get("form", DEFAULT_FORM)]
    if not form.items:
        return {}
    with suppress(CheckpointError, UsageError):  # that it was changed, its digest tells
        _, _, selected = list_and_select(CheckpointRef(str(folder), form.name))
        assert selected.description is not None
        return {
            selected.names[f]: d._replace(views=tuple(map(EntryView.unplaced, d.views)))
            for f, d in selected.description.declared_files.items()
        }
    return {}


def _incomplete(record: Mapping[str, Any]) -> tuple[str, ...]:
    """Return that not all files of a destination were made, as a warning."""
    total, file_count = record.get("ranks"), len(record["files"])
    if not isinstance(total, int) or not file_count < total < _MOST_FILES:
        return ()
    unit = "files" if FORMS[record.get("form", DEFAULT_FORM)].described else "ranks"
    return (f"{file_count} of {total} {unit} were made; what was compared is these",)


def notice_of_other_options(conversion: Conversion, team: Team) -> list[str]:
    """Return, as a notice, the command with the options that a destination was made with, if they
    are known and are not those of the request.

    Collective; what it does not find or cannot read, no process does.
    """
    request, folder = conversion.request, conversion.target.folder
    with suppress(StorageError, UsageError):
        merged = _merge_manifests(_manifests(folder, team)[0])
        src = None if request.files is not None else conversion.source.where.path
        request_options = [src, *verify_options(conversion)]
        was = [merged["identity"].get("source"), *(merged.get("verify") or ())]
        if _normal(was) == _normal(request_options):
            return []
        command = verify_command(merged, str(folder))
        return [f"{folder} was made with other options; compare it with: {command}"]
    return []


def _merge_manifests(manifests: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    """Return the first of the manifests that nodes have, with the files of all."""
    files = {name: facts for record in manifests for name, facts in record["files"].items()}
    return {**manifests[0], "files": files}


def _normal(words: Iterable[str | None]) -> list[str]:
    """Return a source and options without defaults and links, so that equal ones are equal."""
    pairs = [str(Path(word).resolve()) if word[0] == "/" else word for word in words if word]
    for default in (["--dst-form", "ranks"], ["--dst-strategy", "none"]):
        for position in range(len(pairs) - 1):
            if pairs[position : position + 2] == default:
                del pairs[position : position + 2]
                break
    return pairs


def _not_listed(folder: Path, record: Mapping[str, Any]) -> list[Difference]:
    """Return the checkpoint files of a destination that its manifest does not know."""
    form = FORMS[record.get("form", DEFAULT_FORM)]
    listing = listing_at(folder, form)
    ranked = {} if form.described else by_rank(listing, DEFAULT_PATTERN)
    names = [(name, rank) for rank, file_names in ranked.items() for name in file_names]
    names += [(name, 0) for name in tensor_files({*listing.entries} - listing.folders)]
    differences = [
        Difference(name, rank, "is not listed in the manifest", whole_file=True)
        for name, rank in names
        if name not in record["files"]
    ]
    wrong = wrong_companions(folder, record)
    return differences + [Difference(n, 0, r, whole_file=True) for n, r in wrong.items()]


def _manifests(folder: Path, team: Team) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the manifests that nodes have, and for each the processes that have it."""
    nodes, path = team.nodes, folder / MANIFEST_NAME
    has_manifest = team.allgather(lambda: nodes.is_leader(team.rank) and path.is_file())
    digests_by_process = team.allgather(
        lambda: file_digest(path) if has_manifest[team.rank] else b""
    )
    groups: dict[bytes, list[int]] = {}
    for node, processes in enumerate(nodes.processes):
        if digests_by_process[processes[0]]:
            groups.setdefault(digests_by_process[processes[0]], []).append(node)
    node_groups = list(groups.values())
    if not node_groups:
        if not any(team.allgather(folder.is_dir)):
            if any(team.allgather(folder.exists)):
                look = f"rankxform inspect --check {quote(str(folder))}"
                raise UsageError("is a file, not a folder that rankxform wrote", look, where=folder)
            raise UsageError("no such folder", where=folder)
        is_begun = any(team.allgather((folder / FOLDER_NAME / JOB_NAME).is_file))
        _refuse_begun(folder, is_begun, UsageError)
        raise UsageError(
            "there is no manifest; this is no finished destination of rankxform",
            "verify SRC DST --src-strategy A --dst-strategy B, which compares it with its source",
            where=path,
        )
    leaders = [[p for node in group for p in nodes.processes[node]] for group in node_groups]
    firsts = {processes[0] for processes in leaders}
    records = team.allgather(lambda: read_manifest(folder) if team.rank in firsts else None)
    return [record for record in records if record is not None], sorted(leaders)


def _check_file(
    path: Path,
    facts: Mapping[str, Any],
    record: Mapping[str, Any],
    declared: DeclaredFile | None,
    on_progress: OnProgress,
) -> tuple[list[Difference], int]:
    """Compare one file with what the manifest says of it; return also the bytes compared."""
    rank = facts["rank"]
    if not path.is_file():
        return [Difference(path.name, rank, "is missing")], 0
    if path.stat().st_size != facts["size"]:
        return [Difference(path.name, rank, f"is not of the {facts['size']} bytes written")], 0
    try:
        index = Indexer().index(path, declared or DeclaredFile())
    except CheckpointError as error:
        return [unreadable_file(str(path), rank, str(error))], 0
    slices = _expected_by(record, rank, path)
    if slices is None:
        return [], 0
    wrong = header_differences(
        index, rank, {name: expected_slice for name, (_, expected_slice) in slices.items()}
    )
    changed = Difference(path.name, rank, "was changed since it was written", whole_file=True)
    if wrong:
        return wrong, 0
    is_changed = facts.get("sample") not in (None, sample_digest(path))
    if "digest" not in facts:
        return [changed] * is_changed, 0
    with SourceReader({rank: str(path)}, {rank: index}) as sources:
        total = file_fingerprint(Fingerprint(record["seed"]), sources, rank, slices, on_progress)
    if f"{total:016x}" != facts["digest"]:
        return [Difference(path.name, rank, "was changed since it was written")], facts["size"]
    wrong = wrong_checksums({rank: str(path)}, {rank: index}, [rank], on_progress)
    return wrong or [changed] * is_changed, facts["size"]


def _expected_by(record: Mapping[str, Any], rank: int, path: Path) -> Any:
    try:
        return expected_slices(record, rank)
    except FormatError as error:
        raise StorageError(
            f"damaged: {path}: {error}",
            "compare with the source instead (verify SRC DST)",
            where=MANIFEST_NAME,
        ) from error


def verify(request: Request, team: Team, on_start: OnStart = start_silently) -> Verdict:
    """Compare every byte of ``request.dst`` with what the source and the strategies make of it.

    Both are streamed, in the memory that `request` allows; nothing is written. Collective.
    """
    destination = ExistingDestination()
    outcome = convert(request, destination, team, on_start)
    conversion = outcome.conversion
    other_options = notice_of_other_options(conversion, team) if destination.differences else []
    return Verdict(
        src=request.src,
        dst=str(conversion.target.folder),
        differences=tuple(destination.differences),
        files_compared=len(destination.existing.indexes),
        bytes_compared=outcome.bytes_written,
        seconds=outcome.seconds,
        processes=team.size,
        notices=(*outcome.notices, *other_options),
        warnings=outcome.warnings,
        step=conversion.source.selected.step_name,
        evidence=conversion.target.evidence.facts,
        names=destination.names,
    )
