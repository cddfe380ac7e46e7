"""``.metadata`` of PyTorch's and HyperParallel's distributed checkpoints: a pickled table of boxes.

It is read as data (`pickled`) and written without PyTorch (`pickles`). Both frameworks have the
same classes, in modules of their own; what differs is in `MetadataDialect`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from functools import lru_cache
from math import prod
from typing import Any

from rankxform.errors import FormatError
from rankxform.geometry.box import Box, Shape
from rankxform.values import NamedTuple, dataclass, no_garbage_collection

from .container import ITEM_SIZE, TEXT
from .dcp_containers import TORCH, TORCH_NAMES
from .pickles import PickleWriter, UnbuiltObject, load_pickle

_PART = 1 << 20
_MOST = 1 << 48

_TORCH = "torch.distributed.checkpoint"
_OLD = "torch.distributed._shard.sharded_tensor.metadata"
_HYPER = "hyper_parallel.core.distributed_checkpoint", "hyper_parallel.core.checkpoint"
_MEGATRON = "megatron.core.dist_checkpointing.strategies.torch"

_CLASSES = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata",
    "MetadataIndex", "TensorProperties", "StorageMeta", "StorageInfo", "_StorageInfo",
    "_MEM_FORMAT_ENCODING", "MEM_FORMAT_ENCODING", "SavePlan", "WriteItem", "TensorWriteData",
    "WriteItemType", "MCoreSavePlan", "MCoreMetadata",
)  # fmt: skip
_MODULES = (
    f"{_TORCH}.metadata", f"{_TORCH}.filesystem", f"{_TORCH}.planner", _OLD, _MEGATRON,
    *(f"{package}.{end}" for package in _HYPER for end in ("metadata", "storage")),
)  # fmt: skip
_OTHERS = (
    "torch.Size", "torch.serialization._get_layout", "pathlib.PosixPath", "pathlib.Path",
    "pathlib.PurePosixPath", "collections.OrderedDict",
)  # fmt: skip


def allowed_names(name: str) -> bool:
    """Tell whether a ``.metadata`` may have a name."""
    module, _, short_name = name.rpartition(".")
    return (
        name in _OTHERS
        or (module in _MODULES and short_name in _CLASSES)
        or (module == "torch" and _is_type(short_name))
    )


def _is_type(name: str) -> bool:
    """Tell whether a name is that of a type, known here or not: which is not, is said by name."""
    return name.rstrip("0123456789").split("_")[0] in (
        "float", "bfloat", "int", "uint", "bool", "complex", "quint", "qint", "half", "double",
        "float8", "float4", "bits",
    )  # fmt: skip


class StoredItem(NamedTuple):
    """Where something lies: file, first byte, bytes (-1: not said), and the name that it has there.

    box: of a tensor; None of what is no tensor.
    """

    file: str
    offset: int
    nbytes: int
    key: str
    box: Box | None = None


@dataclass
class DcpMetadata:
    """What a ``.metadata`` says."""

    # Type and full shape, by name.
    tensors: dict[str, tuple[str, Shape]] = field(default_factory=dict)
    # By name where each box of a tensor lies, or what is no tensor.
    items: dict[str, tuple[StoredItem, ...]] = field(default_factory=dict)
    flattened: tuple[str, ...] = ()  # names whose shards are flattened


def parse_dcp_metadata(data: bytes) -> DcpMetadata:
    """Read a ``.metadata``. Raises FormatError that says what is wrong, and of which tensor."""
    with no_garbage_collection():
        return _table(load_pickle(data, allowed_names))


def _table(unbuilt: Any) -> DcpMetadata:
    if not isinstance(unbuilt, UnbuiltObject) or unbuilt.kind.rpartition(".")[2] not in (
        "Metadata",
        "MCoreMetadata",
    ):
        raise FormatError("is no table of a distributed checkpoint")
    version = unbuilt.get("version")
    if version not in (None, "1.0", "1.0.0"):
        raise FormatError(f"is of version {_shown(version)}, and not of 1.0")
    declared_by_name, stored = unbuilt.get("state_dict_metadata"), unbuilt.get("storage_data")
    if type(declared_by_name) is not dict or type(stored) is not dict:
        raise FormatError("lacks state_dict_metadata or storage_data")
    metadata = DcpMetadata()
    chunks: dict[str, dict[Shape, Shape]] = {}
    for name, storage_metadata in declared_by_name.items():
        if type(name) is not str or not isinstance(storage_metadata, UnbuiltObject):
            raise FormatError("names something that is no tensor")
        if storage_metadata.kind.endswith(".TensorStorageMetadata"):
            try:
                metadata.tensors[name], chunks[name] = _tensor(storage_metadata)
            except FormatError as error:
                error.say(error.at(name))
                raise
    boxes: dict[tuple[Shape, Shape], Box] = {}
    lying: dict[str, list[StoredItem]] = {name: [] for name in declared_by_name}
    while stored:  # what was looked at is let go
        index, info = stored.popitem()
        name, item = _item(index, info, chunks, boxes)
        if name not in lying:
            raise FormatError("says where it lies, and not what it is", where=name)
        lying[name].append(item)
    for name, sizes in chunks.items():
        stored_starts = {i.box.start for i in lying[name] if i.box is not None}
        missing_starts = [
            start for start, size in sizes.items() if prod(size) and start not in stored_starts
        ]
        if missing_starts:
            raise FormatError(
                f"box at {missing_starts[0]} is described and nowhere stored", where=name
            )
    metadata.items = {name: tuple(reversed(stored_items)) for name, stored_items in lying.items()}
    mcore_data = unbuilt.get("mcore_data") or {}
    metadata.flattened = tuple(
        name
        for name, properties in (mcore_data.items() if type(mcore_data) is dict else ())
        if type(properties) is dict and "nd_reformulated_orig_global_shape" in properties
    )
    return metadata


def _tensor(storage_metadata: UnbuiltObject) -> tuple[tuple[str, Shape], dict[Shape, Shape]]:
    """Return type and shape of a tensor, and by offset the sizes of its boxes."""
    properties = storage_metadata.get("properties")
    if not isinstance(properties, UnbuiltObject):
        raise FormatError("states no type")
    state = properties.state
    positional_dtype = state[0] if type(state) is tuple and properties.keys is None else None
    dtype = type_of(properties.get("dtype", positional_dtype))
    shape, chunks = _shape(storage_metadata.get("size")), storage_metadata.get("chunks")
    if type(chunks) is not list:
        raise FormatError("states no boxes")
    sizes: dict[Shape, Shape] = {}
    for chunk in chunks:
        if not isinstance(chunk, UnbuiltObject):
            raise FormatError("states no boxes")
        start, size = _shape(chunk.get("offsets")), _shape(chunk.get("sizes"))
        if len(start) != len(shape) or len(size) != len(shape):
            raise FormatError(f"box at {start} of sizes {size} is not of shape {list(shape)}")
        if sizes.setdefault(start, size) != size:
            raise FormatError(f"boxes at {start} have sizes {sizes[start]} and {size}")
    return (dtype, shape), sizes


def _shown(value: Any) -> str:
    """Return a text or a number as it is, and only the kind of anything that may be nested."""
    return str(value) if isinstance(value, (str, int, float)) else f"a {type(value).__name__}"


def type_of(value: Any) -> str:
    """Return the type that a framework names. Raises FormatError."""
    text = _shown(value).removeprefix("torch.")
    dtypes_by_name = {**TORCH, **{name.lower(): name for name in ITEM_SIZE if name != TEXT}}
    if text.lower() not in dtypes_by_name:
        raise FormatError(f"element type {text[:40]} is not known")
    return dtypes_by_name[text.lower()]


@lru_cache(maxsize=1 << 16)
def _check_shape(value: Shape) -> Shape:
    if not all(type(n) is int and 0 <= n < _MOST for n in value):
        raise FormatError("states sizes that are none")
    return value


def _shape(value: Any) -> Shape:
    """Return sizes or a place; most are equal to others."""
    if type(value) is list:
        value = tuple(value)
    try:
        return _check_shape(value)
    except TypeError:
        raise FormatError("states sizes that are none") from None


def _item(
    index: Any,
    info: Any,
    chunks: Mapping[str, Mapping[Shape, Shape]],
    boxes: dict[tuple[Shape, Shape], Box],
) -> tuple[str, StoredItem]:
    """Return a name, and where something of it lies."""
    if not isinstance(index, UnbuiltObject) or not isinstance(info, UnbuiltObject):
        raise FormatError("storage_data is no table of places")
    name, box_offset = index.get("fqn"), index.get("offset")
    file, offset, nbytes = (info.get(key) for key in ("relative_path", "offset", "length"))
    key = info.get("tensor_key") or name
    if type(name) is not str or type(file) is not str or type(key) is not str:
        raise FormatError("names no tensor, or no file, in storage_data")
    if type(offset) is not int or type(nbytes) is not int or not 0 <= offset < _MOST:
        raise FormatError(f"lies at byte {_shown(offset)}, of {_shown(nbytes)} bytes", where=name)
    transforms = info.get("transform_descriptors")
    if transforms:
        raise FormatError(f"stored through transforms {_names_of(transforms)}", where=name)
    sizes = chunks.get(name)
    if sizes is None:
        return name, StoredItem(file, offset, nbytes, key)
    start = _shape(box_offset if box_offset is not None else ())
    if start not in sizes:
        raise FormatError(f"box at {start} is stored and nowhere described", where=name)
    pair = start, sizes[start]
    if pair not in boxes:
        boxes[pair] = Box(start, tuple(a + n for a, n in zip(start, sizes[start])))
    return name, StoredItem(file, offset, nbytes, key, boxes[pair])


def _names_of(transforms: Any) -> Any:
    """Return the names of what a tensor's bytes went through."""
    if type(transforms) is not list:
        return "that are not known"
    named = [t.get("name") if isinstance(t, UnbuiltObject) else t for t in transforms]
    return [_shown(name)[:40] for name in named[:4]]


