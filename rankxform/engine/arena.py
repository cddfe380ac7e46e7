"""The arena: room for the tiles in flight, regions of it, and numpy views of these."""

from __future__ import annotations

from math import gcd
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankxform.geometry.box import Box, first_element
from rankxform.values import dataclass

ALIGN = 64
"""Bytes by which regions are aligned."""

if TYPE_CHECKING:  # numpy.typing is a tenth of the start-up
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Words = npt.NDArray[Any]
    View = tuple[Words, Words]  # what is written, and what it is a copy of


@dataclass(frozen=True)
class Region:
    """A box of the full parameter that lies in the arena, row-major.

    part: what is wanted of it. raw: whether it lies there as it was read, in the source's type.
    """

    box: Box
    data: Bytes
    part: Box
    raw: bool = True


class SourceIndices(NamedTuple):
    """Which elements of a source tensor a copy takes: for each of its axes which indices, and along
    which axis of the source each axis of the copy moves. source: its number; -1: none,
    the same number everywhere."""

    source: int
    ranges: tuple[range, ...] = ()
    axes: tuple[int, ...] = ()


def arena(nbytes: int) -> Bytes:
    """Return room for tiles, of so many bytes."""
    return np.empty(nbytes, np.uint8)


def content_offset(part: Box, box: Box, item: int) -> int:
    """Return the content byte at which `part` starts in a slice that holds `box`."""
    return first_element(part.relative_to(box), box.shape) * item


def copy_views(target: Region, source: Region, part: Box, item: int) -> View:
    """Return `part`, a box of the full parameter, as it lies in two regions of the arena."""
    if not part.ndim:
        return target.data, source.data
    word = _word(target.box, source.box, part, item)
    return (
        _words(target, item, word)[_index(part, target.box, item, word)],
        _words(source, item, word)[_index(part, source.box, item, word)],
    )


def typed(region: Region, part: Box, kind: np.dtype[Any]) -> Words:
    """Return `part` of a region as values of a type."""
    values = region.data.view(kind).reshape(region.box.shape)
    return values[part.relative_to(region.box).slices()] if part.ndim else values


def _word(a: Box, b: Box, part: Box, item: int) -> int:
    """Return the largest number of bytes that divides every position on the last axis."""
    positions = (a.start[-1] - b.start[-1], part.start[-1] - a.start[-1], part.shape[-1])
    return gcd(*(n * item for n in (*positions, a.shape[-1], b.shape[-1])))


def _words(region: Region, item: int, word: int) -> Words:
    shape = region.box.shape
    kind = f"u{word}" if word in (1, 2, 4, 8) else f"V{word}"
    return region.data.view(kind).reshape(*shape[:-1], shape[-1] * item // word)


def _index(part: Box, frame: Box, item: int, word: int) -> tuple[slice, ...]:
    *outer, inner = part.relative_to(frame).slices()
    return (*outer, slice(inner.start * item // word, inner.stop * item // word))
