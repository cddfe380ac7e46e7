"""The verb `maps`."""

from __future__ import annotations

import json

import pytest

from rankxform.cli.main import main
from tests.operations.test_map import SAMPLES
from tests.reference_maps import KINDS

pytestmark = pytest.mark.filterwarnings("ignore:.*infinite or no numbers")
ALSO = {"telechat3": "llama", "telechat3_moe": "deepseek_v3"}
"""Tables of models that have the names of another."""
SAMPLED = {"mixtral", "llama_meta"}
"""Tables whose models are those of tests/data/formats/megatron, and of checkpoints/test_meta.py."""


def printed(capfd, *line):
    code = main(list(line))
    out, error = capfd.readouterr()
    return code, out, error


def test_the_verb_lists_shows_and_checks(capfd, tmp_path):
    assert printed(capfd, "maps")[1].count("\n") == len(KINDS) + len(ALSO) + len(SAMPLED) + 1
    code, out, _ = printed(capfd, "maps", "show", "deepseek_v3")
    assert code == 0
    assert "mtp.layers.{layer}.transformer_layer.mlp.experts.weight1" in out
    assert "the same as lm_head.weight" in out
    sample = SAMPLES["qwen3_moe"]
    line = ("maps", "check", "qwen3_moe", str(sample / "mindformers"), "--config")
    code, out, _ = printed(capfd, *line, str(sample / "hf" / "config.json"))
    assert code == 0
    assert "model.layers.*.mlp.experts.*.gate_proj.weight (8)  Float32 [12, 16]\n" in out
    assert "  of decoder.layers.*.mlp.experts.weight1\n" in out
    code, _, error = printed(capfd, *line, str(SAMPLES["qwen3"] / "hf" / "config.json"))
    assert code == 2
    assert "is of a Qwen3ForCausalLM" in error
    names = ("inspect", str(sample / "hf"), "--map", "qwen3_moe")
    code, inspected, _ = printed(capfd, *names)
    assert code == 0
    assert "decoder.layers.*.mlp.experts.weight1 (2)  Float32 [64, 24]\n" in inspected
    code, out, _ = printed(capfd, *line, str(sample / "hf" / "config.json"), "--json")
    facts = json.loads(out)
    made = {one["name"]: one["src_names"] for one in facts["entries"]}
    assert made["model.norm.weight"] == ["decoder.final_layernorm.weight"]
