"""Slices of one parameter, in memory, merged."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rankxform.errors import FormatError, RankxformError
from rankxform.formats.strategy_proto import decode_layout
from rankxform.layout.layout import Layout

from .network import parameter

Array = np.ndarray[Any, Any]


def merge_sliced_parameter(
    sliced_parameters: list[Any], strategy: Mapping[str, Any] | None = None
) -> Any:
    """Merge the slices of a parameter, in rank order; return a Parameter.

    `strategy` is what `build_searched_strategy` returns; without one the slices are joined on
    axis 0. Even and uneven shards (param_split_shape), nested tensor maps, optimizer shards and
    embeddings of several fields are supported. bfloat16 stays bfloat16. Raises TypeError,
    ValueError and KeyError where MindSpore does.
    """
    if not isinstance(sliced_parameters, list):
        raise TypeError(f"sliced_parameters is a {type(sliced_parameters).__name__}, not a list")
    if not sliced_parameters:
        raise ValueError("sliced_parameters is empty")
    if strategy and not isinstance(strategy, dict):
        raise TypeError(f"strategy is a {type(strategy).__name__}, not a dict")
    arrays, first = _arrays(sliced_parameters)
    name, dtype = first.name, str(first.dtype)
    if not strategy:
        return _made(first, dtype, np.concatenate(arrays))
    if name not in strategy:
        raise KeyError(f"the strategy has no parameter {name!r}")
    layout = _layout(strategy[name])
    if len(arrays) != layout.ranks:
        raise ValueError(
            f"{name!r}: {len(arrays)} slices, and the strategy has {layout.ranks} ranks"
        )
    try:
        return _made(first, dtype, _join(arrays, layout))
    except RankxformError as error:
        raise ValueError(f"{name!r}: {error}") from error


def _arrays(slices: Sequence[Any]) -> tuple[list[Array], Any]:
    """Return the slices' values, and the first slice. bfloat16 comes as words."""
    import mindspore

    first = slices[0]
    arrays = []
    for index, slice_ in enumerate(slices):
        if not isinstance(slice_, mindspore.Parameter):
            raise TypeError(f"slice {index} is a {type(slice_).__name__}, not a Parameter")
        if (slice_.name, slice_.shape[1:]) != (
            first.name,
            first.shape[1:],
        ) or slice_.dtype != first.dtype:
            raise ValueError(
                f"slice {index} is {slice_.name!r} of {slice_.dtype} {list(slice_.shape)}, slice 0 "
                "is "
                f"{first.name!r} of {first.dtype} {list(first.shape)}; only axis 0 may differ"
            )
        if slice_.dtype == mindspore.bfloat16:
            arrays.append(np.frombuffer(slice_.get_bytes(), np.uint16).reshape(slice_.shape))
        else:
            arrays.append(slice_.asnumpy())
    return arrays, first


def _made(first: Any, dtype: str, value: Array) -> Any:
    merged = parameter(first.name, dtype, value)
    merged.requires_grad, merged.layerwise_parallel = first.requires_grad, first.layerwise_parallel
    return merged


def _join(arrays: Sequence[Array], layout: Layout) -> Array:
    if layout.field:
        return _join_fields(arrays, layout.field)
    grid = layout.grid(layout.full_shape(arrays[0].shape))
    full_array = np.empty(grid.shape, arrays[0].dtype)
    for rank, slice_ in enumerate(arrays):
        box = grid.box(layout.cell(rank))
        if slice_.shape != box.shape:
            raise ValueError(f"slice {rank} has shape {list(slice_.shape)}, not {list(box.shape)}")
        full_array[box.slices()] = slice_
    return full_array


def _join_fields(arrays: Sequence[Array], fields: int) -> Array:
    """Join slices of an embedding: each rank has a share of the rows of every field."""
    columns = arrays[0].shape[1:]
    by_field = [slice_.reshape(fields, -1, *columns) for slice_ in arrays]
    return np.concatenate(by_field, axis=1).reshape(-1, *columns)


def _layout(described: Any) -> Layout:
    """Read a ParallelLayouts message."""
    try:
        return decode_layout(memoryview(described.SerializePartialToString()))
    except (AttributeError, FormatError, RankxformError) as error:
        raise ValueError(f"the strategy is not of build_searched_strategy: {error}") from error
