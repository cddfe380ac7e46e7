"""`inspect --check`, `inspect --replicas`, `inspect --src-strategy`."""

from __future__ import annotations

import sys
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from itertools import chain
from posixpath import relpath
from typing import Any, ClassVar

from rankxform.checkpoints.base import FORMS
from rankxform.display.text import (
    first_of_ranks,
    format_count,
    format_seconds,
    format_size,
    shown_path,
)
from rankxform.engine.scan import FileScan, bytes_to_scan, scan
from rankxform.errors import CheckpointError, DifferenceError, Message, RankxformError, UsageError
from rankxform.formats.container import BOX_MARK, Index
from rankxform.layout.names import and_more, first_texts, format_ranges, summarize_names
from rankxform.planning.catalog import catalog_text
from rankxform.planning.evidence import (
    Evidence,
    ReplicaDifference,
    order_text,
    replicas_to_compare,
    samples_text,
    unequal_replicas,
)
from rankxform.planning.selection import (
    missing_slices,
    missing_slices_error,
    types_by_file,
    unusual_tensors,
)
from rankxform.planning.zeros import equal_matrices, find_stored_zeros, is_judged
from rankxform.publish.digests import digest_at, stated_at
from rankxform.publish.options import SUMS
from rankxform.request import Request
from rankxform.results import NORMAL, Result, Section, Table, lines, plain
from rankxform.source.choose import a_strategy_is_given
from rankxform.source.open import open_source
from rankxform.source.source import Source
from rankxform.source.written import compare_fingerprints, with_fingerprint
from rankxform.statements import (
    CONTENT,
    ERROR,
    NOTICE,
    SAMPLES,
    WARNING,
    Finding,
    as_difference,
    as_warning,
    errors_of,
    rule,
    run_rules,
)
from rankxform.target.inputs import resolve_request, source_ref_with_strategy
from rankxform.target.model_files import read_stated_model
from rankxform.target.resolve import open_resolved_source, resolve, resolve_target
from rankxform.target.stated_model import StatedModel, findings_of
from rankxform.target.target import Conversion
from rankxform.transport import Team
from rankxform.transport.team import Begin, OnProgress, begin_silently, show_nothing
from rankxform.values import NamedTuple, dataclass

from .evidence import examine, read_samples, require_evidence, with_evidence
from .verdict import Comparison

RIGHT, DOUBTFUL, WRONG, NOT_CHECKED = "right", "doubtful", "wrong", "not checked"
_SHOWN = 20
_ORDER = (WRONG, DOUBTFUL, RIGHT, NOT_CHECKED)
_LEFT_OVER = (".part", ".tmp")
_STATEMENTS, _BOXES, _RANKS, _STRATEGY, _COPIES, _TENSORS, _REPLICAS, _CHECKSUMS, _VALUES = (
    "statements", "boxes", "ranks", "strategy", "copies", "tensors", "replicas", "checksums",
    "values",
)  # fmt: skip
"""Groups of rules: what a check calls what it looked at."""


class Passed(NamedTuple):
    """A group of rules that found nothing."""

    group: str
    is_checked: bool  # False: there was nothing to compare, or it was not asked for
    text: str


class CheckRow(NamedTuple):
    """What was checked, and how that ended."""

    check: str  # the group of what was looked at
    state: str  # right, doubtful, wrong, not checked
    text: str
    rule: str | None = None  # that found it; None: no rule did, or nothing is wrong
    file: str | None = None  # address of the file that it is of; None: it is of no single file


