"""A transfer compiled for one process: tiles, reads, messages, views of the arena.

A schedule is one process's part in an exchange; a local transfer is an exchange with oneself. It
names byte ranges of source and destination slices, messages, and numpy views of the arena between
them. Parameters that are sharded alike have one schedule, and tiles that differ only in where they
begin are one tile, repeated.

A tile has one index on the leading axes, a range on one axis, and all of the rest. Every slice
holds a tile in one piece, so each tile takes one read from each source file and one write to each
destination file. All processes of an exchange divide the parameter into the same tiles, small
enough for the arena of each.

For each tile a process starts its receives, reads its part once, packs and sends at most one
message to each process and tag, forwards what others of its node need, and assembles its slices.
Both ends know the order of the parts of a message.

No deadlock: starting a tile never waits; receives are started and messages sent without blocking.
Only completing a tile waits, for messages of that tile: from its readers (sent when they start it),
its own (received once the receiver has started it), and forwarded ones (sent when the forwarder has
its readers' messages). Suppose that some processes wait for ever, and take one whose tile is first
in the common order. If the process that it waits for has not started that tile, that process is
completing an earlier one: a contradiction. Otherwise that process waits, in order to forward, for a
reader that has not started the tile: the same contradiction.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, reduce
from itertools import accumulate
from math import gcd, prod
from operator import mul
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from rankxform.formats.container import item_size
from rankxform.geometry.box import Box, contiguous_runs, count_runs, first_element
from rankxform.geometry.tiling import Cell, RowIndex, TileRun, overlaps, split_into_tiles
from rankxform.planning.exchange import CellPair, Routes, interleave, routes_of
from rankxform.planning.reads import ReadMethod
from rankxform.planning.transfers import Exchange, Transfer
from rankxform.values import NamedTuple, dataclass

from .cast import cast_function, word_type

if TYPE_CHECKING:
    from .cast import CastFunction


ALIGN = 64
"""Bytes by which regions are aligned."""

if TYPE_CHECKING:  # numpy.typing is a tenth of the start-up
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    Words = npt.NDArray[Any]
    View = tuple[Words, Words]  # what is written, and what it is a copy of
    Copy = tuple[Any, Any]  # the same, or where both will be


ARENA = 0
"""The number of the arena among a tile's buffers; slices in memory have those behind it."""
BYTE = np.dtype(np.uint8)


class Strided:
    """Elements in a buffer; `step` bytes further on with every repetition of the tile.

    Tiles of tensors that are sharded alike differ in their buffers alone: a schedule works in these
    numbers, once, and numpy makes views of them, and refuses what leaves its buffer.
    """

    __slots__ = "buffer", "kind", "offset", "shape", "step", "strides"

    def __init__(
        self,
        buffer: int,
        offset: int,
        shape: tuple[int, ...],
        strides: tuple[int, ...] = (1,),
        kind: np.dtype[Any] = BYTE,
        step: int = 0,
    ) -> None:
        """buffer: its number. offset, strides: in bytes. kind: the type of elements; without it
        they are a run of bytes."""
        self.buffer, self.offset, self.step = buffer, offset, step
        self.shape, self.strides, self.kind = shape, strides, kind

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, part: slice) -> Strided:
        """Return a part of a run of bytes."""
        first, stop, _ = part.indices(self.shape[0])
        length = (max(0, stop - first),)
        return Strided(self.buffer, self.offset + first, length, (1,), BYTE, self.step)

    def boxed(
        self,
        shape: tuple[int, ...],
        kind: np.dtype[Any],
        start: tuple[int, ...],
        extent: tuple[int, ...],
    ) -> Strided:
        """Return a box of the row-major array of this shape that a run of bytes holds."""
        strides = tuple(accumulate(shape[:0:-1], mul, initial=kind.itemsize))[::-1][: len(shape)]
        offset = self.offset + sum(map(mul, start, strides))
        return Strided(self.buffer, offset, extent, strides, kind, self.step)

    def words_in(self, buffers: Sequence[Bytes], repeat: int) -> Words:
        """Return the elements in these buffers, for the tile of this number."""
        offset = self.offset + repeat * self.step
        words: Words = np.ndarray(self.shape, self.kind, buffers[self.buffer], offset, self.strides)
        return words


