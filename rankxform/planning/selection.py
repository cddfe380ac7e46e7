"""Which parameters are converted, from which stages, and what is missing or unusual.

A strategy file lists what the compiler sharded. What only one of the two files lists is either
optimizer state that the destination has no use for, or a question that the user must answer.

Unusual tensors are found by names and full shapes alone: emptied matrices of ZeRO-3, flat
parameters of FSDP, names that a wrapper has put before a model's own, adapters beside the layers
that they are for.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field, replace
from math import lcm, prod

from rankxform.display.text import format_size
from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.formats.container import BYTES, content_bytes, item_size
from rankxform.geometry.box import Box, Shape
from rankxform.geometry.pieces import Assembly, PieceTiling
from rankxform.layout.layout import Layout, whole_layout
from rankxform.layout.names import is_extra_state, pattern_of, patterns, summarize_names
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.operations.base import OperationChain, Tensor
from rankxform.statements import quote
from rankxform.values import dataclass, pattern_on_use

from .build_catalog import add_followers, layout_with_uneven_rows
from .catalog import Catalog, ComposedSharding, Parameter, Sharding


def apply_operations(catalog: Catalog, operations: OperationChain) -> list[Tensor]:
    """Return what becomes of the source's tensors, those dropped too."""
    states = catalog.states
    return operations(
        Tensor.of(p.src_name, p.src_dtype, p.shape, states) for p in catalog.parameters
    )


class ParameterFactory:
    """Makes parameters of tensors, with one sharding for all that are composed alike."""

    def __init__(self, catalog: Catalog) -> None:
        self._assemblies: dict[object, Assembly] = {}
        self._stored = {parameter.src_name: parameter for parameter in catalog.parameters}
        self._known: dict[object, ComposedSharding] = {}

    def parameter(self, tensor: Tensor) -> Parameter:
        """Return a parameter, under its name and type at the destination."""
        sources = [self._stored[source.name] for source in tensor.sources]
        steps = tuple(source.step for source in tensor.sources)
        if tensor.assembly is None and not any(steps):
            (source,) = sources
            if (source.name, source.dtype) == (tensor.name, tensor.dtype):
                return source
            return replace(
                source, name=tensor.name, dtype=tensor.dtype, related=tensor.related,
                is_weight=tensor.is_weight,
            )  # fmt: skip
        return Parameter(
            tensor.name,
            tensor.dtype,
            self._composed(self._assembly(tensor), sources),
            sources[0].src_name,
            sources[0].src_dtype,
            tuple(source.src_name for source in sources),
            steps,
            related=tensor.related,
            is_weight=tensor.is_weight,
        )

    def _assembly(self, tensor: Tensor) -> Assembly:
        """Return how a tensor is made: one object for tensors as they are of one shape."""
        if tensor.assembly is not None:
            return tensor.assembly
        if tensor.shape not in self._assemblies:
            self._assemblies[tensor.shape] = tensor.made_of
        return self._assemblies[tensor.shape]

    def _composed(self, assembly: Assembly, sources: Sequence[Parameter]) -> ComposedSharding:
        shardings = [s.sharding for s in sources if isinstance(s.sharding, Sharding)]
        assert len(shardings) == len(sources), "tensors of the catalog lie in the files"
        key = id(assembly), tuple(map(id, shardings))
        if key not in self._known:
            grid = PieceTiling(assembly, [sharding.grid for sharding in shardings])
            self._known[key] = ComposedSharding(grid, shardings)
        return self._known[key]


def by_source(parameters: Iterable[Parameter]) -> Mapping[str, tuple[str, ...]]:
    """Return the names of the parameters by the name of their first source tensor.

    Destination files have their tensors in the order of the source tensors.
    """
    names_by_source: dict[str, list[str]] = {}
    for parameter in parameters:
        names_by_source.setdefault(parameter.src_name, []).append(parameter.name)
    return {src_name: tuple(names) for src_name, names in names_by_source.items()}


