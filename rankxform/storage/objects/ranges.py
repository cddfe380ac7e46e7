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

from rankxform.errors import CheckpointError
from rankxform.storage.posix import Buffer
from rankxform.storage.store import FileVersion, RangeReader

from .access import Bucket, ObjectAddress
from .places import ObjectMeta, fill, look_at
from .workers import IN_FLIGHT, Workers

PIECE, _LEAST_PIECE = 8 << 20, 1 << 20
"""Bytes of a request, at most; and in little memory, where smaller ones are in flight at a time."""


class ObjectRanges(RangeReader):
    """Objects that this process reads; what is announced is fetched before it is asked for."""

    ahead = IN_FLIGHT

    def __init__(self, bucket_of: Callable[[ObjectAddress], Bucket]) -> None:
        self._bucket_of, self._workers = bucket_of, Workers(IN_FLIGHT)
        self._metas: dict[str, ObjectMeta] = {}
        self._piece = PIECE
        self._begun: deque[tuple[tuple[str, int, int], Any, list[Future[None]]]] = deque()

    def version(self, path: str, sparse: bool = False) -> FileVersion:
        return self._meta(path).version

    def version_now(self, path: str) -> FileVersion | None:
        meta = self._look_at(path)
        return meta.version if meta is not None else None

    def announces_within(self, nbytes: int) -> None:
        self._piece = max(_LEAST_PIECE, min(PIECE, nbytes // IN_FLIGHT))

    def announce(self, path: str, offset: int, nbytes: int) -> None:
        room = memoryview(bytearray(nbytes))
        self._begun.append(((path, offset, nbytes), room, self._fetch(path, offset, room)))

    def read(self, path: str, offset: int, room: Buffer, sparse: bool = False) -> None:
        byte_range = path, offset, len(room)
        while any(byte_range == first for first, _, _ in self._begun):
            announced_range, data, futures = self._begun.popleft()
            for future in futures:
                future.result()
            if announced_range == byte_range:
                room[:] = data
                return
        for future in self._fetch(path, offset, memoryview(room)):
            future.result()

    def close(self) -> None:
        for _, _, futures in self._begun:
            for future in futures:
                future.cancel()
        self._begun.clear()
        self._workers.end()

    def _fetch(self, path: str, offset: int, room: Any) -> list[Future[None]]:
        """Begin to fill `room`, piece by piece."""
        meta, address = self._meta(path), ObjectAddress.of(path)
        client = self._bucket_of(address).client(patient=True)
        fill_part = partial(fill, client, address.key, path, meta)
        return [
            self._workers.begin(
                partial(fill_part, offset + start, room[start : start + self._piece])
            )
            for start in range(0, len(room), self._piece)
        ]

    def _meta(self, path: str) -> ObjectMeta:
        if path not in self._metas:
            address = ObjectAddress.of(path)
            meta = self._bucket_of(address).listed.get(address.key) or self._look_at(path)
            if meta is None:
                raise CheckpointError("is not there", "the same command again", where=path)
            self._metas[path] = meta
        return self._metas[path]

    def _look_at(self, path: str) -> ObjectMeta | None:
        address = ObjectAddress.of(path)
        return look_at(self._bucket_of(address), address)
