"""MindSpore's .ckpt files: headers, numbers that came in pieces, what older writers wrote."""

from __future__ import annotations

import random

import numpy as np
import pytest

from rankxform.formats import ckpt
from rankxform.formats.container import ITEM_SIZE, NOT_MINDSPORES
from rankxform.formats.protobuf import FormatError
from tests import reference
from tests.formats.test_container import reader


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
