"""What makes two conversions the same: their output is, byte for byte."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rankxform.layout.strategy import Strategy

from .prepare import Conversion

_OPTIONS = ("prefix", "include", "exclude", "one_sided", "unlisted", "replicas", "crc", "verify")


def identity(conversion: Conversion) -> dict[str, Any]:
    """Return, for JSON, what is made of what.

    Not which destination ranks are made, nor how: neither changes what is in a file.
    """
    request, paths = conversion.request, conversion.shards.paths
    options = {name: getattr(request, name) for name in _OPTIONS}
    plain = {k: list(v) if isinstance(v, tuple) else v for k, v in options.items()}
    return {
        "options": {**plain, "format": conversion.format},
        "source": request.src,
        "source strategy": digest(conversion.source.strategy),
        "destination strategy": digest(conversion.dst),
        "source files": {
            str(rank): {
                "file": _below(paths[rank], request.src),
                "size": index.size,
                "modified": index.modified,
            }
            for rank, index in conversion.indexes.items()
        },
    }


def digest(strategy: Strategy) -> str:
    """Return a digest of what a strategy says, whatever file said it."""
    written = cache(_written)
    state = blake2b(f"{strategy.stage_size}".encode(), digest_size=16)
    for stage, layouts in enumerate(strategy.stages):
        for name in sorted(layouts):
            state.update(f"\n{stage} {name!r} {written(layouts[name])}".encode())
    return state.hexdigest()


def _written(layout: Hashable) -> str:
    return repr(layout)


def _below(path: Path, folder: str) -> str:
    try:
        return str(path.relative_to(folder))
    except ValueError:
        return str(path)
