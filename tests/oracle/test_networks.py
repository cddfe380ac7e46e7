"""Real strategies of the tutorials' and of large networks, scaled down, against MindSpore."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import rankxform
from tests import reference

from .test_transform import differing

ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
pytestmark = pytest.mark.oracle
DATA = Path(__file__).parents[1] / "data"
STATE = ("adam_m", "adam_v", "accum", "stat")


def shapes_of(folder, scale):
    """Read params.txt; return full shapes and types of the parameters and their states."""
    params = {}
    for line in (folder / "params.txt").read_text().splitlines():
        match = re.match(r"PARAM (\S+) \(([\d, ]*)\) (\w+)", line)
        if match:
            shape = tuple(scale(int(n)) for n in match[2].split(",") if n.strip())
            params[match[1]] = shape, match[3]
            params.update((f"{state}.{match[1]}", (shape, "Float32")) for state in STATE)
    return params


def stages_of(strategy, keep=lambda name: True):
    """Read a real strategy through `inspect`, into the reference's form."""
    found = rankxform.inspect(strategy)
    stages = [{} for _ in range(found["stages"])]
    for layout in found["layouts"]:
        if keep(layout["name"]) and not layout["name"].startswith("accu_grads"):
            stages[layout["stage"]][layout["name"]] = (
                layout["device_matrix"],
                layout["tensor_map"],
                layout["opt_step"],
                layout["opt_size"],
            )
    return stages


def compare(tmp, params, src, dst, a, b):
    folder = reference.write_checkpoint(tmp / "src", src, params)
    ms.transform_checkpoints(folder, str(tmp / "ms"), "checkpoint_", a, b)
    rankxform.transform(folder, tmp / "rx", a, b, fsync=False)
    assert differing(tmp) == []
    assert reference.wrong_slices(tmp / "rx", dst, params) == []


TUTORIALS = [
    ("resilience_train_and_predict", "src_strategy.ckpt", "dst_strategy.ckpt"),
    ("resilience_train_and_predict", "src_strategy.ckpt", None),
    ("resilience_train_and_predict", "dst_strategy.ckpt", "src_strategy.ckpt"),
    ("resilience_train_and_predict", "src_pipeline_strategy_merged.ckpt", "dst_strategy.ckpt"),
    ("model_transformation", "src_strategy.ckpt", "dst_strategy.ckpt"),
    ("model_transformation", "src_strategy.json", "dst_strategy_threshold0.ckpt"),
    (
        "model_transformation_pipeline",
        "src_pipeline_strategy_merged.ckpt",
        "dst_pipeline_strategy.ckpt",
    ),
]


@pytest.mark.parametrize(("name", "a", "b"), TUTORIALS)
def test_the_tutorials_conversions(name, a, b, tmp_path):
    folder = DATA / "tutorials" / name
    params = shapes_of(folder, lambda n: min(n, 784) if n != 20000 else 160)
    src = stages_of(folder / a)
    dst = stages_of(folder / b) if b else None
    listed = {n for stage in src for n in stage}
    params = {n: p for n, p in params.items() if n in listed}
    compare(tmp_path, params, src, dst, str(folder / a), str(folder / b) if b else None)


def sampled(name):
    """Keep a layer of every pipeline stage, and all that is in none."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return not layer or int(layer[1]) in (0, 8, 16, 31)


LLAMA = [
    ("src_dp8mp1pp1_opt.ckpt", "tutorial4_8p_dp2mp1pp4/merged_ckpt_strategy.ckpt"),
    ("tutorial4_8p_dp2mp1pp4/merged_ckpt_strategy.ckpt", "tutorial4_4p_dp1mp2pp2/merged_ckpt_strategy.ckpt"),
    ("tutorial4_4p_dp1mp2pp2/merged_ckpt_strategy.ckpt", "dst_dp2mp4pp1_opt.ckpt"),
    ("dst_dp2mp4pp1_opt.ckpt", None),
]  # fmt: skip


@pytest.mark.parametrize(("a", "b"), LLAMA)
def test_llama_2_7b_layers(a, b, tmp_path):
    folder = DATA / "models" / "llama2_7b"
    params = shapes_of(folder, lambda n: 16 * max(1, min(6, n // 2048)))
    src = stages_of(folder / a, sampled)
    dst = stages_of(folder / b, sampled) if b else None
    params = {n: p for n, p in params.items() if any(n in stage for stage in src)}
    paths = [
        reference.write_strategy(tmp_path / f"{side}.ckpt", stages) if stages else None
        for side, stages in (("a", src), ("b", dst))
    ]
    compare(tmp_path, params, src, dst, *paths)


def test_deepseek_v3_tiny(tmp_path):
    folder = DATA / "models" / "deepseek_v3"
    a = folder / "tiny4L_8p_dp2mp2pp2ep2" / "merged_ckpt_strategy.ckpt"
    b = folder / "tiny4L_8p_dp4mp2pp1ep4_optws2" / "ckpt_strategy_rank_0.ckpt"
    params = shapes_of(a.parent, lambda n: 16 * max(1, min(6, n // 2048)))
    src, dst = stages_of(a), stages_of(b)
    params = {n: p for n, p in params.items() if any(n in stage for stage in src)}
    compare(tmp_path, params, src, dst, str(a), str(b))
