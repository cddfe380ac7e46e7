"""A Qwen3-shaped Hugging Face model whose vocabulary (37) no tensor-parallel size divides (Megatron-Bridge #1331, ColossalAI #6167),
tied or not (gemma #8, Qwen3-VL-Embedding #89): KIND/ = untied, tied (no lm_head, config says tied), lying (no lm_head, config says untied).
Usage: this program OUT. Right for mp=4: refused for 37 with the next size and the option; with --vocab 40 rows 37..39 zero, rank r has rows 10r..10r+9,
and OUT/KIND comes back bit for bit with --vocab 37. A tied model must come back without lm_head."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
rng = np.random.default_rng(7); f = lambda *s: rng.standard_normal(s).astype("f4")
H, L, NH, NK, D, F, V = 16, 2, 4, 4, 8, 24, 37
for kind in ("untied", "tied", "lying"):
    o = f"{sys.argv[1]}/{kind}"; os.makedirs(o)
    t = {"model.embed_tokens.weight": f(V, H), "model.norm.weight": f(H)}
    if kind == "untied": t["lm_head.weight"] = f(V, H)
    for i in range(L):
        p = f"model.layers.{i}."
        t |= {p + "input_layernorm.weight": f(H), p + "post_attention_layernorm.weight": f(H), p + "self_attn.q_norm.weight": f(D), p + "self_attn.k_norm.weight": f(D),
              p + "self_attn.q_proj.weight": f(NH * D, H), p + "self_attn.k_proj.weight": f(NK * D, H), p + "self_attn.v_proj.weight": f(NK * D, H), p + "self_attn.o_proj.weight": f(H, NH * D),
              p + "mlp.gate_proj.weight": f(F, H), p + "mlp.up_proj.weight": f(F, H), p + "mlp.down_proj.weight": f(H, F)}
    save_file(t, o + "/model.safetensors")
    json.dump({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": H, "num_attention_heads": NH, "num_key_value_heads": NK, "head_dim": D, "intermediate_size": F, "num_hidden_layers": L, "vocab_size": V, "tie_word_embeddings": kind == "tied"}, open(o + "/config.json", "w"))
