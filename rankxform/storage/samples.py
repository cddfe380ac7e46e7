"""Digests of tensor content, by which ranks are compared before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, suppress
from functools import lru_cache, partial
from hashlib import blake2b
from zlib import crc32

from rankxform.errors import CheckpointError, FormatError
from rankxform.formats.base import Index, spans_of_range
from rankxform.formats.dtype import item_size
from rankxform.planning.consistency import ContentDigest

from .index import container_of_path, index_file
from .posix import OnProgress, blocks, open_for_reading
from .sources import check_same
from .store import is_path, storage_of, store_at

_ELEMENT = 8
"""Most bytes of a number."""
_LONG = 1 << 20
"""Bytes of a hole that counts."""
SAMPLE = 4096
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
                state, content = blake2b(digest_size=16), b""
                is_number, first, is_constant = index.nbytes(name) <= _ELEMENT, b"", True
                for part in read(index.spans(name)):  # a number too may lie in several records
                    state.update(part)
                    on_progress(len(part))
                    content += bytes(part) if is_number else b""
                    first = first or bytes(part[:1])
                    is_constant = is_constant and not bytes(part).lstrip(first)
                samples[name] = ContentDigest(state.digest(), constant=is_constant, content=content)
    return samples


def digest_samples(
    path: str, index: Index, names: Iterable[str], on_progress: OnProgress = lambda nbytes: None
) -> dict[str, ContentDigest]:
    """Return a digest of some bytes of each tensor of `names` that the file holds.

    Where they lie in the content, its size tells.
    """
    samples = {}
    with closing(storage_of(path).ranges()) as ranges:
        check_same(path, ranges.version(path, sparse=True), index)
        for name in names:
            if name in index:
                spans, nbytes = index.spans(name), index.nbytes(name)
                start = crc32(b"%d" % nbytes) % (max(0, nbytes - SAMPLE) + 1)
                room, done = memoryview(bytearray(min(SAMPLE, nbytes - start))), 0
                for span in spans_of_range(spans, start, len(room)):
                    ranges.read(path, span.offset, room[done : done + span.nbytes], sparse=True)
                    done += span.nbytes
                data = bytes(room)
                on_progress(len(data))
                digest = blake2b(data, digest_size=16).digest()
                dtype = index.schema.dtypes[index.schema.position[name]]
                samples[name] = ContentDigest(
                    digest,
                    constant=not data.lstrip(data[:1]),
                    is_zero=bool(data) and not data.lstrip(b"\0"),
                    is_finite=is_finite(data[(-start) % item_size(dtype) :], dtype),
                )
    return samples


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
    exponents = int.from_bytes(data[: count * width], "little") & _repeated(exponent, width, count)
    overflowing = exponents + _repeated(lowest, width, count)
    return not overflowing & _repeated(1 << (8 * width - 1), width, count)


@lru_cache(maxsize=64)
def _repeated(word: int, width: int, count: int) -> int:
    return int.from_bytes(word.to_bytes(width, "little") * count, "little")


def find_holes(path: str, index: Index) -> dict[str, int]:
    """Return the tensors of a file of which a long part was never written, with its bytes.

    Lost writes leave holes, which read as zeros; so do file systems that store no zeros.
    """
    if not is_path(path):
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
