"""Containers of the DCP family: .distcp and .bytes.

A .distcp file is a row of items. Each is a ZIP that `torch.save` wrote, of a tensor or of anything
else that is pickled.
Where they begin only the checkpoint's ``.metadata`` says; they are found from the file's end, since
every ZIP's end says where it began. Entries are named by their first byte in the file, which is how
``.metadata`` names them; what the tensors are called, only that knows. Instead of tensors' ZIPs a
safetensors file may stand at the end.

::

    archive/data.pkl      a pickle: type, sizes, strides
    archive/byteorder     little
    archive/data/0        the elements, row by row
    archive/version       3

Layout: APPNOTE.TXT of PKWARE; what torch reads and writes was established with torch 2.6 to 2.14.

A .bytes file is a row of opaque items. Only the checkpoint's ``.metadata`` says where each begins
and ends; the file itself is one entry.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from zlib import crc32

from rankxform.errors import FormatError, RequestError
from rankxform.formats import safetensors
from rankxform.geometry.box import Shape
from rankxform.values import NamedTuple

from .container import (
    BLOCK,
    BYTES,
    TEXT,
    Blocks,
    Container,
    ContentTail,
    FileLayout,
    Index,
    ReadAt,
    Schema,
    Span,
    TensorSpec,
    content_bytes,
    crc_of,
)
from .pickles import PERSISTENT, GlobalName, PickleWriter, UnbuiltObject, load_pickle

STORAGES = {
    "Double": "Float64", "Float": "Float32", "Half": "Float16", "BFloat16": "BFloat16",
    "Long": "Int64", "Int": "Int32", "Short": "Int16", "Char": "Int8", "Byte": "UInt8",
    "Bool": "Bool",
}  # fmt: skip
TORCH = {
    "float64": "Float64", "float32": "Float32", "float16": "Float16", "bfloat16": "BFloat16",
    "int64": "Int64", "int32": "Int32", "int16": "Int16", "int8": "Int8", "uint8": "UInt8",
    "uint16": "UInt16", "uint32": "UInt32", "uint64": "UInt64", "bool": "Bool",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
}  # fmt: skip
"""torch's types, by the names that they have there."""
TORCH_NAMES = {dtype: name for name, dtype in TORCH.items()}

REBUILD = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
UNTYPED = "torch.storage.UntypedStorage"

_EOCD, _DIRECTORY, _LOCAL = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_EOCD64, _LOCATOR, _DESCRIPTOR = b"PK\6\6", b"PK\6\7", b"PK\7\x08"
_ZIP_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_HEAD = struct.Struct("<4s5H3I2H")
_FULL = 0xFFFFFFFF
_MOST_MEMBERS = 1 << 20
_MOST_DIRECTORY = 128 << 20


class ZipMember(NamedTuple):
    """One file of a ZIP: where its local header is, from the ZIP's start; its bytes, and CRC-32."""

    header_offset: int
    nbytes: int
    crc: int
    title: bytes  # its name, with the folder


class ZipDirectory(NamedTuple):
    """The end of a ZIP: where it starts and ends in the file, and its members by name."""

    start: int
    end: int
    members: Mapping[str, ZipMember]


def read_zip_directory(data: bytes, end: int) -> ZipDirectory | int | None:
    """Return the end of a ZIP that ends at byte `end` of a file, of which `data` are the last.

    Returns how many more bytes are needed if `data` are too few, None if it is no ZIP's end. Raises
    FormatError for one that makes no sense.
    """
    eocd_start = len(data) - _ZIP_END.size
    if eocd_start < 0 or data[eocd_start : eocd_start + 4] != _EOCD:
        return None
    *_, count, size, offset, comment = _ZIP_END.unpack_from(data, eocd_start)
    if comment:
        return None
    end64_bytes = _END64.size + 20 if data[max(0, eocd_start - 20) :][:4] == _LOCATOR else 0
    if end64_bytes:  # torch writes it whatever the sizes
        if eocd_start < end64_bytes:
            return end64_bytes + _ZIP_END.size
        if data[eocd_start - end64_bytes : eocd_start - end64_bytes + 4] != _EOCD64:
            raise FormatError(f"the ZIP that ends at byte {end:,} has no 64-bit end")
        *_, count, size, offset = _END64.unpack_from(data, eocd_start - end64_bytes)
    elif _FULL in (size, offset):
        raise FormatError(f"the ZIP that ends at byte {end:,} has no 64-bit end")
    need = size + end64_bytes + _ZIP_END.size
    start = end - need - offset
    if start < 0 or count > _MOST_MEMBERS or size > _MOST_DIRECTORY:
        raise FormatError(f"the ZIP that ends at byte {end:,} states sizes beyond the file")
    if need > len(data):
        return int(need)
    return ZipDirectory(
        start, end, _members(data[len(data) - need : len(data) - need + size], count)
    )


