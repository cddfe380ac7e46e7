"""Values changed from one element type to another, as MindSpore changes them.

Between floating types a value is rounded to the nearest, ties to even; beyond the largest it
becomes infinite; subnormal values are kept. A NaN becomes the type's quiet NaN: of BFloat16 always
0x7fc0, of Float16 0x7e00 with its sign (MindSpore 2.10, `Tensor.astype` on a CPU). numpy converts,
and `ml_dtypes` where it knows no such type: it keeps a NaN's sign and payload, so NaNs of BFloat16
are put right. Arrays of BFloat16 are of its 16-bit words.
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

    CastFunction = Callable[[Words, Words], bool]
    """Writes the values of the second array into the first, of the same shape. True: all that was
    written is finite; False: that is not known."""

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

_FLOAT8 = {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu"}
"""Names in `ml_dtypes`."""

_SQUARE = 128
"""Rows and columns of a square that stays in the cache."""

_QUIET_NAN = np.uint16(0x7FC0)
_HALF_NAN, _HALF_SIGN = np.uint16(0x7E00), np.uint16(0x8000)
_UNSIGNED = np.uint16(0x7FFF)
_SIGN, _INFINITE = 0x8000, 0x7F80
_INFINITE_BITS = {FLOAT16: 0x7C00, BFLOAT16: _INFINITE}


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
    if src == dst:
        return _copy
    if dst == BFLOAT16 and src not in FLOATS:
        raise RequestError(f"{src} is not converted to BFloat16: neither holds the other")
    if src == BFLOAT16 and dst not in FLOATS:
        return lambda dst_words, src_words: _to_integer(dst_words, _single(src_words), src, dst)
    if BFLOAT16 in (src, dst):
        return _to_bfloat16 if dst == BFLOAT16 else _from_bfloat16
    return _plain(source, dst, src)


def blockwise(convert: CastFunction | None) -> CastFunction:
    """Return a conversion (None: a copy) that is fast where the axes of an array are exchanged.

    Squares of the two last axes are first copied into the cache as they lie in memory.
    """

    def convert_blocks(dst_words: Words, src_words: Words) -> bool:
        inner = src_words.ndim >= 2 and min(src_words.shape[-2:]) > 1
        if inner and abs(src_words.strides[-2]) < abs(src_words.strides[-1]):
            is_finite = True
            if src_words.ndim > 2:
                for dst_row, src_row in zip(dst_words, src_words):
                    is_finite &= convert_blocks(dst_row, src_row)
                return is_finite
            rows, columns = src_words.shape
            room = np.empty((_SQUARE, _SQUARE), src_words.dtype)
            for i in range(0, rows, _SQUARE):
                for j in range(0, columns, _SQUARE):
                    part = src_words[i : i + _SQUARE, j : j + _SQUARE].T
                    square = room[: len(part), : part.shape[1]]
                    square[...] = part
                    dst_square = dst_words[i : i + _SQUARE, j : j + _SQUARE]
                    is_finite &= (convert or _copy)(dst_square, square.T)
            return is_finite
        return (convert or _copy)(dst_words, src_words)

    return convert_blocks


def _copy(dst_words: Words, src_words: Words) -> bool:
    dst_words[...] = src_words
    return False


def _plain(source: np.dtype[Any], dst: str, src: str) -> CastFunction:
    """Return the conversion between two types that numpy knows."""
    target = word_type(dst)
    if target == source:
        return _copy
    if source.kind == "f" and dst == FLOAT16:
        return _to_half
    if source.kind == "f" and target.kind in "iu":
        return lambda dst_words, src_words: _to_integer(dst_words, src_words, src, dst)
    return _copy_values


def _copy_values(dst_words: Words, src_words: Words) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        dst_words[...] = src_words
    return False


@cache
def bfloat16() -> np.dtype[Any]:
    """Return numpy's type of BFloat16 values; its package takes 5 ms to import."""
    import ml_dtypes

    brain: np.dtype[Any] = np.dtype(ml_dtypes.bfloat16)
    return brain


def _to_bfloat16(dst_words: Words, src_values: Words) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        dst_words.view(bfloat16())[...] = src_values
    if _is_finite(dst_words):
        return True
    dst_words[_is_nan(dst_words)] = _QUIET_NAN
    return False


def _from_bfloat16(dst_values: Words, src_words: Words) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        dst_values[...] = src_words.view(bfloat16())
    if _is_finite(src_words):
        return dst_values.dtype != np.float16  # whose largest value is smaller
    dst_values[_is_nan(src_words)] = np.nan
    return False


def _single(words: Words) -> Words:
    """Return BFloat16 values as Float32."""
    values = np.empty(words.shape, "<f4")
    _from_bfloat16(values, words)
    return values


def _is_finite(words: Words, dtype: str = BFLOAT16) -> bool:
    """Tell whether values of a type of 16 bits are finite; no array is made."""
    if not words.size:
        return True
    bits, signed, unsigned = _INFINITE_BITS[dtype], words.view("<i2"), words.view("<u2")
    return bool(signed.max() < bits and unsigned.max() < bits + _SIGN)


def _is_nan(words: Words) -> Words:
    is_nan: Words = (words & _UNSIGNED) > _INFINITE
    return is_nan


def _from_table(dtype: str) -> CastFunction:
    """Return the conversion of 8-bit floats, each of which is looked up.

    E4M3 has no infinity, E5M2 has, and E8M0 is a power of two without sign. Micikevicius et al.,
    FP8 Formats for Deep Learning, 2022; OCP Microscaling Formats 1.0, 2023.
    """
    import ml_dtypes

    codes = np.arange(256, dtype=np.uint8)
    values = codes.view(getattr(ml_dtypes, _FLOAT8[dtype])).astype(np.float64)

    def convert(dst_words: Words, src_words: Words) -> bool:
        dst_words[...] = values[src_words]
        return False

    return convert


def _to_half(dst_words: Words, src_words: Words) -> bool:
    with np.errstate(over="ignore", invalid="ignore"):
        dst_words[...] = src_words
    if _is_finite(dst_words, FLOAT16):
        return True
    wrong = src_words != src_words
    sign = np.where(np.signbit(src_words[wrong]), _HALF_SIGN, np.uint16(0))
    dst_words.view("<u2")[wrong] = sign | _HALF_NAN
    return False


def not_finite(words: Words, dtype: str) -> Words | None:
    """Return where values of a floating type are infinite or NaN; None if none is."""
    if dtype not in _INFINITE_BITS:
        is_finite = np.isfinite(words)
        return None if is_finite.all() else ~is_finite
    if _is_finite(words, dtype):
        return None
    wrong: Words = (words.view("<u2") & _UNSIGNED) >= _INFINITE_BITS[dtype]
    return wrong


def became_infinite(dst_words: Words, src_words: Words, wrong: Words, dtype: str) -> bool:
    """Tell whether a value is infinite that was finite (`src_words`, before the change).

    wrong: where values of `dst_words`, of type `dtype`, are not finite.
    """
    dst_values, src_values = dst_words[wrong], src_words[wrong]
    if dtype in _INFINITE_BITS:
        endless = (dst_values.view("<u2") & _UNSIGNED) == _INFINITE_BITS[dtype]
    else:
        endless = np.isinf(dst_values)
    if src_values.dtype == "<u2":  # BFloat16
        return bool((endless & ((src_values & _UNSIGNED) < _INFINITE)).any())
    return bool((endless & np.isfinite(src_values)).any())


def _to_integer(dst_words: Words, src_words: Words, src: str, dst: str) -> bool:
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
    return False
