"""The strategy of a job that was never compiled, from another strategy and both jobs' sizes.

The source's layouts are explained (`explain`), or a preset's rules say what they
mean; the same meanings are then written for the destination's sizes as MindSpore's compiler writes
them. What follows holds if the network's ``shard()`` calls do not change. Whatever is not known is
refused, all at once, each reason with the option that answers it.
"""

# All reasons are told at once because each answer given alone would cost a run. Refusing single
# parameters was tried: it was wrong in 44 pairs of compiled strategies, as the layouts that look
# plain may be meant otherwise too.

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankxform.derivation.presets import matching_presets
from rankxform.errors import DerivationError, RequestError
from rankxform.layout.differences import describe_layout
from rankxform.layout.layout import Layout, same_boxes, without_optimizer
from rankxform.layout.names import pattern_of
from rankxform.layout.states import NEVER_SAVED
from rankxform.layout.strategy import Strategy

from .explain import (
    NetworkParameter,
    Refusals,
    check_hidden,
    explain,
    parameters_in,
    parameters_of,
    rule_for,
    sizes_fit,
)
from .mesh import EXPERT, FLAT, MeshSpec, layout_of, print_spec
from .participation import add_optimizer_shard, may_shard, optimizer_shards
from .pipeline import in_layers
from .place import assign_stages
from .request import Derived, DeriveRequest, Extent, ShardingRow
from .rules import ShardingRule, mismatched_shapes, sizes_by_name


def derive(request: DeriveRequest, label: str = "derived") -> Derived:
    """Derive the destination's strategy. Raises DerivationError with all that stands against it."""
    refusals = Refusals(request.src_flag, request.dst_flag)
    source, rules = request.source, request.all_rules
    if source is None:
        parameters = parameters_in(request.shapes, rules, refusals)
    else:
        parameters = parameters_of(source, refusals)
    if not parameters:
        refusals.add("there is no parameter", "Give the strategy or the shapes of a network")
    _check_patterns(request, parameters, refusals)
    _check_preset(request, parameters, refusals)
    specs_by_name = _meanings(request, parameters, refusals)
    takes_part = optimizer_shards(request, parameters, refusals)
    stages = assign_stages(request.stage_layers, parameters, rules, request.dst.pp, refusals)
    layouts: dict[str, Layout] = {}
    for name, parameter in parameters.items():
        plain = _plain(request, name, parameter, specs_by_name.get(name), refusals)
        if plain is None:
            continue
        shared = len(stages.get(name, ())) > 1
        layout = add_optimizer_shard(
            request, name, parameter, plain, takes_part[name], shared, refusals
        )
        if layout is not None:
            layouts[name] = layout
    if refusals:
        asks = any("--preset" in text for text in refusals.texts())
        fitting = matching_presets(parameters) if asks and request.preset is None else ()
        tries = [f"--preset {name}, which knows all names" for name in fitting]
        raise DerivationError.of(refusals.texts(), tries=tries)
    strategy = _strategy(request, parameters, layouts, stages, label)
    roles = _roles(request, parameters, specs_by_name, takes_part, layouts)
    return Derived(strategy, roles, _assumptions(request))


def _check_patterns(
    request: DeriveRequest, parameters: Mapping[str, NetworkParameter], refusals: Refusals
) -> None:
    """Refuse what the user says of names that are not there."""
    rules = (*request.rules, *request.places.placed)
    labelled = [(rule.label, rule.names) for rule in rules]
    for flag, patterns in (("--opt-on", request.opt_on), ("--opt-off", request.opt_off)):
        labelled += [(f"{flag} {regex.pattern!r}", regex) for regex in patterns]
    for label, pattern in labelled:
        if not any(pattern.search(name) for name in parameters):
            refusals.add(f"{label} matches no parameter", "Change it, or leave it out")


