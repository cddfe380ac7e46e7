"""Where recipes are made and kept."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from rankxform.formats.dtype import item_size
from rankxform.geometry.runs import CALL_BYTES
from rankxform.geometry.tiles import Bands
from rankxform.planning.exchange import Traded
from rankxform.planning.transfers import Move

from .letters import TradeRecipe
from .schedule import Band, Recipe, arena

if TYPE_CHECKING:
    from .schedule import Bytes

_BLOCK = 8 << 20
_LEAST_BLOCK = 64 << 10
_MANY_BANDS = 64
_MANY_RECIPES = 256


class Cut:
    """Bands of a recipe that differ in their place only; worked out for an arena when needed."""

    def __init__(self, recipe: Recipe, alike: Bands, arenas: Sequence[Bytes]) -> None:
        self._recipe, self._alike, self._arenas = recipe, alike, arenas
        self._made: dict[int, Band] = {}

    def on(self, arena: int) -> Band:
        """Return the band as it is done in the arena of this number."""
        if arena not in self._made:
            self._made[arena] = self._recipe.band(self._alike, self._arenas[arena])
        return self._made[arena]


class Kitchen:
    """Makes recipes, and keeps those of parameters that are small enough to have many alike."""

    def __init__(
        self, memory: int, arenas: int = 1, call: float = CALL_BYTES, sealed: bool = False
    ) -> None:
        """`memory` is shared by the arenas. `call` is what a read of little costs, in bytes.
        `sealed` are letters that have room for a seal."""
        self._call, self._sealed = call, sealed
        nbytes = min(_BLOCK, max(memory // arenas, _LEAST_BLOCK))
        self._arenas = [arena(nbytes) for _ in range(arenas)]
        self._kept: dict[object, Sequence[tuple[Cut, int]]] = {}

    def recipe(self, move: Move) -> Iterable[tuple[Cut, int]]:
        """Return what is done for `move`, in order: bands, each with how often it was before."""
        parameter = move.parameter
        key: object = (
            parameter.layout, parameter.shape, item_size(parameter.dtype), move.layout,
            parameter.listed, tuple(move.targets),
        )  # fmt: skip
        if isinstance(move, Traded):  # the caller keeps all trades, so that ids stay their own
            key = key, id(move.trade.servers), id(move.trade.senders), move.trade.turn
        if key in self._kept:
            return self._kept[key]
        made = self._cuts(
            TradeRecipe(move, self._call, self._sealed)
            if isinstance(move, Traded)
            else Recipe(move, self._call)
        )
        first = []
        for cut in made:
            first.append(cut)
            if len(first) > _MANY_BANDS:
                return chain(first, made)
        if len(self._kept) >= _MANY_RECIPES:
            self._kept.clear()
        self._kept[key] = first
        return first

    def _cuts(self, recipe: Recipe) -> Iterator[tuple[Cut, int]]:
        last: dict[int, Cut] = {}  # of bands that are alike, by the id of what they have in common
        for alike, turn in recipe.turns(len(self._arenas[0])):
            if id(alike) not in last:
                last[id(alike)] = Cut(recipe, alike, self._arenas)
            yield last[id(alike)], turn
            if turn + 1 == alike.count:
                del last[id(alike)]
