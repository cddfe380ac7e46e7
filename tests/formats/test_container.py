"""Indexes found from headers, and headers as MindSpore and safetensors write them."""

from __future__ import annotations

import random

import numpy as np
import pytest
import safetensors.numpy

from rankxform.formats import ckpt
from rankxform.formats import safetensors as ours
from rankxform.formats.container import ITEM_SIZE, NOT_MINDSPORES, Span
from rankxform.formats.protobuf import FormatError, read_varint, signed, varint
from tests import reference


def reader(data):
    return lambda offset, nbytes: data[offset : offset + nbytes]


def entries(count=40):
    rng = random.Random(count)
    found = {}
    for i in range(count):
        dtype = rng.choice([d for d in ITEM_SIZE if d not in ("str", *NOT_MINDSPORES)])
        shape = tuple(rng.randint(0, 5) for _ in range(rng.randint(0, 3)))
        found[f"layer.{i}.{'x' * rng.randint(0, 300)}"] = (
            dtype,
            reference.counting_tensor("", shape, dtype),
        )
    return found


@pytest.mark.parametrize("n", [0, 1, 127, 128, 300, 2**31, 2**63, 2**64 - 1])
def test_numbers_survive(n):
    assert read_varint(varint(n), 0) == (n, len(varint(n)))
    assert signed(read_varint(varint(-5), 0)[0], 64) == -5


def test_a_ckpt_index_finds_every_content(tmp_path):
    written = entries()
    reference.write_ckpt(tmp_path / "c.ckpt", written)
    data = (tmp_path / "c.ckpt").read_bytes()
    index = ckpt.read_index(reader(data), len(data))
    for name, (dtype, words) in written.items():
        assert index.shape(name) == words.shape and index.dtype(name) == dtype
        assert (
            b"".join(data[s.offset : s.offset + s.nbytes] for s in index.spans(name))
            == words.tobytes()
        )


def test_headers_are_what_another_writer_writes():
    for shape in ((), (1,), (3, 4), (1 << 20, 3)):
        data = bytes(4 * int(np.prod(shape)))
        entry = reference.ckpt_entry("net.w", "Float32", shape, data)
        assert ckpt.header("net.w", "Float32", shape, len(data)) + data == entry


def test_fields_may_come_in_any_order():
    content = reference.field(3, bytes(8))
    tensor = content + reference.field(2, b"Float32") + reference.dims([2])
    value = reference.field(2, tensor) + reference.field(1, b"w") + reference.field(9, b"unknown")
    data = reference.field(1, value)
    index = ckpt.read_index(reader(data), len(data))
    assert index.shape("w") == (2,)
    packed = reference.field(2, b"Float32") + reference.field(1, b"\x02\x01") + content
    data = reference.field(1, reference.field(1, b"w") + reference.field(2, packed))
    assert ckpt.read_index(reader(data), len(data)).shape("w") == (2, 1)


def test_an_old_scalar_has_one_dim_of_zero():
    data = reference.ckpt_entry("s", "Float32", (0,), bytes(4))
    assert ckpt.read_index(reader(data), len(data)).shape("s") == ()


def test_a_name_that_comes_again_is_another_files():
    """MindSpore takes the later one; two files were joined."""
    parts = [
        reference.ckpt_entry(n, "Int8", (1,), b) for n, b in (("a", b"1"), ("b", b"2"), ("a", b"3"))
    ]
    data = b"".join(parts)
    with pytest.raises(FormatError, match=f"names 'a' twice: at byte {len(data) - len(parts[2])}"):
        ckpt.read_index(reader(data), len(data))


def test_the_checksum_trailer_is_no_parameter():
    body = reference.ckpt_entry("w", "Int8", (3,), b"abc")
    data = body + ckpt.crc_trailer(12345)
    index = ckpt.read_index(reader(data), len(data))
    assert index.schema.names == ("w",) and index.checksum_at == len(body)
    assert ckpt.stated_crc(data[index.checksum_at :]) == 12345


def test_pieces_are_sharded_where_mindspore_shards():
    assert list(ckpt.pieces(0)) == [0]
    assert list(ckpt.pieces(ckpt.PIECE_BYTES)) == [ckpt.PIECE_BYTES]
    assert list(ckpt.pieces(ckpt.PIECE_BYTES * 2 + 1)) == [ckpt.PIECE_BYTES, ckpt.PIECE_BYTES, 1]


def test_safetensors_headers_load_in_the_library(tmp_path):
    listed = [("b", "Float64", (2,)), ("a", "Int16", (3, 1)), ("s", "Bool", ())]
    head, offsets = ours.header(listed, {"format": "ms", "mine": "kept"})
    body = bytes(range(16)) + bytes(range(6)) + b"\1"
    (tmp_path / "x.safetensors").write_bytes(head + body)
    loaded = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert {n: a.shape for n, a in loaded.items()} == {"b": (2,), "a": (3, 1), "s": ()}
    assert loaded["a"].tobytes() == body[16:22]
    assert len(head) % 8 == 0
    index = ours.read_index(reader(head + body), len(head + body))
    assert index.metadata == {"format": "ms", "mine": "kept"}
    assert index.spans("a") == (Span(offsets[1], 6),)


def test_a_safetensors_file_of_the_library_is_indexed(tmp_path):
    arrays = {
        f"p{i}": np.arange(i * 3, dtype=t).reshape(3, i) for i, t in enumerate(("i1", "f4", "f8"))
    }
    safetensors.numpy.save_file(arrays, tmp_path / "x.safetensors", {"who": "me"})
    data = (tmp_path / "x.safetensors").read_bytes()
    index = ours.read_index(reader(data), len(data))
    for name, array in arrays.items():
        span = index.spans(name)[0]
        assert index.shape(name) == array.shape
        assert data[span.offset : span.offset + span.nbytes] == array.tobytes()
