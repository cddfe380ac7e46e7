"""The same bytes as MindSpore's own transform_checkpoints, over hundreds of random conversions.

RANKXFORM_BATCHES asks for more, by twenties.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

import rankxform
from tests import reference
from tests.cases import DTYPES, Case, random_case

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
pytestmark = pytest.mark.oracle
REAL = Path(__file__).parents[1] / "data" / "real_strategies"

BATCH = 20
CASES = BATCH * int(os.environ.get("RANKXFORM_BATCHES", "10"))
SAFETENSORS_CASES = CASES // 4 // BATCH * BATCH
WITHOUT_BF16 = tuple(d for d in DTYPES if d != "BFloat16")  # MindSpore's needs numpy 1 there


def prepare(case, tmp, kind="ckpt", strategy="ckpt", **options):
    src = reference.write_checkpoint(
        tmp / "src", case.src, case.params, case.extras, kind, **options
    )
    shapes = {n: s for n, (s, _) in case.params.items()}
    strategies = [
        None
        if stages is None
        else reference.write_strategy(tmp / f"{side}.{strategy}", stages, strategy, shapes)
        for side, stages in (("src", case.src), ("dst", case.dst))
    ]
    return src, *strategies


def differing(tmp):
    """Compare the folders that MindSpore and rankxform wrote, file by file."""
    theirs, ours = (
        {p.relative_to(tmp / who): p.read_bytes() for p in (tmp / who).rglob("checkpoint_*")}
        for who in ("ms", "rx")
    )
    return [str(p) for p in sorted({*theirs, *ours}) if theirs.get(p) != ours.get(p)]


def some(first, count=BATCH):
    return range(first, first + count)


@pytest.mark.sampled
@pytest.mark.parametrize("first", range(0, CASES, BATCH))
def test_ckpt_output_is_the_same_bytes(first, tmp_path):
    for seed in some(first):
        tmp = tmp_path / str(seed)
        src, a, b = prepare(random_case(seed), tmp)
        ms.transform_checkpoints(src, str(tmp / "ms"), "checkpoint_", a, b)
        rankxform.transform(src, tmp / "rx", a, b, fsync=False)
        assert differing(tmp) == [], f"seed {seed}"


@pytest.mark.parametrize("first", range(1000, 1060, BATCH))
def test_json_strategies_give_the_same_bytes(first, tmp_path):
    for seed in some(first):
        case = random_case(seed, stages=((1, 1),), nested=False)
        tmp = tmp_path / str(seed)
        src, a, b = prepare(case, tmp, strategy="json")
        ms.transform_checkpoints(src, str(tmp / "ms"), "checkpoint_", a, b)
        rankxform.transform(src, tmp / "rx", a, b, fsync=False)
        assert differing(tmp) == [], f"seed {seed}"


@pytest.mark.parametrize("ranks", [(4, 2), (2, 4), (4, 4), (8, 4)])
def test_running_statistics_come_from_one_rank_as_with_mindspore(ranks, tmp_path):
    """Listed values that each rank has of its own: every file has one source rank's."""
    params = {f"net.{n}": ((16, 8), "Float32") for n in "wv"}
    params |= {f"adam_m.net.{n}": ((16, 8), "Float32") for n in "wv"}
    params |= {
        f"bn{i}.moving_{n}": ((8,), "Float32") for i in range(3) for n in ("mean", "variance")
    }
    case = Case(params, *([{
        name: ([n], [-1] if "bn" in name else [0, -1], 0, 0) for name in params
    }] for n in ranks))  # fmt: skip
    src, a, b = prepare(case, tmp_path)
    for rank, path in enumerate(sorted((tmp_path / "src").rglob("*.ckpt"))):
        taint(path, rank, "bn")
    ms.transform_checkpoints(src, str(tmp_path / "ms"), "checkpoint_", a, b)
    rankxform.transform(src, tmp_path / "rx", a, b, fsync=False)
    assert differing(tmp_path) == []


def taint(path, rank, prefix):
    """Write other values into the parameters of a prefix, so that no two ranks agree."""
    rng = np.random.default_rng(rank)
    entries = {}
    for name, (dtype, shape, data) in reference.read_ckpt(path).items():
        words = np.frombuffer(data, reference.WORD[reference.ITEM[dtype]]).reshape(shape)
        if name.startswith(prefix):
            words = words ^ rng.integers(1, 8, shape).astype(words.dtype)
        entries[name] = dtype, words
    reference.write_ckpt(path, entries)


@pytest.mark.parametrize("first", range(3000, 3000 + SAFETENSORS_CASES, BATCH))
def test_safetensors_values_are_the_same(first, tmp_path):
    """MindSpore writes .ckpt here: its safetensors to safetensors is wrong (item 2)."""
    for seed in some(first):
        tmp = tmp_path / str(seed)
        src, a, b = prepare(
            random_case(seed, dtypes=WITHOUT_BF16, stages=((1, 1), (1, 2))), tmp, "safetensors"
        )
        ms.transform_checkpoints(src, str(tmp / "ms"), "checkpoint_", a, b, output_format="ckpt")
        rankxform.transform(src, tmp / "rx", a, b, fsync=False)
        for theirs in sorted((tmp / "ms").rglob("*.ckpt")):
            ours = tmp / "rx" / theirs.relative_to(tmp / "ms").with_suffix(".safetensors")
            assert reference.read_safetensors(ours) == reference.read_ckpt(theirs), f"seed {seed}"


