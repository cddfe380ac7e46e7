"""Slices from memory to memory: `rankxform.reshard` against what MPI alone does with the bytes.

``mpirun -n 2 python -m benchmarks.reshard [--mib 1024] [--tensors 64] [--repeat 5]`` moves matrices
that are sharded by rows to columns, and prints the least of the runs in seconds, and its ratio to

- `alltoall`: MPI_Alltoall of as many bytes into memory that was used before;
- `fresh`: the same into new memory, as a function that returns arrays needs it;
- `limit`: the same columns as `reshard` makes, into arrays that were used before: tensor by tensor
  packed by numpy and exchanged by MPI_Sendrecv, and what stays copied by numpy;
- `by hand`: all slices packed by numpy, MPI_Alltoall, and unpacked into new arrays.

`into` and `into with plan` are `reshard` into arrays that were used before.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import rankxform
from tests import reference

COMM = MPI.COMM_WORLD


def strategies(names):
    """Write a strategy by rows and one by columns on process 0; return their paths."""
    here = Path(COMM.bcast(tempfile.mkdtemp() if COMM.rank == 0 else None))
    paths = here / "rows.ckpt", here / "columns.ckpt"
    for path, axes in zip(paths, ([0, -1], [-1, 0])):
        if COMM.rank == 0:
            layout = [COMM.size], axes, 0, 0
            reference.write_strategy(path, [dict.fromkeys(names, layout)])
    COMM.Barrier()
    return paths


def least(action, repeat):
    """Return the least seconds that an action takes on all processes."""
    passed = []
    for _ in range(repeat + 1):  # the first connects
        COMM.Barrier()
        began = time.perf_counter()
        action()
        COMM.Barrier()
        passed.append(time.perf_counter() - began)
    return min(passed[1:])


def by_hand(held):
    """Pack, exchange and unpack; return the columns of this process."""
    rows, columns = next(iter(held.values())).shape
    part = columns // COMM.size
    packed = np.empty((COMM.size, len(held), rows, part), np.float32)
    for number, values in enumerate(held.values()):
        for process in range(COMM.size):
            packed[process, number] = values[:, process * part : (process + 1) * part]
    received = np.empty_like(packed)
    COMM.Alltoall(packed, received)
    found = {name: np.empty((rows * COMM.size, part), np.float32) for name in held}
    for number, values in enumerate(found.values()):
        for process in range(COMM.size):
            values[process * rows : (process + 1) * rows] = received[process, number]
    return found


def pairwise(held, rooms, packed):
    """Put the columns of this process into `rooms`, by way of a buffer for one tensor's part."""
    rows, columns = next(iter(held.values())).shape
    part = columns // COMM.size
    for name, values in held.items():
        room = rooms[name]
        for distance in range(COMM.size):
            to, sender = (COMM.rank + distance) % COMM.size, (COMM.rank - distance) % COMM.size
            place = room[sender * rows : (sender + 1) * rows]
            part_of_peer = values[:, to * part : (to + 1) * part]
            if distance == 0:
                place[...] = part_of_peer
            else:
                packed[...] = part_of_peer
                COMM.Sendrecv(packed, to, recvbuf=place, source=sender)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--tensors", type=int, default=64)
    parser.add_argument("--repeat", type=int, default=5)
    options = parser.parse_args()
    edge = int((options.mib * (1 << 20) / options.tensors / 4) ** 0.5) // COMM.size * COMM.size
    names = [f"layers.{number}.weight" for number in range(options.tensors)]
    rng = np.random.default_rng(COMM.rank)
    held = {name: rng.random((edge // COMM.size, edge), dtype=np.float32) for name in names}
    nbytes = sum(values.nbytes for values in held.values()) // COMM.size * COMM.size
    a, b = strategies(names)
    sent, used = np.ones(nbytes, np.uint8), np.ones(nbytes, np.uint8)
    plan = rankxform.plan_reshard(held, a, b, comm=COMM)
    found = rankxform.reshard(held, plan=plan, comm=COMM, progress=False)
    assert all((found[name] == values).all() for name, values in by_hand(held).items())
    rooms, packed = dict(found), np.ones((edge // COMM.size, edge // COMM.size), np.float32)
    for values in found.values():
        values[...] = 0
    pairwise(held, rooms, packed)
    assert all((found[name] == values).all() for name, values in by_hand(held).items())
    actions = {
        "alltoall": lambda: COMM.Alltoall(sent, used),
        "fresh": lambda: COMM.Alltoall(sent, np.empty(nbytes, np.uint8)),
        "limit": lambda: pairwise(held, rooms, packed),
        "by hand": lambda: by_hand(held),
        "reshard": lambda: rankxform.reshard(held, a, b, comm=COMM, progress=False),
        "with plan": lambda: rankxform.reshard(held, plan=plan, comm=COMM, progress=False),
        "into": lambda: rankxform.reshard(held, a, b, comm=COMM, into=rooms, progress=False),
        "into with plan": lambda: rankxform.reshard(
            held, plan=plan, comm=COMM, into=rooms, progress=False
        ),
    }
    seconds = {name: least(action, options.repeat) for name, action in actions.items()}
    if COMM.rank == 0:
        print(f"{COMM.size} processes, {nbytes * COMM.size / 2**20:.0f} MiB in {len(held)} tensors")
        for name, value in seconds.items():
            ratios = (f"{value / seconds[other]:.2f} x {other}" for other in list(actions)[:4])
            print(f"{name:14} {value:7.3f} s  {', '.join(ratios)}")


if __name__ == "__main__":
    main()
