"""A slow second truth of distributed checkpoints, written and read without the package or PyTorch.

Tables are real pickles here: of classes that are made on the spot under the frameworks' names, and
read back by `pickle` itself, with anything that is not known refused. Items are ZIPs of `zipfile`.
"""

from __future__ import annotations

import io
import itertools
import json
import pickle
import random
import sys
import types
import zipfile
from pathlib import Path

import numpy as np

from tests import reference

TORCH = {
    "Float64": "float64", "Float32": "float32", "Float16": "float16", "BFloat16": "bfloat16",
    "Int64": "int64", "Int32": "int32", "Int16": "int16", "Int8": "int8", "UInt8": "uint8",
    "Bool": "bool", "UInt16": "uint16", "UInt32": "uint32", "UInt64": "uint64",
    "F8_E4M3": "float8_e4m3fn",
}  # fmt: skip
STORAGE = {
    "Float64": "Double", "Float32": "Float", "Float16": "Half", "BFloat16": "BFloat16",
    "Int64": "Long", "Int32": "Int", "Int16": "Short", "Int8": "Char", "UInt8": "Byte",
    "Bool": "Bool",
}  # fmt: skip
DTYPE = {name: own for own, name in TORCH.items()}
META, FILES = "torch.distributed.checkpoint.metadata", "torch.distributed.checkpoint.filesystem"
HYPER = "hyper_parallel.core.distributed_checkpoint"


class Named:
    """Something that a pickle has by its name alone."""

    def __init__(self, name):
        self.name = name

    def __call__(self, *args):
        return args[0] if self.name == "torch.Size" else (self.name, *args)


class Object:
    """An instance of a class that is not there."""

    def __init__(self, *args):
        self.state = {}

    def __setstate__(self, state):
        self.state = state

    def __getitem__(self, key):
        return self.state[key]

    def get(self, key):
        return self.state.get(key)


class Tables(pickle.Unpickler):
    """Reads what frameworks pickle; classes become `Object`, functions `Named`."""

    def find_class(self, module, name):
        if name.lstrip("_")[:1].isupper() and module != "torch" and name != "OrderedDict":
            return type(name, (Object,), {})
        if (module, name) == ("collections", "OrderedDict"):
            return dict
        assert module.startswith("torch") or module == "pathlib", (module, name)
        return Named(f"{module}.{name}")

    def persistent_load(self, key):
        return key


def loaded(data):
    return Tables(io.BytesIO(data)).load()


def key_of(index):
    offset = index["offset"]
    return index["fqn"], tuple(offset) if offset else offset


def read_items(folder, *, tensors=True):
    """Read every box, unless only what is no tensor is wanted; return ({name: (dtype, full array of words)}, {name: bytes of an item})."""
    folder = Path(folder)
    tables = [folder / ".metadata"] if (folder / ".metadata").exists() else []
    assert tables, "no .metadata"
    table, only_items = loaded(tables[0].read_bytes()), not tensors
    tensors, items, seen = {}, {}, {}
    for index, info in table["storage_data"].items():
        name, stated = index["fqn"], table["state_dict_metadata"][index["fqn"]]
        path = folder / info["relative_path"]
        if type(stated).__name__ == "BytesStorageMetadata":
            items[name] = path.read_bytes()[info["offset"] :][: info["length"]]
            continue
        if only_items:
            continue
        properties = stated["properties"].state
        named = properties[0] if isinstance(properties, tuple) else properties["dtype"]
        named = named if isinstance(named, str) else named.name
        dtype, shape = DTYPE[named.removeprefix("torch.")], tuple(stated["size"])
        word = reference.WORD[reference.ITEM[dtype]]
        full = tensors.setdefault(name, (dtype, np.zeros(shape, word)))[1]
        count = seen.setdefault(name, np.zeros(shape, "u1"))
        at = tuple(index["offset"] or ())
        (sizes,) = {tuple(c["sizes"]) for c in stated["chunks"] if tuple(c["offsets"] or ()) == at}
        own, data = _content(path, info, index)
        assert own == dtype, (name, own, dtype)
        where = tuple(slice(a, a + n) for a, n in zip(at, sizes))
        full[where] = np.frombuffer(data, word).reshape(sizes)
        count[where] += 1
    assert all((some == 1).all() for some in seen.values()), "boxes overlap or do not cover"
    assert only_items or tensors.keys() | items.keys() == table["state_dict_metadata"].keys()
    return tensors, items


