"""Nothing outside a destination is changed through it, and no source file under another name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

import rankxform
from tests.mpi_launch import environment
from tests.trust.test_ours import stopped
from tests.trust.test_resume import make_place, stop_after


@pytest.fixture
def place(tmp_path):
    return make_place(tmp_path)


def contents(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


@pytest.mark.parametrize("mount", ["src dst", "src/rank_1 dst/rank_2", "src dst/below"])
def test_a_source_is_the_same_through_a_bind_mount(mount, place):
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("mounting needs root")
    before = contents(place.tmp / "src")
    for folder in mount.split():
        (place.tmp / folder).mkdir(parents=True, exist_ok=True)
    dst = "dst/below/deeper" if "below" in mount else "dst"
    command = [sys.executable, "-m", "rankxform", "transform", "src", dst, "--overwrite"]
    command += place.strategies
    done = subprocess.run(
        ["unshare", "-m", "sh", "-c", f'mount --bind {mount} && exec "$@"', "sh", *command],
        cwd=place.tmp, env=environment(), capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "lies in the source folder" in done.stderr
    assert contents(place.tmp / "src") == before


def test_a_destination_may_lie_beside_a_complete_file(place):
    place.transform()
    rankxform.transform(place.dst, place.tmp / "one", place.b, None)
    complete = place.tmp / "complete.ckpt"
    (place.tmp / "one/rank_0/checkpoint_0.ckpt").rename(complete)
    rankxform.transform(complete, place.tmp / "again", None, place.a)
    assert (place.tmp / "again/rank_3/checkpoint_3.ckpt").exists()


def test_a_source_among_the_files_of_an_earlier_conversion_is_not_swept_away(place):
    """The manifest's other files would be removed, as of ranks that this conversion has not."""
    place.transform()
    before = contents(place.dst)
    with pytest.raises(rankxform.UsageError, match="holds the source in its rank folders"):
        rankxform.transform(place.final(2), place.dst, "none", overwrite=True, prefix="x")
    assert contents(place.dst) == before


@pytest.mark.parametrize("kind", [os.link, os.symlink])
def test_a_source_file_is_not_replaced_under_another_name(kind, place):
    before = contents(place.tmp / "src")
    place.final(1).parent.mkdir(parents=True)
    kind(f"{place.src}/rank_3/checkpoint_3.ckpt", place.final(1))
    with pytest.raises(rankxform.UsageError, match="is the source file .*rank_3/checkpoint_3.ckpt"):
        place.transform(overwrite=True)
    assert contents(place.tmp / "src") == before and place.final(1).exists()


@pytest.mark.parametrize("name", [".rankxform", "rank_1"])
@pytest.mark.parametrize("when", ["before", "stopped", "done"])
def test_no_link_inside_a_destination_is_followed(when, name, place, monkeypatch):
    """What lies behind the link has the names that a run would remove or replace."""
    if when == "stopped":
        stop_after(monkeypatch, 5)
        stopped(place)
    elif when == "done":
        place.transform()
    outside, inside = place.tmp / "outside", place.dst / name
    if inside.exists():
        inside.rename(outside)
    outside.mkdir(exist_ok=True)
    for file in ("lock", "lock.guard", "job.json", "journal-x.jsonl", "checkpoint_1.ckpt.part"):
        (outside / file).write_bytes(b"somebody else's")
    place.dst.mkdir(exist_ok=True)
    inside.symlink_to(outside)
    before = contents(outside)
    for overwrite in (False, True):
        with pytest.raises(rankxform.StorageError, match=f"{name}: is a link, and inside a dest"):
            place.transform(overwrite=overwrite)
    assert contents(outside) == before


@pytest.mark.parametrize("record", ["rankxform.json", ".rankxform/job.json"])
def test_a_record_that_names_a_file_through_a_link(record, place, monkeypatch):
    """Of ranks that this run does not make: an overwriting run removes what the old one left."""
    if record == "rankxform.json":
        place.transform()
    else:
        stop_after(monkeypatch, 5)
        stopped(place)
    shutil.rmtree(place.dst / "rank_2")
    outside = place.tmp / "outside"
    outside.mkdir()
    victim = outside / "checkpoint_2.ckpt"
    for path in (victim, victim.with_name(victim.name + ".part")):
        path.write_bytes(b"precious")
    (place.dst / "rank_2").symlink_to(outside)
    path = place.dst / record
    facts = json.loads(path.read_text())
    facts["files"]["rank_2/checkpoint_2.ckpt"] = {
        "id": 2, "size": 8, "modified": victim.stat().st_mtime_ns,
    }  # fmt: skip
    path.write_text(json.dumps(facts))
    with pytest.raises(rankxform.StorageError, match="rank_2: is a link"):
        rankxform.transform(place.src, place.dst, place.a, None, overwrite=True)
    assert set(contents(outside).values()) == {b"precious"} and len(contents(outside)) == 2


@pytest.mark.parametrize(
    "name", ["", ".", "rank_0", "rank_0/", "rank_0/..", "rank_0/a/b", "x.ckpt"]
)
def test_a_record_that_names_no_file_of_a_rank(name, place, monkeypatch):
    stop_after(monkeypatch, 5)
    stopped(place)
    path = place.dst / ".rankxform/job.json"
    facts = json.loads(path.read_text())
    facts["files"][name] = {"id": 0}
    path.write_text(json.dumps(facts))
    (place.tmp / "dst.part").write_bytes(b"precious")  # the part file of a file called "."
    with pytest.raises(rankxform.StorageError, match="is no file of rank 0's folder"):
        rankxform.transform(place.src, place.dst, place.a, None, overwrite=True)
    assert (place.tmp / "dst.part").exists()


@pytest.mark.parametrize("name", ["rankxform.json", ".rankxform/journal-x.jsonl"])
def test_records_that_are_pipes_are_not_waited_for(name, place):
    (place.dst / name).parent.mkdir(parents=True)
    os.mkfifo(place.dst / name)
    with pytest.raises(
        rankxform.StorageError, match="cannot read, as a file of its own: is no reg"
    ):
        place.transform()


def test_records_that_are_links_are_not_read(place):
    place.transform()
    path = place.dst / "rankxform.json"
    path.rename(place.tmp / "elsewhere.json")
    path.symlink_to(place.tmp / "elsewhere.json")
    with pytest.raises(rankxform.StorageError, match=r"rankxform\.json: cannot read, as a file of"):
        place.transform()
