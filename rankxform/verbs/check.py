"""`inspect --check`, `inspect --replicas`."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain

from rankxform.checkpoints.base import FORMS
from rankxform.display.text import (
    first_of_ranks,
    format_count,
    format_seconds,
    format_size,
    shown_path,
)
from rankxform.engine.checksum import FileScan, bytes_to_scan, scan
from rankxform.errors import CheckpointError, DifferenceError, Message, RankxformError, UsageError
from rankxform.formats.container import BOX_MARK
from rankxform.layout.names import first_texts, format_ranges, summarize_names
from rankxform.planning.catalog import Catalog, catalog_text
from rankxform.planning.evidence import (
    Evidence,
    ReplicaDifference,
    TensorsToRead,
    replicas_to_compare,
    samples_text,
    unequal_replicas,
)
from rankxform.planning.selection import missing_slices, types_by_file, unusual_tensors
from rankxform.request import Request
from rankxform.results import NORMAL, Result, Section, Table, lines
from rankxform.source.open import Source, open_source
from rankxform.statements import CONTENT, ERROR, SAMPLES, Finding, as_warning, rule, run_rules
from rankxform.storage.posix import OnProgress
from rankxform.target.inputs import resolve_request, source_ref_with_strategy
from rankxform.target.resolve import open_resolved_source, resolve, resolve_target
from rankxform.target.target import Conversion
from rankxform.transport import Team
from rankxform.transport.team import ShowProgress, show_nothing
from rankxform.values import NamedTuple, dataclass

from .evidence import examine, read_samples, require_evidence, with_evidence

RIGHT, DOUBTFUL, WRONG, NOT_CHECKED = "right", "doubtful", "wrong", "not checked"
_SHOWN = 20
_ORDER = (WRONG, DOUBTFUL, RIGHT, NOT_CHECKED)
_LEFT_OVER = (".part", ".tmp")


class CheckRow(NamedTuple):
    """What was checked, how that ended (right, doubtful, wrong, not checked), and more words."""

    check: str
    state: str
    text: str


@dataclass(frozen=True, repr=False)
class Check(Result):
    """What a check of a checkpoint found."""

    src: str  # the checkpoint, as it was named
    form: str  # its form
    full: bool  # whether every byte was read
    files_compared: int  # number of files
    # What was checked, each with its state: right, doubtful, wrong, or not checked.
    rows: tuple[CheckRow, ...]
    reads: int  # number of reads of content, by all processes
    bytes_read: int  # content read, by all processes
    seconds: float  # of the whole call

    @property
    def same(self) -> bool | None:
        """Whether nothing is wrong; None where nothing could be compared with anything."""
        if any(row.state == WRONG for row in self.rows):
            return False
        return True if any(row.state == RIGHT for row in self.rows) else None

    def __bool__(self) -> bool:
        """Whether something was compared and nothing is wrong.

        Raises DifferenceError where nothing could be compared with anything.
        """
        if self.same is None:
            raise DifferenceError(
                "nothing could be compared with anything",
                "look at `same` and `rows`",
                where=self.src,
            )
        return self.same

    def in_short(self) -> str:
        text_by_verdict = {
            True: "nothing wrong was found",
            False: "WRONG",
            None: "nothing could be compared",
        }
        read = (
            f"{format_count(self.files_compared, 'file')}, {format_size(self.bytes_read)} looked at"
        )
        doubts = sum(row.state == DOUBTFUL for row in self.rows)
        also = f", {format_count(doubts, 'doubt')}" if doubts else ""
        verdict = text_by_verdict[self.same] + also
        return f"{self.form}: {verdict}; {read}, {format_seconds(self.seconds)}"

    json_first = ("same",)

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows it."""
        if self.same is None:
            return DifferenceError.exit_code
        return 0 if self.same else CheckpointError.exit_code

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield what was found, what is wrong first."""
        verdict_text = {
            True: ": nothing wrong was found",
            False: "",
            None: ": nothing could be compared with anything",
        }[self.same]
        files = format_count(self.files_compared, "file")
        title = FORMS[self.form].title
        label = "WRONG" if self.same is False else ""
        yield lines(label, f"{shown_path(self.src)}: {title}, {files}{verdict_text}")
        for row in sorted(self.rows, key=lambda row: _ORDER.index(row.state)):
            yield lines(row.check, f"{row.state}: {row.text}")
        reads, passed = format_count(self.reads, "read"), format_seconds(self.seconds)
        yield lines("looked at", f"{reads}, {format_size(self.bytes_read)}, {passed}")


def check(
    request: Request,
    full: bool,
    team: Team,
    begin: Callable[[int], ShowProgress] = lambda total: show_nothing,
) -> Check:
    """Look for all that is wrong with a checkpoint; `full`: read every byte. Collective."""
    began = time.monotonic()
    where = team.bcast(lambda: source_ref_with_strategy(request))
    source = open_source(where, team)
    asked_amiss = where.strategy is not None and any(e.error is UsageError for e in source.errors)
    if not source.paths or asked_amiss:
        source.require()
    rows, evidence, compared = [*_statements(source), *_ranks(source)], Evidence(), {}
    if not source.errors:
        evidence = _examine_or_finding(request, source, team)
        rows += [*_rows_of_samples(evidence), *_rows_of_tensors(source.require_catalog())]
        if full and not evidence.errors:
            compared = replicas_to_compare(source.require_catalog(), source.indexes)
    scans_by_file = scan_all(source, full, compared, team, begin)
    scans = [*scans_by_file.values()]
    rows += team.bcast(
        lambda: [
            *_rows_of_replicas(source, compared, scans_by_file, evidence),
            *rows_of_content(ContentRead(source, scans, full)),
        ]
    )
    return Check(
        source.where.path,
        source.form.name,
        full,
        len(source.paths),
        tuple(rows),
        evidence.reads + sum(file_scan.reads for file_scan in scans),
        evidence.bytes_read + sum(file_scan.nbytes for file_scan in scans),
        time.monotonic() - began,
    )


def scan_all(
    source: Source,
    full: bool,
    compared: Mapping[int, Collection[str]],
    team: Team,
    begin: Callable[[int], ShowProgress],
) -> dict[int, FileScan]:
    """Return what all files hold. Collective.

    compared: by file the tensors of which digests are made.
    """
    all_indexes = {**source.indexes, **source.extra_rank_index}
    total = sum(index.size if full else bytes_to_scan(index) for index in all_indexes.values())

    def scan_local_files(on_progress: OnProgress) -> list[tuple[int, FileScan]]:
        return [
            (file, scan(path, all_indexes[file], full, on_progress, {*compared.get(file, ())}))
            for file in source.reach.partition(all_indexes)[team.rank]
            for path in (source.paths[file],)
        ]

    local_scans = team.work(scan_local_files, begin(total))
    return dict(chain.from_iterable(team.allgather(lambda: local_scans)))


def _statements(source: Source) -> Iterator[CheckRow]:
    """Yield what files, headers and tables say of each other."""
    described = source.form.described
    for error in source.errors[:_SHOWN]:
        is_question = not described and source.where.strategy is None and error.error is UsageError
        if is_question and len(source.indexes) == len(source.paths):
            text = "how its ranks shard tensors is not known; give --src-strategy"
            yield CheckRow("strategy", NOT_CHECKED, text)
        else:
            yield CheckRow("statements", WRONG, error.text.replace("\n", "; "))
    if source.errors[_SHOWN:]:
        yield CheckRow("statements", WRONG, f"and {len(source.errors) - _SHOWN} more faults")
    for text in source.warnings:
        yield CheckRow("statements", DOUBTFUL, text)
    description, number = source.description, len(source.paths)
    for path in description.missing_files.values():
        yield CheckRow(
            "statements", WRONG, f"{path}: is not there, and {description.source} lists it"
        )
    if source.errors or description.missing_files:
        return
    if description.boxes:
        boxes = format_count(sum(map(len, description.boxes.values())), "box")
        tensors = format_count(len(description.boxes), "tensor")
        text = f"{boxes} of {tensors} cover each, and none twice"
        yield CheckRow("boxes", RIGHT, text)
    if described:
        yield CheckRow(
            "statements", RIGHT, f"{format_count(number, 'file')}: they hold what is said of them"
        )
    elif source.manifest is not None:
        yield CheckRow(
            "statements", RIGHT, f"{format_count(number, 'file')}, as rankxform wrote them"
        )


def _ranks(source: Source) -> Iterator[CheckRow]:
    """Yield which ranks have no file, and whether other files hold what theirs should."""
    if source.form.described or not source.paths:
        return
    if source.where.strategy is None:
        missing_ranks = sorted({*range(max(source.paths))} - {*source.paths})
        if missing_ranks:
            yield CheckRow(
                "ranks",
                DOUBTFUL,
                f"rank {format_ranges(missing_ranks)} has no file, and later ones have",
            )
        return
    missing_ranks = [rank for rank in source.needed_files if rank not in source.paths]
    if not missing_ranks:
        return
    message = f"rank {format_ranges(missing_ranks)} of {source.where.strategy.label} has no file"
    if source.catalog is None:
        yield CheckRow("ranks", WRONG, message)
        return
    losses_by_ranks = missing_slices(source.catalog.parameters)
    names = [parameter.name for losses in losses_by_ranks.values() for parameter, _ in losses]
    names += source.catalog.unreachable
    if names:
        yield CheckRow(
            "ranks", WRONG, f"{message}, and no other holds slices of {summarize_names(names, 3)}"
        )
    else:
        yield CheckRow("ranks", DOUBTFUL, f"{message}; others hold all that it should")


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


def _rows_of_samples(evidence: Evidence) -> Iterator[CheckRow]:
    """Yield whether what files hold of the same elements agrees."""
    for error in evidence.errors:
        yield CheckRow("copies", WRONG, error.text.replace("\n", "; "))
    for text in evidence.warnings:
        yield CheckRow("copies", DOUBTFUL, text)
    if evidence.errors:
        return
    if evidence.samples:
        text = f"{format_count(evidence.samples, 'comparison')} of what several files hold"
        yield CheckRow("copies", RIGHT, text)
    else:
        text = "no two files hold bytes that must be the same, or must not be"
        yield CheckRow("copies", NOT_CHECKED, text)


def _rows_of_replicas(
    source: Source,
    compared: Mapping[int, Collection[str]],
    scans: Mapping[int, FileScan],
    evidence: Evidence,
) -> list[CheckRow]:
    """Say whether all bytes that several ranks should hold are the same."""
    nbytes = _content_bytes(source, compared)
    if not nbytes:
        return []
    digests = {file: file_scan.digests for file, file_scan in scans.items()}
    differences = [*unequal_replicas(source.require_catalog(), digests)]
    differing = [d for d in differences if d.name not in evidence.per_rank_tensors]
    if differing:
        groups = " and ".join(f"rank {format_ranges(ranks)}" for ranks in differing[0].groups)
        text = f"{differing[0].name!r}: {groups} hold other bytes of the same elements"
        text += f", and so for {len(differing) - 1} more" if differing[1:] else ""
        return [CheckRow("replicas", WRONG, f"{text}; `inspect --replicas` lists all")]
    text = f"all bytes that several ranks hold are the same, {format_size(nbytes)} read"
    return [CheckRow("replicas", RIGHT, text)]


def _content_bytes(source: Source, tensors: Mapping[int, Collection[str]]) -> int:
    return sum(source.indexes[file].nbytes(n) for file, names in tensors.items() for n in names)


def _rows_of_tensors(catalog: Catalog) -> Iterator[CheckRow]:
    shapes = {p.name: p.shape for p in catalog.parameters if p.is_weight}
    for text in (*unusual_tensors(shapes, [*shapes]), *types_by_file(catalog)):
        yield CheckRow("tensors", DOUBTFUL, text)


# -- the files' content ----------------------------------------------------------------------------


class ContentRead(NamedTuple):
    """What files hold; the subject of rules over content. On process 0."""

    source: Source
    scans: Sequence[FileScan]
    full: bool  # whether every byte was read

    def totals(self, kind: str) -> dict[str, int]:
        """Return the number of such values, or bytes, by tensor: "nans", "infinite", "holes"."""
        by_tensor: dict[str, int] = {}
        for file_scan in self.scans:
            for box, number in getattr(file_scan, kind).items():
                name = box.partition(BOX_MARK)[0]
                by_tensor[name] = by_tensor.get(name, 0) + number
        return by_tensor


@rule(CONTENT)
def checksums_match(read: ContentRead) -> Iterator[Finding]:
    """Content is what the checksums are of that files carry."""
    wrong = [text for file_scan in read.scans for text in file_scan.wrong_sums]
    and_more = [f"and {len(wrong) - _SHOWN} more"] if wrong[_SHOWN:] else []
    yield from (Finding(Message(text)) for text in (*wrong[:_SHOWN], *and_more))


@rule(CONTENT)
def values_are_numbers(read: ContentRead) -> Iterator[Finding]:
    """No float is NaN."""
    if nans := read.totals("nans"):
        values = format_count(sum(nans.values()), "value")
        yield Finding(Message(f"{values} of {summarize_names(nans, 3)}: no number (NaN)"))


@rule(CONTENT)
def values_are_finite(read: ContentRead) -> Iterator[Finding]:
    """No float is infinite."""
    if infinite := read.totals("infinite"):
        values = format_count(sum(infinite.values()), "value")
        yield as_warning(f"{values} of {summarize_names(infinite, 3)}: infinite")


@rule(CONTENT)
def all_parts_were_written(read: ContentRead) -> Iterator[Finding]:
    """Files have no long parts that were never written."""
    if holes := read.totals("holes"):
        nbytes = sum(holes.values())
        yield as_warning(f"{nbytes:,} bytes of {summarize_names(holes, 3)} were never written")


@rule(CONTENT)
def nothing_is_left_over(read: ContentRead) -> Iterator[Finding]:
    """No file is there that an interrupted save left behind."""
    listing = read.source.listing
    names = [n for n in (listing.entries if listing is not None else ()) if n.endswith(_LEFT_OVER)]
    if names:
        yield as_warning(f"{first_texts(names)}: left by a save that was interrupted")


_ROW_OF_RULE = {
    "checksums_match": "checksums",
    "values_are_numbers": "values",
    "values_are_finite": "values",
    "all_parts_were_written": "holes",
    "nothing_is_left_over": "leftovers",
}
"""What rows call what is checked by a rule."""


def rows_of_content(read: ContentRead) -> list[CheckRow]:
    """Return what was found in the files' content, and what was found right."""
    by_check: dict[str, list[CheckRow]] = {"checksums": [], "values": []}
    for finding in run_rules(CONTENT, read):
        check, state = _ROW_OF_RULE[finding.rule], WRONG if finding.severity == ERROR else DOUBTFUL
        by_check.setdefault(check, []).append(CheckRow(check, state, finding.text))
    for check, passed in (("checksums", _sums_passed(read)), ("values", _values_passed(read))):
        by_check[check] = by_check[check] or [CheckRow(check, *passed)]
    return [row for rows in by_check.values() for row in rows]


