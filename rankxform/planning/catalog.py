"""What the source holds: every tensor's type, full shape, and which file holds which box of it.

Built from the indexes of the source files and their strategy; the place where a checkpoint that
does not fit its strategy is found, before a byte is written. Names are those of the destination:
strategy and files are renamed before they come here, and `Parameter.src_name` is what to read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field, replace
from types import MappingProxyType

from rankxform.errors import CheckpointError, RequestError
from rankxform.formats.base import Schema
from rankxform.geometry.box import Box, Shape
from rankxform.geometry.grid import Cell, Stored
from rankxform.layout.layout import Layout, whole
from rankxform.layout.names import NEVER_SAVED, parameter_of, state_of, summarize_names
from rankxform.layout.strategy import Strategy
from rankxform.ops.base import Step
from rankxform.values import dataclass

from .sharding import Composed, Sharding

_FEW_TIED = 2
"""Parameters that pipeline stages usually share: an embedding, and one more."""


@dataclass(frozen=True)
class Parameter:
    """One tensor of the source, under the name and type that it gets at the destination.

    src_name, src_dtype: what the files call it, and their type. Of a tensor that is made of others:
    the first of these; src_names are all, by number. steps: what is done to the elements of each
    before their type is changed, if anything is.
    """

    name: str
    dtype: str
    sharding: Sharding | Composed = field(compare=False)
    src_name: str
    src_dtype: str
    src_names: tuple[str, ...] = ()
    steps: tuple[Step | None, ...] = ()

    @property
    def shape(self) -> Shape:
        """The full shape, in elements."""
        return self.sharding.grid.shape

    @property
    def grid(self) -> Stored:
        return self.sharding.grid

    @property
    def composed(self) -> Composed | None:
        """How the tensor is made of others; None of one that is as in the files."""
        return self.sharding if isinstance(self.sharding, Composed) else None

    def src_name_of(self, cell: Cell) -> str:
        """Return the name in the files of what a source cell is of."""
        composed = self.composed
        return self.src_names[composed.pieces.source(cell)] if composed else self.src_name

    @property
    def layout(self) -> Layout:
        return self.sharding.layout

    @property
    def holders(self) -> tuple[int, ...]:
        return self.sharding.holders

    @property
    def listed(self) -> bool:
        return self.sharding.listed

    def box(self, file: int) -> Box:
        """Return the region that a file holds, in the full tensor, of a tensor in the files."""
        assert isinstance(self.sharding, Sharding)
        return self.sharding.grid.box(self.sharding.cell(file))


@dataclass(frozen=True)
class FileGroup:
    """Files of one stage that hold the same tensors, in the same order and shapes."""

    schema: Schema
    files: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Catalog:
    """All tensors of a source checkpoint.

    paths: for messages, of each file.
    groups: by stage, those with the highest ranks first.
    listed: tensors that strategy and files both know, by name.
    unlisted: tensors of the files that the source strategy does not list, by name.
    unreachable: names that no file holds while files that could hold them are missing, with the
        missing ranks; without gradients that are accumulated, if no file has any.
    searched: for messages, on which nodes files were searched for, if on several.
    src_names: what files and strategy call the tensors that were renamed.
    ranks: of which rank a file is, by its id; a file that is not among them has its rank for an id.
    gone: by rank a file that the checkpoint speaks of and that is not there.
    """

    strategy: Strategy
    paths: Mapping[int, str]
    groups: tuple[tuple[FileGroup, ...], ...]
    listed: Mapping[str, Parameter]
    unlisted: Mapping[str, Parameter]
    unreachable: Mapping[str, tuple[int, ...]]
    searched: str = ""
    src_names: Mapping[str, str] = field(default_factory=dict)
    ranks: Mapping[int, int] = field(default_factory=dict)
    gone: Mapping[int, str] = field(default_factory=dict)

    def rank_of(self, file: int) -> int:
        """Return the global rank that a file is of."""
        return self.ranks.get(file, file)

    def src_name(self, name: str) -> str:
        """Return what the source's files and strategy call a tensor."""
        return self.src_names.get(name, name)

    @property
    def parameters(self) -> list[Parameter]:
        """Those listed, then the others."""
        return [*self.listed.values(), *self.unlisted.values()]

    def names_in(self, stages: Iterable[int]) -> list[str]:
        """Return the names in the files of `stages`, highest rank's first, as MindSpore does."""
        ordered = (self.groups[s] for s in sorted(stages, reverse=True))
        return list(
            dict.fromkeys(
                name for groups in ordered for group in groups for name in group.schema.names
            )
        )


