"""The execution of schedules: the order of tiles, reads, messages, copies, sinks.

A parameter moves tile by tile. For each tile every source file is read in one piece, every
destination file written in one piece, and between the two lies one strided numpy copy in words
as wide as the sharding allows; if a destination wants exactly what was read, nothing is copied. All
destination ranks that one process serves take their part from the same read.

Tiles are started in one order that all processes share, and completed in the same order. With
messages, several tiles are in flight at a time, and a process waits only for messages of the
oldest. Their senders wait only for messages of earlier tiles, so there is no deadlock.

Two tensors, or two parts of one, may be made of alternate rows, or of the halves of the rows, of
one source tensor. Made one after the other they would each read all of it; made in turn, the second
finds what the first has read in the arena.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from functools import cached_property
from itertools import chain, cycle, tee, zip_longest
from math import prod
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from rankxform.formats.container import item_size
from rankxform.geometry.pieces import Piece
from rankxform.geometry.tiling import TileRun
from rankxform.planning.budget import MemoryBudget
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.reads import ReadMethod
from rankxform.planning.transfers import Transfer
from rankxform.storage.posix import Buffer, Position
from rankxform.storage.source_reader import SourceReader, TensorRead
from rankxform.transport.team import OnProgress
from rankxform.values import NamedTuple, dataclass

from .checksum import IntegrityChecker
from .copier import Copier, Operands, ValueStats
from .schedule import Schedule, SlicesInMemory, TileWork, arena, bind_tile
from .sinks import ArraySink

if TYPE_CHECKING:
    from .in_memory import InMemory
    from .schedule import Bytes, View


_REPORT_SECONDS = 0.01
"""After so long progress is told, and a request to stop noticed; tiles may take microseconds."""
_MANY_TILES = 64
_MANY_SCHEDULES = 256


class TilePlan:
    """Tiles of a schedule that differ in their place only; worked out when they are needed, and
    bound to each arena once."""

    def __init__(self, schedule: Schedule, tile_run: TileRun, arenas: Sequence[Bytes]) -> None:
        self._schedule, self._alike, self._arenas = schedule, tile_run, arenas
        self._plans: dict[int, TileWork] = {}
        self._bound: dict[int, TileWork] = {}

    def bound(self, arena: int, slices: SlicesInMemory | None = None, repeat: int = 0) -> TileWork:
        """Return the work as it is done in the arena of this number.

        slices: those that lie in memory, where they do; then it is that of one repetition.
        """
        if slices is None and arena in self._bound:
            return self._bound[arena]
        number = arena if self._schedule.picks else 0  # pieces are views of one arena
        if number not in self._plans:
            room = self._arenas[number]
            self._plans[number] = self._schedule.plan(self._alike, room, slices or SlicesInMemory())
        plan = self._plans[number]
        if slices is not None:
            return bind_tile(plan, slices.buffers(self._arenas[arena]), repeat)
        self._bound[arena] = bind_tile(plan, [self._arenas[arena]])
        return self._bound[arena]


Step = tuple[TilePlan, int, float]
"""A tile's plan, the number of its repetition, and where in an exchange it is done, from 0 to 1."""


class Tile(NamedTuple):
    """A tile of a transfer, worked out when it is needed."""

    transfer: Transfer
    plan: TilePlan | None = None  # None: the transfer ends
    repeat: int = 0  # the number of its repetition
    arena: int = 0  # the number of the arena where it is done
    shift: int = 0  # so many bytes further on in the source than planned: another slice of a stack

    def work(self, in_memory: InMemory | None) -> TileWork | None:
        """Return what is done for it."""
        if self.plan is None:
            return None
        if in_memory is None or not in_memory.has(self.transfer):
            return self.plan.bound(self.arena)
        return self.plan.bound(self.arena, in_memory.slices(self.transfer), self.repeat)


