"""Language models inside vision-language models, and ones without a head: what Transformers saved."""

from __future__ import annotations

import json
import shutil
import warnings
from contextlib import nullcontext

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference, reference_forms
from tests.checkpoints import DATA

TOWERS = DATA / "hf_towers"
DENSE = {"qkv": "grouped", "gate_up": "interleaved"}
MODELS = {
    "qwen3_vl": (TOWERS / "qwen3_vl", "qwen3", DENSE, "model.language_model."),
    "qwen2_5_vl": (TOWERS / "qwen2_5_vl", "qwen2", DENSE, "model."),
    "qwen2_5_vl_modules": (
        TOWERS / "qwen2_5_vl_modules", "qwen2", DENSE, "model.language_model.",
    ),
    "qwen3_base": (TOWERS / "qwen3_base", "qwen3", DENSE, ""),
    "qwen3_vl_moe": (
        DATA / "hf_experts/qwen3_vl_moe/modules", "qwen3_moe",
        {"qkv": "grouped", "experts": "stacked"}, "model.language_model.",
    ),
}  # fmt: skip
WITH_TOWERS = [name for name in MODELS if name != "qwen3_base"]


def there_and_back(src, tmp, kind, towers, **options):
    """Return MindFormers' tensors of a model, and what they become again."""
    experts = options.pop("experts", None)
    named = {"map": kind, "towers": towers, "fsync": False, **options}
    rankxform.transform(src, tmp / "mf", dst_form="unified", **named)
    config = str(src / "config.json")
    back = {**named, "config": config, "experts": experts}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        if towers == "drop":
            said = pytest.warns(rankxform.RankxformWarning, match="alone, without a tower")
        else:
            said = nullcontext()
        with said:
            rankxform.transform(tmp / "mf", tmp / "hf", dst_form="huggingface", **back)
    inside = reference.read_safetensors(tmp / "mf/part0.safetensors")
    return inside, reference.read_safetensors(tmp / "hf/model.safetensors")


@pytest.mark.parametrize("model", MODELS)
def test_a_tower_is_carried_there_and_back(model, tmp_path):
    src, kind, options, _ = MODELS[model]
    inside, back = there_and_back(src, tmp_path, kind, "keep", **options)
    saved = reference.read_safetensors(src / "model.safetensors")
    assert back == saved
    towers = {name: saved[name] for name in saved if "visual" in name}
    assert bool(towers) == (model in WITH_TOWERS)
    assert {name: inside[name] for name in inside if "visual" in name} == towers
    assert "decoder.layers.1.self_attention.linear_qkv.weight" in inside


@pytest.mark.parametrize("model", WITH_TOWERS)
def test_a_tower_is_left_out_and_said(model, tmp_path):
    src, kind, options, before = MODELS[model]
    inside, back = there_and_back(src, tmp_path, kind, "drop", **options)
    saved = reference.read_safetensors(src / "model.safetensors")
    language = {name: saved[name] for name in saved if "visual" not in name}
    if model == "qwen2_5_vl_modules":  # without towers the published prefix is taken
        language = {name.replace(before, "model."): t for name, t in language.items()}
    assert back == language and not any("visual" in name for name in inside)
    report = rankxform.transform(
        src, tmp_path / "again", dst_form="unified", map=kind, towers="drop", **{
            n: w for n, w in options.items() if n != "experts"
        }
    )  # fmt: skip
    assert [group.reason for group in report.left_out] == ["of a tower (--towers drop)"]


@pytest.mark.parametrize("model", WITH_TOWERS)
def test_nothing_is_guessed_of_a_tower(model, tmp_path):
    src, kind, options, _ = MODELS[model]
    options = {name: word for name, word in options.items() if name != "experts"}
    with pytest.raises(RankxformError, match="has towers") as raised:
        rankxform.transform(src, tmp_path / "mf", dst_form="unified", map=kind, **options)
    assert [text.split()[1] for text in raised.value.tries] == ["drop", "keep"]
    assert not (tmp_path / "mf").exists()


def test_a_language_model_below_another_prefix_has_its_own_head(tmp_path):
    """As Llava's published files have it."""
    config = {
        "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava",
        "text_config": {
            "model_type": "llama", "hidden_size": 4, "num_hidden_layers": 0, "vocab_size": 6,
            "num_attention_heads": 2, "intermediate_size": 8,
        },
    }  # fmt: skip
    words = np.arange(24, dtype="<u4").reshape(6, 4)
    tensors = {
        "language_model.model.embed_tokens.weight": ("Float32", words),
        "language_model.model.norm.weight": ("Float32", words[0]),
        "language_model.lm_head.weight": ("Float32", words + 1),
        "vision_tower.w": ("Float32", words + 2),
        "multi_modal_projector.w": ("Float32", words + 3),
    }
    src = reference_forms.write_huggingface(tmp_path / "src", tensors, 1)
    (src / "config.json").write_text(json.dumps(config))
    inside, back = there_and_back(src, tmp_path, "llama", "keep", **DENSE)
    assert {*inside} == {
        "embedding.word_embeddings.weight", "decoder.final_layernorm.weight", "output_layer.weight",
        "vision_tower.w", "multi_modal_projector.w",
    }  # fmt: skip
    assert back == {n: (d, w.shape, w.tobytes()) for n, (d, w) in tensors.items()}


def test_an_architecture_that_no_table_knows_is_refused(tmp_path):
    src = shutil.copytree(TOWERS / "qwen3_vl", tmp_path / "src")
    config = json.loads((src / "config.json").read_text())
    (src / "config.json").write_text(json.dumps({**config, "architectures": ["OtherModel"]}))
    with pytest.raises(RankxformError, match="is of a OtherModel"):
        rankxform.transform(src, tmp_path / "mf", dst_form="unified", map="qwen3", **DENSE)


def test_the_option_is_for_a_map(tmp_path):
    with pytest.raises(RankxformError, match="--towers is for --map"):
        rankxform.transform(TOWERS / "qwen3_vl", tmp_path / "d", dst_form="dcp", towers="drop")