Loss = tuple[Parameter, Box]
"""A region of a parameter that no file holds."""


def missing_slices(parameters: Iterable[Parameter]) -> dict[tuple[int, ...], list[Loss]]:
    """Return the slices that no source file holds, by the ranks that should hold them."""
    losses_by_ranks: dict[tuple[int, ...], list[Loss]] = {}
    for parameter in parameters:
        sharding = parameter.sharding
        if isinstance(sharding, Sharding):
            for cell, should in sharding.placement.lacking.items():
                loss = parameter, sharding.grid.box(cell)
                losses_by_ranks.setdefault(should, []).append(loss)
    return losses_by_ranks


def missing_slices_error(
    catalog: Catalog,
    parameters: Iterable[Parameter],
    ranks_by_name: Mapping[str, Sequence[int]],
    *,
    excludable: bool = True,
) -> CheckpointError:
    """Return the error that names the ranks whose files are missing, and what only they hold.

    `parameters`: the needed ones of the catalog. `ranks_by_name`: needed names that no file has ->
    the ranks whose files are missing. `excludable`: whether --exclude can be told of these names.
    Parameters come before optimizer states, and large losses before small ones.
    """
    states = catalog.states
    ordered = sorted(ranks_by_name, key=lambda name: (states.of(name) is not None, name))
    names = summarize_names(ordered, 2)
    label, searched = catalog.declared_by, catalog.searched
    groups = missing_slices(parameters)
    if not groups:
        ranks = sorted({rank for missing in ranks_by_name.values() for rank in missing})
        return CheckpointError(
            f"{_ranks(ranks)} no file{searched}: no source file holds {names}",
            "bring the missing rank folders",
            "--fallback PLACE names another place that has them",
            *(["leave these parameters out (--exclude)"] if excludable else ()),
            details=f"{label} places them on ranks whose files are not there: {_few(ranks)}",
        )
    should, losses = max(groups.items(), key=lambda group: sum(map(_nbytes, group[1])))
    parameter, box = max(losses, key=lambda loss: (loss[0].state is None, loss[1].size))
    files = {catalog.rank_of(file): file for file in catalog.paths}
    missing = [rank for rank in should if rank not in files]
    missing_files = catalog.description.missing_files
    gone_files = [missing_files[rank] for rank in should if rank in missing_files]
    if gone_files:
        where = f"{gone_files[0]}: is not there"
    elif missing:
        where = f"{_ranks(missing)} no file"
    elif sum(catalog.rank_of(file) == should[0] for file in catalog.paths) > 1:
        where = f"rank {should[0]} lacks one of its files"
    else:
        where = f"{catalog.paths[files[should[0]]]}: is incomplete"
    also = f", and none of {names}" if names else ""
    others = sorted({rank for ranks in groups for rank in ranks}.difference(should))
    its, owner = ("their", "one of these ranks") if len(missing) > 1 else ("its", "the rank")
    other_losses_text = (
        f"slices of rank{'s' if others[1:] else ''} {_few(others)} are lost too" if others else ""
    )
    bring = "bring that file" if gone_files else f"bring the folder of {owner}"
    if not gone_files and not missing:
        bring = "copy the file again"
    return CheckpointError(
        f"{where}{searched}: no source file holds {len(losses):,} of {its} slices, "
        f"{format_size(sum(map(_nbytes, losses)))}, such as {box} of {parameter.src_name!r} "
        f"({label}){also}",
        bring,
        "--fallback PLACE names another place that has it",
        details=other_losses_text,
    )


def _nbytes(loss: Loss) -> int:
    parameter, box = loss
    return prod(box.shape) * item_size(parameter.src_dtype)


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} has" if len(ranks) == 1 else f"ranks {_few(ranks)} have"