@dataclass(frozen=True, repr=False)
class Check(Comparison):
    """What a check of a checkpoint found."""

    src: str  # the checkpoint, as it was named
    form: str  # its form
    full: bool  # whether every byte was read
    files_compared: int  # number of files
    findings: tuple[Finding, ...]  # errors are wrong, warnings doubtful
    passed: tuple[Passed, ...]  # what was found right, and what was not checked
    reads: int  # number of reads of content, by all processes
    bytes_read: int  # content read, by all processes
    seconds: float  # of the whole call

    difference_code = CheckpointError.exit_code
    unknown: ClassVar[tuple[str, ...]] = (
        "nothing could be compared with anything",
        "look at `same` and `rows`",
    )
    json_without = ("findings", "passed")

    @property
    def same(self) -> bool | None:
        """Whether nothing is wrong; None where nothing could be compared with anything, or where no
        strategy says how files are sharded, so that most could not."""
        if errors_of(self.findings):
            return False
        groups = {passed.group: passed.is_checked for passed in self.passed}
        return True if any(groups.values()) and groups.get(_STRATEGY, True) else None

    @property
    def rows(self) -> tuple[CheckRow, ...]:
        """What was checked, each with its state; first what is wrong or doubtful."""
        findings = (
            CheckRow(
                finding.group_name,
                WRONG if finding.severity == ERROR else DOUBTFUL,
                finding.text_of_inspection,
                finding.rule or None,
                finding.file,
            )
            for finding in self.findings
        )
        passed = (CheckRow(g, RIGHT if ok else NOT_CHECKED, text) for g, ok, text in self.passed)
        return (*findings, *passed)

    def as_dict(self) -> dict[str, Any]:
        return {**super().as_dict(), "rows": plain(self.rows)}

    def in_short(self) -> str:
        text_by_verdict = {
            True: "nothing wrong was found",
            False: "WRONG",
            None: "nothing could be compared",
        }
        read = (
            f"{format_count(self.files_compared, 'file')}, {format_size(self.bytes_read)} looked at"
        )
        doubts = len(self.findings) - len(errors_of(self.findings))
        also = f", {format_count(doubts, 'doubt')}" if doubts else ""
        verdict = text_by_verdict[self.same] + also
        return f"{self.form}: {verdict}; {read}, {format_seconds(self.seconds)}"

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield what was found, what is wrong first."""
        verdict_text = {
            True: ": nothing wrong was found",
            False: "",
            None: ": nothing could be compared with anything",
        }[self.same]
        if self.same is None and any(passed.is_checked for passed in self.passed):
            verdict_text = ": nothing wrong was found, and what needs a strategy was not looked for"
        files = format_count(self.files_compared, "file")
        title = FORMS[self.form].title
        label = "WRONG" if self.same is False else ""
        yield lines(label, f"{shown_path(self.src)}: {title}, {files}{verdict_text}")
        for row in sorted(self.rows, key=lambda row: _ORDER.index(row.state)):
            yield lines(row.check, f"{row.state}: {row.text}")
        reads, passed = format_count(self.reads, "read"), format_seconds(self.seconds)
        yield lines("looked at", f"{reads}, {format_size(self.bytes_read)}, {passed}")


def check(request: Request, full: bool, team: Team, begin: Begin = begin_silently) -> Check:
    """Look for all that is wrong with a checkpoint; `full`: read every byte. Collective."""
    began = time.monotonic()
    where = team.bcast(lambda: source_ref_with_strategy(request))
    source = open_source(where, team)
    asked_amiss = where.strategy is not None and any(e.error is UsageError for e in source.errors)
    if not source.paths or asked_amiss:
        source.require()
    evidence: Evidence | None = None
    compared: Mapping[int, Collection[str]] = {}
    if not source.errors:
        evidence = _examine_or_finding(request, source, team)
        if full and not evidence.errors:
            compared = replicas_to_compare(source.require_catalog(), source.indexes)
    scans = scan_all(source, full, compared, team, begin)
    findings, fingerprints = [*_findings_of_source(source)], 0
    if full and not source.errors and source.manifest is not None:
        files = with_fingerprint(source.paths, source.manifest)
        total = sum(source.indexes[file].size for file in files)
        findings += compare_fingerprints(source, files, team, begin("check", total))
        fingerprints = len(files)
    digests = 0
    if full and not source.errors:
        wrong_files, digests = compare_digests(source, team, begin)
        findings += wrong_files
    stated_model = team.bcast(lambda: None if source.errors else read_stated_model(source))
    read = ContentRead(source, scans, full, compared, evidence, fingerprints, stated_model, digests)
    findings += [f for f in evidence.findings if f.severity != NOTICE] if evidence else []
    findings += team.bcast(lambda: [*run_rules(CONTENT, [sys.modules[__name__]], read)])
    return Check(
        source.where.path,
        source.form.name,
        full,
        len(source.paths),
        tuple(findings),
        tuple(_find_passed(read, findings)),
        (evidence.reads if evidence else 0) + sum(s.reads for s in scans.values()),
        (evidence.bytes_read if evidence else 0) + sum(s.nbytes for s in scans.values()),
        time.monotonic() - began,
    )


def compare_digests(source: Source, team: Team, begin: Begin) -> tuple[list[Finding], int]:
    """Compare files with a document of digests that lies beside them, whoever wrote it: what is
    wrong, and how many files were compared. Collective."""
    place = source.where.path
    sums, unreadable = team.bcast(lambda: stated_at(place, SUMS.values()))
    wrong_files = [as_difference(text, document) for document, text in unreadable.items()]
    names = {file: relpath(path, place) for file, path in source.paths.items()}
    files = [file for file, name in names.items() if name in sums]
    show = begin("check", sum(source.indexes[file].size for file in files))

    def compare(on_progress: OnProgress) -> list[Finding]:
        findings = list[Finding]()
        for file in source.reach.partition(files)[team.rank]:
            kind, digest = sums[names[file]]
            if digest_at(kind, source.paths[file], on_progress) != digest:
                text = f"is not what {SUMS[kind]} states of it"
                findings.append(as_difference(text, source.paths[file]))
        return findings

    local_findings = team.work(compare, show) if files else []
    by_process = team.allgather(lambda: local_findings)
    return [*wrong_files, *chain.from_iterable(by_process)], len(files)


def scan_all(
    source: Source, full: bool, compared: Mapping[int, Collection[str]], team: Team, begin: Begin
) -> dict[int, FileScan]:
    """Return what all files hold. Collective.

    compared: by file the tensors of which digests are made.
    """
    all_indexes = {**source.indexes, **source.extra_rank_index}
    total = sum(index.size if full else bytes_to_scan(index) for index in all_indexes.values())

    def scan_local_files(on_progress: OnProgress) -> list[tuple[int, FileScan]]:
        return [
            (
                file,
                scan(
                    path,
                    all_indexes[file],
                    full,
                    on_progress,
                    {*compared.get(file, ())},
                    _matrices(source, all_indexes[file]) if full else (),
                ),
            )
            for file in source.reach.partition(all_indexes)[team.rank]
            for path in (source.paths[file],)
        ]

    local_scans = team.work(scan_local_files, begin("check", total))
    return dict(chain.from_iterable(team.allgather(lambda: local_scans)))


def _matrices(source: Source, index: Index) -> frozenset[str]:
    """Return the entries of a file that are weights' matrices, and not zero by design."""
    if source.catalog is None:
        return frozenset()
    schema, is_weight = index.schema, source.catalog.states.is_weight
    return frozenset(
        entry
        for entry, dtype, shape in zip(schema.names, schema.dtypes, schema.shapes)
        for name in [entry.partition(BOX_MARK)[0]]
        if is_weight(name) and is_judged(name, dtype, shape)
    )


