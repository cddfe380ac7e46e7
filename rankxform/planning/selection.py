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
from rankxform.ops.base import Derivation, Tensor
from rankxform.values import dataclass

from .catalog import Catalog, Parameter
from .derived import TensorMaker, by_source, tensors_of
from .losses import losses_error
from .table import effective_layout, with_states

_STATE = "optimizer state that the destination strategy does not list"
_UNMATCHED = "only one of the two strategies lists it"
ERROR, DROP, REPLICATE = UNMATCHED = ("error", "drop", "replicate")


@dataclass(frozen=True)
class LeftOut:
    """Parameters that are not written, and why."""

    why: str
    names: tuple[str, ...]
    nbytes: int
    # Of states: name -> family, such as "adam_m.*".
    families: Mapping[str, str] = field(default_factory=dict, compare=False)

    @property
    def facts(self) -> dict[str, object]:
        """Why, patterns of the names, and bytes, for JSON."""
        return {"why": self.why, "names": patterns(self.names), "nbytes": self.nbytes}


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
    left_out: tuple[LeftOut, ...]
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


def select(
    catalog: Catalog,
    dst: Strategy,
    derivation: Derivation | None = None,
    unmatched: str = ERROR,
    ranks: Iterable[int] = (),
    tensors: Sequence[Tensor] | None = None,
    apart: Collection[str] = (),
) -> Selection:
    """Decide for every parameter of the source what becomes of it.

    `ranks` are the destination ranks to make (default: all); what is lost for others is no error.
    `derivation` tells what becomes of each; `tensors` is that, if it is known already. `unmatched`
    says what happens to one that only one strategy lists: "error"; "drop"; or "replicate", which
    takes the side that does not list it to hold it whole on every rank. `apart`: see
    `with_followers`. Raises RequestError for unmatched names, UsageError where nothing is left to
    convert.
    """
    derivation = derivation or Derivation()
    sharded: dict[str, Parameter] = {}
    replicated: dict[str, Parameter] = {}
    reasons: dict[str, list[Parameter]] = {}
    make = TensorMaker(catalog)
    every = tensors_of(catalog, derivation) if tensors is None else tensors
    for tensor in every:
        parameter = make.parameter(tensor)
        if tensor.dropped:
            reasons.setdefault(tensor.dropped, []).append(parameter)
            continue
        name, there = parameter.name, parameter.name in dst and not isinstance(dst, WholeStrategy)
        declared = parameter.declared and parameter.src_name not in apart
        here = declared and not catalog.is_whole and not _is_in_no_strategy(parameter)
        if parameter.value is not None:  # no strategy speaks of what no file holds
            replicated[name] = parameter
        elif name in dst and declared:
            sharded[name] = parameter
        elif declared and parameter.base_name in dst:
            reasons.setdefault(_STATE, []).append(parameter)
        elif not here and not there:
            replicated[name] = parameter
        elif unmatched == REPLICATE:
            (sharded if there else replicated)[name] = parameter
        else:
            reasons.setdefault(_UNMATCHED, []).append(parameter)
    if not any(p.state for p in (*sharded.values(), *replicated.values())):
        replicated = {name: p for name, p in replicated.items() if p.value is None}
    left_out = tuple(
        _left_out(reason, some) for reason, some in sorted(reasons.items(), key=_order)
    )
    chosen = [*sharded.values(), *replicated.values()]
    if derivation.renames:
        missing = set(dst.stages_of) - set(sharded) - set(replicated)
    else:
        stated = catalog.strategy.stages_of if catalog.strategy is not None else ()
        missing = {*map(derivation.name_of, stated), *dst.stages_of}
        missing -= {derivation.name_of(parameter.name) for parameter in catalog.parameters}
    found = Selection(
        sharded, replicated, left_out, tuple(sorted(missing)), by_source(chosen),
        derivation.renames, derivation.name_of,
    )  # fmt: skip
    refused = reasons.get(_UNMATCHED, []) if unmatched == ERROR else []
    _check(found, catalog, dst, refused, _lost(catalog, dst, ranks, derivation), derivation)
    _check_names(dst, every)
    return found


def _check_names(dst: Strategy, tensors: Sequence[Tensor]) -> None:
    """Refuse tensors that a strategy hardly knows, where those that it does know are not there.

    One name may be the same in every naming of a model, such as that of its head.
    """
    if not dst.stages_of or isinstance(dst, WholeStrategy):
        return
    own = {one.name for one in tensors if one.is_weight}
    listed = {name for name in dst.stages_of if dst.states.of(name) is None}
    both = own & listed
    any_known = any(one.name in dst or one.base_name in dst for one in tensors)
    if any_known and (2 * len(both) >= len(own) or 2 * len(both) >= len(listed)):
        return
    some = f"{len(both)} of the {len(own)}" if both else "none of the"
    unknown = next((one.name for one in tensors if one.name not in dst), tensors[0].name)
    raise RequestError(
        f"{dst.label} lists {some} tensors, and not {unknown}; it lists "
        f"{summarize_names(sorted(listed - own) or list(dst.stages_of), 1)}",
        "translate the names (--map, --rename)",
        "give this network's strategy",
    )