def _few(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:12])) + (", ..." if len(ranks) > 12 else "")


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
    """The parameters to convert, by the names that they get."""

    sharded: Mapping[str, Parameter]  # converted from the source's layout to the destination's
    # Whole on every destination rank, as one source rank holds it.
    replicated: Mapping[str, Parameter]
    left_out: tuple[OmittedParameters, ...]  # what is not written
    absent: tuple[str, ...]  # names that the strategies list and no file holds
    # By name of a source tensor, which parameters come where it stands in the files.
    made_of: Mapping[str, tuple[str, ...]]
    # Whether tensors may be made of several, or under names that others have.
    composed: bool = False
    # Tells what a source tensor is called at the destination, as far as its name tells.
    name_of: Callable[[str], str] = field(default=str, compare=False)

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
    operations: OperationChain | None = None,
    unmatched: str = ERROR,
    ranks: Iterable[int] = (),
    tensors: Sequence[Tensor] | None = None,
    non_followers: Collection[str] = (),
) -> Selection:
    """Decide for every parameter of the source what becomes of it.

    `ranks` are the destination ranks to make (default: all); what is lost for others is no error.
    `operations` tells what becomes of each; `tensors` is that, if it is known already. `unmatched`
    says what happens to one that only one strategy lists: "error"; "drop"; or "replicate", which
    takes the side that does not list it to hold it whole on every rank. `non_followers`: see
    `add_destination_followers`. Raises RequestError for unmatched names, UsageError where nothing
    is left to convert.
    """
    operations = operations or OperationChain()
    sharded: dict[str, Parameter] = {}
    replicated: dict[str, Parameter] = {}
    reasons: dict[str, list[Parameter]] = {}
    make = ParameterFactory(catalog)
    all_tensors = apply_operations(catalog, operations) if tensors is None else tensors
    for tensor in all_tensors:
        parameter = make.parameter(tensor)
        if tensor.dropped:
            reasons.setdefault(tensor.dropped, []).append(parameter)
            continue
        name = parameter.name
        is_in_dst = parameter.name in dst and not isinstance(dst, WholeStrategy)
        declared = parameter.is_declared and parameter.src_name not in non_followers
        is_counter = not parameter.is_weight and parameter.state is None
        is_listed = parameter.dtype != BYTES and not is_counter  # by any strategy
        is_in_src = declared and not catalog.is_whole and is_listed
        if parameter.value is not None:  # hardly any strategy speaks of what no file holds
            (sharded if is_in_dst and parameter.is_weight else replicated)[name] = parameter
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
        replicated = {n: p for n, p in replicated.items() if p.value is None or p.is_weight}
    ordered_reasons = sorted(reasons, key=lambda reason: {_STATE: 0, _UNMATCHED: 1}.get(reason, 2))
    left_out = tuple(_left_out(reason, reasons[reason]) for reason in ordered_reasons)
    parameters = [*sharded.values(), *replicated.values()]
    if operations.renames:
        missing = set(dst.stages_of) - set(sharded) - set(replicated)
    else:
        declared_names = catalog.strategy.stages_of if catalog.strategy is not None else ()
        missing = {*map(operations.name_of, declared_names), *dst.stages_of}
        missing -= {operations.name_of(parameter.name) for parameter in catalog.parameters}
    selection = Selection(
        sharded, replicated, left_out, tuple(sorted(missing)), by_source(parameters),
        operations.renames, operations.name_of,
    )  # fmt: skip
    refused = reasons.get(_UNMATCHED, []) if unmatched == ERROR else []
    _check(
        selection, catalog, dst, refused, _find_missing(catalog, dst, ranks, operations), operations
    )
    _check_names(dst, all_tensors, {*map(operations.name_of, catalog.unread_names)})
    return selection


def _check_names(dst: Strategy, tensors: Sequence[Tensor], unread_names: Set[str]) -> None:
    """Refuse tensors that a strategy hardly knows, where those that it does know are not there.

    One name may be the same in every naming of a model, such as that of its head.
    """
    if not dst.stages_of or isinstance(dst, WholeStrategy):
        return
    listed = {name for name in dst.stages_of if dst.states.of(name) is None}
    weight_names = {tensor.name for tensor in tensors if tensor.is_weight} | unread_names & listed
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


