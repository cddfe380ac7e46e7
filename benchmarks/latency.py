"""A source behind a latency: what reads in flight are worth.

``python -m benchmarks.latency [--folder F] [--mib 1024] [--memory 64 ...]``: shards in memory that
answer each read after 30 ms, 64 at a time, and the same without latency. Medians of the move,
interleaved; the folder should be in memory too.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
from pathlib import Path

import rankxform
from rankxform.storage.store import STORAGE
from tests import reference
from tests.toy_storage import Memory

LATENCY, REQUESTS, FILES, ROW = 0.03, 64, 4, 4096
CASES = {"rows": ([8], [0, -1]), "columns": ([2], [-1, 0])}


def prepare(folder, nbytes, layout):
    params = {f"w{n}": ((nbytes // 16 // 4 // ROW, ROW), "Float32") for n in range(16)}
    for name, (devices, axes) in (("src", ([FILES], [0, -1])), ("dst", layout)):
        stages = [dict.fromkeys(params, (devices, axes, 0, 0))]
        reference.write_stage_files(folder / f"{name}_strategy", stages)
        if name == "src":
            reference.write_checkpoint(folder / "src", stages, params, {}, "safetensors")


def seconds(folder, memory, latency):
    """Return how long the move of a conversion took, and the storage that it read."""
    STORAGE["mem"] = storage = Memory(latency, REQUESTS)
    storage.add("src", folder / "src")
    shutil.rmtree(folder / "dst", ignore_errors=True)
    report = rankxform.transform(
        "mem://src", folder / "dst", folder / "src_strategy", folder / "dst_strategy",
        fsync=False, memory=memory,
    )  # fmt: skip
    return report.move_seconds, storage


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--memory", type=int, nargs="+", default=[64, 512], metavar="MIB")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    for case, layout in CASES.items():
        folder = Path(tempfile.mkdtemp(dir=options.folder))
        prepare(folder, options.mib << 20, layout)
        for memory in options.memory:
            found = {0.0: [], LATENCY: []}
            for _ in range(options.rounds):
                for latency, times in found.items():
                    taken, storage = seconds(folder, memory << 20, latency)
                    times.append(taken)
            without, behind = (statistics.median(times) for times in found.values())
            print(
                f"{case:8} --memory {memory:4} MiB: {without:.3f} s without latency, {behind:.3f} s "
                f"with {LATENCY * 1e3:.0f} ms: {without / behind:.0%} of the throughput; at most "
                f"{storage.most >> 20} MiB in flight, {storage.announced} reads announced, "
                f"{storage.direct} not"
            )
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