class ScheduleCache:
    """Makes schedules, and keeps the short ones, which many small parameters share."""

    def __init__(
        self,
        budget: MemoryBudget,
        method: ReadMethod,
        in_memory: InMemory | None = None,
        *,
        checked: bool = False,
        ascending: bool = False,
    ) -> None:
        """With `checked`, messages have checksums. With `ascending`, tiles are in the order of the
        tensor that is made, at any cost."""
        self._in_memory = in_memory
        self._method, self._checked, self._ascending = method, checked, ascending
        self._budget = budget
        self._arenas = [arena(budget.arena) for _ in range(budget.in_flight)]
        self._arena_numbers = cycle(range(budget.in_flight))
        self._kept: dict[object, tuple[Sequence[Step], int]] = {}

    def tiles(self, transfer: Transfer) -> Iterator[Tile]:
        """Yield the tiles of a transfer, in order, each for the next of the arenas."""
        steps, shift = self._steps_of(transfer)
        for plan, repeat, _ in steps:
            yield Tile(transfer, plan, repeat, next(self._arena_numbers), shift)

    def tiles_in_turn(self, transfers: Sequence[Transfer]) -> Iterator[Tile]:
        """Yield the tiles of parts in exchanges, those of all in proportion; a process that has no
        part in one of them has the others' tiles in the same order."""
        from heapq import merge

        streams = (zip(cycle([transfer]), self._steps_of(transfer)[0]) for transfer in transfers)
        for transfer, (plan, repeat, _) in merge(*streams, key=lambda step: step[1][2]):
            yield Tile(transfer, plan, repeat, next(self._arena_numbers))

    def _steps_of(self, transfer: Transfer) -> tuple[Iterable[Step], int]:
        """Return a transfer's tiles, each with its repetition, and how many bytes further on in
        the source they are."""
        parameter, exchange = transfer.parameter, transfer.exchange
        in_stack = None if exchange or self._checked else _place_in_stack(transfer)
        grid, start = in_stack or (parameter.grid, 0)
        key: object = (
            grid, parameter.src_dtype, parameter.dtype, transfer.grid,
            tuple(transfer.targets), any(parameter.steps),
        )  # fmt: skip
        if exchange:
            key = key, exchange.receivers, exchange.senders, exchange.forwarder
        if key in self._kept:
            cached_steps, cached_start = self._kept[key]
            return cached_steps, start - cached_start
        if parameter.composed_sharding:
            from .piece_schedule import PieceSchedule

            schedule: Schedule = PieceSchedule(
                transfer, self._method, checked=self._checked, ascending=self._ascending
            )
        else:
            is_between = self._in_memory is not None and self._in_memory.is_between(transfer)
            schedule = Schedule(transfer, self._method, checked=self._checked, in_memory=is_between)
        steps = self._steps(schedule)
        first = []
        for step in steps:
            first.append(step)
            if len(first) > _MANY_TILES:
                return chain(first, steps), 0
        if len(self._kept) >= _MANY_SCHEDULES:
            self._kept.clear()
        self._kept[key] = first, start
        return first, 0

    @cached_property
    def _large_arena(self) -> Bytes:
        """Room for tiles that are better large; its pages are taken as they are used."""
        large = self._budget.large_arena
        return arena(large) if large > self._budget.arena else self._arenas[0]

    def _steps(self, schedule: Schedule) -> Iterator[Step]:
        plans = dict[int, TilePlan]()  # by the id of the tiles, which the plan keeps
        arenas = self._arenas
        if schedule.permutes and len(arenas) == 1:
            arenas = [self._large_arena]
        for tile_run, repeat, position in schedule.repeats(len(arenas[0])):
            if id(tile_run) not in plans:
                plans[id(tile_run)] = TilePlan(schedule, tile_run, arenas)
            yield plans[id(tile_run)], repeat, position
            if repeat + 1 == tile_run.count:
                del plans[id(tile_run)]


