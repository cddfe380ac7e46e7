"""Threads that make requests, and headers of files that are fetched before they are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Generic, TypeVar

from rankxform.storage.store import ReadFiles
from rankxform.transport.team import OnProgress

IN_FLIGHT = 16
"""Requests of a process at a time."""
_LOOK_SECONDS = 0.2

Work = tuple["Future[None]", Callable[[], None]]
T = TypeVar("T")


class Workers:
    """Threads that end with the process: a request is not interrupted, and nobody waits for it."""

    def __init__(self, count: int) -> None:
        self._queue: SimpleQueue[Work | None] = SimpleQueue()
        self._count, self._started = count, 0

    def begin(self, work: Callable[[], None]) -> Future[None]:
        """Do `work` in one of the threads."""
        future: Future[None] = Future()
        self._queue.put((future, work))
        if self._started < self._count:
            self._started += 1
            Thread(target=self._run, daemon=True).start()
        return future

    def end(self) -> None:
        """Let the threads end."""
        for _ in range(self._started):
            self._queue.put(None)

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            future, work = item
            if not future.set_running_or_notify_cancel():
                continue
            try:
                work()
            except BaseException as error:  # it is raised where the range is read
                future.set_exception(error)
            else:
                future.set_result(None)


def await_future(future: Future[None], on_wait: OnProgress | None) -> None:
    """Wait until work is done, and raise what it raised; `on_wait` is called meanwhile."""
    while not future.done():
        wait_for([future], _LOOK_SECONDS)
        if on_wait is not None:
            on_wait(0)
    future.result()


def read_each(files: Sequence[int], read: ReadFiles, on_progress: OnProgress) -> None:
    """Read some of each file in a thread of its own (`storage.store.ReadEach`)."""
    workers = Workers(IN_FLIGHT)
    futures = [workers.begin(partial(read, lambda nbytes: None, (file,))) for file in files]
    try:
        for future in futures:
            await_future(future, on_progress)
    finally:
        workers.end()


class HeadersAhead(Generic[T]):
    """Headers of files that are read one after another, fetched several at a time.

    Each takes a round trip, and thousands of them would take minutes.
    """

    def __init__(self, fetch: Callable[[str], T]) -> None:
        self._fetch, self._workers = fetch, Workers(IN_FLIGHT)
        self._coming: deque[str] = deque()
        self._begun: dict[str, tuple[Future[None], list[T]]] = {}

    def expect(self, addresses: Iterable[str]) -> None:
        """Begin to fetch what is read next, in this order."""
        self._coming = deque(addresses)
        self._begun.clear()
        self._begin()

    def take(self, address: str) -> T | None:
        """Return the header of a file, once; None if nobody expected it. Raises StorageError."""
        future, headers = self._begun.pop(address, (None, []))
        self._begin()
        if future is None:
            return None
        future.result()
        return headers[0]

    def _begin(self) -> None:
        while self._coming and len(self._begun) < 2 * IN_FLIGHT:
            address, headers = self._coming.popleft(), list[T]()
            work = partial(lambda a, h: h.append(self._fetch(a)), address, headers)
            self._begun[address] = self._workers.begin(work), headers
