"""Which tensors are left, and which counters are added.

Options: `--include`, `--exclude`, `--weights-only`, `--masters`.

MindFormers' Checkpoint 2.0 states them in common.json. A trainer that continues from rank folders
or from unified safetensors looks for tensors of these names, as MindSpore's ``append_dict`` makes
them, and begins with step 0 or fails where there are none.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from struct import pack, unpack
from typing import Any

from rankxform.errors import CheckpointError, RequestError
from rankxform.formats.container import BYTES
from rankxform.geometry.pieces import Assembly
from rankxform.layout.names import TRAINING_FACTS, compile_regex, summarize_names
from rankxform.layout.states import MASTER, MODEL, State, state_of_name
from rankxform.statements import Finding, as_warning, quote

from .base import ModelOperation, Tensor, TensorOperation

NOT_CHOSEN = "not chosen by --include and --exclude"


NO_TENSOR = "items that are no tensors"


def drop_items(options: Mapping[str, Any]) -> TensorOperation | None:
    """Return the operation that drops what is no tensor, where the destination is not to have it.

    `items` says so: how such things are kept at the source, and at the destination.
    """
    src, dst = options.get("items") or ("", "")
    if src and src == dst:
        return None

    def dropped(tensor: Tensor) -> Tensor:
        return replace(tensor, dropped=NO_TENSOR) if tensor.dtype == BYTES else tensor

    return dropped


def drop_by_name(options: Mapping[str, Any]) -> TensorOperation | None:
    """Return the operation that drops what `include` does not match, or `exclude` does.

    Both are sequences of regular expressions, searched in the name that a parameter gets. Raises
    UsageError.
    """
    include = [compile_regex(pattern, "--include") for pattern in options.get("include", ())]
    exclude = [compile_regex(pattern, "--exclude") for pattern in options.get("exclude", ())]
    if not include and not exclude:
        return None

    def dropped(tensor: Tensor) -> Tensor:
        name = tensor.name
        is_included = not include or any(pattern.search(name) for pattern in include)
        if is_included and not any(pattern.search(name) for pattern in exclude):
            return tensor
        return replace(tensor, dropped=NOT_CHOSEN)

    return dropped


def patterns_without_match(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match none of `names`, which are those at the destination."""
    all_names = list(names)
    return [text for text in patterns if not any(map(compile_regex(text, "").search, all_names))]


NOT_WEIGHTS = "optimizer states and counters (--weights-only)"
_HALVES = ("Float16", "BFloat16")
_MASTER_KINDS = (MASTER, "fp32_param", "master_param", "param")


def weights_only(options: Mapping[str, Any]) -> TensorOperation | None:
    """Return the operation that drops optimizer states, counters and what is kept for a run."""
    if not options.get("weights_only"):
        return None

    def dropped(tensor: Tensor) -> Tensor:
        if tensor.is_weight or (options.get("masters") and is_master(tensor.state)):
            return tensor
        return replace(tensor, dropped=NOT_WEIGHTS)

    return dropped


def is_master(state: State | None) -> bool:
    """Tell whether a state is the Float32 copy of a parameter that an optimizer keeps."""
    return state is not None and state.kind in _MASTER_KINDS


class DropTrainingState(ModelOperation):
    """Drops what other frameworks keep beside ``model.`` and ``optimizer.``, such as a rng."""

    renames = False

    def __init__(self, elsewhere: Sequence[Tensor] = ()) -> None:
        self._elsewhere = elsewhere

    def without(self, tensors: Sequence[Tensor]) -> DropTrainingState:
        return DropTrainingState(tensors)

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        all_tensors = [*tensors, *self._elsewhere]
        names = {tensor.name for tensor in all_tensors}
        states = [t.state for t in all_tensors if t.state and t.base_name != t.name]
        wrappers = {state.wrapper for state in states if state.parameter in names}
        wrapper = next(iter(wrappers)) if len(wrappers) == 1 else ""
        if not wrapper.endswith(MODEL):
            return [*tensors]
        parent = wrapper.removesuffix(MODEL)  # of "app.model." what lies in "app." beside it
        return [
            replace(t, dropped=NOT_WEIGHTS)
            if not t.dropped and t.name.startswith(parent) and not t.name.startswith(wrapper)
            else t
            for t in tensors
        ]