def _place_in_stack(transfer: Transfer) -> tuple[object, int] | None:
    """Return of a tensor that is a slice of a stack what all of its slices share, and where it
    begins in the file's content, in bytes; None of any other.

    A mixture of experts has tens of thousands of such tensors, whose schedules differ in nothing
    else. What is done to elements may depend on their place, and integrity is checked by it.
    """
    parameter = transfer.parameter
    composed = parameter.composed_sharding
    if composed is None or any(parameter.steps) or len(transfer.readers) != 1:
        return None
    grid, (cell,) = composed.pieces, transfer.readers
    source_box, piece = grid.source_box(cell), grid.piece(cell)
    first = piece.src_start
    steps = [step for axis, step in zip(piece.axes, piece.src_step) if axis == 0]
    if len(grid.assembly.pieces) > 1 or len(first) < 2 or steps not in ([], [1]):
        return None
    shared = (
        cell, source_box, grid.box(cell), parameter.shape, piece.shape, piece.dst_start,
        piece.dst_step, first[1:], piece.src_step, piece.axes,
    )  # fmt: skip
    return shared, first[0] * prod(source_box.shape[1:]) * item_size(parameter.src_dtype)


_MOST = 4


def group_in_turn(transfers: Iterable[Transfer]) -> Iterator[list[Transfer]]:
    """Yield transfers in their order: those that are made in turn as one list."""
    group: list[Transfer] = []
    for transfer in transfers:
        if group and not _is_in_turn(group, transfer):
            yield group
            group = []
        group.append(transfer)
    if group:
        yield group


def _is_in_turn(group: Sequence[Transfer], b: Transfer) -> bool:
    """Tell whether a transfer is of one position in an exchange with others, or is made of rows of
    one source with them."""
    a = group[-1]
    if a.exchange is not None and b.exchange is not None:
        return a.exchange.position == b.exchange.position
    if len(group) == _MOST:
        return False
    composed_a, composed_b = a.parameter.composed_sharding, b.parameter.composed_sharding
    if composed_a is None or composed_b is None or a.exchange or b.exchange:
        return False
    if a.parameter.src_names != b.parameter.src_names or a.readers.items() != b.readers.items():
        return False
    pieces = composed_a.pieces.assembly.pieces, composed_b.pieces.assembly.pieces
    return len(pieces[0]) == len(pieces[1]) and all(map(_overlap, *pieces))


def _overlap(a: Piece, b: Piece) -> bool:
    """Whether two pieces of the same shape take elements of the same rows of the same source."""
    if a.source != b.source or a.shape != b.shape or a.axes != b.axes or not a.src_start:
        return False
    rows, other_rows = a.src_box(a.box), b.src_box(b.box)
    return rows.start[0] < other_rows.stop[0] and other_rows.start[0] < rows.stop[0]


# Files are announced to the system (POSIX_FADV_WILLNEED) only where a process attends to messages
# too: while a read waits for a device, its messages do not move on. Eight nodes that sent 50 MB
# each over slow links, from slow disks, took 5.2 s, and 4.6 to 4.9 s so, with 4 tiles ahead as with
# 32; the links alone take 4.1 s. Without messages a cold read of 2 GB by two processes took 2.5 s
# either way, because the system reads ahead itself. Of objects each read takes 30 ms, and only
# announcing keeps 64 in flight.
_TILES_AHEAD, _LEAST_AHEAD = 4, 64 << 10
"""Tiles whose reads are announced to the system; bytes of a read that is worth it."""


class ArenaReuse:
    """Tells which tiles need no reads, because the tile before has left in the arena what they
    need; it is told of all tiles, in order."""

    _left: object = None

    def forget(self) -> None:
        """Take note that the arena holds something else."""
        self._left = None

    def has(self, tile: Tile, work: TileWork) -> bool:
        """Tell whether everything that a tile reads is in the arena already."""
        if not work.arena:
            self._left = None
            return False
        readers, entry = tile.transfer.readers, tile.transfer.parameter.entry
        read = work.arena, [
            (readers[f.cell], entry(f.cell, readers[f.cell]), f.start + tile.shift, len(f.room),
             f.run, f.stride)
            for f in work.fetches
        ]  # fmt: skip
        is_in_arena, self._left = read == self._left, read
        return is_in_arena


