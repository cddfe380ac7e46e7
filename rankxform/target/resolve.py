"""What a request makes of a source."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, CheckpointRef, Form, SelectedFiles
from rankxform.errors import RequestError, UsageError
from rankxform.formats.container import CONTAINERS, Container, Index, Schema
from rankxform.geometry.box import Shape
from rankxform.layout.layout import whole_layout
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.operations.base import OperationChain, Tensor, tied_duplicates
from rankxform.operations.rename import AS_STORED, MINDSPORE, rename_strategy
from rankxform.operations.select import is_added
from rankxform.options import is_default
from rankxform.planning.build_catalog import catalog_of, expand_patterns
from rankxform.planning.catalog import Catalog, Description
from rankxform.planning.plan import Planner
from rankxform.planning.selection import (
    REPLICATE,
    add_destination_followers,
    apply_operations,
    check_ranks,
    needed_stages,
    select_parameters,
)
from rankxform.planning.transfers import Reach
from rankxform.request import Request
from rankxform.source.open import open_place, open_source
from rankxform.source.place import look_at
from rankxform.source.source import ALL, Source, SourceNeed
from rankxform.statements import ACCEPT_CONTRADICTIONS, PLAN, as_warning, require, run_rules
from rankxform.storage.source_reader import container_of_path
from rankxform.storage.store import address_of
from rankxform.storage.user_files import load_strategy
from rankxform.transport import Team

from . import findings as findings_of_target
from .findings import TargetDraft, adding_suggestions
from .inputs import ResolvedRequest, resolve_request, source_ref
from .manifest import check_not_applied
from .model_files import read_stated_model
from .node_folders import unsafe_writers
from .target import Conversion, Target
from .training import STEP_KEY, iteration_findings, kept_facts, read_training

if TYPE_CHECKING:
    from rankxform.derivation.request import Derived


def open_resolved_source(
    resolved: ResolvedRequest, team: Team, *, all_files: bool = False
) -> Source:
    """Open the source that a request names, as far as it is needed, or all of it. Collective.

    Raises its first error, with what else may be meant.
    """
    if resolved.shapes is not None:
        return team.agree(lambda: _imagine_source(resolved, resolved.shapes or {}, team))
    place = look_at(resolved.where, team)
    need = ALL if all_files else need_of(resolved, place.strategy)
    source = open_place(place, team, need)
    with adding_suggestions(resolved, source, team):
        return team.agree(source.require)


def need_of(resolved: ResolvedRequest, src: Strategy | None) -> SourceNeed:
    """Return which part of a source of this strategy a request needs; pure."""
    operations = _build_operations(resolved)
    is_sharded = src is not None and not isinstance(src, WholeStrategy)
    ranks = tuple(_needed_ranks(src, resolved, operations)) if src and is_sharded else None
    return SourceNeed(ranks, operations, accepts=resolved.request.accepts)


def _needed_ranks(
    src: Strategy, resolved: ResolvedRequest, operations: OperationChain
) -> Sequence[int]:
    """Return the source ranks of the stages that the wanted destination ranks draw on.

    With `unmatched` "replicate" these are all ranks: any file may hold a parameter that no source
    stage lists. So are they where the destination's strategy has to be derived first, and where
    names at the destination are not those of the source.
    """
    request, dst = resolved.request, resolved.dst
    all_names = request.map is not None or request.masters
    if request.unmatched == REPLICATE or not isinstance(dst, Strategy) or all_names:
        return range(src.ranks)
    operations = operations.with_states(src.states)
    operations.check_names(src.stages_of)
    name_of = operations.name_of
    stages = {dst.stage_of(rank) for rank in check_ranks(request.ranks, dst)}
    src_stages = {s for stage in stages for s in needed_stages(src, dst, stage, name_of)}
    return [rank for stage in sorted(src_stages) for rank in src.ranks_in(stage)]


def _imagine_source(
    resolved: ResolvedRequest, shapes_and_types: dict[str, tuple[Shape, str]], team: Team
) -> Source:
    """Imagine the checkpoint that a strategy makes of parameters with the given full shapes."""
    src, shapes = resolved.src or WholeStrategy(), Path(resolved.request.shapes or "")
    if isinstance(src, PatternStrategy):
        src = src.over({name: shape for name, (shape, _) in shapes_and_types.items()}, states=True)
    indexes: dict[int, Index] = {}
    for stage in range(len(src.stages)):
        names = [n for n in shapes_and_types if n not in src or stage in src.stages_of.get(n, (0,))]
        sliced = []
        for name in names:
            shape, _ = shapes_and_types[name]
            try:
                layout = (
                    src.layout(name, stage, len(shape)) if name in src else whole_layout(len(shape))
                )
                layout = layout.fold(shape, slices=False)
                sliced.append(layout.grid(shape).box(layout.cell(0)).shape)
            except RequestError as error:
                raise RequestError(f"{name!r} in {src.label}: {error}", where=shapes) from error
        types = tuple(shapes_and_types[name][1] for name in names)
        schema = Schema(tuple(names), types, tuple(sliced))
        indexes.update((rank, Index(schema, array("q"), {}, 0)) for rank in src.ranks_in(stage))
    names_of = {rank: f"rank_{rank}/{shapes.name}" for rank in indexes}
    schemas = {rank: index.schema for rank, index in indexes.items()}
    catalog = catalog_of(Description(src.label, src), schemas, names_of, tuple(indexes))
    return Source(
        where=resolved.where,
        form=FORMS[DEFAULT_FORM],
        selected=SelectedFiles(names_of),
        strategy=src,
        needed_files=tuple(indexes),
        paths=names_of,
        indexes=indexes,
        reach=Reach.full(team.nodes.node_of, indexes),
        description=catalog.description,
        schemas=schemas,
        catalog=catalog,
    )


_LOADABLE = "safetensors"
"""The container of ranks' files whose source has one that MindSpore cannot load."""


