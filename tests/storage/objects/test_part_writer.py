"""Parts that fill in any order, are sent once, and take no more memory than was given."""

from __future__ import annotations

import random
import threading
from itertools import pairwise

import pytest

from rankxform.engine.sinks import FileSink
from rankxform.errors import StoppedError, StorageError
from rankxform.formats.container import CONTAINERS, TensorSpec
from rankxform.planning.upload_parts import UploadParts
from rankxform.storage.objects.part_writer import PartBuffers, PartWriter


class Sender:
    def __init__(self):
        self.got, self.gate, self.error = {}, threading.Event(), None
        self.gate.set()

    def __call__(self, number, data):
        assert self.gate.wait(30)
        if self.error:
            raise self.error
        assert number not in self.got, "a part is sent once"
        self.got[number] = bytes(data)


@pytest.mark.parametrize("seed", range(20))
def test_bytes_come_into_the_parts_where_they_belong(seed):
    rng = random.Random(seed)
    content = rng.randbytes(1000)
    starts = [0, *sorted(rng.sample(range(1, 1000), rng.randrange(8)))]
    present = {n for n in range(1, len(starts) + 1) if rng.random() < 0.2}
    sender, buffers = Sender(), PartBuffers(400, lambda nbytes: None)
    writer = PartWriter(UploadParts((*starts,), 1000, ()), buffers, sender, present)
    cuts = [0, *sorted(rng.sample(range(1, 1000), rng.randrange(20))), 1000]
    pieces = [(a, content[a:b]) for a, b in pairwise(cuts)]
    rng.shuffle(pieces)
    for offset, piece in pieces:
        head = rng.randrange(len(piece))
        writer.put(offset + head, memoryview(piece)[head:], memoryview(piece)[:head])
    buffers.finish()
    ends = [*starts[1:], 1000]
    expected = {n: content[a:b] for n, (a, b) in enumerate(zip(starts, ends), 1)}
    assert sender.got == {n: data for n, data in expected.items() if n not in present}
    assert writer.written == sum(map(len, sender.got.values()))


def test_a_part_that_is_begun_waits_for_memory():
    sender, waited = Sender(), []
    sender.gate.clear()

    def look(nbytes):
        waited.append(len(sender.got))
        sender.gate.set()

    buffers = PartBuffers(25, look)
    writer = PartWriter(UploadParts((*range(0, 100, 10),), 100, ()), buffers, sender)
    for offset in range(0, 20, 10):
        writer.put(offset, memoryview(bytes(10)))
    assert not waited
    writer.put(20, memoryview(bytes(1)))
    assert waited and 1 in sender.got


def test_what_fails_is_raised_and_a_stop_is_heard():
    sender = Sender()
    sender.error = StorageError("the connection broke")
    buffers = PartBuffers(100, lambda nbytes: None)
    PartWriter(UploadParts((0,), 10, ()), buffers, sender).put(0, memoryview(bytes(10)))
    with pytest.raises(StorageError, match="broke"):
        buffers.finish()

    def stop(nbytes):
        raise StoppedError("stopped by SIGTERM")

    sender = Sender()
    sender.gate.clear()
    buffers = PartBuffers(100, stop)
    PartWriter(UploadParts((0,), 10, ()), buffers, sender).put(0, memoryview(bytes(10)))
    with pytest.raises(StoppedError):
        buffers.finish()
    buffers.close()
    sender.gate.set()


def test_a_head_that_an_empty_tensor_shares_is_counted_once():
    """The header of a safetensors file stands before both; counted twice, a part were sent too
    early, with zeros at its end."""
    specs = [("a", "Float32", (0, 4)), ("b", "Float32", (64, 4)), ("c", "Float32", (64,))]
    layout = CONTAINERS["safetensors"].lay_out([TensorSpec(*spec) for spec in specs], {}, False, 0)
    sender, buffers = Sender(), PartBuffers(1 << 20, lambda nbytes: None)
    sink = FileSink(layout, PartWriter(UploadParts((0,), layout.size, ()), buffers, sender))
    for name, spans in layout.spans.items():
        sink.put(name, 0, memoryview(b"x" * spans[0].nbytes))
    sink.finish()
    buffers.finish()
    header = layout.headers[0][1]
    assert sender.got == {1: header + b"x" * (layout.size - len(header))}


def test_a_part_that_lacks_bytes_is_never_taken_for_sent():
    writer = PartWriter(UploadParts((0,), 10, ()), PartBuffers(100, print), Sender())
    writer.put(0, memoryview(bytes(9)))
    with pytest.raises(AssertionError, match="lack"):
        writer.flush()
