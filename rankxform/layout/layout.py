"""The layout of one parameter; optimizer shards and nested maps as part of it.

Ranks here are stage-local: 0 to ``ranks - 1``. The closed form is MindSpore's rule for tensor
maps and optimizer shards; no operator is replayed, so any sharding can be compared with any other.

>>> layout = Layout((2, 4), ((0,), ()))            # 2 x 4 ranks; axis 0 sharded by the rightmost 4
>>> layout.grid((8, 3)).box(layout.cell(5))        # rank 5 is at (1, 1)
Box(start=(2, 0), stop=(4, 3))

A strategy file states the optimizer's shard beside device matrix and tensor map; MindSpore's
strategy metadata, which Checkpoint 2.0 keeps, adds the device axes that divide axis 0 further to
its list.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace
from functools import cache, cached_property
from itertools import accumulate
from math import prod
from types import MappingProxyType
from typing import Any

from rankxform.errors import RequestError, StrategyError
from rankxform.geometry.box import Shape
from rankxform.geometry.tiling import Cell, Grid
from rankxform.values import dataclass

MOST_RANKS = 1 << 20
_MOST_AXES = 64


def _few(numbers: tuple[int, ...]) -> str:
    """Write numbers for a message; long lists and huge numbers are abbreviated."""
    shown = [str(n) if abs(n) < 1 << 64 else "..." for n in numbers[:12]]
    return "[" + ", ".join(shown) + (", ..." if len(numbers) > 12 else "") + "]"


@dataclass(frozen=True)
class Layout:
    """How one parameter is sharded, as a strategy file declares it."""

    device_matrix: tuple[int, ...]  # arrangement of the stage's ranks, last axis fastest
    # By axis of the tensor the device axes that shard it, most significant first. Device axes are
    # counted from the right. (): the axis is not sharded.
    tensor_map: tuple[tuple[int, ...], ...]
    # The optimizer divides axis 0 of a slice among the ranks that hold the same slice, in chunks of
    # `opt_size` of them (-1: all). 0 in either: it does not. The step is only carried along.
    opt_step: int = 0
    opt_size: int = 0
    field: int = 0  # number of fields of an embedding; 0: an ordinary parameter
    split_rows: tuple[int, ...] = ()  # rows of each slice, if axis 0 is sharded unevenly
    split_offsets: tuple[int, ...] = ()  # first row of each of these slices
    # The tensor's shape in a JSON strategy, which lists one axis for each device axis of a nested
    # tensor map; `fold` undoes that. None: not of a JSON strategy.
    expanded_shape: Shape | None = None

    def __post_init__(self) -> None:
        if not self.device_matrix or min(self.device_matrix) < 1:
            raise StrategyError(
                f"device matrix {_few(self.device_matrix)} must be one or more positive sizes"
            )
        if len(self.device_matrix) > _MOST_AXES:
            text = f"{len(self.device_matrix):,} axes, more than {_MOST_AXES}"
            raise StrategyError(f"device matrix {_few(self.device_matrix)} has {text}")
        if self.ranks > MOST_RANKS:
            raise StrategyError(
                f"device matrix {_few(self.device_matrix)} is of more than {MOST_RANKS:,} ranks; "
                "the file is damaged"
            )
        if self.split_rows and min(self.split_rows) < 0:
            raise StrategyError(f"param_split_shape {_few(self.split_rows)} has negative rows")
        used = [axis for axes in self.tensor_map for axis in axes]
        for axis in used:
            if not 0 <= axis < len(self.device_matrix):
                raise StrategyError(
                    f"tensor map {self.printable_map} names axis {axis}, but the device matrix "
                    f"{list(self.device_matrix)} has axes 0 to {len(self.device_matrix) - 1}"
                )
        if len(set(used)) < len(used):
            raise StrategyError(
                f"tensor map {self.printable_map} uses one device-matrix axis twice"
            )
        if self.opt_shards > 1 and not self.tensor_map:
            raise StrategyError("an optimizer shard cannot divide a scalar")
        if self.opt_shards < 1 or self.free_ranks % self.opt_shards:
            raise StrategyError(
                f"optimizer shard size {self.opt_size} does not divide the {self.free_ranks} "
                "ranks that hold the same slice",
                details=f"by device matrix {list(self.device_matrix)} and tensor map "
                f"{self.printable_map}",
            )

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process is sent: the fields, and not what was worked out of them."""
        return {field.name: self.__dict__[field.name] for field in fields(self)}

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.device_matrix, self.tensor_map, self.opt_step, self.opt_size))

    @property
    def printable_map(self) -> list[int | list[int]]:
        """The tensor map as MindSpore prints it: -1 for no device axis, a list for several."""
        return [-1 if not a else a[0] if len(a) == 1 else list(a) for a in self.tensor_map]

    @cached_property
    def ranks(self) -> int:
        """Number of ranks in the device matrix."""
        return prod(self.device_matrix)

    def _axis_size(self, axis: int) -> int:
        return self.device_matrix[len(self.device_matrix) - 1 - axis]

    @cached_property
    def map_counts(self) -> tuple[int, ...]:
        """Parts of each tensor axis under the tensor map alone, without the optimizer shard."""
        return tuple(prod(map(self._axis_size, axes)) for axes in self.tensor_map)

    @property
    def free_ranks(self) -> int:
        """Number of ranks with the same slice under the tensor map alone."""
        return self.ranks // prod(self.map_counts)

    @property
    def opt_shards(self) -> int:
        """Parts into which the optimizer shard divides axis 0 of a slice."""
        if not self.opt_step or not self.opt_size:
            return 1
        return self.free_ranks if self.opt_size == -1 else self.opt_size

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Parts of each tensor axis, the optimizer shard included."""
        if not self.tensor_map:
            return ()
        return (self.map_counts[0] * self.opt_shards, *self.map_counts[1:])

    def cell(self, rank: int) -> Cell:
        """Return which cell of the grid stage-local `rank` holds (modulo the matrix's ranks)."""
        return self._cells[rank % self.ranks]

    @cached_property
    def _cells(self) -> tuple[Cell, ...]:
        return _cells(self)

    @cached_property
    def holders(self) -> Mapping[Cell, tuple[int, ...]]:
        """For each cell of the grid the ranks of the device matrix that hold it, ascending."""
        return _holders(self)

    def replica(self, rank: int) -> int:
        """Return the position of stage-local `rank` among the ranks that hold the same cell.

        For a destination rank whose number (modulo this layout's ranks) is `rank`, MindSpore reads
        every cell from the holder at this position. Among the holders of a cell, the coordinates on
        the axes that shard nothing ascend with the rank; so that holder has the destination's
        coordinates on these axes, and under an optimizer shard is in the destination's chunk.

        >>> Layout((2, 2), ((0,),)).replica(2)
        1
        """
        return self.holders[self.cell(rank)].index(rank % self.ranks)

    def grid(self, shape: Shape) -> Grid:
        """Return the cells of a parameter of full `shape`, in elements.

        Raises RequestError where the shape does not divide, or the rule is not known.
        """
        return _grid(self, shape)

    def _make_grid(self, shape: Shape) -> Grid:
        if self.field:
            raise RequestError(
                f"an embedding of {self.field} fields interleaves its rows; "
                "only layouts with field 0 can be converted"
            )
        if len(shape) != len(self.tensor_map):
            raise RequestError(
                f"tensor map {self.printable_map} is for {len(self.tensor_map)} axes, "
                f"the parameter has shape {list(shape)}"
            )
        if self.split_rows:
            return self._uneven_grid(shape)
        for axis, (extent, count) in enumerate(zip(shape, self.counts)):
            if extent % count:
                raise RequestError(
                    f"axis {axis} of shape {list(shape)} cannot be split into {count} equal parts"
                )
        return Grid.even(shape, self.counts)

    def _uneven_grid(self, shape: Shape) -> Grid:
        if self.counts[0] != len(self.split_rows) or prod(self.counts) != self.counts[0]:
            raise RequestError(
                f"param_split_shape {list(self.split_rows)} is not one number of rows for each "
                f"of the {self.counts[0]} parts of axis 0",
                details="no other axis may then be sharded",
            )
        if sum(self.split_rows) != shape[0]:
            raise RequestError(
                f"param_split_shape {list(self.split_rows)} adds up to {sum(self.split_rows)} "
                f"rows, the parameter has {shape[0]}"
            )
        return Grid((tuple(accumulate(self.split_rows, initial=0)), *((0, n) for n in shape[1:])))

    def full_shape(self, slice_shape: Shape) -> Shape:
        """Return the parameter's shape, given the shape of one rank's slice.

        >>> Layout((2, 4), ((0,), ()), opt_step=4, opt_size=-1).full_shape((3, 5))
        (24, 5)
        """
        if len(slice_shape) != len(self.tensor_map):
            raise RequestError(
                f"tensor map {self.printable_map} is for {len(self.tensor_map)} axes, "
                f"the slice has shape {list(slice_shape)}"
            )
        if self.split_rows:
            return (sum(self.split_rows), *slice_shape[1:])
        return tuple(n * count for n, count in zip(slice_shape, self.counts))

    @property
    def may_be_nested(self) -> bool:
        """Whether the axes of a JSON strategy may be those of a nested map, expanded."""
        if self.expanded_shape is None:
            return False
        steps = zip(self.expanded_shape, self.tensor_map, self.tensor_map[1:])
        return any(axes and after and size == prod(map(self._axis_size, axes))
                   for size, axes, after in steps)  # fmt: skip

    def fold(self, shape: Shape, *, slices: bool) -> Layout:
        """Return the layout with a JSON strategy's expanded axes folded back into `shape`'s.

        `shape` is the full shape, or with `slices` one rank's. A layout that has as many axes as
        the shape is returned as it is. An axis sharded by several device axes stands in JSON as one
        axis for each: all but the last as long as its device axis, the last one the rest.

        >>> json_form = Layout((2, 2, 2), ((), (1,), (0,)), expanded_shape=(32, 2, 32))
        >>> json_form.fold((32, 16), slices=True).tensor_map
        ((), (1, 0))
        """
        if len(shape) == len(self.tensor_map) or self.expanded_shape is None:
            return self
        tensor_maps = sorted(set(self._foldings(0, shape, slices)))
        if len(tensor_maps) != 1:
            raise RequestError(
                f"tensor map {self.printable_map} of the expanded shape "
                f"{list(self.expanded_shape)} fits the shape {list(shape)} in {len(tensor_maps)} "
                "ways",
                "use the protobuf strategy file, which keeps nested maps",
            )
        return replace(self, tensor_map=tensor_maps[0], expanded_shape=None)

    def _foldings(self, axis: int, shape: Shape, slices: bool) -> list[tuple[tuple[int, ...], ...]]:
        """Return the tensor maps that fold the expanded axes from `axis` on into `shape`."""
        assert self.expanded_shape is not None
        if not shape:
            return [()] if axis == len(self.expanded_shape) else []
        first = axis == 0
        tensor_maps = []
        extent = 1
        axes: tuple[int, ...] = ()
        for end in range(axis, len(self.expanded_shape)):
            size, axes_here = self.expanded_shape[end], self.tensor_map[end]
            if end > axis and not axes_here:
                break
            count = prod(map(self._axis_size, axes_here))
            extent *= size
            axes += axes_here
            parts = prod(map(self._axis_size, axes)) * (self.opt_shards if first else 1)
            if extent == shape[0] * (parts if slices else 1):
                others = self._foldings(end + 1, shape[1:], slices)
                tensor_maps += [(axes, *tensor_map) for tensor_map in others]
            if size != count:
                break
        return tensor_maps


@cache
def _grid(layout: Layout, shape: Shape) -> Grid:
    return layout._make_grid(shape)


@cache
def _cells(layout: Layout) -> tuple[Cell, ...]:
    sizes = layout.device_matrix
    used = {a for axes in layout.tensor_map for a in axes}
    free = [a for a in reversed(range(len(sizes))) if a not in used]
    cells = []
    for rank in range(layout.ranks):
        coordinate, quotient = {}, rank
        for axis, size in enumerate(reversed(sizes)):
            quotient, coordinate[axis] = divmod(quotient, size)
        mixed = [_mixed_radix(layout, axes, coordinate) for axes in layout.tensor_map]
        if mixed and layout.opt_shards > 1:
            position = _mixed_radix(layout, free, coordinate)
            mixed[0] = mixed[0] * layout.opt_shards + position % layout.opt_shards
        cells.append(tuple(mixed))
    return tuple(cells)


def _mixed_radix(
    layout: Layout, axes: tuple[int, ...] | list[int], coordinate: Mapping[int, int]
) -> int:
    """Return the number whose digits are the coordinates on `axes`, most significant first."""
    value = 0
    for axis in axes:
        value = value * layout._axis_size(axis) + coordinate[axis]
    return value


@cache
def _holders(layout: Layout) -> Mapping[Cell, tuple[int, ...]]:
    ranks_by_cell: dict[Cell, list[int]] = {}
    for rank, cell in enumerate(_cells(layout)):
        ranks_by_cell.setdefault(cell, []).append(rank)
    return MappingProxyType({cell: tuple(ranks) for cell, ranks in ranks_by_cell.items()})


def whole_layout(ndim: int) -> Layout:
    """Return the layout of a parameter that one rank holds complete."""
    return Layout((1,), ((),) * ndim)


def without_optimizer(layout: Layout) -> Layout:
    """Return a layout without its optimizer shard."""
    return replace(layout, opt_step=0, opt_size=0) if layout.opt_step or layout.opt_size else layout


def same_boxes(a: Layout, b: Layout) -> bool:
    """Tell whether two layouts give every rank of a stage the same box, whatever the shape."""
    if a is b or a == b:
        return True
    if a.ranks != b.ranks or a.counts != b.counts:
        return False
    if (a.split_rows, a.field) != (b.split_rows, b.field):
        return False
    return all(a.cell(rank) == b.cell(rank) for rank in range(a.ranks))


def fold_optimizer_shard(layout: Layout, ranks: int) -> Layout:
    """Return the layout on `ranks` ranks that says the same without an optimizer shard of its own.

    The shard's ranks are those that differ on the last of the device axes which shard nothing; one
    axis is split if it is not needed whole. Raises RequestError where no device axes say the same.

    >>> fold_optimizer_shard(Layout((2, 4), ((0,), ()), opt_step=4, opt_size=-1), 8).tensor_map
    ((0, 1), ())
    >>> fold_optimizer_shard(Layout((4, 2), ((0,),), opt_step=4, opt_size=2), 8)
    ... # doctest: +ELLIPSIS
    Layout(device_matrix=(2, 2, 2), tensor_map=((0, 1),), ...)
    """
    if layout.split_rows or layout.field or layout.expanded_shape is not None:
        raise RequestError(
            "metadata.json cannot state this layout (uneven rows, a field, or an expanded shape)",
            "choose another --dst-form",
        )
    matrix, tensor_map = list(layout.device_matrix), [list(axes) for axes in layout.tensor_map]
    left = layout.opt_shards  # shards that no device axis makes yet
    added: list[int] = []
    used = {axis for axes in tensor_map for axis in axes}
    axis = 0
    while left > 1 and axis < len(matrix):
        position = len(matrix) - 1 - axis
        size = matrix[position]
        if axis in used or size == 1:
            axis += 1
            continue
        if left % size:
            part = left
            if size % part:
                break
            matrix[position : position + 1] = [size // part, part]
            tensor_map = [[a + (a > axis) for a in axes] for axes in tensor_map]
            used = {a + (a > axis) for a in used}
            size = part
        added.insert(0, axis)
        used.add(axis)
        left //= size
        axis += 1
    if left > 1:
        raise RequestError(
            f"an optimizer shard of {layout.opt_shards} of {layout.free_ranks} ranks is not along "
            "device axes, and no metadata.json can state it",
            "choose another --dst-form",
            details=f"the ranks hold the same slice by device matrix {list(layout.device_matrix)} "
            f"and tensor map {layout.printable_map}",
        )
    if added:
        tensor_map[0] += added
    if ranks != layout.ranks:
        matrix.insert(0, ranks // layout.ranks)
    return Layout(tuple(matrix), tuple(map(tuple, tensor_map)))


def repair_misstated_layout(declared: Layout, counts: Shape) -> Layout | None:
    """Return the true layout of a parameter of which MindSpore declares a wrong one.

    None: no layout or several layouts explain the declared one. If an optimizer shards in groups
    that are not along device axes, MindSpore 2.10 declares as many shards as some axes have.
    `counts`: the number of parts along each axis, as the shapes in the files show it. Every layout
    for which MindSpore would declare the same is tried.
    """
    if not counts or counts[1:] != declared.counts[1:] or counts[0] == declared.counts[0]:
        return None
    candidates: dict[tuple[Cell, ...], Layout] = {}  # cells by rank -> a layout that gives them
    for matrix, axes in _unsplit(declared):
        for kept in range(len(axes[0]) + 1):
            tensor_map = (axes[0][:kept], *axes[1:])
            plain = Layout(matrix, tensor_map)
            shards, remainder = divmod(counts[0], plain.counts[0])
            if remainder or shards < 2 or plain.free_ranks % shards:
                continue
            if _stated_by_mindspore(plain, shards) == (declared.device_matrix, declared.tensor_map):
                candidate = Layout(matrix, tensor_map, 1, shards)
                cells = tuple(map(candidate.cell, range(candidate.ranks)))
                candidates.setdefault(cells, candidate)
    return next(iter(candidates.values())) if len(candidates) == 1 else None


def _unsplit(declared: Layout) -> Iterator[tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]]:
    """Yield (device matrix, tensor map) as declared, and with two neighbouring axes joined.

    MindSpore splits one device axis in two. The upper half shards nothing, the lower half at most
    axis 0.
    """
    matrix, tensor_map = declared.device_matrix, declared.tensor_map
    yield matrix, tensor_map
    used = {axis for axes in tensor_map for axis in axes}
    for position in range(len(matrix) - 1):
        lower = len(matrix) - 2 - position
        if lower + 1 in used or any(lower in axes for axes in tensor_map[1:]):
            continue
        size = matrix[position] * matrix[position + 1]
        joined = (*matrix[:position], size, *matrix[position + 2 :])
        yield (
            joined,
            tuple(tuple(a - (a > lower) for a in axes if a != lower) for axes in tensor_map),
        )


def _stated_by_mindspore(
    plain: Layout, shards: int
) -> tuple[tuple[int, ...], tuple[tuple[int, ...], ...]] | None:
    """Return the (device matrix, tensor map) that MindSpore 2.10 declares for a layout.

    `shards`: into how many the optimizer divides a slice. After `_NetStrategyInfo` of
    `mindspore.parallel.strategy`.
    """
    matrix, tensor_map = list(plain.device_matrix), [list(axes) for axes in plain.tensor_map]
    last, counter, real = len(matrix) - 1, -1, 1
    copies = plain.free_ranks // shards
    used = {last - axis for axes in tensor_map for axis in axes}
    split = False
    for position, size in enumerate(matrix):
        if position in used or real == copies:
            continue
        if real > copies:
            split = True
            break
        counter, real = position, real * size
    if split or real != copies:
        first = copies // (real // matrix[counter])
        if not first:
            return None
        matrix[counter : counter + 1] = [first, matrix[counter] // first]
        tensor_map = [[a + (a >= last + 1 - counter) for a in axes] for axes in tensor_map]
        last += 1
    used = {last - axis for axes in tensor_map for axis in axes}
    tensor_map[0] += [last - n for n in range(counter + 1, last + 1) if n not in used]
    return tuple(matrix), tuple(map(tuple, tensor_map))
