"""vLLM itself starts from folders that were written, and writes the same greedy tokens.

These run where an environment with vLLM's CPU wheel is at hand: `make night` makes one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

import rankxform

HERE = Path(__file__).parent
PYTHON = os.environ.get("RANKXFORM_VLLM", str(HERE.parents[1] / ".venv-vllm/bin/python"))

pytestmark = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason="no environment with vLLM: make night"
)


def job(*arguments):
    line = [PYTHON, str(HERE / "vllm_jobs.py"), *map(str, arguments)]
    done = subprocess.run(line, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return [line for line in done.stdout.splitlines() if line.startswith("TOKENS")]


@pytest.mark.parametrize("model", ["Llama", "Mistral", "Qwen2", "Qwen3", "Glm4"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_an_engine_starts_and_answers_the_same(model, ranks, tmp_path):
    src, dst = tmp_path / "model", tmp_path / "served"
    job("make", model, src)
    rankxform.transform(src, dst, dst_form="vllm", tensor_parallel=ranks, fsync=False)
    expected = job("serve", src, "auto", ranks)
    assert len(expected) == 1 and job("serve", dst, "sharded_state", ranks) == expected
