"""A thread that sums what its process writes meanwhile, where a core would be idle."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any


class HelperThread:
    """Makes calls in their order, while the process goes on."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[tuple[Callable[[], Any], SimpleQueue[Any]] | None] = SimpleQueue()
        self._thread = Thread(target=self._make_calls, name="rankxform sums", daemon=True)
        self._thread.start()

    def start(self, call: Callable[[], Any]) -> Callable[[], Any]:
        """Have a call made after those that were started before; return what waits for it, and
        returns its result or raises its error."""
        outcome: SimpleQueue[Any] = SimpleQueue()
        self._calls.put((call, outcome))
        return partial(_result_of, outcome)

    def end(self) -> None:
        """Wait until no call is made any more."""
        self._calls.put(None)
        self._thread.join()

    def _make_calls(self) -> None:
        while (started := self._calls.get()) is not None:
            call, outcome = started
            try:
                outcome.put(call())
            except BaseException as error:  # or its process would wait for ever
                outcome.put(error)


def _result_of(outcome: SimpleQueue[Any]) -> Any:
    result = outcome.get()
    if isinstance(result, BaseException):
        raise result
    return result


@contextmanager
def helper_thread() -> Iterator[HelperThread | None]:
    """Provide a thread for a while; None where the system allows no more of them."""
    try:
        helper = HelperThread()
    except RuntimeError:
        yield None
        return
    try:
        yield helper
    finally:
        helper.end()
