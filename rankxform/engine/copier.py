"""Copies between views of the arena: plain, with another type, or with what a step adds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from rankxform.formats.dtype import item_size
from rankxform.geometry.box import Box, Shape
from rankxform.geometry.grid import Cell
from rankxform.geometry.runs import contiguous_runs
from rankxform.ops.base import Dequantize, LowRank
from rankxform.planning.catalog import Parameter
from rankxform.storage.sources import Sources

from .arena import Place
from .convert import converter, moved_type
from .piece_schedule import PieceRegion

if TYPE_CHECKING:
    from .arena import View, Words
    from .convert import Convert

_BLOCK = 1 << 16
_KEPT = 4
_EXACT = "Float64"


def read_box(parameter: Parameter, box: Box, sources: Sources) -> Any:
    """Return a box of a source tensor as an array of the type that `moved_type` names."""
    kind = moved_type(parameter.src_dtype)
    found = np.empty(box.shape, kind)
    for cell, held in parameter.sharding.files.items():
        whole = parameter.grid.box(cell)
        part = whole.intersect(box)
        if part is None:
            continue
        values = np.empty(part.size, kind)
        _read_runs(parameter, cell, held[0], part.relative_to(whole), whole.shape, values, sources)
        found[part.relative_to(box).slices()] = values.reshape(part.shape)
    return found


def read_made(parameter: Parameter, box: Box, sources: Sources) -> Any:
    """Return a box of a parameter as Float64, whether it lies in the files or is made of others."""
    if parameter.composed is None:
        values = read_box(parameter, box, sources)
        found = np.empty(values.shape, np.float64)
        converter(parameter.src_dtype, _EXACT)(found, values)
        return found
    pieces = parameter.composed.pieces
    found = np.zeros(box.shape)
    for number, piece in enumerate(pieces.assembly.pieces):
        inside = piece.inside(box)
        if inside is None:
            continue
        for cell, files in parameter.sharding.files.items():
            part = pieces.box(cell).intersect(inside) if cell[0] == number else None
            if part is None:
                continue
            whole, around = pieces.held(cell), piece.src_box(part)
            values = np.empty(around.size, moved_type(parameter.src_dtype))
            _read_runs(parameter, cell, files[0], around.relative_to(whole), whole.shape, values,
                       sources)  # fmt: skip
            region = PieceRegion(around, values.view(np.uint8), part, True, piece)
            exact = np.empty(part.shape)
            converter(parameter.src_dtype, _EXACT)(exact, region.values(values.dtype))
            at = piece.dst_box(part).relative_to(box)
            steps = zip(at.start, at.stop, piece.dst_step)
            found[tuple(slice(a, b, step or 1) for a, b, step in steps)] = exact
    return found


def _read_runs(
    parameter: Parameter, cell: Cell, file: int, box: Box, shape: Shape, values: Any,
    sources: Sources,
) -> None:  # fmt: skip
    data, done, item = values.view(np.uint8).data, 0, item_size(parameter.src_dtype)
    for start, count in contiguous_runs(box, shape):
        room = data[done : done + count * item]
        sources.read(file, parameter.src_name_of(cell), start * item, room)
        done += count * item


def correlation(a: Any, b: Any) -> float:
    """Return the cosine of the angle between two arrays; 0 if one is zero or not finite."""
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / norm if np.isfinite(norm) and norm else 0.0


class Operands:
    """Tensors that steps need beside the one that they change, read as they are needed."""

    def __init__(self, tensors: Mapping[str, tuple[Parameter, Sources]]) -> None:
        """`tensors`: by the name that steps use, with the files that hold them."""
        self._tensors = tensors
        self.get = lru_cache(maxsize=_KEPT)(self._get)

    def shape(self, name: str) -> Shape:
        return self._tensors[name][0].shape

    def _get(self, name: str, box: Box) -> Any:
        """Return a box of a tensor, as Float64."""
        parameter, sources = self._tensors[name]
        values = read_box(parameter, box, sources)
        found = np.empty(values.shape, np.float64)
        converter(parameter.src_dtype, _EXACT)(found, values)
        return found


class Copier:
    """Makes copies, with the steps of the parameter that they are of."""

    def __init__(self, operands: Operands | None = None) -> None:
        self._operands = operands

    def __call__(
        self,
        parameter: Parameter,
        convert: Convert | None,
        copies: Sequence[View],
        places: Sequence[Place],
    ) -> None:
        """Make copies; `places` say which elements they are of, where there are steps."""
        if any(parameter.steps):
            for (into, out), place in zip(copies, places):
                if place.source < 0:
                    into[...] = out
                else:
                    self._with_step(parameter, into, out, place)
        elif convert and places:
            for (into, out), place in zip(copies, places):
                if place.source < 0:
                    into[...] = out
                else:
                    convert(into, out)
        elif convert:
            for into, out in copies:
                convert(into, out)
        else:
            for into, out in copies:
                into[...] = out

    def _with_step(self, parameter: Parameter, into: Words, out: Words, place: Place) -> None:
        """Copy block by block of rows, in Float64, and round once."""
        step = parameter.steps[place.source]
        exact = converter(parameter.src_dtype, _EXACT)
        rounded = converter(_EXACT, parameter.dtype)
        if step is None:
            converter(parameter.src_dtype, parameter.dtype)(into, out)
            return
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
        rows, columns = place.ranges if not step.transposed else place.ranges[::-1]
        rank = shape(step.a)[0]
        b = get(step.b, Box((rows.start, 0), (rows.stop, rank)))[:: rows.step]
        a = get(step.a, Box((0, columns.start), (rank, columns.stop)))[:, :: columns.step]
        product = step.scale * (b @ a)
        if step.transposed:
            product = product.T
        return product.T if _is_turned(place) else product

    def _factors(self, step: Dequantize, place: Place) -> Any:
        """Return the factor of each element of a place, in the order of the copy."""
        assert self._operands is not None
        blocks = [
            np.arange(r.start, r.stop, r.step) // size for r, size in zip(place.ranges, step.block)
        ]
        box = Box(tuple(int(b[0]) for b in blocks), tuple(int(b[-1]) + 1 for b in blocks))
        scales = self._operands.get(step.scales, box)
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
