"""Optimizer shards as part of the layout, as MindSpore's metadata states them.

A strategy file states the shard beside device matrix and tensor map; MindSpore's strategy metadata,
which Checkpoint 2.0 keeps, adds the device axes that divide axis 0 further to its list.
"""

from __future__ import annotations

from collections.abc import Iterator

from rankxform.errors import RequestError
from rankxform.geometry.box import Shape
from rankxform.geometry.tiling import Cell

from .layout import Layout


def fold_optimizer_shard(layout: Layout, ranks: int) -> Layout:
    """Return the layout on `ranks` ranks that says the same without an optimizer shard of its own.

    The shard's ranks are those that differ on the last of the device axes which shard nothing; one
    axis is split if it is not needed whole. Raises RequestError where no device axes say the same.

    >>> fold_optimizer_shard(Layout((2, 4), ((0,), ()), opt_step=4, opt_size=-1), 8).tensor_map
    ((0, 1), ())
    >>> fold_optimizer_shard(Layout((4, 2), ((0,),), opt_step=4, opt_size=2), 8)
    ... # doctest: +ELLIPSIS
    Layout(device_matrix=(2, 2, 2), tensor_map=((0, 1),), ...)
    """
    if layout.split_rows or layout.field or layout.expanded_shape is not None:
        raise RequestError(
            "metadata.json cannot state this layout (uneven rows, a field, or an expanded shape)",
            "choose another --dst-form",
        )
    matrix, axes = list(layout.device_matrix), [list(some) for some in layout.tensor_map]
    left = layout.opt_shards
    added: list[int] = []
    used = {axis for some in axes for axis in some}
    axis = 0
    while left > 1 and axis < len(matrix):
        at = len(matrix) - 1 - axis
        size = matrix[at]
        if axis in used or size == 1:
            axis += 1
            continue
        if left % size:
            part = left
            if size % part:
                break
            matrix[at : at + 1] = [size // part, part]
            axes = [[a + (a > axis) for a in some] for some in axes]
            used = {a + (a > axis) for a in used}
            size = part
        added.insert(0, axis)
        used.add(axis)
        left //= size
        axis += 1
    if left > 1:
        raise RequestError(
            f"an optimizer shard of {layout.opt_shards} of {layout.free_ranks} ranks is not along "
            "device axes, and no metadata.json can state it",
            "choose another --dst-form",
            details=f"the ranks hold the same slice by device matrix {list(layout.device_matrix)} "
            f"and tensor map {layout.printable_map}",
        )
    if added:
        axes[0] += added
    if ranks != layout.ranks:
        matrix.insert(0, ranks // layout.ranks)
    return Layout(tuple(matrix), tuple(map(tuple, axes)))


def repair_misstated_layout(stated: Layout, counts: Shape) -> Layout | None:
    """Return the layout that is meant where MindSpore states a wrong one, None if that is not sure.

    Where an optimizer shards in groups that are not along device axes, MindSpore 2.10 states as
    many shards as some axes have; `counts` are the parts of each axis that the files show. Every
    layout of which MindSpore would state this is tried; those that are found must agree.
    """
    if not counts or counts[1:] != stated.counts[1:] or counts[0] == stated.counts[0]:
        return None
    found: dict[tuple[Cell, ...], Layout] = {}
    for matrix, axes in _unsplit(stated):
        for kept in range(len(axes[0]) + 1):
            tensor_map = (axes[0][:kept], *axes[1:])
            plain = Layout(matrix, tensor_map)
            shards, rest = divmod(counts[0], plain.counts[0])
            if rest or shards < 2 or plain.free_ranks % shards:
                continue
            if _stated_by_mindspore(plain, shards) == (stated.device_matrix, stated.tensor_map):
                meant = Layout(matrix, tensor_map, 1, shards)
                found.setdefault(tuple(map(meant.cell, range(meant.ranks))), meant)
    return next(iter(found.values())) if len(found) == 1 else None


def _unsplit(stated: Layout) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Yield device matrix and tensor map as stated, and with two neighbouring axes as one.

    The upper one of two axes that were one shards nothing, and the lower one at most axis 0.
    """
    matrix, axes = stated.device_matrix, stated.tensor_map
    yield matrix, axes
    used = {axis for some in axes for axis in some}
    for at in range(len(matrix) - 1):
        lower = len(matrix) - 2 - at
        if lower + 1 in used or any(lower in some for some in axes[1:]):
            continue
        merged = (*matrix[:at], matrix[at] * matrix[at + 1], *matrix[at + 2 :])
        whole = tuple(tuple(a - (a > lower) for a in some if a != lower) for some in axes)
        yield merged, whole


def _stated_by_mindspore(
    plain: Layout, shards: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None:
    """Return what MindSpore 2.10 states of a layout whose optimizer makes `shards` of a slice.

    It is (device matrix, tensor map), after `_NetStrategyInfo` of `mindspore.parallel.strategy`.
    """
    matrix, axes = list(plain.device_matrix), [list(some) for some in plain.tensor_map]
    last, counter, real = len(matrix) - 1, -1, 1
    wanted = plain.free_ranks // shards
    used = {last - axis for some in axes for axis in some}
    split = False
    for at, size in enumerate(matrix):
        if at in used or real == wanted:
            continue
        if real > wanted:
            split = True
            break
        counter, real = at, real * size
    if split or real != wanted:
        first = wanted // (real // matrix[counter])
        if not first:
            return None
        matrix[counter : counter + 1] = [first, matrix[counter] // first]
        axes = [[a + (a >= last + 1 - counter) for a in some] for some in axes]
        last += 1
    used = {last - axis for some in axes for axis in some}
    axes[0] += [last - at for at in range(counter + 1, last + 1) if at not in used]
    return tuple(matrix), tuple(map(tuple, axes))
