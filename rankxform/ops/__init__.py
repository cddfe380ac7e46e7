"""Steps between source tensors and the destination tensors made of them; each is one module."""

from . import cast, drop, mapping, rename, weights
from .base import OPERATIONS

OPERATIONS.update(
    rename=rename.rename,
    weights_only=weights.weights_only,
    masters=weights.masters,
    mapping=mapping.mapping,
    drop=drop.drop,
    cast=cast.cast,
)

__all__ = ["cast", "drop", "mapping", "rename", "weights"]
