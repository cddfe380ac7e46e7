"""Values changed from one element type to another, as MindSpore changes them.

Between floating types a value is rounded to the nearest, ties to even; beyond the largest it
becomes infinite; subnormal values are kept. A NaN becomes the type's quiet NaN: of BFloat16 always
0x7fc0, of Float16 0x7e00 with its sign (MindSpore 2.10, `Tensor.astype` on a CPU). BFloat16 needs
no other package: its values are handled as 16-bit words.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rankxform.errors import CheckpointError, RequestError
from rankxform.formats.container import FLOAT8, FLOATS, NOT_MINDSPORES, TEXT

if TYPE_CHECKING:
    from .schedule import Words

    CastFunction = Callable[[Words, Words], None]
    """Writes the values of the second array into the first, of the same shape."""

FLOAT16, BFLOAT16, EXACT = "Float16", "BFloat16", "Float64"
"""Types of 16 bits, and the one in which steps work, which has all others' values."""

_NUMPY = {
    "Bool": "?",
    "Int8": "i1",
    "UInt8": "u1",
    "Int16": "<i2",
    "UInt16": "<u2",
    "Int32": "<i4",
    "UInt32": "<u4",
    "Int64": "<i8",
    "UInt64": "<u8",
    "Float16": "<f2",
    "BFloat16": "<u2",
    "Float32": "<f4",
    "Float64": "<f8",
    "Int4": "i1",
    **dict.fromkeys(NOT_MINDSPORES, "u1"),
}

_BLOCK = 1 << 16
"""Elements at a time, which stay in the cache from one step to the next."""

_SQUARE = 128
"""Rows and columns of a square that stays in the cache."""

_1, _16, _HALF = np.uint32(1), np.uint32(16), np.uint32(0x7FFF)
_QUIET_NAN = np.uint16(0x7FC0)
_HALF_NAN, _HALF_SIGN = np.uint16(0x7E00), np.uint16(0x8000)
_UNSIGNED = np.uint16(0x7FFF)
_INFINITE, _HALF_INFINITE = np.uint16(0x7F80), np.uint16(0x7C00)


def transport_dtype(dtype: str) -> np.dtype[Any]:
    """Return the numpy type in which elements are moved; words, of those numpy does not know."""
    return np.dtype(_NUMPY[dtype])


def word_type(dtype: str) -> np.dtype[Any]:
    """Return the type of `transport_dtype` where values are known: of BFloat16 its words.

    Raises RequestError where they are not: of Int4, texts, and F8.
    """
    if dtype in ("Int4", TEXT, *NOT_MINDSPORES):
        raise RequestError(f"{dtype} cannot be converted to another type, nor another type to it")
    return transport_dtype(dtype)


@cache
def cast_function(src: str, dst: str) -> CastFunction:
    """Return what converts arrays of one type to another. Raises RequestError.

    The arrays have the types that `word_type` names; they need not be contiguous.
    """
    if src in FLOAT8 and dst == EXACT:
        return _from_table(src)
    source = word_type(src)
    if src == "BFloat16" and dst == "BFloat16":
        return _copy
    if src == "BFloat16":
        return _in_blocks(_from_bfloat16, np.dtype("<f4"), then=_plain(np.dtype("<f4"), dst, src))
    if dst == "BFloat16":
        if src not in FLOATS:
            raise RequestError(f"{src} is not converted to BFloat16: neither holds the other")
        return _in_blocks(_to_bfloat16, np.dtype("<u2"), first=np.dtype("<f4"))
    return _plain(source, dst, src)


