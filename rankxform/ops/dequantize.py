"""Matrices in 8-bit floats with a factor for each block, as DeepSeek-V3 is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.errors import CheckpointError
from rankxform.formats.dtype import FLOAT8

from .base import Composition, Dequantize, SourceTensor, Tensor

SCALES = "_scale_inv"
"""What is behind a matrix's name in the name of its factors."""

RESULT = "BFloat16"
DEFAULT_BLOCK = (128, 128)


class Dequantized(Composition):
    """Multiplies blocks by their factors, and leaves the factors out."""

    renames = False

    def __init__(self, block: tuple[int, int] = DEFAULT_BLOCK) -> None:
        """`block`: rows and columns that share a factor."""
        self._block = block

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        known = {one.name: one for one in tensors if not one.dropped}
        used, found = set[str](), []
        for one in tensors:
            if one.dtype == FLOAT8 and not one.dropped:
                scales = known.get(one.name + SCALES)
                if scales is None:
                    raise CheckpointError(
                        f"{one.name!r} is {FLOAT8}, and there is no {one.name + SCALES!r}, the "
                        "factors by which it becomes a number",
                        "leave out --dtype and --map to carry it as it is",
                    )
                used.add(scales.name)
                one = self._with_factors(one, scales)
            found.append(one)
        return [
            replace(one, dropped="factors of 8-bit matrices, which are applied")
            if one.name in used
            else one
            for one in found
        ]

    def _with_factors(self, one: Tensor, scales: Tensor) -> Tensor:
        want = tuple(-(-n // size) for n, size in zip(one.shape, self._block))
        if len(one.shape) != 2 or scales.shape != want or scales.dtype != "Float32":
            raise CheckpointError(
                f"{scales.name!r} is {scales.dtype} {list(scales.shape)}; for {one.name!r} of "
                f"shape {list(one.shape)} in blocks of {list(self._block)}, Float32 {list(want)} "
                "was expected"
            )
        (source,) = one.sources
        step = Dequantize(scales.sources[0].name, self._block)
        made = SourceTensor(source.name, source.src_dtype, source.shape, step, RESULT)
        return replace(one, dtype=RESULT, sources=(made,))


def dequantize(options: Mapping[str, Any]) -> Composition | None:
    """Return the operation, where another type or another naming is asked for."""
    if options.get("dtype") is None and options.get("map") is None:
        return None
    return Dequantized(options.get("block") or DEFAULT_BLOCK)
