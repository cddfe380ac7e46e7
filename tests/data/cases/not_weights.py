"""Folders of which a download left something else than weights: git-lfs pointers, an HTML page, 0 bytes, .incomplete, an index with a BOM
or torn; reported everywhere as HeaderTooLarge / MetadataIncompleteBuffer (PersuGPT #2, sglang #32279).
Usage: this program OUT. Right: each refused; the message says what the file is (a pointer: fetch it with git lfs pull). bom: converts, or names the BOM."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
t = {f"w{i}": np.full((4, 4), i, "f4") for i in range(2)}
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:" + "0" * 64 + "\nsize 4976698672\n"
def put(kind, second, index=True, bom=False, torn=False):
    o = f"{sys.argv[1]}/{kind}"; os.makedirs(o); save_file({"w0": t["w0"]}, o + "/model-00001-of-00002.safetensors")
    n = o + "/model-00002-of-00002.safetensors"
    if second is None: save_file({"w1": t["w1"]}, n)
    else: open(n + (".incomplete" if kind == "incomplete" else ""), "w").write(second)
    j = json.dumps({"metadata": {"total_size": 128}, "weight_map": {f"w{i}": f"model-{i+1:05}-of-00002.safetensors" for i in range(2)}})
    if index: open(o + "/model.safetensors.index.json", "w", encoding="utf-8-sig" if bom else "utf-8").write(j[:60] if torn else j)
put("lfs", LFS); put("lfsnoindex", LFS, False); put("html", "<!DOCTYPE html><html><body>404</body></html>"); put("empty", ""); put("incomplete", "x" * 100)
put("bom", None, bom=True); put("tornindex", None, torn=True)
o = f"{sys.argv[1]}/lfsindex"; os.makedirs(o); save_file(t, o + "/model-00001-of-00001.safetensors"); open(o + "/model.safetensors.index.json", "w").write(LFS)
