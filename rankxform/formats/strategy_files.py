"""Strategy files, JSON and protobuf.

``{"current_stage": n, "parallel_strategy_item": {operator: {"stage": s, ...}},
"parallel_layout_item": {name: {"dev_matrix", "tensor_map", "tensor_shape", "field",
"opt_weight_shard_step", "opt_weight_shard_size" [, "param_split_shape", "indices_offset"]}}}``

A parameter with a nested tensor map stands here expanded, with one axis for each device axis;
`Layout.fold` undoes that once a shape is known.

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

import json
from collections.abc import Mapping
from typing import Any

from rankxform.errors import FormatError, StrategyError
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import DERIVED, StrategyRecord
from rankxform.values import decode_json

from .protobuf import (
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


def parse_strategy_json(data: bytes, label: str) -> StrategyRecord:
    """Read a strategy file. Raises FormatError, or StrategyError for an impossible layout."""
    document = _document(data)
    operators = document.get("parallel_strategy_item") or {}
    items = document.get("parallel_layout_item") or {}
    if not isinstance(operators, dict) or not isinstance(items, dict):
        raise FormatError("parallel_strategy_item and parallel_layout_item must be objects")
    layouts = {}
    for name, item in items.items():
        try:
            layouts[name] = _layout(item)
        except (FormatError, StrategyError) as error:
            error.say(error.at(repr(name)))
            raise
    stages = tuple(_number(item, "stage") for item in operators.values())
    return StrategyRecord(
        label,
        _number(document, "current_stage"),
        stages,
        layouts,
        json=True,
        derived=DERIVED in operators,
    )


def is_strategy(data: bytes) -> bool:
    """Tell a strategy, be it a broken one, from other JSON.

    >>> is_strategy(b'{"parallel_layout_item": {'), is_strategy(b'{"kind": "rankxform manifest"}')
    (True, False)
    """
    return any(key in data for key in (b'"parallel_layout_item"', b'"parallel_strategy_item"'))


def _document(data: bytes) -> dict[str, Any]:
    document = decode_json(data)
    if not isinstance(document, dict):
        raise FormatError("not a JSON object")
    return document


def _layout(item: Any) -> Layout:
    if not isinstance(item, dict):
        raise FormatError("a layout must be a JSON object")
    written = item.get("tensor_map")
    if not isinstance(written, list):
        raise FormatError("no tensor_map")
    tensor_map = tuple(
        tuple(a for a in (e if isinstance(e, list) else [e]) if a != -1) for e in written
    )
    if not all(_is_int(a) for axes in tensor_map for a in axes):
        raise FormatError(f"tensor_map {written} must hold integers, or lists of them")
    shape = _numbers(item, "tensor_shape")
    return Layout(
        device_matrix=_numbers(item, "dev_matrix"),
        tensor_map=tensor_map,
        opt_step=_number(item, "opt_weight_shard_step"),
        opt_size=_number(item, "opt_weight_shard_size"),
        field=_number(item, "field"),
        split_rows=_numbers(item, "param_split_shape"),
        split_offsets=_numbers(item, "indices_offset"),
        expanded_shape=shape if len(shape) == len(tensor_map) and "tensor_shape" in item else None,
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(item: Mapping[str, Any], field: str) -> int:
    value = item.get(field, 0) if isinstance(item, dict) else None
    if not isinstance(value, int) or not _is_int(value):
        raise FormatError(f"{field} is {value!r}; expected an integer")
    return value


def _numbers(item: Mapping[str, Any], field: str) -> tuple[int, ...]:
    value = item.get(field, [])
    if not isinstance(value, list) or not all(map(_is_int, value)):
        raise FormatError(f"{field} is {value!r}; expected a list of integers")
    return tuple(value)


def encode_json_stage(stage: int, layouts: Mapping[str, Layout], operator: str) -> bytes:
    """Return the file of one pipeline stage, with `operator` as its only operator.

    Shapes are left out; no reader needs them where no map is nested. Raises StrategyError for a
    nested map, which this form writes expanded.
    """
    items = {}
    for name, layout in layouts.items():
        if any(len(axes) > 1 for axes in layout.tensor_map):
            raise StrategyError(
                f"JSON has no nested tensor map such as {layout.printable_map}",
                "write protobuf (.ckpt)",
                where=f"{name!r}",
            )
        items[name] = {
            "dev_matrix": list(layout.device_matrix),
            "tensor_map": layout.printable_map,
            "tensor_shape": [],
            "field": layout.field,
            "opt_weight_shard_step": layout.opt_step,
            "opt_weight_shard_size": layout.opt_size,
        }
        if layout.split_rows:
            items[name]["param_split_shape"] = list(layout.split_rows)
            items[name]["indices_offset"] = list(layout.split_offsets)
    document = {
        "current_stage": 2,
        "parallel_strategy_item": {operator: {"stage": stage, "parallel_strategy": []}},
        "parallel_layout_item": items,
    }
    return json.dumps(document).encode()


def merge_json_stages(files: list[tuple[int, bytes]]) -> bytes:
    """Join one file for each stage, given as (stage, bytes), as merge_pipeline_strategys does.

    Layouts are renamed ``stage-name``. Operator strategies are one dictionary, so of two
    operators of one name the later stage's stays, as with MindSpore; nothing reads them.
    """
    operators: dict[str, Any] = {}
    layouts: dict[str, Any] = {}
    for stage, data in files:
        document = _document(data)
        operators.update(document.get("parallel_strategy_item") or {})
        items = document.get("parallel_layout_item") or {}
        layouts.update((f"{stage}-{name}", item) for name, item in items.items())
    merged = {
        "current_stage": 1,
        "parallel_strategy_item": operators,
        "parallel_layout_item": layouts,
    }
    return json.dumps(merged).encode()


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
            item = decode_message(value)
            if not operator_stages:
                texts = (bytes(decode_message(v)) for n, v in fields(item) if n == 1)
                derived = DERIVED.encode() in texts
            operator_stages.append(_operator_stage(item))
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
            dims = (v for n, v in fields(decode_message(value)) if n == 1)
            lists[number].append([size for encoded in dims for size in decode_repeated(encoded)])
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
    sizes = [(n, dims) for n, dims_lists in lists for dims in dims_lists]
    coded = ((n, b"".join(encode_tag(1, VARINT) + varint(d) for d in dims)) for n, dims in sizes)
    return b"".join(
        [delimited(n, content) for n, content in coded]
        + [encode_tag(n, VARINT) + varint(value) for n, value in scalars]
    )


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
