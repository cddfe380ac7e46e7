"""Recipes: how one kind of move is done, band by band, in an arena of bounded size.

A recipe names byte ranges of source and destination slices and numpy views of the arena between
them. Parameters that are cut alike have one recipe. Bands that differ only in where they start
are one band, told how often it is repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from math import gcd, prod
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankxform.formats.dtype import item_size
from rankxform.geometry.box import Box
from rankxform.geometry.grid import Cell
from rankxform.geometry.runs import CALL_BYTES, contiguous_runs, first_element, worth_picking
from rankxform.geometry.tiles import Bands, Rows, bands
from rankxform.planning.transfers import Move
from rankxform.storage.posix import Buffer

_SMALL_BAND = 4 << 20
ALIGN = 64

if TYPE_CHECKING:  # numpy.typing is a tenth of the start-up
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Words = npt.NDArray[Any]
    Copies = tuple[Words, Words]  # what is written, and what it is a copy of


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
class Letters:
    """What crosses between this process and others in one band.

    packs: copies to do before sending. sends, receipts: (process, letter). repacks, passing:
    copies and letters to send when the receipts are there, to processes of the same node; passed:
    such letters that come.
    """

    packs: Sequence[Copies]
    sends: Sequence[tuple[int, Buffer]]
    receipts: Sequence[tuple[int, Buffer]]
    repacks: Sequence[Copies]
    passing: Sequence[tuple[int, Buffer]]
    passed: Sequence[tuple[int, Buffer]]


class Load(NamedTuple):
    """What is read of source `cell` from content byte `start` on, `step` bytes further with every
    band, into `room` in the arena; `picked` out of rows that are not wanted whole."""

    cell: Cell
    start: int
    step: int
    room: Buffer
    picked: bool


@dataclass(frozen=True)
class Band:
    """What is done for one band of a parameter, and `count` - 1 times more further on.

    stores: (destination cell, first content byte, bytes to the next band's, what of the arena to
    write, and the copies that put it together: view of the arena to write, view to read). All are
    put together in the same place, one after the other, which so stays in the cache.
    sources, regions: what is read and wanted, and what is stored, as boxes of the full parameter;
    for whoever wants to look. The sources' parts tile what the regions tile. They are those of
    the first band, and move on by `step` elements of `axis` with every one.
    letters: what crosses between processes, if the move is a part of a trade.
    """

    count: int
    loads: Sequence[Load]
    stores: Sequence[tuple[Cell, int, int, Buffer, Sequence[Copies]]]
    sources: Sequence[Source] = ()
    regions: Sequence[Region] = ()
    axis: int = 0
    step: int = 0
    letters: Letters | None = None

    def at(self, turn: int, box: Box) -> Box:
        """Return where a box of the first band is in the one of number `turn`."""
        return box.shifted(self.axis, turn * self.step) if turn else box


def arena(nbytes: int) -> Bytes:
    """Return room for bands, of so many bytes."""
    return np.empty(nbytes, np.uint8)


@dataclass(frozen=True)
class Held:
    """A region of the parameter in the arena, row-major."""

    box: Box
    data: Bytes


class Recipe:
    """Works out the bands of one kind of move, each in an arena that it uses anew.

    `call` is what a read of little costs, in bytes.
    """

    def __init__(self, move: Move, call: float = CALL_BYTES) -> None:
        parameter = move.parameter
        self._call = call
        self._shape, self._item = parameter.shape, item_size(parameter.dtype)
        grid = move.layout.grid(parameter.shape)
        boxes = {cell: grid.box(cell) for cell in move.targets}
        self._targets = {cell: box for cell, box in boxes.items() if box.size}
        self._empty = [cell for cell, box in boxes.items() if not box.size]
        self._copies: dict[Cell, Sequence[tuple[Any, Box]]] = {}  # by what is in the arena
        self._grid = parameter.grid
        self._rows: dict[Cell, Rows[Any]] = {}
        self._held: dict[Cell, Box] = {}
        self._wanted: dict[Cell, Box] = {}  # of a source cell, the hull of what is wanted
        for target in self._targets:
            self._copies[target] = copies = move.copies(target)
            for cell, box in copies:
                self._want(cell, box)

    def _want(self, cell: Cell, box: Box) -> None:
        """Take note that `box` is to be read of source `cell`."""
        hull = self._wanted.get(cell)
        self._wanted[cell] = hull.hull(box) if hull else box
        self._held[cell] = self._grid.box(cell)

    def bands(self, arena: int) -> Iterator[Bands]:
        """Yield the bands of the move, each small enough for an arena of so many bytes.

        Slices without elements are a band of their own, the first.
        """
        if self._empty:
            yield Bands(Box.whole((0,) * len(self._shape)), 0, 1)
        yield from self._full_bands(arena)

    def _full_bands(self, arena: int) -> Iterator[Bands]:
        if not self._targets:
            return
        region = reduce(Box.hull, self._targets.values())
        shards = [*self._held.values(), *self._targets.values()]
        room = arena - ALIGN * len(shards)
        split = len(self._held) < len(self._targets)
        limit = (min(room, _SMALL_BAND) if split or self._straight() else room) // self._item
        yield from bands(self._shape, region, [shards], max(1, limit))

    def turns(self, arena: int) -> Iterator[tuple[Bands, int]]:
        """Yield bands with how often they were there before, in the order to do them in."""
        for alike in self.bands(arena):
            for turn in range(alike.count):
                yield alike, turn

    def _straight(self) -> bool:
        """Whether only rows are cut, so that nothing needs gathering."""
        return all(
            box.shape[1:] == self._held[at].shape[1:] == self._targets[cell].shape[1:]
            for cell, copies in self._copies.items()
            for at, box in copies
        )

    def band(self, alike: Bands, arena: Bytes) -> Band:
        """Work out what is done for the first of bands that are alike, in an arena."""
        self._arena, self._used = arena, 0
        if not alike.first.size:
            nothing = arena[:0].data
            return Band(1, (), [(cell, 0, 0, nothing, ()) for cell in self._empty])
        return self._work(alike)

    def _work(self, alike: Bands) -> Band:
        band = alike.first
        loads: list[Load] = []
        loaded = {
            cell: self._load(cell, need, alike, loads) for cell, need in self._sources.over(band)
        }
        return self._finished(alike, loads, loaded, None)

    def _finished(
        self,
        alike: Bands,
        loads: Sequence[Load],
        loaded: Mapping[Any, Held],
        letters: Letters | None,
    ) -> Band:
        """Plan to put every target together of what will be in the arena, and end the band."""
        stores, regions = [], []
        wanted: dict[Box, list[Source]] = {}
        band, behind = alike.first, self._used
        for cell, target in self._wanting.over(band):
            box, self._used = self._targets[cell], behind
            data, copies, sources = self._assemble(cell, target, loaded)
            start, step = offset(target, box, self._item), self._step(alike, box)
            stores.append((cell, start, step, data.data, copies))
            regions.append(Region(target, data))
            for source in sources:
                wanted.setdefault(source.held, []).append(source)
        whole = [one for some in wanted.values() for one in in_one(some)]
        return Band(alike.count, loads, stores, whole, regions, alike.axis, alike.step, letters)

    def _step(self, alike: Bands, box: Box) -> int:
        """Return the content bytes from one band to the next in a slice that holds `box`."""
        return alike.step * prod(box.shape[alike.axis + 1 :]) * self._item

    @cached_property
    def _sources(self) -> Rows[Cell]:
        return Rows(self._wanted.items())

    @cached_property
    def _wanting(self) -> Rows[Cell]:
        return Rows(self._targets.items())

    def _parts_of(self, cell: Cell) -> Rows[Any]:
        """Return what makes up destination `cell`, by what is in the arena."""
        if cell not in self._rows:
            self._rows[cell] = Rows(self._copies[cell])
        return self._rows[cell]

    def _load(self, cell: Cell, need: Box, alike: Bands, loads: list[Load]) -> Held:
        """Plan to read what is wanted of a band from source `cell`; return where it will be."""
        box, band = self._held[cell], alike.first
        step = self._step(alike, box)
        mine = band.intersect(box)
        assert mine is not None
        frame, start = need.relative_to(mine), offset(mine, box, self._item)
        if need == mine or not worth_picking(frame, mine.shape, self._item, self._call):
            data = self._take(mine.size)
            loads.append(Load(cell, start, step, data.data, False))
            return Held(mine, data)
        data, done = self._take(need.size), 0
        for first, count in contiguous_runs(frame, mine.shape):
            nbytes = count * self._item
            room = data[done : done + nbytes].data
            loads.append(Load(cell, start + first * self._item, step, room, True))
            done += nbytes
        return Held(need, data)

    def _assemble(
        self, cell: Cell, target: Box, loaded: Mapping[Any, Held]
    ) -> tuple[Bytes, list[Copies], list[Source]]:
        """Plan to put `target`, of destination `cell`, together; return where, copies, sources."""
        parts = list(self._parts_of(cell).over(target))
        sources = [Source(loaded[at].box, loaded[at].data, part) for at, part in parts]
        if len(parts) == 1 and sources[0].held == target:
            return sources[0].data, [], sources
        data = self._take(target.size)
        held = Held(target, data)
        copies = [views(held, loaded[at], part, self._item) for at, part in parts]
        return data, copies, sources

    def _take(self, elements: int, more: int = 0) -> Bytes:
        """Return aligned room for `elements`, and so many bytes more, in the arena, which is used
        anew for each band."""
        start = -(-self._used // ALIGN) * ALIGN
        self._used = start + elements * self._item + more
        assert self._used <= len(self._arena), "a band's cost was planned too low"
        return self._arena[start : self._used]


def in_one(sources: list[Source]) -> list[Source]:
    """Return disjoint parts of one region as the one that they tile, where they tile it."""
    held, data = sources[0].held, sources[0].data
    tiled = sum(one.part.size for one in sources) == held.size
    return [Source(held, data, held)] if tiled else sources


def offset(part: Box, box: Box, item: int) -> int:
    """Return the content byte at which `part` starts in a slice that holds `box`."""
    return first_element(part.relative_to(box), box.shape) * item


def views(target: Held, source: Held, part: Box, item: int) -> tuple[Words, Words]:
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


def _view(held: Held, item: int, word: int) -> Words:
    shape = held.box.shape
    kind = f"u{word}" if word in (1, 2, 4, 8) else f"V{word}"
    return held.data.view(kind).reshape(*shape[:-1], shape[-1] * item // word)


def _index(part: Box, frame: Box, item: int, word: int) -> tuple[slice, ...]:
    *outer, last = part.relative_to(frame).slices()
    return (*outer, slice(last.start * item // word, last.stop * item // word))
