"""Conversions between element types: every 16-bit value, and a million others."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from rankxform.engine.cast import cast_function, transport_dtype, word_type
from rankxform.errors import CheckpointError, RequestError

DATA = Path(__file__).parents[1] / "data" / "formats"
WORDS = np.arange(1 << 16).astype("<u2")


def converted(src, dst, values):
    """Return values of one type in another, by numpy's type for moving them."""
    found = np.empty(values.shape, transport_dtype(dst))
    cast_function(src, dst)(found, values)
    return found


def test_casts_are_mindspores():
    vectors = json.loads((DATA / "cast_vectors.json").read_text())
    bits = np.array([int(text, 16) for text in vectors["float32_bits"]], "<u4")
    for dtype, key in (("BFloat16", "bfloat16_bits"), ("Float16", "float16_bits")):
        found = np.empty(bits.shape, word_type(dtype))
        cast_function("Float32", dtype)(found, bits.view("<f4"))
        assert [f"{word:04x}" for word in found.view("<u2")] == vectors[key]


def test_casts_of_a_million_random_patterns():
    bits = np.random.default_rng(1).integers(0, 1 << 32, 1_000_000).astype("<u4")
    values = bits.view("<f4")
    nan = np.isnan(values)
    found = np.empty(bits.shape, "<u2")
    cast_function("Float32", "BFloat16")(found, values)
    wide = bits.astype("u8")
    nearest = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2")
    assert np.array_equal(found, np.where(nan, 0x7FC0, nearest))
    back = np.empty(bits.shape, "<f4")
    cast_function("BFloat16", "Float32")(back, found)
    assert np.array_equal(back.view("<u4")[~nan], found[~nan].astype("<u4") << 16)
    assert (back.view("<u4")[nan] == 0x7FC00000).all()
    half = np.empty(bits.shape, "<f2")
    cast_function("Float32", "Float16")(half, values)
    assert (half.view("<u2")[nan] == np.where(bits[nan] >> 31, 0xFE00, 0x7E00)).all()
    some = ~nan & (np.abs(values) < 65520)
    error = np.abs(half[some].astype("<f8") - values[some])
    assert (error <= np.maximum(2.0**-25, np.abs(values[some].astype("<f8")) * 2.0**-11)).all()
    again = np.empty(bits.shape, "<u2")
    cast_function("Float16", "BFloat16")(again, half)
    once = np.empty(bits.shape, "<u2")
    cast_function("Float32", "BFloat16")(once, half.astype("<f4"))
    assert np.array_equal(again, once)


def test_integers_are_never_made_of_what_they_cannot_hold():
    into = np.empty(2, "<i4")
    cast_function("Float32", "Int32")(into, np.array([-3.7, 2.0], "<f4"))
    assert into.tolist() == [-3, 2]
    for bad in (2.0**31, np.nan, np.inf):
        with pytest.raises(CheckpointError, match="is no value of Int32"):
            cast_function("Float32", "Int32")(into, np.array([0, bad], "<f4"))


def test_every_bfloat16():
    exact = (WORDS.astype("<u4") << 16).view("<f4")
    nan = np.isnan(exact)
    single = converted("BFloat16", "Float32", WORDS).view("<u4")
    assert np.array_equal(single, np.where(nan, 0x7FC00000, exact.view("<u4")))
    assert np.array_equal(converted("Float32", "BFloat16", exact), np.where(nan, 0x7FC0, WORDS))
    double = converted("BFloat16", "Float64", WORDS)
    assert np.array_equal(double[~nan], exact[~nan].astype("<f8"))
    assert (double[nan].view("<u8") == 0x7FF8 << 48).all()
    assert np.array_equal(converted("Float64", "BFloat16", double), np.where(nan, 0x7FC0, WORDS))
    with np.errstate(over="ignore", invalid="ignore"):
        half = exact.astype("<f2").view("<u2")
    found = converted("BFloat16", "Float16", WORDS).view("<u2")
    assert np.array_equal(found, np.where(nan, 0x7E00, half))


def test_every_float16():
    values = WORDS.view("<f2")
    nan = np.isnan(values)
    with np.errstate(invalid="ignore"):
        wide = values.astype("<f4").view("<u4").astype("<u8")
    nearest = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).astype("<u2")
    found = converted("Float16", "BFloat16", values)
    assert np.array_equal(found, np.where(nan, 0x7FC0, nearest))


def test_doubles_are_rounded_to_single_precision_first():
    """As MindSpore does: 1 + 2^-8 + 2^-40 is above a tie of BFloat16, and a tie as Float32."""
    values = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40, 1e39, -1e-50])
    found = converted("Float64", "BFloat16", values)
    assert [hex(word) for word in found] == ["0x3f80", "0x3f82", "0x7f80", "0x8000"]


@pytest.mark.parametrize("src", ["Float32", "Float16", "BFloat16"])
@pytest.mark.parametrize("dst", ["Float32", "Float16", "BFloat16", "Float64"])
def test_arrays_need_not_be_contiguous(src, dst):
    words = np.random.default_rng(2).normal(size=(6, 10, 14)).astype("<f4")
    source = words if src == "Float32" else converted("Float32", src, words)
    whole = source.copy() if src == dst else converted(src, dst, source)
    target = np.zeros((14, 10, 12), transport_dtype(dst))
    cast_function(src, dst)(target[1::2, ::3, :6].T, source[:, ::3, 1::2])
    assert np.array_equal(target[1::2, ::3, :6].T, whole[:, ::3, 1::2])
    assert not target[::2].any() and not target[:, :, 6:].any()
    scalar = np.zeros((), transport_dtype(dst))
    cast_function(src, dst)(scalar, source[1, 2, 3].reshape(()))
    assert scalar == whole[1, 2, 3]
    cast_function(src, dst)(target[:0], source[:0, :, :1].T[:0, :, :0].reshape(0, 10, 12))


@pytest.mark.parametrize("dtype", ["F8_E4M3", "F8_E5M2", "F8_E8M0"])
def test_every_float8(dtype):
    """By the definitions of the formats, in exact arithmetic."""
    codes = np.arange(256).astype("u1")
    found = converted(dtype, "Float64", codes)
    for code, value in enumerate(found.tolist()):
        if dtype == "F8_E8M0":
            wanted = float("nan") if code == 255 else 2.0 ** (code - 127)
        else:
            width, bias = (3, 7) if dtype == "F8_E4M3" else (2, 15)
            exponent, mantissa = (code & 0x7F) >> width, code % 2**width
            wanted = (mantissa + (exponent > 0) * 2**width) * 2.0 ** (
                max(1, exponent) - bias - width
            )
            if dtype == "F8_E4M3":
                wanted = float("nan") if code & 0x7F == 0x7F else wanted
            elif exponent == 31:
                wanted = float("nan") if mantissa else float("inf")
            wanted = -wanted if code >> 7 else wanted
        assert value == wanted or (np.isnan(value) and np.isnan(wanted)), code


def test_types_without_values():
    with pytest.raises(RequestError, match="is not converted to BFloat16"):
        cast_function("Int32", "BFloat16")
    with pytest.raises(RequestError, match="cannot be converted"):
        cast_function("Int4", "Float32")


def test_integers_of_bfloat16():
    words = np.array([3.75, -2.0, 65280.0]).astype(ml_dtypes.bfloat16).view("<u2")
    assert converted("BFloat16", "Int32", words).tolist() == [3, -2, 65280]
    with pytest.raises(CheckpointError, match="is no value of Int8"):
        converted("BFloat16", "Int8", words)
