"""The protobuf wire format, as far as MindSpore's two messages use it.

Encoding: https://protobuf.dev/programming-guides/encoding. A field is a varint key
``number << 3 | wire type`` and a value: a varint (type 0), 8 bytes (1), a varint length and as
many bytes (2), or 4 bytes (5). Groups (3, 4) do not occur.
"""

# No protobuf runtime: offsets are needed, files exceed what one can hold, and a few hundred bytes
# of each parameter are enough. Lengths are checked before anything is allocated.

from __future__ import annotations

from collections.abc import Iterator

from rankxform.errors import FormatError

VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5


def read_varint(data: bytes | memoryview, offset: int) -> tuple[int, int]:
    """Return the unsigned 64-bit varint at `offset` and the position behind it.

    >>> read_varint(b"\\x96\\x01", 0)
    (150, 2)
    """
    value = shift = 0
    for position in range(offset, min(offset + 10, len(data))):
        byte = data[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 64:
                break
            return value, position + 1
        shift += 7
    text = f"byte {offset}: no complete number here; the file is damaged or cut off"
    raise FormatError(text, "copy the file again")


def signed(value: int, bits: int) -> int:
    """Read an unsigned varint as int32 or int64, which protobuf writes in two's complement."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >> (bits - 1) else value


def varint(value: int) -> bytes:
    """Encode `value`, a negative one as ten bytes, as protobuf does.

    >>> varint(150), len(varint(-1))
    (b'\\x96\\x01', 10)
    """
    value &= (1 << 64) - 1
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_tag(number: int, wire_type: int) -> bytes:
    return varint(number << 3 | wire_type)


def delimited(number: int, content: bytes) -> bytes:
    """Encode a string, bytes or message field."""
    return encode_tag(number, BYTES) + varint(len(content)) + content


def fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Yield (number, value) of each field of a message held in memory.

    The value is an int for varints and a view of the bytes for the rest. Raises FormatError.
    """
    offset, end = 0, len(data)
    while offset < end:
        tag, offset = read_varint(data, offset)
        number, wire_type = tag >> 3, tag & 7
        if number == 0:
            raise FormatError(f"byte {offset}: field number 0; the file is damaged")
        if wire_type == VARINT:
            value, offset = read_varint(data, offset)
            yield number, value
            continue
        if wire_type == BYTES:
            length, offset = read_varint(data, offset)
        elif wire_type in (FIXED64, FIXED32):
            length = 8 if wire_type == FIXED64 else 4
        else:
            raise FormatError(f"byte {offset}: wire type {wire_type} is not used by this format")
        if offset + length > end:
            raise FormatError(
                f"byte {offset}: a field of {length} bytes ends behind its message's {end} bytes; "
                "the file is damaged or cut off",
                "copy the file again",
            )
        yield number, data[offset : offset + length]
        offset += length


def decode_text(value: int | memoryview) -> str:
    """Decode a string field."""
    if isinstance(value, int):
        raise FormatError("a number stands where a text is expected")
    try:
        return bytes(value).decode()
    except UnicodeDecodeError as error:
        raise FormatError(f"a text is not UTF-8: {error}") from None


def decode_integer(value: int | memoryview, bits: int = 64) -> int:
    """Decode an int32, int64 or uint32 field."""
    if not isinstance(value, int):
        raise FormatError("bytes stand where a number is expected")
    return signed(value, bits)


def decode_message(value: int | memoryview) -> memoryview:
    """Return the bytes of an embedded message."""
    if isinstance(value, int):
        raise FormatError("a number stands where a message is expected")
    return value


def decode_repeated(value: int | memoryview, bits: int = 64) -> list[int]:
    """Decode one occurrence of a repeated number: a single one, or a packed run of them."""
    if isinstance(value, int):
        return [signed(value, bits)]
    numbers, offset = [], 0
    while offset < len(value):
        number, offset = read_varint(value, offset)
        numbers.append(signed(number, bits))
    return numbers
