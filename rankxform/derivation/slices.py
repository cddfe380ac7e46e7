"""The strategy by which the files of ranks are sharded, of a job whose strategy is lost.

A preset says what shards each parameter, and the job's sizes into how many slices; full shapes
follow from the slices in the files, and have to be those of one network, as the preset states them.
Where the slices would fit with and without the optimizer's shard, those shapes decide, or nothing
does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from rankxform.errors import DerivationError
from rankxform.formats.base import Schema
from rankxform.formats.dtype import content_bytes
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout, without_optimizer
from rankxform.layout.names import NEVER_SAVED, parameter_of, state_of, summarize_names

from .derive import derive
from .request import Derived, DeriveRequest, Extent
from .rules import Rule, mismatched_shapes

_ROUNDS = 4
"""Full shapes decide what the optimizer shards, and that decides full shapes."""

Slices = Mapping[str, tuple[Shape, str]]
"""The shape and type of a parameter's slice, by name."""


HoldsSame = Callable[[str, int, int], bool | None]
"""Whether two ranks of a stage hold the same bytes of a parameter; None where bytes say nothing."""


def derive_of_slices(
    given: DeriveRequest, schemas: Mapping[int, Schema], label: str, holds_same: HoldsSame
) -> Derived:
    """Derive the strategy of the job that wrote files.

    Args:
        given: the job's sizes as its `dst`, and what shards its parameters.
        schemas: of one file of each pipeline stage, or of more, by global rank.
        label: what messages call the strategy.
        holds_same: looks into two files.

    Raises:
        DerivationError: the slices do not make one network, or more than one.
    """
    slices = {
        name: (shape, dtype)
        for one in dict.fromkeys(schemas.values())
        for name, shape, dtype in zip(one.names, one.shapes, one.dtypes)
    }
    free, size = _without_shapes(given), given.dst.stage_size
    largest = {n: tuple(k * size for k in s) if _is_cut(s) else s for n, (s, _) in slices.items()}
    try:
        full = _settled(free, slices, largest)
        full = _decided(free, given.all_rules, slices, full, holds_same)
        found = derive(replace(given, extents=_extents(slices, full)), label)
    except DerivationError as error:
        if not error.reasons:
            raise
        what = f"the files' slices are not those of the job that {given.dst_flag} describes"
        job = f"{given.dst_flag} FILE of the job that wrote them, with its --preset"
        raise DerivationError.of(error.reasons, what, [job]) from None
    saved = (
        {name: one for name, one in some.items() if state_of(name) != NEVER_SAVED}
        for some in found.strategy.stages
    )
    return replace(found, strategy=replace(found.strategy, stages=tuple(saved)))


def _is_cut(shape: Shape) -> bool:
    """Whether a tensor may be a slice of a larger one: counters of one element are not."""
    return any(extent != 1 for extent in shape)


def _without_shapes(given: DeriveRequest) -> DeriveRequest:
    """Return a question whose rules say nothing of shapes, which are not known yet."""
    if given.preset is None:
        return given
    rules = tuple(replace(rule, shape=()) for rule in given.preset.rules)
    return replace(given, preset=replace(given.preset, rules=rules))


def _extents(slices: Slices, shapes: Mapping[str, Shape]) -> dict[str, Extent]:
    return {n: Extent(s, content_bytes(slices[n][1], s)) for n, s in shapes.items()}


def _layouts(
    given: DeriveRequest, slices: Slices, shapes: Mapping[str, Shape]
) -> dict[str, Layout]:
    """Return how parameters of these full shapes would be sharded, of those that files hold."""
    strategy = derive(replace(given, extents=_extents(slices, shapes))).strategy
    found = {name: layout for some in strategy.stages for name, layout in some.items()}
    return {name: layout for name, layout in found.items() if name in slices}


def _made(slices: Slices, counts: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the full shapes that slices make, each so many times along each axis."""
    return {
        name: tuple(extent * times for extent, times in zip(shape, counts.get(name, (1,) * 99)))
        for name, (shape, _) in slices.items()
    }


def _settled(free: DeriveRequest, slices: Slices, first: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return full shapes that are sharded into these slices, by the optimizer where it may be."""
    shapes = dict(first)
    for _ in range(_ROUNDS):
        layouts = _layouts(free, slices, shapes)
        made = _made(slices, {name: one.counts for name, one in layouts.items()})
        if made == shapes:
            return shapes
        shapes = made
    raise DerivationError(
        "the full shapes of the files' slices cannot be told",
        "--src-strategy FILE of the job that wrote them",
    )


def _decided(
    free: DeriveRequest,
    rules: Sequence[Rule],
    slices: Slices,
    full: Mapping[str, Shape],
    holds_same: HoldsSame,
) -> dict[str, Shape]:
    """Choose where slices fit without the optimizer's shard as well.

    By the shapes that the rules state, one after the other as sizes become known; and what these do
    not tell by two files, which then hold the same bytes.
    """
    layouts = _layouts(free, slices, full)
    sharded = {name: one for name, one in layouts.items() if one.opt_shards > 1}
    own, counts = {n: slices[n] for n in sharded}, {n: a.map_counts for n, a in sharded.items()}
    plain = _made(own, counts)
    others = _layouts(free, slices, {**full, **plain})
    unsure = [n for n in sharded if others[n].opt_shards == 1 and parameter_of(n) == n]
    known = {n: shape for n, shape in full.items() if parameter_of(n) not in {*unsure}}
    while unsure:
        found = {}
        for name in unsure:
            both = full[name], plain[name]
            ways = [
                way for way in both if name not in mismatched_shapes(rules, {**known, name: way})
            ]
            if len(ways) == 1:
                found[name] = ways[0]
        if not found:
            name = unsure[0]
            one = without_optimizer(sharded[name])
            ranks = one.holders[one.cell(0)]
            same = holds_same(name, ranks[0], ranks[1])
            if same is None:
                break
            found[name] = plain[name] if same else full[name]
        known.update(found)
        unsure = [name for name in unsure if name not in found]
    if unsure:
        raise DerivationError(
            f"whether the optimizer shards {summarize_names(unsure, 2)} cannot be told by slices",
            "--opt-on REGEX or --opt-off REGEX for them",
            "--src-strategy FILE of the job that wrote them",
        )
    return {n: known.get(n, known.get(parameter_of(n), shape)) for n, shape in full.items()}
