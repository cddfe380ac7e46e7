"""Half-open boxes of a row-major array, in elements, and their contiguous runs."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from math import prod
from operator import lt, sub
from typing import TypeVar

K = TypeVar("K", bound=Hashable)

Shape = tuple[int, ...]
"""The extents of an array, in elements."""


@dataclass(frozen=True)
class Box:
    """The region ``start[j] <= i[j] < stop[j]`` of an array, in elements.

    A 0-d array has one box, ``Box((), ())``, which holds one element.

    >>> Box((0, 2), (2, 4)).shape
    (2, 2)
    """

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @classmethod
    def whole(cls, shape: tuple[int, ...]) -> Box:
        """Return the box of a complete array of `shape`."""
        return cls((0,) * len(shape), tuple(shape))

    @property
    def ndim(self) -> int:
        return len(self.start)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(map(sub, self.stop, self.start))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(map(sub, self.stop, self.start))

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None where there is none.

        >>> Box((0,), (4,)).intersect(Box((3,), (9,)))
        Box(start=(3,), stop=(4,))
        """
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(map(lt, start, stop)) else None

    def contains(self, other: Box) -> bool:
        return all(a <= c for a, c in zip(self.start, other.start)) and all(
            d <= b for b, d in zip(self.stop, other.stop)
        )

    def relative_to(self, frame: Box) -> Box:
        """Return this box in the coordinates of `frame`, whose corner becomes the origin."""
        origin = frame.start
        return Box(tuple(map(sub, self.start, origin)), tuple(map(sub, self.stop, origin)))

    def shifted(self, axis: int, by: int) -> Box:
        """Return this box moved by so many elements along one axis."""
        offset = tuple(by if j == axis else 0 for j in range(self.ndim))
        return Box(
            tuple(a + d for a, d in zip(self.start, offset)),
            tuple(b + d for b, d in zip(self.stop, offset)),
        )

    def bounding_box(self, other: Box) -> Box:
        """Return the smallest box that holds both."""
        return Box(tuple(map(min, self.start, other.start)), tuple(map(max, self.stop, other.stop)))

    def slices(self) -> tuple[slice, ...]:
        """Return the index that selects this box from an array in the same frame."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop))

    def __str__(self) -> str:
        return "[" + ", ".join(f"{a}:{b}" for a, b in zip(self.start, self.stop)) + "]"


def bounding_boxes(boxes: Iterable[tuple[K, Box]]) -> dict[K, Box]:
    """Return for each key the smallest box that holds all of its boxes.

    >>> bounding_boxes([("a", Box((0,), (1,))), ("a", Box((3,), (4,)))])
    {'a': Box(start=(0,), stop=(4,))}
    """
    bounds: dict[K, Box] = {}
    for key, box in boxes:
        bounds[key] = bounds[key].bounding_box(box) if key in bounds else box
    return bounds


def first_element(box: Box, shape: tuple[int, ...]) -> int:
    """Return the flat position of the first element of `box` in an array of `shape`.

    `box` is relative to the array; the position is in elements, row-major.

    >>> first_element(Box((1, 2), (2, 4)), (3, 4))
    6
    """
    position = 0
    for start, extent in zip(box.start, shape):
        position = position * extent + start
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
    """Return (start of the first, length, distance, count) of runs at equal distances, in elements.

    The runs are those of `contiguous_runs`. The count is 0 if their distances differ, which takes
    three axes.

    >>> strided_runs(Box((0, 2), (2, 4)), (2, 4))
    (2, 2, 4, 2)
    """
    axis = max(run_axis(box, shape) - 1, 0)
    if prod(box.shape[: max(axis - 1, 0)]) > 1:
        return 0, 0, 0, 0
    count, stride = (box.shape[axis - 1], prod(shape[axis:])) if axis else (1, 0)
    return first_element(box, shape), prod(box.shape[axis:]), stride, count
