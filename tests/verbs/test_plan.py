"""What is planned of a checkpoint of which there are full shapes alone."""

from __future__ import annotations

import json

import pytest

import rankxform
from rankxform import DerivationError, UsageError

SHAPES = {
    f"model.layers.{layer}.{name}.weight": shape
    for layer in (0, 1)
    for name, shape in (
        ("attention.wq", (64, 64)), ("attention.wo", (64, 64)), ("attention_norm", (64,)),
        ("feed_forward.w1", (96, 64)), ("feed_forward.w2", (64, 96)),
    )
}  # fmt: skip
YAML = """\
parallel: {parallel_mode: 1, enable_parallel_optimizer: True, parallel_optimizer_config:
  {parallel_optimizer_threshold: 0}}
parallel_config: {data_parallel: 2, model_parallel: 4, vocab_emb_dp: True}
"""
SIZES = {"src_parallel": "dp=2,mp=4,vocab_emb_dp=true"}
DST = {"dst_parallel": "dp=1,mp=2,vocab_emb_dp=true", "optimizer_shard": "off"}


@pytest.fixture
def shapes(tmp_path):
    path = tmp_path / "shapes.json"
    documents = {name: {"shape": shape, "dtype": "Float32"} for name, shape in SHAPES.items()}
    path.write_text(json.dumps(documents))
    (tmp_path / "src.yaml").write_text(YAML)
    return path


def test_a_source_is_sharded_as_its_configuration_says(shapes, tmp_path):
    """It was planned as one whole checkpoint."""
    src = tmp_path / "src.ckpt"
    rankxform.derive(
        dst="dp=2,mp=4,vocab_emb_dp=true", shapes=shapes, preset="llama_legacy", output=src,
        optimizer_shard="on", threshold=0,
    )  # fmt: skip
    compiled = rankxform.plan("", src, shapes=shapes, **SIZES, **DST)
    config = {"src_config": str(tmp_path / "src.yaml"), "preset": "llama_legacy"}
    plan = rankxform.plan("", shapes=shapes, **config, **DST)
    assert plan.src_ranks == 8 and len(plan.shards[0].bytes_from) == 6
    assert plan.shards == compiled.shards and plan.sharding == compiled.sharding


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"src_config": "src.yaml"}, "--preset llama_legacy, which knows all names"),
        (SIZES, "leave out --src-parallel if the source is one whole checkpoint"),
        ({**SIZES, "preset": "llama_legacy"}, "--src-config FILE --preset NAME"),
    ],
)
def test_what_does_not_say_how_a_source_is_sharded(shapes, tmp_path, options, text, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises((UsageError, DerivationError)) as refusal:
        rankxform.plan("", shapes=shapes, **options, **DST)
    assert any(text in one for one in refusal.value.parts.tries)
