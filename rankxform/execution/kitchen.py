"""Where recipes are made and kept."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from rankxform.formats.dtype import item_size
from rankxform.planning.moves import Move
from rankxform.planning.trades import Traded

from .letters import TradeRecipe
from .recipes import AUTO, Band, Recipe, arena

_BLOCK = 8 << 20
_LEAST_BLOCK = 64 << 10
_MANY_BANDS = 64
_MANY_RECIPES = 256


class Kitchen:
    """Makes recipes, and keeps those of parameters that are small enough to have many alike."""

    def __init__(self, memory: int, reading: str = AUTO) -> None:
        self._reading = reading
        self._arena = arena(min(_BLOCK, max(memory, _LEAST_BLOCK)))
        self._kept: dict[object, Sequence[Band]] = {}

    def recipe(self, move: Move) -> Iterable[Band]:
        """Return the bands of `move`, in order."""
        parameter = move.parameter
        key: object = (
            parameter.layout, parameter.shape, item_size(parameter.dtype), move.layout,
            parameter.listed, tuple(move.targets),
        )  # fmt: skip
        if isinstance(move, Traded):  # the caller keeps all trades, so that ids stay their own
            key = key, id(move.trade.servers), id(move.trade.senders)
        if key in self._kept:
            return self._kept[key]
        if isinstance(move, Traded):
            made = TradeRecipe(move, self._arena, self._reading).bands()
        else:
            made = Recipe(move, self._arena, self._reading).bands()
        first = []
        for band in made:
            first.append(band)
            if len(first) > _MANY_BANDS:
                return chain(first, made)
        if len(self._kept) >= _MANY_RECIPES:
            self._kept.clear()
        self._kept[key] = first
        return first
