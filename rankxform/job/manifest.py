"""What makes two conversions the same: their output is, byte for byte."""

from __future__ import annotations

import shlex
from collections.abc import Hashable, Mapping
from functools import cache
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rankxform.layout.strategy import Strategy

from .prepare import Conversion
from .request import Request

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


def verify_options(conversion: Conversion) -> list[str]:
    """Return the options of a `verify` that compares the destination with this source."""
    request, plain = conversion.request, Request("", None)
    options = []
    for side in ("src_strategy", "dst_strategy"):
        given = getattr(request, side)
        if isinstance(given, Strategy):
            return []  # one that no file has
        if given is not None:
            path = Path(given)
            options += [f"--{side}", str(path.absolute()) if given and path.exists() else given]
    for name in ("prefix", "format", "src_pattern", "suffix", "one_sided", "unlisted", "replicas"):
        if getattr(request, name) != getattr(plain, name):
            options += [f"--{name}", getattr(request, name)]
    for name in ("include", "exclude"):
        options += [word for pattern in getattr(request, name) for word in (f"--{name}", pattern)]
    if conversion.shards.step and (request.step or conversion.shards.skipped_steps):
        options += ["--step", "_".join(map(str, conversion.shards.step))]
    return [word.replace("_", "-") if word.startswith("--") else word for word in options]


def verify_command(manifest: Mapping[str, Any], folder: str) -> str:
    """Return the command that compares `folder`, whose manifest is given, with its source."""
    options = manifest.get("verify")
    if not isinstance(options, list) or not all(isinstance(word, str) for word in options):
        options = []
    options = options or ["--src-strategy", "A", "--dst-strategy", "B"]
    source = manifest["identity"].get("source")
    return shlex.join(["rankxform", "verify", str(source or "SRC"), folder, *options])


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