def _errors_without_strategy(source: Source) -> tuple[Finding, ...]:
    """Return the errors that are no fault of the files: that no strategy is given."""
    if source.form.described or source.where.strategy is not None:
        return ()
    are_all_read = len(source.indexes) == len(source.paths)
    asks_for_strategy = a_strategy_is_given.__name__
    return tuple(
        error
        for error in source.errors
        if error.error is UsageError and (are_all_read or error.rule == asks_for_strategy)
    )


def _findings_of_source(source: Source) -> Iterator[Finding]:
    """Yield what is wrong or doubtful in names, headers and tables; of many errors the first."""
    missing_strategy = _errors_without_strategy(source)
    errors = [error for error in source.errors if error not in missing_strategy]
    yield from errors[:_SHOWN]
    if errors[_SHOWN:]:
        yield Finding(Message(f"and {len(errors) - _SHOWN} more faults"))
    yield from (finding for finding in source.findings if finding.severity == WARNING)
    for path in source.description.missing_files.values():
        text = f"is not there, and {source.description.source} lists it"
        yield Finding(Message(text, where=path), file=path)


def _examine_or_finding(request: Request, source: Source, team: Team) -> Evidence:
    """Return what samples say, or what prevents that they say anything. Collective."""
    evidence = Evidence()
    try:
        resolved = resolve_request(request, team)
        conversion = Conversion(resolved, source, resolve_target(resolved, source, team))
        evidence = examine(conversion, team)
        require_evidence(conversion, evidence, team)
    except RankxformError as error:  # it says what else may be meant
        first, others = Finding.of_error(error, SAMPLES), evidence.errors[1:]
        return replace(evidence, findings=(first, *others))
    return evidence


