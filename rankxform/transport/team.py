"""The processes of a run, as the job sees them; and the team of one."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, TypeVar

from rankxform.errors import StoppedError, storage_errors

from .nodes import ALONE, Nodes

if TYPE_CHECKING:  # it needs numpy
    from .p2p import Mail

T = TypeVar("T")
Show = Callable[[int, bool], None]
"""Told on process 0 the bytes done by all processes, and whether that is the end."""


class Team(ABC):
    """Processes that call the same methods in the same order.

    Every method but `rank` and `size` is collective. A failure on one process is raised on all,
    as one class with one message.
    """

    rank: int
    size: int
    stop_reason: Callable[[], str | None] = staticmethod(lambda: None)
    """Asked often, on every process: why to stop before the end, or None."""
    stall_seconds = 900.0
    """How long to wait for an answer of another process before all are ended."""

    def check_stop(self) -> None:
        """Raise StoppedError where this process was asked to stop."""
        reason = self.stop_reason()
        if reason is not None:
            raise StoppedError(reason)

    @abstractmethod
    def share(self, compute: Callable[[], T]) -> T:
        """Compute on process 0 and return the value on every process."""

    @abstractmethod
    def gather(self, compute: Callable[[], T]) -> list[T]:
        """Compute on every process and return all values, by process, on every process."""

    @abstractmethod
    @contextmanager
    def together(self) -> Iterator[None]:
        """Do local work; leave when every process has done its own, or raise on all."""
        yield

    @abstractmethod
    def work(self, compute: Callable[[Callable[[int], None]], T], show: Show) -> T:
        """Do long local work that reports bytes as it goes; end together.

        `compute` gets a function to call with the bytes done since the last call. That function
        raises on every process soon after one has failed, so that none works on for nothing.
        """

    def gather_work(self, compute: Callable[[Callable[[int], None]], T]) -> list[T]:
        """Do long local work as `work` does, and return all values, by process, on every one."""
        value = self.work(compute, lambda done, end: None)
        return self.gather(lambda: value)

    @property
    @abstractmethod
    def nodes(self) -> Nodes:
        """Which processes share a node. Collective when it is first asked for."""

    @abstractmethod
    def mail(self) -> Mail:
        """Return what carries bytes between processes. Collective when it is first asked for.

        What is on its way when `work` fails is dropped.
        """

    @abstractmethod
    def finish(self, code: int) -> int:
        """Leave the team with an exit code; return the largest of all processes'."""

    @abstractmethod
    def free(self) -> None:
        """Let go of what the team holds of MPI, which stays; for calls that an application makes.

        Collective.
        """

    @abstractmethod
    def abort(self, message: str, code: int) -> None:
        """Say why and end every process now, in whatever state they are. Does not return."""


class Serial(Team):
    """One process, without MPI."""

    rank, size = 0, 1

    def share(self, compute: Callable[[], T]) -> T:
        with self.together():
            return compute()
        raise AssertionError("together() raises or returns")

    def gather(self, compute: Callable[[], T]) -> list[T]:
        return [self.share(compute)]

    @contextmanager
    def together(self) -> Iterator[None]:
        with storage_errors():
            self.check_stop()
            yield

    def work(self, compute: Callable[[Callable[[int], None]], T], show: Show) -> T:
        done = 0

        def tick(nbytes: int) -> None:
            nonlocal done
            self.check_stop()
            done += nbytes
            show(done, False)

        with storage_errors():
            value = compute(tick)
        show(done, True)
        return value

    nodes = ALONE

    def mail(self) -> Mail:
        raise AssertionError("one process has nobody to write to")

    def finish(self, code: int) -> int:
        return code

    def free(self) -> None:
        """There is nothing to let go of."""

    def abort(self, message: str, code: int) -> None:
        os.write(2, f"rankxform: error: {message}\n".encode())
        os._exit(code)
