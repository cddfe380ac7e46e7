"""Headers of an object, read from window to window, and fetched before they are asked for.

Some formats have a header before each tensor, and where the next one is, each tells: hundreds of
round trips, one after another. But the layers of a model are alike. Where the distances between the
last headers are those of a while before, the next ones are expected where these go on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial

from rankxform.formats.container import Span

from .workers import IN_FLIGHT, Workers

WINDOW = 64 << 10
"""Bytes that one request fetches of a header, at least, if nothing says how long it is."""
_EXPECTED = 8 << 10
_SLACK = 1 << 10
"""Bytes of a window around a header that is expected, and by how many distances may differ: names
have numbers of more digits."""
_LONGEST_PERIOD, _MOST_AHEAD = 64, 2 * IN_FLIGHT

Fetch = Callable[[int, int], bytes]
"""Returns so many bytes from an offset on."""


class _HeaderWindow:
    """Bytes of an object that were asked for. future: None when they are there."""

    def __init__(self, start: int, nbytes: int) -> None:
        self.start, self.stop = start, start + nbytes
        self.data = b""
        self.future: Future[None] | None = None


class HeaderWindows:
    """What was fetched of one object's headers; its `read_at` is a `formats.container.ReadAt`."""

    _workers = Workers(4 * IN_FLIGHT)

    def __init__(self, fetch: Fetch, size: int, first: bytes) -> None:
        """first: the object's first bytes, if they were fetched."""
        self._fetch, self._size = fetch, size
        window = _HeaderWindow(0, len(first))
        window.data = first
        self._windows = [window]  # in their order; those that were expected in vain among them
        self._entered = [0]  # at which offsets reading went on in another window
        self._is_told = False  # what is read next
        self._last_read = window

    def expect(self, spans: Iterable[Span]) -> None:
        """Begin to fetch what is read next; near spans are one request."""
        self._is_told = True
        start = stop = -1
        for span in spans:
            if start < 0 or span.offset - stop > _EXPECTED or span.offset - start > WINDOW:
                self._begin_unless_there(start, stop)
                start = span.offset
            stop = span.offset + span.nbytes
        self._begin_unless_there(start, stop)

    def _begin_unless_there(self, start: int, stop: int) -> None:
        stop = min(stop, self._size)
        if 0 <= start < stop and self._covering(start, stop) is None:
            window = self._add(start, stop - start)
            window.future = self._workers.begin(partial(self._fill, window))

    def read_at(self, offset: int, nbytes: int) -> bytes:
        """Return bytes; fewer only where the object ends. Raises StorageError."""
        stop = min(offset + nbytes, self._size)
        if offset >= stop:
            return b""
        window = self._covering(offset, stop)
        if window is None and nbytes > WINDOW:  # no header, but all of a document
            return self._fetch(offset, stop - offset)
        if window is None:
            length = min(max(nbytes, WINDOW), self._size - offset)
            data = self._fetch(offset, length)
            window = self._add(offset, length)
            window.data = data
        if window.future is not None:
            window.future.result()
        if window is not self._last_read:
            self._last_read = window
            if not self._is_told:
                self._foresee(offset)
        return window.data[offset - window.start : stop - window.start]

    def _covering(self, start: int, stop: int) -> _HeaderWindow | None:
        place = bisect_right(self._windows, start, key=lambda window: window.start) - 1
        for window in reversed(self._windows[max(0, place - 1) : place + 1]):
            if window.start <= start and stop <= window.stop:
                return window
        return None

    def _add(self, start: int, nbytes: int) -> _HeaderWindow:
        window = _HeaderWindow(start, nbytes)
        place = bisect_right(self._windows, start, key=lambda window: window.start)
        self._windows.insert(place, window)
        return window

    def _fill(self, window: _HeaderWindow) -> None:
        window.data = self._fetch(window.start, window.stop - window.start)

    def _foresee(self, offset: int) -> None:
        """Take note where reading is, and expect as many windows as were foreseen rightly."""
        self._entered.append(offset)
        steps = [b - a for a, b in zip(self._entered, self._entered[1:])]
        period, count = 0, 0
        for candidate in range(1, min(_LONGEST_PERIOD, len(steps) - 1) + 1):
            pairs = zip(reversed(steps), reversed(steps[:-candidate]))
            likeness = next((n for n, (a, b) in enumerate(pairs) if abs(a - b) > _SLACK // 2), None)
            likeness = len(steps) - candidate if likeness is None else likeness
            if likeness > count:
                period, count = candidate, likeness
        for number in range(min(count, _MOST_AHEAD)):
            offset += steps[len(steps) - period + number % period]
            if self._covering(offset, offset + 1) is None:
                start = max(0, offset - _SLACK)
                self._begin_unless_there(start, start + _EXPECTED)
