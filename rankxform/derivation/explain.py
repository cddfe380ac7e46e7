"""Which mesh axes shard each parameter of a strategy, given the sizes of its job.

A strategy is explained as a whole or not at all: where one layout is of a mesh that the sizes do
not have, the network has rules of its own, and those that look plain may be meant otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from rankxform.errors import RequestError
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout, same_boxes, without_optimizer
from rankxform.layout.names import summarize_names
from rankxform.layout.states import NEVER_SAVED, find_states
from rankxform.layout.strategy import Strategy
from rankxform.values import dataclass

from .mesh import (
    DST_SIZES,
    EXPERT,
    LAYOUT,
    MESHES,
    SRC_SIZES,
    Meaning,
    Parallel,
    layout_of,
    meanings,
    mesh_axes,
)
from .rules import Rule


class Refusals:
    """Why something cannot be derived: reasons, what would answer each, and the names concerned.

    src_flag, dst_flag: the options that give the sizes of both jobs, as answers name them.
    """

    def __init__(self, src_flag: str = SRC_SIZES, dst_flag: str = DST_SIZES) -> None:
        self.src_flag, self.dst_flag = src_flag, dst_flag
        self._names: dict[tuple[str, str], dict[str, None]] = {}

    def add(self, reason: str, answer: str, *names: str) -> None:
        """Note a reason; names of one reason are collected."""
        self._names.setdefault((reason, answer), {}).update(dict.fromkeys(names))

    def __bool__(self) -> bool:
        return bool(self._names)

    def texts(self) -> list[str]:
        """Return one text for each reason: the answer, the reason, and whom it concerns."""
        found = []
        for (reason, answer), names in self._names.items():
            of = f":\n     {summarize_names(names, 4)}" if names else ""
            found.append(f"{answer}:\n     {reason}{of}")
        return found


@dataclass(frozen=True)
class Parameter:
    """A parameter of a network, as a strategy or a checkpoint lists it.

    layout: None where no strategy says. stages: that list it. states: the names of the optimizer
    states that follow it, gradients that are never saved included.
    """

    layout: Layout | None
    stages: tuple[int, ...]
    states: tuple[str, ...] = ()

    @property
    def trained(self) -> bool:
        """Whether an optimizer keeps states of it."""
        return bool(self.states)


def parameters_of(source: Strategy, refusals: Refusals) -> dict[str, Parameter]:
    """Return the parameters that a strategy lists, in its order; states belong to theirs."""
    found: dict[str, Parameter] = {}
    states: dict[str, dict[str, None]] = {}
    for stage, layouts in enumerate(source.stages):
        for name, layout in layouts.items():
            base = source.states.base_name(name)
            if base != name and base in layouts:
                states.setdefault(base, {})[name] = None
                if layout != layouts[base]:
                    refusals.add(
                        "an optimizer state has another layout than its parameter",
                        "This is not derived: compile the destination's strategy",
                        name,
                    )
                continue
            known = found.get(name)
            if known and known.layout != layout:
                refusals.add(
                    "pipeline stages list it with different layouts",
                    "This is not derived: compile the destination's strategy",
                    name,
                )
            found[name] = Parameter(layout, (*(known.stages if known else ()), stage))
    return {name: replace(one, states=tuple(states.get(name, ()))) for name, one in found.items()}


def parameters_in(
    shapes: Mapping[str, Shape], listed: Sequence[Rule], refusals: Refusals
) -> dict[str, Parameter]:
    """Return the parameters of a checkpoint of whole tensors, whose full shapes are given.

    Tensors of one element that no rule names, such as a step, are left to "in no strategy".
    """
    found: dict[str, Parameter] = {}
    states: dict[str, list[str]] = {}
    known = find_states(shapes)
    for name, shape in shapes.items():
        base = known.base_name(name)
        if base != name and base in shapes:
            if shapes[base] == shape:
                states.setdefault(base, []).append(name)
            else:
                refusals.add(
                    "an optimizer state has another shape than its parameter",
                    "This is not derived: compile the destination's strategy",
                    name,
                )
        elif known.kind(name) != NEVER_SAVED and (
            any(one != 1 for one in shape) or any(rule.names.search(name) for rule in listed)
        ):
            found[name] = Parameter(None, (0,))
    return {name: replace(one, states=tuple(states.get(name, ()))) for name, one in found.items()}


def fits(source: Strategy, sizes: Parallel, refusals: Refusals) -> bool:
    """Tell whether sizes are a strategy's; refuse them if not."""
    stages, ranks = len(source.stages), source.stage_size
    if stages != sizes.pp or ranks != sizes.stage_size:
        refusals.add(
            f"{source.label} is of {source.extent}, but {sizes} would be "
            f"{Strategy(({},) * sizes.pp, sizes.stage_size, '').extent}",
            f"Correct {refusals.src_flag}",
        )
        return False
    for layouts in source.stages:
        for name, layout in layouts.items():
            if layout.ranks != source.stage_size:
                refusals.add(
                    f"its device matrix is of {layout.ranks} ranks, others are of {ranks}",
                    "This is not derived: compile the destination's strategy",
                    name,
                )
    return True


