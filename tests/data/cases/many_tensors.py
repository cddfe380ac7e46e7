"""A Qwen3-MoE-shaped model with as many tensors as the 235B has (94 layers x 128 experts x 3), each tiny: slow loading of many tensors is a common report.
Usage: this program OUT [LAYERS EXPERTS]. OUT/hf has 16 files with an index. Right: round trip through MindFormers' names is bit for bit the same."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
out = sys.argv[1] + "/hf"; L, E = map(int, sys.argv[2:4]) if len(sys.argv) > 2 else (94, 128); rng = np.random.default_rng(2); f = lambda *s: rng.standard_normal(s).astype("f4")
H, NH, NK, D, F, V = 8, 2, 2, 4, 4, 16
t = {"model.embed_tokens.weight": f(V, H), "model.norm.weight": f(H), "lm_head.weight": f(V, H)}
for i in range(L):
    p = f"model.layers.{i}."
    t |= {p + "input_layernorm.weight": f(H), p + "post_attention_layernorm.weight": f(H), p + "self_attn.q_norm.weight": f(D), p + "self_attn.k_norm.weight": f(D), p + "self_attn.q_proj.weight": f(NH * D, H),
          p + "self_attn.k_proj.weight": f(NK * D, H), p + "self_attn.v_proj.weight": f(NK * D, H), p + "self_attn.o_proj.weight": f(H, NH * D), p + "mlp.gate.weight": f(E, H)}
    for e in range(E): t |= {p + f"mlp.experts.{e}.gate_proj.weight": f(F, H), p + f"mlp.experts.{e}.up_proj.weight": f(F, H), p + f"mlp.experts.{e}.down_proj.weight": f(H, F)}
os.makedirs(out); names = list(t); n = -(-len(names) // 16); m = {}
for j in range(16):
    fn = f"model-{j+1:05}-of-00016.safetensors"; part = names[j * n:(j + 1) * n]; save_file({k: t[k] for k in part}, f"{out}/{fn}"); m |= dict.fromkeys(part, fn)
json.dump({"metadata": {"total_size": sum(a.nbytes for a in t.values())}, "weight_map": m}, open(out + "/model.safetensors.index.json", "w"))
json.dump({"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": H, "num_attention_heads": NH, "num_key_value_heads": NK, "head_dim": D, "intermediate_size": F, "moe_intermediate_size": F, "num_experts": E, "num_hidden_layers": L, "vocab_size": V, "tie_word_embeddings": False, "decoder_sparse_step": 1, "mlp_only_layers": []}, open(out + "/config.json", "w"))
print(len(t), "tensors")
