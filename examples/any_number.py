"""16 devices to 4 and to 8; 64 to 56, which is no multiple nor divisor.

The layouts are written by hand, for no compiled network has these numbers: data parallel with
optimizer parallel on 16, model parallel on 4 and 8; rows sharded by 64, then by 56.
"""

from __future__ import annotations

from examples.steps import check, rankxform, start
from tests import reference

PARAMS = {"w": ((448, 64), "Float32"), "b": ((448,), "Float32")}


def layouts(data, model, opt):
    return [{
        "w": ([data, model], [0, -1], model if opt else 0, -1 if opt else 0),
        "b": ([data, model], [-1], 0, 0),
    }]  # fmt: skip


def main(folder):
    jobs = {
        16: layouts(4, 4, opt=True), 4: layouts(1, 4, opt=False), 8: layouts(2, 4, opt=True),
        64: layouts(1, 64, opt=False), 56: layouts(1, 56, opt=False),
    }  # fmt: skip
    for src, dst in ((16, 4), (16, 8), (64, 56)):
        here = folder / f"{src}_to_{dst}"
        reference.write_checkpoint(here / "src", jobs[src], PARAMS)
        a = reference.write_strategy(here / "src_strategy.ckpt", jobs[src])
        b = reference.write_strategy(here / "dst_strategy.ckpt", jobs[dst])
        rankxform(
            "transform", here / "src", here / "dst", "--src-strategy", a, "--dst-strategy", b,
            processes=3,
        )  # fmt: skip
        check(here / "dst", jobs[dst], PARAMS)


if __name__ == "__main__":
    start(main)
