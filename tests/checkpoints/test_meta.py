"""Meta's own files of Llama: how ranks hold tensors, and the order of rows within heads."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference, reference_forms
from tests import reference_torch as torch
from tests.checkpoints import DATA
from tests.checkpoints.test_dcp import transformed, whole

EXPECTED = reference.read_safetensors(DATA / "meta/expected.safetensors")
SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
         "num_key_value_heads": 2, "intermediate_size": 24, "vocab_size": 1000,
         "tie_word_embeddings": False, "torch_dtype": "bfloat16"}  # fmt: skip
CONFIG = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", **SIZES}
PARAMS = {"dim": 16, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 1000}
ROWS = "wq", "wk", "wv", "w1", "w3", "output"
COLUMNS = "wo", "w2"


def model(*, tied=False):
    """Return random bits under Meta's names."""
    rng = np.random.default_rng(3)

    def words(*shape):
        return rng.integers(0, 0x7F00, shape).astype("<u2")

    made = {"tok_embeddings.weight": words(1000, 16), "norm.weight": words(16),
            "rope.freqs": words(2), "output.weight": words(1000, 16)}  # fmt: skip
    if tied:
        made["output.weight"] = made["tok_embeddings.weight"]
    for layer in range(2):
        made |= {
            f"layers.{layer}.{name}.weight": words(*shape)
            for name, shape in {
                "attention.wq": (16, 16), "attention.wk": (8, 16), "attention.wv": (8, 16),
                "attention.wo": (16, 16), "feed_forward.w1": (24, 16), "feed_forward.w3": (24, 16),
                "feed_forward.w2": (16, 24), "attention_norm": (16,), "ffn_norm": (16,),
            }.items()
        }  # fmt: skip
    return made


def write(folder, tensors, ranks, embedding=0):
    folder.mkdir()
    axes = {**dict.fromkeys(ROWS, 0), **dict.fromkeys(COLUMNS, 1), "tok_embeddings": embedding}
    for rank in range(ranks):
        part = {}
        for name, words in tensors.items():
            axis = axes.get(name.split(".")[-2])
            held = words if axis is None else np.split(words, ranks, axis)[rank]
            part[name] = "BFloat16", np.ascontiguousarray(held)
        torch.save(folder / f"consolidated.{rank:02}.pth", part)
    (folder / "params.json").write_text(json.dumps(PARAMS))
    (folder.parent / "config.json").write_text(json.dumps(CONFIG))
    return folder


