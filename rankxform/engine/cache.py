"""Schedules made once for all parameters that are sharded alike."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from typing import TYPE_CHECKING

from rankxform.geometry.tiles import Tiles
from rankxform.planning.read_method import ReadMethod
from rankxform.planning.transfers import Transfer

from .arena import arena
from .piece_schedule import PieceSchedule
from .schedule import Schedule
from .tile_work import TileWork

if TYPE_CHECKING:
    from .arena import Bytes

_BLOCK = 8 << 20
_LEAST_BLOCK = 64 << 10
_MANY_TILES = 64
_MANY_SCHEDULES = 256


class Step:
    """Tiles of a schedule that differ in their place only; worked out for an arena when needed."""

    def __init__(self, schedule: Schedule, alike: Tiles, arenas: Sequence[Bytes]) -> None:
        self._schedule, self._alike, self._arenas = schedule, alike, arenas
        self._made: dict[int, TileWork] = {}

    def on(self, arena: int) -> TileWork:
        """Return the work as it is done in the arena of this number."""
        if arena not in self._made:
            self._made[arena] = self._schedule.work(self._alike, self._arenas[arena])
        return self._made[arena]


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
        self._kept: dict[object, Sequence[tuple[Step, int]]] = {}

    def turns(self, transfers: Sequence[Transfer]) -> Iterator[tuple[Transfer, Step, int]]:
        """Yield what is done for transfers that are made in turn, as `steps` of each has it."""
        if len(transfers) == 1:
            (transfer,) = transfers
            for step, repeat in self.steps(transfer):
                yield transfer, step, repeat
            return
        for some in zip_longest(*map(self.steps, transfers)):
            for transfer, one in zip(transfers, some):
                if one:
                    yield transfer, *one

    def steps(self, transfer: Transfer) -> Iterable[tuple[Step, int]]:
        """Return what is done for `transfer`, in order, each with the number of its repetition."""
        parameter, exchange = transfer.parameter, transfer.exchange
        key: object = (
            parameter.grid, parameter.src_dtype, parameter.dtype, transfer.grid,
            tuple(transfer.targets), any(parameter.steps),
        )  # fmt: skip
        if exchange:
            key = key, exchange.receivers, exchange.senders, exchange.forwarder
        if key in self._kept:
            return self._kept[key]
        kind = PieceSchedule if parameter.composed else Schedule
        made = self._steps(kind(transfer, self._method, self._checked))
        first = []
        for step in made:
            first.append(step)
            if len(first) > _MANY_TILES:
                return chain(first, made)
        if len(self._kept) >= _MANY_SCHEDULES:
            self._kept.clear()
        self._kept[key] = first
        return first

    @cached_property
    def _large_arena(self) -> Bytes:
        """Room for tiles that are better large; its pages are taken as they are used."""
        return arena(self._large)

    def _steps(self, schedule: Schedule) -> Iterator[tuple[Step, int]]:
        made: dict[int, Step] = {}  # by the id of the tiles, which the step keeps
        arenas = self._arenas
        if schedule.permutes and len(arenas) == 1:
            arenas = [self._large_arena]
        for alike, repeat in schedule.repeats(len(arenas[0])):
            if id(alike) not in made:
                made[id(alike)] = Step(schedule, alike, arenas)
            yield made[id(alike)], repeat
            if repeat + 1 == alike.count:
                del made[id(alike)]
