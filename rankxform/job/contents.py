"""What a destination holds, as its manifest tells: where every slice belongs, strategies aside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rankxform.engine.compare_sink import Expected
from rankxform.layout.layout import Layout

from .prepare import Conversion


def contents(conversion: Conversion) -> dict[str, Any]:
    """Return, for JSON, what the files of each pipeline stage hold.

    A parameter is its type, its full shape, and the number of its layout in the stage's list.
    """
    planner, dst = conversion.planner, conversion.dst
    stages: dict[str, Any] = {}
    for rank in conversion.ranks:
        stage = str(dst.stage_of(rank))
        if stage in stages:
            continue
        numbers: dict[Layout, int] = {}
        parameters: dict[str, Any] = {}
        for (p, _), layout in zip(planner.slices(rank), planner.names(rank).values()):
            parameters[p.name] = [p.dtype, list(p.shape), numbers.setdefault(layout, len(numbers))]
        layouts = [asdict(layout) for layout in numbers]
        stages[stage] = {"layouts": layouts, "parameters": parameters}
    return {"stage size": dst.stage_size, "stages": stages}


def expected(manifest: Mapping[str, Any], rank: int) -> dict[str, tuple[tuple[int, ...], Expected]]:
    """Return what the file of `rank` holds, from a manifest: full shape, type and box by name."""
    size = manifest["stage size"]
    stage = manifest["stages"][str(rank // size)]
    layouts = [_layout(facts) for facts in stage["layouts"]]
    found = {}
    for name, (dtype, shape, number) in stage["parameters"].items():
        box = layouts[number].grid(tuple(shape)).box(layouts[number].cell(rank % size))
        found[name] = tuple(shape), Expected(dtype, box)
    return found


def _layout(facts: Mapping[str, Any]) -> Layout:
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
    plain["tensor_map"] = tuple(map(tuple, facts["tensor_map"]))
    return Layout(**plain)
