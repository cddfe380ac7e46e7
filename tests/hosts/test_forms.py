"""Checkpoints that describe themselves on several nodes: files on each node's own disk, or shared."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

from tests import reference, reference_forms
from tests.cases import random_case
from tests.conformance.test_forms import ReadFormTests, WrittenFormTests
from tests.hosts.machines import LOCAL
from tests.hosts.test_exchange import clean, gathered, hosts  # noqa: F401
from tests.reference_maps import Model, random_strategy

CASE = random_case(3, mindspore_agrees=False, whole=False)
SUITES = [suite for suite in WrittenFormTests.__subclasses__() if issubclass(suite, ReadFormTests)]
DESCRIBING = {"common.json"}.union(*({Path(suite.index).name, suite.mark} for suite in SUITES))


def spread(machines, form):
    """Put a checkpoint's files on the nodes' own disks in turn, what describes them on the first."""
    made = machines.shared / "made"
    shutil.rmtree(made, ignore_errors=True)
    reference_forms.write_any(form, made / "src", CASE, seed=2)
    files = [path for path in sorted((made / "src").rglob("*")) if path.is_file()]
    for number, path in enumerate(files):
        home = machines.names[0 if path.name in DESCRIBING else number % len(machines.names)]
        target = machines.disk(home) / "src" / path.relative_to(made / "src")
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    reference.write_stage_files(made / "b", CASE.dst)
    return made / "b"


def run(machines, dst, *options):
    return machines.mpirun(
        1, sys.executable, "-m", "rankxform", "transform", LOCAL / "src", dst, *map(str, options),
        "--no-fsync",
    )  # fmt: skip


@pytest.mark.sampled
@pytest.mark.parametrize("form", [suite.form for suite in SUITES])
def test_files_on_each_nodes_own_disk(form, clean):  # noqa: F811
    """To rank folders on own disks, to another form in one folder; never to another form apart."""
    b = spread(clean, form)
    code, output = run(clean, LOCAL / "dst", "--dst-strategy", b, "--format", "safetensors")
    assert code == 0, output
    found = gathered(clean)
    assert reference.wrong_slices(found, CASE.dst, CASE.params, "safetensors") == []
    target = clean.shared / "u"
    shutil.rmtree(target, ignore_errors=True)
    code, output = run(clean, target, "--dst-form", "unified", "--max-part", "5000")
    assert code == 0, output
    assert reference_forms.wrong_in("unified", target, CASE) == []
    code, output = run(clean, LOCAL / "apart", "--dst-form", "unified")
    assert code == 4 and "is not one folder on" in output, output


@pytest.mark.sampled
@pytest.mark.parametrize("form", [suite.form for suite in SUITES])
def test_the_first_node_must_have_what_describes_them(form, clean):  # noqa: F811
    spread(clean, form)
    first, second = (clean.disk(name) / "src" for name in clean.names[:2])
    moved = 0
    for path in list(first.rglob("*")):
        if path.name in DESCRIBING and not path.name.startswith("latest_"):
            target = second / path.relative_to(first)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.move(path, target)
            moved += 1
    code, output = run(clean, clean.shared / "never", "--dst-form", "unified", "--src-form", form)
    assert moved and code == 3 and "process 0 does not see it" in output, output


def test_tensors_are_put_together_of_files_on_several_nodes(clean):  # noqa: F811
    """What a node's disk lacks crosses the network; config.json lies on the first node only."""
    model = Model("qwen3_moe", 2, "Float32")
    made = clean.shared / "made"
    shutil.rmtree(made, ignore_errors=True)
    reference_forms.write_huggingface(made / "src", model.tensors("hf"), files=5)
    params = model.params("mf")
    layouts = random_strategy(params, 8, 1, 4)
    b = reference.write_stage_files(made / "b", layouts)
    (made / "src" / "config.json").write_text(json.dumps(model.config))
    files = sorted(path for path in (made / "src").iterdir())
    for number, path in enumerate(files):
        home = clean.names[0 if path.suffix == ".json" else number % len(clean.names)]
        target = clean.disk(home) / "src" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(path, target)
    options = ("--dst-strategy", b, "--map", "qwen3_moe", "--format", "safetensors")
    code, output = run(clean, LOCAL / "dst", *options)
    assert code == 0, output
    wrong = reference.wrong_slices(
        gathered(clean), layouts, params, "safetensors", make=lambda n, s, d: model.mf[n]
    )
    assert wrong == []
