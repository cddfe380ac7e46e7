"""Copies between views of the arena: plain, with another type, or with what a step adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankxform.errors import CheckpointError
from rankxform.formats.dtype import FLOATS
from rankxform.geometry.box import Box
from rankxform.geometry.pieces import BROADCAST_AXIS
from rankxform.ops.base import BlockScale, LowRankUpdate
from rankxform.planning.catalog import Parameter

from .arena import SourceIndices
from .convert import EXACT, became_infinite, cast_function, not_finite
from .operands import Operands

if TYPE_CHECKING:
    from .arena import View, Words
    from .convert import Convert

_BLOCK = 1 << 16
_LARGEST = {"Float16": "65504", "BFloat16": "3.39e38", "Float32": "3.40e38", "Float64": "1.80e308"}
_WIDER = {"Float16": "bf16 or fp32", "BFloat16": "fp32", "Float32": "Float64", "Float64": "another"}


class ValueStats(NamedTuple):
    """What was seen of a parameter's values when they were changed.

    not_finite: how many are infinite or no number, in all copies. had_values, has_values: whether
    any was not zero before, and after.
    """

    not_finite: int = 0
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
        convert: Convert | None,
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
            else:
                assert convert is not None
                convert(dst_words, src_words)
            if parameter.dtype in FLOATS:
                self._look_at(parameter, dst_words, src_words)

    def _look_at(self, parameter: Parameter, dst_words: Words, src_words: Words) -> None:
        """See that no finite value has become infinite, and note what else is no number."""
        name, dtype = parameter.name, parameter.dtype
        stats = self.values.get(name, ValueStats())
        wrong = not_finite(dst_words, dtype)
        if wrong is not None and became_infinite(dst_words, src_words, wrong, dtype):
            raise CheckpointError(
                f"a value is beyond {dtype}'s largest, {_LARGEST[dtype]}, and would become "
                "infinite",
                f"choose {_WIDER[dtype]}",
                "keep its type (--keep-dtype)",
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
        rows = max(1, _BLOCK // max(1, src_words[:1].size)) if src_words.ndim else 1
        for first_row in range(0, len(src_words), rows):
            part = src_words[first_row : first_row + rows]
            values = np.empty(part.shape, np.float64)
            exact(values, part)
            block_place = _rows_of(place, slice(first_row, first_row + rows))
            if isinstance(step, LowRankUpdate):
                values += self._product(step, block_place)
            else:
                values *= self._factors(step, block_place)
            rounded(dst_words[first_row : first_row + rows], values)

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
        product = step.scale * (b @ a)
        if step.transposed:
            product = product.T
        return product.T if _is_turned(place) else product

    def _products(self, step: LowRankUpdate, place: SourceIndices) -> Any:
        """Return the products of a stack's matrices, likewise."""
        assert self._operands is not None
        get, rank = self._operands.get, self._operands.shape(step.a)[2]
        matrices, rows, columns = place.ranges
        box_a = Box((matrices.start, rows.start, 0), (matrices.stop, rows.stop, rank))
        box_b = Box((matrices.start, 0, columns.start), (matrices.stop, rank, columns.stop))
        a, b = get(step.a, box_a), get(step.b, box_b)
        products = a[:: matrices.step, :: rows.step] @ b[:: matrices.step, :, :: columns.step]
        moving = [axis for axis in place.axes if axis != BROADCAST_AXIS]
        order = [*moving, *(axis for axis in range(len(place.ranges)) if axis not in moving)]
        shape = [1 if axis == BROADCAST_AXIS else len(place.ranges[axis]) for axis in place.axes]
        return step.scale * products.transpose(order).reshape(shape)

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
        factors = scales[np.ix_(*(b - b[0] for b in blocks))]
        return factors.T if _is_turned(place) else factors


def _is_turned(place: SourceIndices) -> bool:
    """Whether the axes of the copy are those of the source, exchanged."""
    return place.axes[0] == 1 or place.axes[1] == 0


def _rows_of(place: SourceIndices, rows: slice) -> SourceIndices:
    """Return the place of some rows of a copy."""
    axis = place.axes[0]
    ranges = tuple(r[rows] if n == axis else r for n, r in enumerate(place.ranges))
    return SourceIndices(place.source, ranges, place.axes)
