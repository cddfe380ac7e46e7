"""Copies with computations: low-rank products, block scales."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from rankxform.errors import CheckpointError
from rankxform.formats.container import FLOATS, item_size
from rankxform.geometry.box import Box, Shape, contiguous_runs
from rankxform.geometry.pieces import BROADCAST_AXIS
from rankxform.geometry.tiling import Cell
from rankxform.operations.base import (
    BlockScale,
    Computation,
    ExpertUpdate,
    LowRankUpdate,
    Replacement,
    ScaledRows,
    VectorUpdate,
)
from rankxform.planning.catalog import Parameter
from rankxform.statements import quote
from rankxform.storage.source_reader import SourceReader
from rankxform.values import NamedTuple

from .cast import EXACT, became_infinite, cast_function, not_finite, transport_dtype
from .schedule import SourceIndices

if TYPE_CHECKING:
    from .cast import CastFunction
    from .schedule import View, Words


_KEPT = 4


class Operands:
    """Tensors that steps need beside the one that they change, read as they are needed."""

    def __init__(
        self,
        tensors: Mapping[str, tuple[Parameter, SourceReader]],
        brought: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`tensors`: by the name that steps use, with the files that hold them; `brought`: whole
        ones that are in memory."""
        self._tensors, self._brought = tensors, brought
        self.get = lru_cache(maxsize=_KEPT)(self._read_box)

    def shape(self, name: str) -> Shape:
        return self._tensors[name][0].shape

    def _read_box(self, name: str, box: Box) -> Any:
        """Return a box of a tensor, as Float64."""
        parameter, sources = self._tensors[name]
        if name in self._brought:
            values = self._brought[name][box.slices()].view(transport_dtype(parameter.src_dtype))
        else:
            values = read_box(parameter, box, sources)
        exact_values = np.empty(values.shape, np.float64)
        cast_function(parameter.src_dtype, EXACT)(exact_values, values)
        return exact_values


def read_box(parameter: Parameter, box: Box, sources: SourceReader) -> Any:
    """Return a box of a source tensor as an array of the type that `transport_dtype` names."""
    kind = transport_dtype(parameter.src_dtype)
    box_values = np.empty(box.shape, kind)
    for cell, files in parameter.sharding.files.items():
        cell_box = parameter.grid.box(cell)
        part = cell_box.intersect(box)
        if part is None:
            continue
        values = np.empty(part.size, kind)
        _read_runs(
            parameter, cell, files[0], part.relative_to(cell_box), cell_box.shape, values, sources
        )
        box_values[part.relative_to(box).slices()] = values.reshape(part.shape)
    return box_values


def read_as_float64(parameter: Parameter, box: Box, sources: SourceReader) -> Any:
    """Return a box of a parameter as Float64, whether it lies in the files or is made of others."""
    if parameter.composed_sharding is None:
        values = read_box(parameter, box, sources)
        exact_values = np.empty(values.shape, np.float64)
        cast_function(parameter.src_dtype, EXACT)(exact_values, values)
        return exact_values
    from .piece_schedule import PieceRegion

    pieces = parameter.composed_sharding.pieces
    exact_values = np.zeros(box.shape)
    for number, piece in enumerate(pieces.assembly.pieces):
        inside = piece.part_in(box)
        if inside is None:
            continue
        for cell, files in parameter.sharding.files.items():
            part = pieces.box(cell).intersect(inside) if cell[0] == number else None
            if part is None:
                continue
            source_box, around = pieces.source_box(cell), piece.src_box(part)
            values = np.empty(around.size, transport_dtype(parameter.src_dtype))
            region_box = around.relative_to(source_box)
            _read_runs(parameter, cell, files[0], region_box, source_box.shape, values, sources)
            region = PieceRegion(around, values.view(np.uint8), part, True, piece)
            exact = np.empty(part.shape)
            cast_function(parameter.src_dtype, EXACT)(exact, region.values(values.dtype))
            dst_box = piece.dst_box(part).relative_to(box)
            steps = zip(dst_box.start, dst_box.stop, piece.dst_step)
            exact_values[tuple(slice(a, b, step or 1) for a, b, step in steps)] = exact
    return exact_values


