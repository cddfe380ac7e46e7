"""``--lora``: adapters of low rank, added to the matrices that they are for.

``W + (B A) s`` with ``s = alpha / r``; A of shape (r, in), B of shape (out, r) (Hu et al., LoRA,
2021). What else changes the formula in PEFT's adapter_config.json is obeyed (`operations.peft`), or
refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import field, replace
from math import sqrt
from typing import Any

from rankxform.errors import CheckpointError, UsageError
from rankxform.geometry.box import Shape
from rankxform.layout.names import first_texts, pattern_of, summarize_names
from rankxform.layout.states import find_states
from rankxform.layout.strategy import Strategy
from rankxform.options import flag_of
from rankxform.statements import Finding, as_notice, as_warning
from rankxform.values import dataclass, pattern_on_use

from .base import (
    AdapterStep,
    LowRankUpdate,
    ModelOperation,
    OperationContext,
    Replacement,
    ScaledRows,
    Tensor,
)
from .peft import LENGTHS, PREFIX, ExpertPair, PeftAdditions, find_additions

_OF_ADAPTERS = pattern_on_use(r"lora|\.adapter\.linear_(?:in|out)\.")
"""In names of an adapter's tensors, where they lie beside the model's."""
_FAMILIES = (
    (".mindpet_delta_lora_a", ".mindpet_delta_lora_b", ".weight"),
    (".lora_A.weight", ".lora_B.weight", ".weight"),
    (".lora_A.default.weight", ".lora_B.default.weight", ".weight"),
    (".adapter.linear_in.weight", ".adapter.linear_out.weight", ".weight"),
    (".lora_a", ".lora_b", ".weight"),
    (".weight1_lora_a", ".weight1_lora_b", ".weight1"),
    (".weight2_lora_a", ".weight2_lora_b", ".weight2"),
)
"""Names of A, B and their matrix behind the module's: MindPet's, MindFormers' Mcore and PEFT's, of
a model that PEFT wraps, Megatron-Bridge's, PyNative's, and those of its experts, of which each has
a product."""

_CONFIG = "adapter_config.json"
"""PEFT's."""
_MOST = 1e9
_MOST_SIGNS = {r"[*+{]": 4, r"\?": 8, r"\|": 16}
"""How many repetitions, optional parts and alternatives an expression may have: each may multiply
the ways in which it can match."""
_REFUSED: dict[str, tuple[object, ...]] = {
    "use_dora": (False, None, True),
    "use_qalora": (False, None),
    "layer_replication": (None, []),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None, {}),
    "loftq_config": (None, {}),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
"""Entries of adapter_config.json, with the values under which the formula above holds."""