def _members(directory: bytes, count: int) -> dict[str, ZipMember]:
    members: dict[str, ZipMember] = {}
    position = 0
    for _ in range(count):
        if directory[position : position + 4] != _DIRECTORY:
            raise FormatError("the directory of a ZIP is damaged")
        try:
            fields = _ENTRY.unpack_from(directory, position)
        except struct.error:
            raise FormatError("the directory of a ZIP is cut off") from None
        method, crc, stored, nbytes = fields[4], *fields[7:10]
        name_size, extra_size, comment = fields[10:13]
        local = fields[16]
        position += _ENTRY.size
        title = directory[position : position + name_size]
        name = title.decode(errors="replace").partition("/")[2]
        extra = directory[position + name_size : position + name_size + extra_size]
        position += name_size + extra_size + comment
        if _FULL in (nbytes, stored, local):
            nbytes, stored, local = _wide(extra, nbytes, stored, local)
        if method or stored != nbytes:
            raise FormatError(f"{name!r} in a ZIP is compressed; torch stores tensors as they are")
        if name in members:
            raise FormatError(f"{name!r} is twice in a ZIP")
        members[name] = ZipMember(local, nbytes, crc, title)
    return members


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Return values, of which those that do not fit 32 bits are in an extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1 and position + 4 + size <= len(extra):
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, position + 4))
            return tuple(next(wide, value) if value == _FULL else value for value in values)
        position += 4 + size
    return values


def content_at(head: bytes, member: ZipMember) -> int | None:
    """Return where a member's content is, from its ZIP's start; None if `head` is too short."""
    if len(head) < member.header_offset + _HEAD.size:
        return None
    header_fields = _HEAD.unpack_from(head, member.header_offset)
    mark, _, flags, method, *_, nbytes, name_size, extra_size = header_fields
    if mark != _LOCAL:
        raise FormatError("a member of a ZIP is not where its directory says")
    begin = member.header_offset + _HEAD.size
    title = head[begin : begin + name_size]
    is_sized = not flags & _FLAG and nbytes != _FULL  # else it is said behind the content
    if title != member.title[: len(title)] or method or (is_sized and nbytes != member.nbytes):
        raise FormatError("a member of a ZIP is not as its directory says; the file is damaged")
    return int(begin + name_size + extra_size)


def allowed_names(name: str) -> bool:
    """Tell whether a tensor's pickle may have a name."""
    module, _, short_name = name.rpartition(".")
    return (
        name in (*REBUILD, _PARAMETER, UNTYPED, "collections.OrderedDict")
        or (module == "torch" and short_name.removesuffix("Storage") in STORAGES)
        or (module == "torch" and short_name in TORCH)
    )


class TensorPickle(NamedTuple):
    """What a data.pkl says of a tensor: its type and shape; wrong: why it cannot be read."""

    dtype: str
    shape: Shape
    wrong: str = ""


def read_tensor_pickle(data: bytes) -> TensorPickle:
    """Read a data.pkl. Raises FormatError for one that is no plain tensor's."""
    unbuilt = load_pickle(data, allowed_names)
    if isinstance(unbuilt, UnbuiltObject) and unbuilt.kind == _PARAMETER and unbuilt.args:
        unbuilt = unbuilt.args[0]
    try:
        return _plain(unbuilt)
    except (AttributeError, IndexError, TypeError, ValueError):
        raise FormatError("has a data.pkl that is no tensor's") from None


