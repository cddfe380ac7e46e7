"""Facts on the training that a destination keeps as tensors, and its source beside its tensors.

MindFormers' Checkpoint 2.0 states them in common.json. A trainer that continues from rank folders
or from unified safetensors looks for tensors of these names, as MindSpore's ``append_dict`` makes
them, and begins with step 0 or fails where there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankxform.formats.checkpoint2 import COMMON
from rankxform.geometry.pieces import Assembly

from .base import Composition, Tensor

_AS_PARAMETER = "global_step"
"""The optimizer's own counter, a parameter of one element; the others are plain numbers."""

_MOST_INT32 = 1 << 31
_NOT_SCALED = 1
"""What MindFormers' rank folders hold where its common.json says null."""


class Counters:
    """Adds a tensor for each fact that no tensor states, if there are states of an optimizer."""

    renames = False

    def __init__(self, training: Mapping[str, Any]) -> None:
        known = {name: training.get(name) for name in COMMON}
        if known["step_num"] is not None and known["loss_scale"] is None:
            known["loss_scale"] = _NOT_SCALED
        self._facts = {n: v for n, v in known.items() if type(v) is int or type(v) is float}

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        states = [one for one in tensors if one.state]
        if not states:
            return [*tensors]
        there = {one.name for one in tensors}
        facts = {name: value for name, value in self._facts.items() if name not in there}
        return [*tensors, *(_tensor(name, value, states[-1]) for name, value in facts.items())]


def _tensor(name: str, value: float, state: Tensor) -> Tensor:
    """Return a tensor of one number, which is written behind `state`."""
    dtype = "Int64" if type(value) is int else "Float32"
    shape = (1,) if name == _AS_PARAMETER else ()
    if shape and value < _MOST_INT32:
        dtype = "Int32"
    made = Assembly(shape, (), value)
    return Tensor(name, dtype, shape, state.sources, made, keeps_dtype=True, is_weight=False)


def is_added(tensor: Tensor) -> bool:
    """Tell whether a tensor is a fact that no tensor of the source states."""
    return tensor.assembly is not None and not tensor.assembly.pieces


def counters(options: Mapping[str, Any]) -> Composition | None:
    """Return the operation that adds the facts `training`, where the destination is to have them.

    They belong to an optimizer's states, and are left out with these.
    """
    if options.get("weights_only") or not options.get("training"):
        return None
    return Counters(options["training"])
