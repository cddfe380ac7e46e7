"""``--include`` and ``--exclude``: parameters that are chosen by name; the others are dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.formats.dtype import BYTES
from rankxform.layout.names import compile_regex

from .base import Tensor, TensorOperation

NOT_CHOSEN = "not chosen by --include and --exclude"


NO_TENSOR = "items that are no tensors"


def drop_items(options: Mapping[str, Any]) -> TensorOperation | None:
    """Return the operation that drops what is no tensor, where the destination is not to have it.

    `items` says so: how such things are kept at the source, and at the destination.
    """
    src, dst = options.get("items") or ("", "")
    if src and src == dst:
        return None

    def dropped(tensor: Tensor) -> Tensor:
        return replace(tensor, dropped=NO_TENSOR) if tensor.dtype == BYTES else tensor

    return dropped


def drop_by_name(options: Mapping[str, Any]) -> TensorOperation | None:
    """Return the operation that drops what `include` does not match, or `exclude` does.

    Both are sequences of regular expressions, searched in the name that a parameter gets. Raises
    UsageError.
    """
    include = [compile_regex(pattern, "--include") for pattern in options.get("include", ())]
    exclude = [compile_regex(pattern, "--exclude") for pattern in options.get("exclude", ())]
    if not include and not exclude:
        return None

    def dropped(tensor: Tensor) -> Tensor:
        name = tensor.name
        is_included = not include or any(pattern.search(name) for pattern in include)
        if is_included and not any(pattern.search(name) for pattern in exclude):
            return tensor
        return replace(tensor, dropped=NOT_CHOSEN)

    return dropped


def patterns_without_match(patterns: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the patterns that match none of `names`, which are those at the destination."""
    all_names = list(names)
    return [text for text in patterns if not any(map(compile_regex(text, "").search, all_names))]
