"""Names of tensors: `--rename`, `--names`.

Tensors get MindSpore's names first, which a map takes, and then those that are asked for. A step
that one framework keeps once and another for each parameter becomes the other.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.errors import RequestError, UsageError
from rankxform.formats.container import BYTES, FLOATS
from rankxform.geometry.pieces import BROADCAST_AXIS, Assembly, Piece
from rankxform.layout.names import compile_regex
from rankxform.layout.states import MASTER, MODEL, OPTIMIZER, State, States, is_below_root
from rankxform.layout.strategy import Strategy
from rankxform.statements import Finding, as_warning, quote

from .base import ModelOperation, Tensor, TensorOperation
from .select import NOT_CHOSEN


def rename(options: Mapping[str, Any]) -> TensorOperation | None:
    r"""Return the operation that applies the rules of `rename`, in order, to parameters' names.

    A rule replaces every match of its expression, which ends at the last ``=``, as `re.sub` does;
    ``\1`` stands for a group. An
    optimizer state keeps its prefix, and gets the new name of its parameter. Raises UsageError.

    >>> renamed = rename({"rename": [r"^layers\.(\d+)=blocks.\1"]})
    >>> renamed(Tensor.of("layers.0.w")).name
    'blocks.0.w'
    """
    rules = [_rule(text) for text in options.get("rename", ())]
    if not rules:
        return None

    def renamed(tensor: Tensor) -> Tensor:
        base = tensor.base_name
        name = _apply_rules(rules, base)
        if name == base and tensor.state is None and tensor.related is not None:
            # A copy that no rule names goes where its parameter goes.
            parameter = _apply_rules(rules, tensor.related.parameter)
            return tensor.renamed(tensor.related.name_for(parameter), parameter)
        if not name or "\0" in name:
            defect_text = "a NUL in the" if name else "no"
            raise UsageError(
                f"--rename: leaves {defect_text} name of {tensor.name!r}; \\g<0> is the match"
            )
        if name == base:
            return tensor
        if tensor.state is None and tensor.related is not None:
            return tensor.renamed(name, _apply_rules(rules, tensor.related.parameter))
        if tensor.state is None:
            return tensor.renamed(name)
        return tensor.renamed(tensor.state.name_for(name), name)

    return renamed


def _apply_rules(rules: Iterable[tuple[re.Pattern[str], str]], name: str) -> str:
    for pattern, replacement in rules:
        name = pattern.sub(replacement, name)
    return name


def _rule(text: str) -> tuple[re.Pattern[str], str]:
    regex, equals, replacement = text.rpartition("=")
    if not equals or not regex:
        raise UsageError(f"--rename {text!r}: expected REGEX=REPLACEMENT, such as '^model\\.='")
    pattern = compile_regex(regex, "--rename")
    named = {number: f"?P<{name}>" for name, number in pattern.groupindex.items()}
    groups = "".join(f"({named.get(number, '')})" for number in range(1, pattern.groups + 1))
    try:
        re.sub(groups, replacement, "")  # raises if a group does not exist
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {text!r}: {error}") from error
    return pattern, replacement


def rules_without_match(rules: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the rules that match none of `names`, each as the rules before it leave them.

    `names` are those of parameters, without their states.
    """
    current_names, unmatched_rules = {*names}, []
    for text in rules:
        pattern, replacement = _rule(text)
        if not any(map(pattern.search, current_names)):
            unmatched_rules.append(text)
        current_names = {pattern.sub(replacement, name) for name in current_names}
    return unmatched_rules


TORCH, HYPERPARALLEL = "torch", "hyperparallel"
MASTERS = "optimizer._mixed_precision_optimizer.fp32_from_fp16_params."
"""What HyperParallel puts before a parameter's name for its Float32 copy."""
STATE_NAMES = {
    "exp_avg": "adam_m", "exp_avg_sq": "adam_v", "max_exp_avg_sq": "max_exp_avg_sq",
    "momentum_buffer": "muon_m", "fp32_param": MASTER, "param": MASTER, MASTER: MASTER,
}  # fmt: skip
"""What MindSpore calls other frameworks' states."""

AS_STORED, MINDSPORE = "as-stored", "mindspore"
NAMINGS_OF_FRAMEWORKS = (AS_STORED, MINDSPORE, TORCH, HYPERPARALLEL)

STEP_OF_ONE, _GLOBAL_STEP = "step", "global_step"
_NOT_A_MODELS = ("rng", "rng_state")
"""What is kept with a model and its optimizer and is of neither, by its usual names."""
_ONE_OF_MANY = "the same as global_step"
_OTHERS = {mindspore_name: name for name, mindspore_name in reversed(STATE_NAMES.items())}


