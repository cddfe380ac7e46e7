"""What PEFT's adapters hold beside pairs of matrices: whole modules, biases, tokens, experts.

Names and formulas are those of PEFT 0.21 (`tuners/lora`), each compared with its own merge. Experts
that are one tensor of a layer have their products in two matrices, wrapped in each other: the inner
``experts.base_layer.lora_A`` is for gate_up_proj, the outer ``experts.lora_A`` for down_proj, or
for the only one. Since 0.19 they are of the tensor's own axes; before, and always of experts that a
model keeps transposed, of the axes exchanged.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, NamedTuple

from rankxform.errors import CheckpointError, UsageError
from rankxform.geometry.box import Shape
from rankxform.values import pattern_on_use

from .base import AdapterStep, ExpertUpdate, LowRankUpdate, Replacement, Tensor, VectorUpdate

PREFIX = "base_model.model."
_OWNER = "experts"
_INNER, _OUTER = "gate_up_proj", "down_proj"
_WRAPPER = ".base_layer"
_TOKENS = ".token_adapter"
_EMBEDDING = ".lora_embedding_A", ".lora_embedding_B"
LENGTHS = ".lora_magnitude_vector"
"""Behind a module's name that of what its rows' lengths become."""
_DELTA = f"{_TOKENS}.trainable_tokens_delta"
_COPIES = f"{_TOKENS}{_WRAPPER}.weight", f"{_WRAPPER}.weight"
"""Ends of names of copies of the base's tensors, which an adapter leaves as they are."""
_VOCABULARY = pattern_on_use(r".*\b(embed_tokens|lm_head|wte|word_embeddings)\.weight")
_TURNED = 0, 19
"""The version since which products have the axes of the experts' tensor."""


class PeftAdditions(NamedTuple):
    """What adapter_config.json says of an adapter beside its rank and alpha."""

    saved_modules: tuple[str, ...] = ()  # modules_to_save
    biases: str = "none"  # bias: whose are in the adapter
    tokens: Mapping[str, tuple[int, ...]] | None = None  # by module, rows that were trained
    parameters: tuple[str, ...] = ()  # target_parameters
    version: tuple[int, ...] = ()  # peft_version
    scales_rows: bool = False  # use_dora
    has_biases: bool = False  # lora_bias
    label: str = ""  # what states it

    @classmethod
    def of(cls, config: Mapping[str, Any], label: str) -> PeftAdditions:
        """Read an adapter_config.json. Raises UsageError."""
        lists = [config.get(key) or [] for key in ("modules_to_save", "target_parameters")]
        if not all(isinstance(e, list) and all(isinstance(n, str) for n in e) for e in lists):
            raise UsageError("modules_to_save and target_parameters: expected names", where=label)
        biases = config.get("bias") or "none"
        if biases not in ("none", "lora_only", "all"):
            raise UsageError(f"bias is {biases!r}; expected none, lora_only or all", where=label)
        indices = config.get("trainable_token_indices")
        tokens = {"embed_tokens": indices} if isinstance(indices, list) else indices or {}
        if not isinstance(tokens, dict) or not all(
            isinstance(rows, list) and all(type(r) is int and r >= 0 for r in rows)
            for rows in tokens.values()
        ):
            raise UsageError("trainable_token_indices: expected numbers of rows", where=label)
        numbers = re.match(r"(\d+)\.(\d+)", str(config.get("peft_version") or ""))
        return cls(
            tuple(lists[0]),
            biases,
            {module: tuple(rows) for module, rows in tokens.items()},
            tuple(lists[1]),
            tuple(map(int, numbers.groups())) if numbers else (),
            config.get("use_dora") is True,
            config.get("lora_bias") is True,
            label,
        )

    def parameter_of(self, module: str) -> str | None:
        """Return the tensor of experts that a pair is for, by its module; None if for none."""
        owner = module.removesuffix(_WRAPPER)
        pairs = (parameter.rpartition(".")[::2] for parameter in self.parameters)
        targets = {t for parent, t in pairs if f".{owner}".endswith(f".{parent or _OWNER}")}
        if not targets:
            return None
        if len(targets) == 1 and not module.endswith(_WRAPPER):
            return f"{owner}.{targets.pop()}"
        if targets != {_INNER, _OUTER}:
            text = f"target_parameters are {', '.join(sorted(targets))} of one module"
            raise UsageError(f"{text}, in an order that is not known", where=self.label)
        return f"{owner}.{_INNER if module.endswith(_WRAPPER) else _OUTER}"

    def rows_of(self, module: str, count: int) -> dict[int, int]:
        """Return by row of a module the row of its trained ones. Raises UsageError."""
        for name, rows in (self.tokens or {}).items():
            if f".{module}".endswith(f".{name}"):
                if len(rows) != count or len({*rows}) != count:
                    text = f"trainable_token_indices has {len(rows)} rows of {name}"
                    raise UsageError(f"{text}, and {count} are there", where=self.label)
                return {row: number for number, row in enumerate(rows)}
        raise UsageError(f"trainable_token_indices names no {module}", where=self.label)

    def check_all_there(self, names: Collection[str], parameters: Collection[str]) -> None:
        """Refuse an adapter that lacks what its configuration names. Raises UsageError.

        parameters: tensors of experts for which it has pairs.
        """
        dotted_names = [f".{name}." for name in names]
        deltas = [name for name in dotted_names if f"{_DELTA}." in name]
        lists = (
            ("modules_to_save", self.saved_modules, dotted_names),
            ("trainable_token_indices", self.tokens or {}, deltas),
        )
        for parameter in self.parameters:
            if not any(f".{name}".endswith(f".{parameter}") for name in parameters):
                text = f"target_parameters names {parameter!r}, for which the adapter has no pair"
                raise UsageError(text, "merge this adapter with PEFT", where=self.label)
        if self.has_biases and not any(name.endswith(".lora_B.bias") for name in names):
            text = "lora_bias is True, and the adapter has no bias of a pair"
            raise UsageError(text, "merge this adapter with PEFT", where=self.label)
        for key, modules, holding_names in lists:
            for module in modules:
                if not any(f".{module}." in name for name in holding_names):
                    text = f"{key} names {module!r}, of which the adapter holds nothing"
                    raise UsageError(text, "merge this adapter with PEFT", where=self.label)

    def may_replace(self, name: str) -> bool:
        """Tell whether a tensor under the base's own name is one that an adapter has whole.

        PEFT saves a vocabulary that grew without a word in its configuration.
        """
        module = name.rpartition(".")[0]
        is_saved = any(f".{module}.".find(f".{saved}.") >= 0 for saved in self.saved_modules)
        is_bias = self.biases != "none" and name.endswith(".bias")
        return is_saved or is_bias or _VOCABULARY().fullmatch(name) is not None