def resolve(
    request: Request,
    team: Team,
    enter: Callable[[str], None] = lambda phase: None,
    source: Source | None = None,
) -> Conversion:
    """Open the source and resolve the target; no more of tensors is read than single numbers.

    enter: told which phase begins. source: if it is open. Collective.
    """
    resolved = resolve_request(request, team)
    enter("index")
    source = source or open_resolved_source(resolved, team)
    enter("plan")
    return Conversion(resolved, source, resolve_target(resolved, source, team))


def resolve_target(resolved: ResolvedRequest, source: Source, team: Team) -> Target:
    """Return what is made of a source without errors. Collective."""
    adapter = _adapter(resolved, team)
    if adapter is not None and not resolved.request.accepts(ACCEPT_CONTRADICTIONS):
        team.bcast(lambda: check_not_applied(source, adapter))
    request = resolved.request
    if source.form.configured:
        from .own_companions import read_own_companions

        is_all = not (request.map or request.include or request.exclude)
        stated_model = team.bcast(lambda: read_stated_model(source) if is_all else None)
        own_companions = team.bcast(lambda: read_own_companions(request, source))
        resolved = replace(resolved, stated_model=stated_model, own_companions=own_companions)
    if resolved.request.map is not None:
        from .map_choices import settle_map

        settled = team.agree(lambda: settle_map(resolved, source))
        resolved = replace(resolved, request=settled)
    if adapter is not None:
        shapes = {p.src_name: p.shape for p in adapter.require_catalog().parameters}
        lora = replace(resolved.inputs["lora"], shapes=shapes)
        resolved = replace(resolved, inputs={**resolved.inputs, "lora": lora})
    training = read_training(resolved.request, source, team)
    reference = _check_arrangement(resolved, source, team)
    with adding_suggestions(resolved, source, team):
        target = team.agree(lambda: _make_target(resolved, source, training, adapter))
    doubts = [unsafe_writers(resolved.request, target, team)]
    if reference is not None:
        from .map_choices import check_resemblance

        doubts.append(
            team.bcast(lambda: check_resemblance(Conversion(resolved, source, target), reference))
        )
    return target.with_findings(map(as_warning, filter(None, doubts)))


def _adapter(resolved: ResolvedRequest, team: Team) -> Source | None:
    """Open an adapter, if one is to be added. Collective."""
    if (adapter := resolved.inputs.get("lora")) is None:
        return None
    is_stated = adapter.strategy is not None
    strategy = team.bcast(lambda: load_strategy(adapter.strategy) if is_stated else None)
    where = CheckpointRef(adapter.path, strategy=strategy)
    if adapter.is_in_source:  # the same files as the source's
        where = replace(source_ref(resolved.request, strategy), path=adapter.path)
    return open_source(where, team).require()


