"""Which ranks and pipeline stages of a source a destination rank draws on, by strategies alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from rankxform.errors import UsageError
from rankxform.layout.strategy import Strategy

from .catalog import Catalog
from .selection import Selection

Naming = Callable[[str], str]
"""Tells what a source tensor is called at the destination, as far as its name tells."""


def needed_stages(src: Strategy, dst: Strategy, dst_stage: int, name_of: Naming = str) -> list[int]:
    """Return the source stages that MindSpore loads for a destination stage, ascending.

    These are the stages of all parameters that the source lists, except parameters that the
    destination lists in other stages only.
    """
    if not src.stages_of:
        return [0]
    elsewhere = {name for name, stages in dst.stages_of.items() if dst_stage not in stages}
    return sorted(
        {s for n, stages in src.stages_of.items() if name_of(n) not in elsewhere for s in stages}
    )


def source_stages(
    catalog: Catalog, dst: Strategy, selection: Selection, dst_stage: int
) -> list[int]:
    """Return the source stages that a destination stage draws on.

    Those that MindSpore loads, ascending, and then any that alone hold what the destination
    stage lists and the source strategy does not, if that is taken as replicated.
    """
    if catalog.strategy is None:
        return [0]
    if selection.composed:
        return list(range(len(catalog.strategy.stages)))
    loaded_stages = needed_stages(catalog.strategy, dst, dst_stage, selection.name_of)
    names = set(catalog.names_in(loaded_stages))
    sole_holders = {
        catalog.stage_of(parameter.holders[0])
        for name, parameter in selection.sharded.items()
        if not parameter.declared and parameter.src_name not in names
        and dst_stage in dst.stages_of.get(name, ())
    }  # fmt: skip
    return [*loaded_stages, *sorted(sole_holders.difference(loaded_stages))]


def check_ranks(ranks: Iterable[int], dst: Strategy) -> tuple[int, ...]:
    """Return the destination ranks to make, ascending: `ranks`, or all if there are none."""
    ascending = tuple(sorted(set(ranks))) or tuple(range(dst.ranks))
    if ascending[-1] >= dst.ranks or ascending[0] < 0:
        raise UsageError(
            f"destination rank {ascending[-1]} does not exist: {dst.label} has ranks 0 to "
            f"{dst.ranks - 1}"
        )
    return ascending
