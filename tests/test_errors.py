"""Bad input gets one clear message with the file's name, and harms nothing."""

from __future__ import annotations

import os
import random
import subprocess
import types
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform.cli.main import main
from rankxform.engine import pipeline as engine
from rankxform.errors import exit_code
from rankxform.storage import posix
from tests import reference
from tests.place import Place

PARAMS = {"w": ((8, 6), "Float32"), "b": ((8,), "Float16")}
SHARDED = [{"w": ([2], [0, -1], 0, 0), "b": ([2], [0], 0, 0)}]
ACROSS = [{"w": ([2], [-1, 0], 0, 0), "b": ([2], [-1], 0, 0)}]


@pytest.fixture(params=["ckpt", "safetensors"])
def kind(request):
    return request.param


class RefusingPlace(Place):
    """Remembers the source's bytes."""

    def __init__(self, tmp, kind):
        super().__init__(tmp, SHARDED, ACROSS, PARAMS, kind)
        self.before = self.source_bytes()

    def source_bytes(self):
        return {p: p.read_bytes() for p in sorted((self.tmp / "src").rglob("*.*"))}

    def refused(self, error, words, code, **options):
        """Transform, expect `error`, and see that nothing was written or changed."""
        before = self.source_bytes()
        given = {"src": self.src, "dst": self.dst, "src_strategy": self.a, "dst_strategy": self.b}
        with pytest.raises(error, match=words) as caught:
            rankxform.transform(**{**given, **options})
        assert exit_code(caught.value) == code
        assert not list(self.tmp.rglob("*.part"))
        assert not [p for p in self.dst.rglob("*") if p.is_file()]
        assert self.source_bytes() == before
        return str(caught.value)


@pytest.fixture
def place(tmp_path, kind):
    return RefusingPlace(tmp_path, kind)


@pytest.mark.parametrize("keep", [0.0, 0.2, 0.5, 0.99])
def test_a_truncated_checkpoint(keep, place):
    path = place.shard(1)
    os.truncate(path, int(path.stat().st_size * keep))
    place.refused(rankxform.CheckpointError, "rank_1/checkpoint_1", 3)


def test_a_file_longer_than_its_content(place):
    with place.shard(0).open("ab") as file:
        file.write(b"\0" * 9)
    place.refused(rankxform.CheckpointError, "rank_0/checkpoint_0", 3)


def test_a_truncated_strategy(place):
    os.truncate(place.a, os.path.getsize(place.a) - 3)
    place.refused(rankxform.StrategyError, r"a\.ckpt: byte \d+", 3)


def test_an_empty_strategy(place):
    os.truncate(place.a, 0)
    place.refused(rankxform.StrategyError, "a.ckpt: lists no parameter layout", 3)


def test_a_checkpoint_in_place_of_a_strategy(place):
    place.refused(rankxform.StrategyError, "checkpoint_0", 3, src_strategy=place.shard(0))


def test_a_strategy_in_place_of_a_checkpoint(place):
    place.shard(0).write_bytes((place.tmp / "a.ckpt").read_bytes())
    place.refused(rankxform.CheckpointError, "rank_0/checkpoint_0", 3)


@pytest.mark.parametrize("seed", range(150))
def test_a_damaged_file_is_refused_or_read_never_a_crash(seed, place):
    """Flip, insert and remove bytes anywhere: an error names the file, or the bytes are data."""
    rng = random.Random(seed)
    victim = rng.choice(
        [place.shard(0), place.shard(1), place.tmp / "a.ckpt", place.tmp / "b.ckpt"]
    )
    data = bytearray(victim.read_bytes())
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(data))
        how = rng.random()
        if how < 0.6:
            data[at] ^= 1 << rng.randrange(8)
        elif how < 0.8:
            data[at:at] = rng.randbytes(rng.randint(1, 9))
        else:
            del data[at : at + rng.randint(1, 9)]
    victim.write_bytes(data)
    try:
        rankxform.transform(place.src, place.dst, place.a, place.b, fsync=False)
    except rankxform.RankxformError as error:
        assert exit_code(error) in (2, 3)
        assert not [p for p in place.dst.rglob("*") if p.is_file()]
        return
    if victim.name == "a.ckpt":
        assert place.good  # what was damaged in it says nothing of where boxes are
    elif victim.parent.parent == place.src:
        assert whole_tensors(place.final, ACROSS) == whole_tensors(place.shard, SHARDED)


