"""MindFormers' own code saves what is converted here, and loads what was written.

The wheels are unpacked and not installed (`make .mindformers/unpacked`); what is replaced of them
stands in mindformers_client.py. docs/forms.md names what `CASES` are.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rankxform
from tests import reference
from tests.frameworks.mindformers_model import Sizes, stored
from tests.reference_maps import Model

HERE = Path(__file__).parent
WHEELS = Path(os.environ.get("RANKXFORM_MINDFORMERS", HERE.parents[1] / ".mindformers"))

CASES = {
    "1.9.0": {"plain": [], "dedup": ["dedup"], "muon": ["muon"]},
    "2.0.0": {"plain": [], "dedup": ["dedup"], "muon": ["muon"], "pynative": ["pynative", "plain"]},
    "2.1.0": {
        "plain": [], "dedup": ["dedup"], "pynative": ["pynative", "plain", "group"],
        "adapter": ["pynative", "adapter"],
    },
}  # fmt: skip
"""What is saved by each version, and what is special in it."""

EACH = [(version, name) for version, cases in CASES.items() for name in cases]
FROM, TO = [2, 2, 2], [4, 1, 2]

pytestmark = [
    pytest.mark.skipif(
        not all((WHEELS / version / "mindformers").is_dir() for version in CASES),
        reason="no wheels of MindFormers: make .mindformers/unpacked",
    ),
    pytest.mark.filterwarnings("ignore:.*do not round"),
    pytest.mark.filterwarnings("ignore:.*gets no such file"),
    pytest.mark.filterwarnings("ignore:.*hold values of their own"),
]


def done(version, jobs, folder):
    """Have a version of MindFormers do jobs; return what became of each."""
    path = folder / "jobs.json"
    path.write_text(json.dumps(jobs))
    line = [sys.executable, str(HERE / "mindformers_client.py"), str(WHEELS / version), str(path)]
    found = subprocess.run(line, capture_output=True, text=True, cwd=folder, check=False)
    assert found.returncode == 0, found.stderr[-2000:]
    return json.loads(found.stdout.splitlines()[-1])


def job(do, where, sizes, kind):
    shards = "pynative" not in kind
    return {"do": do, "where": str(where), "sizes": sizes, "optimizer": shards, "kind": kind}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return the folder in which a version has saved all of its cases, for both sizes."""
    folders = {}

    def folder(version):
        if version not in folders:
            folders[version] = tmp_path_factory.mktemp("saved")
            jobs = [
                job("save", folders[version] / f"{name} {number}", sizes, kind)
                for name, kind in CASES[version].items()
                for number, sizes in enumerate((FROM, TO))
            ]
            for found in done(version, jobs, folders[version]):
                assert "metadata.json" in found, found
        return folders[version]

    return folder


@pytest.mark.sampled
@pytest.mark.parametrize(("version", "name"), EACH)
def test_what_it_saved_is_read(version, name, saved, tmp_path):
    rankxform.transform(saved(version) / f"{name} 0", tmp_path / "whole", dst_form="huggingface")
    found = {}
    for path in (tmp_path / "whole").glob("*.safetensors"):
        found.update(reference.read_safetensors(path))
    counters = {"global_step", "learning_rate"}
    kind = CASES[version][name]
    sizes = Sizes(FROM, True, kind)
    every = {n: stored(n, shape) for n, (shape, _) in sizes.every.items()}
    if "adapter" in kind:
        every = {n: one for n, one in every.items() if "lora" in n}
    assert {n: one for n, one in found.items() if n not in counters} == every


@pytest.mark.sampled
@pytest.mark.parametrize("version", CASES)
def test_what_is_written_is_loaded(version, saved, tmp_path):
    folder, jobs = saved(version), []
    for name, kind in CASES[version].items():
        strategy = folder / f"{name} 1" / "iteration_00000100" / "metadata.json"
        for dedup in (False, True):
            dst = tmp_path / f"{name} {dedup}"
            options = {"dst_form": "checkpoint2", "dedup": dedup}
            if version != "2.1.0":  # which alone knows it
                options["exclude"] = ("^consumed_samples$",)
            rankxform.transform(folder / f"{name} 0", dst, dst_strategy=strategy, **options)
            jobs.append(job("load", dst, TO, kind))
        if "adapter" not in kind:  # whole tensors; of these the loader's step is common.json's
            dst, options["dst_form"] = tmp_path / f"{name} whole", "unified"
            rankxform.transform(folder / f"{name} 0", dst, **options | {"dedup": False})
            jobs.append(job("load", dst, TO, kind))
    for asked, found in zip(jobs, done(version, jobs, tmp_path)):
        assert found.get("bad") == [] and found["good"] > 100, (asked, found)


