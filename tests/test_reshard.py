"""Arrays in memory under another strategy, by one process (`tests/mpi/test_reshard.py`: by several)."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import rankxform


def test_words_of_bfloat16_and_a_fortran_array():
    words = np.arange(12, dtype=np.uint16).reshape(3, 4)
    held = {"w": words, "f": np.asfortranarray(np.arange(6.0).reshape(2, 3))}
    found = rankxform.reshard(held, dtypes={"w": "BFloat16"}, progress=False)
    assert found.dtypes["w"] == "BFloat16" and found["w"].tobytes() == words.tobytes()
    assert (found["f"] == held["f"]).all()
    cast = rankxform.reshard(held, dtypes={"w": "BFloat16"}, dtype="fp32", progress=False)
    assert cast["w"].dtype == np.float32


def test_workers_without_mpi_are_refused(monkeypatch):
    monkeypatch.setenv("MS_WORKER_NUM", "8")
    with pytest.raises(rankxform.UsageError, match="8 workers were started without MPI"):
        rankxform.reshard({"w": np.zeros(3)}, progress=False)


def test_factors_are_not_released_before_they_are_used(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"quantization_config": {"weight_block_size": [128, 128]}}'
    )
    slices = {
        "m.up.weight": np.full((256, 256), 0x38, "u1"),
        "m.up.weight_scale_inv": np.full((2, 2), 3, "f4"),
        "z": np.ones((4, 4), "f4"),
    }
    found = rankxform.reshard(
        slices, dtypes={"m.up.weight": "F8_E4M3"}, dtype="fp32", release=True,
        config=str(tmp_path / "config.json"), progress=False,
    )  # fmt: skip
    assert (found["m.up.weight"] == 3).all() and slices == {}


@pytest.mark.parametrize(
    "values",
    [
        np.arange(10.0)[::2], np.ones((4, 3))[:, 1:2], np.broadcast_to(np.float32(1), (4,)),
        np.float64(3), np.zeros((0, 3), "f4"), np.ones(3, bool), np.asfortranarray(np.eye(3)),
    ],
)  # fmt: skip
def test_arrays_of_any_strides(values):
    found = rankxform.reshard({"w": np.asarray(values), "z": np.ones(2)}, progress=False)
    assert np.array_equal(found["w"], values) and found["w"].dtype == values.dtype


@pytest.mark.parametrize(
    ("values", "dtypes", "message"),
    [
        (np.arange(4, dtype=">f4"), {}, "bytes in another order"),
        (np.arange(4, dtype=">f4"), {"w": "Float32"}, "bytes in another order"),
        (np.ones(2, "c8"), {"w": "Float64"}, "and not Float64"),
        (np.ones(2, "i4,i4"), {"w": "Int64"}, "and not Int64"),
        (np.array([None, 1]), {"w": "Int64"}, "and not Int64"),
        (np.ma.masked_array([1, 2], [0, 1]), {}, "is a MaskedArray"),
        (np.ones(2, "f4"), {"w": np.float32}, "and not"),
    ],
)
def test_arrays_that_are_none_of_mindspores_are_refused(values, dtypes, message):
    with pytest.raises(rankxform.UsageError, match=message):
        rankxform.reshard({"w": values}, dtypes=dtypes, progress=False)
    with pytest.raises(rankxform.UsageError, match="unknown option 'check_crc'"):
        rankxform.reshard({"w": np.ones(2)}, check_crc=True, progress=False)


def test_one_plan_in_two_threads():
    plan = rankxform.plan_reshard({"w": np.zeros((500, 500))})

    def turn(number):
        given = np.full((500, 500), float(number))
        return {*rankxform.reshard({"w": given}, plan=plan, progress=False)["w"].flat} == {number}

    with ThreadPoolExecutor(2) as threads:
        assert all(threads.map(turn, range(20)))


MEMORY = """
import re, sys
import numpy as np, rankxform
release, edge = sys.argv[1] == "1", 1448  # arrays of 8 MiB, which the allocator keeps in its heap
slices = {f"w{n}": np.arange(edge * edge, dtype="f4").reshape(edge, edge) + n for n in range(24)}
rankxform.reshard({"w": np.ones(8)}, progress=False)
most = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1])  # KiB
before = most()
found = rankxform.reshard(slices, release=release, progress=False)
print((most() - before) / (24 * 8 * 1024))
"""


def test_released_arrays_make_room_for_the_new_ones():
    kept, released = (
        float(
            subprocess.run(
                [sys.executable, "-c", MEMORY, way], check=True, capture_output=True
            ).stdout
        )
        for way in "01"
    )
    assert released < 0.2 and kept > 0.5, (released, kept)  # parts of one side


def test_a_plan_before_there_are_slices_takes_none_of_their_memory():
    plan = rankxform.plan_reshard(None, shapes={"w": ((1 << 20, 1 << 20), "float32")})  # 4 TiB
    with pytest.raises(rankxform.UsageError, match="not those that the plan was made for"):
        rankxform.reshard({"w": np.zeros((4, 6), "<f4")}, plan=plan, progress=False)


@pytest.mark.filterwarnings("ignore:the matrix subclass")
def test_arrays_to_fill_that_do_not_fit():
    data = np.zeros(64, "<f4")
    held = {"w": data[:24].reshape(4, 6), "v": np.ones(3, "<f4"), "f": np.asfortranarray(np.eye(3))}
    read_only = np.zeros((4, 6), "<f4")
    read_only.flags.writeable = False
    mistakes = [
        (
            {"w": np.zeros((6, 4), "<f4")},
            "expected Float32 [4, 6] for 'w', and it is float32 [6, 4]",
        ),
        ({"w": np.zeros((4, 6), ">f4")}, "and it is >f4 [4, 6]"),
        ({"w": [0.0] * 24}, "and it is a list"),
        ({"w": np.ma.zeros((4, 6), "<f4")}, "and it is a MaskedArray"),
        ({"w": np.zeros((4, 6), "<f4").view(np.matrix)}, "and it is a matrix"),
        (
            {"w": np.asfortranarray(np.zeros((4, 6), "<f4"))},
            "and it is float32 [4, 6], strided or read-only",
        ),
        ({"w": read_only}, "and it is float32 [4, 6], strided or read-only"),
        ({"q": read_only}, "'q' is no array that this process gets"),
        ({"w": held["w"]}, "into['w'] and the slice 'w' share memory"),
        ({"w": data[23:47].reshape(4, 6)}, "the slice 'w' and into['w'] share memory"),
        (
            {"w": data[24:48].reshape(4, 6), "v": data[47:50]},
            "into['w'] and into['v'] share memory",
        ),
        ([held["w"]], "into is a list; expected a dict"),
    ]
    for into, words in mistakes:
        with pytest.raises(rankxform.UsageError) as raised:
            rankxform.reshard(held, into=into, progress=False)
        assert words in str(raised.value)
    apart = {"w": data[24:48].reshape(4, 6), "v": data[48:51], "f": np.empty((3, 3))}
    held["w"][:] = 7
    found = rankxform.reshard(held, into=apart, progress=False)
    assert (data[24:51] == [7] * 24 + [1] * 3).all() and (apart["f"] == np.eye(3)).all()
    assert all(found[name] is values for name, values in apart.items())


def test_what_a_person_mistakes_is_one_line():
    rows, one = {"w": np.zeros((4, 6), "<f4")}, "shard:w=0@1"
    mistakes = {
        "expected names of parameters": lambda: rankxform.reshard({0: rows["w"]}, one, one),
        "expected what plan_reshard returns": lambda: rankxform.reshard(rows, plan="plan"),
        "unknown option 'fallback'": lambda: rankxform.reshard(rows, one, one, fallback="x"),
        "a name like 'v'": lambda: rankxform.reshard(rows, "shard:w=0,v=0@1", one),
        "slices and shapes are given": lambda: rankxform.plan_reshard(rows, one, one, shapes={}),
        "expected shape and type": lambda: rankxform.plan_reshard(None, shapes={"w": (4, 6)}),
        "shard:w=0@1, which": lambda: rankxform.reshard(rows, "w=0@1", one),
    }
    for words, call in mistakes.items():
        with pytest.raises(rankxform.RankxformError) as raised:
            call()
        assert words in str(raised.value) and "arrays-" not in str(raised.value)
    planned = rankxform.plan_reshard(rows, one, one)
    assert repr(planned) == "ReshardPlan(1 -> 1 rank, 1 parameter)"
    assert repr(rankxform.reshard(rows, plan=planned)).startswith("Parameters(1 slice of rank 0")
