"""`--dtype`: types of elements."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rankxform.errors import UsageError
from rankxform.formats.container import FLOATS
from rankxform.layout.names import compile_regex

from .base import Tensor, TensorOperation
from .options import TYPES

_ROUTERS_BIAS = ("e_score_correction_bias", ".expert_bias")
"""How names end of what routers add to scores, which small differences decide."""


def make(options: Mapping[str, Any]) -> TensorOperation | None:
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
    dtype = TYPES[options["dtype"]]

    def changed(tensor: Tensor) -> Tensor:
        name = tensor.name
        if tensor.dtype not in FLOATS or tensor.keeps_dtype or name.endswith(_ROUTERS_BIAS):
            return tensor
        if any(pattern.search(name) for pattern in keep):
            return tensor
        follows = not tensor.is_weight or tensor.related is not None  # a copy keeps its type too
        if follows and not any(pattern.search(name) for pattern in states):
            return tensor
        return replace(tensor, dtype=dtype)

    return changed