def build_catalog(
    strategy: Strategy,
    schemas: Mapping[int, Schema],
    paths: Mapping[int, str],
    wanted: Iterable[int],
    searched: str = "",
    src_names: Mapping[str, str] = MappingProxyType({}),
    ranks: Mapping[int, int] = MappingProxyType({}),
) -> Catalog:
    """Return the catalog of a source whose files hold `schemas`, by id.

    Files of ranks beyond the strategy's must have been left out by the caller; `wanted` are the
    ids of files that were looked for, found or not. `src_names` are the files' names of tensors
    that were renamed. `ranks` are those of files whose id is not their rank; such files say
    themselves what they hold, so that a parameter that two stages list is taken from both. Raises
    CheckpointError where types or shapes differ between ranks that should agree.
    """
    groups = _groups(strategy, schemas, ranks)
    found: dict[str, list[tuple[int, FileGroup]]] = {}
    for stage, some in enumerate(groups):
        for group in some:
            for name in group.schema.names:
                found.setdefault(name, []).append((stage, group))
    for stage, some in enumerate(groups):
        for group in some:
            _check_stage(strategy, stage, group, paths)
    listed: dict[str, Parameter] = {}
    unlisted: dict[str, Parameter] = {}
    shardings = _Shardings()
    for name, places in found.items():
        listing = next((s for s, _ in places if _lists(strategy, name, s)), None)
        if listing is None and name in strategy:
            continue  # a copy outside the stages that list it, such as a tied embedding
        here = [group for s, group in places if listing in (None, s) or ranks]
        src_name = src_names.get(name, name)
        dtype = _one_dtype(name, src_name, here, paths)
        if listing is None:
            sharding = shardings.unlisted(name, here)
        else:
            sharding = shardings.listed(name, src_name, listing, here, strategy, paths)
        to = unlisted if listing is None else listed
        to[name] = Parameter(name, dtype, sharding, src_name, dtype)
    saved = {state_of(name) for name in found}
    absent = [
        name
        for name in strategy.stages_of
        if name not in listed and (state_of(name) != NEVER_SAVED or NEVER_SAVED in saved)
    ]
    missing = {ranks.get(file, file) for file in frozenset(wanted) - frozenset(schemas)}
    lost = _unreachable(strategy, absent, frozenset(missing))
    return Catalog(strategy, paths, groups, listed, unlisted, lost, searched, src_names, ranks)


def _unreachable(
    strategy: Strategy, absent: Iterable[str], missing: frozenset[int]
) -> dict[str, tuple[int, ...]]:
    """Return the `absent` names that missing files may hold, each with the missing ranks.

    A name is certainly not in the checkpoint if all ranks with one of its boxes are there and
    none has it (with remove_redundancy one of them would).
    """
    found: dict[str, tuple[int, ...]] = {}
    known: dict[tuple[Layout, int], tuple[int, ...]] = {}
    for name in absent:
        stage = strategy.stages_of[name][0]
        layout = strategy.stages[stage][name]
        if (layout, stage) not in known:
            known[layout, stage] = _missing_holders(layout, strategy.ranks_in(stage), missing)
        if known[layout, stage]:
            found[name] = known[layout, stage]
    return found


def _missing_holders(layout: Layout, ranks: range, missing: frozenset[int]) -> tuple[int, ...]:
    gone = tuple(rank for rank in ranks if rank in missing)
    incomplete = {layout.cell(rank - ranks.start) for rank in gone}
    return gone if len(incomplete) == len(layout.holders) else ()


def effective_layout(strategy: Strategy, name: str, stage: int, ndim: int) -> Layout:
    """Return the layout of `name`, an optimizer state's uneven rows taken from its parameter.

    The compiler states `param_split_shape` for an embedding and not for its moments, which it
    shards alike.
    """
    layout = strategy.layout(name, stage, ndim)
    base = strategy.stages[stage].get(parameter_of(name), layout)
    same = (base.device_matrix, base.tensor_map) == (layout.device_matrix, layout.tensor_map)
    if base.split_rows and not layout.split_rows and same:
        return replace(layout, split_rows=base.split_rows, split_offsets=base.split_offsets)
    return layout


def _check_stage(
    strategy: Strategy, stage: int, group: FileGroup, paths: Mapping[int, str]
) -> None:
    """Refuse files that hold much of what the strategy places in other pipeline stages.

    A copy of a tied embedding is usual; a quarter of the parameters is another strategy's file.
    """
    every = {parameter_of(name) for name in group.schema.names}
    foreign = {
        base
        for name in group.schema.names
        if (base := parameter_of(name)) in strategy.stages_of and not _lists(strategy, base, stage)
    }
    if len(foreign) > _FEW_TIED and 4 * len(foreign) >= len(every):
        raise CheckpointError(
            f"{paths[group.files[0]]}: holds {len(foreign)} parameters that {strategy.label} "
            f"places in other pipeline stages than its {stage}, such as "
            f"{summarize_names(foreign, 2)}; the strategy is not this checkpoint's"
        )


