"""`verify DST`: what lies there against what the manifest says, the right file named, each once."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

import rankxform
from rankxform.cli.main import main
from rankxform.display.text import as_text
from rankxform.errors import RankxformError
from tests import reference, rules

PARAMS = dict.fromkeys("abcd", ((64, 32), "Float32"))
ROWS = [{name: ([4], [0, -1], 0, 0) for name in PARAMS}]
PAIRS = [{name: ([2], [0, -1], 0, 0) for name in PARAMS}]
LARGE = {"w": ((16 << 10, 1024), "Float32")}  # 64 MiB: 64 samples lie a MiB apart
TWO = [{"w": ([2], [0, -1], 0, 0)}]


@pytest.fixture
def src(tmp_path):
    reference.write_strategy(tmp_path / "a.ckpt", ROWS)
    reference.write_strategy(tmp_path / "b.ckpt", PAIRS)
    return Path(reference.write_checkpoint(tmp_path / "src", ROWS, PARAMS, None, "safetensors"))


def converted(src, name, **options):
    """Return a destination of two files: in a form with an index, or of ranks."""
    dst, form = src.parent / name, {"dst_form": "huggingface", "max_shard": 20_000}
    if name == "ranks":
        form = {"dst_strategy": src.parent / "b.ckpt"}
    rankxform.transform(src, dst, src.parent / "a.ckpt", fsync=False, **form, **options)
    return dst


def test_fingerprints_that_cannot_be_compared_are_not_claimed(src):
    """A manifest has them, and no longer says what the files hold."""
    dst = converted(src, "ranks", verify=True)
    assert rankxform.verify(dst).checked == "fingerprints"
    manifest = dst / "rankxform.json"
    record = json.loads(manifest.read_text())
    del record["stages"]
    manifest.write_text(json.dumps(record))
    verdict = rankxform.verify(dst)
    assert (verdict.same, verdict.checked) == (None, "samples")


def test_a_destination_below_another_is_itself(src):
    """Of which no file is left: it is not taken for the folder that it lies in."""
    above = converted(src, "ranks")
    form = {"dst_form": "checkpoint2", "iteration": 7}
    a, b = src.parent / "a.ckpt", src.parent / "b.ckpt"
    rankxform.transform(src, above / "c2", a, b, fsync=False, **form)
    removed = [*(above / "c2").rglob("*.safetensors")]
    for path in removed:
        path.unlink()
    verdict = rankxform.verify(above / "c2")
    assert verdict.same is False
    assert {finding.file for finding in verdict.errors} == {*map(str, removed)}


def changed_between_samples(path, *, keeps_time):
    """Change one byte of a large file that no sample has."""
    status = path.stat()
    with path.open("r+b") as file:
        file.seek(status.st_size // 2 + (300 << 10))
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))
    if keeps_time:
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))
    else:
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns + 10**9))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A destination with fingerprints, whose files are larger than their samples."""
    tmp = tmp_path_factory.mktemp("large")
    reference.write_strategy(tmp / "a.ckpt", TWO)
    src = reference.write_checkpoint(tmp / "src", TWO, LARGE, None, "safetensors")
    options = {"fsync": False, "verify": True}
    rankxform.transform(src, tmp / "dst", tmp / "a.ckpt", tmp / "a.ckpt", **options)
    return tmp


@pytest.fixture
def place(large, tmp_path):
    """A copy of it, by hard links but for one file; the copied times are those of the manifest."""
    dst = tmp_path / "dst"
    subprocess.run(["cp", "-rp", large / "dst", dst], check=True)
    return dst


@pytest.mark.parametrize("keeps_time", [False, True])
def test_check_compares_the_fingerprints_that_a_manifest_has(keeps_time, place, capfd):
    path = place / "rank_1/checkpoint_1.safetensors"
    assert main(["inspect", str(place), "--check", "--full"]) == 0
    assert "2 fingerprints compared with all bytes" in capfd.readouterr().out
    changed_between_samples(path, keeps_time=keeps_time)
    assert rankxform.verify(place).same is False
    found = rankxform.check(place, full=True)
    assert found.same is False
    (row,) = [row for row in found.rows if row.state == "wrong"]
    assert row.file == str(path) and "changed or replaced" in row.text
    assert row.check not in {other.check for other in found.rows if other.state == "right"}


def test_a_source_with_other_bytes_than_its_fingerprint_is_refused(place, tmp_path):
    path = place / "rank_1/checkpoint_1.safetensors"
    os.utime(path)  # as `cp -r` leaves it
    assert rankxform.transform(place, tmp_path / "whole", fsync=False).bytes_written
    changed_between_samples(path, keeps_time=False)
    with pytest.raises(rankxform.CheckpointError, match=r"checkpoint_1.*changed or replaced"):
        rankxform.transform(place, tmp_path / "again", fsync=False)


