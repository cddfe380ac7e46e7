"""MindSpore's functions for distributed checkpoints: same names, arguments and return types."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rankxform.api import ranks, transform
from rankxform.errors import RankxformError, UsageError
from rankxform.formats.strategy_files import encode_layout
from rankxform.layout.strategy import WholeStrategy
from rankxform.planning.selection import needed_stages
from rankxform.request import Request
from rankxform.storage.user_files import load_strategy, merge_stage_files, read_strategy_file
from rankxform.verbs.transform import transform_one_rank

from .files import load_unified, save_slices
from .network import load_for, parameters, strategy_of


def transform_checkpoints(
    src_checkpoints_dir: str,
    dst_checkpoints_dir: str,
    ckpt_prefix: str,
    src_strategy_file: str | None = None,
    dst_strategy_file: str | None = None,
    process_num: int = 1,
    output_format: str = "ckpt",
) -> None:
    """Convert the folders ``rank_N`` of one directory to another strategy.

    Files that are there are replaced, as MindSpore does. Under mpirun every process calls this,
    and the work is shared among them; `process_num` is ignored. A strategy may be a folder of stage
    files. Raises what `rankxform.transform` does, and TypeError as MindSpore does; and UsageError
    where MindSpore would convert stage by stage, into files with only some of the parameters.
    """
    _must_be(str, ckpt_prefix=ckpt_prefix)
    if _is_by_stage(src_strategy_file, dst_strategy_file):
        raise UsageError(
            f"{dst_strategy_file} lists parameters that {src_strategy_file} does not",
            "give the folder with the files of all stages, or the merged file, if it is of one",
            "use rankxform.transform, if the network has grown",
        )
    transform(
        src_checkpoints_dir,
        dst_checkpoints_dir,
        src_strategy_file,
        dst_strategy_file,
        src_form="ranks",
        prefix=ckpt_prefix,
        format=output_format,
        overwrite=True,
    )


def transform_checkpoint_by_rank(
    rank_id: int,
    checkpoint_files_map: Mapping[int, str],
    save_checkpoint_file_name: str,
    src_strategy_file: str | None = None,
    dst_strategy_file: str | None = None,
) -> None:
    """Convert what one destination rank needs; each process calls this for ranks of its own.

    checkpoint_files_map: source files by rank; those of `rank_list_for_transform` are enough.
    """
    _must_be(dict, checkpoint_files_map=checkpoint_files_map)
    _must_be(int, rank_id=rank_id)
    _must_be(str, save_checkpoint_file_name=save_checkpoint_file_name)
    if not save_checkpoint_file_name.endswith(".ckpt"):
        raise ValueError(f"save_checkpoint_file_name {save_checkpoint_file_name} must end in .ckpt")
    files = {int(rank): os.fspath(path) for rank, path in checkpoint_files_map.items()}
    request = Request(
        src=os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in files.values()])
        if files
        else "",
        dst=None,
        files=files,
        src_strategy=src_strategy_file,
        dst_strategy=dst_strategy_file,
        ranks=(rank_id,),
        format="ckpt",
    )
    transform_one_rank(request, Path(save_checkpoint_file_name))


def rank_list_for_transform(
    rank_id: int, src_strategy_file: str | None = None, dst_strategy_file: str | None = None
) -> list[Any]:
    """Return the source ranks to hand to `transform_checkpoint_by_rank`, highest first.

    This is MindSpore's own list, which has more ranks than are read (`rankxform.ranks` returns only
    those). If MindSpore refuses, for example because neither number of ranks divides the other, it
    is all ranks of the pipeline stages that are needed.
    """
    _must_be(int, rank_id=rank_id)
    if src_strategy_file is None:
        return [0]
    src = load_strategy(src_strategy_file)
    dst = load_strategy(dst_strategy_file)
    ranks(src_strategy_file, dst_strategy_file, (rank_id,))  # raises what is wrong with them
    try:
        from mindspore.parallel.checkpoint_transform import rank_list_for_transform as mindspores

        return list(mindspores(rank_id, src_strategy_file, dst_strategy_file))
    except (ImportError, ValueError, IndexError, RuntimeError, TypeError, OSError):
        stages = needed_stages(
            src, dst, dst.stage_of(rank_id)
        )  # MindSpore is not there, or refuses
        return sorted((r for stage in stages for r in src.ranks_in(stage)), reverse=True)


# MindSpore 2.10's other names of the three.
convert_checkpoints = transform_checkpoints
convert_checkpoint_by_rank = transform_checkpoint_by_rank
rank_list_for_convert = rank_list_for_transform


def merge_pipeline_strategys(src_strategy_dirs: str, dst_strategy_file: str) -> None:
    """Write the strategy files of all pipeline stages in a folder as one file.

    Processes that call this at the same moment for one file do not disturb each other. Files of
    one stage that differ, and stages that are missing, are errors.
    """
    if not os.path.isdir(src_strategy_dirs):
        raise NotADirectoryError(f"src_strategy_dirs {src_strategy_dirs} is not a directory")
    merge_stage_files(src_strategy_dirs, os.path.abspath(dst_strategy_file), overwrite=True)


def build_searched_strategy(strategy_filename: str | None) -> dict[str, Any] | None:
    """Return the layouts that a strategy file lists, as MindSpore's ParallelLayouts, by name."""
    if strategy_filename is None:
        return None
    _must_be(str, strategy_filename=strategy_filename)
    from mindspore.train import node_strategy_pb2 as messages

    path = Path(strategy_filename)
    if not path.is_file() or not path.stat().st_size:
        raise ValueError(f"{path}: there is no such strategy file, or it is empty")
    try:
        record = read_strategy_file(path)
    except RankxformError as error:
        raise ValueError(str(error)) from error
    return {
        name: messages.ParallelLayouts.FromString(encode_layout(layout))
        for name, layout in record.layouts.items()
    }


