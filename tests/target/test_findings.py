"""What is hardly a weight is told before it is written."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

import rankxform
from tests import reference
from tests.reported import convert, dst, made, same, tensors

__all__ = ["dst", "made"]


UNUSUAL = {
    "compiled": ({"_orig_mod.l.w": (2, 2), "_orig_mod.l.b": (2,)}, r"'_orig_mod\.='"),
    "parallel": ({"module.l.w": (2, 2), "module.l.b": (2,)}, r"'^module\.='"),
    "peft": ({"base_model.model.l.w": (2, 2)}, r"'^base_model\.model\.='"),
    "layers": ({"l.base_layer.w": (2, 2), "l.lora_A.w": (1, 2)}, "is not merged"),
    "flat": ({"l._flat_param": (8,), "b": (2,)}, "in one row"),
    "empty": ({"a": (0,), "b": (0,), "norm": (2,)}, "ZeRO-3"),
}


@pytest.mark.parametrize("kind", UNUSUAL)
def test_what_is_hardly_a_weight_is_told_with_what_mends_it(kind, tmp_path, dst):
    shapes, text = UNUSUAL[kind]
    (tmp_path / "src").mkdir()
    arrays = {n: np.ones(s, "f4") for n, s in shapes.items()}
    save_file(arrays, tmp_path / "src" / "model.safetensors")
    with pytest.warns(rankxform.RankxformWarning) as told:
        same(convert(tmp_path / "src", dst)[1], arrays)
    assert len(told) == 1 and text in str(told[0].message)
    rows = rankxform.check(tmp_path / "src").rows
    assert [one.text for one in rows if one.check == "tensors"] == [str(told[0].message)]
    if "--rename" in str(told[0].message):
        rule = str(told[0].message).rpartition("'")[0].rpartition("'")[2]
        assert {*convert(tmp_path / "src", dst, rename=(rule,))[1]} <= {"l.w", "l.b"}


def test_matrices_that_were_not_gathered(made, dst):
    src = made("zero3_empty") / "checkpoint-10"
    with pytest.warns(
        rankxform.RankxformWarning, match=r"13 of 14 weights are empty.*zero_to_fp32"
    ):
        same(convert(src, dst)[1], tensors(src))


def test_values_that_are_no_numbers_are_seen_in_samples(tmp_path, dst):
    params = {f"w{i}": ((32, 32), "Float32") for i in range(2)}
    rows = [dict.fromkeys(params, ([2], [0, -1], 0, 0))]

    def make(name, shape, dtype):
        found = np.random.default_rng(len(name)).uniform(1, 2, shape).astype("<f4")
        found[20:, :] = np.nan if name == "w1" else 3
        return found.view("<u4")

    reference.write_checkpoint(tmp_path / "src", rows, params, make=make)
    a = reference.write_strategy(tmp_path / "a.ckpt", rows)
    with pytest.warns(rankxform.RankxformWarning, match=r"w1 hold values that are"):
        convert(tmp_path / "src", dst, a)
