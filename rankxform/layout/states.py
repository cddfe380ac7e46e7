"""Which tensors are an optimizer's states: decided for a whole family, by relation.

A name alone does not tell. ``stat.pool.weight`` may be SGD's state of ``pool.weight`` or a weight
of a module called `stat`; Lamb's ``lamb_m.w`` is a state, though few lists have the word. The rest
of the name tells: a *family* is one prefix or suffix and all tensors that have it, and a tensor
*relates* if the rest of its name is a parameter of its shape, or of which it has one value, or one
for each row or column (Adafactor).

1. Of a family that an optimizer is known to name so, all tensors are states if at least half of
   them relate: a tied weight, or one in another stage's file, may be missing. If none relates, all
   are weights. Between, those that relate are states, and the others are weights with a warning.
2. Below an optimizer's root (``optimizer.``, ``app.optim.``) nothing is a weight if one name
   relates or is spelled as an optimizer's. Otherwise the root is a module's name.
3. A family under any other prefix of which at least half relate, and which covers at least half of
   the other weights, is a *copy*: an average, a teacher, a twin tower. Nobody but the user knows
   whether these are weights of the model, so that nothing drops them by guess.

It is decided once, on a source's own names and full shapes, and kept with the parameters.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import field
from math import prod
from operator import eq

from rankxform.geometry.box import Shape
from rankxform.values import NamedTuple, dataclass, pattern_on_use

MASTER = "main_param"
"""The Float32 copy of a parameter that an optimizer keeps."""

NEVER_SAVED = "accu_grads"
"""A state that strategies list and that MindSpore does not save."""

STATE_PREFIXES = frozenset((
    # mindspore.nn, mindspore.experimental.optim, mindspore.mint.optim (2.10)
    "accum", "accum_update", "adam_m", "adam_v", "ax", "ax_", "exp_avg", "exp_avg_sq", "exp_inf",
    "lamb_m", "lamb_v", "linear", "max_exp_avg_sq", "mean_grad", "mean_square", "moment", "moment1",
    "moment2", "moments", "momentum_buf", "momentum_buffer", "prev", "stat", "step_size", "vhat",
    # MindFormers (1.3 to 2.1)
    "accu_grads", "exp_avg_insta_sim", "exp_avg_sq_col", "exp_avg_sq_row", "exp_insta_row",
    "main_param", "muon_m", "pma_weight_ema", "pma_weight_sma",
))  # fmt: skip
"""What optimizers put before a parameter's name, with a dot."""

UNLISTED_BY_COMPILERS = frozenset(("muon_m",))
"""Of these what no compiler lists in a strategy, though ranks keep slices of it."""

_JOINED_PREFIXES = (
    "exp_avg_insta_row_", "exp_avg_insta_col_", "exp_avg_sq_row_", "exp_avg_sq_col_", "exp_avg_sq_",
    "pma_weight_", "eta_", "mu_",
)  # fmt: skip
"""What AdaFactor, Came, PmaAdamW and ASGD put before it without a dot; the longest first."""

STATE_SUFFIXES = frozenset((
    "acc_delta", "exp_avg", "exp_avg_sq", "exp_inf", "fp32_param", "grad_avg", "main_param",
    "max_exp_avg_sq", "momentum_buffer", "square_avg",
))  # fmt: skip
"""What PyTorch's optimizers and Megatron's put behind a parameter's name, with a dot."""

_UNMISTAKABLE = frozenset((
    "accu_grads", "adam_m", "adam_v", "exp_avg", "exp_avg_sq", "fp32_param", "lamb_m", "lamb_v",
    "main_param", "max_exp_avg_sq", "moment1", "moment2", "muon_m", "square_avg", "vhat",
))  # fmt: skip
"""Of these words the ones that hardly any module is called by."""

_COMPANIONS = {
    "linear": ("moments",), "prev": ("step_size",), "step_size": ("prev",), "stat": ("accum",),
    "mu": ("ax_", "ax"), "eta": ("ax_", "ax"),
}  # fmt: skip
"""Ordinary words -> what the optimizer that uses them keeps too; alone they name a module."""