def add_destination_followers(
    catalog: Catalog, dst: Strategy, operations: OperationChain, tensors: Iterable[Tensor]
) -> tuple[Strategy, frozenset[str]]:
    """Return a destination's strategy with the states that follow parameters.

    Jobs that shard by pattern list no states, so one that neither side lists follows its parameter
    on both. Names of those that the destination alone lists are returned too: these do not follow.
    Nor do compilers list all families, such as Muon's: one of which the strategy lists no member
    follows parameters of which it lists no state, if it lists others'. `tensors` are those that
    operations make.
    """
    states = [state for name in dst.stages_of if (state := dst.states.of(name)) is not None]
    families, with_states = {s.family for s in states}, {s.parameter for s in states}
    shapes = {t.name: t.shape for t in tensors if not t.dropped} if families else {}
    unlisted = {
        tensor.name: tensor.base_name
        for tensor in tensors
        if tensor.state is not None
        and tensor.name in shapes
        and tensor.state.family not in families
        and tensor.base_name not in with_states
        and tensor.shape == shapes.get(tensor.base_name)
    }
    dst = add_followers(dst, unlisted) if unlisted else dst
    if operations.renames or isinstance(dst, WholeStrategy):
        return dst, frozenset()
    follows = {p.name: p.follows for p in catalog.parameters if p.follows is not None}
    non_followers = frozenset(
        name for name in follows if (new := operations.name_of(name)) in dst and new not in unlisted
    )
    bases_by_state = {
        operations.name_of(name): operations.name_of(base)
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
    operations: OperationChain,
) -> None:
    """Refuse a selection that cannot be meant: of unmatched names, with losses, or of nothing."""
    if refused and not selection.sharded:
        raise _foreign_error(refused, catalog, dst)
    if ranks_by_name:
        # What is made of several, or named by another, is excluded by a name that is not known yet.
        parameters, excludable = selection.sources(catalog), not operations.renames
        raise missing_slices_error(catalog, parameters, ranks_by_name, excludable=excludable)
    if refused:
        raise _unmatched_error(refused, catalog, dst, operations)
    if not catalog.parameters:
        raise CheckpointError("holds no tensor", where=_first(catalog.paths))
    if not selection.parameters:
        raise UsageError("no parameter is left to convert", "check --include and --exclude")
    if not catalog.declared:
        raise RequestError(
            f"{catalog.declared_by} lists none of the parameters in {_first(catalog.paths)}; "
            "it is the strategy of another network, or of another stage"
        )


def destination_layout(selection: Selection, dst: Strategy, name: str, stage: int) -> Layout | None:
    """Return how ranks of destination `stage` shard `name`, or None where they do not hold it."""
    if name in selection.replicated:
        return whole_layout(len(selection.replicated[name].shape))
    parameter = selection.sharded[name]
    if name not in dst or stage not in dst.stages_of.get(name, (0,)):
        return None
    return layout_with_uneven_rows(dst, name, stage, len(parameter.shape))


def _find_missing(
    catalog: Catalog, dst: Strategy, ranks: Iterable[int], operations: OperationChain
) -> dict[str, tuple[int, ...]]:
    """Return the names that `ranks` (none: all) should get and that no file holds."""
    dst_stages = {dst.stage_of(rank) for rank in ranks} or set(range(len(dst.stages)))
    return {
        name: missing
        for name, missing in catalog.unreachable.items()
        if not operations.drops(name)
        and (operations.renames or (new := operations.name_of(name)) in dst)
        and (operations.renames or dst_stages.intersection(dst.stages_of.get(new, dst_stages)))
    }


def _left_out(reason: str, parameters: list[Parameter]) -> OmittedParameters:
    nbytes = sum(content_bytes(p.src_dtype, p.shape) for p in parameters)
    states = {p.name: p.state for p in parameters if p.state is not None}
    families = {name: state.family for name, state in states.items() if state.parameter != name}
    families |= {p.name: "*._extra_state" for p in parameters if is_extra_state(p.name)}
    return OmittedParameters(reason, tuple(p.name for p in parameters), nbytes, families)


