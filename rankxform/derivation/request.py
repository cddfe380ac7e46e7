"""The inputs and the result of a derivation."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from rankxform.geometry.box import Shape
from rankxform.layout.names import format_ranges
from rankxform.layout.strategy import Strategy
from rankxform.results import NORMAL, Group, Result, Section, lines
from rankxform.values import NamedTuple, dataclass

from .mesh import DST_SIZES, SRC_SIZES, Parallel
from .rules import Preset, ShardingRule
from .stages import StageLayers, lists_of, places_in_lists


class Extent(NamedTuple):
    """A parameter's full shape, in elements, and its full size in bytes."""

    shape: Shape
    nbytes: int


@dataclass(frozen=True)
class DeriveRequest:
    """All that a strategy is derived from."""

    source: Strategy | None  # None where every parameter is whole
    dst: Parallel
    src: Parallel | None = None  # the source's sizes; with `keep_mesh` only its threshold counts
    takes_threshold: bool = False  # nothing states the destination's threshold: it is the source's
    # The ranks of a stage stay arranged as they are; only the optimizer's shard and the pipeline
    # change, and with `keep_stages` not even the latter.
    keep_mesh: bool = False
    keep_stages: bool = False
    # Of the parameters, as far as they are known.
    extents: Mapping[str, Extent] = field(default_factory=dict)
    preset: Preset | None = None
    rules: tuple[ShardingRule, ...] = ()  # the user's, before the preset's
    # opt_on, opt_off: which parameters take part in the optimizer's shard, or do not.
    opt_on: tuple[re.Pattern[str], ...] = ()
    opt_off: tuple[re.Pattern[str], ...] = ()
    unsharded: frozenset[str] = frozenset()  # axes that shard no parameter
    predict: bool = False  # the job trains nothing
    # src_flag, dst_flag: the options that the sizes come from.
    src_flag: str = SRC_SIZES
    dst_flag: str = DST_SIZES
    places: StageLayers = field(default_factory=StageLayers)  # what is said of the pipeline

    def with_threshold(self) -> DeriveRequest:
        """Return the request with the source's threshold, where nothing states the other's."""
        threshold = self.src.threshold if self.src else None
        if threshold is None or self.dst.threshold is not None:
            return self
        return replace(self, dst=replace(self.dst, threshold=threshold), takes_threshold=True)

    @property
    def all_rules(self) -> tuple[ShardingRule, ...]:
        """The rules, in the order in which they are tried."""
        return (*self.rules, *(self.preset.rules if self.preset else ()))

    @property
    def stage_layers(self) -> StageLayers:
        """What is said of the pipeline, by the preset at last."""
        if self.places.layers is not None or self.preset is None:
            return self.places
        return replace(self.places, layers=self.preset.layers)

    @property
    def shapes(self) -> dict[str, Shape]:
        """The full shapes that are known."""
        return {name: extent.shape for name, extent in self.extents.items()}


@dataclass(frozen=True)
class ShardingRow:
    """Parameters that are sharded alike: a row of the table that is printed."""

    pattern: str  # their names, with numbers as ``*``
    parameters: int  # number of parameters
    spec: str  # mesh axes that shard them, by axis
    # Whether the optimizer shards them: "yes", "no", or "-" (not known, or it shards none)
    optimizer: str
    src_layout: str  # device matrix, tensor map, and the optimizer shard's step and size
    dst_layout: str  # device matrix, tensor map, and the optimizer shard's step and size
    src_holds: str  # what one rank holds, for people
    dst_holds: str  # what one rank holds, for people


@dataclass(frozen=True, repr=False)
class Derived(Result):
    """A derived strategy, and what shows how it came about.

    roles: how the parameters are sharded. assumptions: what it depends on, in sentences.
    """

    strategy: Strategy  # the derived strategy
    roles: tuple[ShardingRow, ...]  # rows of the table that is printed
    assumptions: tuple[str, ...]  # what was assumed, for people

    def in_short(self) -> str:
        return self.strategy.in_short()

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        yield lines("", "derived strategy: which mesh axes shard what")
        yield from role_groups(self.roles)
        yield from stage_groups(self.strategy)
        yield from (lines("note", text) for text in self.assumptions)

    @property
    def facts(self) -> dict[str, Any]:
        """What shows how the strategy came about, for JSON."""
        return {
            "roles": [vars(role) for role in self.roles],
            "assumptions": list(self.assumptions),
            "stage_parameters": [len(layouts) for layouts in self.strategy.stages],
        }


def role_groups(roles: Sequence[ShardingRow]) -> Iterator[Group]:
    """Yield the rows of a role table, those that are sharded alike together."""
    names_by_sharding: dict[str, list[str]] = {}
    for role in roles:
        after = f" -> {role.dst_holds}" if role.dst_holds else ""
        count = f" ({role.parameters})" if role.parameters > 1 else ""
        key = f"{role.src_holds}{after}; {role.spec}"
        names_by_sharding.setdefault(key, []).append(role.pattern + count)
    yield from map(Group, names_by_sharding, names_by_sharding.values())


_FEW = 6


def stage_groups(strategy: Strategy) -> Iterator[Group]:
    """Yield what each pipeline stage holds; nothing where there is one stage."""
    if len(strategy.stages) == 1:
        return
    texts = []
    for stage, layouts in enumerate(strategy.stages):
        names = [name for name in layouts if strategy.states.of(name) is None]
        parts = [
            f"{prefix}.{format_ranges(sorted(n))}"
            for prefix, n in lists_of(names, outermost=True).items()
        ]
        parts += [name for name in names if not places_in_lists(name)]
        suffix = f", and {len(parts) - _FEW} more" if len(parts) > _FEW else ""
        texts.append(f"{stage}: {len(names)} parameters: {', '.join(parts[:_FEW])}{suffix}")
    yield Group("pipeline stages", texts)
