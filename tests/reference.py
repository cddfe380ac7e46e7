"""A slow second truth: slices, strategy files and checkpoints, written without the package.

Nothing here imports rankxform. A layout is ``(device_matrix, tensor_map, step, size)``, the
tensor map with -1 for an unsharded axis and a list for one sharded by several device axes; a fifth item is
the rows of each part of axis 0, if they are not equal. A strategy is a list of stages, each
``{name: layout}``. A parameter is ``(shape, dtype)``.
"""

from __future__ import annotations

import json
import zlib
from pathlib import Path

import numpy as np

ITEM = {
    "Bool": 1, "Int8": 1, "UInt8": 1, "Int4": 1, "Int16": 2, "UInt16": 2, "Float16": 2,
    "BFloat16": 2, "Int32": 4, "UInt32": 4, "Float32": 4, "Int64": 8, "UInt64": 8, "Float64": 8,
    "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1,
}  # fmt: skip
WORD = {1: "u1", 2: "<u2", 4: "<u4", 8: "<u8"}


# -- cutting --------------------------------------------------------------------------------


def coordinates(rank, device_matrix):
    return tuple(int(c) for c in np.unravel_index(rank, device_matrix))


def axes_of(entry):
    return (
        [] if entry == -1 else [a for a in entry if a != -1] if isinstance(entry, list) else [entry]
    )


def shard(full, layout, rank):
    """Return what stage-local `rank` holds of the array `full`, by splitting axis after axis."""
    device_matrix, tensor_map, step, size, *rows = layout
    ranks = int(np.prod(device_matrix))
    rank %= ranks
    part = full
    if rows:
        at = len(device_matrix) - 1 - axes_of(tensor_map[0])[0]
        return np.split(part, np.cumsum(rows[0])[:-1])[coordinates(rank, device_matrix)[at]]
    for axis, entry in enumerate(tensor_map):
        for device_axis in axes_of(entry):
            at = len(device_matrix) - 1 - device_axis
            part = np.split(part, device_matrix[at], axis)[coordinates(rank, device_matrix)[at]]
    if step and size:
        group = [r for r in range(ranks) if _place(r, layout) == _place(rank, layout)]
        shards = len(group) if size == -1 else size
        if shards > 1:
            part = np.split(part, shards, 0)[group.index(rank) % shards]
    return part


def _place(rank, layout):
    device_matrix, tensor_map, *_ = layout
    where = coordinates(rank, device_matrix)
    used = [a for entry in tensor_map for a in axes_of(entry)]
    return [where[len(device_matrix) - 1 - a] for a in used]


def full_tensor(name, shape, dtype):
    """Return reproducible words for a parameter; bf16 and other floats hold no NaN."""
    rng = np.random.default_rng(zlib.crc32(name.encode()))
    item = ITEM[dtype]
    count = int(np.prod(shape))
    if dtype == "Bool":
        words = rng.integers(0, 2, count, dtype=np.uint8)
    elif dtype in ("Float16", "Float32", "Float64"):
        kind = {"Float16": np.float16, "Float32": np.float32, "Float64": np.float64}[dtype]
        words = rng.standard_normal(count).astype(kind).view(WORD[item])
    elif dtype == "BFloat16":
        words = (rng.standard_normal(count).astype(np.float32).view("<u4") >> 16).astype("<u2")
    else:
        words = np.frombuffer(rng.bytes(count * item), WORD[item]).copy()
    return words.reshape(shape)


def counting_tensor(name, shape, dtype):
    """Return a tensor of its own flat index, so that a wrong element names its place."""
    return np.arange(int(np.prod(shape)), dtype=WORD[ITEM[dtype]]).reshape(shape)


# -- strategy files -------------------------------------------------------------------------


def varint(n):
    n &= (1 << 64) - 1
    out = bytearray()
    while True:
        out.append((n & 127) | (128 if n > 127 else 0))
        n >>= 7
        if not n:
            return bytes(out)


def field(number, value):
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def dims(numbers):
    return b"".join(field(1, int(n)) for n in numbers)


def proto_layout(layout):
    device_matrix, tensor_map, step, size, *rows = layout
    if any(isinstance(entry, list) for entry in tensor_map):
        maps = [entry if isinstance(entry, list) else [entry] for entry in tensor_map]
        maps += [[]] if len(maps) == 1 else []
    else:
        maps = [tensor_map]
    parts = [field(1, dims(device_matrix)), *(field(2, dims(m)) for m in maps)]
    starts = np.cumsum([0, *rows[0][:-1]]) if rows else []
    parts += [field(3, dims(rows[0] if rows else [])), field(4, dims(starts))]
    parts += [field(5, 0), field(6, step), field(7, size)]
    return b"".join(parts)


