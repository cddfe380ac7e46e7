"""`transform`: convert a checkpoint, or continue where a stopped run left off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import chain
from pathlib import Path
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS
from rankxform.display.text import (
    format_count,
    format_seconds,
    format_size,
    from_here,
    read_and_needed,
    shown_path,
)
from rankxform.layout.names import format_ranges, layers_by_stage, patterns, summarize_names
from rankxform.layout.states import state_of_name
from rankxform.planning.plan import needed_bytes
from rankxform.planning.selection import OmittedParameters
from rankxform.process import usable_cores
from rankxform.request import Request
from rankxform.results import NORMAL, QUIET, VERBOSE, Lines, Result, Section, lines, stage_layers
from rankxform.source.source import PlaceUse
from rankxform.statements import join
from rankxform.target.destination import OneFileDestination, destination_at
from rankxform.target.manifest import verify_options
from rankxform.target.target import Conversion
from rankxform.transport import SerialTeam, Team
from rankxform.values import dataclass

from .convert import OnStart, Outcome, Prepared, convert, start_silently

_FEW = 4
_LONG_SECONDS = 10.0
"""From how long a run on more processes is worth a word."""


def transform(
    request: Request,
    team: Team,
    on_start: OnStart = start_silently,
    prepared: Prepared | None = None,
) -> Report:
    """Convert a checkpoint; return what was done. Collective."""
    outcome = convert(request, destination_at(request, team), team, on_start, prepared)
    return report_of(outcome, team)


def transform_one_rank(request: Request, path: Path) -> None:
    """Write the file of the one rank of `request` as `path`, by this process on its own."""
    convert(request, OneFileDestination(path), SerialTeam())


@dataclass(frozen=True, repr=False)
class Report(Result):
    """What a transform did, over all processes. Sizes are bytes, times seconds."""

    src: str  # the source, as it was named
    dst: str  # the destination, as it was named
    step: str | None  # training step that was converted; None: no name declares one
    src_ranks: int  # ranks of the source's strategy
    dst_ranks: int  # ranks of the destination's strategy
    parameters: int  # number of parameters, optimizer states included
    files: tuple[str, ...]  # paths of all destination files
    files_linked: int  # number of files that share another one's bytes
    files_kept: int  # number of files that were complete before
    files_continued: int  # number of files that an earlier run had begun
    bytes_read: int  # tensor content read, by all processes
    bytes_needed: int  # distinct bytes of the source that were needed
    bytes_written: int  # bytes of destination files that were written, with their headers
    bytes_sent: int  # content sent from one process to another
    bytes_shared: int  # part of `bytes_written` whose blocks are the source's files' too
    # Patterns of the parameters that were read whole to compare ranks.
    compared_names: tuple[str, ...]
    seconds: float  # of the whole call
    processes: int  # number of processes that it ran on
    peak_memory_bytes: int  # of the largest process
    phases: tuple[Mapping[str, float], ...]  # for each process: phase -> seconds
    left_out: tuple[OmittedParameters, ...]  # parameters that were not written, and why
    absent: tuple[str, ...]  # names that the strategies list and no file holds
    bytes_before: int = 0  # content that an earlier run had written
    # What storage gave, headers and samples included, without what was in memory; None: the system
    # does not count it.
    bytes_fetched: int | None = None
    bytes_compared: int = 0  # content that was read to compare ranks
    # Samples of tensors that were compared between files, with the reads and bytes that it took.
    evidence: Mapping[str, int | None] = field(default_factory=dict)
    accepted: tuple[str, ...] = ()  # doubts that did not refuse the source
    move_seconds: float = 0.0  # from the finished plan to the last file's name
    # Which nodes have which ranks, or write them; None: all have one folder.
    placement: str | None = None
    strategy: str | None = None  # path of the destination's strategy, if it was derived
    derivation: Mapping[str, Any] | None = None  # how the destination's strategy was derived
    form: str = DEFAULT_FORM  # form of the destination
    fingerprints: bool = False  # whether fingerprints are kept, for `verify DST`
    # Number of files that were complete before, and were compared with their fingerprints.
    files_compared: int = 0
    resumed: bool = False  # whether a stopped run was continued, whatever it left
    src_layers: tuple[str, ...] = ()  # for each pipeline stage its layers, such as "0-15"
    dst_layers: tuple[str, ...] = ()  # for each pipeline stage its layers, such as "0-15"
    notices: tuple[str, ...] = ()  # what was assumed
    warnings: tuple[str, ...] = ()  # what may be wrong
    places: tuple[PlaceUse, ...] = ()  # what was needed of each place, if there are several

    next: tuple[str, ...] = ()  # words of a command that compares every byte

    json_without = ("next",)

    def as_dict(self) -> dict[str, Any]:
        """Return the report as ``transform --json`` prints it: names by pattern."""
        return {**super().as_dict(), "absent": patterns(self.absent)}

    def in_short(self) -> str:
        ranks = f"{self.src_ranks} -> {format_count(self.dst_ranks, 'rank')}"
        files = format_count(len(self.files), "file")
        if self.files_kept == len(self.files):
            return f"{ranks}: {files} complete already"
        return (
            f"{ranks}: {format_size(self.bytes_written)} in {files}, {format_seconds(self.seconds)}"
        )

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield what was read and left out, what to know, how to go on, and what was written."""
        if level > QUIET:
            if self.files_kept < len(self.files):
                yield from self._reading(level)
                yield from omitted(self.left_out, self.absent, level)
            yield from self.notes()
            yield from self._going_on()
        yield stage_layers(self.src_layers, self.dst_layers)
        yield lines("done", self._last_word())

    def _reading(self, level: int) -> Iterator[Lines]:
        if self.resumed or self.files_kept or self.files_continued:
            files_text = f"{self.files_kept:,} of {len(self.files):,} files were complete"
            yield lines(
                "continued", f"an earlier run: {files_text}, {self.files_continued:,} begun"
            )
        if self.placement:
            yield lines("placed", self.placement)
        sent = f"; sent {format_size(self.bytes_sent)} between processes" if self.bytes_sent else ""
        memory = f"{format_size(self.peak_memory_bytes)} a process"
        read_text = read_and_needed(self.bytes_read, self.bytes_needed)
        yield lines("read", f"{read_text}{sent}; peak memory {memory}")
        if self.bytes_shared:
            text = f"{format_size(self.bytes_shared)} of {format_size(self.bytes_written)} written"
            yield lines("shared", f"{text}: blocks of the source's files, not copied")
        if self.places:
            yield lines("places", *(place.in_words for place in self.places))
        if self.strategy:
            yield lines("strategy", f"of the destination: {shown_path(self.strategy)}")
        if self.bytes_compared:
            shown = self.compared_names[: None if level == VERBOSE else _FEW]
            ending = ", ..." if len(shown) < len(self.compared_names) else ""
            size = format_size(self.bytes_compared)
            yield lines(
                "compared", f"between ranks, all bytes: {', '.join(shown)}{ending} ({size})"
            )

    def _going_on(self) -> Iterator[Lines]:
        """Yield what a job loads, how to check that, and how a slow run would be faster."""
        if not FORMS[self.form].is_named_in_yaml:
            load = self.dst
        elif self.dst_ranks == 1 < self.src_ranks:
            load = f"one complete file, for one device: {self.files[0]} (--dst-strategy: for more)"
        else:
            container = Path(self.files[0]).suffix.removeprefix(".") if self.files else ""
            load = f"in the job's YAML, load_checkpoint: {self.dst}, auto_trans_ckpt: False"
            load += f", load_ckpt_format: {container}" if container != "ckpt" else ""
        yield lines("load", load)
        words = [from_here(word) if word.startswith("/") else word for word in self.next]
        yield lines("next", join(words))
        is_slow = self.processes == 1 and self.seconds > _LONG_SECONDS
        if is_slow and (core_count := len(usable_cores())) > 1:
            faster = f"rankxform transform -n {core_count} ... would use all {core_count} cores"
            yield lines("faster", faster)

    def _last_word(self) -> str:
        if self.files_kept == len(self.files):
            files = format_count(self.files_kept, "file")
            how = "their sizes, and times or samples"
            if self.files_compared == self.files_kept:
                how = "the fingerprints of all their bytes"
            return f"{files} complete already, by {how}; nothing was written"
        linked = f" ({self.files_linked} linked to equal ones)" if self.files_linked else ""
        files = format_count(len(self.files) - self.files_kept, "file")
        before = format_size(self.bytes_before)
        return (
            f"{format_size(self.bytes_written + self.bytes_before)} in {files}{linked}"
            + (f", of which {before} had been written before" if self.bytes_before else "")
            + f", {format_seconds(self.seconds)}, "
            f"{format_size(self.bytes_written / max(self.seconds, 1e-9))}/s"
        )


