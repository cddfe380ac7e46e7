"""Cases after public reports, and how they are converted: for the tests of what each was about."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import rankxform
from rankxform.errors import RankxformError

CASES = Path(__file__).parent / "data" / "cases"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return the folder of a case, made once."""
    folders = {}

    def make(name):
        if name not in folders:
            folders[name] = tmp_path_factory.mktemp("cases") / name
            words = [sys.executable, str(CASES / f"{name}.py"), str(folders[name])]
            words += ["3", "4"] if name == "many_tensors" else [sys.executable]
            subprocess.run(
                words, check=True, capture_output=True, env={**os.environ, "LC_ALL": "C"}
            )
        return folders[name]

    return make


@pytest.fixture
def dst(tmp_path):
    return tmp_path / "dst"


def tensors(folder):
    found = {}
    for path in sorted(Path(folder).rglob("*.safetensors")):
        found |= load_file(path)
    return found


def convert(src, dst, *strategies, **options):
    shutil.rmtree(dst, ignore_errors=True)
    options.setdefault("dst_form", "huggingface")
    report = rankxform.transform(src, dst, *strategies, fsync=False, **options)
    return report, tensors(dst)


def same(found, expected):
    assert {*found} == {*expected}
    for name, array in expected.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def refused(src, dst, *strategies, **options):
    with pytest.raises(RankxformError) as caught:
        convert(src, dst, *strategies, **options)
    assert not dst.exists()
    return caught.value.parts


def put(folder, shapes, **more):
    folder.mkdir(parents=True)
    arrays = {n: np.arange(np.prod(s), dtype="f4").reshape(s) + 1 for n, s in shapes.items()}
    save_file({**arrays, **more}, folder / "model.safetensors")
    return folder
