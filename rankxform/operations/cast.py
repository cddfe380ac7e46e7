"""`--dtype`: types of elements."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.errors import UsageError
from rankxform.formats.container import FLOATS
from rankxform.layout.names import compile_regex

from .base import ModelOperation, Tensor
from .options import TYPES

_ROUTERS_BIAS = ("e_score_correction_bias", ".expert_bias")
"""How names end of what routers add to scores, which small differences decide."""
_ROUTERS = ("gate", "router")
"""Last parts of names of modules whose rows are experts."""
_BIAS_TYPE = "Float32"


class CastOperation(ModelOperation):
    """Gives floating tensors a type; not optimizer states and counters, unless they are to."""

    renames = False

    def __init__(
        self, dtype: str, keep: Sequence[re.Pattern[str]], states: Sequence[re.Pattern[str]]
    ) -> None:
        """keep: names of tensors that keep theirs. states: of states and counters that do not."""
        self._dtype, self._keep, self._states = dtype, keep, states

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        weights = {t.name: t for t in tensors if t.is_weight and len(t.shape) > 1}
        return [replace(t, dtype=self._dtype) if self._is_cast(t, weights) else t for t in tensors]

    def _is_cast(self, tensor: Tensor, weights: Mapping[str, Tensor]) -> bool:
        name = tensor.name
        if tensor.dtype not in FLOATS or tensor.keeps_dtype or name.endswith(_ROUTERS_BIAS):
            return False
        if any(pattern.search(name) for pattern in self._keep):
            return False
        if tensor.dtype == _BIAS_TYPE and len(tensor.shape) == 1:
            module = name.rpartition(".")[0]
            is_router = module.rpartition(".")[2] in _ROUTERS
            names = (
                [f"{module}.weight"] if is_router else [f"{module}.{r}.weight" for r in _ROUTERS]
            )
            routers = [weights[router] for router in names if router in weights]
            if any(r.shape[0] == tensor.shape[0] and r.dtype != _BIAS_TYPE for r in routers):
                return False  # a router that has its bias in a longer type than itself
        follows = not tensor.is_weight or tensor.related is not None  # a copy keeps its type too
        return not follows or any(pattern.search(name) for pattern in self._states)


def make(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation that gives floating tensors the type `dtype`.

    Not to those that match an expression of `keep_dtype`, nor to optimizer states and counters that
    no expression of `cast_states` matches. Raises UsageError.
    """
    keep = [compile_regex(text, "--keep-dtype") for text in options.get("keep_dtype", ())]
    states = [compile_regex(text, "--cast-states") for text in options.get("cast_states", ())]
    if options.get("dtype") is None:
        if keep or states:
            option = "--keep-dtype" if keep else "--cast-states"
            raise UsageError("is about --dtype, which is not given", "give both", where=option)
        return None
    return CastOperation(TYPES[options["dtype"]], keep, states)
