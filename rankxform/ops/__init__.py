"""Steps between a source tensor and the destination tensor made of it; each is one module."""

from . import drop, rename
from .base import OPERATIONS

OPERATIONS.update(rename=rename.rename, drop=drop.drop)

__all__ = ["drop", "rename"]
