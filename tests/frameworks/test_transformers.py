"""A model of transformers gives the same logits after it was ranks of a training, by two strategies.

These run where an environment with transformers is at hand: `make night` makes one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import rankxform

HERE = Path(__file__).parent
PYTHON = os.environ.get("RANKXFORM_MEGATRON", str(HERE.parents[1] / ".venv-megatron/bin/python"))
MODELS = "llama", "qwen2", "qwen3", "qwen3_moe", "mixtral", "deepseek_v3", "glm4"

pytestmark = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason="no environment with transformers: make night"
)


def job(*arguments):
    line = [PYTHON, str(HERE / "transformers_jobs.py"), *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model", MODELS)
def test_logits_are_the_same_before_and_after(model, tmp_path):
    src = tmp_path / "model"
    job("make", model, src)
    named = {"map": model, "config": src / "config.json", "fsync": False}
    first, second = "shard:linear_proj=1@4", "shard:linear_fc2|linear_proj|word_embeddings=0@2"
    ranks = {"format": "safetensors", "unmatched": "replicate"}
    rankxform.transform(src, tmp_path / "a", dst_strategy=first, **ranks, **named)
    told = {"src_strategy": first, "dst_strategy": second, "fsync": False, **ranks}
    rankxform.transform(tmp_path / "a", tmp_path / "b", **told)
    told = {"src_strategy": second, "dst_form": "huggingface", "like": src, "fsync": False}
    rankxform.transform(tmp_path / "b", tmp_path / "c", map=model, **told)
    job("compare", src, tmp_path / "c")