def blockwise(convert: CastFunction | None) -> CastFunction:
    """Return a conversion (None: a copy) that is fast where the axes of an array are exchanged.

    Squares of the two last axes are first copied into the cache as they lie in memory.
    """

    def convert_blocks(dst_words: Words, src_words: Words) -> None:
        inner = src_words.ndim >= 2 and min(src_words.shape[-2:]) > 1
        if inner and abs(src_words.strides[-2]) < abs(src_words.strides[-1]):
            if src_words.ndim > 2:
                for dst_row, src_row in zip(dst_words, src_words):
                    convert_blocks(dst_row, src_row)
                return
            rows, columns = src_words.shape
            for i in range(0, rows, _SQUARE):
                for j in range(0, columns, _SQUARE):
                    part = src_words[i : i + _SQUARE, j : j + _SQUARE]
                    square = np.ascontiguousarray(part.T).T
                    (convert or _copy)(dst_words[i : i + _SQUARE, j : j + _SQUARE], square)
        elif convert:
            convert(dst_words, src_words)
        else:
            dst_words[...] = src_words

    return convert_blocks


def _copy(dst_words: Words, src_words: Words) -> None:
    dst_words[...] = src_words


def _plain(source: np.dtype[Any], dst: str, src: str) -> CastFunction:
    """Return the conversion between two types that numpy knows."""
    target = word_type(dst)
    if target == source:
        return _copy
    if source.kind == "f" and dst == FLOAT16:
        return _in_blocks(_to_half, target)
    if source.kind == "f" and target.kind in "iu":
        return lambda dst_words, src_words: _to_integer(dst_words, src_words, src, dst)
    return _copy_values


def _copy_values(dst_words: Words, src_words: Words) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        dst_words[...] = src_words


