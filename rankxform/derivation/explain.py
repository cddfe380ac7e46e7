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
    MeshSpec,
    Parallel,
    layout_of,
    mesh_axes,
    mesh_specs,
)
from .rules import ShardingRule


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
        texts = []
        for (reason, answer), names in self._names.items():
            names_text = f":\n     {summarize_names(names, 4)}" if names else ""
            texts.append(f"{answer}:\n     {reason}{names_text}")
        return texts


@dataclass(frozen=True)
class NetworkParameter:
    """A parameter of a network, as a strategy or a checkpoint lists it."""

    layout: Layout | None  # None where no strategy says
    stages: tuple[int, ...]  # that list it
    # The names of the optimizer states that follow it, gradients that are never saved included.
    states: tuple[str, ...] = ()

    @property
    def trained(self) -> bool:
        """Whether an optimizer keeps states of it."""
        return bool(self.states)


def parameters_of(source: Strategy, refusals: Refusals) -> dict[str, NetworkParameter]:
    """Return the parameters that a strategy lists, in its order; states belong to theirs."""
    parameters: dict[str, NetworkParameter] = {}
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
            previous = parameters.get(name)
            if previous and previous.layout != layout:
                refusals.add(
                    "pipeline stages list it with different layouts",
                    "This is not derived: compile the destination's strategy",
                    name,
                )
            parameters[name] = NetworkParameter(
                layout, (*(previous.stages if previous else ()), stage)
            )
    return {n: replace(p, states=tuple(states.get(n, ()))) for n, p in parameters.items()}


def parameters_in(
    shapes: Mapping[str, Shape], listed: Sequence[ShardingRule], refusals: Refusals
) -> dict[str, NetworkParameter]:
    """Return the parameters of a checkpoint of whole tensors, whose full shapes are given.

    Tensors of one element that no rule names, such as a step, are left to "in no strategy".
    """
    parameters: dict[str, NetworkParameter] = {}
    states: dict[str, list[str]] = {}
    relations = find_states(shapes)
    for name, shape in shapes.items():
        base = relations.base_name(name)
        if base != name and base in shapes:
            if shapes[base] == shape:
                states.setdefault(base, []).append(name)
            else:
                refusals.add(
                    "an optimizer state has another shape than its parameter",
                    "This is not derived: compile the destination's strategy",
                    name,
                )
        elif relations.kind(name) != NEVER_SAVED and (
            any(length != 1 for length in shape) or any(rule.names.search(name) for rule in listed)
        ):
            parameters[name] = NetworkParameter(None, (0,))
    return {n: replace(p, states=tuple(states.get(n, ()))) for n, p in parameters.items()}


def sizes_fit(source: Strategy, sizes: Parallel, refusals: Refusals) -> bool:
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
    parameters: Mapping[str, NetworkParameter],
    sizes: Parallel,
    rules: Sequence[ShardingRule],
    shapes: Mapping[str, Shape],
    refusals: Refusals,
) -> dict[str, tuple[MeshSpec, ...]]:
    """Return what the layout of each parameter may mean; rules are compared with it.

    Several meanings are of different meshes that have equal sizes.
    """
    specs_of = cache(lambda layout: tuple(mesh_specs(layout, sizes)))
    specs_by_name: dict[str, tuple[MeshSpec, ...]] = {}
    for name, parameter in parameters.items():
        assert parameter.layout is not None
        plain = without_optimizer(parameter.layout)
        if parameter.layout.field or parameter.layout.split_rows:
            refusals.add(
                "an embedding in fields or uneven rows is the network's own",
                "This is not derived: compile the destination's strategy",
                name,
            )
            continue
        rule = rule_for(rules, name, "mesh", "spec")
        if rule is None:
            specs_by_name[name] = specs_of(plain)
            if not specs_by_name[name]:
                refusals.add(
                    _misfit(plain, sizes), f"Correct {refusals.src_flag}{_OWN_RULES}", name
                )
            continue
        specs_by_name[name] = _by_rule(rule, plain, specs_of(plain), sizes, shapes.get(name))
        if not specs_by_name[name]:
            refusals.add(
                f"{rule.label} contradicts the source, where device matrix "
                f"{list(plain.device_matrix)} with tensor map {plain.printable_map} was used with "
                f"{sizes}",
                "Change the rule, use another version of the preset, or correct "
                + refusals.src_flag,
                name,
            )
    _check_use([specs for specs in specs_by_name.values() if specs], sizes, refusals)
    return specs_by_name


_OWN_RULES = (
    "; or where the network shards in its own way, give --rule 'REGEX=(mp, None)', or "
    "--dst-parallel same if the ranks of a stage stay as they are"
)


