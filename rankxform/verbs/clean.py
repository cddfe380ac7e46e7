"""`clean`: what stopped runs left of a conversion goes; what is complete stays."""

from __future__ import annotations

from rankxform.results import DictResult, lines
from rankxform.storage.store import absolute
from rankxform.target.destination import destination_of


def clean(dst: str) -> DictResult:
    """Remove what stopped runs left at a destination. Raises StorageError where one is at work."""
    removed = destination_of(dst).remove_unfinished(absolute(dst))
    texts = removed or ("nothing was begun here",)
    return DictResult({"dst": dst, "removed": [*removed]}, (lines("clean", *texts),))
