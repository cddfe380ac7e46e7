"""``--names``: what frameworks call a model's parameters and its optimizer's states.

Tensors get MindSpore's names first, which a map takes, and then those that are asked for. A step
that one framework keeps once and another for each parameter becomes the other.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.errors import RequestError
from rankxform.formats.dtype import BYTES
from rankxform.geometry.pieces import NO_AXIS, Assembly, Piece
from rankxform.layout.names import (
    HYPERPARALLEL,
    MASTER,
    MASTERS,
    MODEL,
    OPTIMIZER,
    STATE_NAMES,
    TORCH,
    is_wrapped,
    parameter_of,
    state_of,
)
from rankxform.layout.strategy import Strategy

from .base import Composition, Tensor
from .weights import is_state

AS_STORED, MINDSPORE = "as-stored", "mindspore"
NAMES = (AS_STORED, MINDSPORE, TORCH, HYPERPARALLEL)

_STEP, _GLOBAL_STEP = "step", "global_step"
_NOT_A_MODELS = ("rng", "rng_state")
"""What is kept with a model and its optimizer and is of neither, by its usual names."""
_ONE_OF_MANY = "the same as global_step"
_OTHERS = {own: name for name, own in reversed(STATE_NAMES.items())}


class ToMindSpore(Composition):
    """Gives tensors MindSpore's names, whoever has named them; or only those that a map would not
    know, because ``model.`` stands before them."""

    renames = True

    def __init__(self, *, always: bool) -> None:
        self._always = always

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        wrapped = is_wrapped([one.name for one in tensors])
        if not wrapped and not self._always:
            return [*tensors]
        steps = [one for one in tensors if state_of(one.name) == _STEP and not one.dropped]
        found = []
        for one in tensors:
            if state_of(one.name) == _STEP and not one.dropped:
                same = "" if one is steps[0] else steps[0].sources[0].name
                found.append(replace(one, dropped=_ONE_OF_MANY, same_as=same))
                continue
            is_theirs = one.name.startswith((MODEL, OPTIMIZER + "."))
            if not is_theirs or one.dtype == BYTES:
                found.append(one)  # it has MindSpore's name, or none of a parameter's
                continue
            state = STATE_NAMES.get(state_of(one.name) or "")
            base = parameter_of(one.name)
            if wrapped or state:
                base = base.removeprefix(MODEL)
            found.append(replace(one, name=f"{state}.{base}" if state else base))
        if steps and not any(one.name == _GLOBAL_STEP for one in found):
            first = Piece(0, (1,), (0,), (1,), (), (0,), (NO_AXIS,))
            made = Assembly((1,), (first if not steps[0].shape else Assembly.of((1,)).pieces[0],))
            source = steps[0].sources[0]
            found.append(Tensor(_GLOBAL_STEP, "Int32", (1,), (source,), made, keeps_dtype=True))
        return found


class FromMindSpore(Composition):
    """Gives tensors that have MindSpore's names those of another framework."""

    renames = True

    def __init__(self, names: str) -> None:
        self._names = names

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        found = []
        trained: dict[str, None] = {}
        for one in tensors:
            if one.dropped or one.dtype == BYTES:
                found.append(one)
                continue
            if state_of(one.name) in _OTHERS:
                trained[parameter_of(one.name)] = None
            found.append(replace(one, name=from_mindspore_name(one.name, self._names)))
        step = next((one for one in tensors if one.name == _GLOBAL_STEP and not one.dropped), None)
        if step is not None and trained:
            found = [one for one in found if one.name != _GLOBAL_STEP]
            found.append(replace(step, dropped="kept for each parameter"))
            axes = len(step.sources[0].shape)
            made = Assembly((), (Piece(0, (), (), (), (0,) * axes, (), ()),))
            found += [
                Tensor(
                    f"optimizer.state.{base}.step", "Float32", (), step.sources, made,
                    keeps_dtype=True,
                )
                for base in trained
            ]  # fmt: skip
        return found


def from_mindspore_name(name: str, names: str) -> str:
    """Return what a framework calls a tensor of MindSpore's name. Raises RequestError.

    >>> from_mindspore_name("adam_m.layers.0.w", "torch"), from_mindspore_name("w", "torch")
    ('optimizer.state.layers.0.w.exp_avg', 'model.w')
    """
    state, base = state_of(name), parameter_of(name)
    if name.startswith(OPTIMIZER + "."):
        return name  # what no parameter has, such as param_groups
    if state is None:
        return name if is_state(name) or name in _NOT_A_MODELS else MODEL + base
    if state == MASTER and names == HYPERPARALLEL:
        return MASTERS + base
    other = _OTHERS.get(state)
    if other is None or state == MASTER:
        raise RequestError(
            f"{names} has no name for such a state",
            f"leave it out (--exclude '^{state}[.]')",
            where=f"{name!r}",
        )
    return f"optimizer.state.{base}.{other}"


def named_strategy(strategy: Strategy, names: str, made: Collection[str]) -> Strategy:
    """Return a strategy of MindSpore's names under those that tensors are given.

    `made` are the names of the tensors; a strategy that lists some of them is returned as it is.
    """
    if names in (AS_STORED, MINDSPORE) or any(name in strategy for name in made):
        return strategy
    stages = tuple(
        {
            from_mindspore_name(name, names): layout
            for name, layout in some.items()
            if state_of(name) is None or state_of(name) in _OTHERS
        }
        for some in strategy.stages
    )
    return replace(strategy, stages=stages)


def to_mindspore(options: Mapping[str, Any]) -> Composition | None:
    """Return the operation before a map, if names are asked for, or a map."""
    asked = options.get("names", AS_STORED) != AS_STORED
    return ToMindSpore(always=asked) if asked or options.get("mapping") else None


def from_mindspore(options: Mapping[str, Any]) -> Composition | None:
    """Return the operation behind a map, if names of others are asked for."""
    names = options.get("names", AS_STORED)
    return None if names in (AS_STORED, MINDSPORE) else FromMindSpore(names)