@pytest.mark.sampled
@pytest.mark.parametrize("version", CASES)
def test_a_model_is_what_its_converters_make_of_it(version, tmp_path):
    """The models that the maps are tested with (tests/reference_maps.py), both ways."""
    is_newest = version == "2.1.0"  # alone it converts DeepSeek-V4, and QKV and experts back
    kinds = ["qwen3", "qwen3_moe", *(["deepseek_v4"] if is_newest else [])]
    models = {
        (kind, seed): Model(kind, seed, "Float32")
        for kind in kinds
        for seed in range(1 + is_newest)
    }
    words = []
    for (kind, seed), model in models.items():
        folder = tmp_path / f"{kind} {seed}"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(model.config))
        np.savez(folder / "hf.npz", **model.hf)
        words.append(f"{kind.replace('_v4', '4')}={folder}")
    found = subprocess.run(
        [sys.executable, str(HERE / "mindformers_converters.py"), str(WHEELS / version), *words],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert found.returncode == 0, found.stderr[-2000:]
    outcomes = [json.loads(line) for line in found.stdout.splitlines() if line.startswith("{")]
    assert len(outcomes) == len(models)
    for (name, model), outcome in zip(models.items(), outcomes):
        assert outcome["wrong"] == [], name
        assert not is_newest or (outcome["refused"], outcome["back"]) == ([], len(model.hf)), name
        theirs = dict(np.load(tmp_path / "{} {}".format(*name) / "mf.npz"))
        assert theirs.keys() == model.mf.keys(), name
        for tensor, values in model.mf.items():
            # experts are of two axes there, and of three in PyNative's network: the same elements
            assert theirs[tensor].tobytes() == values.tobytes(), (name, tensor)


SCRIPT = "mindformers/tools/transform_ckpt.py"


def layouts(names, mp):
    return {name: ([8 // mp, mp], [0, -1], 0, 0) for name in names}


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_the_script_of_one_command_line(kind, tmp_path):
    """transform_ckpt.py: the same files and tensors, from two pipeline stages to one; of `.ckpt`
    files the same bytes."""
    names = [f"layers.{number}.w" for number in range(4)]
    params = dict.fromkeys(names, ((32, 8), "Float32"))
    src = [layouts(names[:2], 4), layouts(names[2:], 4)]
    reference.write_checkpoint(tmp_path / "src", src, params, kind=kind)
    reference.write_stage_files(tmp_path / "a", src)
    reference.write_stage_files(tmp_path / "b", [layouts(names, 2)])
    line = ["--src_ckpt_strategy", "a", "--dst_ckpt_strategy", "b", "--src_ckpt_dir", "src",
            "--dst_ckpt_dir"]  # fmt: skip
    for dst, program in (
        ("ours", [sys.executable, "-m", "rankxform"]),
        ("theirs", [sys.executable, str(WHEELS / "2.1.0" / SCRIPT)]),
    ):
        here = tmp_path / dst
        here.mkdir()
        for one in ("src", "a", "b"):
            shutil.copytree(tmp_path / one, here / one)
        found = subprocess.run(
            [*program, *line, "dst", "--pre", "new_"], cwd=here, capture_output=True, text=True,
            check=False,
        )  # fmt: skip
        assert found.returncode == 0, found.stderr[-2000:]

    def files(folder):
        read = Path.read_bytes if kind == "ckpt" else reference.read_ckpt
        return {str(path.relative_to(folder)): read(path) for path in folder.glob("rank_*/*")}

    assert files(tmp_path / "ours/dst") == files(tmp_path / "theirs/dst") != {}
