"""A file that is written in parts: a part is sent when it is full, by a thread, and never again."""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection
from concurrent.futures import Future
from functools import partial

from rankxform.planning.upload_parts import UploadParts
from rankxform.storage.posix import Buffer, Position
from rankxform.transport.team import OnProgress

from .workers import Workers, await_future

SENDERS = 8
"""Parts that a process sends at a time."""
NOTHING = memoryview(b"")

Send = Callable[[int, memoryview], None]
"""Sends the part of a file with this number."""


class PartBuffers:
    """Memory for the parts that a process fills or sends, and the threads that send them.

    A part that is begun when all memory is taken waits for one that is being sent; where none is,
    more is taken, which the plan avoids (`planning.parts`).
    """

    def __init__(self, nbytes: int, on_progress: OnProgress) -> None:
        """nbytes: of memory. on_progress: is called while parts are waited for, and may raise."""
        self._limit, self.on_progress = nbytes, on_progress
        self._taken = 0
        self._workers = Workers(SENDERS)
        self._sending: deque[tuple[Future[None], int]] = deque()

    def take(self, nbytes: int) -> bytearray:
        """Return memory for a part."""
        while self._sending and self._taken + nbytes > self._limit:
            self._end_oldest()
        self._taken += nbytes
        return bytearray(nbytes)

    def send(self, work: Callable[[], None], nbytes: int) -> None:
        """Send a part, whose memory is free when that is done."""
        while len(self._sending) >= 2 * SENDERS or (self._sending and self._sending[0][0].done()):
            self._end_oldest()
        self._sending.append((self._workers.begin(work), nbytes))

    def finish(self) -> None:
        """Wait until all parts are sent. Raises StorageError."""
        while self._sending:
            self._end_oldest()

    def close(self) -> None:
        """Let the threads end; what is being sent is not waited for."""
        for future, _ in self._sending:
            future.cancel()
        self._workers.end()

    def _end_oldest(self) -> None:
        future, nbytes = self._sending[0]
        await_future(future, self.on_progress)
        self._sending.popleft()
        self._taken -= nbytes


class PartWriter:
    """The parts of one file that this process sends (`engine.sinks.FileWriter`).

    written: bytes of parts that were full.
    """

    def __init__(
        self,
        parts: UploadParts,
        buffers: PartBuffers,
        send: Send,
        present: Collection[int] = (),
        put_again: int = 0,
    ) -> None:
        """present: numbers of parts that the store has; they are not sent again.

        put_again: so many of the file's first bytes are put twice, and sent as put last.
        """
        self._starts, self._ends = parts.starts, [*parts.starts[1:], parts.size]
        self._buffers, self._send, self._present = buffers, send, present
        self._put_again = put_again
        self._heads: set[int] = set()  # places of heads that were put
        self._open: dict[int, tuple[bytearray, int]] = {}  # by number, with the bytes that it lacks
        self.written = 0

    def put(self, offset: int, data: Buffer, head: Buffer = NOTHING) -> None:
        if head and offset not in self._heads:  # an empty tensor has that of the next one
            self._heads.add(offset)
            self._put_run(offset - len(head), memoryview(head))
        self._put_run(offset, memoryview(data))

    def _put_run(self, offset: int, data: memoryview) -> None:
        while len(data):
            number = bisect_right(self._starts, offset)
            start, end = self._starts[number - 1], self._ends[number - 1]
            length = min(len(data), end - offset)
            if number not in self._present:
                room, lacking_bytes = self._open.get(number) or (
                    self._buffers.take(end - start),
                    end - start + max(0, min(end, self._put_again) - start),
                )
                room[offset - start : offset - start + length] = data[:length]
                self._open[number] = room, lacking_bytes - length
                if lacking_bytes == length:
                    del self._open[number]
                    self._buffers.send(partial(self._send, number, memoryview(room)), len(room))
                    self.written += len(room)
            offset, data = offset + length, data[length:]

    @property
    def open_bytes(self) -> int:
        """Bytes of parts that were begun, and are not full."""
        return sum(len(room) for room, _ in self._open.values())

    def is_open(self, offset: int) -> bool:
        """Return whether the part with this byte was begun, and is not full."""
        return bisect_right(self._starts, offset) in self._open

    def share(self, offset: int, source: Position, nbytes: int) -> int:
        return 0

    def flush(self) -> None:
        """See that all parts that were begun were full, and sent."""
        lacking_bytes = {number: lacking for number, (_, lacking) in self._open.items()}
        assert not lacking_bytes, f"bytes that parts lack: {lacking_bytes}"