def proto_strategy(layouts, stage=0, current=2, prefixes=None):
    """Encode a ParallelStrategyMap; `prefixes` gives the stage before each name of a merged one."""
    item = field(1, b"MatMul-op0") + field(2, field(1, stage) + field(2, dims([1, 1])))
    out = [field(1, current), field(2, item)]
    for i, (name, layout) in enumerate(layouts):
        written = name if prefixes is None else f"{prefixes[i]}-{name}"
        out.append(field(3, field(1, written.encode()) + field(2, proto_layout(layout))))
    return b"".join(out)


def json_strategy(layouts, stage=0, current=2, shapes=None):
    items = {}
    for name, (device_matrix, tensor_map, step, size) in layouts:
        shape = list(shapes[name]) if shapes else []
        flat, expanded = [], []
        for axis, entry in enumerate(tensor_map):
            axes = axes_of(entry)
            rest = shape[axis] if shapes else 0
            for a in axes[:-1]:
                extent = device_matrix[len(device_matrix) - 1 - a]
                flat.append(a)
                expanded.append(extent)
                rest //= extent
            flat.append(axes[-1] if axes else -1)
            expanded.append(rest)
        items[name] = {
            "dev_matrix": list(device_matrix), "tensor_map": flat, "tensor_shape": expanded,
            "field": 0, "opt_weight_shard_step": step, "opt_weight_shard_size": size,
        }  # fmt: skip
    operators = {"MatMul-op0": {"stage": stage, "parallel_strategy": [[1, 1]]}}
    return json.dumps(
        {
            "current_stage": current,
            "parallel_strategy_item": operators,
            "parallel_layout_item": items,
        }
    ).encode()


def read_strategy(path):
    """Parse an un-merged protobuf strategy file into one stage of layouts."""
    found = {}
    for number, item in _fields(memoryview(Path(path).read_bytes())):
        if number == 3:
            name, layout = (part for _, part in _fields(item))
            parts = list(_fields(layout))
            matrix = [n for _, n in _fields(next(v for k, v in parts if k == 1))]
            maps = [[_signed(n) for _, n in _fields(v)] for k, v in parts if k == 2]
            tensor_map = maps[0] if len(maps) == 1 else [m for m in maps if m]
            numbers = {k: _signed(v) for k, v in parts if isinstance(v, int)}
            found[bytes(name).decode()] = matrix, tensor_map, numbers.get(6, 0), numbers.get(7, 0)
    return found


def _signed(n):
    return n - (1 << 64) if n >> 63 else n


def write_strategy(path, stages, kind="ckpt", shapes=None):
    """Write one file for a single stage, a merged one for several; return its path as text."""
    path = Path(path)
    if len(stages) == 1 and kind == "json":
        path.write_bytes(json_strategy(list(stages[0].items()), shapes=shapes))
    elif len(stages) == 1:
        path.write_bytes(proto_strategy(list(stages[0].items())))
    else:
        every = [
            (s, name, layout) for s, stage in enumerate(stages) for name, layout in stage.items()
        ]
        prefixes = [s for s, _, _ in every]
        path.write_bytes(
            proto_strategy([(n, lay) for _, n, lay in every], current=1, prefixes=prefixes)
        )
    return str(path)


def write_stage_files(folder, stages, kind="ckpt"):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for s, stage in enumerate(stages):
        make = json_strategy if kind == "json" else proto_strategy
        (folder / f"ckpt_strategy_rank_{s}.{kind}").write_bytes(make(list(stage.items()), stage=s))
    return str(folder)


# -- checkpoints ----------------------------------------------------------------------------


def ckpt_head(name, dtype, shape, nbytes):
    """Return what stands before `nbytes` of content: three lengths, each of all that follows."""
    before = dims(shape) + field(2, dtype.encode())
    content = varint(3 << 3 | 2) + varint(nbytes)
    tensor = varint(2 << 3 | 2) + varint(len(before) + len(content) + nbytes) + before + content
    tag = field(1, name.encode())
    return varint(1 << 3 | 2) + varint(len(tag) + len(tensor) + nbytes) + tag + tensor


def ckpt_entry(name, dtype, shape, content):
    return ckpt_head(name, dtype, shape, len(content)) + content