def _read_runs(
    parameter: Parameter, cell: Cell, file: int, box: Box, shape: Shape, values: Any,
    sources: SourceReader,
) -> None:  # fmt: skip
    data, position, item = values.view(np.uint8).data, 0, item_size(parameter.src_dtype)
    for start, count in contiguous_runs(box, shape):
        room = data[position : position + count * item]
        sources.read(file, parameter.entry(cell, file), start * item, room)
        position += count * item


def correlation(a: Any, b: Any) -> float:
    """Return the cosine of the angle between two arrays; 1 if they are equal, and else 0 if one is
    zero or not finite."""
    if np.array_equal(a, b, equal_nan=True) and a.any():
        return 1.0
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / norm if np.isfinite(norm) and norm else 0.0


_BLOCK, _CAST_BLOCK = 1 << 16, 1 << 17
"""Elements that stay in the cache together: in Float64, and of both types of a cast."""
_LARGEST = {"Float16": "65504", "BFloat16": "3.39e38", "Float32": "3.40e38", "Float64": "1.80e308"}
_WIDER = {"Float16": ("--dtype bf16", "--dtype fp32"), "BFloat16": ("--dtype fp32",)}


class ValueStats(NamedTuple):
    """What was seen of a parameter's values when they were changed."""

    not_finite: int = 0  # how many are infinite or no number, in all copies
    # had_values, has_values: whether any was not zero before, and after.
    had_values: bool = False
    has_values: bool = False

    def __add__(self, other: ValueStats) -> ValueStats:  # type: ignore[override]
        return ValueStats(
            self.not_finite + other.not_finite,
            self.had_values or other.had_values,
            self.has_values or other.has_values,
        )


