"""What the source holds: every parameter's type, full shape, layout and holders.

Built from the indexes of the source files and their strategy; the place where a checkpoint that
does not fit its strategy is found, before a byte is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from rankxform.errors import CheckpointError, RequestError
from rankxform.formats.base import Contents, Index
from rankxform.geometry.box import Box
from rankxform.geometry.grid import Cell, Grid
from rankxform.layout.layout import Layout, Shape, whole
from rankxform.layout.names import NEVER_SAVED, followed, in_few_words, state_of
from rankxform.layout.strategy import Strategy

_FEW_TIED = 2
"""Parameters that pipeline stages usually share: an embedding, and one more."""


@dataclass(frozen=True)
class Parameter:
    """One parameter in the source.

    shape: the full one, in elements.
    layout: how the stage that starts at global rank `first_rank` cuts it.
    holders: global ranks whose file holds a slice of it, ascending.
    listed: whether the source strategy speaks of it; if not, every holder has it whole.
    """

    name: str
    dtype: str
    shape: Shape
    layout: Layout
    first_rank: int
    holders: tuple[int, ...]
    listed: bool = True

    @cached_property
    def grid(self) -> Grid:
        return self.layout.grid(self.shape)

    def cell(self, rank: int) -> Cell:
        """Return the cell that global `rank` holds."""
        return self.layout.cell(rank - self.first_rank) if self.listed else (0,) * len(self.shape)

    def box(self, rank: int) -> Box:
        """Return the region that global `rank` holds, in the full parameter."""
        return self.grid.box(self.cell(rank))

    @cached_property
    def ranks_by_cell(self) -> Mapping[Cell, tuple[int, ...]]:
        """For each cell the global ranks whose file holds it, ascending."""
        found: dict[Cell, list[int]] = {}
        for rank in self.holders:
            found.setdefault(self.cell(rank), []).append(rank)
        return {cell: tuple(ranks) for cell, ranks in found.items()}


@dataclass(frozen=True)
class Shelf:
    """Ranks of one stage whose files hold the same entries, in the same order and shapes."""

    contents: Contents
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Source:
    """All parameters of a source checkpoint.

    paths: for messages, the file of each rank that saved.
    shelves: by stage, those with the highest ranks first.
    listed: parameters that strategy and files both know, by name.
    unlisted: parameters of the files that the source strategy does not list, by name.
    unreachable: names that no file holds while files that could hold them are missing, with the
        missing ranks; without gradients that are accumulated, if no file has any.
    looked: for messages, on which nodes files were looked for, if on several.
    """

    strategy: Strategy
    paths: Mapping[int, str]
    shelves: tuple[tuple[Shelf, ...], ...]
    listed: Mapping[str, Parameter]
    unlisted: Mapping[str, Parameter]
    unreachable: Mapping[str, tuple[int, ...]]
    looked: str = ""

    def names_in(self, stages: Iterable[int]) -> list[str]:
        """Return the names in the files of `stages`, highest rank's first, as MindSpore does."""
        ordered = (self.shelves[s] for s in sorted(stages, reverse=True))
        return list(
            dict.fromkeys(
                name for shelves in ordered for shelf in shelves for name in shelf.contents.names
            )
        )


def survey(
    strategy: Strategy,
    indexes: Mapping[int, Index],
    paths: Mapping[int, str],
    wanted: Iterable[int],
    looked: str = "",
) -> Source:
    """Describe the source checkpoint, whose files `indexes` give by global rank.

    Ranks beyond the strategy's must have been left out by the caller; `wanted` are the ranks
    whose files were looked for, found or not. Raises CheckpointError
    where types or shapes differ between ranks that should agree.
    """
    shelves = tuple(_shelves(strategy.ranks_in(s), indexes) for s in range(len(strategy.stages)))
    found: dict[str, list[tuple[int, Shelf]]] = {}
    for stage, stage_shelves in enumerate(shelves):
        for shelf in stage_shelves:
            for name in shelf.contents.names:
                found.setdefault(name, []).append((stage, shelf))
    for stage, stage_shelves in enumerate(shelves):
        for shelf in stage_shelves:
            _check_stage(strategy, stage, shelf, paths)
    listed: dict[str, Parameter] = {}
    unlisted: dict[str, Parameter] = {}
    holders: dict[tuple[int, ...], tuple[int, ...]] = {}  # one tuple for all that share it
    for name, places in found.items():
        listing = next((s for s, _ in places if _lists(strategy, name, s)), None)
        if listing is None and name in strategy:
            continue  # a copy beside the stage that the strategy speaks of, as of tied embeddings
        here = [shelf for s, shelf in places if listing in (None, s)]
        ranks = tuple(sorted(r for shelf in here for r in shelf.ranks))
        ranks = holders.setdefault(ranks, ranks)
        dtype = _one_dtype(name, here, paths)
        if listing is None:
            shape = here[0].contents.shapes[here[0].contents.position[name]]
            unlisted[name] = Parameter(name, dtype, shape, whole(len(shape)), 0, ranks, False)
        else:
            listed[name] = _listed(strategy, name, dtype, listing, here, ranks, paths)
    saved = {state_of(name) for name in found}
    absent = [
        name
        for name in strategy.stages_of
        if name not in listed and (state_of(name) != NEVER_SAVED or NEVER_SAVED in saved)
    ]
    lost = _unreachable(strategy, absent, frozenset(wanted) - frozenset(indexes))
    return Source(strategy, paths, shelves, listed, unlisted, lost, looked)