class RenameToMindSpore(ModelOperation):
    """Gives tensors MindSpore's names, whoever has named them; or only those that a map would not
    know, because ``model.`` stands before them."""

    renames = True

    def __init__(self, *, always: bool, is_last: bool, keeps_steps: bool = False) -> None:
        """`is_last`: no other names are given then. `keeps_steps`: the destination has a step for
        each parameter, as the source has."""
        self._always, self._is_last, self._keeps_steps = always, is_last, keeps_steps
        self._unnamed: dict[str, str] = {}  # states without a name there -> family

    def findings(self, names: Sequence[str]) -> Iterator[Finding]:
        if self._unnamed:
            families = "; ".join(dict.fromkeys(self._unnamed.values()))
            text = (
                f"{families}: MindSpore has no name for these states, and {len(self._unnamed)} keep"
            )
            yield as_warning(f"--names mindspore: {text} theirs (--exclude leaves them out)")

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        wrapper = wrapper_of(tensors)
        if not wrapper and not self._always:
            return [*tensors]
        steps = [tensor for tensor in tensors if _is_step(tensor) and not tensor.dropped]
        new_tensors = []
        for tensor in tensors:
            if _is_step(tensor) and not tensor.dropped and self._keeps_steps:
                new_tensors.append(
                    tensor.renamed(tensor.name, tensor.base_name.removeprefix(wrapper))
                )
                continue
            if _is_step(tensor) and not tensor.dropped:
                same_as = "" if tensor is steps[0] else steps[0].sources[0].name
                new_tensors.append(replace(tensor, dropped=_ONE_OF_MANY, same_as=same_as))
                continue
            kind = STATE_NAMES.get(tensor.state.kind) if tensor.state is not None else None
            is_theirs = tensor.state is None or is_below_root(tensor.name)
            base = tensor.base_name.removeprefix(wrapper)
            if (
                tensor.dtype == BYTES
                or not is_theirs
                or (tensor.state is not None and kind is None)
            ):
                # No parameter's, or a state that MindSpore has no name for.
                new_tensors.append(tensor)
                is_unnamed = self._is_last and is_theirs and not tensor.dropped
                is_unnamed = is_unnamed and tensor.dtype != BYTES
                if is_unnamed and tensor.state is not None and tensor.base_name != tensor.name:
                    self._unnamed[tensor.name] = tensor.state.family
            elif tensor.dtype not in FLOATS and kind and self._is_last and not tensor.dropped:
                raise RequestError(
                    f"is {tensor.dtype}, and MindSpore's {kind} holds numbers, not codes of them",
                    "--weights-only",
                    "leave out --names mindspore",
                    where=f"{tensor.name!r}",
                )
            elif kind is None:
                new_tensors.append(tensor.renamed(base))
            else:
                state = State(kind, base, f"{kind}.")
                new_tensors.append(replace(tensor, name=state.name_for(base), related=state))
        if (
            steps
            and not self._keeps_steps
            and not any(tensor.name == _GLOBAL_STEP for tensor in new_tensors)
        ):
            first = Piece(0, (1,), (0,), (1,), (), (0,), (BROADCAST_AXIS,))
            assembly = Assembly(
                (1,), (first if not steps[0].shape else Assembly.of((1,)).pieces[0],)
            )
            source = steps[0].sources[0]
            new_tensors.append(
                Tensor(
                    _GLOBAL_STEP,
                    "Int32",
                    (1,),
                    (source,),
                    assembly,
                    keeps_dtype=True,
                    is_weight=False,
                )
            )
        return new_tensors


def _is_step(tensor: Tensor) -> bool:
    """Tell whether a tensor is the step of one parameter, which other frameworks keep."""
    return tensor.state is not None and tensor.state.kind == STEP_OF_ONE


def wrapper_of(tensors: Sequence[Tensor]) -> str:
    """Return what stands before a model's names, beside its optimizer's states; "" for nothing.

    Names of a model may begin with ``model.`` themselves: what its states belong to tells. Without
    states a second ``model.`` does, or one before the head.
    """
    names = {tensor.name for tensor in tensors}
    resolved = {t.state.wrapper for t in tensors if t.state and t.state.parameter in names}
    if resolved:
        return max(resolved)
    if any(tensor.state and tensor.state.wrapper for tensor in tensors):
        return MODEL if any(name.startswith(MODEL) for name in names) else ""
    has_second = any(name.startswith((MODEL + MODEL, MODEL + "lm_head.")) for name in names)
    return MODEL if has_second else ""


