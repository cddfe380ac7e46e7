"""What Megatron-Core's tensors are, made of Hugging Face's by numpy alone; nothing of rankxform."""

from __future__ import annotations

import json

import numpy as np

from tests import reference_forms

PADDED = 24  # rows of the samples' vocabulary of 20


LOCAL_SPEC = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
}
"""Norms as a torch_dist folder has them, and as the local specification calls them."""


def local(name):
    """Return what the local specification calls a tensor of a torch_dist folder."""
    for fused, own in LOCAL_SPEC.items():
        name = name.replace(fused, own)
    return name


def tensors_of(sample):
    """Return the tensors of a sample of tests/data/formats/megatron, {name: (type, words)}."""
    config = json.loads((sample / "config.json").read_text())
    stored = reference_forms.tensors_in(sample / "expected.safetensors")
    words = {name: w for name, (_, w) in stored.items()}
    found = {}
    for name, its_words in words.items():
        if name in ("model.embed_tokens.weight", "lm_head.weight"):
            first = (its_words[:1].view("<f4") * np.float32(0.5)).view("<u4")
            padding = np.repeat(first, PADDED - len(its_words), axis=0)
            other = {"lm_head.weight": "output_layer.weight"}
            own = other.get(name, "embedding.word_embeddings.weight")
            found[own] = np.concatenate([its_words, padding])
        elif name == "model.norm.weight":
            found["decoder.final_layernorm.weight"] = its_words
    for layer in range(config["num_hidden_layers"]):
        found |= _layer(words, config, f"model.layers.{layer}.", f"decoder.layers.{layer}.")
    return {name: ("Float32", its_words) for name, its_words in found.items()}


def _layer(words, config, theirs, ours):
    found = {}
    groups = config["num_key_value_heads"]
    for kind in ("weight", "bias"):
        parts = [words.get(f"{theirs}self_attn.{x}_proj.{kind}") for x in "qkv"]
        if parts[0] is not None:
            by_group = [part.reshape(groups, -1, *part.shape[1:]) for part in parts]
            joined = np.concatenate(by_group, axis=1).reshape(-1, *parts[0].shape[1:])
            found[f"{ours}self_attention.linear_qkv.{kind}"] = joined
    plain = {
        "input_layernorm": "input_layernorm", "post_attention_layernorm": "pre_mlp_layernorm",
        "self_attn.o_proj": "self_attention.linear_proj", "mlp.down_proj": "mlp.linear_fc2",
        "self_attn.q_norm": "self_attention.q_layernorm", "mlp.gate": "mlp.router",
        "self_attn.k_norm": "self_attention.k_layernorm", "block_sparse_moe.gate": "mlp.router",
    }  # fmt: skip
    for name, other in plain.items():
        if f"{theirs}{name}.weight" in words:
            found[f"{ours}{other}.weight"] = words[f"{theirs}{name}.weight"]
    if f"{theirs}mlp.gate_proj.weight" in words:
        halves = [words[f"{theirs}mlp.{half}_proj.weight"] for half in ("gate", "up")]
        found[f"{ours}mlp.linear_fc1.weight"] = np.concatenate(halves)
    for module, names in (
        ("mlp", ("gate_proj", "up_proj", "down_proj")),
        ("block_sparse_moe", ("w1", "w3", "w2")),
    ):
        experts = [
            [words[f"{theirs}{module}.experts.{e}.{name}.weight"] for name in names]
            for e in range(config["num_experts"])
            if f"{theirs}{module}.experts.{e}.{names[0]}.weight" in words
        ]
        if experts:
            fc1 = np.stack([np.concatenate([gate, up]) for gate, up, _ in experts])
            found[f"{ours}mlp.experts.experts.linear_fc1.weight"] = fc1
            found[f"{ours}mlp.experts.experts.linear_fc2.weight"] = np.stack(
                [e[2] for e in experts]
            )
    return found
