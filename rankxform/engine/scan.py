"""Files looked through for what no header shows: sums that do not fit, numbers that are none."""

from __future__ import annotations

from contextlib import closing
from dataclasses import field, replace
from functools import partial
from zlib import crc32

import numpy as np

from rankxform.formats.container import FLOATS, Index, Span
from rankxform.storage.posix import OnProgress, blocks
from rankxform.storage.source_reader import SAMPLE, check_checksums, check_same, find_holes
from rankxform.storage.store import storage_of
from rankxform.values import dataclass

from .cast import not_finite, transport_dtype

_FEW = 4
_BRAIN_NAN, _BRAIN_SIGN = np.uint16(0x7F80), np.uint16(0x7FFF)


@dataclass
class FileScan:
    """What a file was found to hold: wrong sums, in words; by tensor how many values are NaN, and
    how many infinite; long parts that were never written, by tensor; what was looked at."""

    wrong_sums: list[str] = field(default_factory=list)
    sums: int = 0
    unchecked_sums: int = 0
    nans: dict[str, int] = field(default_factory=dict)
    infinite: dict[str, int] = field(default_factory=dict)
    holes: dict[str, int] = field(default_factory=dict)
    tensors: int = 0
    reads: int = 0
    nbytes: int = 0


def bytes_to_scan(index: Index) -> int:
    """Return how many bytes `scan` reads of a file where it does not read all."""
    names = (index.schema.names[number] for number in _chosen(index))
    return sum(min(SAMPLE, index.spans(name)[0].nbytes) for name in names)


def _chosen(index: Index) -> list[int]:
    """Return the tensors of which a little is read."""
    floats = [n for n, dtype in enumerate(index.schema.dtypes) if dtype in FLOATS]
    return floats[:: max(1, len(floats) // _FEW)][:_FEW]


def scan(path: str, index: Index, full: bool, on_progress: OnProgress) -> FileScan:
    """Look through a file: every byte, or a little of some tensors. Raises CheckpointError."""
    file_scan = FileScan(holes=dict(find_holes(path, index)))
    schema = index.schema
    numbers = range(len(schema.names)) if full else _chosen(index)
    with closing(storage_of(path).ranges()) as ranges:
        check_same(path, ranges.version(path), index)
        read = blocks(partial(ranges.read, path))
        for number in numbers:
            name, dtype, crc = schema.names[number], schema.dtypes[number], 0
            spans = index.spans(name)
            if not full:
                spans = (Span(spans[0].offset, min(SAMPLE, spans[0].nbytes)),)
            for part in read(spans):
                if dtype in FLOATS:
                    _look_at(file_scan, name, dtype, part)
                if full and number in index.sums:
                    crc = crc32(part, crc)
                file_scan.reads += 1
                file_scan.nbytes += len(part)
                on_progress(len(part))
            file_scan.tensors += 1
            if full and number in index.sums:
                file_scan.sums += 1
                if crc != index.sums[number]:
                    index_crc = index.sums[number]
                    text = f"{path}: {name}: CRC-32 is {crc:08x}, the file says {index_crc:08x}"
                    file_scan.wrong_sums.append(text)
    if not full:
        file_scan.unchecked_sums += len(index.sums) + (index.has_checksum and not index.sums)
        return file_scan
    messages = check_checksums(
        path, replace(index, sums={}), on_progress
    )  # of no tensor of its own
    file_scan.sums += len(messages)
    file_scan.wrong_sums += [f"{path}: {wrong}" for wrong in messages if wrong]
    return file_scan


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