def _content(path, info, index):
    """Return type and bytes of a box, its checksum compared."""
    if path.suffix == ".safetensors":
        dtype, _, data = reference.read_safetensors(path)[info["tensor_key"] or index["fqn"]]
        return dtype, data
    dtype, _, data = item_content(path.read_bytes()[info["offset"] :][: info["length"]])
    return dtype, data


def item_content(item):
    """Return type, shape and bytes of an item, its checksum compared."""
    with zipfile.ZipFile(io.BytesIO(item)) as archive:
        assert archive.testzip() is None
        prefix = archive.namelist()[0].partition("/")[0]
        assert archive.read(f"{prefix}/byteorder") == b"little"
        data = archive.read(f"{prefix}/data/0")
        (function, storage, first, sizes, strides, *rest) = loaded(
            archive.read(f"{prefix}/data.pkl")
        )
    plain = [int(np.prod(sizes[axis + 1 :])) for axis in range(len(sizes))]
    assert first == 0 and list(strides) == plain
    if function.endswith("_v3"):
        return DTYPE[rest[-1].name.removeprefix("torch.")], tuple(sizes), data
    kinds = {f"torch.{name}Storage": dtype for dtype, name in STORAGE.items()}
    return kinds[storage[1].name], tuple(sizes), data


# -- written --------------------------------------------------------------------------------------


def _module(name):
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        sys.modules.setdefault(".".join(parts[:end]), types.ModuleType(".".join(parts[:end])))
    return sys.modules[name]


class Stand:
    """Puts classes and functions of the frameworks' names where `pickle` looks for them."""

    def __init__(self):
        self.modules = dict(sys.modules)
        for name in [n for n in sys.modules if n.split(".")[0] in ("torch", "hyper_parallel")]:
            del sys.modules[name]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        for name in [n for n in sys.modules if n.split(".")[0] in ("torch", "hyper_parallel")]:
            del sys.modules[name]
        sys.modules.update(self.modules)

    def make(self, module, name, **state):
        kind = getattr(_module(module), name, None)
        if kind is None:
            kind = type(name, (), {"__module__": module})
            setattr(_module(module), name, kind)
        made = kind()
        made.__dict__.update(state)
        return made

    def called(self, module, name, *args):
        """Return something that is pickled as a call of a name."""
        if not hasattr(_module(module), name):
            function = types.FunctionType((lambda *given: given).__code__, {}, name)
            function.__module__, function.__qualname__ = module, name
            setattr(_module(module), name, function)
        function = getattr(_module(module), name)
        return type("Call", (), {"__reduce__": lambda own: (function, args)})()

    def named(self, module, name):
        """Return something that is pickled as a name."""
        if not hasattr(_module(module), name):
            made = type("Name", (), {"__module__": module, "__reduce__": lambda own: name})()
            setattr(_module(module), name, made)
        return getattr(_module(module), name)


