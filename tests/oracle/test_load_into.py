"""Networks filled without a file in between are those that were filled from files."""

from __future__ import annotations

import numpy as np
import pytest

import rankxform
from tests import reference

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
from mindspore import nn  # noqa: E402

import rankxform.mindspore as ours  # noqa: E402
from rankxform.layout.layout import Layout  # noqa: E402
from rankxform.mindspore.network import layouts_of  # noqa: E402

pytestmark = pytest.mark.oracle

PARAMS = {
    "0.weight": ((16, 8), "Float32"),
    "0.bias": ((16,), "Float32"),
    "1.weight": ((4, 16), "Float32"),
    "1.bias": ((4,), "Float32"),
}
STATE = {f"moments.{name}": facts for name, facts in PARAMS.items()}
SHARDED = {
    "0.weight": ([2, 4], [0, -1], 4, -1),
    "0.bias": ([2, 4], [0], 0, 0),
    "1.weight": ([2, 4], [-1, 0], 0, 0),
    "1.bias": ([2, 4], [-1], 0, 0),
}
SRC = [{**SHARDED, **{f"moments.{name}": layout for name, layout in SHARDED.items()}}]


def full(name):
    shape, dtype = {**PARAMS, **STATE}[name]
    return reference.full_tensor(name, shape, dtype).view(np.float32)


def network():
    return nn.SequentialCell(nn.Dense(8, 16), nn.Dense(16, 4))


def values(net):
    return {p.name: p.asnumpy().copy() for p in net.get_parameters()}


@pytest.fixture
def place(tmp_path):
    src = reference.write_checkpoint(
        tmp_path / "src",
        SRC,
        {**PARAMS, **STATE},
        {"global_step": ("Int32", np.full(1, 7, np.uint32))},
    )
    return src, reference.write_strategy(tmp_path / "a.ckpt", SRC)


def test_in_memory_and_from_a_file(place, tmp_path):
    src, a = place
    report = ours.load_into(first := network(), src, a)
    rankxform.transform(src, tmp_path / "dst", a, None, fsync=False)
    second = network()
    ms.load_param_into_net(
        second, ms.load_checkpoint(str(tmp_path / "dst/rank_0/checkpoint_0.ckpt"))
    )
    a, b = values(first), values(second)
    assert set(report.loaded) == set(PARAMS) == set(a)
    assert all(np.array_equal(a[name], b[name]) for name in a)
    assert np.array_equal(a["0.weight"], full("0.weight"))
    assert report.missing == () and set(report.left_over) == {*STATE, "global_step"}
    assert report.bytes_read == sum(np.prod(s) * 4 for s, _ in PARAMS.values())


def test_an_optimizer_is_filled_too(place):
    src, a = place
    net = network()
    optimizer = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    report = ours.load_into(optimizer, src, a)
    assert set(STATE) <= set(report.loaded)
    assert "learning_rate" in report.missing
    found = {p.name: p.asnumpy() for p in optimizer.get_parameters()}
    for name in STATE:
        assert np.array_equal(found[name], full(name))


def test_a_network_from_another_one_in_memory(place):
    src, a = place
    net = network()
    first = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    ours.load_into(first, src, a)
    net = network()
    second = nn.Momentum(net.trainable_params(), 0.1, 0.9)
    report = ours.reshard_network(first, second, progress=False)
    assert {*STATE, *PARAMS} <= {*report.loaded} and report.missing == ()
    before, after = values(first), values(second)
    assert all(np.array_equal(before[name], after[name]) for name in {*STATE, *PARAMS})
    with pytest.raises(rankxform.RequestError, match="do not hold the same parameters"):
        ours.reshard_network(network(), nn.Dense(3, 2), strict=True, progress=False)


def test_strict(place):
    src, a = place
    net = network()
    before = values(net)
    with pytest.raises(rankxform.RequestError, match=r"only the checkpoint has '.*' and 2 more"):
        ours.load_into(net, src, a, strict=True)
    after = values(net)
    assert all(np.array_equal(before[name], after[name]) for name in before)
    with pytest.raises(rankxform.RequestError, match="only the network has '2.weight', '2.bias'"):
        ours.load_into(nn.SequentialCell(*network(), nn.Dense(4, 2)), src, a, strict=True)


