"""Slices that processes hold in memory, under another strategy."""

from __future__ import annotations

import os
import random

import numpy as np
import pytest

import rankxform
from rankxform.engine import in_memory
from rankxform.engine.sinks import numpy_type
from rankxform.planning import budget
from tests import reference
from tests.cases import random_case, unevenly_sharded
from tests.mpi.conftest import as_nodes, prepare
from tests.mpi_launch import world

SIZES = (1, 2, 3, 5, 7)
SEEDS = int(os.environ.get("RANKXFORM_SEEDS", 6))
PARAMS = {"w": ((8, 6), "Float32"), "b": ((8,), "BFloat16"), "h": ((8, 2), "Float16")}


def held_by(rank, src):
    """Return what a rank saved, as arrays of the types that numpy has for them."""
    path = next((src / f"rank_{rank}").glob("*"), None) if (src / f"rank_{rank}").exists() else None
    if path is None:
        return {}
    return {
        name: np.frombuffer(data, np.uint8).view(numpy_type(dtype)).reshape(shape).copy()
        for name, (dtype, shape, data) in reference.read_any(path).items()
    }


def stages_of(rng, size):
    """Return pipeline stages and ranks of a stage, of both sides, for no more ranks than `size`."""
    stages = [(a, b) for a in range(1, size + 1) for b in range(1, size + 1) if a * b <= size]
    return rng.choice(stages), rng.choice(stages)


def case_of(seed, size):
    """Return a random case of which each process holds a rank at most."""
    rng = random.Random(seed)
    if rng.random() < 0.5 and size > 3:
        case = random_case(
            seed, mindspore_agrees=False, stages=((2, 1), (1, 2), (1, 1)), whole=False
        )
        while max(map(ranks_of, (case.src, case.dst))) > size:
            seed += 1000
            case = random_case(
                seed, mindspore_agrees=False, stages=((2, 1), (1, 2), (1, 1)), whole=False
            )
        return case
    sizes = rng.randint(1, size), rng.randint(1, size)
    case = random_case(seed, mindspore_agrees=False, ranks=sizes, whole=False)
    return unevenly_sharded(case, seed) if rng.random() < 0.3 else case


def rooms(arrays, rng):
    """Return arrays to fill in the place of some of these, with other content."""
    return {name: np.full_like(values, 1) for name, values in arrays.items() if rng.random() < 0.7}


def ranks_of(stages):
    return len(stages) * reference.stage_size(stages)


def as_large_tensors(monkeypatch):
    """Have small tensors be moved as large ones are, in several tiles."""
    monkeypatch.setattr(in_memory, "_LEAST_BYTES", 0)
    monkeypatch.setattr(budget, "_LARGEST_ARENA", 4096)


@pytest.mark.sampled
@pytest.mark.world(sizes=(2, 3, 5))
@pytest.mark.parametrize("seed", range(2 * SEEDS))
def test_what_is_loaded_in_an_exchange_is_what_files_hold(seed, tmp, monkeypatch):
    """On one node and on several, each of which sees some files; any rank on each process."""
    comm, rng = world(), random.Random(seed)
    case = random_case(seed * 10 + comm.size, mindspore_agrees=False, whole=False)
    case = unevenly_sharded(case, seed) if rng.random() < 0.3 else case
    src, a, b = prepare(case, tmp, rng.choice(("ckpt", "safetensors")))
    as_large_tensors(monkeypatch)
    if seed % 2:
        as_nodes(monkeypatch, 2, seed)
    rank = random.Random(f"{seed} {comm.rank}").randrange(ranks_of(case.dst))
    expected = {
        name: reference.shard(reference.full_tensor(name, *case.params[name]), layout, local).view(
            numpy_type(case.params[name][1])
        )
        for name, layout, local in reference.held_by(rank, case.dst, case.params)
    }
    into = rooms(expected, random.Random(f"{seed} {comm.rank}")) if rng.random() < 0.5 else None
    found = rankxform.load(
        src, a, b, rank=rank, into=into, comm=comm, progress=False, memory="1M",
        read_method=("two-phase", "auto")[seed % 2],
    )  # fmt: skip
    for name, words in expected.items():
        assert found[name].tobytes() == words.tobytes(), (rank, name)
    assert all(found[name] is room for name, room in (into or {}).items())


