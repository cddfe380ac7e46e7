"""What rankxform asks of a team, passed by one process, by forked ones, and under MPI libraries.

`rankxform.transport` is the only room that knows MPI, so no byte depends on the library once these
pass. A fault that shows under mpirun alone becomes a test here first.
"""

from __future__ import annotations

import os
import time
from types import MappingProxyType

import numpy as np
import pytest

import rankxform
from rankxform.errors import CheckpointError, PeerError, StorageError
from rankxform.transport import SerialTeam, team
from rankxform.transport.team import NeverStop
from tests.local_world import Failed, run_world
from tests.mpi_launch import world

AROUND_LIMITS = (0, 1, 4095, 4096, 4097, 32767, 32768, 32769, 3_000_000)
"""Bytes; libraries send small, middle and large messages in different ways."""


def raise_(error):
    raise error


class NowStop(NeverStop):
    def reason(self):
        return "stopped by a test"


class TeamTests:
    """The laws of a team of any size. A subclass has the fixture `processes`."""

    @pytest.mark.parametrize("nbytes", AROUND_LIMITS)
    def test_values_reach_every_process(self, processes, nbytes):
        assert processes.bcast(lambda: bytes([7]) * nbytes) == bytes([7]) * nbytes
        values = processes.allgather(lambda: bytes([processes.rank]) * (nbytes * processes.rank))
        assert values == [bytes([r]) * (nbytes * r) for r in range(processes.size)]

    def test_the_value_is_computed_on_process_0(self, processes):
        assert processes.bcast(lambda: ["value", processes.rank]) == ["value", 0]

    def test_more_is_gathered_than_one_message_may_have(self, processes, monkeypatch):
        monkeypatch.setattr("rankxform.transport.mpi.GATHER_LIMIT", 1 << 20)
        values = processes.allgather(lambda: np.full(300_000, processes.rank, np.int64))
        assert [value[-1] for value in values] == list(range(processes.size))

    @pytest.mark.parametrize("call", ["agree", "bcast", "allgather", "work"])
    def test_an_error_is_raised_on_all_as_it_is(self, processes, call):
        def compute(on_progress=None):
            if processes.rank == (0 if call == "bcast" else processes.size - 1):
                error = CheckpointError("torn", "copy it again", where="rank_1/a.ckpt")
                error.fault = "files"
                raise error

        arguments = (compute, lambda done, end: None) if call == "work" else (compute,)
        with pytest.raises(CheckpointError) as raised:
            getattr(processes, call)(*arguments)
        parts = raised.value.parts
        assert (parts.what, parts.tries, parts.where) == (
            "torn",
            ("copy it again",),
            "rank_1/a.ckpt",
        )
        assert raised.value.fault == "files"

    @pytest.mark.parametrize("call", ["bcast", "allgather"])
    def test_a_value_that_cannot_be_sent_ends_all(self, processes, call):
        if processes.size == 1:
            pytest.skip("one process sends nothing")
        with pytest.raises(PeerError, match="pickle"):
            getattr(processes, call)(lambda: MappingProxyType({}))
        assert processes.bcast(lambda: 1) == 1  # and all are where they were

    def test_the_lowest_process_that_fails_is_heard(self, processes):
        with pytest.raises(StorageError, match="disk 0 is full"):
            processes.agree(lambda: raise_(StorageError(f"disk {processes.rank} is full")))

    def test_an_oserror_is_one_of_storage(self, processes):
        def compute():
            if processes.rank == processes.size - 1:
                raise OSError(5, os.strerror(5), "/data/a")

        with pytest.raises(StorageError, match="/data/a"):
            processes.agree(compute)

    def test_work_shows_its_progress_and_ends_with_the_total(self, processes):
        shown = []

        def compute(on_progress):
            for _ in range(10):
                on_progress(7)
            return processes.rank

        assert processes.work(compute, lambda *state: shown.append(state)) == processes.rank
        if processes.rank == 0:
            assert shown[-1] == (70 * processes.size, True)

    def test_a_failure_where_progress_is_shown_ends_the_work(self, processes):
        with pytest.raises(StorageError, match="the screen is gone"):
            processes.work(
                lambda on_progress: on_progress(1),
                lambda done, end: raise_(StorageError("the screen is gone")),
            )

    def test_values_of_work_are_gathered(self, processes):
        values = processes.allgather_work(lambda on_progress: processes.rank * 2)
        assert values == [2 * r for r in range(processes.size)]

    @pytest.mark.parametrize("call", ["work", "allgather_work", "agree", "bcast", "allgather"])
    def test_a_stop_that_one_process_sees_first_ends_all(self, processes, call):
        """It is seen before the work begins: the others are in its reductions already."""
        if processes.rank == processes.size - 1:
            processes.stopping = NowStop()
        arguments = {"work": (lambda on_progress: 1, lambda done, end: None)}
        arguments["allgather_work"] = (lambda on_progress: 1,)
        with pytest.raises(rankxform.StoppedError, match="stopped by a test"):
            getattr(processes, call)(*arguments.get(call, (lambda: 1,)))

    def test_every_process_has_a_node(self, processes):
        nodes = processes.nodes
        assert sorted(p for node in nodes.processes for p in node) == list(range(processes.size))
        assert nodes.is_leader(nodes.processes[0][0])

    def test_all_end_with_the_largest_code(self, processes):
        leaving = SerialTeam() if isinstance(processes, SerialTeam) else team(world())
        assert leaving.finish(leaving.rank + 3) == leaving.size + 2