class RenameFromMindSpore(ModelOperation):
    """Gives tensors that have MindSpore's names those of another framework."""

    renames = True

    def __init__(self, names: str, excluded: Sequence[re.Pattern[str]] = ()) -> None:
        """`excluded`: states without a name there that match one of these are left out."""
        self._names, self._excluded = names, excluded

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        new_tensors = []
        trained: dict[str, None] = {}
        for tensor in tensors:
            if tensor.dropped or tensor.dtype == BYTES:
                new_tensors.append(tensor)
                continue
            if tensor.state is not None and tensor.state.kind in _OTHERS:
                trained[tensor.base_name] = None
            has_name = _has_name(tensor.state, self._names)
            if not has_name and any(one_of.search(tensor.name) for one_of in self._excluded):
                new_tensors.append(replace(tensor, dropped=NOT_CHOSEN))
                continue
            name = framework_name(
                tensor.name, tensor.state, self._names, is_weight=tensor.is_weight
            )
            parameter = None if tensor.state is None else MODEL + tensor.state.parameter
            if tensor.related is not None and tensor.related.is_copy:
                related = tensor.related._replace(before=MODEL + tensor.related.before)
                new_tensors.append(replace(tensor, name=name, related=related))
                continue
            new_tensors.append(tensor.renamed(name, parameter))
        steps = (tensor for tensor in tensors if tensor.name == _GLOBAL_STEP)
        step = next((tensor for tensor in steps if not tensor.dropped), None)
        if step is not None and trained:
            new_tensors = [tensor for tensor in new_tensors if tensor.name != _GLOBAL_STEP]
            new_tensors.append(replace(step, dropped="kept for each parameter"))
            axes = len(step.sources[0].shape)
            assembly = Assembly((), (Piece(0, (), (), (), (0,) * axes, (), ()),))
            new_tensors += [
                Tensor(
                    f"optimizer.state.{base}.step", "Float32", (), step.sources, assembly,
                    keeps_dtype=True, is_weight=False,
                )
                for base in trained
            ]  # fmt: skip
        return new_tensors


def _has_name(state: State | None, names: str) -> bool:
    """Tell whether a framework has a name for a state of MindSpore's."""
    if state is None or state.kind == OPTIMIZER or is_below_root(state.before):
        return True
    if state.kind == MASTER:
        return names == HYPERPARALLEL
    return state.kind in _OTHERS


def expression_of_family(state: State) -> str:
    """Return an expression for all states that have a state's prefix and suffix."""
    prefix_pattern = f"^{re.escape(state.before)}" if state.before else ""
    return prefix_pattern + (f"{re.escape(state.after)}$" if state.after else "")


def framework_name(name: str, state: State | None, names: str, *, is_weight: bool) -> str:
    """Return what a framework calls a tensor of MindSpore's name. Raises RequestError.

    >>> framework_name("adam_m.w", State("adam_m", "w", "adam_m."), "torch", is_weight=False)
    'optimizer.state.w.exp_avg'
    """
    if state is None:
        return name if not is_weight or name in _NOT_A_MODELS else MODEL + name
    if state.kind == STEP_OF_ONE and is_below_root(name):
        return f"optimizer.state.{state.parameter}.{STEP_OF_ONE}"
    if state.kind == OPTIMIZER or name.startswith(OPTIMIZER + "."):
        return name  # what no parameter has, such as param_groups
    if state.kind == MASTER and names == HYPERPARALLEL:
        return MASTERS + state.parameter
    framework_kind = _OTHERS.get(state.kind)
    if framework_kind is None or state.kind == MASTER:
        raise RequestError(
            f"{names} has no name for such a state",
            f"--exclude {quote(expression_of_family(state))} to leave such states out",
            where=f"{name!r}",
        )
    return f"optimizer.state.{state.parameter}.{framework_kind}"


def rename_strategy(strategy: Strategy, names: str, tensor_names: Collection[str]) -> Strategy:
    """Return a strategy of MindSpore's names under those that tensors are given.

    `tensor_names` are the names of the tensors; a strategy that lists some of them is returned as
    it is.
    """
    if names in (AS_STORED, MINDSPORE) or any(name in strategy for name in tensor_names):
        return strategy
    states: States = strategy.states
    stages = tuple(
        {
            framework_name(name, states.of(name), names, is_weight=states.is_weight(name)): layout
            for name, layout in layouts.items()
            if _has_name(states.of(name), names)
        }
        for layouts in strategy.stages
    )
    return replace(strategy, stages=stages)


def to_mindspore(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation before a map, if names are asked for, or a map."""
    names, mapping = options.get("names", AS_STORED), options.get("map")
    if names == AS_STORED and not mapping:
        return None
    keeps_steps = names in (TORCH, HYPERPARALLEL) and not mapping
    return RenameToMindSpore(
        always=names != AS_STORED, is_last=names == MINDSPORE, keeps_steps=keeps_steps
    )


def from_mindspore(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation behind a map, if names of others are asked for."""
    names = options.get("names", AS_STORED)
    if names in (AS_STORED, MINDSPORE):
        return None
    excluded = [compile_regex(text, "--exclude") for text in options.get("exclude", ())]
    return RenameFromMindSpore(names, excluded)