def whole_tensors(path_of, stages):
    """Return the bytes of all tensors, as an independent reader finds them in files of ranks."""
    files, full = [reference.read_any(path_of(rank)) for rank in range(2)], {}
    for name in PARAMS:
        (dtype, _, _), *_ = (file[name] for file in files)
        slices = [
            np.frombuffer(data, reference.WORD[reference.ITEM[dtype]]).reshape(shape)
            for _, shape, data in (file[name] for file in files)
        ]
        axis = stages[0][name][1]
        full[name] = dtype, (slices[0] if axis == [-1] else np.concatenate(
            slices, axis.index(0))).tobytes()  # fmt: skip
    return full


@pytest.mark.parametrize("seed", range(60))
def test_a_damaged_json_strategy(seed, place):
    rng = random.Random(seed)
    shapes = {n: s for n, (s, _) in PARAMS.items()}
    data = bytearray(reference.json_strategy(list(SHARDED[0].items()), shapes=shapes))
    for _ in range(3):
        data[rng.randrange(len(data))] = rng.choice(b'0123456789[]{}",:-enu')
    path = place.tmp / "a.json"
    path.write_bytes(data)
    try:
        rankxform.transform(place.src, place.dst, path, place.b, fsync=False)
    except rankxform.RankxformError as error:
        assert exit_code(error) in (2, 3)
    else:
        assert place.good  # what was damaged in it says nothing of where boxes are


def test_a_missing_rank(place):
    place.shard(1).unlink()
    place.refused(rankxform.CheckpointError, "^rank 1 has no file: no source file holds", 3)


def test_a_missing_stage(place, tmp_path):
    stages = [{"w": ([2], [0, -1], 0, 0)}, {"b": ([2], [0], 0, 0)}, {"c": ([2], [0], 0, 0)}]
    folder = tmp_path / "stages"
    reference.write_stage_files(folder, stages)
    (folder / "ckpt_strategy_rank_1.ckpt").unlink()
    message = place.refused(
        rankxform.StrategyError, "no strategy of pipeline stage 1", 3, src_strategy=folder
    )
    assert "ckpt_strategy_rank_0.ckpt" in message
    assert "ckpt_strategy_rank_2.ckpt" in message


def test_a_stage_that_was_forgotten_shows_in_the_extra_ranks(place):
    late = {"late": ((4,), "Float32")}
    reference.write_checkpoint(
        place.tmp / "more", [{"late": ([4], [-1], 0, 0)}], late, kind=place.kind
    )
    for rank in (2, 3):
        (place.tmp / "more" / f"rank_{rank}").rename(place.tmp / "src" / f"rank_{rank}")
    place.refused(rankxform.CheckpointError, "(?s)stages.*rank_3.*late", 3)


def test_a_strategy_of_another_network(place):
    other = reference.write_strategy(place.tmp / "o.ckpt", [{"x": ([2], [0], 0, 0)}])
    place.refused(
        rankxform.RequestError,
        "lists none of the parameters",
        3,
        src_strategy=other,
        dst_strategy=None,
    )


def test_a_strategy_with_another_number_of_axes(place):
    other = reference.write_strategy(place.tmp / "o.ckpt", [{**SHARDED[0], "w": ([2], [0], 0, 0)}])
    place.refused(
        rankxform.CheckpointError,
        "'w' does not fit .*o.ckpt: tensor map .* is for 1 axes",
        3,
        src_strategy=other,
    )


