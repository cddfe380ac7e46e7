"""Folders of integers that stand for numbers, and of tables."""

from __future__ import annotations

import json

import numpy as np
import pytest

import rankxform
from rankxform.errors import CheckpointError
from tests import reference, reference_forms

ONE = {"Float32": 0x3F800000, "Float16": 0x3C00}
NORM = {"norm.weight": ("Float32", (16,))}
QUANTIZED = {
    "gptq": {"q.qweight": ("Int32", (4, 32)), "q.qzeros": ("Int32", (1, 4)),
             "q.scales": ("Float16", (1, 32)), "q.g_idx": ("Int32", (32,))},
    "hqq": {"q.W_q": ("UInt8", (16, 32)), "q.scale": ("Float16", (64, 1)), "q.zero": ("Float16", (64, 1))},
    "eetq": {"q.weight": ("Int8", (32, 16)), "q.weight_scales": ("Float16", (16,))},
    "quanto": {"q.weight._data": ("Int8", (32, 16)), "q.weight._scale": ("Float32", (32, 1))},
    "packed": {"q.indices_packed": ("Int32", (1, 8, 16)), "q.centroids": ("Float16", (1, 16, 8))},
    "aqlm": {"q.codes": ("Int16", (32, 2, 1)), "q.codebooks": ("Float16", (1, 256, 1, 8)),
             "q.scales": ("Float16", (32, 1, 1, 1))},
    "vptq": {"q.indices": ("Int32", (1, 8, 64)), "q.centroids.weight": ("Float16", (1, 256))},
    "gpt_oss": {"mlp.experts.down_proj_blocks": ("UInt8", (4, 32, 2, 16)),
                "mlp.experts.down_proj_scales": ("UInt8", (4, 32, 2))},
    "other": {"q.codes": ("UInt32", (32, 4)), "q.steps": ("Float32", (32,))},
}  # fmt: skip
PLAIN = {
    "clip": {"embeddings.position_ids": ("Int64", (1, 16)),
             "embeddings.class_embedding": ("Float32", (16,))},
    "bert": {"embeddings.position_ids": ("Int32", (1, 16)),
             "embeddings.word_embeddings.weight": ("Float32", (32, 16))},
    "swin": {"attn.relative_position_index": ("Int32", (64, 64)),
             "attn.relative_position_bias_table": ("Float32", (225, 32))},
    "gpt2": {"attn.bias": ("UInt8", (1, 1, 16, 16)), "attn.masked_bias": ("Float32", ()),
             "attn.c_attn.weight": ("Float32", (16, 48))},
    "deepseek_v4": {"ffn.gate.tid2eid": ("Int32", (32, 4)), "ffn.gate.weight": ("Float32", (8, 16))},
    "routing": {"gate.tid2eid": ("Int32", (40, 4)), "gate.bias": ("Float32", (4,))},
    "rotary": {"rotary.position_grid": ("Int32", (8, 8)), "rotary.inv_freq": ("Float32", (8,))},
    "swin_idx": {"attn.relative_position_idx": ("Int32", (16, 16)),
                 "attn.relative_position_bias_table": ("Float32", (32, 4))},
    "medusa": {"tree_choices": ("Int32", (16, 4)), "scale": ("Float32", (4,))},
    "counts": {"n": ("Int32", (16, 4)), "a": ("Float32", (16, 4))},
    "bool": {"attn.tril": ("Bool", (16, 16)), "attn.scale": ("Float32", (16,))},
}  # fmt: skip


def random_folder(path, types):
    words = {"Float32": "<u4", "Float16": "<u2", "Int32": "<u4", "UInt32": "<u4", "UInt8": "u1",
             "Int8": "u1", "Int16": "<u2", "Int64": "<u8", "Bool": "u1"}  # fmt: skip
    tensors = {
        name: (dtype, np.full(shape, ONE.get(dtype, 1), words[dtype]))
        for name, (dtype, shape) in {**types, **NORM}.items()
    }
    return reference_forms.write_huggingface(path, tensors)


@pytest.mark.parametrize("kind", QUANTIZED)
def test_a_folder_of_integers_that_stand_for_numbers(kind, tmp_path):
    """A copy is exact; another type is refused, and an adapter where it is for such a module."""
    src = random_folder(tmp_path / "src", QUANTIZED[kind])
    rankxform.transform(src, tmp_path / "copy", dst_form="huggingface", fsync=False)
    with pytest.raises(CheckpointError, match="is quantized .*--dtype would change"):
        rankxform.transform(src, tmp_path / "dst", dst_form="huggingface", dtype="bf16")
    assert not (tmp_path / "dst").exists()


@pytest.mark.parametrize("kind", PLAIN)
def test_a_folder_with_tables_of_integers(kind, tmp_path):
    src = random_folder(tmp_path / "src", PLAIN[kind])
    rankxform.transform(src, tmp_path / "dst", dst_form="huggingface", dtype="bf16", fsync=False)


def test_an_adapter_beside_a_module_of_integers(tmp_path):
    """Only what it touches must be numbers."""
    plain = {"k.weight": ("Float32", (16, 16))}
    src = random_folder(tmp_path / "src", QUANTIZED["other"] | plain)
    for module, shapes in (("k", ((2, 16), (16, 2))), ("q", ((2, 16), (32, 2)))):
        lora = tmp_path / module
        entries = {
            f"base_model.model.{module}.lora_{m}.weight": (
                "Float32",
                np.full(shape, ONE["Float32"], "<u4"),
            )
            for m, shape in zip("AB", shapes)
        }
        reference.write_safetensors(lora / "adapter_model.safetensors", entries)
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
        (lora / "adapter_config.json").write_text(json.dumps(config))
    options = {"dst_form": "huggingface", "fsync": False}
    with pytest.warns(rankxform.RankxformWarning, match="as before the training"):
        rankxform.transform(src, tmp_path / "dst", lora=tmp_path / "k", **options)
    with pytest.raises(CheckpointError, match="'q.codes' is quantized .*--lora would change"):
        rankxform.transform(src, tmp_path / "other", lora=tmp_path / "q", **options)
