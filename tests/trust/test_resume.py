"""Runs that were stopped are continued, whole ones are kept, and others are refused."""

from __future__ import annotations

import os
from importlib import import_module

import pytest

import rankxform
from rankxform.engine import pipeline as engine
from rankxform.engine.sinks import part_of
from rankxform.publish import folder_records, journal
from rankxform.request import Request
from rankxform.transport import SerialTeam
from rankxform.verbs.transform import transform
from tests import reference
from tests.place import Place, of_another_step

destination = import_module("rankxform.target.folder")

NAMES = [f"w{i}" for i in range(12)]
PARAMS = dict.fromkeys(NAMES, ((48, 32), "Float32"))
SRC = [dict.fromkeys(NAMES, ([4], [0, -1], 0, 0))]
DST = [dict.fromkeys(NAMES, ([3], [0, -1], 0, 0))]


def make_place(tmp, kind="ckpt"):
    """4 ranks to 3, by rows, of twelve parameters."""
    return Place(tmp, SRC, DST, PARAMS, kind)


@pytest.fixture(params=["ckpt", "safetensors"])
def place(tmp_path, request):
    return make_place(tmp_path, request.param)


def stop_after(monkeypatch, transfers, error=None):
    """Make the engine fail when it has carried out so many moves, once."""
    real, left = engine.SourceReader.read, [transfers]
    error = error or rankxform.StoppedError("stopped by a test")

    def read(self, rank, name, start, room, sparse=False):
        if name not in seen:
            seen.append(name)
            left[0] -= 1
        if left[0] < 0:
            monkeypatch.setattr(engine.SourceReader, "read", real)
            raise error
        real(self, rank, name, start, room, sparse)

    seen = []
    monkeypatch.setattr(engine.SourceReader, "read", read)


def test_a_stopped_run_is_continued_where_it_was(place, monkeypatch):
    whole = place.transform()
    for rank in range(3):
        place.final(rank).unlink()
    (place.dst / "rankxform.json").unlink()
    stop_after(monkeypatch, 5)
    with pytest.raises(rankxform.StoppedError) as caught:
        place.transform()
    assert caught.value.resumable
    assert not any(place.final(rank).exists() for rank in range(3))
    assert not (place.dst / "rankxform.json").exists()
    report = place.transform()
    assert place.good
    assert report.files_continued == 3
    assert report.bytes_read == whole.bytes_read * 7 // 12, "five of twelve parameters were there"
    assert not (place.dst / ".rankxform").exists()
    assert len(place.manifest["files"]) == 3


def test_any_failure_of_storage_can_be_continued(place, monkeypatch):
    stop_after(monkeypatch, 7, rankxform.StorageError("the device is gone"))
    with pytest.raises(rankxform.StorageError, match="the device is gone"):
        place.transform()
    report = place.transform()
    assert place.good and report.files_continued == 3


def test_a_broken_source_leaves_nothing(place, monkeypatch):
    stop_after(monkeypatch, 7, rankxform.CheckpointError("was changed"))
    with pytest.raises(rankxform.CheckpointError) as caught:
        place.transform()
    assert not caught.value.resumable
    assert not place.dst.exists() or not [p for p in place.dst.rglob("*") if p.is_file()]


def test_what_is_complete_is_kept(place):
    first = place.transform()
    before = {p: p.stat() for p in place.dst.rglob("*") if "rank_" in str(p)}
    again = place.transform()
    assert (again.files_kept, again.bytes_written, again.bytes_read) == (3, 0, 0)
    assert first.files_kept == 0
    assert {p: p.stat() for p in place.dst.rglob("*") if "rank_" in str(p)} == before
    place.final(1).unlink()
    again = place.transform()
    assert again.files_kept == 2 and 0 < again.bytes_written < first.bytes_written
    assert place.good and len(place.manifest["files"]) == 3


def test_ranks_can_be_made_in_several_runs(place):
    place.transform(ranks=(0,))
    assert list(place.manifest["files"]) == [f"rank_0/checkpoint_0.{place.kind}"]
    report = place.transform(ranks=(1, 2))
    assert report.files_kept == 0
    assert place.good and len(place.manifest["files"]) == 3
    assert place.transform().files_kept == 3


def test_a_changed_file_is_not_taken_for_ours(place):
    place.transform()
    data = place.final(1).read_bytes()
    place.final(1).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(rankxform.StorageError, match="checkpoint_1.*was changed after it was"):
        place.transform()
    place.transform(overwrite=True)
    assert place.final(1).read_bytes() == data


