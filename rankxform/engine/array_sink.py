"""Destination slices in memory, in the place of a destination file."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np

from rankxform.errors import CheckpointError
from rankxform.formats.base import TensorSpec
from rankxform.formats.dtype import TEXT, content_bytes
from rankxform.storage.posix import Buffer
from rankxform.storage.reflink import Position

from .convert import transport_dtype


class ArraySink:
    """One destination rank's slices, each in memory of its own (`pipeline.Sink`)."""

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        """`tensors`: what the rank gets, in order."""
        self._tensors = list(tensors)
        self._bytes = {
            name: np.empty(content_bytes(dtype, shape), np.uint8)
            for name, dtype, shape in self._tensors
        }
        self._buffers = {name: array.data for name, array in self._bytes.items()}
        self.written = 0

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Take content of `name` from its content byte `start` on."""
        self._buffers[name][start : start + len(data)] = data
        self.written += len(data)

    def share(self, name: str, start: int, source: Position, nbytes: int) -> bool:
        return False

    def finish(self) -> None:
        """Nothing is kept back."""

    def take(self) -> dict[str, Any]:
        """Return the arrays, by name; a text as a str."""
        arrays_by_name: dict[str, Any] = {}
        for name, dtype, shape in self._tensors:
            data = self._bytes[name]
            if dtype == TEXT:
                arrays_by_name[name] = _text(name, data.tobytes())
            else:
                arrays_by_name[name] = data.view(numpy_type(dtype)).reshape(shape)
        return arrays_by_name


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"is no UTF-32 text ({error.reason})", where=f"{name!r}") from error


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Return the numpy type that represents MindSpore's `dtype` here."""
    if dtype == "BFloat16":
        try:
            numpy_dtype: np.dtype[Any] = np.dtype(import_module("ml_dtypes").bfloat16)
        except ImportError:
            numpy_dtype = transport_dtype(dtype)
        return numpy_dtype
    return transport_dtype(dtype)
