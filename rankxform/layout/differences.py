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
    """Return the parameters of which two strategies give a rank different boxes, or one lists none.

    Two layouts are equal if they give every rank the same box, however they are written.
    Accumulated gradients, which no checkpoint holds, are left out.
    """
    names_by_reason: dict[str, list[str]] = {}
    if (a.stage_size, len(a.stages)) != (b.stage_size, len(b.stages)):
        names_by_reason[f"the first is of {a.extent}, the second of {b.extent}"] = []
    if max(len(a.stages), len(b.stages)) > 1 and len(a.stages) != len(b.stages):
        first, second = (
            ", ".join(f"{_count_parameters(strategy, layouts):,}" for layouts in strategy.stages)
            for strategy in (a, b)
        )
        names_by_reason[f"stages hold {first} parameters, in the second {second}"] = []
    for name in sorted({*a.stages_of, *b.stages_of}):
        if NEVER_SAVED in (a.states.kind(name), b.states.kind(name)):
            continue
        reason = _difference(a, b, name)
        if reason:
            names_by_reason.setdefault(reason, []).append(name)
    return [StrategyDifference(reason, tuple(names)) for reason, names in names_by_reason.items()]


def _count_parameters(strategy: Strategy, layouts: Iterable[str]) -> int:
    """Count the parameters of a stage, without optimizer states."""
    return sum(strategy.states.of(name) is None for name in layouts)


def first_differing_name(
    a: Strategy, b: Strategy, names: Iterable[str], shapes: Mapping[str, Shape]
) -> str | None:
    """Return the first of `names` that the two strategies shard differently. None: there is none.

    Both list all of `names`. `shapes`: full shapes, by which the expanded axes of the JSON strategy
    `b` are folded. Without its shape a parameter is compared only if both layouts have as many
    axes.
    """
    same_stages = len(a.stages) == len(b.stages)
    for name in names:
        stage_a, stage_b = a.stages_of[name][0], b.stages_of[name][0]
        layout_a, layout_b = a.stages[stage_a][name], b.stages[stage_b][name]
        if name in shapes:
            try:
                layout_b = layout_b.fold(shapes[name], slices=False)
            except RequestError:
                return name
        elif len(layout_b.tensor_map) != len(layout_a.tensor_map):
            continue
        if (same_stages and stage_a != stage_b) or not same_boxes(layout_a, layout_b):
            return name
    return None


def _difference(a: Strategy, b: Strategy, name: str) -> str | None:
    if name not in a or name not in b:
        return f"only the {'first' if name in a else 'second'} lists it"
    stages_a, stages_b = a.stages_of[name], b.stages_of[name]
    if len(a.stages) == len(b.stages) and stages_a != stages_b:
        return f"on {stages_in_words(stages_a)}, in the second on {stages_in_words(stages_b)}"
    layout_a, layout_b = a.stages[stages_a[0]][name], b.stages[stages_b[0]][name]
    if same_boxes(layout_a, layout_b):
        return None
    if layout_a.ranks == layout_b.ranks and layout_a.counts == layout_b.counts:
        return f"{describe_layout(layout_a)}; in the second other ranks hold these slices"
    return f"{describe_layout(layout_a)}; in the second {describe_layout(layout_b)}"


def describe_layout(layout: Layout) -> str:
    """Return in words how a layout shards a parameter.

    >>> describe_layout(Layout((2, 4), ((0,), ()), 4, -1))
    'axis 0 into 8 (4 x 2 by the optimizer), 1 copy'
    >>> describe_layout(Layout((8,), ((),)))
    'whole, 8 copies'
    """
    parts = []
    plain = without_optimizer(layout)
    for axis, (count, plain_count) in enumerate(zip(layout.counts, plain.counts)):
        if count > 1:
            by_optimizer = ""
            if count != plain_count:
                by_optimizer = " by the optimizer"
            if count != plain_count > 1:
                by_optimizer = f" ({plain_count} x {count // plain_count} by the optimizer)"
            parts.append(f"axis {axis} into {count}{by_optimizer}")
    copies = layout.free_ranks // layout.opt_shards
    copies_text = f"{copies} cop" + ("y" if copies == 1 else "ies")
    return f"{' and '.join(parts) or 'whole'}, {copies_text}"