def _foreign_error(refused: Sequence[Parameter], catalog: Catalog, dst: Strategy) -> RequestError:
    """Return that no parameter is in both strategies, and which of them lists none."""
    names = summarize_names([parameter.name for parameter in refused], 3)
    by_source = sum(parameter.is_declared for parameter in refused)
    if 0 < by_source < len(refused):
        message = f"{catalog.declared_by} and {dst.label} share none of the checkpoint's parameters"
        return RequestError(f"{message}, such as {names}; one of them is another network's")
    labels = (dst.label, catalog.declared_by)
    foreign, listing, option = (
        (*labels, "--dst-strategy") if by_source else (*labels[::-1], "--src-strategy")
    )
    return RequestError(
        f"{foreign} lists none of the checkpoint's parameters, and {listing} lists them",
        f"{option} of this network, which has {names}",
        "translate the names (--map, --rename)",
        details=f"{foreign} is another network's, or calls its parameters otherwise",
    )


def _unmatched_error(
    alone: list[Parameter], catalog: Catalog, dst: Strategy, operations: OperationChain
) -> RequestError:
    parts = []
    for label, names in (
        (catalog.declared_by, [p.src_name for p in alone if p.is_declared]),
        (dst.label, [p.name for p in alone if not p.is_declared]),
    ):
        if names:
            parts.append(f"only {label} lists {summarize_names(names, 3)}")
    renamed = any(operations.name_of(p.name) != p.name for p in catalog.parameters)
    return RequestError(
        "; ".join(parts),
        "--unmatched drop leaves them out",
        "--unmatched replicate if every rank of the side that does not list them holds them whole",
        details=f"with --rename, {dst.label} must list the new names" if renamed else "",
    )


def _first(paths: Mapping[int, str]) -> str:
    return paths[min(paths)] if paths else "the source"


Naming = Callable[[str], str]
"""Tells what a source tensor is called at the destination, as far as its name tells."""


def needed_stages(src: Strategy, dst: Strategy, dst_stage: int, name_of: Naming = str) -> list[int]:
    """Return the source stages that MindSpore loads for a destination stage, ascending.

    These are the stages of all parameters that the source lists, except parameters that the
    destination lists in other stages only.
    """
    if not src.stages_of:
        return [0]
    elsewhere = {name for name, stages in dst.stages_of.items() if dst_stage not in stages}
    return sorted(
        {s for n, stages in src.stages_of.items() if name_of(n) not in elsewhere for s in stages}
    )


def source_stages(
    catalog: Catalog, dst: Strategy, selection: Selection, dst_stage: int
) -> list[int]:
    """Return the source stages that a destination stage draws on.

    Those that MindSpore loads, ascending, and then any that alone hold what the destination
    stage lists and the source strategy does not, if that is taken as replicated.
    """
    if catalog.strategy is None:
        return [0]
    if selection.composed:
        return list(range(len(catalog.strategy.stages)))
    loaded_stages = needed_stages(catalog.strategy, dst, dst_stage, selection.name_of)
    names = set(catalog.names_in(loaded_stages))
    sole_holders = {
        catalog.stage_of(parameter.holders[0])
        for name, parameter in selection.sharded.items()
        if not parameter.is_declared and parameter.src_name not in names
        and dst_stage in dst.stages_of.get(name, ())
    }  # fmt: skip
    return [*loaded_stages, *sorted(sole_holders.difference(loaded_stages))]


