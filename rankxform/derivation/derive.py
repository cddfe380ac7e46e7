"""The derived strategy, and the optimizer's shard.

The source's layouts are explained (`explain`), or a preset's rules say what they
mean; the same meanings are then written for the destination's sizes as MindSpore's compiler writes
them. What follows holds if the network's ``shard()`` calls do not change. Whatever is not known is
refused, all at once, each reason with the option that answers it.

``frontend/parallel/parameter_manager.cc`` and ``ops_info/operator_info.cc`` decide it from the
layout alone, the full size and two settings; see `shard`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache

from rankxform.errors import DerivationError, RequestError
from rankxform.layout.layout import Layout, same_boxes, without_optimizer
from rankxform.layout.names import pattern_of, summarize_names
from rankxform.layout.states import NEVER_SAVED
from rankxform.layout.strategy import Strategy, describe_layout

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
from .mesh import EXPERT, FLAT, MeshSpec, Parallel, layout_of, print_spec
from .request import Derived, DeriveRequest, Extent, ShardingRow
from .rules import ShardingRule, matching_presets, mismatched_shapes, sizes_by_name
from .stages import assign_stages, in_layers


def shard_by_optimizer(layout: Layout, rows: int, nbytes: int, parallel: Parallel) -> Layout:
    """Return a layout with the optimizer's shard of a parameter that takes part in it.

    `rows` is the full extent of axis 0, `nbytes` the full size. There is no shard of a parameter
    below the threshold, where no two ranks hold the same slice, where the shard size does not
    divide the ranks that do, or where the slice's rows do not divide.

    >>> sharded = Parallel(optimizer_shard=True)
    >>> shard_by_optimizer(Layout((2, 4), ((0,), ())), 64, 1 << 20, sharded).opt_step
    4
    """
    if not parallel.shards or nbytes < parallel.threshold_bytes:
        return layout
    return divide(layout, rows, parallel.shard_size)


def divide(layout: Layout, rows: int, size: int | None) -> Layout:
    """Return a layout whose slices are divided among the ranks that hold them.

    size: into how many shards at most (None: as many as there are such ranks).
    """
    ranks = layout.free_ranks
    if ranks == 1 or not layout.tensor_map or (size and size < ranks and ranks % size):
        return layout
    count = min(size or ranks, ranks)
    if rows // layout.map_counts[0] % count:
        return layout
    return replace(layout, opt_step=_step(layout), opt_size=count if size else -1)


@cache
def _step(layout: Layout) -> int:
    """Return the distance between ranks that hold the same slice, as MindSpore computes it."""
    group = layout.holders[layout.cell(0)]
    return (group[-1] - group[0]) // (len(group) - 1)


def optimizer_shards(
    request: DeriveRequest, parameters: Mapping[str, NetworkParameter], refusals: Refusals
) -> dict[str, bool | None]:
    """Tell which parameters take part in the optimizer's shard; None where that is not known."""
    shown_by_name = _seen_taking_part(request, parameters, refusals)
    takes_part: dict[str, bool | None] = {}
    by_pattern: dict[str, set[bool]] = {}
    for name, value in shown_by_name.items():
        if value is not None:
            by_pattern.setdefault(pattern_of(name), set()).add(value)
    for name in parameters:
        pattern_flags = by_pattern.get(pattern_of(name), set())
        value = shown_by_name.get(name)
        if value is None and len(pattern_flags) == 1:
            value = next(iter(pattern_flags))
        takes_part[name] = _takes_part(request, name, value, refusals)
    return takes_part


def _takes_part(
    request: DeriveRequest, name: str, src_takes_part: bool | None, refusals: Refusals
) -> bool | None:
    """Return what the user or a rule says of a parameter, or else what was seen."""
    on, off = (
        any(pattern.search(name) for pattern in p) for p in (request.opt_on, request.opt_off)
    )
    if on and off:
        refusals.add("--opt-on and --opt-off both match it", "Change one of them", name)
    rule = rule_for(request.all_rules, name, "optimizer")
    decided, who = (on, f"--opt-{'on' if on else 'off'}") if on or off else (None, "")
    if decided is None and rule is not None:
        decided, who = rule.optimizer, rule.label
    if decided is None:
        return src_takes_part
    if src_takes_part is not None and src_takes_part is not decided:
        refusals.add(
            f"{who} contradicts the source, where it "
            + ("takes part" if src_takes_part else "does not take part")
            + " in the optimizer's shard",
            "Change the rule, or use another version of the preset",
            name,
        )
    return decided


