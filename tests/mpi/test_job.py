"""The same conversions as everywhere, shared by several processes."""

from __future__ import annotations

import os
import re
import warnings

import pytest

import rankxform
import rankxform.mindspore
from rankxform.target import folder
from tests import reference
from tests.cases import Case, random_case
from tests.mpi.conftest import as_nodes, prepare
from tests.mpi_launch import world

SIZES = (1, 2, 3, 5)


@pytest.mark.sampled
@pytest.mark.world(sizes=SIZES)
@pytest.mark.parametrize("seed", range(12))
def test_every_slice_is_right_at_any_number_of_processes(seed, tmp):
    kind = ("ckpt", "safetensors")[seed % 2]
    case = random_case(seed, mindspore_agrees=False)
    src, a, b = prepare(case, tmp, kind)
    report = rankxform.transform(src, tmp / "dst", a, b, comm=world(), fsync=False)
    assert report.processes == world().size
    wrong = reference.wrong_slices(tmp / "dst", case.dst, case.params, kind)
    assert wrong == []


@pytest.mark.world(real=(3,))
@pytest.mark.parametrize("seed", range(3))
def test_every_slice_is_right_under_mpirun(seed, tmp):
    test_every_slice_is_right_at_any_number_of_processes(seed, tmp)


@pytest.mark.world(sizes=SIZES)
@pytest.mark.parametrize("ranks", [(8, 6), (3, 5), (7, 1)])
def test_ranks_without_a_common_factor(ranks, tmp):
    case = random_case(sum(ranks), mindspore_agrees=False, ranks=ranks, whole=False)
    src, a, b = prepare(case, tmp)
    rankxform.transform(src, tmp / "dst", a, b, comm=world(), fsync=False)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []


@pytest.mark.world(sizes=(2, 3, 5))
def test_the_plan_is_the_same_on_every_process(tmp):
    case = random_case(3, mindspore_agrees=False, whole=False)
    src, a, b = prepare(case, tmp)
    plans = world().allgather(rankxform.plan(src, a, b, comm=world()))
    assert all(plan == plans[0] for plan in plans)


@pytest.mark.world(sizes=(2, 3, 5))
def test_an_error_on_one_process_is_raised_on_all(tmp):
    case = random_case(4, whole=False)
    src, a, b = prepare(case, tmp)
    victim = src / "rank_1" / "checkpoint_1.ckpt"
    if world().rank == 0:
        os.truncate(victim, victim.stat().st_size - 1)
    world().Barrier()
    with pytest.raises(rankxform.CheckpointError, match="rank_1/checkpoint_1.ckpt"):
        rankxform.transform(src, tmp / "dst", a, b, comm=world())
    assert not list((tmp / "dst").rglob("*"))


@pytest.mark.world(sizes=(2, 3))
@pytest.mark.parametrize("action", ["error", "ignore"])
def test_a_warning_is_the_same_on_every_process(action, tmp):
    case = random_case(5, mindspore_agrees=False, ranks=(8, 4), whole=False)
    src, a, b = prepare(case, tmp)
    if world().rank == 0:
        for rank in range(8):
            path = src / f"rank_{rank}/checkpoint_{rank}.ckpt"
            for step in ("1_1", "1_2")[: 1 + (rank != 6)]:
                path.with_name(f"net-{step}.ckpt").write_bytes(path.read_bytes())
            path.unlink()
    world().Barrier()
    with warnings.catch_warnings():
        warnings.simplefilter(action, rankxform.RankxformWarning)
        if action == "ignore":
            assert (
                "rank 6 has no file" in rankxform.load(src, a, b, comm=world(), rank=0).warnings[0]
            )
            return
        with pytest.raises(rankxform.RankxformWarning, match="rank 6 has no file"):
            rankxform.load(src, a, b, comm=world(), rank=0)


@pytest.mark.world(real=(2,))
def test_a_program_can_call_as_often_as_it_likes():
    for _ in range(3000):  # MPICH has 2,048 communicators
        with pytest.raises(rankxform.UsageError, match="unknown option 'nonsense'"):
            rankxform.plan("nowhere", comm=world(), nonsense=True)


