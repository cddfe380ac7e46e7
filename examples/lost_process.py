"""A process is killed with what it kept; the others' slices in memory are enough to go on.

Needs MindSpore. Four processes train, and after each step each keeps its rank's slices in a folder
of its own in memory, as a node would in ``/dev/shm``. Two ranks hold each slice. One process is
killed and its folder is lost; mpirun ends the others. What they kept becomes the slices of three
ranks, nothing is read from storage, and three processes go on with the losses of a job that was
never interrupted.

``python -m examples.lost_process FOLDER``; what each process does is in `train`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from examples.steps import rankxform, run, start
from tests import reference

FOUR = {
    "0.weight": ([2, 2], [0, -1], 0, 0),
    "0.bias": ([2, 2], [0], 0, 0),
    "2.weight": ([2, 2], [-1, 0], 0, 0),
    "2.bias": ([2, 2], [-1], 0, 0),
}
THREE = {
    "0.weight": ([3], [0, -1], 0, 0),
    "0.bias": ([3], [0], 0, 0),
    "2.weight": ([3], [-1, 0], 0, 0),
    "2.bias": ([3], [-1], 0, 0),
}
STEPS, KILLED_AFTER, VICTIM = 6, 3, 2


def keep(training, folder, rank, step):
    """Keep what `rank` holds of the network and its optimizer after a step; drop earlier ones."""
    import mindspore as ms

    from examples.training_goes_on import with_states

    layouts = with_states(FOUR)
    slices = [
        {"name": p.name, "data": ms.Tensor(reference.shard(p.asnumpy(), layouts[p.name], rank))}
        if p.name in layouts
        else {"name": p.name, "data": ms.Tensor(p.asnumpy())}
        for p in training.get_parameters()
    ]
    path = folder / f"node_{rank}/rank_{rank}/net-1_{step}.ckpt"
    path.parent.mkdir(parents=True, exist_ok=True)
    ms.save_checkpoint(slices, str(path))
    for earlier in path.parent.glob(f"net-1_{step - 2}.ckpt"):
        earlier.unlink()


def train(folder, memory):
    """Train for all steps, or go on from what was converted; the victim kills itself."""
    import mindspore as ms
    from mpi4py import MPI

    from examples.training_goes_on import job, steps
    from rankxform.mindspore import load_into

    world = MPI.COMM_WORLD
    if world.rank == 0 and not (memory / "next").exists():
        ms.set_seed(1)
        (folder / "expected.json").write_text(json.dumps(steps(job(), STEPS)))
    ms.set_seed(1)  # the same values on all processes, and in the job that is not interrupted
    training, done = job(), 0
    if (memory / "next").exists():
        report = load_into(training, memory / "next", folder / "three.ckpt", None)
        assert not report.missing, report.missing
        done = KILLED_AFTER
    losses = []
    for step in range(done + 1, STEPS + 1):
        world.Barrier()
        losses += steps(training, 1)
        if world.size == 4:
            keep(training, memory, world.rank, step)
            world.Barrier()
            if (step, world.rank) == (KILLED_AFTER, VICTIM):
                os.kill(os.getpid(), signal.SIGKILL)
    if world.rank == 0:
        (folder / "losses.json").write_text(json.dumps(losses))


def main(folder):
    memory = Path(tempfile.mkdtemp(prefix="rankxform-", dir="/dev/shm"))
    words = [sys.executable, "-m", "examples.lost_process", folder, "train", memory]
    try:
        go_on(folder, memory, words)
    finally:
        shutil.rmtree(memory)


def go_on(folder, memory, words):
    from examples.training_goes_on import with_states

    four = reference.write_strategy(folder / "four.ckpt", [with_states(FOUR)])
    three = reference.write_strategy(folder / "three.ckpt", [with_states(THREE)])
    try:
        run(*words, processes=4)
        sys.exit("WRONG: the job ended as if no process had been killed")
    except subprocess.CalledProcessError:
        print(f"process {VICTIM} was killed, and mpirun has ended the others", flush=True)
    shutil.rmtree(memory / f"node_{VICTIM}")
    first, *others = sorted(memory.glob("node_*"))
    rankxform(
        "transform", first, memory / "next", "--src-strategy", four, "--dst-strategy", three,
        *(word for place in others for word in ("--fallback", place)), processes=3,
    )  # fmt: skip
    run(*words, processes=3)
    expected = json.loads((folder / "expected.json").read_text())
    losses = json.loads((folder / "losses.json").read_text())
    print("never interrupted", *(f"{loss:.6f}" for loss in expected))
    print("gone on          ", *[" " * 8] * KILLED_AFTER, *(f"{loss:.6f}" for loss in losses))
    assert losses == expected[KILLED_AFTER:]
    print("the same to the bit")


if __name__ == "__main__":
    if "train" in sys.argv[2:]:
        train(Path(sys.argv[1]), Path(sys.argv[3]))
    else:
        start(main)
