"""The verb ``verify``."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from rankxform.display.terminal import labelled_lines, red
from rankxform.display.units import (
    first_of_ranks,
    format_count,
    format_seconds,
    format_size,
    short_table,
)
from rankxform.errors import DifferenceError, UsageError
from rankxform.layout.names import format_ranges, pattern_of
from rankxform.options import RUN, facts_of
from rankxform.request import option_table
from rankxform.transport import Team

from .options import (
    STRATEGIES_EXAMPLE,
    add_folders,
    add_number,
    add_option,
    add_report,
    add_table,
    add_work,
    refuse,
)
from .report import notes, samples_in_words, warnings
from .screen import Screen

if TYPE_CHECKING:
    from rankxform.engine.compare_sink import Difference
    from rankxform.job.verdict import Verdict

SUMMARY = "Compare a destination with its source, or with its own manifest."
EXAMPLE = f"rankxform verify -n 8 output/checkpoint new_ckpt \\\n      {STRATEGIES_EXAMPLE}"


def add_options(verb: argparse.ArgumentParser) -> None:
    add_folders(
        verb, dst="folder to verify; with one folder alone, it is compared with its own manifest"
    )
    add_table(verb, "verify")
    _ignore_writing(verb)
    run = verb.add_argument_group(RUN)
    add_work(verb, run)
    add_number(verb)
    add_report(verb)


def _ignore_writing(verb: argparse.ArgumentParser) -> None:
    """Accept, and ignore, options that concern writing alone, so that `verify` takes the same
    command as `transform`."""
    for one in option_table():
        verbs = facts_of(one).verbs
        if "transform" in verbs and "verify" not in verbs:
            add_option(verb, one, dest="ignored_" + one.name, help=argparse.SUPPRESS)
    verb.add_argument("--profile", action="store_true", help=argparse.SUPPRESS)


def run(options: argparse.Namespace, team: Team) -> int:
    from rankxform.job.verify import verify
    from rankxform.job.verify_manifest import verify_alone

    screen = Screen(options, team)
    if team.bcast(lambda: _means_manifest(options)):
        request, found = None, verify_alone(options.src, team, screen.progress)
    else:
        request = screen.request()
        found = verify(request, team, screen.begin)
    text = partial(_verdict, found, screen.is_verbose, screen.is_quiet)
    screen.result("verify", found.as_dict, text)
    if request is not None:
        screen.page_of_work(request, verdict=found)
    return 0 if found.same else DifferenceError.exit_code


def _means_manifest(options: argparse.Namespace) -> bool:
    """Whether one folder was given, to be compared with its own manifest."""
    if options.dst or options.dst_option or options.src_option or not options.src:
        return False
    if options.src_strategy or options.dst_strategy:
        raise UsageError("one folder and a strategy: verify SRC DST, or verify DST by its manifest")
    refuse(
        options,
        "and one folder: it is compared with its own manifest; leave the option out, or give the "
        "source too: verify SRC DST",
    )
    if options.report:
        raise UsageError("--report is for a comparison with the source: verify SRC DST")
    return True


def _verdict(found: Verdict, verbose: bool = False, quiet: bool = False) -> str:
    """Say whether source and destination hold the same model, and where they do not.

    verbose: each slice that differs has a row; quiet: the last line alone.
    """
    what = _compared(found.files_compared, found.bytes_compared, found.seconds)
    notices = [] if quiet else notes(found.notices)
    doubts = warnings(found.warnings)
    if found.same is None:
        why = (
            f"samples alone were compared. {format_count(found.files_compared, 'file')} "
            "of the right size "
            "with sound headers; the manifest has no fingerprints (transform --verify --overwrite "
            "keeps them)"
        )
        return "\n".join(
            [
                labelled_lines("NOT VERIFIED:", why),
                f"to compare every byte: {found.command}",
                *notices,
                *doubts,
            ]
        )
    if found.same:
        stands = samples_in_words(found.evidence)
        what = f"every byte compared, {what}"
        if found.by_manifest:
            what += "; with the fingerprints of the conversion"
        elif found.evidence.get("samples"):
            what += f"; SRC's strategy stands on {stands}"
        return "\n".join([*notices, labelled_lines("same", what), *doubts])
    slices = [one for one in found.differences if not one.whole_file]
    files = {one.rank for one in found.differences if one.whole_file or found.by_manifest}
    names = {one.name for one in slices}
    told = [format_count(len(names), "parameter"), format_count(len(slices), "slice")]
    where = ", ".join(
        ([] if found.by_manifest or not slices else told)
        + ([format_count(len(files), "file")] if files else [])
    )
    last = f"{red('DIFFERENT')}: {where}; compared {what}"
    if quiet:
        return "\n".join([*doubts, last])
    rows = _differences(found, verbose)
    return "\n".join([*notices, rows, *doubts, last])


def _compared(files: int, nbytes: int, duration: float) -> str:
    return f"{format_size(nbytes)} in {format_count(files, 'file')}, {format_seconds(duration)}"


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
        first_of_ranks([found.names.get(rank, "-") for rank in ranks])
        if found.names
        else format_ranges(ranks)
    )
    if first.index is None:
        return where, "", "", f"{what}: {first.why}"
    differ, every = sum(one.count for one in some), sum(one.size for one in some)
    return where, str(list(first.index)), f"{differ:,} of {every:,}", what
