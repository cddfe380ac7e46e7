"""adapter_config.json as PEFT 0.18 writes it, with every key, and what people change (peft #1300 and its like; PiSSA/OLoRA/CorDA subtract from the base).
Usage: this program OUT. OUT/base, OUT/KIND. Right: default, gaussian, rslora, patterns, dropout, layers, eva: OUT/expect-KIND.safetensors.
pissa, pissa16, olora, corda, loftq: A and B belong to ANOTHER base (the residual), so the merge with this one is wrong: refuse.
dora, lora_bias, target_parameters, token_indices, replication, alora, qalora: refuse by name. named: keys lora_A.other.weight."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
out = sys.argv[1]; rng = np.random.default_rng(9); f = lambda *s: rng.standard_normal(s).astype("f4")
Q = [f"model.layers.{i}.self_attn.{x}_proj" for i in (0, 1) for x in "qv"]; base = {q + ".weight": f(6, 6) for q in Q}; os.makedirs(out + "/base"); save_file(base, out + "/base/model.safetensors")
C = dict(alora_invocation_tokens=None, alpha_pattern={}, arrow_config=None, auto_mapping=None, base_model_name_or_path="x", bias="none", corda_config=None, ensure_weight_tying=False, eva_config=None, exclude_modules=None,
         fan_in_fan_out=False, inference_mode=True, init_lora_weights=True, layer_replication=None, layers_pattern=None, layers_to_transform=None, loftq_config={}, lora_alpha=16, lora_bias=False, lora_dropout=0.0, megatron_config=None,
         megatron_core="megatron.core", modules_to_save=None, peft_type="LORA", peft_version="0.18.0", qalora_group_size=16, r=2, rank_pattern={}, revision=None, target_modules=["v_proj", "q_proj"], target_parameters=None, task_type="CAUSAL_LM",
         trainable_token_indices=None, use_dora=False, use_qalora=False, use_rslora=False)
def put(kind, ok=True, scale=lambda q, r: 16 / r, rank=lambda q: 2, name="", only=Q, **config):
    o = f"{out}/{kind}"; os.makedirs(o); t, w = {}, dict(base)
    for q in only:
        A, B = f(rank(q), 6), f(6, rank(q)); w[q + ".weight"] = base[q + ".weight"] + np.float32(scale(q, rank(q))) * (B @ A)
        t |= {f"base_model.model.{q}.lora_A{name}.weight": A, f"base_model.model.{q}.lora_B{name}.weight": B}
    save_file(t, o + "/adapter_model.safetensors"); json.dump({**C, **config}, open(o + "/adapter_config.json", "w"))
    if ok: save_file(w, f"{out}/expect-{kind}.safetensors")
put("default"); put("gaussian", init_lora_weights="gaussian"); put("eva", init_lora_weights="eva", eva_config={"rho": 2.0}); put("rslora", use_rslora=True, scale=lambda q, r: 16 / r ** .5); put("dropout", lora_dropout=.1)
put("patterns", rank_pattern={"q_proj": 3}, alpha_pattern={"layers.1.self_attn.v_proj": 4}, rank=lambda q: 3 if q.endswith("q_proj") else 2, scale=lambda q, r: (4 if "1.self_attn.v" in q else 16) / r)
put("caret", rank_pattern={r"^model\.layers\.0\.self_attn\.q_proj": 4}, rank=lambda q: 4 if q == Q[0] else 2)
put("layers", layers_to_transform=[1], layers_pattern="layers", only=Q[2:])
for k, c in dict(pissa={"init_lora_weights": "pissa"}, pissa16={"init_lora_weights": "pissa_niter_16"}, olora={"init_lora_weights": "olora"}, corda={"init_lora_weights": "corda", "corda_config": {}}, loftq={"init_lora_weights": "loftq", "loftq_config": {"loftq_bits": 4}},
                 dora={"use_dora": True}, lora_bias={"lora_bias": True}, target_parameters={"target_parameters": ["mlp.experts.gate_up_proj"]}, token_indices={"trainable_token_indices": [1, 2]}, replication={"layer_replication": [[0, 2], [0, 2]]},
                 alora={"alora_invocation_tokens": [1]}, qalora={"use_qalora": True}, other={"peft_type": "LOHA"}).items(): put(k, False, **c)
put("named", False, name=".other")
