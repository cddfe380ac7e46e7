"""``plan``: what would be read and written, how, and how long it would take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import Any

from rankxform.job import Conversion, Prediction
from rankxform.layout.names import in_few_words
from rankxform.planning.simulate import Simulation
from rankxform.planning.transfers import RANGES, ROWS, needed_bytes, read_by_rank
from rankxform.storage.bandwidth import PROBE_BYTES

from .report import left_out, opening, some_names, warnings
from .units import few, seconds, shortened, size, table

_FEW_PATTERNS = 2


def plan_summary(conversion: Conversion, found: Simulation, call: float) -> dict[str, Any]:
    """Return the whole plan in numbers: for each destination rank, and in all.

    `call` is what a read of little costs, in bytes.
    """
    processes = len(found.loads)
    planner, shares = conversion.planner, conversion.shares(processes)
    plans = [planner.plan(rank) for rank in conversion.ranks]
    moves = [planner.moves(portions) for portions in shares]
    writers: dict[int, list[int]] = {}
    for process, portions in enumerate(shares):
        for portion in portions:
            writers.setdefault(portion.rank, []).append(process)
    from_rank = read_by_rank(move for some in moves for move in some)
    selection = conversion.selection
    return {
        "src": conversion.request.src,
        "src_ranks": conversion.source.strategy.ranks,
        "dst_ranks": conversion.dst.ranks,
        "processes": processes,
        "step": "_".join(map(str, conversion.shards.step)) if conversion.shards.step else None,
        "parameters": len(selection.cut) + len(selection.everywhere),
        "bytes_needed": needed_bytes(planner.moves(conversion.everything)),
        "bytes_read": sum(load.read for load in found.loads),
        "bytes_exchanged": sum(load.sent + load.passed for load in found.loads),
        "ways": ways(found),
        "read_call_bytes": None if call == inf else round(call),
        "bytes_written": sum(plan.nbytes for plan in plans),
        "buffer_bytes_a_process": conversion.request.memory,
        "bytes_from_source_rank": {str(r): from_rank[r] for r in sorted(from_rank)},
        "ranks": [
            {
                "rank": plan.rank,
                "processes": writers[plan.rank],
                "parameters": len(plan.slices),
                "copies": sum(len(s.copies) for s in plan.slices),
                "bytes_needed": plan.nbytes,
                "bytes_written": plan.nbytes,
                "src_ranks": list(plan.src_ranks),
            }
            for plan in plans
        ],
        "left_out": [
            {"reason": left.reason, "bytes": left.nbytes, "names": list(left.names)}
            for left in selection.left_out
        ],
        "not_in_checkpoint": list(selection.absent),
        "notices": conversion.notices,
        "warnings": conversion.warnings,
    }


def plan_table(conversion: Conversion, summary: Mapping[str, Any]) -> str:
    """Write the plan for people."""
    head = ("rank", "process", "parameters", "copies", "needs", "writes", "from source ranks")
    rows = [
        (
            r["rank"], few(r["processes"]), r["parameters"], r["copies"],
            size(r["bytes_needed"]), size(r["bytes_written"]), few(r["src_ranks"]),
        )
        for r in summary["ranks"]
    ]  # fmt: skip
    processes = summary["processes"]
    lines = [opening(conversion, processes), "", shortened(table(head, rows))]
    lines += ["", ways_table(summary["ways"])]
    if {way["way"] for way in summary["ways"]} & {RANGES, ROWS} and summary["read_call_bytes"]:
        call = size(summary["read_call_bytes"])
        lines.append(f"ranges or rows by what a read of little costs here: as much as {call} more")
    lines += [
        "",
        f"in all: {size(summary['bytes_needed'])} of the source are needed, "
        f"{size(summary['bytes_read'])} read, {size(summary['bytes_written'])} written; "
        f"buffers of at most {size(summary['buffer_bytes_a_process'])} on each of "
        f"{processes} process{'es' if processes > 1 else ''}",
    ]
    lines += [left_out(left) for left in conversion.selection.left_out]
    if conversion.selection.absent:
        lines.append(
            some_names("in the strategies, not in the checkpoint", conversion.selection.absent)
        )
    lines += [f"note: {notice}" for notice in conversion.notices]
    return "\n".join(lines + warnings(conversion.warnings))


_WAYS = {
    "whole": "in one piece",
    "ranges": "wanted ranges",
    "rows": "rows that hold them",
    "exchange": "once, and exchanged",
}


def ways(found: Simulation) -> list[dict[str, Any]]:
    """Return how source files are read: the way, which parameters, and the bytes."""
    return [
        {"way": name, "bytes_read": way.nbytes, "names": list(way.names)}
        for name, way in found.ways.items()
    ]


def ways_table(found: Sequence[Mapping[str, Any]]) -> str:
    """Write for people what `ways` returns."""
    rows = [
        (_WAYS[one["way"]], f"{len(one['names']):,}", size(one["bytes_read"]),
         in_few_words(one["names"], _FEW_PATTERNS))
        for one in found
    ]  # fmt: skip
    return table(("how files are read", "parameters", "reads", "which"), rows)


def prediction(found: Prediction) -> str:
    """Say how long the move is expected to take, and from what that follows."""
    reads, writes = (min(getattr(s, n) for s in found.speeds) for n in ("read", "write"))
    return (
        f"the move would take about {seconds(found.seconds)}: the slowest process reads "
        f"{size(reads)}/s and writes {size(writes)}/s, measured with {size(PROBE_BYTES)}"
    )
