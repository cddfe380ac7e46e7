"""Checkpoints in object storage: ``s3://``, ``obs://``, ``gs://`` and ``az://``.

Nothing here is imported before an address with such a scheme is used. After the first request a
process must not fork: the threads of obstore, which makes the requests, do not exist in a child,
which would wait for them for ever.
"""

from __future__ import annotations

from time import monotonic

from rankxform.storage.store import ReadEach

from .access import Bucket, ObjectAddress, library
from .errors import is_unanswered
from .places import ObjectPlace
from .ranges import ObjectRanges
from .workers import read_each

_KEPT_SECONDS = 2.0


class ObjectStorage:
    """Buckets (`storage.store.Storage`)."""

    buffers = 512 << 20  # of which a half is for requests in flight
    has_versions = True
    has_folders = False
    is_shared = True
    read_each: ReadEach | None = staticmethod(read_each)

    def __init__(self) -> None:
        self._places: dict[str, tuple[ObjectPlace, float, int]] = {}

    def store(self, place: str) -> ObjectPlace:
        """Return a place, whose listing may be as old as a few seconds, for it is asked for in a
        row, and no older than what this process wrote last."""
        writes = Bucket.of(ObjectAddress.of(place)).writes
        kept_place, began, writes_before = self._places.get(place, (None, 0.0, 0))
        if kept_place is None or writes != writes_before or monotonic() - began > _KEPT_SECONDS:
            kept_place = ObjectPlace(place)
            self._places[place] = kept_place, monotonic(), writes
        return kept_place

    def ranges(self) -> ObjectRanges:
        return ObjectRanges(Bucket.of)

    def is_reached(self, address: str) -> bool:
        place = ObjectAddress.of(address)
        bucket = Bucket.of(place)
        if bucket.is_reached is None:
            bucket.is_reached, client = True, bucket.client(patient=False)
            try:
                library().head(client, place.key or "-")
            except Exception as error:
                bucket.is_reached = not is_unanswered(error)
        return bucket.is_reached
