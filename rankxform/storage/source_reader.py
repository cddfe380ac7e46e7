"""Source files: indexed, their tensors read, sampled, and checked."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, nullcontext, suppress
from dataclasses import replace
from functools import lru_cache, partial
from itertools import chain
from typing import Any
from zlib import crc32

from rankxform.errors import CheckpointError, FormatError
from rankxform.formats.container import (
    FIRST_BYTES,
    FLOATS,
    Container,
    DeclaredFile,
    Index,
    Span,
    container_of,
    content_bytes,
    file_signature,
    item_size,
    non_tensor_spans,
    spans_of_range,
)
from rankxform.planning.evidence import ContentDigest
from rankxform.transport.team import OnProgress
from rankxform.values import NamedTuple, blake2b

from .posix import AnyPath, Buffer, Position, blocks, open_for_reading
from .store import FileVersion, HeaderReader, RangeReader, storage_of, store_at


def container_of_path(path: AnyPath) -> Container:
    """Return the container of a checkpoint file, which its name tells."""
    return container_of(os.path.splitext(path)[1])


def index_file(path: AnyPath) -> Index:
    """Read the table of contents of `path` from its headers. Raises CheckpointError."""
    return Indexer().index(path)


_TICK = 10_000_000
"""Nanoseconds after which the clock of a file system has ticked."""


_NOTHING = DeclaredFile()


class Indexer:
    """Indexes files; a file laid out like an earlier one is recognized by comparing headers.

    The ranks of a stage mostly save the same parameters in the same shapes, so their files differ
    in content alone: all other bytes are the same in the same places, and so is the
    table of contents. Comparing is several times faster than parsing, and alike files share one
    table in memory.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[str, int], list[_Template]] = {}

    def index(self, path: AnyPath, declared: DeclaredFile = _NOTHING) -> Index:
        """Read the table of contents of `path`. Raises CheckpointError if it is not as declared."""
        kind = container_of_path(path)
        with store_at(str(path)).open("") as file:
            size, modified, inode, changed = file.version
            templates = (
                self._seen.setdefault((kind.name, size), []) if kind.has_equal_headers else []
            )
            index = next((t.index for t in templates if t.fits(file)), None)
            if size < declared.nbytes:
                raise CheckpointError(
                    f"is shorter than {declared.source} says: {size:,} of {declared.nbytes:,} "
                    "bytes",
                    "copy it again",
                    where=path,
                )
            try:
                if index is None:
                    index = kind.read_index(file.read_at, size)
                    templates.append(_Template(index, str(path)))
                    if file.expect is not None and kind.has_equal_headers:
                        # What was fetched is at hand now.
                        templates[-1].fits(file, is_its_own=True)
                index = index.viewed(declared.views)
            except FormatError as error:
                signature = file_signature(file.read_at(0, min(FIRST_BYTES, size)))
                if signature is None or not kind.alone:
                    raise CheckpointError.of_parts(error.at(path)) from error
                raise CheckpointError(
                    f"expected a {kind.name} file, and it is {signature.title}", *signature.tries,
                    where=path,
                ) from error  # fmt: skip
        return replace(index, modified=modified, inode=inode, changed=changed)


def wait_for_newer_mtime(indexes: Iterable[Index]) -> None:
    """Wait until a later write gets a later modification time than these files have.

    A file system's clock ticks every few milliseconds. Two writes within a tick get equal times.
    """
    newest, now = max((index.modified for index in indexes), default=0), time.time_ns()
    if now - _TICK < newest <= now:
        time.sleep(_TICK / 1e9)


class _Template:
    """The bytes of a file outside its content. They are read when a second file may equal them."""

    def __init__(self, index: Index, path: str) -> None:
        self.index = index
        self._path = path
        self._headers: list[tuple[int, bytes]] = []

    def fits(self, file: HeaderReader, *, is_its_own: bool = False) -> bool:
        """Whether another file of the same size has the same bytes outside of its content."""
        if not self._headers:
            opened = nullcontext(file) if is_its_own else store_at(self._path).open("")
            with opened as first:
                spans = non_tensor_spans(self.index)
                self._headers = [(s.offset, first.read_at(s.offset, s.nbytes)) for s in spans]
        if file.expect is not None:
            file.expect(Span(offset, len(data)) for offset, data in self._headers)
        return all(file.read_at(offset, len(data)) == data for offset, data in self._headers)


