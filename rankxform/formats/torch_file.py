"""Files of `torch.save`, read as data: a ZIP with a pickle, and a member for each storage.

::

    archive/data.pkl     {name: a call that would make a tensor of a storage, from an element on}
    archive/data/0 ...   storages: elements one after another, as they were in memory
    archive/byteorder    little

Nothing that the pickle names is called (`formats.pickles`). A tensor is a view of a storage, which
others may share; what does not lie there row by row is read by runs, if these are long enough. No
such file is written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from rankxform.errors import FormatError, RequestError
from rankxform.geometry.box import Shape
from rankxform.layout.names import is_extra_state
from rankxform.values import crc32

from .ckpt import crc_of
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
    file_signature,
    item_size,
)
from .dcp_containers import (
    StorageView,
    ZipDirectory,
    ZipReader,
    allowed_names,
    row_strides,
    storage_view,
)
from .pickles import GlobalName, UnbuiltObject, load_pickle

_PARAMETERS = "torch._utils._rebuild_parameter", "torch._utils._rebuild_parameter_with_state"
_OF_TYPE = "torch._tensor._rebuild_from_type_v2"
_PLAIN_TYPES = "torch.Tensor", "torch.nn.parameter.Parameter", "torch.nn.parameter.Buffer"
_ALSO = (*_PARAMETERS, _OF_TYPE, *_PLAIN_TYPES, "torch.Size", "torch.device")
_MOST_PICKLE = 64 << 20
_NESTED, _DEEP, _LONG = 2, 4, 64
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
        reader = ZipReader(read_at, size)
        first = reader.bytes(0, min(size, FIRST_BYTES))
        if first.startswith(_LEGACY):
            raise FormatError("is a stream of torch.save before 1.6, without a directory", _AGAIN)
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
        try:
            saved = load_pickle(words, _is_allowed, deepest=_DEEP, longest=_LONG)
        except FormatError as error:  # of what is no plain tensor, by the name that it has there
            raise FormatError(error.what, "save a state_dict() of plain tensors") from None
        places: dict[str, Span] = {}
        entries: list[ParsedEntry] = []
        runs = 0
        for name, call in _tensors_of(saved).items():
            entries.append(_entry(name, call, reader, directory, places))
            runs += len(entries[-1].spans) - 1
            if runs > _MOST_IN_ALL:
                text = f"{name!r}: so many tensors are not stored row by row"
                raise FormatError(text, "save them .contiguous()")
        return build_index(entries, size, has_checksum=True)

    def checksums(
        self, index: Index, read_at: ReadAt, blocks: Blocks
    ) -> Sequence[tuple[str, str, str]]:
        """Return the CRC-32 of every storage; torch states none of what it was told to skip."""
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


def _is_allowed(name: str) -> bool:
    return name in _ALSO or allowed_names(name)


def _tensors_of(saved: Any) -> Mapping[str, UnbuiltObject]:
    """Return the calls that make tensors, by name, of a state dict or the only one below a key.

    Raises FormatError.
    """
    if type(saved) is not dict:
        kind = saved.kind if isinstance(saved, UnbuiltObject) else type(saved).__name__
        raise FormatError(f"holds one {kind}, and no tensors by name", "save its state_dict()")
    keys = [key for key in _WRAPPED if type(saved.get(key)) is dict]
    has_tensors = any(isinstance(value, UnbuiltObject) for value in saved.values())
    if len(keys) > 1 or not (keys or has_tensors):
        keys_text = ", ".join(repr(key)[:40] for key in [*saved][:3]) or "nothing"
        text = f"has no tensors by name, but {keys_text}"
        raise FormatError(text, "save the state_dict alone")
    if keys:
        saved = saved[keys[0]]
    tensors = {}
    for name, call in saved.items():
        if type(name) is not str:
            raise FormatError(f"names {name!r}, which is no text")
        if is_extra_state(name):
            continue
        if not isinstance(call, UnbuiltObject):
            kind = type(call).__name__
            raise FormatError(f"{name!r} is a {kind} and no tensor", "save the state_dict alone")
        tensors[name] = call
    return tensors


def _entry(
    name: str,
    call: UnbuiltObject,
    reader: ZipReader,
    directory: ZipDirectory,
    places: dict[str, Span],
) -> ParsedEntry:
    """Return a tensor, and where its elements lie. Raises FormatError, which names it."""
    try:
        key, dtype, stored, first, shape, strides, _ = _view_of(call)
        if key not in places:
            member = directory.members.get(f"data/{key}")
            if member is None:
                raise FormatError(f"its elements, data/{key}, are not in the file")
            places[key] = Span(reader.place(directory, member), member.nbytes)
        place, item = places[key], item_size(dtype)
        if stored > place.nbytes:
            raise FormatError(f"data/{key} has {place.nbytes:,} bytes, and {stored:,} are stated")
        last = first + sum((n - 1) * step for n, step in zip(shape, strides))
        if prod(shape) and (last + 1) * item > stored:
            raise FormatError(f"it ends at element {last + 1:,} of {stored // item:,}")
        spans = tuple(
            Span(place.offset + start * item, length * item)
            for start, length in _runs(first, shape, strides, item)
        )
    except (AttributeError, IndexError, KeyError, TypeError, ValueError):
        raise FormatError(f"{name!r} is made in a way that is not known") from None
    except FormatError as error:
        raise FormatError(f"{name!r}: {error.what}", *error.tries) from None
    return ParsedEntry(name, dtype, shape, spans)


def _view_of(call: UnbuiltObject) -> StorageView:
    """Return what a call says that makes a tensor. Raises FormatError, and others of nonsense."""
    for _ in range(_NESTED):
        call = call.args[0] if call.kind in _PARAMETERS else call
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
