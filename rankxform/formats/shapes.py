"""Full shapes and types from a JSON file, for planning where no checkpoint is at hand.

``{name: {"shape": [rows, columns], "dtype": "Float32"}}``; the type may be left out. What
`inspect --json` prints of one complete checkpoint file is understood too.
"""

from __future__ import annotations

import json

from rankxform.errors import FormatError
from rankxform.geometry.box import Shape

from .dtype import item_size


def parse_shapes(data: bytes) -> dict[str, tuple[Shape, str]]:
    """Return (full shape, type) by name. Raises FormatError."""
    try:
        document = json.loads(data)
        if not isinstance(document, dict) or document.get("shards"):
            raise ValueError("neither shapes by name nor what `inspect` says of one complete file")
        if isinstance(document.get("entries"), list):
            entries = [item for item in document["entries"] if isinstance(item, dict)]
            document = {str(item.get("name")): item for item in entries}
        return {name: _entry(name, item) for name, item in document.items()}
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f'not {{name: {{"shape": [...], "dtype": "Float32"}}}}: {error}'
        ) from None


def _entry(name: str, item: object) -> tuple[Shape, str]:
    if not isinstance(item, dict) or "shape" not in item:
        raise ValueError(f"{name!r} has no shape")
    shape, dtype = item["shape"], item.get("dtype", "Float32")
    if not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ValueError(f"shape {shape!r}")
    if not isinstance(dtype, str):
        raise ValueError(f"dtype {dtype!r}")
    item_size(dtype)
    return tuple(shape), dtype
