"""The strategy by which the files of ranks are sharded, of a job whose strategy is lost.

A preset says what shards each parameter, and the job's sizes into how many slices; full shapes
follow from the slices in the files, and have to be those of one network, as the preset states them.
Where the slices would fit with and without the optimizer's shard, those shapes decide, or nothing
does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial

from rankxform.errors import DerivationError
from rankxform.formats.container import Schema, content_bytes
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout, without_optimizer
from rankxform.layout.names import pattern_of, summarize_names
from rankxform.layout.states import NEVER_SAVED, find_states
from rankxform.layout.strategy import Strategy
from rankxform.values import NamedTuple

from .derive import derive
from .explain import Refusals, rule_for
from .neighbours import fitting_changes
from .request import Derived, DeriveRequest, Extent
from .rules import ShardingRule, matching_presets, mismatched_shapes

BY_RULE_ALONE = "By which axes these are sharded, --rule alone says"
"""How the assumption begins that nothing in the files could contradict."""

_SHOWN = 3
_ASKS = "Give ", "Add ", "State "
"""How answers begin to reasons that contradict nothing: something was not said."""

_NO_RULE = "has no rule"
_LOOKED_AT = 8
_ROUNDS = 4
"""Full shapes decide what the optimizer shards, and that decides full shapes."""

Slices = Mapping[str, tuple[Shape, str]]
"""The shape and type of a parameter's slice, by name."""


class SliceBytes(NamedTuple):
    """What files hold, as far as it is asked for.

    holds_same: tells whether two ranks of a stage hold the same bytes of a parameter; None where
    bytes say nothing. may_repeat: tells, by a name and how many axes it has, whether slices may be
    equal.
    """

    holds_same: Callable[[str, int, int], bool | None]
    may_repeat: Callable[[str, int], bool]


def derive_of_slices(
    request: DeriveRequest, schemas: Mapping[int, Schema], label: str, slice_bytes: SliceBytes
) -> Derived:
    """Derive the strategy of the job that wrote files.

    Args:
        request: the job's sizes as its `dst`, and what shards its parameters.
        schemas: of one file of each pipeline stage, or of more, by global rank.
        label: what messages call the strategy.
        slice_bytes: looks into files.

    Raises:
        DerivationError: the slices do not make one network, or more than one.
    """
    slices = {
        name: (shape, dtype)
        for schema in dict.fromkeys(schemas.values())
        for name, shape, dtype in zip(schema.names, schema.shapes, schema.dtypes)
    }
    states = find_states({name: shape for name, (shape, _) in slices.items()})
    slices = {n: d for n, d in slices.items() if n not in states.counters}
    try:
        derived = _derive_as_said(request, slices, label, slice_bytes)
    except DerivationError as error:
        if not error.reasons:
            raise
        raise _refusal(error, request, slices, label, slice_bytes) from None
    saved = (
        {
            n: layout
            for n, layout in layouts.items()
            if derived.strategy.states.kind(n) != NEVER_SAVED
        }
        for layouts in derived.strategy.stages
    )
    strategy = replace(derived.strategy, stages=tuple(saved))
    shape_rules = [rule for rule in request.preset.rules if rule.shape] if request.preset else []
    by_rule_alone = [
        name
        for layouts in strategy.stages
        for name, layout in layouts.items()
        if any(count > 1 for count in layout.map_counts)
        and rule_for(request.rules, name, "spec")
        and not any(rule.names.search(name) for rule in shape_rules)
    ]
    if not by_rule_alone:
        return replace(derived, strategy=strategy)
    text = f"{BY_RULE_ALONE}: {summarize_names(by_rule_alone, 3)}."
    return replace(derived, strategy=strategy, assumptions=(*derived.assumptions, text))


def _derive_as_said(
    request: DeriveRequest, slices: Slices, label: str, slice_bytes: SliceBytes
) -> Derived:
    """Derive a strategy that the slices have, in shape and bytes, or raise DerivationError."""
    free, size = _without_shapes(request), request.dst.stage_size
    largest = {
        n: s if all(extent == 1 for extent in s) else tuple(extent * size for extent in s)
        for n, (s, _) in slices.items()  # counters of one element are no slices
    }
    full = _shapes_that_fit(free, slices, largest)
    full = _decide_ambiguous(free, request.all_rules, slices, full, slice_bytes)
    derived = derive(replace(request, extents=_extents(slices, full)), label)
    _check_bytes(request, derived.strategy, slices, slice_bytes)
    return derived


