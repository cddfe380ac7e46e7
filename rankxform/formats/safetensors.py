"""safetensors: an 8-byte little-endian length, a JSON header, and one buffer of tensors.

Format: https://huggingface.co/docs/safetensors. MindSpore's own reader wants the header's
entries in data order, without gaps, to the end of the file, and marks a Int4 parameter by a
metadata entry ``{name: "Int4"}`` over I8 data.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

from .base import Entry, Index, ReadAt, Shape, Span, build
from .dtype import FROM_SAFETENSORS, INT4, TO_SAFETENSORS, content_bytes
from .wire import FormatError

_MAX_HEADER = 100_000_000
METADATA_KEY = "__metadata__"
CRC_KEY = "crc_num"
REDUNDANCY_KEY = "remove_redundancy"
_INTEGERS = ("Int8", "UInt8", "Int16", "UInt16", "Int32", "UInt32", "Int64", "UInt64", INT4)


MOST_ZEROS = 1 << 32


def zeros_of(dtype: str, shape: Shape, content: bytes) -> int | None:
    """Return how many zero bytes stand for a parameter in MindSpore's checksum, if they do.

    MindSpore sums ``bytes(array)``, and of a 0-d array of integers that is as many zeros as its
    value says. None where it is the content itself: of any other parameter; and of a value that is
    negative or larger than memory, with which MindSpore can neither save nor check.

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
    metadata = header.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise FormatError("__metadata__ must hold texts only")
    entries = [_entry(name, item, metadata, 8 + length) for name, item in header.items()]
    entries.sort(key=lambda e: (e.spans[0].offset, e.spans[0].nbytes))
    _check_gapless(entries, 8 + length, size)
    return build(entries, size, metadata=metadata)


def _header(data: bytes) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise FormatError("the header names one parameter twice")
        return found

    try:
        header = json.loads(data, object_pairs_hook=unique)
    except (ValueError, RecursionError) as error:
        raise FormatError(f"the header is not JSON: {error}") from None
    if not isinstance(header, dict):
        raise FormatError("the header is not a JSON object")
    return header


def _entry(name: str, item: Any, metadata: Mapping[str, str], base: int) -> Entry:
    try:
        dtype, shape, (begin, end) = item["dtype"], item["shape"], item["data_offsets"]
        numbers = [*shape, begin, end]
    except (KeyError, TypeError, ValueError):
        raise FormatError(f"{name!r}: dtype, shape and two data_offsets are wanted") from None
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or begin > end:
        raise FormatError(f"{name!r}: shape {shape} or data_offsets {[begin, end]} is impossible")
    if not isinstance(dtype, str) or dtype not in FROM_SAFETENSORS:
        raise FormatError(
            f"{name!r}: element type {dtype!r} is not one of MindSpore's "
            f"({', '.join(FROM_SAFETENSORS)})"
        )
    marked = metadata.get(name) == INT4 and dtype == "I8"
    return Entry(
        name,
        INT4 if marked else FROM_SAFETENSORS[dtype],
        tuple(shape),
        (Span(base + begin, end - begin),),
    )


def _check_gapless(entries: Sequence[Entry], base: int, size: int) -> None:
    at = base
    for entry in entries:
        span = entry.spans[0]
        if span.offset != at:
            raise FormatError(
                f"{entry.name!r} starts at byte {span.offset}, the data before it end at {at}"
            )
        at += span.nbytes
    if at != size:
        raise FormatError(
            f"the tensors end at byte {at}, the file at {size}; it is "
            + ("cut off" if size < at else "longer than its header says")
        )


def header(
    entries: Sequence[tuple[str, str, Shape]], metadata: Mapping[str, str], reserve: int = 0
) -> tuple[bytes, array[int]]:
    """Return the header for `entries` (name, dtype, shape) in data order, and their offsets.

    The offsets are from the start of the file. The header is padded with blanks to a multiple
    of eight bytes, as the safetensors library does, after room for `reserve` more bytes.
    """
    document: dict[str, Any] = {METADATA_KEY: dict(metadata)} if metadata else {}
    at, begins = 0, array("q")
    for name, dtype, shape in entries:
        end = at + content_bytes(dtype, shape)
        document[name] = {
            "dtype": TO_SAFETENSORS[dtype],
            "shape": list(shape),
            "data_offsets": [at, end],
        }
        begins.append(at)
        at = end
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (reserve + -(len(data) + reserve) % 8)
    base = 8 + len(data)
    return len(data).to_bytes(8, "little") + data, array("q", (base + b for b in begins))
