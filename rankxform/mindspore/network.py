"""Networks: their strategy, their parameters, merged slices."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import numpy as np

from rankxform import transport
from rankxform.api import load, reshard
from rankxform.errors import FormatError, RankxformError, RequestError, StrategyError
from rankxform.formats.strategy_files import decode_layout
from rankxform.layout.layout import Layout
from rankxform.layout.names import first_texts
from rankxform.layout.strategy import Strategy, StrategyRecord, WholeStrategy, merge_records
from rankxform.statements import ACCEPT_NEW
from rankxform.storage.user_files import is_none
from rankxform.transport.launcher import launched_size
from rankxform.values import dataclass
from rankxform.verbs.load import Parameters

NETWORK = "network"
"""The destination strategy that `load_into` takes from the network itself."""


@dataclass(frozen=True)
class LoadReport:
    """What `load_into` did with the network's parameters and the checkpoint's, by name."""

    loaded: tuple[str, ...]  # got their values
    missing: tuple[str, ...]  # of the network, in no source file
    left_over: tuple[str, ...]  # of the checkpoint, not in the network
    bytes_read: int  # those that this process read


def load_into(
    net: Any,
    src: str | os.PathLike[str],
    src_strategy: str | os.PathLike[str] | Strategy | None = None,
    dst_strategy: str | os.PathLike[str] | Strategy | None = NETWORK,
    *,
    strict: bool = False,
    rank: int | None = None,
    comm: Any = None,
    **options: Any,
) -> LoadReport:
    """Fill the parameters of `net` (a Cell) from the checkpoint in `src`, without a file.

    Only what the network has is read, sharded as `dst_strategy` says: by default as the network was
    compiled, whole if it was not; or with `dst_parallel` or `dst_config` as is derived. The other
    arguments are those of `rankxform.load`; processes may have networks of different parameters.
    With `strict`, RequestError is raised, and nothing changed, where the network has a name that is
    not in the checkpoint, or the other way round; and always where a slice has not as many elements
    as the network's parameter.
    """
    if isinstance(dst_strategy, str) and dst_strategy == NETWORK:
        dst_strategy = None if _derives(options) else strategy_of(net, comm=comm)
    loaded_slices = load_for(net, src, src_strategy, dst_strategy, rank=rank, comm=comm, **options)
    return _fill(net, loaded_slices, src, strict=strict)


def reshard_network(
    net: Any,
    new_net: Any,
    src_strategy: str | os.PathLike[str] | Strategy | None = NETWORK,
    dst_strategy: str | os.PathLike[str] | Strategy | None = NETWORK,
    *,
    strict: bool = False,
    comm: Any = None,
    **options: Any,
) -> LoadReport | None:
    """Fill the parameters of `new_net` (a Cell) from those that processes hold in `net`.

    No file is read: slices go from memory to memory (`rankxform.reshard`, whose options it takes).
    The strategies default to those that the networks were compiled to. A process that holds
    nothing passes None for `net`, and one that gets nothing for `new_net`; both strategies are then
    to be given. An optimizer is a Cell too: it has the network's parameters and its own states.
    """
    if isinstance(src_strategy, str) and src_strategy == NETWORK:
        src_strategy = strategy_of(net, comm=comm)
    if isinstance(dst_strategy, str) and dst_strategy == NETWORK:
        dst_strategy = None if _derives(options) else strategy_of(new_net, comm=comm)
    held_parameters = [] if net is None else list(net.get_parameters())
    slices = {parameter.name: _array(parameter) for parameter in held_parameters}
    dtypes = {parameter.name: str(parameter.dtype) for parameter in held_parameters}
    resharded = reshard(slices, src_strategy, dst_strategy, comm=comm, dtypes=dtypes, **options)
    return None if new_net is None else _fill(new_net, resharded, "the network", strict=strict)


def _fill(net: Any, loaded_slices: Parameters, src: Any, *, strict: bool) -> LoadReport:
    """Give a network's parameters the values of the slices of their names."""
    import mindspore

    names = [parameter.name for parameter in net.get_parameters()]
    missing = tuple(name for name in names if name not in loaded_slices)
    loaded = tuple(name for name in loaded_slices if name in {*names})
    left_over = (*loaded_slices.left_over, *(n for n in loaded_slices if n not in {*names}))
    read = loaded_slices.bytes_read
    if strict and (missing or left_over):
        raise RequestError(
            f"{src} and the network do not hold the same parameters: "
            f"{_few('only the network has', missing)}{_few('only the checkpoint has', left_over)}"
            "say strict=False to load what both have"
        )
    _check_shapes(net, loaded_slices, src)
    try:
        mindspore.load_param_into_net(net, parameters(loaded_slices), strict_load=strict)
    except (RuntimeError, TypeError, ValueError) as error:
        raise RequestError(
            f"what rank {loaded_slices.rank} loaded, MindSpore refuses: {error}", where=src
        ) from error
    return LoadReport(loaded, missing, left_over, read)