class TensorRead(NamedTuple):
    """A read of the content of a tensor in a file, by its entry there, in bytes."""

    file: int
    entry: str
    start: int
    nbytes: int


class SourceReader:
    """The source files of one process.

    paths, indexes: by file. recheck: called with the id of a file of which something was changed
    that may not concern its content; raises CheckpointError if it does. nbytes: read so far. ahead:
    how many reads may be in flight if they are announced; 0 where that gains nothing. is_memory:
    whether all files lie in memory.
    """

    def __init__(
        self,
        paths: Mapping[int, str],
        indexes: Mapping[int, Index],
        recheck: Callable[[int], None] = lambda file: None,
    ) -> None:
        self._paths, self._indexes, self._recheck = paths, indexes, recheck
        kinds = dict.fromkeys(map(storage_of, paths.values()))
        self._ranges = {kind: kind.ranges() for kind in kinds}
        self._open: dict[tuple[int, bool], tuple[RangeReader, str, Index]] = {}
        self._versions: dict[int, FileVersion] = {}
        self._coming: Iterator[TensorRead] = iter(())
        self._next: TensorRead | None = None  # of those to come
        # Each with how many requests it takes.
        self._flight: deque[tuple[TensorRead, int]] = deque()
        self._memory = self._free_requests = self._free_bytes = 0
        self.nbytes = 0
        self.ahead = max((ranges.ahead for ranges in self._ranges.values()), default=0)
        self.is_memory = bool(kinds) and all(ranges.is_memory for ranges in self._ranges.values())

    def read(self, file: int, name: str, start: int, room: Buffer, sparse: bool = False) -> None:
        """Fill `room` with what a file holds of `name`, from byte `start` on.

        `name` is the source's own, and `start` counts in the tensor's content. Raises StorageError,
        and CheckpointError where the file has changed since it was indexed. sparse: out of bytes
        that nobody wants.
        """
        ranges, path, index = self._opened(file, sparse)
        i = index.schema.position[name]
        if i not in index.pieces:
            ranges.read(path, index.offsets[i] + start, room, sparse)
        else:
            done = 0
            for span in spans_of_range(index.spans(name), start, len(room)):
                ranges.read(path, span.offset, room[done : done + span.nbytes], sparse)
                done += span.nbytes
        self.nbytes += len(room)
        if self._flight:
            self._passed(TensorRead(file, name, start, len(room)))

    def expect(self, coming: Iterator[TensorRead], memory: int, on_wait: OnProgress) -> None:
        """Announce what `read` will be called for, all of it and in this order.

        As many are in flight as the storage can have, and no more of their bytes than `memory`.
        on_wait: is called while a read takes long, and may raise.
        """
        self._coming, self._next = coming, next(coming, None)
        all_at_once = not any(ranges.keeps_announced for ranges in self._ranges.values())
        if all_at_once:
            memory = sys.maxsize
        self._memory, self._free_requests, self._free_bytes = memory, self.ahead, memory
        for ranges in self._ranges.values():
            ranges.announces_within(memory)
            ranges.on_wait = on_wait
        self._announce()
        for ranges in self._ranges.values() if all_at_once else ():
            ranges.all_announced()

    def _announce(self) -> None:
        """Announce as much as there is room for; what never has room is not announced."""
        while (read := self._next) is not None:
            ranges, path, index = self._opened(read.file)
            spans = list(spans_of_range(index.spans(read.entry), read.start, read.nbytes))
            if len(spans) <= ranges.ahead and read.nbytes <= self._memory:
                if len(spans) > self._free_requests or read.nbytes > self._free_bytes:
                    return
                for span in spans:
                    ranges.announce(path, span.offset, span.nbytes)
                self._flight.append((read, len(spans)))
                self._free_requests -= len(spans)
                self._free_bytes -= read.nbytes
            self._next = next(self._coming, None)

    def announce_to_system(self, read: TensorRead) -> None:
        """Let the file system, if it can, begin to read what `read` will soon be called for."""
        ranges, path, index = self._opened(read.file)
        for span in spans_of_range(index.spans(read.entry), read.start, read.nbytes):
            ranges.announce_to_system(path, span.offset, span.nbytes)

    def _passed(self, read: TensorRead) -> None:
        """Announce more, if this was the first in flight; other reads are not announced."""
        if self._flight[0][0] == read:
            _, requests = self._flight.popleft()
            self._free_requests += requests
            self._free_bytes += read.nbytes
            self._announce()

    def place(self, file: int, name: str, start: int) -> Position | None:
        """Return the descriptor, path and byte at which content byte `start` of `name` lies.

        None where the content lies in several parts of the file, or in no file system. Raises as
        `read` does.
        """
        ranges, path, index = self._opened(file)
        i = index.schema.position[name]
        return None if i in index.pieces else ranges.position(path, index.offsets[i] + start)

    def memory_of(self, file: int, name: str) -> Any:
        """Return the content of `name` as an array of bytes; where `is_memory`."""
        ranges, _, index = self._opened(file)
        content = ranges.memory_of(index.schema.position[name])
        if self._flight:
            self._passed(self.whole(file, name))
        return content

    def whole(self, file: int, name: str) -> TensorRead:
        """Return the read of all of `name`'s content."""
        return TensorRead(file, name, 0, self._indexes[file].nbytes(name))

    def read_runs(
        self, file: int, name: str, start: int, room: Buffer, sparse: bool, run: int, stride: int
    ) -> None:
        """Fill `room` with runs of `run` bytes, each `stride` bytes behind the start of the last.

        The rest is as for `read`.
        """
        ranges, path, index = self._opened(file, sparse)
        spans = index.spans(name)
        if len(spans) > 1:
            for done in range(0, len(room), run):
                first = start + done // run * stride
                self.read(file, name, first, room[done : done + run], sparse)
            return
        offset, read = spans[0].offset + start, ranges.read
        for done in range(0, len(room), run):
            read(path, offset, room[done : done + run], sparse)
            offset += stride
            if self._flight:
                self._passed(TensorRead(file, name, start + done // run * stride, run))
        self.nbytes += len(room)

    def _opened(self, file: int, sparse: bool = False) -> tuple[RangeReader, str, Index]:
        """Return how a file is read, its path and index. Raises CheckpointError if it has changed.

        What is sparse may be read through a descriptor of its own, which may be of another file.
        """
        opened = self._open.get((file, sparse))
        if opened is None:
            path, index = self._paths[file], self._indexes[file]
            ranges = self._ranges[storage_of(path)]
            version = ranges.version(path, sparse)
            check_same(path, version, index)
            self._versions.setdefault(file, version)
            opened = self._open[file, sparse] = ranges, path, index
        return opened

    def check_unchanged(self) -> tuple[str, ...]:
        """See that every file that was read still is what was indexed; return what to know.

        A file of another size or time was written while it was read, and may have been read half
        before and half after. Raises CheckpointError.
        """
        touched = []
        opened_files = {file: opened for (file, _), opened in self._open.items()}
        for file, (ranges, path, index) in opened_files.items():
            if path in ranges.pinned:
                continue
            named = ranges.version_now(path)
            if named is None:
                touched.append(f"{path}: was removed while it was read")
                continue
            check_same(path, named, index)
            if (named.inode, named.changed) != (index.inode, index.changed):
                self._recheck(file)
            if named != self._versions[file]:
                touched.append(f"{path}: its name, mode or links were changed while it was read")
        return tuple(touched)

    def __enter__(self) -> SourceReader:
        return self

    def __exit__(self, *_: object) -> None:
        for ranges in self._ranges.values():
            ranges.close()


def check_same(path: str, version: FileVersion, index: Index) -> None:
    """Raise CheckpointError where a source file is no longer the one that was indexed."""
    if (version.size, version.modified) != (index.size, index.modified):
        raise CheckpointError(
            f"was changed after it was first read ({index.size} bytes then, {version.size} now); "
            "training still writes there?",
            "wait until the checkpoint is complete and run again",
            where=path,
        )


_ELEMENT = 8
"""Most bytes of a number."""
_LONG = 1 << 20
"""Bytes of a hole that counts."""
SAMPLE = 4096
_LARGEST_ROW = 1 << 20
"""Bytes of a row that is looked at."""
"""Bytes of a tensor that are looked at."""


def digest_all(
    path: str, index: Index, names: Iterable[str], on_progress: OnProgress
) -> dict[str, ContentDigest]:
    """Return a digest of all bytes of each tensor of `names` that the file holds."""
    samples = {}
    with closing(storage_of(path).ranges()) as ranges:
        check_same(path, ranges.version(path), index)
        read = blocks(partial(ranges.read, path))
        for name in names:
            if name in index:
                state, content, last = blake2b(digest_size=16), b"", b""
                is_number, width = index.nbytes(name) <= _ELEMENT, _element_size(index, name)
                is_constant = is_zero = True
                for part in read(index.spans(name)):  # a number too may lie in several records
                    state.update(part)
                    on_progress(len(part))
                    content += bytes(part) if is_number else b""
                    is_constant = is_constant and is_uniform(last + part, width)
                    is_zero = is_zero and not bytes(part).lstrip(b"\0")
                    last = (last + part)[-width:] if is_constant else b""
                samples[name] = ContentDigest(state.digest(), is_constant, content, is_zero)
    return samples


def digest_samples(
    path: str, index: Index, names: Iterable[str], on_progress: OnProgress = lambda nbytes: None
) -> dict[str, ContentDigest]:
    """Return a digest of some bytes of each tensor of `names` that the file holds.

    Where they lie in the content, its size tells.
    """
    samples, names = {}, [name for name in names if name in index]
    with closing(storage_of(path).ranges()) as ranges:
        check_same(path, ranges.version(path, sparse=True), index)
        for number, name in enumerate(names):
            if ranges.ahead and ranges.keeps_announced and number % ranges.ahead == 0:
                for next_name in names[number : number + ranges.ahead]:
                    nbytes = index.nbytes(next_name)
                    start = _sample_start(nbytes)
                    length = min(SAMPLE, nbytes - start)
                    for span in spans_of_range(index.spans(next_name), start, length):
                        ranges.announce(path, span.offset, span.nbytes)
                ranges.all_announced()
            spans, nbytes = index.spans(name), index.nbytes(name)
            start = _sample_start(nbytes)
            data = _sample(ranges, path, spans, start, on_progress)
            digest = blake2b(data, digest_size=16).digest()
            dtype, width = _dtype(index, name), _element_size(index, name)
            is_constant, is_zero = is_uniform(data, width), not data.lstrip(b"\0")
            elements = data[(-start) % width :]
            may_be_zeros = dtype in FLOATS and not elements.strip(b"\0\x80") and elements != b""
            are_zeros = may_be_zeros and holds_zeros(elements, width)
            if are_zeros or (is_constant and not is_zero):
                # A triangle of ones has long runs of them.
                ends = (0, max(0, nbytes - SAMPLE))
                first, last = (_sample(ranges, path, spans, e, on_progress) for e in ends)
                is_constant = is_zero or is_uniform(first + last, width)
                are_zeros = are_zeros and holds_zeros(first + last, width)
            is_sound = is_finite(elements, dtype)
            samples[name] = ContentDigest(digest, is_constant, b"", is_zero, is_sound, are_zeros)
    return samples


def read_samples_of(path: str, index: Index, names: Iterable[str]) -> dict[str, bytes]:
    """Return the whole elements of what `digest_samples` reads."""
    samples = {}
    with closing(storage_of(path).ranges()) as ranges:
        check_same(path, ranges.version(path, sparse=True), index)
        for name in names:
            nbytes, width = index.nbytes(name), _element_size(index, name)
            start = _sample_start(nbytes)
            data = _sample(ranges, path, index.spans(name), start, lambda nbytes: None)
            elements = data[(-start) % width :]
            samples[name] = elements[: len(elements) // width * width]
    return samples


def ends_in_zeros(path: str, index: Index, names: Iterable[str]) -> Iterator[str]:
    """Yield those of some floating tensors whose last row is zero, and one before it is not."""
    with closing(storage_of(path).ranges()) as ranges:
        check_same(path, ranges.version(path, sparse=True), index)
        ends = list[tuple[str, int, list[Span]]]()  # name, bytes of a row, and where its last are
        for name in names:
            nbytes, dtype = index.nbytes(name), _dtype(index, name)
            shape = index.schema.shapes[index.schema.position[name]]
            row = content_bytes(dtype, shape[1:])
            if dtype in FLOATS and 0 < row <= _LARGEST_ROW and nbytes >= 2 * row:
                length = min(nbytes, max(SAMPLE // row, 2) * row)
                last_spans = spans_of_range(index.spans(name), nbytes - length, length)
                ends.append((name, row, [*last_spans]))
        announced = chain.from_iterable(spans for _, _, spans in ends[: ranges.ahead])
        for span in announced if ranges.keeps_announced else ():
            ranges.announce(path, span.offset, span.nbytes)
        if ranges.keeps_announced:  # else arrays are let go that are read no more
            ranges.all_announced()
        for name, row, spans in ends:
            room = memoryview(bytearray(sum(span.nbytes for span in spans)))
            done = 0
            for span in spans:
                ranges.read(path, span.offset, room[done : done + span.nbytes], sparse=True)
                done += span.nbytes
            if not bytes(room[-row:]).strip(b"\0") and bytes(room).strip(b"\0"):
                yield name


def _sample_start(nbytes: int) -> int:
    """Return where in content of so many bytes its sample begins."""
    return crc32(b"%d" % nbytes) % (max(0, nbytes - SAMPLE) + 1)


def _sample(
    ranges: RangeReader, path: str, spans: Sequence[Span], start: int, on_progress: OnProgress
) -> bytes:
    """Return at most `SAMPLE` bytes of a tensor's content from byte `start` on."""
    total = sum(span.nbytes for span in spans)
    room, done = memoryview(bytearray(min(SAMPLE, total - start))), 0
    for span in spans_of_range(spans, start, len(room)):
        ranges.read(path, span.offset, room[done : done + span.nbytes], sparse=True)
        done += span.nbytes
    on_progress(done)
    return bytes(room)


def is_uniform(data: bytes, width: int) -> bool:
    """Tell whether elements of `width` bytes are all equal; one alone if its bytes are.

    The first may be cut off at its beginning.

    >>> is_uniform(b"\\x80?\\0\\0\\x80?\\0", 4), is_uniform(b"\\0\\0\\x80?", 4)
    (True, False)
    """
    return not data.lstrip(data[:1]) or data[width:] == data[:-width] != b""


def holds_zeros(data: bytes, width: int) -> bool:
    """Tell whether elements of `width` bytes are floats of the value zero, of either sign.

    >>> holds_zeros(b"\\0\\x80\\0\\0", 2), holds_zeros(b"\\x80\\0", 2)
    (True, False)
    """
    signs = data[width - 1 :: width]
    return not signs.strip(b"\0\x80") and not any(
        data[place::width].strip(b"\0") for place in range(width - 1)
    )


def _dtype(index: Index, name: str) -> str:
    return index.schema.dtypes[index.schema.position[name]]


def _element_size(index: Index, name: str) -> int:
    return item_size(_dtype(index, name))


_EXPONENTS = {
    "Float16": (2, 0x7C00, 1 << 10), "BFloat16": (2, 0x7F80, 1 << 7),
    "Float32": (4, 0x7F80_0000, 1 << 23), "Float64": (8, 0x7FF0_0000_0000_0000, 1 << 52),
}  # fmt: skip
"""By type the bytes of an element, the bits of its exponent, and the lowest of these."""


def is_finite(data: bytes, dtype: str) -> bool:
    """Tell whether all whole elements of some content are finite numbers.

    An exponent all of whose bits are set overflows into the sign when its lowest bit is added: so
    all elements are looked at by three operations on one long number.

    >>> is_finite(b"\\x00\\x00\\x80\\x7f", "Float32"), is_finite(b"\\x00\\x3c", "Float16")
    (False, True)
    """
    if dtype not in _EXPONENTS:
        return True
    width, exponent, lowest = _EXPONENTS[dtype]
    count = len(data) // width
    exponents = int.from_bytes(data[: count * width], "little") & _repeat_word(
        exponent, width, count
    )
    overflowing = exponents + _repeat_word(lowest, width, count)
    return not overflowing & _repeat_word(1 << (8 * width - 1), width, count)


@lru_cache(maxsize=64)
def _repeat_word(word: int, width: int, count: int) -> int:
    return int.from_bytes(word.to_bytes(width, "little") * count, "little")


def find_holes(path: str, index: Index) -> dict[str, int]:
    """Return the tensors of a file of which a long part was never written, with its bytes.

    Lost writes leave holes, which read as zeros; so do file systems that store no zeros.
    """
    if not storage_of(path).has_folders:
        return {}
    with open_for_reading(path) as (fd, status):
        if status.st_size - status.st_blocks * 512 < _LONG:
            return {}
        gaps = [(a, b) for a, b in _holes(fd, status.st_size) if b - a >= _LONG]
    lost_bytes: dict[str, int] = {}
    for name in index.schema.names if gaps else ():
        for span in index.spans(name):
            end = span.offset + span.nbytes
            lost = sum(max(0, min(b, end) - max(a, span.offset)) for a, b in gaps)
            if lost >= _LONG:
                lost_bytes[name] = lost_bytes.get(name, 0) + lost
    return lost_bytes


def _holes(fd: int, size: int) -> Iterator[tuple[int, int]]:
    position = 0
    with suppress(OSError):  # the file system does not tell
        while position < size:
            start = os.lseek(fd, position, os.SEEK_HOLE)
            if start >= size:
                return
            try:
                position = os.lseek(fd, start, os.SEEK_DATA)
            except OSError:  # the hole reaches to the end of the file
                position = size
            yield start, position


def check_content(path: str, index: Index, seen: Mapping[str, ContentDigest]) -> None:
    """Raise CheckpointError where a file has other headers, or other bytes where it was looked at.

    seen: what was sampled of it before, by entry.
    """
    now = index_file(path).viewed(index.views)
    same = (now.schema, now.offsets, now.pieces) == (index.schema, index.offsets, index.pieces)
    if not same or digest_samples(path, index, seen, lambda done: None) != seen:
        raise CheckpointError(
            "was replaced while it was read; training still writes there?",
            "wait until the checkpoint is complete and run again",
            where=path,
        )


def check_crc(path: str, index: Index, on_progress: OnProgress) -> None:
    """Compare a file with the checksum it carries, if any. Raises CheckpointError."""
    wrong = describe_wrong_crc(path, index, on_progress)
    if wrong:
        raise CheckpointError(f"{wrong}; the file is damaged, copy it again", where=path)


def describe_wrong_crc(path: str, index: Index, on_progress: OnProgress) -> str | None:
    """Return what is wrong with the checksums that a file carries; None if nothing, or it has none.

    Reads all that has one.
    """
    return next(filter(None, check_checksums(path, index, on_progress)), None)


def check_checksums(path: str, index: Index, on_progress: OnProgress) -> list[str]:
    """Return for each checksum that a file carries what is wrong with it, "" if nothing."""
    with store_at(path).open("") as file, closing(storage_of(path).ranges()) as ranges:
        read = blocks(partial(ranges.read, path), on_progress)
        try:
            checksums = container_of_path(path).checksums(index, file.read_at, read)
        except FormatError as error:
            return [str(error)]
    return [f"{of} is {b}, the file says {a}" if a != b else "" for of, a, b in checksums]
