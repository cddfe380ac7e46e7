"""Adapters whose formula is not the usual one: obeyed, or refused."""

from __future__ import annotations

import json
from contextlib import nullcontext

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference, reference_forms
from tests.reference_values import adapter_of, values, words


def whole(folder):
    return reference_forms.read_huggingface(folder)


def test_what_is_not_known_of_an_adapter_is_refused(tmp_path):
    bits = np.random.default_rng(1)
    base = {"m.weight": ("Float32", words(bits.normal(0, 1, (4, 6)), "Float32"))}
    src = reference_forms.write_huggingface(tmp_path / "src", base)
    lora = adapter_of("peft", {"m": (4, 6)}, "Float32", 2, bits)

    def refused(stated, arrays=lora, **options):
        folder = tmp_path / f"lora{len(list(tmp_path.iterdir()))}"
        tensors = {n: ("Float32", a) for n, a in arrays.items()}
        reference.write_safetensors(folder / "adapter_model.safetensors", tensors)
        if stated is not None:
            full = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} | stated
            (folder / "adapter_config.json").write_text(json.dumps(full))
        with pytest.raises(RankxformError) as caught:
            rankxform.transform(src, tmp_path / "dst", lora=str(folder), **options)
        assert not (tmp_path / "dst").exists()
        return str(caught.value)

    assert "give --lora-alpha and --lora-rank" in refused(None)
    assert "give --lora-alpha and --lora-rank" in refused(None, lora_alpha=3.0)
    assert "leave out --lora-rank" in refused({}, lora_rank=2)
    assert "use_dora is True" in refused({"use_dora": True})
    assert "modules_to_save names 'head'" in refused({"modules_to_save": ["head"]})
    assert "init_lora_weights is 'pissa'" in refused({"init_lora_weights": "pissa"})
    assert "with rank 3" in refused({"r": 3})
    assert "with rank 3" in refused({"rank_pattern": {"m": 3}})
    wide = adapter_of("peft", {"m": (4, 7)}, "Float32", 2, bits)
    assert "has shape [4, 6]" in refused({}, wide)
    other = adapter_of("peft", {"other": (4, 6)}, "Float32", 2, bits)
    assert "is for 'other.weight'" in refused({}, other)
    half = {n: a for n, a in lora.items() if "lora_A" in n}
    assert "and no 'base_model.model.m.lora_B.weight'" in refused({}, half)


def write_pair(tmp_path, factor=1.0):
    """Write matrices `m.weight` and `n`, and an adapter of the first."""
    bits = np.random.default_rng(1)
    base = {n: ("Float32", words(bits.normal(0, 1, (4, 6)), "Float32")) for n in ("m.weight", "n")}
    adapter = {
        name: ("Float32", words(factor * values(array, "Float32"), "Float32"))
        for name, array in adapter_of("peft", {"m": (4, 6)}, "Float32", 2, bits).items()
    }
    reference.write_safetensors(tmp_path / "lora/adapter_model.safetensors", adapter)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4}
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
    return reference_forms.write_huggingface(tmp_path / "src", base)


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({}, "; look at its values, and at what is added to them"),
        ({"dtype": "fp16"}, "; --dtype bf16, or --dtype fp32, or --keep-dtype m.weight"),
    ],
)
def test_what_helps_where_a_sum_would_become_infinite(options, ending, tmp_path):
    src = write_pair(tmp_path, 1e30)
    with pytest.raises(RankxformError, match="largest") as caught:
        rankxform.transform(src, tmp_path / "dst", lora=tmp_path / "lora", **options)
    assert str(caught.value).split("\n")[0].endswith(ending)


def test_an_adapter_of_what_is_left_out_is_added_to_nothing(tmp_path):
    src = write_pair(tmp_path)
    with pytest.warns(rankxform.RankxformWarning, match="added to none of the parameters"):
        report = rankxform.transform(src, tmp_path / "dst", lora=tmp_path / "lora", exclude="^m")
    assert not any("added to 1" in notice for notice in report.notices)


@pytest.mark.parametrize("stated", [{"use_rslora": True}, {"alpha_pattern": {"m": 8}},
                                    {"fan_in_fan_out": True}])  # fmt: skip
def test_what_changes_the_formula_is_obeyed(stated, tmp_path):
    bits, turned = np.random.default_rng(5), "fan_in_fan_out" in stated
    array = words(bits.normal(0, 1, (6, 4) if turned else (4, 6)), "Float32")
    src = reference_forms.write_huggingface(tmp_path / "src", {"m.weight": ("Float32", array)})
    lora = adapter_of("peft", {"m": (4, 6)}, "Float32", 2, bits)
    folder = tmp_path / "lora"
    tensors = {n: ("Float32", a) for n, a in lora.items()}
    reference.write_safetensors(folder / "adapter_model.safetensors", tensors)
    full = {"peft_type": "LORA", "r": 2, "lora_alpha": 4} | stated
    (folder / "adapter_config.json").write_text(json.dumps(full))
    rankxform.transform(src, tmp_path / "dst", lora=str(folder), dst_form="huggingface")
    scale = 8 / 2 if "alpha_pattern" in stated else 4 / 2**0.5 if "use_rslora" in stated else 2
    a, b = (values(lora[f"base_model.model.m.lora_{x}.weight"], "Float32") for x in "AB")
    product = scale * (b @ a)
    want = values(array, "Float32") + (product.T if turned else product)
    have = values(whole(tmp_path / "dst")["m.weight"][1], "Float32")
    assert np.allclose(have, want, rtol=2**-23, atol=0)


@pytest.mark.parametrize(
    ("text", "is_quick"),
    [
        ("q_proj", True), (r"layers\.\d+\.(q|v)_proj", True), (r".*\.(0|1)\..*", True), ("[a-z(+)]+", True),
        (r"((\w+\.?)+)+#", False), ("(a|a)*b", False), ("(a*)*", False), ("(a{1,9}){1,9}", False),
        (".*.*.*.*.*x", False), ("((a|a))*b", False), ("(a?){30}b", False), ("a?" * 30 + "a" * 30, False),
        (r".*\.layers\.\d+\.mlp\.experts\.\d+\..*", True),
    ],
)  # fmt: skip
def test_an_expression_of_a_download_is_quick(text, is_quick, tmp_path):
    src = write_pair(tmp_path)
    path = tmp_path / "lora/adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "alpha_pattern": {text: 4}}))
    met = (
        pytest.warns(rankxform.RankxformWarning, match="no pair")
        if text != "[a-z(+)]+"
        else nullcontext()
    )
    with met if is_quick else pytest.raises(RankxformError, match="may take too long"):
        rankxform.transform(src, tmp_path / "dst", lora=str(tmp_path / "lora"), fsync=False)