_BELOW_A_ROOT = STATE_PREFIXES | STATE_SUFFIXES | frozenset((
    "col_var", "eta", "master_param", "mu", "mu_product", "param", "row_var", "step", "sum",
    "variance",
))  # fmt: skip
"""Words that are a state's only where an optimizer's root stands before them, and the others."""

COUNTERS = frozenset((
    "global_step", "learning_rate", "loss_scale", "scale_sense", "epoch_num", "step_num",
    "global_batch_size",
    "beta1_power", "beta2_power", "current_iterator_step", "last_overflow_iterator_step",
    "momentum", "state_step", "step_t", "afactor_step", "cov_step", "fake_lr", "fake_param",
    "accumulation_step", "scale_value", "ga_steps", "current_default_lr", "current_grouped_lr",
    "scale_window", "list_index", "scale_window_up_count", "scale_window_down_count", "aux_loss",
    "mtp_loss", "lm_loss", "indexer_loss", "sync_tensor", "tft_g_one_flag", "graceful_exit",
    "graceful_init",
))  # fmt: skip
"""What MindSpore and MindFormers save beside parameters and their optimizer states."""

_COUNTER = pattern_on_use(r"learning_rate_group_\d+|Parameter\$\d+")
"""Learning rates of groups, and values of an optimizer that got no name."""

_NUMBERED_MATRIX = pattern_on_use(r"matrix_(?:[ag]_inv_|max)\d+")
"""What THOR keeps for each layer, by number."""

_RNG = pattern_on_use(r"(?:^|\.)(?:\w+_)?rng(?:_states?)?(?:\.\w+)*$")
"""States of generators of random numbers, which trainers save with a model."""

_MOST_COUNTER_AXES = 1  # a learning rate may have a value for each step

NOT_SAVED = (
    "fi_parameter", "zeros_k_pe", "zeros_k_nope", "zeros_value_states", "_cache",
    "_device_local_norm", "_device_local_loss", "expert_load", "max_logits_val",
)  # fmt: skip
"""Ends of names that MindFormers lists in a metadata.json and leaves out of the files."""

_RUN_TIME = frozenset((
    "fi_parameter", "fi_accu", "fi_cache", "pi_cache", "zeros_k_pe", "zeros_k_nope",
    "zeros_value_states", "key_cache", "value_cache", "mask_cache", "_device_local_norm",
    "_device_local_loss", "expert_load", "max_logits_val", "tokens_per_expert",
    "global_tokens_per_expert",
))  # fmt: skip
"""Last parts of names of what MindFormers' networks keep for a run; no weight is called so."""

OPTIMIZER, MODEL = "optimizer", "model."
"""The kind of what is an optimizer's and no parameter's; what stands before a model's names."""

_ROOT = pattern_on_use(
    r"(?:^|\.)(?:opt_states?|optim(?:izer)?s?(?:_states?(?:_dict)?)?(?:_?\d+)?)\.", re.IGNORECASE
)
_GROUP = pattern_on_use(r"(?:\d+\.)?(?:_mixed_precision_optimizer\.)?")
_MODULE = "module."
_FP32 = "fp32_from_fp16_params."
"""What HyperParallel puts before a parameter's name for its master."""
_SPELLED = frozenset(("param_groups", "gbuf"))
"""What only optimizers have: their options, and Megatron's flat buffers."""
_MOST_PREFIX_PARTS = 2
_COPY = ""


