"""8-bit floats and their factors: numbers are made of them, or they are refused.

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

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import FLOAT8, FLOATS
from rankxform.geometry.box import Shape
from rankxform.values import pattern_on_use

from .base import BlockScale, ModelOperation, OperationContext, SourceTensor, Tensor

RESULT = "BFloat16"
DEFAULT_BLOCK, _MOST_BLOCK = (128, 128), 1 << 20
APPLIED = "factors of 8-bit matrices, which are applied"
OF_ACTIVATIONS = "factors of activations, which numbers need not"

_INTEGERS = ("Int4", "Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32")
_PACKED = pattern_on_use(r"weight[^.]*$|_blocks$")
"""Last parts of names of quantized matrices; other integers are tables and indexes."""
_FACTOR_OF_ADAPTER = pattern_on_use(r"^(?:base_model\.model\.)?(.*?)\.lora_", re.IGNORECASE)
_FACTOR_TYPES = ("Float32", "BFloat16", "F8_E8M0")
_TABLE = pattern_on_use(r"(index|idx|ids|eid|mask|bias|grid|choices|table|buckets?|positions?)$")
"""Last parts of names of integers that are positions, or say what is left out."""
_CODES = pattern_on_use(r"indices|codes")
"""In names of integers whose values lie in a module below."""
_NO_FACTOR = pattern_on_use(r"bias|freq|norm|embed")
"""In last parts of names of floats that multiply no integers."""
_SHARES = (1, 2, 4, 8)
"""Of how many integers packed ones are, or which part of an axis."""
_ACTIVATION = pattern_on_use(r"(.*[._])?(input|output|activation|[qkv]|kv)_scale(_ub)?")
_INTEGER_FACTOR = pattern_on_use(
    r"(weight_?)?(scales?|scale_inv|qzeros|zero_points?|g_idx|deq_scale|quant_(bias|scale|map|state).*"
    r"|offsets?|absmax|nested_.*|scb)",
    re.IGNORECASE,
)


def find_quantized(types: Mapping[str, tuple[str, Shape]]) -> dict[str, str]:
    """Return matrices of integers that stand for numbers, each with a tensor of its factors.

    types: type and full shape of each tensor, by name. By the names that tools use; or by relation:
    a module without a weight of its own whose integers have an axis that a float's axis is a small
    multiple or share of.
    """
    modules: dict[str, list[str]] = {}
    for name in types:
        modules.setdefault(name.rpartition(".")[0], []).append(name)
    quantized = {}
    for name, (dtype, shape) in types.items():
        module, _, last_part = name.rpartition(".")
        if dtype not in _INTEGERS or len(shape) < 2 or _TABLE().search(last_part):
            continue
        beside = [*modules[module], *modules.get(name, ())]
        factors = [n for n in beside if _INTEGER_FACTOR().fullmatch(n.rpartition(".")[2])]
        if not (factors and _PACKED().search(name)):
            weight_type, weight_shape = types.get(f"{module}.weight", ("", ()))
            is_floating = weight_type in FLOATS and len(weight_shape) > 1
            below = [f"{module}.centroids", f"{module}.codebooks"] if _CODES().search(name) else []
            candidates = [n for m in (module, *below) for n in modules.get(m, ())]
            factors = [
                n
                for n in (candidates if module and not is_floating else ())
                if (types[n][0] in FLOATS or (types[n][0] == "UInt8" and "scale" in n))
                and n != name
                and not _NO_FACTOR().search(n.rpartition(".")[2])
                and any(a and b and (a % b == 0 or b % a == 0) and max(a, b) // min(a, b) in _SHARES
                        for a in types[n][1][:1] + types[n][1][-1:] for b in (shape[0], shape[-1]))
            ]  # fmt: skip
        if factors:
            quantized[name] = factors[0]
    return quantized


class DequantizeOperation(ModelOperation):
    """Multiplies 8-bit floats by their factors, which are left out; refuses integers."""

    renames = False

    def __init__(
        self,
        block: tuple[int, int] = DEFAULT_BLOCK,
        *,
        applies: bool,
        option: str,
        scheme: str,
        touched: frozenset[str] | None = None,
    ) -> None:
        """`block`: rows and columns that share a factor. `applies`: numbers are asked for, by the
        option `option`. `scheme`: what the configuration calls the quantization, or "". `touched`:
        the modules that are changed; None: all."""
        self._block, self._applies, self._asked, self._scheme = block, applies, option, scheme
        self._touched = touched

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        tensors_by_name = {tensor.name: tensor for tensor in tensors if not tensor.dropped}
        self._check_integers(tensors_by_name)
        if not self._applies:
            return [*tensors]
        scale_names, new_tensors, has_matrices = set[str](), [], False
        for tensor in tensors:
            is_matrix = tensor.dtype in FLOAT8[:2] and not tensor.dropped
            if is_matrix:
                scales = self._factors_of(tensor, tensors_by_name)
                scale_names.add(scales.name)
                tensor, has_matrices = self._with_factors(tensor, scales), True
            new_tensors.append(tensor)
        if not has_matrices:
            return [*tensors]
        matrices = [name for name, tensor in tensors_by_name.items() if tensor.dtype in FLOAT8[:2]]
        remaining = [tensor for tensor in new_tensors if not tensor.dropped]
        reasons = {tensor.name: _left_out(tensor, scale_names, matrices) for tensor in remaining}
        return [
            replace(t, dropped=reasons[t.name]) if reasons.get(t.name) else t for t in new_tensors
        ]

    def _check_integers(self, tensors_by_name: Mapping[str, Tensor]) -> None:
        """Refuse matrices of integers that have factors beside them. Raises CheckpointError."""
        types = {name: (tensor.dtype, tensor.shape) for name, tensor in tensors_by_name.items()}
        for name, factor in find_quantized(types).items():
            module = name.rpartition(".")[0]
            if self._touched is None or module in self._touched:
                scheme = f"{self._scheme}: " if self._scheme else ""
                remedy = "leave out --dtype; a copy is exact"
                if self._asked != "--dtype":
                    remedy = "convert the model that was not quantized"
                raise CheckpointError(
                    f"{name!r} is quantized ({scheme}{types[name][0]} with {factor!r}), "
                    f"and {self._asked} would change the numbers that it stands for",
                    remedy,
                )

    def _factors_of(self, matrix: Tensor, tensors_by_name: Mapping[str, Tensor]) -> Tensor:
        """Return the one tensor of factors of a matrix. Raises CheckpointError."""
        stem = matrix.name.removesuffix("weight")
        names = [
            f"{matrix.name}_scale_inv",
            f"{matrix.name}_scale",
            f"{stem}scale",
            f"{stem}scale_inv",
        ]
        scales = [tensors_by_name[name] for name in dict.fromkeys(names) if name in tensors_by_name]
        if len(scales) == 1:
            return scales[0]
        count = "no" if not scales else f"{len(scales)} tensors of"
        raise CheckpointError(
            f"{matrix.name!r} is {matrix.dtype}, and there are {count} factors by which it becomes "
            f"a number ({' or '.join(repr(tensor.name) for tensor in scales) or repr(names[0])})",
            "leave out --dtype and --map to carry it as it is",
        )

    def _with_factors(self, matrix: Tensor, scales: Tensor) -> Tensor:
        block = self._block_of(matrix, scales)
        if block is None or scales.dtype not in _FACTOR_TYPES:
            want = [-(-n // size) for n, size in zip(matrix.shape, self._block)]
            raise CheckpointError(
                f"{scales.name!r} is {scales.dtype} {list(scales.shape)}, and {matrix.name!r} has "
                f"shape {list(matrix.shape)}: expected {want}, a factor for each row, or one",
                details=f"blocks are of {list(self._block)}; factors Float32, BFloat16 or F8_E8M0",
            )
        (source,) = matrix.sources
        step = BlockScale(scales.sources[0].name, block)
        scaled_source = SourceTensor(source.name, source.src_dtype, source.shape, step, RESULT)
        return replace(matrix, dtype=RESULT, sources=(scaled_source,))

    def _block_of(self, matrix: Tensor, scales: Tensor) -> tuple[int, int] | None:
        """Return the rows and columns that share a factor, by the factors' shape; None if none."""
        if len(matrix.shape) != 2:
            return None
        rows, columns = matrix.shape
        if scales.shape == tuple(-(-n // size) for n, size in zip(matrix.shape, self._block)):
            return self._block
        if scales.shape in ((rows,), (rows, 1)):
            return 1, columns
        return (rows, columns) if scales.shape in ((), (1,), (1, 1)) else None


def _left_out(tensor: Tensor, scale_names: set[str], matrices: Sequence[str]) -> str:
    """Return why a tensor is left out where matrices become numbers, "" if it is not.

    A factor of activations is one number in a module that has 8-bit `matrices`.
    """
    if tensor.name in scale_names:
        return APPLIED
    if prod(tensor.shape) != 1 or not _ACTIVATION().fullmatch(tensor.name):
        return ""
    module = tensor.name.rpartition(".")[0] + "."
    return OF_ACTIVATIONS if any(name.startswith(module) for name in matrices) else ""


def read(context: OperationContext) -> tuple[tuple[int, int], str]:
    """Return the rows and columns of a block, and what the configuration calls the quantization."""
    config, label = context.config or ({}, "")
    quantization = config.get("quantization_config")
    entries = quantization if isinstance(quantization, dict) else {}
    scheme, experts = str(entries.get("quant_method") or ""), config.get("expert_dtype")
    if scheme and isinstance(experts, str):
        scheme += f", experts {experts}"
    size = entries.get("weight_block_size")
    if size is None:
        return DEFAULT_BLOCK, scheme
    good = isinstance(size, list) and len(size) == 2 and all(type(n) is int for n in size)
    if not good or not all(0 < n < _MOST_BLOCK for n in size):
        raise UsageError(f"weight_block_size is {size!r}; expected two numbers", where=label)
    return (size[0], size[1]), scheme


def make(options: Mapping[str, Any]) -> ModelOperation:
    """Return the operation, where another type, another naming or an adapter is asked for."""
    block, scheme = options["inputs"]["dequantize"]
    option = next(name for name in ("dtype", "map", "lora") if options[name] is not None)
    touched = None
    if option == "lora":  # which changes the modules that it is for, and no others
        names = options["inputs"]["lora"].shapes
        modules = (_FACTOR_OF_ADAPTER().search(name) for name in names or ())
        touched = frozenset(match[1] for match in modules if match) if names else None
    return DequantizeOperation(
        block, applies=option != "lora", option=f"--{option}", scheme=scheme, touched=touched
    )