def _check_preset(
    request: DeriveRequest, parameters: Mapping[str, NetworkParameter], refusals: Refusals
) -> None:
    """Refuse a preset that does not know every name, or whose shapes are others."""
    preset = request.preset
    if preset is None:
        return
    unknown = [n for n in parameters if rule_for(request.all_rules, n, "spec") is None]
    # A rule may state a stage or the optimizer alone, and leave the rest to the source's strategy.
    is_matched = any(rule.names.search(name) for name in parameters for rule in request.all_rules)
    if parameters and not is_matched:
        options_text = " or ".join(f"--preset {name}" for name in matching_presets(parameters))
        text = f"{preset.label} has no rule for any parameter"
        answer = f"Give {options_text}" if options_text else "Choose the network's own preset"
        raise DerivationError.of([f"{answer}:\n     {text}"])
    if unknown and preset.complete:
        refusals.add(
            f"{preset.label} has no rule for it",
            "Add --rule 'REGEX=(tp, None)', or choose the network's own preset",
            *unknown,
        )
    shapes = {name: extent for name, extent in request.shapes.items() if name in parameters}
    for name, expected_shape in mismatched_shapes(preset.rules, shapes).items():
        refusals.add(
            f"has shape {list(shapes[name])}, which {preset.label} expects as {expected_shape}",
            "Choose the preset of this network and version",
            name,
        )
    experts, ep = sizes_by_name(preset.rules, shapes).get("experts", 0), request.dst.ep
    if experts % ep:
        refusals.add(f"{experts} experts do not divide by ep={ep}", f"Change {refusals.dst_flag}")
    for name, value, reason in preset.requires:
        if getattr(request.dst, name) is not value and request.dst.mp > 1 and not request.keep_mesh:
            refusals.add(
                f"{preset.label} is proven for {name}={str(value).lower()} only, because {reason}",
                f"State {name}={str(value).lower()} in {refusals.dst_flag}, if that is so; else "
                "compile the destination's strategy",
            )


def _meanings(
    request: DeriveRequest, parameters: Mapping[str, NetworkParameter], refusals: Refusals
) -> Mapping[str, tuple[MeshSpec, ...]]:
    """Return by which meshes and specs each parameter may be sharded, as far as that is needed."""
    source, src, dst, rules = request.source, request.src, request.dst, request.all_rules
    if request.keep_mesh:
        return {}
    if source is None:
        is_complete = bool(
            request.preset and request.preset.complete
        )  # unknown names are refused then
        return _meanings_by_rule(parameters, rules, None if is_complete else refusals)
    assert src is not None
    if not sizes_fit(source, src, refusals):
        return {}
    specs_by_name = explain(parameters, src, rules, request.shapes, refusals)
    check_hidden(specs_by_name, rules, src, dst, request.unsharded, refusals)
    for flag in ("vocab_emb_dp", "use_seq_parallel"):
        before, after = getattr(src, flag), getattr(dst, flag)
        if before != after and request.preset is None and max(src.mp, dst.mp) > 1:
            refusals.add(
                f"{flag} is {_flag(before)} in the source and {_flag(after)} in the destination; "
                "which parameters depend on it, only a preset knows",
                f"Give --preset; or state {flag} for both, if it is the same",
            )
    _check_vocabulary(request, specs_by_name, refusals)
    return specs_by_name


def _check_vocabulary(
    request: DeriveRequest, specs_by_name: Mapping[str, tuple[MeshSpec, ...]], refusals: Refusals
) -> None:
    """Refuse to guess vocab_emb_dp where the source replicates what looks like a vocabulary.

    That is a matrix outside the layers which is not sharded although the job has tensor parallel.
    """
    src, dst = request.src, request.dst
    if src is None or dst.vocab_emb_dp is not None or min(src.mp, dst.mp) == 1:
        return
    repeats = in_layers(specs_by_name)
    for name, specs in specs_by_name.items():
        plain = specs and len(specs[0].spec) > 1 and not any(mesh_spec.axes for mesh_spec in specs)
        if plain and name not in repeats and not rule_for(request.all_rules, name, "spec"):
            refusals.add(
                f"is replicated although mp={src.mp}, as with vocab_emb_dp; whether the "
                "destination's job replicates it too is not stated",
                f"State vocab_emb_dp=true or vocab_emb_dp=false in {refusals.src_flag} and "
                f"{refusals.dst_flag}, or give --preset",
                name,
            )


