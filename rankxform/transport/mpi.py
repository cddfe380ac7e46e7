"""The team of an MPI communicator, and messages between two processes.

A process that waits yields the core for a moment, which keeps exchanges fast, then sleeps in
growing steps, so that waiting processes leave the cores to those that work. (MPICH's own wait
spins: eight processes on two cores took 4.4 s instead of 1.1 s while one computed 1.1 s.)

No exception crosses a collective alone. Local work runs inside `agree`, `bcast`, `allgather` or
`work`, which agree on the first failing process by a reduction and raise its message everywhere.
What escapes them ends in `abort`, which takes all processes down.

Between two processes, messages of one tag arrive in the order in which they were sent. A message
is complete only when its receiver has made room for it (sends are synchronous), so nobody is
flooded.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property
from typing import Any, TypeVar

import numpy as np

from rankxform.errors import (
    CheckpointError,
    Message,
    PeerError,
    RankxformError,
    RequestError,
    StoppedError,
    StrategyError,
    UsageError,
    peer_error,
    raising_storage_errors,
)

from .launcher import CLEAR_LINE, check_launcher, import_mpi, initialize, launched_size, terminal
from .team import Nodes, OnProgress, ShowProgress, Team, this_node

TAGS = 2
"""How many tags there are; messages of one tag between two processes do not overtake each other."""

Until = Callable[[Callable[[], bool], "OnProgress | None"], None]


class PointToPoint:
    """What the processes of a communicator send each other; made by all of them at once."""

    def __init__(self, mpi: Any, comm: Any, until: Until) -> None:
        """`until` waits for a condition, and ends all processes if it is never met."""
        self._mpi, self._comm, self._until = mpi, comm.Dup(), until
        self._out: list[Any] = []
        self._in: list[tuple[int, int, Any]] = []
        self._counts = np.zeros((2, comm.size, TAGS), np.int64)  # sent to, arrived from

    def send(self, peer: int, data: memoryview, tag: int = 0) -> Any:
        """Begin to send; `data` must stay as it is until the request is done."""
        request = self._comm.Issend([data, self._mpi.BYTE], peer, tag)
        self._counts[0, peer, tag] += 1
        self._out.append(request)
        return request

    def receive(self, peer: int, room: memoryview, tag: int = 0) -> Any:
        """Begin to receive what fills `room`."""
        request = self._comm.Irecv([room, self._mpi.BYTE], peer, tag)
        self._in.append((peer, tag, request))
        return request

    def progress(self) -> None:
        """Let messages in flight move on."""
        self._comm.Iprobe()

    def wait_all(self, requests: Iterable[Any], on_progress: OnProgress | None) -> None:
        """Wait until `requests` are done. `on_progress` is called meanwhile, and may raise."""
        for request in requests:
            self._until(request.Test, on_progress)
        self._out = [request for request in self._out if request]
        for peer, tag, request in self._in:
            if not request:
                self._counts[1, peer, tag] += 1
        self._in = [(peer, tag, request) for peer, tag, request in self._in if request]

    # After a failure an application's communicator, and MPI_Finalize, must find nothing unmatched.
    def drain(self) -> None:
        """Receive and drop all messages that are still in flight. Collective.

        It is for processes that failed as one, when none waits for its messages any more.
        """
        status = self._mpi.Status()
        for peer, tag, request in self._in:
            if request:
                request.Cancel()
                request.Wait(status)
                self._counts[1, peer, tag] += not status.Is_cancelled()
            else:
                self._counts[1, peer, tag] += 1
        self._in = []
        sent_here = np.zeros_like(self._counts[0])  # by peer and tag
        self._until(self._comm.Ialltoall(self._counts[0], sent_here).Test, None)
        for peer, tag in np.argwhere(sent_here > self._counts[1]).tolist():
            for _ in range(int(sent_here[peer, tag] - self._counts[1, peer, tag])):
                self._drop(peer, tag)
        self.wait_all(list(self._out), None)

    def _drop(self, peer: int, tag: int) -> None:
        status = self._mpi.Status()
        self._until(lambda: self._comm.Iprobe(peer, tag, status), None)
        room = np.empty(status.Get_count(self._mpi.BYTE), np.uint8)
        self._until(self._comm.Irecv([room, self._mpi.BYTE], peer, tag).Test, None)
        self._counts[1, peer, tag] += 1

    def close(self) -> None:
        """Let go of what MPI keeps for this. Collective; all that was sent must have arrived."""
        self._comm.Free()


T = TypeVar("T")

GATHER_LIMIT = 1 << 30
"""Bytes that one gather may have; more is broadcast process by process. MPI counts in 32 bits."""
_YIELD_SECONDS = 0.02
_FIRST_SLEEP, _LONGEST_SLEEP = 50e-6, 2e-3
_ROUND_SECONDS = 0.2
_SPEAK_SECONDS = 0.3
"""Time for a launcher to forward output: MPICH's may drop it once it is told to abort."""
_PATIENCE_SECONDS = 4.0
"""Longer than it takes until an abort has ended the others: its own limit is 3 s."""
_OF_INPUTS = (CheckpointError, StrategyError, RequestError)
"""Errors that are not of one process, where all see the same files."""


