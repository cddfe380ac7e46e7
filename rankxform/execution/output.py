"""Destination files: where everything goes in one, and a stream of writes into it."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from rankxform.errors import RequestError
from rankxform.formats import ckpt, safetensors
from rankxform.formats.dtype import INT4, TEXT, item_size
from rankxform.formats.index import Span
from rankxform.planning.plan import RankPlan, Slice

from .files import Buffer, Descriptors, Tick, blocks, write_from


@dataclass(frozen=True)
class Output:
    """The bytes of one destination file, planned.

    headers: (offset, bytes) of everything that is not tensor content, ascending.
    spans: where the content of each parameter goes, in order.
    size: the file's bytes, without a trailing checksum.
    """

    final: Path
    headers: tuple[tuple[int, bytes], ...]
    spans: Mapping[str, tuple[Span, ...]]
    size: int
    metadata: Mapping[str, str] | None = None

    @property
    def part(self) -> Path:
        """The name the file has while it is written."""
        return self.final.with_name(self.final.name + ".part")


def lay_out(plan: RankPlan, final: Path, metadata: Mapping[str, str], crc: bool) -> Output:
    """Plan the file `final` of one destination rank; its name tells the format.

    `metadata` is kept by safetensors. Raises RequestError for what the format cannot hold.
    """
    if final.suffix == ".safetensors":
        return _safetensors(plan, final, metadata, crc)
    headers, spans, at = [], {}, 0
    for piece in plan.slices:
        parameter, found = piece.parameter, []
        for nbytes in ckpt.pieces(piece.nbytes):
            head = ckpt.header(parameter.name, parameter.dtype, piece.box.shape, nbytes)
            headers.append((at, head))
            found.append(Span(at + len(head), nbytes))
            at += len(head) + nbytes
        spans[parameter.name] = tuple(found)
    return Output(final, tuple(headers), spans, at)


def _safetensors(plan: RankPlan, final: Path, metadata: Mapping[str, str], crc: bool) -> Output:
    texts = [s.parameter.name for s in plan.slices if s.parameter.dtype == TEXT]
    if texts:
        raise RequestError(
            f"safetensors cannot hold texts, such as {texts[0]!r}; "
            f"leave them out (--exclude '^{texts[0]}$') or write --format ckpt"
        )
    # The library's own order: wide types first, so that every tensor is aligned; then by name.
    order = sorted(plan.slices, key=lambda s: (-item_size(s.parameter.dtype), s.parameter.name))
    entries = [(s.parameter.name, s.parameter.dtype, s.box.shape) for s in order]
    if any(name == safetensors.METADATA_KEY for name, _, _ in entries):
        raise RequestError(
            f"safetensors cannot hold a parameter named {safetensors.METADATA_KEY!r}; "
            f"leave it out (--exclude '^{safetensors.METADATA_KEY}$') or write --format ckpt"
        )
    dropped = (safetensors.CRC_KEY, safetensors.REDUNDANCY_KEY)
    kept = {key: value for key, value in metadata.items() if key not in dropped}
    marks = {name: INT4 for name, dtype, _ in entries if dtype == INT4}
    described = {"format": "ms", **kept, **marks}
    head, offsets = safetensors.header(entries, described, reserve=40 if crc else 0)
    spans = {s.parameter.name: (Span(offset, s.nbytes),) for s, offset in zip(order, offsets)}
    size = len(head) + sum(s.nbytes for s in order)
    return Output(final, ((0, head),), spans, size, described)


def ordered(plan: RankPlan, output: Output) -> list[Slice]:
    """Return the slices in the order of their content in the file."""
    return sorted(plan.slices, key=lambda s: output.spans[s.parameter.name][0].offset)


class Writer:
    """Writes by position into one file, small neighbouring ones gathered into one call."""

    def __init__(self, path: Path, descriptors: Descriptors, buffer: Buffer) -> None:
        self._path, self._descriptors, self._buffer = path, descriptors, buffer
        self._start = self._fill = 0
        self.written = 0

    def put(self, offset: int, data: Buffer) -> None:
        """Write `data` at `offset`; it may stay in the buffer until `flush`."""
        if offset != self._start + self._fill or self._fill + len(data) > len(self._buffer):
            self.flush()
            self._start = offset
        if len(data) > len(self._buffer):
            self._write(offset, data)
            self._start = offset + len(data)
            return
        self._buffer[self._fill : self._fill + len(data)] = data
        self._fill += len(data)

    def flush(self) -> None:
        if self._fill:
            self._write(self._start, self._buffer[: self._fill])
            self._start += self._fill
            self._fill = 0

    def _write(self, offset: int, data: Buffer) -> None:
        write_from(self._descriptors.get(self._path), self._path, offset, data)
        self.written += len(data)


def add_crc(output: Output, descriptors: Descriptors, tick: Tick) -> None:
    """Write the checksum that MindSpore's ``crc_check=True`` expects into a complete part file.

    `.ckpt`: crc32 of all bytes, in a trailer. safetensors: crc32 chained over name and bytes of
    each tensor in name order, in the metadata.
    """
    fd = descriptors.get(output.part)
    if output.metadata is None:
        trailer = ckpt.crc_trailer(file_crc(fd, output.part, [Span(0, output.size)], 0, tick))
        write_from(fd, output.part, output.size, memoryview(trailer))
        return
    crc = tensors_crc(fd, output.part, output.spans, tick)
    entries_head = output.headers[0][1]
    head = _with_metadata(entries_head, {**output.metadata, safetensors.CRC_KEY: str(crc)})
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


def tensors_crc(fd: int, path: Path, spans: Mapping[str, tuple[Span, ...]], tick: Tick) -> int:
    """Return safetensors' checksum: crc32 over each name and its bytes, in name order."""
    crc = 0
    for name in sorted(spans):
        crc = file_crc(fd, path, spans[name], zlib.crc32(name.encode(), crc), tick)
    return crc


def part_descriptors() -> Descriptors:
    """Open part files for writing and reading back."""
    return Descriptors(os.O_RDWR)
