"""Which parameters are converted, which are not, and why.

A strategy file lists what the compiler sharded. What only one of the two files lists is either
optimizer state that the destination has no use for, or a question that the user must answer.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import field

from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.formats.dtype import BYTES, content_bytes
from rankxform.layout.layout import Layout, whole_layout
from rankxform.layout.names import patterns, summarize_names
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.ops.base import OperationChain, Tensor
from rankxform.values import dataclass

from .catalog import Catalog, Parameter
from .derived import ParameterFactory, apply_operations, by_source
from .losses import missing_slices_error
from .table import add_followers, layout_with_uneven_rows

_STATE = "optimizer state that the destination strategy does not list"
_UNMATCHED = "only one of the two strategies lists it"
ERROR, DROP, REPLICATE = UNMATCHED = ("error", "drop", "replicate")


@dataclass(frozen=True)
class OmittedParameters:
    """Parameters that are not written, and why."""

    reason: str
    names: tuple[str, ...]
    nbytes: int
    # Of states: name -> family, such as "adam_m.*".
    families: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def facts(self) -> dict[str, object]:
        """Why, patterns of the names, and bytes, for JSON."""
        return {"why": self.reason, "names": patterns(self.names), "nbytes": self.nbytes}


@dataclass(frozen=True)
class Selection:
    """The parameters to convert, by the names that they get.

    sharded: converted from the source's layout to the destination's.
    replicated: whole on every destination rank, as one source rank holds it.
    left_out: what is not written.
    absent: names that the strategies list and no file holds.
    made_of: by name of a source tensor, which parameters come where it stands in the files.
    composed: whether tensors may be made of several, or under names that others have.
    name_of: tells what a source tensor is called at the destination, as far as its name tells.
    """

    sharded: Mapping[str, Parameter]
    replicated: Mapping[str, Parameter]
    left_out: tuple[OmittedParameters, ...]
    absent: tuple[str, ...]
    made_of: Mapping[str, tuple[str, ...]]
    composed: bool = False
    name_of: Callable[[str], str] = field(default=str, compare=False)

    def in_place_of(self, name: str) -> tuple[str, ...]:
        """Return which parameters come where a source tensor stands in the files."""
        return self.made_of.get(name, ())

    def sources(self, catalog: Catalog) -> list[Parameter]:
        """Return the source tensors that the sharded parameters are made of, in their order."""
        return sources_of(self.sharded.values(), catalog)

    @property
    def parameters(self) -> list[Parameter]:
        return [*self.sharded.values(), *self.replicated.values()]


def sources_of(parameters: Iterable[Parameter], catalog: Catalog) -> list[Parameter]:
    """Return the source tensors that parameters are made of, in their order."""
    stored = {parameter.src_name: parameter for parameter in catalog.parameters}
    names = (name for p in parameters for name in p.src_names or (p.src_name,))
    return [stored[name] for name in dict.fromkeys(names)]


def select_parameters(
    catalog: Catalog,
    dst: Strategy,
    derivation: OperationChain | None = None,
    unmatched: str = ERROR,
    ranks: Iterable[int] = (),
    tensors: Sequence[Tensor] | None = None,
    non_followers: Collection[str] = (),
) -> Selection:
    """Decide for every parameter of the source what becomes of it.

    `ranks` are the destination ranks to make (default: all); what is lost for others is no error.
    `derivation` tells what becomes of each; `tensors` is that, if it is known already. `unmatched`
    says what happens to one that only one strategy lists: "error"; "drop"; or "replicate", which
    takes the side that does not list it to hold it whole on every rank. `non_followers`: see
    `add_destination_followers`. Raises RequestError for unmatched names, UsageError where nothing
    is left to convert.
    """
    derivation = derivation or OperationChain()
    sharded: dict[str, Parameter] = {}
    replicated: dict[str, Parameter] = {}
    reasons: dict[str, list[Parameter]] = {}
    make = ParameterFactory(catalog)
    all_tensors = apply_operations(catalog, derivation) if tensors is None else tensors
    for tensor in all_tensors:
        parameter = make.parameter(tensor)
        if tensor.dropped:
            reasons.setdefault(tensor.dropped, []).append(parameter)
            continue
        name, is_in_dst = (
            parameter.name,
            parameter.name in dst and not isinstance(dst, WholeStrategy),
        )
        declared = parameter.declared and parameter.src_name not in non_followers
        is_in_src = declared and not catalog.is_whole and not _is_in_no_strategy(parameter)
        if parameter.value is not None:  # no strategy speaks of what no file holds
            replicated[name] = parameter
        elif name in dst and declared:
            sharded[name] = parameter
        elif declared and parameter.base_name in dst:
            reasons.setdefault(_STATE, []).append(parameter)
        elif not is_in_src and not is_in_dst:
            replicated[name] = parameter
        elif unmatched == REPLICATE:
            (sharded if is_in_dst else replicated)[name] = parameter
        else:
            reasons.setdefault(_UNMATCHED, []).append(parameter)
    if not any(p.state for p in (*sharded.values(), *replicated.values())):
        replicated = {name: p for name, p in replicated.items() if p.value is None}
    left_out = tuple(_left_out(r, p) for r, p in sorted(reasons.items(), key=_order))
    parameters = [*sharded.values(), *replicated.values()]
    if derivation.renames:
        missing = set(dst.stages_of) - set(sharded) - set(replicated)
    else:
        declared_names = catalog.strategy.stages_of if catalog.strategy is not None else ()
        missing = {*map(derivation.name_of, declared_names), *dst.stages_of}
        missing -= {derivation.name_of(parameter.name) for parameter in catalog.parameters}
    selection = Selection(
        sharded, replicated, left_out, tuple(sorted(missing)), by_source(parameters),
        derivation.renames, derivation.name_of,
    )  # fmt: skip
    refused = reasons.get(_UNMATCHED, []) if unmatched == ERROR else []
    _check(selection, catalog, dst, refused, _lost(catalog, dst, ranks, derivation), derivation)
    _check_names(dst, all_tensors)
    return selection


def _check_names(dst: Strategy, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that a strategy hardly knows, where those that it does know are not there.

    One name may be the same in every naming of a model, such as that of its head.
    """
    if not dst.stages_of or isinstance(dst, WholeStrategy):
        return
    weight_names = {tensor.name for tensor in tensors if tensor.is_weight}
    listed = {name for name in dst.stages_of if dst.states.of(name) is None}
    common_names = weight_names & listed
    any_known = any(tensor.name in dst or tensor.base_name in dst for tensor in tensors)
    if any_known and (
        2 * len(common_names) >= len(weight_names) or 2 * len(common_names) >= len(listed)
    ):
        return
    count_text = (
        f"{len(common_names)} of the {len(weight_names)}" if common_names else "none of the"
    )
    unknown = next((tensor.name for tensor in tensors if tensor.name not in dst), tensors[0].name)
    raise RequestError(
        f"{dst.label} lists {count_text} tensors, and not {unknown}; it lists "
        f"{summarize_names(sorted(listed - weight_names) or list(dst.stages_of), 1)}",
        "translate the names (--map, --rename)",
        "give this network's strategy",
    )


