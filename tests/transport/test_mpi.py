"""All schedules of a team: whoever fails, stops or raises, wherever, nobody waits for ever, and
all end alike.

The numbers of schedules are stated by `python -m tests.transport.test_mpi`.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import MappingProxyType

import numpy as np
import pytest

from rankxform.errors import PeerError, RankxformError, StoppedError, StorageError
from rankxform.transport import mpi
from rankxform.transport.team import NeverStop, show_nothing
from tests.transport.model import WrongSchedule, explore

DIRECT, FORWARDED = 0, 1


class Stop(NeverStop):
    def reason(self):
        return "stopped by a test"


KINDS = ("error", "bug", "stop", "interrupt", "exit", "unsendable")
"""What happens to a process at a step."""


class Fault:
    """Happens once on one process, at a step of a program."""

    def __init__(self, kind=None, rank=0, step=0):
        self.kind, self.rank, self.step = kind, rank, step

    def at(self, team, step):
        """Return a value for a step, or do what happens there."""
        if self.kind is None or (team.rank, step) != (self.rank, self.step):
            return step
        if self.kind == "error":
            raise StorageError("the disk is full")
        if self.kind == "bug":
            raise KeyError("a bug")
        if self.kind == "interrupt":
            raise KeyboardInterrupt
        if self.kind == "exit":
            raise SystemExit(3)
        if self.kind == "stop":
            team.stopping = Stop()
            team.check_stop()
        return MappingProxyType({})

    @property
    def expected(self):
        """Return the class of what all processes raise."""
        return {"error": StorageError, "bug": PeerError, "unsendable": PeerError}.get(
            self.kind, StoppedError
        )


def collectives(team, fault):
    """Every method that ends as one, one after another."""
    assert team.agree(lambda: fault.at(team, 0)) == 0 or fault.kind == "unsendable"
    team.bcast(lambda: fault.at(team, 1))
    assert len(team.allgather(lambda: fault.at(team, 2))) == team.size
    team.allgather_work(lambda tick: fault.at(team, 3))
    return "done"


def at_work(team, fault):
    """Local work that reports its progress, in steps between which others may do anything."""

    def compute(on_progress):
        for step in range(2):
            team.poll()
            fault.at(team, step)
            on_progress(1)
        return "done"

    return team.work(compute, show_nothing)


def forwarding(team, fault):
    """An exchange of a tile: 0 reads and sends to 1, which passes it on to 2, its neighbour."""
    messenger, data = team.p2p(), memoryview(bytearray(b"tile" * 8))

    def compute(on_progress):
        fault.at(team, 0)
        room, requests = memoryview(bytearray(len(data))), []
        if team.rank == 0:
            requests = [messenger.send(1, data, DIRECT)]
        elif team.rank == 1:
            messenger.wait_all([messenger.receive(0, room, DIRECT)], on_progress)
            fault.at(team, 1)
            requests = [messenger.send(p, room, FORWARDED) for p in range(2, team.size)]
        else:
            requests = [messenger.receive(1, room, FORWARDED)]
        on_progress(8)
        messenger.wait_all(requests, on_progress)
        fault.at(team, 2)
        return bytes(data if team.rank == 0 else room)

    return team.work(compute, show_nothing)


def ended_alike(program, fault):
    """Return a program that ends as the command does: what it raises is agreed on, and after it all
    are where the others are."""

    def run(team):
        try:
            outcome = program(team, fault)
        except RankxformError as error:
            outcome = error
        except (KeyboardInterrupt, SystemExit) as error:
            outcome = error
        team.stopping = NeverStop()
        assert team.bcast(lambda: ["and on"]) == ["and on"]
        code = team.finish(0 if isinstance(outcome, (str, bytes)) else 4)
        return outcome, code

    return run


def check_of(fault):
    def check(outcomes):
        for rank, (kind, value) in enumerate(outcomes):
            if kind == "error":
                raise value
            outcome, code = value
            if fault.kind is None:
                assert not isinstance(outcome, BaseException) and code == 0
            elif fault.kind in ("interrupt", "exit") and rank == fault.rank:
                assert isinstance(outcome, (KeyboardInterrupt, SystemExit))
            else:
                assert isinstance(outcome, fault.expected), (rank, outcome)
                assert code == 4

    return check


STEPS = {collectives: 4, at_work: 2, forwarding: 3}
SILENT = {  # faults that mean nothing at a step, or no process meets there
    (collectives, "unsendable"): (0,),
    (at_work, "unsendable"): (0, 1),
    (forwarding, "unsendable"): (0, 1, 2),
}


def faults_of(program, size):
    yield Fault()
    for kind in KINDS:
        for step in range(STEPS[program]):
            if step in SILENT.get((program, kind), ()):
                continue
            for rank in range(size):
                if program is collectives and step == 1 and rank:
                    continue  # process 0 alone computes what is broadcast
                if program is forwarding and step == 1 and rank != 1:
                    continue
                yield Fault(kind, rank, step)


def explore_all(program, size, is_eager=False):
    """Return how many schedules all faults have."""
    return sum(
        explore(size, ended_alike(program, fault), check_of(fault), is_eager=is_eager)
        for fault in faults_of(program, size)
    )


@pytest.fixture(autouse=True)
def every_round(monkeypatch):
    """Rounds begin as often as they may; an error of ours is not printed for each schedule."""
    monkeypatch.setattr(mpi, "_ROUND_SECONDS", -1.0)
    monkeypatch.setattr(sys, "excepthook", lambda *error: None)


@pytest.mark.parametrize("is_eager", [False, True])
@pytest.mark.parametrize("program", STEPS, ids=lambda program: program.__name__)
def test_two_processes_end_alike_under_every_schedule(program, is_eager):
    assert explore_all(program, 2, is_eager) > 20


@pytest.mark.slow
@pytest.mark.sampled
@pytest.mark.parametrize("program", STEPS, ids=lambda program: program.__name__)
def test_three_processes_end_alike_under_every_schedule(program):
    assert explore_all(program, 3) >= len([*faults_of(program, 3)])


def test_where_progress_is_reported_at_the_end_alone(monkeypatch):
    monkeypatch.setattr(mpi, "_ROUND_SECONDS", float("inf"))
    assert explore_all(at_work, 2) > 10


# -- the model finds what it is for ----------------------------------------------------------------


def test_a_collective_that_one_process_leaves_out_is_found():
    def program(team):
        if team.rank:
            team.bcast(lambda: 1)
        return team.finish(0)

    with pytest.raises(WrongSchedule, match=r"differs|wait for ever|not all"):
        explore(2, program, lambda outcomes: [raise_(v) for k, v in outcomes if k == "error"])


def test_a_team_whose_failing_process_leaves_its_rounds_is_found(monkeypatch):
    """As ours would be without the end of rounds: the others wait in a reduction."""
    end = mpi._ProgressRounds.end
    monkeypatch.setattr(
        mpi._ProgressRounds, "end", lambda self, failed: failed or end(self, failed)
    )
    with pytest.raises(WrongSchedule):
        explore_all(at_work, 2)


def test_a_team_that_does_not_agree_before_it_gathers_is_found(monkeypatch):
    monkeypatch.setattr(mpi.MpiTeam, "agree", lambda self, compute: compute())
    with pytest.raises((WrongSchedule, AssertionError)):
        explore_all(collectives, 2)


def test_a_message_that_nobody_receives_is_found():
    def program(team):
        messenger = team.p2p()
        if team.rank == 0:
            messenger.send(1, memoryview(b"x"))
        return "done"

    with pytest.raises(WrongSchedule, match="nobody received"):
        explore(2, program, lambda outcomes: None)


def test_processes_that_wait_for_each_other_are_found():
    def program(team):
        messenger, room = team.p2p(), memoryview(bytearray(1))
        messenger.wait_all([messenger.receive(1 - team.rank, room)], None)

    with pytest.raises(WrongSchedule, match="wait for ever"):
        explore(2, program, lambda outcomes: None)


def test_a_schedule_in_which_alone_something_goes_wrong_is_found():
    """One process looks whether another was there before, which is so in some schedules alone."""
    seen = Counter()

    def program(team):
        request = team._comm.Iallreduce(np.ones(1), np.zeros(1), "SUM")
        team.poll()
        seen[team.rank, request.Test()] += 1
        team._wait(request)

    assert explore(2, program, lambda outcomes: None) > 1
    assert {*seen} >= {(0, True), (0, False), (1, True)}


def raise_(error):
    raise error


if __name__ == "__main__":
    mpi._ROUND_SECONDS, sys.excepthook = -1.0, lambda *error: None
    for size in (2, 3):
        for program in STEPS:
            print(f"{size} processes, {program.__name__}: {explore_all(program, size):,} schedules")