def _seen_taking_part(
    request: DeriveRequest, parameters: Mapping[str, NetworkParameter], refusals: Refusals
) -> dict[str, bool | None]:
    """Tell what the source's layouts show: a shard, or none although one was possible."""
    source, src = request.source, request.src or Parallel()
    layouts = {name: parameter.layout for name, parameter in parameters.items() if parameter.layout}
    sharded = [layout for layout in layouts.values() if layout.opt_shards > 1]
    if source is None or not sharded:
        return {}
    if src.optimizer_shard is False:
        refusals.add(
            "the source's optimizer shards parameters, but its configuration says that it does not",
            "Correct --src-config",
        )
    threshold = src.threshold_bytes
    repeats = in_layers(parameters)
    extents = (request.extents.get(n) for n, layout in layouts.items() if layout.opt_shards > 1)
    smallest = min((extent.nbytes for extent in extents if extent), default=0)  # with a shard
    takes_part: dict[str, bool | None] = {}
    for name, layout in layouts.items():
        extent = request.extents.get(name)
        if layout.opt_shards > 1:
            takes_part[name] = True
            if extent and extent.nbytes < threshold and may_shard(request):
                refusals.add(
                    f"is sharded by the optimizer, although it is smaller than "
                    f"{threshold // 1024} KiB",
                    "Give --src-threshold, and --threshold if the destination's is another "
                    "(parallel.parallel_optimizer_config.parallel_optimizer_threshold, in KiB)",
                    name,
                )
            continue
        min_bytes = threshold if src.threshold is not None else max(threshold, smallest)
        possible = extent is not None and extent.nbytes >= min_bytes and len(extent.shape) > 0
        if not possible or _may_be_tied(request, parameters[name], name in repeats):
            takes_part[name] = None
            continue
        assert extent is not None
        limits = _limits(sharded, layout.free_ranks)
        would_be = [divide(without_optimizer(layout), extent.shape[0], limit) for limit in limits]
        certain = bool(would_be) and all(divided.opt_shards > 1 for divided in would_be)
        takes_part[name] = False if certain else None
    return takes_part


def _limits(sharded: Sequence[Layout], ranks: int) -> list[int | None]:
    """Return the source's optimizer_weight_shard_size, as the shards of its parameters show it.

    `ranks` hold the same slice of the parameter in question. None stands for no limit. There is no
    answer where every shard that is seen goes to all ranks, and they are fewer than these.
    """
    sizes = [layout.opt_size for layout in sharded]
    if -1 in sizes:
        return [None]
    exact = [layout.opt_size for layout in sharded if layout.opt_size < layout.free_ranks]
    if exact:
        return [max(exact)]
    return [None] if ranks <= max(sizes) else []


def may_shard(request: DeriveRequest) -> bool:
    """Tell whether the destination's optimizer may shard anything anew."""
    if request.predict or request.dst.optimizer_shard is False:
        return False
    return request.dst.optimizer_shard is not None or not request.keep_mesh


def _may_be_tied(request: DeriveRequest, parameter: NetworkParameter, is_layer: bool) -> bool:
    """Tell whether stages may share a parameter, which then has no shard in spite of its flag."""
    assert request.source is not None
    if len(request.source.stages) == 1:
        return False
    outside = parameter.stages == (0,) and not is_layer
    return len(parameter.stages) > 1 or (outside and request.dst.pp == 1)