def write_ckpt(path, entries):
    """Write ``{name: (dtype, words)}`` as a .ckpt file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for name, (dtype, words) in entries.items():
            file.write(ckpt_entry(name, dtype, words.shape, np.ascontiguousarray(words).tobytes()))


SAFE = {
    "Bool": "BOOL", "Int8": "I8", "UInt8": "U8", "Int4": "I8", "Int16": "I16", "UInt16": "U16",
    "Float16": "F16", "BFloat16": "BF16", "F8_E4M3": "F8_E4M3", "F8_E5M2": "F8_E5M2", "F8_E8M0": "F8_E8M0", "Int32": "I32", "UInt32": "U32", "Float32": "F32",
    "Int64": "I64", "UInt64": "U64", "Float64": "F64",
}  # fmt: skip


def write_safetensors(path, entries, metadata=None):
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    header, at, body = {"__metadata__": {"format": "ms", **(metadata or {})}}, 0, []
    for name in sorted(entries, key=lambda n: (-ITEM[entries[n][0]], n)):
        dtype, words = entries[name]
        data = np.ascontiguousarray(words).tobytes()
        header[name] = {
            "dtype": SAFE[dtype], "shape": list(words.shape), "data_offsets": [at, at + len(data)],
        }  # fmt: skip
        at += len(data)
        body.append(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(body))


def read_ckpt(path):
    """Parse a whole .ckpt file into ``{name: (dtype, shape, bytes)}``, pieces joined."""
    found = {}
    data = memoryview(Path(path).read_bytes())
    for _, value in _fields(data):
        parts = dict(_fields(value))
        shape, dtype, content = [], "", b""
        for number, inner in _fields(parts[2]):
            if number == 1:
                shape.append(inner)
            elif number == 2:
                dtype = bytes(inner).decode()
            else:
                content = bytes(inner)
        name = bytes(parts[1]).decode()
        before = found[name][2] if name in found else b""
        found[name] = (dtype, tuple(shape), before + content)
    return found


def _fields(data):
    at = 0
    while at < len(data):
        key, at = _number(data, at)
        value, at = _number(data, at)
        if key & 7 == 2:
            yield key >> 3, data[at : at + value]
            at += value
        else:
            yield key >> 3, value


def _number(data, at):
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at


def read_safetensors(path):
    """Parse a safetensors file into ``{name: (dtype, shape, bytes)}``."""
    data = Path(path).read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    metadata = header.pop("__metadata__", {})
    names = {v: k for k, v in SAFE.items() if k != "Int4"}
    found = {}
    for name, item in header.items():
        a, b = item["data_offsets"]
        dtype = "Int4" if metadata.get(name) == "Int4" else names[item["dtype"]]
        found[name] = (dtype, tuple(item["shape"]), data[8 + length + a : 8 + length + b])
    return found


def read_any(path):
    return read_safetensors(path) if str(path).endswith(".safetensors") else read_ckpt(path)


# -- whole cases ----------------------------------------------------------------------------


def stage_size(stages):
    return max(int(np.prod(layout[0])) for stage in stages for layout in stage.values())


def held_by(rank, stages, params):
    """Yield (name, layout) of what global `rank` holds, in the strategy's order."""
    size = stage_size(stages)
    for name, layout in stages[rank // size].items():
        if name in params:
            yield name, layout, rank % size


def write_checkpoint(
    folder, stages, params, extras=None, kind="ckpt", make=full_tensor, name="checkpoint_{rank}"
):
    """Write rank_N folders of the checkpoint that `stages` shard; `stages` None: one whole file.

    `extras` is ``{name: (dtype, words)}`` or a function of the rank: parameters in no strategy.
    """
    write = write_safetensors if kind == "safetensors" else write_ckpt
    extras = extras or {}
    ranks = 1 if stages is None else stage_size(stages) * len(stages)
    for rank in range(ranks):
        if stages is None:
            entries = {n: (d, make(n, s, d)) for n, (s, d) in params.items()}
        else:
            entries = {}
            for n, layout, local in held_by(rank, stages, params):
                shape, dtype = params[n]
                entries[n] = (dtype, shard(make(n, shape, dtype), layout, local))
        entries.update(extras(rank) if callable(extras) else extras)
        write(Path(folder) / f"rank_{rank}" / f"{name.format(rank=rank)}.{kind}", entries)
    return str(folder)


def wrong_slices(folder, stages, params, kind="ckpt", ranks=None, make=full_tensor):
    """Return what is wrong in the output `folder`: missing, additional or different slices."""
    wrong = []
    size = 1 if stages is None else stage_size(stages)
    count = 1 if stages is None else size * len(stages)
    for rank in range(count) if ranks is None else ranks:
        found = read_any(Path(folder) / f"rank_{rank}" / f"checkpoint_{rank}.{kind}")
        if stages is None:
            wanted = {n: make(n, s, d) for n, (s, d) in params.items()}
        else:
            wanted = {
                n: shard(make(n, *params[n]), layout, local)
                for n, layout, local in held_by(rank, stages, params)
            }
        for n, words in wanted.items():
            have = found.get(n)
            if have is None:
                wrong.append(f"rank {rank}: {n} is missing")
            elif have != (params[n][1], words.shape, np.ascontiguousarray(words).tobytes()):
                wrong.append(
                    f"rank {rank}: {n} is {have[0]} {have[1]}, {words.shape} wanted; bytes?"
                )
    return wrong