def test_slices_of_different_shapes(place):
    entries = {
        n: (d, np.zeros((2, 6), "<u4") if n == "w" else np.zeros(4, "<u2"))
        for n, (_, d) in PARAMS.items()
    }
    write = reference.write_ckpt if place.kind == "ckpt" else reference.write_safetensors
    write(place.shard(1), entries)
    text = "slices of 'w' have unlike rows: 4 on rank 0, 2 on rank 1"
    place.refused(rankxform.CheckpointError, text, 3)


def test_shapes_that_do_not_divide(place):
    odd = reference.write_strategy(
        place.tmp / "o.ckpt", [{"w": ([5], [0, -1], 0, 0), "b": ([5], [-1], 0, 0)}]
    )
    place.refused(
        rankxform.RequestError,
        r"o.ckpt: 'w': axis 0 of shape \[8, 6\] cannot be split into 5",
        3,
        dst_strategy=odd,
    )


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (([2, 2], [0, 0], 0, 0), "uses one device-matrix axis twice"),
        (([2], [3, -1], 0, 0), "names axis 3, but the device matrix"),
        (([2], [-5, -1], 0, 0), "names axis -5"),
        (([0], [-1, -1], 0, 0), "must be one or more positive sizes"),
    ],
)
def test_impossible_layouts(layout, words, place):
    bad = reference.write_strategy(place.tmp / "o.ckpt", [{**ACROSS[0], "w": layout}])
    place.refused(rankxform.StrategyError, f"o.ckpt: 'w': .*{words}", 3, dst_strategy=bad)


def test_a_file_that_shrinks_while_it_is_read(place, monkeypatch):
    read = engine.SourceReader.read

    def shrink_first(self, rank, *rest):
        os.truncate(place.shard(rank), 40)
        return read(self, rank, *rest)

    monkeypatch.setattr(engine.SourceReader, "read", shrink_first)
    with pytest.raises(rankxform.CheckpointError, match="rank_0/.* changed"):
        rankxform.transform(place.src, place.dst, place.a, place.b)
    assert not [p for p in place.dst.rglob("*") if p.is_file()]


def test_a_short_read_is_told_from_the_end_of_the_file(place, monkeypatch):
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda fd, buffers, at: real(fd, [buffers[0][:7]], at))
    rankxform.transform(place.src, place.dst, place.a, place.b)
    assert reference.wrong_slices(place.dst, ACROSS, PARAMS, place.kind) == []


def test_the_target_inside_the_source(place):
    place.refused(
        rankxform.UsageError, "lies in the source folder", 2, dst=place.tmp / "src" / "out"
    )
    place.refused(rankxform.UsageError, "lies in the source folder", 2, dst=place.tmp / "src")


def test_a_foreign_file_in_the_targets_place(place):
    path = place.dst / "rank_1" / f"checkpoint_1.{place.kind}"
    path.parent.mkdir(parents=True)
    path.write_text("precious")
    with pytest.raises(rankxform.StorageError, match=r"checkpoint_1.* already there.*--overwrite"):
        rankxform.transform(place.src, place.dst, place.a, place.b)
    assert path.read_text() == "precious"
    assert [p for p in place.dst.rglob("*") if p.is_file()] == [path]
    rankxform.transform(place.src, place.dst, place.a, place.b, overwrite=True)
    assert reference.wrong_slices(place.dst, ACROSS, PARAMS, place.kind) == []


def test_a_folder_in_the_targets_place(place):
    (place.dst / "rank_1" / f"checkpoint_1.{place.kind}").mkdir(parents=True)
    place.refused(rankxform.StorageError, "is a folder", 4, overwrite=True)


def test_a_file_where_the_target_folder_should_be(place):
    place.dst.write_text("a file")
    with pytest.raises(rankxform.StorageError, match="dst: is a file, and DST must be a folder"):
        rankxform.transform(place.src, place.dst, place.a, place.b)
    assert place.dst.read_text() == "a file"