def _refusal(
    error: DerivationError,
    request: DeriveRequest,
    slices: Slices,
    label: str,
    slice_bytes: SliceBytes,
) -> DerivationError:
    """Say why no strategy can be derived, and what was stated near it that the slices have."""
    exclude_option = "--exclude REGEX for what is no parameter of the network"
    states = find_states({name: shape for name, (shape, _) in slices.items()})
    presets = matching_presets([name for name in slices if states.of(name) is None])
    if request.preset is None and not request.rules:
        message = "nothing says what shards the parameters of the job that wrote them"
        job = "--preset NAME of its network (docs/strategies.md)"
        job = f"--preset {presets[0]}" if len(presets) == 1 else job
        return DerivationError.of(error.reasons, message, [job, exclude_option])
    if all(reason.startswith(_ASKS) for reason in error.reasons):
        message = "what is said of the job does not tell how its files are sharded"
        asks = [] if request.preset is not None else [f"--preset {name}" for name in presets]
        return DerivationError.of(error.reasons, message, [*asks, exclude_option])

    flag = request.dst_flag
    message = f"the files' slices are not those of the job that {flag} describes"
    as_said = partial(_derive_as_said, slices=slices, label=label, slice_bytes=slice_bytes)
    fitting = fitting_changes(request, as_said)[:_SHOWN]
    job = f"{flag.replace('-parallel', '-config')} FILE of the job that wrote them"
    is_unknown = any(_NO_RULE in reason for reason in error.reasons)
    others = [f"{job}, with its --preset", *([exclude_option] if is_unknown else [])]
    fit = "the slices fit that" + ("; they fit other statements too" if fitting[1:] else "")
    return DerivationError.of(error.reasons, message, [f"{t}: {fit}" for t in fitting] or others)


def _without_shapes(request: DeriveRequest) -> DeriveRequest:
    """Return a question whose rules say nothing of shapes, which are not known yet."""
    if request.preset is None:
        return request
    rules = tuple(replace(rule, shape=()) for rule in request.preset.rules)
    return replace(request, preset=replace(request.preset, rules=rules))


def _extents(slices: Slices, shapes: Mapping[str, Shape]) -> dict[str, Extent]:
    return {n: Extent(s, content_bytes(slices[n][1], s)) for n, s in shapes.items()}


def _layouts(
    request: DeriveRequest, slices: Slices, shapes: Mapping[str, Shape]
) -> dict[str, Layout]:
    """Return how parameters of these full shapes would be sharded, of those that files hold."""
    strategy = derive(replace(request, extents=_extents(slices, shapes))).strategy
    layouts_by_name = {
        name: layout for stage_layouts in strategy.stages for name, layout in stage_layouts.items()
    }
    return {name: layout for name, layout in layouts_by_name.items() if name in slices}


