"""What PEFT's adapters hold beside pairs of matrices, compared with what PEFT merged itself."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference, reference_forms
from tests.checkpoints import DATA

SAMPLES = DATA / "peft"
ADAPTERS = sorted(path.name for path in SAMPLES.iterdir())
EXPERTS = "target_parameters", "moe_default", "target_one_parameter"
MODULE = "model.layers.0.mlp.experts."


def tensors_of(path):
    return {n: (d, values_of(d, s, b)) for n, (d, s, b) in reference.read_safetensors(path).items()}


def values_of(dtype, shape, data):
    assert dtype == "Float32"
    return np.frombuffer(data, "<f4").reshape(shape)


def folder_of(path, arrays):
    tensors = {name: ("Float32", np.ascontiguousarray(a).view("<u4")) for name, a in arrays.items()}
    return reference_forms.write_huggingface(path, tensors, 1)


def adapter(tmp, sample, **config):
    """Return a copy of a sample's adapter, of which the configuration may say something else."""
    folder = tmp / "adapter"
    folder.mkdir()
    shutil.copy(SAMPLES / sample / "adapter_model.safetensors", folder)
    stated = json.loads((SAMPLES / sample / "adapter_config.json").read_text()) | config
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


def base_of(tmp, sample):
    arrays = {n: a for n, (_, a) in tensors_of(SAMPLES / sample / "base.safetensors").items()}
    return folder_of(tmp / "base", arrays)


def merged_by(src, dst, lora, **options):
    rankxform.transform(
        src, dst, lora=str(lora), **{"dst_form": "huggingface", "fsync": False, **options}
    )
    return {n: a for n, (_, a) in tensors_of(dst / "model.safetensors").items()}


def check(found, sample):
    """Compare with PEFT's merge: it sums in Float32, in an order of its own."""
    merged = {n: a for n, (_, a) in tensors_of(SAMPLES / sample / "merged.safetensors").items()}
    before = {n: a for n, (_, a) in tensors_of(SAMPLES / sample / "base.safetensors").items()}
    assert {n: a.shape for n, a in found.items()} == {n: a.shape for n, a in merged.items()}
    changed = 0
    for name, array in merged.items():
        if np.array_equal(array, before[name]):
            assert np.array_equal(found[name], array), name
        else:
            changed += 1
            assert np.abs(found[name] - array).max() <= 3e-7 * np.abs(array).max(), name
    assert changed


@pytest.mark.parametrize("sample", ADAPTERS)
def test_is_merged_as_peft_does(sample, tmp_path):
    src, lora = base_of(tmp_path, sample), adapter(tmp_path, sample)
    check(merged_by(src, tmp_path / "dst", lora), sample)
    told = {"lora": str(lora), "dst_form": "huggingface"}
    assert rankxform.verify(src, tmp_path / "dst", **told).same


@pytest.mark.parametrize("sample", ADAPTERS)
@pytest.mark.parametrize("axis", [0, 1])
def test_slices_of_ranks_are_those_of_the_whole(sample, axis, tmp_path):
    """Whatever part of a matrix a tile has."""
    src, lora = base_of(tmp_path, sample), adapter(tmp_path, sample)
    whole = merged_by(src, tmp_path / "whole", lora)
    cut = {n for n, a in whole.items() if a.ndim > axis and a.shape[axis] % 2 == 0}
    strategy = reference.write_strategy(
        tmp_path / "s.ckpt",
        [
            {
                n: ([2], [0 if number == axis else -1 for number in range(whole[n].ndim)], 0, 0)
                for n in cut
            }
        ],
    )
    options = {
        "dst_strategy": strategy,
        "lora": str(lora),
        "unmatched": "replicate",
        "fsync": False,
    }
    rankxform.transform(src, tmp_path / "ranks", format="safetensors", **options)
    for rank in range(2):
        (path,) = (tmp_path / f"ranks/rank_{rank}").glob("*.safetensors")
        for name, (_, array) in tensors_of(path).items():
            own = np.split(whole[name], 2, axis)[rank] if name in cut else whole[name]
            assert np.array_equal(array, own), name


def by_number(arrays):
    """Return a model with its experts one by one."""
    found = {}
    for name, array in arrays.items():
        if name == f"{MODULE}gate_up_proj":
            for number, both in enumerate(array):
                for part, half in zip(("gate_proj", "up_proj"), np.split(both, 2)):
                    found[f"{MODULE}{number}.{part}.weight"] = half
        elif name == f"{MODULE}down_proj":
            for number, matrix in enumerate(array):
                found[f"{MODULE}{number}.down_proj.weight"] = matrix
        else:
            found[name] = array
    return found