def renamed(tensors, *, tied=False):
    """Return what Transformers has of them: in each head the even rows, then the odd ones."""
    names = {"tok_embeddings": "model.embed_tokens", "norm": "model.norm", "output": "lm_head"}
    inner = {
        "attention.wq": "self_attn.q_proj", "attention.wk": "self_attn.k_proj",
        "attention.wv": "self_attn.v_proj", "attention.wo": "self_attn.o_proj",
        "feed_forward.w1": "mlp.gate_proj", "feed_forward.w3": "mlp.up_proj",
        "feed_forward.w2": "mlp.down_proj", "attention_norm": "input_layernorm",
        "ffn_norm": "post_attention_layernorm",
    }  # fmt: skip
    heads = {"attention.wq": 4, "attention.wk": 2}
    made = {}
    for name, words in tensors.items():
        stem = name.removesuffix(".weight")
        if name == "rope.freqs" or (tied and stem == "output"):
            continue
        if stem in names:
            made[names[stem] + ".weight"] = words
            continue
        _, layer, kind = stem.split(".", 2)
        if kind in heads:
            turned = words.reshape(heads[kind], len(words) // heads[kind] // 2, 2, -1)
            words = turned.transpose(0, 2, 1, 3).reshape(words.shape)
        made[f"model.layers.{layer}.{inner[kind]}.weight"] = words
    return {n: ("BFloat16", w.shape, w.tobytes()) for n, w in made.items()}


@pytest.mark.parametrize("kind", ["llama2", "llama3"])
def test_files_of_two_ranks_are_whole_again(kind, tmp_path):
    transformed(DATA / "meta" / kind, tmp_path / "dst", dst_form="huggingface")
    assert whole(tmp_path / "dst") == EXPECTED
    assert rankxform.verify(DATA / "meta" / kind, tmp_path / "dst").same


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("embedding", [0, 1])
@pytest.mark.parametrize("tied", [False, True])
def test_become_transformers_names_and_again_meta_s(ranks, embedding, tied, tmp_path):
    tensors = model(tied=tied)
    src = write(tmp_path / "src", tensors, ranks, embedding)
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": tied}))
    named = {"map": "llama_meta", "config": str(tmp_path / "config.json")}
    transformed(src, tmp_path / "hf", dst_form="huggingface", **named)
    assert whole(tmp_path / "hf") == renamed(tensors, tied=tied)
    transformed(
        tmp_path / "hf", tmp_path / "ranks", format="safetensors", unmatched="replicate",
        dst_strategy="shard:attention.wq=0,attention.wo=1@2", **named,
    )  # fmt: skip
    again = rankxform.load(tmp_path / "ranks", src_strategy="shard:attention.wq=0,attention.wo=1@2")
    wanted = {n: w for n, w in tensors.items() if n != "rope.freqs"}
    wanted = {n: w for n, w in wanted.items() if not tied or n != "output.weight"}
    assert {n: again[n].tobytes() for n in again} == {n: w.tobytes() for n, w in wanted.items()}


class TestRefusals:
    @pytest.fixture
    def src(self, tmp_path):
        return write(tmp_path / "src", model(), 2)

    def refused(self, src, text, **options):
        with pytest.raises(RankxformError, match=text) as raised:
            rankxform.transform(src, src.parent / "dst", dst_form="huggingface", **options)
        assert raised.value.tries and not (src.parent / "dst").exists()

    def test_a_missing_rank(self, src):
        (src / "consolidated.00.pth").unlink()
        self.refused(src, r"consolidated\.00\.pth.*is missing")

    @pytest.mark.parametrize("ranks", [2, 4])
    def test_the_last_ranks_are_missing(self, ranks, tmp_path):
        src = write(tmp_path / "x", model(), ranks)
        for rank in range(ranks // 2, ranks):
            (src / f"consolidated.{rank:02}.pth").unlink()
        self.refused(src, "of 16 columns of layers.0.attention.wo.weight")

    def test_two_files_of_one_rank(self, src):
        shutil.copy(src / "consolidated.01.pth", src / "consolidated.0001.pth")
        self.refused(src, "3 files of 2 ranks")

    def test_what_all_ranks_hold_is_not_the_same(self, src):
        other = {**model(), "layers.1.ffn_norm.weight": np.full(16, 0x3F80, "<u2")}
        write(src.parent / "other", other, 2)
        shutil.copy(src.parent / "other/consolidated.01.pth", src)
        self.refused(
            src, "'layers.1.ffn_norm.weight' is not the same in the files of ranks 0 and 1"
        )

    def test_heads_of_another_configuration(self, src):
        """The same shapes, of which other rows would be in turn."""
        (src.parent / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 2}))
        named = {"map": "llama_meta", "config": src.parent / "config.json"}
        self.refused(src, "num_attention_heads", **named)

    def test_a_tensor_that_nobody_knows(self, src):
        tensors = {**model(), "layers.0.attention.gate": np.zeros(4, "<u2")}
        shutil.rmtree(src)
        self.refused(write(src, tensors, 2), "how 2 ranks hold 'layers.0.attention.gate'")

    def test_an_embedding_that_is_neither_rows_nor_columns(self, src):
        tensors = {**model(), "tok_embeddings.weight": np.zeros((1000, 24), "<u2")}
        shutil.rmtree(src)
        self.refused(write(src, tensors, 2), r"norm\.weight")

    def test_ranks_of_two_models(self, src):
        other = {**model(), "layers.0.feed_forward.w1.weight": np.zeros((32, 16), "<u2")}
        write(src.parent / "other", other, 2)
        shutil.copy(src.parent / "other/consolidated.01.pth", src)
        self.refused(src, "another rank's")

    def test_beside_files_of_another_form(self, src):
        """The folder is that of what Transformers reads."""
        reference_forms.write_huggingface(src, {"w": ("Float32", np.zeros(2, "<u4"))}, 1)
        assert [*rankxform.load(src)] == ["w"]
