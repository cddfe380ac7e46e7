"""MindSpore's own calls, and its networks.

``import rankxform.mindspore as ms`` serves a script that calls MindSpore's functions for
distributed checkpoints: same names, arguments, return types and outputs. What MindSpore gets
wrong without a word is right here, or refused (docs/mindspore.md lists it). `load_into` fills a
network from a checkpoint of any other parallel strategy, without a file in between, and
`reshard_network` from another network.

MindSpore is imported by the functions that need it.
"""

from .calls import (
    build_searched_strategy,
    convert_checkpoint_by_rank,
    convert_checkpoints,
    load_distributed_checkpoint,
    merge_pipeline_strategys,
    rank_list_for_convert,
    rank_list_for_transform,
    transform_checkpoint_by_rank,
    transform_checkpoints,
)
from .files import (
    ckpt_to_safetensors,
    get_ckpt_path_with_strategy,
    load_segmented_checkpoints,
    safetensors_to_ckpt,
    unified_safetensors,
)
from .network import (
    LoadReport,
    load_into,
    merge_sliced_parameter,
    parameters,
    reshard_network,
    strategy_of,
)

__all__ = [
    "LoadReport",
    "build_searched_strategy",
    "ckpt_to_safetensors",
    "convert_checkpoint_by_rank",
    "convert_checkpoints",
    "get_ckpt_path_with_strategy",
    "load_distributed_checkpoint",
    "load_into",
    "load_segmented_checkpoints",
    "merge_pipeline_strategys",
    "merge_sliced_parameter",
    "parameters",
    "rank_list_for_convert",
    "rank_list_for_transform",
    "reshard_network",
    "safetensors_to_ckpt",
    "strategy_of",
    "transform_checkpoint_by_rank",
    "transform_checkpoints",
    "unified_safetensors",
]