def _flag(value: bool | None) -> str:
    return "not stated" if value is None else str(value).lower()


def _meanings_by_rule(
    parameters: Mapping[str, NetworkParameter],
    rules: Sequence[ShardingRule],
    refusals: Refusals | None,
) -> dict[str, tuple[MeshSpec, ...]]:
    specs_by_name: dict[str, tuple[MeshSpec, ...]] = {}
    for name in parameters:
        rule = rule_for(rules, name, "spec")
        if rule is None:
            if refusals is None:
                continue
            refusals.add(
                "no rule says how it is sharded, and there is no source strategy",
                "Give --preset, or --rule 'REGEX=(tp, None)'",
                name,
            )
            continue
        assert rule.spec is not None
        specs_by_name[name] = (MeshSpec(rule.meshes()[0], rule.spec),)
    return specs_by_name


def _plain(
    request: DeriveRequest,
    name: str,
    parameter: NetworkParameter,
    specs: tuple[MeshSpec, ...] | None,
    refusals: Refusals,
) -> Layout | None:
    """Return a parameter's layout at the destination, without the optimizer's shard."""
    if request.keep_mesh:
        assert parameter.layout is not None
        if (parameter.layout.field or parameter.layout.split_rows) and may_shard(request):
            refusals.add(
                "an embedding in fields or uneven rows is the network's own",
                "Leave --optimizer-shard out, or compile the destination's strategy",
                name,
            )
        return without_optimizer(parameter.layout)
    if not specs:
        return None  # refused already
    dst, extent = request.dst, request.extents.get(name)
    rule = rule_for(request.all_rules, name, "spec")
    layouts = []
    for mesh, spec in specs:
        try:
            dst_spec = (
                rule.meaning(mesh, dst, extent.shape if extent else None).spec if rule else spec
            )
            layouts.append(layout_of(mesh, dst_spec, dst))
        except RequestError as error:
            refusals.add(str(error), _answer(str(error), refusals.dst_flag), name)
            return None
    if not all(same_boxes(layouts[0], layout) for layout in layouts[1:]):
        refusals.add(
            f"is sharded over {' or '.join(map(str, specs))}, which have the same sizes in the "
            "source",
            "Give --preset, or --rule 'REGEX=expert' for what belongs to experts",
            name,
        )
        return None
    return layouts[0] if _divides(layouts[0], name, extent, refusals) else None


def _answer(reason: str, dst_flag: str) -> str:
    if "vocab_emb_dp, which" in reason:
        return f"State vocab_emb_dp=true or vocab_emb_dp=false in {dst_flag}"
    if "shape" in reason:
        return "Give --shapes, a JSON file of full shapes or the checkpoint"
    return f"Change {dst_flag}, or compile the destination's strategy"


def _divides(layout: Layout, name: str, extent: Extent | None, refusals: Refusals) -> bool:
    if extent is None:
        return True
    if len(extent.shape) != len(layout.tensor_map):
        refusals.add(
            f"has {len(extent.shape)} axes, but its spec has {len(layout.tensor_map)}",
            "Change the rule, or give the checkpoint of this strategy",
            name,
        )
        return False
    for axis, (length, count) in enumerate(zip(extent.shape, layout.map_counts)):
        if length % count:
            refusals.add(
                f"axis {axis} of shape {list(extent.shape)} does not divide by {count}",
                f"Change {refusals.dst_flag}; MindSpore's compiler refuses this too",
                name,
            )
            return False
    return True


# -- what comes of it -----------------------------------------------------------------------------


