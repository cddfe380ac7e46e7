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
    matrix, tensor_map = list(layout.device_matrix), [list(axes) for axes in layout.tensor_map]
    left = layout.opt_shards  # shards that no device axis makes yet
    added: list[int] = []
    used = {axis for axes in tensor_map for axis in axes}
    axis = 0
    while left > 1 and axis < len(matrix):
        position = len(matrix) - 1 - axis
        size = matrix[position]
        if axis in used or size == 1:
            axis += 1
            continue
        if left % size:
            part = left
            if size % part:
                break
            matrix[position : position + 1] = [size // part, part]
            tensor_map = [[a + (a > axis) for a in axes] for axes in tensor_map]
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
        tensor_map[0] += added
    if ranks != layout.ranks:
        matrix.insert(0, ranks // layout.ranks)
    return Layout(tuple(matrix), tuple(map(tuple, tensor_map)))


def repair_misstated_layout(declared: Layout, counts: Shape) -> Layout | None:
    """Return the true layout of a parameter of which MindSpore declares a wrong one.

    None: no layout or several layouts explain the declared one. If an optimizer shards in groups
    that are not along device axes, MindSpore 2.10 declares as many shards as some axes have.
    `counts`: the number of parts along each axis, as the shapes in the files show it. Every layout
    for which MindSpore would declare the same is tried.
    """
    if not counts or counts[1:] != declared.counts[1:] or counts[0] == declared.counts[0]:
        return None
    candidates: dict[tuple[Cell, ...], Layout] = {}  # cells by rank -> a layout that gives them
    for matrix, axes in _unsplit(declared):
        for kept in range(len(axes[0]) + 1):
            tensor_map = (axes[0][:kept], *axes[1:])
            plain = Layout(matrix, tensor_map)
            shards, remainder = divmod(counts[0], plain.counts[0])
            if remainder or shards < 2 or plain.free_ranks % shards:
                continue
            if _stated_by_mindspore(plain, shards) == (declared.device_matrix, declared.tensor_map):
                candidate = Layout(matrix, tensor_map, 1, shards)
                cells = tuple(map(candidate.cell, range(candidate.ranks)))
                candidates.setdefault(cells, candidate)
    return next(iter(candidates.values())) if len(candidates) == 1 else None


def _unsplit(declared: Layout) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Yield (device matrix, tensor map) as declared, and with two neighbouring axes joined.

    MindSpore splits one device axis in two. The upper half shards nothing, the lower half at most
    axis 0.
    """
    matrix, tensor_map = declared.device_matrix, declared.tensor_map
    yield matrix, tensor_map
    used = {axis for axes in tensor_map for axis in axes}
    for position in range(len(matrix) - 1):
        lower = len(matrix) - 2 - position
        if lower + 1 in used or any(lower in axes for axes in tensor_map[1:]):
            continue
        size = matrix[position] * matrix[position + 1]
        joined = (*matrix[:position], size, *matrix[position + 2 :])
        yield (
            joined,
            tuple(tuple(a - (a > lower) for a in axes if a != lower) for axes in tensor_map),
        )


def _stated_by_mindspore(
    plain: Layout, shards: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None:
    """Return the (device matrix, tensor map) that MindSpore 2.10 declares for a layout.

    `shards`: into how many the optimizer divides a slice. After `_NetStrategyInfo` of
    `mindspore.parallel.strategy`.
    """
    matrix, tensor_map = list(plain.device_matrix), [list(axes) for axes in plain.tensor_map]
    last, counter, real = len(matrix) - 1, -1, 1
    copies = plain.free_ranks // shards
    used = {last - axis for axes in tensor_map for axis in axes}
    split = False
    for position, size in enumerate(matrix):
        if position in used or real == copies:
            continue
        if real > copies:
            split = True
            break
        counter, real = position, real * size
    if split or real != copies:
        first = copies // (real // matrix[counter])
        if not first:
            return None
        matrix[counter : counter + 1] = [first, matrix[counter] // first]
        tensor_map = [[a + (a >= last + 1 - counter) for a in axes] for axes in tensor_map]
        last += 1
    used = {last - axis for axes in tensor_map for axis in axes}
    tensor_map[0] += [last - n for n in range(counter + 1, last + 1) if n not in used]
    return tuple(matrix), tuple(map(tuple, tensor_map))
