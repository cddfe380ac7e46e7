"""Files of torch.save, written by `pickle` and `zipfile` alone; imports nothing of the package, and no torch."""

from __future__ import annotations

import io
import json
import pickle
import sys
import types
import zipfile
from collections import OrderedDict
from contextlib import contextmanager

STORAGES = {
    "Float64": "DoubleStorage", "Float32": "FloatStorage", "Float16": "HalfStorage",
    "BFloat16": "BFloat16Storage", "Int64": "LongStorage", "Int32": "IntStorage",
    "Int16": "ShortStorage", "Int8": "CharStorage", "UInt8": "ByteStorage", "Bool": "BoolStorage",
}  # fmt: skip


def _named(name, module="torch"):
    """Return a class that pickles as this name."""
    return type(name, (), {"__module__": module, "__qualname__": name})


TYPES = {name: _named(name) for name in STORAGES.values()}


def _rebuild_tensor_v2():
    """Stand for torch's function, which is named and never called."""


_rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = (
    "torch._utils",
    "_rebuild_tensor_v2",
)


class _Tensor:
    def __init__(self, key, kind, count, shape, first=0, strides=None):
        self.key, self.kind, self.count, self.shape, self.first = key, kind, count, shape, first
        steps, step = [], 1
        for n in reversed(shape):
            steps.insert(0, step)
            step *= n
        self.strides = tuple(steps) if strides is None else strides

    def __reduce__(self):
        storage = _Persistent(("storage", self.kind, self.key, "cpu", self.count))
        arguments = storage, self.first, self.shape, self.strides, False, OrderedDict()
        return _rebuild_tensor_v2, arguments


_PLACES = "torch.distributed.tensor.placement_types"
CLASSES = {
    name: _named(name, module)
    for name, module in {
        "DTensor": "torch.distributed.tensor", "DeviceMesh": "torch.distributed.device_mesh",
        "DTensorSpec": "torch.distributed.tensor._dtensor_spec",
        "TensorMeta": "torch.distributed.tensor._dtensor_spec", "Size": "torch",
        "Shard": _PLACES, "_StridedShard": _PLACES, "Replicate": _PLACES, "Partial": _PLACES,
    }.items()
}  # fmt: skip


def _function(name, module):
    def stand():
        """Stand for torch's function, which is named and never called."""

    stand.__module__, stand.__qualname__, stand.__name__ = module, name, name
    return stand


FUNCTIONS = {
    "_rebuild_from_type_v2": _function("_rebuild_from_type_v2", "torch._tensor"),
    "_rebuild_wrapper_subclass": _function("_rebuild_wrapper_subclass", "torch._utils"),
}


class _Call:
    """Pickles as a call, or as a new object with a state."""

    def __init__(self, function, arguments, state=None):
        self.reduced = function, arguments, *(() if state is None else (state,))

    def __reduce__(self):
        return self.reduced


def _object(name, state, arguments=()):
    return _Call(CLASSES[name], arguments, state)


def dtensor(local, shape, sizes, coordinates, placements):
    """Return what pickles as a DTensor of torch 2.9: of a `tensor` on a mesh of such sizes.

    placements: (class, dim) or (class, dim, split_factor), or the class alone.
    """
    ranks = tensor("ranks", "Int32", tuple(sizes))
    members = "dim", "split_factor"
    spec = {
        "mesh": _object("DeviceMesh", {"mesh": ranks, "_coordinate_on_dim": list(coordinates)}),
        "placements": tuple(_object(p[0], dict(zip(members, p[1:]))) for p in placements),
        "tensor_meta": _object(
            "TensorMeta", None, (_Call(CLASSES["Size"], (tuple(shape),)), (), None)
        ),
    }
    state = None, {"_local_tensor": local, "_spec": _object("DTensorSpec", spec)}
    arguments = FUNCTIONS["_rebuild_wrapper_subclass"], CLASSES["DTensor"], (), state
    return _Call(FUNCTIONS["_rebuild_from_type_v2"], arguments)


class _Persistent:
    def __init__(self, id):
        self.id = id


class _Pickler(pickle.Pickler):
    def persistent_id(self, value):
        return value.id if isinstance(value, _Persistent) else None


@contextmanager
def _torch():
    """Let pickle find torch's names."""
    named = [_rebuild_tensor_v2, *TYPES.values(), *CLASSES.values(), *FUNCTIONS.values()]
    names = {"torch", *(one.__module__ for one in named)}
    modules = {name: types.ModuleType(name) for name in names}
    for one in named:
        setattr(modules[one.__module__], one.__qualname__, one)
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            if module is None:
                del sys.modules[name]
            else:
                sys.modules[name] = module


def pickled(value):
    """Return a pickle in which `tensor`s are calls of torch's function."""
    out = io.BytesIO()
    with _torch():
        _Pickler(out, 2).dump(value)
    return out.getvalue()


def tensor(key, dtype, shape, count=None, first=0, strides=None):
    """Return what pickles as a tensor of the storage `key`, of so many elements."""
    elements = 1
    for n in shape:
        elements *= n
    count = elements if count is None else count
    return _Tensor(str(key), TYPES[STORAGES[dtype]], count, tuple(shape), first, strides)


def archive(path, value, storages, *, order=b"little", more=()):
    """Write a file: the pickle of `value`, and storages by key."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as out:
        out.writestr("archive/data.pkl", value if isinstance(value, bytes) else pickled(value))
        out.writestr("archive/byteorder", order)
        for key, data in storages.items():
            out.writestr(f"archive/data/{key}", data)
        for name, data in more:
            out.writestr(f"archive/{name}", data)
        out.writestr("archive/version", b"3\n")
    return path


def save(path, tensors):
    """Write {name: (type, words)} as torch.save does a state dict."""
    made, storages = OrderedDict(), {}
    for number, (name, (dtype, words)) in enumerate(tensors.items()):
        made[name] = tensor(number, dtype, words.shape)
        storages[number] = words.tobytes()
    return archive(path, made, storages)


def write_folder(folder, tensors, count):
    """Write tensors as transformers did before safetensors, in so many files with an index."""
    folder.mkdir(parents=True)
    names = list(tensors)
    if count == 1:
        save(folder / "pytorch_model.bin", tensors)
        return folder
    weight_map = {}
    for number in range(count):
        file = f"pytorch_model-{number + 1:05}-of-{count:05}.bin"
        part = names[number::count]
        save(folder / file, {name: tensors[name] for name in part})
        weight_map |= dict.fromkeys(part, file)
    total = sum(words.nbytes for _, words in tensors.values())
    document = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(document))
    return folder
