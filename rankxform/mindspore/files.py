"""MindSpore's functions for single checkpoint files: same names, arguments and return types."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from hashlib import blake2b
from pathlib import Path
from typing import Any

from rankxform.errors import CheckpointError, RankxformError, UsageError
from rankxform.job.load import Parameters, load
from rankxform.job.transform import transform_one_rank
from rankxform.layout.strategy import Strategy
from rankxform.request import Request
from rankxform.storage.index import index_file
from rankxform.storage.strategies import load_strategy
from rankxform.transport import SerialTeam, team

from .network import parameters, strategy_of
from .unified import name_options

_RANK = re.compile(r"rank_(\d+)")


def ckpt_to_safetensors(
    file_path: str,
    save_path: str | None = None,
    name_map: dict[str, str] | None = None,
    file_name_regex: str | None = None,
    processes_num: int = 1,
) -> None:
    """Write a ``.ckpt`` file, or those in the folders ``rank*`` of a folder, as safetensors.

    save_path: the folder of the new files (default: beside the old ones); name_map: new names of
    parameters, by the old ones, which their optimizer states follow; file_name_regex: of the files
    to convert. Under mpirun processes share the files; `processes_num` is ignored. Raises
    ValueError for paths as MindSpore does, and what `rankxform.transform` raises.
    """
    _convert(file_path, save_path, name_map, file_name_regex, "ckpt", "safetensors")


def safetensors_to_ckpt(
    file_path: str,
    save_path: str | None = None,
    name_map: dict[str, str] | None = None,
    file_name_regex: str | None = None,
    processes_num: int = 1,
) -> None:
    """Write safetensors files as ``.ckpt``; the arguments are those of `ckpt_to_safetensors`."""
    _convert(file_path, save_path, name_map, file_name_regex, "safetensors", "ckpt")


def _convert(
    file_path: str,
    save_path: str | None,
    name_map: dict[str, str] | None,
    file_name_regex: str | None,
    src: str,
    dst: str,
) -> None:
    if save_path and os.path.splitext(save_path)[1]:
        raise ValueError(f"save_path {save_path!r} must be a folder, and has a suffix")
    if name_map is not None and not isinstance(name_map, dict):
        raise ValueError(f"name_map is a {type(name_map).__name__}, not a dict")
    pattern = re.compile(file_name_regex or "")
    pairs = list(_files(Path(file_path), save_path, pattern, src))
    processes = team(None)
    names = name_map or {}

    def convert_mine() -> None:
        for old, folder in pairs[processes.rank :: processes.size]:
            renamed = name_options(index_file(old).schema.names, lambda name: names.get(name, name))
            request = Request(
                str(old), None, "none", files={0: str(old)}, ranks=(0,), format=dst, **renamed
            )
            transform_one_rank(request, folder / f"{old.stem}.{dst}")

    try:
        processes.agree(convert_mine)
    except RankxformError:  # raised on every process
        processes.free()
        raise
    processes.free()


def _files(
    place: Path, save_path: str | None, pattern: re.Pattern[str], kind: str
) -> Iterator[tuple[Path, Path]]:
    """Yield files to convert, each with the folder of its result. Raises ValueError."""
    if place.is_file():
        if place.suffix != f".{kind}":
            raise ValueError(f"file_path {place}: must be a .{kind} file")
        if not pattern.search(str(place)):
            raise ValueError(f"file_path {place}: does not match {pattern.pattern!r}")
        yield place, Path(save_path) if save_path else place.parent
        return
    if not place.is_dir():
        raise ValueError(f"file_path {place}: is neither a file nor a folder")
    folders = sorted(f for f in place.iterdir() if f.is_dir() and f.name.startswith("rank"))
    if not folders:
        raise ValueError(f"file_path {place}: has no folders rank*")
    for folder in folders:
        for file in sorted(folder.iterdir()):
            if file.suffix == f".{kind}" and pattern.search(file.name):
                yield file, Path(save_path) / folder.name if save_path else folder


def load_segmented_checkpoints(
    ckpt_file_dir: str,
    net: Any = None,
    strict_load: bool = False,
    filter_prefix: str | list[str] | tuple[str, ...] | None = None,
    dec_key: bytes | None = None,
    dec_mode: str = "AES-GCM",
    specify_prefix: str | list[str] | tuple[str, ...] | None = None,
    choice_func: Callable[[str], bool] | None = None,
) -> dict[str, Any]:
    """Return the parameters of all ``.ckpt`` files of a folder; load them into `net`, if given.

    filter_prefix: of names that are left out; specify_prefix: of those that are taken; either
    takes the place of choice_func, which is given a name. A tensor that several files hold must be
    the same in all (MindSpore takes that of any). Each process loads by itself. Encrypted files are
    MindSpore's own.
    """
    import mindspore

    if not isinstance(ckpt_file_dir, str):
        raise TypeError(f"ckpt_file_dir is a {type(ckpt_file_dir).__name__}, not a str")
    if dec_key is not None:
        from mindspore.parallel import load_segmented_checkpoints as own

        return own(  # type: ignore[no-any-return]
            ckpt_file_dir, net, strict_load, filter_prefix, dec_key, dec_mode, specify_prefix,
            choice_func,
        )  # fmt: skip
    folder = Path(ckpt_file_dir)
    if not folder.is_dir():
        raise ValueError(f"ckpt_file_dir {folder}: is not a folder")
    is_selected = _choice(filter_prefix, specify_prefix, choice_func)
    parameters_by_name: dict[str, Any] = {}
    holders_by_name: dict[str, tuple[Path, Any]] = {}
    for path in sorted(folder.glob("*.ckpt")):
        loaded_slices = load(Request(str(path), None, "none"), SerialTeam(), 0)
        for name in [name for name in loaded_slices if not is_selected(name)]:
            loaded_slices.pop(name)
        _check_same(loaded_slices, holders_by_name, path)
        parameters_by_name.update(parameters(loaded_slices))
    if not parameters_by_name:
        raise ValueError(f"ckpt_file_dir {folder}: no .ckpt file there holds what is to be loaded")
    if net is not None:
        mindspore.load_param_into_net(net, parameters_by_name, strict_load)
    return parameters_by_name


def _choice(
    filter_prefix: Any, specify_prefix: Any, choice_func: Callable[[str], bool] | None
) -> Callable[[str], bool]:
    left_out, taken_prefixes = (
        _prefixes(name, value)
        for name, value in (("filter_prefix", filter_prefix), ("specify_prefix", specify_prefix))
    )
    if choice_func is not None and left_out is None and taken_prefixes is None:
        return choice_func

    def wanted(name: str) -> bool:
        if left_out is not None and name.startswith(left_out):
            return False
        return taken_prefixes is None or name.startswith(taken_prefixes)

    return wanted


def _prefixes(name: str, value: Any) -> tuple[str, ...] | None:
    if value is None:
        return None
    prefixes = (value,) if isinstance(value, str) else value
    if not isinstance(prefixes, (list, tuple)) or not all(isinstance(p, str) for p in prefixes):
        raise TypeError(f"{name} is {value!r}, not a str or several")
    if not all(prefixes):
        raise ValueError(f"{name}: an empty text begins every name")
    return tuple(prefixes)


def _check_same(
    loaded_slices: Parameters, holders_by_name: dict[str, tuple[Path, Any]], path: Path
) -> None:
    """Refuse another value of a tensor that an earlier file holds; note those of this one."""
    for name, value in loaded_slices.items():
        data = value.encode() if isinstance(value, str) else value.tobytes()
        facts = loaded_slices.dtypes[name], getattr(value, "shape", None), blake2b(data).digest()
        first_path, first_facts = holders_by_name.setdefault(name, (path, facts))
        if first_facts != facts:
            raise CheckpointError(
                f"{first_path} and {path}: hold different values of {name!r}; are they segments of "
                "one "
                "checkpoint? choice_func leaves names out"
            )


def get_ckpt_path_with_strategy(
    cur_ckpt_path: str, cur_strategy_path: str | Mapping[str, Any]
) -> str | None:
    """Return the path of a checkpoint file that holds what this process's rank needs, or None.

    That is `cur_ckpt_path` if it is this rank's and there; or else that of the first other rank,
    in the place of ``rank_N``, that holds the same slices of all parameters by the strategy.
    """
    rank = _own_rank()
    if str(rank) in _RANK.findall(cur_ckpt_path) and os.path.isfile(cur_ckpt_path):
        return cur_ckpt_path
    strategy = (
        strategy_of(cur_strategy_path)
        if isinstance(cur_strategy_path, Mapping)
        else load_strategy(cur_strategy_path)
    )
    for replica_rank in _replicas(strategy, rank):
        path = _RANK.sub(f"rank_{replica_rank}", cur_ckpt_path)
        if os.path.isfile(path):
            return path
    return None


def _own_rank() -> int:
    from mindspore.communication import get_rank

    return int(get_rank())


def _replicas(strategy: Strategy, rank: int) -> list[int]:
    """Return the ranks that hold the same slices of all parameters as `rank`, with it.

    A strategy of one pipeline stage is that of the rank's stage.
    """
    stages, size = strategy.stages, strategy.stage_size
    stage, rank_in_stage = divmod(rank, size)
    if stage >= len(stages) > 1:
        raise UsageError(f"rank {rank}: {strategy.label} has {strategy.ranks} ranks")
    layouts = set(stages[stage if len(stages) > 1 else 0].values())
    return [
        stage * size + peer_in_stage
        for peer_in_stage in range(size)
        if all(layout.cell(peer_in_stage) == layout.cell(rank_in_stage) for layout in layouts)
    ]