@dataclass(frozen=True)
class LoraScaling:
    """How much of the product is added, module by module."""

    # alpha, rank: the usual.
    alpha: float
    rank: int
    # alphas, ranks: by expression of modules' names.
    alphas: Mapping[str, float] = field(default_factory=dict)
    ranks: Mapping[str, int] = field(default_factory=dict)
    root: bool = False  # divide by the root of the rank
    transposed: bool = False  # matrices are stored as (in, out)
    targets: tuple[str, ...] = ()  # names that modules end with, as far as they are listed
    partial: bool = False  # whether some layers are left out on purpose
    label: str = "--lora-rank"  # what states it
    additions: PeftAdditions = PeftAdditions()

    @classmethod
    def of(cls, config: Mapping[str, Any], label: str) -> LoraScaling:
        """Return what an adapter_config.json says. Raises UsageError for what is not known."""
        kind = config.get("peft_type", "LORA")
        if kind != "LORA":
            raise UsageError(f"peft_type is {kind!r}; only LORA adapters are merged", where=label)
        for key, good in _REFUSED.items():
            if config.get(key) not in good:
                raise UsageError(
                    f"{key} is {config[key]!r}, which changes what is added in a way that is "
                    "not known here",
                    "merge this adapter with PEFT",
                    where=label,
                )
        alpha, rank = config.get("lora_alpha"), config.get("r")
        if alpha is None or not _positive(alpha) or not _positive(rank) or type(rank) is not int:
            raise UsageError(
                f"lora_alpha is {alpha!r} and r is {rank!r}; expected both", where=label
            )
        alphas, ranks = config.get("alpha_pattern") or {}, config.get("rank_pattern") or {}
        for patterns in (alphas, ranks):
            if not isinstance(patterns, dict) or not all(map(_positive, patterns.values())):
                raise UsageError("alpha_pattern and rank_pattern: expected numbers", where=label)
            for text in patterns:
                _check_expression(str(text), label)
        if not all(type(number) is int for number in ranks.values()):
            raise UsageError("rank_pattern: expected whole numbers", where=label)
        root, transposed = config.get("use_rslora"), config.get("fan_in_fan_out")
        if root not in (True, False, None) or transposed not in (True, False, None):
            raise UsageError("use_rslora and fan_in_fan_out: expected true or false", where=label)
        listed = config.get("target_modules")
        targets = tuple(map(str, listed)) if isinstance(listed, list) else ()
        is_partial = config.get("layers_to_transform") is not None
        return cls(
            alpha, rank, alphas, ranks, bool(root), bool(transposed), targets, is_partial, label,
            PeftAdditions.of(config, label),
        )  # fmt: skip

    @classmethod
    def of_mindformers(cls, manifest: Mapping[str, Any], label: str) -> LoraScaling:
        """Return what the manifest of MindFormers' PyNative trainer says. Raises UsageError."""
        config = manifest.get("lora_config")
        lora_config = config if isinstance(config, dict) else {}
        alpha, rank = lora_config.get("lora_alpha"), lora_config.get("lora_rank")
        if alpha is None or not _positive(alpha) or not _positive(rank) or type(rank) is not int:
            raise UsageError(
                f"lora_alpha is {alpha!r} and lora_rank is {rank!r}; expected both", where=label
            )
        return cls(alpha, rank, label=label)

    def scale(self, module: str) -> float:
        """Return the factor of a module's product."""
        rank = self.rank_of(module)
        alpha = _match(self.alphas, module, self.alpha)
        return float(alpha / (sqrt(rank) if self.root else rank))

    def matchless(self, modules: Iterable[str]) -> Iterator[str]:
        """Yield, in words, what is stated of modules for which there is no pair."""
        all_modules = list(modules)
        for name in self.targets if not self.additions.parameters else ():
            if not any(module == name or module.endswith(f".{name}") for module in all_modules):
                yield f"{self.label}: target_modules has {name!r}, for which there is no pair"
        for key, patterns in (("alpha_pattern", self.alphas), ("rank_pattern", self.ranks)):
            for text in patterns:
                if not any(re.match(rf"(.*\.)?({text})$", module) for module in all_modules):
                    yield f"{self.label}: {key} has {text!r}, for which there is no pair"

    def rank_of(self, module: str) -> int:
        return int(_match(self.ranks, module, self.rank))


def _check_expression(text: str, label: str) -> None:
    """Refuse an expression of a downloaded file that may take longer than anybody waits: with
    repetitions or alternatives in a repeated group, or many repetitions. Raises UsageError."""
    plain = re.sub(r"(\\d|\[0-9\])[*+]", "x", text)  # it ends where digits do
    plain = re.sub(r"\\.|\[[^\]]*\]", "x", plain).replace("(?:", "(")
    counts = {sign: len(re.findall(sign, plain)) for sign in _MOST_SIGNS}
    is_slow = any(counts[sign] > most for sign, most in _MOST_SIGNS.items())
    while not is_slow and (group := re.search(r"\(([^()]*)\)", plain)):
        is_repeated = plain[group.end() : group.end() + 1] in ("*", "+", "{")
        is_slow = is_repeated and re.search(r"[*+?{|]", group[1]) is not None
        plain = plain[: group.start()] + group[1] + plain[group.end() :]
    if is_slow:
        text = f"the expression {text!r} may take too long"
        raise UsageError(text, "merge this adapter with PEFT", where=label)


def _positive(value: Any) -> bool:
    """Tell whether a value is a number above zero that a scale can be made of."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < _MOST


def _match(patterns: Mapping[str, Any], module: str, otherwise: Any) -> Any:
    """Return the value of the first expression that a module's name ends with, as PEFT does."""
    for text, value in patterns.items():
        try:
            if re.match(rf"(.*\.)?({text})$", module):
                return value
        except re.error as error:
            raise UsageError(f"adapter_config.json: {text!r}: {error}") from error
    return otherwise


