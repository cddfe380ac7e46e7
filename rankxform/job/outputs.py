"""The files of one process's share: which, with which bytes where, and which are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rankxform.engine.file_sink import FileLayout, Output, lay_out_ckpt, lay_out_safetensors
from rankxform.formats.dtype import INT4
from rankxform.planning.transfers import Portion
from rankxform.publish.links import NONE, REFLINK, can_reflink
from rankxform.storage.index import SAFETENSORS
from rankxform.transport import Team

from .placement import Placement
from .prepare import Conversion


def alike(
    conversion: Conversion,
    team: Team,
    placement: Placement,
    ranks: Iterable[int],
    *,
    agreed: bool,
) -> dict[int, list[int]]:
    """Return which files of `ranks` are written, each with the ranks that get its bytes.

    `agreed` is whether parameters in no strategy are the same on all source ranks; where they
    are not, or MindSpore's replicas are wanted, ranks with equal boxes may differ.
    """
    request = conversion.request
    each = {rank: [rank] for rank in ranks}
    if request.link == NONE or not agreed or request.replicas != "spread":
        return each
    apart = [[rank for rank in each if rank in root.ranks] for root in placement.roots]
    found = {first: some for mine in apart for first, some in conversion.alike(mine).items()}
    if len(found) == len(each) or request.dst is None:
        return each
    if request.link == REFLINK:
        dst, first = Path(request.dst), team.rank == placement.of(team.rank).processes[0]
        if not all(team.gather(lambda: not first or can_reflink(dst))):
            return each
    return found


class Layouts:
    """The layouts of destination files; ranks with slices of one shape share one.

    What is in a file depends on the source files of its pipeline stage, not on which other
    files are made in the same run.
    """

    def __init__(self, conversion: Conversion) -> None:
        self._conversion = conversion
        self._known: dict[int, FileLayout] = {}

    def of(self, rank: int) -> FileLayout:
        """Return the layout of the file of a destination rank."""
        slices = self._conversion.planner.slices(rank)  # one list for all ranks with the same
        if id(slices) not in self._known:
            entries = [(p.name, p.dtype, shape) for p, shape in slices]
            self._known[id(slices)] = (
                lay_out_safetensors(entries, self._metadata(rank), self._conversion.request.crc)
                if self._conversion.format == SAFETENSORS
                else lay_out_ckpt(entries)
            )
        return self._known[id(slices)]

    def _metadata(self, rank: int) -> dict[str, str]:
        """Return what safetensors keep beside tensors: of the lowest source rank of the stage."""
        src, dst = self._conversion.source.strategy, self._conversion.dst
        stages = self._conversion.planner.source_stages(dst.stage_of(rank))
        first = next(
            one
            for stage in stages
            for source in src.ranks_in(stage)
            if (one := self._conversion.indexes.get(source)) is not None
        )
        # a mark of INT4 is the source's; the output has its own
        return {k: v for k, v in first.metadata.items() if not (v == INT4 and k in first)}


def outputs(
    conversion: Conversion,
    mine: Sequence[Portion],
    groups: Mapping[int, Sequence[int]],
    layouts: Layouts,
) -> dict[int, Output]:
    """Plan the files of this process's share."""
    outputs = {}
    for portion in mine:
        final, *others = map(conversion.final, groups[portion.rank])
        outputs[portion.rank] = Output(
            final, layouts.of(portion.rank), owned=portion.first == 0, alike=tuple(others)
        )
    return outputs
