"""Files of `torch.save`, read as data: a ZIP with a pickle, and a member for each storage.

::

    archive/data.pkl     {name: a call that would make a tensor of a storage, from an element on}
    archive/data/0 ...   storages: elements one after another, as they were in memory
    archive/byteorder    little

Before torch 1.6 it was a stream: five pickles, of which the fourth is the value and the last a list
of storages, and these in that order, each behind its number of elements.

Nothing that the pickle names is called (`formats.pickles`). A tensor is a view of a storage, which
others may share; what does not lie there row by row is read by runs, if these are long enough. What
a rank's file says beside its tensors goes into the metadata of its index, as JSON: under `BOXES`
which box of a tensor it has (`formats.dtensors`), under `TRAINING` the arguments of Megatron's
training, and under `SUMS` CRC-32s. No such file is written.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from rankxform.errors import FormatError, RequestError
from rankxform.geometry.box import Shape
from rankxform.layout.layout import MOST_RANKS
from rankxform.layout.names import is_extra_state
from rankxform.values import NamedTuple, crc32

from .container import (
    FIRST_BYTES,
    Blocks,
    Container,
    FileLayout,
    Index,
    ParsedEntry,
    ReadAt,
    Span,
    TensorSpec,
    build_index,
    crc_of,
    file_signature,
    item_size,
)
from .dcp_containers import (
    STORAGES,
    UNTYPED,
    StorageView,
    ZipDirectory,
    ZipReader,
    allowed_names,
    row_strides,
    storage_view,
)
from .dtensors import DTENSOR_NAMES, WRAPPER, LocalPart, is_dtensor, local_part
from .pickles import PERSISTENT, GlobalName, UnbuiltObject, load_pickles

BOXES, SUMS, TRAINING = "boxes", "sums", "training"
"""What the metadata of an index have of a rank's file, the first two by position."""
DEGREES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size",
)  # fmt: skip
"""Arguments of Megatron's training whose product is a number of ranks."""

_PARAMETERS = "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
_PLAIN_TYPES = "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"
_ALSO = (*_PARAMETERS, _OF_TYPE, *_PLAIN_TYPES, "torch.Size", "torch.device", *DTENSOR_NAMES)
_ARGUMENTS = "argparse.Namespace"
_INERT = frozenset((
    _ARGUMENTS, "_codecs.encode", "_io.BytesIO", "collections.Counter", "collections.defaultdict",
    "datetime.date", "datetime.datetime", "datetime.timedelta", "datetime.timezone",
    "functools.partial", "numpy.ndarray", "numpy.dtype",
    *(f"numpy.{core}.multiarray.{name}" for core in ("core", "_core")
      for name in ("_reconstruct", "scalar")),
    *(f"{module}.{name}" for module in ("builtins", "__builtin__")
      for name in ("set", "frozenset", "complex", "bytearray", "slice")),
))  # fmt: skip
_INERT_MODULES = "megatron.", "mindspeed", "omegaconf.", "pathlib."
_KEPT_BESIDE = (
    "args", "rng_state", "optimizer", "optimizer_state_dict", "opt_param_scheduler",
    "lr_scheduler", "scheduler", "rerun_state_machine", "content_metadata",
)  # fmt: skip
"""What a training keeps beside a model: names of classes may stand there, of which nothing is
made."""
_MOST_PICKLE, _FIRST_PICKLES = 64 << 20, 1 << 20
_PICKLES, _PROTOCOL, _MOST_ELEMENTS = 5, 1001, 1 << 48
"""Of a stream: how many it begins with, and what the second one says."""
_NESTED, _DEEP, _LONG = 2, 32, 1 << 16
"""Calls for a parameter around a tensor; how deep tuples are in each other, and how long."""
_MOST_RUNS, _SHORT_RUN, _MOST_SHORT = 1 << 16, 64, 1 << 12
"""Runs of a tensor that is not stored row by row; and those of a few bytes."""
_MOST_IN_ALL = 1 << 18
_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19"
_WRAPPED = "state_dict", "model_state_dict", "model", "module"
"""Keys below which a training keeps its model's tensors."""
_PROGRAM = "is a program of TorchScript", "save the model's state_dict()"
_AGAIN = "torch.save(torch.load(PATH, weights_only=True), PATH), in a newer torch"


