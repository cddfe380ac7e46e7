"""A source in several places: what survivors have is read there, and nothing of it in storage.

The slow reference marks every element of every tensor with the ranks that hold it.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import warnings

import numpy as np
import pytest

import rankxform
from rankxform.request import Request
from rankxform.transport import SerialTeam
from rankxform.verbs.plan import plan
from tests import reference
from tests.cases import random_case

LOSSES = int(os.environ.get("RANKXFORM_SEEDS", 1)) * 200
KIND = "safetensors"
SRC = [{"w": ([2, 4], [0, -1], 0, 0), "v": ([2, 4], [-1, 0], 0, 0)}]
DST = [{"w": ([2], [0, -1], 0, 0), "v": ([2], [0, -1], 0, 0)}]
PARAMS = {"w": ((16, 8), "Float32"), "v": ((8, 12), "BFloat16")}


def warned(call, *arguments, **options):
    """Return what a call returns, and all that it warns of, as one text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        outcome = call(*arguments, **options)
    return outcome, "\n".join(str(one.message) for one in caught)


@pytest.fixture
def job(tmp_path):
    return Job(tmp_path, SRC, DST, PARAMS)


class Job:
    """A checkpoint, two strategies, and where its ranks' files lie."""

    def __init__(self, tmp, src, dst, params):
        self.tmp, self.params, self.src, self.dst = tmp, params, src, dst
        self.a = reference.write_stage_files(tmp / "a", src)
        self.b = reference.write_stage_files(tmp / "b", dst)
        reference.write_checkpoint(tmp / "all", src, params, None, KIND)
        self.ranks = len(src) * reference.stage_size(src)

    def place(self, name, ranks):
        """Make a place with the files of some ranks."""
        (self.tmp / name).mkdir()
        for rank in ranks:
            shutil.copytree(self.tmp / "all" / f"rank_{rank}", self.tmp / name / f"rank_{rank}")
        return self.tmp / name

    def convert(self, *places, **options):
        dst = self.tmp / "dst"
        report = rankxform.transform(
            places[0], dst, self.a, self.b, fallback=places[1:], fsync=False, **options
        )
        assert reference.wrong_slices(dst, self.dst, self.params, KIND) == []
        return report


def test_a_rank_s_file_comes_from_the_first_place_that_has_it(job):
    first, second = job.place("first", [0, 2, 3, 4, 7]), job.place("second", [1, 2, 5])
    report = job.convert(first, second, job.place("storage", range(8)))
    places = [str(first), str(second), str(job.tmp / "storage")]
    assert [use.place for use in report.places] == places
    assert {*report.places[0].ranks_read} <= {0, 2, 3, 4, 7} and {*report.places[1].ranks_read} <= {
        1,
        5,
    }
    assert report.places[1].bytes_needed == report.bytes_needed / 4, "what ranks 1 and 5 hold"
    assert sum(use.bytes_needed for use in report.places) == report.bytes_needed
    assert report.places[2].bytes_needed == 0, "rank 2 holds what rank 6 does"
    shutil.rmtree(first / "rank_2")
    shutil.rmtree(second / "rank_2")
    planned = rankxform.plan(first, job.a, job.b, fallback=[second, job.tmp / "storage"])
    assert (
        planned.places[2].bytes_needed == planned.bytes_needed / 4
        and "places" in planned._repr_html_()
    )
    assert rankxform.verify(
        first, job.tmp / "dst", job.a, job.b, fallback=[str(second), str(job.tmp / "storage")]
    ).same


def test_a_copy_that_a_crash_left_is_dropped(job):
    first, storage = job.place("first", range(8)), job.place("storage", range(8))
    for rank, nbytes in ((1, 100), (5, 0)):
        os.truncate(first / f"rank_{rank}" / f"checkpoint_{rank}.{KIND}", nbytes)
    report, text = warned(job.convert, first, storage)
    assert text.count("is read instead") == 2 and str(storage / "rank_1") in text
    assert {*report.places[1].ranks_read} <= {1, 5} and report.places[1].bytes_needed
    with pytest.raises(rankxform.CheckpointError, match=r"rank_1/.*cut off"):
        rankxform.plan(first, job.a, job.b)


def test_two_whole_copies_that_differ_are_refused(job):
    first, storage = job.place("first", range(8)), job.place("storage", range(8))
    path = storage / "rank_3" / f"checkpoint_3.{KIND}"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(rankxform.CheckpointError, match="they differ") as raised:
        rankxform.plan(first, job.a, job.b, fallback=[storage])
    assert str(first / "rank_3") in str(raised.value) and str(path) in str(raised.value)
    assert len(raised.value.parts.tries) == 2


