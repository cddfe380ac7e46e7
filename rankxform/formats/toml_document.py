"""Files in TOML, of rules and of mapping tables."""

from __future__ import annotations

import sys
from typing import Any

from rankxform.errors import UsageError


def parse_toml(data: bytes, label: str) -> dict[str, Any]:
    """Return what a file says; `label` is what messages call it. Raises UsageError."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    try:
        document: dict[str, Any] = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise UsageError(f"not TOML: {error}", where=label) from None
    return document