def _in_blocks(
    convert: Callable[[Words, Words, Words], None],
    result: np.dtype[Any],
    first: np.dtype[Any] | None = None,
    then: CastFunction = _copy,
) -> CastFunction:
    """Return what applies `convert` to contiguous blocks: from type `first`, to type `result`.

    It is given room for as many 32-bit words as there are elements in the block.
    """

    def convert_blocks(dst_words: Words, src_words: Words) -> None:
        if dst_words.flags.c_contiguous and src_words.flags.c_contiguous:
            dst_words, src_words = dst_words.reshape(-1), src_words.reshape(-1)
        elif dst_words.ndim > 1 and dst_words[0].size * 2 > _BLOCK:
            for dst_row, src_row in zip(dst_words, src_words):
                convert_blocks(dst_row, src_row)
            return
        rows = max(1, _BLOCK // max(1, dst_words[:1].size)) if dst_words.ndim else 1
        if not dst_words.ndim:
            dst_words, src_words = dst_words.reshape(1), src_words.reshape(1)
        room = np.empty(min(dst_words.size, max(_BLOCK, rows * dst_words[:1].size)), "<u4")
        for first_row in range(0, len(dst_words), rows):
            part = src_words[first_row : first_row + rows]
            with np.errstate(over="ignore", invalid="ignore"):
                block = np.ascontiguousarray(part, dtype=first or part.dtype)
            target = dst_words[first_row : first_row + rows]
            if target.flags.c_contiguous and target.dtype == result:
                convert(target.reshape(-1), block.reshape(-1), room[: block.size])
            else:
                cast_block = np.empty(block.shape, result)
                convert(cast_block.reshape(-1), block.reshape(-1), room[: block.size])
                then(target, cast_block)

    return convert_blocks


def _to_bfloat16(dst_words: Words, src_words: Words, room: Words) -> None:
    """Round Float32 to its upper half, to nearest even."""
    bits = src_words.view("<u4")
    np.right_shift(bits, _16, out=room)
    np.bitwise_and(room, _1, out=room)
    np.add(room, _HALF, out=room)
    np.add(room, bits, out=room)  # a NaN may overflow; it is put right below
    np.right_shift(room, _16, out=room)
    np.copyto(dst_words, room, casting="unsafe")
    if _has_nan(src_words):
        dst_words[src_words != src_words] = _QUIET_NAN


def _from_bfloat16(dst_words: Words, src_words: Words, room: Words) -> None:
    bits = dst_words.view("<u4")
    np.copyto(bits, src_words)
    np.left_shift(bits, _16, out=bits)
    if _has_nan(dst_words):
        bits[dst_words != dst_words] = np.uint32(0x7FC00000)


def _has_nan(values: Words) -> bool:
    """Tell whether there is a NaN: the maximum is one then."""
    return bool(values.size and np.isnan(values.max()))


def _from_table(dtype: str) -> CastFunction:
    """Return the conversion of 8-bit floats, each of which is looked up."""
    values = _float8_values(dtype)

    def convert(dst_words: Words, src_words: Words) -> None:
        dst_words[...] = values[src_words]

    return convert


@cache
def _float8_values(dtype: str) -> Any:
    """Return the values of all 256 codes of an 8-bit float.

    E4M3 has no infinity, E5M2 has, and E8M0 is a power of two without sign. Micikevicius et al.,
    FP8 Formats for Deep Learning, 2022; OCP Microscaling Formats 1.0, 2023.
    """
    bits = np.arange(256)
    if dtype == "F8_E8M0":
        return np.where(bits == 255, np.nan, 2.0 ** (bits - 127.0))
    width, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
    steps = 2**width
    exponent, mantissa = (bits & 0x7F) >> width, bits % steps
    values = np.where(
        exponent == 0,
        mantissa / steps * 2.0 ** (1 - bias),
        (1 + mantissa / steps) * 2.0 ** (exponent - float(bias)),
    )
    if dtype == "F8_E4M3":
        values[(bits & 0x7F) == 0x7F] = np.nan
    else:
        values[exponent == 31] = np.where(mantissa[exponent == 31] == 0, np.inf, np.nan)
    return np.where(bits >> 7, -values, values)


def _to_half(dst_words: Words, src_words: Words, room: Words) -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        np.copyto(dst_words, src_words, casting="unsafe")
    if _has_nan(src_words):
        wrong = src_words != src_words
        sign = np.where(np.signbit(src_words[wrong]), _HALF_SIGN, np.uint16(0))
        dst_words.view("<u2")[wrong] = sign | _HALF_NAN


def not_finite(words: Words, dtype: str) -> Words | None:
    """Return where values of a floating type are infinite or NaN; None if none is."""
    if dtype in (FLOAT16, BFLOAT16):
        infinity_bits = _HALF_INFINITE if dtype == FLOAT16 else _INFINITE
        mask = (words.view("<u2") & _UNSIGNED) >= infinity_bits
    else:
        mask = ~np.isfinite(words)
    return mask if mask.any() else None


def became_infinite(dst_words: Words, src_words: Words, wrong: Words, dtype: str) -> bool:
    """Tell whether a value is infinite that was finite (`src_words`, before the change).

    wrong: where values of `dst_words`, of type `dtype`, are not finite.
    """
    dst_values, src_values = dst_words[wrong], src_words[wrong]
    if dtype in (FLOAT16, BFLOAT16):
        endless = (dst_values.view("<u2") & _UNSIGNED) == (
            _HALF_INFINITE if dtype == FLOAT16 else _INFINITE
        )
    else:
        endless = np.isinf(dst_values)
    if src_values.dtype == "<u2":  # BFloat16
        return bool((endless & ((src_values & _UNSIGNED) < _INFINITE)).any())
    return bool((endless & np.isfinite(src_values)).any())


def _to_integer(dst_words: Words, src_words: Words, src: str, dst: str) -> None:
    """Truncate, where every value has one in the type. Raises CheckpointError."""
    limits = np.iinfo(dst_words.dtype)
    with np.errstate(invalid="ignore"):
        truncated = np.trunc(src_words)
        top = float(limits.max) + 1.0  # exact: a power of two
        good = (truncated >= float(limits.min)) & (truncated < top)
    if not good.all():
        value = src_words[~good].flat[0]
        raise CheckpointError(f"{src} {value!r} is no value of {dst}", "leave the type as it is")
    dst_words[...] = truncated