def _check_arrangement(resolved: ResolvedRequest, source: Source, team: Team) -> Source | None:
    """Compare how tensors are joined with a reference; return that, if one is given. Collective."""
    request = resolved.request
    if request.like is None or request.map is None or resolved.shapes is not None:
        return None
    from .map_choices import check_joining

    reference = open_source(CheckpointRef(request.like), team).require()
    check_joining(resolved, source, reference, team)
    return reference


# -- on every process ---------------------------------------------------------------------------


def _build_operations(
    resolved: ResolvedRequest, items: str = "", training: Mapping[str, Any] | None = None
) -> OperationChain:
    """Return what becomes of the source's tensors; the same on every process.

    items: how the source keeps what is no tensor. training: what it states of the training.
    """
    request, form = resolved.request, FORMS[resolved.request.dst_form or DEFAULT_FORM]
    has_counters = form.counters and request.dst is not None
    return OperationChain.of({
        **vars(request), "inputs": resolved.inputs, "items": (items, form.items),
        "training": training if has_counters else None,
    })  # fmt: skip


def _make_target(
    resolved: ResolvedRequest, source: Source, training: Mapping[str, Any], adapter: Source | None
) -> Target:
    """Work out what is made; pure, and the same on every process."""
    request, catalog = resolved.request, source.require_catalog()
    facts = None if source.form.counters else training  # as tensors, the source has them
    operations = _build_operations(resolved, source.description.items, facts)
    operations = operations.with_states(catalog.states).without(catalog.unread_names)
    tensors = apply_operations(catalog, operations)
    listed = catalog.strategy.stages_of if catalog.strategy is not None else ()
    operations.check_names([*listed, *(parameter.name for parameter in catalog.parameters)])
    derived, dst = _destination_strategy(resolved, catalog, tensors, operations)
    ranks = check_ranks(request.ranks, dst)
    dst, dst_listed_states = add_destination_followers(catalog, dst, operations, tensors)
    is_served = FORMS[request.dst_form or DEFAULT_FORM].is_served  # then all of it is cut or whole
    unmatched = REPLICATE if is_served else request.unmatched
    selection = select_parameters(
        catalog, dst, operations, unmatched, ranks, tensors, dst_listed_states
    )
    draft = TargetDraft(resolved, source, operations, tensors, selection, dst, adapter)
    findings = [*source.findings, *run_rules(PLAN, [findings_of_target], draft, request.accepts)]
    companions, own_names = resolved.companions, frozenset[str]()
    if resolved.own_companions is not None:
        from .own_companions import adapt_companions

        own_companions, noticed = adapt_companions(resolved.own_companions, draft)
        own_names = frozenset(own_companions.keys() - companions.keys())
        companions, findings = {**own_companions, **companions}, [*findings, *noticed]
    require(findings, is_counted=False)
    planner = Planner(catalog, dst, selection)
    try:
        for rank in ranks:
            planner.layouts_of_file(
                rank
            )  # raises if a shape does not divide, or the rank gets nothing
    except RequestError as error:
        raise _with_vocabulary(error, tensors, dst) from error
    form = FORMS[request.dst_form or DEFAULT_FORM]
    if request.ranks and form.described:
        raise UsageError(
            f"a {form.name} checkpoint is made and compared whole", "leave out --ranks"
        )
    container, options = _container(request, form, source), _form_options(request, form)
    step, suffix = training.get(STEP_KEY), f".{container.name}"
    arrangement = form.destination_files(planner, options, step, suffix)
    if arrangement.parts:
        planner = planner.with_parts(arrangement.parts)
    findings += iteration_findings(source, training, arrangement)
    dst_place, folder = request.dst or ".", arrangement.folder
    return Target(
        planner=planner,
        ranks=ranks,
        files=tuple(f for f in arrangement.names if planner.content_of_file(f).rank in set(ranks)),
        dst=request.dst,
        place=address_of(dst_place, folder),
        form=form,
        container=container,
        arrangement=arrangement,
        derived=derived,
        adapter=adapter,
        training=kept_facts(request, training),
        companions=companions,
        own_companions=own_names,
        truncated_vocab=tuple(
            tensor.sources[0].name
            for operation in operations.compositions
            for tensor in operation.truncated(tensors)
        ),
        tied_duplicates=tied_duplicates(tensors),
        map_in_words=next(filter(None, (o.in_words() for o in operations.compositions)), None),
        accepted=request.accept,
        findings=tuple(findings),
    )