def omitted(
    groups: Iterable[OmittedParameters], absent: Sequence[str], level: int
) -> Iterator[Lines]:
    """Yield what is not written: states by their family, the others by pattern; at `VERBOSE` the
    patterns of all."""
    facts: list[tuple[str, Sequence[str], Mapping[str, str], str]] = [
        ("left out", group.names, group.families, f"{format_size(group.nbytes)}; {group.reason}")
        for group in groups
    ]
    if absent:
        states = {name: state for name in absent if (state := state_of_name(name)) is not None}
        names_by_family = {name: state.family for name, state in states.items()}
        reason = "in the strategies, not in the checkpoint"
        facts.append(("absent", absent, names_by_family, reason))
    for label, names, families, reason in facts:
        counts = Counter(families[name] for name in names if name in families)
        other_names = [name for name in names if name not in families]
        shown = [f"{family} ({count:,})" for family, count in counts.items()]
        shown += [summarize_names(other_names, 3)] if other_names else []
        details = [f"  {name}" for name in patterns(names)] if level == VERBOSE else []
        yield lines(label, f"{', '.join(shown)}: {reason}", *details)


def compare_words(conversion: Conversion, processes: int) -> tuple[str, ...]:
    """Return the command that compares every byte of a destination, with absolute paths."""
    number = ["-n", str(processes)] if processes > 1 else []
    request, source, target = conversion.request, conversion.source, conversion.target
    words = [source.where.path, target.dst or "DST", *verify_options(conversion)]
    if request.ranks:
        words += ["--ranks", format_ranges(request.ranks).replace(" ", "")]
    words.append("--keep-fingerprints")
    if request.verify:
        number, words = [], [str(target.dst)]
    return ("rankxform", "verify", *number, *words)