def _lists(strategy: Strategy, name: str, stage: int) -> bool:
    return name in strategy and stage in strategy.stages_of.get(name, (0,))


def _groups(
    strategy: Strategy, schemas: Mapping[int, Schema], ranks: Mapping[int, int]
) -> tuple[tuple[FileGroup, ...], ...]:
    """Return the groups of each stage, those with the highest ranks first."""
    alike: tuple[dict[Schema, list[tuple[int, int]]], ...] = tuple({} for _ in strategy.stages)
    for rank, file in sorted((ranks.get(file, file), file) for file in schemas):
        alike[strategy.stage_of(rank)].setdefault(schemas[file], []).append((rank, file))
    stages = (
        [
            FileGroup(schema, tuple(f for _, f in some), tuple(r for r, _ in some))
            for schema, some in stage.items()
        ]
        for stage in alike
    )
    return tuple(
        tuple(sorted(groups, key=lambda group: (group.ranks[-1], group.files[-1]), reverse=True))
        for groups in stages
    )


def _one_dtype(name: str, src_name: str, groups: list[FileGroup], paths: Mapping[int, str]) -> str:
    types = {group.schema.dtypes[group.schema.position[name]]: group.files[0] for group in groups}
    if len(types) > 1:
        (a, rank_a), (b, rank_b), *_ = sorted(types.items())
        raise CheckpointError(
            f"{src_name!r} is {a} in {paths[rank_a]} and {b} in {paths[rank_b]}; "
            "these files are not of one checkpoint"
        )
    return next(iter(types))


class _Shardings:
    """Makes shardings, one object for all tensors that are stored alike."""

    def __init__(self) -> None:
        self._known: dict[object, Sharding] = {}

    def _one(
        self,
        shape: Shape,
        layout: Layout,
        first_rank: int,
        groups: list[FileGroup],
        listed: bool = True,
    ) -> Sharding:
        pairs = sorted(pair for group in groups for pair in zip(group.files, group.ranks))
        holders, ranks = tuple(f for f, _ in pairs), tuple(r for _, r in pairs)
        key = shape, layout, first_rank, holders, listed
        if key not in self._known:
            grid = layout.grid(shape)
            self._known[key] = Sharding(grid, layout, first_rank, holders, ranks, listed)
        return self._known[key]

    def unlisted(self, name: str, groups: list[FileGroup]) -> Sharding:
        """Return the sharding of a tensor that every file of `groups` holds whole."""
        shape = _slice_shape(name, groups[0])
        return self._one(shape, whole(len(shape)), 0, groups, listed=False)

    def listed(
        self,
        name: str,
        src_name: str,
        stage: int,
        groups: list[FileGroup],
        strategy: Strategy,
        paths: Mapping[int, str],
    ) -> Sharding:
        """Return how `stage` shards a tensor. Raises CheckpointError where slices do not fit."""
        slice_shape = _slice_shape(name, groups[0])
        layout = effective_layout(strategy, name, stage, len(slice_shape))
        stated = layout.expanded_shape
        try:
            layout = layout.fold(slice_shape, slices=True)
            shape = layout.full_shape(slice_shape)
            if stated and layout.expanded_shape and not layout.split_rows and stated != shape:
                raise RequestError(
                    f"{layout.counts} slices of {list(slice_shape)} make {list(shape)}, "
                    f"the strategy states {list(stated)}"
                )
            if layout.expanded_shape is not None:
                layout = replace(layout, expanded_shape=None)
            sharding = self._one(shape, layout, strategy.ranks_in(stage).start, groups)
        except RequestError as error:
            raise CheckpointError(
                f"{paths[groups[0].files[0]]}: {src_name!r} does not fit {strategy.label}: {error}"
            ) from error
        for group in groups:
            _check_slices(name, src_name, sharding, group, paths)
        return sharding


def _slice_shape(name: str, group: FileGroup) -> Shape:
    return group.schema.shapes[group.schema.position[name]]


def _check_slices(
    name: str, src_name: str, sharding: Sharding, group: FileGroup, paths: Mapping[int, str]
) -> None:
    """Check that the ranks of a group hold slices of the shape that the layout gives them."""
    have = _slice_shape(name, group)
    even = not sharding.layout.split_rows
    for file in group.files[:1] if even else group.files:
        want = sharding.grid.box(sharding.cell(file)).shape
        if have != want:
            raise CheckpointError(
                f"{paths[file]}: the slice of {src_name!r} has shape {list(have)}, "
                f"expected {list(want)}; the ranks' files are not of one checkpoint, "
                "or the strategy is another's"
            )
