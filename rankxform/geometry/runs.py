"""Contiguous runs: where a box lies in the flat order of the array that holds it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from .box import Box


def first_element(box: Box, shape: tuple[int, ...]) -> int:
    """Return the flat position of the first element of `box` in an array of `shape`.

    `box` is relative to the array; the position is in elements, row-major.

    >>> first_element(Box((1, 2), (2, 4)), (3, 4))
    6
    """
    position = 0
    for at, extent in zip(box.start, shape):
        position = position * extent + at
    return position


def run_axis(box: Box, shape: tuple[int, ...]) -> int:
    """Return the first axis from which on `box` covers whole rows of the array.

    All axes at or after it are complete; the axis before it (if any) may be covered in part without
    ending the run. ``0`` means the box is the whole array.

    >>> run_axis(Box((0, 2), (2, 4)), (2, 4)), run_axis(Box((1, 0), (2, 4)), (2, 4))
    (2, 1)
    """
    axis = box.ndim
    while axis and box.start[axis - 1] == 0 and box.stop[axis - 1] == shape[axis - 1]:
        axis -= 1
    return axis


def contiguous_runs(box: Box, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """Yield the maximal contiguous runs of `box` in a row-major array.

    `shape` is the array's, in elements; `box` is relative to the array and not empty.
    A run is ``(start, count)`` in elements; runs ascend and never touch.
    A 0-d array has one run, ``(0, 1)``.

    >>> list(contiguous_runs(Box((0, 2), (2, 4)), (2, 4)))
    [(2, 2), (6, 2)]
    >>> list(contiguous_runs(Box((1, 0), (3, 4)), (4, 4)))
    [(4, 8)]
    """
    axis = max(run_axis(box, shape) - 1, 0)  # the axis that a run may cover in part
    count = prod(box.shape[axis:])
    for corner in product(*(range(a, b) for a, b in zip(box.start[:axis], box.stop[:axis]))):
        start = corner + box.start[axis:]
        yield first_element(Box(start, start), shape), count


def count_runs(box: Box, shape: tuple[int, ...]) -> int:
    """Return how many runs `box`, not empty, has in an array of `shape`.

    >>> count_runs(Box((0, 2), (2, 4)), (2, 4))
    2
    """
    return prod(box.shape[: max(run_axis(box, shape) - 1, 0)])


def strided_runs(box: Box, shape: tuple[int, ...]) -> tuple[int, int, int, int]:
    """Return (start of the first, length, distance, number) of runs that are equally far apart.

    As for `contiguous_runs`; the number is 0 where they are not, which takes three axes.

    >>> strided_runs(Box((0, 2), (2, 4)), (2, 4))
    (2, 2, 4, 2)
    """
    axis = max(run_axis(box, shape) - 1, 0)
    if prod(box.shape[: max(axis - 1, 0)]) > 1:
        return 0, 0, 0, 0
    count, stride = (box.shape[axis - 1], prod(shape[axis:])) if axis else (1, 0)
    return first_element(box, shape), prod(box.shape[axis:]), stride, count
