"""Recipes for trades: one process's part in moving a parameter between processes, band by band.

Every process that takes part cuts the parameter into the same bands. In each it reads what it is
to read, once, packs for every other process what that one wants, and sends it; takes what is sent
to it, passes on what others of its node want of that, and puts its slices together. Between two
processes goes one letter a band and kind, its pieces in one order that both know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from rankxform.geometry.bands import Bands, bands
from rankxform.geometry.box import Box
from rankxform.geometry.grid import Cell
from rankxform.planning.posts import Piece, Posts, posts
from rankxform.planning.trades import Trade, Traded

from .files import Buffer
from .recipes import ALIGN, AUTO, Band, Held, Letters, Recipe, views

if TYPE_CHECKING:
    from .recipes import Bytes, Copies


class TradeRecipe(Recipe):
    """Works out the bands of one process's part in a kind of trade."""

    def __init__(self, move: Traded, arena: Bytes, reading: str = AUTO) -> None:
        super().__init__(move, arena, reading)
        trade = move.trade
        grid = move.layout.grid(move.parameter.shape)
        self._every = {cell: grid.box(cell) for cell in trade.servers}
        self._boxes = {(at, cell): box for cell in trade.servers for at, box in trade.copies(cell)}
        every = posts(trade)
        self._mine = every.get(move.process, Posts())
        self._groups = [self._group(own, trade, process) for process, own in every.items()]
        self._held, self._wanted = {}, {}
        for piece in self._mine.read:
            self._want(piece[0], self._boxes[piece])
        own = set(self._mine.own)
        self._copies = {
            cell: tuple(
                (at if (at, cell) in own else (at, cell), box) for at, box in move.copies(cell)
            )
            for cell in move.targets
        }

    def _group(self, own: Posts, trade: Trade, process: int) -> list[Box]:
        """Return the boxes that a process has in its arena, each as often as it may be there."""
        read = [self._grid.box(at) for at in dict.fromkeys(at for at, _ in own.read)]
        letters = [own.out, own.into, own.passing, own.passed]
        pieces = [self._boxes[one] for post in letters for some in post.values() for one in some]
        served = [box for cell, box in self._every.items() if process in trade.servers[cell]]
        return [*read, *pieces, *served]

    def bands(self) -> Iterator[Band]:
        if not prod(self._shape):
            yield from super().bands()
            return
        region, *others = self._every.values()
        for box in others:
            region = region.hull(box)
        room = len(self._arena) - ALIGN * max(map(len, self._groups))
        limit = max(1, room // self._item)
        for alike in bands(self._shape, region, self._groups, limit):
            if any(alike.first.intersect(self._boxes[piece]) for piece in self._mine.every):
                yield self._band(alike)

    def _band(self, alike: Bands) -> Band:
        self._used, band = 0, alike.first
        loads: list[tuple[Cell, int, int, Buffer]] = []
        held: dict[Any, Held] = {
            cell: self._load(cell, alike, loads)
            for cell, wanted in self._wanted.items()
            if band.intersect(wanted)
        }
        packs: list[Copies] = []
        repacks: list[Copies] = []
        mine = self._mine
        sends = [self._write(to, some, band, held, packs) for to, some in mine.out.items()]
        receipts = [self._expect(of, some, band, held) for of, some in mine.into.items()]
        passing = [self._write(to, some, band, held, repacks) for to, some in mine.passing.items()]
        passed = [self._expect(of, some, band, held) for of, some in mine.passed.items()]
        letters = Letters(
            packs, _real(sends), _real(receipts), repacks, _real(passing), _real(passed)
        )
        return self._finished(alike, loads, held, letters)

    def _parts(self, pieces: Iterable[Piece], band: Box) -> list[tuple[Piece, Box]]:
        found = ((piece, self._boxes[piece].intersect(band)) for piece in pieces)
        return [(piece, part) for piece, part in found if part is not None]

    def _write(
        self,
        to: int,
        pieces: Iterable[Piece],
        band: Box,
        held: Mapping[Any, Held],
        copies: list[Copies],
    ) -> tuple[int, Buffer]:
        """Plan a letter of what is in the arena; one that lies there as it is needs no copy."""
        parts = self._parts(pieces, band)
        found = [held.get(piece) or held[piece[0]] for piece, _ in parts]
        if len(parts) == 1 and found[0].box == parts[0][1]:
            return to, found[0].data.data
        letter, done = self._take(sum(part.size for _, part in parts)), 0
        for (_, part), source in zip(parts, found):
            nbytes = part.size * self._item
            into = Held(part, letter[done : done + nbytes])
            copies.append(views(into, source, part, self._item))
            done += nbytes
        return to, letter.data

    def _expect(
        self, sender: int, pieces: Iterable[Piece], band: Box, held: dict[Any, Held]
    ) -> tuple[int, Buffer]:
        """Plan room for a letter, and take note where its pieces will be."""
        parts = self._parts(pieces, band)
        letter, done = self._take(sum(part.size for _, part in parts)), 0
        for piece, part in parts:
            nbytes = part.size * self._item
            held[piece] = Held(part, letter[done : done + nbytes])
            done += nbytes
        return sender, letter.data


def _real(letters: Iterable[tuple[int, Buffer]]) -> list[tuple[int, Buffer]]:
    return [(process, letter) for process, letter in letters if len(letter)]
