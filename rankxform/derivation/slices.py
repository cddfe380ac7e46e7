"""The strategy by which the files of ranks are sharded, of a job whose strategy is lost.

A preset says what shards each parameter, and the job's sizes into how many slices; full shapes
follow from the slices in the files, and have to be those of one network, as the preset states them.
Where the slices would fit with and without the optimizer's shard, those shapes decide, or nothing
does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from rankxform.errors import DerivationError
from rankxform.formats.base import Schema
from rankxform.formats.dtype import content_bytes
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout, without_optimizer
from rankxform.layout.names import pattern_of, summarize_names
from rankxform.layout.states import NEVER_SAVED, find_states
from rankxform.layout.strategy import Strategy

from .derive import derive
from .explain import Refusals
from .request import Derived, DeriveRequest, Extent
from .rules import Rule, mismatched_shapes

_LOOKED_AT = 8
_ROUNDS = 4
"""Full shapes decide what the optimizer shards, and that decides full shapes."""

Slices = Mapping[str, tuple[Shape, str]]
"""The shape and type of a parameter's slice, by name."""


class Bytes(NamedTuple):
    """What files hold, as far as it is asked for.

    same: tells whether two ranks of a stage hold the same bytes of a parameter; None where bytes
    say nothing. may_repeat: tells, by a name and how many axes it has, whether slices may be equal.
    """

    same: Callable[[str, int, int], bool | None]
    may_repeat: Callable[[str, int], bool]


def derive_of_slices(
    given: DeriveRequest, schemas: Mapping[int, Schema], label: str, held: Bytes
) -> Derived:
    """Derive the strategy of the job that wrote files.

    Args:
        given: the job's sizes as its `dst`, and what shards its parameters.
        schemas: of one file of each pipeline stage, or of more, by global rank.
        label: what messages call the strategy.
        held: looks into files.

    Raises:
        DerivationError: the slices do not make one network, or more than one.
    """
    slices = {
        name: (shape, dtype)
        for one in dict.fromkeys(schemas.values())
        for name, shape, dtype in zip(one.names, one.shapes, one.dtypes)
    }
    states = find_states({name: shape for name, (shape, _) in slices.items()})
    slices = {name: one for name, one in slices.items() if name not in states.counters}
    free, size = _without_shapes(given), given.dst.stage_size
    largest = {n: tuple(k * size for k in s) if _is_cut(s) else s for n, (s, _) in slices.items()}
    try:
        full = _settled(free, slices, largest)
        full = _decided(free, given.all_rules, slices, full, held)
        found = derive(replace(given, extents=_extents(slices, full)), label)
        _check_bytes(given, found.strategy, slices, held)
    except DerivationError as error:
        if not error.reasons:
            raise
        what = f"the files' slices are not those of the job that {given.dst_flag} describes"
        job = f"{given.dst_flag} FILE of the job that wrote them, with its --preset"
        more = "--exclude REGEX for what is no parameter of the network"
        raise DerivationError.of(error.reasons, what, [job, more]) from None
    saved = (
        {n: one for n, one in some.items() if found.strategy.states.kind(n) != NEVER_SAVED}
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
        name: tuple(
            extent * times for extent, times in zip(shape, counts.get(name, (1,) * len(shape)))
        )
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
    held: Bytes,
) -> dict[str, Shape]:
    """Choose where slices fit without the optimizer's shard as well.

    By the shapes that the rules state, one after the other as sizes become known; and what these do
    not tell by two files, which then hold the same bytes. What is alike in all layers is decided
    once.
    """
    layouts = _layouts(free, slices, full)
    states = find_states(full)
    sharded = {name: one for name, one in layouts.items() if one.opt_shards > 1}
    own, counts = {n: slices[n] for n in sharded}, {n: a.map_counts for n, a in sharded.items()}
    plain = _made(own, counts)
    others = _layouts(free, slices, {**full, **plain})
    unsure: dict[_Kind, list[str]] = {}
    for name in sharded:
        if others[name].opt_shards == 1 and states.of(name) is None:
            unsure.setdefault(_Kind(pattern_of(name), full[name], plain[name]), []).append(name)
    found = dict(full)
    known = _one_of_each(full, {name for names in unsure.values() for name in names})
    while unsure:
        told = {
            kind: way for kind, names in unsure.items() if (way := kind.way(names, known, rules))
        }
        if not told:
            kind, names = next(iter(unsure.items()))
            same = _is_same(names, sharded[names[0]], held)
            if same is None or (same and held.may_repeat(names[0], len(kind.full))):
                raise DerivationError(
                    f"whether the optimizer shards {summarize_names(names, 2)} cannot be told by "
                    "slices",
                    "--opt-on REGEX or --opt-off REGEX for them",
                    "--src-strategy FILE of the job that wrote them",
                )
            told = {kind: kind.plain if same else kind.full}
        for kind, way in told.items():
            names = unsure.pop(kind)
            found.update(dict.fromkeys(names, way))
            known[names[0]] = way
    return {name: found.get(states.base_name(name), shape) for name, shape in found.items()}


