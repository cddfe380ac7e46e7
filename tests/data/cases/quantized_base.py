"""Folders of integer-quantized weights (vllm-ascend #633 W8A8, LlamaFactory #4664 GPTQ, bitsandbytes), and adapters for another size (LlamaFactory #3507).
Usage: this program OUT. base-w8a8: x.weight I8 with weight_scale/deq_scale F32; base-gptq: qweight I32, scales F16; base-bnb: weight U8 [n,1] with weight.absmax;
base-big: float [8,8] for the [6,6] adapter OUT/lora. Right: --lora on any of them is refused; --dtype bf16 on a quantized folder is refused, or leaves scales alone
(a scale that is rounded changes every weight; deq_scale holds bit patterns); a plain copy is exact."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
o = sys.argv[1]; rng = np.random.default_rng(1); X = "model.layers.0.self_attn.q_proj"
def put(k, t, c=None): os.makedirs(f"{o}/{k}"); save_file(t, f"{o}/{k}/model.safetensors"); json.dump(c or {}, open(f"{o}/{k}/config.json", "w"))
put("base-w8a8", {X + ".weight": rng.integers(-128, 127, (6, 6)).astype("i1"), X + ".weight_scale": rng.random((6, 1)).astype("f4"), X + ".deq_scale": rng.random(6).astype("f4"), "model.norm.weight": np.ones(6, "f4")}, {"quantization_config": {"quant_method": "ascend"}})
put("base-gptq", {X + ".qweight": rng.integers(0, 9, (1, 6)).astype("i4"), X + ".scales": rng.random((1, 6)).astype("f2"), X + ".qzeros": np.zeros((1, 1), "i4"), "model.norm.weight": np.ones(6, "f2")}, {"quantization_config": {"quant_method": "gptq", "bits": 4}})
put("base-bnb", {X + ".weight": rng.integers(0, 255, (18, 1)).astype("u1"), X + ".weight.absmax": rng.random(1).astype("f4"), "model.norm.weight": np.ones(6, "f4")}, {"quantization_config": {"quant_method": "bitsandbytes"}})
put("base-big", {X + ".weight": np.ones((8, 8), "f4")})
os.makedirs(o + "/lora"); save_file({f"base_model.model.{X}.lora_A.weight": rng.random((2, 6)).astype("f4"), f"base_model.model.{X}.lora_B.weight": rng.random((6, 2)).astype("f4")}, o + "/lora/adapter_model.safetensors")
json.dump({"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"]}, open(o + "/lora/adapter_config.json", "w"))