def _plain(unbuilt: UnbuiltObject) -> TensorPickle:
    """Return what a call says that makes a tensor. Raises FormatError, and others of nonsense."""
    view = storage_view(unbuilt)
    if view.key != "0":
        raise FormatError(f"is a tensor of a storage that is not known ({view.key})")
    return TensorPickle(view.dtype, view.shape, _wrong(view))


class StorageView(NamedTuple):
    """A tensor as torch keeps it: elements of a storage."""

    key: str  # of the storage's member
    dtype: str
    stored: int  # bytes that are stated of the storage
    first: int  # element
    shape: Shape
    strides: Shape  # in elements
    is_conjugate: bool  # or negative: its values are others than those that are stored


def storage_view(unbuilt: UnbuiltObject) -> StorageView:
    """Return what a call says that makes a tensor. Raises FormatError, and others of nonsense."""
    if unbuilt.kind not in REBUILD:
        raise FormatError(
            f"is made by {unbuilt.kind}, and no plain tensor", "dequantize() it first"
        )
    storage, first, shape, strides, _, hooks, *extra_args = unbuilt.args
    if storage.kind != PERSISTENT or storage.args[0] != "storage":
        raise TypeError
    _, kind, key, _, count, *of_others = storage.args  # a part of another's, in old streams
    if any(each is not None for each in of_others):
        raise FormatError("is a view of another's storage", "save its clone()")
    if hooks or type(kind) is not GlobalName or type(key) is not str:
        raise TypeError
    if type(shape) is not tuple or type(strides) is not tuple:
        raise TypeError
    if not all(map(is_extent, (*shape, *strides, first, count))):
        raise TypeError
    if unbuilt.kind == REBUILD[1]:
        dtype = TORCH.get(extra_args.pop(0).removeprefix("torch."))
    else:
        dtype = STORAGES.get(kind.removeprefix("torch.").removesuffix("Storage"))
    if dtype is None:
        raise FormatError(f"is of a type that is not known ({kind})")
    stored = count if kind == UNTYPED else count * content_bytes(dtype, ())
    return StorageView(key, dtype, stored, first, shape, strides, any(extra_args))


def is_extent(value: object) -> bool:
    """Tell whether a value that was read is a number of elements, or a position among them."""
    return type(value) is int and 0 <= value < 1 << 48


def _wrong(view: StorageView) -> str:
    """Return why the bytes are not the elements row by row; "" if they are."""
    _, dtype, stored, first, shape, strides, is_conjugate = view
    plain = row_strides(shape)
    if len(strides) != len(shape):
        return f"stored with {len(strides)} strides of {len(shape)} axes"
    if prod(shape) and any(a != b for a, b, n in zip(strides, plain, shape) if n > 1):
        return f"stored with strides {strides}, not row by row"
    if first or stored != content_bytes(dtype, shape):
        return f"a view of a larger tensor: {stored:,} bytes from element {first:,} on"
    if is_conjugate:
        return "stored as a conjugate or a negative"
    return ""


def row_strides(shape: Shape) -> Shape:
    """Return the strides, in elements, of an array that is stored row by row.

    >>> row_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(prod(shape[axis + 1 :]) for axis in range(len(shape)))


# -- written --------------------------------------------------------------------------------------

_ALIGNED = 64
_FLAG = 8
"""Says that a member's sizes and CRC-32 stand behind it, and in the directory."""


class ItemFrame(NamedTuple):
    """The bytes around a tensor's content: before it, and behind it with places for its CRC-32."""

    head: bytes
    tail: bytes
    crc_at: tuple[int, ...]


