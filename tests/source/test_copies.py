"""A source in several places: what survivors have is read there, and nothing of it in storage.

The slow reference marks every element of every tensor with the ranks that hold it.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import subprocess
import warnings

import numpy as np
import pytest

import rankxform
from rankxform.request import Request
from rankxform.source import copies
from rankxform.transport import SerialTeam
from rankxform.verbs.plan import plan
from tests import reference, reference_forms
from tests.cases import random_case
from tests.forked import run_forked

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


def test_inspect_looks_at_all_places(job):
    first, second = job.place("first", range(4)), job.place("second", range(4, 8))
    by_strategy = "--src-strategy", job.a
    for words in (
        ("--replicas", *by_strategy),
        ("--page", "p.html", *by_strategy),
        ("--check", "--full", *by_strategy),
    ):
        done = run_forked(["inspect", first, *words, "--fallback", second], 1, job.tmp)
        assert done.code == 0 and "8 files" in done.stdout
    done = run_forked(["inspect", first, "--fallback", second], 1, job.tmp)
    assert done.code == 2 and "--fallback is for --check" in done.stderr


def test_a_copy_that_a_crash_left_is_dropped(job):
    first, storage = job.place("first", range(8)), job.place("storage", range(8))
    for rank, nbytes in ((1, 100), (5, 0)):
        os.truncate(first / f"rank_{rank}" / f"checkpoint_{rank}.{KIND}", nbytes)
    report, text = warned(job.convert, first, storage)
    assert text.count("takes its place") == 2 and str(storage / "rank_1") in text
    assert {*report.places[1].ranks_read} <= {1, 5} and report.places[1].bytes_needed
    with pytest.raises(rankxform.CheckpointError, match=r"rank_1/.*cut off"):
        rankxform.plan(first, job.a, job.b)


def test_a_copy_with_a_damaged_name_is_told_by_that_name(job):
    """It was "whole", and incomplete by the message before."""
    first, storage = job.place("first", range(8)), job.place("storage", range(8))
    path = first / "rank_1" / f"checkpoint_1.{KIND}"
    name = min((n for n in job.params if len(n) > 1), default="w")
    path.write_bytes(path.read_bytes().replace(name.encode(), name[:-1].encode() + b"~", 1))
    with pytest.raises(rankxform.CheckpointError, match="in its stead") as refused:
        job.convert(first, storage)
    assert f"{name[:-1]}~" in str(refused.value) and f"mv {path}" in str(refused.value)


def test_a_copy_that_was_cut_off_between_two_tensors_is_told_and_can_be_moved_away(job):
    """The advice led in a circle: "is incomplete", then "is whole, as another place's copy is"."""
    for name in ("near", "storage"):
        job.place(name, range(job.ranks))
    for rank in (3, 7):  # which hold the same
        (torn,) = (job.tmp / "near" / f"rank_{rank}").iterdir()
        entries = reference.read_safetensors(torn)
        _, shape, data = entries["w"]
        torn.unlink()
        words = np.frombuffer(data, np.float32).reshape(shape)
        reference.write_safetensors(torn, {"w": ("Float32", words)})
    places = job.tmp / "near", job.tmp / "dst", job.a, job.b
    with pytest.raises(rankxform.CheckpointError, match="is incomplete") as raised:
        rankxform.transform(*places)
    assert raised.value.tries[0] == "copy the file again"
    options = {"fallback": (str(job.tmp / "storage"),)}
    for _ in range(2):
        with pytest.raises(rankxform.CheckpointError, match="holds 1 tensors, and .* 2") as raised:
            rankxform.transform(*places, **options)
        command, _, _ = raised.value.tries[0].partition(" if it")
        subprocess.run(command, shell=True, check=True)
    rankxform.transform(*places, **options)
    assert reference.wrong_slices(job.tmp / "dst", DST, PARAMS, KIND) == []


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


@pytest.mark.sampled
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


def test_ranks_of_two_steps_are_found_as_in_one_folder(job):
    """Storage has the ranks of another step under the same names."""
    first = job.place("first", range(4))
    other = {name: lambda n, s, d: reference.full_tensor(n + "other", s, d) for name in ("w", "v")}
    reference.write_checkpoint(
        job.tmp / "storage", SRC, PARAMS, None, KIND, make=lambda n, s, d: other[n](n, s, d)
    )
    for rank in range(4):
        shutil.rmtree(job.tmp / "storage" / f"rank_{rank}")
    with pytest.raises(rankxform.CheckpointError, match="different bytes"):
        rankxform.plan(first, job.a, job.b, fallback=job.tmp / "storage")


def test_values_of_ranks_own_come_from_their_ranks(tmp_path):
    """Running statistics differ between ranks; storage has those of the lost ones."""
    params = {"w": ((8, 8), "Float32"), "moving_mean": ((4,), "Float32")}
    src = [{"w": ([4], [0, -1], 0, 0)}]
    made = tmp_path / "all"
    for rank in range(4):
        part = reference.shard(reference.full_tensor("w", (8, 8), "Float32"), src[0]["w"], rank)
        mean = np.full(4, rank + 0.5, "<f4").view("<u4")
        (made / f"rank_{rank}").mkdir(parents=True)
        reference.write_safetensors(
            made / f"rank_{rank}" / "a.safetensors",
            {"w": ("Float32", part), "moving_mean": ("Float32", mean)},
        )
    first = tmp_path / "first"
    for rank in range(2):
        shutil.copytree(made / f"rank_{rank}", first / f"rank_{rank}")
    a = reference.write_stage_files(tmp_path / "a", src)
    options = {"unlisted": "take-one", "fsync": False}
    rankxform.transform(made, tmp_path / "plain", a, a, **options)
    rankxform.transform(first, tmp_path / "dst", a, a, fallback=made, **options)
    for rank in range(4):
        name = f"rank_{rank}/checkpoint_{rank}.safetensors"
        assert (tmp_path / "dst" / name).read_bytes() == (tmp_path / "plain" / name).read_bytes()
    assert params["w"][0] == (8, 8)


def test_a_place_is_never_written(job):
    first, storage = job.place("first", range(8)), job.place("storage", range(8))
    before = {path: path.read_bytes() for path in storage.rglob("*.*")}
    for dst in (storage, storage / "out", first / "rank_0"):
        with pytest.raises(rankxform.UsageError, match="never written"):
            rankxform.transform(first, dst, job.a, job.b, fallback=storage, overwrite=True)
    shutil.rmtree(first)
    with pytest.raises(rankxform.UsageError, match="never written"):
        warned(rankxform.transform, first, first, job.a, job.b, fallback=storage)
    assert {path: path.read_bytes() for path in storage.rglob("*.*")} == before


def test_a_step_that_only_a_later_place_has_is_not_taken_unasked(tmp_path):
    for name, step in (("first", 1), ("storage", 2)):
        reference.write_checkpoint(tmp_path / name, SRC, PARAMS, None, KIND, name=f"net-1_{step}")
    a = reference.write_stage_files(tmp_path / "a", SRC)
    first, options = tmp_path / "first", {"fallback": tmp_path / "storage"}
    with pytest.raises(rankxform.CheckpointError, match="has no file of the step"):
        rankxform.plan(first, a, None, **options)
    assert rankxform.plan(first, a, None, step="1_1", **options).places[1].bytes_needed == 0
    assert rankxform.plan(first, a, None, step="1_2", **options).places[0].bytes_needed == 0


def test_the_first_place_may_have_no_file_that_is_needed(tmp_path):
    """Its files are of another pipeline stage than the ranks that are made."""
    layout = ([2], [0, -1], 0, 0)
    stages, params = [{"w": layout}, {"v": layout}], dict.fromkeys("wv", ((8, 2), "Float32"))
    reference.write_checkpoint(tmp_path / "all", stages, params, None, KIND, name="net-1_5")
    a = reference.write_stage_files(tmp_path / "a", stages)
    shutil.copytree(tmp_path / "all", tmp_path / "first", ignore=lambda *_: ["rank_2", "rank_3"])
    for options in ({}, {"ranks": [2, 3]}):
        plan = rankxform.plan(tmp_path / "first", a, a, fallback=tmp_path / "all", **options)
        assert plan.places[1].bytes_needed == 64, options
    loaded = rankxform.load(
        tmp_path / "first", a, a, rank=2, fallback=tmp_path / "all", progress=False
    )
    assert (loaded["v"] == reference.full_tensor("v", (8, 2), "Float32").view("<f4")[:4]).all()


def test_the_first_place_may_have_the_index_alone(tmp_path):
    tensors = {name: ("Float32", np.arange(8, dtype="<u4").reshape(4, 2)) for name in "ab"}
    reference_forms.write_huggingface(tmp_path / "all", tensors, files=2)
    (tmp_path / "first").mkdir()
    shutil.copy(tmp_path / "all/model.safetensors.index.json", tmp_path / "first")
    found = rankxform.load(tmp_path / "first", fallback=tmp_path / "all", progress=False)
    assert {*found} == {*"ab"}


def test_documents_of_two_places_are_the_same(job):
    """What describes a checkpoint is compared, and its files are found in either place."""
    first, storage = job.tmp / "first", job.tmp / "storage"
    options = {"dst_form": "checkpoint2", "fsync": False, "iteration": 5}
    rankxform.transform(job.tmp / "all", first, job.a, job.a, **options)
    shutil.copytree(first, storage)
    files = sorted(first.rglob("*.safetensors"))
    for path in files[1::2]:
        path.unlink()
    report = rankxform.transform(
        first, job.tmp / "dst", None, job.b, dst_form="ranks", fallback=storage, format=KIND
    )
    assert reference.wrong_slices(job.tmp / "dst", DST, PARAMS, KIND) == []
    assert all(use.bytes_needed for use in report.places)
    assert {rank for use in report.places for rank in use.ranks_read} <= {*range(8)}
    document = next(storage.rglob("metadata.json"))
    document.write_text(document.read_text().replace("{", "{ ", 1))
    with pytest.raises(rankxform.CheckpointError, match="not the same in all places"):
        rankxform.plan(first, None, job.b, fallback=storage)


def test_a_copy_with_parts_that_were_never_written_is_dropped(tmp_path):
    params = {"w": ((1024, 2048), "Float32")}
    src = [{"w": ([2], [0, -1], 0, 0)}]
    for name in ("first", "storage"):
        reference.write_checkpoint(tmp_path / name, src, params, None, KIND)
    path = tmp_path / "first" / "rank_1" / f"checkpoint_1.{KIND}"
    data = path.read_bytes()
    with path.open("wb") as file:
        file.write(data[: 1 << 20])
        file.seek(3 << 20)
        file.write(data[3 << 20 :])
    a = reference.write_stage_files(tmp_path / "a", src)
    options = {"fallback": tmp_path / "storage", "fsync": False}
    report, text = warned(rankxform.transform, tmp_path / "first", tmp_path / "dst", a, **options)
    assert "bytes were never written" in text and report.places[1].ranks_read == (1,)
    assert reference.wrong_slices(tmp_path / "dst", None, params, KIND) == []


def test_a_file_that_a_disk_refuses_is_read_elsewhere(job, monkeypatch):
    first, storage = job.place("first", range(8)), job.place("storage", range(8))
    real = copies.Indexer.index

    def index(self, path, *others):
        if path.startswith(f"{first}/rank_5/"):
            raise rankxform.StorageError("cannot open: Input/output error", where=path)
        return real(self, path, *others)

    monkeypatch.setattr(copies.Indexer, "index", index)
    report, text = warned(job.convert, first, storage)
    assert "Input/output error" in text and report.places[0].bytes_needed
    with pytest.raises(rankxform.StorageError):
        rankxform.plan(first, job.a, job.b)
    shutil.rmtree(first / "rank_5")
    shutil.rmtree(first / "rank_1")
    with pytest.raises(rankxform.CheckpointError, match=r"nowhere, where nothing is"):
        rankxform.plan(first, job.a, job.b, fallback=job.tmp / "nowhere")


def test_a_warning_names_the_line_that_asked(job):
    first = job.place("first", range(8))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rankxform.plan(first, job.a, job.b, fallback=job.tmp / "nowhere")
    assert {warning.filename for warning in caught} == {__file__}
