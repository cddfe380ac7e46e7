"""What lies at an address, for processes that use obstore."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from rankxform.storage.objects.writing import WritablePrefix


def at(address, *words):
    """Return the sizes of objects by name, and the keys of uploads that were begun.

    ``--copy FOLDER`` copies all of it, ``--begin NAME`` begins an upload.
    """
    prefix = WritablePrefix(address)
    there = prefix.objects()
    if words[:1] == ("--copy",):
        for name in there:
            path = Path(words[1]) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(prefix.read(name))
    if words[:1] == ("--begin",):
        prefix.uploads.begin(prefix.key(words[1]), {})
    begun = [key for key, _ in prefix.uploads.begun(prefix.key("x").removesuffix("x"))]
    prefix.close()
    return {"objects": {name: meta.size for name, meta in there.items()}, "begun": begun}


if __name__ == "__main__":
    print(json.dumps(at(*sys.argv[1:])))
