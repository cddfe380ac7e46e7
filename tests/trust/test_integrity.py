"""`transform --verify`: faults between reading and writing end the run, and its manifest tells
later whether a file is still what was written."""

from __future__ import annotations

import json
import random
import shutil
import sys
import threading
from hashlib import sha256

import numpy as np
import pytest

import rankxform
from rankxform.engine import checksum as fingerprint
from rankxform.engine.helper_thread import HelperThread
from rankxform.publish import folder_records
from rankxform.target import folder
from tests import reference
from tests.cases import random_case
from tests.mpi_launch import environment, mpirun, run
from tests.trust.test_resume import make_place, stop_after


def corrupt(source, tile, turn, item, rng):
    """Change something of what is wanted of a region that was read: a bit, or two swapped runs."""
    box = source.part.relative_to(source.box)
    whole = source.data.view(np.uint8).reshape(*source.box.shape, item)
    wanted = whole[box.slices()]
    places = np.argwhere(np.ones(wanted.shape, bool))
    if rng.random() < 0.5:
        wanted[tuple(rng.choice(places))] ^= 1 << rng.randrange(8)
        return
    before = wanted.copy()
    a, b = (tuple(rng.choice(places)[:-1]) for _ in range(2))
    wanted[a], wanted[b] = before[b], before[a]
    if (wanted == before).all():
        wanted[a] ^= 255


@pytest.mark.sampled
@pytest.mark.parametrize("first", range(0, 300, 50))
def test_a_fault_between_the_buffers_is_found_and_named(first, tmp_path, monkeypatch):
    """Where something is assembled, by the run, which ends; what is written from where it was read
    is as wrong in the file, and differs from its fingerprint."""
    real = fingerprint.IntegrityChecker.read
    for seed in range(first, first + 50):
        rng = random.Random(seed)
        case, tmp = random_case(seed, stages=((1, 1),)), tmp_path / str(seed)
        src = reference.write_checkpoint(tmp / "src", case.src, case.params, case.extras)
        a, b = (
            stages and reference.write_strategy(tmp / f"{n}.ckpt", stages)
            for n, stages in (("a", case.src), ("b", case.dst))
        )
        hit = []

        def read(self, transfer, work, repeat, copy, rng=rng, hit=hit):
            real(self, transfer, work, repeat, copy)
            sources = [source for source in work.sources if source.part.size]
            if not hit and sources and rng.random() < 0.2:
                hit.append(transfer.parameter.name)
                hit.append(any(write.copies for write in work.writes))
                item = reference.ITEM[transfer.parameter.dtype]
                corrupt(rng.choice(sources), work, repeat, item, rng)

        with monkeypatch.context() as patch:
            patch.setattr(fingerprint.IntegrityChecker, "read", read)
            try:
                rankxform.transform(src, tmp / "dst", a, b, fsync=False, verify=True)
            except rankxform.DifferenceError as error:
                assert hit and str(error).startswith(repr(hit[0])) and hit[1], f"seed {seed}"
                assert error.exit_code == 6 and not error.resumable
                assert not list((tmp / "dst").rglob("*.ckpt"))
            else:
                assert not hit or not hit[1], f"seed {seed}: a fault in {hit[0]} was not found"
                assert bool(hit) == bool(rankxform.verify(tmp / "dst").differences), f"seed {seed}"
                shutil.rmtree(tmp / "dst")
        rankxform.transform(src, tmp / "dst", a, b, fsync=False, verify=True)
        assert rankxform.verify(tmp / "dst").differences == ()


@pytest.mark.sampled
@pytest.mark.parametrize("first", range(0, 40, 10))
def test_a_thread_that_sums_beside_a_process_finds_the_same(first, tmp_path, monkeypatch):
    monkeypatch.setattr(fingerprint, "_WORTH_HELP", 0)
    monkeypatch.setattr("rankxform.publish.digests._WORTH_HELP", 0)
    monkeypatch.setattr(folder, "_has_idle_core", lambda _: True)
    real, start, began = fingerprint.IntegrityChecker.put, HelperThread.start, []
    monkeypatch.setattr(HelperThread, "start", lambda *args: began.append(args) or start(*args))
    for seed in range(first, first + 10):
        case, tmp = random_case(seed, stages=((1, 1),)), tmp_path / str(seed)
        src = reference.write_checkpoint(tmp / "src", case.src, case.params, case.extras)
        a, b = (
            stages and reference.write_strategy(tmp / f"{n}.ckpt", stages)
            for n, stages in (("a", case.src), ("b", case.dst))
        )
        began.clear()
        dst, options = tmp / "dst", {"fsync": False, "verify": True}
        rankxform.transform(src, dst, a, b, digests="sha256", **options)
        assert began and rankxform.verify(dst).differences == ()
        for line in (dst / "SHA256SUMS").read_text().splitlines():
            digest, name = line.split("  ")
            assert digest == sha256((dst / name).read_bytes()).hexdigest()
        hit = []

        def put(self, transfer, work, repeat, number, hit=hit):
            target = work.targets[number] if work.targets else None
            if work.writes[number].copies and target.part.size and not hit:
                hit.append(transfer.parameter.name)
                item = reference.ITEM[transfer.parameter.dtype]
                corrupt(target, work, repeat, item, random.Random(0))
            real(self, transfer, work, repeat, number)

        with monkeypatch.context() as patch:
            patch.setattr(fingerprint.IntegrityChecker, "put", put)
            try:
                rankxform.transform(src, tmp / "dst2", a, b, **options)
            except rankxform.DifferenceError as error:
                assert str(error).startswith(repr(hit[0])), f"seed {seed}"
            else:
                assert not hit, f"seed {seed}: a fault in {hit[0]} was not found"
        assert "rankxform sums" not in {thread.name for thread in threading.enumerate()}