def _strategy(
    request: DeriveRequest,
    parameters: Mapping[str, NetworkParameter],
    layouts: Mapping[str, Layout],
    stages: Mapping[str, tuple[int, ...]],
    label: str,
) -> Strategy:
    """Collect the layouts by stage, states beside their parameters."""
    pp = request.dst.pp
    layouts_by_stage: list[dict[str, Layout]] = [{} for _ in range(pp)]
    src_pp = len(request.source.stages) if request.source else 1
    for name, parameter in parameters.items():
        states: list[str] = []
        if not request.predict:
            gradients = f"{NEVER_SAVED}.{name}"
            states = [state for state in parameter.states if state != gradients]
            if (pp > 1 and parameter.trained) or (
                pp == src_pp == 1 and gradients in parameter.states
            ):
                states.append(gradients)
        for stage in stages[name]:
            layouts_by_stage[stage].update((n, layouts[name]) for n in (name, *states))
    size = max(layout.ranks for layout in layouts.values()) if layouts else request.dst.stage_size
    return Strategy(tuple(layouts_by_stage), size, label, derived=True)


def _roles(
    request: DeriveRequest,
    parameters: Mapping[str, NetworkParameter],
    specs_by_name: Mapping[str, tuple[MeshSpec, ...]],
    takes_part: Mapping[str, bool | None],
    layouts: Mapping[str, Layout],
) -> tuple[ShardingRow, ...]:
    rows: dict[tuple[str, ...], int] = {}
    has_no_shards = request.predict or request.dst.optimizer_shard is False
    words = {True: "yes", False: "no", None: "-"}
    for name, parameter in parameters.items():
        rule = None if request.keep_mesh else rule_for(request.all_rules, name, "spec")
        spec = (
            "as it is"
            if request.keep_mesh
            else _spec_in_words(request, name, specs_by_name[name], rule)
        )
        row = (
            pattern_of(name),
            spec,
            "-" if has_no_shards else words[takes_part[name]],
            format_layout(parameter.layout) if parameter.layout else "whole",
            format_layout(layouts[name]),
            describe_layout(parameter.layout) if parameter.layout else "whole",
            describe_layout(layouts[name]),
        )
        rows[row] = rows.get(row, 0) + 1
    return tuple(ShardingRow(pattern, number, *words) for (pattern, *words), number in rows.items())


def _spec_in_words(
    request: DeriveRequest, name: str, specs: tuple[MeshSpec, ...], rule: ShardingRule | None
) -> str:
    """Write the spec at the destination, and whether a rule replicates the parameter there."""
    mesh, spec = specs[0]
    extent, suffix = request.extents.get(name), ""
    if rule and rule.spec is not None:
        spec = rule.meaning(mesh, request.dst, extent.shape if extent else None).spec
        suffix = "" if spec == rule.spec else ", replicated"
    return (mesh if mesh in (EXPERT, FLAT) else "") + print_spec(spec) + suffix


def format_layout(layout: Layout) -> str:
    """Write a layout as a strategy file has it, in one line.

    >>> format_layout(Layout((2, 4), ((0,), ()), 4, -1))
    '[2, 4] [0, -1] 4 -1'
    """
    shards = f" {layout.opt_step} {layout.opt_size}" if layout.opt_size else ""
    return f"{list(layout.device_matrix)} {layout.printable_map}{shards}"


def _assumptions(request: DeriveRequest) -> tuple[str, ...]:
    texts = ["This holds if the network's shard() calls do not change."]
    if request.preset is None and request.dst.vocab_emb_dp is None and not request.keep_mesh:
        texts[0] += (
            " They may depend on vocab_emb_dp and use_seq_parallel: these are taken as equal."
        )
    if not request.keep_mesh:
        src_text = f"; the source's has {request.src}" if request.src else ""
        texts.insert(0, f"The destination's job has {request.dst}{src_text}.")
    if request.preset:
        proof = (
            f"was proven on {request.preset.networks}" if request.preset.networks else "is yours"
        )
        texts.append(f"{request.preset.label} {proof}.")
        if not request.preset.proven:
            texts[-1] = f"{request.preset.label} is NOT proven: {request.preset.evidence}."
    stages = len(request.source.stages) if request.source else 1
    if stages == request.dst.pp > 1 and not request.places.says_counts:
        texts.append("Layers are taken to be on the pipeline stages where the source has them.")
    if request.dst.shards and not request.predict:
        texts.append(
            f"The optimizer shards parameters of {request.dst.threshold_bytes // 1024} KiB or more."
        )
    return tuple(texts)
