"""Objects read by byte ranges, several at a time (`storage.store.RangeReader`).

A request takes a round trip before its first byte comes, and one connection moves so much a second:
only several at a time are fast. Pieces of 8 MiB are the cheapest (0.3 ms of the processor for each
request, and 0.7 s for each GiB); each is fetched by one of a process's threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import numpy as np

from rankxform.errors import CheckpointError
from rankxform.planning.store_requests import PIECE
from rankxform.storage.posix import Buffer
from rankxform.storage.store import FileVersion, RangeReader

from .access import Bucket, ObjectAddress
from .places import ObjectMeta, fill, look_at
from .workers import IN_FLIGHT, Workers, await_future

_LEAST_PIECE = 1 << 20
"""Bytes of a request at most, in little memory, where smaller ones are in flight at a time."""


_LONGEST_GAP, _BYTES_A_GAP = 1 << 10, 64
"""Bytes between ranges of one request at most, such as a tensor's header; and how many bytes that
are needed stand for one that is not."""
_SMALL = 64 << 10
"""Bytes of a request that takes a round trip and little more: more of them are in flight."""


class RangeRequest:
    """Ranges of an object that follow each other, and are fetched as one. futures: None until they
    are."""

    def __init__(self, path: str, offset: int) -> None:
        self.path, self.offset = path, offset
        self.rooms: list[Any] = []
        self.futures: list[Future[None]] | None = None

    @property
    def nbytes(self) -> int:
        return sum(map(len, self.rooms))

    @property
    def stop(self) -> int:
        """The byte of the object behind its last."""
        return self.offset + self.nbytes


class ObjectRanges(RangeReader):
    """Objects that this process reads; what is announced is fetched before it is asked for."""

    ahead = 16 * IN_FLIGHT  # of which neighbours are one request

    def __init__(self, bucket_of: Callable[[ObjectAddress], Bucket]) -> None:
        self._bucket_of, self._workers = bucket_of, Workers(IN_FLIGHT)
        self._small_workers = Workers(4 * IN_FLIGHT)
        self._metas: dict[str, ObjectMeta] = {}
        self.pinned: set[str] = set()
        self._piece = PIECE
        # By size what was read: fresh memory costs as much as a copy.
        self._rooms: dict[int, list[Any]] = {}
        self._kept_bytes = 0
        self._open: dict[str, RangeRequest] = {}  # by path, that which may grow
        self._begun: deque[tuple[tuple[str, int, int], Any, RangeRequest]] = deque()

    def version(self, path: str, sparse: bool = False) -> FileVersion:
        return self._meta(path).version

    def version_now(self, path: str) -> FileVersion | None:
        meta = self._look_at(path)
        return meta.version if meta is not None else None

    def announces_within(self, nbytes: int) -> None:
        self._piece = max(_LEAST_PIECE, min(PIECE, nbytes // IN_FLIGHT))

    def announce(self, path: str, offset: int, nbytes: int) -> None:
        request = self._open.get(path)
        if request is not None:
            gap = offset - request.stop
            is_near = 0 <= gap <= min(_LONGEST_GAP, request.nbytes // _BYTES_A_GAP)
            if not is_near or request.nbytes >= self._piece:
                self._begin(request)
                request = None
            elif gap:
                request.rooms.append(np.empty(gap, np.uint8))
        if request is None:
            request = self._open[path] = RangeRequest(path, offset)
        if self._rooms.get(nbytes):
            room = self._rooms[nbytes].pop()
            self._kept_bytes -= nbytes
        else:
            room = np.empty(nbytes, np.uint8)
        request.rooms.append(room)
        self._begun.append(((path, offset, nbytes), room, request))
        if request.nbytes >= self._piece:
            self._begin(request)

    def all_announced(self) -> None:
        for request in [*self._open.values()]:
            self._begin(request)

    def read(self, path: str, offset: int, room: Buffer, sparse: bool = False) -> None:
        byte_range = path, offset, len(room)
        while any(byte_range == first for first, _, _ in self._begun):
            announced_range, data, request = self._begun.popleft()
            if request.futures is None:  # nothing more was announced that goes with it
                self.all_announced()
            self._await(request)
            if announced_range == byte_range:
                room[:] = memoryview(data)
            if self._kept_bytes + len(data) <= IN_FLIGHT * self._piece:
                self._rooms.setdefault(len(data), []).append(data)
                self._kept_bytes += len(data)
            if announced_range == byte_range:
                return
        request = RangeRequest(path, offset)
        request.rooms.append(np.frombuffer(room, np.uint8))
        self._begin(request)
        self._await(request)

    def _await(self, request: RangeRequest) -> None:
        for future in request.futures or ():
            await_future(future, self.on_wait)

    def close(self) -> None:
        for _, _, request in self._begun:
            for future in request.futures or ():
                future.cancel()
        self._begun.clear()
        self._open.clear()
        self._rooms.clear()
        self._kept_bytes = 0
        self._workers.end()
        self._small_workers.end()

    def _begin(self, request: RangeRequest) -> None:
        """Begin to fill the rooms of a request, a large one piece by piece."""
        self._open.pop(request.path, None)
        path, meta, address = request.path, self._meta(request.path), ObjectAddress.of(request.path)
        client = self._bucket_of(address).client(patient=True)
        part = partial(fill, client, address.key, path, meta)
        workers = self._small_workers if request.nbytes <= _SMALL else self._workers
        begin, rooms, offset = workers.begin, request.rooms, request.offset
        if len(rooms) > 1:
            request.futures = [begin(partial(part, offset, rooms))]
            return
        (room,) = rooms
        starts = range(0, len(room), self._piece)
        pieces = ((start, room[start : start + self._piece]) for start in starts)
        request.futures = [begin(partial(part, offset + start, [piece])) for start, piece in pieces]

    def _meta(self, path: str) -> ObjectMeta:
        if path not in self._metas:
            address = ObjectAddress.of(path)
            meta = self._bucket_of(address).listed.get(address.key) or self._look_at(path)
            if meta is None:
                raise CheckpointError("is not there", "the same command again", where=path)
            self._metas[path] = meta
            if meta.etag:
                self.pinned.add(path)
        return self._metas[path]

    def _look_at(self, path: str) -> ObjectMeta | None:
        address = ObjectAddress.of(path)
        return look_at(self._bucket_of(address), address)
