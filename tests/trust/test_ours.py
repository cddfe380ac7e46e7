"""In a folder that others use too: what a run takes for its own work, and what it leaves alone."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from importlib import import_module

import numpy as np
import pytest

import rankxform
from rankxform.engine.sinks import part_of
from rankxform.publish import folder_records, journal, records
from rankxform.storage import posix as files
from tests import reference
from tests.place import of_another_step
from tests.trust.test_resume import make_place, stop_after, two_copies_each

destination = import_module("rankxform.target.folder")


@pytest.fixture(params=["ckpt", "safetensors"])
def place(tmp_path, request):
    return make_place(tmp_path, request.param)


def stop_publishing(monkeypatch, after):
    """Make a run stop when it has given so many files their names, once."""
    real, left = destination.publish_file, [after]

    def give_name(part, final, *, durable):
        left[0] -= 1
        if left[0] < 0:
            monkeypatch.setattr(destination, "publish_file", real)
            raise rankxform.StoppedError("stopped by a test")
        real(part, final, durable=durable)

    monkeypatch.setattr(destination, "publish_file", give_name)


def stopped(place, **options):
    with pytest.raises(rankxform.StoppedError) as caught:
        place.transform(**options)
    assert caught.value.resumable


def write_files(place, data):
    for rank in range(3):
        place.final(rank).parent.mkdir(parents=True, exist_ok=True)
        place.final(rank).write_bytes(data)


def test_what_was_named_before_the_stop_is_kept(place, monkeypatch):
    stop_publishing(monkeypatch, 2)
    stopped(place)
    assert not place.final(2).exists()
    report = place.transform()
    assert (report.files_kept, report.files_continued, report.bytes_read) == (2, 1, 0)
    assert place.good
    assert sorted(f["id"] for f in place.manifest["files"].values()) == [0, 1, 2]


def test_old_files_are_replaced_whatever_happens_to_their_times(place, monkeypatch):
    write_files(place, b"old")
    stop_publishing(monkeypatch, 1)
    stopped(place, overwrite=True)
    for rank in (1, 2):
        os.utime(place.final(rank))
    with pytest.raises(rankxform.StorageError, match="checkpoint_1.* is already there"):
        place.transform()
    report = place.transform(overwrite=True)
    assert report.files_kept == 1 and place.good


def test_files_that_others_put_there_are_not_taken_for_ours(place, monkeypatch):
    stop_after(monkeypatch, 5)
    stopped(place)
    write_files(place, b"somebody else's")
    with pytest.raises(rankxform.StorageError, match="checkpoint_0.* is already there"):
        place.transform()
    assert place.final(0).read_bytes() == b"somebody else's"
    assert place.transform(overwrite=True).files_continued == 3 and place.good


def test_named_files_that_were_not_synced_die_with_the_machine(place, monkeypatch):
    """Their names, sizes and times may outlast it, with zeros for content."""
    stop_publishing(monkeypatch, 2)
    stopped(place, fsync=False)
    for rank in range(2):
        status = place.final(rank).stat()
        with place.final(rank).open("r+b") as file:
            file.write(bytes(status.st_size))
        os.utime(place.final(rank), ns=(status.st_atime_ns, status.st_mtime_ns))
    monkeypatch.setattr(folder_records, "boot_id", lambda: "another boot")
    report = place.transform()
    assert report.files_kept == 0 and place.good


def test_files_of_another_size_are_not_ours(place, monkeypatch):
    stop_publishing(monkeypatch, 2)
    stopped(place, fsync=False)
    os.truncate(place.final(0), 0)
    with pytest.raises(rankxform.StorageError, match="checkpoint_0.* is already there"):
        place.transform()
    report = place.transform(overwrite=True)
    assert report.files_kept == 1 and place.good


def test_a_source_file_that_only_the_first_ranks_needed_is_remembered(tmp_path):
    params = {"a": ((8, 4), "Float32"), "b": ((8, 4), "Float32")}
    stages = [{name: ([2], [0, -1], 0, 0)} for name in params]
    src = reference.write_checkpoint(tmp_path / "src", stages, params)
    strategy = tmp_path / "s"
    reference.write_stage_files(strategy, stages)
    for ranks in ((0,), (2,)):
        rankxform.transform(src, tmp_path / "dst", strategy, strategy, ranks=ranks)
    known = json.loads((tmp_path / "dst/rankxform.json").read_text())["identity"]["source files"]
    assert sorted(known) == ["0", "1", "2", "3"]
    of_another_step(tmp_path / "src/rank_1/checkpoint_1.ckpt")
    with pytest.raises(rankxform.StorageError, match="of rank 1 was changed"):
        rankxform.transform(src, tmp_path / "dst", strategy, strategy, ranks=(0, 1))


@pytest.mark.filterwarnings("ignore:.*the same bytes:rankxform.RankxformWarning")
def test_what_stands_in_a_file_does_not_depend_on_the_other_files_of_a_run(tmp_path):
    params = {"a": ((8, 4), "Float32"), "b": ((8, 4), "Float32")}
    stages = [{name: ([2], [0, -1], 0, 0)} for name in params]
    src = tmp_path / "src"
    for rank in range(4):
        name = "ab"[rank // 2]
        (src / f"rank_{rank}").mkdir(parents=True)
        entries = {name: ("Float32", np.ones((4, 4), np.float32))}
        path = src / f"rank_{rank}" / f"checkpoint_{rank}.safetensors"
        reference.write_safetensors(path, entries, {"stage": name})
    strategy = tmp_path / "s"
    reference.write_stage_files(strategy, stages)
    options = {"accept": ("equal-slices",)}
    rankxform.transform(src, tmp_path / "all", strategy, strategy, **options)
    for rank in range(4):
        rankxform.transform(src, tmp_path / "one", strategy, strategy, ranks=(rank,), **options)
        name = f"rank_{rank}/checkpoint_{rank}.safetensors"
        data = (tmp_path / "all" / name).read_bytes()
        assert (tmp_path / "one" / name).read_bytes() == data
        assert b'"stage":"' + b"ab"[rank // 2 : rank // 2 + 1] in data


def test_a_part_file_that_would_be_laid_out_otherwise_is_begun_anew(tmp_path, monkeypatch):
    names = [f"w{i}" for i in range(8)]
    params = dict.fromkeys(names, ((12, 4), "Float32"))
    sharded = [dict.fromkeys(names, ([2, 2], [0, -1], 0, 0))]  # ranks 1 and 3 copy 0 and 2
    src = reference.write_checkpoint(tmp_path / "src", sharded, params)
    a = reference.write_strategy(tmp_path / "a.ckpt", sharded)
    last = tmp_path / "src/rank_3/checkpoint_3.ckpt"
    entries = reference.read_any(last)
    last.unlink()
    backwards = {name: entries[name] for name in reversed(names)}
    reference.write_ckpt(
        last,
        {n: (d, np.frombuffer(c, np.float32).reshape(s)) for n, (d, s, c) in backwards.items()},
    )
    last.rename(tmp_path / "away")
    stop_after(monkeypatch, 4)
    with pytest.raises(rankxform.StoppedError):
        rankxform.transform(src, tmp_path / "dst", a, None)
    (tmp_path / "away").rename(last)
    report = rankxform.transform(src, tmp_path / "dst", a, None)
    assert report.files_continued == 0
    assert list(reference.read_any(tmp_path / "dst/rank_0/checkpoint_0.ckpt")) == names[::-1]
    assert rankxform.verify(src, tmp_path / "dst", a, None).differences == ()


def test_nothing_is_kept_of_a_part_that_is_begun_anew(place, monkeypatch):
    """The new file may get the inode of the old one, of which a journal says that it is done."""
    stop_after(monkeypatch, 5)
    stopped(place)
    monkeypatch.setattr(
        destination.FileLayoutCache, "of", otherwise(destination.FileLayoutCache.of)
    )
    seen = []

    def create(path):
        files = (place.dst / ".rankxform").glob("journal-*.jsonl")
        known = records.merge_journals(
            {p.name: p.read_bytes() for p in files}, folder_records.boot_id()
        )
        seen.append((path.name, set(known.names_of_file)))
        raise rankxform.StoppedError("stopped by a test")

    monkeypatch.setattr(destination, "create", create)
    stopped(place)
    assert seen == [(f"checkpoint_0.{place.kind}.part", {1, 2})]


def otherwise(real):
    """Lay the file of rank 0 out in another way, as if another source file had come."""

    def of(self, rank):
        layout = real(self, rank)
        return replace(layout, spans=dict(reversed(layout.spans.items()))) if rank == 0 else layout

    return of


def test_a_part_file_that_has_two_names_is_not_written_to(tmp_path, monkeypatch):
    folder, a, b = two_copies_each(tmp_path)
    rankxform.transform(folder, tmp_path / "whole", a, b, crc=True)
    stop_publishing(monkeypatch, 1)
    with pytest.raises(rankxform.StoppedError):
        rankxform.transform(folder, tmp_path / "d", a, b, crc=True, link="hard")
    seen = []
    real = files.os.pwritev

    def pwritev(fd, parts, offset):
        seen.append(os.fstat(fd).st_nlink)
        return real(fd, parts, offset)

    monkeypatch.setattr(files.os, "pwritev", pwritev)
    rankxform.transform(folder, tmp_path / "d", a, b, crc=True, link="hard")
    assert set(seen) == {1}
    for rank in range(4):
        name = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_stop_while_files_are_synced_loses_no_fingerprint(place, monkeypatch):
    real, left = journal.sync, [3]

    def sync(path):
        real(path)
        left[0] -= 1
        if not left[0]:
            raise rankxform.StoppedError("stopped by a test")

    monkeypatch.setattr(journal, "sync", sync)
    stopped(place, verify=True)
    report = place.transform(verify=True)
    assert report.files_continued == 3 and report.bytes_read == 0
    assert rankxform.verify(place.dst).differences == ()


def test_after_a_sync_that_failed_nothing_more_is_believed(place, monkeypatch):
    real, left = journal.sync, [3]

    def sync(path):
        left[0] -= 1
        if not left[0]:
            raise rankxform.StorageError(f"{path}: cannot sync: Input/output error")
        real(path)

    monkeypatch.setattr(journal, "sync", sync)
    with pytest.raises(rankxform.StorageError, match="Input/output"):
        place.transform()
    assert left[0] == 0, "it was not tried again"
    report = place.transform()
    assert report.files_continued == 0 and place.good


def test_a_refused_run_leaves_the_manifest(place, monkeypatch):
    place.transform()
    before = place.manifest
    status = os.statvfs(place.tmp)
    full = type("Full", (), {"f_bavail": 0, "f_frsize": status.f_frsize})
    monkeypatch.setattr(files.os, "statvfs", lambda path: full)
    with pytest.raises(rankxform.StorageError, match="0.0 MB are free") as caught:
        place.transform(overwrite=True)
    assert not caught.value.resumable
    assert place.manifest == before
    assert not list(place.dst.rglob("*.part")) and not (place.dst / ".rankxform").exists()


def test_some_ranks_made_anew_leave_the_others_in_the_manifest(place):
    place.transform()
    inode = place.final(0).stat().st_ino
    place.transform(ranks=(0,), overwrite=True)
    assert place.final(0).stat().st_ino != inode
    assert len(place.manifest["files"]) == 3
    assert place.transform().files_kept == 3


def test_a_stopped_run_waits_while_other_ranks_are_made(place, monkeypatch):
    stop_after(monkeypatch, 5)
    stopped(place, ranks=(0, 1))
    assert place.transform(ranks=(2,)).files_continued == 0
    assert list(place.manifest["files"]) == [f"rank_2/checkpoint_2.{place.kind}"]
    assert part_of(place.final(1)).exists()
    report = place.transform()
    assert (report.files_kept, report.files_continued) == (1, 2) and place.good
    assert not (place.dst / ".rankxform").exists() and len(place.manifest["files"]) == 3


def test_files_named_before_a_stop_come_into_the_next_manifest(place, monkeypatch):
    stop_publishing(monkeypatch, 1)
    stopped(place, ranks=(0, 1))
    place.transform(ranks=(2,))
    assert [f["id"] for f in place.manifest["files"].values()] == [0, 2]
    assert (place.dst / ".rankxform").exists(), "rank 1 is still to come"
    assert place.transform(ranks=(1,)).files_continued == 1
    assert place.good and not (place.dst / ".rankxform").exists()


@pytest.mark.parametrize("error", [rankxform.CheckpointError("was changed"), KeyError("a bug")])
def test_a_failure_on_the_way_keeps_what_was_done_before(place, monkeypatch, error):
    stop_after(monkeypatch, 5)
    stopped(place)
    stop_after(monkeypatch, 2, error)
    with pytest.raises(type(error)):
        place.transform()
    report = place.transform()
    assert report.files_continued == 3 and place.good


def test_a_folder_that_was_there_stays(place, monkeypatch):
    place.dst.mkdir()
    stop_after(monkeypatch, 5, rankxform.CheckpointError("was changed"))
    with pytest.raises(rankxform.CheckpointError):
        place.transform()
    assert place.dst.is_dir()
    assert not [p for p in place.dst.rglob("*") if p.is_file()]


def test_a_run_that_did_not_get_the_folder_promises_nothing(place, monkeypatch):
    write_files(place, b"old")
    with pytest.raises(rankxform.StorageError, match="is already there") as caught:
        place.transform()
    assert not caught.value.resumable
    assert not (place.dst / ".rankxform").exists()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda record: record.pop("identity"), "lacks 'identity'"),
        (lambda record: record.update(seed="x"), "lacks 'seed'"),
        (lambda record: record["identity"].pop("source files"), "lacks 'source files'"),
        (lambda record: record["files"].update(a=3), "'a' is no file of this folder"),
        (
            lambda record: record["files"].update({"../a": {"id": 0, "size": 1, "modified": 1}}),
            "'../a' is no file",
        ),
        (lambda record: next(iter(record["files"].values())).pop("id"), "lacks 'id'"),
    ],
)
@pytest.mark.parametrize("which", ["rankxform.json", ".rankxform/job.json"])
def test_damaged_records_are_one_message(tmp_path, monkeypatch, which, damage, words):
    place = make_place(tmp_path)
    if which.startswith("."):
        stop_after(monkeypatch, 5)
        stopped(place)
    else:
        place.transform()
    record = json.loads((place.dst / which).read_text())
    damage(record)
    (place.dst / which).write_text(json.dumps(record))
    before = {p for p in place.dst.rglob("*") if p.is_file()}
    with pytest.raises(rankxform.StorageError, match=words):
        place.transform()
    assert {p for p in place.dst.rglob("*") if p.is_file()} == before
    if not which.startswith("."):
        with pytest.raises(rankxform.StorageError, match=words):
            rankxform.verify(place.dst)


@pytest.mark.sampled
@pytest.mark.parametrize(
    "line", [b"[]", b"3", b'{"done":[[["x"],["w1"]]],"sums":{}}', b'{"done":3,"sums":{}}', b"{}"]
)
def test_a_journal_counts_up_to_what_makes_no_sense(tmp_path, monkeypatch, line):
    place = make_place(tmp_path)
    monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)
    stop_after(monkeypatch, 9)
    stopped(place)
    (written,) = (place.dst / ".rankxform").glob("journal-*")
    lines = written.read_bytes().splitlines(keepends=True)
    written.write_bytes(b"".join([*lines[:6], line + b"\n", *lines[6:]]))
    report = place.transform()
    assert place.good and report.bytes_read == 7 * 48 * 32 * 4
    stop_after(monkeypatch, 9)
    shutil.rmtree(place.dst)
    stopped(place)
    (written,) = (place.dst / ".rankxform").glob("journal-*")
    written.write_bytes(line + b"\n")
    assert place.transform().files_continued == 0 and place.good


def test_another_conversion_removes_what_the_first_made_and_nobody_changed(place):
    place.transform()
    place.final(1).write_bytes(b"changed by somebody")
    with pytest.warns(rankxform.RankxformWarning, match="rank_1.*lies beside"):
        rankxform.transform(place.src, place.dst, place.a, None, overwrite=True)
    assert sorted(p.name for p in place.dst.glob("rank_*")) == ["rank_0", "rank_1"]
    assert place.final(1).read_bytes() == b"changed by somebody"
    assert [f["id"] for f in place.manifest["files"].values()] == [0]
