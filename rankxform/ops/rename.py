"""``--rename REGEX=REPLACEMENT``: other names at the destination."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rankxform.errors import UsageError
from rankxform.layout.names import parameter_of

from .base import Operation, Tensor


def rename(options: Mapping[str, Any]) -> Operation | None:
    r"""Return the operation that applies the rules of `rename`, in order, to parameters' names.

    A rule replaces every match of its expression, as `re.sub` does; ``\1`` stands for a group. An
    optimizer state keeps its prefix, and gets the new name of its parameter. Raises UsageError.

    >>> renamed = rename({"rename": [r"^layers\.(\d+)=blocks.\1"]})
    >>> renamed(Tensor("adam_m.layers.0.w", "adam_m.layers.0.w", "", "", ())).name
    'adam_m.blocks.0.w'
    """
    rules = [_rule(text) for text in options.get("rename", ())]
    if not rules:
        return None

    def renamed(tensor: Tensor) -> Tensor:
        base = parameter_of(tensor.name)
        prefix, name = tensor.name[: len(tensor.name) - len(base)], base
        for pattern, replacement in rules:
            name = pattern.sub(replacement, name)
        if not name:
            raise UsageError(f"--rename: leaves no name of {tensor.name!r}")
        return tensor if name == base else replace(tensor, name=prefix + name)

    return renamed


def _rule(text: str) -> tuple[re.Pattern[str], str]:
    expression, equals, replacement = text.rpartition("=")
    if not equals or not expression:
        raise UsageError(f"--rename {text!r}: expected REGEX=REPLACEMENT, such as '^model\\.='")
    try:
        pattern = re.compile(expression)
        re.compile(f"(?:{expression})?").sub(replacement, "")  # raises if a group does not exist
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {text!r}: {error}") from error
    return pattern, replacement
