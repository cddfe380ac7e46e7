"""Which parameters the optimizer shards at the destination, and so how they are sharded there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from rankxform.layout.layout import Layout, without_optimizer
from rankxform.layout.names import pattern_of

from .explain import NetworkParameter, Refusals, rule_for
from .mesh import Parallel
from .optimizer import divide, shard_by_optimizer
from .pipeline import in_layers
from .request import DeriveRequest


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
        takes_part[name] = _stated(request, name, value, refusals)
    return takes_part


def _stated(
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
    smallest = _smallest_sharded(request, layouts)
    takes_part: dict[str, bool | None] = {}
    for name, layout in layouts.items():
        extent = request.extents.get(name)
        if layout.opt_shards > 1:
            takes_part[name] = True
            if extent and extent.nbytes < threshold and may_shard(request):
                refusals.add(
                    f"is sharded by the optimizer, although it is smaller than "
                    f"{threshold // 1024} KiB",
                    "Give --src-threshold, the source's parallel_optimizer_threshold in KiB",
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


def _smallest_sharded(request: DeriveRequest, layouts: Mapping[str, Layout]) -> int:
    """Return the bytes of the smallest parameter with a shard: the threshold is not above it."""
    sharded = (request.extents.get(n) for n, layout in layouts.items() if layout.opt_shards > 1)
    return min((extent.nbytes for extent in sharded if extent), default=0)


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
