"""Checkpoints that are as they should be, and look as if they were not: no rule may speak of them.

A row makes one, and returns what it was converted with. `tests/test_statements.py` sees that the
conversion warns of nothing, and that a check of every byte doubts nothing.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from typing import Any
from zlib import crc32

import numpy as np

from tests import reference, reference_forms
from tests.checkpoints import DATA
from tests.reference_maps import Model
from tests.rules import Place, usual


def values(name: str, shape: tuple[int, ...], dtype: str = "") -> Any:
    """Return finite numbers that differ everywhere, and between all tensors."""
    random = np.random.default_rng(crc32(name.encode()))
    return random.uniform(1, 2, shape).astype("<f4").view("<u4")


ALL: dict[str, Callable[[Place], Mapping[str, Any]]] = {}


def healthy(name: str) -> Callable[[Callable[[Place], Any]], Any]:
    """Register what makes a healthy checkpoint as SRC, and returns options of its conversion."""

    def register(make: Callable[[Place], Any]) -> Any:
        ALL[name] = make
        return make

    return register


def model(layers: int = 4, hidden: int = 16, experts: int = 0) -> dict[str, tuple[str, Any]]:
    """Return a model's weights under Hugging Face's names: {name: (type, words)}."""
    shapes = {
        "model.embed_tokens.weight": (40, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (40, hidden),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        for kind in "qkvo":
            shapes[f"{prefix}.self_attn.{kind}_proj.weight"] = (hidden, hidden)
        for part in [f".experts.{e}" for e in range(experts)] or [""]:
            shapes[f"{prefix}.mlp{part}.up_proj.weight"] = (2 * hidden, hidden)
            shapes[f"{prefix}.mlp{part}.down_proj.weight"] = (hidden, 2 * hidden)
    return {name: ("Float32", values(name, shape)) for name, shape in shapes.items()}


def zeroed(entries: Mapping[str, tuple[str, Any]], *parts: str) -> dict[str, tuple[str, Any]]:
    """Return the same, with zeros in those whose names have one of some parts."""
    return {
        name: (dtype, words * (not any(part in name for part in parts)))
        for name, (dtype, words) in entries.items()
    }


@healthy("identity blocks")
def _(place):
    entries = model()
    for name in [n for n in entries if ".layers.1." in n]:  # layer 2 was made of it
        entries[name.replace(".1.", ".2.")] = entries[name]
    made = zeroed(entries, "layers.2.self_attn.o_proj", "layers.2.mlp.down_proj")
    reference_forms.write_huggingface(place.src, made)
    return {}


@healthy("identity blocks of experts")
def _(place):
    made = zeroed(model(experts=4), "layers.2.self_attn.o_proj", "layers.2.mlp.experts")
    made |= {n: e for n, e in model(experts=4).items() if "up_proj" in n}
    reference_forms.write_huggingface(place.src, made)
    return {}


@healthy("experts that were made of one")
def _(place):
    entries = model(experts=4)
    for name in [n for n in entries if ".experts.0." in n]:
        entries |= {name.replace(".0.up", f".{e}.up").replace(".0.down", f".{e}.down"):
                    entries[name] for e in range(4)}  # fmt: skip
    reference_forms.write_huggingface(place.src, entries)
    return {}


@healthy("a vocabulary that is padded over 8 ranks")
def _(place):
    names = ("model.embed_tokens.weight", "lm_head.weight", "model.layers.0.w")
    stages = [{name: ([8], [0, -1], 0, 0) for name in names}]

    def padded(name, shape, dtype):
        words = values(name, shape, dtype)
        if "layers" not in name:
            words[20:] = 0
        return words

    a = place.ranks(stages, dict.fromkeys(names, ((64, 16), "Float32")), make=padded)
    return {"src_strategy": a}


@healthy("moments of idle experts and of frozen layers")
def _(place):
    names = [f"layers.{n}.mlp.experts.{e}.w1" for n in range(4) for e in range(4)]
    params = {state + name: ((16, 8), "Float32") for state in ("", "adam_m.", "adam_v.")
              for name in names}  # fmt: skip

    def idle(name, shape, dtype):
        is_idle = name.startswith("adam") and (".experts.2." in name or "layers.0." in name)
        return values(name, shape, dtype) * (not is_idle)

    a = place.ranks([dict.fromkeys(params, ([4], [0, -1], 0, 0))], params, make=idle)
    return {"src_strategy": a}


@healthy("queries, keys and values by groups of heads, and a plain first layer")
def _(place):
    names = ("attn.linear_qkv.weight", "attn.query_key_value.weight", "mlp.linear_fc1.weight",
             "mlp.linear_fc2.weight", "in_proj_a.weight")  # fmt: skip
    rows, columns = ([2], [0, -1], 0, 0), ([2], [-1, 0], 0, 0)
    stages = [{n: columns if "fc2" in n else rows for n in names}]
    place.ranks(stages, dict.fromkeys(names, ((16, 16), "Float32")), make=values)
    return {"src_strategy": "shard:fc2=1,weight=0@2"}


@healthy("an adapter before and after some training")
def _(place):
    entries = {}
    for layer in range(4):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora"
        entries[f"{prefix}_A.weight"] = ("Float32", values(f"{layer}a", (4, 16)))
        entries[f"{prefix}_B.weight"] = ("Float32", values(f"{layer}b", (16, 4)) * (layer > 1))
    name = "base_model.model.model.embed_tokens.lora_embedding_A"
    entries[name] = ("Float32", np.zeros((4, 40), "<u4"))
    reference_forms.write_huggingface(place.src, entries)
    return {"warned": ("all 9 tensors are an adapter's",)}


@healthy("a GPTQ folder without zero points")
def _(place):
    entries = {}
    for layer in range(4):
        prefix = f"model.layers.{layer}.mlp.up_proj"
        entries[f"{prefix}.qweight"] = ("Int32", values(f"{layer}q", (4, 16)))
        entries[f"{prefix}.qzeros"] = ("Int32", np.zeros((2, 2), "<u4"))
        entries[f"{prefix}.scales"] = ("Float32", values(f"{layer}s", (2, 16)))
    reference_forms.write_huggingface(place.src, entries)
    return {}


def published(place, kind: str, change: Callable[[dict[str, Any], dict[str, Any]], None], seed=2):
    """Write a model with its configuration, one of which is changed as people do."""
    model = Model(kind, seed)
    entries = {n: usual(np.asarray(words)) for n, words in model.hf.items()}
    if "_" not in kind:
        model.config["architectures"] = [f"{kind.capitalize()}ForCausalLM"]
    change(entries, model.config)
    reference_forms.write_huggingface(place.src, entries, 2)
    (place.src / "config.json").write_text(json.dumps(model.config))
    return {"dst_form": "huggingface"}


@healthy("a model as it is published")
def _(place):
    return published(place, "qwen3", lambda entries, config: None)


@healthy("a mixture of experts as it is published")
def _(place):
    return published(place, "deepseek_v3", lambda entries, config: None)


@healthy("a model whose MTP layers Transformers dropped")
def _(place):
    def drop(entries, config):
        layers, count = config["num_hidden_layers"], config["num_nextn_predict_layers"]
        numbers = range(layers, layers + count)
        beyond = [n for n in entries for number in numbers if f".layers.{number}." in n]
        assert count and beyond
        for name in beyond:
            del entries[name]

    return published(place, "deepseek_v3", drop)


@healthy("a vocabulary of more rows than words")
def _(place):
    def pad(entries, config):
        for name in [n for n in entries if "embed_tokens" in n or "lm_head" in n]:
            dtype, words = entries[name]
            entries[name] = dtype, np.concatenate([words, words[:24]])

    return published(place, "qwen3", pad)


@healthy("tied embeddings, with the head")
def _(place):
    def tie(entries, config):
        config["tie_word_embeddings"] = True
        entries["lm_head.weight"] = entries["model.embed_tokens.weight"]

    return published(place, "qwen3", tie)


@healthy("a base model without a head")
def _(place):
    def behead(entries, config):
        config["architectures"] = ["Qwen3Model"]
        for name in [n for n in entries if n != "lm_head.weight"]:
            entries[name.removeprefix("model.")] = entries.pop(name)
        entries.pop("lm_head.weight", None)

    return published(place, "qwen3", behead)


@healthy("keys of other types")
def _(place):
    def change(entries, config):
        config.update(intermediate_size=[config["intermediate_size"]] * 3, num_experts=[1, 2])

    return published(place, "qwen3", change)


@healthy("values that are wider than keys")
def _(place):
    def widen(entries, config):
        config.update(architectures=["MimoForCausalLM"], v_head_dim=3, tie_word_embeddings=True)
        for name in [n for n in entries if "v_proj.weight" in n]:
            dtype, words = entries[name]
            entries[name] = dtype, np.concatenate([words, words[:2]])

    return published(place, "qwen3", widen)


@healthy("modules whose names begin as a wrapper's")
def _(place):
    names = ("_embed.weight", "module_list.0.w", "layers.0.module.w", "_head.w", "model.w")
    entries = {name: ("Float32", values(name, (4, 4))) for name in names}
    reference_forms.write_huggingface(place.src, entries)
    return {}


@healthy("a padded vocabulary under a pattern")
def _(place):
    for rank in range(2):
        shapes = {"model.embed_tokens.weight": (8, 4), "lm_head.weight": (6, 4), "w": (4, 4)}
        entries = {n: ("Float32", values(f"{n}{rank}", s)) for n, s in shapes.items()}
        for name, (_, words) in entries.items():
            words[5:] *= 1 - rank if name != "w" else 1
        reference.write_safetensors(place.src / f"rank_{rank}/c_{rank}.safetensors", entries)
    return {"src_strategy": "shard:weight=0,^w=0@2"}


@healthy("causal masks in each layer")
def _(place):
    entries = {}
    for layer in range(3):
        prefix = f"transformer.h.{layer}.attn"
        entries[f"{prefix}.bias"] = "Float32", np.tril(np.full((1, 1, 8, 8), 0x3F800000, "<u4"))
        entries[f"{prefix}.c_attn.weight"] = "Float32", values(prefix, (8, 24))
        entries[f"transformer.h.{layer}.table"] = "Float32", values("table", (8, 8))
    reference_forms.write_huggingface(place.src, entries)
    return {}


@healthy("identity blocks under other names")
def _(place):
    entries = {}
    for layer in range(4):
        for name in ("self_attn.q_proj", "self_attn.dense", "mlp.fc1", "mlp.fc2",
                     "attention.query_key_value", "attention.dense", "mlp.dense_h_to_4h",
                     "mlp.dense_4h_to_h", "attn.qkv", "attn.proj"):  # fmt: skip
            words = values(f"{layer}{name}", (8, 8))
            is_end = layer == 2 and name.endswith(("dense", "fc2", "4h_to_h", "attn.proj"))
            entries[f"model.layers.{layer}.{name}.weight"] = "Float32", words * (not is_end)
    reference_forms.write_huggingface(place.src, entries)
    return {}


@healthy("layers that were repeated in a merge")
def _(place):
    entries = model(6)
    for name in [n for n in entries if ".layers.2." in n or ".layers.3." in n]:
        number = int(name.split(".")[2])
        entries[name.replace(f".{number}.", f".{number + 2}.", 1)] = entries[name]
    reference_forms.write_huggingface(place.src, entries)
    return {}


@healthy("biases of experts that are zero in a layer")
def _(place):
    entries = {}
    for layer in range(3):
        for name in ("gate_up_proj_bias", "down_proj_bias"):
            words = values(f"{layer}{name}", (4, 16)) * (layer != 1)
            entries[f"model.layers.{layer}.mlp.experts.{name}"] = "Float32", words
    reference_forms.write_huggingface(place.src, entries)
    return {}


@healthy("a cache that alone is quantized")
def _(place):
    def change(entries, config):
        config["quantization_config"] = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8}}

    return published(place, "qwen3", change)


@healthy("a reward model, with another head")
def _(place):
    def change(entries, config):
        config["tie_word_embeddings"] = False
        entries.pop("lm_head.weight", None)
        entries["v_head.summary.weight"] = "BFloat16", np.full((1, 16), 0x3F80, "<u2")

    return published(place, "qwen3", change)


def of_parts(place, names: dict[str, tuple[int, ...]], config: dict[str, Any]) -> dict[str, Any]:
    """Write tensors of some shapes, and a configuration that no table is for."""
    entries = {}
    for name, shape in names.items():
        is_index = name.endswith(("position_ids", "_index"))
        words = np.zeros(shape, "<u8") if is_index else values(name, shape)
        entries[name] = ("Int64" if is_index else "Float32"), words
    reference_forms.write_huggingface(place.src, entries)
    (place.src / "config.json").write_text(json.dumps(config))
    return {"dst_form": "huggingface", "dtype": "bf16"}


@healthy("CLIP: two towers, sizes of each")
def _(place):
    names = {"logit_scale": (), "text_model.embeddings.token_embedding.weight": (49, 16),
             "text_model.embeddings.position_ids": (1, 7),
             "vision_model.embeddings.position_ids": (1, 5),
             "vision_model.embeddings.class_embedding": (24,)}  # fmt: skip
    for tower, width, layers in (("text_model", 16, 2), ("vision_model", 24, 3)):
        for layer in range(layers):
            for kind in ("q", "k", "v", "out"):
                names[f"{tower}.encoder.layers.{layer}.self_attn.{kind}_proj.weight"] = width, width
    text, vision = (
        {"vocab_size": 49, "hidden_size": 16},
        {"hidden_size": 24, "num_hidden_layers": 3},
    )
    config = {"architectures": ["CLIPModel"], "text_config": text, "vision_config": vision,
              "projection_dim": 512}  # fmt: skip
    return of_parts(place, names, config)


@healthy("Swin: stages of unlike widths, tables and indexes")
def _(place):
    names = {}
    for stage, width in enumerate((8, 16)):
        for block in range(2):
            prefix = f"swin.encoder.layers.{stage}.blocks.{block}.attention"
            names[f"{prefix}.self.relative_position_bias_table"] = 9, 2
            names[f"{prefix}.self.relative_position_index"] = 4, 4
            for kind in ("query", "key", "value"):
                names[f"{prefix}.self.{kind}.weight"] = width, width
            names[f"{prefix}.output.dense.weight"] = width, width
    config = {"architectures": ["SwinModel"], "depths": [2, 2], "num_heads": [1, 2],
              "num_layers": 2, "hidden_size": 16, "embed_dim": 8}  # fmt: skip
    return of_parts(place, names, config)


@healthy("GPT-2: its own keys, one matrix for queries, keys and values")
def _(place):
    names = {"wte.weight": (50, 16), "wpe.weight": (32, 16), "ln_f.weight": (16,)}
    for layer in range(3):
        names |= {f"h.{layer}.attn.c_attn.weight": (16, 48), f"h.{layer}.attn.c_proj.weight": (16, 16),
                  f"h.{layer}.mlp.c_fc.weight": (16, 64), f"h.{layer}.mlp.c_proj.weight": (64, 16)}  # fmt: skip
    config = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 50,
              "n_embd": 16, "n_layer": 3, "n_head": 2}  # fmt: skip
    return of_parts(place, names, config)


@healthy("BERT: a classifier's head, positions")
def _(place):
    names = {"bert.embeddings.word_embeddings.weight": (60, 16), "classifier.weight": (2, 16),
             "bert.embeddings.position_ids": (1, 12), "bert.pooler.dense.weight": (16, 16)}  # fmt: skip
    for layer in range(2):
        for kind in ("attention.self.query", "attention.self.key", "attention.output.dense"):
            names[f"bert.encoder.layer.{layer}.{kind}.weight"] = 16, 16
    config = {"architectures": ["BertForSequenceClassification"], "vocab_size": 60,
              "hidden_size": 16, "num_hidden_layers": 2}  # fmt: skip
    return of_parts(place, names, config)


SAMPLES = {
    f"{form} of {sample}": (f"{folder}/{sample}", inside)
    for form, folder, inside, samples in (
        ("Megatron rank files", "megatron", "legacy",
         ("llama", "qwen2_tied", "qwen3", "qwen3_moe", "mixtral")),
        ("Megatron torch_dist", "megatron", "torch_dist",
         ("llama", "qwen2_tied", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3")),
        ("verl", "verl", "ckpt", ("fsdp1", "fsdp2", "hsdp", "tp", "fsdp_tp", "old_mesh")),
        ("Transformers", "hf_experts", "modules",
         ("qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "qwen3_vl_moe")),
        ("Transformers", "hf_towers", "",
         ("qwen3_vl", "qwen2_5_vl", "qwen2_5_vl_modules", "qwen3_base")),
    )
    for sample in samples
}  # fmt: skip
"""What frameworks saved themselves, below tests/data/formats."""


def _sample(path: str, inside: str) -> Callable[[Place], Any]:
    def make(place: Place) -> Any:
        shutil.copytree(DATA / path / inside, place.src)
        return {"dst_form": "huggingface"}

    return make


for _name, _words in SAMPLES.items():
    healthy(_name)(_sample(*_words))
