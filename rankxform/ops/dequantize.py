"""Quantized matrices: 8-bit floats become numbers by their factors, integers are refused.

An 8-bit float has one tensor of factors beside it: for each block (DeepSeek-V3), for each row, or
one for all. What is quantized to integers has zero points, packed values or codes that no rule
here knows; rounding its factors would change every weight, and so nothing but a copy is made of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from rankxform.errors import CheckpointError
from rankxform.formats.dtype import FLOAT8

from .base import Composition, Dequantize, SourceTensor, Tensor

RESULT = "BFloat16"
DEFAULT_BLOCK = (128, 128)
APPLIED = "factors of 8-bit matrices, which are applied"
OF_ACTIVATIONS = "factors of activations, which numbers need not"

_INTEGERS = ("Int4", "Int8", "UInt8", "Int32", "UInt32")
_PACKED = re.compile(r"weight[^.]*$|_blocks$")
"""Last parts of names of quantized matrices; other integers are tables and indexes."""
_FACTOR_TYPES = ("Float32", "BFloat16", "F8_E8M0")
_ACTIVATION = re.compile(r"(.*[._])?(input|output|activation|[qkv]|kv)_scale(_ub)?")
_INTEGER_FACTOR = re.compile(
    r"(weight_?)?(scales?|scale_inv|qzeros|zero_points?|g_idx|deq_scale|quant_(bias|scale|map|state).*"
    r"|offsets?|absmax|nested_.*|scb)",
    re.IGNORECASE,
)


class Dequantized(Composition):
    """Multiplies 8-bit floats by their factors, which are left out; refuses integers."""

    renames = False

    def __init__(
        self, block: tuple[int, int] = DEFAULT_BLOCK, *, applies: bool, asked: str, scheme: str
    ) -> None:
        """`block`: rows and columns that share a factor. `applies`: numbers are asked for, by the
        option `asked`. `scheme`: what the configuration calls the quantization, or ""."""
        self._block, self._applies, self._asked, self._scheme = block, applies, asked, scheme

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        known = {one.name: one for one in tensors if not one.dropped}
        self._check_integers(known)
        if not self._applies:
            return [*tensors]
        used, found, has_matrices = set[str](), [], False
        for one in tensors:
            is_matrix = one.dtype in FLOAT8[:2] and not one.dropped
            if is_matrix:
                scales = self._factors_of(one, known)
                used.add(scales.name)
                one, has_matrices = self._with_factors(one, scales), True
            found.append(one)
        if not has_matrices:
            return [*tensors]
        matrices = [name for name, one in known.items() if one.dtype in FLOAT8[:2]]
        kept = [one for one in found if not one.dropped]
        reasons = {one.name: _left_out(one, used, matrices) for one in kept}
        return [
            replace(one, dropped=reasons[one.name]) if reasons.get(one.name) else one
            for one in found
        ]

    def _check_integers(self, known: Mapping[str, Tensor]) -> None:
        """Refuse matrices of integers that have factors beside them. Raises CheckpointError."""
        matrices = [
            one
            for one in known.values()
            if one.dtype in _INTEGERS and len(one.shape) > 1 and _PACKED.search(one.name)
        ]
        if not matrices:
            return
        beside: dict[str, list[str]] = {}
        for name in known:
            stem, _, last = name.rpartition(".")
            if _INTEGER_FACTOR.fullmatch(last):
                beside.setdefault(stem, []).append(name)
        for one in matrices:
            stem = one.name.rpartition(".")[0]
            factors = beside.get(stem) or beside.get(one.name)
            if factors:
                scheme = f"{self._scheme}: " if self._scheme else ""
                remedy = "leave out --dtype; a copy is exact"
                if self._asked != "--dtype":
                    remedy = "convert the model that was not quantized"
                raise CheckpointError(
                    f"{one.name!r} is quantized ({scheme}{one.dtype} with {factors[0]!r}), and "
                    f"{self._asked} would change the numbers that it stands for",
                    remedy,
                )

    def _factors_of(self, one: Tensor, known: Mapping[str, Tensor]) -> Tensor:
        """Return the one tensor of factors of a matrix. Raises CheckpointError."""
        stem = one.name.removesuffix("weight")
        names = [f"{one.name}_scale_inv", f"{one.name}_scale", f"{stem}scale", f"{stem}scale_inv"]
        scales = [known[name] for name in dict.fromkeys(names) if name in known]
        if len(scales) == 1:
            return scales[0]
        count = "no" if not scales else f"{len(scales)} tensors of"
        raise CheckpointError(
            f"{one.name!r} is {one.dtype}, and there are {count} factors by which it becomes a "
            f"number ({' or '.join(repr(tensor.name) for tensor in scales) or repr(names[0])})",
            "leave out --dtype and --map to carry it as it is",
        )

    def _with_factors(self, one: Tensor, scales: Tensor) -> Tensor:
        block = self._block_of(one, scales)
        if block is None or scales.dtype not in _FACTOR_TYPES:
            want = [-(-n // size) for n, size in zip(one.shape, self._block)]
            raise CheckpointError(
                f"{scales.name!r} is {scales.dtype} {list(scales.shape)}, and {one.name!r} has "
                f"shape {list(one.shape)}: expected {want}, a factor for each row, or one",
                details=f"blocks are of {list(self._block)}; factors Float32, BFloat16 or F8_E8M0",
            )
        (source,) = one.sources
        step = Dequantize(scales.sources[0].name, block)
        made = SourceTensor(source.name, source.src_dtype, source.shape, step, RESULT)
        return replace(one, dtype=RESULT, sources=(made,))

    def _block_of(self, one: Tensor, scales: Tensor) -> tuple[int, int] | None:
        """Return the rows and columns that share a factor, by the factors' shape; None if none."""
        if len(one.shape) != 2:
            return None
        rows, columns = one.shape
        if scales.shape == tuple(-(-n // size) for n, size in zip(one.shape, self._block)):
            return self._block
        if scales.shape in ((rows,), (rows, 1)):
            return 1, columns
        return (rows, columns) if scales.shape in ((), (1,), (1, 1)) else None


def _left_out(one: Tensor, used: set[str], matrices: Sequence[str]) -> str:
    """Return why a tensor is left out where matrices become numbers, "" if it is not.

    A factor of activations is one number in a module that has 8-bit `matrices`.
    """
    if one.name in used:
        return APPLIED
    if prod(one.shape) != 1 or not _ACTIVATION.fullmatch(one.name):
        return ""
    module = one.name.rpartition(".")[0] + "."
    return OF_ACTIVATIONS if any(name.startswith(module) for name in matrices) else ""


def dequantize(options: Mapping[str, Any]) -> Composition | None:
    """Return the operation, where another type, another naming or an adapter is asked for."""
    asked = next((name for name in ("dtype", "map", "lora") if options.get(name) is not None), None)
    if asked is None:
        return None
    block, scheme = options.get("block") or DEFAULT_BLOCK, options.get("scheme") or ""
    return Dequantized(block, applies=asked != "lora", asked=f"--{asked}", scheme=scheme)