@pytest.mark.sampled
@pytest.mark.world(sizes=SIZES)
@pytest.mark.parametrize("seed", range(SEEDS))
def test_it_is_what_transform_and_load_make(seed, tmp, monkeypatch):
    comm, rng = world(), random.Random(seed)
    case = case_of(seed * 10 + comm.size, comm.size)
    src, a, b = prepare(case, tmp)
    options = rng.choice([{}, {}, {"dtype": "fp32"}, {"exclude": "layer1"}, {"memory": "1M"}])
    rankxform.transform(src, tmp / "dst", a, b, comm=comm, fsync=False, **options)
    places = [*range(comm.size)], [*range(comm.size)]
    if rng.random() < 0.7:  # processes hold and get other ranks than their own
        rng.shuffle(places[0])
        rng.shuffle(places[1])
    src_rank, rank = (ranks[comm.rank] for ranks in places)
    held = held_by(src_rank, src)
    release = bool(rng.getrandbits(1))
    if seed % 3:
        as_large_tensors(monkeypatch)
    names = {name for stage in case.src for name in stage}
    dtypes = {name: "BFloat16" for name in names if case.params[name][1] == "BFloat16"}
    expected = held_by(rank, tmp / "dst")
    into = rooms(expected, rng) if rng.random() < 0.5 else None
    found = rankxform.reshard(
        held, a, b, comm=comm, release=release, progress=False, dtypes=dtypes, src_rank=src_rank,
        rank=rank, into=into, **options,
    )  # fmt: skip
    assert found.keys() == expected.keys(), (sorted(found), sorted(expected))
    for name, values in expected.items():
        assert found[name].dtype == values.dtype and found[name].shape == values.shape
        assert found[name].tobytes() == values.tobytes(), name
    assert all(found[name] is room for name, room in (into or {}).items())
    assert bool(held) != release or not held_by(src_rank, src)


