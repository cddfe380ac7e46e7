"""The files of one process's part: which, with which bytes where, and which are equal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from posixpath import splitext

from rankxform.engine.file_sink import OutputFile
from rankxform.formats.base import BLOCK, Container, FileLayout, Index, container_of
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange
from rankxform.publish.links import LINK_NONE, LINK_REFLINK, can_reflink
from rankxform.request import Request
from rankxform.transport import Team

from .placement import Placement
from .target import Target


def equal_files(
    request: Request, planner: Planner, placement: Placement, ranks: Iterable[int], team: Team
) -> dict[int, list[int]]:
    """Return which files of `ranks` are written, each with the ranks that get its bytes."""
    single_groups = {rank: [rank] for rank in ranks}
    if request.link == LINK_NONE:
        return single_groups
    ranks_by_root = [[rank for rank in single_groups if rank in r.ranks] for r in placement.roots]
    groups = {
        first: group
        for root_ranks in ranks_by_root
        for first, group in planner.equal_files(root_ranks).items()
    }
    if len(groups) == len(single_groups) or request.dst is None:
        return single_groups
    if request.link == LINK_REFLINK:
        dst, first = Path(request.dst), team.rank == placement.of(team.rank).processes[0]
        if not all(team.allgather(lambda: not first or can_reflink(dst))):
            return single_groups
    return groups


class FileLayoutCache:
    """The layouts of destination files; ranks with slices of one shape share one.

    What is in a file depends on the source files of its pipeline stage, not on which other
    files are made in the same run.
    """

    def __init__(
        self, planner: Planner, indexes: Mapping[int, Index], target: Target, checksum: bool
    ) -> None:
        self._planner, self._indexes = planner, indexes
        self._target, self._checksum = target, checksum
        self._known: dict[int, FileLayout] = {}

    def of(self, rank: int) -> FileLayout:
        """Return the layout of the file of a destination rank."""
        slices = self._planner.slices(rank)  # one list for all ranks with the same
        if id(slices) not in self._known:
            container, tensors = self._container(rank), self._planner.tensors(rank)
            source = self._source(rank)
            begins = min(source.offsets, default=0) % BLOCK
            metadata = self._metadata(rank, source)
            layout = container.lay_out(tensors, metadata, self._checksum, begins)
            self._known[id(slices)] = layout
        return self._known[id(slices)]

    def _container(self, rank: int) -> Container:
        """Return the container of a destination file; some forms have two."""
        return container_of(splitext(self._target.arrangement.names[rank])[1])

    def _source(self, rank: int) -> Index:
        """Return the file of the lowest source rank of a destination rank's stage."""
        planner = self._planner
        return next(
            index
            for stage in planner.source_stages(planner.dst.stage_of(planner.part(rank).rank))
            for file, index in self._indexes.items()
            if planner.catalog.stage_of(file) == stage
        )

    def _metadata(self, rank: int, source: Index) -> Mapping[str, str]:
        """Return a source file's metadata for the file of a destination rank.

        Entries named after a source tensor that is not in the destination's file are left out.
        """
        omitted_names = set(source.schema.names).difference(
            t.name for t in self._planner.tensors(rank)
        )
        metadata = {key: text for key, text in source.metadata.items() if key not in omitted_names}
        return self._target.form.metadata(metadata)


def plan_output_files(
    target: Target,
    slice_ranges: Sequence[SliceRange],
    groups: Mapping[int, Sequence[int]],
    layouts: FileLayoutCache,
) -> dict[int, OutputFile]:
    """Plan the files of this process's part; `groups` are ranks whose files are equal."""
    outputs_by_file = {}
    for slice_range in slice_ranges:
        final, *equal_paths = map(target.path, groups[slice_range.rank])
        outputs_by_file[slice_range.rank] = OutputFile(
            final,
            layouts.of(slice_range.rank),
            owned=slice_range.first == 0,
            equal=tuple(equal_paths),
        )
    return outputs_by_file