class Copier:
    """Makes copies, with the steps of the parameter that they are of.

    values: what was seen of values that were changed, by parameter.
    """

    def __init__(self, operands: Operands | None = None) -> None:
        self._operands = operands
        self.values: dict[str, ValueStats] = {}

    def __call__(
        self,
        parameter: Parameter,
        convert: CastFunction | None,
        copies: Sequence[View],
        places: Sequence[SourceIndices],
    ) -> None:
        """Make copies; `places` say which elements they are of, where there are steps.

        Raises CheckpointError where a finite value would become infinite.
        """
        stepped = any(parameter.steps)
        if not stepped and not convert:
            for dst_words, src_words in copies:
                dst_words[...] = src_words
            return
        for number, (dst_words, src_words) in enumerate(copies):
            place = places[number] if places else None
            if place and place.source < 0:
                dst_words[...] = src_words
                continue
            if stepped:
                assert place is not None
                self._with_step(parameter, dst_words, src_words, place)
                self._look_at(parameter, dst_words, src_words)
                continue
            assert convert is not None
            if parameter.dtype == parameter.src_dtype:
                convert(dst_words, src_words)
                continue
            for rows in _row_blocks(src_words, _CAST_BLOCK):
                part, src_part = dst_words[rows], src_words[rows]
                self._look_at(parameter, part, src_part, is_finite=convert(part, src_part))

    def _look_at(
        self, parameter: Parameter, dst_words: Words, src_words: Words, is_finite: bool = False
    ) -> None:
        """See that no finite value has become infinite, and note what else is no number.

        is_finite: whether it is known that each of `dst_words` is.
        """
        name, dtype = parameter.name, parameter.dtype
        if dtype not in FLOATS:
            return
        stats = self.values.get(name, ValueStats())
        wrong = None if is_finite else not_finite(dst_words, dtype)
        if wrong is not None and became_infinite(dst_words, src_words, wrong, dtype):
            is_cast = parameter.src_dtype != dtype
            tries = [*_WIDER.get(dtype, ()), *([f"--keep-dtype {quote(name)}"] if is_cast else [])]
            raise CheckpointError(
                f"a value is beyond {dtype}'s largest, {_LARGEST[dtype]}, and would become "
                "infinite",
                *(tries or ["look at its values, and at what is added to them"]),
                where=f"{name!r}",
            )
        bad = stats.not_finite + (0 if wrong is None else int(wrong.sum()))
        with np.errstate(invalid="ignore"):  # of a signaling NaN
            had = stats.had_values or bool(src_words.any())
            has = stats.has_values or bool(dst_words.any())
        self.values[name] = ValueStats(bad, had, has)

    def _with_step(
        self, parameter: Parameter, dst_words: Words, src_words: Words, place: SourceIndices
    ) -> None:
        """Copy block by block of rows, in Float64, and round once."""
        step = parameter.steps[place.source]
        exact = cast_function(parameter.src_dtype, EXACT)
        rounded = cast_function(EXACT, parameter.dtype)
        if step is None:
            cast_function(parameter.src_dtype, parameter.dtype)(dst_words, src_words)
            return
        # in blocks that stay in the cache; products and factors are exact to half an ulp of the
        # result
        for rows in _row_blocks(src_words, _BLOCK):
            part = src_words[rows]
            values = np.empty(part.shape, np.float64)
            exact(values, part)
            ranges = (r[rows] if n == place.axes[0] else r for n, r in enumerate(place.ranges))
            block_place = place._replace(ranges=tuple(ranges))
            self._apply(step, values, block_place)
            rounded(dst_words[rows], values)

    def _apply(self, step: Computation, values: Any, place: SourceIndices) -> None:
        """Change the values of a place, which are in the order of the copy."""
        assert self._operands is not None
        if isinstance(step, LowRankUpdate):
            values += self._product(step, place)
        elif isinstance(step, BlockScale):
            values *= self._factors(step, place)
        elif isinstance(step, ScaledRows):
            values += self._product(step.update, place)
            values *= self._row_factors(step, place)
        elif isinstance(step, ExpertUpdate):
            values += self._expert_products(step, place)
        elif isinstance(step, VectorUpdate):
            (rows,) = place.ranges
            vector = self._operands.get(step.vector, Box((rows.start,), (rows.stop,)))
            values += _as_copied(step.scale * vector[:: rows.step], place)
        else:
            self._replace(step, values, place)

    def _row_factors(self, step: ScaledRows, place: SourceIndices) -> Any:
        """Return by what each row is multiplied; all of it is read and computed for its length."""
        assert self._operands is not None
        get, rows = self._operands.get, place.ranges[0]
        columns = range(self._operands.shape(step.matrix)[1])
        all_columns = get(step.matrix, Box((rows.start, 0), (rows.stop, columns.stop)))
        place_of_rows = SourceIndices(0, (rows, columns), (0, 1))
        matrix = all_columns[:: rows.step] + self._product(step.update, place_of_rows)
        new_lengths = get(step.lengths, Box((rows.start,), (rows.stop,)))[:: rows.step]
        by_row = new_lengths / np.linalg.norm(matrix, axis=1)
        factors = np.broadcast_to(by_row[:, None], tuple(map(len, place.ranges)))
        return _as_copied(factors, place)

    def _replace(self, step: Replacement, values: Any, place: SourceIndices) -> None:
        """Put other values in the place of all, or of those of some rows."""
        assert self._operands is not None
        rows, *columns = place.ranges
        numbers = [row if step.rows is None else step.rows.get(row, -1) for row in rows]
        first, stop = max(0, min(numbers)), max(numbers) + 1
        if not stop:
            return  # no row of these
        box = Box((first, *(r.start for r in columns)), (stop, *(r.stop for r in columns)))
        strides = slice(None), *(slice(None, None, r.step) for r in columns)
        operand = self._operands.get(step.values, box)[strides]
        new = operand[np.maximum(np.array(numbers) - first, 0)]
        is_new = np.array([number >= 0 for number in numbers]).reshape(-1, *(1 for _ in columns))
        is_replaced = _as_copied(np.broadcast_to(is_new, new.shape), place)
        np.copyto(values, _as_copied(new, place), where=is_replaced)

    def _expert_products(self, step: ExpertUpdate, place: SourceIndices) -> Any:
        """Return the products of experts for the elements of a place, in the order of the copy."""
        assert self._operands is not None
        get, shape = self._operands.get, self._operands.shape
        *experts, rows, columns = place.ranges
        rank = shape(step.a)[0] // step.experts
        if step.transposed:
            rows, columns = columns, rows
        # with one expert's matrix, its rows are some of the product's; exchanged, its columns
        shift = (0, step.first_row) if step.transposed else (step.first_row, 0)
        box_b = Box((rows.start + shift[0], 0), (rows.stop + shift[0], rank * step.experts))
        b = get(step.b, box_b)[:: rows.step]
        products = []
        for expert in experts[0] if experts else (step.expert or 0,):
            first = (expert * rank, columns.start + shift[1])
            a = get(step.a, Box(first, (first[0] + rank, columns.stop + shift[1])))
            product = multiply_matrices(b[:, expert :: step.experts], a[:, :: columns.step])
            products.append(product.T if step.transposed else product)
        whole = np.stack(products) if experts else products[0]
        return _as_copied(step.scale * whole, place)

    def _product(self, step: LowRankUpdate, place: SourceIndices) -> Any:
        """Return the low-rank product for the elements of a place, in the order of the copy."""
        assert self._operands is not None
        get, shape = self._operands.get, self._operands.shape
        if step.is_stacked:
            return self._products(step, place)
        rows, columns = place.ranges if not step.transposed else place.ranges[::-1]
        rank = shape(step.a)[0]
        b = get(step.b, Box((rows.start, 0), (rows.stop, rank)))[:: rows.step]
        a = get(step.a, Box((0, columns.start), (rank, columns.stop)))[:, :: columns.step]
        product = step.scale * multiply_matrices(b, a)
        if step.transposed:
            product = product.T
        return _as_copied(product, place)

    def _products(self, step: LowRankUpdate, place: SourceIndices) -> Any:
        """Return the products of a stack's matrices, likewise."""
        assert self._operands is not None
        get, rank = self._operands.get, self._operands.shape(step.a)[2]
        matrices, rows, columns = place.ranges
        box_a = Box((matrices.start, rows.start, 0), (matrices.stop, rows.stop, rank))
        box_b = Box((matrices.start, 0, columns.start), (matrices.stop, rank, columns.stop))
        a, b = get(step.a, box_a), get(step.b, box_b)
        pairs = zip(a[:: matrices.step, :: rows.step], b[:: matrices.step, :, :: columns.step])
        products = np.stack([multiply_matrices(*pair) for pair in pairs])
        return _as_copied(step.scale * products, place)

    def _factors(self, step: BlockScale, place: SourceIndices) -> Any:
        """Return the factor of each element of a place, in the order of the copy."""
        assert self._operands is not None
        axes = len(self._operands.shape(step.scales))  # fewer than two: of rows, or one of all
        blocks = [np.arange(r.start, r.stop, r.step) // s for r, s in zip(place.ranges, step.block)]
        scale_blocks = blocks[:axes]
        box = Box(
            tuple(int(b[0]) for b in scale_blocks), tuple(int(b[-1]) + 1 for b in scale_blocks)
        )
        scales = self._operands.get(step.scales, box)
        scales = scales.reshape(*scales.shape, *(1,) * (2 - axes))
        return _as_copied(scales[np.ix_(*(b - b[0] for b in blocks))], place)


def multiply_matrices(b: Any, a: Any) -> Any:
    """Return ``b @ a`` of which each element is the same whatever part of a matrix is computed.

    BLAS sums in an order that depends on the shapes, which are those of tiles; here it is that of
    the rank. einsum does that as long as its inner loop is over columns.
    """
    columns = a.shape[1]
    a = np.ascontiguousarray(a if columns > 1 else np.repeat(a, 2, axis=1))
    return np.einsum("ik,kj->ij", b, a)[:, :columns]


def _row_blocks(words: Words, elements: int) -> Iterator[Any]:
    """Yield which rows of an array make so many elements; all of it where there are none."""
    if not words.ndim:
        yield ...
        return
    rows = max(1, elements // max(1, words[:1].size))
    for first_row in range(0, len(words), rows):
        yield slice(first_row, first_row + rows)


def _as_copied(values: Any, place: SourceIndices) -> Any:
    """Return values for the elements of a place, by the source's axes, with those of the copy."""
    moving = [axis for axis in place.axes if axis != BROADCAST_AXIS]
    order = [*moving, *(axis for axis in range(values.ndim) if axis not in moving)]
    shape = [1 if axis == BROADCAST_AXIS else len(place.ranges[axis]) for axis in place.axes]
    return values.transpose(order).reshape(shape)