@pytest.mark.world(sizes=(4, 6))
@pytest.mark.parametrize("axis", [0, 1])
def test_no_tile_crosses_where_pieces_meet_that_stay(axis, tmp, monkeypatch):
    """Two shards become one, on a process that holds either: nothing is sent of the other half."""
    comm, rng = world(), random.Random(axis)
    monkeypatch.setattr(in_memory, "_LEAST_BYTES", 0)
    full, tensor_map = np.arange(144, dtype="<f4").reshape(12, 12), [[0, -1], [-1, 0]][axis]
    a, b = (str(tmp / f"{side}.ckpt") for side in "ab")
    for path, shards in ((a, comm.size), (b, comm.size // 2)) if comm.rank == 0 else ():
        reference.write_strategy(path, [{"w": ([shards], tensor_map, 0, 0)}])
    comm.Barrier()
    for _ in range(8):
        taking = [2 * pair + rng.randrange(2) for pair in range(comm.size // 2)]
        others = [process for process in range(comm.size) if process not in taking]
        rank = [*taking, *others].index(comm.rank)
        held = {"w": np.split(full, comm.size, axis)[comm.rank].copy()}
        found = rankxform.reshard(held, a, b, comm=comm, rank=rank, progress=False)
        if rank < len(taking):
            np.testing.assert_array_equal(found["w"], np.split(full, len(taking), axis)[rank])


def small(comm, tmp, shards=2):
    """Return a checkpoint of PARAMS in two shards, with its strategy and one by columns."""
    src = [dict.fromkeys(("w", "h"), ([comm.size // shards, shards], [0, -1], 0, 0))]
    dst = [{"w": ([comm.size], [-1, -1], 0, 0), "h": ([comm.size], [-1, -1], 0, 0)}]
    params = {name: PARAMS[name] for name in ("w", "h")}
    if comm.rank == 0:
        reference.write_checkpoint(tmp / "src", src, params)
        reference.write_strategy(tmp / "a.ckpt", src)
        reference.write_strategy(tmp / "b.ckpt", dst)
    comm.Barrier()
    return tmp / "src", tmp / "a.ckpt", tmp / "b.ckpt"


@pytest.mark.world(sizes=(4,))
def test_replicas_serve_for_who_holds_nothing_and_what_is_lost_is_named(tmp):
    comm = world()
    src, a, b = small(comm, tmp)
    whole = held_by(comm.rank, src)
    held = {} if comm.rank in (0, 3) else whole
    found = rankxform.reshard(held, a, b, comm=comm, progress=False)
    assert found["w"].shape == (8, 6)
    held = {} if comm.rank in (0, 2) else whole
    with pytest.raises(rankxform.CheckpointError, match="ranks 0, 2 have no file") as caught:
        rankxform.reshard(held, a, b, comm=comm, progress=False)
    assert caught.value.tries[0] == "slices of these ranks, from other processes"


@pytest.mark.world(sizes=(2,))
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda held: held.update(w=held["w"][:2]), "'w'"),
        (lambda held: held.update(w=held["w"].astype("f8")), "w"),
        (lambda held: held.pop("h"), "h"),
        (lambda held: held.update(w=[1, 2]), "'w' is a list; expected a numpy array"),
        (lambda held: held.update(w=held["w"].astype("U3")), "'w' has the type"),
    ],
)
def test_wrong_arrays_of_one_process_are_refused_on_all(change, message, tmp):
    comm = world()
    src, a, b = small(comm, tmp)
    held = held_by(comm.rank, src)
    if comm.rank == 1:
        change(held)
    with pytest.raises(rankxform.RankxformError, match=message):
        rankxform.reshard(held, a, b, comm=comm, progress=False)


@pytest.mark.world(sizes=(2,))
def test_ranks_are_named_once_and_there_are_as_many_as_processes(tmp):
    comm = world()
    src, a, b = small(comm, tmp)
    held = held_by(comm.rank, src)
    with pytest.raises(rankxform.UsageError, match="processes 0 and 1 both hold rank 0"):
        rankxform.reshard(held, a, b, src_rank=0, comm=comm, progress=False)
    with pytest.raises(rankxform.UsageError, match="slices of rank 2 are given"):
        rankxform.reshard(held, a, b, src_rank=2 + comm.rank, comm=comm, progress=False)
    with pytest.raises(rankxform.UsageError, match="nobody takes rank 1"):
        rankxform.reshard(held, a, b, rank=0, comm=comm, progress=False)
    with pytest.raises(rankxform.UsageError, match="dtypes: there is no slice 'q'"):
        rankxform.reshard(held, a, b, dtypes={"q": "BFloat16"}, comm=comm, progress=False)


@pytest.mark.world(sizes=(2, 3))
def test_processes_of_one_communicator_make_one_call(tmp):
    """It was "plan= is given by some processes", which nobody had given."""
    comm = world()
    src, a, b = small(comm, tmp)
    call = rankxform.load if comm.rank == 0 else rankxform.reshard
    with pytest.raises(rankxform.UsageError, match="call load and reshard at once"):
        call(src if comm.rank == 0 else None, a, b, comm=comm, progress=False)


@pytest.mark.world(sizes=(2, 4))
def test_a_plan_is_made_once_and_refused_for_other_slices(tmp):
    comm = world()
    src, a, b = small(comm, tmp, shards=comm.size)
    slices = held_by(comm.rank, src)
    plan = rankxform.plan_reshard(slices, a, b, comm=comm)
    for turn in range(3):
        now = {name: values + turn for name, values in reversed(slices.items())}
        expected = rankxform.reshard(dict(now), a, b, comm=comm, progress=False)
        found = rankxform.reshard(dict(now), plan=plan, comm=comm, progress=False)
        assert all((found[name] == values).all() for name, values in expected.items())
    other = dict(slices)
    if comm.rank == 1:
        other["w"] = other["w"].astype("f2")
    with pytest.raises(rankxform.UsageError, match="slices of rank 1 are not those"):
        rankxform.reshard(other, plan=plan, comm=comm, progress=False)
    another = rankxform.plan_reshard(slices, a, b, comm=comm)
    with pytest.raises(rankxform.UsageError, match="the plan is another's"):
        rankxform.reshard(
            slices, plan=another if comm.rank == 1 else plan, comm=comm, progress=False
        )
    with pytest.raises(rankxform.UsageError, match="plan= stands for"):
        rankxform.reshard(slices, a, plan=plan, comm=comm, progress=False)


@pytest.mark.world(sizes=(2, 4))
def test_arrays_of_the_caller_are_filled_again_and_again(tmp):
    comm = world()
    src, a, b = small(comm, tmp, shards=comm.size)
    slices = held_by(comm.rank, src)
    plan = rankxform.plan_reshard(slices, a, b, comm=comm)
    into = dict(rankxform.reshard(slices, plan=plan, comm=comm, progress=False))
    for turn in range(1, 3):
        now = {name: values + turn for name, values in slices.items()}
        expected = rankxform.reshard(now, a, b, comm=comm, progress=False)
        rankxform.reshard(now, plan=plan, into=into, comm=comm, progress=False)
        assert all((into[name] == values).all() for name, values in expected.items())
    wrong = {**into, "w": into["w"].T.copy()} if comm.rank == 1 else into
    before = {name: values.copy() for name, values in into.items()}
    with pytest.raises(rankxform.UsageError, match="into: expected Float32"):
        rankxform.reshard(slices, plan=plan, into=wrong, comm=comm, progress=False)
    assert all((into[name] == values).all() for name, values in before.items())
    with pytest.raises(rankxform.UsageError, match="a plan fills no arrays"):
        rankxform.plan_reshard(slices, a, b, into=into, comm=comm)


@pytest.mark.world(sizes=(2, 4))
def test_a_plan_is_made_before_there_are_slices(tmp):
    comm = world()
    src, a, b = small(comm, tmp, shards=comm.size)
    slices = held_by(comm.rank, src)
    shapes = {name: (values.shape, values.dtype) for name, values in slices.items()}
    plan = rankxform.plan_reshard(None, a, b, shapes=shapes, comm=comm)
    expected = rankxform.reshard(dict(slices), a, b, comm=comm, progress=False)
    for _ in range(2):
        found = rankxform.reshard(dict(slices), plan=plan, comm=comm, progress=False)
        assert found.keys() == expected.keys()
        assert all(np.array_equal(found[name], values) for name, values in expected.items())


def squares(comm, tmp, shards, dst_shards, edge=640):
    """Return strategies by rows and by columns, and this process's rows, if it holds any."""
    src = [{"w": ([shards], [0, -1], 0, 0)}]
    dst = [{"w": ([dst_shards], [-1, 0], 0, 0)}]
    if comm.rank == 0:
        reference.write_strategy(tmp / "a.ckpt", src)
        reference.write_strategy(tmp / "b.ckpt", dst)
    comm.Barrier()
    full = np.arange(edge * edge, dtype="f4").reshape(edge, edge)
    rows = edge // shards
    held = {"w": full[comm.rank * rows :][:rows].copy()} if comm.rank < shards else {}
    return held, tmp / "a.ckpt", tmp / "b.ckpt", full


@pytest.mark.world(sizes=(4,))
@pytest.mark.parametrize("who", ["all", "one"])
@pytest.mark.parametrize(("shards", "dst_shards"), [(2, 4), (4, 2), (4, 1)])
def test_a_job_grows_and_shrinks_with_release(who, shards, dst_shards, tmp):
    comm = world()
    held, a, b, full = squares(comm, tmp, shards, dst_shards)
    release = who == "all" or comm.rank == 1
    found = rankxform.reshard(held, a, b, release=release, comm=comm, progress=False)
    assert (held == {}) == (release or comm.rank >= shards), "of who asked for it alone"
    columns = full.shape[1] // dst_shards
    if comm.rank < dst_shards:
        assert (found["w"] == full[:, comm.rank * columns :][:, :columns]).all()
    else:
        assert found == {}


@pytest.mark.world(sizes=(4,))
def test_what_processes_ask_otherwise_is_refused_on_all(tmp):
    comm = world()
    held, a, b, _ = squares(comm, tmp, 4, 4, edge=8)
    real = hasattr(comm, "Split")
    plan = rankxform.plan_reshard(held, a, b, dtypes={"w": "Float32"}, comm=comm)
    for arguments in (
        {"plan": plan} if comm.rank != 1 else {"src_strategy": a, "dst_strategy": b},
        {"plan": plan, **({"memory": "32M"} if comm.rank == 1 else {})},
        {"src_strategy": a, "dst_strategy": b, "src_rank": comm.rank - 1},
        *([{"plan": plan, "comm": comm.Split(0, [0, 1, 3, 2][comm.rank])}] if real else []),
    ):
        with pytest.raises(rankxform.UsageError):
            rankxform.reshard(held, progress=False, **{"comm": comm, **arguments})
    with pytest.raises(rankxform.UsageError, match="no process holds slices"):
        rankxform.reshard(None, a, b, comm=comm, progress=False)


@pytest.mark.world(sizes=(4,))
def test_a_plan_is_refused_where_other_replicas_differ(tmp):
    """Running statistics: whole on every rank, without states; each rank's own if they differ."""
    comm = world()
    strategy = [{"w": ([4], [0, -1], 0, 0), "mean": ([4], [-1], 0, 0)}]
    if comm.rank == 0:
        reference.write_strategy(tmp / "a.ckpt", strategy)
    comm.Barrier()
    a, rows = tmp / "a.ckpt", np.arange(8.0).reshape(2, 4) + comm.rank
    states = {"adam_m.w": rows + 1, "adam_v.w": rows + 2}
    alike = {"w": rows, "mean": np.ones(4), **states}
    apart = {**alike, "mean": np.ones(4) * comm.rank}
    plan = rankxform.plan_reshard(alike, a, a, comm=comm)
    with pytest.raises(rankxform.UsageError, match="than those of the plan"):
        rankxform.reshard(apart, plan=plan, comm=comm, progress=False)
    found = rankxform.reshard(apart, a, a, comm=comm, progress=False)
    assert (found["mean"] == comm.rank).all()


@pytest.mark.world(sizes=(4,))
def test_replicas_are_compared_with_a_plan_too(tmp):
    comm = world()
    src, a, b = small(comm, tmp)
    held = held_by(comm.rank, src)
    plan = rankxform.plan_reshard(held, a, b, comm=comm)
    if comm.rank == 3:
        held["w"][:] = -1
    with pytest.raises(rankxform.CheckpointError, match="ranks 1 and 3 hold"):
        rankxform.reshard(held, plan=plan, comm=comm, progress=False)
