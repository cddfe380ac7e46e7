"""Checkpoints in object storage: ``s3://``, ``obs://``, ``gs://`` and ``az://``.

Nothing here is imported before an address with such a scheme is used. After the first request a
process must not fork: the threads of obstore, which makes the requests, do not exist in a child,
which would wait for them for ever.
"""

from __future__ import annotations

from .access import Bucket
from .places import ObjectPlace
from .ranges import ObjectRanges


class ObjectStorage:
    """Buckets (`storage.store.Storage`)."""

    def store(self, place: str) -> ObjectPlace:
        return ObjectPlace(place)

    def ranges(self) -> ObjectRanges:
        return ObjectRanges(Bucket.of)
