"""torch_dist folders that are written: keys, shapes and items against those that Megatron-Core saved."""

from __future__ import annotations

import pickle
import zipfile

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference, reference_dcp, reference_forms
from tests.checkpoints import DATA
from tests.checkpoints.test_dcp import transformed, whole

MODELS = "llama", "qwen2_tied", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3"
NO_EXTRA_STATE_OF = "core_attention"
"""Jobs on GPUs have one of it too; the samples are of CPUs."""
MADE_FOR_MINDFORMERS = "mtp.output_layer.weight"


def read(folder):
    """Return tensors and items of an iteration's folder."""
    return reference_dcp.read_items(next(folder.glob("iter_*")))


class Sample:
    """What Megatron-Core saved of a model, and the model under Hugging Face's names."""

    def __init__(self, model, tmp):
        self.folder = DATA / "megatron" / model
        self.tensors, self.items = read(self.folder / "torch_dist")
        self.hf = tmp / "hf"
        tensors = reference_forms.tensors_in(self.folder / "expected.safetensors")
        reference_forms.write_huggingface(self.hf, tensors, 1)
        (self.hf / "config.json").write_text((self.folder / "config.json").read_text())
        self.rows = self.tensors["embedding.word_embeddings.weight"][1].shape[0]
        self.told = {"map": model.removesuffix("_tied"), "dst_form": "torch_dist"}
        self.vocabulary = tensors["model.embed_tokens.weight"][1].shape[0]

    def converted(self, dst, **options):
        told = {**self.told, **options}
        rankxform.transform(self.hf, dst, vocab=self.rows, fsync=False, **told)
        return dst


@pytest.fixture(params=MODELS)
def sample(tmp_path, request):
    return Sample(request.param, tmp_path)


@pytest.fixture
def llama(tmp_path):
    return Sample("llama", tmp_path)


def same_words(found, expected, rows):
    """Compare two tensors; of a vocabulary, its first rows."""
    assert found[0] == expected[0] and found[1].shape == expected[1].shape
    return (found[1][:rows] == expected[1][:rows]).all()


@pytest.mark.filterwarnings("ignore:.*rows of")
def test_a_published_model_has_the_keys_that_megatron_has(sample, tmp_path):
    dst = sample.converted(tmp_path / "dst", transformer_impl="local", iteration=7)
    assert (dst / "latest_checkpointed_iteration.txt").read_text() == "7"
    tensors, items = read(dst)
    tensors.pop(MADE_FOR_MINDFORMERS, None)
    assert tensors.keys() == sample.tensors.keys()
    for name, tensor in tensors.items():
        is_padded = "word_embeddings" in name or name.startswith("output_layer")
        rows = sample.vocabulary if is_padded else None
        assert same_words(tensor, sample.tensors[name], rows), name
    assert {name for name in items if NO_EXTRA_STATE_OF not in name} == sample.items.keys()
    told = {**sample.told, "transformer_impl": "local", "vocab": sample.rows}
    assert rankxform.verify(sample.hf, dst, **told).same