def test_mindspore_loads_what_is_written(tmp_path):
    case = random_case(5, dtypes=WITHOUT_BF16)
    src, a, b = prepare(case, tmp_path)
    for kind in ("ckpt", "safetensors"):
        rankxform.transform(src, tmp_path / kind, a, b, format=kind, crc=True)
        for path in sorted((tmp_path / kind).rglob(f"*.{kind}")):
            loaded = ms.load_checkpoint(str(path), format=kind, crc_check=True)
            ours = reference.read_any(path) if kind == "safetensors" else None
            for name, parameter in loaded.items():
                array = parameter.asnumpy()
                assert array.shape == tuple(parameter.shape)
                if ours:
                    assert array.tobytes() == ours[name][2]
            assert set(loaded) >= {"global_step", "learning_rate"}


def test_checksums_of_0d_integers_are_mindspores(tmp_path):
    """It sums as many zeros as the value says; what it cannot sum, it cannot save either."""
    values = {
        f"n{i}": np.array(value, kind)
        for i, (value, kind) in enumerate(
            [(5, "i4"), (0, "i8"), (300, "u2"), (7, "i1"), (3, "u8"), (1, "?"), (2.5, "f4")]
        )
    }
    saved = [{"name": n, "data": ms.Tensor(value)} for n, value in values.items()]
    path = tmp_path / "src/rank_0/net"
    path.parent.mkdir(parents=True)
    ms.save_checkpoint(saved, str(path), format="safetensors", crc_check=True)
    ours = tmp_path / "dst/rank_0/checkpoint_0.safetensors"
    rankxform.transform(tmp_path / "src", tmp_path / "dst", crc=True, check_crc=True)
    theirs = rankxform.inspect(f"{path}.safetensors")["metadata"]["crc_num"]
    assert rankxform.inspect(ours)["metadata"]["crc_num"] == theirs
    assert set(ms.load_checkpoint(str(ours), format="safetensors", crc_check=True)) == set(values)
    assert rankxform.verify(tmp_path / "src", tmp_path / "dst").same
    negative = {"n": ("Int64", np.array(-3, "<i8").view("<u8"))}
    reference.write_safetensors(tmp_path / "odd/rank_0/c.safetensors", negative)
    rankxform.transform(tmp_path / "odd", tmp_path / "odd_dst", crc=True)
    rankxform.transform(tmp_path / "odd_dst", tmp_path / "odd_again", check_crc=True)


def real(network, configuration):
    """Return the merged or only strategy file of a configuration, its shapes and its ranks."""
    folder = REAL / network / configuration
    merged = folder / "merged_strategy.ckpt"
    strategy = merged if merged.exists() else folder / "strategy" / "strategy_0.ckpt"
    return strategy, json.loads((folder / "shapes.json").read_text())


def real_checkpoint(shapes, strategy, target):
    """Make the checkpoint of a real configuration: MindSpore's own slice shapes, counted values."""
    inspected = rankxform.inspect(strategy)["layouts"]
    layouts = {
        (layout["stage"], layout["name"]): (
            layout["device_matrix"], layout["tensor_map"], layout["opt_step"], layout["opt_size"]
        )
        for layout in inspected
    }  # fmt: skip
    size = shapes["ranks"] // shapes["stages"]
    for rank in range(shapes["ranks"]):
        entries = {}
        for name, shape in shapes["slice_shape_by_rank"][str(rank)].items():
            about = shapes["params"].get(name)
            if about is None or name.startswith("accu_grads"):
                continue
            full = reference.full_tensor(name, tuple(about["full_shape"]), about["dtype"])
            layout = layouts.get((rank // size, name))
            words = reference.shard(full, layout, rank % size) if layout else full
            assert list(words.shape) == shape, f"the reference shards {name} as the compiler does"
            entries[name] = about["dtype"], words
        reference.write_ckpt(target / f"rank_{rank}" / f"checkpoint_{rank}.ckpt", entries)
    return str(target)


NETWORKS = {
    "A_mlp": ("src8_momentum", "dst4_momentum"),
    "B_pipeline": ("pp2x4_mp", "pp2x4_t0"),
    "C_transformer": ("dp2mp4_opt", "dp2mp2pp2_opt", "dp2mp2pp2_noopt", "dp1mp4"),
    "D_nested": ("n1", "n2", "n3", "n4", "n5", "n6", "n7", "n8"),
    "E_optshard": ("optall_rep", "ows2_dp8"),
    "F_misc_bmm3d": ("bmm3d", "bmm3d_opt"),
    "F_misc_odd": ("odd", "odd_mp"),
}
PAIRS = [
    (network, a, b)
    for network, members in NETWORKS.items()
    for a in members
    for b in (*members, None)
    if a != b
]


@pytest.mark.sampled
@pytest.mark.parametrize(("network", "a", "b"), PAIRS)
def test_real_strategies_give_the_same_bytes(network, a, b, tmp_path):
    src_strategy, shapes = real(network, a)
    dst_strategy = real(network, b)[0] if b else None
    src = real_checkpoint(shapes, src_strategy, tmp_path / "src")
    dst = str(dst_strategy) if b else None
    try:
        ms.transform_checkpoints(src, str(tmp_path / "ms"), "checkpoint_", str(src_strategy), dst)
    except (ValueError, RuntimeError) as error:
        pytest.skip(f"MindSpore refuses: {error}")
    rankxform.transform(src, tmp_path / "rx", src_strategy, dst_strategy)
    assert differing(tmp_path) == []
