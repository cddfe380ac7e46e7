"""PyTorch DCP resharding the same tensors between the same meshes, as its users would.

``python -m benchmarks.dcp make|load|both`` is run by ``torchrun``-like spawning of this file with the
Python of an environment that has torch (CPU build): ``PYTHON -m benchmarks.dcp bench FOLDER``. The mixed
case of `benchmarks.cases`: 8 ranks save DTensors on a (dp 2, mp 4) mesh; 4 ranks load them on (dp 2,
mp 2) and save them again. DCP stores replicas once, so it writes half of the bytes that one file for
each rank takes. Prints seconds, start-up counted and not counted, and bytes written.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path


def worker(task, folder, gigabytes):
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, zeros

    dist.init_process_group("gloo")
    world = dist.get_world_size()
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "mp"))
    count = gigabytes * 1024 // 2 // 16
    state = {}
    for i in range(count):
        sharded = [Replicate(), Shard(1 if i % 5 == 4 else 0)]
        if task == "make":
            torch.manual_seed(i)
            full = torch.randint(0, 1 << 30, (2048, 2048), dtype=torch.int32).view(torch.float32)
            state[f"layers.{i}.weight"] = distribute_tensor(full, mesh, sharded)
        else:
            state[f"layers.{i}.weight"] = zeros(2048, 2048, device_mesh=mesh, placements=sharded)
    source, target = f"{folder}/dcp-src", f"{folder}/dcp-dst"
    dist.barrier()
    began = time.perf_counter()
    if task == "make":
        dcp.save(state, checkpoint_id=source)
    else:
        dcp.load(state, checkpoint_id=source)
        dist.barrier()
        loaded = time.perf_counter() - began
        dcp.save(state, checkpoint_id=target)
        dist.barrier()
        if dist.get_rank() == 0:
            print(json.dumps({"load": loaded, "move": time.perf_counter() - began}))
    dist.destroy_process_group()


def launch(task, folder, gigabytes, processes):
    began = time.perf_counter()
    children = []
    for rank in range(processes):
        env = {
            **os.environ, "RANK": str(rank), "WORLD_SIZE": str(processes), "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "LOCAL_RANK": str(rank),
        }  # fmt: skip
        line = [sys.executable, "-m", "benchmarks.dcp", "worker", task, folder, str(gigabytes)]
        children.append(subprocess.Popen(line, env=env, stdout=subprocess.PIPE, text=True))
    outputs = [child.communicate()[0] for child in children]
    if any(child.returncode for child in children):
        sys.exit("a worker failed")
    whole = time.perf_counter() - began
    return {**json.loads(outputs[0] or "{}"), "whole": whole}


def bench(folder, gigabytes=1, repeat=5):
    if not Path(f"{folder}/dcp-src/.metadata").exists():
        launch("make", folder, gigabytes, 8)
    rows = []
    for _ in range(repeat):
        shutil.rmtree(f"{folder}/dcp-dst", ignore_errors=True)
        os.sync()
        rows.append(launch("load", folder, gigabytes, 4))
    written = sum(p.stat().st_size for p in Path(f"{folder}/dcp-dst").rglob("*") if p.is_file())
    middle = {key: sorted(row[key] for row in rows)[len(rows) // 2] for key in rows[0]}
    print(json.dumps({**middle, "written": written}))


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        worker(sys.argv[2], sys.argv[3], int(sys.argv[4]))
    else:
        bench(sys.argv[2], *map(int, sys.argv[3:]))