@pytest.mark.world(sizes=(1, 2, 4))
def test_each_process_loads_the_slices_of_its_own_rank(tmp):
    case = random_case(5, mindspore_agrees=False, ranks=(8, 4), whole=False)
    src, a, b = prepare(case, tmp)
    report = rankxform.transform(src, tmp / "dst", a, b, comm=world(), fsync=False)
    for rank in (world().rank, world().size - 1 - world().rank, 3):
        found = rankxform.load(src, a, b, rank=rank, comm=world())
        expected = reference.read_any(report.files[rank])
        assert {n: v.tobytes() for n, v in found.items()} == {
            n: data for n, (_, _, data) in expected.items()
        }
    assert rankxform.load(src, a, b, comm=world()).rank == world().rank
    shapes = {name: value.shape for name, value in rankxform.load(src, a, comm=world()).items()}
    assert {name: shapes[name] for name in case.params} == {
        n: s for n, (s, _) in case.params.items()
    }


@pytest.mark.world(sizes=(3,))
def test_a_rank_that_does_not_exist_is_an_error_on_all(tmp):
    case = random_case(5, mindspore_agrees=False, ranks=(8, 2), whole=False)
    src, a, b = prepare(case, tmp)
    with pytest.raises(rankxform.UsageError, match="destination rank 2 does not exist"):
        rankxform.load(src, a, b, comm=world())


@pytest.mark.world(real=(1, 3))
def test_mindspores_calls_on_every_process_for_one_folder(tmp):
    case = random_case(8, mindspore_agrees=False, ranks=(8, 6), whole=False)
    src, a, b = prepare(case, tmp)
    calls = rankxform.mindspore
    a, b = (str(calls.merge_pipeline_strategys(str(f), f"{f}.ckpt") or f"{f}.ckpt") for f in (a, b))
    world().Barrier()
    for _ in range(2):
        calls.transform_checkpoints(str(src), str(tmp / "dst"), "checkpoint_", a, b)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []
    for rank in range(world().rank, 6, world().size):
        needed = calls.rank_list_for_transform(rank, a, b)
        files_map = {int(n): f"{src}/rank_{n}/checkpoint_{n}.ckpt" for n in needed}
        target = tmp / "one" / f"net_{rank}.ckpt"
        calls.transform_checkpoint_by_rank(rank, files_map, str(target), a, b)
        whole = (tmp / f"dst/rank_{rank}/checkpoint_{rank}.ckpt").read_bytes()
        assert target.read_bytes() == whole


@pytest.mark.world(sizes=(2, 3))
def test_processes_that_want_different_parameters(tmp):
    case = random_case(5, mindspore_agrees=False, ranks=(8, 4), whole=False)
    src, a, b = prepare(case, tmp)
    everything = rankxform.load(src, a, b, rank=0, comm=world())
    names = sorted(everything)
    mine = names[world().rank]
    found = rankxform.load(src, a, b, rank=0, include=f"^{re.escape(mine)}$", comm=world())
    assert list(found) == [mine] and sorted([*found.left_over, mine]) == names
    assert found[mine].tobytes() == everything[mine].tobytes()
    with pytest.raises(rankxform.UsageError, match="differ in unmatched; only rank"):
        rankxform.load(
            src, a, b, rank=0, unmatched=("error", "replicate")[world().rank % 2], comm=world()
        )


@pytest.mark.world(sizes=(2,))
def test_what_is_wrong_on_one_process_is_raised_on_all(tmp):
    case = random_case(5, mindspore_agrees=False, ranks=(8, 4), whole=False)
    src, a, b = prepare(case, tmp)
    bad = {"memory": 1} if world().rank else {}
    for call in (rankxform.load, rankxform.plan):
        with pytest.raises(rankxform.UsageError, match="1 MiB is the least"):
            call(src, a, b if call is rankxform.load else None, comm=world(), **bad)
    layouts = {"w": ([2], [0], [4], 0, world().rank == 0, "")}
    with pytest.raises(rankxform.StrategyError, match="'w': it is sharded unevenly"):
        rankxform.mindspore.strategy_of(layouts, comm=world())


