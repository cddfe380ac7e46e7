"""Source files are read as they were indexed, wherever they lie."""

from __future__ import annotations

import os

import numpy as np
import pytest

from rankxform.errors import CheckpointError
from rankxform.storage.source_reader import SourceReader, TensorRead, index_file
from rankxform.storage.store import STORAGE
from tests import reference
from tests.toy_storage import Memory

DATA = np.arange(64, dtype=np.int32)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "src/a.safetensors"
    reference.write_safetensors(path, {"w": ("Int32", DATA)})
    return path


def content(sources, file, sparse=False, nbytes=256):
    room = memoryview(bytearray(nbytes))
    sources.read(file, "w", 0, room, sparse)
    return bytes(room)


@pytest.mark.parametrize("first", [False, True])
def test_a_file_that_is_replaced_is_noticed_by_each_way_of_reading(file, first):
    with SourceReader({0: str(file)}, {0: index_file(file)}) as sources:
        assert content(sources, 0, first) == DATA.tobytes()
        other = file.with_name("other")
        other.write_bytes(file.read_bytes())
        os.utime(other, ns=(1, 1))
        other.replace(file)
        with pytest.raises(CheckpointError, match="was changed after it was first read"):
            content(sources, 0, not first)


def test_the_files_of_a_source_may_lie_in_several_kinds_of_storage(file, monkeypatch):
    memory = Memory()
    monkeypatch.setitem(STORAGE, "mem", memory)
    memory.add("there", file.parent)
    paths = {0: str(file), 1: f"mem://there/{file.name}"}
    with SourceReader(paths, {n: index_file(path) for n, path in paths.items()}) as sources:
        sources.expect(iter([TensorRead(0, "w", 0, 256), TensorRead(1, "w", 0, 256)]), 1024, print)
        assert content(sources, 0) == content(sources, 1) == DATA.tobytes()
        assert sources.place(1, "w", 0) is None and sources.place(0, "w", 0) is not None
        assert (memory.announced, memory.direct, sources.ahead) == (1, 0, 64)


@pytest.mark.parametrize(("ahead", "memory"), [(1, 256), (3, 1 << 20), (64, 40), (64, 1 << 20)])
def test_as_much_is_in_flight_as_may_be_and_every_read_gets_its_bytes(
    file, monkeypatch, ahead, memory
):
    storage = Memory(ahead=ahead)
    monkeypatch.setitem(STORAGE, "mem", storage)
    storage.add("there", file.parent)
    path = f"mem://there/{file.name}"
    wanted = [
        TensorRead(0, "w", start, nbytes) for start in range(0, 192, 16) for nbytes in (16, 64)
    ]
    others = [TensorRead(0, "w", 3, 7), TensorRead(0, "w", 0, 256)]  # which are of something else
    with SourceReader({0: path}, {0: index_file(path)}) as sources:
        sources.expect(iter(wanted), memory, print)
        for one in [others[0], *wanted[:9], *others, *wanted[9:]]:
            room = memoryview(bytearray(one.nbytes))
            sources.read(0, "w", one.start, room)
            assert bytes(room) == DATA.tobytes()[one.start :][: one.nbytes]
    assert storage.most <= memory
    assert storage.announced == sum(one.nbytes <= memory for one in wanted)


def test_a_file_is_announced_to_the_system_where_it_lies(file, monkeypatch):
    announced, start = [], index_file(file).offsets[0]
    monkeypatch.setattr(
        "rankxform.storage.store.advise", lambda *words: announced.append(words[1:])
    )
    with SourceReader({0: str(file)}, {0: index_file(file)}) as sources:
        sources.announce_to_system(TensorRead(0, "w", 8, 64))
        assert sources.ahead == 0
        sources.expect(iter([TensorRead(0, "w", 8, 64)]), 128, print)  # which it is not
    assert announced == [(os.POSIX_FADV_WILLNEED, start + 8, 64)]
