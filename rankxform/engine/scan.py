"""A file looked through: what its values are, what was never written, what its checksums say."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import closing
from dataclasses import field, replace
from functools import partial

import numpy as np

from rankxform.formats.container import FLOATS, Index, Span, content_bytes, item_size
from rankxform.layout.names import pattern_of
from rankxform.planning.evidence import ContentDigest
from rankxform.storage.posix import Buffer, blocks
from rankxform.storage.source_reader import (
    SAMPLE,
    check_checksums,
    check_same,
    find_holes,
    holds_zeros,
    is_uniform,
)
from rankxform.storage.store import storage_of
from rankxform.transport.team import OnProgress
from rankxform.values import blake2b, crc32, dataclass

from .cast import cast_function, not_finite, transport_dtype

_FEW = 4
_BRAIN_NAN, _BRAIN_SIGN = np.uint16(0x7F80), np.uint16(0x7FFF)


@dataclass
class FileScan:
    """What a file was found to hold: wrong sums, in words; by tensor how many values are NaN, and
    how many infinite; long parts that were never written, by tensor; what was looked at; digests of
    tensors, of which they were asked for; which matrices are zero, of those that may not be, and of
    each the first of its kind that has the same bytes; the tensor after which all is zeros, if it
    ends in them too, and their bytes."""

    wrong_sums: list[str] = field(default_factory=list)
    sums: int = 0
    unchecked_sums: int = 0
    nans: dict[str, int] = field(default_factory=dict)
    infinite: dict[str, int] = field(default_factory=dict)
    holes: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    reads: int = 0
    nbytes: int = 0
    digests: dict[str, ContentDigest] = field(default_factory=dict)
    zeros: dict[str, bool] = field(default_factory=dict)
    first_of: dict[str, str] = field(default_factory=dict)
    tail: tuple[str, int] | None = None


def bytes_to_scan(index: Index) -> int:
    """Return how many bytes `scan` reads of a file where it does not read all."""
    names = (index.schema.names[number] for number in _choose_tensors(index))
    return sum(min(SAMPLE, index.spans(name)[0].nbytes) for name in names)


def _choose_tensors(index: Index) -> list[int]:
    """Return the tensors of which a little is read."""
    floats = [n for n, dtype in enumerate(index.schema.dtypes) if dtype in FLOATS]
    return floats[:: max(1, len(floats) // _FEW)][:_FEW]


def scan(
    path: str,
    index: Index,
    full: bool,
    on_progress: OnProgress,
    compared: Collection[str] = (),
    matrices: Collection[str] = (),
) -> FileScan:
    """Look through a file: every byte, or a little of some tensors. Raises CheckpointError.

    compared: tensors of which digests are made, if every byte is looked at. matrices: those that
    are not zero, nor equal to others of their kind.
    """
    file_scan, likeness = FileScan(holes=dict(find_holes(path, index))), _Likeness(matrices)
    schema = index.schema
    numbers = range(len(schema.names)) if full else _choose_tensors(index)
    with closing(storage_of(path).ranges()) as ranges:
        check_same(path, ranges.version(path), index)
        read = blocks(partial(ranges.read, path))
        for number in numbers:
            name, dtype, crc = schema.names[number], schema.dtypes[number], 0
            state = blake2b(digest_size=16) if name in compared else None
            spans = index.spans(name)
            if not full:
                spans = (Span(spans[0].offset, min(SAMPLE, spans[0].nbytes)),)
            for part in read(spans):
                if full:
                    likeness.add(name, dtype, part)
                if dtype in FLOATS:
                    _look_at(file_scan, name, dtype, part)
                if full and number in index.sums:
                    crc = crc32(part, crc)
                if state is not None:
                    state.update(part)
                file_scan.reads += 1
                file_scan.nbytes += len(part)
                on_progress(len(part))
            file_scan.tensors += 1
            if state is not None:
                file_scan.digests[name] = ContentDigest(state.digest())
            if full and number in index.sums:
                file_scan.sums += 1
                if crc != index.sums[number]:
                    index_crc = index.sums[number]
                    text = f"{path}: {name}: CRC-32 is {crc:08x}, the file says {index_crc:08x}"
                    file_scan.wrong_sums.append(text)
        if full:
            file_scan.zeros = likeness.zeros
            file_scan.first_of = likeness.first_of(lambda name: read(index.spans(name)))
            file_scan.tail = likeness.tail(index)
    if not full:
        file_scan.unchecked_sums += len(index.sums) + (index.has_checksum and not index.sums)
        return file_scan
    # Of no tensor of its own.
    messages = check_checksums(path, replace(index, sums={}), on_progress)
    file_scan.sums += len(messages)
    file_scan.wrong_sums += [f"{path}: {wrong}" for wrong in messages if wrong]
    return file_scan


class _Likeness:
    """Tells of a file's matrices which are zero or equal, and where its zeros at the end begin."""

    def __init__(self, matrices: Collection[str]) -> None:
        self.zeros: dict[str, bool] = {}
        self._matrices = matrices
        self._heads: dict[tuple[str, str, bytes], list[str]] = {}  # those that begin alike
        self._ending_zeros: dict[str, int] = {}  # bytes at the end of each tensor

    def add(self, name: str, dtype: str, part: Buffer) -> None:
        """Look at the next part of a tensor's content."""
        width, is_first = item_size(dtype), name not in self._ending_zeros
        if is_first and name in self._matrices:
            head = bytes(part[:SAMPLE])
            unlike = name if is_uniform(head, width) else ""
            self._heads.setdefault((pattern_of(name), unlike, head), []).append(name)
        may_be_zero = not part[-1] & 0x7F  # the last byte of most numbers is another
        if name in self._matrices and self.zeros.get(name, True):
            self.zeros[name] = may_be_zero and holds_zeros(bytes(part), width)
        kept_bytes = len(bytes(part).rstrip(b"\0")) if may_be_zero else len(part)
        zeros = 0 if is_first or kept_bytes else self._ending_zeros[name]
        self._ending_zeros[name] = zeros + len(part) - kept_bytes

    def first_of(self, read: Callable[[str], Iterable[Buffer]]) -> dict[str, str]:
        """Return each matrix with the first of its kind that has its bytes.

        read: yields a tensor's content. Only of what begins alike it is read again.
        """
        first_by_name = {}
        for names in self._heads.values():
            first_by_content: dict[bytes, str] = {}
            for name in names:
                state = blake2b(digest_size=16)
                for part in read(name) if names[1:] else ():
                    state.update(part)
                first_by_name[name] = first_by_content.setdefault(state.digest(), name)
        return first_by_name

    def tail(self, index: Index) -> tuple[str, int] | None:
        """Return in which matrix the zeros begin that end the file, if they fill others too."""
        nbytes, is_filled = 0, False
        for name in sorted(
            self._ending_zeros, key=lambda n: index.spans(n)[0].offset, reverse=True
        ):
            size, zeros = index.nbytes(name), self._ending_zeros[name]
            nbytes += zeros
            if zeros < size:
                number = index.schema.position[name]
                row = content_bytes(index.schema.dtypes[number], index.schema.shapes[number][-1:])
                is_cut = name in self._matrices and zeros >= row
                return (name, nbytes) if is_cut and is_filled else None
            is_filled = is_filled or name in self._matrices
        return None