class TestSerialTeam(TeamTests):
    @pytest.fixture
    def processes(self):
        return SerialTeam()


class ManyTests(TeamTests):
    """The laws of a team of several processes, with what they send each other."""

    @pytest.fixture
    def processes(self):
        processes = team(world())
        yield processes
        processes.free()

    def test_a_bug_of_one_is_told_to_all(self, processes):
        with pytest.raises(PeerError, match="a bug of rankxform's own: KeyError"):
            processes.bcast(lambda: {}["nothing"])

    @pytest.mark.parametrize("call", ["agree", "allgather", "work"])
    @pytest.mark.parametrize("interruption", [KeyboardInterrupt, SystemExit])
    def test_an_interruption_of_one_stops_the_others(self, processes, call, interruption):
        def compute(on_progress=None):
            if processes.rank == processes.size - 1:
                raise interruption

        arguments = (compute, lambda done, end: None) if call == "work" else (compute,)
        is_mine = processes.rank == processes.size - 1
        with pytest.raises(interruption if is_mine else rankxform.StoppedError) as caught:
            getattr(processes, call)(*arguments)
        assert is_mine or f"stopped by {interruption.__name__}" in str(caught.value)
        assert processes.bcast(lambda: 1) == 1  # and all are where they were

    def test_a_failure_in_the_middle_of_the_work_stops_the_others(self, processes):
        calls = 0

        def compute(on_progress):
            nonlocal calls
            if processes.rank == processes.size - 1:
                raise StorageError("disk full")
            for _ in range(10_000):
                on_progress(1)
                calls += 1
                time.sleep(0.002)

        with pytest.raises(StorageError, match="disk full"):
            processes.work(compute, lambda done, end: None)
        assert calls < 10_000, "a healthy process worked on to the end"

    def ring(self, processes, messages, receives_first=False):
        """Send `messages`, pairs of tag and bytes, to the next process; return what came."""
        p2p = processes.p2p()
        peer, source = (processes.rank + 1) % processes.size, (processes.rank - 1) % processes.size
        rooms = [(tag, bytearray(len(data))) for tag, data in messages]

        def work(on_progress):
            if receives_first:
                requests = [p2p.receive(source, memoryview(room), tag) for tag, room in rooms]
                requests += [p2p.send(peer, memoryview(data), tag) for tag, data in messages]
            else:
                requests = [p2p.send(peer, memoryview(data), tag) for tag, data in messages]
                p2p.progress()
                requests += [p2p.receive(source, memoryview(room), tag) for tag, room in rooms]
            p2p.wait_all(requests, on_progress)

        processes.work(work, lambda done, end: None)
        return [(tag, bytes(room)) for tag, room in rooms]

    @pytest.mark.parametrize("receives_first", [True, False])
    @pytest.mark.parametrize("nbytes", AROUND_LIMITS)
    def test_messages_of_a_tag_come_in_order(self, processes, nbytes, receives_first):
        messages = [(n % 2, bytes([n]) * nbytes) for n in range(1, 6)]
        assert self.ring(processes, messages, receives_first) == messages

    def test_tags_do_not_wait_for_each_other(self, processes):
        """Sent as tag 0, then 1; received as tag 1, then 0."""
        p2p = processes.p2p()
        peer, source = (processes.rank + 1) % processes.size, (processes.rank - 1) % processes.size
        rooms = {tag: bytearray(100_000) for tag in (1, 0)}

        def work(on_progress):
            sends = [p2p.send(peer, memoryview(bytes([tag + 1]) * 100_000), tag) for tag in (0, 1)]
            for tag, room in rooms.items():
                p2p.wait_all([p2p.receive(source, memoryview(room), tag)], on_progress)
            p2p.wait_all(sends, on_progress)

        processes.work(work, lambda done, end: None)
        assert all(set(room) == {tag + 1} for tag, room in rooms.items())

    @pytest.mark.parametrize("nbytes", [10, 1_000_000])
    def test_a_failure_leaves_no_message_on_its_way(self, processes, nbytes):
        """Process 0 fails while its messages and receives wait for others; then all goes on."""
        p2p = processes.p2p()

        def work(on_progress):
            peers = [peer for peer in range(processes.size) if peer != processes.rank]
            rooms = [bytearray(nbytes) for _ in peers]
            for peer, room in zip(peers, rooms):
                if processes.rank != 0:
                    p2p.receive(peer, memoryview(room))
                p2p.send(peer, memoryview(bytes(nbytes)))
            if processes.rank == 0:
                raise StorageError("cannot read")
            while True:
                on_progress(0)
                time.sleep(0.001)

        with pytest.raises(StorageError, match="cannot read"):
            processes.work(work, lambda done, end: None)
        messages = [(0, b"again" * 10), (1, b"and again")]
        assert self.ring(processes, messages) == messages

    def test_a_process_that_is_busy_for_long_is_not_taken_for_lost(self, processes):
        """Others wait for its message longer than the stall limit, while it shows signs of life."""
        processes.stall_seconds = 1.0
        p2p = processes.p2p()
        room = bytearray(9)

        def work(on_progress):
            if processes.rank == 0:
                end = time.monotonic() + 2.0
                while time.monotonic() < end:
                    on_progress(0)
                    time.sleep(0.05)
                peers = range(1, processes.size)
                p2p.wait_all([p2p.send(p, memoryview(b"a message")) for p in peers], on_progress)
            else:
                p2p.wait_all([p2p.receive(0, memoryview(room))], on_progress)

        processes.work(work, lambda done, end: None)
        assert processes.rank == 0 or bytes(room) == b"a message"

    def test_teams_follow_each_other(self, processes):
        """More than a library has communicators of at a time would need one that is not freed."""
        for number in range(100):
            other = team(world())
            assert other.allgather(lambda number=number: number) == [number] * other.size
            other.free()


