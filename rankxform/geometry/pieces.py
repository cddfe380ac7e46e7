"""Tensors composed of pieces of others: index maps, in integers.

Merged matrices, such as MindFormers' QKV, gate and up projections or stacked experts, are composed
of several source tensors. A piece maps a strided box of one source tensor to a strided box of the
composed tensor: element `i`, counted along the axes of the composed tensor, lies there at
``dst_start + dst_step * i``, and in the source at ``src_start + src_step * i``, along the source's
axes in any order.

Concatenating, interleaving, stacking, splitting and transposing pieces makes pieces again, and each
piece has an inverse. A mapping table is therefore written in one direction only, and the engine
copies composed tensors from any sharding to any other without making the whole tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from rankxform.values import dataclass

from .box import Box, Shape
from .tiling import Cell, Overlaps, Tiling

BROADCAST_AXIS = -1


@dataclass(frozen=True)
class Piece:
    """A strided box of one source tensor, and the strided box of the composed tensor it becomes.

    >>> evens = Piece(0, (2,), (0,), (2,), (0,), (1,), (0,))
    >>> evens.part_in(Box((1,), (4,))), evens.src_box(Box((0,), (2,)))
    (Box(start=(1,), stop=(2,)), Box(start=(0,), stop=(2,)))
    """

    source: int  # number of the source tensor
    shape: Shape  # elements of the piece, along each axis of the composed tensor
    dst_start: tuple[int, ...]  # its first element in the composed tensor
    dst_step: tuple[int, ...]  # elements of the composed tensor from one to the next
    src_start: tuple[int, ...]  # its first element in the source, by axis of the source
    src_step: tuple[int, ...]  # elements of the source from one to the next, by composed axis
    # By composed axis the axis of the source that moves with it. BROADCAST_AXIS: none does, and the
    # step is 0.
    axes: tuple[int, ...]

    @property
    def box(self) -> Box:
        """All elements, counted in the piece."""
        return Box.whole(self.shape)

    @cached_property
    def is_broadcast(self) -> bool:
        return BROADCAST_AXIS in self.axes

    @cached_property
    def is_ordered(self) -> bool:
        """Whether the axes of the source follow each other as those of the made tensor do."""
        moving = [a for a, n in zip(self.axes, self.shape) if n > 1 and a != BROADCAST_AXIS]
        return moving == sorted(moving)

    def part_in(self, box: Box) -> Box | None:
        """Return the elements that lie in a box of the composed tensor. None: there are none."""
        return _within(self.shape, self.dst_start, self.dst_step, box)

    def dst_box(self, box: Box) -> Box:
        """Return the smallest box of the composed tensor that contains elements of the piece."""
        axes = [*zip(self.dst_start, self.dst_step, box.start, box.stop)]
        return Box(
            tuple(origin + step * first for origin, step, first, _ in axes),
            tuple(origin + step * (end - 1) + 1 for origin, step, _, end in axes),
        )

    def inside_source(self, box: Box) -> Box | None:
        """Return the elements that lie in a box of the source. None: there are none."""
        moving = set(self.axes)
        for axis, index in enumerate(self.src_start):
            if axis not in moving and not box.start[axis] <= index < box.stop[axis]:
                return None
        low, high, first = [], [], []
        for axis in self.axes:
            if axis == BROADCAST_AXIS:
                low.append(0)
                high.append(1)
                first.append(0)
            else:
                low.append(box.start[axis])
                high.append(box.stop[axis])
                first.append(self.src_start[axis])
        return _within(self.shape, tuple(first), self.src_step, Box(tuple(low), tuple(high)))

    def src_box(self, box: Box) -> Box:
        """Return the smallest box of the source that contains elements of the piece."""
        start, stop = list(self.src_start), [index + 1 for index in self.src_start]
        for axis, step, a, b in zip(self.axes, self.src_step, box.start, box.stop):
            if axis != BROADCAST_AXIS:
                first = self.src_start[axis]
                start[axis], stop[axis] = first + step * a, first + step * (b - 1) + 1
        return Box(tuple(start), tuple(stop))

    def inverse(self, number: int) -> Piece:
        """Return the piece that makes the source again, of the composed tensor.

        `number`: of the composed tensor among the sources of the new piece.
        """
        assert all(n == 1 for n, axis in zip(self.shape, self.axes) if axis == BROADCAST_AXIS)
        src_axes = range(len(self.src_start))
        order = [self.axes.index(axis) if axis in self.axes else -1 for axis in src_axes]
        assert -1 not in order, "an axis of the source that the composed tensor lacks"
        return Piece(
            number,
            tuple(self.shape[j] for j in order),
            self.src_start,
            tuple(self.src_step[j] for j in order),
            self.dst_start,
            tuple(self.dst_step[j] for j in order),
            tuple(order),
        )


def _within(shape: Shape, first: Shape, step: Shape, box: Box) -> Box | None:
    """Return the indices `i` on each axis for which ``first + step * i`` lies in `box`."""
    start, stop = [], []
    for extent, origin, stride, a, b in zip(shape, first, step, box.start, box.stop):
        if stride == 0:
            low, high = (0, extent) if a <= origin < b else (0, 0)
        else:  # -(x // y) is the quotient rounded up
            low, high = max(0, -((origin - a) // stride)), min(extent, -((origin - b) // stride))
        if low >= high:
            return None
        start.append(low)
        stop.append(high)
    return Box(tuple(start), tuple(stop))


@dataclass(frozen=True)
class Assembly:
    """A composed tensor. Elements that no piece makes are zero."""

    shape: Shape
    pieces: tuple[Piece, ...]
    value: float = 0  # of every element, if there are no pieces

    @classmethod
    def of(cls, shape: Shape, source: int = 0) -> Assembly:
        """Return source tensor number `source`, unchanged."""
        n = len(shape)
        return cls(
            shape, (Piece(source, shape, (0,) * n, (1,) * n, (0,) * n, (1,) * n, tuple(range(n))),)
        )

    def transposed(self) -> Assembly:
        """Return the tensor with its last two axes exchanged."""
        order = [*range(len(self.shape) - 2), len(self.shape) - 1, len(self.shape) - 2]

        def reordered(values: Sequence[int]) -> tuple[int, ...]:
            return tuple(values[j] for j in order)

        pieces = tuple(
            Piece(
                piece.source,
                reordered(piece.shape),
                reordered(piece.dst_start),
                reordered(piece.dst_step),
                piece.src_start,
                reordered(piece.src_step),
                reordered(piece.axes),
            )
            for piece in self.pieces
        )
        return Assembly(reordered(self.shape), pieces)

    def rows(self, start: int, stop: int) -> Assembly:
        """Return indices ``start`` to ``stop - 1`` of the first axis."""
        box = Box((start, *(0 for _ in self.shape[1:])), (stop, *self.shape[1:]))
        pieces = []
        for piece in self.pieces:
            inside = piece.part_in(box)
            if inside is not None:
                pieces.append(_move_by_rows(_crop(piece, inside), -start))
        return Assembly((stop - start, *self.shape[1:]), tuple(pieces))

    def resized_rows(self, rows: int, *, repeat_last: bool = False) -> Assembly:
        """Return the tensor with `rows` rows: the added ones are zeros or repeat the last row."""
        old_rows, added = self.shape[0], []
        if repeat_last:
            last_row = Box((old_rows - 1, *(0 for _ in self.shape[1:])), self.shape)
            for piece in self.pieces:
                inside = piece.part_in(last_row)
                if inside is not None:
                    row = _crop(piece, inside)
                    added.append(
                        replace(
                            row,
                            shape=(rows - old_rows, *row.shape[1:]),
                            dst_start=(old_rows, *row.dst_start[1:]),
                            dst_step=(1, *row.dst_step[1:]),
                            src_step=(0, *row.src_step[1:]),
                            axes=(BROADCAST_AXIS, *row.axes[1:]),
                        )
                    )
        return Assembly((rows, *self.shape[1:]), (*self.pieces, *added))


def _crop(piece: Piece, box: Box) -> Piece:
    """Return the part of a piece that is in `box`, which counts in the piece."""
    src_start = list(piece.src_start)
    for axis, step, a in zip(piece.axes, piece.src_step, box.start):
        if axis != BROADCAST_AXIS:
            src_start[axis] += step * a
    origins = zip(piece.dst_start, piece.dst_step, box.start)
    dst_start = (origin + stride * a for origin, stride, a in origins)
    return replace(piece, shape=box.shape, dst_start=tuple(dst_start), src_start=tuple(src_start))


def _move_by_rows(piece: Piece, rows: int) -> Piece:
    return replace(piece, dst_start=(piece.dst_start[0] + rows, *piece.dst_start[1:]))


def concatenate(parts: Sequence[Assembly]) -> Assembly:
    """Return tensors one after another, along the first axis."""
    pieces: list[Piece] = []
    rows = 0
    for part in parts:
        pieces += [_move_by_rows(piece, rows) for piece in part.pieces]
        rows += part.shape[0]
    return Assembly((rows, *parts[0].shape[1:]), tuple(pieces))


def pile(parts: Sequence[Assembly]) -> Assembly:
    """Return tensors one after another, along a first axis of their own."""
    pieces = [
        replace(
            piece,
            shape=(1, *piece.shape),
            dst_start=(number, *piece.dst_start),
            dst_step=(1, *piece.dst_step),
            src_step=(0, *piece.src_step),
            axes=(BROADCAST_AXIS, *piece.axes),
        )
        for number, part in enumerate(parts)
        for piece in part.pieces
    ]
    return Assembly((len(parts), *parts[0].shape), tuple(pieces))


def interleave_rows(parts: Sequence[Assembly]) -> Assembly:
    """Return the first row of each of `parts`, then the second of each, and so on."""
    count = len(parts)
    pieces = tuple(
        replace(
            piece,
            dst_start=(piece.dst_start[0] * count + number, *piece.dst_start[1:]),
            dst_step=(piece.dst_step[0] * count, *piece.dst_step[1:]),
        )
        for number, part in enumerate(parts)
        for piece in part.pieces
    )
    return Assembly((parts[0].shape[0] * count, *parts[0].shape[1:]), pieces)


def concatenate_by_group(parts: Sequence[Assembly], groups: int) -> Assembly:
    """Return the first group of rows of each part, then the second group of each, and so on.

    `groups`: the number of groups, equal for all parts.
    """
    rows = [part.shape[0] // groups for part in parts]
    return concatenate(
        [part.rows(n * g, (n + 1) * g) for n in range(groups) for part, g in zip(parts, rows)]
    )


def of_views(whole: Assembly, views: Sequence[Piece], sources: Sequence[int]) -> Assembly:
    """Return a composed tensor whose parts are boxes of other tensors.

    views: by number of a part the one piece that makes all of it. sources: the numbers of the
    tensors that these are pieces of.
    """
    pieces = []
    for piece in whole.pieces:
        view, start = views[piece.source], list(views[piece.source].src_start)
        for axis, index in enumerate(piece.src_start):
            start[view.axes[axis]] += view.src_step[axis] * index
        moving = [axis if axis == BROADCAST_AXIS else view.axes[axis] for axis in piece.axes]
        steps = (
            0 if axis == BROADCAST_AXIS else step * view.src_step[axis]
            for axis, step in zip(piece.axes, piece.src_step)
        )
        pieces.append(
            replace(
                piece, source=sources[piece.source], src_start=tuple(start), src_step=tuple(steps),
                axes=tuple(moving),
            )
        )  # fmt: skip
    return Assembly(whole.shape, tuple(pieces))


def invert(whole: Assembly, shapes: Sequence[Shape]) -> list[Assembly]:
    """Return each source of `whole` as composed of `whole` alone.

    `shapes`: of the sources, by number.
    """
    pieces_by_source: list[list[Piece]] = [[] for _ in shapes]
    for piece in whole.pieces:
        pieces_by_source[piece.source].append(piece.inverse(0))
    return [Assembly(shape, tuple(pieces)) for shape, pieces in zip(shapes, pieces_by_source)]


# -- pieces, and how their sources are sharded ---------------------------------------------------


class PieceTiling:
    """How a composed tensor lies in the sharded tensors that it is composed of.

    It stands where a `Grid` stands for a tensor that is stored as it is. A cell is (number of the
    piece, *cell of the source's tiling), and its box counts in the piece. It equals itself alone.
    """

    def __init__(self, assembly: Assembly, grids: Sequence[Tiling]) -> None:
        self.assembly = assembly
        self.grids = tuple(grids)  # by number of the source
        self.shape = assembly.shape

    def piece(self, cell: Cell) -> Piece:
        return self.assembly.pieces[cell[0]]

    def source(self, cell: Cell) -> int:
        """Return the number of the source that `cell` belongs to."""
        return self.piece(cell).source

    def source_box(self, cell: Cell) -> Box:
        """Return the box of the source tensor that `cell` is."""
        return self.grids[self.source(cell)].box(cell[1:])

    def box(self, cell: Cell) -> Box:
        """Return the elements of the piece that `cell` holds; it holds at least one."""
        box = self.piece(cell).inside_source(self.source_box(cell))
        assert box is not None
        return box

    def box_in_source(self, cell: Cell, box: Box) -> Box:
        """Return the smallest box of the source that contains a region of a piece."""
        return self.piece(cell).src_box(box)

    def destination_box(self, cell: Cell, box: Box) -> Box:
        """Return the smallest box of the composed tensor that contains a region of a piece."""
        return self.piece(cell).dst_box(box)

    def overlaps(self, dst: Tiling, cell: Cell) -> Overlaps:
        """Return the cells that overlap `cell` of `dst`, with the common regions of the pieces."""
        overlaps = []
        box = dst.box(cell)
        for number, piece in enumerate(self.assembly.pieces if box.size else ()):
            inside = piece.part_in(box)
            if inside is None:
                continue
            grid = self.grids[piece.source]
            for src_cell in grid.cells_over(piece.src_box(inside)):
                stored = piece.inside_source(grid.box(src_cell))
                common = stored.intersect(inside) if stored is not None else None
                if common is not None:
                    overlaps.append(((number, *src_cell), common))
        return tuple(overlaps)
