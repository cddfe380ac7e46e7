"""Megatron's distributed checkpoints."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rankxform
from tests import reference
from tests.checkpoints.test_dcp import transformed, whole
from tests.reference_dcp import write_dcp

pytestmark = pytest.mark.filterwarnings("ignore:optimizer[^/]*do not round")


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("in_proj.weight", ("query", "key", "value", "z", "beta", "alpha")),
        ("in_proj.weight", ("z", "x", "B", "C", "dt")),
        ("conv1d.weight", ("query", "key", "value")),
        ("conv1d.weight", ("x", "B", "C")),
        ("conv1d.bias", ("x", "B", "C")),
    ],
)
def test_parts_of_one_parameter_of_megatrons(kind, parts, tmp_path):
    """In the model's order, whatever the table's; of weights and of the optimizer's states."""
    tensors, joined = {}, {}
    for root in ("", "optimizer.state.exp_avg."):
        name = f"{root}decoder.layers.mixer.{kind}"
        columns = () if kind.endswith("bias") else (3,)
        arrays = [
            np.arange(100 * n, 100 * n + 4 * (n + 1) * 3 ** len(columns), dtype="<u4")
            .reshape(2, 2 * (n + 1), *columns) + bool(root)
            for n in range(len(parts))
        ]  # fmt: skip
        tensors |= {f"{name}.{part}": ("Float32", a) for part, a in zip(parts[::-1], arrays[::-1])}
        tensors |= {f"{name}.{part}": ("Float32", a) for part, a in zip(parts, arrays)}
        for layer in range(2):
            of_layer = np.concatenate([array[layer] for array in arrays])
            joined[name.replace("layers.", f"layers.{layer}.")] = of_layer
    src = write_dcp(tmp_path / "src", tensors)
    (Path(src) / "metadata.json").write_text(
        '{"sharded_backend": "torch_dist", "sharded_backend_version": 1}'
    )
    transformed(src, tmp_path / "dst", dst_form="huggingface")
    made = {name: (shape, data) for name, (_, shape, data) in whole(tmp_path / "dst").items()}
    assert made == {name: (a.shape, a.tobytes()) for name, a in joined.items()}


def test_a_rank_without_rows_has_no_box_and_none_is_missing(tmp_path):
    src = reference.write_checkpoint(tmp_path / "src", None, {"w": ((8, 6), "Float32")})
    stage = {"w": ([2], [0, -1], 0, 0, [0, 8])}
    strategy = reference.write_strategy(tmp_path / "b.ckpt", [stage])
    told = {"dst_strategy": strategy, "dst_form": "dcp"}
    transformed(src, tmp_path / "dst", **told)
    assert rankxform.verify(src, tmp_path / "dst", **told).same
