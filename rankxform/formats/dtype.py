"""Element types: MindSpore's names, the names in safetensors, and bytes an element.

Data are opaque here: a type is a label with an item size. Int4 counts bytes, two values in
each; ``str`` is the UTF-32 text of an `append_dict` entry, ``bytes`` what is no tensor and is
carried as it is between checkpoints of one form. Types that MindSpore does not have
are called as in safetensors, and are carried from one such file to another.
"""

from __future__ import annotations

from math import prod

from rankxform.errors import FormatError

INT4, TEXT, BYTES = "Int4", "str", "bytes"

_TYPES = (
    # MindSpore, safetensors, bytes
    ("Bool", "BOOL", 1),
    ("Int8", "I8", 1),
    ("UInt8", "U8", 1),
    ("Int16", "I16", 2),
    ("UInt16", "U16", 2),
    ("Int32", "I32", 4),
    ("UInt32", "U32", 4),
    ("Int64", "I64", 8),
    ("UInt64", "U64", 8),
    ("Float16", "F16", 2),
    ("BFloat16", "BF16", 2),
    ("Float32", "F32", 4),
    ("Float64", "F64", 8),
    (INT4, None, 1),
    (TEXT, None, 1),
    ("F8_E4M3", "F8_E4M3", 1),
    ("F8_E5M2", "F8_E5M2", 1),
    ("F8_E8M0", "F8_E8M0", 1),
)
FLOATS = ("Float16", "BFloat16", "Float32", "Float64")
FLOAT8 = ("F8_E4M3", "F8_E5M2", "F8_E8M0")
NOT_MINDSPORES = FLOAT8
ITEM_SIZE = {name: size for name, _, size in _TYPES}
TO_SAFETENSORS = {**{name: code for name, code, _ in _TYPES if code}, INT4: "I8"}
FROM_SAFETENSORS = {code: name for name, code, _ in _TYPES if code}


def item_size(dtype: str) -> int:
    """Return the bytes of one element. Raises FormatError for a type MindSpore does not have."""
    try:
        return 1 if dtype == BYTES else ITEM_SIZE[dtype]
    except KeyError:
        raise FormatError(
            f"element type {dtype!r} is not one of MindSpore's ({', '.join(ITEM_SIZE)})"
        ) from None


def content_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return the bytes that a parameter of `shape` takes.

    >>> content_bytes("BFloat16", (3, 4)), content_bytes("Float64", ())
    (24, 8)
    """
    return prod(shape) * item_size(dtype)
