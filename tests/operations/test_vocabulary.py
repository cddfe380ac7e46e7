"""`--vocab` is advised where it loses nothing, and what it adds is said."""

from __future__ import annotations

import json

import numpy as np
import pytest

import rankxform
from rankxform.errors import CheckpointError
from tests import reference_forms
from tests.reference_maps import Model


@pytest.mark.parametrize(
    ("rows", "is_advised"), [(60, True), (41, True), (10, False), (38, True), (35, False)]
)
def test_rows_are_added_only_where_few_lack(rows, is_advised, tmp_path):
    """Of 40 words: more rows, a slice of one rank, two words fewer, an eighth fewer."""
    model = Model("qwen3", 1)
    model.config["vocab_size"] = words = 40
    tensors = {}
    for name, array in model.hf.items():
        is_vocabulary = "embed_tokens" in name or "lm_head" in name
        array = np.resize(array, (rows, array.shape[1])) if is_vocabulary else array
        tensors[name] = "BFloat16", array
    reference_forms.write_huggingface(tmp_path / "src", tensors)
    (tmp_path / "src/config.json").write_text(json.dumps(model.config))
    with pytest.raises(CheckpointError) as refusal:
        rankxform.plan(tmp_path / "src", map="qwen3")
    assert (f"--vocab {words}" in str(refusal.value)) == is_advised
    model.config["hidden_size"] *= 2  # another model's: more than rows differ
    (tmp_path / "src/config.json").write_text(json.dumps(model.config))
    with pytest.raises(CheckpointError) as other_refusal:
        rankxform.plan(tmp_path / "src", map="qwen3")
    assert "--vocab" not in str(other_refusal.value)
    if rows < words and not is_advised:
        assert "one rank's slice" in str(refusal.value)
