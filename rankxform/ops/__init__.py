"""Steps between source tensors and the destination tensors made of them; each is one module."""

from . import cast, dequantize, drop, rename, vocabulary, weights
from .base import OPERATIONS, prepared

OPERATIONS.update(
    rename=rename.rename,
    weights_only=weights.weights_only,
    masters=weights.masters,
    dequantize=dequantize.dequantize,
    lora=prepared("adapter"),
    mapping=prepared("mapping"),
    drop=drop.drop,
    items=drop.drop_items,
    vocabulary=vocabulary.vocabulary,
    cast=cast.cast,
)

__all__ = ["cast", "dequantize", "drop", "rename", "vocabulary", "weights"]
