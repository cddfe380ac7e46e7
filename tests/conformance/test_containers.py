"""What every container keeps to, written once; a subclass names it, its types, and an oracle.

What is of one container alone stands in tests/formats.
"""

from __future__ import annotations

import json
import math
import random
from typing import ClassVar

import pytest

from rankxform.engine.sinks import OutputFile, file_sinks, part_descriptors
from rankxform.errors import FormatError
from rankxform.formats.container import (
    CONTAINERS,
    ITEM_SIZE,
    NOT_MINDSPORES,
    TEXT,
    TO_SAFETENSORS,
    TensorSpec,
    content_bytes,
)
from rankxform.formats.dcp_containers import items_of
from tests import reference, reference_dcp
from tests.mpi.test_seams import ToyContainer


class ContainerTests:
    """The laws of a container."""

    container: ClassVar  # of `rankxform.formats.container`
    dtypes: ClassVar[tuple[str, ...]]
    loses_at_most: ClassVar[int] = 4  # so many truncated files are whole files of fewer tensors

    def read_by_others(self, path, layout):
        """Return {name: (type, shape, bytes)} of a file."""
        return reference.read_any(path)

    def made(self, tmp, seed, count=12):
        """Write random tensors, a part after the other in any order; return path, layout, tensors."""
        rng, tensors = random.Random(seed), {}
        for number in range(count):
            dtype = rng.choice(self.dtypes)
            shape = tuple(rng.randint(0 if number else 1, 9) for _ in range(rng.randint(0, 3)))
            name = f"layer.{number}.{'x' * rng.randint(0, 300)}"
            tensors[name] = dtype, reference.full_tensor(name, shape, dtype)
        specs = [TensorSpec(name, dtype, words.shape) for name, (dtype, words) in tensors.items()]
        specs.sort(key=lambda spec: self.container.order(spec.name, spec.dtype))
        layout = self.container.lay_out(specs, {}, False)
        parts = []
        for name, (_, words) in tensors.items():
            data = words.tobytes()
            cuts = sorted(rng.choices(range(len(data) + 1), k=rng.randrange(4)))
            parts += [(name, a, data[a:b]) for a, b in zip([0, *cuts], [*cuts, len(data)])]
        rng.shuffle(parts)
        output = OutputFile(tmp / f"c.{self.container.name}", layout)
        with output.part.open("wb") as file:
            file.truncate(layout.size)
        descriptors = part_descriptors()
        sink = file_sinks({0: output}, [[0]], descriptors, 64 << 10, False)[0]
        for name, start, data in parts:
            if data or start == 0:
                sink.put(name, start, memoryview(data))
        sink.finish()
        descriptors.close()
        output.part.rename(output.final)
        return output.final, layout, tensors

    def index(self, data, log=None):
        def read_at(offset, nbytes):
            if log is not None:
                log.append(nbytes)
            return data[offset : offset + nbytes]

        return self.container.read_index(read_at, len(data))

    @pytest.mark.parametrize("seed", range(8))
    def test_parts_in_any_order_make_a_file_that_others_read(self, seed, tmp_path):
        path, layout, tensors = self.made(tmp_path, seed)
        assert path.stat().st_size == layout.size
        assert self.read_by_others(path, layout) == {
            name: (dtype, words.shape, words.tobytes()) for name, (dtype, words) in tensors.items()
        }

    @pytest.mark.parametrize("seed", range(8))
    def test_an_index_finds_every_content(self, seed, tmp_path):
        path, _, tensors = self.made(tmp_path, seed)
        data, contents = path.read_bytes(), []
        index = self.index(data)
        schema = index.schema
        for name, dtype, shape in zip(schema.names, schema.dtypes, schema.shapes):
            spans = index.spans(name)
            assert sum(span.nbytes for span in spans) == content_bytes(dtype, shape)
            held = b"".join(data[span.offset : span.offset + span.nbytes] for span in spans)
            contents.append((dtype, shape, held))
        assert sorted(contents) == sorted(
            (dtype, words.shape, words.tobytes()) for dtype, words in tensors.values()
        )

    def test_header_and_content_and_what_stands_behind_it_fill_the_file(self, tmp_path):
        _, layout, _ = self.made(tmp_path, 0)
        places = [(offset, len(head)) for offset, head in layout.headers]
        places += [span for spans in layout.spans.values() for span in spans]
        for name, tail in layout.tails.items():
            last = layout.spans[name][-1]
            places.append((last.offset + last.nbytes, len(tail.data)))
        end = 0
        for offset, nbytes in sorted(places):
            assert offset == end
            end += nbytes
        assert end + layout.trailer == layout.size

    def test_every_truncation_is_noticed_or_leaves_whole_tensors(self, tmp_path):
        path, _, _ = self.made(tmp_path, 1, count=4)
        data, whole = path.read_bytes(), 0
        for size in range(len(data)):
            try:
                index = self.index(data[:size])
            except FormatError:
                continue
            assert index.schema.names, "an empty file is refused"
            whole += 1
        assert whole <= self.loses_at_most

    @pytest.mark.parametrize("seed", range(40))
    def test_noise_is_refused(self, seed):
        with pytest.raises(FormatError):
            self.index(random.Random(seed).randbytes(seed * 7))

    def test_headers_alone_are_read(self, tmp_path):
        spec = TensorSpec("w", "Float32", (250_000,))
        layout = self.container.lay_out([spec], {}, False)
        data = bytearray(layout.size)
        for offset, head in layout.headers:
            data[offset : offset + len(head)] = head
        for tail in layout.tails.values():
            data[layout.size - len(tail.data) :] = tail.data
        log = []
        self.index(bytes(data), log)
        assert sum(log) < 100_000 < layout.size


class TestCkpt(ContainerTests):
    container = CONTAINERS["ckpt"]
    dtypes = tuple(d for d in ITEM_SIZE if d not in (TEXT, *NOT_MINDSPORES))


class TestSafetensors(ContainerTests):
    container = CONTAINERS["safetensors"]
    dtypes = tuple(d for d in TO_SAFETENSORS if d in reference.ITEM and d != "Int4")
    loses_at_most = 0


class TestDistcp(ContainerTests):
    container = CONTAINERS["distcp"]
    dtypes = tuple(reference_dcp.TORCH)

    def read_by_others(self, path, layout):
        data = path.read_bytes()
        places = items_of(layout).items()
        return {
            name: reference_dcp.item_content(data[start : start + nbytes])
            for name, (start, nbytes) in places
        }


class TestToy(ContainerTests):
    container = ToyContainer()
    dtypes = ("Float32", "Int8")

    def read_by_others(self, path, layout):
        line, _, content = path.read_bytes().partition(b"\n")
        found = {}
        for name, dtype, shape in json.loads(line):
            nbytes = math.prod(shape) * reference.ITEM[dtype]
            found[name] = dtype, tuple(shape), content[:nbytes]
            content = content[nbytes:]
        return found