def _sums_passed(read: ContentRead) -> tuple[str, str]:
    """Return the state of checksums of which none is wrong, in words."""
    sums = sum(file_scan.sums for file_scan in read.scans)
    unchecked = sum(file_scan.unchecked_sums for file_scan in read.scans)
    if sums:
        return RIGHT, f"{format_count(sums, 'checksum')} compared with the content"
    if unchecked:
        return NOT_CHECKED, f"{format_count(unchecked, 'checksum')}; --full compares them"
    return NOT_CHECKED, "the files carry none"


def _values_passed(read: ContentRead) -> tuple[str, str]:
    """Return the state of values of which all are finite, in words."""
    tensors_text = format_count(sum(file_scan.tensors for file_scan in read.scans), "tensor")
    if read.full:
        return RIGHT, f"finite in {tensors_text}"
    return NOT_CHECKED, f"finite in {tensors_text} looked at; --full looks at all"


@dataclass(frozen=True, repr=False)
class ReplicaVerdict(Result):
    """What a comparison of replicas found."""

    # Replicas of which not all ranks hold the same bytes.
    differences: tuple[ReplicaDifference, ...]
    files_compared: int  # number of source files
    bytes_compared: int  # bytes read, by all processes
    seconds: float  # of the whole call
    warnings: tuple[str, ...]  # what may be wrong

    @property
    def same(self) -> bool | None:
        """Whether all copies are the same; None where nothing is held by several ranks."""
        return not self.differences if self.bytes_compared else None

    def __bool__(self) -> bool:
        """Whether all copies are the same. Raises DifferenceError where there are none."""
        if self.same is None:
            raise DifferenceError("no bytes are held by several ranks; nothing was compared")
        return self.same

    json_first = ("same",)

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows it."""
        return 0 if self.same else DifferenceError.exit_code

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


def compare_replicas(
    request: Request, team: Team, begin: Callable[[int], ShowProgress] = lambda total: show_nothing
) -> ReplicaVerdict:
    """Read every byte that more than one source rank should hold, and compare.

    `request` names the source and its strategy; it has no destination.
    """
    began = time.monotonic()
    source = open_resolved_source(resolve_request(request, team), team, all_files=True)
    catalog = source.require_catalog()
    names = replicas_to_compare(catalog, source.indexes)
    total = _content_bytes(source, names)
    show = begin(total) if team.rank == 0 else show_nothing
    digests = read_samples(source, [TensorsToRead(names, True)], team, show).samples[True]
    differences = team.agree(lambda: tuple(unequal_replicas(catalog, digests)))
    seconds = time.monotonic() - began
    return ReplicaVerdict(differences, len(source.indexes), total, seconds, source.warnings)