def explain(
    parameters: Mapping[str, Parameter],
    sizes: Parallel,
    rules: Sequence[Rule],
    shapes: Mapping[str, Shape],
    refusals: Refusals,
) -> dict[str, tuple[Meaning, ...]]:
    """Return what the layout of each parameter may mean; rules are compared with it.

    Several meanings are of different meshes that have equal sizes.
    """
    known = cache(lambda layout: tuple(meanings(layout, sizes)))
    found: dict[str, tuple[Meaning, ...]] = {}
    for name, one in parameters.items():
        assert one.layout is not None
        plain = without_optimizer(one.layout)
        if one.layout.field or one.layout.split_rows:
            refusals.add(
                "an embedding in fields or uneven rows is the network's own",
                "This is not derived: compile the destination's strategy",
                name,
            )
            continue
        rule = rule_for(rules, name, "mesh", "spec")
        if rule is None:
            found[name] = known(plain)
            if not found[name]:
                refusals.add(
                    _misfit(plain, sizes), f"Correct {refusals.src_flag}{_OWN_RULES}", name
                )
            continue
        found[name] = _by_rule(rule, plain, known(plain), sizes, shapes.get(name))
        if not found[name]:
            refusals.add(
                f"{rule.label} contradicts the source, where device matrix "
                f"{list(plain.device_matrix)} with tensor map {plain.printable_map} was used with "
                f"{sizes}",
                "Change the rule, use another version of the preset, or correct "
                + refusals.src_flag,
                name,
            )
    _check_use([some for some in found.values() if some], sizes, refusals)
    return found


_OWN_RULES = (
    "; or where the network shards in its own way, give --rule 'REGEX=(tp, None)', or "
    "--dst-parallel same if the ranks of a stage stay as they are"
)


def _misfit(layout: Layout, sizes: Parallel) -> str:
    matrix = list(layout.device_matrix)
    axes = [mesh_axes(mesh, sizes) for mesh in MESHES]
    if any(one and tuple(size for _, size in one) == layout.device_matrix for one in axes):
        return (
            f"tensor map {layout.printable_map} on device matrix {matrix} shards it over a data "
            f"axis of {sizes}"
        )
    return f"device matrix {matrix} fits no mesh of {sizes}"


def _check_use(found: Sequence[tuple[Meaning, ...]], sizes: Parallel, refusals: Refusals) -> None:
    """Refuse stated axes that shard nothing, and sizes by which all parameters are experts'."""
    used = {axis for several in found for one in several for axis in one.axes}
    option = refusals.src_flag
    if found and all(one.mesh == EXPERT for several in found for one in several):
        refusals.add(f"with {sizes} every parameter would be an expert's", f"Correct {option}")
    for axis, name, size in (("tp", "mp", sizes.mp), ("ep", "ep", sizes.ep)):
        if size > 1 and axis not in used:
            refusals.add(f"no parameter is sharded over {name}={size}", f"Correct {option}")


def _by_rule(
    rule: Rule, plain: Layout, known: Sequence[Meaning], sizes: Parallel, shape: Shape | None
) -> tuple[Meaning, ...]:
    """Return what a rule says, if the source's layout agrees with it on every axis longer than 1.

    What of the source's job is not known may be either way.
    """
    if rule.spec is None:
        return tuple(one for one in known if one.mesh == rule.mesh)
    likely = [one.mesh for one in known]
    ways = [sizes]
    if rule.replicated_if and sizes.vocab_emb_dp is None:
        ways = [replace(sizes, vocab_emb_dp=way) for way in (True, False)]
    axes = len(rule.spec)
    either = [(sizes.mp * sizes.cp,) * axes, (1,) * axes]  # an extent that divides, and one not
    known_shapes = either if shape is None and rule.replicated_if else [shape]
    for way, extents in product(ways, known_shapes):
        for mesh in rule.meshes(likely):
            try:
                meant = layout_of(mesh, rule.meaning(mesh, way, extents).spec, way)
            except RequestError:
                continue
            if same_boxes(meant, plain):
                return (Meaning(mesh, rule.spec),)
    return ()


def rule_for(rules: Iterable[Rule], name: str, *stated_by: str) -> Rule | None:
    """Return the first rule that matches a name and says one of these things."""
    return next(
        (
            rule
            for rule in rules
            if any(getattr(rule, what) is not None for what in stated_by)
            and rule.names.search(name)
        ),
        None,
    )


def check_hidden(
    found: Mapping[str, tuple[Meaning, ...]],
    rules: Sequence[Rule],
    src: Parallel,
    dst: Parallel,
    unsharded: frozenset[str],
    refusals: Refusals,
) -> None:
    """Refuse axes that have size 1 in the source, where they cannot be seen, and more in `dst`."""
    experts = any(one.mesh == EXPERT for several in found.values() for one in several)
    for name, several in found.items():
        if rule_for(rules, name, "spec") or not several:
            continue
        seen = all(one.mesh in (LAYOUT, EXPERT) for one in several)
        grown = [("mp", src.mp, dst.mp)] if not seen else []
        grown += [("ep", src.ep, dst.ep)] if not experts else []
        for axis, before, after in grown:
            if before == 1 and after > 1:
                refusals.add(
                    f"{axis} is 1 in the source, so it does not show what {axis}={after} would "
                    "shard",
                    f"Give --preset, --rule 'REGEX=(tp, None)', or a source strategy with {axis} "
                    "above 1",
                    name,
                )
        if dst.cp > 1 and not seen and "cp" not in unsharded:
            refusals.add(
                f"the source does not show whether cp={dst.cp} shards it",
                "Give --preset, --rule, or --unsharded cp if cp shards no parameter (Llama's "
                "embedding only with vocab_emb_dp)",
                name,
            )
