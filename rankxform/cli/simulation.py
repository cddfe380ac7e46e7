"""``plan --simulate``: what a cluster would do."""

from __future__ import annotations

import argparse
from typing import Any

from rankxform import job
from rankxform.planning.cost_model import Costs
from rankxform.planning.simulate import Simulation, spread_of

from .options import MOMENTS, SHARE
from .planned import ways, ways_table
from .report import as_json, opening, warnings
from .units import seconds, size, table

_NUMBERS = ("reads", "letters", "slices")
_NAMES = {
    "read": "read from files",
    "sent": "sent to other nodes",
    "passed": "sent on its node",
    "received": "received",
    "written": "written",
    "reads": "reads, at least",
    "letters": "letters, at least",
    "slices": "slices",
}


def simulated(conversion: job.Conversion, options: argparse.Namespace) -> str:
    """Simulate, and return the table or JSON."""
    processes = options.simulate
    nodes = options.nodes or -(-processes // 8)
    placement = options.src_placement or job.PLACES[0]
    found = job.on_paper(conversion, processes, nodes, placement)
    facts = _facts(conversion, found, processes, nodes, placement)
    return as_json(facts) if options.json else _table(conversion, facts)


def _facts(
    conversion: job.Conversion, found: Simulation, processes: int, nodes: int, src_placement: str
) -> dict[str, Any]:
    request = conversion.request
    spread = spread_of(found.loads)
    return {
        "processes": processes,
        "nodes": nodes,
        "src_ranks": conversion.source.strategy.ranks,
        "dst_ranks": conversion.dst.ranks,
        "src_placement": src_placement,
        "dst_placement": request.dst_placement,
        "reading": request.reading,
        "ways": ways(found),
        "costs": vars(request.costs or Costs()),
        "seconds": found.total,
        "seconds_of_processes": list(found.seconds),
        "seconds_of_networks": list(found.network),
        "loads": {name: [getattr(one, name) for one in found.loads] for name in spread},
        "least_mean_largest": {name: list(three) for name, three in spread.items()},
        "buffer_bytes_a_process": request.memory,
        "peak_memory_bytes": found.memory,
    }


def _table(conversion: job.Conversion, facts: dict[str, Any]) -> str:
    rows = []
    for name, (least, mean, largest) in facts["least_mean_largest"].items():
        show = "{:,.0f}".format if name in _NUMBERS else size
        times = f"{largest / mean:.2f}" if mean else ""
        total = sum(facts["loads"][name])
        rows.append((_NAMES[name], show(least), show(mean), show(largest), times, show(total)))
    slowest = max(facts["seconds_of_processes"])
    network = max(facts["seconds_of_networks"])
    given = ", ".join(f"{name} {_cost(name, value)}" for name, value in facts["costs"].items())
    lines = [
        opening(conversion, facts["processes"]),
        f"on           {facts['nodes']:,} nodes; source {facts['src_placement']}, destination "
        f"{facts['dst_placement']}",
        "",
        table(("of a process", "least", "mean", "largest", "over mean", "all"), rows),
        "",
        ways_table(facts["ways"]),
        "",
        f"about {seconds(facts['seconds'])}: the busiest process {seconds(slowest)}, the busiest "
        f"node's network {seconds(network)}",
        f"if {given}",
        f"memory of a process: at most {size(facts['peak_memory_bytes'])}, of that "
        f"{size(facts['buffer_bytes_a_process'])} buffers and the rest what planning takes here; "
        "without MPI's own",
    ]
    notes = [f"note: {notice}" for notice in conversion.notices]
    return "\n".join([*lines, *notes, *warnings(conversion.warnings)])


def _cost(name: str, value: float) -> str:
    if name == SHARE:
        return f"{value:.0%}"
    return seconds(value) if name in MOMENTS else f"{size(value)}/s"