class TorchFile(Container):
    """A file of torch.save (`formats.container.Container`)."""

    name = "bin"
    alone = False
    has_equal_headers = False

    def read_index(self, read_at: ReadAt, size: int) -> Index:
        saved, members = _read_saved(read_at, size)
        storages = _Storages(members)
        entries: list[ParsedEntry] = []
        runs = 0
        for name, call in _tensors_of(saved).items():
            entries.append(storages.entry(name, call))
            runs += len(entries[-1].spans) - 1
            if runs > _MOST_IN_ALL:
                text = f"{name!r}: so many tensors are not stored row by row"
                raise FormatError(text, "save them .contiguous()")
        training = _training_of(saved)
        boxes = storages.boxes if any(storages.boxes) else []
        documents = {BOXES: boxes, SUMS: storages.sums, TRAINING: training}
        metadata = {key: json.dumps(value) for key, value in documents.items() if value}
        ranks = prod(training.get(degree) or 1 for degree in DEGREES) if training else 1
        wrong = {
            entry.name: f"is one rank's part of {list(box[0]) if box else 'it'}; name the folder "
            "of all ranks"
            for entry, box in zip(entries, storages.boxes)
            if ranks > 1 or (box is not None and box[0] != entry.shape)
        }
        has_checksum = isinstance(members, _ZipMembers)
        return build_index(entries, size, has_checksum=has_checksum, metadata=metadata, wrong=wrong)

    def checksums(
        self, index: Index, read_at: ReadAt, blocks: Blocks
    ) -> Sequence[tuple[str, str, str]]:
        """Return the CRC-32 of every storage; torch states none of what it was told to skip."""
        if not index.has_checksum:
            return []
        reader = ZipReader(read_at, index.size)
        directory = reader.directory(0, index.size)
        members = [(n, m) for n, m in directory.members.items() if n.startswith("data/") and m.crc]
        return [
            (
                f"{name}: CRC-32",
                f"{member.crc:08x}",
                f"{crc_of(blocks, [Span(reader.place(directory, member), member.nbytes)]):08x}",
            )
            for name, member in members
        ]

    def lay_out(
        self,
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        checksum: bool,
        begins: int = 0,
    ) -> FileLayout:
        raise RequestError("files of torch.save are read, and not written")


class PtFile(TorchFile):
    """The same, by its other usual suffix."""

    name = "pt"


class PthFile(TorchFile):
    """The same, as Meta and others call it."""

    name = "pth"


class _SavedFile(NamedTuple):
    """What a file holds, as data, and where its storages lie."""

    value: Any
    members: _ZipMembers | _StreamMembers


class _ZipMembers:
    """Storages as members of a ZIP."""

    def __init__(self, reader: ZipReader, directory: ZipDirectory) -> None:
        self._reader, self._directory = reader, directory
        self._places: dict[str, Span] = {}

    def place(self, key: str) -> tuple[Span, int]:
        """Return where a storage lies in the file, and its CRC-32, or 0. Raises FormatError."""
        member = self._directory.members.get(f"data/{key}")
        if member is None:
            raise FormatError(f"its elements, data/{key}, are not in the file")
        if key not in self._places:
            self._places[key] = Span(self._reader.place(self._directory, member), member.nbytes)
        return self._places[key], member.crc


class _StreamMembers:
    """Storages one after another behind the pickles, each behind its number of elements."""

    def __init__(self, places: Mapping[str, Span]) -> None:
        self._places = places

    def place(self, key: str) -> tuple[Span, int]:
        """Return where a storage lies in the file, and no CRC-32. Raises FormatError."""
        if key not in self._places:
            raise FormatError(f"its elements, storage {key}, are not in the file")
        return self._places[key], 0


