"""What a node wrote is read back by another, with patience and without mercy."""

from __future__ import annotations

import threading

import pytest

import rankxform
from rankxform.publish import files as reading
from rankxform.publish.files import files_to_read_back, read_back, stat_or_none
from rankxform.storage.identity import sample_digest
from rankxform.transport.team import Nodes


@pytest.fixture
def file(tmp_path):
    """A file, and what the node that wrote it says."""
    path = tmp_path / "checkpoint_0.ckpt"
    path.write_bytes(bytes(range(256)) * 4096)
    return path, {**stat_or_none(path), "sample": sample_digest(path)}


class Clock:
    """Every look at it takes ten seconds."""

    now = 0.0

    def __call__(self):
        self.now += 10
        return self.now


def refused(path, facts, words, monkeypatch):
    monkeypatch.setattr(reading, "_PAUSE", 0)
    with pytest.raises(
        rankxform.StorageError,
        match=f"{words}.* were written on h1; it was removed(?s:.*)the file sys",
    ):
        read_back(path, facts, "h1", Clock())


def test_what_is_the_same_is_read_once(file):
    read_back(*file, "h1", clock=lambda: 0.0)


@pytest.mark.parametrize("at", [0, 600_000, (1 << 20) - 1])
def test_zeros_in_place_of_what_was_written(file, at, monkeypatch):
    path, facts = file
    data = bytearray(path.read_bytes())
    data[at - at % 4096 : at + 200_000] = bytes(len(data[at - at % 4096 : at + 200_000]))
    path.write_bytes(data)
    refused(path, facts, "has other bytes on another node", monkeypatch)


def test_a_file_that_is_shorter_or_not_there(file, monkeypatch):
    path, facts = file
    path.write_bytes(path.read_bytes()[:-1])
    refused(path, facts, "has 1,048,575 bytes as another node sees it", monkeypatch)
    assert not path.exists(), "or a run that goes on would take it for complete"
    refused(path, facts, "is not seen on another node", monkeypatch)


def test_what_comes_late_is_waited_for(file):
    path, facts = file
    data = path.read_bytes()
    path.write_bytes(data[:100])
    timer = threading.Timer(0.3, lambda: path.write_bytes(data))
    timer.start()
    read_back(path, facts, "h1")
    timer.join()


def test_each_file_is_read_once_and_by_another_node():
    nodes = Nodes((0, 0, 1, 2), ("h0", "h1", "h2"))
    written = [{f"{process}-{n}": {} for n in range(3)} for process in range(4)]
    readers = {}
    for process in range(4):
        for path, _, writer in files_to_read_back(written, range(4), process, nodes):
            assert path not in readers
            assert nodes.names[nodes.node_of[int(path[0])]] == writer
            readers[path] = process
    assert sorted(readers) == sorted(path for one in written for path in one)
    assert all(
        nodes.node_of[int(path[0])] != nodes.node_of[reader] for path, reader in readers.items()
    )
    assert len(set(readers.values())) == 4
    own_folders = list(files_to_read_back(written, (0, 1), 0, nodes))
    assert own_folders == []
