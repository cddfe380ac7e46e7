"""Whole conversions against the slow reference, in one process and without MPI."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest

import rankxform
from tests import reference
from tests.cases import random_case, unevenly_sharded


def convert(case, tmp, kind="ckpt", strategy="files", make=reference.full_tensor, **options):
    """Write the case's source, convert it, and return what is wrong with the output."""
    src = reference.write_checkpoint(
        tmp / "src", case.src, case.params, case.extras, kind, make=make
    )
    write = reference.write_stage_files if strategy == "files" else reference.write_strategy
    a, b = (
        None if stages is None else write(tmp / f"{side}.strategy", stages)
        for side, stages in (("src", case.src), ("dst", case.dst))
    )
    report = rankxform.transform(src, tmp / "dst", a, b, fsync=False, **options)
    out = options.get("format", kind)
    wanted = options.get("ranks") or None
    wrong = reference.wrong_slices(tmp / "dst", case.dst, case.params, out, wanted, make)
    return wrong, report


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(120))
def test_any_strategy_to_any_other(seed, tmp_path):
    case = random_case(seed, mindspore_agrees=False)
    memory = (1 << 20, 64 << 20)[seed % 2]
    assert convert(case, tmp_path, ("ckpt", "safetensors")[seed % 2], memory=memory)[0] == []


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(40))
def test_parts_need_not_be_equal(seed, tmp_path):
    case = unevenly_sharded(random_case(seed, mindspore_agrees=False), seed)
    kind = ("ckpt", "safetensors")[seed % 2]
    assert convert(case, tmp_path, kind, verify=seed % 3 == 0)[0] == []


@pytest.mark.sampled
@pytest.mark.parametrize("ranks", [(8, 6), (3, 5), (7, 1), (1, 7), (64, 56), (12, 18)])
def test_numbers_of_ranks_need_no_common_factor(ranks, tmp_path):
    for seed in range(3 if max(ranks) > 20 else 8):
        case = random_case(seed, mindspore_agrees=False, ranks=ranks, whole=False)
        assert convert(case, tmp_path / str(seed))[0] == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize(("src", "dst"), [("ckpt", "safetensors"), ("safetensors", "ckpt")])
def test_either_container_becomes_the_other(src, dst, seed, tmp_path):
    case = random_case(seed, mindspore_agrees=False)
    assert convert(case, tmp_path, src, format=dst)[0] == []


@pytest.mark.sampled
@pytest.mark.parametrize("seed", range(20))
def test_there_and_back_is_the_identity(seed, tmp_path):
    case = random_case(seed, mindspore_agrees=False, whole=False)
    convert(case, tmp_path)
    a, b = str(tmp_path / "src.strategy"), str(tmp_path / "dst.strategy")
    rankxform.transform(tmp_path / "dst", tmp_path / "back", b, a, fsync=False)
    assert reference.wrong_slices(tmp_path / "back", case.src, case.params) == []