def _is_in_no_strategy(parameter: Parameter) -> bool:
    """Tell whether no strategy lists such a thing: a counter, or what is no tensor."""
    is_counter = not parameter.is_weight and parameter.state is None
    return parameter.dtype == BYTES or is_counter


def add_destination_followers(
    catalog: Catalog, dst: Strategy, derivation: OperationChain
) -> tuple[Strategy, frozenset[str]]:
    """Return a destination's strategy with the states that follow parameters.

    Jobs that shard by pattern list no states, so one that neither side lists follows its parameter
    on both. Names of those that the destination alone lists are returned too: these do not follow.
    """
    if derivation.renames or isinstance(dst, WholeStrategy):
        return dst, frozenset()
    follows = {p.name: p.follows for p in catalog.parameters if p.follows is not None}
    non_followers = frozenset(name for name in follows if derivation.name_of(name) in dst)
    bases_by_state = {
        derivation.name_of(name): derivation.name_of(base)
        for name, base in follows.items()
        if name not in non_followers
    }
    return (add_followers(dst, bases_by_state) if bases_by_state else dst), non_followers


def _check(
    selection: Selection,
    catalog: Catalog,
    dst: Strategy,
    refused: list[Parameter],
    ranks_by_name: Mapping[str, tuple[int, ...]],
    derivation: OperationChain,
) -> None:
    """Refuse a selection that cannot be meant: of unmatched names, with losses, or of nothing."""
    if refused and not selection.sharded:
        raise _foreign_error(refused, catalog, dst)
    if ranks_by_name:
        raise missing_slices_error(catalog, selection.sources(catalog), ranks_by_name)
    if refused:
        raise _unmatched_error(refused, catalog, dst, derivation)
    if not catalog.parameters:
        raise CheckpointError("holds no tensor", where=_first(catalog.paths))
    if not selection.parameters:
        raise UsageError("no parameter is left to convert", "check --include and --exclude")
    if not catalog.declared:
        raise RequestError(
            f"{catalog.label} lists none of the parameters in {_first(catalog.paths)}; "
            "it is the strategy of another network, or of another stage"
        )