@pytest.mark.parametrize("sample", EXPERTS)
class TestExperts:
    def test_of_a_base_that_has_them_one_by_one(self, sample, tmp_path):
        arrays = {n: a for n, (_, a) in tensors_of(SAMPLES / sample / "base.safetensors").items()}
        src = folder_of(tmp_path / "base", by_number(arrays))
        lora = adapter(tmp_path, sample)
        found = merged_by(src, tmp_path / "dst", lora)
        stacked = merged_by(base_of(tmp_path / "b", sample), tmp_path / "c", lora)
        assert all(np.array_equal(a, found[n]) for n, a in by_number(stacked).items())

    def test_that_are_taken_apart_on_the_way(self, sample, tmp_path):
        src, lora = base_of(tmp_path, sample), adapter(tmp_path, sample)
        stacked = merged_by(src, tmp_path / "stacked", lora)
        apart = merged_by(src, tmp_path / "apart", lora, experts="apart")
        assert {*apart} == {*by_number(stacked)}
        assert all(np.array_equal(a, apart[n]) for n, a in by_number(stacked).items())

    def test_of_axes_exchanged_as_gpt_oss_has_them(self, sample, tmp_path):
        """Then the products are of the tensor's axes exchanged."""
        arrays = {n: a for n, (_, a) in tensors_of(SAMPLES / sample / "base.safetensors").items()}
        turned = {n: a.transpose(0, 2, 1) if a.ndim == 3 else a for n, a in arrays.items()}
        lora = adapter(tmp_path, sample)
        plain = merged_by(base_of(tmp_path, sample), tmp_path / "plain", lora)
        found = merged_by(folder_of(tmp_path / "turned", turned), tmp_path / "dst", lora)
        for name, array in plain.items():
            back = found[name].transpose(0, 2, 1) if array.ndim == 3 else found[name]
            assert np.array_equal(array, back), name

    def test_without_the_version_that_wrote_them_are_refused(self, sample, tmp_path):
        lora = adapter(tmp_path, sample, peft_version=None)
        with pytest.raises(RankxformError, match="no peft_version"):
            merged_by(base_of(tmp_path, sample), tmp_path / "dst", lora)


@pytest.mark.parametrize(("version", "turned"), [("0.18.1", True), ("0.19.0", False)])
def test_of_square_experts_the_version_tells_the_order(version, turned, tmp_path):
    rng = np.random.default_rng(3)
    base = rng.normal(size=(3, 4, 4)).astype("<f4")
    a, b = (rng.normal(size=shape).astype("<f4") for shape in ((6, 4), (4, 6)))
    src = folder_of(tmp_path / "src", {"experts.down_proj": base})
    (tmp_path / "lora").mkdir()
    pair = {"experts.lora_A.weight": a, "experts.lora_B.weight": b}
    tensors = {f"base_model.model.{n}": ("Float32", w.view("<u4")) for n, w in pair.items()}
    reference.write_safetensors(tmp_path / "lora/adapter_model.safetensors", tensors)
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "peft_version": version}
    config["target_parameters"] = ["experts.down_proj"]
    (tmp_path / "lora/adapter_config.json").write_text(json.dumps(config))
    found = merged_by(src, tmp_path / "dst", tmp_path / "lora")["experts.down_proj"]
    for number in range(3):
        product = 2 * b[:, number::3] @ a[2 * number : 2 * number + 2]
        expected = base[number] + (product.T if turned else product)
        assert np.allclose(found[number], expected, atol=1e-6)


def write_adapter(folder, arrays, **config):
    folder.mkdir()
    tensors = {f"base_model.model.{n}": ("Float32", a.view("<u4")) for n, a in arrays.items()}
    reference.write_safetensors(folder / "adapter_model.safetensors", tensors)
    stated = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, **config}
    (folder / "adapter_config.json").write_text(json.dumps(stated))
    return folder


PAIR = {
    "m.lora_A.weight": np.array([[1, 2, 3], [2, 1, 0]], "<f4"),
    "m.lora_B.weight": np.array([[1, 0], [0, 1], [1, 1], [2, 0]], "<f4"),
}
PRODUCT = 2 * PAIR["m.lora_B.weight"] @ PAIR["m.lora_A.weight"]
BASE = {
    "m.weight": np.arange(12, dtype="<f4").reshape(4, 3),
    "m.bias": np.arange(4, dtype="<f4"),
    "model.embed_tokens.weight": np.arange(15, dtype="<f4").reshape(5, 3),
}