def _array(parameter: Any) -> Array:
    """Return a copy of a parameter's values, of bfloat16 as words."""
    import mindspore

    if parameter.dtype != mindspore.bfloat16:
        return np.array(parameter.asnumpy())
    words: Array = np.frombuffer(parameter.get_bytes(), np.uint16).reshape(parameter.shape)
    return words


def _check_shapes(net: Any, loaded_slices: Parameters, src: Any) -> None:
    """Refuse slices of other sizes than the network's, before any parameter is changed."""
    wrong = [
        f"{parameter.name!r} has shape {list(loaded_slices[parameter.name].shape)}, "
        f"{list(parameter.shape)} in the network"
        for parameter in net.get_parameters()
        if parameter.name in loaded_slices
        and getattr(loaded_slices[parameter.name], "size", None) != prod(parameter.shape)
        and not isinstance(loaded_slices[parameter.name], str)
    ]
    if wrong:
        suffix = f", and {len(wrong) - 1} more" if wrong[1:] else ""
        raise RequestError(
            f"of what rank {loaded_slices.rank} loaded, {wrong[0]}{suffix}; does dst_strategy "
            "shard as the network does?",
            where=src,
        )


def load_for(
    net: Any, src: Any, src_strategy: Any, dst_strategy: Any, **options: Any
) -> Parameters:
    """Load the parameters that a network has; the arguments are those of `rankxform.load`."""
    names = (re.escape(parameter.name) for parameter in net.get_parameters())
    if options.get("rank") is None and (_derives(options) or not is_none(dst_strategy)):
        from mindspore.communication import GlobalComm, get_rank

        has_ranks = launched_size() is None and GlobalComm.INITED  # and no MPI launcher
        options["rank"] = int(get_rank()) if has_ranks else None
    accept = options.pop("accept", None) or ()
    # What a network has and the checkpoint lacks is told by name.
    options["accept"] = [*([accept] if isinstance(accept, str) else accept), ACCEPT_NEW]
    return load(src, src_strategy, dst_strategy, include=f"^(?:{'|'.join(names)})$", **options)


def _derives(options: Mapping[str, Any]) -> bool:
    return any(options.get(name) is not None for name in ("dst_parallel", "dst_config"))


def _few(title: str, names: Sequence[str]) -> str:
    return f"{title} {first_texts([*map(repr, names)])}; " if names else ""


def parameters(loaded_slices: Parameters) -> dict[str, Any]:
    """Return loaded slices as MindSpore's Parameters, as ``load_checkpoint`` does of a file.

    They are taken out of `loaded_slices` one by one, so that the memory of both is not needed at
    once.
    """
    parameters_by_name = {}
    for name in list(loaded_slices):
        parameters_by_name[name] = parameter(
            name, loaded_slices.dtypes[name], loaded_slices.pop(name)
        )
    return parameters_by_name


