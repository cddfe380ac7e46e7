"""A metadata.json of Checkpoint 2.0 as a strategy, and a plan as a metadata.json."""

# That of DeepSeek-V3 on 1,024 ranks has 210 MB, of which most repeats: one member after the other
# is decoded, equal values are kept once, and 0.4 MB are broadcast.

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rankxform.errors import CheckpointError, FormatError, RequestError
from rankxform.formats.checkpoint2_metadata import (
    PARAMETERS,
    Checkpoint2Metadata,
    Checkpoint2Parameter,
    Holders,
    Written,
    format_metadata,
    parse_checkpoint2_metadata,
    slice_number,
)
from rankxform.formats.container import ReadAt
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout, fold_optimizer_shard, whole_layout
from rankxform.layout.states import NEVER_SAVED
from rankxform.layout.strategy import Strategy
from rankxform.planning.plan import Planner
from rankxform.values import dataclass

from .posix import open_for_reading, range_reader

_START, _PART = 1 << 12, 1 << 20


@dataclass(frozen=True)
class Checkpoint2Description:
    """What a metadata.json says: the strategy; of each file its rank and the parameters in it; and
    by parameter type and full shape, in elements."""

    strategy: Strategy
    ranks: Mapping[str, int]
    listed: Mapping[str, tuple[str, ...]]
    declared: Mapping[str, tuple[str, Shape]]


def is_metadata(path: Path) -> bool:
    """Tell whether a file is the metadata.json of a checkpoint, by how it starts."""
    if not path.is_file():
        return False
    with open_for_reading(path) as (fd, _):
        return begins_metadata(range_reader(fd, path))


def begins_metadata(read_at: ReadAt) -> bool:
    """Tell whether a document is the metadata.json of a checkpoint, by how it starts."""
    return f'"{PARAMETERS}"'.encode() in read_at(0, _START)


def read_checkpoint2_metadata(path: Path) -> Checkpoint2Description:
    """Read a metadata.json. Raises CheckpointError, which says what contradicts what."""
    with open_for_reading(path) as (fd, _):
        return parse_checkpoint2(range_reader(fd, path), str(path))


def parse_checkpoint2(read_at: ReadAt, label: str) -> Checkpoint2Description:
    """Read a metadata.json through a function. Raises CheckpointError."""
    try:
        return _describe_parsed(parse_checkpoint2_metadata(read_at), label)
    except FormatError as error:
        raise CheckpointError.of_parts(error.at(label)) from error


def _describe_parsed(metadata: Checkpoint2Metadata, label: str) -> Checkpoint2Description:
    size = _stage_size(metadata)
    stages: list[dict[str, Layout]] = []
    ranks: dict[str, int] = {}
    listed: dict[str, dict[str, None]] = {}
    checked: dict[object, tuple[tuple[int, ...], int | None]] = {}
    for name, parameter in metadata.parameters.items():
        slices = metadata.storage.get(name, {})
        layout = (
            _over_stage(name, parameter, size)
            if parameter.layout
            else whole_layout(len(parameter.shape))
        )
        where = tuple((number, id(holders)) for number, holders in slices.items())
        key = layout, parameter.ranks, where
        if key not in checked:
            checked[key] = _stages_of(name, parameter, layout, slices, size, ranks)
        where_held, lost = checked[key]
        if lost is not None and not name.startswith(f"{NEVER_SAVED}."):
            raise FormatError(f"does not say where slice {lost} is", where=f"{name!r}")
        for stage in where_held:
            stages += [{} for _ in range(stage + 1 - len(stages))]
            stages[stage][name] = layout
        for holders in slices.values():
            for file, _ in holders:
                listed.setdefault(file, {})[name] = None
    extra = [name for name in metadata.storage if name not in metadata.parameters]
    if extra:
        raise FormatError(f"says where slices of {extra[0]!r} are, and not what they are")
    shared_names: dict[tuple[str, ...], tuple[str, ...]] = {}
    shapes = {name: parameter.shape for name, parameter in metadata.parameters.items()}
    return Checkpoint2Description(
        Strategy(tuple(stages), size, label, shapes=shapes),
        ranks,
        {
            file: shared_names.setdefault(names, names)
            for file, names in ((file, tuple(names)) for file, names in listed.items())
        },
        {n: (p.dtype, p.shape) for n, p in metadata.parameters.items()},
    )


