"""Tensors of several parts, each sharded by rows for itself."""

from __future__ import annotations

import numpy as np
import pytest

import rankxform
from rankxform.errors import RequestError, StrategyError, UsageError
from rankxform.layout.strategy import PatternStrategy
from tests import reference

WORDS = {"Float32": "<u4", "BFloat16": "<u2", "Int8": "<u1"}


def write(src, ranks, parts, *, dtype="Float32", kind="safetensors", states=True, shape=(6,)):
    """Write ranks of a fused tensor with its state; return the whole tensors.

    parts: (rows in the whole, whether each rank has all of them).
    """
    random, whole = np.random.default_rng(len(parts)), {}
    slices = [{} for _ in range(ranks)]
    for name in ("qkv.weight", *(("adam_m.qkv.weight",) if states else ())):
        pieces = [random.integers(1, 200, (rows, *shape)).astype(WORDS[dtype]) for rows, _ in parts]
        whole[name] = np.concatenate(pieces)
        for rank, entries in enumerate(slices):
            own = [
                piece if is_whole else np.split(piece, ranks)[rank]
                for piece, (_, is_whole) in zip(pieces, parts)
            ]
            entries[name] = dtype, np.concatenate(own)
    write_file = {"safetensors": reference.write_safetensors, "ckpt": reference.write_ckpt}[kind]
    for rank, entries in enumerate(slices):
        entries["norm"] = dtype, np.arange(1, 5).astype(WORDS[dtype])
        write_file(src / f"rank_{rank}/c_{rank}.{kind}", entries)
    return whole


def whole_tensors(dst, kind="safetensors"):
    (path,) = dst.rglob(f"*.{kind}")
    read = {"safetensors": reference.read_safetensors, "ckpt": reference.read_ckpt}[kind]
    return {name: data for name, (_, _, data) in read(path).items()}


@pytest.mark.parametrize(
    ("ranks", "text", "parts"),
    [
        (2, "32/16/16", [(32, False), (16, False), (16, False)]),
        (4, "8/4/4", [(8, False), (4, False), (4, False)]),
        (3, "9/3r/6", [(9, False), (3, True), (6, False)]),
        (2, "1/1", [(6, False), (6, False)]),
        (2, "1/1/1", [(2, False), (2, False), (2, False)]),  # of one row of each rank too
        (5, "5r/10", [(5, True), (10, False)]),
        (1, "3/4", [(3, False), (4, False)]),
    ],
)
@pytest.mark.parametrize("kind", ["safetensors", "ckpt"])
def test_parts_are_put_one_behind_the_other(ranks, text, parts, kind, tmp_path):
    whole = write(tmp_path / "src", ranks, parts, kind=kind)
    options = {"src_strategy": f"shard:qkv=0:{text}@{ranks}"}
    rankxform.transform(tmp_path / "src", tmp_path / "dst", **options, verify=True, fsync=False)
    made = whole_tensors(tmp_path / "dst", kind)
    assert all(made[name] == array.tobytes() for name, array in whole.items())
    assert rankxform.verify(tmp_path / "src", tmp_path / "dst", **options).same


@pytest.mark.parametrize("dtype", WORDS)
def test_random_parts_and_destinations(dtype, tmp_path):
    """Of any types and axes, beside expressions without parts, for several ranks."""
    random = np.random.default_rng(7)
    for case in range(12):
        ranks = int(random.integers(1, 5))
        parts = [(ranks * int(random.integers(1, 4)), False) for _ in range(random.integers(1, 5))]
        if random.integers(2):
            parts.insert(0, (int(random.integers(1, 6)), True))
        src, dst = tmp_path / f"{case}", tmp_path / f"{case}dst"
        shape = tuple(map(int, random.integers(1, 5, random.integers(0, 3))))
        whole = write(src, ranks, parts, dtype=dtype, shape=shape)
        text = "/".join(f"{rows}{'r' * is_whole}" for rows, is_whole in parts)
        ways = len(whole["qkv.weight"])
        layout = ([ways], [0] + [-1] * len(shape), 0, 0)
        stages = [{**dict.fromkeys(whole, layout), "norm": ([ways], [-1], 0, 0)}]
        b = reference.write_strategy(tmp_path / f"{case}.ckpt", stages)
        a = f"shard:qkv=0:{text}@{ranks}"
        rankxform.transform(src, dst, a, b, fsync=False, unmatched="replicate")
        for name, array in whole.items():
            rows = [whole_tensors(dst / f"rank_{rank}")[name] for rank in range(ways)]
            assert b"".join(rows) == array.tobytes()


def test_a_part_that_each_rank_has_whole_is_compared(tmp_path):
    write(tmp_path / "src", 2, [(4, False), (16, True)], shape=(64,), states=False)
    path = tmp_path / "src/rank_1/c_1.safetensors"
    entries = {n: (d, np.frombuffer(data, "<u4").reshape(s))
               for n, (d, s, data) in reference.read_safetensors(path).items()}  # fmt: skip
    words = entries["qkv.weight"][1].copy()
    words[2:] += 1
    path.unlink()
    reference.write_safetensors(path, {**entries, "qkv.weight": ("Float32", words)})
    with pytest.raises(rankxform.CheckpointError, match="hold replicas of 'qkv.weight'"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", "shard:qkv=0:4/16r@2", fsync=False)


@pytest.mark.parametrize(
    ("text", "match"),
    [("8/8", "are 16 rows, and slices of 10 rows .* make 20"), ("9/11", "9 rows .* by 2"),
     ("1/1/1", "are 3 rows")],
)  # fmt: skip
def test_rows_that_are_not_those_of_the_files(text, match, tmp_path):
    write(tmp_path / "src", 2, [(12, False), (8, False)])
    with pytest.raises(RequestError, match=match):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", f"shard:qkv=0:{text}@2")
    assert not (tmp_path / "dst").exists()


def test_a_missing_rank_is_named(tmp_path):
    write(tmp_path / "src", 2, [(4, False), (4, False)])
    (tmp_path / "src/rank_1/c_1.safetensors").unlink()
    with pytest.raises(rankxform.CheckpointError, match="rank 1 has no file"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", "shard:qkv=0:4/4@2")


@pytest.mark.parametrize("text", ["qkv=1:1/1@2", "qkv=0:@2", "qkv=0:a/b@2", "qkv=0:0/4@2"])
def test_words_that_state_no_parts(text):
    with pytest.raises(StrategyError, match="rows of parts of axis 0"):
        PatternStrategy.parse(f"shard:{text}")


def test_a_destination_has_no_parts(tmp_path):
    write(tmp_path / "src", 1, [(4, False)])
    with pytest.raises(UsageError, match="no destination is written so"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", "none", "shard:qkv=0:2/2@2")


@pytest.mark.parametrize("rule", ["qkv=0", "qkv=0:1/1/1"])
def test_what_every_rank_holds_alike_is_no_slice(rule, tmp_path):
    """With parts and without: both ranks hold the whole tensor."""
    random = np.random.default_rng(3)
    whole, rows = random.integers(1, 99, (48, 64), "<u4"), random.integers(1, 99, (32, 64), "<u4")
    for rank in range(2):
        entries = {"l.0.qkv_proj.weight": ("Float32", whole),
                   "l.0.x.weight": ("Float32", rows[16 * rank : 16 * rank + 16])}  # fmt: skip
        reference.write_safetensors(tmp_path / f"src/rank_{rank}/c_{rank}.safetensors", entries)
    with pytest.raises(rankxform.RankxformError, match="all ranks hold the same bytes of it"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", f"shard:{rule},x=0@2", fsync=False)
