"""The verb ``verify``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rankxform.display.text import (
    first_of_ranks,
    format_count,
    format_seconds,
    format_size,
    labelled_lines,
    red,
    short_table,
)
from rankxform.errors import DifferenceError, UsageError
from rankxform.layout.names import format_ranges, pattern_of
from rankxform.transport import Team

from .options import Parsed, refuse_given_options
from .screen import Screen, describe_samples, notice_lines, warning_lines

if TYPE_CHECKING:
    from rankxform.engine.sinks import Difference
    from rankxform.verbs.verify import Verdict


def run(options: Parsed, team: Team) -> int:
    from rankxform.verbs.verify import verify, verify_alone

    screen = Screen(options, team)
    if team.bcast(lambda: _means_manifest(options)):
        request, verdict = None, verify_alone(options.src, team, screen.progress)
    else:
        request = screen.request()
        verdict = verify(request, team, screen.begin)
    text = partial(_verdict, verdict, screen.is_verbose, screen.is_quiet)
    screen.result("verify", verdict.as_dict, text)
    if request is not None:
        screen.page_of_work(verdict=verdict)
    return 0 if verdict.same else DifferenceError.exit_code


def _means_manifest(options: Parsed) -> bool:
    """Whether one folder was given, to be compared with its own manifest."""
    if options.dst or options.dst_option or options.src_option or not options.src:
        return False
    if options.src_strategy or options.dst_strategy:
        raise UsageError("one folder and a strategy: verify SRC DST, or verify DST by its manifest")
    refuse_given_options(
        options,
        "and one folder: it is compared with its own manifest; leave the option out, or give the "
        "source too: verify SRC DST",
    )
    if options.report:
        raise UsageError("--report is for a comparison with the source: verify SRC DST")
    return True


def _verdict(verdict: Verdict, verbose: bool = False, quiet: bool = False) -> str:
    """Say whether source and destination hold the same model, and where they do not.

    verbose: each slice that differs has a row; quiet: the last line alone.
    """
    files_text = format_count(verdict.files_compared, "file")
    size_text, duration = format_size(verdict.bytes_compared), format_seconds(verdict.seconds)
    compared_text = f"{size_text} in {files_text}, {duration}"
    notices = [] if quiet else notice_lines(verdict.notices)
    doubts = warning_lines(verdict.warnings)
    if verdict.same is None:
        reason = (
            f"samples alone were compared. {format_count(verdict.files_compared, 'file')} of the "
            "right size with sound headers; the manifest has no fingerprints (transform --verify "
            "--overwrite keeps them)"
        )
        return "\n".join(
            [
                labelled_lines("NOT VERIFIED:", reason),
                f"to compare every byte: {verdict.command}",
                *notices,
                *doubts,
            ]
        )
    if verdict.same:
        stands = describe_samples(verdict.evidence)
        compared_text = f"every byte compared, {compared_text}"
        if verdict.by_manifest:
            compared_text += "; with the fingerprints of the conversion"
        elif verdict.evidence.get("samples"):
            compared_text += f"; SRC's strategy stands on {stands}"
        return "\n".join([*notices, labelled_lines("same", compared_text), *doubts])
    slices = [difference for difference in verdict.differences if not difference.whole_file]
    files = {d.rank for d in verdict.differences if d.whole_file or verdict.by_manifest}
    names = {difference.name for difference in slices}
    count_texts = [format_count(len(names), "parameter"), format_count(len(slices), "slice")]
    where = ", ".join(
        ([] if verdict.by_manifest or not slices else count_texts)
        + ([format_count(len(files), "file")] if files else [])
    )
    last_line = f"{red('DIFFERENT')}: {where}; compared {compared_text}"
    if quiet:
        return "\n".join([*doubts, last_line])
    rows = _differences(verdict, verbose)
    return "\n".join([*notices, rows, *doubts, last_line])


def _differences(verdict: Verdict, verbose: bool) -> str:
    """Write a row for each difference, or for all of one kind."""
    differences_by_key: dict[object, list[Difference]] = {}
    for difference in verdict.differences:
        key = difference.name if difference.whole_file else pattern_of(difference.name)
        differences_by_key.setdefault(
            id(difference) if verbose else (key, difference.why, difference.whole_file), []
        ).append(difference)
    head = ("file" if verdict.names else "rank", "first at", "elements", "what differs")
    rows = [_row(verdict, differences) for differences in differences_by_key.values()]
    return short_table(head, rows, "slices" if verbose else "kinds of difference")


def _row(verdict: Verdict, differences: Sequence[Difference]) -> tuple[object, ...]:
    first = differences[0]
    names = {difference.name for difference in differences}
    title = first.name if len(names) == 1 else f"{pattern_of(first.name)} ({len(names):,})"
    ranks = sorted({difference.rank for difference in differences})
    where = (
        first_of_ranks([verdict.names.get(rank, "-") for rank in ranks])
        if verdict.names
        else format_ranges(ranks)
    )
    if first.index is None:
        return where, "", "", f"{title}: {first.why}"
    differ = sum(difference.count for difference in differences)
    all_elements = sum(difference.size for difference in differences)
    return where, str(list(first.index)), f"{differ:,} of {all_elements:,}", title
