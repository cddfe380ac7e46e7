"""Each byte read by one process and sent to those that want it, on one node."""

from __future__ import annotations

import errno
import os
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import rankxform
from rankxform.engine.pipeline import Pipeline
from rankxform.planning.transfers import Reach
from rankxform.storage.store import PosixRangeReader
from tests import reference
from tests.cases import Case, random_case, unevenly_sharded
from tests.mpi.conftest import as_nodes, prepare
from tests.mpi_launch import world

job_measure = import_module("rankxform.verbs.work")
transport_p2p = import_module("rankxform.transport.mpi")
transport_mpi = import_module("rankxform.transport.mpi")

SIZES = (2, 3, 5)
ROW, COLUMN, WHOLE = [0, -1], [-1, 0], [-1, -1]


def shard(src, dst, shape=(240, 512)):
    """Return a case of 3 parameters: `src` and `dst` are (device matrix, tensor map), and may be
    followed by the rows of each part."""
    src, dst = ((*one[:2], 0, 0, *one[2:]) for one in (src, dst))
    names = ("a", "b", "c")
    return Case(
        dict.fromkeys(names, (shape, "Float32")),
        [dict.fromkeys(names, src)],
        [dict.fromkeys(names, dst)],
    )


@pytest.mark.sampled
@pytest.mark.world(sizes=SIZES)
@pytest.mark.parametrize("seed", range(12))
def test_every_slice_is_right_when_bytes_are_exchanged(seed, tmp):
    kind = ("ckpt", "safetensors")[seed % 2]
    case = random_case(seed, mindspore_agrees=False)
    case = unevenly_sharded(case, seed) if seed % 4 == 1 else case
    src, a, b = prepare(case, tmp, kind)
    options = {"verify": True} if seed % 3 == 0 else {}
    rankxform.transform(
        src, tmp / "dst", a, b, comm=world(), fsync=False, read_method="two-phase", **options
    )
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params, kind) == []


@pytest.mark.sampled
@pytest.mark.world(real=(3,))
@pytest.mark.parametrize("seed", range(3))
def test_every_slice_is_right_when_messages_are_mpis(seed, tmp):
    test_every_slice_is_right_when_bytes_are_exchanged(seed, tmp)


FAMILIES = {
    "1 to 8 by columns": shard(([1], WHOLE), ([8], COLUMN)),
    "8 to 1 by columns": shard(([8], COLUMN), ([1], WHOLE)),
    "columns to rows": shard(([8], COLUMN), ([6], ROW)),
    "4 replicas to 8 rows": shard(([4, 2], ROW), ([8], COLUMN)),
    "8 columns to 4 replicas": shard(([8], COLUMN), ([4, 2], ROW)),
    "all to all": shard(([4], WHOLE), ([4], WHOLE)),
    "columns to uneven rows": shard(([8], COLUMN), ([5], ROW, [0, 100, 0, 139, 1])),
    "uneven rows to rows": shard(([5], ROW, [0, 100, 0, 139, 1]), ([6], ROW)),
    "rows to empty ones": shard(([6], ROW), ([5], ROW, [0, 0, 240, 0, 0])),
}