@pytest.mark.world(sizes=(2, 3, 5, 8))
class TestLocalTeam(ManyTests):
    """By forked processes."""


@pytest.mark.world(real=(2, 5))
class TestMpiTeam(ManyTests):
    """Under mpirun, of whichever library this environment has."""


def test_hosts_of_a_local_world_are_nodes():
    def work(comm):
        processes = team(comm)
        return processes.nodes.node_of

    assert set(run_world(3, work, hosts=["a", "a", "b"])) == {(0, 0, 1)}


def test_an_abort_ends_all_at_once(capfd):
    def work(comm):
        if comm.rank == 1:
            team(comm).abort("the disk burns", 4)
        time.sleep(60)

    began = time.monotonic()
    outcomes = run_world(3, work)
    assert time.monotonic() - began < 5
    assert all(isinstance(outcome, Failed) for outcome in outcomes)
    assert capfd.readouterr().err.count("the disk burns") == 1


def test_a_process_that_never_answers_ends_the_others(capfd):
    def work(comm):
        processes = team(comm)
        processes.stall_seconds = 0.5
        if comm.rank == 1:
            time.sleep(60)
        processes.barrier()

    assert all(isinstance(outcome, Failed) for outcome in run_world(2, work))
    assert "no answer from a process for 0.5 s" in capfd.readouterr().err
