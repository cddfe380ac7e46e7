"""The execution of schedules: the order of tiles, reads, messages, copies, sinks.

A parameter moves tile by tile. For each tile every source file is read in one piece, every
destination file written in one piece, and between the two lies one strided numpy copy in words
as wide as the sharding allows; if a destination wants exactly what was read, nothing is copied. All
destination ranks that one process serves take their part from the same read.

Tiles are started in one order that all processes share, and completed in the same order. With
messages, several tiles are in flight at a time, and a process waits only for messages of the
oldest. Their senders wait only for messages of earlier tiles, so there is no deadlock.

Two tensors may be made of alternate rows, or of the halves of the rows, of one source tensor. Made
one after the other they would each read all of it; made in turn, the second finds what the first
has read in the arena.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from itertools import chain, tee, zip_longest
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
from rankxform.storage.posix import Buffer, OnProgress, Position
from rankxform.storage.source_reader import SourceReader, TensorRead
from rankxform.values import NamedTuple, dataclass

from .checksum import IntegrityChecker
from .copier import Copier, Operands, ValueStats
from .schedule import Schedule, SlicesInMemory, TileRead, TileWork, arena
from .sinks import ArraySink

if TYPE_CHECKING:
    from .in_memory import InMemory, WorkInMemory
    from .schedule import Bytes, View


_MANY_TILES = 64
_MANY_SCHEDULES = 256


class LazyTileWork:
    """Tiles of a schedule that differ in their place only; worked out for an arena when needed."""

    def __init__(self, schedule: Schedule, tile_run: TileRun, arenas: Sequence[Bytes]) -> None:
        self._schedule, self._alike, self._arenas = schedule, tile_run, arenas
        self._made: dict[int, TileWork] = {}
        self._in_memory: dict[int, WorkInMemory] = {}

    def on(self, arena: int) -> TileWork:
        """Return the work as it is done in the arena of this number."""
        if arena not in self._made:
            self._made[arena] = self._schedule.work(self._alike, self._arenas[arena])
        return self._made[arena]

    def work_in_memory(self, slices: SlicesInMemory, repeat: int, arena: int) -> TileWork:
        """Return the work for one of the tiles, between slices that lie in memory."""
        if arena not in self._in_memory:
            from .in_memory import WorkInMemory

            tiles, room = self._alike, self._arenas[arena]
            works = [self._schedule.work(tiles, room, slices)]
            if tiles.count > 1:
                second = replace(tiles, first=tiles.first.shifted(tiles.axis, tiles.step))
                works.append(self._schedule.work(second, room, slices))
            self._in_memory[arena] = WorkInMemory(works[0], works[-1], slices)
        return self._in_memory[arena].on(slices, repeat)


class MovedStep:
    """A step for another slice of a stack: it reads so many bytes further on, and does the same."""

    def __init__(self, step: LazyTileWork, nbytes: int) -> None:
        self._step, self._nbytes = step, nbytes

    def on(self, arena: int) -> TileWork:
        """Return the work as it is done in the arena of this number."""
        work = self._step.on(arena)
        return replace(
            work,
            fetches=[self._moved(fetch) for fetch in work.fetches],
            direct=[(self._moved(fetch), write) for fetch, write in work.direct],
        )

    def _moved(self, fetch: TileRead) -> TileRead:
        return fetch._replace(start=fetch.start + self._nbytes)


class StepInMemory:
    """A tile of a transfer between slices that lie in memory, at one of its repetitions."""

    def __init__(
        self, step: LazyTileWork, repeat: int, transfer: Transfer, in_memory: InMemory
    ) -> None:
        self._step, self._repeat = step, repeat
        self._transfer, self._in_memory = transfer, in_memory

    def on(self, arena: int) -> TileWork:
        """Return the work; messages are packed in the arena of this number."""
        slices = self._in_memory.slices(self._transfer)
        return self._step.work_in_memory(slices, self._repeat, arena)


Step = LazyTileWork | MovedStep | StepInMemory


class ScheduleCache:
    """Makes schedules, and keeps the short ones, which many small parameters share."""

    def __init__(
        self,
        budget: MemoryBudget,
        method: ReadMethod,
        in_memory: InMemory | None = None,
        *,
        checked: bool = False,
    ) -> None:
        """With `checked`, messages have checksums."""
        self._in_memory = in_memory
        self._method, self._checked = method, checked
        self._budget = budget
        self._arenas = [arena(budget.arena) for _ in range(budget.in_flight)]
        self._kept: dict[object, tuple[Sequence[tuple[LazyTileWork, int]], int]] = {}

    def turns(self, transfers: Sequence[Transfer]) -> Iterator[tuple[Transfer, Step, int]]:
        """Yield what is done for transfers that are made in turn, as `steps` of each has it."""
        if len(transfers) == 1:
            (transfer,) = transfers
            for step, repeat in self.steps(transfer):
                yield transfer, step, repeat
            return
        for step_repeats in zip_longest(*map(self.steps, transfers)):
            for transfer, step_repeat in zip(transfers, step_repeats):
                if step_repeat:
                    yield transfer, *step_repeat

    def steps(self, transfer: Transfer) -> Iterable[tuple[Step, int]]:
        """Return what is done for `transfer`, in order, each with the number of its repetition."""
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
            if start == cached_start:
                return self._with_steps_in_memory(transfer, cached_steps)
            return [(MovedStep(s, start - cached_start), r) for s, r in cached_steps]
        if parameter.composed_sharding:
            from .piece_schedule import PieceSchedule

            schedule: Schedule = PieceSchedule(transfer, self._method, checked=self._checked)
        else:
            is_between = self._in_memory is not None and self._in_memory.is_between(transfer)
            schedule = Schedule(transfer, self._method, checked=self._checked, in_memory=is_between)
        steps = self._steps(schedule)
        first = []
        for step in steps:
            first.append(step)
            if len(first) > _MANY_TILES:
                return self._with_steps_in_memory(transfer, chain(first, steps))
        if len(self._kept) >= _MANY_SCHEDULES:
            self._kept.clear()
        self._kept[key] = first, start
        return self._with_steps_in_memory(transfer, first)

    def _with_steps_in_memory(
        self, transfer: Transfer, steps: Iterable[tuple[LazyTileWork, int]]
    ) -> Iterable[tuple[Step, int]]:
        """Return steps as they are done where slices of the transfer lie in memory, if any do."""
        in_memory = self._in_memory
        if in_memory is None or not in_memory.has(transfer):
            return steps
        return ((StepInMemory(step, r, transfer, in_memory), r) for step, r in steps)

    @cached_property
    def _large_arena(self) -> Bytes:
        """Room for tiles that are better large; its pages are taken as they are used."""
        large = self._budget.large_arena
        return arena(large) if large > self._budget.arena else self._arenas[0]

    def _steps(self, schedule: Schedule) -> Iterator[tuple[LazyTileWork, int]]:
        steps_by_run_id: dict[
            int, LazyTileWork
        ] = {}  # by the id of the tiles, which the step keeps
        arenas = self._arenas
        if schedule.permutes and len(arenas) == 1:
            arenas = [self._large_arena]
        for tile_run, repeat in schedule.repeats(len(arenas[0])):
            if id(tile_run) not in steps_by_run_id:
                steps_by_run_id[id(tile_run)] = LazyTileWork(schedule, tile_run, arenas)
            yield steps_by_run_id[id(tile_run)], repeat
            if repeat + 1 == tile_run.count:
                del steps_by_run_id[id(tile_run)]


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


def group_by_shared_rows(transfers: Iterable[Transfer]) -> Iterator[list[Transfer]]:
    """Yield transfers in their order: those that are made in turn as one list."""
    row_group: list[Transfer] = []
    for transfer in transfers:
        if row_group and not (len(row_group) < _MOST and _share_rows(row_group[-1], transfer)):
            yield row_group
            row_group = []
        row_group.append(transfer)
    if row_group:
        yield row_group


def _share_rows(a: Transfer, b: Transfer) -> bool:
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


# Files are not announced: POSIX_FADV_WILLNEED 16 or 48 MiB ahead was tried, and a cold read of 2
# GB by two processes took 2.5 s either way, because the system reads ahead itself. Where each
# read takes 30 ms and 64 may be in flight, only announcing keeps as many in flight.


Turn = tuple[Transfer, Step | None, int, int]
"""A tile of a transfer, worked out when it is needed: how (None: the transfer ends), the number of
its repetition, and that of the arena where it is done."""


class ArenaReuse:
    """Tells which tiles need no reads, because the tile before has left in the arena what they
    need; it is told of all tiles, in order."""

    def __init__(self) -> None:
        self._left: object = None

    def forget(self) -> None:
        """Take note that the arena holds something else."""
        self._left = None

    def has(self, transfer: Transfer, work: TileWork) -> bool:
        """Tell whether everything that a tile reads is in the arena already."""
        if not work.arena:
            self._left = None
            return False
        readers, entry = transfer.readers, transfer.parameter.entry
        read = work.arena, [
            (f.cell, readers[f.cell], entry(f.cell, readers[f.cell]), f.start, len(f.room), f.run,
             f.stride)
            for f in work.fetches
        ]  # fmt: skip
        is_in_arena, self._left = read == self._left, read
        return is_in_arena


def coming_reads(turns: Iterable[Turn], in_memory: InMemory | None) -> Iterator[TensorRead]:
    """Yield what tiles read, in order; slices in memory are taken as a whole."""
    repeats, taken = ArenaReuse(), None
    for transfer, step, repeat, arena_number in turns:
        if step is None:
            continue
        if in_memory is not None and in_memory.is_between(transfer):
            if transfer is not taken:
                yield from in_memory.reads_of(transfer)
            taken = transfer
            continue
        work = step.on(arena_number)
        if repeats.has(transfer, work):
            continue
        for cell, start, tile_step, room, _, run, stride in work.fetches:
            file = transfer.readers[cell]
            entry, nbytes = transfer.parameter.entry(cell, file), len(room)
            if not run:
                yield TensorRead(file, entry, start + repeat * tile_step, nbytes)
            for number in range(nbytes // run if run else 0):
                yield TensorRead(file, entry, start + number * stride, run)


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
    """Where the content of one destination file's slices goes.

    Parts of a slice ascend but for those of an exchange, whose tiles are interleaved.
    """

    @property
    def bytes_put(self) -> int:
        """Bytes put so far."""

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Take content of `name` from its content byte `start` on."""

    def share(self, name: str, start: int, source: Position, nbytes: int) -> bool:
        """Take content as `put` does, by sharing blocks of a file; tell whether that was done."""

    def finish(self) -> None:
        """Write out what is still buffered; once, after the last `put`. Raises StorageError."""


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

    def __add__(self, other: Traffic) -> Traffic:
        seconds = {
            name: self.seconds.get(name, 0.0) + other.seconds.get(name, 0.0)
            for name in (*self.seconds, *other.seconds)
        }
        return Traffic(
            self.read + other.read, self.written + other.written, self.sent + other.sent, seconds,
            self.notices + other.notices, {**self.values, **other.values},
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
    schedules = ScheduleCache(budget, work.policy.method, in_memory, checked=checker is not None)
    copier = Copier(operands)
    pipeline = Pipeline(sinks, sources, on_progress, on_complete, checker, messenger, copier)
    scheduling = {"plan": 0.0}
    turns = _turns(work, schedules, budget.in_flight)
    if sources.ahead:
        turns, coming = tee(turns)
        sources.expect(coming_reads(coming, in_memory), budget.announced)
    for transfer, tile, repeat in _work_out(turns, scheduling):
        if tile is None:
            pipeline.end(transfer)
        elif messenger is None:
            pipeline.move(transfer, tile, repeat)
        else:
            if len(pipeline.in_flight) == budget.in_flight:
                pipeline.complete()
            pipeline.start(transfer, tile, repeat)
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
    )