class TestWhatStandsBesidePairs:
    def merge(self, tmp, more, **config):
        tmp.mkdir(exist_ok=True)
        lora = write_adapter(tmp / "lora", {**PAIR, **more}, **config)
        return merged_by(folder_of(tmp / "src", BASE), tmp / "dst", lora)

    def test_a_bias_is_scaled_like_its_matrix(self, tmp_path):
        bias = np.array([1, 2, 3, 4], "<f4")
        found = self.merge(tmp_path, {"m.lora_B.bias": bias}, lora_bias=True)
        assert np.array_equal(found["m.bias"], BASE["m.bias"] + 2 * bias)
        assert np.array_equal(found["m.weight"], BASE["m.weight"] + PRODUCT)

    def test_a_vocabulary_that_grew_names_the_option(self, tmp_path):
        more = {"model.embed_tokens.weight": np.ones((7, 3), "<f4")}
        with pytest.raises(RankxformError, match=r"\[7, 3\]") as raised:
            self.merge(tmp_path, more)
        assert raised.value.tries[0].startswith("--vocab 7 ")
        src = tmp_path / "src"
        wide = {"dst_form": "huggingface", "vocab": 7, "vocab_fill": "repeat-last"}
        with pytest.warns(rankxform.RankxformWarning, match="copies of the last"):
            rankxform.transform(src, tmp_path / "wide", **wide)
        found = merged_by(tmp_path / "wide", tmp_path / "dst", tmp_path / "lora")
        assert np.array_equal(found["model.embed_tokens.weight"], more["model.embed_tokens.weight"])

    def test_a_vocabulary_with_fewer_rows_is_another_bases(self, tmp_path):
        with pytest.raises(RankxformError, match="embed_tokens"):
            self.merge(tmp_path, {"model.embed_tokens.weight": np.ones((4, 3), "<f4")})

    def test_rows_are_replaced_in_the_order_of_the_list(self, tmp_path):
        delta = np.array([[9, 7, 9], [8, 8, 6]], "<f4")
        more = {"model.embed_tokens.token_adapter.trainable_tokens_delta": delta}
        found = self.merge(tmp_path, more, trainable_token_indices={"embed_tokens": [4, 1]})
        expected = BASE["model.embed_tokens.weight"].copy()
        expected[[4, 1]] = delta
        assert np.array_equal(found["model.embed_tokens.weight"], expected)

    @pytest.mark.parametrize(
        ("rows", "text"),
        [([4], "has 1 rows"), ([4, 4], "has 2 rows"), ([4, 5], "has row 5"), (None, "names no")],
    )
    def test_rows_that_are_not_there_are_refused(self, rows, text, tmp_path):
        delta = np.arange(6, dtype="<f4").reshape(2, 3)
        more = {"model.embed_tokens.token_adapter.trainable_tokens_delta": delta}
        with pytest.raises(RankxformError, match=text):
            self.merge(tmp_path, more, trainable_token_indices=rows)

    def test_a_module_that_is_not_listed_is_refused(self, tmp_path):
        with pytest.raises(RankxformError, match="norm.weight"):
            self.merge(tmp_path, {"norm.weight": np.ones((3,), "<f4")})

    @pytest.mark.parametrize("key", ["modules_to_save", "trainable_token_indices"])
    def test_what_is_listed_and_lacks_is_refused(self, key, tmp_path):
        stated = {key: ["score"] if key == "modules_to_save" else {"score": [1]}}
        with pytest.raises(RankxformError, match=f"{key} names 'score', of which .* nothing"):
            self.merge(tmp_path, {}, **stated)

    def test_lengths_of_rows_belong_to_all_pairs_or_to_none(self, tmp_path):
        lengths = {"m.lora_magnitude_vector": np.ones(4, "<f4")}
        with pytest.raises(RankxformError, match="use_dora is True, and m.weight has no lengths"):
            self.merge(tmp_path / "a", {}, use_dora=True)
        with pytest.raises(RankxformError, match="lora_magnitude_vector"):
            self.merge(tmp_path / "b", lengths)
        found = self.merge(tmp_path / "c", lengths, use_dora=True)["m.weight"]
        assert np.allclose(np.linalg.norm(found, axis=1), 1)

    def test_two_changes_of_one_tensor_are_refused(self, tmp_path):
        more = {"m.base_layer.bias": np.ones(4, "<f4"), "m.lora_B.bias": np.ones(4, "<f4")}
        with pytest.raises(RankxformError, match="'m.bias' in two ways"):
            self.merge(tmp_path, more, bias="lora_only", lora_bias=True)


