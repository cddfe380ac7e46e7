"""The index of a checkpoint file on disk."""

from __future__ import annotations

from pathlib import Path

from rankxform.errors import CheckpointError
from rankxform.formats import ckpt, safetensors
from rankxform.formats.index import Index
from rankxform.formats.wire import FormatError

from .files import opened, range_reader

CKPT, SAFETENSORS = "ckpt", "safetensors"
FORMATS = (CKPT, SAFETENSORS)


def container(path: Path) -> str:
    """Return the format of a checkpoint file, which its name tells."""
    return SAFETENSORS if path.suffix == ".safetensors" else CKPT


def index(path: Path) -> Index:
    """Read the table of contents of `path` from its headers. Raises CheckpointError."""
    read = safetensors.read_index if container(path) == SAFETENSORS else ckpt.read_index
    with opened(path) as (fd, status):
        try:
            found = read(range_reader(fd, path), status.st_size)
        except FormatError as error:
            raise CheckpointError(f"{path}: {error}") from error
    found.modified = status.st_mtime_ns
    return found
