"""Diffusers-style folders: another base name for files and index, and a second precision beside the first (all names twice; f32 and f16).
Usage: this program OUT. one: right = 4 tensors. two (index and fp16 index): right = refuse or take the unmarked set, never mix. sub: pieces in subfolders."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
t = {f"blocks.{i}.w": np.full((4, 4), i, "f4") for i in range(4)}
def part(o, base, ext, tt):
    os.makedirs(o, exist_ok=True); k = list(tt)
    for i in (0, 1): save_file({x: tt[x] for x in k[2 * i:2 * i + 2]}, f"{o}/{base}{ext}-{i+1:05}-of-00002.safetensors")
    json.dump({"metadata": {"total_size": 256}, "weight_map": {x: f"{base}{ext}-{k.index(x)//2+1:05}-of-00002.safetensors" for x in k}}, open(f"{o}/{base}.safetensors.index{ext}.json", "w"))
B = "diffusion_pytorch_model"; o = sys.argv[1]
part(o + "/one", B, "", t); part(o + "/two", B, "", t); part(o + "/two", B, ".fp16", {k: v.astype("f2") for k, v in t.items()})
part(o + "/sub/transformer", B, "", t); os.makedirs(o + "/sub/vae"); save_file({"enc.w": np.ones(3, "f4")}, o + "/sub/vae/" + B + ".safetensors")
