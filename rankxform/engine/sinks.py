"""Where content goes: a file, an array, a comparison."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import (
    TEXT,
    Container,
    FileLayout,
    Index,
    TensorSpec,
    content_bytes,
    crc_of,
    item_size,
    spans_of_range,
)
from rankxform.geometry.box import Box
from rankxform.planning.transfers import Transfer
from rankxform.statements import Finding, Where, as_difference
from rankxform.storage.posix import (
    Buffer,
    Descriptors,
    Position,
    blocks,
    read_into,
    share_blocks,
    shareable_blocks,
    start_writing,
    write_from,
)
from rankxform.storage.source_reader import SourceReader
from rankxform.transport.team import OnProgress
from rankxform.values import ScatteredCrc, dataclass

from .cast import BFLOAT16, bfloat16, transport_dtype

_PAGE = 4096
_BEHIND = 16 << 20
_NOTHING = memoryview(b"")
_HUGE, _LEAST_HUGE, _MOST_LOST = 2 << 20, 4 << 20, 16
"""Bytes of a huge page, bytes from which on numpy asks for such, part that may be lost."""


@dataclass(frozen=True)
class OutputFile:
    """One destination file: its name, its layout, and whether this process owns it.

    A process that writes later slices of a file does not own it, and does not create, finish or
    publish it. equal: other final names whose files are to hold the same bytes. on_written: gets
    the places of all bytes that are written, and the bytes; after a failed write some come again.
    """

    final: Path
    layout: FileLayout
    is_created_here: bool = True
    equal: tuple[Path, ...] = ()
    on_written: OnWritten | None = field(default=None, compare=False)

    @cached_property
    def part(self) -> Path:
        """The name the file has while it is written."""
        return part_of(self.final)

    @property
    def output_paths(self) -> tuple[Path, ...]:
        """All names that the bytes get."""
        return self.final, *self.equal


OnWritten = Callable[[int, Sequence[Buffer]], "Callable[[], object] | None"]
"""Called with the place of buffers that are about to be written one after the other. What it
returns is called when they are: only then may the buffers change."""


def part_of(final: Path) -> Path:
    """Return the name that a file has until it is complete."""
    return final.with_name(final.name + ".part")


def part_descriptors() -> Descriptors:
    """Open part files for writing and reading back."""
    return Descriptors(os.O_RDWR)


class PageWriter:
    """Writes by position into files that get the same bytes, in calls that start and end on page
    boundaries.

    Small neighbouring pieces are gathered in the buffer; of a large one only the ends that share
    a page with something else go through it. Ranks that hold replicas have such files.
    """

    def __init__(
        self, outputs: Sequence[OutputFile], descriptors: Descriptors, buffer: Buffer,
        is_write_behind: bool = False,
    ) -> None:  # fmt: skip
        """With `is_write_behind`, written data goes to the device while the work continues."""
        self._outputs = [(output.part, output.on_written) for output in outputs]
        self._descriptors, self._buffer = descriptors, buffer
        self._start = self._fill = 0
        self._behind, self._begun = is_write_behind, 0
        self.written = 0

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

    def share(self, offset: int, source: Position, nbytes: int) -> int:
        """Share whole blocks of another file at `offset`; return how many bytes all files share
        with it, 0 where the file system cannot."""
        for path, _ in self._outputs:
            if not share_blocks(source, (self._descriptors.get(path), path, offset), nbytes):
                return 0
        self.written += nbytes
        return nbytes * len(self._outputs)

    def flush(self) -> None:
        if self._fill:
            self._write(self._buffer[:0])
            self._start += self._fill
            self._fill = 0

    def _write(self, data: Buffer) -> None:
        """Write what is in the buffer and `data` behind it."""
        nbytes, filled = self._fill + len(data), self._buffer[: self._fill]
        pending_bytes = self.written + nbytes - self._begun
        is_started = self._behind and pending_bytes >= _BEHIND
        for path, on_written in self._outputs:
            fd = self._descriptors.get(path)
            begun = on_written and on_written(self._start, (filled, data))
            write_from(fd, path, self._start, filled, data)
            if begun:
                begun()
            if is_started:
                start_writing(fd, self._start + nbytes - pending_bytes, pending_bytes)
        self.written += nbytes
        if is_started:
            self._begun = self.written


def files_made_alike(
    outputs: Mapping[int, OutputFile], transfers: Iterable[Transfer]
) -> list[list[int]]:
    """Return the ids of `outputs`, together those that get the same bytes from all `transfers`."""
    targets_by_identity = dict.fromkeys(transfer.targets for transfer in transfers)
    file_groups = {files for targets in targets_by_identity for files in targets.values()}
    numbers_by_file: dict[int, list[int]] = {file: [] for file in outputs}
    for number, files in enumerate(file_groups):
        for file in files:
            numbers_by_file[file].append(number)
    files_by_content: dict[object, list[int]] = {}
    for file, output in outputs.items():
        key = id(output.layout), tuple(numbers_by_file[file])
        files_by_content.setdefault(key, []).append(file)
    return [*files_by_content.values()]


def file_sinks(
    outputs: Mapping[int, OutputFile],
    made_alike: Sequence[Sequence[int]],
    parts: Descriptors,
    room: int,
    is_write_behind: bool,
) -> dict[int, FileSink]:
    """Return the sinks of `outputs`, by destination file; files that are `made_alike` share one.

    room: bytes of each one's buffer. With `is_write_behind` the device writes while the work goes
    on, for files that are synced in the end.
    """
    buffers, sinks = memoryview(bytearray(room * len(made_alike))), dict[int, FileSink]()
    for number, files in enumerate(made_alike):
        buffer = buffers[number * room : (number + 1) * room]
        writer = PageWriter([outputs[file] for file in files], parts, buffer, is_write_behind)
        sinks |= dict.fromkeys(files, FileSink(outputs[files[0]].layout, writer))
    return sinks


class FileWriter(Protocol):
    """Where the bytes of one file, or of equal ones, go, by their places in it."""

    written: int  # bytes so far, of one file

    def put(self, offset: int, data: Buffer, head: Buffer = _NOTHING) -> None:
        """Take `data` for `offset`, and `head` for right before it."""

    def share(self, offset: int, source: Position, nbytes: int) -> int:
        """Take blocks of another file for `offset`, if that is possible; return how many bytes all
        files share with it."""

    def flush(self) -> None:
        """Write what is held back."""


class FileSink:
    """One destination file, or equal ones, while it is written (`engine.pipeline.Sink`)."""

    def __init__(self, layout: FileLayout, writer: FileWriter) -> None:
        self._spans, self._heads, self._tails = layout.spans, layout.heads, layout.tails
        self._shares = not layout.tails  # until the file system does not
        self._crcs: dict[str, ScatteredCrc] = {}  # of tensors with a tail, until all is put
        self._writer = writer

    @property
    def bytes_put(self) -> int:
        return self._writer.written

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Write content of `name` from its content byte `start` on."""
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
        crc, span = self._crcs.setdefault(name, ScatteredCrc()), self._spans[name][0]
        crc.add(start, data)
        if crc.nbytes == span.nbytes:
            tail = self._tails[name].with_crc(self._crcs.pop(name).whole)
            self._writer.put(span.offset + span.nbytes, memoryview(tail))

    def share(self, name: str, start: int, source: Position, nbytes: int) -> int:
        spans, (src, path, first) = self._spans[name], source
        if len(spans) > 1 or not self._shares:
            return 0
        offset = spans[0].offset + start
        part = shareable_blocks(first, offset, nbytes)
        if not part:
            return 0
        middle = src, path, first + part.start
        shared_bytes = self._writer.share(offset + part.start, middle, len(part))
        self._shares = shared_bytes > 0
        if self._shares:
            for a, b in ((0, part.start), (part.stop, nbytes)):
                end = memoryview(bytearray(b - a))
                read_into(src, path, first + a, end)
                self.put(name, start + a, end)
        return shared_bytes

    def finish(self) -> None:
        self._writer.flush()


