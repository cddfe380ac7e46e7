"""Bytes from one process to another, without blocking either.

Between two processes, messages of one tag arrive in the order in which they were sent. A message
is complete only when its receiver has made room for it (sends are synchronous), so nobody is
flooded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

TAGS = 2
"""How many tags there are; messages of one tag between two processes do not overtake each other."""

OnProgress = Callable[[int], None]
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