# -- written --------------------------------------------------------------------------------------


class MetadataDialect(NamedTuple):
    """How a framework writes the table: its modules, its classes' names, and what it keeps."""

    metadata: str
    storage: str
    info: str
    version: str | None
    torch: bool


TORCH_FLAVOR = MetadataDialect(
    f"{_TORCH}.metadata", f"{_TORCH}.filesystem", "_StorageInfo", None, True
)
HYPER_FLAVOR = MetadataDialect(
    f"{_HYPER[0]}.metadata", f"{_HYPER[0]}.storage", "StorageInfo", "1.0", False
)


def format_dcp_metadata(table: DcpMetadata, flavor: MetadataDialect) -> Iterator[bytes]:
    """Yield a ``.metadata`` in parts of some size."""
    writer = PickleWriter()
    writer.push_object(f"{flavor.metadata}.Metadata", None)
    writer.begin_dict()
    writer.values("state_dict_metadata")
    writer.begin_dict()
    for name, items in table.items.items():
        writer.values(name)
        if name in table.tensors:
            _write_tensor(writer, flavor, *table.tensors[name], items)
        else:
            writer.push_object(f"{flavor.metadata}.BytesStorageMetadata", {})
        yield from _large(writer)
    writer.end_dict()
    writer.values("planner_data")
    writer.begin_dict()
    for name in table.items:
        writer.values(name, (name,))
    writer.end_dict()
    writer.values("storage_data")
    writer.begin_dict()
    for name, items in table.items.items():
        for number, item in enumerate(items):
            _write_place(writer, flavor, name, number, item)
            yield from _large(writer)
    writer.end_dict()
    if flavor.torch:
        writer.values("storage_meta", None)
    writer.values("version", flavor.version)
    writer.end_dict()
    writer.build()
    yield writer.stop()


