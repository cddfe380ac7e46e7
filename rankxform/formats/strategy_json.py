"""Strategy files in JSON, as MindSpore writes them for a name that ends in ``.json``.

``{"current_stage": n, "parallel_strategy_item": {operator: {"stage": s, ...}},
"parallel_layout_item": {name: {"dev_matrix", "tensor_map", "tensor_shape", "field",
"opt_weight_shard_step", "opt_weight_shard_size" [, "param_split_shape", "indices_offset"]}}}``

A parameter with a nested tensor map stands here expanded, with one axis for each device axis;
`Layout.fold` undoes that once a shape is known.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from rankxform.errors import FormatError, StrategyError
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import DERIVED, StrategyRecord


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
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"not JSON: {error}") from None
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