def _read_saved(read_at: ReadAt, size: int) -> _SavedFile:
    """Return what a file holds, as data, and where its storages lie. Raises FormatError."""
    reader = ZipReader(read_at, size)
    first = reader.bytes(0, min(size, FIRST_BYTES))
    if first.startswith(_LEGACY):
        return _read_stream(read_at, size)
    if first[:4] != b"PK\3\4":
        signature = None if first[:1] == b"\x80" else file_signature(first)
        if signature is not None:
            raise FormatError(f"is {signature.title}", *signature.tries)
        raise FormatError("is no file of torch.save", "copy it again")
    try:
        directory = reader.directory(0, size)
    except FormatError as error:
        raise FormatError(*_PROGRAM) if "'code/" in error.what else error from None
    if directory.start:
        raise FormatError(f"begins with {directory.start:,} bytes that belong to no member")
    if "data.pkl" not in directory.members or "constants.pkl" in directory.members:
        raise FormatError(*_PROGRAM)
    data = directory.members["data.pkl"]
    if data.nbytes > _MOST_PICKLE:
        raise FormatError(f"has a pickle of {data.nbytes:,} bytes; tables of names are smaller")
    order = directory.members.get("byteorder")
    if order and read_at(reader.place(directory, order), min(order.nbytes, 16)) != b"little":
        raise FormatError("has elements in another byte order", "save it on another machine")
    words = read_at(reader.place(directory, data), data.nbytes)
    if data.crc and crc32(words) != data.crc:
        raise FormatError("has a pickle with another CRC-32 than is stated", "copy it again")
    (saved,), _ = _load(words, 1)
    return _SavedFile(saved, _ZipMembers(reader, directory))


def _load(words: bytes, count: int) -> tuple[list[Any], int]:
    """Return what pickles hold, and where the last one ends. Raises FormatError."""
    try:
        return load_pickles(words, _is_allowed, count, deepest=_DEEP, longest=_LONG)
    except FormatError as error:  # of what is no plain tensor, by the name that it has there
        raise FormatError(error.what, "save a state_dict() of plain tensors") from None


def _read_stream(read_at: ReadAt, size: int) -> _SavedFile:
    """Read a file of torch before 1.6: five pickles, and storages in the order of the last one.

    Raises FormatError.
    """
    nbytes = min(size, _FIRST_PICKLES)
    while True:
        try:
            values, end = _load(read_at(0, nbytes), _PICKLES)
            break
        except FormatError:
            if nbytes >= min(size, _MOST_PICKLE):
                raise
            nbytes = min(size, _MOST_PICKLE, 8 * nbytes)
    _, protocol, system, saved, keys = values
    is_little = type(system) is dict and system.get("little_endian") is True
    if protocol != _PROTOCOL or not is_little or type(keys) is not list:
        raise FormatError("is a stream of torch.save of another version, or byte order", _AGAIN)
    items = _item_sizes(saved)
    places: dict[str, Span] = {}
    for key in keys:
        if type(key) is not str or key not in items or key in places:
            raise FormatError(f"lists a storage {key!r} that no tensor is of, or twice", _AGAIN)
        count = int.from_bytes(read_at(end, 8), "little", signed=True)
        places[key] = Span(end + 8, count * items[key])
        end += 8 + count * items[key]
        if not 0 <= count < _MOST_ELEMENTS or end > size:
            raise FormatError(f"ends within storage {key}, of {count:,} elements", "copy it again")
    return _SavedFile(saved, _StreamMembers(places))


def _item_sizes(saved: Any) -> dict[str, int]:
    """Return by storage the bytes of an element, of all that a value speaks of.

    Every value is looked at once. Raises FormatError for one that is of no type, or of two.
    """
    items: dict[str, int] = {}
    todo, looked_at = [saved], set[int]()
    while todo:
        value = todo.pop()
        if id(value) in looked_at:
            continue
        looked_at.add(id(value))
        if isinstance(value, UnbuiltObject):
            if value.kind == PERSISTENT and type(value.args) is tuple and len(value.args) > 2:
                kind, key = value.args[1:3]
                name = str(kind).removeprefix("torch.").removesuffix("Storage")
                item = 1 if kind == UNTYPED else item_size(STORAGES.get(name, ""))
                if type(key) is str and items.setdefault(key, item) != item:
                    raise FormatError(f"has storage {key} of two types", "save it again")
            todo += value.args if type(value.args) is tuple else [value.args]
            todo += value.state.values() if type(value.state) is dict else [value.state]
        elif type(value) is dict:
            todo += value.values()
        elif type(value) in (list, tuple):
            todo += value
    return items