def test_the_same_conversion_again_says_what_it_compared(large, capfd):
    words = [large / "src", large / "dst", "--src-strategy", large / "a.ckpt", "--no-fsync"]
    words = ["transform", *map(str, words), "--dst-strategy", str(large / "a.ckpt"), "--verify"]
    assert main(words) == 0
    assert "by the fingerprints of all their bytes" in capfd.readouterr().out
    path = large / "dst/rank_1/checkpoint_1.safetensors"
    data = path.read_bytes()
    changed_between_samples(path, keeps_time=True)
    status = path.stat()
    try:
        assert main(words) == 4
        assert (
            "checkpoint_1.safetensors: was changed after it was written" in capfd.readouterr().err
        )
    finally:
        path.write_bytes(data)
        os.utime(path, ns=(status.st_mtime_ns, status.st_mtime_ns))


def test_without_fingerprints_a_second_run_says_so(src, capfd):
    dst = converted(src, "ranks")
    line = f"transform {src} {dst} --src-strategy {src.parent}/a.ckpt --dst-strategy {src.parent}/b.ckpt"
    assert main(shlex.split(line)) == 0
    assert "complete already, by their sizes, and times or samples" in capfd.readouterr().out


def test_what_a_manifest_says_beyond_is_read_over(src):
    dst = converted(src, "ranks", verify=True)
    path = dst / "rankxform.json"
    record = json.loads(path.read_text())
    record["later"] = {"key": 1}
    for entry in record["files"].values():
        entry["later"] = [1]
    path.write_text(json.dumps(record))
    assert rankxform.verify(dst).same is True
    assert rankxform.load(dst, dst_strategy="none")


def test_a_manifest_of_another_version_is_refused_with_what_can_be_done(src, capfd):
    dst = converted(src, "ranks")
    path = dst / "rankxform.json"
    path.write_text(path.read_text().replace('"version": 4', '"version": 3'))
    before = {p: p.read_bytes() for p in dst.rglob("*") if p.is_file()}
    line = f"transform {src} {dst} --src-strategy {src.parent}/a.ckpt --dst-strategy {src.parent}/b.ckpt"
    for words in (["verify", str(dst)], shlex.split(line)):
        assert main(words) == 4
        told = capfd.readouterr().err
        assert "expected version 4, found 3" in told and "use that rankxform" in told
    assert {p: p.read_bytes() for p in dst.rglob("*") if p.is_file()} == before


@pytest.mark.filterwarnings("ignore::rankxform.RankxformWarning")
def test_a_manifest_with_a_value_of_another_type_is_one_message(tmp_path):
    """Every key of it and of its identity, in turn; the keys that need not be there too."""
    place = rules.WrittenPlace(tmp_path, "ranks")
    good = place.manifest.read_text()
    record = json.loads(good)
    keys = [(key,) for key in {*record, "copied", "applied", "accepted", "undeclared", "beside"}]
    keys += [("identity", key) for key in {*record["identity"], "adapter files"}]
    keys += [("identity", "source files", "0"), ("files", place.files[0].name), ("stages", "0")]
    kept = shutil.copytree(place.dst, tmp_path / "kept")
    for path in sorted(keys):
        for value in (None, 5, "x", [1], {"x": 1}):
            document = json.loads(good)
            holder = document
            for key in path[:-1]:
                holder = holder[key]
            holder[path[-1]] = value
            for call in (place.verify, lambda: str(rankxform.inspect(place.dst)),
                         lambda: rankxform.check(place.dst, place.b, full=True), place.write):  # fmt: skip
                place.manifest.write_text(json.dumps(document))
                with suppress(RankxformError):
                    call()
            shutil.rmtree(place.dst)
            shutil.copytree(kept, place.dst)


def test_no_command_is_printed_that_needs_a_source_that_is_gone(tmp_path):
    stages = [{"w": ([2], [0, -1], 0, 0)}]
    src = reference.write_checkpoint(tmp_path / "src", stages, {"w": ((8, 8), "Float32")})
    strategy = reference.write_strategy(tmp_path / "a.ckpt", stages)
    rankxform.transform(src, tmp_path / "dst", strategy, None)
    told = as_text(rankxform.verify(tmp_path / "dst"))
    assert f"rankxform verify {src}" in told
    (tmp_path / "src").rename(tmp_path / "moved")
    told = as_text(rankxform.verify(tmp_path / "dst"))
    assert "its source is not there any more" in told and "rankxform verify" not in told
