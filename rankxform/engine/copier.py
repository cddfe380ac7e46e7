"""Copies between views of the arena: plain, with another type, or with what a step adds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from rankxform.errors import CheckpointError
from rankxform.formats.dtype import FLOATS
from rankxform.geometry.box import Box
from rankxform.geometry.pieces import BROADCAST_AXIS
from rankxform.ops.base import Dequantize, LowRank
from rankxform.planning.catalog import Parameter

from .arena import Place
from .convert import EXACT, became_infinite, converter, not_finite
from .operands import Operands

if TYPE_CHECKING:
    from .arena import View, Words
    from .convert import Convert

_BLOCK = 1 << 16
_LARGEST = {"Float16": "65504", "BFloat16": "3.39e38", "Float32": "3.40e38", "Float64": "1.80e308"}
_WIDER = {"Float16": "bf16 or fp32", "BFloat16": "fp32", "Float32": "Float64", "Float64": "another"}


class Values(NamedTuple):
    """What was seen of a parameter's values when they were changed.

    not_finite: how many are infinite or no number, in all copies. had_values, has_values: whether
    any was not zero before, and after.
    """

    not_finite: int = 0
    had_values: bool = False
    has_values: bool = False

    def __add__(self, other: Values) -> Values:  # type: ignore[override]
        return Values(
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
        self.values: dict[str, Values] = {}

    def __call__(
        self,
        parameter: Parameter,
        convert: Convert | None,
        copies: Sequence[View],
        places: Sequence[Place],
    ) -> None:
        """Make copies; `places` say which elements they are of, where there are steps.

        Raises CheckpointError where a finite value would become infinite.
        """
        stepped = any(parameter.steps)
        if not stepped and not convert:
            for into, out in copies:
                into[...] = out
            return
        for number, (into, out) in enumerate(copies):
            place = places[number] if places else None
            if place and place.source < 0:
                into[...] = out
                continue
            if stepped:
                assert place is not None
                self._with_step(parameter, into, out, place)
            else:
                assert convert is not None
                convert(into, out)
            if parameter.dtype in FLOATS:
                self._look_at(parameter, into, out)

    def _look_at(self, parameter: Parameter, into: Words, out: Words) -> None:
        """See that no finite value has become infinite, and note what else is no number."""
        name, dtype = parameter.name, parameter.dtype
        known = self.values.get(name, Values())
        wrong = not_finite(into, dtype)
        if wrong is not None and became_infinite(into, out, wrong, dtype):
            raise CheckpointError(
                f"a value is beyond {dtype}'s largest, {_LARGEST[dtype]}, and would become "
                "infinite",
                f"choose {_WIDER[dtype]}",
                "keep its type (--keep-dtype)",
                where=f"{name!r}",
            )
        bad = known.not_finite + (0 if wrong is None else int(wrong.sum()))
        with np.errstate(invalid="ignore"):  # of a signaling NaN
            had = known.had_values or bool(out.any())
            has = known.has_values or bool(into.any())
        self.values[name] = Values(bad, had, has)

    def _with_step(self, parameter: Parameter, into: Words, out: Words, place: Place) -> None:
        """Copy block by block of rows, in Float64, and round once."""
        step = parameter.steps[place.source]
        exact = converter(parameter.src_dtype, EXACT)
        rounded = converter(EXACT, parameter.dtype)
        if step is None:
            converter(parameter.src_dtype, parameter.dtype)(into, out)
            return
        # in blocks that stay in the cache; products and factors are exact to half an ulp of the
        # result
        rows = max(1, _BLOCK // max(1, out[:1].size)) if out.ndim else 1
        for at in range(0, len(out), rows):
            part = out[at : at + rows]
            values = np.empty(part.shape, np.float64)
            exact(values, part)
            here = _rows_of(place, slice(at, at + rows))
            if isinstance(step, LowRank):
                values += self._product(step, here)
            else:
                values *= self._factors(step, here)
            rounded(into[at : at + rows], values)

    def _product(self, step: LowRank, place: Place) -> Any:
        """Return the low-rank product for the elements of a place, in the order of the copy."""
        assert self._operands is not None
        get, shape = self._operands.get, self._operands.shape
        if step.each:
            return self._products(step, place)
        rows, columns = place.ranges if not step.transposed else place.ranges[::-1]
        rank = shape(step.a)[0]
        b = get(step.b, Box((rows.start, 0), (rows.stop, rank)))[:: rows.step]
        a = get(step.a, Box((0, columns.start), (rank, columns.stop)))[:, :: columns.step]
        product = step.scale * (b @ a)
        if step.transposed:
            product = product.T
        return product.T if _is_turned(place) else product

    def _products(self, step: LowRank, place: Place) -> Any:
        """Return the products of a stack's matrices, likewise."""
        assert self._operands is not None
        get, rank = self._operands.get, self._operands.shape(step.a)[2]
        some, rows, columns = place.ranges
        box_a = Box((some.start, rows.start, 0), (some.stop, rows.stop, rank))
        box_b = Box((some.start, 0, columns.start), (some.stop, rank, columns.stop))
        a, b = get(step.a, box_a), get(step.b, box_b)
        found = a[:: some.step, :: rows.step] @ b[:: some.step, :, :: columns.step]
        moving = [axis for axis in place.axes if axis != BROADCAST_AXIS]
        order = [*moving, *(axis for axis in range(len(place.ranges)) if axis not in moving)]
        shape = [1 if axis == BROADCAST_AXIS else len(place.ranges[axis]) for axis in place.axes]
        return step.scale * found.transpose(order).reshape(shape)

    def _factors(self, step: Dequantize, place: Place) -> Any:
        """Return the factor of each element of a place, in the order of the copy."""
        assert self._operands is not None
        axes = len(self._operands.shape(step.scales))  # fewer than two: of rows, or one of all
        blocks = [
            np.arange(r.start, r.stop, r.step) // size for r, size in zip(place.ranges, step.block)
        ]
        kept = blocks[:axes]
        box = Box(tuple(int(b[0]) for b in kept), tuple(int(b[-1]) + 1 for b in kept))
        scales = self._operands.get(step.scales, box)
        scales = scales.reshape(*scales.shape, *(1,) * (2 - axes))
        factors = scales[np.ix_(*(b - b[0] for b in blocks))]
        return factors.T if _is_turned(place) else factors


def _is_turned(place: Place) -> bool:
    """Whether the axes of the copy are those of the source, exchanged."""
    return place.axes[0] == 1 or place.axes[1] == 0


def _rows_of(place: Place, rows: slice) -> Place:
    """Return the place of some rows of a copy."""
    axis = place.axes[0]
    ranges = tuple(r[rows] if n == axis else r for n, r in enumerate(place.ranges))
    return Place(place.source, ranges, place.axes)
