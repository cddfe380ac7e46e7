"""Pickles are data: the values are pickle's own, nothing is called, and memory is bounded."""

from __future__ import annotations

import os
import pickle
import random
import struct
import tracemalloc
from collections import OrderedDict

import pytest

from rankxform.errors import FormatError
from rankxform.formats import dcp_containers, dcp_metadata, pickles
from rankxform.formats.pickles import PickleWriter


def plain(rng, depth=3):
    """Return a value of those that tables have."""
    leaf = [
        None, True, False, rng.randrange(256), rng.randrange(1 << 40), -rng.randrange(1 << 31),
        rng.random(), "text" * rng.randrange(80), "日本", os.urandom(rng.randrange(300)),
        tuple(rng.randrange(1 << 17) for _ in range(rng.randrange(5))),
    ]  # fmt: skip
    kind = rng.randrange(4) if depth else 0
    if kind == 1:
        return [plain(rng, depth - 1) for _ in range(rng.randrange(4))]
    if kind == 2:
        return {str(n): plain(rng, depth - 1) for n in range(rng.randrange(4))}
    return rng.choice(leaf)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_values_are_those_of_pickle(protocol):
    rng = random.Random(protocol)
    for _ in range(200):
        value = plain(rng)
        data = pickle.dumps(value, protocol)
        try:
            found = pickles.load_pickle(data, lambda name: False)
        except FormatError as error:  # protocol 2 makes bytes by a call
            assert protocol == 2 and ("_codecs.encode" in str(error) or "bytes" in str(error))
        else:
            assert found == value


class Evil:
    def __init__(self, *how):
        self.how = how

    def __reduce__(self):
        return self.how


@pytest.mark.parametrize("permitted", [dcp_metadata.allowed_names, dcp_containers.allowed_names])
@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("how", [(os.system, ("true",)), (eval, ("1",)), (getattr, (1, "real"))])
def test_names_that_no_table_has(how, protocol, permitted):
    with pytest.raises(FormatError, match=r"names \w+\.(system|eval|getattr), which no table"):
        pickles.load_pickle(pickle.dumps([1, {"a": Evil(*how)}], protocol), permitted)


def test_what_is_permitted_is_not_called():
    made = pickles.load_pickle(
        pickle.dumps({"a": Evil(OrderedDict, ()), "b": (1, 2)}, 4), dcp_metadata.allowed_names
    )
    assert made == {"a": {}, "b": (1, 2)}
    data = b"\x80\x02cpathlib\nPosixPath\nX\x01\0\0\0/\x85R."
    made = pickles.load_pickle(data, dcp_metadata.allowed_names)
    assert (made.kind, made.args) == ("pathlib.PosixPath", ("/",))


BOMBS = {
    "nested tuples": b"\x80\x04)" + b"\x85" * 100_000 + b".",
    "nested by memory": b"\x80\x04)\x94" + b"h\x00\x85" + b"\x85\x94" * 9 + b".",
    "a number in the memo far away": b"\x80\x02Nr" + struct.pack("<I", 1 << 31) + b".",
    "containers": b"\x80\x04" + b"]" * 2_000_000 + b".",
    "a length beyond the end": b"\x80\x04\x8d" + struct.pack("<Q", 1 << 60) + b"x.",
    "a long number": b"\x80\x04\x8a\xff" + b"\xff" * 255 + b".",
    "no end": b"\x80\x04K\x01",
    "nothing": b"",
    "a text protocol": b"cos\nsystem\n(S'true'\ntR.",
    "another word": b"\x80\x04\x97.",
    "a key that is a list": b"\x80\x04}]K\x01s.",
    "an object of a number": b"\x80\x04K\x01)\x81.",
}


@pytest.mark.parametrize("bomb", BOMBS)
def test_bombs(bomb):
    tracemalloc.start()
    try:
        with pytest.raises(FormatError):
            pickles.load_pickle(BOMBS[bomb], dcp_metadata.allowed_names)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_what_is_written_is_read_by_pickle():
    made = PickleWriter()
    made.mark()
    made.values((1, 300, 70_000, 1 << 40, -5), "text", "text", None, True, ())
    made.tuple()
    data = made.stop()
    assert pickle.loads(data) == ((1, 300, 70_000, 1 << 40, -5), "text", "text", None, True, ())