# -- the files' content ----------------------------------------------------------------------------


class ContentRead(NamedTuple):
    """What was read of a checkpoint's files; the subject of rules over content. On process 0."""

    source: Source
    scans: Mapping[int, FileScan]  # by file
    full: bool  # whether every byte was read
    replicas: Mapping[int, Collection[str]]  # file -> its tensors of which others hold replicas
    evidence: Evidence | None  # None: the source has errors, and samples say nothing
    fingerprints: int  # files of which a fingerprint was compared with the manifest's
    stated_model: StatedModel | None  # what lies beside a Hugging Face folder's tensors
    digests: int = 0  # files of which a digest was compared with a document's that lies there

    def totals(self, kind: str) -> dict[str, int]:
        """Return the number of such values, or bytes, by tensor: "nans", "infinite", "holes"."""
        by_tensor: dict[str, int] = {}
        for file_scan in self.scans.values():
            for box, number in getattr(file_scan, kind).items():
                name = box.partition(BOX_MARK)[0]
                by_tensor[name] = by_tensor.get(name, 0) + number
        return by_tensor

    @property
    def replica_bytes(self) -> int:
        """Bytes of which several ranks hold replicas, and that were compared."""
        return _content_bytes(self.source, self.replicas)


def _content_bytes(source: Source, tensors: Mapping[int, Collection[str]]) -> int:
    return sum(source.indexes[file].nbytes(n) for file, names in tensors.items() for n in names)


@rule(CONTENT, group=_RANKS)
def ranks_have_files(read: ContentRead) -> Iterator[Finding]:
    """Each rank has a file, or others hold what its file should."""
    source = read.source
    if source.form.described or not source.paths:
        return
    if source.where.strategy is None:
        missing = sorted({*range(max(source.paths))} - {*source.paths})
        if missing:
            yield as_warning(f"rank {format_ranges(missing)} has no file, and later ones have")
        return
    missing = [rank for rank in source.needed_files if rank not in source.paths]
    if not missing:
        return
    message = f"rank {format_ranges(missing)} of {source.where.strategy.label} has no file"
    if source.catalog is None:
        yield Finding(Message(message))
        return
    losses_by_ranks = missing_slices(source.catalog.parameters)
    names = [parameter.name for losses in losses_by_ranks.values() for parameter, _ in losses]
    names += source.catalog.unreachable
    if names:
        lost = f"no other holds slices of {summarize_names(names, 3)}"
        yield Finding(Message(f"{message}, and {lost}"))
    else:
        yield as_warning(f"{message}; others hold all that it should")


@rule(CONTENT, group=_RANKS)
def files_hold_their_slices(read: ContentRead) -> Iterator[Finding]:
    """A slice of a rank that has a file is in that file, or in another's.

    A file that was cut off between two tensors can be read, and lacks those behind.
    """
    source = read.source
    if source.where.strategy is None or source.catalog is None:
        return
    losses_by_ranks = missing_slices(source.catalog.parameters)
    if any(rank in source.paths for ranks in losses_by_ranks for rank in ranks):
        yield Finding(missing_slices_error(source.catalog, source.catalog.parameters, {}).parts)