def check_ranks(ranks: Iterable[int], dst: Strategy) -> tuple[int, ...]:
    """Return the destination ranks to make, ascending: `ranks`, or all if there are none."""
    ascending = tuple(sorted(set(ranks))) or tuple(range(dst.ranks))
    if ascending[-1] >= dst.ranks or ascending[0] < 0:
        is_whole = isinstance(dst, WholeStrategy)
        present = f"{dst.label} has ranks 0 to {dst.ranks - 1}"
        present = "without a strategy there is one, 0, of whole tensors" if is_whole else present
        all_ranks = f"--ranks 0-{dst.ranks - 1}"
        tries = ("--dst-strategy FILE of its job",) if is_whole else (all_ranks,)
        raise UsageError(f"destination rank {ascending[-1]} does not exist: {present}", *tries)
    return ascending


def source_ranks_needed(
    src: Strategy, dst: Strategy, ranks: Iterable[int]
) -> dict[int, tuple[int, ...]]:
    """Return for each destination rank the source ranks whose bytes it needs, ascending.

    This uses the strategies alone. If several ranks hold the same box, it is the one that MindSpore
    reads; parameters in no strategy come from the rank that corresponds to the destination rank.
    """
    for strategy in (src, dst):
        if isinstance(strategy, PatternStrategy):
            raise UsageError(
                "which names it means, the checkpoint tells",
                "name SRC",
                where=f"{strategy.label!r}",
            )
    return {
        rank: tuple(sorted(_find_source_ranks(src, dst, rank))) for rank in check_ranks(ranks, dst)
    }


def _find_source_ranks(src: Strategy, dst: Strategy, rank: int) -> set[int]:
    stage, local = dst.stage_of(rank), rank % dst.stage_size
    stages = needed_stages(src, dst, stage)
    if not stages:
        raise RequestError(
            f"destination rank {rank} needs nothing: {src.label} lists none of the parameters that "
            f"{dst.label} lists for pipeline stage {stage}"
        )
    src_ranks = {src.ranks_in(stages[0])[local % src.stage_size]}
    names = src.stages_of if isinstance(dst, WholeStrategy) else dst.stages[stage]
    layout_pairs: set[tuple[Layout, Layout, int]] = set()
    for name in names:
        if name not in src or isinstance(src, WholeStrategy):
            continue
        src_stage = src.stages_of[name][0]
        have = src.layout(name, src_stage, 0)
        want = dst.layout(name, stage, len(have.tensor_map))
        if (have, want, src_stage) not in layout_pairs:
            layout_pairs.add((have, want, src_stage))
            first = src.ranks_in(src_stage).start
            src_ranks |= {first + r for r in _holding(have, want, local, name)}
    return src_ranks


def _holding(have: Layout, want: Layout, local: int, name: str) -> set[int]:
    """Return the stage-local ranks of `have` that hold what rank `local` of `want` needs."""
    if len(have.tensor_map) != len(want.tensor_map):
        raise CheckpointError(
            "a nested tensor map in JSON needs the checkpoint's shapes",
            "name SRC too",
            where=f"{name!r}",
        )
    shape = tuple(map(lcm, have.counts, want.counts))
    if have.split_rows or want.split_rows:
        shape = (sum(have.split_rows or want.split_rows), *shape[1:])
    box = want.grid(shape).box(want.cell(local)) if shape else Box((), ())
    replica = have.replica(local)
    return {have.holders[cell][replica] for cell in have.grid(shape).cells_over(box)}


_FLAT = ("flat_param", "_flat_param", "_fsdp_flat_param")
_WRAPPERS = (
    # what stands in a name, the tool, the rule that takes it away
    ("_orig_mod.", "torch.compile", r"_orig_mod\.="),
    ("_fsdp_wrapped_module.", "FSDP", r"_fsdp_wrapped_module\.="),
    ("_checkpoint_wrapped_module.", "activation checkpointing", r"_checkpoint_wrapped_module\.="),
    ("base_model.model.", "PEFT", r"^base_model\.model\.="),
    ("module.", "DistributedDataParallel", r"^module\.="),
)
_WRAPPING = pattern_on_use(r"(?:(?:module|_\w+)\.)+")
"""Parts that wrappers put before a model's names; no published model's begin so."""
_BRIDGED = pattern_on_use(r"\.adapter\.linear_(?:in|out)\.")
_ANYWHERE = 3  # of these wrappers the first ones may stand anywhere in a name, the others begin it


