"""What a manifest says of its files: where every slice belongs, strategies aside."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from rankxform.engine.compare_sink import ExpectedSlice
from rankxform.errors import FormatError
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import Strategy
from rankxform.planning.plan import Planner
from rankxform.values import dataclass

_WRONG = (KeyError, IndexError, TypeError, ValueError, AttributeError)
"""What a document of another structure leads to."""


def manifest_contents(planner: Planner, files: tuple[int, ...]) -> dict[str, Any]:
    """Return, for JSON, what the files of each pipeline stage hold.

    A parameter is the number of its kind: type, full shape, and the number of its layout. Of files
    that hold some of a rank's parameters, the rank and the names are kept too. What no strategy
    listed stays unlisted, so that the way back is the identity.
    """
    dst = planner.dst
    stages: dict[str, Any] = {}
    for rank in dict.fromkeys(planner.part(file).rank for file in files):
        stage = str(dst.stage_of(rank))
        if stage in stages:
            continue
        layouts: dict[Layout, int] = {}
        kinds: dict[tuple[str, Shape, int], int] = {}
        parameters: dict[str, int] = {}
        for name, layout in planner.names_of(rank).items():
            p = planner.parameter(name)
            kind = p.dtype, p.shape, layouts.setdefault(layout, len(layouts))
            parameters[p.name] = kinds.setdefault(kind, len(kinds))
        written = [asdict(layout) for layout in layouts]
        stages[stage] = {"layouts": written, "kinds": list(kinds), "parameters": parameters}
    parts = {
        str(file): [planner.part(file).rank, list(planner.names(file))]
        for file in files
        if planner.part(file).names is not None
    }
    document: dict[str, Any] = {"stage size": dst.stage_size, "stage count": len(dst.stages)}
    document["stages"] = stages
    if parts:
        document["parts"] = parts
    names = {name for stage in stages.values() for name in stage["parameters"]}
    undeclared = sorted(names.intersection(planner.selection.replicated))
    if undeclared and len(undeclared) < len(names):
        document["undeclared"] = undeclared
    return document


def expected_slices(
    manifest: Mapping[str, Any], file: int
) -> dict[str, tuple[tuple[int, ...], ExpectedSlice]] | None:
    """Return what a file holds, from a manifest: full shape, type and box by name.

    None where it does not say. Raises FormatError.
    """
    if "stages" not in manifest:
        return None
    try:
        size = manifest["stage size"]
        rank, names = manifest.get("parts", {}).get(str(file), (file, None))
        stage = manifest["stages"].get(str(rank // size))
        if stage is None:
            return None
        kinds_by_name, slices_by_name = _stated_sharding(stage), {}
        for name in kinds_by_name if names is None else names:
            dtype, shape, layout = kinds_by_name[name]
            box = layout.grid(shape).box(layout.cell(rank % size))
            slices_by_name[name] = shape, ExpectedSlice(dtype, box)
        return slices_by_name
    except _WRONG as error:
        raise FormatError(f"what it says of file {file} makes no sense ({error!r})") from error


@dataclass(frozen=True)
class ManifestSharding:
    """What a manifest states of a whole checkpoint: the strategy, and types by name.

    strategy: None where not all pipeline stages were made.
    """

    strategy: Strategy | None
    dtypes: Mapping[str, str]


def manifest_sharding(manifest: Mapping[str, Any], label: str) -> ManifestSharding:
    """Return how the ranks that a manifest speaks of shard. Raises FormatError."""
    try:
        size, count = int(manifest["stage size"]), int(manifest["stage count"])
        stages = [
            _stated_sharding(manifest["stages"].get(str(number), _NOTHING))
            for number in range(count)
        ]
        shapes = {n: shape for stage in stages for n, (_, shape, _) in stage.items()}
        dtypes = {n: dtype for stage in stages for n, (dtype, _, _) in stage.items()}
        undeclared = {*map(str, manifest.get("undeclared", ()))}
        layouts = tuple(
            {n: layout for n, (_, _, layout) in s.items() if n not in undeclared} for s in stages
        )
        shapes = {n: shape for n, shape in shapes.items() if n not in undeclared}
        strategy = Strategy(layouts, size, label, shapes=shapes) if all(stages) else None
        return ManifestSharding(strategy, dtypes)
    except _WRONG as error:
        raise FormatError(f"what it says of its files makes no sense ({error!r})") from error


_NOTHING: Mapping[str, Any] = {"layouts": (), "kinds": (), "parameters": {}}


def _stated_sharding(stage: Mapping[str, Any]) -> dict[str, tuple[str, Shape, Layout]]:
    layouts = [_layout(facts) for facts in stage["layouts"]]
    kinds = [(str(dtype), tuple(map(int, shape)), layouts[n]) for dtype, shape, n in stage["kinds"]]
    return {name: kinds[number] for name, number in stage["parameters"].items()}


def _layout(facts: Mapping[str, Any]) -> Layout:
    plain: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in facts.items()}
    plain["tensor_map"] = tuple(map(tuple, facts["tensor_map"]))
    return Layout(**plain)