@pytest.mark.parametrize("name", ["out.safetensors", "out.ckpt"])
def test_a_files_name_for_the_target_folder(name, place):
    place.refused(rankxform.UsageError, f"{name}: is named like a file", 2, dst=place.tmp / name)
    assert not (place.tmp / name).exists()
    (place.tmp / name).mkdir()  # who wants a folder of this name makes it
    rankxform.transform(place.src, place.tmp / name, place.a, place.b)
    assert reference.wrong_slices(place.tmp / name, ACROSS, PARAMS, place.kind) == []


def test_what_does_not_exist(place):
    place.refused(rankxform.UsageError, "nowhere: no such checkpoint", 2, src=place.tmp / "nowhere")
    place.refused(
        rankxform.UsageError, "nowhere: no such strategy", 2, src_strategy=place.tmp / "nowhere"
    )


def test_a_folder_of_several_ranks_without_a_strategy(place):
    place.refused(
        rankxform.UsageError, "files of 2 ranks, and no --src-strategy says", 2, src_strategy=None
    )


@pytest.mark.parametrize("option", ["prefix", "suffix", "src_pattern", "src_strategy", "src"])
def test_a_nul_in_a_name(option, place):
    place.refused(rankxform.UsageError, f"^{option} 'a.*b': holds a NUL", 2, **{option: "a\0b"})


def test_an_encrypted_file(place):
    place.shard(0).write_bytes(b"\xd8\x5e\x3a\x7f" + bytes(100))
    words = "encrypted" if place.kind == "ckpt" else "rank_0"
    place.refused(rankxform.CheckpointError, words, 3)


def test_a_maptensor(tmp_path):
    place = RefusingPlace(tmp_path, "ckpt")
    value = reference.field(1, b"table") + reference.field(3, reference.field(1, b""))
    with place.shard(0).open("ab") as file:
        file.write(reference.field(1, value))
    place.refused(rankxform.CheckpointError, "'table' is a maptensor", 3)


def test_a_type_that_mindspore_does_not_have(tmp_path):
    place = RefusingPlace(tmp_path, "ckpt")
    with place.shard(0).open("ab") as file:
        file.write(reference.ckpt_entry("odd", "Complex64", (2,), bytes(16)))
    place.refused(rankxform.CheckpointError, "'Complex64' is not one of MindSpore's", 3)


def test_a_wrong_checksum_is_found_on_request(place):
    good = place.tmp / "good"
    rankxform.transform(place.src, good, place.a, place.a, crc=True)
    rankxform.transform(good, place.tmp / "again", place.a, place.b, check_crc=True)
    path = good / "rank_1" / f"checkpoint_1.{place.kind}"
    data = bytearray(path.read_bytes())
    content = reference.read_any(place.shard(1))["w"][2]
    data[data.index(content) + 5] ^= 1
    path.write_bytes(data)
    (good / "rankxform.json").unlink()
    place.refused(
        rankxform.CheckpointError,
        "checkpoint_1.*its checksum is",
        3,
        src=good,
        dst_strategy=place.b,
        src_strategy=place.a,
        check_crc=True,
    )


@pytest.fixture
def nobody(tmp_path):
    """Become somebody who owns nothing, with a source that everybody may read."""
    if os.getuid() != 0:
        pytest.skip("needs root, to become somebody else")
    place = RefusingPlace(tmp_path, "ckpt")
    for path in (tmp_path, *tmp_path.parents):
        if path.owner() == "root" and path.stat().st_mode & 0o777 == 0o700:
            path.chmod(0o755)
    yield place
    os.seteuid(0)


def test_a_read_only_target(nobody):
    os.seteuid(65534)
    nobody.refused(rankxform.StorageError, "dst.*cannot make the folder: Permission denied", 4)


