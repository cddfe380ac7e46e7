"""Recipes: how one kind of move is done, band by band, in an arena of bounded size.

A recipe names byte ranges of source and destination slices and numpy views of the arena between
them. Parameters that are cut alike have one recipe. Bands that differ only in where they start
are one band, told how often it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import gcd, prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rankxform.formats.dtype import item_size
from rankxform.geometry.bands import Bands, bands
from rankxform.geometry.box import Box
from rankxform.geometry.grid import Cell
from rankxform.geometry.runs import contiguous_runs, first_element, worth_picking
from rankxform.planning.moves import Move

from .files import Buffer

_BLOCK = 8 << 20
_SMALL_BAND = 4 << 20
_LEAST_BLOCK = 64 << 10
_ALIGN = 64
_MANY_BANDS = 64
_MANY_RECIPES = 256

if TYPE_CHECKING:  # numpy.typing is a tenth of the start-up
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    _Words = npt.NDArray[Any]


@dataclass(frozen=True)
class Source:
    """A region in the arena as it was read, row-major, and the part of it that is wanted."""

    held: Box
    data: Bytes
    part: Box


@dataclass(frozen=True)
class Region:
    """What a store puts: a box of the full parameter, and where in the arena it is put together."""

    box: Box
    data: Bytes


@dataclass(frozen=True)
class Band:
    """What is done for one band of a parameter, and `count` - 1 times more further on.

    loads: (source cell, first content byte, bytes from there to the next band's, where in the
    arena to put it).
    stores: (destination cell, first content byte, bytes to the next band's, what of the arena to
    write, and the copies that put it together: view of the arena to write, view to read). All are
    put together in the same place, one after the other, which so stays in the cache.
    sources, regions: what is read and wanted, and what is stored, as boxes of the full parameter;
    for whoever wants to look. The sources' parts tile what the regions tile. They are those of
    the first band, and move on by `step` elements of `axis` with every one.
    """

    count: int
    loads: Sequence[tuple[Cell, int, int, Buffer]]
    stores: Sequence[tuple[Cell, int, int, Buffer, Sequence[tuple[_Words, _Words]]]]
    sources: Sequence[Source] = ()
    regions: Sequence[Region] = ()
    axis: int = 0
    step: int = 0

    def at(self, turn: int, box: Box) -> Box:
        """Return where a box of the first band is in the one of number `turn`."""
        return box.shifted(self.axis, turn * self.step) if turn else box


class Kitchen:
    """Makes recipes, and keeps those of parameters that are small enough to have many alike."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._arena = np.empty(min(_BLOCK, max(memory, _LEAST_BLOCK)), np.uint8)
        self._kept: dict[object, Sequence[Band]] = {}

    def bands(self, move: Move) -> Iterator[tuple[Band, int]]:
        """Yield the bands of `move` in order, each with how often it was there before."""
        for band in self._recipe(move):
            for turn in range(band.count):
                yield band, turn

    def _recipe(self, move: Move) -> Iterable[Band]:
        parameter = move.parameter
        key = (
            parameter.layout, parameter.shape, item_size(parameter.dtype), move.layout,
            parameter.listed, tuple(move.targets),
        )  # fmt: skip
        if key in self._kept:
            return self._kept[key]
        made = _Recipe(move, self._arena).bands()
        first = []
        for band in made:
            first.append(band)
            if len(first) > _MANY_BANDS:
                return chain(first, made)
        if len(self._kept) >= _MANY_RECIPES:
            self._kept.clear()
        self._kept[key] = first
        return first


@dataclass(frozen=True)
class _Held:
    """A region of the parameter in the arena, row-major."""

    box: Box
    data: Bytes