@dataclass(frozen=True)
class LoraAdapter:
    """An adapter's folder or file, and how much of its products is added."""

    path: str
    scaling: LoraScaling
    strategy: str | Strategy | None  # how it is sharded
    is_in_source: bool  # its tensors are the source's own
    shapes: Mapping[str, Shape] | None = None  # of its tensors, by name, once it is open


def read(context: OperationContext) -> LoraAdapter | None:
    """Return the adapter that is to be added. Raises UsageError."""
    options = context.options
    numbers = ("lora_alpha", "lora_rank")
    if options["lora"] is None:
        for name in (*numbers, "lora_strategy"):
            if options[name] is not None:
                raise UsageError(f"{flag_of(name)} is for --lora", "give both")
        return None
    path = context.place_of(options["lora"])
    if path is None:
        raise UsageError("no such adapter", where=options["lora"])
    strategy: str | Strategy | None = options["lora_strategy"]
    is_in_source = context.is_source(path)
    if strategy is None and (is_in_source or not context.states_its_strategy(path)):
        strategy = options["src_strategy"]
    scaling = _read_scaling(context, path, [n for n in numbers if options[n] is not None])
    return LoraAdapter(path, scaling, strategy, is_in_source)


def _read_scaling(
    context: OperationContext, place: str, requested_numbers: Sequence[str]
) -> LoraScaling:
    alpha, rank = context.options["lora_alpha"], context.options["lora_rank"]
    config = context.config_at(place, _CONFIG)
    manifest = None if config else context.adapter_manifest(place)
    if stating := config or manifest:
        if requested_numbers:
            flags = " and ".join(map(flag_of, requested_numbers))
            raise UsageError(f"{stating[1]} states both", f"leave out {flags}")
        parse = LoraScaling.of if manifest is None else LoraScaling.of_mindformers
        return parse(*stating)
    if not _positive(alpha) or not rank:
        raise UsageError(
            f"{place} has no {_CONFIG}, and without them it is not known how much is to be added",
            "give --lora-alpha and --lora-rank, as the adapter was trained",
        )
    return LoraScaling(float(alpha), rank)


def make(options: Mapping[str, Any]) -> LoraOperation | None:
    """Return the operation, once the adapter is open."""
    adapter: LoraAdapter = options["inputs"]["lora"]
    if adapter.shapes is None:
        return None
    return LoraOperation(adapter.shapes, adapter.scaling, adapter.path, inside=adapter.is_in_source)


