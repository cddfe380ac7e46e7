"""``--weights-only`` and ``--masters``: a model without what training keeps beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.errors import CheckpointError
from rankxform.layout.names import (
    COUNTERS,
    MASTER,
    MODEL,
    NOT_SAVED,
    OPTIMIZER,
    STATE_NAMES,
    is_wrapped,
    parameter_of,
    state_of,
)

from .base import Composition, Operation, Tensor

NOT_WEIGHTS = "optimizer states and counters (--weights-only)"
_AVERAGED = "pma_weight_"


def weights_only(options: Mapping[str, Any]) -> Operation | None:
    """Return the operation that drops optimizer states, counters and what is kept for a run."""
    if not options.get("weights_only"):
        return None

    def dropped(tensor: Tensor) -> Tensor:
        name = tensor.name
        master = options.get("masters") and is_master(name)
        if master or not is_state(name):
            return tensor
        return replace(tensor, dropped=NOT_WEIGHTS)

    return dropped


def is_state(name: str) -> bool:
    """Tell whether a tensor is no weight of a model, by its name.

    >>> [is_state(name) for name in ("adam_m.w", "global_step", "layers.0.w")]
    [True, True, False]
    """
    return (
        state_of(name) is not None
        or name in COUNTERS
        or name.startswith(_AVERAGED)
        or any(part in name for part in NOT_SAVED)
    )


def is_master(name: str) -> bool:
    """Tell whether a tensor is the Float32 copy of a parameter, by its name."""
    return STATE_NAMES.get(state_of(name) or "") == MASTER


class ModelOnly(Composition):
    """Drops what other frameworks keep beside ``model.`` and ``optimizer.``, such as a rng."""

    renames = False

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        names = [one.name for one in tensors]
        has_states = any(name.startswith(OPTIMIZER + ".") for name in names)
        if not has_states or not is_wrapped(names):
            return [*tensors]
        return [
            one if one.dropped or one.name.startswith(MODEL) else replace(one, dropped=NOT_WEIGHTS)
            for one in tensors
        ]


def model_only(options: Mapping[str, Any]) -> Composition | None:
    """Return the operation that leaves a model alone, if it is asked for."""
    return ModelOnly() if options.get("weights_only") and not options.get("masters") else None


class Masters(Composition):
    """Takes the Float32 masters that an optimizer keeps in the place of the parameters."""

    renames = True

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        masters = {
            parameter_of(one.name): one
            for one in tensors
            if is_master(one.name) and not one.dropped
        }
        if not masters:
            raise CheckpointError(
                f"the checkpoint has no masters ({MASTER}.*)", "leave out --masters"
            )
        found = []
        own = {one.name: one for one in tensors}
        for name, master in masters.items():
            shape = own[name].shape if name in own else None
            if shape != master.shape:
                has = f"of shape {list(shape)}" if shape is not None else "not in the checkpoint"
                raise CheckpointError(
                    f"{master.name!r} has shape {list(master.shape)}, and {name!r} is {has}; a "
                    "master takes the place of its parameter"
                )
        for one in tensors:
            if one.name in masters:
                found.append(replace(masters[one.name], name=one.name))
                found.append(replace(one, dropped="replaced by its Float32 master (--masters)"))
            elif parameter_of(one.name) not in masters or not is_master(one.name):
                found.append(one)
        return found


def masters(options: Mapping[str, Any]) -> Composition | None:
    """Return the operation that takes the masters, if it is asked for."""
    return Masters() if options.get("masters") else None