def read_training(read_at: ReadAt, size: int) -> dict[str, Any]:
    """Return the arguments that Megatron's training kept, in whatever file of torch.save.

    Raises FormatError.
    """
    return _training_of(_read_saved(read_at, size).value)


def _is_allowed(name: str) -> bool:
    return name in _ALSO or allowed_names(name) or name in _INERT or name.startswith(_INERT_MODULES)


def _tensors_of(saved: Any) -> Mapping[str, UnbuiltObject]:
    """Return the calls that make tensors, by name, of a state dict or the only one below a key.

    Names of the parts of Megatron's virtual pipeline begin with their own, as ``model0.``. Raises
    FormatError.
    """
    if type(saved) is not dict:
        kind = saved.kind if isinstance(saved, UnbuiltObject) else type(saved).__name__
        raise FormatError(f"holds one {kind}, and no tensors by name", "save its state_dict()")
    keys = [key for key in _WRAPPED if type(saved.get(key)) is dict]
    parts = [f"model{number}" for number in range(len(saved)) if f"model{number}" in saved]
    own_keys = [key for key in saved if key not in _KEPT_BESIDE]
    has_tensors = any(isinstance(saved[key], UnbuiltObject) for key in own_keys)
    if len(keys) > 1 or (keys and parts) or not (keys or parts or has_tensors):
        keys_text = ", ".join(repr(key)[:40] for key in [*saved][:3]) or "nothing"
        text = f"has no tensors by name, but {keys_text}"
        raise FormatError(text, "save the state_dict alone")
    _check_beside(saved, (*keys, *parts))
    if parts:
        tensors_by_part = {f"{part}.": saved[part] for part in parts}
    elif keys:
        tensors_by_part = {"": saved[keys[0]]}
    else:
        tensors_by_part = {"": {key: saved[key] for key in own_keys}}
    tensors = {}
    for part, calls in tensors_by_part.items():
        for name, call in calls.items():
            if type(name) is not str:
                raise FormatError(f"names {name!r}, which is no text")
            if is_extra_state(name):
                continue
            if not isinstance(call, UnbuiltObject):
                kind = type(call).__name__
                raise FormatError(
                    f"{name!r} is a {kind} and no tensor", "save the state_dict alone"
                )
            tensors[part + name] = call
    return tensors


def _check_beside(saved: Mapping[Any, Any], model_keys: Collection[str]) -> None:
    """Refuse an object that nobody makes beside a model, but where a training keeps its own.

    Every value is looked at once. Raises FormatError, which names it.
    """
    unread_keys = {*_KEPT_BESIDE, *model_keys}
    todo = [value for key, value in saved.items() if key not in unread_keys]
    looked_at = set[int]()
    while todo:
        value = todo.pop()
        if id(value) in looked_at:
            continue
        looked_at.add(id(value))
        if isinstance(value, UnbuiltObject) and (
            value.kind in _INERT or value.kind.startswith(_INERT_MODULES)
        ):
            raise FormatError(f"has a {value.kind} beside its tensors", "save the state_dict alone")
        if type(value) is dict:
            todo += value.values()
        elif type(value) in (list, tuple):
            todo += value


def _training_of(saved: Any) -> dict[str, Any]:
    """Return what Megatron's training kept of its arguments; {} of any other file."""
    arguments = saved.get("args") if type(saved) is dict else None
    if not isinstance(arguments, UnbuiltObject) or arguments.kind != _ARGUMENTS:
        return {}
    state = arguments.state if type(arguments.state) is dict else {}
    plain = (bool, int, float, str, type(None))
    training = {n: value for n, value in state.items() if type(n) is str and type(value) in plain}
    for name in ("checkpoint_version", "iteration"):
        if name in saved and type(saved[name]) in plain:
            training[name] = saved[name]
    for name in (*DEGREES, "expert_tensor_parallel_size"):
        degree = training.get(name)
        if degree is not None and (type(degree) is not int or not 0 < degree <= MOST_RANKS):
            raise FormatError(f"args: {name} is {degree!r}, and expected is a number of ranks")
    training["optimizer"] = "optimizer" in saved
    return training


