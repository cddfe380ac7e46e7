"""Worlds of forked processes, with as much of mpi4py's communicator as `MpiTeam` uses.

Tests of what several processes do start no launcher: `run_world` forks, the processes are joined by
sockets, and `MpiTeam` runs over a `LocalComm` as it runs over MPI's. A world of two takes 0.1 s;
mpirun takes 5 s before its first test.

A frame is a header and its bytes. A collective sends a frame to every other process, and is
complete when all their frames with its number have come. A message of `Issend` is complete when
its receiver has matched it and said so. Receives match in the order in which they were posted.
Every `Test` moves all sockets on; nothing moves between calls, as in MPI.

Sockets deliver in order and lose nothing, so a test that passes here and fails under MPI shows what
tests/conformance/test_team.py lacks.
"""

from __future__ import annotations

import os
import pickle
import select
import signal
import socket
import struct
import sys
import time
import traceback
import warnings
from collections import defaultdict, deque
from contextlib import suppress

import numpy as np

_HEADER = struct.Struct("<qqqq")  # bytes, communicator, kind, number or tag
_COLLECTIVE, _MATCHED, _MESSAGE = 0, 1, 2  # a message's kind is _MESSAGE + its tag
_BLOCK = 1 << 20


class Wires:
    """The sockets of one process to all others. They never block."""

    def __init__(self, rank, sockets):
        self.rank = rank
        self._sockets = sockets  # peer -> socket
        self._out = {peer: deque() for peer in sockets}
        self._in = {peer: bytearray() for peer in sockets}
        self.contributions = defaultdict(dict)  # (communicator, call) -> {peer: bytes}
        self.arrived = defaultdict(deque)  # (communicator, peer, tag) -> [(number, bytes)]
        self.posted = defaultdict(deque)  # (communicator, peer, tag) -> requests of receives
        self.matched = set()  # (communicator, peer, number) of messages that were received

    def send(self, peer, comm, kind, number, data=b""):
        data = memoryview(data).cast("B")
        self._out[peer] += [memoryview(_HEADER.pack(len(data), comm, kind, number)), data]

    def progress(self):
        for peer, wire in self._sockets.items():
            self._send_queued(wire, self._out[peer])
            self._receive_all(peer, wire)

    def _send_queued(self, wire, queue):
        while queue:
            try:
                count = wire.send(queue[0]) if queue[0] else 0
            except (BlockingIOError, BrokenPipeError, ConnectionResetError):
                return  # it is full; or nobody reads any more, and run_world reports why
            queue[0] = queue[0][count:]
            if not queue[0]:
                queue.popleft()

    def _receive_all(self, peer, wire):
        buffer = self._in[peer]
        try:
            while block := wire.recv(_BLOCK):
                buffer += block
        except (BlockingIOError, ConnectionResetError):
            pass
        start = 0
        while len(buffer) - start >= _HEADER.size:
            nbytes, comm, kind, number = _HEADER.unpack_from(buffer, start)
            end = start + _HEADER.size + nbytes
            if len(buffer) < end:
                break
            self._take(peer, comm, kind, number, bytes(buffer[start + _HEADER.size : end]))
            start = end
        del buffer[:start]

    def _take(self, peer, comm, kind, number, data):
        if kind == _COLLECTIVE:
            self.contributions[comm, number][peer] = data
        elif kind == _MATCHED:
            self.matched.add((comm, peer, number))
        else:
            self.arrived[comm, peer, kind - _MESSAGE].append((number, data))
            self.match(comm, peer, kind - _MESSAGE)

    def match(self, comm, peer, tag):
        """Give what has arrived to the receives that wait for it, in order."""
        posted, arrived = self.posted[comm, peer, tag], self.arrived[comm, peer, tag]
        while posted and arrived:
            number, data = arrived.popleft()
            posted.popleft().fill(data)
            self.send(peer, comm, _MATCHED, number)

    def flush(self, deadline=5.0):
        """Send what is queued before this process ends."""
        end = time.monotonic() + deadline
        while any(self._out.values()) and time.monotonic() < end:
            self.progress()


class Request:
    """An operation that has begun; false once it is complete, as mpi4py's."""

    def __init__(self, wires, complete):
        self._wires, self._complete = wires, complete  # complete() returns whether it is
        self._is_complete = False

    def __bool__(self):
        return not self._is_complete

    def Test(self):
        if not self._is_complete:
            self._wires.progress()
            self._is_complete = self._complete()
        return self._is_complete

    def Wait(self, status=None):
        while not self.Test():
            time.sleep(1e-4)