@rule(CONTENT, group=_TENSORS)
def tensors_are_usual(read: ContentRead) -> Iterator[Finding]:
    """Weights are neither empty nor flattened, and a tensor has one type."""
    catalog = read.source.catalog
    if catalog is not None and not read.source.errors:
        shapes = {p.name: p.shape for p in catalog.parameters if p.is_weight}
        yield from map(as_warning, unusual_tensors(shapes, [*shapes]))
        yield from map(as_warning, types_by_file(catalog))


@rule(CONTENT, group=_TENSORS)
def tensors_are_as_configured(read: ContentRead) -> Iterator[Finding]:
    """The tensors of a Hugging Face folder are those that its config.json states."""
    if read.stated_model is not None:
        findings = findings_of(read.stated_model, read.source.require_catalog())
        yield from (finding for finding in findings if finding.severity == WARNING)


@rule(CONTENT, group=_REPLICAS)
def all_replicas_are_equal(read: ContentRead) -> Iterator[Finding]:
    """All bytes that several ranks should hold are the same."""
    if not read.replica_bytes or read.evidence is None:
        return
    digests = {file: file_scan.digests for file, file_scan in read.scans.items()}
    differences = [*unequal_replicas(read.source.require_catalog(), digests)]
    differing = [d for d in differences if d.name not in read.evidence.per_rank_tensors]
    if differing:
        groups = " and ".join(f"rank {format_ranges(ranks)}" for ranks in differing[0].groups)
        text = f"{differing[0].name!r}: {groups} hold other bytes of the same elements"
        text += f", and so for {len(differing) - 1} more" if differing[1:] else ""
        yield Finding(Message(f"{text}; `inspect --replicas` lists all"))


@rule(CONTENT, group=_CHECKSUMS)
def checksums_match(read: ContentRead) -> Iterator[Finding]:
    """Content is what the checksums are of that files carry."""
    wrong = [text for file_scan in read.scans.values() for text in file_scan.wrong_sums]
    and_more = [f"and {len(wrong) - _SHOWN} more"] if wrong[_SHOWN:] else []
    yield from (Finding(Message(text)) for text in (*wrong[:_SHOWN], *and_more))


@rule(CONTENT, group=_VALUES)
def values_are_numbers(read: ContentRead) -> Iterator[Finding]:
    """No float is NaN."""
    if nans := read.totals("nans"):
        values = format_count(sum(nans.values()), "value")
        yield Finding(Message(f"{values} of {summarize_names(nans, 3)}: no number (NaN)"))


@rule(CONTENT, group=_VALUES)
def values_are_finite(read: ContentRead) -> Iterator[Finding]:
    """No float is infinite."""
    if infinite := read.totals("infinite"):
        values = format_count(sum(infinite.values()), "value")
        yield as_warning(f"{values} of {summarize_names(infinite, 3)}: infinite")


@rule(CONTENT, group=_VALUES)
def matrices_are_filled(read: ContentRead) -> Iterator[Finding]:
    """No matrix is zero where most of its kind are not, no file ends in zeros, and no matrix has
    the bytes of another of its kind."""
    paths = read.source.paths
    zeros_by_file, equal = dict[int, dict[str, bool]](), dict[str, str]()
    for file, file_scan in read.scans.items():
        zeros = zeros_by_file[file] = dict[str, bool]()
        for entry, is_zero in file_scan.zeros.items():
            name = entry.partition(BOX_MARK)[0]
            zeros[name] = is_zero and zeros.get(name, True)
        if file_scan.tail is not None:
            name, nbytes = file_scan.tail
            text = f"the last {nbytes:,} bytes are zeros, from within {name!r} on"
            yield as_warning(f"{paths[file]}: {text}; was it copied whole?")
        all_zero = [name for name, is_zero in zeros.items() if is_zero]
        equal.update(equal_matrices(file_scan.first_of, all_zero))
    names = {name for zeros in zeros_by_file.values() for name in zeros}
    yield from map(
        as_warning, find_stored_zeros(zeros_by_file, names, is_full=True).in_words(paths)
    )
    if equal:
        name, first = next(iter(equal.items()))
        text = f"{name!r} has the bytes of {first!r}{and_more([*equal], 'such tensor')}"
        yield as_warning(f"{text}; was one written in the place of the other?")


