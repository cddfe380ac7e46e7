"""Runs with `--verify` prove their plans, and say so; a plan that is wrong writes nothing."""

from __future__ import annotations

import json

import pytest

import rankxform
from rankxform.display.text import as_text
from rankxform.engine.coverage import CoveredSink
from rankxform.errors import RankxformError
from rankxform.planning import assign
from rankxform.target import folder as target_folder
from tests import reference
from tests.mpi_launch import world

PARAMS = {f"{n}.w": ((8, 12), "Float32") for n in range(4)}
SRC = [{name: ([4], [0, -1], 0, 0) for name in PARAMS}]
DST = [{name: ([3], [-1, 0], 0, 0) for name in PARAMS}]


@pytest.fixture
def job(tmp_path):
    """Return what `transform` is called with."""
    src = reference.write_checkpoint(tmp_path / "src", SRC, PARAMS, kind="safetensors")
    sides = (("a.ckpt", SRC), ("b.ckpt", DST))
    strategies = [reference.write_strategy(tmp_path / name, side) for name, side in sides]
    return src, tmp_path / "dst", *strategies


def manifest_of(dst):
    return json.loads((dst / "rankxform.json").read_text())


@pytest.mark.world(sizes=(1, 3))
def test_the_manifest_says_that_the_plan_was_proved(tmp):
    if world().rank == 0:
        reference.write_checkpoint(tmp / "src", SRC, PARAMS, kind="safetensors")
        reference.write_strategy(tmp / "a.ckpt", SRC)
        reference.write_strategy(tmp / "b.ckpt", DST)
    world().Barrier()
    job = tmp / "src", tmp / "dst", tmp / "a.ckpt", tmp / "b.ckpt"
    rankxform.transform(*job, comm=world(), verify=True, fsync=False)
    if world().rank == 0:
        assert len(manifest_of(tmp / "dst")["proof"]) == 16
        assert "plan proved" in as_text(rankxform.verify(tmp / "dst"))


def test_a_run_without_verify_does_not_say_so(job):
    rankxform.transform(*job, fsync=False)
    assert "proof" not in manifest_of(job[1])
    assert rankxform.verify(*job, keep_fingerprints=True).same
    assert "plan proved" not in as_text(rankxform.verify(job[1]))


def test_what_an_earlier_run_made_without_a_proof_is_not_called_proved(job):
    dst = job[1]
    rankxform.transform(*job, verify=True, fsync=False)
    manifest = manifest_of(dst)
    del manifest["proof"]  # as a version before this wrote it
    (dst / "rankxform.json").write_text(json.dumps(manifest))
    next((dst / "rank_1").iterdir()).unlink()
    rankxform.transform(*job, verify=True, fsync=False)
    assert "proof" not in manifest_of(dst)
    rankxform.transform(*job, verify=True, fsync=False, overwrite=True)
    assert "proof" in manifest_of(dst)


@pytest.mark.parametrize("wrong", ["lacks a slice", "has a slice twice"])
def test_a_wrong_assignment_writes_nothing(wrong, job, monkeypatch):
    def changed(*args, **options):
        ranges = assign.assignment_of(*args, **options)
        first = ranges[0].pop(0)
        if wrong == "lacks a slice":
            return ranges
        return [[first, *ranges[0], first]]

    monkeypatch.setattr(target_folder, "assignment_of", changed)
    with pytest.raises(RankxformError, match="the plan is wrong: what processes make"):
        rankxform.transform(*job, verify=True, fsync=False)
    assert not [path for path in job[1].rglob("*") if path.suffix == ".safetensors"]


@pytest.mark.parametrize("times", [0, 2])
def test_a_range_that_is_not_put_once_is_found_before_a_file_has_its_name(times, job, monkeypatch):
    put, names = CoveredSink.put, []

    def wrong(self, name, start, data):
        names.append(name)
        for _ in range(times if len(names) == 5 else 1):
            put(self, name, start, data)

    monkeypatch.setattr(CoveredSink, "put", wrong)
    with pytest.raises(RankxformError, match="put twice, or never"):
        rankxform.transform(*job, verify=True, fsync=False)
    assert not [*job[1].rglob("*.safetensors")]


def test_plan_proves_for_any_number_of_processes(job):
    src, _, *strategies = job
    for processes in (1, 2, 5):
        plan = rankxform.plan(src, *strategies, processes=processes, prove=True)
        assert plan.boxes_proved == 3
        assert "proved" in as_text(plan)
    assert rankxform.plan(src, *strategies).boxes_proved is None