def test_what_megatron_saved_is_written_again(sample, tmp_path):
    src = sample.folder / "torch_dist"
    told = {"dst_form": "torch_dist", "transformer_impl": "local", "verify": True}
    transformed(src, tmp_path / "dst", max_part=500, **told)
    assert len([*tmp_path.glob("dst/iter_0000005/*.distcp")]) > 3
    tensors, _ = read(tmp_path / "dst")
    assert tensors.keys() == sample.tensors.keys()
    assert all(same_words(t, sample.tensors[name], None) for name, t in tensors.items())
    told.pop("verify")
    assert rankxform.verify(src, tmp_path / "dst", **told).same
    transformed(tmp_path / "dst", tmp_path / "whole", dst_form="huggingface")
    transformed(src, tmp_path / "expected", dst_form="huggingface")
    assert whole(tmp_path / "whole") == whole(tmp_path / "expected")
    path = min(tmp_path.glob("dst/iter_0000005/*.distcp"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    assert rankxform.verify(src, tmp_path / "dst", **told).same is False


def test_ranks_cut_tensors_into_boxes(llama, tmp_path):
    strategy = "shard:linear_fc2|linear_proj=1@2"
    src = llama.folder / "torch_dist"
    transformed(
        src, tmp_path / "dst", dst_form="torch_dist", dst_strategy=strategy, unmatched="replicate"
    )
    tensors, _ = read(tmp_path / "dst")
    assert all(same_words(t, llama.tensors[name], None) for name, t in tensors.items())


def test_what_lies_beside_the_tensors_is_what_torch_saves(llama, tmp_path):
    transformed(llama.folder / "torch_dist", tmp_path / "dst", dst_form="torch_dist")
    folder = tmp_path / "dst/iter_0000005"
    with zipfile.ZipFile(folder / "common.pt") as archive:
        state = pickle.loads(archive.read("archive/data.pkl"))  # this test's own file
    assert state == {"iteration": 5, "checkpoint_version": 3}
    _, items = read(tmp_path / "dst")
    assert {*items.values()} == {(folder / "extra_state.pt").read_bytes()}
    with zipfile.ZipFile(folder / "extra_state.pt") as archive:
        assert pickle.loads(archive.read("archive/data.pkl")) == [None]
        assert archive.read("archive/data.pkl") == b"\x80\x02]q\x00Na."


FUSED = {
    "llama": {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.mlp.linear_fc1.layer_norm_weight",
    },
    "qwen3_moe": {
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight",
        "decoder.layers.pre_mlp_layernorm.weight",
        "decoder.layers.self_attention.q_layernorm.weight",
        "decoder.layers.self_attention.k_layernorm.weight",
    },
    "deepseek_v3": {
        f"{layer}{norm}"
        for layer in ("decoder.layers.0.", "decoder.layers.1.", "mtp.layers.0.transformer_layer.")
        for norm in (
            "input_layernorm.weight",
            "self_attention.linear_q_up_proj.layer_norm_weight",
            "self_attention.linear_kv_up_proj.layer_norm_weight",
            "mlp.linear_fc1.layer_norm_weight" if layer[-2] == "0" and layer[0] == "d"
            else "pre_mlp_layernorm.weight",
        )
    } | {"mtp.layers.0.final_layernorm.weight"},
}  # fmt: skip
"""Norms as jobs with Transformer Engine call them, but for the last."""


@pytest.mark.parametrize("model", FUSED)
def test_norms_are_called_as_transformer_engine_does(model, tmp_path):
    src = DATA / "megatron" / model / "torch_dist"
    told = {"dst_form": "torch_dist", "transformer_impl": "transformer_engine"}
    transformed(src, tmp_path / "dst", **told)
    tensors, _ = read(tmp_path / "dst")
    norms = {name for name in tensors if "norm" in name.rsplit(".", 2)[-2] + name.rsplit(".")[-1]}
    assert norms - {"decoder.final_layernorm.weight", "mtp.layers.0.enorm.weight",
                    "mtp.layers.0.hnorm.weight"} == FUSED[model]  # fmt: skip
    transformed(tmp_path / "dst", tmp_path / "whole", dst_form="huggingface")
    transformed(src, tmp_path / "expected", dst_form="huggingface")
    assert whole(tmp_path / "whole") == whole(tmp_path / "expected")


class TestRefusals:
    def refused(self, src, tmp, text, **options):
        with pytest.raises(RankxformError, match=text) as raised:
            rankxform.transform(src, tmp / "dst", dst_form="torch_dist", **options)
        assert raised.value.tries and not (tmp / "dst").exists()

    def test_names_that_depend_on_the_job(self, tmp_path):
        src = DATA / "megatron/qwen3_moe/torch_dist"
        self.refused(src, tmp_path, "with Transformer Engine, and .* without")

    def test_other_names(self, llama, tmp_path):
        self.refused(llama.hf, tmp_path, "no weight under Megatron's names, and 20 tensors more")

    def test_gate_and_up_of_a_job_that_joins_them_otherwise(self, tmp_path):
        words = np.full((4, 2), 0x3F800000, "<u4")
        name = "decoder.layers.0.mlp.linear_fc1.weight"
        reference.write_ckpt(tmp_path / "src/rank_0/c.ckpt", {name: ("Float32", words)})
        text = "has gate before up, and in rank folders they may lie otherwise"
        self.refused(tmp_path / "src", tmp_path, text)

    @pytest.mark.filterwarnings("ignore:.*gate before up")
    def test_states_of_an_optimizer(self, tmp_path):
        words = np.full((2, 2), 0x3F800000, "<u4")
        names = (
            "decoder.layers.0.mlp.linear_fc1.weight",
            "adam_m.decoder.layers.0.mlp.linear_fc1.weight",
        )
        reference.write_ckpt(
            tmp_path / "src/rank_0/c.ckpt", dict.fromkeys(names, ("Float32", words))
        )
        told = {"accept": ("contradictions",), "fsync": False}
        self.refused(tmp_path / "src", tmp_path, "'adam_m.decoder.*--weights-only", **told)
        told["weights_only"] = True
        rankxform.transform(tmp_path / "src", tmp_path / "dst", dst_form="torch_dist", **told)
        assert [*read(tmp_path / "dst")[0]] == ["decoder.layers.mlp.linear_fc1.weight"]

    @pytest.mark.parametrize(
        "name",
        [
            "decoder.layers.0.self_attention.linear_q.weight", "decoder.layers.0.mlp.gating.weight",
            "decoder.layers.0.mlp.linear_fc2.weight.exp_avg", "embedding.tokens.weight",
            "decoder.layers.0.mlp.experts.weight1",
        ],
    )  # fmt: skip
    def test_names_that_no_job_asks_for(self, name, tmp_path):
        words = np.full((4, 2), 0x3F800000, "<u4")
        reference.write_ckpt(tmp_path / "src/rank_0/c.ckpt", {name: ("Float32", words)})
        self.refused(tmp_path / "src", tmp_path, "is no weight under Megatron's names")

    def test_layers_that_differ_in_type_alone(self, tmp_path):
        names = [f"decoder.layers.{n}.mlp.linear_fc2.weight" for n in range(2)]
        words = np.full((4, 2), 0x3F800000, "<u4")
        reference.write_ckpt(
            tmp_path / "src/rank_0/c.ckpt", dict.fromkeys(names, ("Float32", words))
        )
        told = {"dtype": "bf16", "keep_dtype": (r"layers\.0\.",)}
        self.refused(tmp_path / "src", tmp_path, "here types differ", **told)

    def test_layers_that_differ_keep_their_numbers(self, tmp_path):
        sizes = {
            "decoder.layers.0.mlp.linear_fc2.weight": 4,
            "decoder.layers.1.mlp.linear_fc2.weight": 6,
        }
        tensors = {
            n: ("Float32", np.full((rows, 2), 0x3F800000, "<u4")) for n, rows in sizes.items()
        }
        reference.write_ckpt(tmp_path / "src/rank_0/c.ckpt", tensors)
        transformed(tmp_path / "src", tmp_path / "dst", dst_form="torch_dist")
        tensors, items = read(tmp_path / "dst")
        assert {n: len(w) for n, (_, w) in tensors.items()} == sizes
        assert sorted(items) == [
            f"decoder.layers.{n}.mlp.linear_fc2._extra_state/shard_0_1" for n in (0, 1)
        ]


def test_a_folder_is_verified_by_itself(llama, tmp_path):
    told = {"dst_form": "torch_dist", "verify": True}
    transformed(llama.folder / "torch_dist", tmp_path / "dst", max_part=500, **told)
    assert rankxform.verify(tmp_path / "dst").same
    (tmp_path / "dst/iter_0000005/extra_state.pt").write_bytes(b"")
    assert rankxform.verify(tmp_path / "dst").same is False
