"""What copying leaves beside weights: macOS's ._NAME (AppleDouble), .nfsXXXX, editors' NAME~, NAME.tmp, .DS_Store, a 'latest' link, .cache/huggingface (hub's --local-dir), __MACOSX.
Usage: this program OUT. index, single, ranks, c2-less: the same tensors as without the litter. Right: litter is ignored (hidden files are nobody's weights); w = 0..3."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
A = b"\0\5\x16\7" + b"\0" * 60; t = np.arange(4, dtype="f4")
def litter(d, n):
    for x in ("._" + n, ".nfs00000001", n + "~", n + ".tmp", ".DS_Store"): open(f"{d}/{x}", "wb").write(A)
for kind in ("index", "single", "noindex", "ranks", "link"):
    o = f"{sys.argv[1]}/{kind}"; os.makedirs(o)
    if kind in ("index", "noindex"):
        m = {}
        for i in (0, 1): n = f"model-{i+1:05}-of-00002.safetensors"; save_file({f"w{i}": t}, f"{o}/{n}"); m[f"w{i}"] = n; litter(o, n)
        if kind == "index": json.dump({"metadata": {"total_size": 32}, "weight_map": m}, open(o + "/model.safetensors.index.json", "w")); open(o + "/._model.safetensors.index.json", "wb").write(A)
    if kind == "single": save_file({"w": t}, o + "/model.safetensors"); litter(o, "model.safetensors"); os.makedirs(o + "/.cache/huggingface/download"); open(o + "/.cache/huggingface/download/model.safetensors.lock", "w"); os.makedirs(o + "/__MACOSX"); open(o + "/__MACOSX/._model.safetensors", "wb").write(A)
    if kind in ("ranks", "link"):
        for r in (0, 1):
            d = f"{o}/rank_{r}"; os.makedirs(d); save_file({"w": t[2 * r:2 * r + 2]}, d + "/net-1_5.safetensors")
            if kind == "ranks": litter(d, "net-1_5.safetensors"); open(o + "/._rank_0", "wb").write(A)
            else: os.symlink("net-1_5.safetensors", d + "/latest.safetensors")
