"""Values of floating types, rounded and added up in exact arithmetic; nothing of the package."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

WORDS = {"Float32": "<u4", "BFloat16": "<u2", "Float16": "<u2", "F8_E4M3": "u1"}
MANTISSA = {"Float32": 23, "BFloat16": 7, "Float16": 10}
LEAST = {"Float32": -126, "BFloat16": -126, "Float16": -14}


def values(words, dtype):
    """Return words as float64."""
    if dtype == "BFloat16":
        return (words.astype("<u4") << 16).view("<f4").astype(float)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        return words.view({"Float32": "<f4", "Float16": "<f2"}[dtype]).astype(float)


def words(array, dtype):
    """Round float32 values to a type, as MindSpore does, by another way than the package."""
    array = np.asarray(array, "<f4")
    if dtype == "Float32":
        return array.view("<u4")
    if dtype == "Float16":
        with np.errstate(over="ignore"):
            return array.astype("<f2").view("<u2")
    found = np.empty(array.shape, "<u2")
    for index, one in np.ndenumerate(array):
        bits = int(one.view("<u4"))
        low, high = bits & 0xFFFF, bits >> 16
        found[index] = 0x7FC0 if np.isnan(one) else high + (low > 0x8000 - (high & 1))
    return found


def ulp(value, dtype):
    """Return the distance of the values of a type around `value`."""
    exponent = np.maximum(np.floor(np.log2(np.maximum(np.abs(value), 1e-300))), LEAST[dtype])
    return 2.0 ** (exponent - MANTISSA[dtype])


FAMILIES = {
    "mindpet": (".mindpet_delta_lora_a", ".mindpet_delta_lora_b", ""),
    "mcore": (".lora_A.weight", ".lora_B.weight", ""),
    "pynative": (".lora_a", ".lora_b", ""),
    "peft": (".lora_A.weight", ".lora_B.weight", "base_model.model."),
}


def adapter_of(family, shapes, dtype, rank, bits):
    a_end, b_end, prefix = FAMILIES[family]
    arrays = {}
    for module, (rows, columns) in shapes.items():
        for end, shape in ((a_end, (rank, columns)), (b_end, (rows, rank))):
            arrays[prefix + module + end] = words(bits.normal(0, 0.3, shape), dtype)
    return arrays


def exactly(base, a, b, scale):
    """Return ``base + scale * (b @ a)`` in exact arithmetic, rounded to float64 once."""
    found = np.empty(base.shape)
    for (i, j), value in np.ndenumerate(base):
        total = sum(Fraction(float(x)) * Fraction(float(y)) for x, y in zip(b[i], a[:, j]))
        found[i, j] = float(Fraction(float(value)) + Fraction(scale) * total)
    return found
