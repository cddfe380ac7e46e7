"""Where replicas differ, a parameter and its states are one rank's."""

from __future__ import annotations

import numpy as np
import pytest

import rankxform
from tests import reference

NORM = [f"{state}norm.weight" for state in ("", "adam_m.", "adam_v.")]
BIASES = [f"layers.{n}.bias" for n in range(8)]
LAYOUT = {n: ([4], [-1], 0, 0) for n in (*NORM, *BIASES)} | {"up.weight": ([4], [0, -1], 0, 0)}


def write(tmp_path, change, dtype="Float32"):
    """Write four ranks of which the norm and its moments are changed: change(rank, name, array)."""
    for rank in range(4):
        entries = {"up.weight": (dtype, reference.full_tensor(f"up{rank}", (8, 8), dtype))}
        for name in (*BIASES, *NORM):
            words = reference.full_tensor(name, (48,), dtype)
            entries[name] = dtype, change(rank, name, words) if name in NORM else words
        reference.write_safetensors(tmp_path / f"src/rank_{rank}/c_{rank}.safetensors", entries)
    return reference.write_strategy(tmp_path / "a.ckpt", [LAYOUT])


def converted(tmp_path, strategy, match, **options):
    with pytest.warns(rankxform.RankxformWarning, match=match):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", strategy, fsync=False, **options)
    (path,) = (tmp_path / "dst").rglob("*.safetensors")
    made = reference.read_safetensors(path)
    return {n: [rank for rank in range(4) if source(tmp_path, rank)[n] == made[n]] for n in NORM}


def source(tmp_path, rank):
    return reference.read_safetensors(tmp_path / f"src/rank_{rank}/c_{rank}.safetensors")


def test_what_drifted_is_taken_of_the_lowest_rank(tmp_path):
    a = write(tmp_path, lambda rank, name, words: words + rank)
    options = {"accept": ("contradictions",)}
    ranks = converted(tmp_path, a, "taken of rank 0,", **options)
    assert ranks == {name: [0] for name in NORM}
    with pytest.warns(rankxform.RankxformWarning, match="taken of rank 0,"):
        assert rankxform.verify(tmp_path / "src", tmp_path / "dst", a, **options).same


def test_the_group_of_ranks_that_agree_gives_what_differs(tmp_path):
    a = write(tmp_path, lambda rank, name, words: words + (rank == 0))
    options = {"accept": ("contradictions",)}
    assert converted(tmp_path, a, "taken of rank 1-3,", **options) == {
        name: [1, 2, 3] for name in NORM
    }


@pytest.mark.parametrize("dtype", ["Float32", "BFloat16", "Float16"])
def test_moments_alone(tmp_path, dtype):
    """All that lies as they do, the norm too, is the same rank's; the difference is said."""
    ones = {"Float32": 0x3F800000, "BFloat16": 0x3F80, "Float16": 0x3C00}[dtype]
    twos = {"Float32": 0x40000000, "BFloat16": 0x4000, "Float16": 0x4000}[dtype]

    def change(rank, name, words):
        if name != NORM[1]:
            return words
        return np.full_like(words, twos if rank in (1, 3) else ones)

    a = write(tmp_path, change, dtype)
    ranks = converted(tmp_path, a, r"by up to 1 in the samples\): taken of rank 0, 2,")
    assert ranks[NORM[1]] == [0, 2]


def test_a_part_that_ranks_have_whole_and_otherwise(tmp_path):
    """Of a tensor in parts; of other ones enough is equal that the strategy is not refuted."""
    random = np.random.default_rng(1)
    wholes = {f"l.{n}.qkv": random.integers(1, 99, (2, 16, 64), "<u4") for n in range(6)}
    for rank in range(2):
        entries = {}
        for name, (shared, own) in wholes.items():
            part = shared + (rank if name == "l.5.qkv" else 0)
            entries[name] = "Float32", np.concatenate([own[8 * rank : 8 * rank + 8], part])
        reference.write_safetensors(tmp_path / f"src/rank_{rank}/c_{rank}.safetensors", entries)
    options = {
        "src_strategy": "shard:qkv=0:16/16r@2",
        "accept": ("contradictions",),
        "fsync": False,
    }
    with pytest.warns(rankxform.RankxformWarning, match="l.5.qkv.*: taken of rank 0,"):
        rankxform.transform(tmp_path / "src", tmp_path / "dst", **options)
    (path,) = (tmp_path / "dst").rglob("*.safetensors")
    made = reference.read_safetensors(path)
    for name, (shared, own) in wholes.items():
        assert made[name][2] == np.concatenate([own, shared]).tobytes()
