"""MindSpore's functions for single files and for unified safetensors."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from rankxform.api import transform
from rankxform.checkpoints.base import CheckpointRef
from rankxform.errors import CheckpointError, RankxformError, UsageError
from rankxform.layout.states import find_states
from rankxform.layout.strategy import Strategy
from rankxform.request import Request
from rankxform.source.place import list_and_select
from rankxform.storage.source_reader import index_file
from rankxform.storage.user_files import is_none, load_strategy
from rankxform.target.resolve import resolve
from rankxform.transport import SerialTeam, Team, team
from rankxform.values import blake2b
from rankxform.verbs.load import Parameters, load
from rankxform.verbs.transform import transform_one_rank

from .network import load_for, parameters, strategy_of

_STEP = re.compile(r"-?(\d+_\d+)")


def unified_safetensors(
    src_dir: str,
    src_strategy_file: str | None,
    dst_dir: str,
    merge_with_redundancy: bool = True,
    file_suffix: str | None = None,
    max_process_num: int = 64,
    choice_func: Callable[[str], bool | str] | None = None,
    split_dst_file: tuple[int, ...] = (),
) -> None:
    """Write the checkpoint of a distributed job as unified safetensors, in `dst_dir`.

    Files of an earlier conversion in `dst_dir` are replaced. `merge_with_redundancy` is ignored:
    the files show whether parameters are stored once. Under mpirun every process calls this, and
    they divide the work; `max_process_num` is ignored, and `split_dst_file` is refused.
    `hyper_param.safetensors` never holds one rank's slice of what `choice_func` leaves out. Raises
    what `rankxform.transform` does, and ValueError for what `choice_func` must not return.
    """
    if split_dst_file:
        raise UsageError(
            "split_dst_file: start one program under mpirun instead; its processes share the parts"
        )
    options: dict[str, Any] = {"src_form": "ranks"}
    if file_suffix:
        step = _STEP.fullmatch(file_suffix)
        options.update({"step": step[1]} if step else {"suffix": file_suffix})
    if choice_func is not None:
        names = _names(Request(src_dir, None, src_strategy_file, **options))
        options.update(name_options(names, choice_func))
    transform(src_dir, dst_dir, src_strategy_file, dst_form="unified", overwrite=True, **options)


def _names(request: Request) -> list[str]:
    """Return the names of a checkpoint's parameters. Collective."""
    processes: Team = team(None)
    try:
        names = [p.name for p in resolve(request, processes).planner.catalog.parameters]
    except RankxformError:  # raised on every process
        processes.free()
        raise
    processes.free()
    return names


def name_options(names: Iterable[str], choice_func: Callable[[str], bool | str]) -> dict[str, Any]:
    """Return the options that say what `choice_func` says."""
    dropped, renamed = [], {}
    names = list(names)
    states = find_states(dict.fromkeys(names))
    for name in names:
        choice = choice_func(name)
        if not isinstance(choice, (bool, str)):
            raise ValueError(f"choice_func({name!r}) is {choice!r}; expected a bool or a new name")
        if choice is False:
            dropped.append(name)
        elif isinstance(choice, str) and choice != name:
            renamed[name] = choice
    rules: dict[str, str] = {}
    for name, new in renamed.items():
        base = states.base_name(name)
        prefix = name[: len(name) - len(base)]
        if (
            not new.startswith(prefix)
            or rules.setdefault(base, new[len(prefix) :]) != new[len(prefix) :]
        ):
            raise UsageError(
                f"choice_func renames {name!r} to {new!r}, and its parameter otherwise",
                details="an optimizer state keeps its prefix and follows its parameter",
            )
    texts = [f"^{re.escape(old)}$={escape_replacement(new)}" for old, new in rules.items()]
    return {
        **({"exclude": (_exactly(dropped),)} if dropped else {}),
        **({"rename": tuple(texts)} if texts else {}),
    }


def _exactly(names: Sequence[str]) -> str:
    return f"^(?:{'|'.join(map(re.escape, names))})$"


def escape_replacement(text: str) -> str:
    """Return a replacement that stands for itself. Raises UsageError for what a rule cannot say."""
    if "=" in text:
        raise UsageError(f"a new name {text!r} has a '=', which a rule ends at", "choose another")
    return text.replace("\\", "\\\\")


# -- read -----------------------------------------------------------------------------------------


def load_unified(
    network: Any,
    src: str,
    dst_strategy: str | Strategy | None,
    name_map: Mapping[str, str] | None,
    return_param_dict: bool,
) -> Any:
    """Load unified safetensors into a network."""
    import mindspore

    rank = None
    if not is_none(dst_strategy):
        rank = 0
        with suppress(RuntimeError):
            rank = _own_rank()
    loaded_slices = load_for(
        network, src, None, dst_strategy or None, rank=rank, **_options(name_map)
    )
    parameters_by_name = parameters(loaded_slices)
    if return_param_dict:
        return parameters_by_name
    return mindspore.load_param_into_net(network, parameters_by_name)


def _options(name_map: Mapping[str, str] | None) -> dict[str, Any]:
    """Return the options of a source whose names the network knows as others."""
    own_of = (name_map or {}).items()
    renamed = (
        f"^{re.escape(theirs)}$={escape_replacement(network_name)}"
        for network_name, theirs in own_of
    )
    return {"src_form": "unified", "rename": tuple(renamed)}


def save_slices(
    src: str,
    dst_strategy: str | Strategy | None,
    folder: str | None,
    rank_id: int | None,
    output_format: str,
    name_map: Mapping[str, str] | None,
) -> None:
    """Write ``rank_N/net.<format>`` for one rank, or for all, which processes share."""
    if folder is None:
        raise ValueError("dst_safetensors_dir must be given where network is None")
    options = _options(name_map)
    strategy = load_strategy(dst_strategy)
    processes = team(None)
    local_ranks = range(strategy.ranks)[processes.rank :: processes.size]
    listed = _list_parameters(src, options)
    unwanted = [] if is_none(dst_strategy) else [n for n in listed if n not in strategy]
    for rank in local_ranks if rank_id is None else (rank_id,):
        request = Request(
            src,
            None,
            dst_strategy=dst_strategy,
            ranks=(rank,),
            format=output_format,
            exclude=(_exactly(unwanted),) if unwanted else (),
            **options,
        )
        transform_one_rank(request, Path(folder) / f"rank_{rank}" / f"net.{output_format}")
    processes.barrier()
    processes.free()


def _list_parameters(src: str, options: Mapping[str, Any]) -> list[str]:
    """Return the parameters of a folder of unified safetensors, without its loose values."""
    from rankxform.operations.base import OperationChain

    selected = list_and_select(CheckpointRef(str(Path(src).absolute()))).selected
    description = selected.description
    names: list[str] = []
    for file, name in selected.names.items():
        if description is None or file != description.untracked:
            listed = description.listed.get(file) if description is not None else None
            names += listed or index_file(Path(src, name)).schema.names
    operations = OperationChain.of(options, find_states(dict.fromkeys(names)))
    return [operations.name_of(name) for name in names]


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
        loaded_slices = load(Request(str(path), None, "none"), 0, SerialTeam())
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

    def has_chosen_prefix(name: str) -> bool:
        if left_out is not None and name.startswith(left_out):
            return False
        return taken_prefixes is None or name.startswith(taken_prefixes)

    return has_chosen_prefix


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
                "one checkpoint? choice_func leaves names out"
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
