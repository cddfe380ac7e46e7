"""Digests of tensor content, by which ranks are compared before anything is written."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from rankxform.errors import CheckpointError
from rankxform.formats import ckpt
from rankxform.formats.index import Index, Span
from rankxform.formats.safetensors import CRC_KEY

from .engine import check_unchanged
from .files import opened, range_reader, read_into
from .headers import SAFETENSORS, container
from .output import file_crc, tensors_crc

_BLOCK = 1 << 20
_SAMPLE = 4096


@dataclass(frozen=True)
class Sample:
    """What one rank's file holds of one parameter: a digest, and whether all bytes are equal."""

    digest: bytes
    constant: bool


def digest_all(path: Path, index: Index, names: Iterable[str]) -> dict[str, bytes]:
    """Return a digest of all bytes of each of `names` that the file holds."""
    found = {}
    block = memoryview(bytearray(_BLOCK))
    with opened(path) as (fd, status):
        check_unchanged(path, status, index)
        for name in names:
            if name in index:
                state = blake2b(digest_size=16)
                for span in index.spans(name):
                    for part in _blocks(span):
                        view = block[: part.nbytes]
                        read_into(fd, path, part.offset, view)
                        state.update(view)
                found[name] = state.digest()
    return found


def sample(path: Path, index: Index, names: Iterable[str]) -> dict[str, Sample]:
    """Return a digest of the first bytes of each of `names` that the file holds."""
    found = {}
    with opened(path) as (fd, status):
        check_unchanged(path, status, index)
        read_at = range_reader(fd, path)
        for name in names:
            if name in index:
                span = index.spans(name)[0]
                data = read_at(span.offset, min(span.nbytes, _SAMPLE))
                found[name] = Sample(blake2b(data, digest_size=16).digest(), len(set(data)) < 2)
    return found


def check_crc(path: Path, index: Index) -> bool:
    """Compare a file with the checksum it carries; return whether it carries one.

    Raises CheckpointError where they differ.
    """
    with opened(path) as (fd, _):
        if container(path) == SAFETENSORS:
            if CRC_KEY not in index.metadata:
                return False
            stated = index.metadata[CRC_KEY]
            spans = {name: index.spans(name) for name in index.contents.names}
            found = str(tensors_crc(fd, path, spans))
        elif index.crc is None:
            return False
        else:
            stated = str(ckpt.stated_crc(os.pread(fd, ckpt.CRC_BYTES, index.crc)))
            found = str(file_crc(fd, path, [Span(0, index.crc)]))
    if stated != found:
        raise CheckpointError(
            f"{path}: its checksum is {found}, it states {stated}; the file is damaged, "
            "copy it again"
        )
    return True


def _blocks(span: Span) -> Iterable[Span]:
    for start in range(0, span.nbytes, _BLOCK):
        yield Span(span.offset + start, min(_BLOCK, span.nbytes - start))
