"""MindSpore's ``.ckpt``: a protobuf Checkpoint message, one Value for each parameter.

Messages and field numbers (proto2)::

    Checkpoint    value 1*
    Value         tag 1, tensor 2, maptensor 3
    TensorProto   dims 1*, tensor_type 2, tensor_content 3

A parameter over 512 MiB is split into several consecutive Values of one tag; each piece states the
dims of the whole. A scalar has no dims (older writers: one dim, 0). A text has type ``str`` and
dims [0]. A checksum, if any, stands behind the last Value: ``crc_num`` and ten bytes, big-endian.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from rankxform.errors import FormatError, RequestError
from rankxform.geometry.box import Shape

from .container import (
    FILE_CHECKSUM,
    ITEM_SIZE,
    NOT_MINDSPORES,
    TEXT,
    Blocks,
    Container,
    CrcOf,
    FileLayout,
    Index,
    ParsedEntry,
    Patch,
    ReadAt,
    Span,
    TensorSpec,
    build_index,
    content_bytes,
    crc_of,
)
from .protobuf import (
    BYTES,
    FIXED32,
    FIXED64,
    VARINT,
    delimited,
    encode_tag,
    read_varint,
    signed,
    varint,
)

PIECE_BYTES = 512 << 20
"""Content bytes after which MindSpore's save starts another piece."""

_CRC_MARK = b"crc_num"
CRC_BYTES = len(_CRC_MARK) + 10
_WINDOW = 1024
_MOST_DIMS, _LONGEST_TYPE, _LONGEST_NAME = 32, 32, 1 << 16
_ENCRYPTED = {b"\xd8\x5e\x3a\x7f", b"\xd9\x5e\x3a\x7f", b"\xda\x5e\x3a\x7f"}


def read_index(read_at: ReadAt, size: int) -> Index:
    """Find every parameter of a file of `size` bytes from its headers; no content is read.

    Raises FormatError that names the byte where the file stops making sense.
    """
    if not size:
        raise FormatError("the file is empty")
    window = _Window(read_at, size)
    if window.bytes_at(0, 4) in _ENCRYPTED:
        raise FormatError(
            "the file is encrypted, and its key is not known here",
            "load it in MindSpore with dec_key, save it without enc_key, and convert that",
        )
    entries: dict[str, ParsedEntry] = {}
    at_checksum = None
    offset, previous_name = 0, ""
    while offset < size:
        if size - offset == CRC_BYTES and window.bytes_at(offset, len(_CRC_MARK)) == _CRC_MARK:
            at_checksum = offset
            break
        start = offset
        number, offset, end = window.field(offset, size)
        if number != 1 or end is None:
            defect = "damaged" if start else "no checkpoint"
            raise FormatError(f"byte {start}: no parameter starts here; the file is {defect}")
        entry = _value(window, offset, end)
        if entry.name == previous_name:
            entry = _join_entries(entries[previous_name], entry)
        elif entry.name in entries:
            raise FormatError(
                f"names {entry.name!r} twice: at byte {start} another checkpoint begins",
                "copy the file again: two files were joined",
            )
        entries[entry.name] = entry
        offset, previous_name = end, entry.name
    return build_index(
        [_finish_entry(e) for e in entries.values()],
        size,
        checksum_at=at_checksum,
        has_checksum=at_checksum is not None,
    )


