"""What lies at an address, for processes that must not use obstore themselves.

Prints {name: size}, and the keys of uploads that were begun; ``--copy FOLDER`` copies all of it,
``--begin NAME`` begins an upload.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rankxform.storage.objects.writing import WritablePrefix

if __name__ == "__main__":
    address, *words = sys.argv[1:]
    prefix = WritablePrefix(address)
    there = prefix.objects()
    if words[:1] == ["--copy"]:
        for name in there:
            path = Path(words[1]) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(prefix.read(name))
    if words[:1] == ["--begin"]:
        prefix.uploads.begin(prefix.key(words[1]), {})
    begun = [key for key, _ in prefix.uploads.begun(prefix.key("x").removesuffix("x"))]
    prefix.close()
    print(json.dumps({"objects": {n: m.size for n, m in there.items()}, "begun": begun}))
