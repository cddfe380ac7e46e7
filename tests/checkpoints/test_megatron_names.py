"""Names of Megatron-Core's tensors: each specification's, and models under Hugging Face's names."""

from __future__ import annotations

import numpy as np
import pytest

import rankxform
from rankxform.checkpoints.megatron_names import local_name
from rankxform.errors import RankxformError
from tests import reference
from tests.checkpoints import DATA
from tests.checkpoints.test_dcp import WORDS, transformed, whole
from tests.reference_dcp import write_dcp

SAMPLES = DATA / "megatron"
MAPS = {"qwen2_tied": "qwen2"}
MODELS = "llama", "qwen2_tied", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"
LAYER = "decoder.layers.0."


def options_of(model):
    """Return how a sample becomes a Hugging Face folder; its 20 words are padded to 24."""
    return {
        "map": MAPS.get(model, model), "config": str(SAMPLES / model / "config.json"), "vocab": 20,
        "vocab_cut": True, "dst_form": "huggingface",
    }  # fmt: skip


def torch_dist(folder, tensors):
    """Write tensors as a torch_dist folder."""
    write_dcp(folder, tensors)
    backend = '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    (folder / "metadata.json").write_text(backend)
    return folder


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("self_attention.linear_qkv.layer_norm_weight", "input_layernorm.weight"),
        ("self_attention.linear_qkv.layer_norm_bias", "input_layernorm.bias"),
        ("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"),
        ("mlp.0.weight", "pre_mlp_layernorm.weight"),
        ("mlp.1.basic_ops.0.weight", "mlp.linear_fc1.weight"),
        ("mlp.3.basic_ops.0.weight", "mlp.linear_fc2.weight"),
        ("self_attention.linear_q_up_proj.layer_norm_weight", "self_attention.q_layernorm.weight"),
        ("self_attention.linear_kv_up_proj.layer_norm_weight", "self_attention.kv_layernorm.weight"),
        ("self_attention.linear_qkv.weight", "self_attention.linear_qkv.weight"),
        ("mlp.experts.experts.0.linear_fc1.weight", "mlp.experts.experts.0.linear_fc1.weight"),
    ],
)  # fmt: skip
def test_names_are_those_of_the_local_specification(stored, name):
    for root in ("", "optimizer.state.exp_avg.", "chained_0.optimizer.state.param."):
        assert local_name(f"{root}{LAYER}{stored}") == f"{root}{LAYER}{name}"


def test_the_layer_of_a_prediction_has_one_name():
    assert local_name("mtp.layers.0.mtp_model_layer.mlp.router.weight") == (
        "mtp.layers.0.transformer_layer.mlp.router.weight"
    )


@pytest.mark.parametrize("model", MODELS)
def test_models_become_hugging_faces(model, tmp_path):
    """Folders that Megatron-Core wrote: stacked layers, numbered ones, experts, predictions."""
    options = options_of(model)
    transformed(SAMPLES / model / "torch_dist", tmp_path / "hf", **options)
    assert whole(tmp_path / "hf") == reference.read_safetensors(
        SAMPLES / model / "expected.safetensors"
    )
    assert rankxform.verify(SAMPLES / model / "torch_dist", tmp_path / "hf", **options).same


def test_what_is_no_weight_needs_no_word(tmp_path):
    report = transformed(
        SAMPLES / "qwen3_moe/torch_dist", tmp_path / "hf", **options_of("qwen3_moe")
    )
    (group,) = report.left_out
    assert set(group.families.values()) == {"*._extra_state"} and not report.warnings


def test_two_names_of_one_tensor_are_refused(tmp_path):
    names = "mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight"
    src = torch_dist(tmp_path / "src", {f"{LAYER}{name}": ("Float32", WORDS) for name in names})
    with pytest.raises(RankxformError, match="two names of one tensor") as raised:
        transformed(src, tmp_path / "dst", dst_form="huggingface")
    assert all(name in str(raised.value) for name in names)


class TestExpertsOneByOne:
    """As `singleton_local_shards` stores them: by number, and gate and up apart."""

    def tensors(self, numbers):
        found = {}
        for root, shift in (("", 0), ("optimizer.state.exp_avg.", 7)):
            for number in numbers:
                name = f"{root}{LAYER}mlp.experts.experts.{number}."
                for part, half in (("linear_fc1.weight_w", 0), ("linear_fc1.weight_v", 1)):
                    found[name + part] = "Float32", WORDS + 100 * number + 50 * half + shift
                found[name + "linear_fc2.weight"] = (
                    "Float32",
                    (WORDS + 1000 * number + shift).T.copy(),
                )
        return found

    def test_become_one_tensor(self, tmp_path):
        src = torch_dist(tmp_path / "src", self.tensors(range(3)))
        transformed(src, tmp_path / "dst", dst_form="huggingface", weights_only=True)
        made = whole(tmp_path / "dst")
        halves = [np.concatenate([WORDS + 100 * n, WORDS + 100 * n + 50]) for n in range(3)]
        downs = [(WORDS + 1000 * n).T for n in range(3)]
        expected = {
            f"{LAYER}mlp.experts.experts.linear_fc1.weight": np.stack(halves),
            f"{LAYER}mlp.experts.experts.linear_fc2.weight": np.stack(downs),
        }
        assert made == {n: ("Float32", a.shape, a.tobytes()) for n, a in expected.items()}

    def test_one_that_lacks_is_named(self, tmp_path):
        src = torch_dist(tmp_path / "src", self.tensors((0, 2)))
        with pytest.raises(RankxformError, match="experts 0, 2 are there, and 1 is not"):
            transformed(src, tmp_path / "dst", dst_form="huggingface", weights_only=True)


def test_masters_of_a_fully_reshardable_optimizer(tmp_path):
    """It calls them `param`, and keeps the model's shapes."""
    name = f"{LAYER}mlp.linear_fc2.weight"
    halves = {name: ("BFloat16", np.arange(24, dtype="<u2").reshape(6, 4))}
    kinds = ("param", "exp_avg", "exp_avg_sq")
    states = {
        f"optimizer.state.{kind}.{name}": ("Float32", WORDS + n) for n, kind in enumerate(kinds)
    }
    src = torch_dist(tmp_path / "src", {**halves, **states})
    transformed(src, tmp_path / "dst", dst_form="huggingface", weights_only=True, masters=True)
    assert whole(tmp_path / "dst") == {name: ("Float32", WORDS.shape, WORDS.tobytes())}
