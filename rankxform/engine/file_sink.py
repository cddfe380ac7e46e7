"""Destination files: a sink that writes tensor content, and headers in between."""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from zlib import crc32

from rankxform.formats.base import Container, FileLayout, spans_of_range
from rankxform.storage.posix import (
    Buffer,
    Descriptors,
    OnProgress,
    blocks,
    read_into,
    start_writing,
    write_from,
)
from rankxform.storage.reflink import Position, share_blocks, shareable_blocks
from rankxform.values import dataclass

_PAGE = 4096
_BEHIND = 16 << 20
_BUFFER = 64 << 10
_LEAST_BUFFER = 4 << 10
_NOTHING = memoryview(b"")


@dataclass(frozen=True)
class OutputFile:
    """One destination file: its name, its layout, and whether this process owns it.

    A process that writes later slices of a file does not own it, and does not create, finish or
    publish it. equal: other final names whose files are to hold the same bytes.
    """

    final: Path
    layout: FileLayout
    owned: bool = True
    equal: tuple[Path, ...] = ()

    @property
    def part(self) -> Path:
        """The name the file has while it is written."""
        return part_of(self.final)

    @property
    def output_paths(self) -> tuple[Path, ...]:
        """All names that the bytes get."""
        return self.final, *self.equal


def part_of(final: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return final.with_name(final.name + ".part")


def part_descriptors() -> Descriptors:
    """Open part files for writing and reading back."""
    return Descriptors(os.O_RDWR)


class PageWriter:
    """Writes by position into one file, in calls that start and end on page boundaries.

    Small neighbouring pieces are gathered in the buffer; of a large one only the ends that share
    a page with something else go through it.
    """

    def __init__(
        self, path: Path, descriptors: Descriptors, buffer: Buffer, is_write_behind: bool = False
    ) -> None:
        """With `is_write_behind`, written data goes to the device while the work continues."""
        self._path, self._descriptors, self._buffer = path, descriptors, buffer
        self._start = self._fill = 0
        self._behind, self._begun = is_write_behind, 0
        self.written = 0

    @property
    def room(self) -> int:
        """Bytes that the buffer can hold."""
        return len(self._buffer)

    def put(self, offset: int, data: Buffer, head: Buffer = _NOTHING) -> None:
        """Write `data` at `offset`, and `head` right before it; both may stay in the buffer until
        `flush`."""
        if head:
            fill, data_start = self._fill, self._fill + len(head)
            end = data_start + len(data)
            if offset - len(head) == self._start + fill and end <= len(self._buffer):
                self._buffer[fill:data_start] = head
                self._buffer[data_start:end] = data
                self._fill = end
                return
            self.put(offset - len(head), head)
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

    def share(self, offset: int, source: Position, nbytes: int) -> bool:
        """Share whole blocks of another file at `offset`; tell whether the file system can."""
        fd = self._descriptors.get(self._path)
        if not share_blocks(source, (fd, self._path, offset), nbytes):
            return False
        self.written += nbytes
        return True

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
            pending_bytes = self.written - self._begun
            start_writing(fd, self._start + nbytes - pending_bytes, pending_bytes)
            self._begun = self.written


def file_sinks(
    outputs: Mapping[int, OutputFile], parts: Descriptors, memory: int, is_write_behind: bool
) -> dict[int, FileSink]:
    """Return a sink for each of `outputs`, by destination rank.

    `memory`, in bytes, bounds their buffers. With `is_write_behind` the device writes while the
    work goes on, for files that are synced in the end.
    """
    room = min(_BUFFER, max(_LEAST_BUFFER, memory // max(1, len(outputs))))
    buffers = memoryview(bytearray(room * len(outputs)))
    return {
        rank: FileSink(output, parts, buffers[i * room : (i + 1) * room], is_write_behind)
        for i, (rank, output) in enumerate(outputs.items())
    }


class FileSink:
    """One destination file while it is written (`rankxform.engine.pipeline.Sink`)."""

    def __init__(
        self, output: OutputFile, parts: Descriptors, buffer: Buffer, is_write_behind: bool
    ) -> None:
        layout = output.layout
        self._spans, self._heads, self._tails = layout.spans, layout.heads, layout.tails
        self._shares = not layout.tails  # until the file system does not
        self._crcs: dict[str, int] = {}  # of tensors with a tail, until all is put
        self._writer = PageWriter(output.part, parts, buffer, is_write_behind)

    @property
    def written(self) -> int:
        return self._writer.written

    @property
    def room(self) -> int:
        """Bytes that its buffer can hold back."""
        return self._writer.room

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Write content of `name` from its content byte `start` on, in ascending order."""
        spans, put = self._spans[name], self._writer.put
        if len(spans) == 1:
            offset = spans[0].offset + start
            if not start and offset in self._heads:
                put(offset, data, self._heads[offset])
            else:
                put(offset, data)
            if name in self._tails:
                self._put_tail(name, start, data)
            return
        position = 0
        for span in spans_of_range(spans, start, len(data)) if len(data) else spans:
            head = self._heads.get(span.offset)
            if head is not None:
                put(span.offset - len(head), head)
            put(span.offset, data[position : position + span.nbytes])
            position += span.nbytes

    def _put_tail(self, name: str, start: int, data: Buffer) -> None:
        """Sum content that was put, and write what stands behind it when that was the last."""
        crc, span = crc32(data, self._crcs.pop(name, 0)), self._spans[name][0]
        if start + len(data) < span.nbytes:
            self._crcs[name] = crc
        else:
            tail = self._tails[name].with_crc(crc)
            self._writer.put(span.offset + span.nbytes, memoryview(tail))

    def share(self, name: str, start: int, source: Position, nbytes: int) -> bool:
        spans, (src, path, first) = self._spans[name], source
        if len(spans) > 1 or not self._shares:
            return False
        offset = spans[0].offset + start
        part = shareable_blocks(first, offset, nbytes)
        if not part:
            return False
        middle = src, path, first + part.start
        self._shares = self._writer.share(offset + part.start, middle, len(part))
        if self._shares:
            for a, b in ((0, part.start), (part.stop, nbytes)):
                end = memoryview(bytearray(b - a))
                read_into(src, path, first + a, end)
                self.put(name, start + a, end)
        return self._shares

    def finish(self) -> None:
        self._writer.flush()


def add_checksum(
    output: OutputFile, form: Container, descriptors: Descriptors, on_progress: OnProgress
) -> None:
    """Write the checksum that MindSpore's ``crc_check=True`` expects into a complete part file."""
    fd = descriptors.get(output.part)
    fill = partial(read_into, fd, output.part)
    offset, data = form.checksum(output.layout, blocks(fill, on_progress))
    write_from(fd, output.part, offset, memoryview(data))