class State(NamedTuple):
    """What a tensor is to a parameter. Its name is `before`, the parameter's, and `after`."""

    kind: str  # such as "adam_m"; OPTIMIZER: of no parameter; "": a copy that no optimizer makes
    parameter: str  # name of the parameter; the tensor's own of a state of no parameter
    before: str = ""  # stands before the parameter's name
    after: str = ""  # stands behind it
    wrapper: str = ""  # begins the parameter's own name and is left out of the state's

    @property
    def is_copy(self) -> bool:
        """Whether no optimizer is known to make such copies of a parameter."""
        return self.kind == _COPY

    @property
    def family(self) -> str:
        """All names that have its prefix and suffix.

        >>> State("adam_m", "w", "adam_m.").family
        'adam_m.*'
        """
        return f"{self.before}*{self.after}" if self.before or self.after else self.parameter

    def name_for(self, parameter: str) -> str:
        """Return the name of the same state of another parameter.

        >>> State("adam_m", "a.w", "adam_m.").name_for("b.w")
        'adam_m.b.w'
        >>> state = State("exp_avg", "model.a.w", "optimizer.state.", ".exp_avg", "model.")
        >>> state.name_for("model.b")
        'optimizer.state.b.exp_avg'
        """
        if not self.before and not self.after:
            return parameter
        return self.before + parameter.removeprefix(self.wrapper) + self.after

    def renamed(self, parameter: str) -> State:
        """Return the state of a parameter that has another name."""
        return self._replace(parameter=parameter)


class Related:
    """What has a name, and may be a state or a copy of a parameter: a tensor or a parameter."""

    name: str
    related: State | None
    is_weight: bool  # neither a state nor a counter

    @property
    def state(self) -> State | None:
        """What it is to another parameter; None of a weight, a counter or a copy."""
        return None if self.related is None or self.related.is_copy else self.related

    @property
    def base_name(self) -> str:
        """The parameter that it is a state of; its own name if it is none."""
        return self.name if self.state is None else self.state.parameter


@dataclass(frozen=True)
class States:
    """Which tensors of one checkpoint or strategy are states, counters or copies, by name."""

    related: Mapping[str, State] = field(default_factory=dict)  # states and copies
    counters: frozenset[str] = frozenset()  # and what is kept for a run
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)  # prefix -> names
    # Family, as `adam_m.*` -> names that do not relate while some of the family do.
    unrelated: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    numbered: tuple[str, ...] = ()  # states whose number names no parameter

    def of(self, name: str) -> State | None:
        """Return the state that a tensor is, None of a weight, a counter or a copy."""
        state = self.related.get(name)
        return None if state is None or state.is_copy else state

    def kind(self, name: str) -> str | None:
        """Return the kind of state that a tensor is, such as ``adam_m``; None if it is none."""
        state = self.of(name)
        return None if state is None else state.kind

    def base_name(self, name: str) -> str:
        """Return the parameter that a state belongs to; the name itself if it is no state."""
        state = self.of(name)
        return name if state is None else state.parameter

    def is_weight(self, name: str) -> bool:
        """Tell whether a tensor is neither a state nor a counter."""
        return name not in self.counters and self.of(name) is None


