"""Half-open boxes of a row-major array, in elements."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from math import prod
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
        return tuple(b - a for a, b in zip(self.start, self.stop))

    @property
    def size(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """Return the common region, or None where there is none.

        >>> Box((0,), (4,)).intersect(Box((3,), (9,)))
        Box(start=(3,), stop=(4,))
        """
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop)):
            return None
        return Box(start, stop)

    def contains(self, other: Box) -> bool:
        return all(a <= c for a, c in zip(self.start, other.start)) and all(
            d <= b for b, d in zip(self.stop, other.stop)
        )

    def relative_to(self, frame: Box) -> Box:
        """Return this box in the coordinates of `frame`, whose corner becomes the origin."""
        return Box(
            tuple(a - o for a, o in zip(self.start, frame.start)),
            tuple(b - o for b, o in zip(self.stop, frame.start)),
        )

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
    found: dict[K, Box] = {}
    for key, box in boxes:
        found[key] = found[key].bounding_box(box) if key in found else box
    return found
