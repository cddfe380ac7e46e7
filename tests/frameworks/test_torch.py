"""What PyTorch saved is converted, and PyTorch loads what was written.

These run where an environment with PyTorch is at hand: `make night` makes one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

import rankxform
from tests import reference
from tests.checkpoints.test_dcp import trained, whole

HERE = Path(__file__).parent
PYTHON = os.environ.get("RANKXFORM_TORCH", str(HERE.parents[1] / ".venv-torch/bin/python"))
SEEDS = int(os.environ.get("RANKXFORM_SEEDS", "2"))
"""Checkpoints of each kind: 25 at night."""

pytestmark = [
    pytest.mark.skipif(not Path(PYTHON).exists(), reason="no environment with PyTorch: make night"),
    pytest.mark.filterwarnings("ignore:.*do not round"),
]


def torch_job(*arguments):
    line = [PYTHON, str(HERE / "torch_jobs.py"), *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


def converted(src, dst, **options):
    rankxform.transform(src, dst, fsync=False, **options)


@pytest.mark.parametrize("seed", range(SEEDS))
@pytest.mark.parametrize("kind", ["items", "trained", "safetensors", "hf"])
def test_there_and_back(tmp_path, kind, seed):
    src = tmp_path / "src"
    torch_job("save", kind, src, seed)
    expected = reference.read_safetensors(tmp_path / "src.expected.safetensors")
    assert rankxform.check(src, full=True)
    converted(src, tmp_path / "whole", dst_form="huggingface", check_crc=kind != "hf")
    assert whole(tmp_path / "whole") == expected
    converted(src, tmp_path / "dcp", dst_form="dcp", max_part=300)
    torch_job("load", tmp_path / "dcp", tmp_path / "src.expected.safetensors")
    converted(src, tmp_path / "hyper", dst_form="hyperparallel")
    converted(tmp_path / "hyper", tmp_path / "again", dst_form="dcp")
    torch_job("load", tmp_path / "again", tmp_path / "src.expected.safetensors")


@pytest.mark.parametrize("seed", range(SEEDS))
def test_adamw_goes_on_from_what_mindspore_trained(tmp_path, seed):
    model = trained(layers=1 + seed % 3, seed=seed)
    stage = {
        n: ([2, 2], [0, -1] if w.ndim > 1 else [-1], 0, 0)
        for n, (_, w) in model.items()
        if n != "global_step"
    }
    src = reference.write_checkpoint(
        tmp_path / "src", [stage], {n: (model[n][1].shape, model[n][0]) for n in stage},
        {"global_step": model["global_step"]}, "safetensors",
        make=lambda name, shape, dtype: model[name][1],
    )  # fmt: skip
    strategy = reference.write_strategy(tmp_path / "a.ckpt", [stage])
    asked = {"src_strategy": strategy, "dst_form": "dcp", "names": "torch"}
    converted(src, tmp_path / "dst", **asked)
    want = {}
    for name in stage:
        if not name.startswith("adam_"):
            want[f"model.{name}"] = model[name]
            for own, other in (("adam_m", "exp_avg"), ("adam_v", "exp_avg_sq")):
                want[f"optimizer.state.{name}.{other}"] = model[f"{own}.{name}"]
            step = np.array(7, "<f4").view("<u4")
            want[f"optimizer.state.{name}.step"] = "Float32", step
    reference.write_safetensors(tmp_path / "want.safetensors", want)
    torch_job("resume", tmp_path / "dst", tmp_path / "want.safetensors")