@rule(CONTENT, group="holes")
def all_parts_were_written(read: ContentRead) -> Iterator[Finding]:
    """Files have no long parts that were never written."""
    if holes := read.totals("holes"):
        nbytes = sum(holes.values())
        yield as_warning(f"{nbytes:,} bytes of {summarize_names(holes, 3)} were never written")


@rule(CONTENT, group="leftovers")
def nothing_is_left_over(read: ContentRead) -> Iterator[Finding]:
    """No file is there that an interrupted save left behind."""
    listing = read.source.listing
    names = [n for n in (listing.entries if listing is not None else ()) if n.endswith(_LEFT_OVER)]
    if names:
        yield as_warning(f"{first_texts(names)}: left by a save that was interrupted")


# -- what was found right --------------------------------------------------------------------------


def _find_passed(read: ContentRead, findings: Collection[Finding]) -> Iterator[Passed]:
    """Yield of each group that found nothing what was compared; in the order of the groups."""
    groups = {finding.group_name for finding in findings}
    if _errors_without_strategy(read.source):
        text = "how its ranks shard tensors is not known; give --src-strategy"
        yield Passed(_STRATEGY, False, text)
    is_sound = not read.source.errors and not read.source.description.missing_files
    if is_sound:
        yield from (passed for passed in _statements_passed(read) if passed.group not in groups)
    if read.evidence is not None and not read.evidence.errors:
        yield _samples_passed(read.evidence)
    if read.replica_bytes and _REPLICAS not in groups:
        size = format_size(read.replica_bytes)
        yield Passed(
            _REPLICAS, True, f"all bytes that several ranks hold are the same, {size} read"
        )
    if _CHECKSUMS not in groups:
        yield _checksums_passed(read)
    if _VALUES not in groups:
        tensors = format_count(sum(s.tensors for s in read.scans.values()), "tensor")
        text = f"finite in {tensors}" + ("" if read.full else " looked at; --full looks at all")
        yield Passed(_VALUES, read.full, text)


def _statements_passed(read: ContentRead) -> Iterator[Passed]:
    """Yield that boxes and files are as they are declared, and as far as that was compared."""
    source, description = read.source, read.source.description
    if description.boxes:
        boxes = format_count(sum(map(len, description.boxes.values())), "box")
        tensors = format_count(len(description.boxes), "tensor")
        yield Passed(_BOXES, True, f"{boxes} of {tensors} cover each, and none twice")
    files = format_count(len(source.paths), "file")
    if source.form.described:
        yield Passed(_STATEMENTS, True, f"{files}: they hold what is said of them")
    if read.digests:
        count = format_count(read.digests, "file")
        yield Passed(_STATEMENTS, True, f"{count}, as the digests beside them state")
    if source.manifest is None:
        return
    how = "by sizes, and by times or samples"
    if read.fingerprints:
        how = f"{format_count(read.fingerprints, 'fingerprint')} compared with all bytes"
    elif read.full:
        how += "; the manifest has no fingerprints"
    if not source.form.described or read.fingerprints:
        yield Passed(_STATEMENTS, True, f"{files}, as rankxform wrote them: {how}")


def _samples_passed(evidence: Evidence) -> Passed:
    if evidence.samples:
        text = f"{format_count(evidence.samples, 'comparison')} of what several files hold"
        text += order_text(evidence.facts)
        return Passed(_COPIES, True, text)
    text = "no two files hold bytes that must be the same, or must not be"
    return Passed(_COPIES, False, text)


def _checksums_passed(read: ContentRead) -> Passed:
    """Return what was compared with checksums that files carry, of which none is wrong."""
    sums = sum(file_scan.sums for file_scan in read.scans.values())
    unchecked = sum(file_scan.unchecked_sums for file_scan in read.scans.values())
    if sums:
        return Passed(
            _CHECKSUMS, True, f"{format_count(sums, 'checksum')} compared with the content"
        )
    if unchecked:
        text = f"{format_count(unchecked, 'checksum')}; --full compares them"
        return Passed(_CHECKSUMS, False, text)
    return Passed(_CHECKSUMS, False, "the files carry none")


