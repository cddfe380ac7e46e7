"""Which box of a tensor a rank has, as PyTorch's DTensors state it."""

from __future__ import annotations

import random
from itertools import product
from math import prod

import numpy as np
import pytest

import rankxform
from rankxform.errors import RankxformError
from tests import reference_torch as torch
from tests.checkpoints import DATA


def cut(whole, orders, sizes, coordinates):
    """Return a rank's part: along each axis by the mesh axes in that order, as torch.chunk cuts."""
    for axis, mesh_axes in orders.items():
        for mesh_axis in mesh_axes:
            rows = -(-whole.shape[axis] // sizes[mesh_axis])
            first = min(rows * coordinates[mesh_axis], whole.shape[axis])
            whole = whole.take(range(first, min(first + rows, whole.shape[axis])), axis)
    return whole


def write(folder, whole, sizes, placements, orders):
    """Write the file of each rank of a mesh, as verl names them."""
    folder.mkdir(parents=True)
    every = [*product(*map(range, sizes))]
    for rank, coordinates in enumerate(every):
        part = np.ascontiguousarray(cut(whole, orders, sizes, coordinates))
        local = torch.tensor("w", "Float32", part.shape)
        stored = torch.dtensor(local, whole.shape, sizes, coordinates, placements)
        ranks = np.arange(prod(sizes), dtype="<i4").tobytes()
        path = folder / f"model_world_size_{len(every)}_rank_{rank}.pt"
        torch.archive(path, {"w": stored}, {"w": part.tobytes(), "ranks": ranks})
    return folder


JOBS = {  # placements of mesh axes, and the axes that cut each axis of the tensor, in order
    "fsdp": ((3,), [("Shard", 0)], {0: [0]}),
    "columns": ((2,), [("Shard", 1)], {1: [0]}),
    "replicas": ((2, 2), [("Replicate",), ("Shard", 0)], {0: [1]}),
    "two axes": ((2, 3), [("Shard", 0), ("Shard", 1)], {0: [0], 1: [1]}),
    "one axis twice": ((2, 2), [("Shard", 0), ("Shard", 0)], {0: [0, 1]}),
    "fsdp over tp": ((2, 2), [("_StridedShard", 0, 2), ("Shard", 0)], {0: [1, 0]}),
    "three times": ((2, 2, 2), [("_StridedShard", 0, 2), ("Shard", 0), ("Shard", 0)], {0: [1, 0, 2]}),
}  # fmt: skip


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("rows", [1, 7, 12])
def test_boxes_are_those_that_torch_cuts(job, rows, tmp_path):
    sizes, placements, orders = JOBS[job]
    whole = np.arange(rows * 5, dtype="<f4").reshape(rows, 5)
    found = rankxform.load(write(tmp_path / "src", whole, sizes, placements, orders))["w"]
    assert found.shape == whole.shape and found.tobytes() == whole.tobytes()


REFUSED = {
    "a part of a sum": ((2,), [("Partial",)], "a part of a sum"),
    "strides of no mesh": ((2, 2), [("_StridedShard", 0, 3), ("Shard", 0)], "strides of 3"),
    "an axis that is none": ((2,), [("Shard", 2)], "not known"),
    "too few placements": ((2, 2), [("Shard", 0)], "not known"),
}


@pytest.mark.parametrize("job", REFUSED)
def test_what_is_no_box_is_refused_by_name(job, tmp_path):
    sizes, placements, text = REFUSED[job]
    whole = np.zeros((4, 4), "<f4")
    with pytest.raises(RankxformError, match=f"'w'.*{text}"):
        rankxform.load(write(tmp_path / "src", whole, sizes, placements, {}))


def test_a_part_of_another_shape_than_its_mesh_makes_is_refused(tmp_path):
    whole = np.zeros((4, 4), "<f4")
    src = write(tmp_path / "src", whole, (2,), [("Shard", 0)], {1: [0]})
    with pytest.raises(RankxformError, match=r"is \[4, 2\], and its mesh makes it \[2, 4\]"):
        rankxform.load(src)


def test_one_ranks_file_alone_is_no_model(tmp_path):
    path = next((DATA / "verl/fsdp2/ckpt").glob("*rank_0.pt"))
    with pytest.raises(
        RankxformError, match=r"is one rank's part of \[7, 4\]; name the folder of all ranks"
    ):
        rankxform.load(path)


def test_numbers_at_random_are_refused_or_read(tmp_path):
    """Whatever a file says of its mesh, there is no other error."""
    rng = random.Random(7)
    for case in range(60):
        axes = rng.randint(0, 3)
        sizes = [rng.choice((0, 1, 2, 3, 1 << 50, -1)) for _ in range(axes)]
        coordinates = [rng.choice((0, 1, 5, -1)) for _ in range(rng.choice((axes, axes, 1)))]
        kinds = ("Shard", "_StridedShard", "Replicate")
        placements = [(rng.choice(kinds), rng.randint(-1, 2), rng.choice((0, 1, 2))) for _ in sizes]
        local = torch.tensor("w", "Float32", (2, 2))
        stored = torch.dtensor(local, (2, 2), [], coordinates, placements)
        stored.reduced[1][3][1]["_spec"].reduced[2]["mesh"].reduced[2]["mesh"] = torch.tensor(
            "ranks", "Int32", tuple(abs(n) for n in sizes)
        )
        path = tmp_path / f"{case}.pt"
        torch.archive(path, {"w": stored}, {"w": bytes(16), "ranks": bytes(64)})
        try:
            assert rankxform.load(path)["w"].shape == (2, 2)
        except RankxformError as error:
            assert "bug" not in str(error)
