"""`clean`: what stopped runs left of a conversion goes; what is complete stays."""

from __future__ import annotations

from rankxform.results import DictResult, lines
from rankxform.storage.store import absolute, scheme_of
from rankxform.target.destination import DESTINATIONS, check_scheme


def clean(dst: str) -> DictResult:
    """Remove what stopped runs left at a destination. Raises StorageError where one is at work."""
    check_scheme(dst)
    removed = DESTINATIONS[scheme_of(dst)]().remove_unfinished(absolute(dst))
    texts = removed or ("nothing was begun here",)
    return DictResult({"dst": dst, "removed": [*removed]}, (lines("clean", *texts),))