def add_checksum(
    output: OutputFile, form: Container, descriptors: Descriptors, on_progress: OnProgress
) -> None:
    """Write the checksum that MindSpore's ``crc_check=True`` expects into a complete part file."""
    fd = descriptors.get(output.part)
    fill = partial(read_into, fd, output.part)
    read = blocks(fill, on_progress)
    offset, data = form.checksum(output.layout, partial(crc_of, read), read)
    write_from(fd, output.part, offset, memoryview(data))


class ArraySink:
    """One destination rank's slices, each in memory of its own (`pipeline.Sink`)."""

    def __init__(
        self,
        tensors: Iterable[TensorSpec],
        in_huge_pages: bool = False,
        into: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        """`tensors`: what the rank gets, in order; `into`: the caller's arrays for some of them.

        Memory of others is taken with their first content: it may be that of an array just
        released. With `in_huge_pages`, that of large ones begins with a huge page. Raises
        UsageError for arrays that do not fit.
        """
        self._new_memory = _empty_in_huge_pages if in_huge_pages else _empty
        self._tensors = list(tensors)
        self._into = into
        _check_arrays(into, {tensor.name: tensor for tensor in self._tensors})
        self._sizes = {name: content_bytes(dtype, shape) for name, dtype, shape in self._tensors}
        self._bytes = {name: array.reshape(-1).view("u1") for name, array in into.items()}
        self.bytes_put = 0

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Take content of `name` from its content byte `start` on."""
        self.memory_of(name).data[start : start + len(data)] = data
        self.bytes_put += len(data)

    def memory_of(self, name: str) -> Any:
        """Return the bytes of a slice, where its content may be put without `put`."""
        if name not in self._bytes:
            self._bytes[name] = self._new_memory(self._sizes[name])
        return self._bytes[name]

    def share(self, name: str, start: int, source: Position, nbytes: int) -> int:
        return 0

    def finish(self) -> None:
        """Nothing is kept back."""

    def take(self) -> dict[str, Any]:
        """Return the arrays, by name; a text as a str."""
        arrays_by_name: dict[str, Any] = {}
        for name, dtype, shape in self._tensors:
            data = self.memory_of(name)
            if name in self._into:
                arrays_by_name[name] = self._into[name]
            elif dtype == TEXT:
                arrays_by_name[name] = _text(name, data.tobytes())
            else:
                arrays_by_name[name] = data.view(numpy_type(dtype)).reshape(shape)
        return arrays_by_name


def _check_arrays(into: Mapping[str, Any], tensors: Mapping[str, TensorSpec]) -> None:
    """Refuse arrays that are not those of the tensors of their names."""
    for name, array in into.items():
        if name not in tensors or tensors[name].dtype == TEXT:
            raise UsageError(f"into: {name!r} is no array that this process gets", "leave it out")
        _, dtype, shape = tensors[name]
        types, actual = (numpy_type(dtype), transport_dtype(dtype)), f"a {type(array).__name__}"
        is_other_kind = isinstance(array, np.matrix) or hasattr(array, "mask")
        if isinstance(array, np.ndarray) and not is_other_kind:
            if array.flags.carray and array.dtype in types and array.shape == tuple(shape):
                continue
            order = "" if array.flags.carray else ", strided or read-only"
            actual = f"{array.dtype} {list(array.shape)}{order}"
        raise UsageError(
            f"into: expected {dtype} {list(shape)} for {name!r}, and it is {actual}",
            f"numpy.empty({tuple(shape)}, {str(types[0])!r})",
        )


def check_apart(into: Mapping[str, Any], slices: Mapping[str, Any]) -> None:
    """Refuse arrays that share memory with each other, or with slices that are to be read."""
    if not into:
        return
    spans = [(_span(array), f"into[{name!r}]", True) for name, array in into.items()]
    spans += [(_span(array), f"the slice {name!r}", False) for name, array in slices.items()]
    read_up_to, filled_up_to = (0, ""), (0, "")
    for (start, stop), label, is_filled in sorted(span for span in spans if span[0]):
        reached, before = max(read_up_to, filled_up_to) if is_filled else filled_up_to
        if start < reached:
            raise UsageError(f"{before} and {label} share memory", "arrays of their own in into=")
        if is_filled:
            filled_up_to = max(filled_up_to, (stop, label))
        else:
            read_up_to = max(read_up_to, (stop, label))


def _span(array: Any) -> tuple[int, ...]:
    """Return the addresses of an array's first byte, and behind its last; () if it has none."""
    if not array.size:
        return ()
    steps = [(count - 1) * stride for count, stride in zip(array.shape, array.strides)]
    first = array.__array_interface__["data"][0]
    lowest = first + sum(step for step in steps if step < 0)
    return lowest, first + sum(step for step in steps if step > 0) + array.itemsize


def _empty(nbytes: int) -> Any:
    return np.empty(nbytes, np.uint8)


def _empty_in_huge_pages(nbytes: int) -> Any:
    """Return room that starts where a huge page does, unless much of the last one were lost.

    The system then gives all of it by huge pages, and not the first and last megabyte by 4 KiB.
    """
    if nbytes < _LEAST_HUGE or -nbytes % _HUGE > nbytes // _MOST_LOST:
        return _empty(nbytes)
    room = _empty(nbytes + _HUGE)
    start = -room.ctypes.data % _HUGE
    return room[start : start + nbytes]


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"is no UTF-32 text ({error.reason})", where=f"{name!r}") from error


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Return the numpy type that represents MindSpore's `dtype` here."""
    return bfloat16() if dtype == BFLOAT16 else transport_dtype(dtype)


