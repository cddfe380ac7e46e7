"""Nothing outside a destination is changed through it, and no source file under another name."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from contextlib import nullcontext

import pytest

import rankxform
from rankxform.cli.main import main
from rankxform.storage.user_files import merge_stage_files
from rankxform.target.folder import FolderDestination
from rankxform.verbs.clean import clean
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


def steps_of(place):
    """Write two steps of a training, of the place's values, and return their folder."""
    folder = place.tmp / "training"
    for step in (10, 20):
        for rank in range(4):
            path = folder / f"rank_{rank}" / f"net-1_{step}.ckpt"
            path.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(place.shard(rank), path)
    return folder


def follow(place, src, dst, **options):
    return rankxform.follow(src, dst, place.a, place.b, fsync=False, **options)


def all_names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


class TestRemoval:
    """What `clean` and `follow --keep` remove is the conversion's own, and no link leads to it."""

    def test_companions_that_a_manifest_lists_are_those_of_its_form(self, place):
        src, dst = steps_of(place), place.tmp / "followed"
        follow(place, src, dst)
        path = dst / "1_10/rankxform.json"
        record = json.loads(path.read_text())
        precious = place.tmp / "precious"
        record["companions"] = {"../../precious": "x", str(precious): "y", "rank_0": "z"}
        path.write_text(json.dumps(record))
        precious.write_bytes(b"precious")
        follow(place, src, dst, keep=1)
        assert precious.exists() and not (dst / "1_10").exists()

    @pytest.mark.parametrize("name", ["rank_1", ".rankxform"])
    def test_clean_follows_no_link(self, name, place, monkeypatch):
        stop_after(monkeypatch, 5)
        stopped(place)
        outside = place.tmp / "outside"
        (place.dst / name).rename(outside)
        (place.dst / name).symlink_to(outside)
        (outside / "journal-precious.jsonl").write_bytes(b"")
        before = contents(outside)
        with pytest.raises(rankxform.StorageError, match=f"{name}: is a link, and inside a dest"):
            clean(str(place.dst))
        assert contents(outside) == before

    def test_clean_leaves_conversions_behind_links(self, place, monkeypatch):
        stop_after(monkeypatch, 5)
        stopped(place)
        above = place.tmp / "above"
        above.mkdir()
        (above / "sub").symlink_to(place.dst)
        before = contents(place.dst)
        assert clean(str(above)).facts["removed"] == []
        assert contents(place.dst) == before

    def test_a_step_behind_a_link_is_kept(self, place):
        src, dst = steps_of(place), place.tmp / "followed"
        follow(place, src, dst)
        outside = place.tmp / "outside"
        (dst / "1_10/rank_1").rename(outside)
        (dst / "1_10/rank_1").symlink_to(outside)
        before = contents(outside)
        follow(place, src, dst, keep=1)
        assert contents(outside) == before and (dst / "1_10/rankxform.json").exists()


@pytest.mark.parametrize("kind", ["rank folder", "file", "lone file"])
def test_a_source_that_links_into_an_earlier_conversion_is_not_swept_away(kind, place):
    place.transform()
    source = place.tmp / "linked"
    target, file = place.dst / "rank_2", place.final(2)
    if kind == "rank folder":
        source.mkdir()
        (source / "rank_0").symlink_to(target)
    elif kind == "file":
        (source / "rank_0").mkdir(parents=True)
        (source / "rank_0" / file.name).symlink_to(file)
    else:
        source = place.tmp / "one.ckpt"
        source.symlink_to(file)
    before = contents(place.dst)
    with pytest.raises(rankxform.UsageError, match="holds the source|lies in the source"):
        rankxform.transform(
            source, place.dst, "none", "none", overwrite=True, accept=("contradictions",)
        )
    assert contents(place.dst) == before


