"""Checkpoints in object storage: ``s3://``, ``obs://``, ``gs://`` and ``az://``.

Nothing here is imported before an address with such a scheme is used. After the first request a
process must not fork: the threads of obstore, which makes the requests, do not exist in a child,
which would wait for them for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import monotonic

from .access import Bucket, ObjectAddress
from .places import ObjectPlace, fetch_header, is_reached
from .ranges import ObjectRanges
from .workers import HeadersAhead

_KEPT_SECONDS = 2.0


class ObjectStorage:
    """Buckets (`storage.store.Storage`)."""

    buffers = 512 << 20  # of which a half is for requests in flight
    has_versions = True

    def __init__(self) -> None:
        self._places: dict[str, tuple[ObjectPlace, float, int]] = {}
        self._headers = HeadersAhead(fetch_header)

    def store(self, place: str) -> ObjectPlace:
        """Return a place, whose listing may be as old as a few seconds, for it is asked for in a
        row, and no older than what this process wrote last."""
        writes = Bucket.of(ObjectAddress.of(place)).writes
        kept_place, began, writes_before = self._places.get(place, (None, 0.0, 0))
        if kept_place is None or writes != writes_before or monotonic() - began > _KEPT_SECONDS:
            kept_place = ObjectPlace(place, self._headers)
            self._places[place] = kept_place, monotonic(), writes
        return kept_place

    def ranges(self) -> ObjectRanges:
        return ObjectRanges(Bucket.of)

    def is_reached(self, address: str) -> bool:
        return is_reached(ObjectAddress.of(address))

    def expect_headers(self, addresses: Sequence[str]) -> None:
        self._headers.expect(addresses)
