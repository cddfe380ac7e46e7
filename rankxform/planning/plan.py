"""What every destination file is copied from, and groups of equal transfers.

A copy is the overlap of a source rank's box and a destination rank's box. Where several source
ranks hold the same box, one is chosen. The plan holds integers only; it can be printed, counted
and compared without touching a tensor byte, and is the same on every process.

For a 4x4 tensor sharded by rows on 2 ranks and wanted by columns on 2::

    rank 0  w [0:4, 0:2]  <- rank 0 [0:2, 0:2]  <- rank 1 [2:4, 0:2]
    rank 1  w [0:4, 2:4]  <- rank 0 [0:2, 2:4]  <- rank 1 [2:4, 2:4]

A plan is kept as transfers (`rankxform.planning.transfers`) and counted by file for people.

In rank folders a file holds all slices of the rank that is its id. Other forms divide a rank's
slices among files, or leave out those that another file holds.

A model has thousands of tensors and a few hundred pairs of a source sharding and a destination
layout. What is planned for one tensor of a transfer group holds for all of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import count
from types import MappingProxyType
from typing import NoReturn, TypeAlias

from rankxform.errors import RequestError
from rankxform.formats.container import TensorSpec, content_bytes, item_size
from rankxform.geometry.box import Shape
from rankxform.geometry.tiling import Cell, Grid, SourceTiling, overlaps
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import Strategy
from rankxform.values import dataclass

from .catalog import Catalog, Holders, IdentityDict, IdsByCell, Parameter, PreferredPlaces, Sharding
from .selection import Selection, destination_layout, missing_slices_error, source_stages
from .transfers import Receivers, SliceRange, Transfer


@dataclass(frozen=True)
class FileContent:
    """One destination file: whose slices, of which parameters (None: of all that the rank gets)."""

    rank: int
    names: frozenset[str] | None = None


class FileTotals:
    """What one destination file is made of; all sizes are bytes."""

    def __init__(self) -> None:
        self.slices = 0
        self.copies = 0  # regions of source files that are copied into it
        self.written = 0
        self.read_by_rank: dict[int, int] = {}  # source rank -> bytes of it

    def add(self, copies: int, written: int, read_by_rank: Mapping[int, int]) -> None:
        """Count one more slice."""
        self.slices += 1
        self.copies += copies
        self.written += written
        for rank, nbytes in read_by_rank.items():
            self.read_by_rank[rank] = self.read_by_rank.get(rank, 0) + nbytes


def replicas_to_read(parameters: Iterable[Parameter]) -> dict[str, int]:
    """Tell for each parameter which of its equal copies is read.

    The parameters that lie in the same files are taken in file order and divided into as many runs
    of equal bytes as there are copies, so that each file is read in long stretches: what is skipped
    in between would be read ahead by the system for nothing.
    """
    # Runs need no search and are even. (Changing files with every parameter read twice as much from
    # a cold disk.)
    # What belongs together, a parameter and its states, is of one rank, should replicas differ.
    kinds: dict[Holders, dict[str, list[Parameter]]] = {}
    for p in parameters:
        assert isinstance(p.sharding, Sharding), "a tensor of the catalog lies in the files"
        kinds.setdefault(p.sharding.placement, {}).setdefault(p.base_name, []).append(p)
    replicas = dict[str, int]()
    for placement, families in kinds.items():
        sizes = [sum(content_bytes(p.src_dtype, p.shape) + 1 for p in f) for f in families.values()]
        total, bytes_before = sum(sizes), 0
        for family, nbytes in zip(families.values(), sizes):
            replica = (2 * bytes_before + nbytes) * placement.copies // (2 * total)
            replicas.update((p.name, replica) for p in family)
            bytes_before += nbytes
    return replicas


Readers = Mapping[Cell, int]
"""For every cell of a source grid that is needed, the id of the file to read it from."""

ProcessFilePairs = tuple[tuple[int, int], ...]
"""(process, destination file)."""

Visible: TypeAlias = "frozenset[int] | None"
Transfers: TypeAlias = list[Transfer]


class Planner:
    """Plans any destination ranks of one conversion.

    The choice among replicas does not depend on the ranks asked for: the parameters of one layout
    are read from the source's replicas in long runs of equal bytes, so that each distinct source
    box is read from one rank, and the ranks share the bytes evenly.
    """

    def __init__(
        self,
        catalog: Catalog,
        dst: Strategy,
        selection: Selection,
        parts: Mapping[int, FileContent] = MappingProxyType({}),
        per_rank_tensors: frozenset[str] = frozenset(),
    ) -> None:
        """`parts` are the destination's files by id; a file that is none of them is a rank's.

        `per_rank_tensors` are source tensors of which the holders have values of their own, such as
        running statistics: a destination rank gets all of them from one source rank.
        """
        self.catalog, self.dst, self.selection, self.parts = catalog, dst, selection, parts
        self.per_rank_tensors = per_rank_tensors
        replicas_by_name = replicas_to_read(catalog.declared.values())
        self._replicas = {p.src_name: replicas_by_name.get(p.name, 0) for p in catalog.parameters}
        self._parts: dict[int, FileContent] = {}
        self._stages: dict[int, dict[str, Layout]] = {}
        self._src_stages: dict[int, list[int]] = {}
        self._files: dict[tuple[int, frozenset[str] | None], dict[str, Layout]] = {}
        self._slices: dict[object, list[tuple[Parameter, Shape]]] = {}
        self._bytes: dict[int, int] = {}
        self._targets: dict[object, IdsByCell] = {}
        self._readers: dict[object, Readers] = {}
        self._held: dict[object, IdsByCell] = {}
        self._numbers: dict[object, int] = {}
        self._file_of: dict[object, dict[int, int]] = {}

    # -- what destination files hold ------------------------------------------------------------

    def with_parts(self, parts: Mapping[int, FileContent]) -> Planner:
        """Return the planner of the same conversion for other files."""
        return Planner(self.catalog, self.dst, self.selection, parts, self.per_rank_tensors)

    def with_per_rank_tensors(self, per_rank_tensors: frozenset[str]) -> Planner:
        """Return the planner of the same conversion where these source tensors are ranks' own."""
        return Planner(self.catalog, self.dst, self.selection, self.parts, per_rank_tensors)

    def preferring(self, place_of: Mapping[int, int]) -> Planner:
        """Return the planner that reads each slice in the best place where a file has it.

        place_of: source file -> number of its place, the best first. Tensors of which ranks have
        values of their own are read of the rank that they are to be of.
        """
        if len({*place_of.values()}) < 2:
            return self
        return self._with_shardings(PreferredPlaces(place_of))

    def taking_of(self, name: str, files: Container[int]) -> Planner:
        """Return the planner that reads all that lies as a source tensor does of some `files`,
        where these have it."""
        sharding = self.catalog.declared[name].sharding
        place_of = {file: int(file not in files) for file in self.catalog.paths}
        assert isinstance(sharding, Sharding), "a tensor of the catalog lies in the files"
        return self._with_shardings(PreferredPlaces(place_of, sharding.placement))

    def _with_shardings(self, preferred: PreferredPlaces) -> Planner:
        def moved(parameters: Mapping[str, Parameter]) -> dict[str, Parameter]:
            return {
                name: parameter
                if self.is_own(parameter)
                else replace(parameter, sharding=preferred.of(parameter.sharding))
                for name, parameter in parameters.items()
            }

        selection = self.selection
        selection = replace(
            selection, sharded=moved(selection.sharded), replicated=moved(selection.replicated)
        )
        return Planner(self.catalog, self.dst, selection, self.parts, self.per_rank_tensors)

    def content_of_file(self, file: int) -> FileContent:
        """Return whose slices a file holds, and of which parameters."""
        part = self._parts.get(file)
        if part is None:
            part = self._parts[file] = self.parts.get(file) or FileContent(file)
        return part

    def layouts_of_file(self, file: int) -> Mapping[str, Layout]:
        """Return the layouts of the parameters of a destination file, in file order.

        MindSpore writes first what both strategies list and then the rest, each in the order of
        the source files that it loads for the stage, highest rank first. Raises RequestError
        if the file's rank gets nothing.
        """
        part = self.content_of_file(file)
        stage = self.dst.stage_of(part.rank)
        key = stage, part.names
        if key not in self._files:
            layouts = self.layouts_of_rank(part.rank)
            if part.names is not None:
                layouts = {name: layout for name, layout in layouts.items() if name in part.names}
            self._files[key] = layouts
        return self._files[key]

    def layouts_of_rank(self, rank: int) -> dict[str, Layout]:
        """Return the layouts of all parameters that a destination rank gets, in whatever files."""
        stage = self.dst.stage_of(rank)
        if stage not in self._stages:
            self._stages[stage] = self._stage_layouts(stage)
        if not self._stages[stage]:
            raise RequestError(
                f"destination rank {rank} would get no parameter: no file holds one of those "
                f"that {self.dst.label} lists for pipeline stage {stage}"
            )
        return self._stages[stage]

    def slices(self, file: int) -> list[tuple[Parameter, Shape]]:
        """Return the parameters of a file and the shapes of its slices, in file order."""
        part = self.content_of_file(file)
        stage, local = self.dst.stage_of(part.rank), part.rank % self.dst.stage_size
        layouts = self.layouts_of_file(file)
        uneven = any(layout.split_rows for layout in layouts.values())
        # even shards give all ranks of a stage one shape
        key = stage, local if uneven else None, part.names
        if key not in self._slices:
            self._slices[key] = [
                (parameter, layout.grid(parameter.shape).box(layout.cell(local)).shape)
                for name, layout in layouts.items()
                if (parameter := self.parameter(name))
            ]
        return self._slices[key]

    def content_bytes(self, file: int) -> int:
        """Return the bytes of a file's tensors."""
        slices = self.slices(file)
        if id(slices) not in self._bytes:  # one list for all files with the same
            self._bytes[id(slices)] = sum(content_bytes(p.dtype, shape) for p, shape in slices)
        return self._bytes[id(slices)]

    def tensors(self, file: int) -> list[TensorSpec]:
        """Return what a file holds, in file order."""
        return [TensorSpec(p.name, p.dtype, shape) for p, shape in self.slices(file)]

    def parameter(self, name: str) -> Parameter:
        """Return the parameter that is converted under this name."""
        return self.selection.sharded.get(name) or self.selection.replicated[name]

    def cell(self, layout: Layout, file: int) -> Cell:
        """Return the cell of a destination layout that a file holds."""
        return layout.cell(self.content_of_file(file).rank % self.dst.stage_size)

    def equal_files(self, files: Iterable[int]) -> dict[int, list[int]]:
        """Return `files` by the first one that has the same boxes."""
        first: dict[object, int] = {}
        files_by_first: dict[int, list[int]] = {}
        for file in files:
            files_by_first.setdefault(first.setdefault(self.replica_key(file), file), []).append(
                file
            )
        return files_by_first

    def replica_key(self, file: int) -> tuple[int, int, tuple[Cell, ...], tuple[int, ...]]:
        """Return stage, names as a number, cells, and which ranks' own values a file gets: they are
        equal for files that hold the same bytes."""
        part, names = self.content_of_file(file), self.layouts_of_file(file)
        stage = self.dst.stage_of(part.rank)
        number = self._numbers.setdefault((stage, part.names), len(self._numbers))
        per_rank_files: tuple[int, ...] = ()
        if self.per_rank_tensors:
            parameters = map(self.parameter, names)
            per_rank = (p for p in parameters if p.src_name in self.per_rank_tensors)
            per_rank_files = tuple(self.file_for_own_values(p, file) for p in per_rank)
        return (
            stage,
            number,
            tuple(self.cell(layout, file) for layout in dict.fromkeys(names.values())),
            per_rank_files,
        )

    def is_own(self, parameter: Parameter) -> bool:
        """Tell whether a destination rank gets a parameter from its congruent source rank."""
        if parameter.composed_sharding:
            return False
        return not parameter.is_declared or parameter.src_name in self.per_rank_tensors

    # -- which copies make them up --------------------------------------------------------------

    def file_totals(self, files: Iterable[int]) -> dict[int, FileTotals]:
        """Count what each destination file is made of.

        Raises CheckpointError where no source file holds what is needed.
        """
        totals = {file: FileTotals() for file in files}
        for transfer in self.transfers(map(self.whole_file, totals)):
            item = item_size(transfer.parameter.src_dtype)
            for cell, receiving_files in transfer.targets.items():
                nbytes_by_rank: Counter[int] = Counter()
                copies = transfer.copies(cell)
                for src_cell, box in copies:
                    src_rank = self.catalog.rank_of(transfer.readers[src_cell])
                    nbytes_by_rank[src_rank] += box.size * item
                written = content_bytes(transfer.parameter.dtype, transfer.grid.box(cell).shape)
                for file in receiving_files:
                    totals[file].add(len(copies), written, nbytes_by_rank)
        return totals

    def whole_file(self, file: int) -> SliceRange:
        """Return all slices of a file."""
        return SliceRange(file, 0, len(self.layouts_of_file(file)))

    def transfers(self, slice_ranges: Iterable[SliceRange], visible: Visible = None) -> Transfers:
        """Plan parts of some destination files, parameter by parameter in file order.

        Among equal copies, one in a `visible` file is preferred (None: all files are visible).
        Raises CheckpointError where no source file holds what is needed.
        """
        pairs_by_tensor = self.receivers_by_tensor([list(slice_ranges)])
        shared = {id(pairs): pairs for pairs in pairs_by_tensor.values()}
        files_of = {key: tuple(sorted(file for _, file in pairs)) for key, pairs in shared.items()}
        transfers = []
        for (name, layout), pairs in pairs_by_tensor.items():
            parameter, files = self.parameter(name), files_of[id(pairs)]
            grid = layout.grid(parameter.shape)
            transfers += [
                Transfer(parameter, grid, self._targets_of(layout, sharing_files), readers)
                for readers, sharing_files in self._readers_and_files(
                    parameter, layout, files, visible
                )
            ]
        return transfers

    def receivers_by_tensor(
        self, assignment: Sequence[Sequence[SliceRange]]
    ) -> dict[tuple[str, Layout], ProcessFilePairs]:
        """Return who wants a parameter in one destination layout, if process p writes
        ``assignment[p]``; in file order."""
        pairs_by_content: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
        for process, slice_ranges in enumerate(assignment):
            for slice_range in slice_ranges:
                key = (
                    id(self.layouts_of_file(slice_range.file)),
                    slice_range.first,
                    slice_range.stop,
                )
                pairs_by_content.setdefault(key, []).append((process, slice_range.file))
        pairs_by_tensor: dict[tuple[str, Layout], ProcessFilePairs] = {}
        for (_, first, stop), content_pairs in pairs_by_content.items():
            pairs = tuple(content_pairs)
            for entry in list(self.layouts_of_file(pairs[0][1]).items())[first:stop]:
                pairs_by_tensor[entry] = (
                    pairs_by_tensor[entry] + pairs if entry in pairs_by_tensor else pairs
                )
        files = sorted(
            {slice_range.file for slice_ranges in assignment for slice_range in slice_ranges}
        )
        stages = {id(self.layouts_of_file(file)): self.layouts_of_file(file) for file in files}
        order = dict.fromkeys(key for names in stages.values() for key in names.items())
        return {key: pairs_by_tensor[key] for key in order if key in pairs_by_tensor}

    def receivers(self, layout: Layout, pairs: ProcessFilePairs) -> Receivers:
        """Return by destination cell the processes that write it, each with its files."""
        receivers_by_cell: dict[Cell, dict[int, tuple[int, ...]]] = {}
        for process, file in pairs:
            files_by_process = receivers_by_cell.setdefault(self.cell(layout, file), {})
            files_by_process[process] = (*files_by_process.get(process, ()), file)
        return IdentityDict(receivers_by_cell)

    def groups_by_holders(
        self, parameter: Parameter, layout: Layout, pairs: ProcessFilePairs
    ) -> Iterator[tuple[IdsByCell, ProcessFilePairs]]:
        """Yield the files that may be read for each source cell, and the `pairs` for which."""
        if not self.is_own(parameter):
            yield parameter.sharding.files, pairs
            return
        pairs_by_file: dict[int, list[tuple[int, int]]] = {}
        for pair in pairs:
            file = self.file_for_own_values(parameter, pair[1])
            pairs_by_file.setdefault(file, []).append(pair)
        cell = (0,) * len(parameter.shape)
        for file, sharing_pairs in pairs_by_file.items():
            key = cell, file
            if key not in self._held:
                self._held[key] = IdentityDict({cell: (file,)})
            yield self._held[key], tuple(sharing_pairs)

    def _targets_of(self, layout: Layout, files: tuple[int, ...]) -> IdsByCell:
        key = layout, files
        if key not in self._targets:
            files_by_cell: IdsByCell = IdentityDict()
            for file in files:
                cell = self.cell(layout, file)
                files_by_cell[cell] = (*files_by_cell.get(cell, ()), file)
            self._targets[key] = files_by_cell
        return self._targets[key]

    def _readers_and_files(
        self, parameter: Parameter, layout: Layout, files: tuple[int, ...], visible: Visible = None
    ) -> Iterator[tuple[Readers, tuple[int, ...]]]:
        """Yield the readers of `parameter`, and the destination files that share them."""
        if not self.is_own(parameter):
            yield self._readers_of(parameter, layout, files, visible), files
            return
        files_by_src_file: dict[int, list[int]] = {}
        for file in files:
            files_by_src_file.setdefault(self.file_for_own_values(parameter, file), []).append(file)
        for src_file, sharing_files in files_by_src_file.items():
            yield {(0,) * len(parameter.shape): src_file}, tuple(sharing_files)

    def _cells(
        self, parameter: Parameter, layout: Layout, files: tuple[int, ...]
    ) -> Iterator[tuple[Cell, tuple[int, ...]]]:
        """Yield the source cells that destination `files` need, and the files that hold each."""
        grid, files_by_cell = layout.grid(parameter.shape), parameter.sharding.files
        src_cells = (
            cell
            for dst_cell in self._targets_of(layout, files)
            for cell, _ in overlaps(parameter.grid, grid, dst_cell)
        )
        for cell in dict.fromkeys(src_cells):
            yield cell, files_by_cell.get(cell) or self.raise_missing_slice(parameter, cell)

    def _readers_of(
        self, parameter: Parameter, layout: Layout, files: tuple[int, ...], visible: Visible
    ) -> Readers:
        """Choose a file for every source cell that `files` need, one of the `visible` if any."""
        replica = self.replica(parameter)
        key = parameter.sharding, layout, files, replica, visible
        if key not in self._readers:
            readers = {}
            for cell, holders in self._cells(parameter, layout, files):
                candidates = [file for file in holders if visible and file in visible] or holders
                readers[cell] = candidates[replica % len(candidates)]
            self._readers[key] = readers
        return self._readers[key]

    def replica(self, parameter: Parameter) -> int:
        """Return which of the equal copies of a parameter is read, as a number to be reduced."""
        return self._replicas[parameter.src_name] % parameter.sharding.period

    def raise_missing_slice(self, parameter: Parameter, cell: Cell) -> NoReturn:
        """Raise CheckpointError for a slice that no file holds, and all others like it."""
        assert cell not in parameter.sharding.files
        src_parameters = self.selection.sources(self.catalog)
        raise missing_slices_error(self.catalog, src_parameters, {})

    def require_holders(self, transfers: TransferGroup) -> None:
        """Raise CheckpointError if no file holds a slice that a transfer group needs."""
        for cell in transfers.needs:
            if not transfers.files.get(cell):
                self.raise_missing_slice(transfers.first, cell)

    def file_for_own_values(self, parameter: Parameter, file: int) -> int:
        """Return whose copy of ranks' own values a destination file gets, as MindSpore does.

        It is that of the rank that is congruent to the destination's stage-local rank, in the
        lowest stage that MindSpore loads for the destination's stage.
        """
        src, dst_rank = self.catalog.strategy, self.content_of_file(file).rank
        if src is None:
            return parameter.holders[0]
        stages = self.source_stages(self.dst.stage_of(dst_rank))
        local = dst_rank % self.dst.stage_size % src.stage_size
        if parameter.sharding not in self._file_of:  # asked for each destination rank
            rank_of = self.catalog.rank_of
            self._file_of[parameter.sharding] = {rank_of(h): h for h in parameter.holders}
        file_of = self._file_of[parameter.sharding]
        for stage in stages:
            if src.ranks_in(stage)[local] in file_of:
                return file_of[src.ranks_in(stage)[local]]
        stage_files = (file_of[r] for s in stages for r in src.ranks_in(s) if r in file_of)
        return next(stage_files, parameter.holders[0])

    # -- stages ---------------------------------------------------------------------------------

    def source_stages(self, dst_stage: int) -> list[int]:
        """Return the source stages that a destination stage draws on (`planning.selection`)."""
        if dst_stage not in self._src_stages:
            stages = source_stages(self.catalog, self.dst, self.selection, dst_stage)
            self._src_stages[dst_stage] = stages
        return self._src_stages[dst_stage]

    def _stage_layouts(self, stage: int) -> dict[str, Layout]:
        sharded: dict[str, Layout] = {}
        replicated: dict[str, Layout] = {}
        names = self.catalog.names_in(self.source_stages(stage))
        if self.catalog.description.lists_files:  # what stores slices once has counters once too
            names = list(dict.fromkeys([*names, *self.selection.replicated]))
        dst_names = [
            dst_name for src_name in names for dst_name in self.selection.made_of.get(src_name, ())
        ]
        constant_names = [n for n, p in self.selection.replicated.items() if p.value is not None]
        for name in dict.fromkeys([*dst_names, *constant_names]):
            is_replicated = name in self.selection.replicated
            if is_replicated or name in self.selection.sharded:
                layout = self._layout(name, stage)
                if layout is not None:
                    (replicated if is_replicated else sharded)[name] = layout
        return {**sharded, **replicated}

    def _layout(self, name: str, stage: int) -> Layout | None:
        layout = destination_layout(self.selection, self.dst, name, stage)
        if layout is None:
            return None
        parameter = self.parameter(name)
        try:
            layout = layout.fold(parameter.shape, slices=False)
            layout.grid(parameter.shape)
        except RequestError as error:
            origin = f" (the shape is what {self.catalog.declared_by} makes of the source's slices)"
            text = f"{name!r}: {error}" + ("" if self.catalog.is_whole else origin)
            raise RequestError(text, where=self.dst.label) from error
        return layout