def find_states(shapes: Mapping[str, Shape | None]) -> States:
    """Decide which tensors are states. Pure.

    `shapes` are full shapes by name, in elements; None where it is not known, so that the name
    alone relates. The order of names does not matter.

    >>> states = find_states({"w": (8, 4), "lamb_m.w": (8, 4), "stat.pool.w": (8, 4)})
    >>> states.of("lamb_m.w").parameter, states.is_weight("stat.pool.w")
    ('w', True)
    """
    related: dict[str, State] = {}
    unrelated, numbered = dict[str, tuple[str, ...]](), list[str]()
    families, names_by_root = _families(shapes)
    for root, names in names_by_root.items():
        states = _below_root(root, names, shapes)
        related.update(states)
        numbered += (n for n, s in states.items() if s.parameter == n and _is_numbered(n, root))
    for states_by_name in families.values():
        for name, state in [*states_by_name.items()]:
            is_placeholder = state.parameter.startswith("placeholder.")  # of MindFormers' Muon
            if is_placeholder and prod(shapes[name] or ()) == 1:
                related[name] = State(OPTIMIZER, name)
                del states_by_name[name]
    relating_by_family = {}
    for family, states_by_name in families.items():
        names = _relating({n: s.parameter for n, s in states_by_name.items()}, shapes)
        relating_by_family[family] = {name: states_by_name[name] for name in names}
    all_related = [s for relating in relating_by_family.values() for s in relating.values()]
    parameters, present = {s.parameter for s in all_related}, {s.kind for s in all_related}
    for family, relating in relating_by_family.items():
        # What has states of its own is a parameter, though its module be called like a state.
        states_by_name = {
            n: s for n, s in families[family].items() if n in relating or n not in parameters
        }
        is_unmistakable = family == f"{NEVER_SAVED}.*"
        kinds = {state.kind for state in states_by_name.values()}
        companions = {word for kind in kinds for word in _COMPANIONS.get(kind, ())}
        if not kinds.isdisjoint(_COMPANIONS) and companions.isdisjoint(present):
            continue  # an ordinary word, without what its optimizer keeps too
        if is_unmistakable or 2 * len(relating) >= len(states_by_name):
            related.update(states_by_name)
        elif relating or not kinds.isdisjoint(_UNMISTAKABLE):
            related.update(relating)
            unrelated[family] = tuple(
                name
                for name, state in states_by_name.items()
                if name not in relating and not state.parameter.isdecimal()
            )
        numbered += (
            n
            for n, s in states_by_name.items()
            if s.parameter.isdecimal() and s.parameter not in shapes and s.kind in _UNMISTAKABLE
        )
    counters = frozenset(name for name, shape in shapes.items() if _is_counter(name, shape))
    copies = _copies(shapes, related, counters, parameters)
    for prefix, repeating in copies.items():
        related.update((name, State(_COPY, name[len(prefix) :], prefix)) for name in repeating)
    return States(related, counters, copies, unrelated, tuple(numbered))


def may_relate(names: Collection[str]) -> bool:
    """Tell whether some of these names may be states or copies of others, by their spelling."""
    prefix_parts = range(1, _MOST_PREFIX_PARTS + 1)
    return any(_families(dict.fromkeys(names))) or any(
        name.count(".") >= parts and name.split(".", parts)[-1] in names
        for name in names
        for parts in prefix_parts
    )


def state_of_name(name: str) -> State | None:
    """Return the state that one name would be of, if the parameter that it speaks of existed.

    >>> state_of_name("adam_m.layers.0.w").parameter
    'layers.0.w'
    """
    families, names_by_root = _families({name: None})
    for root in names_by_root:
        return _parse_below_root(name, root, {})[0]
    return next((state for states in families.values() for state in states.values()), None)


def _families(
    shapes: Mapping[str, Shape | None],
) -> tuple[dict[str, dict[str, State]], dict[str, list[str]]]:
    """Return the candidates of each known family, and the names below each optimizer's root."""
    families: dict[str, dict[str, State]] = {}
    names_by_root: dict[str, list[str]] = {}
    for name in shapes:
        prefix, dot, parameter = name.partition(".")
        if dot and prefix in STATE_PREFIXES:
            state = State(prefix, parameter, prefix + dot)
            families.setdefault(f"{prefix}.*", {})[name] = state
            continue
        if "opt" in name.lower() and (match := _ROOT().search(name)):
            names_by_root.setdefault(name[: match.end()], []).append(name)
            continue
        if name.startswith(_JOINED_PREFIXES):
            prefix = next(p for p in _JOINED_PREFIXES if name.startswith(p))
            state = State(prefix.rstrip("_"), name.removeprefix(prefix), prefix)
            families.setdefault(f"{prefix}*", {})[name] = state
            continue
        parameter, dot, suffix = name.rpartition(".")
        if dot and suffix in STATE_SUFFIXES:
            state = State(suffix, parameter, "", dot + suffix)
            families.setdefault(f"*.{suffix}", {})[name] = state
    return families, names_by_root


