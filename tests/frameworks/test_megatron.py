"""Megatron-Core's own code loads torch_dist folders that were written, on gloo ranks.

These run where an environment with megatron-core is at hand: `make night` makes one.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.checkpoints.test_torch_dist_files import Sample

HERE = Path(__file__).parent
PYTHON = os.environ.get("RANKXFORM_MEGATRON", str(HERE.parents[1] / ".venv-megatron/bin/python"))
JOBS = [
    ("llama", 1, 1, 1), ("llama", 2, 2, 1), ("qwen2_tied", 2, 2, 1), ("qwen3", 2, 1, 1),
    ("qwen3_moe", 1, 1, 2), ("qwen3_moe", 1, 2, 1), ("mixtral", 1, 2, 1), ("mixtral", 1, 1, 4),
]  # fmt: skip
"""Models, and their tensor, pipeline and expert parallel ranks."""

pytestmark = pytest.mark.skipif(
    not Path(PYTHON).exists(), reason="no environment with megatron-core: make night"
)


@pytest.mark.filterwarnings("ignore:.*rows of")
@pytest.mark.parametrize(("model", "tensor", "stages", "experts"), JOBS)
def test_a_job_of_any_ranks_loads_it(model, tensor, stages, experts, tmp_path):
    sample = Sample(model, tmp_path)
    dst = sample.converted(tmp_path / "dst", transformer_impl="local", iteration=5)
    folders = (next(place.glob("iter_*")) for place in (dst, sample.folder / "torch_dist"))
    job = model.removesuffix("_tied"), tensor, stages, experts, *folders, sample.vocabulary
    line = [PYTHON, str(HERE / "megatron_jobs.py"), *map(str, job)]
    done = subprocess.run(line, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
