"""model.safetensors of a partitioned (ZeRO-3) model saved without gathering: every matrix has shape [0] (DeepSpeed #2413, LlamaFactory #7665), small ones are whole;
beside it DeepSpeed's own folder global_step10/ with *_states.pt. Usage: this program OUT. Right: a warning or refusal that nearly all tensors are empty."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
o = sys.argv[1] + "/checkpoint-10"; os.makedirs(o + "/global_step10")
save_file({**{f"model.layers.{i}.self_attn.{x}_proj.weight": np.zeros(0, "f4") for i in range(3) for x in "qkvo"}, "model.embed_tokens.weight": np.zeros(0, "f4"), "model.norm.weight": np.ones(4, "f4")}, o + "/model.safetensors")
json.dump({"model_type": "llama"}, open(o + "/config.json", "w"))
for r in (0, 1):
    for n in (f"bf16_zero_pp_rank_{r}_mp_rank_00_optim_states.pt", f"zero_pp_rank_{r}_mp_rank_00_model_states.pt"): open(f"{o}/global_step10/{n}", "wb").write(b"PK\3\4")