def find_additions(
    name: str, shapes: Mapping[str, Shape], additions: PeftAdditions, scale: Callable[[str], float]
) -> tuple[str, AdapterStep | None] | None:
    """Return which tensor of the base one of an adapter changes, and how; None if in no known way.

    A copy of the base's own changes nothing: it has no step.
    """
    inside = name.removeprefix(PREFIX)
    if inside.endswith(_EMBEDDING[0]):
        module = inside.removesuffix(_EMBEDDING[0])
        b = name.removesuffix(_EMBEDDING[0]) + _EMBEDDING[1]
        step = LowRankUpdate(name, b, scale(module), transposed=True)
        return (f"{module}.weight", step) if b in shapes else None
    if inside.endswith(".lora_B.bias"):
        module = inside.removesuffix(".lora_B.bias")
        return f"{module}.bias", VectorUpdate(name, scale(module))
    if inside.endswith(_DELTA):
        module = inside.removesuffix(_DELTA)
        rows = additions.rows_of(module, shapes[name][0])
        return f"{module}.weight", Replacement(name, rows)
    if inside.endswith(f"{_WRAPPER}.bias"):
        return f"{inside.removesuffix(f'{_WRAPPER}.bias')}.bias", Replacement(name)
    for end in _COPIES:
        if inside.endswith(end):
            return f"{inside.removesuffix(end)}.weight", None
    return (inside, Replacement(name)) if additions.may_replace(inside) else None


class ExpertPair(NamedTuple):
    """Two matrices of an adapter with the products of all experts of a layer."""

    parameter: str  # the tensor that holds the experts, if they are one
    a: str
    b: str
    shape_a: Shape
    shape_b: Shape
    scale: float
    rank: int

    def steps(
        self, tensors: Mapping[str, Tensor], additions: PeftAdditions
    ) -> Iterator[tuple[str, AdapterStep]]:
        """Yield what is added to experts, in one tensor or one by one. Raises CheckpointError."""
        experts = self.shape_a[0] // self.rank
        if self.parameter in tensors:
            _, rows, columns = (*tensors[self.parameter].shape, 0, 0, 0)[:3]
            is_turned = self._is_transposed((rows, columns), additions)
            yield self.parameter, ExpertUpdate(self.a, self.b, self.scale, experts, is_turned)
            return
        module, _, kind = self.parameter.rpartition(".")
        parts = ("gate_proj", "up_proj") if kind == _INNER else ("down_proj",)
        for expert in range(experts):
            names = [f"{module}.{expert}.{part}.weight" for part in parts]
            if names[0] not in tensors:
                raise CheckpointError(
                    f"is for {self.parameter!r}, or experts by number, and neither is there",
                    "give the base that it was trained on",
                )
            shape = tensors[names[0]].shape
            expert_shape = (len(parts) * shape[0], *shape[1:])
            is_turned = self._is_transposed(expert_shape, additions)
            for number, name in enumerate(names):
                yield (
                    name,
                    ExpertUpdate(
                        self.a, self.b, self.scale, experts, is_turned, expert, number * shape[0]
                    ),
                )

    def _is_transposed(self, shape: Shape, additions: PeftAdditions) -> bool:
        """Tell whether products are of a matrix's axes exchanged. Raises CheckpointError.

        shape: of an expert's matrix, which is square where shapes do not tell.
        """
        if not additions.version:
            raise CheckpointError(
                f"{self.b!r} is for experts, and {additions.label} has no peft_version",
                "state it there, if PEFT saved the adapter",
                details="the version tells the order of columns, which Megatron-Bridge's is not",
            )
        product = self.shape_b[0], self.shape_a[1]
        if product not in (shape, shape[::-1]):
            raise CheckpointError(
                f"{self.a!r} {list(self.shape_a)} and {self.b!r} {list(self.shape_b)} are for "
                f"experts of {list(product)}, and the checkpoint's are {list(shape)}"
            )
        return additions.version < _TURNED if product == product[::-1] else product != shape
