"""The inputs and the result of a derivation."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field, replace
from typing import Any, NamedTuple

from rankxform.geometry.box import Shape
from rankxform.layout.strategy import Strategy
from rankxform.results import Result
from rankxform.values import dataclass

from .mesh import DST_SIZES, SRC_SIZES, Parallel
from .rules import Preset, ShardingRule
from .stages import StageLayers


class Extent(NamedTuple):
    """A parameter's full shape, in elements, and its full size in bytes."""

    shape: Shape
    nbytes: int


@dataclass(frozen=True)
class DeriveRequest:
    """All that a strategy is derived from.

    source: None where every parameter is whole. src: the source's sizes; with `keep_mesh` only its
    threshold counts. keep_mesh: the ranks of a stage stay arranged as they are; only the
    optimizer's shard and the pipeline change, and with `keep_stages` not even the latter. extents:
    of the parameters, as far as they are known. rules: the user's, before the preset's. opt_on,
    opt_off: which parameters take part in the optimizer's shard, or do not. unsharded: axes that
    shard no parameter. predict: the job trains nothing. src_flag, dst_flag: the
    options that the sizes come from. places: what is said of the pipeline.
    """

    source: Strategy | None
    dst: Parallel
    src: Parallel | None = None
    keep_mesh: bool = False
    keep_stages: bool = False
    extents: Mapping[str, Extent] = field(default_factory=dict)
    preset: Preset | None = None
    rules: tuple[ShardingRule, ...] = ()
    opt_on: tuple[re.Pattern[str], ...] = ()
    opt_off: tuple[re.Pattern[str], ...] = ()
    unsharded: frozenset[str] = frozenset()
    predict: bool = False
    src_flag: str = SRC_SIZES
    dst_flag: str = DST_SIZES
    places: StageLayers = field(default_factory=StageLayers)

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
    """Parameters that are sharded alike: a row of the table that is printed.

    pattern: their names, numbers as ``*``; parameters: how many. spec: which mesh axes shard them.
    optimizer: whether they take part in the optimizer's shard ("yes", "no"; "-": not known, or
    there is none). src_layout, dst_layout: as device matrix, tensor map, step and size of the
    optimizer's shard; src_holds, dst_holds: what a rank holds by these, in words.
    """

    pattern: str
    parameters: int
    spec: str
    optimizer: str
    src_layout: str
    dst_layout: str
    src_holds: str
    dst_holds: str


@dataclass(frozen=True, repr=False)
class Derived(Result):
    """A derived strategy, and what shows how it came about.

    roles: how the parameters are sharded. assumptions: what it depends on, in sentences.
    """

    strategy: Strategy
    roles: tuple[ShardingRow, ...]
    assumptions: tuple[str, ...]

    def in_short(self) -> str:
        return self.strategy.in_short()

    def amounts(self) -> dict[str, str]:
        return {role.pattern: f"{role.src_holds} -> {role.dst_holds}" for role in self.roles}

    @property
    def facts(self) -> dict[str, Any]:
        """What shows how the strategy came about, for JSON."""
        return {
            "roles": [vars(role) for role in self.roles],
            "assumptions": list(self.assumptions),
            "stage_parameters": [len(layouts) for layouts in self.strategy.stages],
        }
