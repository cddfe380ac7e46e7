"""Bands: pieces of a tensor small enough to move at once, contiguous in every shard.

A band has one index on each leading axis, a range on one axis, and everything on the axes
behind it. What a shard holds of such a piece is one contiguous byte range of its file, so a
band needs one read from each source and one write to each destination, however the two sides
are cut; what lies between is a strided copy in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from .box import Box


@dataclass(frozen=True)
class Bands:
    """Equal bands that follow each other along one axis: the first, and how many there are."""

    first: Box
    axis: int
    count: int

    @property
    def step(self) -> int:
        """Elements on the axis from one band to the next."""
        return self.first.stop[self.axis] - self.first.start[self.axis] if self.first.ndim else 0

    def __iter__(self) -> Iterator[Box]:
        for n in range(self.count):
            start = self.first.start[self.axis] + n * self.step if self.first.ndim else 0
            yield _replace(self.first, self.axis, start, start + self.step)


Groups = Sequence[Sequence[Box]]


def bands(shape: tuple[int, ...], region: Box, groups: Groups, limit: int) -> Iterator[Bands]:
    """Yield bands that cover `region`, in row-major order, each of bounded cost.

    `shape` is the tensor's; `region` and the shards in `groups` are boxes of it, in elements. The
    cost of a band to a group is the number of elements that all its shards hold of it, summed; it
    stays within `limit` for each group, unless the band is a single element of the tensor. Along
    the axis of its range a band keeps to `region` and never crosses the start or stop of a shard,
    so each shard holds all of its rows or none. Bands that differ in nothing but their start come
    as one.

    >>> list(bands((4, 4), Box((0, 0), (4, 2)), [[Box((0, 0), (4, 4))]], limit=8))
    [Bands(first=Box(start=(0, 0), stop=(2, 4)), axis=0, count=2)]
    """
    if region.size:
        yield from _along(Box.whole(shape), region, groups, limit, 0)


def _along(band: Box, region: Box, groups: Groups, limit: int, axis: int) -> Iterator[Bands]:
    if axis == region.ndim:
        yield Bands(band, max(0, axis - 1), 1)
        return
    low, high = region.start[axis], region.stop[axis]
    ends = {e for shards in groups for s in shards for e in (s.start[axis], s.stop[axis])}
    edges = {e for e in ends if low < e < high}
    cuts = [low, *sorted(edges), high]
    for a, b in zip(cuts, cuts[1:]):
        active = [[s for s in g if s.start[axis] <= a and b <= s.stop[axis]] for g in groups]
        row = max(sum(prod(s.shape[axis + 1 :]) for s in shards) for shards in active)
        step = limit // row if row else b - a
        if step >= 1:
            count, rest = divmod(b - a, step)
            if count:
                yield Bands(_replace(band, axis, a, a + step), axis, count)
            if rest:
                yield Bands(_replace(band, axis, b - rest, b), axis, 1)
        else:
            for index in range(a, b):
                single = _replace(band, axis, index, index + 1)
                yield from _along(single, region, active, limit, axis + 1)


def _replace(box: Box, axis: int, start: int, stop: int) -> Box:
    if not box.ndim:
        return box
    return Box(
        (*box.start[:axis], start, *box.start[axis + 1 :]),
        (*box.stop[:axis], stop, *box.stop[axis + 1 :]),
    )
