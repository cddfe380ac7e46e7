"""What a conversion did."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, field
from typing import Any

from rankxform.display.text import format_count, format_seconds, format_size, read_and_needed
from rankxform.engine.copier import ValueStats
from rankxform.engine.pipeline import Traffic
from rankxform.layout.names import layers_by_stage, patterns, summarize_names
from rankxform.planning.evidence import Evidence
from rankxform.planning.plan import needed_bytes
from rankxform.planning.selection import OmittedParameters
from rankxform.process import Phases, peak_memory
from rankxform.results import Result
from rankxform.target.destination import Destination
from rankxform.transport import Team
from rankxform.values import dataclass


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


def _sum_if_known(counts: Iterable[int | None]) -> int | None:
    all_counts = [*counts]
    return (
        None if None in all_counts else sum(nbytes for nbytes in all_counts if nbytes is not None)
    )


def lost_values(traffic_by_process: Iterable[Traffic]) -> list[str]:
    """Return, as warnings, which parameters are zero, or no numbers, since they were changed."""
    values_by_name: dict[str, ValueStats] = {}
    for traffic in traffic_by_process:
        for name, values in traffic.values.items():
            values_by_name[name] = values_by_name.get(name, ValueStats()) + values
    zero = [n for n, v in values_by_name.items() if v.had_values and not v.has_values]
    wrong = [name for name, tensor_values in values_by_name.items() if tensor_values.not_finite]
    warnings = []
    if zero:
        warnings.append(
            f"{summarize_names(zero, 3)}: every value is zero in the new type, and was not before"
        )
    if wrong:
        warnings.append(
            f"{summarize_names(wrong, 3)}: holds values that are infinite or no numbers"
        )
    return warnings


def report_of(
    destination: Destination,
    evidence: Evidence,
    traffic: Traffic,
    phases: Phases,
    team: Team,
) -> Report:
    """Sum up what all processes did. Collective."""
    source, target = destination.source, destination.target
    leftovers = destination.foreign_warnings(team)
    planner, passed = target.planner, phases.seconds
    seconds, move_seconds = time.monotonic() - phases.began, passed.pop("move") + passed["publish"]
    for name, phase_seconds in traffic.seconds.items():
        passed[name] += phase_seconds
    passed["wait"] += passed["start"] + seconds - sum(passed.values())
    by_process = team.allgather(lambda: (traffic, peak_memory(), passed, phases.bytes_fetched()))
    bytes_needed = team.bcast(
        lambda: needed_bytes(
            planner,
            [
                slice_range
                for process_ranges in destination.remaining_slices
                for slice_range in process_ranges
            ],
        )
    )
    catalog, selection, derived = source.require_catalog(), planner.selection, target.derived
    return Report(
        src=source.where.path,
        dst=str(target.dst),
        step=source.selected.step_name,
        src_ranks=catalog.ranks,
        dst_ranks=planner.dst.ranks,
        parameters=len(selection.parameters),
        files=tuple(map(target.address, target.files)),
        files_linked=destination.files_linked,
        files_kept=destination.files_kept,
        files_continued=destination.files_continued,
        bytes_read=sum(process_traffic.read for process_traffic, *_ in by_process),
        bytes_needed=bytes_needed,
        bytes_written=sum(process_traffic.written for process_traffic, *_ in by_process),
        bytes_sent=sum(process_traffic.sent for process_traffic, *_ in by_process),
        bytes_before=destination.bytes_before,
        bytes_fetched=_sum_if_known(nbytes for *_, nbytes in by_process),
        bytes_compared=evidence.nbytes,
        evidence=evidence.facts,
        accepted=target.accepted,
        compared_names=tuple(patterns(evidence.names)),
        seconds=seconds,
        move_seconds=move_seconds,
        processes=team.size,
        peak_memory_bytes=max(peak for _, peak, *_ in by_process),
        phases=tuple(of_process for _, _, of_process, _ in by_process),
        placement=destination.placement,
        left_out=selection.left_out,
        absent=selection.absent,
        strategy=planner.dst.label if derived else None,
        derivation=derived.facts if derived else None,
        form=target.form.name,
        fingerprints=destination.request.verify,
        src_layers=layers_by_stage(catalog.strategy.stages if catalog.strategy else ()),
        dst_layers=layers_by_stage(planner.dst.stages),
        notices=(
            *target.notices,
            *dict.fromkeys(
                n for process_traffic, *_ in by_process for n in process_traffic.notices
            ),
        ),
        warnings=(
            *target.warnings,
            *leftovers,
            *lost_values(process_traffic for process_traffic, *_ in by_process),
        ),
    )
