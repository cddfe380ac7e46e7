"""MindSpore's own conversions between floating types, of every 16-bit value and a million others."""

from __future__ import annotations

import numpy as np
import pytest

from rankxform.engine.cast import cast_function, transport_dtype

pytestmark = pytest.mark.oracle

WORDS = np.arange(1 << 16).astype("<u2")
PATTERNS = np.random.default_rng(3).integers(0, 1 << 32, 1_000_000).astype("<u4")
KINDS = {"Float16": "float16", "BFloat16": "bfloat16", "Float32": "float32"}


@pytest.mark.parametrize(
    ("src", "dst"),
    [("Float32", "BFloat16"), ("Float32", "Float16"), ("BFloat16", "Float32"),
     ("BFloat16", "Float16"), ("Float16", "BFloat16"), ("Float16", "Float32")],
)  # fmt: skip
def test_a_value_becomes_what_it_becomes_in_mindspore(src, dst):
    import mindspore

    words = PATTERNS if src == "Float32" else WORDS
    tensor = mindspore.Tensor.from_numpy(words.view("<f4" if src == "Float32" else "<f2").copy())
    if src == "BFloat16":  # which has no array: each value is exact in Float32
        single = (WORDS.astype("<u4") << 16).view("<f4")
        tensor = mindspore.Tensor.from_numpy(single).astype(mindspore.bfloat16)
    made = tensor.astype(getattr(mindspore, KINDS[dst])).get_bytes()
    theirs = np.frombuffer(made, "<u4" if dst == "Float32" else "<u2")
    ours = np.empty(words.shape, transport_dtype(dst))
    cast_function(src, dst)(ours, words.view(transport_dtype(src)))
    assert np.array_equal(ours.view(theirs.dtype), theirs)
