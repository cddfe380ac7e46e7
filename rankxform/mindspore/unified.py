"""MindSpore's functions for unified safetensors: same names, arguments and return types."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rankxform.api import transform
from rankxform.checkpoints.base import CheckpointRef
from rankxform.errors import RankxformError, UsageError
from rankxform.job.transform import transform_one_rank
from rankxform.layout.states import find_states
from rankxform.layout.strategy import Strategy
from rankxform.request import Request
from rankxform.source.choice import list_and_select
from rankxform.storage.index import index_file
from rankxform.storage.strategies import is_none, load_strategy
from rankxform.target.aim import prepare
from rankxform.transport import Team, team

from .network import load_for, parameters

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
        _, source, _ = prepare(request, processes)
        names = [p.name for p in source.table.parameters]
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

    rank = _rank_or_0() if not is_none(dst_strategy) else None
    loaded_slices = load_for(
        network, src, None, dst_strategy or None, rank=rank, **_options(name_map)
    )
    parameters_by_name = parameters(loaded_slices)
    if return_param_dict:
        return parameters_by_name
    return mindspore.load_param_into_net(network, parameters_by_name)


def _rank_or_0() -> int:
    from mindspore.communication import get_rank

    try:
        return int(get_rank())
    except RuntimeError:
        return 0


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
    listed = _listed(src, options)
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


def _listed(src: str, options: Mapping[str, Any]) -> list[str]:
    """Return the parameters of a folder of unified safetensors, without its loose values."""
    from rankxform.ops.base import OperationChain

    _, _, selected = list_and_select(CheckpointRef(str(Path(src).absolute())))
    description = selected.description
    names: list[str] = []
    for file, name in selected.names.items():
        if description is None or file != description.untracked:
            listed = description.listed.get(file) if description is not None else None
            names += listed or index_file(Path(src, name)).schema.names
    derivation = OperationChain.of(options, find_states(dict.fromkeys(names)))
    return [derivation.name_of(name) for name in names]
