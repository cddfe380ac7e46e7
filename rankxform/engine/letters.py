"""Recipes for trades: one process's part in moving a parameter between processes, band by band.

Every process that takes part cuts the parameter into the same bands. In each it reads what it is
to read, once, packs for every other process what that one wants, and sends it; takes what is sent
to it, passes on what others of its node want of that, and puts its slices together. Between two
processes goes one letter a band and kind, its pieces in one order that both know.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import reduce
from typing import TYPE_CHECKING, Any

from rankxform.geometry.box import Box
from rankxform.geometry.runs import CALL_BYTES
from rankxform.geometry.tiles import Bands, Rows, bands
from rankxform.planning.exchange import Trade, Traded, paced
from rankxform.planning.routes import Piece, Posts, posts
from rankxform.storage.posix import Buffer

from .checksum import SEAL_BYTES
from .schedule import ALIGN, Band, Held, Letters, Load, Recipe, views

if TYPE_CHECKING:
    from .schedule import Copies


class TradeRecipe(Recipe):
    """Works out the bands of one process's part in a kind of trade.

    With `sealed`, every letter ends with room for a seal, and is a copy of what was read.
    """

    def __init__(self, move: Traded, call: float = CALL_BYTES, sealed: bool = False) -> None:
        super().__init__(move, call)
        self._seal = SEAL_BYTES if sealed else 0
        self._trade = trade = move.trade
        grid = move.layout.grid(move.parameter.shape)
        boxes = {cell: grid.box(cell) for cell in trade.servers}
        self._every = {cell: box for cell, box in boxes.items() if box.size}
        self._boxes = {(at, cell): box for cell in trade.servers for at, box in trade.copies(cell)}
        every = posts(trade)
        self._mine = every.get(move.process, Posts())
        self._groups = [self._group(own, trade, process) for process, own in every.items()]
        self._held, self._wanted = {}, {}
        for piece in self._mine.read:
            self._want(piece[0], self._boxes[piece])
        self._out, self._into, self._passing, self._passed = (
            {peer: self._rows_of(some) for peer, some in post.items()}
            for post in (self._mine.out, self._mine.into, self._mine.passing, self._mine.passed)
        )
        self._pieces = self._rows_of(self._mine.every)
        own = set(self._mine.own)
        self._copies = {
            cell: tuple(
                (at if (at, cell) in own else (at, cell), box) for at, box in move.copies(cell)
            )
            for cell in move.targets
        }

    def _rows_of(self, pieces: Iterable[Piece]) -> Rows[Piece]:
        return Rows((piece, self._boxes[piece]) for piece in pieces)

    def _group(self, own: Posts, trade: Trade, process: int) -> list[Box]:
        """Return the boxes that a process has in its arena, each as often as it may be there."""
        read = [self._grid.box(at) for at in dict.fromkeys(at for at, _ in own.read)]
        letters = [own.out, own.into, own.passing, own.passed]
        pieces = [self._boxes[one] for post in letters for some in post.values() for one in some]
        served = [box for cell, box in self._every.items() if process in trade.servers[cell]]
        return [*read, *pieces, *served]

    def _full_bands(self, arena: int) -> Iterator[Bands]:
        if not self._every:
            return
        region = reduce(Box.hull, self._every.values())
        room = arena - (ALIGN + self._seal) * max(map(len, self._groups))
        limit = max(1, room // self._item)
        yield from bands(self._shape, region, self._groups, limit)

    def turns(self, arena: int) -> Iterator[tuple[Bands, int]]:
        """Yield this process's bands, so that all who read or serve do so from start to end.

        Bands of the same readers and servers stay in their order, and each such row is drawn on
        at the pace that ends them all together: where one side is cut by rows, its processes
        would else have all bands one after the other.
        """
        servers = Rows((self._trade.servers[c], box) for c, box in self._every.items())
        senders = Rows((by, self._grid.box(c)) for c, by in self._trade.senders.items())
        rows: dict[object, list[tuple[int, tuple[Bands, int]]]] = {}
        for alike in self.bands(arena):
            serving = frozenset(p for by, _ in servers.over(alike.first) for p in by)
            reading = frozenset(p for by, _ in senders.over(alike.first) for p, _ in by.values())
            for turn in range(alike.count):
                row = rows.setdefault((serving, reading), [])
                row.append((alike.first.size, (alike, turn)))
        placed = [
            (middle, number, at, one)
            for number, row in enumerate(rows.values())
            for at, (middle, one) in enumerate(paced(row))
        ]
        for *_, (alike, turn) in sorted(placed, key=lambda one: one[:3]):
            if not alike.first.size or next(self._pieces.over(alike.first), None):
                yield alike, turn

    def _work(self, alike: Bands) -> Band:
        band = alike.first
        loads: list[Load] = []
        held: dict[Any, Held] = {
            cell: self._load(cell, need, alike, loads) for cell, need in self._sources.over(band)
        }
        packs: list[Copies] = []
        repacks: list[Copies] = []
        sends = self._write(self._out, band, held, packs)
        receipts = self._expect(self._into, band, held)
        passing = self._write(self._passing, band, held, repacks)
        passed = self._expect(self._passed, band, held)
        letters = Letters(packs, sends, receipts, repacks, passing, passed)
        return self._finished(alike, loads, held, letters)

    def _write(
        self,
        post: Mapping[int, Rows[Piece]],
        band: Box,
        held: Mapping[Any, Held],
        copies: list[Copies],
    ) -> list[tuple[int, Buffer]]:
        """Plan letters of what is in the arena; one that lies there as it is needs no copy."""
        letters = []
        for to, rows in post.items():
            parts = list(rows.over(band))
            found = [held.get(piece) or held[piece[0]] for piece, _ in parts]
            if len(parts) == 1 and found[0].box == parts[0][1] and not self._seal:
                letters.append((to, found[0].data.data))
            elif parts:
                letter, places = self._letter(parts)
                letters.append((to, letter))
                for place, source in zip(places, found):
                    copies.append(views(place, source, place.box, self._item))
        return letters

    def _expect(
        self, post: Mapping[int, Rows[Piece]], band: Box, held: dict[Any, Held]
    ) -> list[tuple[int, Buffer]]:
        """Plan room for letters, and take note where their pieces will be."""
        letters = []
        for sender, rows in post.items():
            parts = list(rows.over(band))
            if parts:
                letter, places = self._letter(parts)
                letters.append((sender, letter))
                held.update((piece, place) for (piece, _), place in zip(parts, places))
        return letters

    def _letter(self, parts: Iterable[tuple[Piece, Box]]) -> tuple[Buffer, list[Held]]:
        """Plan a letter, with its pieces one behind the other."""
        boxes = [part for _, part in parts]
        letter = self._take(sum(box.size for box in boxes), self._seal)
        done, places = 0, []
        for box in boxes:
            nbytes = box.size * self._item
            places.append(Held(box, letter[done : done + nbytes]))
            done += nbytes
        return letter.data, places
