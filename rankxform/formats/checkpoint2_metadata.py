"""metadata.json of MindFormers' Checkpoint 2.0: what every slice of a parameter is, and where.

::

    {"state_dict_metadata": {name: {"properties": {"dtype": "Float32", ...},
         "global_shape": [...], "axis_fragmentations": [...], "layout": {...} or null,
         "chunk": [{"global_offset": [N], "local_shape": [...]}, ...]}, ...},
     "storage_data": {"('name', (N,))": [{"file_name": ..., "storage_rank": R, ...}, ...], ...}}

N is the number of a slice, in row-major order over `axis_fragmentations`; it is not an offset. An
optimizer shard is part of the layout: its device axes come last among those of axis 0. Established
by tests with the code of MindFormers 1.7 to 2.0.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from math import isfinite, prod
from typing import Any

from rankxform.errors import FormatError, StrategyError
from rankxform.geometry.box import Shape
from rankxform.layout.layout import MOST_RANKS, Layout
from rankxform.layout.names import CONSUMED, TRAINING_FACTS
from rankxform.values import dataclass, decode_json, pattern_on_use

from .container import ITEM_SIZE, TEXT, ReadAt
from .documents import read_members

MOST_STEPS = 10**17
PARAMETERS, STORAGE = "state_dict_metadata", "storage_data"

_DTYPES = {name.lower(): name for name in ITEM_SIZE if name != TEXT}
_KEY = pattern_on_use(r"\('([^'\\]*)', \((\d{1,15}),\)\)")

_WRONG = (KeyError, TypeError, ValueError, AttributeError, IndexError)
"""What a document of another structure leads to."""

Holders = tuple[tuple[str, int], ...]
"""Where a slice is: (file, global rank) of each copy."""


@dataclass(frozen=True)
class Checkpoint2Parameter:
    """What is stated of a parameter: its type, its full shape, and the layout on `ranks`.

    layout: None if none is stated, which means a whole tensor.
    """

    dtype: str
    shape: Shape
    layout: Layout | None
    ranks: range


@dataclass
class Checkpoint2Metadata:
    """A metadata.json: parameters by name, and by name the holders of each slice, by number."""

    parameters: dict[str, Checkpoint2Parameter] = field(default_factory=dict)
    storage: dict[str, dict[int, Holders]] = field(default_factory=dict)


def parse_checkpoint2_metadata(read_at: ReadAt) -> Checkpoint2Metadata:
    """Read a metadata.json. Raises FormatError, which names the entry that makes no sense."""
    metadata = Checkpoint2Metadata()
    shared_values: dict[
        Any, Any
    ] = {}  # equal values are kept once: most entries are equal to others

    def parameter(name: str, fields: Any) -> None:
        try:
            metadata.parameters[name] = _parse_parameter(fields, shared_values)
        except (*_WRONG, FormatError, StrategyError) as error:
            raise FormatError(f"{_describe_error(error)}", where=f"{name!r}") from None

    def entry(key: str, entries: Any) -> None:
        try:
            name, number = _slice_of(key)
            places = tuple((replica["file_name"], _storage_rank(replica)) for replica in entries)
            if not all(isinstance(file, str) for file, _ in places):
                raise FormatError("a file_name is no text")
        except (*_WRONG, FormatError) as error:
            raise FormatError(f"{_describe_error(error)}", where=f"{key!r}") from None
        slices = metadata.storage.setdefault(name, {})
        if number in slices:
            raise FormatError(f"slice {number} of {name!r} is stated twice", where=f"{key!r}")
        slices[number] = shared_values.setdefault(places, places)

    members = read_members(
        read_at, {PARAMETERS: (parameter, "\n        },"), STORAGE: (entry, "],")}
    )
    for section in (PARAMETERS, STORAGE):
        if section not in members:
            raise FormatError(f"lacks {section!r}; is it the metadata.json of a checkpoint?")
    if not metadata.parameters:
        raise FormatError("lists no parameter")
    return metadata


def _describe_error(error: Exception) -> str:
    if isinstance(error, KeyError):
        return f"lacks {error}"
    return str(error) if isinstance(error, (FormatError, StrategyError)) else "makes no sense"


def _slice_of(key: str) -> tuple[str, int]:
    """Return name and slice number of a key, which is a Python tuple's repr."""
    match = _KEY().fullmatch(key)
    if match:
        return match[1], int(match[2])
    try:
        value = ast.literal_eval(key)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        value = None
    if isinstance(value, tuple) and len(value) == 2:
        name, numbers = value
        if isinstance(name, str) and isinstance(numbers, tuple) and [*map(type, numbers)] == [int]:
            return name, numbers[0]
    raise FormatError("is no key such as ('name', (0,))")


