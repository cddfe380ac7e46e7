"""Which pipeline stage holds which parameter.

Networks keep their layers in a numbered list, such as ``model.layers.0.`` to
``model.layers.31.``, which the stages divide among them; what comes before the list is on the first
stage, what comes after it on the last.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rankxform.errors import RequestError

_NUMBERED = re.compile(r"(.*?)\.(\d{1,9})\.")


def place_in_list(name: str) -> tuple[str, int] | None:
    """Return the numbered list that a parameter belongs to, and its number there.

    >>> place_in_list("model.layers.12.attention.wq.weight"), place_in_list("lm_head.weight")
    (('model.layers', 12), None)
    """
    match = _NUMBERED.match(name)
    return (match[1], int(match[2])) if match else None


def lists_of(names: Iterable[str]) -> dict[str, set[int]]:
    """Return the numbers in each numbered list of the names."""
    found: dict[str, set[int]] = {}
    for name in names:
        place = place_in_list(name)
        if place:
            found.setdefault(place[0], set()).add(place[1])
    return found


def spread(
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

    >>> spread(7, 3, offset=[0, 1, 0])
    [0, 0, 1, 1, 1, 2, 2]
    """
    if counts:
        if len(counts) != stages or sum(counts) != layers:
            raise RequestError(
                f"--layers-per-stage {_text(counts)} is {sum(counts)} layers on {len(counts)} "
                f"stages; the network has {layers}, and there are {stages} stages"
            )
        return [stage for stage, count in enumerate(counts) for _ in range(count)]
    parts = stages * interleave
    more = list(offset) or [0] * parts
    if len(more) != parts:
        raise RequestError(
            f"--offset {_text(offset)} has {len(more)} numbers; expected one for each of {stages} "
            f"stages" + (f", or for each of {interleave} rounds of them" if interleave > 1 else "")
        )
    every = [layers // parts + extra for extra in more]
    if min(every) < 0 or sum(every) != layers:
        raise RequestError(
            f"{layers} layers do not spread over {stages} stages"
            + (f" in {interleave} rounds" if interleave > 1 else "")
            + f" as {_text(every)}"
        )
    return [part % stages for part, count in enumerate(every) for _ in range(count)]


def _text(numbers: Sequence[int]) -> str:
    return ",".join(map(str, numbers))
