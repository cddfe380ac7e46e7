"""Optimizer shards as part of the layout, as MindSpore's metadata states them.

A strategy file states the shard beside device matrix and tensor map; MindSpore's strategy metadata,
which Checkpoint 2.0 keeps, adds the device axes that divide axis 0 further to its list.
"""

from __future__ import annotations

from rankxform.errors import RequestError

from .layout import Layout


def with_optimizer(layout: Layout, ranks: int) -> Layout:
    """Return the layout on `ranks` ranks that says the same without an optimizer shard of its own.

    The shard's ranks are those that differ on the last of the device axes which shard nothing; one
    axis is split if it is not needed whole. Raises RequestError where no device axes say the same.

    >>> with_optimizer(Layout((2, 4), ((0,), ()), opt_step=4, opt_size=-1), 8).tensor_map
    ((0, 1), ())
    >>> with_optimizer(Layout((4, 2), ((0,),), opt_step=4, opt_size=2), 8)
    ... # doctest: +ELLIPSIS
    Layout(device_matrix=(2, 2, 2), tensor_map=((0, 1),), ...)
    """
    if layout.split_rows or layout.field or layout.expanded_shape is not None:
        raise RequestError("uneven rows, fields, and maps that JSON expanded are not in metadata")
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
            f"an optimizer shard of {layout.opt_shards} of the {layout.free_ranks} ranks with the "
            f"same slice (device matrix {list(layout.device_matrix)}, tensor map "
            f"{layout.printable_map}) is not along device axes, and no metadata can state it"
        )
    if added:
        axes[0] += added
    if ranks != layout.ranks:
        matrix.insert(0, ranks // layout.ranks)
    return Layout(tuple(matrix), tuple(map(tuple, axes)))
