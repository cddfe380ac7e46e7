"""Tiny random models of transformers; run by the Python of an environment that has it.

``python transformers_jobs.py make MODEL FOLDER`` saves a model and its tokens' logits;
``compare FOLDER OTHER`` loads OTHER and compares its logits with those of FOLDER, bit by bit.
"""

import sys
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

SIZES = {
    "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 1024, "head_dim": 8, "max_position_embeddings": 64,
}  # fmt: skip
SPARSE = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}  # fmt: skip
LATENT = {
    "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "head_dim": 4, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
    "num_key_value_heads": 4,
}  # fmt: skip
MODELS = {
    "llama": ("Llama", {}), "qwen2": ("Qwen2", {}), "qwen3": ("Qwen3", {}),
    "qwen3_moe": ("Qwen3Moe", SPARSE), "mixtral": ("Mixtral", SPARSE),
    "deepseek_v3": ("DeepseekV3", SPARSE | LATENT), "glm4": ("Glm4", {"pad_token_id": 0}),
}  # fmt: skip


def logits(folder):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    tokens = torch.arange(24).reshape(2, 12) * 37 % 1000
    with torch.no_grad():
        return model.eval()(tokens).logits.float()


def make(kind, folder):
    name, more = MODELS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES | more)
    torch.manual_seed(5)
    model = getattr(transformers, f"{name}ForCausalLM")(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    model.to(torch.bfloat16).save_pretrained(folder)
    save_file({"logits": logits(folder)}, Path(folder).with_suffix(".logits"))


def compare(folder, other):
    expected = load_file(Path(folder).with_suffix(".logits"))["logits"]
    found = logits(other)
    assert expected.isfinite().all() and expected.std() > 0
    assert torch.equal(found, expected), (found - expected).abs().max()


if __name__ == "__main__":
    {"make": make, "compare": compare}[sys.argv[1]](*sys.argv[2:])