def _unreachable(
    strategy: Strategy, absent: Iterable[str], missing: frozenset[int]
) -> dict[str, tuple[int, ...]]:
    """Tell names that the checkpoint never had from those whose files are not there.

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
    cuts alike.
    """
    layout = strategy.layout(name, stage, ndim)
    base = strategy.stages[stage].get(followed(name), layout)
    same = (base.device_matrix, base.tensor_map) == (layout.device_matrix, layout.tensor_map)
    if base.split_rows and not layout.split_rows and same:
        return replace(layout, split_rows=base.split_rows, split_offsets=base.split_offsets)
    return layout


def _check_stage(strategy: Strategy, stage: int, shelf: Shelf, paths: Mapping[int, str]) -> None:
    """Refuse files that hold much of what the strategy places in other pipeline stages.

    A copy of a tied embedding is usual; a quarter of the parameters is another strategy's file.
    """
    every = {followed(name) for name in shelf.contents.names}
    foreign = {
        base
        for name in shelf.contents.names
        if (base := followed(name)) in strategy.stages_of and not _lists(strategy, base, stage)
    }
    if len(foreign) > _FEW_TIED and 4 * len(foreign) >= len(every):
        raise CheckpointError(
            f"{paths[shelf.ranks[0]]}: holds {len(foreign)} parameters that {strategy.label} "
            f"places in other pipeline stages than its {stage}, such as "
            f"{in_few_words(foreign, 3)}; the strategy is not this checkpoint's"
        )


def _lists(strategy: Strategy, name: str, stage: int) -> bool:
    return name in strategy and stage in strategy.stages_of.get(name, (0,))


def _shelves(ranks: range, indexes: Mapping[int, Index]) -> tuple[Shelf, ...]:
    groups: dict[Contents, list[int]] = {}
    for rank in ranks:
        if rank in indexes:
            groups.setdefault(indexes[rank].contents, []).append(rank)
    shelves = [Shelf(contents, tuple(members)) for contents, members in groups.items()]
    return tuple(sorted(shelves, key=lambda shelf: shelf.ranks[-1], reverse=True))


def _one_dtype(name: str, shelves: list[Shelf], paths: Mapping[int, str]) -> str:
    types = {
        shelf.contents.dtypes[shelf.contents.position[name]]: shelf.ranks[0] for shelf in shelves
    }
    if len(types) > 1:
        (a, rank_a), (b, rank_b), *_ = sorted(types.items())
        raise CheckpointError(
            f"{name!r} is {a} in {paths[rank_a]} and {b} in {paths[rank_b]}; "
            "these files are not of one checkpoint"
        )
    return next(iter(types))


def _listed(
    strategy: Strategy,
    name: str,
    dtype: str,
    stage: int,
    shelves: list[Shelf],
    holders: tuple[int, ...],
    paths: Mapping[int, str],
) -> Parameter:
    shapes = {s.contents.shapes[s.contents.position[name]]: s.ranks[0] for s in shelves}
    slice_shape = next(iter(shapes))
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
        layout = replace(layout, expanded_shape=None)
        parameter = Parameter(name, dtype, shape, layout, strategy.ranks_in(stage).start, holders)
        parameter.grid  # noqa: B018  (raises where the shape does not divide)
    except RequestError as error:
        rank = shapes[slice_shape]
        raise CheckpointError(
            f"{paths[rank]}: {name!r} does not fit {strategy.label}: {error}"
        ) from error
    for shelf in shelves:
        _check_slices(parameter, shelf, paths)
    return parameter


def _check_slices(parameter: Parameter, shelf: Shelf, paths: Mapping[int, str]) -> None:
    """Check that the ranks of `shelf` hold slices of the shape that the layout gives them."""
    have = shelf.contents.shapes[shelf.contents.position[parameter.name]]
    even = not parameter.layout.split_rows
    for rank in shelf.ranks[:1] if even else shelf.ranks:
        want = parameter.box(rank).shape
        if have != want:
            raise CheckpointError(
                f"{paths[rank]}: the slice of {parameter.name!r} has shape {list(have)}, "
                f"{list(want)} is wanted; the ranks' files are not of one checkpoint, "
                "or the strategy is another's"
            )