def test_a_step_that_the_places_have_together(tmp_path):
    """Nodes that died while they wrote a step have no part of it; all have the one before."""
    for name, ranks in (("first", range(4)), ("second", range(4, 8))):
        for step in (1, 2) if name == "first" else (1,):
            reference.write_checkpoint(
                tmp_path / f"{name}{step}", SRC, PARAMS, None, KIND, name=f"net-1_{step}"
            )
            for rank in ranks:
                folder = tmp_path / name / f"rank_{rank}"
                folder.mkdir(parents=True, exist_ok=True)
                for path in (tmp_path / f"{name}{step}" / f"rank_{rank}").iterdir():
                    shutil.copy(path, folder)
    a = reference.write_stage_files(tmp_path / "a", SRC)
    first, options = tmp_path / "first", {"fallback": tmp_path / "second"}
    planned, text = warned(rankxform.plan, first, a, None, **options)
    assert planned.step == "1_1" and "newer but not complete: ranks 4-7" in text
    assert rankxform.plan(first, a, None, step="1_1", **options).step == "1_1"
    with pytest.raises(rankxform.CheckpointError, match="rank"):
        rankxform.plan(first, a, None, step="1_2", **options)


def test_a_place_that_is_no_folder(job):
    first = job.place("first", range(8))
    with pytest.raises(rankxform.UsageError, match="a folder is expected"):
        rankxform.plan(first, job.a, job.b, fallback=[next((first / "rank_0").iterdir())])
    _, text = warned(rankxform.plan, first, job.a, job.b, fallback=job.tmp / "nowhere")
    assert "no such folder" in text
    planned, text = warned(rankxform.plan, job.tmp / "gone", job.a, job.b, fallback=first)
    assert "no such folder" in text and planned.src_ranks == 8


def test_what_names_no_places(job):
    first = job.place("first", range(8))
    for places in (3, b"first", {"first": 1}):
        with pytest.raises(rankxform.UsageError, match=r"fallback is .*; expected"):
            rankxform.plan(first, job.a, job.b, fallback=places)
    planned = rankxform.plan(first, job.a, job.b, fallback=(place for place in [first]))
    assert planned.places[0].bytes_needed == planned.bytes_needed


def holders_of(job):
    """Return for each tensor and element a set of the ranks that hold it, as bits."""
    found = {}
    for name, (shape, _) in job.params.items():
        marks = np.zeros(shape, object)
        for stage, layouts in enumerate(job.src):
            size = reference.stage_size(job.src)
            for local in range(size) if name in layouts else ():
                index = np.arange(marks.size).reshape(shape)
                held = reference.shard(index, layouts[name], local)
                marks.flat[held.ravel()] = marks.flat[held.ravel()] | 1 << (stage * size + local)
        found[name] = marks
    return found


@pytest.mark.parametrize("first_seed", range(0, LOSSES, 20))
def test_random_losses_of_nodes(first_seed, tmp_path):
    """One or two of four nodes are lost, and storage has an older half of the ranks."""
    outcomes = [
        lose_nodes(seed, tmp_path / str(seed)) for seed in range(first_seed, first_seed + 20)
    ]
    assert {"converted", "refused"} <= {*outcomes}


def lose_nodes(seed, tmp):
    rng = random.Random(seed)
    case = random_case(seed, mindspore_agrees=False, whole=False)
    tmp.mkdir()
    job = Job(tmp, case.src, case.dst, case.params)
    lost = rng.sample(range(4), rng.choice((1, 2)))
    stored = {rank for rank in range(job.ranks) if rng.random() < rng.choice((0.5, 1.0))}
    alive = {rank for rank in range(job.ranks) if rank * 4 // job.ranks not in lost}
    first, storage = job.place("nodes", sorted(alive)), job.place("storage", sorted(stored))
    lacking, only_storage = set(), 0
    for name, marks in holders_of(job).items():
        if not any(name in stage for stage in case.dst):
            continue
        bits = {n: sum(1 << rank for rank in ranks) for n, ranks in (("a", alive), ("s", stored))}
        for element in marks.flat:
            if not element & (bits["a"] | bits["s"]):
                lacking.add(element)
            elif not element & bits["a"]:
                only_storage += reference.ITEM[case.params[name][1]]
    options = {"fallback": (str(storage),), "fsync": False}
    if lacking:
        with pytest.raises(rankxform.RankxformError) as raised:
            rankxform.transform(first, tmp / "dst", job.a, job.b, **options)
        assert not (tmp / "dst").exists(), seed
        gone = {rank for bits in lacking for rank in range(job.ranks) if bits >> rank & 1}
        told = {int(n) for n in re.findall(r"\b\d+\b", str(raised.value))}
        assert told & gone, (seed, str(raised.value), gone)
        return "refused"
    job_done = plan(Request(str(first), None, job.a, job.b, **options), SerialTeam())[1]
    report = job.convert(first, storage)
    assert report.places == job_done.places
    of_storage = report.places[1].bytes_needed if report.places else 0
    assert of_storage == only_storage, (seed, report.places)
    return "converted"