# -- replicas and samples alone --------------------------------------------------------------------


@dataclass(frozen=True, repr=False)
class ReplicaVerdict(Comparison):
    """What a comparison of replicas found."""

    # Replicas of which not all ranks hold the same bytes.
    differences: tuple[ReplicaDifference, ...]
    files_compared: int  # number of source files
    bytes_compared: int  # bytes read, by all processes
    seconds: float  # of the whole call
    warnings: tuple[str, ...]  # what may be wrong

    unknown: ClassVar[tuple[str, ...]] = (
        "no bytes are held by several ranks; nothing was compared",
    )

    @property
    def same(self) -> bool | None:
        """Whether all copies are the same; None where nothing is held by several ranks."""
        return not self.differences if self.bytes_compared else None

    def in_short(self) -> str:
        compared = f"{format_size(self.bytes_compared)} compared"
        return f"{format_count(len(self.differences), 'place')} differ, {compared}"

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield where source ranks that should hold the same bytes do not."""
        files, seconds = format_count(self.files_compared, "file"), format_seconds(self.seconds)
        compared = f"{format_size(self.bytes_compared)} in {files}, {seconds}"
        if self.same is None:
            yield lines("NOTHING COMPARED:", f"no bytes are held by several ranks, {compared}")
        elif self.same:
            yield lines("same", f"all bytes that several ranks hold, {compared}")
        else:
            groups = (
                (d.name, str(d.box), " | ".join(first_of_ranks([*ranks]) for ranks in d.groups))
                for d in self.differences
            )
            yield Table(("parameter", "region", "ranks with equal bytes"), [*groups], "places")
            places = format_count(len(self.differences), "place")
            yield lines("DIFFERENT:", f"{places}; compared {compared}")


@dataclass(frozen=True, repr=False)
class SamplesVerdict(Result):
    """Whether what files hold bears a strategy out."""

    src: str  # the checkpoint, as it was named
    src_ranks: int  # ranks of its strategy
    evidence: Mapping[str, int | None]  # samples that were compared, and what that took
    notices: tuple[str, ...]  # what to know
    warnings: tuple[str, ...]  # what may be wrong
    strategy: str  # the strategy, in words

    json_without = ("strategy",)

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows it."""
        return 0 if self.evidence["samples"] else DifferenceError.exit_code

    def in_short(self) -> str:
        if self.evidence["samples"]:
            return f"fits, by {samples_text(self.evidence)}"
        return "nothing could be compared: no two files hold slices of one tensor"

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        yield lines("from", shown_path(self.src), self.strategy)
        read = format_count(self.evidence["reads"] or 0, "read")
        size = format_size(self.evidence["bytes_read"] or 0)
        yield lines("strategy", f"{self.in_short()} ({read} of {size})")
        yield from self.notes()


def compare_samples(request: Request, team: Team) -> SamplesVerdict:
    """Compare what several files hold of the same elements. Collective."""
    _, source, target = with_evidence(resolve(request, team), team)
    catalog, evidence = source.require_catalog(), target.evidence
    return SamplesVerdict(
        source.where.path,
        catalog.ranks,
        evidence.facts,
        (*source.notices, *evidence.notices),
        (*source.warnings, *evidence.warnings),
        catalog_text(catalog),
    )


def compare_replicas(request: Request, team: Team, begin: Begin = begin_silently) -> ReplicaVerdict:
    """Read every byte that more than one source rank should hold, and compare.

    `request` names the source and its strategy; it has no destination.
    """
    began = time.monotonic()
    source = open_resolved_source(resolve_request(request, team), team, all_files=True)
    catalog = source.require_catalog()
    names = replicas_to_compare(catalog, source.indexes)
    total = _content_bytes(source, names)
    show = begin("compare", total) if team.rank == 0 else show_nothing
    digests = read_samples(source, [names], [], team, show)[0][True]
    differences = team.agree(lambda: tuple(unequal_replicas(catalog, digests)))
    seconds = time.monotonic() - began
    return ReplicaVerdict(differences, len(source.indexes), total, seconds, source.warnings)
