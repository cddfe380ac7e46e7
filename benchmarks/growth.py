"""How time and memory grow with what a document may state: ``python -m benchmarks.growth``.

Each case is planned, or read, at n, 2n and 4n on one process. A line says the seconds of each, the
exponent of the growth from the first to the last (1: linear), and how much memory it took at most.
"""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rankxform.cli.main import main as command

SIZES = 3  # n, 2n, 4n


def strategy(path: Path, full: dict[str, list[int]], layouts: dict, stage: int = 0) -> str:
    """Write a JSON strategy."""
    items = {
        name: {
            "opt_weight_shard_step": 0, "opt_weight_shard_size": 0, "field": 0,
            "param_split_shape": [], "indices_offset": [], "stage": stage,
            "tensor_shape": full[name], **layout,
        }
        for name, layout in layouts.items()
    }  # fmt: skip
    path.write_text(json.dumps({
        "current_stage": stage, "parallel_strategy_item": {}, "parallel_layout_item": items,
    }))  # fmt: skip
    return str(path)


def shapes(path: Path, by_name: dict[str, list[int]]) -> str:
    path.write_text(json.dumps({n: {"shape": s, "dtype": "Float32"} for n, s in by_name.items()}))
    return str(path)


def plan(folder: Path, full: dict[str, list[int]], src: dict, dst: dict) -> list[str]:
    files = strategy(folder / "a.json", full, src), strategy(folder / "b.json", full, dst)
    words = ["plan", "--shapes", shapes(folder / "shapes.json", full)]
    return [*words, "--src-strategy", files[0], "--dst-strategy", files[1]]


def axes_of_one(folder: Path, n: int) -> list[str]:
    """Plan a strategy whose mesh has n axes of one rank."""
    layout = {"dev_matrix": [1] * n, "tensor_map": [-1, -1]}
    return plan(folder, {"w": [4, 4]}, {"w": layout}, {"w": layout})


def axes_of_a_tensor(folder: Path, n: int) -> list[str]:
    """Plan a tensor that itself has n axes of one element."""
    layout = {"dev_matrix": [2], "tensor_map": [0] + [-1] * n}
    return plan(folder, {"w": [2] + [1] * n}, {"w": layout}, {"w": layout})


def replicas(folder: Path, n: int) -> list[str]:
    """Plan n ranks that all hold the same."""
    src = {"dev_matrix": [n], "tensor_map": [-1, -1]}
    dst = {"dev_matrix": [4], "tensor_map": [0, -1]}
    return plan(folder, {"w": [4, 4]}, {"w": src}, {"w": dst})


def slices(folder: Path, n: int) -> list[str]:
    """Plan a parameter that n ranks have a row of each."""
    src = {"dev_matrix": [n], "tensor_map": [0, -1]}
    dst = {"dev_matrix": [3], "tensor_map": [0, -1]}
    return plan(folder, {"w": [3 * n, 2]}, {"w": src}, {"w": dst})


def tensors(folder: Path, n: int) -> list[str]:
    """Plan n tensors."""
    src = {"dev_matrix": [4], "tensor_map": [0, -1]}
    dst = {"dev_matrix": [2], "tensor_map": [-1, 0]}
    names = [f"layers.{number}.weight" for number in range(n)]
    full = {name: [8, 8] for name in names}
    return plan(folder, full, dict.fromkeys(names, src), dict.fromkeys(names, dst))


def header(folder: Path, n: int) -> list[str]:
    """List a safetensors file whose header states n tensors of one element."""
    entries = {
        f"tensor.{i:09}": {"dtype": "U8", "shape": [1], "data_offsets": [i, i + 1]}
        for i in range(n)
    }
    data = json.dumps(entries).encode()
    path = folder / "x.safetensors"
    path.write_bytes(len(data).to_bytes(8, "little") + data + bytes(n))
    return ["inspect", str(path)]


CASES: dict[str, tuple[Callable[[Path, int], list[str]], int]] = {
    "axes of one rank": (axes_of_one, 500),
    "axes of a tensor": (axes_of_a_tensor, 8),
    "replicas": (replicas, 1 << 14),
    "slices of one parameter": (slices, 10_000),
    "tensors": (tensors, 9_236),
    "entries of a header": (header, 50_000),
}
"""The first size of each; the last is four times as much."""


def run(words: list[str]) -> str:
    """Run the command in this process; return why it was refused, if it was."""
    with tempfile.TemporaryFile("w+") as said, open(os.devnull, "w") as nothing:
        kept = os.dup(1), os.dup(2)
        os.dup2(nothing.fileno(), 1)
        os.dup2(said.fileno(), 2)
        try:
            code = command(words)
        finally:
            sys.stdout.flush()
            for fd, saved in enumerate(kept, 1):
                os.dup2(saved, fd)
                os.close(saved)
        said.seek(0)
        text = said.read()
    if code not in (0, 2, 3):
        raise RuntimeError(f"exit code {code}: {text[-300:]}")
    errors = [line for line in text.splitlines() if "error:" in line]
    return errors[0] if code else ""


def measure(case: str) -> Iterator[tuple[int, float, str]]:
    """Yield size, seconds, and why it was refused, if it was."""
    make, first = CASES[case]
    for size in (first << step for step in range(SIZES)):
        with tempfile.TemporaryDirectory() as name:
            words = make(Path(name), size)
            began = time.perf_counter()
            text = run(words)
            yield size, time.perf_counter() - began, text


def report(case: str) -> None:
    """Print a line of one case."""
    run(["plan", "--help"])  # imports
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    measured = [*measure(case)]
    seconds = [passed for _, passed, _ in measured]
    growth = math.log(seconds[-1] / seconds[0], 2 ** (SIZES - 1))
    texts = [f"{size:,}: {s:.2f} s{', refused' * bool(why)}" for size, s, why in measured]
    peak = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    print(f"{case:24} {'; '.join(texts)}; exponent {growth:.2f}; {peak:.0f} MB", flush=True)
    for *_, why in measured[-1:]:
        print(f"    {why}" if why else "", end="\n" if why else "", flush=True)


def main(wanted: list[str]) -> None:
    for case in wanted or CASES:  # each in a process of its own, whose memory is the case's
        subprocess.run([sys.executable, "-m", "benchmarks.growth", "--one", case], check=True)


if __name__ == "__main__":
    report(sys.argv[2]) if sys.argv[1:2] == ["--one"] else main(sys.argv[1:])