def _full_shapes(slices: Slices, counts: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the full shapes that slices make, each so many times along each axis."""
    return {
        name: tuple(e * t for e, t in zip(shape, counts.get(name, (1,) * len(shape))))
        for name, (shape, _) in slices.items()
    }


def _shapes_that_fit(
    free: DeriveRequest, slices: Slices, first: Mapping[str, Shape]
) -> dict[str, Shape]:
    """Return full shapes that are sharded into these slices, by the optimizer where it may be."""
    shapes = dict(first)
    for _ in range(_ROUNDS):
        layouts = _layouts(free, slices, shapes)
        full_shapes = _full_shapes(
            slices, {name: layout.counts for name, layout in layouts.items()}
        )
        if full_shapes == shapes:
            return shapes
        shapes = full_shapes
    raise DerivationError(
        "the full shapes of the files' slices cannot be told",
        "--src-strategy FILE of the job that wrote them",
    )


def _decide_ambiguous(
    free: DeriveRequest,
    rules: Sequence[ShardingRule],
    slices: Slices,
    full: Mapping[str, Shape],
    slice_bytes: SliceBytes,
) -> dict[str, Shape]:
    """Choose where slices fit without the optimizer's shard as well.

    By the shapes that the rules state, one after the other as sizes become known; and what these do
    not tell by two files, which then hold the same bytes. What is alike in all layers is decided
    once.
    """
    layouts = _layouts(free, slices, full)
    states = find_states(full)
    sharded = {name: layout for name, layout in layouts.items() if layout.opt_shards > 1}
    sharded_slices = {n: slices[n] for n in sharded}
    counts = {n: a.map_counts for n, a in sharded.items()}
    plain = _full_shapes(sharded_slices, counts)
    plain_layouts = _layouts(free, slices, {**full, **plain})
    unsure: dict[_LayerPattern, list[str]] = {}
    for name in sharded:
        if plain_layouts[name].opt_shards == 1 and states.of(name) is None:
            unsure.setdefault(_LayerPattern(pattern_of(name), full[name], plain[name]), []).append(
                name
            )
    decided_shapes = dict(full)
    known_shapes = _one_of_each(full, {name for names in unsure.values() for name in names})
    while unsure:
        shapes_by_kind = {
            kind: shape
            for kind, names in unsure.items()
            if (shape := kind.way(names, known_shapes, rules))
        }
        if not shapes_by_kind:
            kind, names = next(iter(unsure.items()))
            is_equal = _is_same(names, sharded[names[0]], slice_bytes)
            if is_equal is None or (is_equal and slice_bytes.may_repeat(names[0], len(kind.full))):
                raise DerivationError(
                    f"whether the optimizer shards {summarize_names(names, 2)} cannot be told by "
                    "slices",
                    "--opt-on REGEX or --opt-off REGEX for them",
                    "--src-strategy FILE of the job that wrote them",
                )
            shapes_by_kind = {kind: kind.plain if is_equal else kind.full}
        for kind, shape in shapes_by_kind.items():
            names = unsure.pop(kind)
            decided_shapes.update(dict.fromkeys(names, shape))
            known_shapes[names[0]] = shape
    return {n: decided_shapes.get(states.base_name(n), s) for n, s in decided_shapes.items()}


class _LayerPattern(NamedTuple):
    """Parameters of all layers that are alike: their full shape with the optimizer's shard, and
    without."""

    pattern: str
    full: Shape
    plain: Shape

    def way(
        self, names: Sequence[str], known_shapes: Mapping[str, Shape], rules: Sequence[ShardingRule]
    ) -> Shape | None:
        """Return the shape that does not contradict what is known, if the other one does."""
        name = names[0]
        fitting_shapes = [
            shape
            for shape in (self.full, self.plain)
            if name not in mismatched_shapes(rules, {**known_shapes, name: shape})
        ]
        return fitting_shapes[0] if len(fitting_shapes) == 1 else None


def _one_of_each(shapes: Mapping[str, Shape], without: Collection[str]) -> dict[str, Shape]:
    """Return the shapes of one parameter of each kind, which are all that the rules' sizes need."""
    names_by_kind: dict[tuple[str, Shape], str] = {}
    states = find_states(shapes)
    for name, shape in shapes.items():
        if states.of(name) is None and name not in without:
            names_by_kind.setdefault((pattern_of(name), shape), name)
    return {name: shapes[name] for name in names_by_kind.values()}


def _is_same(names: Sequence[str], layout: Layout, slice_bytes: SliceBytes) -> bool | None:
    """Tell whether two ranks hold the same of parameters, which the optimizer divides among them,
    or which each of them has."""
    plain = without_optimizer(layout)
    first, *other_ranks = plain.holders[plain.cell(0)]
    differing_ranks = [
        rank for rank in other_ranks if layout.cell(rank) != layout.cell(first)
    ] or other_ranks
    answers = (slice_bytes.holds_same(n, first, differing_ranks[0]) for n in names[:_LOOKED_AT])
    return next((answer for answer in answers if answer is not None), None)


def _check_bytes(
    request: DeriveRequest, strategy: Strategy, slices: Slices, slice_bytes: SliceBytes
) -> None:
    """Refuse a strategy whose replicas differ, or whose slices are replicas; one kind at a time.

    What the user says with --opt-on is believed: slices that are equal may be meant.
    """
    kinds: dict[tuple[str, Layout], list[str]] = {}
    for stage_layouts in strategy.stages:
        for name, layout in stage_layouts.items():
            if name in slices and strategy.states.of(name) is None:
                kinds.setdefault((pattern_of(name), layout), []).append(name)
    refusals = Refusals(dst_flag=request.dst_flag)
    for (_, layout), names in kinds.items():
        plain, rule = without_optimizer(layout), rule_for(request.all_rules, names[0], "spec")
        differing = [r for r in range(plain.ranks) if plain.cell(r) != plain.cell(0)]
        if differing and rule is not None and not slice_bytes.may_repeat(names[0], 2):
            answers = (slice_bytes.holds_same(n, 0, differing[0]) for n in names[:_LOOKED_AT])
            if next((answer for answer in answers if answer is not None), False):
                reason = "two ranks hold the same bytes where they would hold different slices"
                refusals.add(reason, f"Correct {rule.label}, or {request.dst_flag}", *names)
        if len(layout.tensor_map) < 2 or layout.free_ranks == 1:
            continue
        is_equal = _is_same(names, layout, slice_bytes)
        is_requested = any(pattern.search(names[0]) for pattern in request.opt_on)
        if is_equal is None or is_equal == (layout.opt_shards == 1) or (is_equal and is_requested):
            continue
        bytes_text = "the same bytes where they would hold different slices"
        bytes_text = bytes_text if is_equal else "different bytes where they would hold replicas"
        refusals.add(f"two ranks hold {bytes_text}", f"Correct {request.dst_flag}", *names)
    if refusals:
        raise DerivationError.of(refusals.texts())
