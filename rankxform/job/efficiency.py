"""How near a conversion came to what its own reads and writes allow."""

# The calls of one process follow each other, so that the seconds of a mean process's calls are no
# more than the move took: a floor that no run is faster than. It is not what the device could do.

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from rankxform.display.units import format_seconds, format_size
from rankxform.values import dataclass

from .report import Report

_CALLS = {"reading": ("read",), "writing": ("write", "fsync")}
"""By resource the phases that are nothing but its calls; an exchange waits for others too."""


class ResourceUse(NamedTuple):
    """What a move did with one resource.

    name: what was done. must, moved: bytes that had to be, and that were. rate: of all processes
    while they did it, in bytes a second. seconds: of all processes at that rate, for what must be.
    """

    name: str
    must: int
    moved: int
    rate: float
    seconds: float


@dataclass(frozen=True)
class MoveFloor:
    """The least that a move could take at the rates of its own calls, if all processes had as much
    to do and nothing else. seconds: of the move, share: of these the floor's, at most 1."""

    rows: tuple[ResourceUse, ...]
    seconds: float
    share: float
    notes: tuple[str, ...] = ()


def floor_of(report: Report) -> MoveFloor | None:
    """Return the floor of a move; None if it began with files that were there before."""
    if report.files_kept or report.files_continued or not report.bytes_written:
        return None
    bytes_of = {
        "reading": (min(report.bytes_needed, report.bytes_read), report.bytes_read),
        "writing": (report.bytes_written, report.bytes_written),
    }
    rows = []
    for name, (must, moved) in bytes_of.items():
        spent = sum(_seconds(phases, *_CALLS[name]) for phases in report.phases) / report.processes
        if spent and moved:
            rows.append(ResourceUse(name, must, moved, moved / spent, spent * must / moved))
    # The move's seconds are process 0's: another may have begun a moment before it.
    calls = tuple(phase for phases in _CALLS.values() for phase in phases)
    elapsed = max(report.move_seconds, *(_seconds(phases, *calls) for phases in report.phases))
    floor_seconds = sum(row.seconds for row in rows)
    return MoveFloor(
        tuple(rows), elapsed, floor_seconds / elapsed if elapsed else 1.0, tuple(_notes(report))
    )


def _notes(report: Report) -> list[str]:
    """Say where memory stood in for storage."""
    notes = []
    if report.bytes_fetched is not None and report.bytes_fetched < report.bytes_read:
        cached = format_size(report.bytes_read - report.bytes_fetched)
        notes.append(
            f"At least {cached} of what was read came from memory, as the system counts; not all "
            "network file systems are in its count."
        )
    if not any(phases.get("fsync") for phases in report.phases):
        notes.append("What was written was not waited for: it may still be on its way to storage.")
    return notes


def describe_floor(floor: MoveFloor) -> list[str]:
    """Say what the floor tells."""
    text = f"{floor.share:.0%} of the move's {format_seconds(floor.seconds)} is the least that its "
    text += "reads and writes could take at the rates they had, shared out evenly and with nothing "
    text += "else."
    return [text, *floor.notes]


def _seconds(phases: Mapping[str, float], *names: str) -> float:
    return sum(phases.get(name, 0.0) for name in names)
