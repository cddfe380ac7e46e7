"""A PEFT adapter on q_proj, v_proj and down_proj of a Qwen3-shaped folder, merged on the way into 2 tensor-parallel ranks with fused qkv and a padded
vocabulary (slowllama #16: LoRA onto consolidated shards; verl #4553). Usage: this program OUT.
Right: OUT/expect/rank_R.safetensors, in BFloat16 of the float32 sum rounded once: grouped qkv rows, fc1 interleaved gate/up, fc2 columns."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
def rounded(a): v = a.view("u4"); return ((v + 0x7FFF + ((v >> 16) & 1)) >> 16).astype("u2")  # to BFloat16, ties to even
o = sys.argv[1]; rng = np.random.default_rng(21); f = lambda *s: rng.standard_normal(s).astype("f4"); H, L, NH, NK, D, F, V, VP = 16, 2, 4, 2, 8, 24, 37, 40
t = {"model.embed_tokens.weight": f(V, H), "model.norm.weight": f(H), "lm_head.weight": f(V, H)}; ad = {}; m = dict(t)
for i in range(L):
    p = f"model.layers.{i}."; b = {p + "input_layernorm.weight": f(H), p + "post_attention_layernorm.weight": f(H), p + "self_attn.q_norm.weight": f(D), p + "self_attn.k_norm.weight": f(D), p + "self_attn.q_proj.weight": f(NH * D, H),
          p + "self_attn.k_proj.weight": f(NK * D, H), p + "self_attn.v_proj.weight": f(NK * D, H), p + "self_attn.o_proj.weight": f(H, NH * D), p + "mlp.gate_proj.weight": f(F, H), p + "mlp.up_proj.weight": f(F, H), p + "mlp.down_proj.weight": f(H, F)}
    t |= b; m |= b
    for n in ("self_attn.q_proj", "self_attn.v_proj", "mlp.down_proj"):
        w = b[p + n + ".weight"]; A, B = f(3, w.shape[1]), f(w.shape[0], 3); ad |= {f"base_model.model.{p}{n}.lora_A.weight": A, f"base_model.model.{p}{n}.lora_B.weight": B}; m[p + n + ".weight"] = w + B @ A * 2
for d in ("hf", "lora", "expect"): os.makedirs(f"{o}/{d}")
save_file(t, o + "/hf/model.safetensors"); save_file(ad, o + "/lora/adapter_model.safetensors"); json.dump({"peft_type": "LORA", "r": 3, "lora_alpha": 6, "target_modules": ["q_proj", "v_proj", "down_proj"]}, open(o + "/lora/adapter_config.json", "w"))
json.dump(dict(architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=H, num_attention_heads=NH, num_key_value_heads=NK, head_dim=D, intermediate_size=F, num_hidden_layers=L, vocab_size=V, tie_word_embeddings=False), open(o + "/hf/config.json", "w"))
pad = lambda a: np.vstack([a, np.zeros((VP - V, H), "f4")])
for r in (0, 1):
    e = {"embedding.word_embeddings.weight": pad(m["model.embed_tokens.weight"])[20 * r:20 * r + 20], "output_layer.weight": pad(m["lm_head.weight"])[20 * r:20 * r + 20], "decoder.final_layernorm.weight": m["model.norm.weight"]}
    for i in range(L):
        p, s = f"decoder.layers.{i}.", f"model.layers.{i}."; q, k, v = (m[s + f"self_attn.{x}_proj.weight"].reshape(NK, -1, H)[r] for x in "qkv")
        gu = np.stack([m[s + "mlp.gate_proj.weight"], m[s + "mlp.up_proj.weight"]], 1).reshape(2 * F, H)
        e |= {p + "self_attention.linear_qkv.weight": np.concatenate([q, k, v]), p + "self_attention.linear_proj.weight": m[s + "self_attn.o_proj.weight"][:, 16 * r:16 * r + 16], p + "mlp.linear_fc1.weight": gu[F * r:F * r + F], p + "mlp.linear_fc2.weight": m[s + "mlp.down_proj.weight"][:, 12 * r:12 * r + 12],
              p + "input_layernorm.weight": m[s + "input_layernorm.weight"], p + "pre_mlp_layernorm.weight": m[s + "post_attention_layernorm.weight"], p + "self_attention.q_layernorm.weight": m[s + "self_attn.q_norm.weight"], p + "self_attention.k_layernorm.weight": m[s + "self_attn.k_norm.weight"]}
    save_file({k: rounded(np.ascontiguousarray(a)) for k, a in e.items()}, f"{o}/expect/rank_{r}.safetensors")
