"""Parameter names: optimizer states, which follow a parameter, and summaries of many names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from rankxform.errors import UsageError

OPTIMIZER_STATE = (
    "adam_m", "adam_v", "moment1", "moment2", "moments", "accum", "stat", "accu_grads",
    "exp_avg", "exp_avg_sq", "exp_avg_sq_row", "exp_avg_sq_col", "exp_avg_insta_sim", "muon_m",
    "exp_insta_row", "max_exp_avg_sq", "main_param",
)  # fmt: skip
"""What MindSpore's and MindFormers' optimizers put before the name of the parameter they follow."""


MASTER = "main_param"
"""The Float32 copy of a parameter that an optimizer keeps."""

OPTIMIZER, MODEL = "optimizer", "model."
"""What other frameworks put before all that is an optimizer's, and before a model's parameters."""
TORCH, HYPERPARALLEL, MEGATRON = "torch", "hyperparallel", "megatron"
MASTERS = "optimizer._mixed_precision_optimizer.fp32_from_fp16_params."
"""What HyperParallel puts before a parameter's name for its Float32 copy."""
FRAMEWORKS: Mapping[str, re.Pattern[str]] = {
    MEGATRON: re.compile(
        r"optimizer\.state\.(?P<state>exp_avg|exp_avg_sq|fp32_param)\.(?P<parameter>.+)"
    ),
    TORCH: re.compile(
        r"optimizer(?:\.[0-9]+)?\.state\.(?P<parameter>.+)\."
        r"(?P<state>exp_avg|exp_avg_sq|max_exp_avg_sq|momentum_buffer|step)"
    ),
    HYPERPARALLEL: re.compile(re.escape(MASTERS) + r"(?P<parameter>.+?)(?P<state>)"),
}
"""How optimizers' states are named in other frameworks; where no state is named, it is MASTER."""

STATE_NAMES = {
    "exp_avg": "adam_m", "exp_avg_sq": "adam_v", "max_exp_avg_sq": "max_exp_avg_sq",
    "momentum_buffer": "muon_m", "fp32_param": MASTER, MASTER: MASTER,
}  # fmt: skip
"""What MindSpore calls other frameworks' states."""

NEVER_SAVED = "accu_grads"
"""A state that strategies list and that MindSpore does not save."""

COUNTERS = frozenset((
    "global_step", "learning_rate", "loss_scale", "scale_sense", "epoch_num", "step_num",
    "beta1_power", "beta2_power", "current_iterator_step", "last_overflow_iterator_step",
    "momentum",
))  # fmt: skip
"""What MindSpore and MindFormers save beside parameters and their optimizer states."""

STEPS = ("global_step", "step_num", "epoch_num")
"""Those that say how far a training was, the same in every file of a checkpoint."""

NOT_SAVED = (
    "fi_parameter", "zeros_k_pe", "zeros_k_nope", "zeros_value_states", "_cache",
    "_device_local_norm", "_device_local_loss", "expert_load", "max_logits_val",
)  # fmt: skip
"""Parts of names that MindFormers lists in a metadata.json and leaves out of the files."""


_NUMBERED = re.compile(r"(?:^|\.)(\d{1,9})\.")


def natural(name: str) -> list[str | tuple[int, str]]:
    """Return a key by which names are sorted as a person numbers them.

    >>> sorted(["part10", "part9"], key=natural)
    ['part9', 'part10']
    """
    parts: list[str | tuple[int, str]] = list(re.split(r"([0-9]+)", name))
    for at in range(1, len(parts), 2):
        digits = str(parts[at]).lstrip("0")
        parts[at] = len(digits), digits
    return parts


def state_of(name: str) -> str | None:
    """Return which optimizer state a name is of, or None for a parameter's own.

    >>> state_of("adam_m.layers.0.w"), state_of("layers.0.w")
    ('adam_m', None)
    """
    prefix, dot, _ = name.partition(".")
    if prefix == OPTIMIZER:
        return _of_optimizer(name)[0]
    return prefix if dot and prefix in OPTIMIZER_STATE else None


def parameter_of(name: str) -> str:
    """Return the parameter that an optimizer state belongs to, or the name itself.

    >>> parameter_of("adam_m.layers.0.w"), parameter_of("layers.0.w")
    ('layers.0.w', 'layers.0.w')
    """
    if name.startswith(OPTIMIZER + "."):
        return _of_optimizer(name)[1]
    return name if state_of(name) is None else name.partition(".")[2]


