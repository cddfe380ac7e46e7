"""Training goes on after two conversions as if there had been none. Needs MindSpore.

A network is trained for some steps on the CPU and saved with its optimizer. The checkpoint is
sharded as 8 ranks would hold it, resharded to 6 ranks in 2 pipeline stages, and put together again.
A new network that loads it goes on with the same losses, to the bit; so does one that is filled
from the 6 ranks' files directly.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn

from examples.steps import rankxform, start
from rankxform.mindspore import load_into
from tests import reference

DATA = np.random.default_rng(3)
X = DATA.standard_normal((24, 12)).astype(np.float32)
Y = DATA.integers(0, 6, 24).astype(np.int32)
EIGHT = {
    "0.weight": ([2, 4], [0, -1], 4, -1),
    "0.bias": ([2, 4], [0], 0, 0),
    "2.weight": ([2, 4], [-1, 0], 0, 0),
    "2.bias": ([2, 4], [-1], 0, 0),
}
SIX = (
    {"0.weight": ([3], [-1, 0], 0, 0), "0.bias": ([3], [-1], 1, -1)},
    {"2.weight": ([3], [0, -1], 0, 0), "2.bias": ([3], [0], 0, 0)},
)


def with_states(layouts):
    """Adam's two moments are sharded as their parameters."""
    states = ("", "moment1.", "moment2.")
    return {state + name: layout for state in states for name, layout in layouts.items()}


def job():
    network = nn.SequentialCell(nn.Dense(12, 24), nn.ReLU(), nn.Dense(24, 6))
    loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")
    optimizer = nn.Adam(network.trainable_params(), learning_rate=0.05)
    return nn.TrainOneStepCell(nn.WithLossCell(network, loss), optimizer).set_train()


def steps(training, count):
    return [float(training(ms.Tensor(X), ms.Tensor(Y)).asnumpy()) for _ in range(count)]


def main(folder):
    eight = reference.write_strategy(folder / "eight.ckpt", [with_states(EIGHT)])
    reference.write_stage_files(folder / "six", list(map(with_states, SIX)))
    training = job()
    before = steps(training, 5)
    complete = folder / "complete.ckpt"
    ms.save_checkpoint(training, str(complete))
    expected = steps(training, 5)
    rankxform("transform", complete, folder / "on_8", "--dst-strategy", eight)
    rankxform(
        "transform", folder / "on_8", folder / "on_6", "--src-strategy", eight,
        "--dst-strategy", folder / "six", processes=2,
    )  # fmt: skip
    rankxform("transform", folder / "on_6", folder / "one", "--src-strategy", folder / "six")
    again = job()
    loaded = ms.load_checkpoint(str(folder / "one/rank_0/checkpoint_0.ckpt"))
    assert ms.load_param_into_net(again, loaded) == ([], []), "every parameter, and no other"
    by_file = steps(again, 5)
    directly = job()
    report = load_into(directly, folder / "on_6", folder / "six", None)
    assert not report.missing, report.missing
    in_memory = steps(directly, 5)
    print("losses before   ", *(f"{loss:.6f}" for loss in before))
    print("without a detour", *(f"{loss:.6f}" for loss in expected))
    print("from files      ", *(f"{loss:.6f}" for loss in by_file))
    print("from memory     ", *(f"{loss:.6f}" for loss in in_memory))
    assert expected == by_file == in_memory
    print("the same to the bit")


if __name__ == "__main__":
    start(main)
