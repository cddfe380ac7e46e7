"""A published folder whose index is from an earlier split (CoSER #3): it names 4 files, and 2 with other names hold all tensors.
Usage: this program OUT. Right: the folder's tensors are whole and unique; a refusal must say that the index is stale and how to go on."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
out = sys.argv[1]; os.makedirs(out)
t = {f"model.layers.{i}.w": np.full((4, 4), i, "f4") for i in range(4)}
save_file({k: t[k] for k in list(t)[:2]}, f"{out}/model-00001-of-00002.safetensors")
save_file({k: t[k] for k in list(t)[2:]}, f"{out}/model-00002-of-00002.safetensors")
json.dump({"metadata": {"total_size": 256}, "weight_map": {k: f"model-{i+1:05}-of-00004.safetensors" for i, k in enumerate(t)}}, open(f"{out}/model.safetensors.index.json", "w"))
