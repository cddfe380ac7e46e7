"""Slices that the user sharded (hybrid parallel): 4 of [2, 8] joined, and split into 2 of [4, 8].

The values are those that MindSpore's tutorial on hybrid parallel prints: the weight's slices
before, the moments' before and after joining. (The weight that it prints after joining is not
made of the slices that it prints before.)
"""

from __future__ import annotations

import numpy as np

from examples.steps import rankxform, start
from tests import reference

WEIGHT = """
0.87537426 1.0448935 0.86736983 0.8836905 0.77354026 0.69588304 0.9183654 0.7792076
0.87224025 0.8726848 0.771446 0.81967723 0.88974726 0.7988162 0.72919345 0.7677011
0.9210751 0.9050457 0.9827775 0.920396 0.9240526 0.9750359 1.0275179 1.0819869
0.73605865 0.84631145 0.9746683 0.9386582 0.82902765 0.83565056 0.9702136 1.0514659
1.0108461 0.8689414 0.91719437 0.8805056 0.7994629 0.8999671 0.7585804 1.0287056
0.90653455 0.60146594 0.7206475 0.8306303 0.8364681 0.89625114 0.7354735 0.8447268
0.7147005 0.9168278 0.80178416 0.6258351 0.8413766 0.5909515 0.696347 0.71359116
0.20506378 0.03691584 0.2454556 0.12978578 0.19065076 0.23904312 0.27509746 0.34614682
"""
MOMENTS = """
0.2567724 -0.07485991 0.282002 0.2456022 0.454939 0.619168 0.18964815 0.45714882
0.25946522 0.24344791 0.45677605 0.3611395 0.23378398 0.41439137 0.5312468 0.4696194
0.2417504 0.28193963 0.06713893 0.21510397 0.23380603 0.11424308 0.0218009 -0.11969765
0.45955992 0.22664294 0.01990281 0.0731914 0.27125207 0.27298513 -0.01716102 -0.15327111
0.03440702 0.41419312 0.24817684 0.30765256 0.48516113 0.24904746 0.57791173 0.00955463
0.13458519 0.6690533 0.49259356 0.28319967 0.25951773 0.16777472 0.45696738 0.24933104
0.14152306 0.5040985 0.24455397 0.10907605 0.11319532 0.19538902 0.01208619 0.40430856
-0.7773164 -0.47611716 -0.6041424 -0.6144473 -0.2651842 -0.31909415 -0.4510405 -0.12860501
"""
FULL = {
    name: np.array(text.split(), np.float32).reshape(8, 8)
    for name, text in (("weight", WEIGHT), ("moments.weight", MOMENTS))
}
PLAIN = {"learning_rate": np.float32([0.01]), "momentum": np.float32([0.9])}


def check(path, rows):
    found = {
        name: np.frombuffer(data, np.float32).reshape(shape)
        for name, (_, shape, data) in reference.read_any(path).items()
    }
    assert found.keys() == {*FULL, *PLAIN}, sorted(found)
    for name, value in FULL.items():
        assert np.array_equal(found[name], value[rows]), name
    print(f"checked: rows {rows.start} to {rows.stop - 1} of weight and moments in {path}")


def main(folder):
    for rank in range(4):
        rows = slice(2 * rank, 2 * rank + 2)
        entries = {**{name: value[rows] for name, value in FULL.items()}, **PLAIN}
        path = folder / f"stage1/node{rank}/CKP_1-4_32.ckpt"
        reference.write_ckpt(path, {n: ("Float32", v) for n, v in entries.items()})
    rankxform(
        "transform", folder / "stage1", folder / "joined",
        "--src-pattern", "node{rank}/CKP_1-4_32.ckpt", "--src-strategy", "shard:weight=0@4",
        "--prefix", "CKP-Integrated_",
    )  # fmt: skip
    joined = folder / "joined/rank_0/CKP-Integrated_0.ckpt"
    check(joined, slice(0, 8))
    rankxform("transform", joined, folder / "stage2", "--dst-strategy", "shard:weight=0@2")
    for rank in range(2):
        check(folder / f"stage2/rank_{rank}/checkpoint_{rank}.ckpt", slice(4 * rank, 4 * rank + 4))


if __name__ == "__main__":
    start(main)
