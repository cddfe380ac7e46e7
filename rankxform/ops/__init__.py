"""Steps between a source tensor and the destination tensor made of it; each is one module."""

from .base import OPERATIONS
from .drop import drop
from .rename import rename

OPERATIONS.update(rename=rename, drop=drop)
