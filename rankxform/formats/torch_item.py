"""One item of PyTorch's distributed checkpoints: a tensor as `torch.save` writes it, a stored ZIP.

::

    archive/data.pkl      a pickle: type, sizes, strides
    archive/byteorder     little
    archive/data/0        the elements, row by row
    archive/version       3

Layout: APPNOTE.TXT of PKWARE; what torch reads and writes was established with torch 2.6 to 2.14.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from math import prod
from typing import NamedTuple
from zlib import crc32

from rankxform.errors import FormatError
from rankxform.geometry.box import Shape

from .dtype import content_bytes
from .pickled import PERSISTENT, UnbuiltObject, load_pickle
from .pickles import PickleWriter

_STORAGES = {
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

_REBUILD = "torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"
_PARAMETER = "torch._utils._rebuild_parameter"
_UNTYPED = "torch.storage.UntypedStorage"

_EOCD, _DIRECTORY, _LOCAL = b"PK\5\6", b"PK\1\2", b"PK\3\4"
_EOCD64, _LOCATOR, _DESCRIPTOR = b"PK\6\6", b"PK\6\7", b"PK\7\x08"
_ZIP_END = struct.Struct("<4s4H2IH")
_END64 = struct.Struct("<4sQ2H2I4Q")
_ENTRY = struct.Struct("<4s6H3I5H2I")
_HEAD = struct.Struct("<4s5H3I2H")
_FULL = 0xFFFFFFFF
_MOST_MEMBERS = 1 << 16
_MOST_DIRECTORY = 16 << 20


class ZipMember(NamedTuple):
    """One file of a ZIP: where its local header is, from the ZIP's start; its bytes, and CRC-32."""

    header_offset: int
    nbytes: int
    crc: int


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
        name = directory[position : position + name_size].decode(errors="replace").partition("/")[2]
        extra = directory[position + name_size : position + name_size + extra_size]
        position += name_size + extra_size + comment
        if _FULL in (nbytes, stored, local):
            nbytes, stored, local = _wide(extra, nbytes, stored, local)
        if method or stored != nbytes:
            raise FormatError(f"{name!r} in a ZIP is compressed; torch stores tensors as they are")
        if name in members:
            raise FormatError(f"{name!r} is twice in a ZIP")
        members[name] = ZipMember(local, nbytes, crc)
    return members


def _wide(extra: bytes, *values: int) -> tuple[int, ...]:
    """Return values, of which those that do not fit 32 bits are in an extra field."""
    position = 0
    while position + 4 <= len(extra):
        kind, size = struct.unpack_from("<2H", extra, position)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{size // 8}Q", extra, position + 4))
            return tuple(next(wide, value) if value == _FULL else value for value in values)
        position += 4 + size
    return values


def content_at(head: bytes, member: ZipMember) -> int | None:
    """Return where a member's content is, from its ZIP's start; None if `head` is too short."""
    if len(head) < member.header_offset + _HEAD.size:
        return None
    mark, *_, name_size, extra_size = _HEAD.unpack_from(head, member.header_offset)
    if mark != _LOCAL:
        raise FormatError("a member of a ZIP is not where its directory says")
    return int(member.header_offset + _HEAD.size + name_size + extra_size)


def allowed_names(name: str) -> bool:
    """Tell whether a tensor's pickle may have a name."""
    module, _, short_name = name.rpartition(".")
    return (
        name in (*_REBUILD, _PARAMETER, _UNTYPED, "collections.OrderedDict")
        or (module == "torch" and short_name.removesuffix("Storage") in _STORAGES)
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
    if unbuilt.kind not in _REBUILD:
        raise FormatError(f"is made by {unbuilt.kind}, and not a plain tensor")
    storage, first, shape, strides, _, hooks, *extra_args = unbuilt.args
    if storage.kind != PERSISTENT:
        raise TypeError
    _, kind, key, _, count = storage.args
    if hooks or not all(map(_is_number, (*shape, *strides, first, count))):
        raise TypeError
    if unbuilt.kind == _REBUILD[1]:
        dtype = TORCH.get(extra_args.pop(0).removeprefix("torch."))
    else:
        dtype = _STORAGES.get(kind.removeprefix("torch.").removesuffix("Storage"))
    if dtype is None or key != "0":
        raise FormatError(f"is a tensor of a kind that is not known ({kind})")
    stored = count if kind == _UNTYPED else count * content_bytes(dtype, ())
    return TensorPickle(dtype, shape, _wrong(dtype, shape, strides, first, stored, extra_args))


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value < 1 << 48


def _wrong(
    dtype: str, shape: Shape, strides: Shape, first: int, stored: int, extra_args: list[object]
) -> str:
    """Return why the bytes are not the elements row by row; "" if they are."""
    plain = row_strides(shape)
    if len(strides) != len(shape):
        return f"stored with {len(strides)} strides of {len(shape)} axes"
    if prod(shape) and any(a != b for a, b, n in zip(strides, plain, shape) if n > 1):
        return f"stored with strides {strides}, not row by row"
    if first or stored != content_bytes(dtype, shape):
        return f"a view of a larger tensor: {stored:,} bytes from element {first:,} on"
    if any(extra_args):
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
    storages = {element_type: name for name, element_type in _STORAGES.items()}
    typed = dtype in storages
    count = prod(shape) if typed else content_bytes(dtype, shape)
    writer = PickleWriter(2)
    writer.name(_REBUILD[0 if typed else 1])
    writer.mark()
    writer.mark()
    writer.values("storage")
    writer.name(f"torch.{storages[dtype]}Storage" if typed else _UNTYPED)
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
