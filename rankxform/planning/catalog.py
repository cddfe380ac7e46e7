"""What is declared of a checkpoint, its tensors, and how they are stored.

A description is no table yet: a MindSpore strategy knows no shape, and what headers contradict is a
fault. `rankxform.planning.build_catalog` makes the catalog of a description and the files' headers.

Names are the source's own. Parameters of the destination, under their names there, are made of the
catalog's by what an expression says (`rankxform.planning.selection`).

A model has many tensors and few ways to store them, so both are shared: tensors that are stored
alike have one `Sharding`, and those of other shapes that lie in the same files one `Holders`.
Both equal themselves alone, so that what is planned for one is found again by its identity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property
from math import lcm
from typing import Any, TypeVar

from rankxform.display.text import shown_path
from rankxform.formats.container import DeclaredFile, Schema
from rankxform.geometry.box import Box, Shape
from rankxform.geometry.pieces import PieceTiling
from rankxform.geometry.tiling import BoxTiling, Cell, Grid, SourceTiling
from rankxform.layout.states import Related, State, States
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.operations.base import NO_STATES, Computation
from rankxform.statements import Finding, Statement
from rankxform.values import NamedTuple, dataclass


class DeclaredBox(NamedTuple):
    """A box of a tensor that a file is said to hold.

    suffix: what stands behind the tensor's name in the file's table of contents.
    """

    file: int
    box: Box
    suffix: str = ""


@dataclass(frozen=True)
class Description:
    """What is stated of a checkpoint, beside its files' headers."""

    source: str = ""  # what declares it, for messages
    strategy: Strategy | None = None  # how ranks shard; None: no strategy declares it
    # Tensor -> boxes of it in files, if it is declared box by box.
    boxes: Mapping[str, tuple[DeclaredBox, ...]] = field(default_factory=dict)
    # File id -> entries of its table of contents, under the names that boxes have.
    declared_files: Mapping[int, DeclaredFile] = field(default_factory=dict)
    items: str = ""  # kind of entries that are no tensors; other checkpoints of that kind get them
    # File id -> rank that it is of; {}: ids are ranks, or files are of no rank.
    ranks: Mapping[int, int] = field(default_factory=dict)
    # File id -> names that it is declared to hold.
    listed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    # Tensor -> type and full shape, in elements.
    declared: Mapping[str, tuple[str, Shape]] = field(default_factory=dict)
    untracked: int | None = None  # id of the file with tensors that are listed nowhere
    training: Mapping[str, Any] = field(default_factory=dict)  # facts such as its global_step
    # Rank -> a file that is named and missing.
    missing_files: Mapping[int, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # tensors that cannot be read -> why
    statements: tuple[Statement, ...] = ()  # statements that others may contradict
    findings: tuple[Finding, ...] = ()  # what its reader noticed
    unmappable: str = ""  # why no map can translate its tensors
    # File of the place -> tensors that an index lists in other files, each with that.
    passed_over: Mapping[str, Mapping[str, str]] = field(default_factory=dict)

    @property
    def lists_files(self) -> bool:
        """Whether it says which file of which rank holds what, as Checkpoint 2.0 does."""
        return bool(self.ranks and self.listed)

    @property
    def is_whole(self) -> bool:
        """Whether all tensors are whole, each in one file."""
        return self.strategy is None and not self.boxes


K = TypeVar("K")
V = TypeVar("V")


class IdentityDict(dict[K, V]):
    """A mapping that many tensors share; it equals itself alone, so that it can be a key."""

    __hash__ = object.__hash__  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        return self is other

    __ne__ = object.__ne__


IdsByCell = IdentityDict[Cell, "tuple[int, ...]"]
"""By cell of a tiling the files that hold it, or the global ranks that get it; ascending."""


@dataclass(frozen=True, eq=False)
class Holders:
    """Which files hold each cell, whatever the tensor's shape."""

    files: IdsByCell  # by cell, ids of files, ascending
    # By (cell, file) what stands behind the tensor's name in that file's table of contents, where
    # anything does.
    suffixes: Mapping[tuple[Cell, int], str] = field(default_factory=dict)
    # By cell that no file holds the ranks whose files should.
    lacking: Mapping[Cell, tuple[int, ...]] = field(default_factory=dict)
    # Whether each holder may have a value of its own, as of a counter; otherwise they agree.
    is_per_rank: bool = False

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """All files that hold a cell, ascending."""
        return tuple(sorted({file for files in self.files.values() for file in files}))

    def preferring(self, place_of: Mapping[int, int]) -> Holders:
        """Return the same with those files of each cell alone that lie in the best place."""
        files = IdentityDict[Cell, tuple[int, ...]]()
        for cell, holders in self.files.items():
            best = min(place_of[file] for file in holders)
            files[cell] = tuple(file for file in holders if place_of[file] == best)
        return replace(self, files=files)

    @cached_property
    def cells_of(self) -> Mapping[int, tuple[Cell, ...]]:
        """By file the cells that it holds."""
        cells: dict[int, tuple[Cell, ...]] = {}
        for cell, files in self.files.items():
            for file in files:
                cells[file] = (*cells.get(file, ()), cell)
        return cells

    @cached_property
    def copies(self) -> int:
        """How many files should hold a cell, at most."""
        holders = (*self.files.values(), *self.lacking.values())
        return max(map(len, holders), default=1)

    @cached_property
    def period(self) -> int:
        """After how many replicas a choice among equal copies repeats."""
        return lcm(*map(len, self.files.values()))


@dataclass(frozen=True, eq=False)
class Sharding:
    """How tensors that are stored alike lie in the source files; one object for all of them."""

    grid: Grid | BoxTiling  # its cells are what files hold, in elements of the full tensor
    placement: Holders
    is_declared: bool = True  # the description lists it; if not, every holder has it whole

    @property
    def files(self) -> IdsByCell:
        """For each cell the files that hold it, ascending."""
        return self.placement.files

    @property
    def holders(self) -> tuple[int, ...]:
        return self.placement.holders

    @property
    def period(self) -> int:
        return self.placement.period


class ComposedSharding:
    """How tensors lie in the source files that are made of others in one way; one object for all.

    Stands where a `Sharding` stands.
    """

    def __init__(self, grid: PieceTiling, parts: Sequence[Sharding]) -> None:
        self.grid = grid  # its cells are (number of the piece, cell of the source's tiling)
        self.pieces, self.parts = grid, tuple(parts)  # parts: of each source
        self.holders = tuple(sorted({file for part in parts for file in part.holders}))
        self.is_declared = any(part.is_declared for part in parts) and bool(grid.assembly.pieces)

    @cached_property
    def files(self) -> IdsByCell:
        """For each cell the files that hold it, ascending."""
        return IdentityDict(
            {
                (number, *cell): files
                for number, piece in enumerate(self.pieces.assembly.pieces)
                for cell, files in self.parts[piece.source].files.items()
                if piece.inside_source(self.parts[piece.source].grid.box(cell)) is not None
            }
        )

    @cached_property
    def period(self) -> int:
        """After how many replicas a choice among equal copies repeats."""
        return lcm(*(part.period for part in self.parts))


class PreferredPlaces:
    """Shardings with those holders of each cell alone whose files lie in the best place."""

    def __init__(self, place_of: Mapping[int, int], only: Holders | None = None) -> None:
        """place_of: file -> number of its place, the best first. only: no others are changed."""
        self._place_of, self._only = place_of, only
        self._placements: dict[Holders, Holders] = {}
        self._stored: dict[Sharding, Sharding] = {}
        self._composed: dict[ComposedSharding, ComposedSharding] = {}

    def of(self, sharding: Sharding | ComposedSharding) -> Sharding | ComposedSharding:
        """Return a sharding with preferred holders; those of ranks' own values stay."""
        if isinstance(sharding, Sharding):
            return self._of_stored(sharding)
        if sharding not in self._composed:
            parts = [*map(self._of_stored, sharding.parts)]
            self._composed[sharding] = ComposedSharding(sharding.pieces, parts)
        return self._composed[sharding]

    def _of_stored(self, sharding: Sharding) -> Sharding:
        placement = sharding.placement
        if placement.is_per_rank or (self._only is not None and placement is not self._only):
            return sharding
        if placement not in self._placements:
            self._placements[placement] = placement.preferring(self._place_of)
        if sharding not in self._stored:
            preferred = replace(sharding, placement=self._placements[placement])
            self._stored[sharding] = preferred
        return self._stored[sharding]


@dataclass(frozen=True)
class Parameter(Related):
    """One tensor, under the name and type that it has in the files, or gets at the destination."""

    name: str
    dtype: str
    sharding: Sharding | ComposedSharding = field(compare=False)
    # src_name, src_dtype: what the files call it, and their type. Of a tensor that is made of
    # others: the first of these; src_names are all, by number.
    src_name: str
    src_dtype: str
    src_names: tuple[str, ...] = ()
    # What is done to the elements of each before their type is changed, if anything is.
    steps: tuple[Computation | None, ...] = ()
    # Of an optimizer state that the description does not list, the parameter like which it is taken
    # to be sharded.
    follows: str | None = None
    related: State | None = None  # what it is to another parameter
    is_weight: bool = True  # neither a state nor a counter

    @property
    def shape(self) -> Shape:
        """The full shape, in elements."""
        return self.sharding.grid.shape

    @property
    def grid(self) -> SourceTiling:
        return self.sharding.grid

    @property
    def composed_sharding(self) -> ComposedSharding | None:
        """How the tensor is made of others; None of one that is as in the files."""
        return self.sharding if isinstance(self.sharding, ComposedSharding) else None

    @property
    def value(self) -> float | None:
        """The value of all elements of a tensor that no file holds. None: files hold the tensor."""
        assembly = (
            None if self.composed_sharding is None else self.composed_sharding.pieces.assembly
        )
        return None if assembly is None or assembly.pieces else assembly.value

    def entry(self, cell: Cell, file: int) -> str:
        """Return the name under which a file holds a source cell."""
        sharding, name = self.sharding, self.src_name
        if isinstance(sharding, ComposedSharding):
            number = sharding.pieces.source(cell)
            sharding, name, cell = sharding.parts[number], self.src_names[number], cell[1:]
        suffixes = sharding.placement.suffixes
        return name + suffixes[cell, file] if suffixes else name

    @property
    def holders(self) -> tuple[int, ...]:
        return self.sharding.holders

    @property
    def is_declared(self) -> bool:
        """Whether the source's description speaks of it."""
        return self.sharding.is_declared


@dataclass(frozen=True)
class FileGroup:
    """Files of one stage that hold the same tensors, in the same order and shapes."""

    schema: Schema
    files: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Catalog:
    """All tensors of a source checkpoint."""

    description: Description  # what states it
    # The rule by which its ranks hold slices, patterns and optimizer states written out; None where
    # there is none.
    strategy: Strategy | None
    paths: Mapping[int, str]  # for messages, of each file
    # By pipeline stage, those with the highest ranks first.
    groups: tuple[tuple[FileGroup, ...], ...]
    declared: Mapping[str, Parameter]  # tensors that description and files both know, by name
    # Tensors of the files that the description does not list, by name.
    undeclared: Mapping[str, Parameter]
    # Names that no file holds while files that could hold them are missing, with the missing ranks;
    # without gradients that are accumulated, if no file has any.
    unreachable: Mapping[str, tuple[int, ...]]
    searched: str = ""  # for messages, on which nodes files were searched for, if on several
    states: States = NO_STATES  # of all names that files or the strategy have

    @property
    def declared_by(self) -> str:
        """What states how tensors are sharded, for messages."""
        return self.strategy.label if self.strategy is not None else self.description.source

    @property
    def is_whole(self) -> bool:
        """Whether all tensors are whole, by what was stated."""
        return isinstance(self.strategy, WholeStrategy)

    @property
    def ranks(self) -> int:
        """How many ranks, or files of no rank, the source has."""
        return self.strategy.ranks if self.strategy is not None else max(self.paths, default=0) + 1

    @property
    def stages(self) -> int:
        """How many pipeline stages the source has."""
        return len(self.strategy.stages) if self.strategy is not None else 1

    @property
    def extent(self) -> str:
        """Stages and ranks, or files of no rank, in words."""
        return self.strategy.extent if self.strategy is not None else f"{len(self.paths)} files"

    @property
    def unread_names(self) -> frozenset[str]:
        """Names that the strategy lists in pipeline stages alone of which no file was opened."""
        if self.strategy is None or len(self.strategy.stages) == 1:
            return frozenset()
        stages = {self.stage_of(file) for file in self.paths}
        listed = self.strategy.stages_of
        return frozenset(name for name in listed if stages.isdisjoint(listed[name]))

    def rank_of(self, file: int) -> int:
        """Return the global rank that a file is of; its id, of a file of no rank."""
        return self.description.ranks.get(file, file)

    def stage_of(self, file: int) -> int:
        """Return the pipeline stage that a file is of."""
        return self.strategy.stage_of(self.rank_of(file)) if self.strategy is not None else 0

    @property
    def parameters(self) -> list[Parameter]:
        """Those declared, then the others."""
        return [*self.declared.values(), *self.undeclared.values()]

    def names_in(self, stages: Iterable[int]) -> list[str]:
        """Return the names in the files of `stages`, highest rank's first, as MindSpore does."""
        if self.strategy is None:
            return [parameter.name for parameter in self.parameters]
        ordered = (self.groups[s] for s in sorted(stages, reverse=True))
        return list(
            dict.fromkeys(
                name for groups in ordered for group in groups for name in group.schema.names
            )
        )


def strategy_text(strategy: Strategy) -> str:
    """Name a strategy, and what it describes."""
    if strategy.label == "none":
        return "no strategy: whole tensors"
    return f"{shown_path(strategy.label)}: {strategy.extent}"


def catalog_text(catalog: Catalog) -> str:
    """Name what describes a source, and what that is."""
    if catalog.strategy is not None:
        return strategy_text(catalog.strategy)
    return f"{shown_path(catalog.declared_by)}: {catalog.extent}"