def parameter(name: str, dtype: str, value: Any) -> Any:
    """Return a Parameter of MindSpore's type `dtype`; a text as it is."""
    import mindspore

    if isinstance(value, str):
        return value
    if dtype in ("BFloat16", "Int4"):  # numpy has no such types, and MindSpore's Tensor asks it
        from mindspore._c_expression import TensorPy

        kind = mindspore.bfloat16 if dtype == "BFloat16" else mindspore.qint4x2
        data = TensorPy.convert_bytes_to_tensor(value.tobytes(), value.shape, kind)
    else:
        data = mindspore.Tensor(value)
    return mindspore.Parameter(data, name=name)


def strategy_of(
    net: Any, *, comm: Any = None, group_size: Callable[[str], int] | None = None
) -> Strategy:
    """Return the strategy that a network was compiled to, from its ``parameter_layout_dict``.

    `net` is a compiled Cell, or such a dictionary. Each process knows its own pipeline stage;
    all processes of `comm` or of the launcher's world call this, in the order of their
    ranks. `group_size` returns the size of a communication group (default: MindSpore's function).
    A network that was not compiled for several devices has every parameter whole.
    """
    team = transport.team(comm)
    try:
        layouts_by_rank = team.allgather(
            lambda: layouts_of(
                net if isinstance(net, Mapping) else net.parameter_layout_dict, group_size
            )
        )
        return _merge_by_stage(layouts_by_rank) if any(layouts_by_rank) else WholeStrategy()
    finally:
        team.free()