class _Storages:
    """The members of a file with elements, and the tensors that are views of them.

    boxes: of each tensor that is read, in order, the shape of the whole and where its part begins;
    None of a plain tensor. sums: its CRC-32, if its member has one and holds nothing else.
    """

    def __init__(self, members: _ZipMembers | _StreamMembers) -> None:
        self._members = members
        self.boxes: list[tuple[Shape, Shape] | None] = []
        self.sums: list[int | None] = []

    def entry(self, name: str, call: UnbuiltObject) -> ParsedEntry:
        """Return a tensor, and where its elements lie. Raises FormatError, which names it."""
        try:
            part = _local_part(call)
            view = _view_of(call if part is None else part.call)
            if part is not None and part.local_shape != view.shape:
                text = f"is {list(view.shape)}, and its mesh makes it {list(part.local_shape)}"
                raise FormatError(text, "save it again")
            place, crc = self._members.place(view.key)
            item, first, shape, strides = (
                item_size(view.dtype),
                view.first,
                view.shape,
                view.strides,
            )
            if view.stored > place.nbytes:
                has = f"data/{view.key} has {place.nbytes:,} bytes"
                raise FormatError(f"{has}, and {view.stored:,} are stated")
            last = first + sum((n - 1) * step for n, step in zip(shape, strides))
            if prod(shape) and (last + 1) * item > view.stored:
                raise FormatError(f"it ends at element {last + 1:,} of {view.stored // item:,}")
            spans = tuple(
                Span(place.offset + start * item, length * item)
                for start, length in _runs(first, shape, strides, item)
            )
        except (AttributeError, IndexError, KeyError, TypeError, ValueError):
            raise FormatError(f"{name!r} is made in a way that is not known") from None
        except FormatError as error:
            raise FormatError(f"{name!r}: {error.what}", *error.tries) from None
        self.boxes.append(None if part is None else (part.shape, part.start))
        self.sums.append(crc if spans == (place,) and crc else None)
        return ParsedEntry(name, view.dtype, shape, spans)


def _local_part(call: UnbuiltObject) -> LocalPart | None:
    """Return what a call says that makes a rank's part of a tensor; None of a plain tensor."""
    call = _within_parameters(call)
    if call.kind != _OF_TYPE or call.args[0] != WRAPPER or not is_dtensor(call.args[1]):
        return None
    return local_part(call.args[3])


def _within_parameters(call: UnbuiltObject) -> UnbuiltObject:
    for _ in range(_NESTED):
        call = call.args[0] if call.kind in _PARAMETERS else call
    return call


def _view_of(call: UnbuiltObject) -> StorageView:
    """Return what a call says that makes a tensor. Raises FormatError, and others of nonsense."""
    call = _within_parameters(call)
    if call.kind == _OF_TYPE:
        function, kind, args, _ = call.args
        if type(function) is not GlobalName or type(kind) is not GlobalName:
            raise TypeError
        if kind not in _PLAIN_TYPES:
            raise FormatError(f"is a {kind}, and no plain tensor", "save it as plain tensors")
        call = UnbuiltObject(function, args)
    view = storage_view(call)
    if view.is_conjugate:
        raise FormatError("is stored as a conjugate or a negative", "resolve_conj() it first")
    if len(view.shape) != len(view.strides):
        raise TypeError
    return view


def _runs(first: int, shape: Shape, strides: Shape, item: int) -> Iterator[tuple[int, int]]:
    """Yield the runs of elements that a view consists of, in the order of its rows.

    >>> list(_runs(0, (2, 3), (4, 1), 4))
    [(0, 3), (4, 3)]
    """
    if not prod(shape):
        return
    inner, axis, plain = 1, len(shape), row_strides(shape)
    while axis and (shape[axis - 1] == 1 or strides[axis - 1] == plain[axis - 1]):
        axis -= 1
        inner *= shape[axis]
    count = prod(shape[:axis])
    if count > (_MOST_SHORT if inner * item < _SHORT_RUN else _MOST_RUNS):
        raise FormatError(
            f"is stored with strides {list(strides)}, not row by row", "save its .contiguous()"
        )
    for place in product(*map(range, shape[:axis])):
        yield first + sum(n * step for n, step in zip(place, strides)), inner