def test_changed_inputs_and_options_are_named(place, monkeypatch):
    stop_after(monkeypatch, 5)
    with pytest.raises(rankxform.StoppedError):
        place.transform()
    for changes, words in (
        (
            {"exclude": ("w3",)},
            "a run that was stopped with other inputs or options: --exclude was",
        ),
        ({"dst_strategy": place.a}, "the destination strategy is not the same"),
    ):
        given = {"src_strategy": place.a, "dst_strategy": place.b, **changes}
        with pytest.raises(rankxform.StorageError, match=words) as caught:
            rankxform.transform(place.src, place.dst, **given)
        assert "--overwrite" in str(caught.value)
    of_another_step(place.tmp / "src" / "rank_2" / f"checkpoint_2.{place.kind}")
    with pytest.raises(rankxform.StorageError, match=r"checkpoint_2\.\w+ of rank 2 was changed"):
        place.transform()
    report = place.transform(overwrite=True)
    assert report.files_continued == 0 and place.verify()


def test_beginning_anew_leaves_nothing_of_the_old(place, monkeypatch):
    stop_after(monkeypatch, 5)
    with pytest.raises(rankxform.StoppedError):
        place.transform()
    assert part_of(place.final(2)).exists()
    rankxform.transform(place.src, place.dst, place.a, None, overwrite=True)
    assert not list(place.dst.rglob("*.part"))
    assert list(place.manifest["files"]) == [f"rank_0/checkpoint_0.{place.kind}"]


def test_an_overwriting_run_that_was_stopped_goes_on(place, monkeypatch):
    place.transform()
    before = place.final(0).stat().st_ino
    stop_after(monkeypatch, 5)
    with pytest.raises(rankxform.StoppedError):
        place.transform(overwrite=True)
    assert place.final(0).stat().st_ino == before, "the old file is there until the new is whole"
    assert len(place.manifest["files"]) == 3, "and the manifest knows them"
    report = place.transform(overwrite=True)
    assert (report.files_kept, report.files_continued) == (0, 3) and place.good
    assert place.final(0).stat().st_ino != before


def test_a_part_file_that_is_another_is_not_continued(place, monkeypatch):
    stop_after(monkeypatch, 5)
    with pytest.raises(rankxform.StoppedError):
        place.transform()
    part = part_of(place.final(1))
    data = bytearray(part.read_bytes())
    other = part.with_name("other")
    other.write_bytes(bytes(len(data)))
    os.replace(other, part)
    report = place.transform()
    assert report.files_continued == 2 and place.good


def test_a_journal_sharded_short_costs_only_its_last_entry(place, monkeypatch):
    monkeypatch.setattr(journal, "JOURNAL_SECONDS", 0)
    stop_after(monkeypatch, 9)
    with pytest.raises(rankxform.StoppedError):
        place.transform()
    (written,) = (place.dst / ".rankxform").glob("journal-*")
    lines = written.read_bytes().splitlines(keepends=True)
    assert len(lines) == 10
    written.write_bytes(b"".join(lines[:6]) + lines[6][:-4])
    report = place.transform()
    assert place.good
    assert report.bytes_read == 7 * report.bytes_needed // 7 == 7 * 48 * 32 * 4


@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.parametrize("when", ["written", "noted"])
@pytest.mark.parametrize("change", [-1, 1])
def test_no_part_of_another_size_gets_a_final_name(change, when, verify, place, monkeypatch):
    """Whatever changes it, at the last moment too; the next run makes it anew."""
    where, name = {
        "written": (destination, "write_parts"),
        "noted": (destination.FolderDestination, "_note_complete"),
    }[when]
    real, part = getattr(where, name), part_of(place.final(1))

    def changed(*arguments, **options):
        done = real(*arguments, **options)
        os.truncate(part, part.stat().st_size + change)
        return done

    monkeypatch.setattr(where, name, changed)
    with pytest.raises(rankxform.StorageError, match="checkpoint_1.*something else has changed"):
        place.transform(verify=verify)
    assert not place.final(1).exists() and not (place.dst / "rankxform.json").exists()
    monkeypatch.setattr(where, name, real)
    place.transform(verify=verify)
    assert place.good


def test_what_fails_before_the_first_byte_leaves_nothing(place):
    def fail(conversion, nbytes):
        assert nbytes > 0
        raise ValueError("of the caller's own")

    request = Request(str(place.src), str(place.dst), str(place.a), str(place.b), fsync=False)
    with pytest.raises(ValueError, match="of the caller's own"):
        transform(request, SerialTeam(), fail)
    assert not place.dst.exists()


def test_a_part_that_another_file_has_replaced_gets_no_final_name(place, monkeypatch):
    real, part = destination.write_parts, part_of(place.final(1))

    def replaced(*arguments, **options):
        done = real(*arguments, **options)
        data = part.read_bytes()
        part.with_name("other").write_bytes(bytes(len(data)))
        part.with_name("other").rename(part)
        return done

    monkeypatch.setattr(destination, "write_parts", replaced)
    with pytest.raises(rankxform.StorageError, match="something else has changed or replaced"):
        place.transform()
    monkeypatch.setattr(destination, "write_parts", real)
    assert place.transform().files_continued == 2 and place.good


def test_a_part_that_has_become_shorter_is_begun_anew(place, monkeypatch):
    stop_after(monkeypatch, 7)
    with pytest.raises(rankxform.StoppedError):
        place.transform()
    part = part_of(place.final(1))
    os.truncate(part, part.stat().st_size - 1)
    assert place.transform().files_continued == 2 and place.good


