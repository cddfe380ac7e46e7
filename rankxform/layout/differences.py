"""Where two strategies differ, and how a layout shards a parameter, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from rankxform.errors import RequestError
from rankxform.geometry.box import Shape
from rankxform.values import dataclass

from .layout import Layout, same_boxes, without_optimizer
from .states import NEVER_SAVED
from .strategy import Strategy, stages_in_words


@dataclass(frozen=True)
class StrategyDifference:
    """Parameters of which two strategies differ alike: why, in words, and their names."""

    why: str
    names: tuple[str, ...]


def strategy_differences(a: Strategy, b: Strategy) -> list[StrategyDifference]:
    """Return where two strategies give a rank different boxes, or list different parameters.

    Layouts that are written otherwise and give every rank the same box are equal. Gradients that
    are in no checkpoint are left out.
    """
    found: dict[str, list[str]] = {}
    if (a.stage_size, len(a.stages)) != (b.stage_size, len(b.stages)):
        found[f"the first is of {a.extent}, the second of {b.extent}"] = []
    if max(len(a.stages), len(b.stages)) > 1 and len(a.stages) != len(b.stages):
        first, second = (", ".join(f"{_own(s, one):,}" for one in s.stages) for s in (a, b))
        found[f"stages hold {first} parameters, in the second {second}"] = []
    for name in sorted({*a.stages_of, *b.stages_of}):
        if NEVER_SAVED in (a.states.kind(name), b.states.kind(name)):
            continue
        why = _difference(a, b, name)
        if why:
            found.setdefault(why, []).append(name)
    return [StrategyDifference(why, tuple(names)) for why, names in found.items()]


def _own(strategy: Strategy, layouts: Iterable[str]) -> int:
    """Count the parameters of a stage, without optimizer states."""
    return sum(strategy.states.of(name) is None for name in layouts)


def first_differing_name(
    own: Strategy, other: Strategy, names: Iterable[str], shapes: Mapping[str, Shape]
) -> str | None:
    """Return the first of `names`, which both list, that the two shard in two ways; None if none.

    `shapes` are full shapes, by which the expanded axes of a JSON strategy are folded; of a tensor
    whose shape is not known, layouts of other numbers of axes are not compared.
    """
    same_stages = len(own.stages) == len(other.stages)
    for name in names:
        mine, theirs = own.stages_of[name], other.stages_of[name]
        layout, ours = other.stages[theirs[0]][name], own.stages[mine[0]][name]
        moved = same_stages and mine[0] != theirs[0]
        if name in shapes:
            try:
                layout = layout.fold(shapes[name], slices=False)
            except RequestError:
                return name
        elif len(layout.tensor_map) != len(ours.tensor_map):
            continue
        if moved or not same_boxes(ours, layout):
            return name
    return None


def _difference(a: Strategy, b: Strategy, name: str) -> str | None:
    if name not in a or name not in b:
        return f"only the {'first' if name in a else 'second'} lists it"
    mine, theirs = a.stages_of[name], b.stages_of[name]
    if len(a.stages) == len(b.stages) and mine != theirs:
        return f"on {stages_in_words(mine)}, in the second on {stages_in_words(theirs)}"
    before, after = a.stages[mine[0]][name], b.stages[theirs[0]][name]
    if same_boxes(before, after):
        return None
    if before.ranks == after.ranks and before.counts == after.counts:
        return f"{describe_layout(before)}; in the second other ranks hold these slices"
    return f"{describe_layout(before)}; in the second {describe_layout(after)}"


def describe_layout(layout: Layout) -> str:
    """Say how a layout shards a parameter.

    >>> describe_layout(Layout((2, 4), ((0,), ()), 4, -1))
    'axis 0 into 8 (4 x 2 by the optimizer), 1 copy'
    >>> describe_layout(Layout((8,), ((),)))
    'whole, 8 copies'
    """
    parts = []
    plain = without_optimizer(layout)
    for axis, (count, own) in enumerate(zip(layout.counts, plain.counts)):
        if count > 1:
            more = f" ({own} x {count // own} by the optimizer)" if count != own > 1 else ""
            more = " by the optimizer" if count != own == 1 else more
            parts.append(f"axis {axis} into {count}{more}")
    copies = layout.free_ranks // layout.opt_shards
    copied = f"{copies} cop" + ("y" if copies == 1 else "ies")
    return f"{' and '.join(parts) or 'whole'}, {copied}"