def _large(writer: PickleWriter) -> Iterable[bytes]:
    return [writer.taken()] if writer.size > _PART else ()


def _write_tensor(
    writer: PickleWriter,
    flavor: MetadataDialect,
    dtype: str,
    shape: Shape,
    items: Iterable[StoredItem],
) -> None:
    writer.push_object(f"{flavor.metadata}.TensorStorageMetadata", None)
    writer.begin_dict()
    writer.values("properties")
    writer.push_object(f"{flavor.metadata}.TensorProperties", None)
    if flavor.torch:
        writer.mark()
        writer.name(f"torch.{TORCH_NAMES[dtype]}")
        _call(writer, "torch.serialization._get_layout", "torch.strided")
        writer.values(False)
        _call(writer, f"{flavor.metadata}._MEM_FORMAT_ENCODING", 0)
        writer.values(False)
        writer.tuple()
    else:
        writer.begin_dict()
        dtype = f"torch.{TORCH_NAMES[dtype]}"
        writer.values("dtype", dtype, "requires_grad", False, "memory_format", None)
        writer.end_dict()
    writer.build()
    writer.values("size")
    _size(writer, flavor, shape)
    writer.values("chunks")
    writer.begin_list()
    for item in items:
        assert item.box is not None
        writer.push_object(f"{flavor.metadata}.ChunkStorageMetadata", None)
        writer.begin_dict()
        writer.values("offsets")
        _size(writer, flavor, item.box.start)
        writer.values("sizes")
        _size(writer, flavor, item.box.shape)
        writer.end_dict()
        writer.build()
    writer.end_list()
    writer.end_dict()
    writer.build()


def _write_place(
    writer: PickleWriter, flavor: MetadataDialect, name: str, number: int, item: StoredItem
) -> None:
    writer.push_object(f"{flavor.metadata}.MetadataIndex", None)
    writer.begin_dict()
    writer.values("fqn", name, "offset")
    if item.box is not None:
        _size(writer, flavor, item.box.start)
    else:
        writer.values(None if flavor.torch else ())
    writer.values("index", number if item.box is not None or not flavor.torch else None)
    writer.end_dict()
    writer.build()
    place = {"relative_path": item.file, "offset": item.offset, "length": item.nbytes}
    if not flavor.torch:
        place["tensor_key"] = item.key if item.box is not None else None
    writer.push_object(f"{flavor.storage}.{flavor.info}", place)


def _size(writer: PickleWriter, flavor: MetadataDialect, shape: Shape) -> None:
    if flavor.torch:
        _call(writer, "torch.Size", shape)
    else:
        writer.values(shape)


def _call(writer: PickleWriter, name: str, *args: object) -> None:
    writer.name(name)
    writer.values(args)
    writer.reduce()