@pytest.mark.parametrize("verify", [False, True])
def test_a_message_of_a_journal_that_changed_costs_its_line(verify, place, monkeypatch):
    """A name of a slice that is not there would leave a hole in the file."""
    stop_after(monkeypatch, 5)
    with pytest.raises(rankxform.StoppedError):
        place.transform(verify=verify)
    (path,) = (place.dst / ".rankxform").glob("journal-*.jsonl")
    data = path.read_bytes()
    assert b'"w1"' in data and b'"w9"' not in data
    path.write_bytes(data.replace(b'"w1"', b'"w9"', 1))
    place.transform(verify=verify)
    assert place.good


def test_a_journal_that_was_not_synced_dies_with_the_machine(place, monkeypatch):
    stop_after(monkeypatch, 5)
    with pytest.raises(rankxform.StoppedError):
        place.transform(fsync=False)
    monkeypatch.setattr(folder_records, "boot_id", lambda: "another boot")
    report = place.transform()
    assert report.files_continued == 0 and place.good


def two_copies_each(tmp_path):
    """Write a checkpoint of 4 ranks; return it and strategies: its own, and one of 2 x 2 copies."""
    params = {f"w{i}": ((16, 8), "Float32") for i in range(6)}
    src = [dict.fromkeys(params, ([4], [0, -1], 0, 0))]
    dst = [dict.fromkeys(params, ([2, 2], [0, -1], 0, 0))]
    folder = reference.write_checkpoint(tmp_path / "s", src, params)
    a, b = (
        reference.write_strategy(tmp_path / f"{n}.ckpt", one) for n, one in (("a", src), ("b", dst))
    )
    return folder, a, b


def test_with_checksums_and_linked_files_too(tmp_path, monkeypatch):
    folder, a, b = two_copies_each(tmp_path)
    rankxform.transform(folder, tmp_path / "whole", a, b, crc=True)
    stop_after(monkeypatch, 3)
    with pytest.raises(rankxform.StoppedError):
        rankxform.transform(folder, tmp_path / "d", a, b, crc=True, link="hard")
    rankxform.transform(folder, tmp_path / "d", a, b, crc=True, link="hard")
    for rank in range(4):
        name = f"rank_{rank}/checkpoint_{rank}.ckpt"
        assert (tmp_path / "d" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_damaged_records_are_named(place):
    place.transform()
    (place.dst / "rankxform.json").write_text("{}")
    with pytest.raises(rankxform.StorageError, match="rankxform.json: not a rankxform manifest"):
        place.transform()


class TestTheSourceWasReplaced:
    """By another step of the same size and time, as `cp -p` and `rsync -t` leave it."""

    def test_it_is_said_and_nothing_is_kept(self, place):
        place.transform()
        of_another_step(place.tmp / "src" / "rank_2" / f"checkpoint_2.{place.kind}")
        with pytest.raises(rankxform.StorageError, match=r"of rank 2 was changed or is another"):
            place.transform()
        report = place.transform(overwrite=True)
        assert report.files_kept == 0

    def test_a_copy_of_the_same_step_is_the_same_source(self, place):
        place.transform()
        for path in (place.tmp / "src").glob("rank_*/*"):
            os.utime(path)
        report = place.transform()
        assert report.files_kept == 3 and place.good

    def test_begun_work_is_never_mixed_with_another_state(self, place, monkeypatch):
        """Whatever samples say: a new time is enough."""
        stop_after(monkeypatch, 5)
        with pytest.raises(rankxform.StoppedError):
            place.transform()
        for path in (place.tmp / "src").glob("rank_1/*"):
            os.utime(path, ns=(1, 1))
        with pytest.raises(rankxform.StorageError, match=r"of rank 1 was changed or is another"):
            place.transform()
        with pytest.raises(rankxform.RankxformError, match="was stopped"):
            rankxform.verify(place.dst)
        assert place.transform(overwrite=True).files_continued == 0 and place.good

    def test_a_manifest_is_not_believed_while_its_files_are_replaced(self, place, monkeypatch):
        place.transform()
        stop_after(monkeypatch, 5)
        with pytest.raises(rankxform.StoppedError):
            place.transform(overwrite=True, crc=True)
        assert (place.dst / "rankxform.json").exists()
        with pytest.raises(rankxform.StorageError, match="was stopped, or is at work"):
            rankxform.verify(place.dst)

    def test_of_whole_tensors_in_one_file(self, tmp_path):
        words = {n: ("Float32", reference.full_tensor(n, (64, 64), "Float32")) for n in NAMES}
        src = tmp_path / "model.safetensors"
        reference.write_safetensors(src, words)
        for _ in range(2):
            rankxform.transform(src, tmp_path / "dst", None, None)
        of_another_step(src)
        with pytest.raises(rankxform.StorageError, match=r"of rank 0 was changed or is another"):
            rankxform.transform(src, tmp_path / "dst", None, None)