def _order(reason: tuple[str, list[Parameter]]) -> int:
    ordered_reasons = (_STATE, _UNMATCHED)
    return (
        ordered_reasons.index(reason[0]) if reason[0] in ordered_reasons else len(ordered_reasons)
    )


def destination_layout(selection: Selection, dst: Strategy, name: str, stage: int) -> Layout | None:
    """Return how ranks of destination `stage` shard `name`, or None where they do not hold it."""
    if name in selection.replicated:
        return whole_layout(len(selection.replicated[name].shape))
    parameter = selection.sharded[name]
    if name not in dst or stage not in dst.stages_of.get(name, (0,)):
        return None
    return layout_with_uneven_rows(dst, name, stage, len(parameter.shape))


def _lost(
    catalog: Catalog, dst: Strategy, ranks: Iterable[int], derivation: OperationChain
) -> dict[str, tuple[int, ...]]:
    """Return the names that `ranks` (none: all) should get and that no file holds."""
    dst_stages = {dst.stage_of(rank) for rank in ranks} or set(range(len(dst.stages)))
    return {
        name: missing
        for name, missing in catalog.unreachable.items()
        if not derivation.drops(name)
        and (derivation.renames or (new := derivation.name_of(name)) in dst)
        and (derivation.renames or dst_stages.intersection(dst.stages_of.get(new, dst_stages)))
    }


def _left_out(reason: str, parameters: list[Parameter]) -> OmittedParameters:
    nbytes = sum(content_bytes(p.src_dtype, p.shape) for p in parameters)
    states = {p.name: p.state for p in parameters if p.state is not None}
    families = {name: state.family for name, state in states.items() if state.parameter != name}
    return OmittedParameters(reason, tuple(p.name for p in parameters), nbytes, families)


def _foreign_error(refused: Sequence[Parameter], catalog: Catalog, dst: Strategy) -> RequestError:
    """Return that no parameter is in both strategies, and which of them lists none."""
    names = summarize_names([parameter.name for parameter in refused], 3)
    by_source = sum(parameter.declared for parameter in refused)
    if 0 < by_source < len(refused):
        message = f"{catalog.label} and {dst.label} share none of the checkpoint's parameters"
        return RequestError(f"{message}, such as {names}; one of them is another network's")
    listing_side, foreign_side, side = (
        (catalog, dst, "--dst-strategy") if by_source else (dst, catalog, "--src-strategy")
    )
    return RequestError(
        f"{foreign_side.label} lists none of the checkpoint's parameters, and {listing_side.label} "
        "lists them",
        f"{side} of this network, which has {names}",
        "translate the names (--map, --rename)",
        details=f"{foreign_side.label} is another network's, or calls its parameters otherwise",
    )


def _unmatched_error(
    alone: list[Parameter], catalog: Catalog, dst: Strategy, derivation: OperationChain
) -> RequestError:
    parts = []
    for label, names in (
        (catalog.label, [p.src_name for p in alone if p.declared]),
        (dst.label, [p.name for p in alone if not p.declared]),
    ):
        if names:
            parts.append(f"only {label} lists {summarize_names(names, 3)}")
    renamed = any(derivation.name_of(p.name) != p.name for p in catalog.parameters)
    return RequestError(
        "; ".join(parts),
        "--unmatched drop",
        "--unmatched replicate if every rank of the side that does not list them holds them whole",
        details=f"with --rename, {dst.label} must list the new names" if renamed else "",
    )


def _first(paths: Mapping[int, str]) -> str:
    return paths[min(paths)] if paths else "the source"
