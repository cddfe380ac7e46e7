"""Strategy files in protobuf: MindSpore's ParallelStrategyMap.

Messages and field numbers (proto2, package mindspore.straspb)::

    ParallelStrategyMap   current_stage 1, parallel_strategy_item 2*, parallel_layout_item 3*
    ParallelStrategyItem  node_name 1, parallel_strategys 2
    ParallelStrategys     stage 1, parallel_strategy 2*
    ParallelLayoutItem    param_name 1, parallel_layouts 2
    ParallelLayouts       dev_matrix 1*, tensor_map 2*, param_split_shape 3*, indices_offset 4*,
                          field 5, opt_weight_shard_step 6, opt_weight_shard_size 7
    DevMatrix, TensorMap, ParamSplitShape, IndicesOffset   dim 1*

One TensorMap is a flat map. Several are a nested map, one for each tensor axis; empty ones among
them are ignored, so that a nested 1-D map can be written as its TensorMap and an empty one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankxform.errors import FormatError, StrategyError
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import DERIVED, StrategyRecord

from .wire import (
    VARINT,
    decode_integer,
    decode_message,
    decode_repeated,
    decode_text,
    delimited,
    encode_tag,
    fields,
    varint,
)

_UNMERGED = 2
"""The current_stage that the compiler writes; 1 is a merged file's."""


def parse_strategy_proto(data: bytes, label: str) -> StrategyRecord:
    """Read a strategy file. Raises FormatError, or StrategyError for an impossible layout."""
    current_stage = 0
    operator_stages: list[int] = []
    derived = False
    layouts: dict[str, Layout] = {}
    layouts_by_bytes: dict[bytes, Layout] = {}  # many parameters have few layouts
    for number, value in fields(memoryview(data)):
        if number == 1:
            current_stage = decode_integer(value)
        elif number == 2:
            derived = derived or (not operator_stages and _is_derived(decode_message(value)))
            operator_stages.append(_operator_stage(decode_message(value)))
        elif number == 3:
            name, content = _layout_item(decode_message(value))
            written = bytes(content)
            try:
                if written not in layouts_by_bytes:
                    layouts_by_bytes[written] = decode_layout(content)
                layouts[name] = layouts_by_bytes[written]
            except (FormatError, StrategyError) as error:
                error.say(error.at(repr(name)))
                raise
    return StrategyRecord(label, current_stage, tuple(operator_stages), layouts, derived=derived)


def _is_derived(item: memoryview) -> bool:
    return any(n == 1 and bytes(decode_message(v)) == DERIVED.encode() for n, v in fields(item))


def _operator_stage(item: memoryview) -> int:
    for number, value in fields(item):
        if number == 2:
            for inner, stage in fields(decode_message(value)):
                if inner == 1:
                    return decode_integer(stage)
    return 0


def _layout_item(item: memoryview) -> tuple[str, memoryview]:
    name, content = "", None
    for number, value in fields(item):
        if number == 1:
            name = decode_text(value)
        elif number == 2:
            content = decode_message(value)
    if not name or content is None:
        raise FormatError(f"a layout item without {'layout' if name else 'parameter name'}")
    return name, content


def decode_layout(content: memoryview) -> Layout:
    """Read a ParallelLayouts message. Raises FormatError, or StrategyError."""
    lists: dict[int, list[list[int]]] = {1: [], 2: [], 3: [], 4: []}
    scalars = {5: 0, 6: 0, 7: 0}
    for number, value in fields(content):
        if number in lists:
            lists[number].append(_dims(decode_message(value)))
        elif number in scalars:
            scalars[number] = decode_integer(value, 32)
    if not lists[1]:
        raise FormatError("no device matrix")
    if not lists[2]:
        raise FormatError("no tensor map")
    return Layout(
        device_matrix=tuple(lists[1][0]),
        tensor_map=_tensor_map(lists[2]),
        opt_step=scalars[6],
        opt_size=scalars[7],
        field=scalars[5],
        split_rows=tuple(lists[3][0]) if lists[3] else (),
        split_offsets=tuple(lists[4][0]) if lists[4] else (),
    )


def encode_layout(layout: Layout) -> bytes:
    """Return the ParallelLayouts message of a layout."""
    maps = [list(axes) or [-1] for axes in layout.tensor_map]
    if all(len(axes) == 1 for axes in maps):
        maps = [[axis for (axis,) in maps]]
    elif len(maps) == 1:
        maps.append([])  # what tells it from a flat map of two axes
    lists = ((1, [layout.device_matrix]), (2, maps), (3, [layout.split_rows]),
             (4, [layout.split_offsets]))  # fmt: skip
    scalars = (5, layout.field), (6, layout.opt_step), (7, layout.opt_size)
    return b"".join(
        [delimited(n, _written_dims(dims)) for n, dims_lists in lists for dims in dims_lists]
        + [encode_tag(n, VARINT) + varint(value) for n, value in scalars]
    )


def _written_dims(dims: Sequence[int]) -> bytes:
    return b"".join(encode_tag(1, VARINT) + varint(n) for n in dims)


def _dims(content: memoryview) -> list[int]:
    return [n for number, value in fields(content) if number == 1 for n in decode_repeated(value)]


def _tensor_map(messages: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    if len(messages) == 1:
        return tuple(() if axis == -1 else (axis,) for axis in messages[0])
    return tuple(tuple(a for a in axes if a != -1) for axes in messages if axes)


def encode_proto_stage(stage: int, layouts: Mapping[str, Layout], operator: str) -> bytes:
    """Return the file of one pipeline stage, with `operator` as its only operator.

    MindSpore takes the stage from the operators; it refuses to merge a file without one.
    """
    item = delimited(1, operator.encode()) + delimited(2, encode_tag(1, VARINT) + varint(stage))
    bytes_by_layout: dict[Layout, bytes] = {}
    parts = [encode_tag(1, VARINT) + varint(_UNMERGED), delimited(2, item)]
    for name, layout in layouts.items():
        if layout not in bytes_by_layout:
            bytes_by_layout[layout] = delimited(2, encode_layout(layout))
        parts.append(delimited(3, delimited(1, name.encode()) + bytes_by_layout[layout]))
    return b"".join(parts)


def merge_proto_stages(files: list[tuple[int, bytes]]) -> bytes:
    """Join one file for each stage, given as (stage, bytes), as merge_pipeline_strategys does.

    Operator strategies are joined in order, each layout is renamed ``stage-name``; all other
    bytes of the items stay as they are. The order of items is MindSpore's.
    """
    operators, layouts = [], []
    for stage, data in files:
        for number, value in fields(memoryview(data)):
            if number == 2:
                operators.append(delimited(2, bytes(decode_message(value))))
            elif number == 3:
                name, content = _layout_item(decode_message(value))
                item = delimited(1, f"{stage}-{name}".encode()) + delimited(2, bytes(content))
                layouts.append(delimited(3, item))
    return b"".join([encode_tag(1, VARINT) + varint(1), *operators, *layouts])