@pytest.mark.world(real=(3,))
def test_one_target_of_several_processes_is_never_incomplete(tmp):
    case = random_case(8, mindspore_agrees=False, ranks=(8, 6), whole=False)
    src, a, b = prepare(case, tmp)
    a, b = (str(next(folder.iterdir())) for folder in (a, b))
    files_map = {n: f"{src}/rank_{n}/checkpoint_{n}.ckpt" for n in range(8)}
    target = tmp / "out.ckpt"
    call = rankxform.mindspore.transform_checkpoint_by_rank
    call(2, files_map, str(tmp / f"alone_{world().rank}.ckpt"), a, b)
    expected = (tmp / f"alone_{world().rank}.ckpt").read_bytes()
    world().Barrier()
    for _ in range(20):
        call(2, files_map, str(target), a, b)
        assert target.read_bytes() == expected
    world().Barrier()
    assert not list(tmp.glob("*.part"))


@pytest.mark.world(sizes=(1, 2, 3))
def test_a_strategy_is_derived_alike_on_every_process(tmp):
    params = {"a.w": ((24, 8), "Float32"), "b.w": ((8, 24), "Float32")}
    src = [{"a.w": ([6], [0, -1], 0, 0), "b.w": ([6], [-1, 0], 0, 0)}]
    dst = [{"a.w": ([4], [0, -1], 0, 0), "b.w": ([4], [-1, 0], 0, 0)}]
    if world().rank == 0:
        reference.write_checkpoint(tmp / "src", src, params)
        reference.write_strategy(tmp / "a.ckpt", src)
    world().Barrier()
    sizes = {"src_parallel": "dp=1,mp=6", "dst_parallel": "dp=1,mp=4", "comm": world()}
    report = rankxform.transform(tmp / "src", tmp / "dst", tmp / "a.ckpt", fsync=False, **sizes)
    assert reference.wrong_slices(tmp / "dst", dst, params) == []
    assert report.strategy == str(tmp / "dst_strategy.ckpt")
    loaded = rankxform.load(tmp / "src", tmp / "a.ckpt", **sizes)
    assert loaded.rank == world().rank
    assert loaded["a.w"].shape == (6, 8)
    sizes["src_parallel"] = "dp=2,mp=3"
    with pytest.raises(rankxform.DerivationError, match="data axis of dp=2,mp=3"):
        rankxform.transform(tmp / "src", tmp / "other", tmp / "a.ckpt", **sizes)


@pytest.mark.world(sizes=(1, 2))
def test_a_rank_that_is_spelled_twice_at_the_destination_ends_every_process(tmp):
    src, a, b = prepare(SPELLED, tmp)
    options = {"comm": world(), "fsync": False}
    rankxform.transform(src, tmp / "dst", a, b, verify=True, **options)
    if world().rank == 0:
        other = tmp / "dst" / "rank_01"
        other.mkdir()
        (other / "other.ckpt").write_bytes(b"")
    world().Barrier()
    with pytest.raises(rankxform.CheckpointError, match="are both rank 1's"):
        rankxform.verify(src, tmp / "dst", a, b, **options)
    with pytest.raises(rankxform.CheckpointError, match="are both rank 1's"):
        rankxform.verify(tmp / "dst", comm=world())


SPELLED = Case(
    {"w": ((8, 4), "Float32")}, [{"w": ([2], [0, -1], 0, 0)}], [{"w": ([2], [-1, 0], 0, 0)}]
)


@pytest.mark.world(sizes=(5,))
@pytest.mark.parametrize("writers", ["node", "any"])
def test_a_plan_says_who_will_write(writers, tmp, monkeypatch):
    """On two nodes with one folder: each file by processes of one node, if that was asked for."""
    case = random_case(3, mindspore_agrees=False, whole=False)
    src, a, b = prepare(case, tmp, "safetensors")
    as_nodes(monkeypatch, 2, 0)
    assigned, real = [], folder.assignment_of

    def assignment_of(*arguments):
        assigned.append(real(*arguments))
        return assigned[-1]

    monkeypatch.setattr(folder, "assignment_of", assignment_of)
    options = {"writers": writers, "link": "none", "comm": world(), "progress": False}
    plan = rankxform.plan(src, a, b, **options)
    rankxform.transform(src, tmp / "dst", a, b, fsync=False, **options)
    (assignment,) = assigned
    node = [process * 2 // 5 for process in range(5)]
    for shard in plan.shards:
        own = [
            p for p, ranges in enumerate(assignment) if any(r.file == shard.rank for r in ranges)
        ]
        assert shard.writers == tuple(own)
        assert writers == "any" or len({node[process] for process in own}) == 1
