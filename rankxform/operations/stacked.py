"""Experts one by one, stacked in two tensors of a layer, as Transformers 5 holds them.

The inverse of `operations.experts`: gate and up ``[E, 2F, H]`` and down ``[E, H, F]``, or each the
other way round, as vLLM expects Qwen3-VL-MoE.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.errors import CheckpointError, UsageError
from rankxform.geometry.pieces import Assembly, concatenate, pile
from rankxform.layout.names import format_ranges

from .base import ModelOperation, OperationContext, Tensor
from .composing import Composer
from .experts import APART, TRANSPOSED, ExpertNames, names_of


def read(context: OperationContext) -> ExpertNames:
    """Return what the operation needs of files."""
    return names_of(context.config[0] if context.config else {})


def make(options: Mapping[str, Any]) -> ModelOperation | None:
    """Return the operation that is asked for."""
    if options["experts"] in (None, APART):
        return None
    is_transposed = options["experts"] == TRANSPOSED
    return Stack(options["inputs"]["stacked"], is_transposed=is_transposed)


class Stack(ModelOperation):
    """Makes two tensors of a layer's experts."""

    renames = True

    def __init__(self, names: ExpertNames, *, is_transposed: bool) -> None:
        self._names, self._is_transposed = names, is_transposed
        parts = "|".join(map(re.escape, names[:3]))
        self._expert = re.compile(
            rf"(?P<before>.*\bexperts\.)(?P<number>\d+)\.(?P<part>{parts})\.weight"
        )
        self._bias = re.compile(rf".*\bexperts\.\d+\.({parts})\.bias")
        self._composer = Composer()

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        blocks: dict[str, dict[tuple[int, str], Tensor]] = {}
        other_tensors = []
        for tensor in tensors:
            match = None if tensor.dropped else self._expert.fullmatch(tensor.name)
            if match is None:
                other_tensors.append(replace(tensor, name=self._names.of_modules(tensor.name)))
            else:
                block = blocks.setdefault(match["before"], {})
                block[int(match["number"]), match["part"]] = tensor
        if bias := next((t.name for t in other_tensors if self._bias.fullmatch(t.name)), None):
            raise CheckpointError(
                f"{bias!r} is a bias of an expert, and where experts have some, gate and up are "
                "joined otherwise",
                "leave out --experts",
            )
        if not blocks:
            raise UsageError("the checkpoint has no experts by number", "leave out --experts")
        for prefix, experts in blocks.items():
            numbers = sorted({number for number, _ in experts})
            complete = [(n, part) for n in range(len(numbers)) for part in self._names[:3]]
            if missing := [key for key in complete if key not in experts]:
                number, part = missing[0]
                raise CheckpointError(
                    f"{prefix}{number}.{part}.weight is not there, and experts "
                    f"{format_ranges(numbers)} are",
                    "leave out --experts",
                )
            inside = self._names.of_modules(prefix)
            halves = [(n, part) for n in range(len(numbers)) for part in self._names[:2]]
            other_tensors.append(
                self._stack(f"{inside}gate_up_proj", [experts[k] for k in halves], 2)
            )
            downs = [experts[number, self._names.down] for number in range(len(numbers))]
            other_tensors.append(self._stack(f"{inside}down_proj", downs, 1))
        return other_tensors

    def _stack(self, name: str, parts: Sequence[Tensor], per_expert: int) -> Tensor:
        """Return one tensor of parts, so many of which are an expert's. Raises CheckpointError."""
        first = parts[0]
        unlike = [p for p in parts if (p.dtype, p.shape) != (first.dtype, first.shape)]
        if unlike:
            raise CheckpointError(
                f"{first.name!r} is {first.dtype} {list(first.shape)}, and {unlike[0].name!r} "
                f"{unlike[0].dtype} {list(unlike[0].shape)}",
                "leave out --experts",
            )

        def build(assemblies: list[Assembly]) -> Assembly:
            starts = range(0, len(assemblies), per_expert)
            piled = pile([concatenate(assemblies[n : n + per_expert]) for n in starts])
            return piled.transposed() if self._is_transposed else piled

        return self._composer.compose(name, parts, per_expert, build)
