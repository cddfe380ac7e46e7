"""Experts that are stacked in one tensor of a layer, one by one: what Transformers 5 saves either way."""

from __future__ import annotations

import json
import warnings

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from rankxform.storage.source_reader import SourceReader
from tests import reference, reference_forms
from tests.checkpoints import DATA

SAMPLES = DATA / "hf_experts"
MODELS = "qwen3_moe", "mixtral", "deepseek_v3"
VARIANTS = {"qwen3_moe": ("rows", "axis", "megatron"), "deepseek_v3": ("rows", "axis", "megatron")}


def converted(src, dst, **options):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*none of these layers")
        rankxform.transform(src, dst, **{"dst_form": "huggingface", "fsync": False, **options})
    return reference.read_safetensors(dst / "model.safetensors")


def saved(model, kind):
    return reference.read_safetensors(SAMPLES / model / kind / "model.safetensors")


def write(folder, arrays):
    tensors = {name: ("Float32", array.view("<u4")) for name, array in arrays.items()}
    return reference_forms.write_huggingface(folder, tensors, 1)


@pytest.mark.parametrize("model", MODELS)
class TestWhatTransformersSaved:
    def test_becomes_the_other(self, model, tmp_path):
        published, modules = SAMPLES / model / "published", SAMPLES / model / "modules"
        assert converted(modules, tmp_path / "a", experts="apart") == saved(model, "published")
        assert converted(published, tmp_path / "b", experts="stacked") == saved(model, "modules")
        assert rankxform.verify(modules, tmp_path / "a", experts="apart").same

    def test_is_read_by_a_map_either_way(self, model, tmp_path):
        """Into whole tensors of MindFormers' or Megatron's names, and back either way."""
        for way in VARIANTS.get(model, ("",)):
            options = {"map": model, "variant": [f"experts={way}"] if way else []}
            if model == "deepseek_v3":
                options["gate_up"] = "interleaved"
            else:
                options["qkv"] = "grouped"
            folders = []
            for kind in ("published", "modules"):
                dst = tmp_path / f"{kind} {way}"
                with warnings.catch_warnings():
                    warnings.filterwarnings("ignore", ".*none of these layers")
                    src = SAMPLES / model / kind
                    rankxform.transform(src, dst, dst_form="unified", fsync=False, **options)
                folders.append(dst)
            first, second = (reference.read_safetensors(f / "part0.safetensors") for f in folders)
            assert first == second
            config = str(SAMPLES / model / "published/config.json")
            for kind, experts in (("published", None), ("modules", "stacked")):
                dst = tmp_path / f"back {kind} {way}"
                back = {
                    "map": model,
                    "config": config,
                    "experts": experts,
                    "dst_form": "huggingface",
                }
                assert converted(folders[0], dst, **back) == saved(model, kind)

    def test_shapes_are_those_of_the_configuration(self, model):
        found = rankxform.inspect(SAMPLES / model / "modules")
        assert not any("makes" in text for text in found.get("warnings", ()))


def stacked(transposed=False):
    """Return experts of one layer, and what they are one by one."""
    gate_up = np.arange(3 * 12 * 8, dtype="<f4").reshape(3, 12, 8)
    down = np.arange(1000, 1000 + 3 * 8 * 6, dtype="<f4").reshape(3, 8, 6)
    one_by_one = {}
    for number in range(3):
        name = f"layers.0.mlp.experts.{number}."
        one_by_one[f"{name}gate_proj.weight"] = gate_up[number, :6]
        one_by_one[f"{name}up_proj.weight"] = gate_up[number, 6:]
        one_by_one[f"{name}down_proj.weight"] = down[number]
    both = {"gate_up_proj": gate_up, "down_proj": down}
    found = {
        f"layers.0.mlp.experts.{name}": np.ascontiguousarray(array.transpose(0, 2, 1))
        if transposed
        else array
        for name, array in both.items()
    }
    return found, one_by_one


def same(found, arrays):
    return found == {n: ("Float32", a.shape, a.tobytes()) for n, a in arrays.items()}


@pytest.mark.parametrize("transposed", [False, True])
def test_the_order_of_axes_is_told_by_shapes(transposed, tmp_path):
    arrays, one_by_one = stacked(transposed)
    src = write(tmp_path / "src", arrays)
    assert same(converted(src, tmp_path / "apart", experts="apart"), one_by_one)
    for kind, axes in (("stacked", False), ("transposed", True)):
        assert same(converted(src, tmp_path / kind, experts=kind), stacked(axes)[0])
        assert same(converted(tmp_path / "apart", tmp_path / f"{kind} again", experts=kind),
                    stacked(axes)[0])  # fmt: skip


def test_a_square_matrix_is_told_by_the_other(tmp_path):
    """2F = H, so that gate and up are square in both orders."""
    for transposed in (False, True):
        gate_up = np.arange(2 * 8 * 8, dtype="<f4").reshape(2, 8, 8)
        down = np.zeros((2, 4, 8) if transposed else (2, 8, 4), "<f4")
        arrays = {"experts.gate_up_proj": gate_up, "experts.down_proj": down}
        src = write(tmp_path / f"src {transposed}", arrays)
        found = converted(src, tmp_path / f"dst {transposed}", experts="apart")
        first = gate_up[0].T if transposed else gate_up[0]
        assert found["experts.0.gate_proj.weight"][2] == np.ascontiguousarray(first[:4]).tobytes()


