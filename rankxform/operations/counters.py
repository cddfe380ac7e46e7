"""Facts on the training that a destination keeps as tensors, and its source beside its tensors.

MindFormers' Checkpoint 2.0 states them in common.json. A trainer that continues from rank folders
or from unified safetensors looks for tensors of these names, as MindSpore's ``append_dict`` makes
them, and begins with step 0 or fails where there are none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from struct import pack, unpack
from typing import Any

from rankxform.formats.checkpoint2_metadata import COMMON
from rankxform.geometry.pieces import Assembly

from .base import ModelOperation, Tensor, TensorOperation
from .select import drop_by_name

_AS_PARAMETER = "global_step"
"""The optimizer's own counter, a parameter of one element; the others are plain numbers."""

_MOST_INT32 = 1 << 31
_NOT_SCALED = 1
"""What MindFormers' rank folders hold where its common.json says null."""


class Counters(ModelOperation):
    """Adds a tensor for each fact that no tensor states, if an optimizer's states are written.

    It is the last operation: what is added has its name already, and is chosen by it.
    """

    renames = False

    def __init__(self, training: Mapping[str, Any], choose: TensorOperation | None) -> None:
        facts = {name: training.get(name) for name in COMMON}
        if facts["step_num"] is not None and facts["loss_scale"] is None:
            facts["loss_scale"] = _NOT_SCALED
        self._facts = {name: value for name, value in facts.items() if value is not None}
        self._choose = choose

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        states = [tensor for tensor in tensors if tensor.state and not tensor.dropped]
        if not states:
            return [*tensors]
        names = {tensor.name for tensor in tensors}
        added = [_counter(n, v, states[-1]) for n, v in self._facts.items() if n not in names]
        return [*tensors, *(self._choose(tensor) if self._choose else tensor for tensor in added)]


def _counter(name: str, value: float, state: Tensor) -> Tensor:
    """Return a tensor of one number, which is written behind `state`."""
    dtype, shape = "Int64", (1,) if name == _AS_PARAMETER else ()
    if type(value) is float:
        dtype = "Float32" if unpack("<f", pack("<f", value))[0] == value else "Float64"
    elif shape and value < _MOST_INT32:
        dtype = "Int32"
    assembly = Assembly(shape, (), value)
    return Tensor(name, dtype, shape, state.sources, assembly, keeps_dtype=True, is_weight=False)


def is_added(tensor: Tensor) -> bool:
    """Tell whether a tensor is a fact that no tensor of the source states."""
    return tensor.assembly is not None and not tensor.assembly.pieces


def counters(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation that adds the facts `training`, if the destination keeps them so."""
    training = options.get("training")
    return Counters(training, drop_by_name(options)) if training else None
