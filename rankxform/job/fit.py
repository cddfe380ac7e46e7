"""Whether a checkpoint is cut as a strategy wants it, so that nothing need be converted."""

from __future__ import annotations

from rankxform.layout.layout import Layout
from rankxform.planning.source import Parameter

from .prepare import Conversion


def fits(conversion: Conversion) -> bool:
    """Tell whether every destination rank would find its own slices in its own source file.

    What else the file holds does not matter: loading leaves it.
    """
    src, dst = conversion.source.strategy, conversion.dst
    if (src.ranks, src.stage_size) != (dst.ranks, dst.stage_size):
        return False
    known: dict[tuple[Layout, Layout, tuple[int, ...]], bool] = {}
    for rank in range(0, dst.ranks, dst.stage_size):  # all ranks of a stage hold the same names
        names = conversion.planner.names(rank)
        for (parameter, _), wanted in zip(conversion.planner.slices(rank), names.values()):
            key = parameter.layout, wanted, parameter.shape
            if key not in known:
                known[key] = _same_boxes(parameter, wanted, dst.stage_size)
            if not known[key] or not set(dst.ranks_in(rank // dst.stage_size)) <= set(
                parameter.holders
            ):
                return False
    return True


def _same_boxes(parameter: Parameter, wanted: Layout, ranks: int) -> bool:
    have, want = parameter.layout.grid(parameter.shape), wanted.grid(parameter.shape)
    return all(
        have.box(parameter.layout.cell(rank)) == want.box(wanted.cell(rank))
        for rank in range(ranks)
    )