def report_of(outcome: Outcome, team: Team) -> Report:
    """Return the report of a conversion. Collective."""
    conversion, stored = outcome.conversion, outcome.destination.stored_before
    _, source, target = conversion
    planner, slice_ranges = target.planner, [*chain.from_iterable(outcome.destination.left)]
    fetched = [process.bytes_fetched for process in outcome.processes]
    bytes_needed, command, places = team.bcast(
        lambda: (
            needed_bytes(planner, slice_ranges),
            compare_words(conversion, team.size),
            source.places_used(planner, slice_ranges),
        )
    )
    catalog, selection, derived = planner.catalog, planner.selection, target.derived
    return Report(
        src=source.where.path,
        dst=str(target.dst),
        step=source.selected.step_name,
        src_ranks=catalog.ranks,
        dst_ranks=planner.dst.ranks,
        parameters=len(selection.parameters),
        files=tuple(map(target.address, target.files)),
        files_linked=stored.linked,
        files_kept=stored.kept,
        files_continued=stored.continued,
        bytes_read=sum(process.traffic.read for process in outcome.processes),
        bytes_needed=bytes_needed,
        bytes_written=outcome.bytes_written,
        bytes_sent=sum(process.traffic.sent for process in outcome.processes),
        bytes_shared=sum(process.traffic.shared for process in outcome.processes),
        bytes_before=stored.bytes_before,
        bytes_fetched=None if None in fetched else sum(filter(None, fetched)),
        bytes_compared=target.evidence.nbytes,
        evidence=target.evidence.facts,
        accepted=target.accepted,
        compared_names=tuple(patterns(target.evidence.names)),
        seconds=outcome.seconds,
        move_seconds=outcome.move_seconds,
        processes=len(outcome.processes),
        peak_memory_bytes=max(process.peak_memory for process in outcome.processes),
        phases=tuple(process.phases for process in outcome.processes),
        placement=stored.placement,
        left_out=selection.left_out,
        absent=selection.absent,
        strategy=planner.dst.label if derived else None,
        derivation=derived.facts if derived else None,
        form=target.form.name,
        fingerprints=conversion.request.verify,
        files_compared=stored.compared,
        resumed=stored.resumed,
        src_layers=layers_by_stage(catalog.strategy.stages if catalog.strategy else ()),
        dst_layers=layers_by_stage(planner.dst.stages),
        notices=outcome.notices,
        warnings=outcome.warnings,
        places=places,
        next=command,
    )
