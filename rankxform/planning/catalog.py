"""The table of a source: every tensor's type, full shape, and which file holds which box of it.

Names are the source's own. Parameters of the destination, under their names there, are made of the
catalog's by what an expression says (`rankxform.planning.derived`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field

from rankxform.formats.base import Schema
from rankxform.geometry.box import Shape
from rankxform.geometry.tiling import Cell, SourceTiling
from rankxform.layout.states import Related, State, States
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.ops.base import NO_STATES, Computation
from rankxform.values import dataclass

from .description import Description
from .sharding import ComposedSharding, Sharding


@dataclass(frozen=True)
class Parameter(Related):
    """One tensor, under the name and type that it has in the files, or gets at the destination.

    src_name, src_dtype: what the files call it, and their type. Of a tensor that is made of others:
    the first of these; src_names are all, by number. steps: what is done to the elements of each
    before their type is changed, if anything is. follows: of an optimizer state that the
    description does not list, the parameter like which it is taken to be sharded.
    """

    name: str
    dtype: str
    sharding: Sharding | ComposedSharding = field(compare=False)
    src_name: str
    src_dtype: str
    src_names: tuple[str, ...] = ()
    steps: tuple[Computation | None, ...] = ()
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
    def composed(self) -> ComposedSharding | None:
        """How the tensor is made of others; None of one that is as in the files."""
        return self.sharding if isinstance(self.sharding, ComposedSharding) else None

    @property
    def value(self) -> float | None:
        """The value of all elements of a tensor that no file holds. None: files hold the tensor."""
        assembly = None if self.composed is None else self.composed.pieces.assembly
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
    def declared(self) -> bool:
        """Whether the source's description speaks of it."""
        return self.sharding.declared


@dataclass(frozen=True)
class FileGroup:
    """Files of one stage that hold the same tensors, in the same order and shapes."""

    schema: Schema
    files: tuple[int, ...]
    ranks: tuple[int, ...]


@dataclass(frozen=True)
class Catalog:
    """All tensors of a source checkpoint.

    description: what states it. strategy: the rule by which its ranks hold slices, patterns and
    optimizer states written out; None where there is none. paths: for messages, of each file.
    groups: by pipeline stage, those with the highest ranks first.
    declared: tensors that description and files both know, by name. undeclared: tensors of the
    files that the description does not list, by name. unreachable: names that no file holds while
    files that could hold them are missing, with the missing ranks; without gradients that are
    accumulated, if no file has any. searched: for messages, on which nodes files were searched for,
    if on several.
    """

    description: Description
    strategy: Strategy | None
    paths: Mapping[int, str]
    groups: tuple[tuple[FileGroup, ...], ...]
    declared: Mapping[str, Parameter]
    undeclared: Mapping[str, Parameter]
    unreachable: Mapping[str, tuple[int, ...]]
    searched: str = ""
    states: States = NO_STATES  # of all names that files or the strategy have

    @property
    def label(self) -> str:
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