def _is_in_no_strategy(parameter: Parameter) -> bool:
    """Tell whether no strategy lists such a thing: a counter, or what is no tensor."""
    is_counter = not parameter.is_weight and parameter.state is None
    return parameter.dtype == BYTES or is_counter


def with_followers(
    catalog: Catalog, dst: Strategy, derivation: Derivation
) -> tuple[Strategy, frozenset[str]]:
    """Return a destination's strategy with the states that follow parameters.

    Jobs that shard by pattern list no states, so one that neither side lists follows its parameter
    on both. Names of those that the destination alone lists are returned too: these do not follow.
    """
    if derivation.renames or isinstance(dst, WholeStrategy):
        return dst, frozenset()
    follows = {p.name: p.follows for p in catalog.parameters if p.follows is not None}
    apart = frozenset(name for name in follows if derivation.name_of(name) in dst)
    more = {
        derivation.name_of(name): derivation.name_of(base)
        for name, base in follows.items()
        if name not in apart
    }
    return (with_states(dst, more) if more else dst), apart


def _check(
    found: Selection,
    catalog: Catalog,
    dst: Strategy,
    refused: list[Parameter],
    lost: Mapping[str, tuple[int, ...]],
    derivation: Derivation,
) -> None:
    """Refuse a selection that cannot be meant: of unmatched names, with losses, or of nothing."""
    if refused and not found.sharded:
        raise _foreign_error(refused, catalog, dst)
    if lost:
        raise losses_error(catalog, found.sources(catalog), lost)
    if refused:
        raise _unmatched_error(refused, catalog, dst, derivation)
    if not catalog.parameters:
        raise CheckpointError("holds no tensor", where=_first(catalog.paths))
    if not found.parameters:
        raise UsageError("no parameter is left to convert", "check --include and --exclude")
    if not catalog.declared:
        raise RequestError(
            f"{catalog.label} lists none of the parameters in {_first(catalog.paths)}; "
            "it is the strategy of another network, or of another stage"
        )


def _order(reason: tuple[str, list[Parameter]]) -> int:
    known = (_STATE, _UNMATCHED)
    return known.index(reason[0]) if reason[0] in known else len(known)


def destination_layout(selection: Selection, dst: Strategy, name: str, stage: int) -> Layout | None:
    """Return how ranks of destination `stage` shard `name`, or None where they do not hold it."""
    if name in selection.replicated:
        return whole_layout(len(selection.replicated[name].shape))
    parameter = selection.sharded[name]
    if name not in dst or stage not in dst.stages_of.get(name, (0,)):
        return None
    return effective_layout(dst, name, stage, len(parameter.shape))


def _lost(
    catalog: Catalog, dst: Strategy, ranks: Iterable[int], derivation: Derivation
) -> dict[str, tuple[int, ...]]:
    """Return the names that `ranks` (none: all) should get and that no file holds."""
    made = {dst.stage_of(rank) for rank in ranks} or set(range(len(dst.stages)))
    return {
        name: missing
        for name, missing in catalog.unreachable.items()
        if not derivation.drops(name)
        and (derivation.renames or (new := derivation.name_of(name)) in dst)
        and (derivation.renames or made.intersection(dst.stages_of.get(new, made)))
    }


def _left_out(reason: str, parameters: list[Parameter]) -> LeftOut:
    nbytes = sum(content_bytes(p.src_dtype, p.shape) for p in parameters)
    states = {p.name: p.state for p in parameters if p.state is not None}
    families = {name: one.family for name, one in states.items() if one.parameter != name}
    return LeftOut(reason, tuple(p.name for p in parameters), nbytes, families)


def _foreign_error(refused: Sequence[Parameter], catalog: Catalog, dst: Strategy) -> RequestError:
    """Return that no parameter is in both strategies, and which of them lists none."""
    names = summarize_names([one.name for one in refused], 3)
    by_source = sum(one.declared for one in refused)
    if 0 < by_source < len(refused):
        what = f"{catalog.label} and {dst.label} share none of the checkpoint's parameters"
        return RequestError(f"{what}, such as {names}; one of them is another network's")
    own, other, side = (
        (catalog, dst, "--dst-strategy") if by_source else (dst, catalog, "--src-strategy")
    )
    return RequestError(
        f"{other.label} lists none of the checkpoint's parameters, and {own.label} lists them",
        f"{side} of this network, which has {names}",
        "translate the names (--map, --rename)",
        details=f"{other.label} is another network's, or calls its parameters otherwise",
    )


def _unmatched_error(
    alone: list[Parameter], catalog: Catalog, dst: Strategy, derivation: Derivation
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