class Receive(Request):
    def __init__(self, wires, key, room):
        super().__init__(wires, lambda: self._is_filled)
        self._key, self._room = key, memoryview(room).cast("B")
        self._is_filled = self._is_cancelled = False

    def fill(self, data):
        assert len(data) <= len(self._room), "a message is longer than the room for it"
        self._room[: len(data)] = data
        self._is_filled = True

    def Cancel(self):
        if not self._is_filled:
            self._wires.posted[self._key].remove(self)
            self._is_filled = self._is_cancelled = True

    def Wait(self, status=None):
        super().Wait()
        if status is not None:
            status.is_cancelled = self._is_cancelled


class Status:
    is_cancelled, nbytes = False, 0

    def Is_cancelled(self):
        return self.is_cancelled

    def Get_count(self, datatype):
        return self.nbytes


class LocalMpi:
    """What `MpiTeam` takes from the module mpi4py.MPI."""

    BYTE = "bytes"
    MIN, MAX, SUM = np.minimum, np.maximum, np.add
    Status = Status

    def __init__(self, wires, hosts):
        self._host = hosts[wires.rank]
        self.COMM_WORLD = LocalComm(self, wires, 1, len(hosts))

    def Get_processor_name(self):
        return self._host

    def Finalize(self):
        """Nothing to end."""


class LocalComm:
    """A communicator of all processes of a local world."""

    def __init__(self, mpi, wires, number, size):
        self.mpi, self._wires, self._number = mpi, wires, number
        self.rank, self.size = wires.rank, size
        self._peers = [peer for peer in range(size) if peer != self.rank]
        self._calls = self._children = self._sent = 0

    def Dup(self):
        self._children += 1  # in the same order on all processes, as every collective
        return LocalComm(self.mpi, self._wires, (self._number << 12) + self._children, self.size)

    def Free(self):
        """Nothing is kept; what nobody received would disturb an application's communicator."""
        self._wires.progress()
        for key, messages in [*self._wires.arrived.items(), *self._wires.posted.items()]:
            assert key[0] != self._number or not messages, "a freed communicator has messages"

    def Abort(self, code=1):
        os.killpg(0, signal.SIGKILL)

    # -- collectives: `outgoing` has by peer what is sent, `finish` gets by process what came --

    def _begin(self, outgoing, senders, finish):
        self._calls += 1
        key = self._number, self._calls
        for peer, data in outgoing.items():
            self._wires.send(peer, self._number, _COLLECTIVE, self._calls, data)
        missing = [peer for peer in senders if peer != self.rank]

        def complete():
            contributions = self._wires.contributions[key]
            if any(peer not in contributions for peer in missing):
                return False
            finish(self._wires.contributions.pop(key))
            return True

        return Request(self._wires, complete)

    def _to_all(self, array, finish):
        data = np.ascontiguousarray(array).tobytes()

        def with_own(contributions):
            finish([{**contributions, self.rank: data}[process] for process in range(self.size)])

        return self._begin(dict.fromkeys(self._peers, data), range(self.size), with_own)

    def Iallreduce(self, send, receive, operation):
        def finish(parts):
            arrays = [np.frombuffer(part, send.dtype) for part in parts]
            receive[:] = operation.reduce(arrays)

        return self._to_all(send, finish)

    def Iallgather(self, send, receive):
        def finish(parts):
            receive[:] = np.frombuffer(b"".join(parts), receive.dtype)

        return self._to_all(send, finish)

    def Iallgatherv(self, send, receive_and_sizes):
        return self.Iallgather(send, receive_and_sizes[0])

    def Ialltoall(self, send, receive):
        def finish(contributions):
            receive[self.rank] = send[self.rank]
            for peer, data in contributions.items():
                receive[peer] = np.frombuffer(data, send.dtype).reshape(send[peer].shape)

        outgoing = {peer: send[peer].tobytes() for peer in self._peers}
        return self._begin(outgoing, range(self.size), finish)

    def Ibcast(self, buffer, root):
        def finish(contributions):
            if self.rank != root:
                buffer[:] = np.frombuffer(contributions[root], buffer.dtype)

        data = buffer.tobytes() if self.rank == root else b""
        return self._begin(
            dict.fromkeys(self._peers, data) if self.rank == root else {}, [root], finish
        )

    def Ibarrier(self):
        return self._to_all(np.zeros(0, np.uint8), lambda parts: None)

    # -- messages ------------------------------------------------------------------------------

    def Issend(self, data_and_type, peer, tag=0):
        self._sent += 1
        key = self._number, peer, self._sent
        self._wires.send(peer, self._number, _MESSAGE + tag, self._sent, data_and_type[0])
        self._wires.progress()
        return Request(self._wires, lambda: key in self._wires.matched)

    def Irecv(self, room_and_type, peer, tag=0):
        key = self._number, peer, tag
        request = Receive(self._wires, key, room_and_type[0])
        self._wires.posted[key].append(request)
        self._wires.match(*key)
        return request

    def Iprobe(self, peer=None, tag=0, status=None):
        self._wires.progress()
        arrived = self._wires.arrived[self._number, peer, tag]
        if arrived and status is not None:
            status.nbytes = len(arrived[0][1])
        return bool(arrived)

    # -- for tests -----------------------------------------------------------------------------

    def Barrier(self):
        self.Ibarrier().Wait()

    def allgather(self, value):
        values = []
        data = np.frombuffer(pickle.dumps(value), np.uint8)
        self._to_all(data, lambda parts: values.extend(map(pickle.loads, parts))).Wait()
        return values

    def bcast(self, value):
        return self.allgather(value if self.rank == 0 else None)[0]


