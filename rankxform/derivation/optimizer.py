"""The optimizer's shard of a parameter: the rule of MindSpore's compiler, complete.

``frontend/parallel/parameter_manager.cc`` and ``ops_info/operator_info.cc`` decide it from the
layout alone, the full size and two settings; see `shard`.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from rankxform.layout.layout import Layout

from .mesh import Parallel


def shard_by_optimizer(layout: Layout, rows: int, nbytes: int, parallel: Parallel) -> Layout:
    """Return a layout with the optimizer's shard of a parameter that takes part in it.

    `rows` is the full extent of axis 0, `nbytes` the full size. There is no shard of a parameter
    below the threshold, where no two ranks hold the same slice, where the shard size does not
    divide the ranks that do, or where the slice's rows do not divide.

    >>> sharded = Parallel(optimizer_shard=True)
    >>> shard_by_optimizer(Layout((2, 4), ((0,), ())), 64, 1 << 20, sharded).opt_step
    4
    """
    if not parallel.shards or nbytes < parallel.threshold_bytes:
        return layout
    return divide(layout, rows, parallel.shard_size)


def divide(layout: Layout, rows: int, size: int | None) -> Layout:
    """Return a layout whose slices are divided among the ranks that hold them.

    size: into how many shards at most (None: as many as there are such ranks).
    """
    ranks = layout.free_ranks
    if ranks == 1 or not layout.tensor_map or (size and size < ranks and ranks % size):
        return layout
    count = min(size or ranks, ranks)
    if rows // layout.map_counts[0] % count:
        return layout
    return replace(layout, opt_step=_step(layout), opt_size=count if size else -1)


@cache
def _step(layout: Layout) -> int:
    """Return the distance between ranks that hold the same slice, as MindSpore computes it."""
    group = layout.holders[layout.cell(0)]
    return (group[-1] - group[0]) // (len(group) - 1)
