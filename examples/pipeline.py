"""A pipeline of 2 stages with 4 devices each becomes a job without one, on 4 devices.

Strategies of MindSpore's compiler (its model transformation tutorial). The stage files are given
as the folder that the job saved them in; merging them first, as MindSpore needs it, gives the
same.
"""

from __future__ import annotations

from examples.steps import TUTORIALS, check, rankxform, same_files, shapes, start
from tests import reference

TUTORIAL = TUTORIALS / "model_transformation_pipeline"
DST = TUTORIAL / "dst_pipeline_strategy.ckpt"


def main(folder):
    params = shapes(TUTORIAL.name, states=("accum.", "stat."))
    merged = reference.read_strategy(TUTORIAL / "src_pipeline_strategy_merged.ckpt")
    stages = [{}, {}]
    for name, layout in merged.items():
        stage, _, plain = name.partition("-")
        stages[int(stage)][plain] = layout
    reference.write_checkpoint(folder / "src", stages, params)
    rankxform("merge", TUTORIAL / "src_pipeline_strategys", folder / "merged.ckpt")
    for strategy, target in (
        (TUTORIAL / "src_pipeline_strategys", "dst"),
        (folder / "merged.ckpt", "dst_merged"),
    ):
        rankxform(
            "transform", folder / "src", folder / target, "--src-strategy", strategy,
            "--dst-strategy", DST, processes=3,
        )  # fmt: skip
    check(folder / "dst", [reference.read_strategy(DST)], params)
    same_files(folder / "dst", folder / "dst_merged")


if __name__ == "__main__":
    start(main)
