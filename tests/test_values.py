"""CRC-32: the same by whichever library computes it, and by a slow third way."""

from __future__ import annotations

import json
import random
import sys
import zlib
from contextlib import suppress

import pytest

from rankxform import values
from rankxform.errors import FormatError
from rankxform.values import MOST_VALUES, check_plain, decode_json


def bit_by_bit(content, crc=0):
    """The definition (ISO 3309): the remainder by the reversed polynomial 0xEDB88320."""
    crc ^= 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0xEDB88320 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


@pytest.fixture(params=["installed", "missing"])
def isal(request, monkeypatch):
    if request.param == "installed":
        pytest.importorskip("isal")
    else:
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    values._crc32.cache_clear()
    yield request.param
    values._crc32.cache_clear()


def test_one_sum_by_every_way(isal):
    draw = random.Random(0)
    for nbytes in (0, 1, 7, 63, 64, 65, 1000):
        content, cut = draw.randbytes(nbytes), draw.randrange(nbytes + 1)
        whole = values.crc32(content)
        parts = values.crc32(memoryview(content)[cut:], values.crc32(memoryview(content)[:cut]))
        assert whole == parts == bit_by_bit(content) == zlib.crc32(content)
    wanted = "isal.isal_zlib" if isal == "installed" else "zlib"
    assert values._crc32() is sys.modules[wanted].crc32


@pytest.mark.parametrize("seed", range(20))
def test_parts_may_come_in_any_order(seed):
    draw = random.Random(seed)
    content = draw.randbytes(draw.choice((0, 1, 40, 5000)))
    cuts = sorted(draw.choices(range(len(content) + 1), k=draw.randrange(9)))
    parts = [*zip([0, *cuts], [*cuts, len(content)])]
    draw.shuffle(parts)
    crc = values.ScatteredCrc()
    for start, stop in parts:
        crc.add(start, memoryview(content)[start:stop])
    assert (crc.nbytes, crc.whole) == (len(content), zlib.crc32(content))


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"[" * 101 + b"]" * 101, "is nested too deeply"),
        (b'{"a": [1], "b": ' * 120 + b"1" + b"}" * 120, "is nested too deeply"),
        (b"[" * 100_000, "is nested too deeply"),
        (b'{"a": 1, "a": 2}', "names 'a' twice"),
        (b"[" + b"9" * 21 + b"]", "has a number of over 20 digits"),
        (b"[" + b"9" * 5000 + b"]", "has a number of over 20 digits"),
        (b'"\\ud800"', "has a text that is no Unicode"),
        (b'{"\\udfff": 1}', "has a text that is no Unicode"),
        (b'"\xed\xa0\x80"', "can't decode byte"),
        (b"", "is not JSON"),
        ("[" + "9" * 30 + "]", "has a number of over 20 digits"),
        (b'["]",' * 300 + b"1" + b',"["]' * 300, "is nested too deeply"),
        (
            json.dumps({f"n{i}": 1 for i in range(20_000)}).encode()[:-1] + b', "n19999": 1}',
            "names 'n19999' twice",
        ),
    ],
)
def test_a_document_that_nobody_means_is_refused(data, text):
    with pytest.raises(FormatError, match=text):
        decode_json(data)
    encoded = data.encode() if isinstance(data, str) else data
    with suppress(UnicodeDecodeError), pytest.raises(FormatError):
        decode_json(encoded.decode().encode("utf-16"))


def test_a_large_document_may_have_all_characters():
    document = {"x": "\U0001f600", "y": "1" * 30, "many": [[n, n] for n in range(400_000)]}
    assert decode_json(json.dumps(document)) == document


@pytest.mark.parametrize(
    "value",
    [[[]] * 3000, {"x": 2**63, "y": -(10**20)}, "\U0001f600", ["[[[{{{"] * 300, 1e308, {"": None}],
)
def test_what_may_be_meant_is_read(value):
    assert decode_json(json.dumps(value).encode()) == value


def test_values_that_refer_to_each_other():
    small = ["x"] * 10
    large = small
    for _ in range(9):
        large = [large] * 10
    loop = []
    loop.append(loop)
    check_plain([small, small])
    for value in (large, loop, [1, *loop], [[1] * 1000 + [loop]]):
        with pytest.raises(ValueError, match="is too large once|is in itself"):
            check_plain(value, MOST_VALUES)
