"""A layer sharded ((2, 1), (1, 2)) on 4 devices, then ((2, 2), (2, 1)) with optimizer parallel.

The strategies are written here, in MindSpore's form: the input's rows are sharded by two, and the
weight's columns, then its rows. What the data-parallel axis leaves equal, optimizer parallel
shards by rows.
"""

from __future__ import annotations

from examples.steps import check, rankxform, start
from tests import reference

SRC = [{
    "layer1.weight": ([2, 1, 2], [-1, 0], 2, -1),
    "layer1.bias": ([2, 2], [0], 2, -1),
}]  # fmt: skip
DST = [{
    "layer1.weight": ([2, 2, 1], [1, -1], 2, -1),
    "layer1.bias": ([4], [-1], 1, -1),
}]  # fmt: skip
PARAMS = {
    state + name: (shape, "Float32")
    for state in ("", "moments.")
    for name, shape in (("layer1.weight", (64, 32)), ("layer1.bias", (32,)))
}


def with_states(stages):
    return [{s + n: layout for s in ("", "moments.") for n, layout in stages[0].items()}]


def main(folder):
    src, dst = with_states(SRC), with_states(DST)
    reference.write_checkpoint(folder / "src", src, PARAMS)
    a = reference.write_strategy(folder / "src_strategy.ckpt", src)
    b = reference.write_strategy(folder / "dst_strategy.ckpt", dst)
    rankxform(
        "transform", folder / "src", folder / "dst", "--src-strategy", a, "--dst-strategy", b,
        processes=2,
    )  # fmt: skip
    check(folder / "dst", dst, PARAMS)


if __name__ == "__main__":
    start(main)