def _relates(shape: Shape | None, whole: Shape | None) -> bool:
    """Tell whether a tensor of `shape` may be a state of a parameter, as far as is known."""
    if shape is None or whole is None or shape == whole:
        return True
    rows, columns = whole[:-1], (*whole[:-2], *whole[-1:])
    kept = (*whole[:-1], 1), (*whole[:-2], 1, *whole[-1:])  # torch's Adafactor keeps the axis
    return prod(shape) == 1 or (len(whole) > 1 and shape in (rows, columns, *kept))


def _relating(
    parameters: Mapping[str, str],
    shapes: Mapping[str, Shape | None],
    relates: Callable[[Shape, Shape], bool] = _relates,
) -> list[str]:
    """Return which names have a shape that relates to that of their parameter, if it exists.

    Where shapes are not known, as of stages that are not read, they do if most others do.
    """
    answers: dict[str, bool | None] = {}
    for name, parameter in parameters.items():
        shape, whole = shapes[name], shapes.get(parameter)
        if shape is not None and whole is not None:
            answers[name] = relates(shape, whole)
        elif parameter in shapes:
            answers[name] = None
    decided = [answer for answer in answers.values() if answer is not None]
    by_analogy = 2 * sum(decided) >= len(decided)
    return [name for name, answer in answers.items() if (by_analogy if answer is None else answer)]


def is_never_saved(name: str) -> bool:
    """Tell whether MindFormers lists such a name and leaves it out of the files."""
    return any(part.endswith(NOT_SAVED) for part in name.split("."))


def is_below_root(name: str) -> bool:
    """Tell whether a name is spelled as those are that other frameworks' optimizers have."""
    return _ROOT().search(name) is not None


# -- below an optimizer's root --------------------------------------------------------------------


def _below_root(
    root: str, names: Iterable[str], shapes: Mapping[str, Shape | None]
) -> dict[str, State]:
    """Return all `names` as states, if `root` is an optimizer's; none if it is a module's."""
    states, resolved, is_optimizer = {}, dict[str, str](), False
    for name in names:
        states[name], is_resolved = _parse_below_root(name, root, shapes)
        if is_resolved:
            resolved[name] = states[name].parameter
        words = name[len(root) :].split(".")
        is_spelled = "state" in words[:-1] or not _SPELLED.isdisjoint(words) or _FP32 in name
        is_optimizer = is_optimizer or is_spelled or not _UNMISTAKABLE.isdisjoint(words)
    return states if is_optimizer or _relating(resolved, shapes) else {}


def _parse_below_root(
    name: str, root: str, shapes: Mapping[str, Shape | None]
) -> tuple[State, bool]:
    """Return the state that a name below an optimizer's root is, and whether its parameter exists.

    ``state.exp_avg.w`` is Megatron's spelling and ``state.w.exp_avg`` PyTorch's; which of them a
    name has, its parameter tells, or else a word that optimizers use.
    """
    start = len(root) + (match.end() if (match := _GROUP().match(name[len(root) :])) else 0)
    parent = root[: match.start() + 1] if (match := _ROOT().search(root)) and match.start() else ""
    if name.startswith("state.", start):
        start += len("state.")
    path, before = name[start:], name[:start]
    if path.startswith(_FP32):
        parameter = path[len(_FP32) :]
        wrapper = _wrapper(parameter, (parent + MODEL, MODEL, parent, ""), shapes, shapes.get(name))
        state = State(MASTER, (MODEL if wrapper is None else wrapper) + parameter, before + _FP32)
        return state._replace(wrapper=MODEL if wrapper is None else wrapper), wrapper is not None
    first, dot, behind = path.partition(".")
    stem, _, last = path.rpartition(".")
    megatron = State(first, behind, before + first + dot)
    torch = State(last, stem, before, dot + last)
    spellings = [
        (state, wrappers)
        for state, wrappers in (
            (megatron, ("", parent, parent + MODEL, MODEL, _MODULE)),
            (torch, (parent + MODEL, MODEL, parent, "", _MODULE)),
        )
        if dot
    ]
    likelier = [pair for pair in spellings if pair[0].kind in _BELOW_A_ROOT]
    for state, wrappers in (*likelier, *spellings):
        wrapper = _wrapper(state.parameter, wrappers, shapes, shapes.get(name))
        if wrapper is not None:
            return state._replace(parameter=wrapper + state.parameter, wrapper=wrapper), True
    if _wrapper(path, ("",), shapes, shapes.get(name)) is not None:
        return State(OPTIMIZER, path, before), True
    for state, _ in likelier:
        if not state.parameter.isdecimal():
            wrapper = "" if state is megatron else parent + MODEL
            return state._replace(parameter=wrapper + state.parameter, wrapper=wrapper), False
    return State(OPTIMIZER, name), False