class TestNothingIsWrittenIntoTheSource:
    """Nor before it is refused: names are listed by what the system is asked to make."""

    @pytest.fixture(autouse=True)
    def created(self, monkeypatch):
        self.made, real_open, real_mkdir = [], os.open, os.mkdir

        def opened(path, flags, *args, **options):
            self.made += [os.fspath(path)] * bool(flags & os.O_CREAT)
            return real_open(path, flags, *args, **options)

        def mkdir(path, *args, **options):
            self.made.append(os.fspath(path))
            return real_mkdir(path, *args, **options)

        monkeypatch.setattr(os, "open", opened)
        monkeypatch.setattr(os, "mkdir", mkdir)

    @pytest.mark.parametrize("name", ["src", "src/new", "src/rank_1"])
    def test_by_a_plan(self, name, place):
        self.made.clear()
        words = [place.src.as_posix(), str(place.tmp / name), *place.strategies]
        assert main(["plan", *words]) == 2
        options = ["--dry-run", "--overwrite"]
        assert main(["transform", *words, *options]) == 2
        assert self.made == []

    @pytest.mark.parametrize("name", ["training", "training/new/er", "training/rank_1"])
    def test_by_follow(self, name, place):
        src = steps_of(place)
        self.made.clear()
        with pytest.raises(rankxform.UsageError, match="lies in the source folder"):
            follow(place, src, place.tmp / name)
        assert self.made == []

    def test_by_the_strategy_of_a_job(self, place):
        (place.src / "strategy").mkdir()
        shutil.copy(place.a, place.src / "strategy")
        (place.tmp / "output").mkdir()
        (place.tmp / "output/strategy").symlink_to(place.src / "strategy")
        before = contents(place.tmp / "src")
        words = ["launch", "--load", str(place.src), *place.strategies, "--overwrite"]
        words += ["--output", str(place.tmp / "output"), "--any-world-size", "--", "true"]
        assert main(words) == 2
        assert contents(place.tmp / "src") == before

    def test_by_a_page_behind_a_linked_rank_folder(self, place):
        outside = place.tmp / "outside"
        (place.src / "rank_3").rename(outside)
        (place.src / "rank_3").symlink_to(outside)
        words = ["plan", str(place.src), *place.strategies, "--page", str(outside / "p.html")]
        assert main(words) == 2 and not (outside / "p.html").exists()


def test_records_behind_a_link_are_not_taken(place):
    """The lock's folder is swept of the lock's files, which others may have there."""
    place.transform()
    outside = place.tmp / "outside"
    outside.mkdir()
    for name in ("lock.guard", ".rankxform-mine"):
        (outside / name).write_bytes(b"precious")
    (place.dst / ".rankxform").symlink_to(outside)
    before = contents(outside)
    words = ["verify", str(place.src), str(place.dst), *place.strategies, "--keep-fingerprints"]
    assert main(words) == 4
    followed = place.tmp / "followed"
    followed.mkdir()
    (followed / ".rankxform").symlink_to(outside)
    with pytest.raises(rankxform.StorageError, match="is a link, and inside a destination none"):
        follow(place, steps_of(place), followed)
    assert contents(outside) == before


@pytest.mark.parametrize("when", ["_create_parts", "fill", "_link", "_rename", "_finish"])
@pytest.mark.parametrize("name", ["rank_1", ".rankxform", ""])
def test_a_folder_that_becomes_a_link_while_a_run_is_at_work(name, when, place, monkeypatch):
    """Nothing changes where the link leads, here to the source; the run fails if it is met again."""
    real, before = getattr(FolderDestination, when), contents(place.tmp / "src")

    def swapped(self, *args, **options):
        folder = place.dst / name
        if folder.exists() and not folder.is_symlink():
            folder.rename(place.tmp / "aside")
        if not folder.is_symlink():
            folder.symlink_to(place.src / "rank_1" if name else place.src)
        return real(self, *args, **options)

    monkeypatch.setattr(FolderDestination, when, swapped)
    is_met = when in ("_create_parts", "fill", "_link") or not name
    is_met = is_met or (name, when) == ("rank_1", "_rename")
    with pytest.raises(rankxform.StorageError) if is_met else nullcontext():
        place.transform(overwrite=True)
    assert contents(place.tmp / "src") == before


def test_a_merged_strategy_replaces_nothing_else(place):
    stages = place.tmp / "stages"
    stages.mkdir()
    shutil.copy(place.a, stages / "ckpt_strategy_rank_0.ckpt")
    before = contents(place.tmp)
    for target in (place.shard(0), stages / "ckpt_strategy_rank_0.ckpt"):
        with pytest.raises(rankxform.RankxformError, match="name another file"):
            merge_stage_files(str(stages), str(target), overwrite=True)
    assert contents(place.tmp) == before
