"""The processes of a run, as the rest of the package sees them, and their nodes.

All processes fail together. Whatever can fail runs inside `agree`, `bcast`, `allgather` or `work`;
the error of the lowest process that failed is raised on all of them, so that no process waits for
another one. Inside `work`, reductions run beside the work, so that a failure stops the others
within a moment. Outside of these four nothing may raise: a bug there ends the job by MPI_Abort.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Protocol, TypeVar

from rankxform.errors import StoppedError, raising_storage_errors
from rankxform.values import dataclass

if TYPE_CHECKING:
    from .mpi import PointToPoint


_MOUNT_NAMESPACE = "/proc/self/ns/mnt"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run. Processes of one node share a host and see the same file systems."""

    node_of: tuple[int, ...]  # by process the number of its node, in the order of the processes
    names: tuple[str, ...]  # by node the name of its host

    @classmethod
    def of_processes(cls, hosts_and_mounts: Sequence[tuple[str, Hashable]]) -> Nodes:
        """Number the nodes. `hosts_and_mounts`: by process what `this_node` returns.

        >>> Nodes.of_processes([("a", 1), ("b", 1), ("a", 1)])
        Nodes(node_of=(0, 1, 0), names=('a', 'b'))
        """
        numbers: dict[tuple[str, Hashable], int] = {}
        node_of = tuple(numbers.setdefault(node, len(numbers)) for node in hosts_and_mounts)
        return cls(node_of, tuple(name for name, _ in numbers))

    @property
    def count(self) -> int:
        return len(self.names)

    @cached_property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """By node its processes, ascending. The first one is the node's leader."""
        processes: list[list[int]] = [[] for _ in self.names]
        for process, node in enumerate(self.node_of):
            processes[node].append(process)
        return tuple(map(tuple, processes))

    def is_leader(self, process: int) -> bool:
        """Return whether `process` is the first of its node."""
        return self.processes[self.node_of[process]][0] == process


ALONE = Nodes((0,), ("this host",))


def this_node(host: str) -> tuple[str, Hashable]:
    """Return this process's host and its mount namespace: containers of a host may differ."""
    mounts = ""
    with suppress(OSError):  # without /proc the host's name must suffice
        mounts = os.readlink(_MOUNT_NAMESPACE)
    return host, mounts


T = TypeVar("T")
OnProgress = Callable[[int], None]
"""Called by a process with the bytes that it has done since the last call; may raise to stop."""
ShowProgress = Callable[[int, bool], None]
"""Called on process 0 with the bytes done by all processes, and whether it is the last call."""
Begin = Callable[[str, int], ShowProgress]
"""Called with a phase and its bytes; returns the function that is shown the progress."""


def show_nothing(done: int, end: bool) -> None:
    """Show nothing."""


def begin_silently(phase: str, total: int) -> ShowProgress:
    """Show nothing of a phase."""
    return show_nothing


class StopSource(Protocol):
    """Something that may ask a process to stop early, such as a signal."""

    def reason(self) -> str | None:
        """Return the reason to stop. None: go on."""

    def at_work(self, is_at_work: bool) -> None:
        """Learn whether `reason` will be called often from now on."""


class NeverStop:
    """A `StopSource` that never asks."""

    def reason(self) -> str | None:
        return None

    def at_work(self, is_at_work: bool) -> None:
        """Nothing changes."""


class Team(ABC):
    """Processes that call the same methods in the same order.

    Every method but `check_stop` and `abort` is collective. A failure on one process is raised on
    all, as one class with one message.
    """

    rank: int
    size: int
    stopping: StopSource = NeverStop()
    """Asked often, on every process."""
    stall_seconds = 900.0
    """How long a process waits for another one before it ends the job."""

    def check_stop(self) -> None:
        """Raise StoppedError if this process was asked to stop."""
        reason = self.stopping.reason()
        if reason is not None:
            raise StoppedError(reason)

    @abstractmethod
    def bcast(self, compute: Callable[[], T]) -> T:
        """Compute on process 0 and return the value on every process."""

    @abstractmethod
    def allgather(self, compute: Callable[[], T]) -> list[T]:
        """Compute on every process and return all values, by process, on every process."""

    @abstractmethod
    def agree(self, compute: Callable[[], T]) -> T:
        """Do local work; return when every process has done its own, or raise on all."""

    def barrier(self) -> None:
        """Return when every process has called this."""
        self.agree(lambda: None)

    @abstractmethod
    def work(self, compute: Callable[[Callable[[int], None]], T], show: ShowProgress) -> T:
        """Do long local work that reports bytes as it goes; end at the same time.

        `compute` gets a function to call with the bytes done since the last call. That function
        raises on every process soon after one has failed, so that none works on for nothing.
        """

    def allgather_work(self, compute: Callable[[Callable[[int], None]], T]) -> list[T]:
        """Do long local work as `work` does, and return all values, by process, on every one."""
        value = self.work(compute, show_nothing)
        return self.allgather(lambda: value)

    @property
    @abstractmethod
    def nodes(self) -> Nodes:
        """Which processes share a node. Collective when it is first asked for."""

    @abstractmethod
    def p2p(self) -> PointToPoint:
        """Return what carries bytes between processes. Collective when it is first asked for.

        What is on its way when `work` fails is dropped.
        """

    @abstractmethod
    def finish(self, code: int) -> int:
        """Leave the team with an exit code; return the largest of all processes'."""

    @abstractmethod
    def free(self) -> None:
        """Free the team's communicators, but leave MPI initialized for the application that calls.

        Collective.
        """

    @abstractmethod
    def abort(self, message: str, code: int) -> None:
        """Say why and end every process now, in whatever state they are. Does not return."""

    @abstractmethod
    def leave(self, code: int) -> None:
        """End every process now, and say nothing. Does not return."""


class SerialTeam(Team):
    """One process, without MPI."""

    rank, size = 0, 1

    def bcast(self, compute: Callable[[], T]) -> T:
        return self.agree(compute)

    def allgather(self, compute: Callable[[], T]) -> list[T]:
        return [self.agree(compute)]

    def agree(self, compute: Callable[[], T]) -> T:
        with raising_storage_errors():
            self.check_stop()
            return compute()

    def work(self, compute: Callable[[Callable[[int], None]], T], show: ShowProgress) -> T:
        done = 0

        def on_progress(nbytes: int) -> None:
            nonlocal done
            self.check_stop()
            done += nbytes
            show(done, False)

        self.stopping.at_work(True)
        try:
            with raising_storage_errors():
                self.check_stop()
                value = compute(on_progress)
        finally:
            self.stopping.at_work(False)
        show(done, True)
        return value

    nodes = ALONE

    def p2p(self) -> PointToPoint:
        raise AssertionError("one process has nobody to write to")

    def finish(self, code: int) -> int:
        return code

    def free(self) -> None:
        """Nothing to free."""

    def abort(self, message: str, code: int) -> None:
        os.write(2, f"rankxform: error: {message}\n".encode())
        self.leave(code)

    def leave(self, code: int) -> None:
        os._exit(code)
