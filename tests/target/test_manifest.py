"""Folders are known again by later commits: the digests in their manifests do not change.

A change of one needs another VERSION of the records.
"""

from __future__ import annotations

import json

import numpy as np

import rankxform
from tests import reference, reference_dcp
from tests.reference_maps import Model


def identity(folder):
    return json.loads((folder / "rankxform.json").read_text())["identity"]


def test_digests_of_strategies_maps_and_boxes(tmp_path):
    """Literal digests: of a strategy, of tensors made of others, and of boxes of files."""
    model = Model("qwen3_moe", 4, "Float32")
    (tmp_path / "config.json").write_text(json.dumps(model.config))
    params = model.params("mf")
    stages = [{n: ([2], [0] + [-1] * (len(s) - 1), 0, 0) for n, (s, _) in params.items()}]
    reference.write_checkpoint(
        tmp_path / "src", stages, params, None, "safetensors", make=lambda n, s, d: model.mf[n]
    )
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    options = {"map": "qwen3_moe", "config": str(tmp_path / "config.json")}
    rankxform.transform(
        tmp_path / "src", tmp_path / "hf", strategy, dst_form="huggingface", **options
    )
    made = identity(tmp_path / "hf")
    assert made["source strategy"] == "475501efc1811b13a89f9f6418de6a8d"
    assert made["tensors"] == "eb4b93704b9518d0ba5003f17fedebb0"
    tensors = {"w": ("Float32", np.arange(24, dtype="<u4").reshape(4, 6))}
    reference_dcp.write_dcp(tmp_path / "dcp", tensors, ranks=3, seed=1)
    rankxform.transform(tmp_path / "dcp", tmp_path / "whole")
    assert identity(tmp_path / "whole")["source strategy"] == "1645b518ee68e31ac90f634a5020e8c5"
