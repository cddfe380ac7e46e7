"""Steps between source tensors and the destination tensors made of them; each is one module."""

from . import cast, counters, dequantize, drop, naming, rename, vocabulary, weights
from .base import OPERATIONS, operation_from_options

OPERATIONS.update(
    rename=rename.rename,
    weights_only=weights.weights_only,
    model_only=weights.model_only,
    masters=weights.masters,
    to_mindspore=naming.to_mindspore,
    dequantize=dequantize.dequantize,
    lora=operation_from_options("adapter"),
    mapping=operation_from_options("mapping"),
    from_mindspore=naming.from_mindspore,
    drop=drop.drop_by_name,
    no_copies=weights.no_copies,
    items=drop.drop_items,
    vocabulary=vocabulary.vocabulary,
    cast=cast.cast,
    counters=counters.counters,
)

__all__ = ["cast", "counters", "dequantize", "drop", "naming", "rename", "vocabulary", "weights"]