def item_frame(dtype: str, shape: Shape, item_start: int) -> ItemFrame:
    """Return what stands around a tensor's content; its item begins at byte `item_start`."""
    nbytes = content_bytes(dtype, shape)
    head, entries = b"", []
    for name, data in (("data.pkl", data_pickle(dtype, shape)), ("byteorder", b"little")):
        entries.append((name, len(head), len(data), crc32(data)))
        head += _local(name, len(data), crc32(data)) + data
    entries.append(("data/0", len(head), nbytes, 0))
    room = _HEAD.size + len("archive/data/0") + 4
    padding = -(item_start + len(head) + room) % _ALIGNED
    extra = struct.pack("<2s H", b"FB", padding) + b"Z" * padding
    head += _local("data/0", 0, 0, _FLAG, extra)
    wide = nbytes >= _FULL
    tail = struct.pack("<4s I 2Q" if wide else "<4s 3I", _DESCRIPTOR, 0, nbytes, nbytes)
    crc_at = [4]
    version = b"3\n"
    entries.append(("version", len(head) + nbytes + len(tail), len(version), crc32(version)))
    tail += _local("version", len(version), crc32(version)) + version
    first = len(head) + nbytes + len(tail)
    for name, place, size, crc in entries:
        if name == "data/0":
            crc_at.append(len(tail) + 16)
        tail += _directory_entry(name, place, size, crc)
    listed = len(head) + nbytes + len(tail) - first
    count, full = len(entries), wide or first >= _FULL
    if full:
        where = first + listed
        tail += _END64.pack(_EOCD64, 44, 45, 45, 0, 0, count, count, listed, first)
        tail += struct.pack("<4s I Q I", _LOCATOR, 0, where, 1)
    directory_offset = _FULL if full else first
    tail += _ZIP_END.pack(_EOCD, 0, 0, count, count, listed, directory_offset, 0)
    return ItemFrame(head, tail, tuple(crc_at))


def _local(name: str, nbytes: int, crc: int, flags: int = 0, extra: bytes = b"") -> bytes:
    full = f"archive/{name}".encode()
    sizes = 20, flags, 0, 0, 0, crc, nbytes, nbytes, len(full), len(extra)
    return _HEAD.pack(_LOCAL, *sizes) + full + extra


