"""How a map's choices are settled, by the checkpoint and by a reference."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError, UsageError
from tests import reference, reference_forms
from tests.operations.test_map import SAMPLES, arrays, near, written
from tests.reference_maps import Model

pytestmark = pytest.mark.filterwarnings("ignore:.*infinite or no numbers")


@pytest.mark.filterwarnings("ignore:.*resemble:rankxform.RankxformWarning")
@pytest.mark.parametrize("qkv", ["grouped", "contiguous"])
@pytest.mark.parametrize("gate_up", ["interleaved", "contiguous"])
def test_a_published_model_contradicts_how_tensors_are_said_to_be_joined(qkv, gate_up, tmp_path):
    bits, seed = np.random.default_rng(8), 0
    while True:  # with several groups of several heads
        model = Model("qwen3", seed, "BFloat16", qkv, gate_up)
        if model.config["num_key_value_heads"] > 1:
            break
        seed += 1
    published, trained = {}, {}
    for name, array in model.hf.items():
        published[name], trained[name] = near(array, 0.1, bits)
    model.hf.update(published)
    hub = written(model, tmp_path, "hf")
    (hub / "config.json").write_text(json.dumps(model.config))
    (hub / "tokenizer.json").write_text("{}")
    for layer in range(model.config["num_hidden_layers"]):
        p, q = f"model.layers.{layer}.", f"decoder.layers.{layer}."
        parts = [trained[f"{p}self_attn.{x}_proj.weight"] for x in "qkv"]
        model.mf[q + "self_attention.linear_qkv.weight"] = model.join_qkv(*parts)
        parts = [trained[f"{p}mlp.{x}_proj.weight"] for x in ("gate", "up")]
        model.mf[q + "mlp.linear_fc1.weight"] = model.join_gate_up(*parts)
    name = "decoder.final_layernorm.weight"
    model.mf["adam_m." + name] = model.mf[name]  # states have no other names, and are left out
    src = written(model, tmp_path)
    options = {
        "map": "qwen3", "like": str(hub), "dst_form": "huggingface", "weights_only": True,
        "accept": "contradictions:embed|o_proj|down|head",
    }  # fmt: skip
    wanted = {"qkv": qkv, "gate_up": gate_up}
    flags = [
        f"--{name.replace('_', '-')} {wanted[name]}"
        for name, usual in (("qkv", "grouped"), ("gate_up", "interleaved"))
        if wanted[name] != usual
    ]
    if flags:
        with pytest.raises(UsageError, match="and it was read as") as raised:
            rankxform.transform(src, tmp_path / "dst", **options)
        assert raised.value.tries == (" ".join(flags),)
        assert not (tmp_path / "dst").exists()
    options.update(wanted)
    rankxform.transform(src, tmp_path / "dst", **options)
    found = arrays(tmp_path / "dst", reference_forms.read_huggingface)
    for name in found:
        if "q_proj" in name or "gate_proj" in name:
            assert found[name].tobytes() == trained[name].tobytes()
    assert (tmp_path / "dst" / "tokenizer.json").read_text() == "{}"
    assert rankxform.verify(src, tmp_path / "dst", **options).same
    other = {"grouped": "contiguous", "contiguous": "grouped"}[qkv]
    with pytest.raises(UsageError, match=f"it was read as {other}; --qkv {qkv}"):
        rankxform.transform(src, tmp_path / "no", **{**options, "qkv": other})
    with pytest.raises(UsageError, match="add --dst-form huggingface"):
        rankxform.transform(src, tmp_path / "no", **{**options, "dst_form": None})
    wrong = {**model.config, "num_attention_heads": 2 * model.config["num_attention_heads"]}
    (hub / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(RankxformError, match="num_attention_heads"):
        rankxform.transform(src, tmp_path / "no", **options)
    for name, array in list(model.hf.items()):
        model.hf[name] = near(array, 0, bits)[0]
    shutil.rmtree(hub)
    reference_forms.write_huggingface(hub, model.tensors("hf"))
    (hub / "config.json").write_text(json.dumps(model.config))
    with pytest.raises(UsageError, match="does not tell how the checkpoint joins it"):
        rankxform.transform(src, tmp_path / "no", **{**options, "qkv": None})
    assert rankxform.transform(src, tmp_path / "said", **options).files


def test_a_map_of_other_names_is_said_to_be_one(tmp_path):
    """One name in common, lm_head.weight, is no reason to doubt the configuration."""
    arrays = {"lm_head.weight": ("Float32", np.zeros((64, 16), "<u4"))}
    arrays |= {f"net.{n}.w": ("Float32", np.zeros((4, 4), "<u4")) for n in range(30)}
    reference.write_safetensors(tmp_path / "model.safetensors", arrays)
    config = SAMPLES["qwen3"] / "hf" / "config.json"
    with pytest.raises(rankxform.RequestError, match=r"but net\.\*\.w.*; choose another map"):
        rankxform.transform(
            tmp_path / "model.safetensors", tmp_path / "dst", map="qwen3", config=str(config)
        )


def test_a_map_of_other_names_proposes_the_one_that_fits(tmp_path):
    model = Model("llama_legacy", 1, "BFloat16")
    src = written(model, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    options = {"config": str(tmp_path / "config.json"), "dst_form": "huggingface"}
    with pytest.raises(RankxformError) as raised:
        rankxform.transform(src, tmp_path / "dst", map="llama", **options)
    assert raised.value.tries[-1] == "--map llama_legacy"
    assert rankxform.transform(src, tmp_path / "dst", map="llama_legacy", **options).files
