"""A complete indexed folder, and beside it files that the index does not name (mlx-vlm #1464): (a) a consolidated copy with the same
names, as Mistral's repositories have it; (b) another file with other tensors; (c) the same names, quantized (uint8).
Usage: this program OUT. Right: what the index lists, 4 tensors; every HF loader takes the index's files and ignores the rest."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
t = {f"model.layers.{i}.w": np.full((4, 4), i, "f4") for i in range(4)}
for kind in ("same", "other", "quantized"):
    out = f"{sys.argv[1]}/{kind}"; os.makedirs(out)
    save_file({k: t[k] for k in list(t)[:2]}, f"{out}/model-00001-of-00002.safetensors")
    save_file({k: t[k] for k in list(t)[2:]}, f"{out}/model-00002-of-00002.safetensors")
    json.dump({"metadata": {"total_size": 256}, "weight_map": {k: f"model-{i//2+1:05}-of-00002.safetensors" for i, k in enumerate(t)}}, open(f"{out}/model.safetensors.index.json", "w"))
    if kind == "same": save_file(t, f"{out}/consolidated.safetensors")
    if kind == "other": save_file({"layers.0.wq": np.ones((4, 4), "f4")}, f"{out}/consolidated.safetensors")
    if kind == "quantized": save_file({k: np.zeros((4, 2), "u1") for k in t}, f"{out}/model.safetensors")
