"""`transform`: convert a checkpoint, or continue where a stopped run left off."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, field
from itertools import chain
from pathlib import Path
from typing import Any

from rankxform.display.text import format_count, format_seconds, format_size, read_and_needed
from rankxform.layout.names import layers_by_stage, patterns
from rankxform.planning.plan import needed_bytes
from rankxform.planning.selection import OmittedParameters
from rankxform.request import Request
from rankxform.results import Result
from rankxform.target.destination import OneFileDestination, destination_at
from rankxform.transport import SerialTeam, Team
from rankxform.values import dataclass

from .convert import OnStart, Outcome, convert, start_silently


def transform(request: Request, team: Team, on_start: OnStart = start_silently) -> Report:
    """Convert a checkpoint; return what was done. Collective."""
    outcome = convert(request, destination_at(request, team), team, on_start)
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
    bytes_written: int  # content of destination files that was written
    bytes_sent: int  # content sent from one process to another
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
    form: str = "ranks"  # form of the destination
    fingerprints: bool = False  # whether fingerprints are kept, for `verify DST`
    src_layers: tuple[str, ...] = ()  # for each pipeline stage its layers, such as "0-15"
    dst_layers: tuple[str, ...] = ()  # for each pipeline stage its layers, such as "0-15"
    notices: tuple[str, ...] = ()  # what was assumed
    warnings: tuple[str, ...] = ()  # what may be wrong

    def as_dict(self) -> dict[str, Any]:
        """Return the report as ``transform --json`` prints it: names by pattern."""
        return {**asdict(self), **by_pattern(self.left_out, self.absent)}

    def in_short(self) -> str:
        ranks = f"{self.src_ranks} -> {format_count(self.dst_ranks, 'rank')}"
        files = format_count(len(self.files), "file")
        if self.files_kept == len(self.files):
            return f"{ranks}: {files} complete already"
        return (
            f"{ranks}: {format_size(self.bytes_written)} in {files}, {format_seconds(self.seconds)}"
        )

    def layers(self) -> dict[str, tuple[str, ...]]:
        return {"before": self.src_layers, "after": self.dst_layers}

    def amounts(self) -> dict[str, str]:
        omitted_count = sum(len(omitted.names) for omitted in self.left_out)
        return {
            "from": f"{self.src}{f', step {self.step}' if self.step else ''}",
            "to": self.dst,
            "read": read_and_needed(self.bytes_read, self.bytes_needed),
            "processes": f"{self.processes:,}, peak memory "
            f"{format_size(self.peak_memory_bytes)} each",
            **({"left out": format_count(omitted_count, "tensor")} if omitted_count else {}),
            "fingerprints": "kept" if self.fingerprints else "not kept",
        }


def by_pattern(left_out: Iterable[OmittedParameters], absent: Iterable[str]) -> dict[str, Any]:
    """Return for JSON what is not written, without a line for each layer."""
    return {
        "left_out": [omitted.facts for omitted in left_out],
        "absent": patterns(absent),
    }


def report_of(outcome: Outcome, team: Team) -> Report:
    """Return the report of a conversion. Collective."""
    conversion, stored = outcome.conversion, outcome.destination.stored
    _, source, target = conversion
    planner, slice_ranges = target.planner, [*chain.from_iterable(outcome.destination.left)]
    fetched = [process.bytes_fetched for process in outcome.processes]
    bytes_needed = team.bcast(lambda: needed_bytes(planner, slice_ranges))
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
        src_layers=layers_by_stage(catalog.strategy.stages if catalog.strategy else ()),
        dst_layers=layers_by_stage(planner.dst.stages),
        notices=outcome.notices,
        warnings=outcome.warnings,
    )
