"""Which source ranks a destination rank needs, by the strategies alone."""

from __future__ import annotations

from collections.abc import Iterable
from math import lcm

from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.geometry.box import Box
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy

from .stages import check_ranks, needed_stages


def source_ranks_needed(
    src: Strategy, dst: Strategy, ranks: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """Return for each destination rank the source ranks whose bytes it needs, ascending.

    This uses the strategies alone. If several ranks hold the same box, it is the one that MindSpore
    reads; parameters in no strategy come from the rank that corresponds to the destination rank.
    """
    for strategy in (src, dst):
        if isinstance(strategy, PatternStrategy):
            raise UsageError(
                "which names it means, the checkpoint tells",
                "name SRC",
                where=f"{strategy.label!r}",
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
    src_ranks = {src.ranks_in(stages[0])[local % src.stage_size]}
    names = src.stages_of if isinstance(dst, WholeStrategy) else dst.stages[stage]
    layout_pairs: set[tuple[Layout, Layout, int]] = set()
    for name in names:
        if name not in src or isinstance(src, WholeStrategy):
            continue
        src_stage = src.stages_of[name][0]
        have = src.layout(name, src_stage, 0)
        want = dst.layout(name, stage, len(have.tensor_map))
        if (have, want, src_stage) not in layout_pairs:
            layout_pairs.add((have, want, src_stage))
            first = src.ranks_in(src_stage).start
            src_ranks |= {first + r for r in _holding(have, want, local, name)}
    return src_ranks


def _holding(have: Layout, want: Layout, local: int, name: str) -> set[int]:
    """Return the stage-local ranks of `have` that hold what rank `local` of `want` needs."""
    if len(have.tensor_map) != len(want.tensor_map):
        raise CheckpointError(
            "a nested tensor map in JSON needs the checkpoint's shapes",
            "name SRC too",
            where=f"{name!r}",
        )
    shape = tuple(map(lcm, have.counts, want.counts))
    if have.split_rows or want.split_rows:
        shape = (sum(have.split_rows or want.split_rows), *shape[1:])
    box = want.grid(shape).box(want.cell(local)) if shape else Box((), ())
    replica = have.replica(local)
    return {have.holders[cell][replica] for cell in have.grid(shape).cells_over(box)}