def test_an_unreadable_file(nobody):
    nobody.shard(1).chmod(0)
    os.seteuid(65534)
    with pytest.raises(
        rankxform.StorageError, match=r"rank_1/checkpoint_1.ckpt: cannot open: Perm"
    ):
        rankxform.transform(nobody.src, nobody.dst, nobody.a, nobody.b)
    assert not nobody.dst.exists()


def test_an_unreadable_source_folder(nobody):
    (nobody.tmp / "src").chmod(0)
    os.seteuid(65534)
    with pytest.raises(rankxform.RankxformError, match="src"):
        rankxform.transform(nobody.src, nobody.dst, nobody.a, nobody.b)


@pytest.fixture
def small_disk(tmp_path):
    """A place whose target is a disk of 1 MiB, and twice as much to be written."""
    if os.getuid():
        pytest.skip("needs root, to mount a small disk")
    place = RefusingPlace(tmp_path, "ckpt")
    params = {"w": ((1024, 512), "Float32"), "b": ((8,), "Float16")}
    reference.write_checkpoint(tmp_path / "src", SHARDED, params)
    place.dst.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", place.dst]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("this machine does not allow mounts")
    place.params = params
    yield place
    subprocess.run(["umount", place.dst], check=True)


def test_too_little_room_is_said_before_anything_is_written(small_disk):
    words = r"dst: 2\.1 MB are to be written, 1\.0 MB are free"
    small_disk.refused(rankxform.StorageError, words, 4)


def test_a_disk_that_fills_midway_leaves_what_can_be_continued(small_disk, monkeypatch):
    plenty = types.SimpleNamespace(f_bavail=1 << 40, f_frsize=1)
    monkeypatch.setattr(posix.os, "statvfs", lambda path: plenty)
    with pytest.raises(rankxform.StorageError, match=r"\.part: cannot write.*No space") as caught:
        rankxform.transform(small_disk.src, small_disk.dst, small_disk.a, small_disk.b)
    assert caught.value.resumable
    assert not list(small_disk.dst.rglob("*.ckpt"))
    subprocess.run(["mount", "-o", "remount,size=8m", small_disk.dst], check=True)
    rankxform.transform(small_disk.src, small_disk.dst, small_disk.a, small_disk.b)
    assert reference.wrong_slices(small_disk.dst, ACROSS, small_disk.params) == []


def test_what_was_written_before_a_disk_was_full_is_not_written_again(small_disk, monkeypatch):
    """Buffers and the journal's last entry take the room that the journal held back."""
    params = {f"w{i:02}": ((256, 32), "Float32") for i in range(64)}
    src = small_disk.dst.parent / "src64"
    layouts = [dict.fromkeys(params, ([4], [0, -1], 0, 0))]
    reference.write_checkpoint(src, layouts, params)
    a = reference.write_strategy(src.parent / "a64", layouts)
    plenty = types.SimpleNamespace(f_bavail=1 << 40, f_frsize=1)
    with monkeypatch.context() as patch:
        patch.setattr(posix.os, "statvfs", lambda path: plenty)
        with pytest.raises(rankxform.StorageError, match="No space"):
            rankxform.transform(src, small_disk.dst, a)
    subprocess.run(["mount", "-o", "remount,size=16m", small_disk.dst], check=True)
    report = rankxform.transform(src, small_disk.dst, a)
    assert report.bytes_before > 300_000
    assert report.bytes_before + report.bytes_written >= 2 << 20
    whole = rankxform.transform(src, src.parent / "whole", a)
    for one, other in zip(report.files, whole.files, strict=True):
        assert Path(one).read_bytes() == Path(other).read_bytes()


def test_a_disk_with_just_enough_room_is_enough(small_disk):
    """What a journal holds back for a full disk does not fill it."""
    subprocess.run(["mount", "-o", "remount,size=2300k", small_disk.dst], check=True)
    rankxform.transform(small_disk.src, small_disk.dst, small_disk.a, small_disk.b)
    assert reference.wrong_slices(small_disk.dst, ACROSS, small_disk.params) == []


