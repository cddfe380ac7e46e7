"""Schedules of tensors that are made of pieces of others.

Tiles are of the tensor that is made, so that each is written in one piece. What they need of a
source is read as it lies there: a box of the source tensor, of which the copy picks elements by
axes and strides. Where the axes are exchanged, a tile of rows needs columns; its arena is as large
as the memory allows, so that these come in long runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import reduce
from itertools import accumulate, chain, pairwise
from math import prod
from operator import mul, sub
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from rankxform.errors import UsageError
from rankxform.geometry.box import Box, contiguous_runs, strided_runs
from rankxform.geometry.pieces import BROADCAST_AXIS, Piece, PieceTiling
from rankxform.geometry.tiling import Cell, RowIndex, TileRun, split_into_tiles
from rankxform.planning.exchange import Routes
from rankxform.planning.reads import ReadMethod
from rankxform.planning.transfers import Exchange, Transfer
from rankxform.values import dataclass

from .cast import blockwise, cast_function, transport_dtype
from .schedule import ALIGN, SMALL_TILE, Region, Schedule, SourceIndices, TileRead

if TYPE_CHECKING:
    from .schedule import Bytes, View, Words

T = TypeVar("T")

_STORED = 512 << 10
"""Bytes that are assembled at a time, and written while they are in the cache."""

_LEAST_SHARE = 16
"""Which part of the arena is left for elements at least, when every piece is aligned there."""

_MOST_SIEVED = 4
"""How many times as much as is wanted may be read, where elements are picked in memory."""


@dataclass(frozen=True)
class PieceRegion(Region):
    """Elements of a piece, in the arena. `part` counts in the piece.

    box: if `stored`, the box of the source tensor that lies there; else the part, in the order of
    the tensor that is made, as messages carry it.
    """

    piece: Piece | None = None
    stored: bool = True

    def values(self, kind: np.dtype[Any]) -> Words:
        """Return the part's elements, along the axes of the tensor that is made."""
        return self.elements_of(self.part, kind)

    def elements_of(self, part: Box, kind: np.dtype[Any]) -> Words:
        """Return the elements of `part`, a box of the piece."""
        piece = self.piece
        assert piece is not None
        values: Words = self.data.view(kind).reshape(self.box.shape)
        if not self.stored:
            return values[part.relative_to(self.box).slices()] if part.ndim else values
        src_box = piece.src_box(part).relative_to(self.box)
        steps = {a: s for a, s in zip(piece.axes, piece.src_step) if a != BROADCAST_AXIS}
        places: list[Any] = [
            slice(a, b, steps[axis]) if axis in steps else a
            for axis, (a, b) in enumerate(zip(src_box.start, src_box.stop))
        ]
        picked = values[tuple([*places, ...])]  # a view, even where no axis is left  # noqa: C409
        moving_axes = sorted(steps)  # the axes of the source that are left
        order = [moving_axes.index(axis) for axis in piece.axes if axis != BROADCAST_AXIS]
        picked = picked.transpose(order)
        if piece.is_broadcast:
            index = tuple(None if axis == BROADCAST_AXIS else slice(None) for axis in piece.axes)
            picked = np.broadcast_to(picked[index], part.shape)
        return picked


class PieceRowIndex(RowIndex[T], Generic[T]):
    """Things with boxes that count in pieces, looked up by the rows of a tile."""

    def __init__(self, grid: PieceTiling, keyed_boxes: Iterable[tuple[T, Cell, Box]]) -> None:
        self._things = [(box_key, grid.piece(cell), box) for box_key, cell, box in keyed_boxes]
        dst_boxes = [piece.dst_box(box) for _, piece, box in self._things]
        self._numbers: RowIndex[int] = RowIndex(enumerate(dst_boxes))
        super().__init__(())

    def over(self, tile: Box) -> Iterator[tuple[T, Box]]:
        """Yield the things that have a part of `tile`, with that part, counted in the piece.

        The tile may cross the edges of their boxes.
        """
        for number in self._numbers.touching(tile):
            box_key, piece, box = self._things[number]
            inside = piece.part_in(tile)
            part = box.intersect(inside) if inside is not None else None
            if part is not None:
                yield box_key, part