@pytest.mark.sampled
@pytest.mark.world(sizes=SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_storage_is_asked_for_each_byte_once(family, tmp):
    case = FAMILIES[family]
    src, a, b = prepare(case, tmp)
    distinct = 3 * 240 * 512 * 4
    options = {"fsync": False, "read_method": "two-phase", "memory": 1 << 20, "link": "none"}
    report = rankxform.transform(src, tmp / "dst", a, b, comm=world(), **options)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []
    assert report.bytes_read == distinct
    plan = rankxform.plan(src, a, b, comm=world(), read_method="two-phase")
    assert (plan.bytes_read, plan.bytes_sent) == (report.bytes_read, report.bytes_sent)


@pytest.mark.world(sizes=SIZES)
def test_loading_reads_one_copy_for_all(tmp):
    case = shard(([4], ROW), ([world().size], WHOLE))
    src, a, b = prepare(case, tmp)
    found = rankxform.load(src, a, b, comm=world(), read_method="two-phase")
    for name, (shape, dtype) in case.params.items():
        assert np.array_equal(found[name].view("u4"), reference.full_tensor(name, shape, dtype))
    assert sum(world().allgather(found.bytes_read)) == 3 * 240 * 512 * 4


@pytest.mark.world(sizes=SIZES)
def test_verify_exchanges_too(tmp):
    case = shard(([8], COLUMN), ([6], ROW))
    src, a, b = prepare(case, tmp)
    rankxform.transform(src, tmp / "dst", a, b, comm=world(), fsync=False)
    verdict = rankxform.verify(src, tmp / "dst", a, b, comm=world(), read_method="two-phase")
    assert verdict.differences == ()
    if world().rank == 0:
        with (tmp / "dst" / "rank_4" / "checkpoint_4.ckpt").open("r+b") as file:
            file.seek(70000)
            file.write(b"another")
    world().Barrier()
    verdict = rankxform.verify(src, tmp / "dst", a, b, comm=world(), read_method="two-phase")
    assert [verdict.ranks[one.file] for one in verdict.differences] == [4]


@pytest.mark.world(sizes=SIZES, real=(3,))
def test_a_failure_in_an_exchange_leaves_nothing_on_its_way(tmp, monkeypatch):
    """One process cannot read while others wait for its messages; then all goes on as ever."""
    case = shard(([8], COLUMN), ([6], ROW))
    src, a, b = prepare(case, tmp)
    victim = world().size - 1
    calls = [0]
    real = os.preadv

    def preadv(fd, buffers, offset):
        calls[0] += len(buffers[0]) > 4096
        if world().rank == victim and calls[0] == 4:
            raise OSError(5, "Input/output error")
        return real(fd, buffers, offset)

    monkeypatch.setattr(os, "preadv", preadv)
    options = {"comm": world(), "fsync": False, "read_method": "two-phase", "memory": 1 << 20}
    with pytest.raises(rankxform.StorageError, match=f"process {victim} of"):
        rankxform.transform(src, tmp / "dst", a, b, **options)
    monkeypatch.setattr(os, "preadv", real)
    rankxform.transform(src, tmp / "dst", a, b, **options)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []


@pytest.mark.world(sizes=(3,))
@pytest.mark.parametrize("method", ["two-phase", "ranges"])
def test_reads_of_some_size_are_announced_to_the_system_where_there_are_messages(
    tmp, monkeypatch, method
):
    """A read that waits for a device would hold messages up."""
    case = shard(([3], ROW), ([3], COLUMN), (240, 3072))
    src, a, b = prepare(case, tmp)
    announced, read, real = [], [], PosixRangeReader.read

    def noted(ranges, path, offset, room, sparse=False):
        read.append((path, offset, len(room)))
        real(ranges, path, offset, room, sparse)

    monkeypatch.setattr(
        PosixRangeReader,
        "announce_to_system",
        lambda ranges, *place: announced.append((place, len(read))),
    )
    monkeypatch.setattr(PosixRangeReader, "read", noted)
    rankxform.transform(src, tmp / "dst", a, b, comm=world(), fsync=False, read_method=method)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []
    of_content = [place for place in read if place[2] >= 64 << 10]
    assert [place for place, _ in announced] == (of_content if method == "two-phase" else [])
    assert of_content or method == "ranges"
    for number, (_, read_before) in enumerate(announced):  # five tiles, of a read each
        done = [one for one in read[:read_before] if one in of_content]
        assert number - 5 <= len(done) <= number


@pytest.mark.world(sizes=(4,))
@pytest.mark.parametrize("verify", [False, True])
def test_tensors_that_other_nodes_send_are_mixed(tmp, monkeypatch, verify):
    """Four nodes have a shard each, of two that every slice is on."""
    case = shard(([2, 2], COLUMN), ([4], ROW), (960, 512))
    src, a, b = prepare(case, tmp)
    monkeypatch.setattr(transport_mpi, "this_node", lambda host: (f"n{world().rank}", ""))
    reach = Reach((0, 1, 2, 3), tuple(frozenset({rank}) for rank in range(4)))
    copies = import_module("rankxform.source.copies")
    monkeypatch.setattr(copies, "find_reach", lambda *_, **__: (reach, []))
    begun, start = [], Pipeline.start

    def noted(pipeline, tile, work):
        begun.append(tile.transfer.parameter.name)
        start(pipeline, tile, work)

    monkeypatch.setattr(Pipeline, "start", noted)
    options = {"comm": world(), "fsync": False, "memory": 1 << 20, "verify": verify}
    rankxform.transform(src, tmp / "dst", a, b, **options)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []
    turns = sum(name != following for name, following in pairwise(begun))
    assert turns > len(case.params)  # one less if they are made one after the other


@pytest.mark.world(sizes=(2, 5))
def test_what_is_measured_is_the_same_on_every_process(tmp, monkeypatch):
    """Two nodes, of several processes each, that see the same files and want all of them."""
    case = shard(([4], ROW), ([world().size], WHOLE))
    src, a, b = prepare(case, tmp)
    monkeypatch.setattr(transport_mpi, "this_node", lambda host: (f"n{world().rank % 2}", ""))
    real, found = job_measure.measure_costs, []

    def measured(*arguments, **options):
        found.append(real(*arguments, **options))
        return found[-1]

    monkeypatch.setattr(job_measure, "measure_costs", measured)
    rankxform.transform(src, tmp / "dst", a, b, comm=world(), fsync=False, link="none")
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []
    ((costs, speeds),) = found
    assert world().allgather((costs, speeds)) == [(costs, speeds)] * world().size
    assert -1 <= costs.overlap <= 1
    assert (
        min(costs.read, costs.network, costs.copy, costs.read_latency, costs.latency, *speeds) > 0
    )
    assert max(costs.network, costs.copy) < 1e13 > 1 / costs.latency


@pytest.mark.sampled
@pytest.mark.world(sizes=(3, 5))
@pytest.mark.parametrize("seed", range(24))
def test_what_a_node_does_not_see_comes_from_another(seed, tmp, monkeypatch):
    case = random_case(seed, mindspore_agrees=False)
    case = unevenly_sharded(case, seed) if seed % 4 == 1 else case
    src, a, b = prepare(case, tmp)
    as_nodes(monkeypatch, 2 + seed % 2, seed)
    memory = (1 << 20, 64 << 20)[seed % 3 == 0]
    options = {"verify": True} if seed % 4 == 0 else {}
    rankxform.transform(src, tmp / "dst", a, b, comm=world(), fsync=False, memory=memory, **options)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []


@pytest.mark.world(sizes=(3, 5))
@pytest.mark.parametrize("dst", [([2], COLUMN, 0, 0), ([2], ROW, 0, 0, [0, 8])])
def test_what_has_no_elements_goes_with_what_is_read_for_others(dst, tmp, monkeypatch):
    """A whole parameter, or one rank's slice of another."""
    case = shard(([2], ROW), ([2], COLUMN), shape=(0, 8))
    case.params["full"], case.src[0]["full"], case.dst[0]["full"] = (
        ((8, 8), "Float32"), ([2], ROW, 0, 0), dst,
    )  # fmt: skip
    src, a, b = prepare(case, tmp)
    as_nodes(monkeypatch, 3, 0)
    rankxform.transform(src, tmp / "dst", a, b, comm=world(), fsync=False, verify=True)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []


@pytest.mark.world(sizes=(2, 3))
def test_a_sync_that_fails_in_an_exchange_ends_all_and_is_continued(tmp, monkeypatch):
    """The last process's device refuses to sync what it wrote."""
    case = shard(([8], COLUMN), ([6], ROW))
    src, a, b = prepare(case, tmp)
    options = {"comm": world(), "read_method": "two-phase"}

    real = os.fsync

    def refuse(fd):
        if ".part" in os.readlink(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    with monkeypatch.context() as patch:
        if world().rank == world().size - 1:
            patch.setattr(os, "fsync", refuse)
        with pytest.raises(
            rankxform.StorageError, match=rf"part.*sync.*process {world().size - 1}"
        ):
            rankxform.transform(src, tmp / "dst", a, b, **options)
    world().Barrier()
    assert not list((tmp / "dst").rglob("*.ckpt"))
    world().Barrier()
    rankxform.transform(src, tmp / "dst", a, b, **options)
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []


@pytest.mark.world(sizes=SIZES)
@pytest.mark.parametrize("place", [0.0, 0.5, 0.999])
def test_a_bit_that_changes_between_two_processes_is_found(place, tmp, monkeypatch):
    """A message of process 0's has another bit, at its start, in its middle, or in its checksum."""
    case = shard(([4], COLUMN), ([8], ROW))
    src, a, b = prepare(case, tmp)
    real, sent = transport_p2p.PointToPoint.send, []

    def send(self, peer, data, tag=0):
        sent.append(peer)
        if world().rank == 0 and len(sent) == 2:
            data[int(place * len(data))] ^= 16
        return real(self, peer, data, tag)

    with monkeypatch.context() as patch:
        patch.setattr(transport_p2p.PointToPoint, "send", send)
        with pytest.raises(rankxform.DifferenceError, match="process 0 sent is not what arrived"):
            rankxform.transform(
                src,
                tmp / "dst",
                a,
                b,
                comm=world(),
                fsync=False,
                read_method="two-phase",
                verify=True,
            )
    world().Barrier()  # the first process has cleared up
    assert not list((tmp / "dst").rglob("*.ckpt"))
    world().Barrier()
    rankxform.transform(
        src, tmp / "dst", a, b, comm=world(), fsync=False, read_method="two-phase", verify=True
    )
    assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []


def _resident(what):
    """Return this process's resident bytes now ("VmRSS"), or at most since it was reset."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])


@pytest.mark.world(real=(3,))
@pytest.mark.parametrize(("dst", "verify"), [(([8], ROW), False), (([2], WHOLE), True)])
def test_no_process_takes_more_memory_than_it_may(dst, verify, tmp):
    """100 MB, or twice as much, cross between processes with 8 MiB for buffers each."""
    case = shard(([4], COLUMN), dst, shape=(4096, 2048))
    src, a, b = prepare(case, tmp)
    options = {"comm": world(), "fsync": False, "read_method": "two-phase", "link": "none"}
    rankxform.transform(src, tmp / "first", a, b, memory=1 << 20, ranks=(0,), **options)
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = _resident("VmRSS")
    rankxform.transform(src, tmp / "dst", a, b, memory=8 << 20, verify=verify, **options)
    grown = max(world().allgather(_resident("VmHWM") - before))
    assert grown < 8 << 20
    if world().rank == 0:
        assert reference.wrong_slices(tmp / "dst", case.dst, case.params) == []