def test_where_no_thread_can_be_started_a_process_sums_by_itself(tmp_path, monkeypatch):
    class NoThread(threading.Thread):
        def start(self):
            raise RuntimeError("can't start new thread")

    monkeypatch.setattr(folder, "_has_idle_core", lambda _: True)
    monkeypatch.setattr("rankxform.engine.helper_thread.Thread", NoThread)
    place = make_place(tmp_path)
    place.transform(verify=True, digests="sha256")
    assert place.good and rankxform.verify(place.dst).same


def test_an_honest_run_passes_in_little_memory(tmp_path):
    params = {"w": ((2048, 512), "Float32"), "v": ((3, 70_000), "Float16"), "s": ((), "Int32")}
    src = [{"w": ([4], [0, -1], 0, 0), "v": ([4], [-1, 0], 0, 0), "s": ([4], [], 0, 0)}]
    dst = [{"w": ([2, 3], [-1, 1], 0, 0), "v": ([3, 2], [1, 0], 0, 0), "s": ([6], [], 0, 0)}]
    folder = reference.write_checkpoint(tmp_path / "src", src, params)
    a, b = (
        reference.write_strategy(tmp_path / f"{n}.ckpt", s) for n, s in (("a", src), ("b", dst))
    )
    rankxform.transform(folder, tmp_path / "d", a, b, memory=1 << 20, verify=True)
    assert reference.wrong_slices(tmp_path / "d", dst, params) == []
    assert rankxform.verify(tmp_path / "d").differences == ()


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_the_manifest_tells_what_was_changed(kind, tmp_path):
    place = make_place(tmp_path, kind)
    place.transform(verify=True)
    verdict = rankxform.verify(place.dst)
    assert (
        verdict.differences == ()
        and verdict.checked == "fingerprints"
        and verdict.files_compared == 3
    )
    rng = random.Random(3)
    for _ in range(50):
        path = place.final(rng.randrange(3))
        before = path.read_bytes()
        data = bytearray(before)
        data[-1 - rng.randrange(200)] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
        (found,) = rankxform.verify(place.dst).differences
        assert found.text == "was changed since it was written" and found.file == str(path)
        path.write_bytes(before)
    place.final(2).write_bytes(before[:-1])
    place.final(0).unlink()
    assert [(one.file, one.text) for one in rankxform.verify(place.dst).differences] == [
        (str(place.final(0)), "is missing"),
        (str(place.final(2)), f"has {len(before) - 1:,} bytes, and {len(before):,} were written"),
    ]


def test_without_fingerprints_samples_alone_are_compared(tmp_path):
    place = make_place(tmp_path)
    place.transform()
    verdict = rankxform.verify(place.dst)
    assert (
        verdict.checked == "samples" and verdict.differences == () and verdict.bytes_compared == 0
    )
    with pytest.raises(rankxform.UsageError, match="rankxform.json: there is no manifest"):
        rankxform.verify(tmp_path / "src")


@pytest.mark.parametrize("link", ["none", "hard"])
def test_the_fingerprints_of_a_continued_run_are_whole(link, tmp_path, monkeypatch):
    place = make_place(tmp_path)
    for transfers in (5, 3):
        stop_after(monkeypatch, transfers)
        with pytest.raises(rankxform.StoppedError):
            place.transform(verify=True, link=link)
    real = folder_records.FolderRecords.finish
    with monkeypatch.context() as patch:
        failing = rankxform.StorageError("no room for the manifest")
        patch.setattr(
            folder_records.FolderRecords, "finish", lambda *a: (_ for _ in ()).throw(failing)
        )
        with pytest.raises(rankxform.StorageError):
            place.transform(verify=True, link=link)
    assert real is folder_records.FolderRecords.finish
    assert place.transform(verify=True, link=link).files_kept == 3
    verdict = rankxform.verify(place.dst)
    assert verdict.differences == () and verdict.checked == "fingerprints"
    assert place.transform().files_kept == 3, "fingerprints of files that stay are kept"
    assert rankxform.verify(place.dst).checked == "fingerprints"


@pytest.mark.parametrize("processes", [1, 3])
def test_the_command(processes, tmp_path):
    place = make_place(tmp_path)
    line = [*mpirun(processes), sys.executable, "-m", "rankxform"]

    def command(*words):
        return run([str(w) for w in [*line, *words]], 60, env=environment())

    code, output = command("transform", place.src, place.dst, *place.strategies, "--verify")
    assert code == 0, output
    code, output = command("verify", place.dst)
    assert code == 0 and "same      every byte compared" in output, output
    data = bytearray(place.final(1).read_bytes())
    data[-5] ^= 4
    place.final(1).write_bytes(data)
    code, output = command("verify", place.dst, "--json")
    assert code == 6, output
    facts = json.loads(output[: output.rindex("}") + 1])
    assert [one["rank"] for one in facts["differences"]] == [1]