def _turns(work: WorkPlan, schedules: ScheduleCache, depth: int) -> Iterator[Turn]:
    """Yield the tiles of transfers in order, each for the next of `depth` arenas."""
    number, single_groups = 0, ([transfer] for transfer in work.transfers)
    for row_group in single_groups if work.ascending else group_by_shared_rows(work.transfers):
        for transfer, step, repeat in schedules.turns(row_group):
            yield transfer, step, repeat, number % depth
            number += 1
        for transfer in row_group:
            yield transfer, None, 0, 0


def _work_out(
    turns: Iterator[Turn], seconds: dict[str, float]
) -> Iterator[tuple[Transfer, TileWork | None, int]]:
    """Yield what is done in each turn, and add up what it takes to work that out."""
    while True:
        began = perf_counter()
        turn = next(turns, None)
        transfer, step, repeat, arena_number = turn or (None, None, 0, 0)
        work = None if step is None else step.on(arena_number)
        seconds["plan"] += perf_counter() - began
        if transfer is None:
            return
        yield transfer, work, repeat


@dataclass
class _TileInFlight:
    """A tile in flight; `ended` are the transfers that are complete with it."""

    transfer: Transfer
    work: TileWork
    repeat: int
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
        self._on_complete, self._checker, self._messenger = on_complete, checker, messenger
        self._copy = copier
        self.in_flight: deque[_TileInFlight] = deque()
        self.sent = self.placed = 0
        self._repeats = ArenaReuse()
        self.seconds = {"read": 0.0, "exchange": 0.0, "copy": 0.0, "write": 0.0}

    def move(self, transfer: Transfer, work: TileWork, repeat: int) -> None:
        """Carry out a tile that no other process has a part in."""
        if work.direct and not self._checker:
            self._pass_on(transfer, work, repeat)
            return
        began = perf_counter()
        self._read(transfer, work, repeat)
        self.seconds["read"] += perf_counter() - began
        self._store(transfer, work, repeat)

    def _pass_on(self, transfer: Transfer, work: TileWork, repeat: int) -> None:
        """Carry out a tile of which each write is what one fetch reads: share blocks or copy."""
        self._repeats.forget()
        parameter, written_bytes, sources = transfer.parameter, 0, self._sources
        name = parameter.name
        for fetch, write in work.direct:
            began = perf_counter()
            file = transfer.readers[fetch.cell]
            src_name = parameter.entry(fetch.cell, file)
            first, start = fetch.start + repeat * fetch.step, write.start + repeat * write.step
            place, nbytes = sources.place(file, src_name, first), len(write.data)
            sinks = [self._sinks[dst_file] for dst_file in transfer.targets[write.cell]]
            unshared_sinks = [
                sink for sink in sinks if not (place and sink.share(name, start, place, nbytes))
            ]
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
            written_bytes += nbytes * len(sinks)
        self._on_progress(written_bytes)

    def start(self, transfer: Transfer, work: TileWork, repeat: int) -> None:
        """Start the receives of a tile, read for it, and start its sends."""
        tile = _TileInFlight(transfer, work, repeat)
        messages, messenger = work.messages, self._messenger
        began = perf_counter()
        if messages and messenger:
            tile.recvs = [messenger.receive(sender, room) for sender, room in messages.recvs]
            tile.forwarded = [messenger.receive(s, r, FORWARDED) for s, r in messages.forwarded]
        self._read(transfer, work, repeat)
        read_end = perf_counter()
        self.seconds["read"] += read_end - began
        if messages and messenger:
            name = transfer.parameter.src_name
            tile.sends = self._send(name, messages.packs, messages.sends, DIRECT)
            self.seconds["exchange"] += perf_counter() - read_end
        self.in_flight.append(tile)

    def _read(self, transfer: Transfer, work: TileWork, repeat: int) -> None:
        """Read for a tile, unless that is what the last one has left in the arena."""
        if self._repeats.has(transfer, work):
            return
        readers, entry, sources = transfer.readers, transfer.parameter.entry, self._sources
        sources.nbytes += work.taken
        for cell, start, step, room, sparse, run, stride in work.fetches:
            file = readers[cell]
            if run:
                sources.read_runs(file, entry(cell, file), start, room, sparse, run, stride)
            else:
                sources.read(file, entry(cell, file), start + repeat * step, room, sparse)

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
        tile = self.in_flight.popleft()
        messages = tile.work.messages
        messenger = self._messenger
        name = tile.transfer.parameter.src_name
        if messages and messenger:
            began = perf_counter()
            self._receive(name, tile.recvs, messages.recvs)
            forwards = self._send(name, messages.repacks, messages.forwards, FORWARDED)
            self._receive(name, tile.forwarded, messages.forwarded)
            self.seconds["exchange"] += perf_counter() - began
            self._store(tile.transfer, tile.work, tile.repeat)
            began = perf_counter()
            messenger.wait_all([*tile.sends, *forwards], self._on_progress)
            self.seconds["exchange"] += perf_counter() - began
        else:
            self._store(tile.transfer, tile.work, tile.repeat)
        for transfer in tile.ended:
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

    def _store(self, transfer: Transfer, work: TileWork, repeat: int) -> None:
        checker = self._checker
        name, targets, sinks = transfer.parameter.name, transfer.targets, self._sinks
        if checker:
            checker.read(transfer, work, repeat, self._copy)
        began = perf_counter()
        copying = writing = 0.0
        written_bytes = 0
        for number, write in enumerate(work.writes):
            cell, start, step, data, copies, places, placed = write
            self._copy(transfer.parameter, work.convert, copies, places)
            if checker:
                checker.put(transfer, work, repeat, number)
            copied = perf_counter()
            self.placed += placed
            written_bytes += placed or len(data) * len(targets[cell])
            if not placed:
                for file in targets[cell]:
                    sinks[file].put(name, start + repeat * step, data)
            written = perf_counter()
            copying += copied - began
            writing += written - copied
            began = written
        self.seconds["copy"] += copying
        self.seconds["write"] += writing
        self._on_progress(written_bytes)
        if self._messenger:
            self._messenger.progress()

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
        began = perf_counter()
        for sink in self._sinks.values():
            sink.finish()
        self.seconds["write"] += perf_counter() - began