def run_world(size, work, hosts=None, deadline=120.0):
    """Fork `size` processes, call `work(comm)` in each, and return by process what it returned.

    `hosts`: by process the name of its host; None: one host. A process that raises, dies or is not
    done by the deadline has a `Failed` in its place; the others are ended soon after it.
    """
    hosts = hosts or ["local"] * size
    assert "obstore" not in sys.modules, "its threads do not exist in a forked process"
    ends = [{} for _ in range(size)]
    for low in range(size):
        for high in range(low + 1, size):
            ends[low][high], ends[high][low] = socket.socketpair()
    pipes = [os.pipe() for _ in range(size)]
    processes, group = [], 0
    for rank in range(size):
        with warnings.catch_warnings():  # the threads of pytest's plugins hold no lock of ours
            warnings.simplefilter("ignore", DeprecationWarning)
            process = os.fork()
        if process == 0:
            for _, write in pipes[:rank] + pipes[rank + 1 :]:
                os.close(write)  # else no pipe ends before all processes do
            _run_process(rank, ends, hosts, work, pipes[rank][1], group)
        group = group or process
        with suppress(ProcessLookupError, PermissionError):  # it has ended, or did so itself
            os.setpgid(process, group)
        processes.append(process)
    for wire in [wire for wires in ends for wire in wires.values()]:
        wire.close()
    for _, write in pipes:
        os.close(write)
    try:
        return _outcomes([read for read, _ in pipes], group, deadline)
    finally:
        with suppress(ProcessLookupError, PermissionError):  # all have ended
            os.killpg(group, signal.SIGKILL)
        for process in processes:
            os.waitpid(process, 0)


class Failed(str):
    """Why a process of a local world has no value."""


NOT_DONE = Failed("it was not done in time")
_GRACE_SECONDS = 5.0
"""How long the others may go on once a process has failed: they may report the same."""


def _run_process(rank, ends, hosts, work, pipe, group):
    """Run one process of a local world. Does not return."""
    try:
        os.setpgid(0, group)  # 0: the first process leads the group that an abort ends
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        for peer, wires in enumerate(ends):
            for wire in wires.values():
                wire.setblocking(False) if peer == rank else wire.close()
        wires = Wires(rank, ends[rank])
        try:
            outcome = work(LocalMpi(wires, hosts).COMM_WORLD)
        except BaseException:
            outcome = Failed(traceback.format_exc())
        wires.flush()
        with os.fdopen(pipe, "wb") as file:
            file.write(pickle.dumps(outcome))
    finally:
        os._exit(0)


def _outcomes(pipes, group, deadline):
    """Read what each process reports, until all have or the deadline has passed."""
    end = time.monotonic() + deadline
    buffers = {pipe: bytearray() for pipe in pipes}
    outcomes = {}
    while len(outcomes) < len(pipes):
        waiting = [pipe for pipe in pipes if pipe not in outcomes]
        ready = select.select(waiting, [], [], max(0.0, end - time.monotonic()))[0]
        if not ready:
            break
        for pipe in ready:
            block = os.read(pipe, _BLOCK)
            buffers[pipe] += block
            if not block:
                data = bytes(buffers[pipe])
                outcomes[pipe] = pickle.loads(data) if data else Failed("it ended without a word")
                if isinstance(outcomes[pipe], Failed):
                    end = min(end, time.monotonic() + _GRACE_SECONDS)
    for pipe in pipes:
        os.close(pipe)
    return [outcomes.get(pipe, NOT_DONE) for pipe in pipes]
