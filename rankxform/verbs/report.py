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
    """What a transform did, over all processes. Sizes are bytes, times seconds.

    src, dst: the folders, with the step that was taken and the ranks that their strategies have.
    parameters: how many, states included.
    files: all destination files; files_linked: how many of them share another's bytes; files_kept:
    how many were complete before; files_continued: how many an earlier run had begun,
    and bytes_before: what it had written of them.

    bytes_read, bytes_written: tensor content and files; bytes_sent: from one process to another;
    bytes_needed: distinct source bytes; bytes_fetched: what storage gave, and not memory, headers
    and samples included; None where the system does not count it. bytes_compared: parameters that
    were read whole to compare ranks, and compared_names, their patterns. evidence: samples of
    tensors that were compared between files, and the reads and bytes that this took; accepted:
    doubts that did not
    refuse the source. seconds: of the whole call;
    move_seconds: from the finished plan to the last file's name. peak_memory_bytes: of the largest
    process.
    phases: seconds of each process, by name.
    placement: which ranks are on which nodes, if these have folders of their own, or whose
    processes write a file. strategy: the
    file of the destination's strategy, if it was derived; derivation: how. form: the destination's;
    fingerprints: whether they are kept, for `verify DST`. src_layers, dst_layers: of each pipeline
    stage, such as "0-15". left_out: what was
    not written, and why; absent: names that the strategies list and no file holds. warnings: what
    may not be what was meant; notices: what to know.
    """

    src: str
    dst: str
    step: str | None
    src_ranks: int
    dst_ranks: int
    parameters: int
    files: tuple[str, ...]
    files_linked: int
    files_kept: int
    files_continued: int
    bytes_read: int
    bytes_needed: int
    bytes_written: int
    bytes_sent: int
    compared_names: tuple[str, ...]
    seconds: float
    processes: int
    peak_memory_bytes: int
    phases: tuple[Mapping[str, float], ...]
    left_out: tuple[OmittedParameters, ...]
    absent: tuple[str, ...]
    bytes_before: int = 0
    bytes_fetched: int | None = None
    bytes_compared: int = 0
    evidence: Mapping[str, int | None] = field(default_factory=dict)
    accepted: tuple[str, ...] = ()
    move_seconds: float = 0.0
    placement: str | None = None
    strategy: str | None = None
    derivation: Mapping[str, Any] | None = None
    form: str = "ranks"
    fingerprints: bool = False
    src_layers: tuple[str, ...] = ()
    dst_layers: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

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
    catalog, selection, derived = source.table, planner.selection, target.derived
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
