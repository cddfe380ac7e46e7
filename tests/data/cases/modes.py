"""File modes (safetensors #782, sentence-transformers #4010, MONAI #1862): sources saved 0600, or not readable at all, or a folder without x.
Usage: this program OUT. Right: outputs obey the umask (022: 0644, 007: 0660), whatever the source's mode; an unreadable file is named, exit 4 or 3."""
import json, os, sys
import numpy as np
from safetensors.numpy import save_file
for k in ("private", "unreadable", "closed"):
    o = f"{sys.argv[1]}/{k}"; os.makedirs(o); save_file({"w": np.ones((4, 4), "f4")}, o + "/model.safetensors"); open(o + "/config.json", "w").write("{}"); open(o + "/tokenizer.json", "w").write("{}")
    os.chmod(o + "/model.safetensors", 0 if k == "unreadable" else 0o600); os.chmod(o + "/tokenizer.json", 0o600)
os.chmod(sys.argv[1] + "/closed", 0o600)