@pytest.mark.parametrize("wrapped", [False, True])
def test_megatron_bridges_adapter_is_merged_before_a_map(wrapped, tmp_path):
    """In Megatron's own layout, queries, keys and values by groups."""
    rng = np.random.default_rng(11)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 2,
        "intermediate_size": 12, "vocab_size": 16, "tie_word_embeddings": True,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    layer = "decoder.layers.0."
    shapes = {
        f"{layer}self_attention.linear_qkv": (16, 8), f"{layer}self_attention.linear_proj": (8, 8),
        f"{layer}mlp.linear_fc1": (24, 8), f"{layer}mlp.linear_fc2": (8, 12),
        f"{layer}input_layernorm": (8,), f"{layer}pre_mlp_layernorm": (8,),
        "decoder.final_layernorm": (8,), "embedding.word_embeddings": (16, 8),
    }  # fmt: skip
    base = {n: rng.normal(size=s).astype("<f4") for n, s in shapes.items()}
    merged, arrays = dict(base), {}
    for name, array in base.items():
        is_adapted = ".linear_" in name
        middle = ".to_wrap" if wrapped and is_adapted else ""
        arrays[f"{name}{middle}.weight"] = array
        if is_adapted:
            out, columns = array.shape
            a, b = rng.normal(size=(2, columns)), rng.normal(size=(out, 2))
            a, b = a.astype("<f4"), b.astype("<f4")
            arrays[f"{name}.adapter.linear_in.weight"] = a
            arrays[f"{name}.adapter.linear_out.weight"] = b
            merged[name] = array + 16 * (b.astype("f8") @ a.astype("f8"))
    src = folder_of(tmp_path / "src", arrays)
    plain = folder_of(
        tmp_path / "plain", {f"{n}.weight": w.astype("<f4") for n, w in merged.items()}
    )
    named = {"map": "llama", "config": str(tmp_path / "config.json"), "qkv": "grouped"}
    named |= {"gate_up": "contiguous", "dst_form": "huggingface"}
    told = {"lora_alpha": 32.0, "lora_rank": 2, **named}
    if wrapped:
        told["rename"] = [r"\.to_wrap\.=."]
    found = merged_by(src, tmp_path / "a", src, **told)
    rankxform.transform(plain, tmp_path / "b", **named)
    expected = {n: a for n, (_, a) in tensors_of(tmp_path / "b/model.safetensors").items()}
    assert {*found} == {*expected} and "model.layers.0.self_attn.k_proj.weight" in found
    for name, array in expected.items():
        assert np.allclose(found[name], array, rtol=3e-7, atol=1e-6), name


@pytest.mark.parametrize("sample", ["target_parameters", "moe_default"])
def test_a_map_takes_what_was_added(sample, tmp_path):
    """To MindFormers' names as a model has them that was merged before."""
    config = {
        "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 8,
        "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4,
        "moe_intermediate_size": 6, "num_experts": 3, "vocab_size": 16,
        "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    src, lora = base_of(tmp_path, sample), adapter(tmp_path, sample)
    merged_by(src, tmp_path / "merged", lora)
    for way in ("rows", "axis", "megatron"):
        options = {
            "map": "qwen3_moe", "config": str(tmp_path / "config.json"), "qkv": "grouped",
            "variant": [f"experts={way}"], "dst_form": "unified",
        }  # fmt: skip
        rankxform.transform(tmp_path / "merged", tmp_path / f"a {way}", **options)
        rankxform.transform(src, tmp_path / f"b {way}", lora=str(lora), **options)
        first, second = (tmp_path / f"{x} {way}/part0.safetensors" for x in "ab")
        assert reference.read_safetensors(first) == reference.read_safetensors(second)


def test_a_model_that_was_saved_while_wrapped(tmp_path):
    """Base and adapter in one file, as trainers save it (verl#4761)."""
    rng = np.random.default_rng(5)
    shapes = {"base_layer.weight": (4, 3), "lora_A.default.weight": (2, 3)}
    shapes |= {"lora_B.default.weight": (4, 2)}
    prefix = "base_model.model.model.layers.0.q_proj."
    arrays = {n: rng.normal(size=s).astype("<f4") for n, s in shapes.items()}
    src = folder_of(tmp_path / "src", {prefix + n: a for n, a in arrays.items()})
    rename = [r"^base_model\.model\.=", r"\.base_layer\.=."]
    numbers = {"lora_alpha": 4.0, "lora_rank": 2}
    found = merged_by(src, tmp_path / "dst", src, rename=rename, **numbers)
    expected = arrays["base_layer.weight"] + 2 * (
        arrays["lora_B.default.weight"] @ arrays["lora_A.default.weight"]
    )
    assert {*found} == {"model.layers.0.q_proj.weight"}
    assert np.allclose(found["model.layers.0.q_proj.weight"], expected, atol=1e-6)
