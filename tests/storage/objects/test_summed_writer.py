"""Files in parts with a checksum: the bytes are those of a file that is summed when it is whole."""

from __future__ import annotations

import random
from functools import partial

import pytest

from rankxform.engine.sinks import FileSink
from rankxform.formats import ckpt
from rankxform.formats.container import CONTAINERS, TensorSpec, content_bytes, crc_of
from rankxform.planning.upload_parts import divide
from rankxform.storage.objects.part_writer import PartBuffers
from rankxform.storage.objects.summed_writer import SummedWriter


def random_tensors(rng):
    """Return tensors with content, with scalars of integers, of which MindSpore sums zeros, and
    tensors without elements among them."""
    shapes = [(rng.randint(1, 40), 4), (), (), (0, 3), (rng.randint(1, 300),)]
    specs = [
        TensorSpec(f"t{number}", rng.choice(["Float32", "Int32", "Int64"]), rng.choice(shapes))
        for number in range(rng.randint(1, 9))
    ]
    content = {
        spec.name: rng.randbytes(content_bytes(spec.dtype, spec.shape))
        if spec.shape
        else rng.randrange(99).to_bytes(content_bytes(spec.dtype, ()), "little")
        for spec in specs
    }
    return specs, content


def whole_file(container, layout, content):
    """Return the file's bytes, its checksum put when all else was there."""
    data = bytearray(layout.size)
    for offset, head in layout.headers:
        data[offset : offset + len(head)] = head
    for name, spans in layout.spans.items():
        at = 0
        for offset, nbytes in spans:
            data[offset : offset + nbytes] = content[name][at : at + nbytes]
            at += nbytes

    def blocks(spans):
        return (memoryview(data)[offset : offset + nbytes] for offset, nbytes in spans)

    offset, patch = container.checksum(layout, partial(crc_of, blocks), blocks)
    data[offset : offset + len(patch)] = patch
    assert patch
    return bytes(data)


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
@pytest.mark.parametrize("seed", range(40))
def test_they_are_the_bytes_of_a_file_that_is_summed_when_it_is_whole(kind, seed, monkeypatch):
    """However it is cut, whoever puts what, in any order."""
    rng, container = random.Random(f"{kind} {seed}"), CONTAINERS[kind]
    monkeypatch.setattr(ckpt, "PIECE_BYTES", rng.choice([64, 512 << 20]))
    specs, content = random_tensors(rng)
    layout = container.lay_out(specs, {}, True, 0)
    parts = divide(layout, rng.choice([50, 300, 5000]))
    count = rng.randint(1, 3)
    owners = {name: unit % count for unit, u in enumerate(parts.units) for name in u.names}
    sent, buffers = {}, PartBuffers(1 << 20, lambda nbytes: None)

    def send(number, data):
        assert number not in sent, "a part is sent once"
        sent[number] = bytes(data)

    is_alone = len({*owners.values()}) == 1
    writers = {
        process: SummedWriter(layout, container, parts, buffers, send, is_alone=is_alone)
        for process in {*owners.values()}
    }
    sinks = {process: FileSink(layout, writer) for process, writer in writers.items()}
    puts = []
    for name, data in content.items():
        cuts = sorted({0, *(rng.randrange(len(data)) for _ in range(2) if len(data) > 8)})
        puts += [(name, a, data[a:b]) for a, b in zip(cuts, [*cuts[1:], len(data)])]
    if seed % 3:  # else in the order of the file, as without messages
        rng.shuffle(puts)
    for name, start, data in puts:
        sinks[owners[name]].put(name, start, memoryview(data))
    for sink in sinks.values():
        sink.finish()
    sums = {start: s for writer in writers.values() for start, s in writer.sums.items()}
    for writer in writers.values():
        writer.complete(sums)
        writer.flush()
    buffers.finish()
    assert b"".join(sent[n] for n in sorted(sent)) == whole_file(container, layout, content)
    assert sum(writer.written for writer in writers.values()) == layout.size