@dataclass(frozen=True)
class Region:
    """A box of the full parameter that lies in the arena, or a slice in memory, row-major."""

    box: Box
    data: Any  # its bytes, or where they will be (`Strided`)
    part: Box  # what is wanted of it
    raw: bool = True  # whether it lies there as it was read, in the source's type


class SourceIndices(NamedTuple):
    """Which elements of a source tensor a copy takes: for each of its axes which indices, and along
    which axis of the source each axis of the copy moves. source: its number; -1: none,
    the same number everywhere."""

    source: int
    ranges: tuple[range, ...] = ()
    axes: tuple[int, ...] = ()


class SlicesInMemory(NamedTuple):
    """Slices of one parameter that lie in memory as a whole, by cell: content that needs no read,
    and room for what is made, that needs no write."""

    contents: Mapping[Cell, Bytes] = MappingProxyType({})
    rooms: Mapping[Cell, Bytes] = MappingProxyType({})

    def buffers(self, arena: Bytes) -> list[Bytes]:
        """Return the buffers of a tile, in an order that all tensors share that are sharded alike:
        the arena, what is read, what is made."""
        return [arena, *(side[cell] for side in self for cell in sorted(side))]


def arena(nbytes: int) -> Bytes:
    """Return room for tiles, of so many bytes."""
    return np.empty(nbytes, np.uint8)


def content_offset(part: Box, box: Box, item: int) -> int:
    """Return the content byte at which `part` starts in a slice that holds `box`."""
    return first_element(part.relative_to(box), box.shape) * item


def copy_words(target: Region, source: Region, part: Box, item: int) -> Copy:
    """Return `part`, a box of the full parameter, as it lies in two regions, in wide words."""
    if not part.ndim:
        return target.data, source.data
    a, b = target.box, source.box
    positions = (a.start[-1] - b.start[-1], part.start[-1] - a.start[-1], part.shape[-1])
    # The most bytes that divide every position on the last axis.
    word = gcd(*(n * item for n in (*positions, a.shape[-1], b.shape[-1])))
    return _in_words(target, part, item, word), _in_words(source, part, item, word)


def typed(region: Region, part: Box, kind: np.dtype[Any]) -> Words:
    """Return `part` of a region as values of a type."""
    values: Words = region.data.view(kind).reshape(region.box.shape)
    return values[part.relative_to(region.box).slices()] if part.ndim else values


