"""``--rename REGEX=REPLACEMENT``: other names at the destination."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rankxform.errors import UsageError
from rankxform.layout.names import compile_regex

from .base import Tensor, TensorOperation


def rename(options: Mapping[str, Any]) -> TensorOperation | None:
    r"""Return the operation that applies the rules of `rename`, in order, to parameters' names.

    A rule replaces every match of its expression, which ends at the last ``=``, as `re.sub` does;
    ``\1`` stands for a group. An
    optimizer state keeps its prefix, and gets the new name of its parameter. Raises UsageError.

    >>> renamed = rename({"rename": [r"^layers\.(\d+)=blocks.\1"]})
    >>> renamed(Tensor.of("layers.0.w")).name
    'blocks.0.w'
    """
    rules = [_rule(text) for text in options.get("rename", ())]
    if not rules:
        return None

    def renamed(tensor: Tensor) -> Tensor:
        base = tensor.base_name
        name = _applied(rules, base)
        if name == base and tensor.state is None and tensor.related is not None:
            # A copy that no rule names goes where its parameter goes.
            parameter = _applied(rules, tensor.related.parameter)
            return tensor.renamed(tensor.related.named(parameter), parameter)
        if not name or "\0" in name:
            defect_text = "a NUL in the" if name else "no"
            raise UsageError(
                f"--rename: leaves {defect_text} name of {tensor.name!r}; \\g<0> is the match"
            )
        if name == base:
            return tensor
        if tensor.state is None and tensor.related is not None:
            return tensor.renamed(name, _applied(rules, tensor.related.parameter))
        if tensor.state is None:
            return tensor.renamed(name)
        return tensor.renamed(tensor.state.named(name), name)

    return renamed


def _applied(rules: Iterable[tuple[re.Pattern[str], str]], name: str) -> str:
    for pattern, replacement in rules:
        name = pattern.sub(replacement, name)
    return name


def _rule(text: str) -> tuple[re.Pattern[str], str]:
    regex, equals, replacement = text.rpartition("=")
    if not equals or not regex:
        raise UsageError(f"--rename {text!r}: expected REGEX=REPLACEMENT, such as '^model\\.='")
    pattern = compile_regex(regex, "--rename")
    named = {number: f"?P<{name}>" for name, number in pattern.groupindex.items()}
    groups = "".join(f"({named.get(number, '')})" for number in range(1, pattern.groups + 1))
    try:
        re.sub(groups, replacement, "")  # raises if a group does not exist
    except (re.error, IndexError) as error:
        raise UsageError(f"--rename {text!r}: {error}") from error
    return pattern, replacement


def rules_without_match(rules: Sequence[str], names: Iterable[str]) -> list[str]:
    """Return the rules that match none of `names`, each as the rules before it leave them.

    `names` are those of parameters, without their states.
    """
    current_names, unmatched_rules = {*names}, []
    for text in rules:
        pattern, replacement = _rule(text)
        if not any(map(pattern.search, current_names)):
            unmatched_rules.append(text)
        current_names = {pattern.sub(replacement, name) for name in current_names}
    return unmatched_rules
