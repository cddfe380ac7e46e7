"""A data-parallel job of 2 processes goes on after two conversions. Needs MindSpore.

Two of msrun's workers train on halves of the data, their gradients averaged, and save. What one
rank saved, complete as on every rank, is sharded for 8 ranks and put together again; two new
workers fill their networks from the 8 ranks' files, in memory, and go on. Each worker's losses are
those of the job that was not stopped, to the bit.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

from examples.steps import ROOT, rankxform, start
from examples.training_goes_on import EIGHT, X, Y, job, with_states
from tests import reference

WORKERS = 2


def worker(folder, source):
    """Train on this worker's share of the data; save after 4 steps, or go on from `source`."""
    import mindspore as ms
    from mindspore.communication import init

    from rankxform.mindspore import load_into

    init()
    ms.set_auto_parallel_context(parallel_mode=ms.ParallelMode.DATA_PARALLEL, gradients_mean=True)
    rank = int(os.environ["RANK_ID"])
    ms.set_seed(1)  # the same values on all workers, as a broadcast would give them
    training = job()
    x, y = ms.Tensor(X[rank::WORKERS]), ms.Tensor(Y[rank::WORKERS])

    def steps(count):
        return [float(training(x, y).asnumpy()) for _ in range(count)]

    if source:
        report = load_into(training, source, folder / "eight.ckpt", None)
        assert not report.missing, report.missing
        told = {"after": steps(4)}
    else:
        told = {"before": steps(4)}
        path = folder / f"saved/rank_{rank}/net-1_4.ckpt"
        path.parent.mkdir(parents=True)
        ms.save_checkpoint(training, str(path))
        told["after"] = steps(4)
    (folder / f"{'new' if source else 'old'}_{rank}.json").write_text(json.dumps(told))


def msrun(folder, *words):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    beside = Path(sys.executable).parent / "msrun"
    line = [
        str(beside) if beside.exists() else shutil.which("msrun"),
        f"--worker_num={WORKERS}", f"--local_worker_num={WORKERS}", "--join=True",
        f"--master_port={port}", f"--log_dir={folder}/log", __file__, str(folder), *map(str, words),
    ]  # fmt: skip
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = {**os.environ, "PYTHONPATH": str(ROOT), "PATH": path}
    print("+ msrun", *line[5:], flush=True)
    done = subprocess.run(line, env=env, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stdout[-3000:] + done.stderr[-3000:])


def losses(folder, which):
    return [json.loads((folder / f"{which}_{r}.json").read_text()) for r in range(WORKERS)]


def main(folder):
    eight = reference.write_strategy(folder / "eight.ckpt", [with_states(EIGHT)])
    msrun(folder, "worker")
    saved = folder / "saved/rank_1/net-1_4.ckpt"
    rankxform(
        "transform", saved, folder / "on_8", "--src-strategy", "none", "--dst-strategy", eight,
        processes=2,
    )  # fmt: skip
    msrun(folder, "worker", folder / "on_8")
    for rank, (old, new) in enumerate(zip(losses(folder, "old"), losses(folder, "new"))):
        lines = {"before": old["before"], "not stopped": old["after"], "gone on": new["after"]}
        for words, values in lines.items():
            print(f"worker {rank}, {words:11}", *(f"{loss:.6f}" for loss in values))
        assert old["after"] == new["after"]
    print("the same to the bit")


if __name__ == "__main__":
    if "worker" in sys.argv[2:]:
        worker(Path(sys.argv[1]), sys.argv[3] if len(sys.argv) > 3 else None)
    else:
        start(main)