def with_parameter(name: str, parameter: str) -> str:
    """Return the name of the same state of another parameter, or that parameter's own.

    >>> with_parameter("adam_m.a.w", "b.w"), with_parameter("a.w", "b.w")
    ('adam_m.b.w', 'b.w')
    >>> with_parameter("optimizer.state.a.w.exp_avg", "model.b.w")
    'optimizer.state.b.w.exp_avg'
    """
    if not name.startswith(OPTIMIZER + "."):
        return name[: len(name) - len(parameter_of(name))] + parameter
    for convention, pattern in FRAMEWORKS.items():
        match = pattern.fullmatch(name)
        if match:
            own = parameter if convention == MEGATRON else parameter.removeprefix(MODEL)
            return name[: match.start("parameter")] + own + name[match.end("parameter") :]
    return name if parameter == parameter_of(name) else parameter


@lru_cache(maxsize=1 << 16)
def _of_optimizer(name: str) -> tuple[str | None, str]:
    """Return state and parameter of a name below ``optimizer.``, as other frameworks have them.

    What is no parameter's there is a state of itself.

    >>> _of_optimizer("optimizer.state.layers.0.w.exp_avg")
    ('exp_avg', 'model.layers.0.w')
    >>> _of_optimizer("optimizer.state.exp_avg.decoder.layers.0.w")
    ('exp_avg', 'decoder.layers.0.w')
    """
    for convention, pattern in FRAMEWORKS.items():
        match = pattern.fullmatch(name)
        if match:
            within = "" if convention == MEGATRON else MODEL
            return match["state"] or MASTER, within + match["parameter"]
    return OPTIMIZER, name


def is_wrapped(names: Iterable[str]) -> bool:
    """Tell whether parameters have ``model.`` before their names, beside an optimizer's states.

    Names of a model may begin so themselves: what states belong to tells.

    >>> is_wrapped(["model.w", "optimizer.state.w.exp_avg"]), is_wrapped(["model.w", "lm_head.w"])
    (True, False)
    """
    every = {*names}
    states = [name for name in every if name.startswith(OPTIMIZER + ".")]
    if states:
        parameters = {parameter_of(name) for name in states}
        bare = {name.removeprefix(MODEL) for name in parameters}
        if (parameters | bare) & every:
            return len(parameters & every) > len(bare & every)
        return any(name.startswith(MODEL) for name in every)
    return any(name.startswith((MODEL + MODEL, MODEL + "lm_head.")) for name in every)


def pattern_of(name: str) -> str:
    """Return a name with its numbers between dots as ``*``.

    >>> pattern_of("blocks.0.fc1.weight")
    'blocks.*.fc1.weight'
    """
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name)


def patterns(names: Iterable[str]) -> list[str]:
    """Summarize names by pattern, numbers between dots replaced by ``*``, commonest first.

    >>> patterns(["blocks.0.w", "blocks.1.w", "head.0"])
    ['blocks.*.w (2)', 'head.0']
    """
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(pattern_of(name), []).append(name)
    ordered = sorted(alike.items(), key=lambda item: (-len(item[1]), item[0]))
    return [f"{pattern} ({len(n)})" if len(n) > 1 else n[0] for pattern, n in ordered]


def more_patterns(count: int) -> str:
    """Say that so many patterns are not shown."""
    return f"{count} more pattern" + ("" if count == 1 else "s")


def summarize_names(names: Iterable[str], most: int = 12) -> str:
    """Return the commonest patterns of `names`, and how many more there are, in one text."""
    shown = patterns(names)
    more = f" and {more_patterns(len(shown) - most)}" if len(shown) > most else ""
    return ", ".join(shown[:most]) + more


def group_states(names: Iterable[str]) -> str:
    """Summarize names: optimizer states by their kind, other parameters by pattern.

    >>> group_states(["adam_m.a", "adam_m.b", "layers.0.w", "layers.1.w"])
    'adam_m.* (2), layers.*.w (2)'
    """
    states: dict[str, int] = {}
    others = []
    for name in names:
        state = state_of(name)
        if state is None:
            others.append(name)
        else:
            states[state] = states.get(state, 0) + 1
    told = [f"{state}.* ({count:,})" for state, count in states.items()]
    return ", ".join(told + ([summarize_names(others, 3)] if others else []))


def expression(text: str, option: str) -> re.Pattern[str]:
    """Compile a regular expression that was given for `option`. Raises UsageError."""
    try:
        return re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise UsageError(f"{option} {text!r}: {error}; expected a regular expression") from error


def layers_by_stage(stages: Iterable[Iterable[str]]) -> tuple[str, ...]:
    """Return which layers each stage has by the first number in its names; "" for none.

    >>> layers_by_stage([["h.0.w", "h.1.w", "h.1.experts.5.w"], ["h.2.w", "head.w"], ["norm.w"]])
    ('0-1', '2', '')
    """
    found = []
    for names in stages:
        numbers = {int(match[1]) for name in names if (match := _NUMBERED.search(name))}
        found.append(ranges(sorted(numbers)))
    return tuple(found)


def ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers shortly.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)
