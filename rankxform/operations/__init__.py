"""Steps between source tensors and the destination tensors made of them; each is one module."""

from rankxform.operations import cast, rename, select, vocabulary

from .base import OPERATIONS, operation_from_options

OPERATIONS.update(
    rename=rename.rename,
    weights_only=select.weights_only,
    model_only=select.model_only,
    masters=select.masters,
    to_mindspore=rename.to_mindspore,
    dequantize=cast.dequantize,
    lora=operation_from_options("adapter"),
    mapping=operation_from_options("mapping"),
    from_mindspore=rename.from_mindspore,
    drop=select.drop_by_name,
    no_copies=select.no_copies,
    items=select.drop_items,
    vocabulary=vocabulary.vocabulary,
    cast=cast.cast,
    counters=select.counters,
)
