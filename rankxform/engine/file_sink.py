"""Destination files: where everything goes in one, and a stream of writes into it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import blake2b
from pathlib import Path

from rankxform.errors import RequestError
from rankxform.formats import ckpt, safetensors
from rankxform.formats.base import Shape, Span
from rankxform.formats.dtype import INT4, TEXT, content_bytes, item_size
from rankxform.storage.posix import (
    SYSCALL_BYTES,
    Buffer,
    Descriptors,
    Tick,
    blocks,
    start_writing,
    write_from,
)

_PAGE = 4096
_BEHIND = 16 << 20


@dataclass(frozen=True)
class FileLayout:
    """The bytes of a destination file, planned; the same for all ranks with slices of one shape.

    headers: (offset, bytes) of everything that is not tensor content, ascending.
    spans: where the content of each parameter goes, in order.
    size: the file's bytes, without a trailing checksum.
    metadata: what safetensors keeps beside tensors; None in a `.ckpt`.
    scalars: the types of parameters without an axis.
    """

    headers: tuple[tuple[int, bytes], ...]
    spans: Mapping[str, tuple[Span, ...]]
    size: int
    metadata: Mapping[str, str] | None = None
    scalars: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def digest(self) -> str:
        """What two layouts share only if they are the same."""
        state = blake2b(repr((self.headers, dict(self.spans))).encode(), digest_size=8)
        return state.hexdigest()


@dataclass(frozen=True)
class Output:
    """One destination file: its name, its layout, and whether it is written from the start.

    A process that writes a later portion of a file does not create, finish or publish it.
    `alike` are other final names whose files are to hold the same bytes.
    """

    final: Path
    layout: FileLayout
    owned: bool = True
    alike: tuple[Path, ...] = ()

    @property
    def part(self) -> Path:
        """The name the file has while it is written."""
        return part_of(self.final)

    def nbytes(self, crc: bool) -> int:
        """Return the bytes of the complete file, with a checksum or without."""
        trailer = ckpt.CRC_BYTES if crc and self.layout.metadata is None else 0
        return self.layout.size + trailer

    @property
    def finals(self) -> tuple[Path, ...]:
        """All names that the bytes get."""
        return self.final, *self.alike


def part_of(final: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return final.with_name(final.name + ".part")


Entry = tuple[str, str, Shape]
"""Name, type and slice shape of a parameter."""


def lay_out_ckpt(entries: Sequence[Entry]) -> FileLayout:
    """Plan a `.ckpt` file of `entries`, in their order."""
    headers, spans, at = [], {}, 0
    for name, dtype, shape in entries:
        found = []
        for nbytes in ckpt.pieces(content_bytes(dtype, shape)):
            head = ckpt.header(name, dtype, shape, nbytes)
            headers.append((at, head))
            found.append(Span(at + len(head), nbytes))
            at += len(head) + nbytes
        spans[name] = tuple(found)
    return FileLayout(tuple(headers), spans, at)


def lay_out_safetensors(
    entries: Sequence[Entry], metadata: Mapping[str, str], crc: bool
) -> FileLayout:
    """Plan a safetensors file of `entries`; `metadata` are kept, but for what becomes untrue.

    The order is the library's own: wide types first, so that every tensor is aligned; then by
    name. Raises RequestError for what the format cannot hold.
    """
    for name, dtype, _ in entries:
        if dtype == TEXT or name == safetensors.METADATA_KEY:
            what = "texts, such as" if dtype == TEXT else "a parameter named"
            raise RequestError(
                f"safetensors cannot hold {what} {name!r}; leave it out (--exclude '^{name}$') "
                "or write --format ckpt"
            )
    order = sorted(entries, key=safetensors_order)
    dropped = (safetensors.CRC_KEY, safetensors.REDUNDANCY_KEY)
    kept = {key: value for key, value in metadata.items() if key not in dropped}
    marks = {name: INT4 for name, dtype, _ in order if dtype == INT4}
    described = {"format": "ms", **kept, **marks}
    head, offsets = safetensors.header(order, described, reserve=40 if crc else 0)
    sizes = [content_bytes(dtype, shape) for _, dtype, shape in order]
    spans = {
        name: (Span(offset, nbytes),) for (name, _, _), offset, nbytes in zip(order, offsets, sizes)
    }
    scalars = {name: dtype for name, dtype, shape in order if not shape}
    return FileLayout(((0, head),), spans, len(head) + sum(sizes), described, scalars)


def safetensors_order(entry: Entry) -> tuple[int, str]:
    """Return where an entry's data stand among others': wide types first, then by name."""
    name, dtype, _ = entry
    return -item_size(dtype), name


class Writer:
    """Writes by position into one file, in calls that start and end on page boundaries.

    Small neighbouring pieces are gathered in the buffer; of a large one only the ends that share
    a page with something else go through it.
    """

    def __init__(
        self, path: Path, descriptors: Descriptors, buffer: Buffer, behind: bool = False
    ) -> None:
        """With `behind`, the device is set to write what is there while the work goes on."""
        self._path, self._descriptors, self._buffer = path, descriptors, buffer
        self._start = self._fill = 0
        self._behind, self._begun = behind, 0
        self.written = 0

    def put(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`; it may stay in the buffer until `flush`."""
        if offset != self._start + self._fill:
            self.flush()
            self._start = offset
        fill, nbytes = self._fill, len(data)
        if fill + nbytes <= len(self._buffer):
            self._buffer[fill : fill + nbytes] = data
            self._fill = fill + nbytes
            return
        bulk = (offset + nbytes) // _PAGE * _PAGE - offset
        if bulk <= 0:
            self.flush()
            bulk = 0
        else:
            self._write(data[:bulk])
        tail = nbytes - bulk
        self._buffer[:tail] = data[bulk:]
        self._start, self._fill = offset + bulk, tail

    def flush(self) -> None:
        if self._fill:
            self._write(self._buffer[:0])
            self._start += self._fill
            self._fill = 0

    def _write(self, data: Buffer) -> None:
        """Write what is in the buffer and `data` behind it."""
        fd, nbytes = self._descriptors.get(self._path), self._fill + len(data)
        write_from(fd, self._path, self._start, self._buffer[: self._fill], data)
        self.written += nbytes
        if self._behind and self.written - self._begun >= _BEHIND:
            done = self.written - self._begun
            start_writing(fd, self._start + nbytes - done, done)
            self._begun = self.written