def _wrapper(
    name: str, wrappers: Iterable[str], shapes: Mapping[str, Shape | None], shape: Shape | None
) -> str | None:
    """Return the first of `wrappers` before which a parameter of this name exists.

    One whose shape a state of `shape` relates to comes first.
    """
    existing = [w for w in wrappers if w + name in shapes and not _ROOT().search(w + name)]
    relating = [w for w in existing if _relates(shape, shapes[w + name])]
    return next(iter(relating or existing), None)


def _is_numbered(name: str, root: str) -> bool:
    """Tell whether a name is spelled ``state.0.exp_avg``, with a number for the parameter."""
    first, second, *_ = [*name[len(root) :].split("."), ""]
    return first == "state" and second.isdecimal()


# -- counters, and copies that no optimizer makes -------------------------------------------------


def _is_counter(name: str, shape: Shape | None) -> bool:
    """Tell whether a tensor is a counter, or kept for a run, by its name and its few axes."""
    is_of_generator = "rng" in name and _RNG().search(name) is not None
    if name in COUNTERS or is_of_generator or _COUNTER().fullmatch(name):
        return shape is None or len(shape) <= _MOST_COUNTER_AXES
    if name.startswith("matrix_") and _NUMBERED_MATRIX().fullmatch(name):
        return True
    return name.rpartition(".")[2] in _RUN_TIME


def _copies(
    shapes: Mapping[str, Shape | None],
    states: Mapping[str, State],
    counters: Iterable[str],
    trained: Collection[str],
) -> dict[str, tuple[str, ...]]:
    """Return the families that repeat the weights' names and shapes under a prefix of their own.

    Prefixes have one or two parts that are no numbers, the shortest first. Small ones are accidents
    (a norm of a block and that of the model), so a family has to repeat half of all other weights.
    `trained`: what has states of its own is a weight.
    """
    left_out = {*states, *counters}
    weights = {name: shape for name, shape in shapes.items() if name not in left_out}
    copies: dict[str, tuple[str, ...]] = {}
    taken = set[str]()
    for parts in range(1, _MOST_PREFIX_PARTS + 1):
        names_by_prefix: dict[str, list[str]] = {}
        for name in weights:
            words = name.split(".", parts)
            is_named = len(words) > parts and not any(map(str.isdecimal, words[:-1]))
            if is_named and name not in taken:
                names_by_prefix.setdefault(name[: -len(words[-1])], []).append(name)
        counts = {}
        for prefix, names in names_by_prefix.items():
            relating = _relating({name: name[len(prefix) :] for name in names}, weights, eq)
            has_values = any(prod(weights[name] or ()) > 1 for name in relating)
            is_trained = any(name in trained for name in names)
            if has_values and not is_trained and 2 * len(relating) >= len(names):
                counts[prefix] = len(relating)
        repeating = taken.union(*(names_by_prefix[prefix] for prefix in counts))
        others = [shape for name, shape in weights.items() if name not in repeating]
        for prefix, count in counts.items():
            names = names_by_prefix[prefix]
            # Of stages that are not read a strategy lists weights, and the copies or not.
            is_listed = any(weights[name] is None for name in names)
            if 2 * count >= len(others) - (0 if is_listed else others.count(None)):
                copies[prefix] = tuple(names)
                taken.update(names)
    return copies
