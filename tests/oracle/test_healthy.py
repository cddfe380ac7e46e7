"""Checkpoints of true training steps are healthy: nothing is refused, and nothing is warned of.

A network is trained by MindSpore on this machine; its parameters, its optimizer's states and what
each rank keeps for itself are sharded as a strategy would, and written by MindSpore.
"""

from __future__ import annotations

import os
import shutil
import warnings

import numpy as np
import pytest

import rankxform
from tests import reference

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
pytestmark = pytest.mark.oracle

HIDDEN, VOCAB, RANKS = 16, 64, 4


def network(np_seed):
    """Return a small network: two equal experts, an adapter, a norm with statistics of its own."""
    from mindspore import nn, ops

    class Block(nn.Cell):
        def __init__(self):
            super().__init__()
            self.norm = nn.LayerNorm((HIDDEN,))
            self.experts = nn.CellList([nn.Dense(HIDDEN, HIDDEN) for _ in range(2)])
            self.experts[1].weight.set_data(self.experts[0].weight)  # upcycled
            self.lora_a = nn.Dense(HIDDEN, 4, has_bias=False)
            self.lora_b = nn.Dense(4, HIDDEN, has_bias=False, weight_init="zeros")
            self.load = ms.Parameter(ms.Tensor(np.zeros(2), ms.float32), requires_grad=False)

        def construct(self, x):
            y = self.norm(x)
            made = self.experts[0](y) + self.experts[1](y) + self.lora_b(self.lora_a(y))
            return x + made

    class Network(nn.Cell):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(VOCAB, HIDDEN, embedding_table="normal")
            self.layers = nn.CellList([Block() for _ in range(3)])
            self.statistics = nn.BatchNorm1d(HIDDEN)
            self.head = nn.Dense(HIDDEN, VOCAB, has_bias=False)

        def construct(self, tokens):
            x = self.embedding(tokens)
            for layer in self.layers:
                x = layer(x)
            x = self.statistics(ops.reshape(x, (-1, HIDDEN)))
            return self.head(x)

    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_seed(np_seed)
    return Network()


def with_loss(net):
    from mindspore import nn, ops

    class WithLoss(nn.Cell):
        def __init__(self):
            super().__init__(auto_prefix=False)
            self.net = net
            self.loss = nn.SoftmaxCrossEntropyWithLogits(sparse=True, reduction="mean")

        def construct(self, tokens, targets):
            return self.loss(self.net(tokens), ops.reshape(targets, (-1,)))

    return WithLoss()


def trained(steps, *, frozen=False):
    """Return a rank's values as {name: array}, after training; and what ranks keep alone."""
    from mindspore import nn

    net = network(1)
    if frozen:
        for one in net.trainable_params():
            one.requires_grad = "lora" in one.name
    rates = [1e-3 / (n + 1) for n in range(10)]
    optimizer = nn.AdamWeightDecay(net.trainable_params(), learning_rate=rates)
    step = nn.TrainOneStepCell(with_loss(net), optimizer)
    step.set_train()
    rng = np.random.default_rng(0)
    for _ in range(steps):
        tokens = ms.Tensor(rng.integers(0, VOCAB, (4, 8)), ms.int32)
        step(tokens, tokens)
    values = {
        one.name: one.asnumpy() for one in (*net.get_parameters(), *optimizer.get_parameters())
    }
    return values, [one.name for one in net.trainable_params()]


def layouts(values):
    """Return a strategy of 2 x 2 ranks: tables and weights by tensor parallelism, the rest whole."""
    stage = {}
    for name, value in values.items():
        if value.ndim == 2:
            axis = 1 if "head" in name or "lora_b" in name else 0
            tensor_map = [0, -1] if axis == 0 and value.shape[0] % 4 == 0 else [-1, 0]
            stage[name] = ([2, 2], tensor_map, 0, 0)
        elif value.ndim == 1 and "learning_rate" not in name:
            stage[name] = ([2, 2], [-1], 0, 0)
    return [stage]


def saved(folder, values, stages, alone=lambda rank: {}, keep=lambda name: True):
    """Write rank folders by MindSpore, each rank with its slices and what it keeps alone."""
    for rank in range(RANKS):
        entries = []
        for name, value in {**values, **alone(rank)}.items():
            if not keep(name):
                continue
            layout = stages[0].get(name)
            own = value if layout is None else reference.shard(value, layout, rank)
            entries.append({"name": name, "data": ms.Tensor(np.ascontiguousarray(own))})
        path = folder / f"rank_{rank}" / f"net_rank_{rank}-1_2.ckpt"
        path.parent.mkdir(parents=True)
        ms.save_checkpoint(entries, str(path))
    return folder


STATISTICS = ("moving_mean", "moving_variance")


def statistics(values):
    def alone(rank):
        return {n: v + rank for n, v in values.items() if n.endswith(STATISTICS)}

    return alone


def load_counters(values):
    def alone(rank):
        return {n: v + 7 * rank for n, v in values.items() if n.endswith("load")}

    return alone


CASES = {
    "two steps": {"steps": 2},
    "step 0": {"steps": 0},
    "adapters trained": {"steps": 2, "frozen": True},
    "statistics of each rank": {"steps": 2, "alone": statistics},
    "load counters of each rank": {"steps": 2, "alone": load_counters},
    "adapters only": {"steps": 2, "frozen": True, "only": "lora"},
    "frozen and not listed": {"steps": 2, "frozen": True, "unlisted": True},
}


TOUCHED = [("two steps", how) for how in ("chmod", "links", "sparse")]
"""What is done to the files after saving."""


@pytest.mark.sampled
@pytest.mark.parametrize(("case", "touched"), [*((case, "") for case in CASES), *TOUCHED])
def test_a_healthy_checkpoint(tmp_path, case, touched):
    chosen = {"frozen": False, "alone": lambda values: lambda rank: {}, "only": "", **CASES[case]}
    values, trainable = trained(chosen["steps"], frozen=chosen["frozen"])
    stages = layouts(values)
    if chosen.get("unlisted"):
        listed = {n for n in stages[0] if any(n.endswith(one) for one in trainable)}
        stages = [{n: stages[0][n] for n in listed}]
    alone = chosen["alone"](values)
    src = saved(tmp_path / "src", values, stages, alone, keep=lambda name: chosen["only"] in name)
    paths = sorted(src.rglob("*.ckpt"))
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    for path in paths:
        if touched == "chmod":
            path.chmod(0o400)
        elif touched == "links":
            os.link(path, tmp_path / path.name)
        elif touched == "sparse":
            os.system(f"cp --sparse=always {path} {path}.copy")
            shutil.move(f"{path}.copy", path)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        report = rankxform.transform(src, tmp_path / "dst", strategy, fsync=False)
    assert report.warnings == ()
    assert rankxform.verify(src, tmp_path / "dst", strategy)
    whole = reference.read_ckpt(next((tmp_path / "dst").rglob("*.ckpt")))
    for name, value in values.items():
        if chosen["only"] in name and name not in alone(1):
            assert whole[name][2] == np.ascontiguousarray(value).tobytes(), name