def unusual_tensors(shapes: Mapping[str, Shape], names: Collection[str]) -> Iterator[str]:
    """Yield, as warnings, what is hardly meant. `shapes` are the source's weights, full and by
    name; `names` are those that they get at the destination.
    """
    empty = [name for name, shape in shapes.items() if shape == (0,)]
    if len(empty) > 1 and 2 * len(empty) >= len(shapes):
        yield (
            f"{len(empty)} of {len(shapes)} weights are empty, such as {empty[0]!r}: saved without "
            "being gathered (ZeRO-3); zero_to_fp32.py makes whole ones"
        )
    flat = [n for n in shapes if n.rpartition(".")[2] in _FLAT or n.startswith("buffer_0_bucket_")]
    if flat:
        yield (
            f"{summarize_names(flat, 2)} hold many parameters in one row, without their names; "
            "save full or sharded state dicts"
        )
    is_adapter = bool(shapes) and all("lora_" in name for name in shapes)
    if is_adapter and any(name.startswith("base_model.model.") for name in shapes):
        yield (
            f"all {len(shapes)} tensors are an adapter's, such as {next(iter(shapes))!r}; --lora "
            "merges it into the model that is given as SRC"
        )
        return
    begins = Counter(match[0] for name in names if (match := _WRAPPING().match(name)))
    run = next((text for text, count in begins.items() if 2 * count >= len(names)), "")
    if run and run not in {wrapper for wrapper, _, _ in _WRAPPERS}:  # several, or one of no list
        option = quote(f"^{re.escape(run)}=")
        yield f"{begins[run]} of {len(names)} names begin with a wrapper's {run}; --rename {option}"
    else:
        run = ""
    for number, (text, tool, rule) in enumerate(_WRAPPERS):
        if number < _ANYWHERE:
            wrapped = [name for name in names if text in name]
        else:
            wrapped = [name for name in names if name.startswith(text)]
        if wrapped and 2 * len(wrapped) >= len(names) and text not in run:
            example_text = f"such as {wrapped[0]!r}"
            yield f"names have {tool}'s {text} in them, {example_text}; --rename {quote(rule)}"
    bridged = [name for name in shapes if _BRIDGED().search(name)]
    if bridged:
        rename = r" --rename '\.to_wrap\.=.'" if any(".to_wrap." in n for n in shapes) else ""
        yield (
            f"an adapter of Megatron-Bridge is not merged, such as {bridged[0]!r}; --lora SRC"
            f"{rename} --lora-alpha A --lora-rank DIM (as run_config.yaml states them) adds it"
        )
    layers = [name for name in shapes if ".base_layer." in name]
    if layers and any("lora_a" in name.lower() for name in shapes):
        yield (
            f"an adapter lies beside {len(layers)} layers, such as {layers[0]!r}, and is not "
            "merged; PEFT's merge_and_unload() does that before saving"
        )


def types_by_file(catalog: Catalog) -> Iterator[str]:
    """Yield, as warnings, tensors of one kind that have another type in other files.

    Files of one checkpoint are saved alike: one that was not is of another.
    """
    files_by_type: dict[str, dict[str, set[int]]] = {}
    for parameter in catalog.parameters:
        if parameter.is_weight and parameter.shape:
            of_kind = files_by_type.setdefault(pattern_of(parameter.name), {})
            of_kind.setdefault(parameter.dtype, set()).update(parameter.holders)
    for kind, files in files_by_type.items():
        (a, in_a), (b, in_b), *_ = [*files.items(), ("", set[int]()), ("", set[int]())]
        if in_a and in_b and in_a.isdisjoint(in_b):
            first, second = catalog.paths[min(in_a)], catalog.paths[min(in_b)]
            yield f"{kind} is {a} in {first}, and {b} in {second}"
            return
