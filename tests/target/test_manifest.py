"""Folders of earlier versions are known again: the digests in their manifests never change.

The literal digests are those of commit b69cd2a, made of the text of its own classes.
"""

from __future__ import annotations

import json

import numpy as np
import pytest

import rankxform
from rankxform.geometry.box import Box
from rankxform.geometry.pieces import Assembly, interleave_rows, pile
from rankxform.layout.layout import Layout
from rankxform.operations.base import BlockScale, LowRankUpdate
from rankxform.planning.catalog import DeclaredBox
from rankxform.target import manifest
from tests import reference, reference_dcp
from tests.reference_maps import Model

LAYOUTS = (
    Layout((2, 2), ((0,), ())),
    Layout((4,), ((0,), ()), 1, -1),
    Layout((2, 2, 3), ((1, 0), ()), 2, 2, 3, (), (), (6, 4)),
    Layout((2,), ((0,),), split_rows=(3, 5), split_offsets=(0, 3)),
)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_are_written_as_ever(layout):
    """As long as the class is called so: the text that is hashed is what Python writes of it."""
    assert manifest._layout_text(layout) == repr(layout)


FIRST_NAMES = {
    "LowRankUpdate": "LowRank", "BlockScale": "Dequantize", "DeclaredBox": "StatedBox", "is_stacked=": "each=",
}  # fmt: skip


def with_first_names(text):
    """Return a text with the names that classes and fields had when it was first hashed."""
    for name, first_name in FIRST_NAMES.items():
        text = text.replace(name, first_name)
    return text


def test_pieces_and_computations_are_written_as_ever():
    stacked = pile([Assembly.of((2, 3)).transposed(), Assembly.of((2, 3), 1).transposed()])
    for assembly in (stacked, interleave_rows([Assembly.of((4,)), Assembly.of((4,), 1)])):
        assert manifest._assembly_text(assembly) == repr(assembly).replace(", value=0)", ")")
    steps = LowRankUpdate("a", "b", 0.5), BlockScale("s", (128, 128)), None
    for count in range(4):
        expected = with_first_names(repr(steps[:count]))
        assert manifest._tuple_text(map(manifest._step_text, steps[:count])) == expected
    stated = DeclaredBox(3, Box((0, 4), (2, 8)), " at (0, 4)"), DeclaredBox(1, Box((), ()))
    text = manifest._tuple_text(map(manifest._box_text, stated))
    assert text == with_first_names(repr(stated))


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
    assert made["source strategy"] == "b511c711c606070d4239b5cd36b98df3"
    assert made["tensors"] == "3d98d4ceca70257b497dd1d002339107"
    tensors = {"w": ("Float32", np.arange(24, dtype="<u4").reshape(4, 6))}
    reference_dcp.write_dcp(tmp_path / "dcp", tensors, ranks=3, seed=1)
    rankxform.transform(tmp_path / "dcp", tmp_path / "whole")
    assert identity(tmp_path / "whole")["source strategy"] == "99333b56e84211d6915d7ca5e6e7c370"
