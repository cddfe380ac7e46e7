"""A job goes on with fewer ranks, and then with more, without a file.

Four processes train a linear layer with momentum, each with a part of its rows. After some steps
one of them leaves: the others take over its rows and go on. Later it comes back. The losses are
those of a job that was never interrupted.

``python -m examples.living_job FOLDER``; what each process does is in `train`.
"""

from __future__ import annotations

import sys

import numpy as np

import rankxform
from examples.steps import run

ROWS, COLUMNS, STEPS = 12, 8, 5
DATA = np.random.default_rng(7)
X, Y = DATA.standard_normal((40, COLUMNS)), DATA.standard_normal((40, ROWS))
WEIGHT = DATA.standard_normal((ROWS, COLUMNS))


def strategy(ranks):
    """Rows of the weight and of its momentum, in equal parts."""
    return f"shard:weight=0@{ranks}"


def steps(slices, comm, count):
    """Train for some steps; return the losses. Each process has the rows of its number."""
    rows = slices["weight"].shape[0]
    own = slice(comm.rank * rows, (comm.rank + 1) * rows)
    losses = []
    for _ in range(count):
        error = X @ slices["weight"].T - Y[:, own]
        losses.append(comm.allreduce(float((error**2).sum())) / Y.size)
        slices["momentum.weight"] = 0.9 * slices["momentum.weight"] + error.T @ X / len(X)
        slices["weight"] = slices["weight"] - 0.1 * slices["momentum.weight"]
    return losses


def train():
    """Train on 4 ranks, on 3, and on 4 again."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    expected = steps(
        {"weight": WEIGHT, "momentum.weight": np.zeros_like(WEIGHT)}, MPI.COMM_SELF, 3 * STEPS
    )
    rows = ROWS // world.size
    own = WEIGHT[world.rank * rows : (world.rank + 1) * rows]
    slices = {"weight": own, "momentum.weight": np.zeros_like(own)}
    losses = steps(slices, world, STEPS)

    fewer = world.size - 1
    slices = rankxform.reshard(
        slices, strategy(world.size), strategy(fewer), comm=world, release=True
    )
    some = world.Split(0 if slices else 1, world.rank)
    losses += steps(slices, some, STEPS) if slices else [0.0] * STEPS

    slices = rankxform.reshard(slices, strategy(fewer), strategy(world.size), comm=world)
    losses += steps(slices, world, STEPS)
    if world.rank == 0:
        np.testing.assert_allclose(losses, expected, rtol=1e-9)
        print(f"checked: {len(losses)} losses on {world.size}, {fewer} and {world.size} ranks")


def main():
    run(sys.executable, "-m", "examples.living_job", "train", processes=4)


if __name__ == "__main__":
    if sys.argv[1:] == ["train"]:
        train()
    else:
        main()
