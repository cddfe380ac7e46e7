"""A Qwen3-shaped model as Megatron-Core (Transformer Engine) names it, layers stacked as torch_dist stores them, vocabulary padded to 48 with
random rows (Megatron initializes its padding); people ask for Hugging Face (Megatron-LM #1508, Pai-Megatron-Patch #590, NeMo Skills #640).
Usage: this program OUT RANKXFORM-PYTHON. OUT/mcore is a DCP that rankxform writes, with Megatron's metadata.json added, so a torch_dist folder.
Right: OUT/expect.safetensors (40 rows; q, k, v of each group split; gate and up the halves of linear_fc1)."""
import json, os, subprocess, sys
import numpy as np
from safetensors.numpy import save_file
out, py = sys.argv[1:3]; rng = np.random.default_rng(13); f = lambda *s: rng.standard_normal(s).astype("f4")
H, L, NH, NK, D, F, V, VP = 16, 2, 4, 2, 8, 24, 40, 48
hf = {"model.norm.weight": f(H)}; E, O = f(VP, H), f(VP, H); hf["model.embed_tokens.weight"], hf["lm_head.weight"] = E[:V], O[:V]
mc = {"embedding.word_embeddings.weight": E, "output_layer.weight": O, "decoder.final_layernorm.weight": hf["model.norm.weight"]}; st = {}
for i in range(L):
    p = f"model.layers.{i}."; n = dict(input_layernorm=f(H), post_attention_layernorm=f(H)); q, k, v = f(NH * D, H), f(NK * D, H), f(NK * D, H)
    o, g, u, d, qn, kn = f(H, NH * D), f(F, H), f(F, H), f(H, F), f(D), f(D)
    hf |= {p + a + ".weight": b for a, b in {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": o, "mlp.gate_proj": g, "mlp.up_proj": u, "mlp.down_proj": d, "self_attn.q_norm": qn, "self_attn.k_norm": kn, **n}.items()}
    qkv = np.concatenate([np.concatenate([q.reshape(NK, -1, H)[j], k.reshape(NK, D, H)[j], v.reshape(NK, D, H)[j]]) for j in range(NK)])
    for a, b in {"self_attention.linear_qkv.weight": qkv, "self_attention.linear_qkv.layer_norm_weight": n["input_layernorm"], "self_attention.linear_proj.weight": o, "self_attention.q_layernorm.weight": qn,
                 "self_attention.k_layernorm.weight": kn, "mlp.linear_fc1.weight": np.concatenate([g, u]), "mlp.linear_fc1.layer_norm_weight": n["post_attention_layernorm"], "mlp.linear_fc2.weight": d}.items(): st.setdefault(a, []).append(b)
os.makedirs(out + "/tmp"); save_file({**mc, **{"decoder.layers." + a: np.stack(b) for a, b in st.items()}}, out + "/tmp/model.safetensors"); save_file(hf, out + "/expect.safetensors")
subprocess.run([py, "-m", "rankxform", "transform", out + "/tmp", out + "/mcore", "--dst-form", "dcp", "-q", "--no-fsync"], check=True)
os.remove(out + "/mcore/rankxform.json"); json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}, open(out + "/mcore/metadata.json", "w"))
json.dump({"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": H, "num_attention_heads": NH, "num_key_value_heads": NK, "head_dim": D, "intermediate_size": F, "num_hidden_layers": L, "vocab_size": V, "tie_word_embeddings": False}, open(out + "/config.json", "w"))
