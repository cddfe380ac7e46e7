"""The files of one process's share: which, with which bytes where, and which are equal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rankxform.execution.headers import SAFETENSORS
from rankxform.execution.links import NONE, REFLINK, can_reflink
from rankxform.execution.output import (
    FileLayout,
    Output,
    lay_out_ckpt,
    lay_out_safetensors,
    safetensors_order,
)
from rankxform.formats.dtype import INT4
from rankxform.planning.moves import Move, Portion
from rankxform.transport import Team

from .prepare import Conversion


def moves(conversion: Conversion, mine: Sequence[Portion]) -> list[Move]:
    """Return the moves of this process's share, in the order of the destination files."""
    moves = conversion.planner.moves(mine)
    if conversion.format == SAFETENSORS:
        moves.sort(key=lambda m: safetensors_order((m.parameter.name, m.parameter.dtype, ())))
    return moves


def alike(
    conversion: Conversion, team: Team, ranks: Sequence[int], *, agreed: bool
) -> dict[int, list[int]]:
    """Return which files of `ranks` are written, each with the ranks that get its bytes.

    `agreed` is whether parameters in no strategy are the same on all source ranks; where they
    are not, or MindSpore's replicas are wanted, ranks with equal boxes may differ.
    """
    request = conversion.request
    each = {rank: [rank] for rank in ranks}
    if request.link == NONE or not agreed or request.replicas != "spread":
        return each
    found = conversion.alike(ranks)
    if len(found) == len(each) or request.dst is None:
        return each
    dst = Path(request.dst)
    if request.link == REFLINK and not team.share(lambda: can_reflink(dst)):
        return each
    return found


def outputs(
    conversion: Conversion, mine: Sequence[Portion], groups: Mapping[int, Sequence[int]]
) -> dict[int, Output]:
    """Plan the files of this process's share; ranks with slices of one shape share a layout."""
    request, planner = conversion.request, conversion.planner
    first = conversion.indexes[min(conversion.indexes)]
    metadata = {
        key: value
        for key, value in first.metadata.items()
        if not (value == INT4 and key in first)  # a mark of the source's; the output has its own
    }
    layouts: dict[int, FileLayout] = {}
    outputs = {}
    for portion in mine:
        slices = planner.slices(portion.rank)  # one list for all ranks with the same
        if id(slices) not in layouts:
            entries = [(p.name, p.dtype, shape) for p, shape in slices]
            layouts[id(slices)] = (
                lay_out_safetensors(entries, metadata, request.crc)
                if conversion.format == SAFETENSORS
                else lay_out_ckpt(entries)
            )
        final, *others = map(conversion.final, groups[portion.rank])
        outputs[portion.rank] = Output(
            final, layouts[id(slices)], owned=portion.first == 0, alike=tuple(others)
        )
    return outputs