COMPARED_BYTES = 1 << 20
"""Bytes of existing files that a process holds beside what they are compared with."""


@dataclass(frozen=True)
class ExpectedSlice:
    """What one destination rank should hold of a parameter: its type, and its box of the whole."""

    dtype: str
    box: Box


class ComparingSink:
    """One destination file, compared with what is put."""

    def __init__(
        self,
        file: int,
        path: str,
        reader: SourceReader,
        index: Index,
        slices: Mapping[str, ExpectedSlice],
        block: Buffer,
    ) -> None:
        """`slices` are what the file should hold; its headers are compared with them at once.

        block: room for what is read of the file; sinks that are used in turn share one.
        """
        self._file, self._path, self._reader, self._slices = file, path, reader, slices
        self._header = header_findings(index, path, slices)
        self._unfit_names = {f.elements.tensor for f in self._header if f.elements}
        # Tensor -> index of its first element that differs, in the full tensor, and how many do.
        self._differing: dict[str, tuple[tuple[int, ...], int]] = {}
        self.bytes_put = 0
        self._block = block

    @property
    def findings(self) -> list[Finding]:
        """What differs, so far: in headers, and in content."""
        sizes = {name: prod(self._slices[name].box.shape) for name in self._differing}
        return [
            *self._header,
            *(
                as_difference("differs", self._path, Where(name, index, count, sizes[name]))
                for name, (index, count) in self._differing.items()
            ),
        ]

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Compare content of `name` from its content byte `start` on."""
        if name in self._unfit_names:
            return
        for offset in range(0, len(data), len(self._block)):
            part = data[offset : offset + len(self._block)]
            room = self._block[: len(part)]
            self._reader.read(self._file, name, start + offset, room)
            self.bytes_put += len(part)
            if not _equal(part, room):
                self._note(name, start + offset, part, room)

    def share(self, name: str, start: int, source: Position, nbytes: int) -> int:
        return 0

    def finish(self) -> None:
        """Nothing is kept back."""

    def _note(self, name: str, start: int, data: Buffer, file_content: Buffer) -> None:
        expected = self._slices[name]
        item = item_size(expected.dtype)
        first = start % item  # a block may start within an element; so may its end be
        differ = np.flatnonzero(
            np.frombuffer(data, np.uint8) != np.frombuffer(file_content, np.uint8)
        )
        elements = np.unique((differ + first) // item)
        place = np.unravel_index(start // item + int(elements[0]), expected.box.shape or (1,))
        index = tuple(int(i) + o for i, o in zip(place, expected.box.start))
        first_index, count = self._differing.get(name, (index, 0))
        self._differing[name] = min(first_index, index), count + len(elements)


def header_findings(index: Index, path: str, slices: Mapping[str, ExpectedSlice]) -> list[Finding]:
    """Return the parameters that are missing, unexpected, or of a wrong type or shape."""
    file_schema = index.schema
    schema = {
        n: (d, s) for n, d, s in zip(file_schema.names, file_schema.dtypes, file_schema.shapes)
    }
    reasons = {name: _mismatch(schema.get(name), expected) for name, expected in slices.items()}
    reasons.update((name, "should not be here") for name in schema if name not in slices)
    return [as_difference(text, path, Where(name)) for name, text in reasons.items() if text]


def _mismatch(header_entry: tuple[str, tuple[int, ...]] | None, expected: ExpectedSlice) -> str:
    if header_entry is None:
        return "is missing"
    if header_entry[0] != expected.dtype:
        return f"is of type {header_entry[0]}, not {expected.dtype}"
    if header_entry[1] != expected.box.shape:
        return f"has shape {list(header_entry[1])}, not {list(expected.box.shape)}"
    return ""


def _equal(a: Buffer, b: Buffer) -> bool:
    word = 8 if len(a) % 8 == 0 else 1
    kind = np.dtype(f"u{word}")
    return bool((np.frombuffer(a, kind) == np.frombuffer(b, kind)).all())