def _rank(value: Any) -> int:
    if type(value) is not int or not 0 <= value < MOST_RANKS:
        raise FormatError(f"storage_rank {value!r} is no rank")
    return value


def _storage_rank(entry: Mapping[str, Any]) -> int:
    """Return the rank that stored a slice, which is one of those that hold it."""
    rank, group = _rank(entry["storage_rank"]), entry.get("rank_group")
    if group is not None and rank not in group:
        raise FormatError(f"is stored by rank {rank}, which is not in its rank_group {group[:8]}")
    return rank


def _parse_parameter(fields: Any, shared_values: dict[Any, Any]) -> Checkpoint2Parameter:
    dtype = _DTYPES.get(str(fields["properties"]["dtype"]).lower())
    if dtype is None:
        raise FormatError(f"dtype {fields['properties']['dtype']!r} is not one of MindSpore's")
    shape, counts = _numbers(fields["global_shape"]), _numbers(fields["axis_fragmentations"])
    layout, ranks = None, range(0)
    if fields["layout"] is not None:
        layout, ranks = _layout(fields["layout"], shared_values)
        if layout.counts != counts:
            raise FormatError(
                f"axis_fragmentations {list(counts)} are not those of its layout, "
                f"{list(layout.counts)}"
            )
    if len(counts) != len(shape) or any(n % count for n, count in zip(shape, counts)):
        raise FormatError(f"shape {list(shape)} is not divided by {list(counts)}")
    local = [n // count for n, count in zip(shape, counts)]
    for chunk in fields["chunk"]:
        (number,) = chunk["global_offset"]
        if list(chunk["local_shape"]) != local or not 0 <= number < prod(counts):
            raise FormatError(
                f"slice {number} of {list(chunk['local_shape'])} is stated, where "
                f"{prod(counts)} slices of {local} make {list(shape)}"
            )
    if layout is None and any(count != 1 for count in counts):
        raise FormatError(f"is divided by {list(counts)} and has no layout")
    key = dtype, shape, layout, ranks
    if key not in shared_values:
        shared_values[key] = Checkpoint2Parameter(*key)
    return shared_values[key]  # type: ignore[no-any-return]


def _numbers(values: Any) -> Shape:
    sizes = tuple(values)
    if not all(type(n) is int and 0 <= n < 1 << 48 for n in sizes):
        raise FormatError(f"{list(sizes)[:8]} are no sizes")
    return sizes


def _layout(fields: Mapping[str, Any], shared_values: dict[Any, Any]) -> tuple[Layout, range]:
    if fields.get("interleaved_parallel"):
        raise FormatError("an interleaved layout cannot be converted")
    axes = tuple(
        tuple(a for a in (entry if isinstance(entry, list) else [entry]) if a != -1)
        for entry in fields["tensor_map"]
    )
    matrix = _numbers(fields["device_matrix"])
    ranks = tuple(map(_rank, fields["rank_list"]))
    stage = range(ranks[0], ranks[0] + len(ranks)) if ranks else range(0)
    if ranks != tuple(stage) or not ranks or ranks[0] % len(ranks):
        raise FormatError(
            f"rank_list {list(ranks[:8])} is not a pipeline stage: consecutive ranks, that start "
            "at a multiple of their number"
        )
    if prod(matrix) != len(ranks):
        raise FormatError(f"device_matrix {list(matrix)} is not of the {len(ranks)} in rank_list")
    key = matrix, axes
    if key not in shared_values:
        shared_values[key] = Layout(matrix, axes)
    return shared_values[key], shared_values.setdefault(stage, stage)


def parse_common(data: bytes) -> dict[str, Any]:
    """Read common.json; unknown keys are left out, what is missing is None. Raises FormatError."""
    members = decode_json(data)
    if not isinstance(members, dict):
        raise FormatError("is no JSON object")
    step = members.get("global_step")
    if step is not None and (type(step) is not int or not 0 <= step < MOST_STEPS):
        raise FormatError(f"global_step is {str(step)[:20]!r}, which is no number of steps")
    for key in TRAINING_FACTS:
        value = members.get(key)
        is_number = type(value) is int and -(1 << 63) <= value < 1 << 63
        if type(value) is float and (key == "loss_scale" or value.is_integer()):
            is_number = isfinite(value) and abs(value) < 1 << 63
            members[key] = value if key == "loss_scale" else int(value)
        if value is not None and not is_number:
            raise FormatError(f"{key} is {str(value)[:20]!r}, and a counter cannot hold it")
    consumed_member = {CONSUMED: members[CONSUMED]} if type(members.get(CONSUMED)) is int else {}
    return {**{key: members.get(key) for key in TRAINING_FACTS}, **consumed_member}


# -- written --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Written:
    """What is to be written of a parameter: type, full shape in elements, and layout on `ranks`."""

    dtype: str
    shape: Shape
    layout: Layout
    ranks: range

    @property
    def text(self) -> str:
        """The JSON of its entry, to be indented."""
        layout = self.layout
        counts = layout.counts
        numbers = [_ravel(layout.cell(rank), counts) for rank in range(len(self.ranks))]
        replica_counts: dict[int, int] = {}
        replicas = []
        for number in numbers:
            replicas.append(replica_counts.get(number, 0))
            replica_counts[number] = replicas[-1] + 1
        local = [n // count for n, count in zip(self.shape, counts)]
        fields = {
            "properties": {
                "dtype": self.dtype,
                "replica_id": replicas,
                "allow_shape_mismatch": False,
                "allow_to_save": True,
            },
            "global_shape": list(self.shape),
            "axis_fragmentations": list(counts),
            "layout": {
                "device_matrix": list(layout.device_matrix),
                "tensor_map": layout.printable_map,
                "interleaved_parallel": False,
                "alias_name": [_alias(n) for n in range(len(layout.device_matrix))],
                "rank_list": list(self.ranks),
            },
            "chunk": [{"global_offset": [n], "local_shape": local} for n in dict.fromkeys(numbers)],
        }
        return _indent_json(fields, 2)


def _alias(number: int) -> str:
    """Return the name of a device axis: "a" to "z", then "aa" and so on."""
    name = chr(ord("a") + number % 26)
    return name if number < 26 else _alias(number // 26 - 1) + name


def _ravel(cell: Sequence[int], counts: Sequence[int]) -> int:
    number = 0
    for coordinate, count in zip(cell, counts):
        number = number * count + coordinate
    return number


def _indent_json(value: Any, depth: int) -> str:
    text = json.dumps(value, indent=4, ensure_ascii=False)
    return text.replace("\n", "\n" + "    " * depth)


def slice_number(layout: Layout, rank: int) -> int:
    """Return the number of the slice that stage-local `rank` holds."""
    return _ravel(layout.cell(rank), layout.counts)


def format_metadata(
    parameters: Mapping[str, Written],
    storage: Mapping[tuple[str, int], tuple[Holders, tuple[int, ...]]],
) -> Iterator[str]:
    """Yield the text of a metadata.json, as MindFormers indents it.

    storage: by name and slice number its holders, and all ranks that have use for the slice.
    """
    yield f'{{\n    "{PARAMETERS}": {{'
    text_cache: dict[Any, str] = {}
    separator = "\n        "
    for name, parameter in parameters.items():
        if parameter not in text_cache:
            text_cache[parameter] = parameter.text
        yield f"{separator}{json.dumps(name, ensure_ascii=False)}: {text_cache[parameter]}"
        separator = ",\n        "
    yield "\n    },\n" if parameters else "},\n"
    yield f'    "{STORAGE}": {{'
    separator = "\n        "
    for key, places in storage.items():
        if places not in text_cache:
            holders, group = places
            text_cache[places] = _indent_json(
                [
                    {"file_name": file, "storage_rank": rank, "rank_group": list(group)}
                    for file, rank in holders
                ],
                2,
            )
        written = json.dumps(repr((key[0], (key[1],))), ensure_ascii=False)
        yield f"{separator}{written}: {text_cache[places]}"
        separator = ",\n        "
    yield "\n    }\n}" if storage else "}\n}"


def format_common(fields: Mapping[str, Any]) -> bytes:
    """Return a common.json with the five keys that every version reads, and a sixth if it is
    known."""
    keys = (*TRAINING_FACTS, CONSUMED) if fields.get(CONSUMED) is not None else TRAINING_FACTS
    return json.dumps({key: fields.get(key) for key in keys}, indent=4).encode()