class PieceSchedule(Schedule):
    """Works out the tiles of a tensor that is made of pieces."""

    picks = True

    def __init__(
        self,
        transfer: Transfer,
        method: ReadMethod,
        *,
        checked: bool = False,
        ascending: bool = False,
    ) -> None:
        """With `ascending`, tiles are in the order of the tensor that is made, at any cost."""
        composed = transfer.parameter.composed_sharding
        assert composed is not None
        self._pieces_of = composed.pieces
        self._steps = transfer.parameter.steps
        self._many_axes = not all(piece.is_ordered for piece in composed.pieces.assembly.pieces)
        self._factors: dict[Cell, int] = {}
        super().__init__(transfer, method, checked=checked)
        parameter = transfer.parameter
        self._source_type = transport_dtype(parameter.src_dtype)
        self._target_type = transport_dtype(parameter.dtype)
        convert = None
        if parameter.dtype != parameter.src_dtype and not any(self._steps):
            convert = cast_function(parameter.src_dtype, parameter.dtype)
        self._convert = blockwise(convert) if convert or self._many_axes else None
        self._rest = np.full((), composed.pieces.assembly.value, self._target_type)
        for cell, need in self._wanted.items():
            stride_factor = prod(self._pieces_of.piece(cell).src_step) or 1
            rows = self._block(cell, need)
            factor = -(-rows.size // max(1, need.size))
            self._factors[cell] = max(stride_factor, factor if factor <= _MOST_SIEVED else 1)
        self._in_source_order = self._is_local and not ascending and self._share_rows()

    def _share_rows(self) -> bool:
        """Tell whether two pieces are made of the same rows of one source."""
        last_rows: dict[int, tuple[int, int]] = {}  # by source: the last piece, where its rows stop
        for source, first, stop, number in sorted(
            (self._pieces_of.source(cell), block.start[0], block.stop[0], cell[0])
            for cell, need in self._wanted.items()
            if (block := self._block(cell, need)).ndim
        ):
            other, reached = last_rows.get(source, (number, 0))
            if first < reached and other != number:
                return True
            last_rows[source] = number, stop
        return False

    @property
    def permutes(self) -> bool:
        """Whether axes are exchanged, so that a large arena makes longer runs."""
        return self._many_axes

    def _rows(self, keyed_boxes: Iterable[tuple[T, Cell, Box]]) -> RowIndex[T]:
        return PieceRowIndex(self._pieces_of, keyed_boxes)

    def _boxes_in_arena(self, routes: Routes, exchange: Exchange, process: int) -> list[Box]:
        """Return the boxes, in the made tensor, of all that a process has in its arena."""
        grid = self._pieces_of
        dst_boxes = [box for cell, box in self._all.items() if process in exchange.receivers[cell]]
        if self._is_local:
            return dst_boxes
        read = [(src_cell, self._boxes[src_cell, cell]) for src_cell, cell in routes.read]
        pieces = [(piece[0], self._boxes[piece]) for piece in routes.in_messages]
        return [
            *(grid.destination_box(src_cell, box) for src_cell, box in [*read, *pieces]),
            *(
                grid.destination_box(src_cell, box)
                for src_cell, box in read
                # A bound of `_factor` that all processes know.
                for _ in range(
                    max(_MOST_SIEVED, prod(self._pieces_of.piece(src_cell).src_step)) - 1
                )
            ),
            *dst_boxes,
        ]

    # -- tiles ------------------------------------------------------------------------------------

    def tiles(self, arena: int) -> Iterator[TileRun]:
        """Yield the tiles one by one: where one starts decides what it needs of each piece."""
        if self._empty:
            yield TileRun(Box.whole((0,) * len(self._shape)), 0, 1)
        if not self._all:
            return
        region = reduce(Box.bounding_box, self._all.values())
        groups, parts = self._groups, max(map(len, self._groups))
        if self._is_local:  # its pieces never overlap, so they are no larger than what is served
            times = 1 + max(self._factors.values(), default=1)
            groups = [[box for box in group for _ in range(times)] for group in self._groups]
            parts = len(self._boxes) + len(self._all)
        room = arena - (ALIGN + self._trailer) * parts
        if room < arena // _LEAST_SHARE:
            raise UsageError(
                f"a tensor of {parts} pieces does not fit into buffers of {arena} bytes",
                "raise --memory",
            )
        if self._is_local and not self._many_axes:
            room = min(room, SMALL_TILE)
        limit, edges = max(1, room // max(self._item, self._src_item)), []
        if self._in_source_order:
            edges = [self._pieces_of.destination_box(c, box) for c, box in self._wanted.items()]
        elif self._many_axes:
            edges = self._rows_of_whole_pieces(groups, limit)
        tile_runs = (
            TileRun(tile, tile_run.axis, 1)
            for tile_run in split_into_tiles(self._shape, region, groups, limit, edges)
            for tile in tile_run
        )
        # One that needs what the tile before has read follows it, and reads nothing.
        yield from sorted(tile_runs, key=self._first_row) if self._in_source_order else tile_runs

    def _rows_of_whole_pieces(self, groups: Sequence[Sequence[Box]], limit: int) -> list[Box]:
        """Return boxes of rows, each of as many whole pieces as fit into a tile; the same on all
        processes.

        Where axes are exchanged, a part of a piece would be read in columns, in short runs.
        """
        boxes = [self._pieces_of.destination_box(c, box) for (c, _), box in self._boxes.items()]
        if not self._shape or not boxes:
            return []

        edges = sorted(
            {edge for box in chain(boxes, *groups) for edge in (box.start[0], box.stop[0])}
        )
        numbers = {edge: number for number, edge in enumerate(edges)}
        costs_by_group = []  # of all rows before each edge
        for group in groups:
            changes = [0] * len(edges)  # of what a row costs
            for box in group:
                row = prod(box.shape[1:])
                changes[numbers[box.start[0]]] += row
                changes[numbers[box.stop[0]]] -= row
            rows = map(sub, edges[1:], edges)
            costs_by_group.append([*accumulate(map(mul, accumulate(changes), rows), initial=0)])
        cuts = [0]
        for number in range(1, len(edges) - 1):
            if max(costs[number + 1] - costs[cuts[-1]] for costs in costs_by_group) > limit:
                cuts.append(number)
        whole = Box.whole(self._shape)
        return [
            Box((edges[first], *whole.start[1:]), (edges[stop], *whole.stop[1:]))
            for first, stop in pairwise([*cuts, len(edges) - 1])
        ]

    def _first_row(self, tile_run: TileRun) -> tuple[int, int]:
        """Return from which row of which source a tile reads; (-1, 0): from none."""
        parts = self._sources.over(tile_run.first)
        rows = ((self._pieces_of.source(c), self._block(c, need).start[0]) for c, need in parts)
        return min(rows, default=(-1, 0))

    # -- one tile ---------------------------------------------------------------------------------

    def _box_around(self, cell: Cell, need: Box) -> Box:
        """Return the box of the source with `need`; strides are filled up, so that the pieces that
        lie in between are read by the same read."""
        piece, source_box = self._pieces_of.piece(cell), self._pieces_of.source_box(cell)
        box = piece.src_box(need)
        start, stop = list(box.start), list(box.stop)
        for axis, step in zip(piece.axes, piece.src_step):
            if step > 1:
                start[axis] -= (start[axis] - source_box.start[axis]) % step
                count = -(-(stop[axis] - start[axis]) // step)
                stop[axis] = min(start[axis] + count * step, source_box.stop[axis])
        return Box(tuple(start), tuple(stop))

    def _block(self, cell: Cell, need: Box) -> Box:
        """Return the whole rows of the source with `need`, which lie in one piece in the file."""
        box, source_box = self._box_around(cell, need), self._pieces_of.source_box(cell)
        return Box(box.start[:1] + source_box.start[1:], box.stop[:1] + source_box.stop[1:])

    def _fetch(self, cell: Cell, need: Box, tile_run: TileRun, fetches: list[TileRead]) -> Region:
        source_box, item = self._pieces_of.source_box(cell), self._src_item
        box, block = self._box_around(cell, need), self._block(cell, need)
        if block.size <= self._factors[cell] * need.size:
            box = self._method.box(box, block, item)
        data, position = self._reserve(box.size * item), 0
        sparse, part = box != block, box.relative_to(source_box)
        first, run, stride, count = strided_runs(part, source_box.shape)
        if count > 1:
            room = data
            fetches.append(TileRead(cell, first * item, 0, room, sparse, run * item, stride * item))
            return PieceRegion(box, data, need, True, self._pieces_of.piece(cell))
        for first, run in contiguous_runs(part, source_box.shape):
            room = data[position : position + run * item]
            fetches.append(TileRead(cell, first * item, 0, room, sparse))
            position += run * item
        return PieceRegion(box, data, need, True, self._pieces_of.piece(cell))

    def _reserve(self, nbytes: int, trailer_bytes: int = 0) -> Bytes:
        """Return views of the arena: which elements a piece takes, numpy indexes."""
        place = super()._reserve(nbytes, trailer_bytes)
        return self._arena[place.offset : place.offset + len(place)]

    def _parts_to_store(
        self, tile: Box, regions: Mapping[Any, Region]
    ) -> Iterator[tuple[Cell, Box]]:
        """Yield parts that stay in the cache until they are written, where they are copies."""
        for cell, target in self._wanting.over(tile):
            parts = list(self._regions(cell, target, regions))
            if len(parts) == 1 and self._is_made(parts[0], target):
                yield cell, target
                continue
            for tile_run in split_into_tiles(
                self._shape, target, [[target]], max(1, _STORED // self._item)
            ):
                for part in tile_run:
                    inside = part.intersect(target)
                    assert inside is not None
                    yield cell, inside

    def _regions(
        self, cell: Cell, target: Box, regions: Mapping[Any, Region]
    ) -> Iterator[PieceRegion]:
        """Yield what `target`, of a destination cell, is made of."""
        for region_key, part in self._parts[cell].over(target):
            region = regions[region_key]
            assert isinstance(region, PieceRegion)
            yield PieceRegion(region.box, region.data, part, True, region.piece, region.stored)

    def _assemble(
        self, cell: Cell, target: Box, regions: Mapping[Any, Region]
    ) -> tuple[Region, list[View], list[SourceIndices], Sequence[Region]]:
        sources = list(self._regions(cell, target, regions))
        if len(sources) == 1 and self._is_made(sources[0], target):
            return Region(target, sources[0].data, target, raw=False), [], [], sources
        data = self._reserve(target.size * self._item)
        values = data.view(self._target_type).reshape(target.shape)
        copies: list[View] = []
        places: list[SourceIndices] = []
        if sum(source.part.size for source in sources) < target.size:
            copies.append((values, self._rest))
            places.append(SourceIndices(-1))
        for source in sources:
            assert source.piece is not None
            place = source.piece.dst_box(source.part).relative_to(target)
            bounds = zip(place.start, place.stop, source.piece.dst_step)
            index: tuple[Any, ...] = (*(slice(a, b, step or 1) for a, b, step in bounds), ...)
            copies.append((values[index], source.values(self._source_type)))
            places.append(source_indices(source.piece, source.part))
        return Region(target, data, target, raw=False), copies, places, sources

    def _is_made(self, source: Region, target: Box) -> bool:
        """Whether a region, as it lies in the arena, is the tile as it is to be written."""
        assert isinstance(source, PieceRegion)
        if any(self._steps) or self._source_type != self._target_type or self._types:
            return False
        if source.part.size != target.size or source.data.nbytes != target.size * self._item:
            return False
        values = source.values(self._source_type)
        return values.shape == target.shape and values.flags.c_contiguous

    def _read_for(self, sources: Iterable[Region]) -> list[Region]:
        return list(sources)

    def _packed(self, place: Region, source: Region) -> View:
        assert isinstance(place, PieceRegion)
        assert isinstance(source, PieceRegion)
        return place.values(self._source_type), source.elements_of(place.part, self._source_type)

    def _region_in_message(self, src_cell: Cell, box: Box, data: Bytes) -> Region:
        return PieceRegion(box, data, box, True, self._pieces_of.piece(src_cell), False)

    def _run(self, region: Region, box: Box) -> Bytes | None:
        return None  # messages are in the order of the tensor that is made


def source_indices(piece: Piece, part: Box) -> SourceIndices:
    """Return which elements of the source a part of a piece takes, by axis."""
    box = piece.src_box(part)
    steps = dict(zip(piece.axes, piece.src_step))
    ranges = tuple(
        range(a, b, steps.get(axis) or 1) for axis, (a, b) in enumerate(zip(box.start, box.stop))
    )
    return SourceIndices(piece.source, ranges, piece.axes)
