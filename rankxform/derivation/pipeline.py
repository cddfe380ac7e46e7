"""Which pipeline stage holds which parameter.

Networks keep their layers in a numbered list, such as ``model.layers.0.`` to
``model.layers.31.``, which the stages divide among them; what comes before the list is on the first
stage, what comes after it on the last.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from rankxform.errors import RequestError
from rankxform.layout.names import pattern_of

_NUMBERED = re.compile(r"\.(\d{1,9})\.")


def places_in_lists(name: str) -> dict[str, int]:
    """Return the numbered lists that a parameter belongs to, outermost first, and its numbers.

    >>> places_in_lists("model.layers.12.experts.3.weight")
    {'model.layers': 12, 'model.layers.12.experts': 3}
    """
    numbers_by_list, position = {}, 0
    while match := _NUMBERED.search(name, position):
        numbers_by_list[name[: match.start()]] = int(match[1])
        position = match.end() - 1
    return numbers_by_list


def lists_of(names: Iterable[str], *, outermost: bool = False) -> dict[str, set[int]]:
    """Return the numbers in each numbered list of the names."""
    numbers_by_list: dict[str, set[int]] = {}
    for name in names:
        for prefix, number in places_in_lists(name).items():
            numbers_by_list.setdefault(prefix, set()).add(number)
            if outermost:
                break
    return numbers_by_list


def homogeneous(names: Iterable[str]) -> set[str]:
    """Return the outermost numbered lists whose items have a parameter in common: layers.

    >>> homogeneous(["h.0.w", "h.0.b", "h.1.w", "net.0.table", "net.1.gamma"])
    {'h'}
    """
    items: dict[str, dict[int, set[str]]] = {}
    for name in names:
        for prefix, number in places_in_lists(name).items():
            suffix = name[len(f"{prefix}.{number}.") :]
            items.setdefault(prefix, {}).setdefault(number, set()).add(suffix)
            break
    return {p for p, n in items.items() if set.intersection(*n.values())}


def in_layers(names: Iterable[str]) -> set[str]:
    """Return the names of parameters in layers: of homogeneous lists, or one of several alike."""
    all_names = list(names)
    layers = tuple(f"{prefix}." for prefix in homogeneous(all_names))
    count = Counter(map(pattern_of, all_names))
    return {name for name in all_names if name.startswith(layers) or count[pattern_of(name)] > 1}


def spread_layers(
    layers: int,
    stages: int,
    *,
    offset: Sequence[int] = (),
    interleave: int = 1,
    counts: Sequence[int] = (),
) -> list[int]:
    """Return the stage of each layer, as MindFormers assigns them. Raises RequestError.

    Each of `interleave` rounds gives every stage the same number of layers, and `offset` more: one
    number for each stage, or for each round and stage. `counts` are the layers of each stage, in
    place of these.

    >>> spread_layers(7, 3, offset=[0, 1, 0])
    [0, 0, 1, 1, 1, 2, 2]
    """
    if counts and min(counts) < 0:
        raise RequestError(f"--layers-per-stage {_text(counts)} has a negative number")
    if counts:
        if len(counts) != stages or sum(counts) != layers:
            raise RequestError(
                f"--layers-per-stage {_text(counts)} is {sum(counts)} layers on {len(counts)} "
                f"stages; the network has {layers}, and there are {stages} stages"
            )
        return [stage for stage, count in enumerate(counts) for _ in range(count)]
    parts = stages * interleave
    if interleave < 1 or parts > max(layers, stages):
        rounds = f"{interleave} rounds"
        raise RequestError(f"{layers} layers do not spread over {stages} stages in {rounds}")
    extra_layers = list(offset) or [0] * parts
    if len(extra_layers) != parts:
        raise RequestError(
            f"offset {_text(offset)} has {len(extra_layers)} numbers; expected one for each of "
            f"{stages} "
            f"stages" + (f", or for each of {interleave} rounds of them" if interleave > 1 else "")
        )
    layer_counts = [layers // parts + extra for extra in extra_layers]
    if min(layer_counts) < 0 or sum(layer_counts) != layers:
        raise RequestError(
            f"{layers} layers do not spread over {stages} stages"
            + (f" in {interleave} rounds" if interleave > 1 else "")
            + f" as {_text(layer_counts)}, which is {sum(layer_counts)} layers"
        )
    return [part % stages for part, count in enumerate(layer_counts) for _ in range(count)]


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