def _load() -> Any:
    """Return mpi4py's MPI, initialized. Raises UsageError where it does not fit the launcher."""
    mpi = import_mpi()
    if not mpi.Is_initialized():
        check_launcher(mpi.Get_library_version())
        initialize(mpi)
    return mpi


class MpiTeam(Team):
    """The processes of one communicator."""

    def __init__(self, mpi: Any, comm: Any, owns_mpi: bool) -> None:
        self._mpi, self._comm, self._owns_mpi = mpi, comm, owns_mpi
        self._p2p: PointToPoint | None = None
        self.rank, self.size = comm.rank, comm.size

    @classmethod
    def over(cls, comm: Any = None) -> MpiTeam:
        """Make a team of `comm`'s processes, or of the launcher's world."""
        mpi = getattr(comm, "mpi", None) or _load()  # a communicator of tests brings its own MPI
        if comm is not None:
            return cls(mpi, comm.Dup(), owns_mpi=False)
        started, world_size = launched_size(), mpi.COMM_WORLD.size
        if world_size == 1 and started not in (None, 1):
            library = mpi.Get_library_version().split(",")[0].splitlines()[0]
            raise UsageError(
                f"the launcher started {started} processes, but each sees a world of 1: this "
                f"mpirun or srun is not {library}'s",
                "use the mpirun of the same installation (for one in a virtual environment: its "
                "bin/mpirun)",
                "srun --mpi=pmix for Open MPI, and --mpi=pmi2 for MPICH",
            )
        return cls(mpi, mpi.COMM_WORLD.Dup(), owns_mpi=True)

    # -- collectives that end as one --------------------------------------------------------

    def bcast(self, compute: Callable[[], T]) -> T:
        def value_and_bytes() -> tuple[T, bytes]:
            value = compute()
            return value, pickle.dumps(value)  # in here: it may fail

        pair = self.agree(lambda: value_and_bytes() if self.rank == 0 else None)
        payload = self._broadcast(pair[1] if pair else b"", root=0)
        return pair[0] if pair else pickle.loads(payload)

    def allgather(self, compute: Callable[[], T]) -> list[T]:
        mine = self.agree(lambda: pickle.dumps(compute()))
        sizes = np.zeros(self.size, np.int64)
        self._wait(self._comm.Iallgather(np.array([len(mine)], np.int64), sizes))
        if sizes.sum() < GATHER_LIMIT:
            data = np.empty(int(sizes.sum()), np.uint8)
            self._wait(self._comm.Iallgatherv(np.frombuffer(mine, np.uint8), (data, sizes)))
            ends = np.cumsum(sizes)
            return [pickle.loads(data[e - n : e].tobytes()) for e, n in zip(ends, sizes)]
        return [
            pickle.loads(self._broadcast(mine if self.rank == root else b"", root))
            for root in range(self.size)
        ]

    def agree(self, compute: Callable[[], T]) -> T:
        with self._agreed():
            self.check_stop()
            value = compute()
        return value  # noqa: RET504  (a failure is raised where the block ends)

    @contextmanager
    def _agreed(self) -> Iterator[None]:
        """Do local work; if it fails on one process, raise its error on all.

        Every process must reach the reduction at the end of this, and must not enter an earlier one
        that another process skips.
        """
        failure: Exception | None = None
        try:
            with raising_storage_errors():
                yield
        except Exception as error:
            failure = error
        except (KeyboardInterrupt, SystemExit) as interruption:
            with suppress(RankxformError):
                self._agree(StoppedError(f"stopped by {type(interruption).__name__}"))
            raise
        self._agree(failure)

    def work(self, compute: Callable[[Callable[[int], None]], T], show: ShowProgress) -> T:
        rounds = _ProgressRounds(self, show)
        value: T | None = None
        with self._agreed():
            failed = True
            self.stopping.at_work(True)
            try:
                self.check_stop()  # in here: the others take part in rounds already
                value = compute(rounds.on_progress)
                failed = False
            finally:
                if rounds.end(failed) and self._p2p:
                    self._p2p.drain()
                self.stopping.at_work(False)
            rounds.check()
            self.check_stop()  # asked for while it waited for the others
        return value

    @cached_property
    def nodes(self) -> Nodes:
        host = self._mpi.Get_processor_name()
        return Nodes.of_processes(self.allgather(lambda: this_node(host)))

    def p2p(self) -> PointToPoint:
        if self._p2p is None:
            self._p2p = PointToPoint(self._mpi, self._comm, self._until)
        return self._p2p

    def finish(self, code: int) -> int:
        worst = np.zeros(1, np.int64)
        self._wait(self._comm.Iallreduce(np.array([code], np.int64), worst, self._mpi.MAX))
        self._wait(self._comm.Ibarrier())
        self.free()
        if self._owns_mpi:
            self._mpi.Finalize()
        return int(worst[0])

    def free(self) -> None:
        if self._p2p is not None:
            self._p2p.close()
        self._comm.Free()

    def abort(self, message: str, code: int) -> None:
        """Say why and end every process of the world now. Does not return."""
        host = self._mpi.Get_processor_name()
        text = f"rankxform: error: {message} [process {self.rank} on {host}]\n"
        if terminal():  # where process 0 may have drawn a line that has not ended
            text = CLEAR_LINE + text
        os.write(2, text.encode())
        time.sleep(_SPEAK_SECONDS)
        self.leave(code)

    def leave(self, code: int) -> None:
        # MPI_Abort can block when a node is gone, and mpi4py holds the interpreter's lock in it:
        # only a signal with its default action still ends the process then.
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(3)
        try:
            self._mpi.COMM_WORLD.Abort(code)
        finally:
            os._exit(code)

    # -- the machinery ----------------------------------------------------------------------

    def _agree(self, failure: BaseException | None) -> None:
        """Raise on every process what the lowest failing one met, if any did.

        A process that only heard of another's failure does not count as failing.
        """
        heard = isinstance(failure, PeerError)
        mine = self.size if failure is None or heard else self.rank
        lowest = np.zeros(1, np.int64)
        self._wait(self._comm.Iallreduce(np.array([mine], np.int64), lowest, self._mpi.MIN))
        first = int(lowest[0])
        if first == self.size:
            if failure is not None:
                raise failure
            return
        record = b""
        if first == self.rank:
            assert failure is not None
            names = getattr(failure, "fault", None), getattr(failure, "rule", None)
            facts = *names, getattr(failure, "reasons", ())
            record = pickle.dumps((type(failure).__name__, *self._describe(failure), *facts))
        raise peer_error(*pickle.loads(self._broadcast(record, first))) from failure

    def _describe(self, failure: BaseException) -> tuple[Message, str]:
        """Return what a failure says, and the process that met it, where that matters."""
        if isinstance(failure, RankxformError):
            parts = failure.parts
        else:
            parts = Message(f"a bug of rankxform's own: {type(failure).__name__}: {failure}")
            sys.excepthook(type(failure), failure, failure.__traceback__)
        nodes = self.__dict__.get("nodes")  # `self.nodes` would be collective here
        sees_the_same = self.rank == 0 if nodes is None else nodes.count == 1
        if isinstance(failure, UsageError) or (sees_the_same and isinstance(failure, _OF_INPUTS)):
            return parts, ""  # of the command line, or of what every process finds
        host = self._mpi.Get_processor_name()
        return parts, f"process {self.rank} of {self.size} on {host}"

    def _broadcast(self, data: bytes, root: int) -> bytes:
        size = np.array([len(data)], np.int64)
        self._wait(self._comm.Ibcast(size, root))
        if self.rank == root:
            buffer = np.frombuffer(data, np.uint8)
        else:
            buffer = np.empty(int(size[0]), np.uint8)
        block = 1 << 29
        for start in range(0, int(size[0]), block):
            self._wait(self._comm.Ibcast(buffer[start : start + block], root))
        return buffer.tobytes()

    def _wait(self, request: Any) -> None:
        """Wait for `request` without burning the core; give up when nobody answers for long."""
        self._until(request.Test)

    def _until(self, test: Callable[[], bool], on_progress: OnProgress | None = None) -> None:
        """Wait until `test` is true.

        `on_progress` is called meanwhile and may raise; it also checks that all other processes are
        alive. Without it, a wait that is longer than the stall limit ends all processes.
        """
        began, pause = time.monotonic(), _FIRST_SLEEP
        while not test():
            if on_progress:
                on_progress(0)
            waited = time.monotonic() - began
            if waited < _YIELD_SECONDS:
                os.sched_yield()
                continue
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_SLEEP)
            if not on_progress:
                self.check_stall(waited)

    def check_stall(self, waited: float) -> None:
        """End all processes when some have not answered for too long."""
        patience = _PATIENCE_SECONDS * min(self.rank, 2)  # so that one process speaks
        if waited > self.stall_seconds + patience:
            self.abort(
                f"no answer from a process for {self.stall_seconds:g} s; what the journals hold "
                "is kept, run the same command again to continue",
                StoppedError.exit_code,
            )


