"""A certificate of a plan: what it makes is summed by an arithmetic of its own, on every run.

An element of a destination that lies at index i of a tensor, and comes from index j of a source
tensor, counts ``x**i * y**j``, with a random x and y for each axis, times random numbers for the
file and the two names. The sum over a box is a product of geometric series, modulo the prime
2**61 - 1, whatever its size. What the plan's pieces add up to is compared with what layouts say: an
element that is lacking, there twice or in another's place changes the sum, but with a probability
of 2**-50 for tensors of a million indices on an axis (Schwartz and Zippel).

It imports nothing of what finds overlaps, assigns work or routes messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from random import Random

from rankxform.errors import RankxformError, RequestError
from rankxform.geometry.box import Box, Shape
from rankxform.geometry.pieces import BROADCAST_AXIS, Piece, PieceTiling
from rankxform.geometry.tiling import Cell, Grid, SourceTiling
from rankxform.layout.layout import Layout
from rankxform.values import NamedTuple, blake2b

from .catalog import Catalog, Parameter
from .transfers import Reach, Transfer

PRIME = (1 << 61) - 1
_MOST_AXES = 64  # numpy's

SumsBySource = Mapping[int, int]
"""Of each source tensor that a tensor is made of, by its number, the sum of what comes of it."""

Hop = tuple[str, int, int, Cell, Cell]
"""A piece in a message: how it travels, from which process, to which; its source and destination
cell."""


class Totals(NamedTuple):
    """Sums of some processes; of all together, the first two are equal, and the third is 0."""

    assembled: int  # what their pieces put into files
    expected: int  # what layouts say of their share of the files
    messages: int  # what they send, less what they receive
    boxes: int = 0  # how many different ones were compared


class Share(NamedTuple):
    """A process's part in one tensor, without the tensor's name: many tensors have the same."""

    sums: SumsBySource  # of what it puts into files
    messages: int  # what it sends, less what it receives
    reads: tuple[tuple[Cell, int], ...]  # source cells, and the files in which it reads them


class ExpectedGroup(NamedTuple):
    """Tensors of a file that lie alike in the source and in the destination."""

    tiling: SourceTiling
    grid: Grid
    layout: Layout
    weights: list[int]  # by number of the source tensor, the sum over the tensors


class PlanProof(NamedTuple):
    """What was compared: the different boxes of all processes; a digest of what they make."""

    boxes: int
    digest: str


class Certificate:
    """Sums what processes of a plan do, and refuses what cannot be right.

    Methods raise RankxformError, for a plan that is wrong is a bug of rankxform's.
    """

    def __init__(self, catalog: Catalog, reach: Reach, seed: int) -> None:
        """reach: of the source's files. seed: drawn for this run, the same on all processes."""
        self._catalog, self._reach, self._seed = catalog, reach, seed
        draw = Random(seed)
        self._x, self._y = ([draw.randrange(2, PRIME) for _ in range(_MOST_AXES)] for _ in "xy")
        self._weight = lru_cache(None)(self._new_weight)
        self._sums: dict[object, SumsBySource] = {}
        self._stated: dict[str, object] = {}  # by tensor what states where it lies
        self._boxes: dict[str, dict[int, list[Box]]] = {}  # by tensor and file
        # Cells with what makes them, and reads that files are stated to hold; each with what is
        # kept because its identity is in the key.
        self._proved: dict[object, tuple[SumsBySource, object]] = {}
        self._held: dict[object, object] = {}
        self._assembled = self._expected = self._messages = 0

    @property
    def totals(self) -> Totals:
        return Totals(self._assembled, self._expected, self._messages, len(self._sums))

    # -- what processes do ------------------------------------------------------------------------

    def share(
        self, process: int, transfer: Transfer, pieces: Iterable[tuple[Cell, Cell]],
        reads: Iterable[Cell], sent: Iterable[Hop] = (), received: Iterable[Hop] = (),
    ) -> Share:  # fmt: skip
        """Return what a process does of a tensor.

        pieces: (source cell, destination cell) of what it reads for itself, or gets. They must be
        each destination cell's, once. reads: source cells that it reads, for itself or others.
        """
        src_cells_of: dict[Cell, list[Cell]] = {}
        for src_cell, cell in pieces:
            src_cells_of.setdefault(cell, []).append(src_cell)
        totals = dict[int, int]()
        for cell, files in transfer.targets.items():
            weight = sum(map(self._weight, files))
            for number, term in self._sums_of(transfer, cell, src_cells_of.get(cell, ())).items():
                totals[number] = (totals.get(number, 0) + weight * term) % PRIME
        readable, read_files = self._reach.of(process), {c: transfer.readers[c] for c in reads}
        for file in read_files.values():
            if file not in readable:
                raise wrong(f"process {process} is to read file {file}, which it cannot open")
        messages = sum(map(self._weight, sent)) - sum(map(self._weight, received))
        return Share(totals, messages, (*read_files.items(),))

    def add(self, parameter: Parameter, share: Share) -> None:
        """Count a share of a tensor, if files are stated to hold what is read of it."""
        names = parameter.src_names or (parameter.src_name,)
        weight = self._weight(parameter.name)
        for number, term in share.sums.items():
            self._assembled += weight * self._weight(("source", names[number])) * term
        self._messages += weight * share.messages
        statements = (*map(self._statement_of, names),)
        if (id(share), statements) not in self._held:
            for cell, file in share.reads:
                key = id(parameter.sharding), statements, cell, file
                if key not in self._held:
                    self._check_held(parameter, cell, file)
                    self._held[key] = parameter
            self._held[id(share), statements] = share

    def add_expected(self, groups: Iterable[ExpectedGroup], file: int, place: int) -> None:
        """Count what a destination file is to hold. place: of its rank in the stage."""
        total = 0
        for tiling, grid, layout, weights in groups:
            for number, term in self._expected_of(tiling, grid, layout.cell(place)).items():
                total += weights[number] * term
        self._expected += total * self._weight(file)

    def groups_of(self, layouts: Mapping[Parameter, Layout]) -> list[ExpectedGroup]:
        """Return tensors of a file by how they lie in the source and the destination."""
        groups: dict[object, ExpectedGroup] = {}
        for parameter, layout in layouts.items():
            names = parameter.src_names or (parameter.src_name,)
            tiling, weight = parameter.grid, self._weight(parameter.name)
            fresh = ExpectedGroup(tiling, layout.grid(parameter.shape), layout, [0] * len(names))
            weights = groups.setdefault((id(tiling), layout), fresh).weights
            for number, name in enumerate(names):
                weights[number] += weight * self._weight(("source", name)) % PRIME
        return [*groups.values()]

    def _sums_of(self, transfer: Transfer, cell: Cell, src_cells: Iterable[Cell]) -> SumsBySource:
        """Return the sums of a destination cell that is put together of these source cells."""
        tiling, copies = transfer.parameter.grid, transfer.copies(cell)
        key = id(tiling), transfer.grid, cell, id(copies), *src_cells
        if key in self._proved:
            return self._proved[key][0]
        regions, sums = dict(copies), dict[int, int]()
        for src_cell in src_cells:
            region, box = regions.get(src_cell), tiling.box(src_cell)
            if region is None or not region.size or not box.contains(region):
                name = transfer.parameter.name
                raise wrong(f"{name}: what is taken of {src_cell} lies outside of it")
            number, term = self._of_region(tiling, src_cell, region)
            sums[number] = (sums.get(number, 0) + term) % PRIME
        if sums != self._expected_of(tiling, transfer.grid, cell):
            raise wrong(f"{transfer.parameter.name}: pieces do not make {transfer.grid.box(cell)}")
        self._proved[key] = sums, (tiling, copies)
        return sums

    # -- sums -------------------------------------------------------------------------------------

    def _new_weight(self, label: object) -> int:
        state = blake2b(f"{self._seed} {label!r}".encode(), digest_size=8)
        return int.from_bytes(state.digest(), "little") % PRIME

    def _expected_of(self, tiling: SourceTiling, grid: Grid, cell: Cell) -> SumsBySource:
        """Return the sums of a destination cell, as the tensor's definition says."""
        key = tiling, grid, cell
        if key not in self._sums:
            box, sums = grid.box(cell), dict[int, int]()
            if not isinstance(tiling, PieceTiling):
                if box.size:
                    sums[0] = self._of_region(tiling, (), box)[1]
            else:
                for piece in tiling.assembly.pieces if box.size else ():
                    part = _part_of(piece, box)
                    if part is not None:
                        term = self._of_piece(piece, part)
                        sums[piece.source] = (sums.get(piece.source, 0) + term) % PRIME
            self._sums[key] = sums
        return self._sums[key]

    def _of_region(self, tiling: SourceTiling, cell: Cell, region: Box) -> tuple[int, int]:
        """Return the number of the source tensor that a region is of, and its sum."""
        if isinstance(tiling, PieceTiling):
            piece = tiling.assembly.pieces[cell[0]]
            return piece.source, self._of_piece(piece, region)
        total = 1
        for x, y, start, stop in zip(self._x, self._y, region.start, region.stop):
            q = x * y % PRIME
            total = total * _series(q, stop - start) * pow(q, start, PRIME) % PRIME
        return 0, total

    def _of_piece(self, piece: Piece, part: Box) -> int:
        total = 1
        for axis, index in enumerate(piece.src_start):
            total = total * pow(self._y[axis], index, PRIME) % PRIME
        steps = zip(piece.dst_start, piece.dst_step, piece.src_step, piece.axes)
        for j, (origin, dst_step, src_step, axis) in enumerate(steps):
            x, first, count = self._x[j], part.start[j], part.stop[j] - part.start[j]
            q = pow(x, dst_step, PRIME)
            if axis != BROADCAST_AXIS:
                q = q * pow(self._y[axis], src_step, PRIME) % PRIME
            total = total * pow(x, origin, PRIME) * pow(q, first, PRIME) % PRIME
            total = total * _series(q, count) % PRIME
        return total

    # -- what files hold --------------------------------------------------------------------------

    def _statement_of(self, name: str) -> object:
        """Return what is equal for source tensors that are stated to lie alike."""
        if name not in self._stated:
            strategy, is_listed = self._catalog.strategy, name in self._catalog.description.boxes
            stages = () if strategy is None else strategy.stages
            layouts = tuple(id(stage.get(name)) for stage in stages)
            self._stated[name] = name if is_listed else layouts
        return self._stated[name]

    def _check_held(self, parameter: Parameter, cell: Cell, file: int) -> None:
        """Refuse a file that is not stated to hold a cell of a tensor."""
        tiling, name, shape = parameter.grid, parameter.src_name, parameter.shape
        if isinstance(tiling, PieceTiling):
            number = tiling.source(cell)
            name, shape = parameter.src_names[number], tiling.grids[number].shape
        box = tiling.source_box(cell)
        stated_boxes = self._stated_boxes(name, shape, file)
        if stated_boxes is None:  # headers alone say how rows are divided
            stated_boxes = [box] if file in parameter.sharding.files[cell] else ()
        if box not in stated_boxes:
            raise wrong(f"file {file} is not stated to hold {box} of {name}")

    def _stated_boxes(self, name: str, shape: Shape, file: int) -> Sequence[Box] | None:
        """Return what the strategy, or the checkpoint's metadata, say that a file holds; None where
        slices are of other sizes than the strategy's, as those of torch.chunk are."""
        description, strategy = self._catalog.description, self._catalog.strategy
        if name in description.boxes:
            if name not in self._boxes:
                boxes = self._boxes[name] = {}
                for holder, box, _ in description.boxes[name]:
                    boxes.setdefault(holder, []).append(box)
            return self._boxes[name].get(file, ())
        stage = None if strategy is None else strategy.stages[self._catalog.stage_of(file)]
        if strategy is None or stage is None or name not in stage:
            return [Box.whole(shape)]
        place = self._catalog.rank_of(file) % strategy.stage_size
        try:
            layout = stage[name].fold(shape, slices=False)
            return [layout.grid(shape).box(layout.cell(place))]
        except RequestError:
            return None


@lru_cache(1 << 16)
def _series(q: int, count: int) -> int:
    """Return the sum of q**i for i below `count`."""
    return (pow(q, count, PRIME) - 1) * pow(q - 1, -1, PRIME) % PRIME


def _part_of(piece: Piece, box: Box) -> Box | None:
    """Return the elements of a piece that lie in a box of the tensor, counted in the piece."""
    ranges = [
        range(origin, origin + step * count, step) if step else range(origin, origin + 1)
        for origin, step, count in zip(piece.dst_start, piece.dst_step, piece.shape)
    ]
    inside = [
        [n for n, index in enumerate(r) if a <= index < b]
        if len(r) < 2
        else range(max(0, -((r.start - a) // r.step)), min(len(r), -((r.start - b) // r.step)))
        for r, a, b in zip(ranges, box.start, box.stop)
    ]
    if not all(len(indices) for indices in inside):
        return None
    return Box(tuple(i[0] for i in inside), tuple(i[-1] + 1 for i in inside))


def wrong(text: str) -> RankxformError:
    """Return the error of a plan that is wrong."""
    advice = "report it with the output of plan --json; this is a bug of rankxform"
    return RankxformError(f"the plan is wrong: {text}", advice)