def _misfit(layout: Layout, sizes: Parallel) -> str:
    matrix = list(layout.device_matrix)
    axes = [mesh_axes(mesh, sizes) for mesh in MESHES]
    if any(a and tuple(size for _, size in a) == layout.device_matrix for a in axes):
        return (
            f"tensor map {layout.printable_map} on device matrix {matrix} shards it over a data "
            f"axis of {sizes}"
        )
    return f"device matrix {matrix} fits no mesh of {sizes}"


def _check_use(
    all_specs: Sequence[tuple[MeshSpec, ...]], sizes: Parallel, refusals: Refusals
) -> None:
    """Refuse stated axes that shard nothing, and sizes by which all parameters are experts'."""
    used_axes = {axis for specs in all_specs for mesh_spec in specs for axis in mesh_spec.axes}
    option = refusals.src_flag
    if all_specs and all(mesh_spec.mesh == EXPERT for specs in all_specs for mesh_spec in specs):
        refusals.add(f"with {sizes} every parameter would be an expert's", f"Correct {option}")
    for axis, size in (("mp", sizes.mp), ("ep", sizes.ep)):
        if size > 1 and axis not in used_axes:
            refusals.add(f"no parameter is sharded over {axis}={size}", f"Correct {option}")


def _by_rule(
    rule: ShardingRule,
    plain: Layout,
    src_specs: Sequence[MeshSpec],
    sizes: Parallel,
    shape: Shape | None,
) -> tuple[MeshSpec, ...]:
    """Return what a rule says, if the source's layout agrees with it on every axis longer than 1.

    What of the source's job is not known may be either way.
    """
    if rule.spec is None:
        return tuple(mesh_spec for mesh_spec in src_specs if mesh_spec.mesh == rule.mesh)
    likely = [mesh_spec.mesh for mesh_spec in src_specs]
    possible_sizes = [sizes]
    if rule.replicated_if and sizes.vocab_emb_dp is None:
        possible_sizes = [replace(sizes, vocab_emb_dp=flag) for flag in (True, False)]
    axes = len(rule.spec)
    # An extent that divides, and one that does not.
    example_shapes = [(sizes.mp * sizes.cp,) * axes, (1,) * axes]
    known_shapes = example_shapes if shape is None and rule.replicated_if else [shape]
    for job_sizes, extents in product(possible_sizes, known_shapes):
        for mesh in rule.meshes(likely):
            try:
                rule_layout = layout_of(
                    mesh, rule.meaning(mesh, job_sizes, extents).spec, job_sizes
                )
            except RequestError:
                continue
            if same_boxes(rule_layout, plain):
                return (MeshSpec(mesh, rule.spec),)
    return ()


def rule_for(rules: Iterable[ShardingRule], name: str, *stated_by: str) -> ShardingRule | None:
    """Return the first rule that matches a name and says one of these things."""
    stating_rules = (r for r in rules if any(getattr(r, f) is not None for f in stated_by))
    return next((rule for rule in stating_rules if rule.names.search(name)), None)


def check_hidden(
    specs_by_name: Mapping[str, tuple[MeshSpec, ...]],
    rules: Sequence[ShardingRule],
    src: Parallel,
    dst: Parallel,
    unsharded: frozenset[str],
    refusals: Refusals,
) -> None:
    """Refuse axes that have size 1 in the source, where they cannot be seen, and more in `dst`."""
    experts = any(
        mesh_spec.mesh == EXPERT for specs in specs_by_name.values() for mesh_spec in specs
    )
    for name, specs in specs_by_name.items():
        if rule_for(rules, name, "spec") or not specs:
            continue
        has_all_axes = all(mesh_spec.mesh in (LAYOUT, EXPERT) for mesh_spec in specs)
        grown = [("mp", src.mp, dst.mp)] if not has_all_axes else []
        grown += [("ep", src.ep, dst.ep)] if not experts else []
        for axis, before, after in grown:
            if before == 1 and after > 1:
                refusals.add(
                    f"{axis} is 1 in the source, so it does not show what {axis}={after} would "
                    "shard",
                    f"Give --preset, --rule 'REGEX=(mp, None)', or a source strategy with {axis} "
                    "above 1",
                    name,
                )
        if dst.cp > 1 and not has_all_axes and "cp" not in unsharded:
            refusals.add(
                f"the source does not show whether cp={dst.cp} shards it",
                "Give --preset, --rule, or --unsharded cp if cp shards no parameter (Llama's "
                "embedding only with vocab_emb_dp)",
                name,
            )