class _Recipe:
    """Works out the bands of one kind of move, in an arena that each band uses anew."""

    def __init__(self, move: Move, arena: Bytes) -> None:
        parameter = move.parameter
        self._shape, self._item, self._arena = parameter.shape, item_size(parameter.dtype), arena
        self._used = 0
        grid = move.layout.grid(parameter.shape)
        self._targets = {cell: grid.box(cell) for cell in move.targets}
        self._copies = {cell: move.copies(cell) for cell in move.targets}
        self._held: dict[Cell, Box] = {}
        self._wanted: dict[Cell, Box] = {}  # of a source cell, the hull of what is wanted
        for copies in self._copies.values():
            for cell, box in copies:
                hull = self._wanted.get(cell)
                self._wanted[cell] = hull.hull(box) if hull else box
                self._held[cell] = parameter.grid.box(cell)

    def bands(self) -> Iterator[Band]:
        region, *others = self._targets.values()
        for box in others:
            region = region.hull(box)
        if not prod(self._shape):
            empty = self._arena[:0].data
            yield Band(1, (), [(cell, 0, 0, empty, ()) for cell in self._targets])
            return
        shards = [*self._held.values(), *self._targets.values()]
        room = len(self._arena) - _ALIGN * len(shards)
        split = len(self._held) < len(self._targets)
        limit = (min(room, _SMALL_BAND) if split or self._straight() else room) // self._item
        for alike in bands(self._shape, region, shards, max(1, limit)):
            yield self._band(alike)

    def _straight(self) -> bool:
        """Whether only rows are cut, so that nothing needs gathering."""
        return all(
            box.shape[1:] == self._held[at].shape[1:] == self._targets[cell].shape[1:]
            for cell, copies in self._copies.items()
            for at, box in copies
        )

    def _band(self, alike: Bands) -> Band:
        self._used = 0
        band = alike.first
        loads: list[tuple[Cell, int, int, Buffer]] = []
        loaded = {
            cell: self._load(cell, alike, loads)
            for cell, wanted in self._wanted.items()
            if band.intersect(wanted)
        }
        stores, regions = [], []
        wanted: dict[Box, list[Source]] = {}
        behind = self._used
        for cell, box in self._targets.items():
            target = band.intersect(box)
            if target is not None:
                self._used = behind
                data, copies, sources = self._assemble(cell, target, loaded)
                start, step = _offset(target, box, self._item), self._step(alike, box)
                stores.append((cell, start, step, data.data, copies))
                regions.append(Region(target, data))
                for source in sources:
                    wanted.setdefault(source.held, []).append(source)
        whole = [one for some in wanted.values() for one in _in_one(some)]
        return Band(alike.count, loads, stores, whole, regions, alike.axis, alike.step)

    def _step(self, alike: Bands, box: Box) -> int:
        """Return the content bytes from one band to the next in a slice that holds `box`."""
        return alike.step * prod(box.shape[alike.axis + 1 :]) * self._item

    def _load(self, cell: Cell, alike: Bands, loads: list[tuple[Cell, int, int, Buffer]]) -> _Held:
        """Plan to read what is wanted of a band from source `cell`; return where it will be."""
        box, band = self._held[cell], alike.first
        step = self._step(alike, box)
        mine, need = band.intersect(box), band.intersect(self._wanted[cell])
        assert mine is not None
        assert need is not None
        frame, start = need.relative_to(mine), _offset(mine, box, self._item)
        if need == mine or not worth_picking(frame, mine.shape, self._item):
            data = self._take(mine.size)
            loads.append((cell, start, step, data.data))
            return _Held(mine, data)
        data, done = self._take(need.size), 0
        for first, count in contiguous_runs(frame, mine.shape):
            nbytes = count * self._item
            room = data[done : done + nbytes].data
            loads.append((cell, start + first * self._item, step, room))
            done += nbytes
        return _Held(need, data)

    def _assemble(
        self, cell: Cell, target: Box, loaded: Mapping[Cell, _Held]
    ) -> tuple[Bytes, list[tuple[_Words, _Words]], list[Source]]:
        """Plan to put `target`, of destination `cell`, together; return where, copies, sources."""
        parts = [
            (at, part)
            for at, box in self._copies[cell]
            if (part := box.intersect(target)) is not None
        ]
        sources = [Source(loaded[at].box, loaded[at].data, part) for at, part in parts]
        if len(parts) == 1 and sources[0].held == target:
            return sources[0].data, [], sources
        data = self._take(target.size)
        held = _Held(target, data)
        copies = [_views(held, loaded[at], part, self._item) for at, part in parts]
        return data, copies, sources

    def _take(self, elements: int) -> Bytes:
        """Return aligned room for `elements` in the arena, which is used anew for each band."""
        start = -(-self._used // _ALIGN) * _ALIGN
        self._used = start + elements * self._item
        assert self._used <= len(self._arena), "a band's cost was planned too low"
        return self._arena[start : self._used]


def _in_one(sources: list[Source]) -> list[Source]:
    """Return disjoint parts of one region as the one that they tile, where they tile it."""
    held, data = sources[0].held, sources[0].data
    tiled = sum(one.part.size for one in sources) == held.size
    return [Source(held, data, held)] if tiled else sources


def _offset(part: Box, box: Box, item: int) -> int:
    """Return the content byte at which `part` starts in a slice that holds `box`."""
    return first_element(part.relative_to(box), box.shape) * item


def _views(target: _Held, source: _Held, part: Box, item: int) -> tuple[_Words, _Words]:
    """Return `part`, a box of the full parameter, as it lies in two regions of the arena."""
    if not part.ndim:
        return target.data, source.data
    word = _word(target.box, source.box, part, item)
    return (
        _view(target, item, word)[_index(part, target.box, item, word)],
        _view(source, item, word)[_index(part, source.box, item, word)],
    )


def _word(a: Box, b: Box, part: Box, item: int) -> int:
    """Return the largest number of bytes that divides every position on the last axis."""
    last = (a.start[-1] - b.start[-1], part.start[-1] - a.start[-1], part.shape[-1])
    return gcd(*(n * item for n in (*last, a.shape[-1], b.shape[-1])))


def _view(held: _Held, item: int, word: int) -> _Words:
    shape = held.box.shape
    kind = f"u{word}" if word in (1, 2, 4, 8) else f"V{word}"
    return held.data.view(kind).reshape(*shape[:-1], shape[-1] * item // word)


def _index(part: Box, frame: Box, item: int, word: int) -> tuple[slice, ...]:
    *outer, last = part.relative_to(frame).slices()
    return (*outer, slice(last.start * item // word, last.stop * item // word))