def load_distributed_checkpoint(
    network: Any,
    checkpoint_filenames: list[str] | None = None,
    predict_strategy: Any = None,
    train_strategy_filename: str | None = None,
    strict_load: bool = False,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    format: str = "ckpt",
    unified_safetensors_dir: str | None = None,
    dst_safetensors_dir: str | None = None,
    rank_id: int | None = None,
    output_format: str = "safetensors",
    name_map: dict[str, str] | None = None,
    max_process_num: int = 64,
    return_param_dict: bool = False,
) -> Any:
    """Load a checkpoint, one file for each rank of the training job, into a network.

    checkpoint_filenames: in rank order. predict_strategy: a dictionary as ``parameter_layout_dict``
    or ``infer_predict_layout`` give it, a file, or None for a network on one device. With `format`
    "safetensors" unified safetensors are read, into the network, or without one into files of the
    ranks, ``rank_N/net.<output_format>``. The form that decrypts is MindSpore's own.
    """
    import mindspore

    if {format, output_format} - {"ckpt", "safetensors"}:
        raise ValueError(f"format {format!r}, {output_format!r}: expected ckpt or safetensors")
    if format == "safetensors" and dec_key is None:
        if unified_safetensors_dir is None or checkpoint_filenames or train_strategy_filename:
            raise ValueError(
                "format 'safetensors' takes unified_safetensors_dir, and neither "
                "checkpoint_filenames nor train_strategy_filename"
            )
        src = os.fspath(unified_safetensors_dir)
        if isinstance(predict_strategy, Mapping):
            predict_strategy = strategy_of(predict_strategy)
        if network is not None:
            return load_unified(network, src, predict_strategy, name_map, return_param_dict)
        save_slices(src, predict_strategy, dst_safetensors_dir, rank_id, output_format, name_map)
        return True
    if dec_key is not None:
        from mindspore.parallel.checkpoint_transform import load_distributed_checkpoint as own

        return own(
            network, checkpoint_filenames, predict_strategy, train_strategy_filename, strict_load,
            dec_key, dec_mode, format, unified_safetensors_dir, dst_safetensors_dir, rank_id,
            output_format, name_map, max_process_num, return_param_dict,
        )  # fmt: skip
    _must_be(mindspore.nn.Cell, network=network)
    _must_be(list, checkpoint_filenames=checkpoint_filenames)
    strategy = (
        train_strategy_filename
        or getattr(network, "_save_strategy_file_path", None)  # of an AutoParallel network
        or mindspore.context.get_auto_parallel_context("strategy_ckpt_load_file")
    )
    if isinstance(predict_strategy, Mapping):
        predict_strategy = strategy_of(predict_strategy)
    files = dict(enumerate(checkpoint_filenames or []))
    loaded_slices = load_for(
        network, os.curdir, strategy or None, predict_strategy or None, files=files
    )
    mindspore.load_param_into_net(network, parameters(loaded_slices), strict_load=strict_load)
    return True


def _is_by_stage(src: str | None, dst: str | None) -> bool:
    """Tell whether MindSpore would take the source strategy for one stage's of several."""
    a, b = (load_strategy(path) for path in (src, dst))
    if isinstance(a, WholeStrategy) or isinstance(b, WholeStrategy):
        return False
    states = ("accu_grads", "adam_v", "adam_m")
    have, want = ({n for n in s.stages_of if not n.startswith(states)} for s in (a, b))
    return len(a.stages) == len(b.stages) == 1 and have < want


def _must_be(kind: type, **arguments: Any) -> None:
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} is a {type(value).__name__}, not a {kind.__name__}")
