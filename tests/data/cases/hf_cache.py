"""A Hugging Face cache: snapshots/REV holds symlinks into blobs/ whose names have no extension (huggingface_hub #1388, VoiceStudio #1056).
Usage: this program OUT. OUT/models--o--m/snapshots/good is complete; snapshots/dangling has one link whose blob is gone.
Right: good converts (w = arange 0..7 split over two files, config.json and tokenizer.json copied by --like); dangling names the missing file."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
root = f"{sys.argv[1]}/models--o--m"; os.makedirs(root + "/blobs")
files = {}
for i in (1, 2):
    n = f"model-{i:05}-of-00002.safetensors"; save_file({f"w{i}": np.arange(4, dtype="f4") + 4 * (i - 1)}, f"{root}/blobs/blob{i}"); files[n] = f"blob{i}"
def text(n, o): open(f"{root}/blobs/{n}.b", "w").write(json.dumps(o)); files[n] = n + ".b"
text("model.safetensors.index.json", {"metadata": {"total_size": 32}, "weight_map": {f"w{i}": f"model-{i:05}-of-00002.safetensors" for i in (1, 2)}})
text("config.json", {"model_type": "llama"}); text("tokenizer.json", {})
for rev in ("good", "dangling"):
    os.makedirs(f"{root}/snapshots/{rev}")
    for n, b in files.items(): os.symlink(f"../../blobs/{'gone' if rev == 'dangling' and b == 'blob2' else b}", f"{root}/snapshots/{rev}/{n}")