def item(words, dtype, stand, change=lambda members: None):
    """Return a tensor as `torch.save` writes it."""
    count = int(words.size)
    strides = tuple(int(np.prod(words.shape[a + 1 :])) for a in range(words.ndim))
    typed = dtype in STORAGE
    kind = stand.named("torch", f"{STORAGE[dtype]}Storage") if typed else None
    if not typed:
        kind = stand.named("torch.storage", "UntypedStorage")
        count *= reference.ITEM[dtype]

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return value[1] if isinstance(value, tuple) and value[:1] == ("persistent",) else None

    storage = "persistent", ("storage", kind, "0", "cpu", count)
    args = storage, 0, tuple(words.shape), strides, False, {}
    version = "_rebuild_tensor_v2" if typed else "_rebuild_tensor_v3"
    args = args if typed else (*args, stand.named("torch", TORCH[dtype]))
    target = io.BytesIO()
    Pickler(target, 2).dump(stand.called("torch._utils", version, *args))
    members = {
        "data.pkl": target.getvalue().replace(b"}q", b"ccollections\nOrderedDict\n)Rq", 1),
        "byteorder": b"little",
        "data/0": words.tobytes(),
        "version": b"3\n",
    }
    change(members)
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        for name, data in members.items():
            archive.writestr(f"archive/{name}", data)
    return output.getvalue()


def saved(value):
    """Return what `torch.save` makes of a value that is no tensor."""
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(value, 2))
        archive.writestr("archive/version", b"3\n")
    return output.getvalue()


def cut(shape, rng, depth=3):
    """Return boxes (start, stop) that tile an array, cut at random places again and again."""
    boxes = [((0,) * len(shape), tuple(shape))]
    for _ in range(rng.randrange(depth + 1) if shape else 0):
        at = rng.randrange(len(boxes))
        start, stop = boxes.pop(at)
        axis = rng.randrange(len(shape))
        place = rng.randint(start[axis], stop[axis])
        for a, b in ((start[axis], place), (place, stop[axis])):
            boxes.append(
                ((*start[:axis], a, *start[axis + 1 :]), (*stop[:axis], b, *stop[axis + 1 :]))
            )
    unique = {}
    for start, stop in boxes:  # two boxes at one place: one of them is empty
        size = int(np.prod(np.subtract(stop, start)))
        if size or start not in unique:
            unique[start] = stop
    return sorted(unique.items())


def write_dcp(folder, tensors, *, ranks=2, seed=0, items=None, boxes=None, change=lambda m: None):
    """Write ``{name: (dtype, words)}`` as PyTorch's DCP, in boxes at random on `ranks` ranks.

    boxes: by name (start, stop) of each. change: changes what is stored, by its state.
    """
    rng, folder = random.Random(seed), Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = dict.fromkeys(range(ranks), b"")
    with Stand() as stand:
        stated, places = {}, {}
        for name, data in (items or {}).items():
            rank = rng.randrange(ranks)
            stated[name] = stand.make(META, "BytesStorageMetadata")
            index = stand.make(META, "MetadataIndex", fqn=name, offset=None, index=None)
            places[index] = _info(stand, rank, files, data)
        for name, (dtype, words) in tensors.items():
            tiles = (boxes or {}).get(name) or cut(words.shape, rng)
            chunks = []
            for number, (start, stop) in enumerate(tiles):
                rank = rng.randrange(ranks)
                part = words[tuple(slice(a, b) for a, b in zip(start, stop))]
                size = tuple(b - a for a, b in zip(start, stop))
                chunks.append(
                    stand.make(
                        META, "ChunkStorageMetadata", offsets=_size(stand, start),
                        sizes=_size(stand, size),
                    )
                )  # fmt: skip
                index = stand.make(
                    META, "MetadataIndex", fqn=name, offset=_size(stand, start), index=number
                )
                places[index] = _info(stand, rank, files, item(part.copy(), dtype, stand))
            properties = stand.make(
                META, "TensorProperties", dtype=stand.named("torch", TORCH[dtype])
            )
            stated[name] = stand.make(
                META, "TensorStorageMetadata", properties=properties,
                size=_size(stand, words.shape), chunks=chunks,
            )  # fmt: skip
        table = {
            "state_dict_metadata": stated, "planner_data": None, "storage_data": places,
            "storage_meta": None, "version": "1.0.0",
        }  # fmt: skip
        change(table)
        content = pickle.dumps(stand.make(META, "Metadata", **table), protocol=4)
    for rank, data in files.items():
        if data:
            (folder / f"__{rank}_0.distcp").write_bytes(data)
    (folder / ".metadata").write_bytes(content)
    return str(folder)


