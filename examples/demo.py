"""Make the demo's checkpoint, and check what became of it.

Uses `tests.reference`, which reads and writes strategies and checkpoints and shards tensors without
a line of rankxform.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import numpy as np

from tests import reference

FOLDER = Path(__file__).parents[1] / "tests/data/tutorials/resilience_train_and_predict"


def network():
    """Return the network's parameters and their Adam states: full shapes and types."""
    params = {}
    for line in (FOLDER / "params.txt").read_text().splitlines():
        match = re.match(r"PARAM (\S+) \(([\d, ]*)\) (\w+)", line)
        if match:
            shape = tuple(int(n) for n in match[2].split(",") if n.strip())
            for state in ("", "adam_m.", "adam_v."):
                params[state + match[1]] = shape, match[3]
    return params


def element_names_its_place(name, shape, dtype):
    """Return the flat index of every element, offset by the name's own number."""
    count = int(np.prod(shape))
    first = reference.zlib.crc32(name.encode()) % (1 << 31)
    return np.arange(first, first + count, dtype="<u4").reshape(shape)


def make(target):
    layouts = reference.read_strategy(FOLDER / "src_strategy.ckpt")
    step = {"global_step": ("Int32", np.array([73], "<i4"))}
    reference.write_checkpoint(
        target, [layouts], network(), step, make=element_names_its_place, name="checkpoint-2_73"
    )
    report(target, "made")


def check(target):
    layouts = reference.read_strategy(FOLDER / "dst_strategy.ckpt")
    params = network()
    wrong = reference.wrong_slices(target, [layouts], params, make=element_names_its_place)
    report(target, "WRONG:" if wrong else "checked")
    if wrong:
        sys.exit("\n".join(wrong[:20]))
    print(f"all elements of {len(params)} parameters are where the 4-rank strategy wants them")


def report(folder, done):
    files = sorted(Path(folder).rglob("*.ckpt"))
    total = sum(f.stat().st_size for f in files)
    print(f"{done} {len(files)} files in {folder}, {total / 1e6:.0f} MB")


if __name__ == "__main__":
    {"make": make, "check": check}[sys.argv[1]](sys.argv[2])
