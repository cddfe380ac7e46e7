"""Exporting again into the folder of an earlier export (mlx-vlm #1827, CoSER #3: stale shards and index beside new ones). Usage: this program OUT. OUT/src: 4 tensors.
Right: after export with --max-shard 100B (several files and an index) and again with --overwrite as one file, a loader that reads the folder sees the second
export only: no old index or shard of the first beside it, or a refusal."""
import os, sys
import numpy as np
from safetensors.numpy import save_file
for k, s in (("src", 0), ("src2", 10)): os.makedirs(f"{sys.argv[1]}/{k}"); save_file({f"w{i}": np.full((4, 4), i + s, "f4") for i in range(4)}, f"{sys.argv[1]}/{k}/model.safetensors")
