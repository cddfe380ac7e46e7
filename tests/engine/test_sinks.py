"""Arrays that are filled."""

from __future__ import annotations

import numpy as np

import rankxform
from rankxform.engine.sinks import ArraySink
from rankxform.formats.container import TensorSpec
from rankxform.storage.source_reader import SourceReader
from tests import reference


def test_large_arrays_are_neither_read_nor_put(monkeypatch):
    def fail(*_):
        raise AssertionError("a buffer lies between")

    monkeypatch.setattr(SourceReader, "read", fail)
    monkeypatch.setattr(ArraySink, "put", fail)
    rows = np.arange(1 << 18, dtype="f4").reshape(512, 512)
    given = {"w": rows, "t": rows.T}
    found = rankxform.reshard(given, progress=False)
    assert all((found[name] == values).all() for name, values in given.items())
    assert found.bytes_read == 2 * rows.nbytes
    assert not any(np.shares_memory(found[name], values) for name, values in given.items())


def test_a_large_tensor_is_read_into_its_array(monkeypatch, tmp_path):
    params = {"w": ((512, 512), "Float32"), "b": ((512,), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", None, params)
    names, put = [], ArraySink.put

    def noted(sink, name, start, data):
        names.append(name)
        put(sink, name, start, data)

    monkeypatch.setattr(ArraySink, "put", noted)
    found = rankxform.load(src, progress=False)
    (file,) = (tmp_path / "src/rank_0").iterdir()
    assert names == ["b"] and found["w"].tobytes() == reference.read_any(file)["w"][2]


def test_a_large_array_begins_with_a_huge_page_unless_much_of_the_last_were_lost():
    for nbytes, is_aligned in ((8 << 20, True), ((8 << 20) + 1, False), (1 << 20, False)):
        sink = ArraySink([TensorSpec("w", "UInt8", (nbytes,))], in_huge_pages=True)
        room = sink.memory_of("w")
        assert room.nbytes == nbytes and room.flags.c_contiguous
        assert (room.base is not None) == is_aligned
        assert not is_aligned or room.ctypes.data % (2 << 20) == 0