def test_gpt_oss_has_gate_and_up_by_columns(tmp_path):
    src = SAMPLES / "gpt_oss/modules"
    tensors = rankxform.load(src)
    found = converted(src, tmp_path / "dst", experts="apart")
    name = "model.layers.1.mlp.experts."
    gate_up, down = tensors[f"{name}gate_up_proj"], tensors[f"{name}down_proj"]
    biases = tensors[f"{name}gate_up_proj_bias"], tensors[f"{name}down_proj_bias"]
    for number in range(3):
        for part, first in (("gate_proj", 0), ("up_proj", 1)):
            half = np.ascontiguousarray(gate_up[number].T[first::2])
            assert found[f"{name}{number}.{part}.weight"] == ("Float32", half.shape, half.tobytes())
            bias = biases[0][number, first::2].tobytes()
            assert found[f"{name}{number}.{part}.bias"][2] == bias
        whole = np.ascontiguousarray(down[number].T)
        assert found[f"{name}{number}.down_proj.weight"][2] == whole.tobytes()
        assert found[f"{name}{number}.down_proj.bias"][2] == biases[1][number].tobytes()
    with pytest.raises(RankxformError, match="bias of an expert"):
        converted(tmp_path / "dst", tmp_path / "again", experts="stacked")


def without(arrays, name):
    return {n: a for n, a in arrays.items() if n != name}


STACKED, ONE_BY_ONE = stacked()
LAYER = "layers.0.mlp.experts."
REFUSED = {
    "no down": (without(STACKED, f"{LAYER}down_proj"), "apart", "has no down_proj beside it"),
    "other shapes": (
        {**STACKED, f"{LAYER}down_proj": np.zeros((3, 8, 5), "<f4")}, "apart", "no stacked experts",
    ),
    "both": ({**STACKED, **ONE_BY_ONE}, "apart", "its experts are stacked too"),
    "one that lacks": (
        without(ONE_BY_ONE, f"{LAYER}1.up_proj.weight"), "stacked", r"experts\.1\.up_proj",
    ),
    "one of another shape": (
        {**ONE_BY_ONE, f"{LAYER}1.up_proj.weight": np.zeros((5, 8), "<f4")}, "stacked",
        r"\[6, 8\], and .*1\.up_proj.* \[5, 8\]",
    ),
    "none": ({"w": np.zeros((2, 2), "<f4")}, "stacked", "no experts by number"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_no_layer_of_experts_is_refused(why, tmp_path):
    arrays, experts, text = REFUSED[why]
    src = write(tmp_path / "src", arrays)
    with pytest.raises(RankxformError, match=text) as raised:
        converted(src, tmp_path / "dst", experts=experts)
    assert raised.value.tries and not (tmp_path / "dst").exists()


def test_experts_are_read_whole_where_they_fit(tmp_path, monkeypatch):
    """MindFormers keeps experts transposed, one below the other; a tile that ended within one
    would need columns of it."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 256,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 8,
        "moe_intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 4,
    }  # fmt: skip
    layer, hidden = "decoder.layers.0.", 256
    shapes = {
        "embedding.word_embeddings.weight": (4, hidden), "output_layer.weight": (4, hidden),
        f"{layer}self_attention.linear_qkv.weight": (24, hidden),
        f"{layer}self_attention.linear_proj.weight": (hidden, 8),
        f"{layer}self_attention.q_layernorm.weight": (4,),
        f"{layer}self_attention.k_layernorm.weight": (4,),
        f"{layer}input_layernorm.weight": (hidden,), f"{layer}pre_mlp_layernorm.weight": (hidden,),
        f"{layer}mlp.router.weight": (8, hidden), "decoder.final_layernorm.weight": (hidden,),
        f"{layer}mlp.experts.weight1": (8 * hidden, 256),
        f"{layer}mlp.experts.weight2": (8 * 128, hidden),
    }  # fmt: skip
    params = {name: (shape, "Float32") for name, shape in shapes.items()}
    strategy = [{name: ([1], [-1] * len(shape), 0, 0) for name, shape in shapes.items()}]
    src = reference.write_checkpoint(tmp_path / "src", strategy, params, None, "safetensors")
    a = reference.write_strategy(tmp_path / "a.ckpt", strategy)
    (tmp_path / "config.json").write_text(json.dumps(config))
    options = {
        "map": "qwen3_moe",
        "config": str(tmp_path / "config.json"),
        "qkv": "grouped",
        "fsync": False,
    }
    rankxform.transform(src, tmp_path / "hf", a, None, dst_form="huggingface", **options)
    reads = []
    read_runs = SourceReader.read_runs
    monkeypatch.setattr(SourceReader, "read_runs", lambda *a: reads.append(a) or read_runs(*a))
    # 512 KiB for what is read, which is almost two experts of weight1, and four of weight2.
    rankxform.transform(tmp_path / "hf", tmp_path / "dst", None, a, memory=2 << 20, **options)
    assert reads == []
    assert reference.wrong_slices(tmp_path / "dst", strategy, params, "safetensors") == []
