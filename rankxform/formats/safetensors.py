"""safetensors: an 8-byte little-endian length, a JSON header, and one buffer of tensors.

Format: https://huggingface.co/docs/safetensors. MindSpore's own reader wants the header's
entries in data order, without gaps, to the end of the file, and marks a Int4 parameter by a
metadata entry ``{name: "Int4"}`` over I8 data.
"""

from __future__ import annotations

import json
import re
from array import array
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from rankxform.errors import FormatError, RequestError
from rankxform.geometry.box import Shape
from rankxform.values import crc32, decode_json

from .container import (
    BLOCK,
    FILE_CHECKSUM,
    FROM_SAFETENSORS,
    INT4,
    REDUNDANCY_KEY,
    TEXT,
    TO_SAFETENSORS,
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
    item_size,
)

_MAX_HEADER = 100_000_000
METADATA_KEY = "__metadata__"
CRC_KEY = "crc_num"
_INTEGERS = ("Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Int64", "UInt64", INT4)

MOST_ZEROS = 1 << 32
_LARGE = 1 << 20
"""Bytes of a file whose content begins where the source's does, which takes a block at most."""

_RESERVE = 40
"""Bytes that a checksum may take in the header."""
_BLOCK = 1 << 20


def zeros_of(dtype: str, shape: Shape, content: bytes) -> int | None:
    """Return how many zero bytes stand for a parameter in MindSpore's checksum, if they do.

    MindSpore sums ``bytes(array)``, which for a 0-d array of integers is as many zeros as its
    value. Return None where the content itself is summed: for any other parameter, and for a value
    that is negative or larger than memory, which MindSpore can neither save nor check.

    >>> zeros_of("Int32", (), bytes([5, 0, 0, 0])), zeros_of("Float32", (), bytes(4))
    (5, None)
    """
    if shape or dtype not in _INTEGERS:
        return None
    value = int.from_bytes(content, "little", signed=dtype.startswith("Int"))
    return value if 0 <= value <= MOST_ZEROS else None


def read_index(read_at: ReadAt, size: int) -> Index:
    """Read the header of a file of `size` bytes. Raises FormatError where it does not hold."""
    prefix = read_at(0, 8)
    length = int.from_bytes(prefix, "little")
    if len(prefix) < 8 or length > min(size - 8, _MAX_HEADER):
        raise FormatError(
            f"the header should take {length} bytes, the file has {size}; "
            "it is cut off, or no safetensors file"
        )
    data = read_at(8, length)
    if len(data) < length:
        raise FormatError(f"the header ends after {len(data)} of {length} bytes")
    header = _header(data)
    metadata = header.pop(METADATA_KEY, None) or {}  # null stands for none
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError("__metadata__ must hold texts only")
    entries = [_entry(name, item, metadata, 8 + length) for name, item in header.items()]
    entries.sort(key=lambda e: (e.spans[0].offset, e.spans[0].nbytes))
    _check_gapless(entries, 8 + length, size)
    return build_index(entries, size, metadata=metadata, has_checksum=CRC_KEY in metadata)


def _header(data: bytes) -> dict[str, Any]:
    try:
        header = decode_json(data)
    except FormatError as error:
        raise FormatError(f"the header {error.what}") from None
    if not isinstance(header, dict):
        raise FormatError("the header is not a JSON object")
    return header


