"""Steps between source tensors and the destination tensors made of them; each is one module."""

from rankxform.operations import rename, select

from .base import OPERATIONS, ImportedOperation

OPERATIONS.update(
    rename=rename.rename,
    weights_only=select.weights_only,
    model_only=select.model_only,
    masters=select.masters,
    to_mindspore=rename.to_mindspore,
    dequantize=ImportedOperation("dequantize", "dtype", "map", "lora"),
    lora=ImportedOperation("lora", "lora", "lora_alpha", "lora_rank", "lora_strategy"),
    experts=ImportedOperation("experts", "map", "experts", "tensor_parallel"),
    map=ImportedOperation("map", "map", "config", "like", "qkv", "gate_up", "variant", "towers"),
    stacked=ImportedOperation("stacked", "experts"),
    from_mindspore=rename.from_mindspore,
    drop=select.drop_by_name,
    no_copies=select.no_copies,
    items=select.drop_items,
    vocabulary=ImportedOperation("vocabulary", "vocab", "vocab_fill", "vocab_cut"),
    serving=ImportedOperation("serving", "tensor_parallel"),
    cast=ImportedOperation("cast", "dtype", "keep_dtype", "cast_states"),
    counters=select.counters,
)
