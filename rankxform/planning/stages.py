"""Which ranks and pipeline stages of a source a destination rank draws on, by strategies alone."""

from __future__ import annotations

from collections.abc import Iterable

from rankxform.errors import UsageError
from rankxform.layout.strategy import Strategy


def needed_stages(src: Strategy, dst: Strategy, dst_stage: int) -> list[int]:
    """Return the source stages that MindSpore loads for a destination stage, ascending.

    These are the stages of all parameters that the source lists, except parameters that the
    destination lists in other stages only.
    """
    if not src.stages_of:
        return [0]
    elsewhere = {name for name, stages in dst.stages_of.items() if dst_stage not in stages}
    return sorted(
        {s for name, stages in src.stages_of.items() if name not in elsewhere for s in stages}
    )


def check_ranks(ranks: Iterable[int], dst: Strategy) -> tuple[int, ...]:
    """Return the destination ranks to make, ascending: those asked for, or all."""
    wanted = tuple(sorted(set(ranks))) or tuple(range(dst.ranks))
    if wanted[-1] >= dst.ranks or wanted[0] < 0:
        raise UsageError(
            f"destination rank {wanted[-1]} does not exist: {dst.label} has ranks 0 to "
            f"{dst.ranks - 1}"
        )
    return wanted