def _in_words(region: Region, part: Box, item: int, word: int) -> Strided:
    """Return a part of a region in words of so many bytes, which divide its places."""
    kind = np.dtype(f"u{word}" if word in (1, 2, 4, 8) else f"V{word}")
    (*outer, inner), extent, inside = region.box.shape, part.shape, part.relative_to(region.box)
    data: Strided = region.data
    return data.boxed(
        (*outer, inner * item // word),
        kind,
        (*inside.start[:-1], inside.start[-1] * item // word),
        (*extent[:-1], extent[-1] * item // word),
    )


class TileRead(NamedTuple):
    """A read of source `cell` from content byte `start` on, `step` bytes further with every
    repetition, into `room` in the arena; `sparse` if bytes in between are skipped.

    run, stride: `room` is filled by runs of so many bytes, each so many behind the start of the
    last; 0: it is one.
    """

    cell: Cell
    start: int
    step: int
    room: Any
    sparse: bool
    run: int = 0
    stride: int = 0


class TileWrite(NamedTuple):
    """A write to destination `cell` from content byte `start` on, `step` bytes further with every
    repetition: `data` in the arena, once `copies` have assembled it. places: of each copy, which
    source elements it takes, where steps change them. placed: bytes that the copies put where they
    belong, in memory; `data` is empty then."""

    cell: Cell
    start: int
    step: int
    data: Any
    copies: Sequence[Copy]
    places: Sequence[SourceIndices] = ()
    placed: int = 0


@dataclass(frozen=True)
class TileMessages:
    """What crosses between this process and others in one tile, as (process, message)."""

    packs: Sequence[Copy]  # copies to do before sending
    # sends, recvs: messages sent by the process that reads.
    sends: Sequence[tuple[int, Any]]
    recvs: Sequence[tuple[int, Any]]
    # repacks, forwards: copies and messages for other processes of the node, once the received
    # messages are there.
    repacks: Sequence[Copy]
    forwards: Sequence[tuple[int, Any]]
    forwarded: Sequence[tuple[int, Any]]  # such messages that this process receives


@dataclass(frozen=True)
class TileWork:
    """What is done for one tile of a parameter, and `count` - 1 times more further on.

    As a schedule plans it, it says where everything will be; `bind_tile` makes buffers and numpy
    views of that. All `writes` are assembled one after another in the same memory, which therefore
    stays in the cache.
    """

    count: int
    fetches: Sequence[TileRead]
    writes: Sequence[TileWrite]
    # sources, targets: what is read and wanted, and what is stored, for the integrity check; the
    # sources' parts tile what the targets tile. They are those of the first tile, and move on by
    # `step` elements of `axis` with every repetition.
    sources: Sequence[Region] = ()
    targets: Sequence[Region] = ()
    axis: int = 0
    step: int = 0
    messages: TileMessages | None = None  # None of a local transfer
    convert: CastFunction | None = None  # makes each copy, if that is more than an assignment
    arena: int = 0  # tells apart the arenas; 0 where what is read is of no use to the next tile
    # If every store is just what one fetch reads, these pairs; in a plan their numbers.
    direct: Sequence[tuple[Any, Any]] = ()
    taken: int = 0  # bytes of slices in memory, which are not read

    def at(self, repeat: int, box: Box) -> Box:
        """Return where a box of the first tile is in the repetition of this number."""
        return box.shifted(self.axis, repeat * self.step) if repeat else box


def bind_tile(plan: TileWork, buffers: Sequence[Bytes], repeat: int = 0) -> TileWork:
    """Return the work of a tile in these buffers: an arena, and slices in memory.

    repeat: the number of the tile, for slices in memory.
    """
    reads = [TileRead(*read[:3], _in_buffers(read.room, buffers, repeat).data, *read[4:])
             for read in plan.fetches]  # fmt: skip
    writes = [
        TileWrite(
            *write[:3],
            _in_buffers(write.data, buffers, repeat).data,
            _views_of(write.copies, buffers, repeat),
            *write[5:],
        )
        for write in plan.writes
    ]
    messages = plan.messages
    if messages is not None:
        packs, repacks = (
            _views_of(copies, buffers, repeat) for copies in (messages.packs, messages.repacks)
        )
        sends, recvs, forwards, forwarded = (
            [(peer, _in_buffers(data, buffers, repeat).data) for peer, data in peers]
            for peers in (messages.sends, messages.recvs, messages.forwards, messages.forwarded)
        )
        messages = TileMessages(packs, sends, recvs, repacks, forwards, forwarded)
    sources, targets = (
        [replace(region, data=_in_buffers(region.data, buffers, repeat)) for region in regions]
        for regions in (plan.sources, plan.targets)
    )
    direct = [(reads[read], writes[write]) for read, write in plan.direct]
    return TileWork(
        plan.count, reads, writes, sources, targets, plan.axis, plan.step, messages, plan.convert,
        plan.arena, direct, plan.taken,
    )  # fmt: skip


def _in_buffers(data: Any, buffers: Sequence[Bytes], repeat: int) -> Words:
    """Return elements in buffers; what lies in an arena already stays there."""
    words: Words = data.words_in(buffers, repeat) if isinstance(data, Strided) else data
    return words


def _views_of(copies: Sequence[Copy], buffers: Sequence[Bytes], repeat: int) -> Sequence[View]:
    return [
        (_in_buffers(target, buffers, repeat), _in_buffers(source, buffers, repeat))
        for target, source in copies
    ]


SMALL_TILE = 4 << 20
"""Bytes of a tile that stays in the cache."""
_LEAST_DIRECT = 64 << 10
"""Bytes of a store whose blocks may be shared with the source."""
CHECKSUM_BYTES = 8
"""What a message between processes has at its end where its bytes are compared."""

if TYPE_CHECKING:
    from .cast import CastFunction


T = TypeVar("T")


class Schedule:
    """Works out the tiles of one kind of transfer, each in an arena that it uses anew.

    With `checked`, every message ends with room for a checksum, and is a copy of what was read.
    With `in_memory`, slices of both sides lie in memory on all processes, and the arena holds
    messages alone.
    """

    def __init__(
        self,
        transfer: Transfer,
        method: ReadMethod,
        *,
        checked: bool = False,
        in_memory: bool = False,
    ) -> None:
        parameter = transfer.parameter
        self._in_memory = in_memory
        self._method, self._trailer = method, CHECKSUM_BYTES if checked else 0
        self._shape, self._grid = parameter.shape, parameter.grid
        self._src_item, self._item = item_size(parameter.src_dtype), item_size(parameter.dtype)
        self._types: tuple[np.dtype[Any], np.dtype[Any]] | None = None
        self._convert: CastFunction | None = None
        if parameter.dtype != parameter.src_dtype and not any(parameter.steps):
            self._types = word_type(parameter.dtype), word_type(parameter.src_dtype)
            self._convert = cast_function(parameter.src_dtype, parameter.dtype)
        self._is_local = transfer.exchange is None
        self._exchange = exchange = transfer.whole_exchange()
        boxes = {cell: transfer.grid.box(cell) for cell in exchange.receivers}
        self._all = {cell: box for cell, box in boxes.items() if box.size}
        self._targets = {cell: self._all[cell] for cell in transfer.targets if cell in self._all}
        self._empty = [cell for cell in transfer.targets if cell not in self._all]
        self._boxes = {
            (src_cell, cell): box
            for cell in self._all
            for src_cell, box in overlaps(self._grid, transfer.grid, cell)
        }
        routes = routes_of(exchange)
        local_routes = routes.get(transfer.process, Routes())
        idle = {
            p: Routes()
            for files_by_process in exchange.receivers.values()
            for p in files_by_process
            if p not in routes
        }
        all_routes = {**routes, **idle}  # those that only write what nobody reads, such as padding
        self._groups = [self._boxes_in_arena(r, exchange, p) for p, r in all_routes.items()]
        self._wanted: dict[Cell, Box] = {}  # of a source cell, the bounding box of what is wanted
        for src_cell, cell in local_routes.read:
            box = self._boxes[src_cell, cell]
            self._wanted[src_cell] = (
                self._wanted[src_cell].bounding_box(box) if src_cell in self._wanted else box
            )
        self._sends, self._recvs, self._forwards, self._forwarded = (
            {peer: self._pieces(pieces) for peer, pieces in peers.items()}
            for peers in (
                local_routes.sends,
                local_routes.recvs,
                local_routes.forwards,
                local_routes.forwarded,
            )
        )
        passing_pieces = [*local_routes.read_here, *local_routes.in_messages]
        self._passing = self._pieces([*dict.fromkeys(passing_pieces)])
        local_pairs = set(local_routes.read_here)
        self._parts = {
            cell: self._rows(
                (src_cell if (src_cell, cell) in local_pairs else (src_cell, cell), src_cell, box)
                for src_cell, box in overlaps(self._grid, transfer.grid, cell)
            )
            for cell in self._targets
        }

    def _rows(self, keyed_boxes: Iterable[tuple[T, Cell, Box]]) -> RowIndex[T]:
        """Return things to be found by tile; the cell tells in whose frame a box is."""
        return RowIndex((box_key, box) for box_key, _, box in keyed_boxes)

    def _pieces(self, pieces: Iterable[CellPair]) -> RowIndex[CellPair]:
        return self._rows((piece, piece[0], self._boxes[piece]) for piece in pieces)

    def _boxes_in_arena(self, routes: Routes, exchange: Exchange, process: int) -> list[Box]:
        """Return the boxes that a process has in its arena, each as often as it may be there."""
        read = [
            self._grid.box(src_cell)
            for src_cell in dict.fromkeys(src_cell for src_cell, _ in routes.read)
        ]
        pieces = [self._boxes[piece] for piece in routes.in_messages]
        if self._in_memory and pieces:
            return pieces
        dst_boxes = [box for cell, box in self._all.items() if process in exchange.receivers[cell]]
        return [*read, *pieces, *dst_boxes]

    picks = False
    """Whether tensors are made of pieces of others, which other tensors may be made of too."""

    @property
    def permutes(self) -> bool:
        """Whether axes are exchanged, so that a large arena makes longer runs."""
        return False

    # -- tiles ------------------------------------------------------------------------------------

    def tiles(self, arena: int) -> Iterator[TileRun]:
        """Yield the tiles of the transfer, each small enough for an arena of so many bytes.

        Slices without elements are a tile of their own, the first.
        """
        if self._empty:
            yield TileRun(Box.whole((0,) * len(self._shape)), 0, 1)
        if not self._all:
            return
        region = reduce(Box.bounding_box, self._all.values())
        room = arena - (ALIGN + self._trailer) * max(map(len, self._groups))
        splits = len(self._wanted) < len(self._targets)
        if (
            self._is_local
            and (
                splits
                or self._convert
                or all(  # only rows are sharded, so that nothing needs copying
                    box.shape[1:] == self._grid.box(src_cell).shape[1:] == self._all[cell].shape[1:]
                    for (src_cell, cell), box in self._boxes.items()
                )
            )
        ):
            room = min(room, SMALL_TILE)
        limit = max(1, room // max(self._item, self._src_item))
        edges = [*self._boxes.values(), *self._all.values()] if self._in_memory else ()
        yield from split_into_tiles(self._shape, region, self._groups, limit, edges)

    def repeats(self, arena: int) -> Iterator[tuple[TileRun, int, float]]:
        """Yield tiles with the number of their repetition, in the order in which to do them, and
        where they stand in it, from 0 to 1.

        `arena` is in bytes. The order is the same on every process of an exchange; tiles in which
        this process has no part are left out.

        In an exchange, tiles of the same readers and receivers stay in their order, and such queues
        are interleaved in proportion to their length: otherwise, where one side is sharded by rows,
        its processes would be busy one after another.
        """
        if self._is_local:
            for tile_run in self.tiles(arena):
                for repeat in range(tile_run.count):
                    yield tile_run, repeat, 0.0
            return
        receivers = RowIndex((self._exchange.receivers[c], box) for c, box in self._all.items())
        senders = self._rows((p, c, self._grid.box(c)) for c, p in self._exchange.senders.items())
        queues: dict[object, list[tuple[int, tuple[TileRun, int]]]] = {}
        for tile_run in self.tiles(arena):
            writing = frozenset(
                p
                for files_by_process, _ in receivers.over(tile_run.first)
                for p in files_by_process
            )
            reading = frozenset(
                p
                for readers_by_process, _ in senders.over(tile_run.first)
                for p, _ in readers_by_process.values()
            )
            queue = queues.setdefault((writing, reading), [])
            queue += [(tile_run.first.size, (tile_run, repeat)) for repeat in range(tile_run.count)]
        placed = [
            (middle, number, position, tile_repeat)
            for number, queue in enumerate(queues.values())
            for position, (middle, tile_repeat) in enumerate(interleave(queue))
        ]
        for middle, *_, (tile_run, repeat) in sorted(placed, key=lambda slot: slot[:3]):
            first = tile_run.first
            local_part = next(self._passing.over(first), None) or next(
                self._wanting.over(first), None
            )
            if local_part or not first.size:
                yield tile_run, repeat, middle

    # -- one tile ---------------------------------------------------------------------------------

    def plan(self, tile_run: TileRun, arena: Bytes, slices: SlicesInMemory) -> TileWork:
        """Work out what is done for the first of tiles that are alike, in an arena of that size.

        slices: those that lie in memory, of which the places alone matter.
        """
        self._arena, self._used, self._taken = arena, 0, 0
        contents, rooms = sorted(slices.contents), sorted(slices.rooms)
        # In `slices.buffers`, behind the arena.
        self._contents = {
            cell: Strided(
                number,
                0,
                (slices.contents[cell].nbytes,),
                step=self._step(tile_run, self._grid.box(cell), self._src_item),
            )
            for number, cell in enumerate(contents, ARENA + 1)
        }
        self._rooms = {
            cell: Strided(
                number,
                0,
                (slices.rooms[cell].nbytes,),
                step=self._step(tile_run, self._targets[cell], self._item),
            )
            for number, cell in enumerate(rooms, ARENA + 1 + len(contents))
            if cell in self._targets
        }
        if not tile_run.first.size:
            nothing = self._reserve(0)
            return TileWork(1, (), [TileWrite(cell, 0, 0, nothing, ()) for cell in self._empty])
        fetches: list[TileRead] = []
        regions: dict[Any, Region] = {
            c: self._fetch(c, n, tile_run, fetches) for c, n in self._sources.over(tile_run.first)
        }
        messages = None if self._is_local else self._messages(tile_run.first, regions)
        writes, targets = [], []
        read: list[Region] = []
        assembly_start = self._used
        for cell, target in self._parts_to_store(tile_run.first, regions):
            self._used = assembly_start
            region, copies, places, sources = self._assemble(cell, target, regions)
            box = self._targets[cell]
            start = content_offset(target, box, self._item)
            step = self._step(tile_run, box, self._item)
            placed = target.size * self._item if cell in self._rooms else 0
            data = region.data[:0] if placed else region.data
            writes.append(TileWrite(cell, start, step, data, copies, places, placed))
            targets.append(region)
            read += sources
        is_passed_on = self._is_local and not slices.rooms
        direct = _direct(fetches, regions, writes, targets) if is_passed_on else ()
        if not self._trailer:  # nobody compares them
            read, targets = [], []
        return TileWork(
            tile_run.count, fetches, writes, self._read_for(read), targets, tile_run.axis,
            tile_run.step, messages, self._convert, id(arena) if self.picks else 0, direct,
            self._taken,
        )  # fmt: skip

    def _parts_to_store(
        self, tile: Box, regions: Mapping[Any, Region]
    ) -> Iterator[tuple[Cell, Box]]:
        """Yield what is stored of a tile: the destination cell, and which part of it at a time."""
        return self._wanting.over(tile)

    def _read_for(self, sources: Iterable[Region]) -> list[Region]:
        """Return what the integrity check sums of what was read: whole regions where it can."""
        regions_by_box: dict[Box, list[Region]] = {}
        for source in sources:
            regions_by_box.setdefault(source.box, []).append(source)
        return [
            region for box_regions in regions_by_box.values() for region in _in_one(box_regions)
        ]

    def _step(self, tile_run: TileRun, box: Box, item: int) -> int:
        """Return the content bytes from one tile to the next in a slice that holds `box`."""
        return tile_run.step * prod(box.shape[tile_run.axis + 1 :]) * item

    @cached_property
    def _sources(self) -> RowIndex[Cell]:
        return self._rows((cell, cell, box) for cell, box in self._wanted.items())

    @cached_property
    def _wanting(self) -> RowIndex[Cell]:
        return RowIndex(self._targets.items())

    def _fetch(self, cell: Cell, need: Box, tile_run: TileRun, fetches: list[TileRead]) -> Region:
        """Plan to read what is wanted of a tile from source `cell`; return where it will be."""
        cell_box, item = self._grid.box(cell), self._src_item
        if cell in self._contents:
            self._taken += need.size * item
            return Region(cell_box, self._contents[cell], need)
        block = tile_run.first.intersect(cell_box)
        assert block is not None
        box = self._method.box(need, block, item)
        start, step = content_offset(block, cell_box, item), self._step(tile_run, cell_box, item)
        position, sparse = 0, box != block
        in_place = None
        if box == need and len(self._targets) == 1:
            ((target, target_box),) = self._targets.items()
            if target_box.contains(need):  # and nothing is read for other processes' slices alone
                in_place = self._in_place((cell, target), need)
        if in_place is not None:
            region, data = in_place
        else:
            data = self._reserve(box.size * item)
            region = Region(box, data, need)
        for first, count in contiguous_runs(box.relative_to(block), block.shape):
            room = data[position : position + count * item]
            fetches.append(TileRead(cell, start + first * item, step, room, sparse))
            position += count * item
        return region

    def _assemble(
        self, cell: Cell, target: Box, regions: Mapping[Any, Region]
    ) -> tuple[Region, list[Copy], list[SourceIndices], Sequence[Region]]:
        """Plan to assemble `target`, of destination `cell`.

        Returns where, the copies with their places, and what they are of.
        """
        parts = list(self._parts[cell].over(target))
        sources = [Region(regions[k].box, regions[k].data, p) for k, p in parts]
        room = self._rooms.get(cell)
        if room is not None:
            region = Region(self._targets[cell], room, target, raw=False)
            copies = [self._copy(region, s) for s in sources if s.data is not room]
            return region, copies, [], sources
        if len(parts) == 1 and sources[0].box == target and not self._types:
            return sources[0], [], [], sources
        region = Region(target, self._reserve(target.size * self._item), target, raw=False)
        return region, [self._copy(region, source) for source in sources], [], sources

    def _copy(self, target: Region, source: Region) -> Copy:
        """Return a source's part as it lies in two regions, in words or in their types."""
        part = source.part
        if not self._types:
            return copy_words(target, source, part, self._item)
        a, b = (
            region.data.boxed(
                region.box.shape, kind, part.relative_to(region.box).start, part.shape
            )
            for region, kind in zip((target, source), self._types)
        )
        return a, b

    def _reserve(self, nbytes: int, trailer_bytes: int = 0) -> Any:
        """Return aligned room for `nbytes + trailer_bytes` bytes; each tile uses the arena anew."""
        start = -(-self._used // ALIGN) * ALIGN
        self._used = start + nbytes + trailer_bytes
        assert self._used <= len(self._arena), "a tile's cost was planned too low"
        return Strided(ARENA, start, (self._used - start,))

    # -- messages ---------------------------------------------------------------------------------

    def _messages(self, tile: Box, regions: dict[Any, Region]) -> TileMessages:
        packs: list[Copy] = []
        repacks: list[Copy] = []
        sends = self._plan_sends(self._sends, tile, regions, packs)
        recvs = self._plan_receives(self._recvs, tile, regions)
        forwards = self._plan_sends(self._forwards, tile, regions, repacks)
        forwarded = self._plan_receives(self._forwarded, tile, regions)
        return TileMessages(packs, sends, recvs, repacks, forwards, forwarded)

    def _plan_sends(
        self,
        peers: Mapping[int, RowIndex[CellPair]],
        tile: Box,
        regions: Mapping[Any, Region],
        copies: list[Copy],
    ) -> list[tuple[int, Any]]:
        """Plan messages of what is in the arena; one that equals a region there needs no copy."""
        messages = []
        for to, rows in peers.items():
            parts = list(rows.over(tile))
            sources = [regions.get(piece) or regions[piece[0]] for piece, _ in parts]
            run = self._run(sources[0], parts[0][1]) if len(parts) == 1 else None
            if run is not None and not self._trailer:
                messages.append((to, run))
            elif parts:
                message, places = self._message((piece[0], part) for piece, part in parts)
                messages.append((to, message))
                for place, source in zip(places, sources):
                    copies.append(self._packed(place, source))
        return messages

    def _packed(self, place: Region, source: Region) -> Copy:
        """Return what of a region in the arena goes to a place in a message."""
        return copy_words(place, source, place.box, self._src_item)

    def _plan_receives(
        self, peers: Mapping[int, RowIndex[CellPair]], tile: Box, regions: dict[Any, Region]
    ) -> list[tuple[int, Any]]:
        """Plan room for messages, and take note where their pieces will be."""
        messages = []
        for sender, rows in peers.items():
            parts = list(rows.over(tile))
            in_place = self._in_place(*parts[0]) if len(parts) == 1 else None
            if in_place is not None:
                region, run = in_place
                messages.append((sender, run))
                regions[parts[0][0]] = region
            elif parts:
                message, places = self._message((piece[0], part) for piece, part in parts)
                messages.append((sender, message))
                regions.update((piece, place) for (piece, _), place in zip(parts, places))
        return messages

    def _in_place(self, piece: CellPair, part: Box) -> tuple[Region, Any] | None:
        """Return the destination slice that lies in memory, and where in it a message can be
        received as it is, if there is such a place."""
        room = self._rooms.get(piece[1])
        if room is None or self._types or self._trailer:
            return None
        region = Region(self._targets[piece[1]], room, part)
        run = self._run(region, part)
        return None if run is None else (region, run)

    def _message(self, parts: Iterable[tuple[Cell, Box]]) -> tuple[Any, list[Region]]:
        """Plan a message, with its pieces one after another."""
        cell_boxes = list(parts)
        message = self._reserve(
            sum(box.size for _, box in cell_boxes) * self._src_item, self._trailer
        )
        position, places = 0, []
        for src_cell, box in cell_boxes:
            nbytes = box.size * self._src_item
            places.append(
                self._region_in_message(src_cell, box, message[position : position + nbytes])
            )
            position += nbytes
        return message, places

    def _region_in_message(self, src_cell: Cell, box: Box, data: Any) -> Region:
        """Return the region of a message that holds a part of source cell `src_cell`."""
        return Region(box, data, box)

    def _run(self, region: Region, box: Box) -> Any:
        """Return what a message of a box is to hold, if it lies in a region in one piece; else
        None."""
        inside, shape, item = box.relative_to(region.box), region.box.shape, self._src_item
        if count_runs(inside, shape) != 1:
            return None
        start = first_element(inside, shape) * item
        return region.data[start : start + box.size * item]


def _direct(
    fetches: Sequence[TileRead],
    regions: Mapping[Any, Region],
    writes: Sequence[TileWrite],
    targets: Sequence[Region],
) -> Sequence[tuple[int, int]]:
    """Return for each write the read of all of it, by their numbers, if there is one for each.

    Not for small ones, which are gathered into large ones.
    """
    if any(len(write.data) < _LEAST_DIRECT for write in writes):
        return ()
    if len(fetches) != len(regions) or any(write.copies for write in writes):
        return ()
    runs = (number for number, fetch in enumerate(fetches) if not fetch.run)
    read = {id(regions[fetches[number].cell].data): number for number in runs}
    pairs = [(read[id(r.data)], n) for n, r in enumerate(targets) if id(r.data) in read]
    return pairs if len(pairs) == len(writes) else ()


def _in_one(sources: list[Region]) -> list[Region]:
    """Return the whole region if its disjoint parts tile it, otherwise the parts."""
    box, data = sources[0].box, sources[0].data
    tiled = sum(source.part.size for source in sources) == box.size
    return [Region(box, data, box)] if tiled else sources