class _Window:
    """A file seen through the few bytes around the header being read."""

    def __init__(self, read_at: ReadAt, size: int) -> None:
        self._read_at, self._size = read_at, size
        self._start, self._data = 0, b""

    def bytes_at(self, offset: int, nbytes: int) -> bytes:
        window_offset = offset - self._start
        if window_offset < 0 or window_offset + nbytes > len(self._data):
            self._start, window_offset = offset, 0
            self._data = self._read_at(offset, max(nbytes, _WINDOW))
        return self._data[window_offset : window_offset + nbytes]

    def varint(self, offset: int, end: int) -> tuple[int, int]:
        window_offset = offset - self._start
        if not 0 <= window_offset <= len(self._data) - 10:
            self.bytes_at(offset, min(10, max(self._size - offset, 0)))
            window_offset = offset - self._start
        try:
            value, value_end = read_varint(self._data, window_offset)
        except FormatError:
            text = f"byte {offset}: no complete number here; the file is damaged or cut off"
            raise FormatError(text, "copy the file again") from None
        if self._start + value_end > end:
            raise FormatError(f"byte {offset}: a number runs over its message's end at {end}")
        return value, self._start + value_end

    def field(self, offset: int, end: int) -> tuple[int, int, int | None]:
        """Return (number, value's offset, value's end), the end None for a varint."""
        tag, inside = self.varint(offset, end)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == VARINT:
            return number, inside, None
        if wire_type == BYTES:
            length, inside = self.varint(inside, end)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise FormatError(f"byte {offset}: wire type {wire_type} is not used by this format")
        if inside + length > end:
            raise FormatError(
                f"byte {offset}: a field of {length} bytes runs over byte {end}; "
                "the file is damaged or cut off",
                "copy the file again",
            )
        return number, inside, inside + length

    def text(self, start: int, end: int, longest: int) -> str:
        if end - start > longest:
            raise FormatError(f"byte {start}: a name of {end - start} bytes; the file is damaged")
        try:
            return self.bytes_at(start, end - start).decode()
        except UnicodeDecodeError as error:
            raise FormatError(f"byte {start}: a name is not UTF-8: {error}") from None


def _value(window: _Window, offset: int, end: int) -> ParsedEntry:
    start, name, tensor = offset, None, None
    while offset < end:
        number, inside, value_end = window.field(offset, end)
        if value_end is None:
            _, value_end = window.varint(inside, end)
        elif number == 1:
            name = window.text(inside, value_end, _LONGEST_NAME)
        elif number == 2:
            tensor = inside, value_end
        elif number == 3:
            raise FormatError(
                f"byte {offset}: {name!r} is a maptensor, which cannot be converted",
                "save the checkpoint without it",
            )
        offset = value_end
    if name is None or tensor is None:
        raise FormatError(f"byte {start}: a parameter without {'tensor' if name else 'name'}")
    return _tensor(window, name, *tensor)


def _tensor(window: _Window, name: str, offset: int, end: int) -> ParsedEntry:
    start, dims, dtype = offset, list[int](), ""
    span: Span | None = None
    while offset < end:
        number, inside, value_end = window.field(offset, end)
        if value_end is None:
            value, value_end = window.varint(inside, end)
            if number == 1:
                dims.append(signed(value, 64))
        elif number == 1:
            while inside < value_end and len(dims) <= _MOST_DIMS:
                value, inside = window.varint(inside, value_end)
                dims.append(signed(value, 64))
        elif number == 2:
            dtype = window.text(inside, value_end, _LONGEST_TYPE)
        elif number == 3:
            span = Span(inside, value_end - inside)
        offset = value_end
        if len(dims) > _MOST_DIMS:
            raise FormatError(f"byte {start}: {name!r} has over {_MOST_DIMS} axes; damaged")
    if span is None or not dtype:
        missing_field = "type" if span else "content"
        raise FormatError(f"byte {start}: {name!r} has no {missing_field}; the file is damaged")
    return ParsedEntry(name, dtype, tuple(dims), (span,))


def _join_entries(first: ParsedEntry, second: ParsedEntry) -> ParsedEntry:
    if (first.dtype, first.shape) != (second.dtype, second.shape):
        raise FormatError(
            f"{first.name!r} is split into pieces that disagree: {first.dtype} {list(first.shape)} "
            f"and {second.dtype} {list(second.shape)}"
        )
    return ParsedEntry(first.name, first.dtype, first.shape, first.spans + second.spans)


