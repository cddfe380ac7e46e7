"""Experts of Hugging Face's models that are stacked in one tensor of a layer, one by one.

Transformers 5 holds the experts of a layer in two tensors, and saves what it loaded so in the same
way; maps know experts by number, as older files have them. Here stacked ones become boxes of their
tensor, under the names of experts by number. In which order their axes are, the shapes of a layer
tell: gate and up are ``[E, 2F, H]`` and down is ``[E, H, F]``, or each is the other way round (as
Qwen3-VL-MoE was published, Llama 4 and gpt-oss are). gpt-oss alone has gate and up by columns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, NamedTuple

from rankxform.errors import CheckpointError
from rankxform.geometry.box import Shape
from rankxform.geometry.pieces import Assembly, Piece
from rankxform.values import pattern_on_use

from .base import ModelOperation, OperationContext, Tensor

APART, STACKED, TRANSPOSED = ARRANGEMENTS = ("apart", "stacked", "transposed")
_STACKED = pattern_on_use(r"(?P<before>.*\bexperts\.)gate_up_proj")
_DOWN, _BIAS = "down_proj", "_bias"
_MIXTRALS = "mlp.experts.", "mlp.gate.", "block_sparse_moe."


class ExpertNames(NamedTuple):
    """What the matrices of one expert are called behind its number."""

    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"
    is_mixtrals: bool = False  # whose modules are called otherwise too

    def published(self, name: str) -> str:
        """Return the published name of what Transformers' modules call `name`."""
        if self.is_mixtrals and any(part in name for part in _MIXTRALS[:2]):
            return name.replace("mlp.", _MIXTRALS[2])
        return name

    def of_modules(self, name: str) -> str:
        """Return what Transformers' modules call a tensor of that published name."""
        return name.replace(_MIXTRALS[2], "mlp.") if self.is_mixtrals else name


def names_of(config: Mapping[str, Any]) -> ExpertNames:
    """Return what a model calls its experts, by its config.json."""
    is_mixtrals = config.get("model_type") == "mixtral"
    return ExpertNames("w1", "w3", "w2", is_mixtrals=True) if is_mixtrals else ExpertNames()


def shapes_apart(shapes: Mapping[str, Shape], config: Mapping[str, Any]) -> Mapping[str, Shape]:
    """Return shapes by name with experts one by one. Raises CheckpointError."""
    if not any(map(_STACKED().fullmatch, shapes)):
        return shapes
    tensors = [Tensor.of(name, "", shape) for name, shape in shapes.items()]
    return {t.name: t.shape for t in TakeApart(names_of(config)).compose(tensors)}


def read(context: OperationContext) -> ExpertNames:
    """Return what the operation needs of files."""
    return names_of(context.config[0] if context.config else {})


def make(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation: a map, and what stacks experts, take them one by one."""
    return TakeApart(options["inputs"]["experts"])


class TakeApart(ModelOperation):
    """Makes tensors of the experts that others hold along their first axis."""

    renames = True

    def __init__(self, names: ExpertNames) -> None:
        self._names = names
        self._assemblies: dict[Piece, Assembly] = {}

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        by_name = {tensor.name: tensor for tensor in tensors if not tensor.dropped}
        matches = (_STACKED().fullmatch(name) for name in by_name)
        blocks = [match["before"] for match in matches if match]
        if not blocks:
            return [*tensors]
        stacked_names, new_tensors = set[str](), list[Tensor]()
        for prefix in blocks:
            stacked = [
                by_name[name]
                for part in ("gate_up_proj", _DOWN)
                for name in (f"{prefix}{part}", f"{prefix}{part}{_BIAS}")
                if name in by_name
            ]
            stacked_names.update(tensor.name for tensor in stacked)
            new_tensors += self._experts(prefix, by_name)
        if again := next((tensor.name for tensor in new_tensors if tensor.name in by_name), None):
            raise CheckpointError(
                f"{again!r} is there, and its experts are stacked too", "--exclude one of them"
            )
        other_tensors = (tensor for tensor in tensors if tensor.name not in stacked_names)
        published = self._names.published
        return [*(replace(t, name=published(t.name)) for t in other_tensors), *new_tensors]

    def _experts(self, prefix: str, by_name: Mapping[str, Tensor]) -> list[Tensor]:
        """Return the experts of a layer, of all its tensors. Raises CheckpointError."""
        gate_up, down = by_name[f"{prefix}gate_up_proj"], by_name.get(f"{prefix}{_DOWN}")
        if down is None:
            raise CheckpointError(f"{gate_up.name!r} has no {_DOWN} beside it", "copy it again")
        is_transposed = arrangement_of(gate_up, down) == TRANSPOSED
        biases = [by_name.get(f"{t.name}{_BIAS}") for t in (gate_up, down)]
        # gpt-oss alone has biases, and columns of gate and up in turn
        step = 1 if biases[0] is None else 2
        count, half = gate_up.shape[0], prod(gate_up.shape[2 if is_transposed else 1 :][:1]) // 2
        new_tensors = []
        for number in range(count):
            name = self._names.published(f"{prefix}{number}.")
            for part, which in ((self._names.gate, 0), (self._names.up, 1)):
                first = which * (half if step == 1 else 1)
                new_tensors.append(
                    self._box(gate_up, f"{name}{part}.weight", number, (first, half, step),
                              is_transposed)
                )  # fmt: skip
                if biases[0] is not None:
                    bias_name = f"{name}{part}.bias"
                    rows = first, half, step
                    new_tensors.append(self._box(biases[0], bias_name, number, rows, False))
            rows = 0, down.shape[2 if is_transposed else 1], 1
            down_name = f"{name}{self._names.down}"
            new_tensors.append(self._box(down, f"{down_name}.weight", number, rows, is_transposed))
            if biases[1] is not None:
                rows = 0, biases[1].shape[1], 1
                new_tensors.append(self._box(biases[1], f"{down_name}.bias", number, rows, False))
        return new_tensors

    def _box(
        self,
        tensor: Tensor,
        name: str,
        number: int,
        rows: tuple[int, int, int],
        is_transposed: bool,
    ) -> Tensor:
        """Return some rows of one expert: from the first of them on, so many, in such steps."""
        first, count, step = rows
        if len(tensor.shape) == 2:
            shape: Shape = (count,)
            piece = Piece(0, shape, (0,), (1,), (number, first), (step,), (1,))
        else:
            axes = (2, 1) if is_transposed else (1, 2)
            start = [number, 0, 0]
            start[axes[0]] = first
            shape = count, tensor.shape[axes[1]]
            piece = Piece(0, shape, (0, 0), (1, 1), tuple(start), (step, 1), axes)
        assembly = self._assemblies.setdefault(piece, Assembly(shape, (piece,)))
        return Tensor(name, tensor.dtype, shape, tensor.sources, assembly)


def arrangement_of(gate_up: Tensor, down: Tensor) -> str:
    """Return how the axes of a layer's stacked experts lie. Raises CheckpointError."""
    shapes = gate_up.shape, down.shape
    if all(len(shape) == 3 for shape in shapes) and shapes[0][0] == shapes[1][0]:
        (_, a, b), (_, c, d) = shapes
        if (a, b) == (2 * d, c):
            return STACKED
        if (a, b) == (d, 2 * c):
            return TRANSPOSED
    texts = " and ".join(f"{t.name!r} {list(t.shape)}" for t in (gate_up, down))
    raise CheckpointError(
        f"{texts} are no stacked experts: [E, 2F, H] and [E, H, F], or [E, H, 2F] and [E, F, H]",
        "--exclude them, if they are something else",
    )
