"""What a checkpoint or a strategy holds, and which source ranks a destination rank needs.

Functions that look and return plain values (dictionaries of texts, numbers and lists), for the
command line and for programs; nothing is changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm
from pathlib import Path
from typing import Any

from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.execution import folder, strategies
from rankxform.execution.headers import container, index
from rankxform.formats.index import Index
from rankxform.geometry.box import Box
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import HandCut, Strategy, WholeStrategy
from rankxform.planning.plan import check_ranks, needed_stages


def inspect(path: Path, pattern: str = folder.DEFAULT_PATTERN) -> dict[str, Any]:
    """Describe the checkpoint file, checkpoint folder or strategy at `path`."""
    if not path.exists():
        raise UsageError(f"{path}: no such file or folder")
    if _is_strategy(path):
        return _strategy(path)
    return _checkpoint(path) if path.is_file() else _folder(path, pattern)


def _is_strategy(path: Path) -> bool:
    if path.is_dir():
        files = [
            p for p in sorted(path.iterdir()) if p.is_file() and p.suffix in strategies.SUFFIXES
        ]
        return bool(files) and all(map(_is_strategy, files))
    return strategies.is_strategy(path)


def _strategy(path: Path) -> dict[str, Any]:
    strategy = strategies.load(str(path))
    return {
        "kind": "strategy",
        "path": str(path),
        "stages": len(strategy.stages),
        "ranks": strategy.ranks,
        "ranks_in_a_stage": strategy.stage_size,
        "layouts": [
            {"stage": stage, "name": name, **_layout(layout)}
            for stage, layouts in enumerate(strategy.stages)
            for name, layout in layouts.items()
        ],
    }


def _layout(layout: Layout) -> dict[str, Any]:
    return {
        "device_matrix": list(layout.device_matrix),
        "tensor_map": layout.printable_map,
        "opt_step": layout.opt_step,
        "opt_size": layout.opt_size,
        "slices": list(layout.counts),
        "replicas": layout.free_ranks // layout.opt_shards,
    }


def _checkpoint(path: Path) -> dict[str, Any]:
    found = index(path)
    contents = found.contents
    return {
        "kind": "checkpoint",
        "path": str(path),
        **_totals(found),
        "format": container(path),
        "checksum": found.crc is not None or "crc_num" in found.metadata,
        "metadata": dict(found.metadata),
        "entries": [
            {
                "name": name,
                "dtype": dtype,
                "shape": list(shape),
                "nbytes": found.nbytes(name),
                "pieces": len(found.spans(name)),
            }
            for name, dtype, shape in zip(contents.names, contents.dtypes, contents.shapes)
        ],
    }


def _totals(found: Index) -> dict[str, int]:
    names = found.contents.names
    return {"parameters": len(names), "nbytes": sum(map(found.nbytes, names)), "size": found.size}


def _folder(path: Path, pattern: str) -> dict[str, Any]:
    shards = folder.find(path, None, pattern)
    ranks = []
    for rank, file in sorted(shards.paths.items()):
        found = index(file)
        ranks.append({"rank": rank, "file": str(file), **_totals(found)})
    step = "_".join(map(str, shards.step)) if shards.step else None
    return {"kind": "folder", "path": str(path), "step": step, "ranks": ranks}


def needed_ranks(src: Strategy, dst: Strategy, ranks: Iterable[int]) -> dict[int, tuple[int, ...]]:
    """Return for each destination rank the source ranks whose bytes it needs, ascending.

    From the strategies alone: of several ranks that hold the same box it is the one that
    MindSpore reads, and of parameters in no strategy the destination's own counterpart.
    """
    for strategy in (src, dst):
        if isinstance(strategy, HandCut):
            raise UsageError(
                f"{strategy.label!r}: which names it means, the checkpoint tells; name SRC"
            )
    return {rank: tuple(sorted(_needed(src, dst, rank))) for rank in check_ranks(ranks, dst)}


def _needed(src: Strategy, dst: Strategy, rank: int) -> set[int]:
    stage, local = dst.stage_of(rank), rank % dst.stage_size
    stages = needed_stages(src, dst, stage)
    if not stages:
        raise RequestError(
            f"destination rank {rank} needs nothing: {src.label} lists none of the parameters that "
            f"{dst.label} lists for pipeline stage {stage}"
        )
    found = {src.ranks_in(stages[0])[local % src.stage_size]}
    names = src.stages_of if isinstance(dst, WholeStrategy) else dst.stages[stage]
    seen: set[tuple[Layout, Layout, int]] = set()
    for name in names:
        if name not in src or isinstance(src, WholeStrategy):
            continue
        src_stage = src.stages_of[name][0]
        have = src.layout(name, src_stage, 0)
        want = dst.layout(name, stage, len(have.tensor_map))
        if (have, want, src_stage) not in seen:
            seen.add((have, want, src_stage))
            first = src.ranks_in(src_stage).start
            found |= {first + r for r in _holding(have, want, local, name)}
    return found


def _holding(have: Layout, want: Layout, local: int, name: str) -> set[int]:
    """Return the stage-local ranks of `have` that hold what rank `local` of `want` needs."""
    if len(have.tensor_map) != len(want.tensor_map):
        raise CheckpointError(
            f"{name!r}: a nested tensor map in JSON needs the checkpoint's shapes; name SRC too"
        )
    shape = tuple(map(lcm, have.counts, want.counts))
    if have.split_rows or want.split_rows:
        shape = (sum(have.split_rows or want.split_rows), *shape[1:])
    box = want.grid(shape).box(want.cell(local)) if shape else Box((), ())
    replica = have.replica(local)
    return {have.holders[cell][replica] for cell in have.grid(shape).cells_over(box)}