def _finish_entry(entry: ParsedEntry) -> ParsedEntry:
    """Give dims [0] the meaning they have: a scalar of older writers, a text, or nothing."""
    have = sum(span.nbytes for span in entry.spans)
    if entry.dtype == TEXT:
        return ParsedEntry(entry.name, TEXT, (have,), entry.spans)
    if entry.shape == (0,) and have and have == ITEM_SIZE.get(entry.dtype):
        return ParsedEntry(entry.name, entry.dtype, (), entry.spans)
    return entry


def pieces(nbytes: int) -> Iterator[int]:
    """Yield the content bytes of each piece that a parameter of `nbytes` is written in."""
    yield min(nbytes, PIECE_BYTES)
    for start in range(PIECE_BYTES, nbytes, PIECE_BYTES):
        yield min(PIECE_BYTES, nbytes - start)


def header(name: str, dtype: str, shape: Shape, nbytes: int) -> bytes:
    """Return all bytes of a Value before its `nbytes` of content, as MindSpore writes them.

    `shape` is the whole parameter's, also for a piece; ``()`` writes no dims.
    """
    dims = (0,) if dtype == TEXT else shape
    prefix = b"".join(encode_tag(1, VARINT) + varint(n) for n in dims) + delimited(
        2, dtype.encode()
    )
    content = encode_tag(3, BYTES) + varint(nbytes)
    tensor = encode_tag(2, BYTES) + varint(len(prefix) + len(content) + nbytes) + prefix + content
    tag = delimited(1, name.encode())
    return encode_tag(1, BYTES) + varint(len(tag) + len(tensor) + nbytes) + tag + tensor


class Ckpt(Container):
    """MindSpore's own container."""

    name = "ckpt"
    alone = True

    def read_index(self, read_at: ReadAt, size: int) -> Index:
        return read_index(read_at, size)

    def lay_out(
        self,
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        checksum: bool,
        begins: int = 0,
    ) -> FileLayout:
        headers, spans, offset = [], {}, 0
        for name, dtype, shape in tensors:
            if dtype in NOT_MINDSPORES:
                raise RequestError(
                    f".ckpt cannot hold {name!r}, which is {dtype}, a type that MindSpore does "
                    "not have",
                    f"leave it out (--exclude '^{re.escape(name)}$') or write --format safetensors",
                )
            tensor_spans = []
            for nbytes in pieces(content_bytes(dtype, shape)):
                head = header(name, dtype, shape, nbytes)
                headers.append((offset, head))
                tensor_spans.append(Span(offset + len(head), nbytes))
                offset += len(head) + nbytes
            spans[name] = tuple(tensor_spans)
        trailer = CRC_BYTES if checksum else 0
        return FileLayout(tuple(headers), spans, offset + trailer, trailer)

    def checksum(self, layout: FileLayout, crc_of_spans: CrcOf, blocks: Blocks) -> Patch:
        end = layout.size - layout.trailer
        return end, crc_trailer(crc_of_spans([Span(0, end)], 0))

    def checksums(
        self, index: Index, read_at: ReadAt, blocks: Blocks
    ) -> Sequence[tuple[str, str, str]]:
        offset = index.checksum_at
        if offset is None:
            return ()
        trailer = read_at(offset, CRC_BYTES)
        if not trailer.startswith(_CRC_MARK):  # in another file of these headers it was there
            raise FormatError(f"byte {offset}: no parameter starts here; the file is damaged")
        declared_crc = stated_crc(trailer)
        return [(FILE_CHECKSUM, str(declared_crc), str(crc_of(blocks, [Span(0, offset)])))]


def crc_trailer(crc: int) -> bytes:
    """Return the checksum that MindSpore's ``crc_check=True`` appends."""
    return _CRC_MARK + crc.to_bytes(10, "big")


def stated_crc(trailer: bytes) -> int:
    """Read the checksum back from the trailer's bytes."""
    return int.from_bytes(trailer[len(_CRC_MARK) :], "big")