def model_only(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation that leaves a model alone, if it is asked for."""
    return (
        DropTrainingState() if options.get("weights_only") and not options.get("masters") else None
    )


class NoCopies(ModelOperation):
    """Refuses copies of parameters, which may be weights or not, unless the user says which."""

    renames = False

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        copies = [t for t in tensors if t.related and t.related.is_copy and not t.dropped]
        if not copies:
            return [*tensors]
        pattern = copies_pattern(copies)
        raise RequestError(
            f"{summarize_names([copy.name for copy in copies], 2)} repeat other tensors' names and "
            "shapes; --weights-only cannot tell whether they are weights",
            f"--exclude {quote(pattern)} to leave them out",
            "--include . to keep them as weights",
            details="an average, a teacher and a twin tower look alike",
        )


def copies_pattern(copies: Sequence[Tensor]) -> str:
    """Return an expression that matches copies by the prefixes that they have now."""
    prefixes = dict.fromkeys(copy.related.before for copy in copies if copy.related)
    return "|".join(f"^{re.escape(prefix)}" for prefix in prefixes)


def no_copies(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation that refuses copies where only weights are asked for.

    With --include the user has said which tensors are meant.
    """
    return NoCopies() if options.get("weights_only") and not options.get("include") else None


class TakeMasters(ModelOperation):
    """Takes the Float32 masters that an optimizer keeps in the place of the parameters."""

    renames = True

    def __init__(self) -> None:
        self._without: list[str] = []  # 16-bit weights that have no master

    def findings(self, names: Sequence[str]) -> Iterator[Finding]:
        if self._without:
            text = f"{len(self._without)} 16-bit weights have no master and stay as they are"
            yield as_warning(f"--masters: {text}: {summarize_names(self._without, 2)}")

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        masters = {t.base_name: t for t in tensors if is_master(t.state) and not t.dropped}
        if not masters:  # what is called so belongs to no parameter of its shape
            for tensor in tensors:
                state = state_of_name(tensor.name)
                if is_master(state) and state is not None and not tensor.dropped:
                    masters[state.parameter] = tensor
        if not masters:
            raise CheckpointError(
                f"the checkpoint has no masters ({MASTER}.*)", "leave out --masters"
            )
        new_tensors = []
        tensors_by_name = {tensor.name: tensor for tensor in tensors}
        for name, master in masters.items():
            shape = tensors_by_name[name].shape if name in tensors_by_name else None
            if shape != master.shape:
                has = f"of shape {list(shape)}" if shape is not None else "not in the checkpoint"
                raise CheckpointError(
                    f"{master.name!r} has shape {list(master.shape)}, and {name!r} is {has}; a "
                    "master takes the place of its parameter"
                )
        weights = [tensor for tensor in tensors if tensor.is_weight and not tensor.dropped]
        self._without = [w.name for w in weights if w.dtype in _HALVES and w.name not in masters]
        for tensor in tensors:
            if tensor.name in masters:
                master = masters[tensor.name]
                new_tensors.append(replace(master, name=tensor.name, related=None, is_weight=True))
                new_tensors.append(
                    replace(tensor, dropped="replaced by its Float32 master (--masters)")
                )
            elif tensor.base_name not in masters or not is_master(tensor.state):
                new_tensors.append(tensor)
        return new_tensors


def masters(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation that takes the masters, if it is asked for."""
    return TakeMasters() if options.get("masters") else None


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
        values = {name: training.get(name) for name in TRAINING_FACTS}
        if values["step_num"] is not None and values["loss_scale"] is None:
            values["loss_scale"] = _NOT_SCALED
        self._facts = {name: value for name, value in values.items() if value is not None}
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