class LoraOperation(ModelOperation):
    """Adds an adapter's products to the matrices that it is for."""

    renames = False

    def __init__(
        self,
        tensors: Mapping[str, Shape],
        scaling: LoraScaling,
        label: str,
        *,
        inside: bool = False,
    ) -> None:
        """`tensors`: of the adapter's files, by name; inside: these are the checkpoint's own.

        Raises CheckpointError for what is no pair.
        """
        adapter_shapes = {
            n: shape for n, shape in tensors.items() if not inside or _OF_ADAPTERS().search(n)
        }
        self._scaling = scaling
        states = find_states({**adapter_shapes})
        tensors = {n: shape for n, shape in adapter_shapes.items() if states.is_weight(n)}
        self._label, self._names, self._inside = label, set(tensors), inside
        self._elsewhere: Collection[str] = ()  # matrices that are not read
        self._shapes = tensors
        self._renamed: Mapping[str, str] = {}  # by name in the files
        self._steps: dict[str, tuple[AdapterStep, Shape]] = {}
        self._experts: list[ExpertPair] = []
        paired_names = set[str]()
        for name in tensors:
            for a_end, b_end, end in _FAMILIES:
                if not name.endswith(a_end):
                    continue
                b = name[: -len(a_end)] + b_end
                if b not in tensors:
                    raise CheckpointError(f"holds {name!r} and no {b!r}", where=label)
                paired_names |= {name, b}
                module = name[: -len(a_end)].removeprefix(PREFIX)
                if parameter := scaling.additions.parameter_of(module):
                    self._experts.append(self._expert_pair(name, b, parameter))
                    continue
                if module + end in self._steps:
                    raise CheckpointError(f"holds two pairs for {module + end!r}", where=label)
                self._steps[module + end] = self._step(name, b, module, tensors, scaling)
        paired_names |= self._scale_rows(tensors)
        unpaired_names = self._add_unpaired([n for n in tensors if n not in paired_names])
        scaling.additions.check_all_there(tensors, [pair.parameter for pair in self._experts])
        if unpaired_names or not (self._steps or self._experts):
            shown = summarize_names(unpaired_names or tensors, 3) or "nothing"
            raise CheckpointError(
                f"holds {shown}, and expected are pairs such as X.lora_A.weight and "
                "X.lora_B.weight",
                where=label,
            )

    def _scale_rows(self, names: Iterable[str]) -> set[str]:
        """Give the matrices of DoRA their rows' lengths, and return the names of these.

        Raises CheckpointError, UsageError.
        """
        additions, length_names = self._scaling.additions, set[str]()
        for name in names:
            inside = name.removesuffix(".weight").removeprefix(PREFIX)
            target = f"{inside.removesuffix(LENGTHS)}.weight"
            step, shape = self._steps.get(target, (None, ()))
            if not inside.endswith(LENGTHS) or not additions.scales_rows:
                continue
            if not isinstance(step, LowRankUpdate) or step.transposed or step.is_stacked:
                text = f"{name!r} is for {target!r}, which gets no plain product"
                raise CheckpointError(text, "merge this adapter with PEFT", where=self._label)
            self._steps[target] = ScaledRows(step, name, target), shape
            length_names.add(name)
        plain = [n for n, (step, _) in self._steps.items() if not isinstance(step, ScaledRows)]
        if additions.scales_rows and (plain or self._experts):
            text = f"use_dora is True, and {first_texts(plain, 1)} has no lengths of its rows"
            raise UsageError(text, "merge this adapter with PEFT", where=additions.label)
        return length_names

    def _expert_pair(self, a: str, b: str, parameter: str) -> ExpertPair:
        """Return the products of a layer's experts. Raises CheckpointError."""
        shape_a, shape_b, rank = self._shapes[a], self._shapes[b], self._scaling.rank_of(parameter)
        if len(shape_a) != 2 or shape_a[:1] != shape_b[1:] or shape_a[0] % rank:
            raise CheckpointError(
                f"{a!r} and {b!r} have shapes {list(shape_a)} and {list(shape_b)}; with rank "
                f"{rank} ({self._scaling.label}), (E {rank}, in) and (out, {rank} E) were expected"
            )
        return ExpertPair(parameter, a, b, shape_a, shape_b, self._scaling.scale(parameter), rank)

    def _add_unpaired(self, names: Sequence[str]) -> list[str]:
        """Take what an adapter has beside pairs; return what is not known. Raises UsageError."""
        unknown_names, partners = list[str](), set[str]()
        for name in names:
            addition = find_additions(
                name, self._shapes, self._scaling.additions, self._scaling.scale
            )
            if addition is None:
                unknown_names.append(name)
                continue
            target, step = addition
            if step is None:
                continue  # a copy of the base's
            partners.update(step.operands)
            if target in self._steps:
                text = f"changes {target!r} in two ways, as {name!r}"
                raise CheckpointError(text, "merge this adapter with PEFT", where=self._label)
            shape = self._shapes[name]
            if isinstance(step, LowRankUpdate):
                shape = (shape[1], self._shapes[step.b][0])
            self._steps[target] = step, shape
        return [name for name in unknown_names if name not in partners]

    def _step(
        self, a: str, b: str, module: str, tensors: Mapping[str, Shape], scaling: LoraScaling
    ) -> tuple[LowRankUpdate, Shape]:
        shape_a, shape_b, rank = tensors[a], tensors[b], scaling.rank_of(module)
        if len(shape_a) == len(shape_b) == 3:
            if shape_a[0] != shape_b[0] or not shape_a[2] == shape_b[1] == rank:
                raise CheckpointError(
                    f"{a!r} and {b!r} have shapes {list(shape_a)} and {list(shape_b)}; with rank "
                    f"{rank} ({scaling.label}), (E, in, {rank}) and (E, {rank}, out) were expected"
                )
            step = LowRankUpdate(a, b, scaling.scale(module), is_stacked=True)
            return step, (shape_a[0], shape_a[1], shape_b[2])
        if len(shape_a) != 2 or len(shape_b) != 2 or not shape_a[0] == shape_b[1] == rank:
            raise CheckpointError(
                f"{a!r} and {b!r} have shapes {list(shape_a)} and {list(shape_b)}; with rank "
                f"{rank} ({scaling.label}), ({rank}, in) and (out, {rank}) were expected"
            )
        shape = (shape_b[0], shape_a[1])
        step = LowRankUpdate(a, b, scaling.scale(module), scaling.transposed)
        return step, shape[::-1] if scaling.transposed else shape

    def without(self, tensors: Sequence[Tensor]) -> LoraOperation:
        part = copy(self)
        part._elsewhere = {tensor.name for tensor in tensors if tensor.name in self._steps}
        return part

    def findings(self, names: Sequence[str]) -> Iterator[Finding]:
        names = [self._renamed.get(name, name) for name in names]
        matrices = [name for name in names if name in self._steps]
        if matrices:
            shown = summarize_names(matrices, 3)
            yield as_notice(f"{self._label}: is added to {len(matrices)} matrices, {shown}")
        elif not self._elsewhere:
            yield as_warning(f"{self._label}: is added to none of the parameters that are written")
        counts_by_kind = Counter(map(pattern_of, names))
        for kind, count in Counter(map(pattern_of, matrices)).items():
            if count < counts_by_kind[kind] and not self._scaling.partial:
                text = f"has pairs for {count} of {counts_by_kind[kind]} {kind}"
                yield as_warning(f"{self._label}: {text}")
        modules = [name.removesuffix(".weight") for name in self._steps]
        modules += [pair.parameter for pair in self._experts]
        yield from map(as_warning, self._scaling.matchless(modules))

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        tensors_by_name = {tensor.name: tensor for tensor in tensors if not tensor.dropped}
        self._renamed = {tensor.sources[0].name: name for name, tensor in tensors_by_name.items()}
        present_names = {*tensors_by_name}
        for pair in self._experts:
            steps = pair.steps(tensors_by_name, self._scaling.additions)
            self._steps |= {name: (step, tensors_by_name[name].shape) for name, step in steps}
        twice = sorted(self._names & present_names)
        if twice and not self._inside:
            raise CheckpointError(
                f"the checkpoint itself holds {twice[0]!r} too, and one adapter is meant",
                "leave its own out (--exclude) after merging it with --lora SRC",
                where=self._label,
            )
        known_names = present_names.union(self._elsewhere)
        lacking = [name for name in self._steps if name not in known_names]
        if lacking:
            raise CheckpointError(
                f"is for {first_texts([*map(repr, lacking)], 1)}, which the checkpoint does not "
                "have; is it another model's adapter, or under other names?",
                where=self._label,
            )
        new_tensors = []
        for tensor in tensors:
            if tensor.name in self._steps and not tensor.dropped:
                tensor = self._added(tensor)
            elif not self._names.isdisjoint((tensor.base_name, tensor.sources[0].name)):
                tensor = replace(tensor, dropped="merged into the matrices (--lora)")
            new_tensors.append(tensor)
        return new_tensors

    def _added(self, matrix: Tensor) -> Tensor:
        step, shape = self._steps[matrix.name]
        (source,) = matrix.sources
        rows = step.rows if isinstance(step, Replacement) else None
        has_rows = rows is None or max(rows) < matrix.shape[0]
        shape = shape if rows is None else (matrix.shape[0], *shape[1:])
        if matrix.shape != shape or not has_rows:
            *others, operand = map(repr, step.operands)
            product = f"the product of {operand} and {others[0]}" if others else operand
            is_grown = isinstance(step, Replacement) and matrix.shape[1:] == shape[1:]
            is_grown = is_grown and matrix.shape[0] < shape[0]
            has = list(shape) if has_rows else f"row {max(rows or ())}"
            raise CheckpointError(
                f"{matrix.name!r} has shape {list(matrix.shape)}; {product} of {self._label} has "
                f"{has}",
                *([f"--vocab {shape[0]} in a run of its own, before this one"] if is_grown else []),
            )
        if source.step is not None or matrix.dtype not in ("Float16", "BFloat16", "Float32"):
            raise CheckpointError(
                f"{matrix.name!r} is {source.src_dtype}, to which no adapter is added",
                "convert the checkpoint to bf16 first (--dtype)",
            )
        if isinstance(step, ScaledRows):
            step = replace(step, matrix=source.name)  # as the files call it
        return replace(matrix, sources=(replace(source, step=step),))