def test_a_plan_says_first_that_there_is_too_little_room(small_disk, capsys):
    """And no probe is written there, which would fail."""
    options = ["--src-strategy", str(small_disk.a), "--dst-strategy", str(small_disk.b)]
    for verb in (["plan"], ["transform", "--dry-run"]):
        assert main([*verb, str(small_disk.src), str(small_disk.dst), *options]) == 0
        output = capsys.readouterr().out
        assert output.count("at least 2.1 MB are to be written, 1.0 MB are free") == 2
        assert "NO ROOM   needs 2.1 MB (1.05 MB free), " in output
        assert "would take about" not in output
    assert not list(small_disk.dst.iterdir())


def test_a_folder_whose_run_was_stopped_is_said_to_be_so(tmp_path):
    """To `verify` alone as well, which looks for a manifest."""
    (tmp_path / "dst/.rankxform").mkdir(parents=True)
    (tmp_path / "dst/.rankxform/job.json").write_text("{}")
    with pytest.raises(rankxform.UsageError) as caught:
        rankxform.verify(tmp_path / "dst")
    assert caught.value.parts.what == "a conversion into this folder was stopped, or is at work"
    assert caught.value.parts.tries[0].startswith("run its command again")


def test_no_name_reaches_a_terminal_with_control_characters(tmp_path, capfd):
    """Names of folders, files and tensors are data, and a terminal would obey them."""
    odd = "e\x1b[31mvil"
    place = tmp_path / odd
    params = {odd: ((8, 6), "Float32")}
    src = reference.write_checkpoint(
        place / "src", [{odd: ([2], [0, -1], 0, 0)}], params, name=f"{odd}_{{rank}}-1_1"
    )
    a = reference.write_strategy(place / "a.ckpt", [{odd: ([2], [0, -1], 0, 0)}])
    b = reference.write_strategy(place / "b.ckpt", [{odd: ([2], [-1, 0], 0, 0)}])
    strategies = ("--src-strategy", a, "--dst-strategy", b)
    commands = [
        ("inspect", src), ("inspect", src, "--check"), ("inspect", src, "--replicas", *strategies[:2]),
        ("inspect", a), ("strategy", "show", a), ("strategy", "diff", a, b), ("ranks", src, *strategies),
        ("plan", src, *strategies, "-v"), ("transform", src, place / "dst", *strategies),
        ("transform", src, place / "dst", *strategies, "--exclude", "nothing"),
        ("verify", src, place / "dst", *strategies), ("inspect", place), ("inspect", place / "dst"),
        ("transform", src, place / "no"), ("transform", place, place / "no", *strategies),
        ("verify", place / "dst"), ("plan", src, "--src-strategy", b),
    ]  # fmt: skip
    for command in commands:
        main([str(word) for word in command])
        texts = capfd.readouterr()
        assert "\x1b" not in texts.out + texts.err, command
    path = next(Path(src).rglob("*.ckpt"))
    path.write_bytes(path.read_bytes()[:-8])
    assert main(["transform", src, str(place / "no"), *strategies]) == 3
    assert "\x1b" not in "".join(capfd.readouterr())


def test_a_fifo_in_a_file_s_place_is_waited_for_by_nobody(tmp_path):
    reference.write_ckpt(tmp_path / "src/rank_0/c.ckpt", {"w": ("Float32", np.ones(4, "<u4"))})
    rankxform.transform(tmp_path / "src", tmp_path / "dcp", dst_form="dcp")
    (tmp_path / "dcp/rankxform.json").unlink()
    (tmp_path / "dcp/__0_0.distcp").unlink()
    os.mkfifo(tmp_path / "dcp/__0_0.distcp")
    writer = os.open(tmp_path / "dcp/__0_0.distcp", os.O_RDWR)  # or who opens it would not fail
    with pytest.raises(rankxform.StorageError, match="is no regular file"):
        rankxform.plan(tmp_path / "dcp")
    os.close(writer)
