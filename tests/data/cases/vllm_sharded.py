"""vLLM's sharded_state: model-rank-R-part-P.safetensors in one folder, each rank's slices under the same names (vllm #51554 describes the files).
Usage: this program OUT. tp 2: q [8,4] by rows, o [4,8] by columns, norm [4] whole; part 1 of each rank holds norm. Right: OUT/expect.safetensors."""
import os, sys
import numpy as np
from safetensors.numpy import save_file
o = sys.argv[1]; os.makedirs(o + "/ckpt")
q, w, n = np.arange(32, dtype="f4").reshape(8, 4), np.arange(32, dtype="f4").reshape(4, 8) + 50, np.ones(4, "f4")
save_file({"q.weight": q, "o.weight": w, "norm.weight": n}, o + "/expect.safetensors")
for r in (0, 1):
    save_file({"q.weight": q[4 * r:4 * r + 4], "o.weight": np.ascontiguousarray(w[:, 4 * r:4 * r + 4])}, f"{o}/ckpt/model-rank-{r}-part-0.safetensors")
    save_file({"norm.weight": n}, f"{o}/ckpt/model-rank-{r}-part-1.safetensors")
