"""Digests of tensor content, by which ranks are compared before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from rankxform.engine.file_sink import file_crc, tensors_crc
from rankxform.errors import CheckpointError
from rankxform.formats import ckpt
from rankxform.formats.base import Index, Span, locate
from rankxform.formats.safetensors import CRC_KEY

from .posix import Tick, blocks, opened, range_reader
from .sources import check_unchanged

_SAMPLE = 4096


@dataclass(frozen=True)
class Sample:
    """What one rank's file holds of one parameter: a digest, and whether all bytes are equal."""

    digest: bytes
    constant: bool


def digest_all(path: Path, index: Index, names: Iterable[str], tick: Tick) -> dict[str, bytes]:
    """Return a digest of all bytes of each of `names` that the file holds."""
    found = {}
    with opened(path) as (fd, status):
        check_unchanged(path, status, index)
        for name in names:
            if name in index:
                state = blake2b(digest_size=16)
                for part in blocks(fd, path, index.spans(name)):
                    state.update(part)
                    tick(len(part))
                found[name] = state.digest()
    return found


def sample(path: Path, index: Index, names: Iterable[str]) -> dict[str, Sample]:
    """Return a digest of some bytes of each of `names` that the file holds.

    The bytes are from the start, the middle and the end of the content.
    """
    found = {}
    with opened(path) as (fd, status):
        check_unchanged(path, status, index)
        read_at = range_reader(fd, path)
        for name in names:
            if name in index:
                spans, nbytes = index.spans(name), index.nbytes(name)
                starts = sorted({0, nbytes // 2, max(0, nbytes - _SAMPLE)})
                data = b"".join(
                    read_at(span.offset, span.nbytes)
                    for start in starts
                    for span in locate(spans, start, min(_SAMPLE, nbytes - start))
                )
                found[name] = Sample(blake2b(data, digest_size=16).digest(), len(set(data)) < 2)
    return found


def check_crc(path: Path, index: Index, tick: Tick) -> None:
    """Compare a file with the checksum it carries, if any. Raises CheckpointError."""
    wrong = wrong_crc(path, index, tick)
    if wrong:
        raise CheckpointError(f"{path}: {wrong}; the file is damaged, copy it again")


def wrong_crc(path: Path, index: Index, tick: Tick) -> str | None:
    """Return what is wrong with the checksum that a file carries; None if nothing, or it has none.

    Reads the whole file if it has one.
    """
    with opened(path) as (fd, _):
        contents = index.contents
        if CRC_KEY in index.metadata:
            stated = index.metadata[CRC_KEY]
            spans = {name: index.spans(name) for name in contents.names}
            every = zip(contents.names, contents.dtypes, contents.shapes)
            scalars = {name: dtype for name, dtype, shape in every if not shape}
            found = str(tensors_crc(fd, path, spans, scalars, tick))
        elif index.crc is None:
            return None
        else:
            stated = str(ckpt.stated_crc(os.pread(fd, ckpt.CRC_BYTES, index.crc)))
            found = str(file_crc(fd, path, [Span(0, index.crc)], 0, tick))
    return None if stated == found else f"its checksum is {found}, it states {stated}"
