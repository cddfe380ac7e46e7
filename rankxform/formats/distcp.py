"""``.distcp``: items of PyTorch's distributed checkpoints, one behind the other.

Each is a ZIP that `torch.save` wrote (`torch_item`), a tensor or anything else that is pickled.
Where they begin only the checkpoint's ``.metadata`` says; they are found from the file's end, since
every ZIP's end says where it began. Entries are named by their first byte in the file, which is how
``.metadata`` names them; what the tensors are called, only that knows. Instead of tensors' ZIPs a
safetensors file may stand at the end.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import replace

from rankxform.errors import FormatError, RequestError
from rankxform.formats.torch_item import (
    TORCH_NAMES,
    TensorPickle,
    ZipDirectory,
    ZipMember,
    content_at,
    item_frame,
    read_tensor_pickle,
    read_zip_directory,
)

from . import safetensors
from .base import (
    BLOCK,
    Blocks,
    ContentTail,
    FileLayout,
    Index,
    Patch,
    ReadAt,
    Schema,
    Span,
    TensorSpec,
)
from .ckpt import crc_of
from .dtype import BYTES, TEXT, content_bytes

_WINDOW = 2048
_MOST_ITEMS = 1 << 24
_MOST_BYTES_ITEMS = 64 << 20
_END = b"PK\5\6"
_BEGIN = b"PK\3\4"


class Distcp:
    """Items of PyTorch's distributed checkpoints (`rankxform.formats.base.Container`)."""

    name = "distcp"
    alone = False
    has_equal_headers = False

    def read_index(self, read_at: ReadAt, size: int) -> Index:
        reader = _Reader(read_at, size)
        if reader.bytes(max(0, size - 22), 4) != _END:
            return _with_safetensors(read_at, size, reader)
        return _index(_from_the_end(reader, 0, size), size)

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

    def checksum(self, layout: FileLayout, blocks: Blocks) -> Patch:
        return 0, b""  # each item has its own

    def checksums(
        self, index: Index, read_at: ReadAt, blocks: Blocks
    ) -> Sequence[tuple[str, str, str]]:
        """Return those of tensors, and those of the parts of what is none."""
        parts = [
            (name, index.spans(name), declared_crc)
            for position, declared_crc in index.sums.items()
            for name in (index.schema.names[position],)
        ]
        reader = _Reader(read_at, index.size)
        for name, dtype in zip(index.schema.names, index.schema.dtypes):
            ((start, nbytes),) = index.spans(name) if dtype == BYTES else ((0, 0),)
            if nbytes:
                tail = _tail(reader, start, start + nbytes)
                for part, member in tail.members.items():
                    place = Span(_place(reader, tail, member), member.nbytes)
                    parts.append((f"{name}/{part}", (place,), member.crc))
        return [
            (f"{name}: CRC-32", f"{declared_crc:08x}", f"{crc_of(blocks, spans):08x}")
            for name, spans, declared_crc in parts
        ]


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


class _Reader:
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


class _Item:
    """One item: where it is, what it is; and where its elements are, with their CRC-32."""

    __slots__ = ("at", "crc", "described", "end", "start")

    def __init__(self, start: int, end: int) -> None:
        self.start = self.at = start
        self.end, self.crc = end, 0
        self.described = TensorPickle(BYTES, (end - start,))


def _from_the_end(reader: _Reader, begin: int, end: int) -> list[_Item]:
    """Return the items between two bytes of a file, each found by its last."""
    file_items: list[_Item] = []
    pickle_cache: dict[bytes, TensorPickle | str] = {}
    while end > begin:
        tail = _tail(reader, begin, end)
        if len(file_items) >= _MOST_ITEMS:
            raise FormatError(f"it has over {_MOST_ITEMS:,} items")
        file_items.append(_item(reader, tail, pickle_cache))
        end = tail.start
    return file_items[::-1]


