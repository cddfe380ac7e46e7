"""Megatron-Core's torch_dist of a mixture of experts: ChainedOptimizer puts chained_0., chained_1. before every key of its optimizers (NeMo-RL #3345).
Usage: this program OUT PYTHON-WITH-RANKXFORM (it writes the DCP; Megatron's metadata.json is added). Right for --weights-only: the two weights alone;
with states: exp_avg of each is known as a state of its parameter (a cast leaves it Float32, a rename takes it along)."""
import json, os, subprocess, sys
import numpy as np
from safetensors.numpy import save_file
out, py = sys.argv[1:3]; f = lambda k: np.full((2, 4, 3), k, "f4")
t = {"decoder.layers.mlp.experts.experts.linear_fc1.weight": f(1), "decoder.layers.self_attention.linear_proj.weight": f(2)}
for i, n in enumerate(list(t)):
    for s, k in (("exp_avg", .1), ("exp_avg_sq", .2), ("fp32_param", 1 + i)): t[f"chained_{i}.optimizer.state.{s}.{n}"] = f(k)
os.makedirs(out + "/tmp"); save_file(t, out + "/tmp/model.safetensors")
subprocess.run([py, "-m", "rankxform", "transform", out + "/tmp", out + "/mcore", "--dst-form", "dcp", "-q", "--no-fsync"], check=True, stdout=subprocess.DEVNULL)
os.remove(out + "/mcore/rankxform.json"); json.dump({"sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch", "common_backend_version": 1}, open(out + "/mcore/metadata.json", "w"))