def _size(stand, shape):
    return stand.called("torch", "Size", tuple(int(n) for n in shape))


def _info(stand, rank, files, data):
    offset = len(files[rank])
    files[rank] += data
    return stand.make(
        FILES, "_StorageInfo", relative_path=f"__{rank}_0.distcp", offset=offset, length=len(data)
    )


def write_dcp_safetensors(folder, tensors, *, ranks=2, seed=0):
    """Write tensors as PyTorch's Hugging Face writer does, boxes of each at random."""
    rng = random.Random(seed)
    shards = [({}, {}) for _ in range(ranks)]
    for name, (dtype, words) in tensors.items():
        rows = sorted(rng.choices(range(words.shape[0] + 1), k=ranks - 1)) if words.ndim else []
        edges = [0, *rows, words.shape[0]] if words.ndim else [0]
        for rank, (a, b) in enumerate(itertools.pairwise(edges)):
            entries, info = shards[rank]
            entries[name] = dtype, words[a:b]
            info[name] = {"saved_offsets": [a] + [0] * (words.ndim - 1)}
        if not words.ndim:
            shards[0][0][name], shards[0][1][name] = (dtype, words), {"saved_offsets": []}
    for rank, (entries, info) in enumerate(shards):
        path = Path(folder) / f"shard-{rank + 1:05}-model-00001-of-00001.safetensors"
        metadata = {"DCP_SHARDING_INFO": json.dumps(info), "DCP_VERSION": "1.0", "format": "pt"}
        reference.write_safetensors(path, entries, metadata)
    return str(folder)


def write_hyperparallel(folder, tensors, *, ranks=2, seed=0):
    """Write tensors as HyperParallel does, in boxes at random, several of one in a file too."""
    rng, folder = random.Random(seed), Path(folder)
    files = {rank: {} for rank in range(ranks)}
    meta, storage = f"{HYPER}.metadata", f"{HYPER}.storage"
    with Stand() as stand:
        stated, places = {}, {}
        for name, (dtype, words) in tensors.items():
            chunks = []
            for number, (start, stop) in enumerate(cut(words.shape, rng)):
                rank = rng.randrange(ranks)
                size = tuple(b - a for a, b in zip(start, stop))
                key = name if name not in files[rank] else f"{name}.__dcp_chunk_{number}"
                part = words[tuple(slice(a, b) for a, b in zip(start, stop))]
                files[rank][key] = dtype, part.copy()
                chunks.append(stand.make(meta, "ChunkStorageMetadata", offsets=start, sizes=size))
                index = stand.make(meta, "MetadataIndex", fqn=name, offset=start, index=number)
                places[index] = stand.make(
                    storage, "StorageInfo", relative_path=f"_rank{rank}_.safetensors", offset=0,
                    length=-1, tensor_key=key,
                )  # fmt: skip
            properties = stand.make(
                meta, "TensorProperties", dtype=f"torch.{TORCH[dtype]}", requires_grad=False,
                memory_format=None,
            )  # fmt: skip
            stated[name] = stand.make(
                meta, "TensorStorageMetadata", properties=properties, size=tuple(words.shape),
                chunks=chunks,
            )  # fmt: skip
        table = {
            "state_dict_metadata": stated, "planner_data": None, "storage_data": places,
            "version": "1.0",
        }  # fmt: skip
        content = pickle.dumps(stand.make(meta, "Metadata", **table), protocol=4)
    for rank, entries in files.items():
        if entries:
            reference.write_safetensors(folder / f"_rank{rank}_.safetensors", entries)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / ".metadata").write_bytes(content)
    return str(folder)
