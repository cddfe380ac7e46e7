"""Threads that make requests."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from functools import partial
from queue import SimpleQueue
from threading import Thread

from rankxform.storage.store import ReadFiles
from rankxform.transport.team import OnProgress

IN_FLIGHT = 16
"""Requests of a process at a time."""
_LOOK_SECONDS, _FILES_AT_ONCE = 0.2, 8

Work = tuple["Future[None]", Callable[[], None]]


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
    workers = Workers(_FILES_AT_ONCE)
    futures = [workers.begin(partial(read, lambda nbytes: None, (file,))) for file in files]
    try:
        for future in futures:
            await_future(future, on_progress)
    finally:
        for future in futures:
            future.cancel()
        workers.end()