def _stage_size(metadata: Checkpoint2Metadata) -> int:
    """Return the ranks of a pipeline stage; all ranks, if no layout says how many."""
    sizes = [len(parameter.ranks) for parameter in metadata.parameters.values() if parameter.layout]
    if sizes:
        return max(sizes)
    ranks = (
        rank
        for slices in metadata.storage.values()
        for holders in slices.values()
        for _, rank in holders
    )
    return max(ranks, default=0) + 1


def _over_stage(name: str, declared: Checkpoint2Parameter, size: int) -> Layout:
    """Return the layout of a parameter over all ranks of its stage.

    PyNative declares some layouts over one group of ranks, which the stage repeats. Raises
    FormatError for other parts of a stage.
    """
    layout, ranks = declared.layout, declared.ranks
    assert layout is not None
    if len(ranks) == size:
        return layout
    if size % len(ranks) or ranks.start % len(ranks):
        raise FormatError(
            f"{name!r} is on {len(ranks)} ranks from {ranks.start} on, and other parameters on "
            f"stages of {size}, of which these are no part"
        )
    matrix = (size // len(ranks), *layout.device_matrix)  # maps count from its end
    return replace(layout, device_matrix=matrix)


def _stages_of(
    name: str,
    declared: Checkpoint2Parameter,
    layout: Layout,
    slices: Mapping[int, Holders],
    size: int,
    ranks: dict[str, int],
) -> tuple[tuple[int, ...], int | None]:
    """Return the stages that hold a parameter, and a slice that nobody holds, or None.

    Raises FormatError where layout and storage contradict each other.
    """
    stages = {declared.ranks.start // size} if declared.layout else set()
    for number, holders in slices.items():
        for file, rank in holders:
            if ranks.setdefault(file, rank) != rank:
                raise FormatError(f"{file!r} is said to be rank {ranks[file]}'s and rank {rank}'s")
            if slice_number(layout, rank % size) != number:
                raise FormatError(
                    f"slice {number} is said to be rank {rank}'s, in {file!r}, which by its "
                    f"layout has slice {slice_number(layout, rank % size)}",
                    where=f"{name!r}",
                )
            stages.add(rank // size)
    lost = {slice_number(layout, r) for r in range(size)} - set(slices)
    return tuple(sorted(stages or {0})), min(lost, default=None)


# -- written --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Checkpoint2Writer:
    """What a metadata.json is to say: of each parameter what it is, of each slice where it is."""

    parameters: Mapping[str, Written]
    storage: Mapping[tuple[str, int], tuple[Holders, tuple[int, ...]]]

    def document(self) -> Iterator[bytes]:
        """Yield the text of the metadata.json, in parts of some size."""
        texts: list[str] = []
        size = 0
        for text in format_metadata(self.parameters, self.storage):
            texts.append(text)
            size += len(text)
            if size > _PART:
                yield "".join(texts).encode()
                texts, size = [], 0
        yield "".join(texts).encode()

    @classmethod
    def of(cls, planner: Planner, names: Mapping[int, str]) -> Checkpoint2Writer:
        """Return what the destination of `planner` is, of files with these `names` by id.

        The optimizer's parameters come after the network's. A gradient that the strategy lists is
        stated like its parameter, though no file holds it: MindFormers does.
        """
        parameters: dict[str, Written] = {}
        holders: dict[tuple[str, int], list[tuple[str, int]]] = {}
        groups: dict[tuple[str, int], list[int]] = {}
        files = {(planner.content_of_file(file).rank, file): name for file, name in names.items()}
        by_rank: dict[int, list[tuple[int, str]]] = {}
        for (rank, file), name in sorted(files.items()):
            by_rank.setdefault(rank, []).append((file, name))
        by_stage: dict[int, list[tuple[str, Written]]] = {}
        once_only = any(  # some rank's files lack what another's hold
            sum(len(planner.layouts_of_file(file)) for file, _ in by_rank.get(r, ()))
            < len(planner.layouts_of_rank(r))
            for r in range(planner.dst.ranks)
        )
        for rank in range(planner.dst.ranks):
            stage = planner.dst.stage_of(rank)
            if stage not in by_stage:
                by_stage[stage] = _in_stage(planner, stage, rank)
                for name, written in by_stage[stage]:
                    if parameters.setdefault(name, written).layout != written.layout:
                        raise RequestError(
                            f"{name!r} is sharded in two ways by two stages, and a metadata.json "
                            "states one",
                            where=planner.dst.label,
                        )
            local = rank % planner.dst.stage_size
            layouts = {written.layout for _, written in by_stage[stage]}
            numbers = {layout: slice_number(layout, local) for layout in layouts}
            rank_files = by_rank.get(rank, [])
            of_state = next((name for file, name in rank_files if file % 2), None)
            file_names = {
                n: name for file, name in rank_files for n in planner.layouts_of_file(file)
            }
            for name, written in by_stage[stage]:
                key = name, numbers[written.layout]
                groups.setdefault(key, []).append(rank)
                never = name.startswith(f"{NEVER_SAVED}.")
                file_name = of_state if never else file_names.get(name)
                if file_name is not None and not (never and once_only and key in holders):
                    holders.setdefault(key, []).append((file_name, rank))
        same: dict[object, object] = {}

        def once(key: tuple[str, int]) -> tuple[Holders, tuple[int, ...]]:
            value = tuple(holders[key]), tuple(groups[key])
            return same.setdefault(value, value)  # type: ignore[return-value]

        return cls(parameters, {key: once(key) for key in holders})


def _in_stage(planner: Planner, stage: int, rank: int) -> list[tuple[str, Written]]:
    """Return what the ranks of a stage hold: the network's parameters, then the optimizer's."""
    size = planner.dst.stage_size
    ranks = range(stage * size, (stage + 1) * size)
    layouts = planner.layouts_of_rank(rank)
    listed = [
        n for n in planner.dst.stages[stage] if n in layouts or _follows(planner.dst, n, layouts)
    ]
    order = dict.fromkeys([*listed, *layouts])
    network, optimizer = list[tuple[str, Written]](), list[tuple[str, Written]]()
    folded: dict[Layout, Layout] = {}
    for name in order:
        base = name if name in layouts else planner.dst.states.base_name(name)
        parameter, layout = planner.parameter(base), layouts[base]
        if not parameter.shape or not is_in_metadata(planner, base):
            continue
        if layout not in folded:
            try:
                folded[layout] = fold_optimizer_shard(layout, size)
            except RequestError as error:
                raise RequestError(f"{name!r}: {error}", where=planner.dst.label) from error
        written = Written(parameter.dtype, parameter.shape, folded[layout], ranks)
        is_weight = base == name and parameter.is_weight
        (network if is_weight else optimizer).append((name, written))
    return [*network, *optimizer]


def is_in_metadata(planner: Planner, name: str) -> bool:
    """Tell whether metadata.json states a parameter: not what no strategy lists, and no counter."""
    parameter = planner.parameter(name)
    return parameter.is_declared and (parameter.is_weight or parameter.state is not None)


def _follows(strategy: Strategy, name: str, layouts: Iterable[str]) -> bool:
    state = strategy.states.of(name)
    return state is not None and state.kind == NEVER_SAVED and state.parameter in layouts