def _directory_entry(name: str, header_offset: int, nbytes: int, crc: int) -> bytes:
    """Return a member's entry in the directory; the first bytes of a ZIP are within 32 bits."""
    full, wide = f"archive/{name}".encode(), []
    flags = _FLAG if name == "data/0" else 0
    size, place = nbytes, header_offset
    if nbytes >= _FULL:
        wide, size = [nbytes, nbytes], _FULL
    if header_offset >= _FULL:
        wide, place = [*wide, header_offset], _FULL
    extra = struct.pack(f"<2H{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
    version = 45 if wide else 20
    fields = version, version, flags, 0, 0, 0, crc, size, size, len(full), len(extra), 0, 0, 0
    return _ENTRY.pack(_DIRECTORY, *fields, 0, place) + full + extra


def data_pickle(dtype: str, shape: Shape) -> bytes:
    """Return the data.pkl of a tensor that is stored row by row."""
    storages = {element_type: name for name, element_type in STORAGES.items()}
    typed = dtype in storages
    count = prod(shape) if typed else content_bytes(dtype, shape)
    writer = PickleWriter(2)
    writer.name(REBUILD[0 if typed else 1])
    writer.mark()
    writer.mark()
    writer.values("storage")
    writer.name(f"torch.{storages[dtype]}Storage" if typed else UNTYPED)
    writer.values("0", "cpu", count)
    writer.tuple()
    writer.persistent()
    writer.values(0, shape, row_strides(shape), False)
    writer.name("collections.OrderedDict")
    writer.values(())
    writer.reduce()
    if not typed:
        writer.name(f"torch.{TORCH_NAMES[dtype]}")
    writer.tuple()
    writer.reduce()
    return writer.stop()


_WINDOW = 2048
_MOST_ITEMS = 1 << 24
_MOST_BYTES_ITEMS = 64 << 20
_CONTENT = "data/0"
"""What holds a tensor's elements."""


class Distcp(Container):
    """Items of PyTorch's distributed checkpoints."""

    name = "distcp"
    alone = False
    has_equal_headers = False

    def read_index(self, read_at: ReadAt, size: int) -> Index:
        reader = ZipReader(read_at, size)
        if reader.bytes(max(0, size - _ZIP_END.size), 4) != _EOCD:
            return _with_safetensors(read_at, size, reader)
        pickle_cache: dict[bytes, TensorPickle | str] = {}
        items = [_item(reader, tail, pickle_cache) for tail in _tails(reader, 0, size)]
        return _index(items[::-1], size)

    def order(self, name: str, dtype: str) -> int:
        """What is no tensor comes first."""
        return int(dtype != BYTES)

    def lay_out(
        self,
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        checksum: bool,
        begins: int = 0,
    ) -> FileLayout:
        """Plan a file. Each item has its CRC-32, whether or not a checksum is asked for."""
        headers, spans, tails, offset = [], {}, {}, 0
        for name, dtype, shape in sorted(
            tensors, key=lambda spec: self.order(spec.name, spec.dtype)
        ):
            nbytes = content_bytes(dtype, shape)
            if dtype == BYTES:
                spans[name] = (Span(offset, nbytes),)
                offset += nbytes
                continue
            if dtype == TEXT or dtype not in TORCH_NAMES:
                raise RequestError(
                    f"dcp cannot hold {name!r}, which is {dtype}", "leave it out (--exclude)"
                )
            around = item_frame(dtype, shape, offset)
            headers.append((offset, around.head))
            spans[name] = (Span(offset + len(around.head), nbytes),)
            tails[name] = ContentTail(around.tail, around.crc_at)
            offset += len(around.head) + nbytes + len(around.tail)
        return FileLayout(tuple(headers), spans, offset, tails=tails)

    def checksums(
        self, index: Index, read_at: ReadAt, blocks: Blocks
    ) -> Sequence[tuple[str, str, str]]:
        """Return those of tensors, and those of all other members of items."""
        names = {span: name for name in index.schema.names for span in index.spans(name)}
        sums = [(index.schema.names[position], crc) for position, crc in index.sums.items()]
        texts = [(name, crc, crc_of(blocks, index.spans(name))) for name, crc in sums]
        reader = ZipReader(read_at, index.size)
        ranges = [(0, index.size)]
        if reader.bytes(max(0, index.size - _ZIP_END.size), 4) != _EOCD:
            # It ends with a safetensors file, which has no sums; items before it are no tensors.
            items = (span for span, name in names.items() if index.dtype(name) == BYTES)
            ranges = [(offset, offset + nbytes) for offset, nbytes in items if nbytes]
        for begin, end in ranges:
            for tail in _tails(reader, begin, end):
                title = names.get(
                    Span(tail.start, tail.end - tail.start), f"item at byte {tail.start:,}"
                )
                for part, member in tail.members.items():
                    place = Span(reader.place(tail, member), member.nbytes)
                    if member.crc and (part != _CONTENT or place not in names):
                        texts.append((f"{title}/{part}", member.crc, _crc(reader, blocks, place)))
        return [(f"{name}: CRC-32", f"{a:08x}", f"{b:08x}") for name, a, b in texts]


def _crc(reader: ZipReader, blocks: Blocks, place: Span) -> int:
    """Return the CRC-32 of a member of an item; most have few bytes, which were read already."""
    if place.nbytes <= _WINDOW:
        return crc32(reader.bytes(*place))
    return crc_of(blocks, [place])


def items_of(layout: FileLayout) -> dict[str, Span]:
    """Return where the item of each tensor of a file lies, from its first byte to its last."""
    item_starts = {offset + len(head): offset for offset, head in layout.headers}
    spans_by_name = {}
    for name, ((content_start, nbytes),) in layout.spans.items():
        start = item_starts.get(content_start, content_start)
        tail = layout.tails.get(name)
        spans_by_name[name] = Span(
            start, content_start + nbytes - start + (len(tail.data) if tail else 0)
        )
    return spans_by_name


class ZipReader:
    """Reads a file in windows, since an item's ends are often both in one."""

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at, self.size = read_at, size
        self._at, self._data = 0, b""

    def bytes(self, offset: int, nbytes: int) -> bytes:
        """Return bytes of the file, fewer where it ends."""
        end = min(offset + nbytes, self.size)
        if not (self._at <= offset and end <= self._at + len(self._data)):
            first = max(0, min(offset, end - _WINDOW))
            self._at, self._data = first, self._read_at(first, max(end, first + _WINDOW) - first)
        return self._data[offset - self._at : max(0, end - self._at)]

    def directory(self, begin: int, end: int) -> ZipDirectory:
        """Return what an item that ends at a byte says of its members. Raises FormatError."""
        tail: ZipDirectory | int | None = _WINDOW
        while isinstance(tail, int):
            need = tail
            first = max(0, end - need)
            tail = read_zip_directory(self.bytes(first, end - first), end)
            if tail is None or tail == need:
                raise FormatError(
                    f"bytes before {end:,} are no end of a ZIP, as torch.save leaves it; the file "
                    "is cut off, or another"
                )
        assert isinstance(tail, ZipDirectory)
        if tail.start < begin:
            raise FormatError(f"the item before byte {end:,} begins before the one before it ends")
        return tail

    def place(self, tail: ZipDirectory, member: ZipMember) -> int:
        """Return the first byte of a member's content in the file."""
        header_offset = tail.start + member.header_offset
        head = self.bytes(header_offset, min(_WINDOW, tail.end - header_offset))
        content_offset = content_at(head, member._replace(header_offset=0))
        if content_offset is None or header_offset + content_offset + member.nbytes > tail.end:
            raise FormatError("a member of its ZIP lies beyond it")
        return header_offset + content_offset


class _Item:
    """One item: where it is, what it is; and where its elements are, with their CRC-32."""

    __slots__ = ("at", "crc", "described", "end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = self.at = start
        self.end, self.crc = end, 0
        self.described = TensorPickle(BYTES, (end - start,))


def _tails(reader: ZipReader, begin: int, end: int) -> Iterator[ZipDirectory]:
    """Yield what the items between two bytes of a file say of their members, the last first."""
    for _ in range(_MOST_ITEMS):
        if end <= begin:
            return
        tail = reader.directory(begin, end)
        yield tail
        end = tail.start
    raise FormatError(f"it has over {_MOST_ITEMS:,} items")


def _item(
    reader: ZipReader, tail: ZipDirectory, pickle_cache: dict[bytes, TensorPickle | str]
) -> _Item:
    """Return what an item is: a tensor, or bytes if it has no elements of its own."""
    item, content = _Item(tail.start, tail.end), tail.members.get(_CONTENT)
    data = tail.members.get("data.pkl")
    if content is None or data is None:
        return item
    try:
        item.described, item.at = _tensor(reader, tail, pickle_cache), reader.place(tail, content)
        item.crc = content.crc
        if item.at + content.nbytes > tail.end:
            raise FormatError("its elements do not lie in its item")
    except FormatError as error:
        item.described = TensorPickle(BYTES, (tail.end - tail.start,), str(error))
        item.at = tail.start
    return item


def _tensor(
    reader: ZipReader, tail: ZipDirectory, pickle_cache: dict[bytes, TensorPickle | str]
) -> TensorPickle:
    """Return what an item's data.pkl says; most are equal to another's."""
    reader.bytes(tail.start, min(_WINDOW, tail.end - tail.start))
    order = tail.members.get("byteorder")
    if order is not None:
        byte_order = reader.bytes(reader.place(tail, order), min(order.nbytes, 16))
        if byte_order != b"little":
            raise FormatError(f"{byte_order.decode(errors='replace')}-endian item")
    data = tail.members["data.pkl"]
    words = reader.bytes(reader.place(tail, data), min(data.nbytes, _WINDOW))
    if words not in pickle_cache:
        try:
            pickle_cache[words] = read_tensor_pickle(words)
        except FormatError as error:
            pickle_cache[words] = str(error)
    tensor_pickle = pickle_cache[words]
    if isinstance(tensor_pickle, str):
        raise FormatError(tensor_pickle)
    if tensor_pickle.wrong:
        raise FormatError(tensor_pickle.wrong)
    if content_bytes(tensor_pickle.dtype, tensor_pickle.shape) != tail.members[_CONTENT].nbytes:
        raise FormatError(
            f"its data.pkl says {tensor_pickle.dtype} {list(tensor_pickle.shape)}, and it has "
            f"{tail.members[_CONTENT].nbytes:,} bytes"
        )
    return tensor_pickle


def _index(items: Sequence[_Item], size: int) -> Index:
    schema = Schema(
        tuple(str(dcp_item.start) for dcp_item in items),
        tuple(dcp_item.described.dtype for dcp_item in items),
        tuple(dcp_item.described.shape for dcp_item in items),
    )
    return Index(
        schema,
        array("q", (dcp_item.at for dcp_item in items)),
        {},
        size,
        has_checksum=all(
            i.crc or i.described.dtype == BYTES or not content_bytes(*i.described[:2])
            for i in items
        ),
        wrong={str(i.start): i.described.wrong for i in items if i.described.wrong},
        sums={n: dcp_item.crc for n, dcp_item in enumerate(items) if dcp_item.crc},
        starts=array("q", (dcp_item.start for dcp_item in items)),
    )


def _end_of(data: bytes, begin: int) -> int:
    """Return where in `data`, which begins with a ZIP, its end is stated; -1 if not in there.

    A ZIP may hold others, which end elsewhere.
    """
    end = data.find(_EOCD)
    while end >= 0 and end + 22 <= len(data):
        tail = read_zip_directory(data[: end + 22], begin + end + 22)
        if isinstance(tail, ZipDirectory) and tail.start == begin:
            return end
        end = data.find(_EOCD, end + 1)
    return -1


def _with_safetensors(read_at: ReadAt, size: int, reader: ZipReader) -> Index:
    """Return the items of a file that ends with a safetensors file, in which all tensors are."""
    begin, items = 0, list[_Item]()
    while reader.bytes(begin, 4) == _LOCAL:
        data, end = reader.bytes(begin, BLOCK), -1
        while end < 0:
            end = _end_of(data, begin)
            if end < 0 and (begin + len(data) >= size or len(data) > _MOST_BYTES_ITEMS):
                raise FormatError(f"the item at byte {begin:,} has no end; the file is cut off")
            if end < 0:
                data = reader.bytes(begin, 2 * len(data))
        items += [_Item(begin, begin + end + 22)]
        begin += end + 22

    def behind(offset: int, nbytes: int) -> bytes:
        return read_at(begin + offset, nbytes)

    tensor_index = safetensors.read_index(behind, size - begin)
    item_index = _index(items, size)
    names = tuple(f"{begin}/{name}" for name in tensor_index.schema.names)
    schema = Schema(
        (*item_index.schema.names, *names),
        (*item_index.schema.dtypes, *tensor_index.schema.dtypes),
        (*item_index.schema.shapes, *tensor_index.schema.shapes),
    )
    assert item_index.starts is not None
    starts = item_index.starts + array("q", (begin for _ in tensor_index.offsets))
    offsets = item_index.offsets + array("q", (begin + offset for offset in tensor_index.offsets))
    return replace(
        item_index, schema=schema, offsets=offsets, starts=starts, metadata=tensor_index.metadata
    )


class Raw(Container):
    """Bytes without a table of contents."""

    name = "bytes"
    alone = False

    def read_index(self, read_at: ReadAt, size: int) -> Index:
        return Index(Schema(("",), (BYTES,), ((size,),)), array("q", (0,)), {}, size)

    def lay_out(
        self,
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        checksum: bool,
        begins: int = 0,
    ) -> FileLayout:
        spans, offset = {}, 0
        for name, dtype, shape in tensors:
            spans[name] = (Span(offset, content_bytes(dtype, shape)),)
            offset += content_bytes(dtype, shape)
        return FileLayout((), spans, offset)
