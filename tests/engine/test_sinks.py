"""Files and arrays that are filled."""

from __future__ import annotations

import os
from types import SimpleNamespace

import numpy as np
import pytest

import rankxform
from rankxform.engine.sinks import (
    ArraySink,
    OutputFile,
    file_sinks,
    files_made_alike,
    part_descriptors,
)
from rankxform.formats.container import TensorSpec, container_of
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


A, B = {(0,): (0, 1, 2), (1,): (3,)}, {(0,): (0, 1), (1,): (3, 2)}


@pytest.mark.parametrize(
    ("targets", "alike"),
    [
        ([A, A], [[0, 1, 2], [3]]),
        ([A, B], [[0, 1], [2], [3]]),
        (
            [{(0,): (0, 1, 2, 3)}, {(0,): (1,)}],
            [[0, 2, 3], [1]],
        ),  # 1 lacks one more, of a stopped run
        ([], [[0, 1, 2, 3]]),
    ],
)
def test_files_that_get_the_same_from_every_transfer_are_made_together(targets, alike, tmp_path):
    layout, other = (container_of(".ckpt").lay_out([], {}, False) for _ in range(2))
    outputs = {file: OutputFile(tmp_path / f"{file}.ckpt", layout) for file in range(4)}
    transfers = [SimpleNamespace(targets=_Identity(by_cell)) for by_cell in targets]
    assert files_made_alike(outputs, transfers) == alike
    outputs[0] = OutputFile(tmp_path / "0.ckpt", other)
    apart = [[0], *(files for group in alike if (files := [f for f in group if f]))]
    assert sorted(files_made_alike(outputs, transfers)) == sorted(apart)


class _Identity(dict):
    __hash__ = object.__hash__


def test_what_is_put_once_is_in_all_files_that_are_made_together(tmp_path):
    tensors = {"a": os.urandom(400_000), "b": os.urandom(3_000), "c": os.urandom(70_000)}
    specs = [TensorSpec(name, "UInt8", (len(data),)) for name, data in tensors.items()]
    layout, seen = container_of(".ckpt").lay_out(specs, {}, False), {0: 0, 1: 0, 2: 0}
    outputs = {}
    for file in seen:

        def count(offset, buffers, file=file):
            seen[file] += sum(map(len, buffers))

        outputs[file] = OutputFile(tmp_path / f"{file}.ckpt", layout, on_written=count)
        outputs[file].part.touch()
    parts = part_descriptors()
    sinks = file_sinks(outputs, [[0, 2], [1]], parts, 16 << 10, is_write_behind=True)
    assert sinks[0] is sinks[2] is not sinks[1]
    for name, data in tensors.items():
        for sink in (sinks[0], sinks[1]):
            sink.put(name, 0, memoryview(data)[:1000])
            sink.put(name, 1000, memoryview(data)[1000:])
    assert not (sinks[0].finish() or sinks[1].finish())
    parts.close()
    made = [output.part.read_bytes() for output in outputs.values()]
    assert made[0] == made[1] == made[2] and len(made[0]) == layout.size
    assert seen == dict.fromkeys(seen, layout.size)
    assert sum(sink.bytes_put for sink in sinks.values()) == 3 * layout.size
    found = reference.read_any(outputs[0].part.rename(outputs[0].final))
    assert {name: content for name, (*_, content) in found.items()} == tensors
