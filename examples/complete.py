"""A complete checkpoint becomes 8 slices and 2; 8 slices become one for a single device."""

from __future__ import annotations

from examples.steps import TUTORIALS, check, rankxform, shapes, start
from tests import reference

TUTORIAL = TUTORIALS / "model_transformation"
EIGHT = TUTORIAL / "src_strategy.ckpt"


def main(folder):
    params = shapes(TUTORIAL.name, states=("accum.", "stat."))
    reference.write_checkpoint(folder / "full", None, params)
    complete = folder / "full/rank_0/checkpoint_0.ckpt"
    eight = [reference.read_strategy(EIGHT)]
    two = [{name: ([2], [0, -1][: len(shape)], 0, 0) for name, (shape, _) in params.items()}]
    two_file = reference.write_strategy(folder / "two.ckpt", two)
    rankxform("transform", complete, folder / "eight", "--dst-strategy", EIGHT, processes=4)
    check(folder / "eight", eight, params)
    rankxform("transform", complete, folder / "two", "--dst-strategy", two_file, processes=2)
    check(folder / "two", two, params)
    rankxform("transform", folder / "eight", folder / "one", "--src-strategy", EIGHT)
    check(folder / "one", None, params)


if __name__ == "__main__":
    start(main)