def coming_reads(tiles: Iterable[Tile], in_memory: InMemory | None) -> Iterator[TensorRead]:
    """Yield what tiles read, in order; slices in memory are taken as a whole."""
    repeats, taken = ArenaReuse(), None
    for tile in tiles:
        transfer = tile.transfer
        if tile.plan is not None and in_memory is not None and in_memory.is_between(transfer):
            if transfer is not taken:
                yield from in_memory.reads_of(transfer)
            taken = transfer
            continue
        work = tile.work(in_memory)
        if work is None or repeats.has(tile, work):
            continue
        for cell, start, step, room, _, run, stride in work.fetches:
            file, first = transfer.readers[cell], start + tile.shift + tile.repeat * step
            entry, nbytes = transfer.parameter.entry(cell, file), len(room)
            if not run:
                yield TensorRead(file, entry, first, nbytes)
            for number in range(nbytes // run if run else 0):
                yield TensorRead(file, entry, first + number * stride, run)


DIRECT, FORWARDED = 0, 1
"""Tags of messages: from the process that reads, and from the one that received it on a node."""


class Messenger(Protocol):
    """Carries bytes to and from other processes, without blocking."""

    def send(self, peer: int, data: Buffer, tag: int = 0) -> Any:
        """Begin to send; return a request."""

    def receive(self, peer: int, room: Buffer, tag: int = 0) -> Any:
        """Begin to receive; return a request."""

    def wait_all(self, requests: Iterable[Any], on_progress: OnProgress) -> None:
        """Wait until requests are done; `on_progress` is called meanwhile, and may raise."""

    def progress(self) -> None:
        """Let messages in flight move on."""


class Sink(Protocol):
    """Where the content of one destination file's slices goes, or of files that get the same.

    Parts of a slice ascend but for those of an exchange, whose tiles are interleaved.
    """

    @property
    def bytes_put(self) -> int:
        """Bytes put so far, into one file."""

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Take content of `name` from its content byte `start` on."""

    def share(self, name: str, start: int, source: Position, nbytes: int) -> int:
        """Take content as `put` does, by sharing blocks of a file; return how many bytes are
        shared by all of its files, 0 if nothing was taken."""

    def finish(self) -> None:
        """Write out what is still buffered, if anything is. Raises StorageError."""


@dataclass(frozen=True)
class Traffic:
    """What one process moved: bytes read from source files, written to sinks, and sent; and the
    seconds it took to read, to exchange, to copy in memory, and to write. notices: what to know of
    the files that were read; values: of values that were changed, by parameter."""

    read: int = 0
    written: int = 0
    sent: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    notices: tuple[str, ...] = ()
    values: Mapping[str, ValueStats] = field(default_factory=dict)
    shared: int = 0  # written bytes whose blocks are the source's files'

    def __add__(self, other: Traffic) -> Traffic:
        seconds = {
            name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0)
            for name in (*self.seconds, *other.seconds)
        }
        return Traffic(
            self.read + other.read, self.written + other.written, self.sent + other.sent, seconds,
            self.notices + other.notices, {**self.values, **other.values},
            self.shared + other.shared,
        )  # fmt: skip


class WorkInputs(NamedTuple):
    """What work is done with: the source's files, opened; messages from and to other processes;
    operands of steps, and what was moved to bring them."""

    sources: SourceReader
    messenger: Messenger | None = None
    operands: Operands | None = None
    operand_traffic: Traffic = Traffic()


def execute(
    work: WorkPlan,
    inputs: WorkInputs,
    sinks: Mapping[int, Sink],
    on_progress: OnProgress,
    checker: IntegrityChecker | None = None,
    on_complete: Callable[[Transfer], None] = lambda transfer: None,
) -> Traffic:
    """Read what `work` needs, assemble it, and put it into `sinks`, by destination file.

    Large slices that lie in memory are moved there (`engine.in_memory`).
    `on_progress` is called with the bytes written since its last call, and may raise to stop;
    `on_complete` is called with every transfer that is complete. A `checker` compares what is put
    with what was read, and messages with what was sent.
    """
    sources, messenger, operands, operand_traffic = inputs
    budget = MemoryBudget.of(
        work.memory,
        exchanges=messenger is not None,
        is_announced=bool(sources.ahead),
        in_memory=sources.is_memory,
    )
    in_memory, makes_arrays = None, any(isinstance(sink, ArraySink) for sink in sinks.values())
    if checker is None and (sources.is_memory or makes_arrays):
        from .in_memory import InMemory

        in_memory = InMemory(sources, sinks)
    schedules = ScheduleCache(
        budget, work.policy.method, in_memory, checked=checker is not None, ascending=work.ascending
    )
    copier = Copier(operands)
    pipeline = Pipeline(sinks, sources, on_progress, on_complete, checker, messenger, copier)
    scheduling = {"plan": 0.0}
    # Arrays are taken as a whole, one tensor after the other, and let go of.
    tiles = _tiles_in_order(work, schedules, in_turn=not sources.is_memory)
    if sources.ahead:
        tiles, coming = tee(tiles)
        sources.expect(coming_reads(coming, in_memory), budget.announced, on_progress)
    elif messenger is not None and in_memory is None:
        tiles = _announced_to_system(tiles, sources)
    for tile, tile_work in _work_out(tiles, in_memory, scheduling):
        if tile_work is None:
            pipeline.end(tile.transfer)
        elif messenger is None:
            pipeline.move(tile, tile_work)
        else:
            if len(pipeline.in_flight) == budget.in_flight:
                pipeline.complete()
            pipeline.start(tile, tile_work)
    while pipeline.in_flight:
        pipeline.complete()
    pipeline.finish()
    notices = sources.check_unchanged()
    written = pipeline.placed + sum(sink.bytes_put for sink in sinks.values())
    return operand_traffic + Traffic(
        sources.nbytes,
        written,
        pipeline.sent,
        pipeline.seconds | scheduling,
        notices,
        copier.values,
        pipeline.shared,
    )


def _tiles_in_order(
    work: WorkPlan, schedules: ScheduleCache, *, in_turn: bool = True
) -> Iterator[Tile]:
    """Yield the tiles of transfers in order, and with each transfer's end one that says so.

    in_turn: whether those of exchanges with one position are mixed; the same on all processes.
    """
    single_groups = ([transfer] for transfer in work.transfers)
    for group in single_groups if work.ascending else group_in_turn(work.transfers):
        if len(group) == 1:
            yield from schedules.tiles(group[0])
        elif group[0].exchange is not None and in_turn:
            yield from schedules.tiles_in_turn(group)
        elif group[0].exchange is not None:
            yield from chain.from_iterable(map(schedules.tiles, group))
        else:
            for tiles in zip_longest(*map(schedules.tiles, group)):
                yield from filter(None, tiles)
        yield from map(Tile, group)


def _announced_to_system(tiles: Iterator[Tile], sources: SourceReader) -> Iterator[Tile]:
    """Yield tiles; what the next few read is announced."""
    coming = deque[Tile]()
    for tile in tiles:
        for read in coming_reads([tile], None):
            if read.nbytes >= _LEAST_AHEAD:
                sources.announce_to_system(read)
        coming.append(tile)
        if len(coming) > _TILES_AHEAD:
            yield coming.popleft()
    yield from coming


def _work_out(
    tiles: Iterator[Tile], in_memory: InMemory | None, seconds: dict[str, float]
) -> Iterator[tuple[Tile, TileWork | None]]:
    """Yield what is done for each tile, and add up what it takes to work that out."""
    while True:
        began = perf_counter()
        tile = next(tiles, None)
        work = None if tile is None else tile.work(in_memory)
        seconds["plan"] += perf_counter() - began
        if tile is None:
            return
        yield tile, work


@dataclass
class _TileInFlight:
    """A tile in flight; `ended` are the transfers that are complete with it."""

    tile: Tile
    work: TileWork
    recvs: Sequence[Any] = ()
    forwarded: Sequence[Any] = ()
    sends: Sequence[Any] = ()
    ended: list[Transfer] = field(default_factory=list)


class Pipeline:
    """Carries out tiles: starts them in order, and completes them in the same order."""

    def __init__(
        self,
        sinks: Mapping[int, Sink],
        sources: SourceReader,
        on_progress: OnProgress,
        on_complete: Callable[[Transfer], None],
        checker: IntegrityChecker | None,
        messenger: Messenger | None,
        copier: Copier,
    ) -> None:
        self._sinks, self._sources, self._on_progress = sinks, sources, on_progress
        self._sinks_of_files: dict[tuple[int, ...], Iterable[Sink]] = {}
        self._on_complete, self._checker, self._messenger = on_complete, checker, messenger
        self._copy = copier
        self.in_flight: deque[_TileInFlight] = deque()
        self.sent = self.placed = self.shared = self._unreported = 0
        self._next_report = 0.0
        self._repeats = ArenaReuse()
        self.seconds = {"read": 0.0, "exchange": 0.0, "copy": 0.0, "write": 0.0}

    def move(self, tile: Tile, work: TileWork) -> None:
        """Carry out a tile that no other process has a part in."""
        if work.direct and not self._checker:
            self._pass_on(tile, work)
            return
        began = perf_counter()
        self._read(tile, work)
        self.seconds["read"] += perf_counter() - began
        self._store(tile, work)

    def _pass_on(self, tile: Tile, work: TileWork) -> None:
        """Carry out a tile of which each write is what one fetch reads: share blocks or copy."""
        self._repeats.forget()
        transfer, repeat, written_bytes, sources = tile.transfer, tile.repeat, 0, self._sources
        parameter = transfer.parameter
        name = parameter.name
        for fetch, write in work.direct:
            began = perf_counter()
            file = transfer.readers[fetch.cell]
            src_name = parameter.entry(fetch.cell, file)
            first = fetch.start + tile.shift + repeat * fetch.step
            start = write.start + repeat * write.step
            place, nbytes = sources.place(file, src_name, first), len(write.data)
            files = transfer.targets[write.cell]
            unshared_sinks = []
            for sink in self._sinks_of_files.get(files) or self._distinct_sinks(files):
                shared_bytes = sink.share(name, start, place, nbytes) if place else 0
                self.shared += shared_bytes
                if not shared_bytes:
                    unshared_sinks.append(sink)
            shared = perf_counter()
            if unshared_sinks:
                sources.read(file, src_name, first, fetch.room, fetch.sparse)
            else:
                sources.nbytes += nbytes
            read = perf_counter()
            for sink in unshared_sinks:
                sink.put(name, start, write.data)
            self.seconds["read"] += read - shared
            self.seconds["write"] += shared - began + perf_counter() - read
            written_bytes += nbytes * len(files)
        self._on_progress(written_bytes)

    def start(self, tile: Tile, work: TileWork) -> None:
        """Start the receives of a tile, read for it, and start its sends."""
        begun = _TileInFlight(tile, work)
        messages, messenger = work.messages, self._messenger
        began = perf_counter()
        if messages and messenger:
            begun.recvs = [messenger.receive(sender, room) for sender, room in messages.recvs]
            begun.forwarded = [messenger.receive(s, r, FORWARDED) for s, r in messages.forwarded]
        self._read(tile, work)
        read_end = perf_counter()
        self.seconds["read"] += read_end - began
        if messages and messenger:
            name = tile.transfer.parameter.src_name
            begun.sends = self._send(name, messages.packs, messages.sends, DIRECT)
            self.seconds["exchange"] += perf_counter() - read_end
        self.in_flight.append(begun)

    def _read(self, tile: Tile, work: TileWork) -> None:
        """Read for a tile, unless that is what the last one has left in the arena."""
        if self._repeats.has(tile, work):
            return
        transfer, sources = tile.transfer, self._sources
        readers, entry = transfer.readers, transfer.parameter.entry
        sources.nbytes += work.taken
        for cell, start, step, room, sparse, run, stride in work.fetches:
            file, first = readers[cell], start + tile.shift + tile.repeat * step
            if run:
                sources.read_runs(file, entry(cell, file), first, room, sparse, run, stride)
            else:
                sources.read(file, entry(cell, file), first, room, sparse)

    def _send(
        self, name: str, packs: Sequence[View], messages: Sequence[tuple[int, Buffer]], tag: int
    ) -> list[Any]:
        assert self._messenger is not None
        for dst_words, src_words in packs:
            dst_words[...] = src_words
        for _, message in messages:
            self.sent += len(message)
            if self._checker:
                self._checker.append_checksum(message, name)
        return [self._messenger.send(to, message, tag) for to, message in messages]

    def complete(self) -> None:
        """Take what was sent for the oldest tile, forward, assemble, and put into sinks."""
        begun = self.in_flight.popleft()
        messages, messenger = begun.work.messages, self._messenger
        name = begun.tile.transfer.parameter.src_name
        if messages and messenger:
            began = perf_counter()
            self._receive(name, begun.recvs, messages.recvs)
            forwards = self._send(name, messages.repacks, messages.forwards, FORWARDED)
            self._receive(name, begun.forwarded, messages.forwarded)
            self.seconds["exchange"] += perf_counter() - began
            self._store(begun.tile, begun.work)
            began = perf_counter()
            messenger.wait_all([*begun.sends, *forwards], self._on_progress)
            self.seconds["exchange"] += perf_counter() - began
        else:
            self._store(begun.tile, begun.work)
        for transfer in begun.ended:
            self._complete_transfer(transfer)

    def _receive(
        self, name: str, requests: Sequence[Any], messages: Sequence[tuple[int, Buffer]]
    ) -> None:
        """Wait until messages have come."""
        assert self._messenger is not None
        self._messenger.wait_all(requests, self._on_progress)
        if self._checker:
            for sender, message in messages:
                self._checker.check_message(message, sender, name)

    def _store(self, tile: Tile, work: TileWork) -> None:
        checker, transfer, repeat = self._checker, tile.transfer, tile.repeat
        name, targets, sinks = transfer.parameter.name, transfer.targets, self._sinks_of_files
        if checker:
            checker.read(transfer, work, repeat, self._copy)
        began = perf_counter()
        copying = writing = 0.0
        written_bytes = 0
        for number, write in enumerate(work.writes):
            cell, start, step, data, copies, places, placed = write
            if copies:
                self._copy(transfer.parameter, work.convert, copies, places)
            if checker:
                checker.put(transfer, work, repeat, number)
            copied = perf_counter()
            self.placed += placed
            files = targets[cell]
            written_bytes += placed or len(data) * len(files)
            if not placed:
                for sink in sinks.get(files) or self._distinct_sinks(files):
                    sink.put(name, start + repeat * step, data)
            if checker and copies:  # the next write may be assembled in the same place
                checker.wait()
            written = perf_counter()
            copying += copied - began
            writing += written - copied
            began = written
        if checker:
            checker.wait()
        self.seconds["copy"] += copying
        self.seconds["write"] += writing
        self._unreported += written_bytes
        if began >= self._next_report:
            self._on_progress(self._unreported)
            self._unreported, self._next_report = 0, began + _REPORT_SECONDS
        if self._messenger:
            self._messenger.progress()

    def _distinct_sinks(self, files: tuple[int, ...]) -> Iterable[Sink]:
        """Return the sinks of files, once where they share one; kept by the files."""
        sinks = self._sinks_of_files[files] = dict.fromkeys(self._sinks[file] for file in files)
        return sinks

    def end(self, transfer: Transfer) -> None:
        """Take note that no more tiles of `transfer` will be started."""
        if self.in_flight:
            self.in_flight[-1].ended.append(transfer)
        else:
            self._complete_transfer(transfer)

    def _complete_transfer(self, transfer: Transfer) -> None:
        if self._checker:
            self._checker.check(transfer)
        self._on_complete(transfer)

    def finish(self) -> None:
        """Finish all sinks."""
        self._on_progress(self._unreported)
        self._unreported = 0
        began = perf_counter()
        for sink in self._sinks.values():
            sink.finish()
        self.seconds["write"] += perf_counter() - began