def _tail(reader: _Reader, begin: int, end: int) -> ZipDirectory:
    """Return what an item that ends at a byte says of its members. Raises FormatError."""
    tail: ZipDirectory | int | None = _WINDOW
    while isinstance(tail, int):
        need = tail
        first = max(0, end - need)
        tail = read_zip_directory(reader.bytes(first, end - first), end)
        if tail is None or tail == need:
            raise FormatError(
                f"bytes before {end:,} are no item of a distributed checkpoint; it is cut off, "
                "or not one"
            )
    assert isinstance(tail, ZipDirectory)
    if tail.start < begin:
        raise FormatError(f"the item before byte {end:,} begins before the one before it ends")
    return tail


def _item(
    reader: _Reader,
    tail: ZipDirectory,
    pickle_cache: dict[bytes, TensorPickle | str],
) -> _Item:
    """Return what an item is: a tensor, or bytes if it has no elements of its own."""
    item, content = _Item(tail.start, tail.end), tail.members.get("data/0")
    data = tail.members.get("data.pkl")
    if content is None or data is None:
        return item
    try:
        item.described, item.at = _tensor(reader, tail, pickle_cache), _place(reader, tail, content)
        item.crc = content.crc
        if item.at + content.nbytes > tail.end:
            raise FormatError("its elements do not lie in its item")
    except FormatError as error:
        item.described = TensorPickle(BYTES, (tail.end - tail.start,), str(error))
        item.at = tail.start
    return item


def _place(reader: _Reader, tail: ZipDirectory, member: ZipMember) -> int:
    """Return the first byte of a member's content in the file."""
    header_offset = tail.start + member.header_offset
    head = reader.bytes(header_offset, min(_WINDOW, tail.end - header_offset))
    content_offset = content_at(head, member._replace(header_offset=0))
    if content_offset is None or header_offset + content_offset + member.nbytes > tail.end:
        raise FormatError("a member of its ZIP lies beyond it")
    return header_offset + content_offset


def _tensor(
    reader: _Reader,
    tail: ZipDirectory,
    pickle_cache: dict[bytes, TensorPickle | str],
) -> TensorPickle:
    """Return what an item's data.pkl says; most are equal to another's."""
    reader.bytes(tail.start, min(_WINDOW, tail.end - tail.start))
    order = tail.members.get("byteorder")
    if order is not None:
        byte_order = reader.bytes(_place(reader, tail, order), min(order.nbytes, 16))
        if byte_order != b"little":
            raise FormatError(f"{byte_order.decode(errors='replace')}-endian item")
    data = tail.members["data.pkl"]
    words = reader.bytes(_place(reader, tail, data), min(data.nbytes, _WINDOW))
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
    if content_bytes(tensor_pickle.dtype, tensor_pickle.shape) != tail.members["data/0"].nbytes:
        raise FormatError(
            f"its data.pkl says {tensor_pickle.dtype} {list(tensor_pickle.shape)}, and it has "
            f"{tail.members['data/0'].nbytes:,} bytes"
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
        has_checksum=all(dcp_item.crc or not _has_content(dcp_item) for dcp_item in items),
        wrong={str(i.start): i.described.wrong for i in items if i.described.wrong},
        sums={n: dcp_item.crc for n, dcp_item in enumerate(items) if dcp_item.crc},
        starts=array("q", (dcp_item.start for dcp_item in items)),
    )


def _has_content(item: _Item) -> bool:
    dtype, shape, _ = item.described
    return dtype != BYTES and content_bytes(dtype, shape) > 0


def _end_of(data: bytes, begin: int) -> int:
    """Return where in `data`, which begins with a ZIP, its end is stated; -1 if not in there.

    A ZIP may hold others, which end elsewhere.
    """
    end = data.find(_END)
    while end >= 0 and end + 22 <= len(data):
        tail = read_zip_directory(data[: end + 22], begin + end + 22)
        if isinstance(tail, ZipDirectory) and tail.start == begin:
            return end
        end = data.find(_END, end + 1)
    return -1


def _with_safetensors(read_at: ReadAt, size: int, reader: _Reader) -> Index:
    """Return the items of a file that ends with a safetensors file, in which all tensors are."""
    begin, items = 0, list[_Item]()
    while reader.bytes(begin, 4) == _BEGIN:
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
