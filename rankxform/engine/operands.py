"""What steps need beside the tensor that they change: boxes of other tensors, as Float64."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from rankxform.formats.dtype import item_size
from rankxform.geometry.box import Box, Shape, contiguous_runs
from rankxform.geometry.tiling import Cell
from rankxform.planning.catalog import Parameter
from rankxform.storage.sources import SourceReader

from .convert import EXACT, cast_function, transport_dtype
from .piece_schedule import PieceRegion

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
        self.get = lru_cache(maxsize=_KEPT)(self._get)

    def shape(self, name: str) -> Shape:
        return self._tensors[name][0].shape

    def _get(self, name: str, box: Box) -> Any:
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
    if parameter.composed is None:
        values = read_box(parameter, box, sources)
        exact_values = np.empty(values.shape, np.float64)
        cast_function(parameter.src_dtype, EXACT)(exact_values, values)
        return exact_values
    pieces = parameter.composed.pieces
    exact_values = np.zeros(box.shape)
    for number, piece in enumerate(pieces.assembly.pieces):
        inside = piece.inside(box)
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
    """Return the cosine of the angle between two arrays; 0 if one is zero or not finite."""
    norm = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float((a * b).sum()) / norm if np.isfinite(norm) and norm else 0.0
