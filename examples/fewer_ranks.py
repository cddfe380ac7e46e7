"""8 devices (model parallel 4, data parallel 2, optimizer parallel) to 4: all, and rank by rank.

The network, the Transformer of MindSpore's resilience tutorial, and both strategies are what
MindSpore compiled; its vocabulary is made smaller. Rank by rank is the model transformation
tutorial's script, with its import changed.
"""

from __future__ import annotations

import sys

from examples.steps import ROOT, TUTORIALS, check, rankxform, run, same_files, shapes, start
from tests import reference

TUTORIAL = TUTORIALS / "resilience_train_and_predict"
SRC, DST = TUTORIAL / "src_strategy.ckpt", TUTORIAL / "dst_strategy.ckpt"
BY_RANK = ROOT / "examples/transform_by_rank.py"


def main(folder):
    params = shapes(TUTORIAL.name, {20000: 80}, states=("adam_m.", "adam_v."))
    reference.write_checkpoint(folder / "src", [reference.read_strategy(SRC)], params)
    rankxform(
        "transform", folder / "src", folder / "dst", "--src-strategy", SRC, "--dst-strategy", DST,
        processes=4,
    )  # fmt: skip
    check(folder / "dst", [reference.read_strategy(DST)], params)
    run(sys.executable, BY_RANK, folder / "src", folder / "by_rank", SRC, DST, processes=4)
    same_files(folder / "dst", folder / "by_rank")


if __name__ == "__main__":
    start(main)
