"""``inspect PATH --check``: all that can be found wrong with a checkpoint without converting it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from rankxform.display.units import format_count, format_seconds, format_size
from rankxform.engine.scan import Scanned, looked_at, scan
from rankxform.errors import DifferenceError, RankxformError, UsageError
from rankxform.formats.base import PLACE
from rankxform.layout.names import format_ranges, summarize_names
from rankxform.planning.consistency import Evidence
from rankxform.planning.losses import lost_slices
from rankxform.planning.unusual import types_by_file, unusual_tensors
from rankxform.request import Request
from rankxform.results import Result
from rankxform.source.opening import Source, open_source
from rankxform.storage.posix import OnProgress
from rankxform.target.aim import aim
from rankxform.target.asked import read_request, where_given
from rankxform.transport import Team
from rankxform.transport.team import ShowProgress, show_nothing
from rankxform.values import dataclass

from .evidence import examine

RIGHT, DOUBTFUL, WRONG, NOT_CHECKED = "right", "doubtful", "wrong", "not checked"
_SHOWN = 20
_LEFT_OVER = (".part", ".tmp")


class Row(NamedTuple):
    """What was checked, how that ended (right, doubtful, wrong, not checked), and more words."""

    check: str
    state: str
    text: str


@dataclass(frozen=True, repr=False)
class Check(Result):
    """What a check of a checkpoint found.

    full: whether every byte was read. reads, bytes_read: of content, by all processes; seconds: of
    the whole call. rows: what was checked, each with its state (right, doubtful, wrong, not
    checked).
    """

    src: str
    form: str
    full: bool
    files_compared: int
    rows: tuple[Row, ...]
    reads: int
    bytes_read: int
    seconds: float

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
        told = {True: "nothing wrong was found", False: "WRONG", None: "nothing could be compared"}
        read = (
            f"{format_count(self.files_compared, 'file')}, {format_size(self.bytes_read)} looked at"
        )
        return f"{self.form}: {told[self.same]}; {read}, {format_seconds(self.seconds)}"

    def amounts(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for row in self.rows:
            text = f"{row.state}: {row.text}"
            found[row.check] = f"{found[row.check]}; {text}" if row.check in found else text
        return {"of": self.src, **found}

    def as_dict(self) -> dict[str, Any]:
        """Return the result as ``inspect --check --json`` prints it."""
        found = asdict(self)
        found["rows"] = [row._asdict() for row in self.rows]
        return {**found, "same": self.same}


def check(
    request: Request,
    full: bool,
    team: Team,
    begin: Callable[[int], ShowProgress] = lambda total: show_nothing,
) -> Check:
    """Look for all that is wrong with a checkpoint; `full`: read every byte. Collective."""
    began = time.monotonic()
    where = team.bcast(lambda: where_given(request))
    source = open_source(where, team)
    asked_amiss = where.strategy is not None and any(f.kind is UsageError for f in source.faults)
    if not source.paths or asked_amiss:
        source.require()
    rows = [*_statements(source), *_ranks(source)]
    evidence = Evidence()
    if not source.faults:
        judged, evidence = _judged(request, source, team)
        rows += judged
        shapes = {p.name: p.shape for p in source.table.parameters if p.is_weight}
        noticed = [*unusual_tensors(shapes, [*shapes]), *types_by_file(source.table)]
        rows += [Row("tensors", DOUBTFUL, text) for text in noticed]
    every = {**source.indexes, **source.extra}
    total = sum(one.size if full else looked_at(one) for one in every.values())

    def mine(on_progress: OnProgress) -> list[Scanned]:
        return [
            scan(source.paths[file], every[file], full, on_progress)
            for file in source.reach.partition(every)[team.rank]
        ]

    found = team.work(mine, begin(total))
    scanned = [one for some in team.allgather(lambda: found) for one in some]
    rows += [*_contents(scanned, full), *team.bcast(lambda: [*_leftovers(source)])]
    return Check(
        source.where.path,
        source.form.name,
        full,
        len(source.paths),
        tuple(rows),
        evidence.reads + sum(one.reads for one in scanned),
        evidence.bytes_read + sum(one.nbytes for one in scanned),
        time.monotonic() - began,
    )


def _statements(source: Source) -> Iterator[Row]:
    """Yield what files, headers and tables say of each other."""
    described = source.form.described
    for fault in source.faults[:_SHOWN]:
        is_question = not described and source.where.strategy is None and fault.kind is UsageError
        if is_question and len(source.indexes) == len(source.paths):
            text = "how its ranks shard tensors is not known; give --src-strategy"
            yield Row("strategy", NOT_CHECKED, text)
        else:
            yield Row("statements", WRONG, fault.text.replace("\n", "; "))
    if source.faults[_SHOWN:]:
        yield Row("statements", WRONG, f"and {len(source.faults) - _SHOWN} more faults")
    for text in source.warnings:
        yield Row("statements", DOUBTFUL, text)
    description, number = source.description, len(source.paths)
    for path in description.missing_files.values():
        yield Row("statements", WRONG, f"{path}: is not there, and {description.source} lists it")
    if source.faults or description.missing_files:
        return
    if description.boxes:
        boxes = format_count(sum(map(len, description.boxes.values())), "box")
        tensors = format_count(len(description.boxes), "tensor")
        text = f"{boxes} of {tensors} cover each, and none twice"
        yield Row("boxes", RIGHT, text)
    if described:
        yield Row(
            "statements", RIGHT, f"{format_count(number, 'file')}: they hold what is said of them"
        )
    elif source.own is not None:
        yield Row("statements", RIGHT, f"{format_count(number, 'file')}, as rankxform wrote them")


def _ranks(source: Source) -> Iterator[Row]:
    """Yield which ranks have no file, and whether other files hold what theirs should."""
    if source.form.described or not source.paths:
        return
    if source.where.strategy is None:
        gone = sorted({*range(max(source.paths))} - {*source.paths})
        if gone:
            yield Row(
                "ranks", DOUBTFUL, f"rank {format_ranges(gone)} has no file, and later ones have"
            )
        return
    gone = [rank for rank in source.wanted if rank not in source.paths]
    if not gone:
        return
    what = f"rank {format_ranges(gone)} of {source.where.strategy.label} has no file"
    if source.catalog is None:
        yield Row("ranks", WRONG, what)
        return
    lost = lost_slices(source.catalog.parameters)
    names = [one.name for some in lost.values() for one, _ in some]
    names += source.catalog.unreachable
    if names:
        yield Row(
            "ranks", WRONG, f"{what}, and no other holds slices of {summarize_names(names, 3)}"
        )
    else:
        yield Row("ranks", DOUBTFUL, f"{what}; others hold all that it should")


def _judged(request: Request, source: Source, team: Team) -> tuple[list[Row], Evidence]:
    """Compare what files hold of the same elements. Collective."""
    try:
        asked = read_request(request, team)
        evidence = examine(asked, source, aim(asked, source, team), team)
    except RankxformError as error:
        return [Row("copies", WRONG, str(error))], Evidence()
    rows = [Row("copies", DOUBTFUL, text) for text in evidence.warnings]
    if evidence.samples:
        text = f"{format_count(evidence.samples, 'comparison')} of what several files hold"
        rows.append(Row("copies", RIGHT, text))
    else:
        text = "no two files hold bytes that must be the same, or must not be"
        rows.append(Row("copies", NOT_CHECKED, text))
    return rows, evidence


def _contents(scanned: Iterable[Scanned], full: bool) -> Iterator[Row]:
    """Yield what was found in the files' content."""
    every = [*scanned]
    wrong = [text for one in every for text in one.wrong_sums]
    for text in wrong[:_SHOWN]:
        yield Row("checksums", WRONG, text)
    if wrong[_SHOWN:]:
        yield Row("checksums", WRONG, f"and {len(wrong) - _SHOWN} more")
    sums, left = sum(one.sums for one in every), sum(one.unchecked_sums for one in every)
    if sums and not wrong:
        yield Row("checksums", RIGHT, f"{format_count(sums, 'checksum')} compared with the content")
    elif left:
        yield Row(
            "checksums", NOT_CHECKED, f"{format_count(left, 'checksum')}; --full compares them"
        )
    elif not sums:
        yield Row("checksums", NOT_CHECKED, "the files carry none")
    looked = format_count(sum(one.tensors for one in every), "tensor") + (
        "" if full else " looked at"
    )
    nans, infinite = _joined(one.nans for one in every), _joined(one.infinite for one in every)
    if nans:
        values = format_count(sum(nans.values()), "value")
        text = f"{values} of {summarize_names(nans, 3)}: no number (NaN)"
        yield Row("values", WRONG, text)
    if infinite:
        values = format_count(sum(infinite.values()), "value")
        text = f"{values} of {summarize_names(infinite, 3)}: infinite"
        yield Row("values", DOUBTFUL, text)
    if not nans and not infinite:
        rest = "" if full else "; --full looks at all"
        yield Row("values", RIGHT if full else NOT_CHECKED, f"finite in {looked}{rest}")
    lost = _joined(one.holes for one in every)
    if lost:
        text = f"{sum(lost.values()):,} bytes of {summarize_names(lost, 3)} were never written"
        yield Row("holes", DOUBTFUL, text)


def _joined(some: Iterable[dict[str, int]]) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in some:
        for box, number in one.items():
            name = box.partition(PLACE)[0]
            found[name] = found.get(name, 0) + number
    return found


def _leftovers(source: Source) -> Iterator[Row]:
    """Yield files that a save left behind."""
    names = source.listing.entries if source.listing is not None else ()
    left = [name for name in names if name.endswith(_LEFT_OVER)]
    if left:
        more = f" and {len(left) - 3} more" if left[3:] else ""
        text = f"{', '.join(left[:3])}{more}: left by a save that was interrupted"
        yield Row("leftovers", DOUBTFUL, text)