def test_slices_of_other_sizes_are_refused_before_anything_changes(place, tmp_path):
    src, a = place
    net = network()
    before = values(net)
    halves = {
        n: ([2], [0] + [-1] * (len(s) - 1), 0, 0) for n, (s, _) in PARAMS.items() if s[0] % 2 == 0
    }
    b = reference.write_strategy(tmp_path / "b.ckpt", [halves])
    with pytest.raises(
        rankxform.RequestError, match=r"rank 1 loaded, '.*' has shape .* in the net"
    ):
        ours.load_into(net, src, a, b, rank=1, unmatched="replicate")
    after = values(net)
    assert all(np.array_equal(before[name], after[name]) for name in before)


def test_a_rank_of_a_compiled_network(place):
    """A CPU compiles no semi-auto-parallel graph: the dictionary is written as one would be."""
    src, a = place
    layouts = {
        "0.weight": ([2, 2], [0, -1], [4, 8], 0, True, "2-group", [16, 8]),
        "0.bias": ([2, 2], [0], [8], 0, True, "", [16]),
        "1.weight": ([2, 2], [-1, 0], [4, 8], 0, True, ""),
        "1.bias": ([2, 2], [-1], [4], 0, True, "", [4]),
    }
    strategy = ours.strategy_of(layouts, group_size={"2-group": 2}.__getitem__)
    assert strategy.ranks == 4
    assert strategy.stages[0]["0.weight"] == Layout(
        (2, 2), ((0,), ()), 1, 2, expanded_shape=(16, 8)
    )
    for rank in range(4):
        found = rankxform.load(src, a, strategy, rank=rank, include="^[01]")
        at = (rank % 2) * 8 + (rank // 2) * 4
        assert np.array_equal(found["0.weight"], full("0.weight")[at : at + 4])
        assert found["1.weight"].shape == (4, 8)
    with pytest.raises(rankxform.StrategyError, match="'w': it is sharded unevenly"):
        layouts_of({"w": ([2], [0], [3], 0, False, "")})
    assert ours.strategy_of(network()).ranks == 1


def test_types_that_numpy_lacks(tmp_path):
    words = np.arange(32, dtype=np.uint16).reshape(8, 4)
    reference.write_ckpt(
        tmp_path / "a.ckpt", {"w": ("BFloat16", words), "q": ("Int4", words.view(np.int8))}
    )
    made = ours.parameters(rankxform.load(tmp_path / "a.ckpt"))
    loaded = ms.load_checkpoint(str(tmp_path / "a.ckpt"))
    for name in ("w", "q"):
        assert made[name].dtype == loaded[name].dtype and made[name].name == loaded[name].name
        assert made[name].get_bytes() == loaded[name].get_bytes()


@pytest.mark.parametrize("strict", [False, True])
def test_load_distributed_checkpoint(place, tmp_path, strict):
    src, a = place
    if strict:  # what only one of them has is an error then, in MindSpore too
        src = reference.write_checkpoint(tmp_path / "s", [SHARDED], PARAMS)
        a = reference.write_strategy(tmp_path / "c.ckpt", [SHARDED])
    files = [f"{src}/rank_{rank}/checkpoint_{rank}.ckpt" for rank in range(8)]
    results = []
    for call in (ours.load_distributed_checkpoint, ms.parallel.load_distributed_checkpoint):
        net = network()
        assert call(net, files, None, str(a), strict_load=strict) is True
        results.append(values(net))
    assert all(np.array_equal(results[0][name], results[1][name]) for name in PARAMS)


def test_load_distributed_checkpoint_of_unified_safetensors(place, tmp_path):
    source = reference.write_checkpoint(tmp_path / "s", [SHARDED], PARAMS, kind="safetensors")
    a = str(reference.write_strategy(tmp_path / "c.ckpt", [SHARDED]))
    ms.parallel.unified_safetensors(str(source), a, str(tmp_path / "u"))
    net = network()
    ours.load_distributed_checkpoint(
        net, format="safetensors", unified_safetensors_dir=str(tmp_path / "u")
    )
    assert np.array_equal(values(net)["0.weight"], full("0.weight"))