def _look_at(file_scan: FileScan, name: str, dtype: str, part: memoryview) -> None:
    values = np.frombuffer(part, transport_dtype(dtype))
    wrong = not_finite(values, dtype)
    if wrong is None or not wrong.any():
        return
    is_nan = (values & _BRAIN_SIGN) > _BRAIN_NAN if dtype == "BFloat16" else np.isnan(values)
    nans = int(is_nan.sum())
    for kind, count in ((file_scan.nans, nans), (file_scan.infinite, int(wrong.sum()) - nans)):
        if count:
            kind[name] = kind.get(name, 0) + count


def largest_difference(contents: Sequence[bytes], dtype: str) -> float:
    """Return how much values of one place differ at most; 0 of what is no float."""
    if dtype not in FLOATS:
        return 0.0
    wide = "Float64" if dtype == "Float64" else "Float32"
    cast = cast_function(dtype, wide) if dtype != wide else np.copyto
    rows = np.empty((len(contents), len(contents[0]) // item_size(dtype)), transport_dtype(wide))
    for row, content in zip(rows, contents):
        cast(row, np.frombuffer(content, transport_dtype(dtype)))
    with np.errstate(all="ignore"):  # what is infinite, or no number, is said elsewhere
        spread = rows.max(axis=0) - rows.min(axis=0)
        return float(spread[np.isfinite(spread)].max(initial=0))