class _Kind(NamedTuple):
    """Parameters of all layers that are alike: their full shape with the optimizer's shard, and
    without."""

    pattern: str
    full: Shape
    plain: Shape

    def way(
        self, names: Sequence[str], known: Mapping[str, Shape], rules: Sequence[Rule]
    ) -> Shape | None:
        """Return the shape that does not contradict what is known, if the other one does."""
        name = names[0]
        ways = [
            way
            for way in (self.full, self.plain)
            if name not in mismatched_shapes(rules, {**known, name: way})
        ]
        return ways[0] if len(ways) == 1 else None


def _one_of_each(shapes: Mapping[str, Shape], without: Collection[str]) -> dict[str, Shape]:
    """Return the shapes of one parameter of each kind, which are all that the rules' sizes need."""
    seen: dict[tuple[str, Shape], str] = {}
    states = find_states(shapes)
    for name, shape in shapes.items():
        if states.of(name) is None and name not in without:
            seen.setdefault((pattern_of(name), shape), name)
    return {name: shapes[name] for name in seen.values()}


def _is_same(names: Sequence[str], layout: Layout, held: Bytes) -> bool | None:
    """Tell whether two ranks hold the same of parameters, which the optimizer divides among them,
    or which each of them has."""
    plain = without_optimizer(layout)
    first, *more = plain.holders[plain.cell(0)]
    others = [rank for rank in more if layout.cell(rank) != layout.cell(first)] or more
    told = (held.same(name, first, others[0]) for name in names[:_LOOKED_AT])
    return next((one for one in told if one is not None), None)


def _check_bytes(given: DeriveRequest, strategy: Strategy, slices: Slices, held: Bytes) -> None:
    """Refuse a strategy whose replicas differ, or whose slices are replicas; one kind at a time.

    What the user says with --opt-on is believed: slices that are equal may be meant.
    """
    kinds: dict[tuple[str, Layout], list[str]] = {}
    for some in strategy.stages:
        for name, layout in some.items():
            is_weight = name in slices and strategy.states.of(name) is None
            is_matrix = is_weight and len(layout.tensor_map) > 1
            if is_matrix and layout.free_ranks > 1:
                kinds.setdefault((pattern_of(name), layout), []).append(name)
    refusals = Refusals(dst_flag=given.dst_flag)
    for (_, layout), names in kinds.items():
        same = _is_same(names, layout, held)
        meant = any(one.search(names[0]) for one in given.opt_on)
        if same is None or same == (layout.opt_shards == 1) or (same and meant):
            continue
        what = "the same bytes where they would hold different slices"
        what = what if same else "different bytes where they would hold replicas"
        refusals.add(f"two ranks hold {what}", f"Correct {given.dst_flag}", *names)
    if refusals:
        raise DerivationError.of(refusals.texts())