def add_optimizer_shard(
    request: DeriveRequest,
    name: str,
    parameter: NetworkParameter,
    plain: Layout,
    takes_part: bool | None,
    shared: bool,
    refusals: Refusals,
) -> Layout | None:
    """Return a parameter's layout with the optimizer's shard; None if it is refused."""
    dst = replace(request.dst, optimizer_shard=False) if request.predict else request.dst
    if dst.optimizer_shard is None and request.keep_mesh:
        return parameter.layout
    if dst.optimizer_shard is False or takes_part is False or plain.free_ranks == 1:
        return plain
    extent = request.extents.get(name)
    if extent is None and dst.optimizer_shard is None:
        _refuse_unstated(refusals)
        return None
    if extent is None:
        refusals.add(
            "its shape decides whether the optimizer shards it, and is not known",
            "Give --shapes, a JSON file of full shapes or the checkpoint",
            name,
        )
        return None
    if not extent.shape:
        return plain
    on = dst if dst.shards else replace(dst, optimizer_shard=True)
    layout = shard_by_optimizer(plain, extent.shape[0], extent.nbytes, on)
    if layout is plain:
        return plain
    if dst.optimizer_shard is None:
        _refuse_unstated(refusals)
        return None
    if takes_part is None:
        refusals.add(
            "the source does not show whether it takes part in the optimizer's shard",
            "Give --opt-on REGEX or --opt-off REGEX (Parameter(parallel_optimizer=False)), "
            "or --preset",
            name,
        )
        return None
    if shared and not any(pattern.search(name) for pattern in (*request.opt_on, *request.opt_off)):
        refusals.add(
            "is shared by two pipeline stages, and whether MindSpore then shards it differs",
            "Give --opt-on REGEX or --opt-off REGEX",
            name,
        )
        return None
    return layout


def _refuse_unstated(refusals: Refusals) -> None:
    refusals.add(
        "whether the destination's optimizer shards parameters is not stated",
        "Give --optimizer-shard on (then with --shapes or the checkpoint), off, or the size "
        "(optimizer_weight_shard_size); or --predict",
    )


# All reasons are told at once because each answer given alone would cost a run. Refusing single
# parameters was tried: it was wrong in 44 pairs of compiled strategies, as the layouts that look
# plain may be meant otherwise too.


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
    is_on = request.dst.shards and not request.predict
    undivided = [n for n, a in layouts.items() if is_on and takes_part[n] is not False]
    undivided = [n for n in undivided if _is_undivided(request, layouts[n], request.extents.get(n))]
    return Derived(strategy, roles, _assumptions(request, undivided))


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


_OWN_PRESET = "Choose the network's own preset (of a publisher's names, transform with --map)"


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
        answer = f"Give {options_text}" if options_text else _OWN_PRESET
        raise DerivationError.of([f"{answer}:\n     {text}"])
    if unknown and preset.complete:
        refusals.add(
            f"{preset.label} has no rule for it",
            "Add --rule 'REGEX=(mp, None)', or choose the network's own preset",
            *unknown,
        )
    shapes = {name: extent for name, extent in request.shapes.items() if name in parameters}
    for name, expected_shape in mismatched_shapes(preset.rules, shapes).items():
        refusals.add(
            f"has shape {list(shapes[name])}, which {preset.label} expects as {expected_shape}",
            f"Correct {rule.label}"
            if (rule := rule_for(request.rules, name, "spec"))
            else f"Correct {refusals.dst_flag}, or choose the preset of this network and version",
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
        # Unknown names are refused then.
        is_complete = bool(request.preset and request.preset.complete)
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
                "Give --preset, or --rule 'REGEX=(mp, None)'",
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


def _is_undivided(request: DeriveRequest, layout: Layout, extent: Extent | None) -> bool:
    """Tell whether the optimizer would shard a parameter, if its slices' rows did divide."""
    return (
        layout.opt_shards == 1 < layout.free_ranks
        and extent is not None
        and extent.nbytes >= request.dst.threshold_bytes
        and bool(extent.shape)
    )


def _assumptions(request: DeriveRequest, undivided: Sequence[str]) -> tuple[str, ...]:
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
        source_text = (
            ", as in the source: --threshold states another" if request.takes_threshold else ""
        )
        texts.append(
            f"The optimizer shards parameters of {request.dst.threshold_bytes // 1024} KiB or "
            f"more{source_text}."
        )
    elif request.dst.optimizer_shard is None and may_shard(request) and request.dst.dp > 1:
        texts.append(
            "Whether the optimizer shards is not stated: parameters of fewer than "
            f"{request.dst.threshold_bytes // 1024} KiB, as all are, it does not (--threshold)."
        )
    if undivided:
        texts.append(
            f"It does not shard {len(undivided)} of these, whose slices do not divide among the "
            f"ranks that hold them: {summarize_names(undivided, 3)}."
        )
    return tuple(texts)