class _ProgressRounds:
    """Reductions that run beside the work: bytes done, processes at their end, failures.

    Every process takes part in round after round until one round has counted all of them as
    ended. A round is started when the last is complete and a moment has passed.
    """

    def __init__(self, team: MpiTeam, show: ShowProgress) -> None:
        self._team, self._show = team, show
        self._failure: BaseException | None = None
        self._done = 0
        self._last = self._begun = 0.0
        self._request: Any = None
        self._total = np.zeros(3, np.int64)

    def on_progress(self, nbytes: int) -> None:
        self._team.check_stop()
        self._done += nbytes
        now = time.monotonic()
        if self._request is None:
            if now - self._last >= _ROUND_SECONDS:
                self._start_sum(ended=0, failed=0)
        elif self._request.Test():
            self._complete()
            if self._failure is not None:
                raise self._failure
            if self._total[2]:
                raise PeerError("another process failed")
        else:
            self._team.check_stall(now - self._begun)

    def end(self, failed: bool) -> bool:
        """Take part until every process has ended; return whether any has failed.

        Rounds go no faster than those that still work start them.
        """
        while True:
            if self._request is None:
                stopped = self._team.stopping.reason() is not None
                bad = failed or stopped or self._failure is not None
                self._start_sum(ended=1, failed=int(bad))
            self._team._wait(self._request)
            self._complete()
            if self._total[1] == self._team.size:
                return bool(self._total[2])

    def check(self) -> None:
        """Raise what showing the progress raised."""
        if self._failure is not None:
            raise self._failure

    def _start_sum(self, ended: int, failed: int) -> None:
        mine = np.array([self._done, ended, failed], np.int64)
        self._mine, self._begun = mine, time.monotonic()  # the buffer must outlive the request
        self._request = self._team._comm.Iallreduce(mine, self._total, self._team._mpi.SUM)

    def _complete(self) -> None:
        self._request, self._last = None, time.monotonic()
        if self._team.rank == 0 and self._failure is None:
            try:
                self._show(int(self._total[0]), bool(self._total[1] == self._team.size))
            except BaseException as failure:  # rounds go on, or the others would wait for ever
                self._failure = failure