def _merge_by_stage(layouts_by_rank: Sequence[Mapping[str, Layout]]) -> Strategy:
    """Merge the layouts that processes know, in rank order, by pipeline stage."""
    size = max(layout.ranks for layouts in layouts_by_rank for layout in layouts.values())
    records = [
        StrategyRecord(f"the network of rank {rank}", 0, (rank // size,), layouts)
        for rank, layouts in enumerate(layouts_by_rank)
    ]
    if len(layouts_by_rank) == 1:  # one process, of one stage
        rank = os.environ.get("RANK_ID", "")
        if rank.isdecimal() and int(rank) >= size:
            raise StrategyError(
                f"the network's stage has {size} ranks, and this is rank {rank}, of a later stage",
                "give dst_strategy as files",
                details="without MPI a process knows its own stage only",
            )
        records = [StrategyRecord("the network", 0, (0,), layouts_by_rank[0])]
    return merge_records(records, "the network")


def layouts_of(
    described: Mapping[str, Sequence[Any]], group_size: Callable[[str], int] | None = None
) -> dict[str, Layout]:
    """Read a ``parameter_layout_dict``. Raises StrategyError that names a parameter.

    An entry is (device matrix, tensor map, slice shape, field, uniform split, group of the
    optimizer shard, and in newer versions the full shape, ...).
    """
    layouts_by_name = {}
    for name, entry in described.items():
        try:
            matrix, tensor_map, _, field, uniform, group = entry[:6]
            shape = tuple(map(int, entry[6])) if len(entry) > 6 and entry[6] else None
            if not uniform:
                raise StrategyError(
                    "it is sharded unevenly, which this dictionary does not describe"
                )
            size = (group_size or _group_size)(group) if group else 0
            layouts_by_name[name] = Layout(
                tuple(map(int, matrix)),
                tuple(_axes(axes) for axes in tensor_map),
                opt_step=1 if size else 0,
                opt_size=size,
                field=max(0, int(field)),
                expanded_shape=shape,
            )
        except (TypeError, ValueError, StrategyError) as error:
            raise StrategyError(f"parameter_layout_dict: {name!r}: {error}") from error
    return layouts_by_name


def _axes(axes: int | Iterable[int]) -> tuple[int, ...]:
    if isinstance(axes, int):
        return () if axes == -1 else (axes,)
    return tuple(axis for axis in axes if axis != -1)


def _group_size(group: str) -> int:
    from mindspore.communication import get_group_size

    return int(get_group_size(group))


Array = np.ndarray[Any, Any]


def merge_sliced_parameter(
    sliced_parameters: list[Any], strategy: Mapping[str, Any] | None = None
) -> Any:
    """Merge the slices of a parameter, in rank order; return a Parameter.

    `strategy` is what `build_searched_strategy` returns; without one the slices are joined on
    axis 0. Even and uneven shards (param_split_shape), nested tensor maps, optimizer shards and
    embeddings of several fields are supported. bfloat16 stays bfloat16. Raises TypeError,
    ValueError and KeyError where MindSpore does.
    """
    if not isinstance(sliced_parameters, list):
        raise TypeError(f"sliced_parameters is a {type(sliced_parameters).__name__}, not a list")
    if not sliced_parameters:
        raise ValueError("sliced_parameters is empty")
    if strategy and not isinstance(strategy, dict):
        raise TypeError(f"strategy is a {type(strategy).__name__}, not a dict")
    arrays, first = _arrays(sliced_parameters)
    name, dtype = first.name, str(first.dtype)
    if not strategy:
        return _make_parameter(first, dtype, np.concatenate(arrays))
    if name not in strategy:
        raise KeyError(f"the strategy has no parameter {name!r}")
    layout = _layout(strategy[name])
    if len(arrays) != layout.ranks:
        raise ValueError(
            f"{name!r}: {len(arrays)} slices, and the strategy has {layout.ranks} ranks"
        )
    try:
        return _make_parameter(first, dtype, _join(arrays, layout))
    except RankxformError as error:
        raise ValueError(f"{name!r}: {error}") from error


def _arrays(slices: Sequence[Any]) -> tuple[list[Array], Any]:
    """Return the slices' values, and the first slice. bfloat16 comes as words."""
    import mindspore

    first = slices[0]
    arrays = []
    for index, slice_ in enumerate(slices):
        if not isinstance(slice_, mindspore.Parameter):
            raise TypeError(f"slice {index} is a {type(slice_).__name__}, not a Parameter")
        if (slice_.name, slice_.shape[1:]) != (
            first.name,
            first.shape[1:],
        ) or slice_.dtype != first.dtype:
            raise ValueError(
                f"slice {index} is {slice_.name!r} of {slice_.dtype} {list(slice_.shape)}, slice 0 "
                f"is {first.name!r} of {first.dtype} {list(first.shape)}; only axis 0 may differ"
            )
        arrays.append(_array(slice_))
    return arrays, first


def _make_parameter(first: Any, dtype: str, value: Array) -> Any:
    merged = parameter(first.name, dtype, value)
    merged.requires_grad, merged.layerwise_parallel = first.requires_grad, first.layerwise_parallel
    return merged


def _join(arrays: Sequence[Array], layout: Layout) -> Array:
    if layout.field:
        return _join_fields(arrays, layout.field)
    grid = layout.grid(layout.full_shape(arrays[0].shape))
    full_array = np.empty(grid.shape, arrays[0].dtype)
    for rank, slice_ in enumerate(arrays):
        box = grid.box(layout.cell(rank))
        if slice_.shape != box.shape:
            raise ValueError(f"slice {rank} has shape {list(slice_.shape)}, not {list(box.shape)}")
        full_array[box.slices()] = slice_
    return full_array


def _join_fields(arrays: Sequence[Array], fields: int) -> Array:
    """Join slices of an embedding: each rank has a share of the rows of every field."""
    columns = arrays[0].shape[1:]
    by_field = [slice_.reshape(fields, -1, *columns) for slice_ in arrays]
    return np.concatenate(by_field, axis=1).reshape(-1, *columns)


def _layout(described: Any) -> Layout:
    """Read a ParallelLayouts message."""
    try:
        return decode_layout(memoryview(described.SerializePartialToString()))
    except (AttributeError, FormatError, RankxformError) as error:
        raise ValueError(f"the strategy is not of build_searched_strategy: {error}") from error
