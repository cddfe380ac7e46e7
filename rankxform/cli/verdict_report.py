"""What the command prints of a verification, and of a comparison of replicas."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rankxform.layout.names import pattern_of, ranges

from .report import notes, warnings
from .terminal import labelled, red
from .units import abbreviate, count, seconds, short_table, size

if TYPE_CHECKING:
    from rankxform.engine.compare_sink import Difference
    from rankxform.job.replicas import ReplicaVerdict
    from rankxform.job.verdict import Verdict


def verdict(found: Verdict, verbose: bool = False, quiet: bool = False) -> str:
    """Say whether source and destination hold the same model, and where they do not.

    verbose: each slice that differs has a row; quiet: the last line alone.
    """
    what = _compared(found.files_compared, found.bytes_compared, found.seconds)
    notices = [] if quiet else notes(found.notices)
    doubts = warnings(found.warnings)
    if found.same is None:
        why = (
            f"no byte was compared. {count(found.files_compared, 'file')} of the right size with "
            "sound headers; the manifest has no fingerprints (transform --verify --overwrite keeps "
            "them)"
        )
        return "\n".join(
            [
                labelled("NOT VERIFIED:", why),
                f"to compare every byte: {found.command}",
                *notices,
                *doubts,
            ]
        )
    if found.same:
        return "\n".join([*notices, labelled("same", f"every byte compared, {what}"), *doubts])
    slices = [one for one in found.differences if not one.whole_file]
    files = {one.rank for one in found.differences if one.whole_file or found.by_manifest}
    names = {one.name for one in slices}
    told = [count(len(names), "parameter"), count(len(slices), "slice")]
    where = ", ".join(
        ([] if found.by_manifest or not slices else told)
        + ([count(len(files), "file")] if files else [])
    )
    last = f"{red('DIFFERENT')}: {where}; compared {what}"
    if quiet:
        return "\n".join([*doubts, last])
    rows = _differences(found, verbose)
    return "\n".join([*notices, rows, *doubts, last])


def _compared(files: int, nbytes: int, duration: float) -> str:
    return f"{size(nbytes)} in {count(files, 'file')}, {seconds(duration)}"


def _differences(found: Verdict, verbose: bool) -> str:
    """Write a row for each difference, or for all of one kind."""
    alike: dict[object, list[Difference]] = {}
    for one in found.differences:
        key = one.name if one.whole_file else pattern_of(one.name)
        alike.setdefault(id(one) if verbose else (key, one.why, one.whole_file), []).append(one)
    head = ("file" if found.names else "rank", "first at", "elements", "what differs")
    rows = [_row(found, some) for some in alike.values()]
    return short_table(head, rows, "slices" if verbose else "kinds of difference")


def _row(found: Verdict, some: Sequence[Difference]) -> tuple[object, ...]:
    first = some[0]
    names = {one.name for one in some}
    what = first.name if len(names) == 1 else f"{pattern_of(first.name)} ({len(names):,})"
    ranks = sorted({one.rank for one in some})
    where = (
        abbreviate([found.names.get(rank, "-") for rank in ranks]) if found.names else ranges(ranks)
    )
    if first.index is None:
        return where, "", "", f"{what}: {first.why}"
    differ, every = sum(one.count for one in some), sum(one.size for one in some)
    return where, str(list(first.index)), f"{differ:,} of {every:,}", what


def replicas(found: ReplicaVerdict) -> str:
    """Say where source ranks that should hold the same bytes do not."""
    what = _compared(found.files_compared, found.bytes_compared, found.seconds)
    told = warnings(found.warnings)
    if found.same is None:
        return "\n".join([f"NOTHING COMPARED: no bytes are held by several ranks, {what}", *told])
    if found.same:
        return "\n".join([*told, labelled("same", f"all bytes that several ranks hold, {what}")])
    rows = [
        (one.name, one.box, " | ".join(abbreviate(list(ranks)) for ranks in one.groups))
        for one in found.differences
    ]
    lines = short_table(("parameter", "region", "ranks with equal bytes"), rows, "places")
    last = f"{red('DIFFERENT')}: {count(len(rows), 'place')}; compared {what}"
    return "\n".join([lines, *told, last])
