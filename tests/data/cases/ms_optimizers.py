"""Optimizer states under the names that MindSpore's own optimizers give them (mindspore-ai/mindspore nn/optim: Lamb lamb_m, lamb_v; Adam with AMSGrad vhat; RMSProp
mean_square, moment, mean_grad; Adadelta accum_update; FTRL linear; and adam_m, moment1 for comparison). 2 ranks, w [8,4] by rows, b [4] whole.
Usage: this program OUT. OUT/KIND/rank_R, OUT/KIND.json lists all (MindSpore lists optimizer states), OUT/infer.json lists w, b for one rank (an inference job).
Right: --weights-only leaves w, b, as does --dst-strategy infer.json (states dropped, named); whole: OUT/expect-KIND.safetensors."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
o = sys.argv[1]; w, b = np.arange(32, dtype="f4").reshape(8, 4), np.arange(4, dtype="f4")
def strategy(f, names, n):
    L = lambda k: {"dev_matrix": [n], "field": 0, "opt_weight_shard_size": 0, "opt_weight_shard_step": 0, "tensor_map": [0, -1] if k.endswith("w") else [-1], "tensor_shape": [8, 4] if k.endswith("w") else [4]}
    json.dump({"current_stage": 0, "parallel_layout_item": {k: L(k) for k in names}, "parallel_strategy_item": {f"X_{k}": {"parallel_strategy": [], "stage": 0} for k in names}}, open(f"{o}/{f}.json", "w"))
os.makedirs(o)
for kind, states in dict(adam=("adam_m", "adam_v"), nnadam=("moment1", "moment2"), lamb=("lamb_m", "lamb_v"), amsgrad=("moment1", "moment2", "vhat"), rmsprop=("mean_square", "moment", "mean_grad"), adadelta=("accum", "accum_update"), ftrl=("moments", "linear")).items():
    t = {"w": w, "b": b, **{f"{s}.w": w + 100 * (i + 1) for i, s in enumerate(states)}, **{f"{s}.b": b + 100 * (i + 1) for i, s in enumerate(states)}}
    save_file(t, f"{o}/expect-{kind}.safetensors"); strategy(kind, list(t), 2)
    for r in (0, 1): os.makedirs(f"{o}/{kind}/rank_{r}"); save_file({k: (v[4 * r:4 * r + 4] if k.endswith("w") else v) for k, v in t.items()}, f"{o}/{kind}/rank_{r}/net-1_5.safetensors")
strategy("infer", ["w", "b"], 1); strategy("weights", ["w", "b"], 2)
