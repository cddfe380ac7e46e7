"""Ranks' files side by side in one folder, the rank inside the file's name (Mixtral's and Llama's consolidated.0N, vLLM's model-rank-R-part-P,
people's own tpR_model): one file a rank, so that --src-pattern says all. Usage: this program OUT.
q [8,4] by rows, o [4,8] by columns, over 2. Right: OUT/expect.safetensors for each pattern:
  a 'tp{rank}_model.safetensors'   b 'model-rank-{rank}-part-0.safetensors'   c 'model_{rank}of2.safetensors'   d 'shard.{rank}.safetensors'   e 'rank{rank}-net.safetensors'"""
import os, sys
import numpy as np
from safetensors.numpy import save_file
o = sys.argv[1]; q, w = np.arange(32, dtype="f4").reshape(8, 4), np.arange(32, dtype="f4").reshape(4, 8) + 50
os.makedirs(o); save_file({"q.weight": q, "o.weight": w}, o + "/expect.safetensors")
for k, p in dict(a="tp{}_model", b="model-rank-{}-part-0", c="model_{}of2", d="shard.{}", e="rank{}-net").items():
    os.makedirs(f"{o}/{k}")
    for r in (0, 1): save_file({"q.weight": q[4 * r:4 * r + 4], "o.weight": np.ascontiguousarray(w[:, 4 * r:4 * r + 4])}, f"{o}/{k}/{p.format(r)}.safetensors")
# zero-padded numbers, as torchrun, Meta (consolidated.00) and Megatron (mp_rank_00) write them: f 'consolidated.{rank}.safetensors', g default pattern,
# h 'ckpt_{rank}/*.safetensors' with files named after the padded number, i rank_N folders with a padded name inside, j as i with a step
for k, p in dict(f="consolidated.{:02}", g="rank_{:02}/net", h="ckpt_{0:03}/net_rank{0:03}", i="rank_{0}/net_rank_{0:02}", j="rank_{0}/net_rank_{0:02}-1_5", k="rank_{0}/mp_{0:02}_net").items():
    for r in (0, 1):
        f = f"{o}/{k}/{p.format(r)}.safetensors"; os.makedirs(os.path.dirname(f), exist_ok=True)
        save_file({"q.weight": q[4 * r:4 * r + 4], "o.weight": np.ascontiguousarray(w[:, 4 * r:4 * r + 4])}, f)