@dataclass(frozen=True, eq=False)
class TransferGroup:
    """Tensors that go from one source sharding to the cells of one destination layout."""

    # The tensors, each with its place in the order of destination files.
    parameters: tuple[tuple[int, Parameter], ...]
    # layout, grid: the destination's.
    layout: Layout
    grid: Grid
    files: IdsByCell  # by source cell the files that may be read
    receivers: Receivers  # by destination cell the processes that write it, each with its ranks

    @property
    def first(self) -> Parameter:
        """One of the tensors, for what they have in common."""
        return self.parameters[0][1]

    @property
    def src(self) -> SourceTiling:
        """How they are stored."""
        return self.first.grid

    @property
    def item(self) -> int:
        """Bytes of an element, as it is stored."""
        return item_size(self.first.src_dtype)

    @cached_property
    def needs(self) -> Mapping[Cell, Mapping[int, int]]:
        """By source cell the processes that need some of it, each with how many elements."""
        elements_by_cell: dict[Cell, dict[int, int]] = {}
        for cell, files_by_process in self.receivers.items():
            for src_cell, box in overlaps(self.src, self.grid, cell):
                of_cell, size = elements_by_cell.setdefault(src_cell, {}), box.size
                for process in files_by_process:
                    of_cell[process] = of_cell.get(process, 0) + size
        return elements_by_cell


