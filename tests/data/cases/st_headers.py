"""Legal and illegal safetensors headers that people met (safetensors #278 #401 #466, fastsafetensors #88 #96, ComfyUI #15602).
Usage: this program OUT. One folder for each kind; every legal one holds w = arange(6, f32) as [2,3], and b = scalar 7 (0-d).
Right: empty, null, padded, gap-free order other than the names' -> converted; dup, trailing, numbers, overlap, hole -> refused by name."""
import json, os, struct, sys
import numpy as np
out = sys.argv[1]
w, b = np.arange(6, dtype="<f4").reshape(2, 3), np.array(7, dtype="<f4")
T = {"w": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, "b": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]}}
data = w.tobytes() + b.tobytes()
def put(kind, header, body=data):
    h = header if isinstance(header, bytes) else json.dumps(header).encode()
    os.makedirs(f"{out}/{kind}"); open(f"{out}/{kind}/model.safetensors", "wb").write(struct.pack("<Q", len(h)) + h + body)
put("empty", {"__metadata__": {}, **T})
put("null", {"__metadata__": None, **T})
put("numbers", {"__metadata__": {"n": 0}, **T})
put("padded", json.dumps(T).encode() + b" " * 37)
put("order", {"b": {"dtype": "F32", "shape": [], "data_offsets": [24, 28]}, "w": T["w"]})
put("zero", {**T, "z": {"dtype": "F32", "shape": [0, 5], "data_offsets": [28, 28]}})
put("dup", b'{"w":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},"w":{"dtype":"F32","shape":[],"data_offsets":[24,28]}}')
put("trailing", T, data + b"xx")
put("overlap", {"w": T["w"], "b": {"dtype": "F32", "shape": [], "data_offsets": [20, 24]}}, data[:24])
put("hole", {"w": T["w"], "b": {"dtype": "F32", "shape": [], "data_offsets": [28, 32]}}, data[:24] + b"\0" * 4 + data[24:])
put("short", T, data[:-1])
put("onlymeta", {"__metadata__": {"k": "v"}}, b"")
put("unicode", json.dumps({"__metadata__": {"k": "v"}, "层.w/1:x": T["w"], "b": T["b"]}, ensure_ascii=False).encode())
