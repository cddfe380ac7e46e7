"""``--include`` and ``--exclude``: parameters that are chosen by name; the others are dropped."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rankxform.errors import UsageError

from .base import Operation, Tensor

NOT_CHOSEN = "not chosen by --include and --exclude"


def drop(options: Mapping[str, Any]) -> Operation | None:
    """Return the operation that drops what `include` does not match, or `exclude` does.

    Both are sequences of regular expressions, searched in the name that a parameter gets. Raises
    UsageError.
    """
    try:
        include = [re.compile(pattern) for pattern in options.get("include", ())]
        exclude = [re.compile(pattern) for pattern in options.get("exclude", ())]
    except re.error as error:
        raise UsageError(f"--include or --exclude: {error.pattern!r}: {error}") from error
    if not include and not exclude:
        return None

    def dropped(tensor: Tensor) -> Tensor:
        name = tensor.name
        chosen = not include or any(pattern.search(name) for pattern in include)
        if chosen and not any(pattern.search(name) for pattern in exclude):
            return tensor
        return replace(tensor, dropped=NOT_CHOSEN)

    return dropped
