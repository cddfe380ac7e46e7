"""The table of a source that is stated box by box, and what headers contradict."""

from __future__ import annotations

import functools
import random

import numpy as np
import pytest

import rankxform
from rankxform.errors import CheckpointError
from rankxform.formats.container import Schema
from rankxform.geometry.box import Box
from rankxform.layout.layout import Layout
from rankxform.layout.strategy import Strategy
from rankxform.planning.build_catalog import catalog_of
from rankxform.planning.catalog import DeclaredBox, Description
from rankxform.planning.plan import Planner
from rankxform.planning.selection import select_parameters
from tests import reference
from tests.geometry.test_tiling import split
from tests.planning import assigned

SHAPES = {"a": (12, 10), "b": (7,), "c": (6, 4, 5)}


def declared(seed, files=16):
    """Deal the boxes of some tensors to files, several of one tensor in a file too."""
    rng = random.Random(seed)
    boxes, entries = {}, {}
    for name, shape in SHAPES.items():
        found = []
        for number, box in enumerate(split(Box.whole(shape), rng)):
            for file in rng.sample(range(files), rng.choice([1, 1, 2])):
                found.append(DeclaredBox(file, box, f"/{number}"))
                entries.setdefault(file, {})[f"{name}/{number}"] = box.shape
        boxes[name] = tuple(found)
    schemas = {
        file: Schema(tuple(some), ("Float32",) * len(some), tuple(some.values()))
        for file, some in entries.items()
    }
    types = {name: ("Float32", shape) for name, shape in SHAPES.items()}
    return Description("metadata", boxes=boxes, declared=types), schemas


def table(description, schemas):
    return catalog_of(description, schemas, {file: f"file {file}" for file in schemas}, schemas)


@pytest.mark.parametrize("seed", range(40))
def test_any_boxes_in_any_files_go_through_the_planner(seed):
    catalog = table(*declared(seed))
    layouts = {n: Layout((3, 2), ((0, 1), *((),) * (len(s) - 1))) for n, s in SHAPES.items()}
    layouts["a"], layouts["b"] = Layout((3, 2), ((1,), (0,))), Layout((6,), ((),))
    layouts["c"] = Layout((3, 2), ((1,), (0,), ()))
    planner = Planner(
        catalog,
        Strategy((layouts,), 6, "b"),
        select_parameters(catalog, Strategy((layouts,), 6, "b")),
    )
    for transfer in planner.transfers([planner.whole_file(rank) for rank in range(6)]):
        for dst_cell in transfer.targets:
            marks, slice_box = np.zeros(transfer.parameter.shape, int), transfer.grid.box(dst_cell)
            for src_cell, region in transfer.copies(dst_cell):
                marks[transfer.parameter.grid.destination_box(src_cell, region).slices()] += 1
            assert (marks[slice_box.slices()] == 1).all() and marks.sum() == slice_box.size
        for cell, file in transfer.readers.items():
            entry = transfer.parameter.entry(cell, file)
            assert entry.partition("/")[0] == transfer.parameter.name
            assert file in transfer.parameter.sharding.files[cell]
    parts = assigned(planner, 6, 5)
    assert sum(one.stop - one.first for some in parts for one in some) == 18


def test_tensors_that_are_stored_alike_share_one_sharding():
    boxes = tuple(DeclaredBox(n, Box((2 * n, 0), (2 * n + 2, 4))) for n in range(3))
    names = ("u", "v", "w")
    schema = Schema(names, ("Int8",) * 3, ((2, 4),) * 3)
    description = Description(
        "m", boxes=dict.fromkeys(names, boxes), declared=dict.fromkeys(names, ("Int8", (6, 4)))
    )
    catalog = table(description, dict.fromkeys(range(3), schema))
    assert len({id(one.sharding) for one in catalog.parameters}) == 1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda boxes: boxes[1:], "cover 12 of 24 elements"),
        (lambda boxes: (*boxes, DeclaredBox(1, Box((2, 0), (5, 4)))), "overlap"),
        (lambda boxes: (DeclaredBox(0, Box((0, 0), (2, 4)), "x"), *boxes[1:]), "does not hold 'wx'"),
        (lambda boxes: (DeclaredBox(0, Box((0, 0), (3, 3))), *boxes[1:]), "is stated"),
    ],
)  # fmt: skip
def test_what_headers_or_the_tensor_contradict_is_refused(change, text):
    boxes = (DeclaredBox(0, Box((0, 0), (3, 4))), DeclaredBox(1, Box((3, 0), (6, 4))))
    schema = Schema(("w",), ("Int8",), ((3, 4),))
    stated_types = {"w": ("Int8", (6, 4))}
    description = Description("m", boxes={"w": boxes}, declared=stated_types)
    assert table(description, {0: schema, 1: schema}).declared["w"].shape == (6, 4)
    with pytest.raises(CheckpointError, match=text):
        table(
            Description("m", boxes={"w": change(boxes)}, declared=stated_types),
            {0: schema, 1: schema},
        )


def test_a_box_whose_file_is_not_there_is_lacking():
    boxes = (DeclaredBox(0, Box((0, 0), (3, 4))), DeclaredBox(1, Box((3, 0), (6, 4))))
    description = Description("m", boxes={"w": boxes}, declared={"w": ("Int8", (6, 4))})
    catalog = table(description, {0: Schema(("w",), ("Int8",), ((3, 4),))})
    assert catalog.declared["w"].sharding.placement.lacking == {(1, 0): (1,)}


@pytest.mark.parametrize("kind", ["ckpt", "shard"])
@pytest.mark.parametrize(
    ("rows", "is_joined"),
    [((4, 4, 4, 2), True), ((3, 3, 3, 0), True), ((1, 1, 0, 0), True), ((2, 1, 0, 0), False),
     ((2, 4, 4, 4), False), ((4, 4, 3, 3), False), ((4, 4, 2, 4), False)],
)  # fmt: skip
def test_slices_of_the_rows_that_chunks_have(rows, is_joined, kind, tmp_path):
    """And their states; others are refused with each rank's rows."""
    arrays = {}
    for name in ("w", "adam_m.w"):
        arrays[name] = np.arange(1, 1 + sum(rows) * 3, dtype="<u4").reshape(-1, 3) + len(name)
    for rank, count in enumerate(rows):
        first = sum(rows[:rank])
        entries = {n: ("Float32", a[first : first + count]) for n, a in arrays.items()}
        reference.write_safetensors(tmp_path / f"src/rank_{rank}/c_{rank}.safetensors", entries)
    a = "shard:^w=0@4"
    if kind == "ckpt":
        stages = [dict.fromkeys(arrays, ([4], [0, -1], 0, 0))]
        a = reference.write_strategy(tmp_path / "a.ckpt", stages)
    call = functools.partial(
        rankxform.transform, tmp_path / "src", tmp_path / "dst", a, fsync=False
    )
    if not is_joined:
        with pytest.raises(
            CheckpointError, match=f"unlike rows: {rows[0]} on rank 0, {rows[1]} on"
        ):
            call()
        return
    call(verify=True)
    (path,) = (tmp_path / "dst").rglob("*.safetensors")
    made = {name: data for name, (_, _, data) in reference.read_safetensors(path).items()}
    assert made == {name: array.tobytes() for name, array in arrays.items()}