def test_the_same_layout_reads_only_its_own_file(tmp_path):
    layouts = [{"w": ([4], [0, -1], 0, 0), "v": ([2, 2], [1, 0], 0, 0)}]
    params = {"w": ((8, 4), "Float32"), "v": ((8, 4), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", layouts, params)
    strategy = reference.write_strategy(tmp_path / "s.ckpt", layouts)
    plan = rankxform.plan(src, strategy, strategy)
    assert [list(one.bytes_from) for one in plan.shards] == [["0"], ["1"], ["2"], ["3"]]


@pytest.mark.parametrize("seed", range(30))
def test_each_needed_byte_is_read_once(seed, tmp_path):
    case = random_case(seed, mindspore_agrees=False, whole=False)
    wrong, report = convert(case, tmp_path)
    assert wrong == []
    listed = {n for stage in case.dst for n in stage}
    unlisted = 8 * reference.stage_size(case.dst) * len(case.dst)  # global_step, learning_rate
    whole = sum(
        int(np.prod(shape)) * reference.ITEM[dtype]
        for name, (shape, dtype) in case.params.items()
        if name in listed
    )
    # Rows that hold short runs of what is wanted are read complete, but no byte twice.
    assert report.bytes_read <= whole + unlisted
    assert report.bytes_read >= sum(
        min(int(np.prod(shape)) * reference.ITEM[dtype] for shape, dtype in [case.params[n]])
        for n in listed
    )


def test_a_subset_of_destination_ranks(tmp_path):
    case = random_case(11, mindspore_agrees=False, ranks=(4, 6), whole=False)
    wrong, report = convert(case, tmp_path, ranks=(1, 4))
    assert wrong == []
    made = sorted(p.parent.name for p in (tmp_path / "dst").rglob("*.ckpt"))
    assert made == ["rank_1", "rank_4"] and len(report.files) == 2


def test_a_subset_needs_only_its_own_source_files(tmp_path):
    layouts = [{"a": ([2], [0], 0, 0)}, {"b": ([2], [0], 0, 0)}]
    params = {"a": ((4,), "Float32"), "b": ((4,), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", layouts, params)
    strategy = reference.write_strategy(tmp_path / "s.ckpt", layouts)
    for rank in (0, 1, 2):
        (tmp_path / "src" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt").unlink()
    rankxform.transform(src, tmp_path / "dst", strategy, strategy, ranks=(3,))
    assert reference.wrong_slices(tmp_path / "dst", layouts, params, ranks=[3]) == []


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
@pytest.mark.parametrize("dst", [None, ([2, 2], [0, -1], 0, 0)])
def test_a_source_without_redundant_copies(kind, dst, tmp_path):
    """remove_redundancy keeps each parameter on one rank of those with equal slices."""
    layout = ([2, 2], [-1, 0], 0, 0)
    params = {f"p{i}": ((4, 8), "Float32") for i in range(6)}
    src = [dict.fromkeys(params, layout)]
    for rank in range(4):
        entries = {}
        for i, (name, (shape, dtype)) in enumerate(params.items()):
            group = [rank % 2, rank % 2 + 2]
            if group[i % 2] == rank:
                full = reference.full_tensor(name, shape, dtype)
                entries[name] = dtype, reference.shard(full, layout, rank)
        entries["global_step"] = "Int32", np.array([3], "<i4")
        path = tmp_path / "src" / f"rank_{rank}" / f"checkpoint_{rank}.{kind}"
        if kind == "ckpt":
            reference.write_ckpt(path, entries)
        else:
            reference.write_safetensors(path, entries, {"remove_redundancy": "True"})
    a = reference.write_strategy(tmp_path / "a.ckpt", src)
    target = None if dst is None else [dict.fromkeys(params, dst)]
    b = None if dst is None else reference.write_strategy(tmp_path / "b.ckpt", target)
    rankxform.transform(tmp_path / "src", tmp_path / "dst", a, b)
    assert reference.wrong_slices(tmp_path / "dst", target, params, kind) == []
    if kind == "safetensors":
        data = next((tmp_path / "dst").rglob("*.safetensors")).read_bytes()
        assert b'"remove_redundancy":"True"' not in data


def test_a_missing_rank_is_no_error_while_its_replica_is_there(tmp_path):
    layouts = [{"w": ([2, 2], [-1, 0], 0, 0)}]
    params = {"w": ((4, 8), "Float32")}
    src = reference.write_checkpoint(tmp_path / "src", layouts, params)
    strategy = reference.write_strategy(tmp_path / "s.ckpt", layouts)
    (tmp_path / "src" / "rank_3" / "checkpoint_3.ckpt").unlink()
    report = rankxform.transform(src, tmp_path / "dst", strategy, None)
    assert reference.wrong_slices(tmp_path / "dst", None, params) == []
    assert any("no file of rank 3" in notice for notice in report.notices)
    (tmp_path / "src" / "rank_1" / "checkpoint_1.ckpt").unlink()
    with pytest.raises(
        rankxform.CheckpointError, match=r"ranks 1, 3 have no file.*\[0:4, 4:8\] of 'w'"
    ):
        rankxform.transform(src, tmp_path / "again", strategy, None)


def test_one_complete_file_is_a_source(tmp_path):
    params = {"w": ((8, 4), "Float32")}
    reference.write_checkpoint(tmp_path, None, params, name="model")
    layouts = [{"w": ([4], [0, -1], 0, 0)}]
    strategy = reference.write_strategy(tmp_path / "s.ckpt", layouts)
    rankxform.transform(tmp_path / "rank_0" / "model.ckpt", tmp_path / "dst", None, strategy)
    assert reference.wrong_slices(tmp_path / "dst", layouts, params) == []


@pytest.mark.parametrize("pieces", ["bytes", "rows"])
def test_a_parameter_in_pieces_is_joined(pieces, tmp_path):
    """Synchronous saving splits bytes, asynchronous saving splits rows; both state the whole dims."""
    full = reference.full_tensor("w", (6, 5), "Float32")
    data = full.tobytes()
    ends = [0, 33, 50, 120] if pieces == "bytes" else [0, 40, 80, 120]
    path = tmp_path / "src" / "rank_0" / "checkpoint_0.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes(
        b"".join(
            reference.ckpt_entry("w", "Float32", (6, 5), data[a:b])
            for a, b in itertools.pairwise(ends)
        )
    )
    layouts = [{"w": ([3], [0, -1], 0, 0)}]
    strategy = reference.write_strategy(tmp_path / "s.ckpt", layouts)
    rankxform.transform(tmp_path / "src", tmp_path / "dst", None, strategy)
    assert reference.wrong_slices(tmp_path / "dst", layouts, {"w": ((6, 5), "Float32")}) == []


def test_parameters_are_chosen_by_regular_expressions(tmp_path):
    params = dict.fromkeys(("net.a.w", "net.a.b", "net.b.w"), ((4,), "Float32"))
    src = reference.write_checkpoint(tmp_path / "src", None, params)
    report = rankxform.transform(src, tmp_path / "dst", include=(r"\.w$",), exclude=("net.b",))
    found = reference.read_ckpt(tmp_path / "dst" / "rank_0" / "checkpoint_0.ckpt")
    assert list(found) == ["net.a.w"]
    assert report.left_out[0].names == ("net.a.b", "net.b.w")
    with pytest.raises(rankxform.UsageError, match="no parameter is left"):
        rankxform.transform(src, tmp_path / "none", include=("nothing",))


def test_optimizer_state_is_left_out_for_inference(tmp_path):
    weights = {f"layer{i}.weight": ((4, 4), "Float16") for i in range(2)}
    state = {
        f"{p}.{n}": (s, "Float32") for p in ("adam_m", "adam_v") for n, (s, _) in weights.items()
    }
    layout = ([2], [0, -1], 0, 0)
    src_stages = [dict.fromkeys({**weights, **state}, layout)]
    dst_stages = [dict.fromkeys(weights, ([2], [-1, 0], 0, 0))]
    src = reference.write_checkpoint(tmp_path / "src", src_stages, {**weights, **state})
    a = reference.write_strategy(tmp_path / "a.ckpt", src_stages)
    b = reference.write_strategy(tmp_path / "b.ckpt", dst_stages)
    report = rankxform.transform(src, tmp_path / "dst", a, b)
    assert reference.wrong_slices(tmp_path / "dst", dst_stages, weights) == []
    assert set(report.left_out[0].names) == set(state)
    names = reference.read_ckpt(tmp_path / "dst" / "rank_0" / "checkpoint_0.ckpt")
    assert set(names) == set(weights)


def test_memory_does_not_grow_with_the_parameter(tmp_path):
    """A parameter of 1 GiB, sharded on both axes, in a process that may allocate 256 MiB at all."""
    shape = (1 << 14, 1 << 14)
    words = np.lib.format.open_memmap(tmp_path / "w.npy", mode="w+", dtype="<u4", shape=shape)
    for start in range(0, shape[0], 1024):
        words[start : start + 1024] = np.arange(
            start * shape[1], (start + 1024) * shape[1], dtype="<u4"
        ).reshape(1024, -1)
    src_layout, dst_layout = ([2], [0, -1], 0, 0), ([2], [-1, 0], 0, 0)
    for rank in range(2):
        part = reference.shard(words, src_layout, rank)
        path = tmp_path / "src" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:  # two pieces of 256 MiB
            for half in np.split(part, 2):
                entry = reference.ckpt_entry("w", "Float32", part.shape, half.tobytes())
                file.write(entry)
    a = reference.write_strategy(tmp_path / "a.ckpt", [{"w": src_layout}])
    b = reference.write_strategy(tmp_path / "b.ckpt", [{"w": dst_layout}])
    program = (
        "import resource, sys; from rankxform.cli.main import main;"
        "resource.setrlimit(resource.RLIMIT_DATA, (256 << 20, 256 << 20)); sys.exit(main())"
    )
    arguments = ["transform", tmp_path / "src", tmp_path / "dst", "--src-strategy", a]
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments, "--dst-strategy", b, "--no-fsync"],
        capture_output=True,
        text=True,
        env={"OPENBLAS_NUM_THREADS": "1", "PATH": "/usr/bin:/bin"},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    for rank in range(2):
        path = tmp_path / "dst" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        dtype, found, data = reference.read_ckpt(path)["w"]
        assert (dtype, found) == ("Float32", (shape[0], shape[1] // 2))
        assert np.array_equal(
            np.frombuffer(data, "<u4").reshape(found), reference.shard(words, dst_layout, rank)
        )
        path.unlink()


def test_files_beyond_2_gib_and_parameters_in_pieces(tmp_path):
    """Two slices of 1.1 GiB, in holes but for a few marks, become one file in five pieces."""
    rows, columns = 2250, 1 << 20
    nbytes, half = rows * columns, rows * columns // 2
    piece = 512 << 20
    marks = {0, 1, half - 1, half, half + 7, nbytes - 1, *range(piece - 2, nbytes, piece)}
    for rank in range(2):
        path = tmp_path / "src" / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
        path.parent.mkdir(parents=True)
        with path.open("wb") as file:
            for start in range(0, half, piece):
                length = min(piece, half - start)
                file.write(reference.ckpt_head("w", "UInt8", (rows // 2, columns), length))
                begin = file.tell()
                for mark in marks:
                    at = mark - rank * half - start
                    if 0 <= at < length:
                        file.seek(begin + at)
                        file.write(bytes([mark % 251 + 1]))
                file.seek(begin + length)
            file.truncate()
    strategy = reference.write_strategy(tmp_path / "a.ckpt", [{"w": ([2], [0, -1], 0, 0)}])
    rankxform.transform(tmp_path / "src", tmp_path / "dst", strategy, fsync=False)
    path = tmp_path / "dst" / "rank_0" / "checkpoint_0.ckpt"
    with path.open("rb") as file:
        for start in range(0, nbytes, piece):
            length = min(piece, nbytes - start)
            head = reference.ckpt_head("w", "UInt8", (rows, columns), length)
            assert file.read(len(head)) == head
            begin, found = file.tell(), {}
            for at in range(0, length, 1 << 24):
                block = np.frombuffer(file.read(min(1 << 24, length - at)), np.uint8)
                found.update((start + at + int(i), int(block[i])) for i in np.flatnonzero(block))
            assert found == {m: m % 251 + 1 for m in marks if start <= m < start + length}
            assert file.tell() == begin + length
        assert file.read(1) == b""
    path.unlink()


@pytest.mark.parametrize("kind", ["ckpt", "safetensors"])
def test_equal_files_are_written_once_and_linked_on_request(kind, tmp_path):
    params = {f"w{i}": ((8, 16), "Float32") for i in range(3)}
    src = [dict.fromkeys(params, ([4], [0, -1], 0, 0))]
    dst = [dict.fromkeys(params, ([4, 2], [-1, 0], 0, 0))]
    folder = reference.write_checkpoint(tmp_path / "src", src, params, kind=kind)
    a, b = (
        reference.write_strategy(tmp_path / f"{n}.ckpt", s) for n, s in (("a", src), ("b", dst))
    )
    report = rankxform.transform(folder, tmp_path / "dst", a, b, link="hard")
    assert reference.wrong_slices(tmp_path / "dst", dst, params, kind) == []
    files = [tmp_path / "dst" / f"rank_{r}" / f"checkpoint_{r}.{kind}" for r in range(8)]
    assert len({path.stat().st_ino for path in files}) == 2
    assert report.files_linked == 6
    assert report.bytes_written == sum(p.stat().st_size for p in files[:2])
    assert not list((tmp_path / "dst").rglob("*.part"))
    plain = rankxform.transform(folder, tmp_path / "plain", a, b, link="none")
    assert plain.files_linked == 0 and plain.bytes_written == 4 * report.bytes_written


def test_files_that_differ_in_a_counter_are_not_linked(tmp_path):
    layouts = [{"w": ([2], [-1], 0, 0)}]
    folder = reference.write_checkpoint(
        tmp_path / "src", layouts, {"w": ((8,), "Float32")},
        lambda rank: {"step": ("Int32", np.array([rank], "<i4"))},
    )  # fmt: skip
    a = reference.write_strategy(tmp_path / "a.ckpt", layouts)
    report = rankxform.transform(folder, tmp_path / "dst", a, a, link="hard")
    assert report.files_linked == 0


@pytest.mark.parametrize("link", ["hard", "none"])
def test_a_plan_reads_and_writes_what_a_conversion_does(link, tmp_path):
    """Files that hold the same bytes are written once, where they may be links to one."""
    params = {"w": ((8, 6), "Float32"), "v": ((8,), "Float32")}
    rows = [{"w": ([2], [0, -1], 0, 0), "v": ([2], [-1], 0, 0)}]
    replicas = [{"w": ([2, 2], [0, -1], 0, 0), "v": ([2, 2], [-1], 0, 0)}]
    src = reference.write_checkpoint(tmp_path / "src", rows, params)
    a = reference.write_strategy(tmp_path / "a.ckpt", rows)
    b = reference.write_strategy(tmp_path / "b.ckpt", replicas)
    plan = rankxform.plan(src, a, b, link=link)
    report = rankxform.transform(src, tmp_path / "dst", a, b, link=link, fsync=False)
    assert plan.bytes_read == report.bytes_read
    written_files = 4 - report.files_linked
    assert written_files == (2 if link == "hard" else 4)
    assert plan.bytes_written == written_files * (4 * 6 + 8) * 4  # without what the format adds
    assert [shard.writers for shard in plan.shards] == [(0,)] * 4