def _entry(name: str, item: Any, metadata: Mapping[str, str], base: int) -> ParsedEntry:
    try:
        dtype, shape, (begin, end) = item["dtype"], item["shape"], item["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        raise FormatError("expected dtype, shape and two data_offsets", where=f"{name!r}") from None
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or begin > end:
        raise FormatError(
            f"shape {shape!r} or data_offsets {[begin, end]} is impossible", where=f"{name!r}"
        )
    if not isinstance(dtype, str) or dtype not in FROM_SAFETENSORS:
        raise FormatError(
            f"element type {dtype!r} is not one of MindSpore's ({', '.join(FROM_SAFETENSORS)})",
            where=f"{name!r}",
        )
    marked = metadata.get(name) == INT4 and dtype == "I8"
    return ParsedEntry(
        name,
        INT4 if marked else FROM_SAFETENSORS[dtype],
        tuple(shape),
        (Span(base + begin, end - begin),),
    )


def _check_gapless(entries: Sequence[ParsedEntry], base: int, size: int) -> None:
    data_end = base
    for entry in entries:
        span = entry.spans[0]
        if span.offset != data_end:
            raise FormatError(
                f"{entry.name!r} starts at byte {span.offset}, the data before it end at {data_end}"
            )
        data_end += span.nbytes
    if data_end != size:
        raise FormatError(
            f"the tensors end at byte {data_end}, the file at {size}; it is "
            + ("cut off" if size < data_end else "longer than its header says")
        )


def header(
    entries: Sequence[tuple[str, str, Shape]], metadata: Mapping[str, str], reserve: int = 0
) -> tuple[bytes, array[int]]:
    """Return the header for `entries` (name, dtype, shape) in data order, and their offsets.

    The offsets are from the start of the file. The header is padded with blanks to a multiple
    of eight bytes, as the safetensors library does, after room for `reserve` more bytes.
    """
    document: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    offset, begins = 0, array("q")
    for name, dtype, shape in entries:
        end = offset + content_bytes(dtype, shape)
        document[name] = {
            "dtype": TO_SAFETENSORS[dtype],
            "shape": list(shape),
            "data_offsets": [offset, end],
        }
        begins.append(offset)
        offset = end
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (reserve + -(len(data) + reserve) % 8)
    base = 8 + len(data)
    return len(data).to_bytes(8, "little") + data, array("q", (base + b for b in begins))


class Safetensors(Container):
    """safetensors files as MindSpore writes them."""

    name = "safetensors"
    alone = True

    def read_index(self, read_at: ReadAt, size: int) -> Index:
        return read_index(read_at, size)

    def order(self, name: str, dtype: str) -> tuple[int, str]:
        """Wide types first, so that every tensor is aligned; then by name, as the library does."""
        return -item_size(dtype), name

    def lay_out(
        self,
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        checksum: bool,
        begins: int = 0,
    ) -> FileLayout:
        """Plan a file; metadata entries are kept, except those that are no longer true."""
        for name, dtype, _ in tensors:
            if dtype == TEXT or name == METADATA_KEY:
                kind_text = "texts, such as" if dtype == TEXT else "a parameter named"
                raise RequestError(
                    f"safetensors cannot hold {kind_text} {name!r}",
                    f"leave it out (--exclude '^{re.escape(name)}$') or write --format ckpt",
                )
        order = sorted(tensors, key=lambda spec: self.order(spec.name, spec.dtype))
        marked = {name for name, dtype, _ in order if dtype != INT4 and metadata.get(name) == INT4}
        untrue = {CRC_KEY, REDUNDANCY_KEY, *marked}
        kept_metadata = {key: value for key, value in metadata.items() if key not in untrue}
        marks = {name: INT4 for name, dtype, _ in order if dtype == INT4}
        reserve = _RESERVE if checksum else 0
        metadata = {"format": "ms", **kept_metadata, **marks}
        head, offsets = header(order, metadata, reserve)
        sizes = [content_bytes(spec.dtype, spec.shape) for spec in order]
        if sum(sizes) >= _LARGE and begins % 8 == 0:  # so that blocks can be shared with the source
            head, offsets = header(order, metadata, reserve + (begins - len(head)) % BLOCK)
            assert len(head) % BLOCK == begins % BLOCK
        spans = {spec.name: (Span(offset, n),) for spec, offset, n in zip(order, offsets, sizes)}
        return FileLayout(((0, head),), spans, len(head) + sum(sizes))

    def checksum(self, layout: FileLayout, crc_of_spans: CrcOf, blocks: Blocks) -> Patch:
        """Return the header with MindSpore's checksum among its metadata."""
        head = layout.headers[0][1]
        document = json.loads(head[8:])
        metadata = document.pop(METADATA_KEY)
        scalars = {
            name: INT4 if metadata.get(name) == INT4 else FROM_SAFETENSORS[item["dtype"]]
            for name, item in document.items()
            if not item["shape"]
        }
        crc = _crc_of_tensors(layout.spans, scalars, crc_of_spans, blocks)
        document = {METADATA_KEY: {**metadata, CRC_KEY: str(crc)}, **document}
        data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(data) <= len(head) - 8, "the reserve was too small"
        return 0, head[:8] + data.ljust(len(head) - 8)

    def checksums(
        self, index: Index, read_at: ReadAt, blocks: Blocks
    ) -> Sequence[tuple[str, str, str]]:
        if CRC_KEY not in index.metadata:
            return ()
        schema = index.schema
        scalars = {
            n: d for n, d, shape in zip(schema.names, schema.dtypes, schema.shapes) if not shape
        }
        spans = {name: index.spans(name) for name in schema.names}
        actual = _crc_of_tensors(spans, scalars, partial(crc_of, blocks), blocks)
        return [(FILE_CHECKSUM, index.metadata[CRC_KEY], str(actual))]


def _crc_of_tensors(
    spans: Mapping[str, tuple[Span, ...]],
    scalars: Mapping[str, str],
    crc_of_spans: CrcOf,
    blocks: Blocks,
) -> int:
    """Return MindSpore's checksum: crc32 over each name and its bytes, in name order.

    `scalars` are the types of parameters without an axis; if these are integers, MindSpore sums
    something else (`zeros_of`).
    """
    crc = 0
    for name in sorted(spans):
        crc = crc32(name.encode(), crc)
        zeros = None
        if name in scalars:
            zeros = zeros_of(scalars[name], (), b"".join(map(bytes, blocks(spans[name]))))
        if zeros is None:
            crc = crc_of_spans(spans[name], crc)
        else:
            block = bytes(min(zeros, _BLOCK))
            for start in range(0, zeros, _BLOCK):
                crc = crc32(block[: zeros - start], crc)
    return crc