def transfer_groups(
    planner: Planner, assignment: Sequence[Sequence[SliceRange]]
) -> Iterator[TransferGroup]:
    """Yield what moves where process p writes ``assignment[p]``."""
    groups_by_key: dict[
        object, tuple[IdsByCell, ProcessFilePairs, list[tuple[int, Parameter]], Layout]
    ] = {}
    numbers = count()
    for (name, layout), all_pairs in planner.receivers_by_tensor(assignment).items():
        parameter = planner.parameter(name)
        for files_by_cell, pairs in planner.groups_by_holders(parameter, layout, all_pairs):
            has_all_pairs = files_by_cell is parameter.sharding.files
            key = (
                id(parameter.sharding), item_size(parameter.src_dtype), parameter.dtype, layout,
                id(files_by_cell), id(all_pairs) if has_all_pairs else pairs,
            )  # fmt: skip
            entry = groups_by_key.setdefault(key, (files_by_cell, pairs, [], layout))
            entry[2].append((next(numbers), parameter))
    receivers_cache: dict[tuple[Layout, int], Receivers] = {}
    for files_by_cell, pairs, parameters, layout in groups_by_key.values():
        receivers = receivers_cache.get((layout, id(pairs)))
        if receivers is None:
            receivers = receivers_cache[layout, id(pairs)] = planner.receivers(layout, pairs)
        grid = layout.grid(parameters[0][1].shape)
        yield TransferGroup(tuple(parameters), layout, grid, files_by_cell, receivers)


def needed_bytes(planner: Planner, slice_ranges: Sequence[SliceRange]) -> int:
    """Return the distinct source bytes that parts of destination files need.

    A region that two destination layouts of a shared parameter want counts for both.
    """
    return sum(
        len(m.parameters) * m.item * sum(m.grid.box(cell).size for cell in m.receivers)
        for m in transfer_groups(planner, [slice_ranges])
    )


def needed_bytes_by_file(planner: Planner, slice_ranges: Sequence[SliceRange]) -> dict[int, int]:
    """Return how many distinct bytes of each source file parts of destination files need.

    Of several files that hold a region, the one that a process alone would read counts.
    """
    nbytes_by_file: Counter[int] = Counter()
    for transfer in planner.transfers(slice_ranges):
        item = item_size(transfer.parameter.src_dtype)
        for cell in transfer.targets:
            for src_cell, box in transfer.copies(cell):
                nbytes_by_file[transfer.readers[src_cell]] += box.size * item
    return nbytes_by_file
