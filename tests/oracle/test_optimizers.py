"""Every optimizer of MindSpore, really: what a train cell saves after a step, and what of it is a weight."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import pytest

from rankxform.layout.states import find_states

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
pytestmark = pytest.mark.oracle
NN = {
    "Adam": {}, "Adam amsgrad": {"use_amsgrad": True}, "AdamWeightDecay": {}, "AdamOffload": {},
    "LazyAdam": {}, "AdaMax": {}, "Adadelta": {}, "Adagrad": {}, "ProximalAdagrad": {}, "ASGD": {},
    "FTRL": {}, "Lamb": {"learning_rate": 0.1}, "Rprop": {}, "AdaFactor": {}, "RMSProp": {},
    "Momentum": {"learning_rate": 0.1, "momentum": 0.9}, "SGD": {"momentum": 0.9},
    "RMSProp centered": {"centered": True}, "AdaFactor beta1": {"beta1": 0.0},
    "Adam lr": {"learning_rate": [0.1, 0.05]},
}  # fmt: skip
WITHOUT_A_STEP = ("Lamb",)  # it has no kernel for a CPU
EXPERIMENTAL = ("Adam", "AdamW", "SGD", "Adadelta", "Adagrad", "ASGD", "Adamax", "RMSprop", "Rprop",
                "RAdam", "NAdam")  # fmt: skip


class Net(ms.nn.Cell):
    def __init__(self):
        super().__init__()
        self.emb, self.fc = ms.nn.Embedding(10, 8), ms.nn.Dense(8, 4)
        self.norm, self.stat = ms.nn.LayerNorm((4,)), ms.nn.Dense(4, 2)

    def construct(self, ids):
        return self.stat(self.norm(self.fc(self.emb(ids)))).sum()


class Cell(ms.nn.Cell):
    """A step with an optimizer that `TrainOneStepCell` does not take; names as there."""

    def __init__(self, net, optimizer):
        super().__init__(auto_prefix=False)
        self.network, self.optimizer = net, optimizer
        self.grad = ms.value_and_grad(net, None, list(optimizer.parameters))

    def construct(self, ids):
        loss, grads = self.grad(ids)
        self.optimizer(grads)
        return loss


def check(cell, net, path, step=True):
    if step:
        cell.set_train()(ms.Tensor(np.array([1, 2, 3]), ms.int32))
    ms.save_checkpoint(cell, str(path))
    saved = {name: tuple(one.shape) for name, one in ms.load_checkpoint(str(path)).items()}
    found, weights = find_states(saved), {*net.parameters_dict()}
    assert {name for name in saved if found.is_weight(name)} == weights
    assert {found.base_name(name) for name in saved} - found.counters == weights
    assert len(saved) > len(weights)


@pytest.fixture(autouse=True, scope="module")
def eager():
    """Run eagerly; the first steps of a process may fail, of a module built for another numpy."""
    ms.set_context(mode=ms.PYNATIVE_MODE, device_target="CPU", pynative_synchronize=True)
    for _ in range(2):
        with suppress(SystemError, RuntimeError):
            net = Net()
            cell = ms.nn.TrainOneStepCell(net, ms.nn.Adam(net.trainable_params()))
            cell.set_train()(ms.Tensor(np.array([1, 2, 3]), ms.int32))
    yield
    ms.set_context(mode=ms.GRAPH_MODE, pynative_synchronize=False)


@pytest.mark.sampled
@pytest.mark.parametrize("name", NN)
def test_what_an_optimizer_saves_is_no_weight(name, tmp_path):
    net = Net()
    made = getattr(ms.nn, name.split()[0])(net.trainable_params(), **NN[name])
    check(ms.nn.TrainOneStepCell(net, made), net, tmp_path / "net.ckpt", name not in WITHOUT_A_STEP)


@pytest.mark.sampled
@pytest.mark.parametrize("name", EXPERIMENTAL)
def test_what_an_experimental_optimizer_saves_is_no_weight(name, tmp_path):
    from mindspore.experimental import optim

    net = Net()
    made = getattr(optim, name)(net.trainable_params(), **({"lr": 0.1} if name == "SGD" else {}))
    check(Cell(net, made), net, tmp_path / "net.ckpt")
