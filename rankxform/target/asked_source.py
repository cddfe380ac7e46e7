"""The source that a request names, as far as it is needed."""

from __future__ import annotations

from array import array
from pathlib import Path

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, SelectedFiles
from rankxform.errors import RequestError
from rankxform.formats.base import Index, Schema
from rankxform.geometry.box import Shape
from rankxform.layout.layout import whole_layout
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.ops.base import OperationChain
from rankxform.planning.description import Description
from rankxform.planning.reach import Reach
from rankxform.planning.selection import REPLICATE
from rankxform.planning.stages import check_ranks, needed_stages
from rankxform.planning.table import catalog_of
from rankxform.source.choice import SourceScope
from rankxform.source.opening import Source, open_source
from rankxform.source.options import ACCEPT_CONTRADICTIONS, ACCEPT_EXTRA_RANKS
from rankxform.transport import Team

from .asked import ResolvedRequest
from .operation_inputs import build_operations
from .suggestions import adding_suggestions


def open_asked(resolved: ResolvedRequest, team: Team, *, all_files: bool = False) -> Source:
    """Open the source that a request names, as far as it is needed, or all of it. Collective.

    Raises its first fault, with what else may be meant.
    """
    if resolved.shapes is not None:
        return team.agree(lambda: _imagined(resolved, resolved.shapes or {}, team))
    source = open_source(resolved.where, team, SourceScope() if all_files else _needed_of(resolved))
    with adding_suggestions(resolved, source, team):
        return team.agree(source.require)


def _needed_of(resolved: ResolvedRequest) -> SourceScope:
    """Return what of the source is needed."""
    derivation = build_operations(resolved.request, resolved.operation)
    return SourceScope(
        lambda src: _needed_ranks(src, resolved, derivation),
        lambda states: derivation.with_states(states).drops,
        extra_ranks=resolved.request.accepts(ACCEPT_EXTRA_RANKS),
        check_saved_strategy=not resolved.request.accepts(ACCEPT_CONTRADICTIONS),
    )


def _needed_ranks(
    src: Strategy, resolved: ResolvedRequest, derivation: OperationChain
) -> list[int] | None:
    """Return the source ranks of the stages that the wanted destination ranks draw on.

    With `unmatched` "replicate" these are all ranks: any file may hold a parameter that no source
    stage lists. So are they where the destination's strategy has to be derived first, and where
    names at the destination are not those of the source.
    """
    if isinstance(src, WholeStrategy):
        return None
    request, dst = resolved.request, resolved.dst
    all_names = request.map is not None or request.masters
    if request.unmatched == REPLICATE or not isinstance(dst, Strategy) or all_names:
        return list(range(src.ranks))
    derivation = derivation.with_states(src.states)
    derivation.check_names(src.stages_of)
    name_of = derivation.name_of
    stages = {dst.stage_of(rank) for rank in check_ranks(request.ranks, dst)}
    src_stages = {s for stage in stages for s in needed_stages(src, dst, stage, name_of)}
    return [rank for stage in sorted(src_stages) for rank in src.ranks_in(stage)]


def _imagined(
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
        resolved.where, FORMS[DEFAULT_FORM], SelectedFiles(names_of),
        names_of, indexes, {}, catalog,
        Reach.full(team.nodes.node_of, indexes), tuple(indexes),
    )  # fmt: skip
