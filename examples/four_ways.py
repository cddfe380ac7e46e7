"""A network is filled from what four ways of training in parallel save. Needs MindSpore.

Auto-parallel and semi-auto-parallel jobs save slices and a strategy file; the two here are what
MindSpore compiled for this network on 8 and on 4 devices. Data-parallel jobs save all of it on
every rank. Hybrid-parallel jobs save slices that their user sharded. A CPU compiles no such graphs,
so the slices are sharded here of one set of values; the networks that are filled run.
"""

from __future__ import annotations

import mindspore as ms
import numpy as np
from mindspore import nn, ops

from examples.steps import TUTORIALS, rankxform, start
from rankxform.mindspore import load_into

TUTORIAL = TUTORIALS / "model_transformation"


class Layer(nn.Cell):
    def __init__(self, inputs, outputs):
        super().__init__()
        draw = np.random.default_rng().standard_normal
        self.weight = ms.Parameter(ms.Tensor(draw((inputs, outputs)).astype(np.float32) / 10))
        self.bias = ms.Parameter(ms.Tensor(draw(outputs).astype(np.float32) / 10))
        self.matmul = ops.MatMul()

    def construct(self, x):
        return self.matmul(x, self.weight) + self.bias


class Network(nn.Cell):
    """The tutorial's: three layers, 784 to 10."""

    def __init__(self):
        super().__init__()
        self.layer1, self.layer2, self.layer3 = Layer(784, 512), Layer(512, 512), Layer(512, 10)

    def construct(self, x):
        return self.layer3(ops.relu(self.layer2(ops.relu(self.layer1(x)))))


def main(folder):
    trained = Network()
    complete = folder / "complete.ckpt"
    ms.save_checkpoint(trained, str(complete))
    image = ms.Tensor(np.random.default_rng(1).random((3, 784), np.float32))
    expected = trained(image).asnumpy()
    data_parallel = folder / "data/rank_3/net-1_10.ckpt"
    data_parallel.parent.mkdir(parents=True)
    data_parallel.write_bytes(complete.read_bytes())
    ways = {
        "auto": TUTORIAL / "src_strategy.ckpt",
        "semi-auto": TUTORIAL / "dst_strategy_threshold0.ckpt",
        "hybrid": "shard:layer2=0@4",
    }
    for way, strategy in ways.items():
        rankxform("transform", complete, folder / way, "--dst-strategy", strategy)
    sources = {"data": (data_parallel, None), **{w: (folder / w, s) for w, s in ways.items()}}
    for way, (source, strategy) in sources.items():
        network = Network()
        assert not np.array_equal(network(image).asnumpy(), expected)
        report = load_into(network, source, strategy, strict=True)
        assert np.array_equal(network(image).asnumpy(), expected), way
        print(f"{way} parallel: {len(report.loaded)} parameters, the same output to the bit")


if __name__ == "__main__":
    start(main)
