"""Verification finds what is wrong in a destination, names it, and passes what is right."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import sys
from contextlib import suppress

import numpy as np
import pytest

import rankxform
from rankxform.storage import user_files
from tests import reference, reference_dcp
from tests.cases import random_case
from tests.mpi_launch import environment, mpirun, run
from tests.place import Place

PARAMS = {
    "w": ((12, 10), "Float32"),
    "v": ((6, 4, 8), "Float16"),
    "b": ((12,), "BFloat16"),
    "s": ((), "Float64"),
}
SRC = [
    {"w": ([2, 3], [0, 1], 0, 0), "v": ([2, 3], [-1, 1, -1], 0, 0), "b": ([6], [0], 0, 0),
     "s": ([6], [], 0, 0)}
]  # fmt: skip
DST = [
    {"w": ([2, 2], [-1, 1], 0, 0), "v": ([2, 2], [1, -1, 0], 0, 0), "b": ([2, 2], [0], 0, 0),
     "s": ([4], [], 0, 0)}
]  # fmt: skip


class WrittenPlace(Place):
    """The destination is written, and its files can be written anew."""

    def __init__(self, tmp, kind):
        super().__init__(tmp, SRC, DST, PARAMS, kind)
        self.transform(fsync=False)

    def entries(self, rank):
        path = self.final(rank)
        found = reference.read_any(path)
        return path, {
            name: (dtype, np.frombuffer(data, reference.WORD[reference.ITEM[dtype]]).reshape(shape))
            for name, (dtype, shape, data) in found.items()
        }

    def rewrite(self, path, entries):
        write = reference.write_safetensors if self.kind == "safetensors" else reference.write_ckpt
        path.unlink()
        write(path, entries)


@pytest.fixture(params=["ckpt", "safetensors"])
def place(tmp_path, request):
    return WrittenPlace(tmp_path, request.param)


def told(verdict):
    return [
        (one.elements.tensor, verdict.ranks[one.file], one.text, one.elements.index)
        for one in verdict.differences
    ]


def test_what_is_right_passes(place):
    verdict = place.verify()
    assert told(verdict) == [] and verdict.files_compared == 4
    total = sum(int(np.prod(s)) * reference.ITEM[d] for s, d in PARAMS.values())
    assert verdict.bytes_compared > total, "replicas are compared too"


def test_every_flipped_bit_is_found_where_it_is(place):
    rng = random.Random(7)
    for _ in range(60):
        rank = rng.randrange(4)
        path, entries = place.entries(rank)
        before = path.read_bytes()
        name = rng.choice(list(PARAMS))
        dtype, words = entries[name]
        words = words.copy()
        index = tuple(rng.randrange(n) for n in words.shape)
        words[index] ^= words.dtype.type(1 << rng.randrange(8 * words.itemsize))
        place.rewrite(path, {**entries, name: (dtype, words)})
        layout, shape = DST[0][name], PARAMS[name][0]
        positions = np.arange(int(np.prod(shape))).reshape(shape)
        flat = reference.shard(positions, layout, rank)[index]
        where = tuple(int(i) for i in np.unravel_index(flat, shape)) if shape else ()
        assert told(place.verify()) == [(name, rank, "differs", where)]
        path.write_bytes(before)
    assert told(place.verify()) == []


def test_swapped_and_missing_and_foreign_parameters(place):
    path, entries = place.entries(2)
    missing = {n: e for n, e in entries.items() if n != "v"}
    place.rewrite(path, {**missing, "x": entries["b"]})
    assert told(place.verify()) == [
        ("v", 2, "is missing", None),
        ("x", 2, "should not be here", None),
    ]
    other = {**entries, "b": ("Float16", entries["b"][1]), "w": ("Float32", entries["w"][1].T)}
    place.rewrite(path, other)
    assert [(name, why) for name, _, why, _ in told(place.verify())] == [
        ("b", "is of type Float16, not BFloat16"),
        ("w", "has shape [5, 12], not [12, 5]"),
    ]


def test_a_missing_rank_is_named(place):
    (place.dst / "rank_3" / f"checkpoint_3.{place.kind}").unlink()
    with pytest.raises(rankxform.CheckpointError, match="dst: has no file of destination rank 3"):
        place.verify()


def test_many_blocks_in_little_memory(tmp_path):
    params = {"w": ((4096, 512), "Float32")}
    src, dst = [{"w": ([4], [0, -1], 0, 0)}], [{"w": ([4], [-1, 0], 0, 0)}]
    folder = reference.write_checkpoint(tmp_path / "src", src, params)
    a, b = (
        reference.write_strategy(tmp_path / f"{n}.ckpt", s) for n, s in (("a", src), ("b", dst))
    )
    rankxform.transform(folder, tmp_path / "dst", a, b, fsync=False)
    path = tmp_path / "dst" / "rank_1" / "checkpoint_1.ckpt"
    data = bytearray(path.read_bytes())
    for at in (-4 * 128 * 1000 - 4, -2):
        data[at] ^= 255
    path.write_bytes(data)
    (found,) = rankxform.verify(folder, tmp_path / "dst", a, b, memory=1 << 20).differences
    where = found.elements
    assert (where.index, where.count, where.size) == ((4096 - 1001, 255), 2, 4096 * 128)


@pytest.mark.sampled
@pytest.mark.parametrize("processes", [1, 3])
def test_the_command_says_so_and_exits_with_6(processes, place):
    line = [*mpirun(processes), sys.executable, "-m", "rankxform", "verify", place.src, place.dst]
    line += place.strategies
    code, output = run([str(w) for w in line], 60, env=environment())
    assert (code, output.splitlines()[-1][:33]) == (0, "same      every byte compared, 1.")
    path, entries = place.entries(1)
    dtype, words = entries["w"]
    words = words.copy()
    words[3, 2] += 1
    place.rewrite(path, {**entries, "w": (dtype, words)})
    code, output = run([str(w) for w in line], 60, env=environment())
    assert code == 6
    assert "DIFFERENT: 1 parameter, 1 slice" in output
    assert re.search(r"^ *1 +\[3, 2\] +1 of 60 +w$", output, re.M)
    code, output = run([*map(str, line), "--json"], 60, env=environment())
    assert code == 6
    facts = json.loads(output[: output.rindex("}") + 1])
    assert facts["differences"][0]["index"] == [3, 2]


@pytest.mark.oracle
def test_mindspores_own_outputs(tmp_path):
    """Right ones pass; the two families that it gets wrong (SEMANTICS B1 and B2) do not."""
    ms = pytest.importorskip("mindspore", reason="MindSpore has no wheel for this Python")
    for seed in range(40):
        case, tmp = random_case(seed), tmp_path / str(seed)
        src = reference.write_checkpoint(tmp / "src", case.src, case.params, case.extras)
        a, b = (
            stages and reference.write_strategy(tmp / f"{n}.ckpt", stages)
            for n, stages in (("a", case.src), ("b", case.dst))
        )
        ms.transform_checkpoints(src, str(tmp / "ms"), "checkpoint_", a, b)
        assert rankxform.verify(src, tmp / "ms", a, b).differences == (), seed
    wrong = (
        ([{"w": ([2, 2, 2], [0, 1], 4, -1)}], None, "ckpt"),
        ([{"w": ([2], [0, -1], 0, 0)}], [{"w": ([2], [-1, 0], 0, 0)}], "safetensors"),
    )
    for number, (before, after, kind) in enumerate(wrong):
        tmp = tmp_path / f"wrong{number}"
        params = {"w": ((16, 8), "Float32")}
        src = reference.write_checkpoint(tmp / "src", before, params, kind=kind)
        a = reference.write_strategy(tmp / "a.ckpt", before)
        b = after and reference.write_strategy(tmp / "b.ckpt", after)
        ms.transform_checkpoints(src, str(tmp / "ms"), "checkpoint_", a, b, output_format=kind)
        verdict = rankxform.verify(src, tmp / "ms", a, b)
        assert {one.elements.tensor for one in verdict.differences} == {"w"}
        rankxform.transform(src, tmp / "rx", a, b)
        assert rankxform.verify(src, tmp / "rx", a, b).differences == ()


def test_a_file_that_cannot_be_read_is_a_difference_and_the_others_are_compared(place):
    path, _ = place.entries(2)
    data = bytearray(path.read_bytes())
    data[:16] = b"\xff" * 16
    modified = path.stat().st_mtime_ns
    path.write_bytes(data)
    os.utime(path, ns=(modified, modified))
    other, entries = place.entries(1)
    kind, values = entries["w"]
    flipped = values.copy()
    flipped.flat[0] ^= 1
    place.rewrite(other, {**entries, "w": (kind, flipped)})
    verdict = place.verify()
    assert [(one.file, one.text.partition(":")[0]) for one in verdict.differences] == [
        (str(other), "differs"),
        (str(path), "cannot be read"),
    ]
    alone = rankxform.verify(place.dst)
    assert [(one.file, one.text.partition(":")[0]) for one in alone.differences] == [
        (str(path), "cannot be read"),
        (str(other), "was changed since it was written"),
    ]


def test_sizes_alone_are_no_proof(place):
    """Without fingerprints no byte is compared, and nobody is told that all is the same."""
    verdict = rankxform.verify(place.dst)
    assert (verdict.same, verdict.checked, verdict.bytes_compared) == (None, "samples", 0)
    code, output = run(
        [sys.executable, "-m", "rankxform", "verify", str(place.dst)], 60, env=environment()
    )
    assert code == 6 and output.startswith("NOT VERIFIED: samples alone were compared (")
    line = output.splitlines()[1].removeprefix("to compare every byte: rankxform ")
    command = [sys.executable, "-m", "rankxform"]
    code, output = run([*command, "verify", "--json", str(place.dst)], 60, env=environment())
    facts = json.loads(output)
    assert (facts["same"], facts["checked"], facts["bytes_compared"]) == (None, "samples", 0)
    code, output = run([*command, *shlex.split(line)], 60, env=environment())
    assert code == 0 and "same      every byte compared" in output
    assert rankxform.verify(place.dst).checked == "fingerprints", "which the command keeps"
    path, _ = place.entries(1)
    os.truncate(path, path.stat().st_size - 1)
    assert rankxform.verify(place.dst).same is False


def test_headers_are_compared_with_what_the_manifest_says(tmp_path):
    """Also without fingerprints; where the manifest does not say it, samples see the change."""
    src = reference.write_checkpoint(tmp_path / "src", SRC, PARAMS)
    a = reference.write_strategy(tmp_path / "a.ckpt", SRC)
    b = reference.write_strategy(tmp_path / "b.ckpt", DST)
    dst = tmp_path / "dst"
    rankxform.transform(src, dst, a, b, format="safetensors", fsync=False)
    path = dst / "rank_2" / "checkpoint_2.safetensors"
    path.write_bytes(path.read_bytes().replace(b'"w"', b'"x"'))
    found = rankxform.verify(dst)
    assert found.same is False and found.checked == "samples"
    assert {t[:3] for t in told(found)} == {("w", 2, "is missing"), ("x", 2, "should not be here")}
    record = json.loads((dst / "rankxform.json").read_text())
    del record["stages"]
    (dst / "rankxform.json").write_text(json.dumps(record))
    assert rankxform.verify(dst).same is False


def test_the_command_that_compares_says_what_was_chosen(place):
    options = {"exclude": ("^b$",), "prefix": "net_", "unlisted": "take-one"}
    rankxform.transform(place.src, place.tmp / "some", place.a, place.b, **options)
    line = shlex.split(rankxform.verify(place.tmp / "some").command)
    assert line[:4] == ["rankxform", "verify", str(place.src), str(place.tmp / "some")]
    assert " ".join(line[4:]) == (
        f"--src-strategy {place.a} --dst-strategy {place.b} --exclude ^b$ --unlisted take-one "
        "--prefix net_ --keep-fingerprints"
    )


def compare_as_printed(folder, code=0):
    """Run the command that `verify` of a folder prints."""
    line = [sys.executable, "-m", *shlex.split(rankxform.verify(folder).command)]
    found, output = run(line, 60, env=environment())
    assert found == code, output
    return output


SHARDED = [{"w": ([4], [0, -1], 0, 0)}]


@pytest.mark.filterwarnings("ignore:.*the same bytes:rankxform.RankxformWarning")
@pytest.mark.filterwarnings("ignore:2 of 3 ranks were made:rankxform.RankxformWarning")
@pytest.mark.parametrize(
    ("options", "words"),
    [({"ranks": (0, 2)}, "--ranks 0,2"), ({"accept": ("equal-slices",)}, "--accept equal-slices")],
)
def test_the_command_that_compares_says_all_that_matters(options, words, tmp_path):
    equal = "accept" in options
    place = Place(
        tmp_path, SHARDED, [{"w": ([3], [0, -1], 0, 0)}], {"w": ((12, 2), "Float32")},
        make=(lambda n, s, d: np.tile(np.arange(6, dtype="<u4").reshape(3, 2), (4, 1)))
        if equal else reference.full_tensor,
    )  # fmt: skip
    place.transform(**options)
    assert words in rankxform.verify(place.dst).command
    assert "same      every byte" in compare_as_printed(place.dst)


def test_the_command_that_compares_takes_the_step_that_was_converted(tmp_path):
    place = Place(tmp_path, SHARDED, SHARDED, {"w": ((8, 2), "Float32")}, name="net-1_10")
    place.transform()
    reference.write_checkpoint(
        place.src, SHARDED, place.params, name="net-1_20", make=reference.counting_tensor
    )
    assert "same      every byte" in compare_as_printed(place.dst)


def test_the_command_that_compares_where_no_option_was_needed(tmp_path):
    src = reference.write_checkpoint(tmp_path / "src", None, {"w": ((8, 2), "Float32")})
    rankxform.transform(src, tmp_path / "dst", crc=True)
    assert "--src-strategy" not in rankxform.verify(tmp_path / "dst").command
    assert "same      every byte" in compare_as_printed(tmp_path / "dst")


def test_the_command_that_compares_where_no_file_says_what_was_given(place):
    a, b = (user_files.load_strategy(str(path)) for path in (place.a, place.b))
    rankxform.transform(place.src, place.tmp / "some", a, b, exclude="^b$")
    words = shlex.split(rankxform.verify(place.tmp / "some").command)[4:]
    assert words == [
        "--src-strategy",
        "A",
        "--dst-strategy",
        "B",
        "--exclude",
        "^b$",
        "--keep-fingerprints",
    ]
    files = {rank: place.shard(rank) for rank in range(6)}
    rankxform.transform("nowhere", place.tmp / "more", place.a, place.b, files=files)
    assert shlex.split(rankxform.verify(place.tmp / "more").command)[2] == "SRC"


def test_a_strategy_longer_than_a_file_name(tmp_path):
    place = Place(tmp_path, SHARDED, SHARDED, {"w": ((8, 2), "Float32")})
    many = "shard:" + ",".join(f"^(w|nothing{i})$=0" for i in range(30)) + "@4"
    rankxform.transform(place.src, place.dst, many, place.b)
    assert "same      every byte" in compare_as_printed(place.dst)


def test_a_destination_of_another_step_is_not_to_be_repaired(tmp_path):
    """The command that was printed wrote the same file again."""
    place = Place(tmp_path, SHARDED, SHARDED, {"w": ((8, 2), "Float32")}, name="net-1_10")
    place.transform()
    reference.write_checkpoint(
        place.src, SHARDED, place.params, name="net-1_20", make=reference.counting_tensor
    )
    verdict = place.verify()
    assert verdict.same is False and verdict.repair is None
    assert any("was made with other options" in notice for notice in verdict.notices)


def test_the_folder_above_destinations_names_one(tmp_path):
    place = Place(tmp_path, SHARDED, SHARDED, {"w": ((8, 2), "Float32")})
    rankxform.transform(place.src, place.dst / "1_10", place.a, place.b, verify=True)
    with pytest.raises(rankxform.UsageError, match="such as 1_10") as refused:
        rankxform.verify(place.dst)
    assert refused.value.tries == (f"rankxform verify {place.dst}/1_10",)


def test_what_was_not_compared_does_not_count(place):
    place.transform(overwrite=True, verify=True, fsync=False)
    size = place.final(0).stat().st_size
    whole = rankxform.verify(place.dst)
    os.rename(place.final(1), place.tmp / "away")
    found = rankxform.verify(place.dst)
    assert found.same is False and whole.bytes_compared == found.bytes_compared + size
    os.rename(place.tmp / "away", place.final(1))
    manifest = place.manifest
    for damaged in ("x", None, [1], 10**18):
        (place.dst / "rankxform.json").write_text(json.dumps({**manifest, "ranks": damaged}))
        assert rankxform.verify(place.dst).same
    (place.dst / "rankxform.json").write_text(json.dumps({**manifest, "ranks": 10**30}))
    with pytest.raises(rankxform.StorageError, match="has a number of over 20 digits"):
        rankxform.verify(place.dst)
    del next(iter(manifest["files"].values()))["digest"]
    (place.dst / "rankxform.json").write_text(json.dumps(manifest))
    assert rankxform.verify(place.dst).same is None


def test_a_record_names_no_file_to_be_removed(place):
    manifest = place.manifest
    name = f"../src/rank_3/{place.shard(3).name}"
    manifest["companions"] = {name: ""}
    (place.dst / "rankxform.json").write_text(json.dumps(manifest))
    place.transform(overwrite=True, exclude="^b$")
    assert place.shard(3).exists()
    facts = place.shard(3).stat()
    stale = {name: {"id": 3, "size": facts.st_size, "modified": facts.st_mtime_ns}}
    (place.dst / "rankxform.json").write_text(json.dumps({**place.manifest, "stale": stale}))
    with pytest.raises(rankxform.StorageError, match="stale"):
        place.transform(overwrite=True)
    assert place.shard(3).exists()


@pytest.mark.parametrize("alone", [False, True])
def test_a_checksum_that_is_not_the_files_own_is_found(alone, place):
    rankxform.transform(
        place.src, place.dst, place.a, place.b, crc=True, verify=True, overwrite=True, fsync=False
    )
    verify = (lambda: rankxform.verify(place.dst)) if alone else place.verify
    assert verify().same is True
    path = place.dst / f"rank_2/checkpoint_2.{place.kind}"
    data = bytearray(path.read_bytes())
    at = data.index(b"crc_num") + (16 if place.kind == "ckpt" else 10)
    data[at] ^= 1  # the last byte of one, the first digit of the other
    path.write_bytes(data)
    (found,) = verify().differences
    assert (found.file, found.elements) == (str(path), None) and "the file says" in found.text


def test_a_checksum_that_is_no_more_to_be_found_is_missed(place):
    """Where its mark is damaged, MindSpore can read no .ckpt, and no checksum in safetensors."""
    rankxform.transform(
        place.src, place.dst, place.a, place.b, crc=True, overwrite=True, fsync=False
    )
    assert place.verify(crc=True).same is True
    path = place.dst / f"rank_2/checkpoint_2.{place.kind}"
    path.write_bytes(path.read_bytes().replace(b"crc_num", b"cbc_num"))
    (found,) = place.verify(crc=True).differences
    told_why = "the file is damaged" if place.kind == "ckpt" else "carries no checksum (--crc)"
    assert (found.file, found.elements) == (str(path), None) and told_why in found.text


def test_what_no_reader_of_a_dcp_can_open_is_different(tmp_path):
    """Its items are ZIPs, of which not only tensors' bytes count."""
    place = Place(tmp_path, [{"w": ([2], [0, -1], 0, 0)}], [{}], {"w": ((8, 4), "Float32")})
    rankxform.transform(place.src, place.dst, place.a, dst_form="dcp", fsync=False)
    path = place.dst / "__0_0.distcp"
    data, readable = path.read_bytes(), 0
    for at in range(0, len(data), 5):
        path.write_bytes(data[:at] + bytes([data[at] ^ 4]) + data[at + 1 :])
        verdict = rankxform.verify(place.src, place.dst, place.a, dst_form="dcp")
        with suppress(Exception):
            reference_dcp.read_items(place.dst)
            readable += 1
            continue
        assert verdict.same is False, at
    assert 0 < readable < len(data) // 5


def test_a_manifest_that_makes_no_sense_is_one_message(tmp_path):
    place = WrittenPlace(tmp_path, "ckpt")
    rankxform.transform(
        place.src, place.dst, place.a, place.b, verify=True, overwrite=True, fsync=False
    )
    path = place.dst / "rankxform.json"
    record = json.loads(path.read_text())
    record["stages"]["0"]["parameters"]["w"] = [2]
    path.write_text(json.dumps(record))
    with pytest.raises(
        rankxform.StorageError, match="damaged: .*what it says of .* makes no sense"
    ):
        rankxform.verify(place.dst)