def _with_vocabulary(error: RequestError, tensors: Sequence[Tensor], dst: Strategy) -> RequestError:
    """Return an error of a shape that does not divide, with the size of a vocabulary that does."""
    from rankxform.operations.vocabulary import is_vocabulary

    for tensor in tensors:
        is_sharded = tensor.shape and tensor.name in dst
        if tensor.dropped or not is_sharded or not is_vocabulary(tensor):
            continue
        layout = dst.layout(tensor.name, dst.stages_of[tensor.name][0], len(tensor.shape))
        rows, shards = tensor.shape[0], layout.counts[0]
        if rows % shards:
            tries = (f"--vocab {-(-rows // shards) * shards}", *error.parts.tries)
            return RequestError.of_parts(error.parts._replace(tries=tries))
    return error


# -- the destination's files ----------------------------------------------------------------------


def _container(request: Request, form: Form, source: Source) -> Container:
    if form.container is not None:
        if request.format not in (None, form.container):
            raise UsageError(f"{form.name} is made of {form.container} files", "leave out --format")
        return CONTAINERS[form.container]
    if request.format is not None:
        return CONTAINERS[request.format]
    its_own = container_of_path(next(iter(source.paths.values())))
    return its_own if its_own.alone else CONTAINERS[_LOADABLE]


def _form_options(request: Request, form: Form) -> dict[str, Any]:
    """Return the options of which the names of a form's files depend, and what they hold.

    Raises UsageError for others' options.
    """
    for other_form in FORMS:
        for name in FORMS.attribute(other_form, "options"):
            if name not in form.options and not is_default(request, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} is for --dst-form {other_form}, and the "
                    f"destination is {form.name}"
                )
    return {name: getattr(request, name) for name in ("prefix", *form.options)}


# -- the destination's strategy -------------------------------------------------------------------


def _destination_strategy(
    resolved: ResolvedRequest,
    catalog: Catalog,
    tensors: Sequence[Tensor],
    operations: OperationChain,
) -> tuple[Derived | None, Strategy]:
    """Return the destination's strategy, and how it was derived if it was not given."""
    in_files = [t for t in tensors if not is_added(t)]  # no strategy speaks of the others
    schema_tensors = [tensor for tensor in in_files if not (tensor.dropped and operations.renames)]
    schema = Schema(
        tuple(tensor.name for tensor in schema_tensors),
        tuple(tensor.dtype for tensor in schema_tensors),
        tuple(tensor.shape for tensor in schema_tensors),
    )
    requested_dst, request = resolved.dst, resolved.request
    form = FORMS[request.dst_form or DEFAULT_FORM]
    if form.is_served:
        if request.dst_strategy is not None or request.derives:
            text = f"a {form.title} folder is cut as its ranks are"
            raise UsageError(text, "leave out --dst-strategy")
        written_shapes = {tensor.name: tensor.shape for tensor in tensors if not tensor.dropped}
        return None, form.destination_strategy(written_shapes, _form_options(request, form))
    names = [tensor.name for tensor in schema_tensors if not tensor.dropped]
    if isinstance(requested_dst, Strategy):
        requested_dst = rename_strategy(requested_dst, request.names, names)
        states = catalog.is_whole and not operations.renames
        return None, expand_patterns(requested_dst, [schema], states=states)
    from rankxform.derivation.inputs import derive_from

    from .manifest import label_beside

    is_named = request.names not in (AS_STORED, MINDSPORE)  # as a framework does, and no more
    is_named = is_named and request.map is None and not request.masters
    is_other = operations.renames and not is_named
    if is_other or catalog.is_whole or catalog.strategy is None:
        derived = derive_from(requested_dst, WholeStrategy(), {0: schema})
    else:
        schemas = {
            rank: group.schema
            for groups in catalog.groups
            for group in groups
            for rank in group.ranks
        }
        named = operations.schemas(schemas)
        derived = derive_from(
            requested_dst, operations.strategy(_without_followers(catalog)), named
        )
    strategy = (
        rename_strategy(derived.strategy, request.names, names) if is_named else derived.strategy
    )
    if request.dst is not None:
        strategy = replace(strategy, label=label_beside(request.dst))
    return derived, strategy


def _without_followers(catalog: Catalog) -> Strategy:
    """Return the source's strategy as it was given, without states that follow parameters."""
    strategy = catalog.strategy
    assert strategy is not None
    follower_names = {p.name for p in catalog.parameters if p.follows is not None}
    if not follower_names:
        return strategy
    stages = tuple(
        {n: layout for n, layout in layouts.items() if n not in follower_names}
        for layouts in strategy.stages
    )
    return replace(strategy, stages=stages)