def add_crc(output: Output, descriptors: Descriptors, tick: Tick) -> None:
    """Write the checksum that MindSpore's ``crc_check=True`` expects into a complete part file.

    `.ckpt`: crc32 of all bytes, in a trailer. safetensors: what `tensors_crc` returns, in the
    metadata.
    """
    fd, layout = descriptors.get(output.part), output.layout
    if layout.metadata is None:
        trailer = ckpt.crc_trailer(file_crc(fd, output.part, [Span(0, layout.size)], 0, tick))
        write_from(fd, output.part, layout.size, memoryview(trailer))
        return
    crc = tensors_crc(fd, output.part, layout.spans, layout.scalars, tick)
    told = {**layout.metadata, safetensors.CRC_KEY: str(crc)}
    head = _with_metadata(layout.headers[0][1], told)
    write_from(fd, output.part, 0, memoryview(head))


def _with_metadata(head: bytes, metadata: Mapping[str, str]) -> bytes:
    """Return a safetensors header of the same length with other metadata."""
    document = json.loads(head[8:])
    document = {
        safetensors.METADATA_KEY: dict(metadata),
        **{k: v for k, v in document.items() if k != safetensors.METADATA_KEY},
    }
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    assert len(data) <= len(head) - 8, "the reserve was too small"
    return head[:8] + data.ljust(len(head) - 8)


def file_crc(fd: int, path: Path, spans: Iterable[Span], crc: int, tick: Tick) -> int:
    """Return the crc32 over `spans` of a file, continued from `crc`."""
    for part in blocks(fd, path, spans):
        crc = zlib.crc32(part, crc)
        tick(0)
    return crc


def tensors_crc(
    fd: int,
    path: Path,
    spans: Mapping[str, tuple[Span, ...]],
    scalars: Mapping[str, str],
    tick: Tick,
) -> int:
    """Return safetensors' checksum: crc32 over each name and its bytes, in name order.

    `scalars` are the types of parameters without an axis, of which MindSpore sums something else
    if they are integers (`safetensors.zeros_of`).
    """
    crc = 0
    for name in sorted(spans):
        crc = zlib.crc32(name.encode(), crc)
        zeros = None
        if name in scalars:
            content = b"".join(map(bytes, blocks(fd, path, spans[name])))
            zeros = safetensors.zeros_of(scalars[name], (), content)
        if zeros is None:
            crc = file_crc(fd, path, spans[name], crc, tick)
        else:
            crc = _crc_of_zeros(zeros, crc, tick)
    return crc


def _crc_of_zeros(nbytes: int, crc: int, tick: Tick) -> int:
    block = bytes(min(nbytes, SYSCALL_BYTES))
    for start in range(0, nbytes, SYSCALL_BYTES):
        crc = zlib.crc32(block[: nbytes - start], crc)
        tick(0)
    return crc


def part_descriptors() -> Descriptors:
    """Open part files for writing and reading back."""
    return Descriptors(os.O_RDWR)
