"""Destination slices in memory, in the place of a destination file."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from typing import Any

import numpy as np

from rankxform.errors import CheckpointError, RequestError
from rankxform.formats.base import TensorSpec
from rankxform.formats.dtype import NOT_MINDSPORES, TEXT, content_bytes
from rankxform.storage.posix import Buffer

_NUMPY = {
    "Bool": "?",
    "Int8": "i1",
    "UInt8": "u1",
    "Int16": "<i2",
    "UInt16": "<u2",
    "Int32": "<i4",
    "UInt32": "<u4",
    "Int64": "<i8",
    "UInt64": "<u8",
    "Float16": "<f2",
    "BFloat16": "<u2",
    "Float32": "<f4",
    "Float64": "<f8",
    "Int4": "i1",
    **dict.fromkeys(NOT_MINDSPORES, "u1"),
}


class Arrays:
    """One destination rank's slices, each in memory of its own (`engine.Sink`)."""

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

    def finish(self) -> None:
        """Nothing is kept back."""

    def take(self) -> dict[str, Any]:
        """Return the arrays, by name; a text as a str."""
        found: dict[str, Any] = {}
        for name, dtype, shape in self._tensors:
            data = self._bytes[name]
            if dtype == TEXT:
                found[name] = _text(name, data.tobytes())
            else:
                found[name] = data.view(numpy_type(dtype)).reshape(shape)
        return found


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-32-le").rstrip("\0")
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{name!r}: is no UTF-32 text ({error.reason})") from error


def value_type(dtype: str) -> np.dtype[Any]:
    """Return the type of numpy that knows the values of one of MindSpore's types.

    Raises RequestError where there is none: of Int4, texts and F8, and of BFloat16 without
    ml_dtypes.
    """
    if dtype in ("Int4", TEXT, *NOT_MINDSPORES):
        raise RequestError(f"{dtype} cannot be converted to another type, nor another type to it")
    found = numpy_type(dtype)
    if dtype == "BFloat16" and found == np.dtype(_NUMPY[dtype]):
        raise RequestError("BFloat16 is converted by ml_dtypes; install it (pip install ml_dtypes)")
    return found


def numpy_type(dtype: str) -> np.dtype[Any]:
    """Return the numpy type that represents MindSpore's `dtype` here."""
    if dtype == "BFloat16":
        try:
            found: np.dtype[Any] = np.dtype(import_module("ml_dtypes").bfloat16)
        except ImportError:
            found = np.dtype(_NUMPY[dtype])
        return found
    return np.dtype(_NUMPY[dtype])
