"""Where files are cut: between tensors, into parts that stores take, whoever sends them."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from rankxform.formats.container import CONTAINERS, TensorSpec
from rankxform.planning.upload_parts import LEAST_PART, MOST_PARTS, UploadMemory, divide

WRITTEN = ("ckpt", "safetensors", "distcp", "bytes")


def laid_out(kind, rng, most=40):
    specs = [
        TensorSpec(
            f"t{n}",
            rng.choice(("Float32", "BFloat16", "Int64")),
            tuple(rng.choice((0, 1, 3, 70)) for _ in range(rng.randrange(3))),
        )
        for n in range(rng.randint(1, most))
    ]
    return CONTAINERS[kind].lay_out(specs, {}, False, 100)


def extents(layout):
    """Return by tensor the bytes that are written with it: its head, its content, its tail."""
    for name, spans in layout.spans.items():
        first = spans[0].offset - len(layout.heads.get(spans[0].offset, b""))
        tail = layout.tails.get(name)
        stop = spans[-1].offset + spans[-1].nbytes + (len(tail.data) if tail else 0)
        yield name, first, stop


@pytest.mark.parametrize("kind", WRITTEN)
@pytest.mark.parametrize("seed", range(20))
def test_a_part_has_bytes_of_one_unit_alone(kind, seed):
    rng = random.Random(seed)
    layout, least = laid_out(kind, rng), rng.choice((1, 100, 1000, 1 << 20))
    parts, least = divide(layout, least), max(least, -(-layout.size // (MOST_PARTS - 1)))
    edges = [*parts.starts, layout.size]
    assert edges[0] == 0 and edges == sorted(edges)
    sizes = [*parts.nbytes.values()]
    assert sizes == [b - a for a, b in pairwise(edges)]
    assert all(least <= size < 2 * least for size in sizes[:-1])
    assert sorted(n for u in parts.units for n in u.names) == sorted(layout.spans)
    assert [n for u in parts.units for n in u.parts] == [*range(1, len(sizes) + 1)]
    unit_of = {name: unit for unit in parts.units for name in unit.names}
    for name, first, stop in extents(layout):
        numbers = unit_of[name].parts
        assert edges[numbers[0] - 1] <= first and stop <= edges[numbers[-1]]


def test_a_file_has_no_more_parts_than_stores_take():
    layout = CONTAINERS["safetensors"].lay_out([TensorSpec("t", "Float32", (1 << 20,))], {}, False)
    assert len(divide(layout, 1).starts) <= MOST_PARTS


def test_a_tensor_is_complete_with_the_parts_of_its_unit():
    specs = [TensorSpec(name, "Float32", (256,)) for name in "abcd"]
    parts = divide(CONTAINERS["ckpt"].lay_out(specs, {}, False), 512)
    sizes = {n: parts.nbytes[n] for n in parts.units[1].parts}
    assert parts.complete_names(sizes) == {"b"}
    assert parts.complete_names({**sizes, min(sizes): 7}) == set()
    assert parts.complete_names(parts.nbytes) == {*"abcd"}


@pytest.mark.parametrize("total", [64 << 20, 512 << 20, 4 << 30])
@pytest.mark.parametrize("files", [1, 8, 1000])
def test_parts_that_fill_fit_into_the_memory(total, files):
    memory = UploadMemory.of(total, files)
    assert memory.part_bytes >= LEAST_PART
    largest = 2 * memory.part_bytes
    assert memory.files == 1 or memory.files * largest <= memory.nbytes
