"""Schedules made once for all parameters that are sharded alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain, zip_longest
from math import prod
from typing import TYPE_CHECKING

from rankxform.formats.dtype import item_size
from rankxform.geometry.tiling import TileRun
from rankxform.planning.read_method import ReadMethod
from rankxform.planning.transfers import Transfer

from .arena import arena
from .piece_schedule import PieceSchedule
from .schedule import Schedule
from .tile_work import TileRead, TileWork

if TYPE_CHECKING:
    from .arena import Bytes

_BLOCK = 8 << 20
_LEAST_BLOCK = 64 << 10
_MANY_TILES = 64
_MANY_SCHEDULES = 256


class LazyTileWork:
    """Tiles of a schedule that differ in their place only; worked out for an arena when needed."""

    def __init__(self, schedule: Schedule, tile_run: TileRun, arenas: Sequence[Bytes]) -> None:
        self._schedule, self._alike, self._arenas = schedule, tile_run, arenas
        self._made: dict[int, TileWork] = {}

    def on(self, arena: int) -> TileWork:
        """Return the work as it is done in the arena of this number."""
        if arena not in self._made:
            self._made[arena] = self._schedule.work(self._alike, self._arenas[arena])
        return self._made[arena]


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


class ScheduleCache:
    """Makes schedules, and keeps the short ones, which many small parameters share."""

    def __init__(
        self, memory: int, arenas: int, method: ReadMethod, *, checked: bool = False
    ) -> None:
        """`memory`, in bytes, is shared by the arenas. With `checked`, messages have checksums."""
        self._method, self._checked = method, checked
        nbytes = min(_BLOCK, max(memory // arenas, _LEAST_BLOCK))
        self._arenas = [arena(nbytes) for _ in range(arenas)]
        self._large = max(nbytes, memory - nbytes)
        self._kept: dict[object, tuple[Sequence[tuple[LazyTileWork, int]], int]] = {}

    def turns(
        self, transfers: Sequence[Transfer]
    ) -> Iterator[tuple[Transfer, LazyTileWork | MovedStep, int]]:
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

    def steps(self, transfer: Transfer) -> Iterable[tuple[LazyTileWork | MovedStep, int]]:
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
                return cached_steps
            return [(MovedStep(s, start - cached_start), r) for s, r in cached_steps]
        kind = PieceSchedule if parameter.composed else Schedule
        steps = self._steps(kind(transfer, self._method, self._checked))
        first = []
        for step in steps:
            first.append(step)
            if len(first) > _MANY_TILES:
                return chain(first, steps)
        if len(self._kept) >= _MANY_SCHEDULES:
            self._kept.clear()
        self._kept[key] = first, start
        return first

    @cached_property
    def _large_arena(self) -> Bytes:
        """Room for tiles that are better large; its pages are taken as they are used."""
        return arena(self._large)

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
    composed = parameter.composed
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
