"""`aim`: what a request makes of a source, before a tensor byte is touched."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, Arrangement, Form, Naming, Where
from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.facts import (
    HEADER,
    ITERATION,
    OPTION,
    SCALAR,
    SHAPE,
    STRATEGY,
    Fact,
    contradictions,
)
from rankxform.formats.base import FORMATS, Format, Schema
from rankxform.layout.names import summarize_names
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.ops import drop, rename
from rankxform.ops.base import Derivation, Tensor
from rankxform.ops.weights import is_state
from rankxform.options import flag_of, is_default
from rankxform.planning.catalog import Catalog
from rankxform.planning.consistency import sharded_by_pattern
from rankxform.planning.derived import tensors_of
from rankxform.planning.plan import Planner
from rankxform.planning.selection import Selection, select, with_followers
from rankxform.planning.stages import check_ranks
from rankxform.planning.table import written_out
from rankxform.request import Request
from rankxform.source.opening import Source, open_source
from rankxform.storage import strategies
from rankxform.storage.index import container
from rankxform.storage.store import address_of, scheme_of
from rankxform.transport import Team

from .asked import Asked, read_request, where_of
from .asked_source import open_asked
from .operation_inputs import (
    assumptions,
    derivation_of,
    map_in_words,
    tied_duplicates,
    truncated_vocab,
)
from .suggestions import suggesting
from .target import Target
from .training import training_facts, training_step, unplaced

if TYPE_CHECKING:
    from rankxform.derivation.request import Derived


def prepare(request: Request, team: Team) -> tuple[Asked, Source, Target]:
    """Return a request as read, its source, and what is made of it. Collective."""
    asked = read_request(request, team)
    source = open_asked(asked, team)
    return asked, source, aim(asked, source, team)


def aim(asked: Asked, source: Source, team: Team) -> Target:
    """Return what is made of a source without faults. Collective."""
    adapter = _adapter(asked, team)
    training = training_facts(asked.request, source, team)
    _check_arrangement(asked, source, team)
    with suggesting(asked, source, team):
        return team.agree(lambda: _aimed(asked, source, training, adapter))


def _adapter(asked: Asked, team: Team) -> Source | None:
    """Open an adapter, if one is to be added. Collective."""
    if asked.operation.lora is None:
        return None
    operation, request = asked.operation, asked.request
    stated = request.lora_strategy or (request.src_strategy if operation.inside else None)
    given = stated or operation.lora_strategy
    strategy = team.bcast(lambda: None if given is None else strategies.load(given))
    where = Where(operation.lora or "", strategy=strategy)
    if operation.inside:  # the same files as the source's
        where = replace(where_of(request, strategy), path=operation.lora or "")
    return open_source(where, team).require()


def _check_arrangement(asked: Asked, source: Source, team: Team) -> None:
    """Compare how tensors are joined with a reference, if one is given. Collective."""
    request = asked.request
    if request.like is None or asked.operation.table is None or asked.shapes is not None:
        return
    from .likeness import check_arrangement

    reference = open_source(Where(request.like), team).require()
    check_arrangement(request, asked.operation, source, reference, team)


# -- on every process ---------------------------------------------------------------------------


def _aimed(
    asked: Asked, source: Source, training: Mapping[str, Any], adapter: Source | None
) -> Target:
    """Work out what is made; pure, and the same on every process."""
    request, operation, catalog = asked.request, asked.operation, source.table
    derivation = derivation_of(request, operation, adapter.table if adapter else None)
    _check_extra_names(source, asked.src)
    tensors = tensors_of(catalog, derivation)
    listed = catalog.strategy.stages_of if catalog.strategy is not None else ()
    derivation.check_names([*listed, *(one.name for one in catalog.parameters)])
    derived, dst = _wanted(asked, catalog, tensors, derivation)
    ranks = check_ranks(request.ranks, dst)
    dst, apart = with_followers(catalog, dst, derivation)
    selection = select(catalog, dst, derivation, request.unmatched, ranks, tensors, apart)
    _check_untracked(source, selection, dst)
    _check_shapes(source, selection, dst)
    planner = Planner(catalog, dst, selection)
    for rank in ranks:
        planner.names(rank)  # raises if a shape does not divide, or the rank gets nothing
    form, written, arrangement = _arranged(request, planner, source, training)
    if arrangement.parts:
        planner = planner.with_parts(arrangement.parts)
    matchless = [*_matchless(request, catalog, derivation, tensors)]
    return Target(
        planner=planner,
        ranks=ranks,
        files=tuple(f for f in arrangement.names if planner.part(f).rank in set(ranks)),
        dst=request.dst,
        place=_place(request.dst or "", arrangement.folder),
        form=form,
        container=written,
        arrangement=arrangement,
        derived=derived,
        adapter=adapter,
        training=training,
        companions=operation.companions,
        truncated_vocab=truncated_vocab(derivation, tensors),
        tied_duplicates=tied_duplicates(tensors),
        map_in_words=map_in_words(operation, derivation),
        notices=(
            *source.notices,
            *_remarks(request, source, selection, bool(operation.table)),
            *assumptions(request, operation, derivation),
            *(text for option, text in matchless if option == "exclude"),
        ),
        warnings=(
            *source.warnings,
            *(text for option, text in matchless if option != "exclude"),
            *map(str, contradictions(_iterations(source, training, arrangement))),
        ),
    )


def _place(dst: str, folder: str) -> str:
    """Return the place of a destination's files."""
    return address_of(dst, folder) if scheme_of(dst) else str(Path(dst) / folder)


def _remarks(request: Request, source: Source, selection: Selection, mapped: bool) -> Iterator[str]:
    """Yield what to know of the source's patterns, and of what the destination's form lacks."""
    by_pattern = sharded_by_pattern(selection.sources(source.table), source.table)
    if by_pattern:
        yield f"{source.table.label} shards {summarize_names(by_pattern)}"
    yield from unplaced(request, source)
    form = FORMS[request.dst_form or DEFAULT_FORM]
    if form.configured and not source.form.configured and request.like is None:
        names = "" if mapped else "tensors keep their names, and "
        yield (
            f"{names}the destination gets no config.json; for a model that Transformers reads, "
            f"give {'' if mapped else '--map and '}--like"
        )


def _check_untracked(source: Source, selection: Selection, dst: Strategy) -> None:
    """Refuse to shard what lies among loose values: it may be one rank's slice already."""
    untracked = source.description.untracked
    if untracked is None or isinstance(dst, WholeStrategy):
        return
    names = [
        name
        for name, one in selection.sharded.items()
        if name in dst and one.src_name in source.indexes[untracked] and one.holders == (untracked,)
    ]
    if names:
        raise RequestError(
            f"{source.paths[untracked]}: holds {summarize_names(names, 3)}, which {dst.label} "
            "shards: MindSpore leaves one rank's slices there; leave them out "
            "(--exclude), or convert the checkpoint that they come from"
        )


def _check_shapes(source: Source, selection: Selection, dst: Strategy) -> None:
    """Refuse a destination's strategy that states other full shapes than the tensors have."""
    made = (
        fact
        for name, one in selection.sharded.items()
        if name in dst.shapes
        for fact in (
            Fact(SHAPE, name, one.shape, HEADER, source.where.path),
            Fact(SHAPE, name, dst.shapes[name], STRATEGY, dst.label),
        )
    )
    for one in contradictions(made):
        raise RequestError(str(one))


# -- the destination's files ----------------------------------------------------------------------


def _arranged(
    request: Request, planner: Planner, source: Source, training: Mapping[str, Any]
) -> tuple[Form, Format, Arrangement]:
    """Return how the destination's files are made. Raises UsageError for what its form lacks."""
    form = FORMS[request.dst_form or DEFAULT_FORM]
    if request.ranks and form.described:
        raise UsageError(f"leave out --ranks: a {form.name} checkpoint is made and compared whole")
    written = _container(request, form, source)
    naming = _naming(request, form, written, training)
    return form, written, form.arrange(planner, naming)


def _container(request: Request, form: Form, source: Source) -> Format:
    if form.container is not None:
        if request.format not in (None, form.container):
            raise UsageError(f"{form.name} is made of {form.container} files; leave out --format")
        return FORMATS[form.container]
    if request.format is not None:
        return FORMATS[request.format]
    return container(next(iter(source.paths.values())))


def _iterations(
    source: Source, training: Mapping[str, Any], arrangement: Arrangement
) -> Iterator[Fact]:
    """Yield how far the training was, by the source, and by the number that is written."""
    step = training_step(training)
    if arrangement.mark is None or step is None:
        return
    yield Fact(ITERATION, "", frozenset({step}), SCALAR, source.where.path)
    number = int(arrangement.mark[1])
    yield Fact(ITERATION, "", frozenset({number}), OPTION, f"--iteration {number}")


def _naming(request: Request, form: Form, container: Format, training: Mapping[str, Any]) -> Naming:
    """Return how a destination's files are to be made. Raises UsageError for others' options."""
    for other in FORMS.values():
        for name in other.options:
            if name not in form.options and not is_default(request, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} is for --dst-form {other.name}, and the "
                    f"destination is {form.name}"
                )
    own = {name: getattr(request, name) for name in form.options}
    return Naming(request.prefix, "." + container.name, training_step(training), own)


# -- the destination's strategy -------------------------------------------------------------------


def _wanted(
    asked: Asked, catalog: Catalog, tensors: Sequence[Tensor], derivation: Derivation
) -> tuple[Derived | None, Strategy]:
    """Return the destination's strategy, and how it was derived if it was not given."""
    made = [one for one in tensors if not (one.dropped and derivation.renames)]
    schema = Schema(
        tuple(one.name for one in made),
        tuple(one.dtype for one in made),
        tuple(one.shape for one in made),
    )
    wanted = asked.dst
    if isinstance(wanted, Strategy):
        states = catalog.is_whole and not derivation.renames
        return None, written_out(wanted, [schema], states=states)
    from rankxform.derivation.asked import derive_from

    from .strategy_file import label_beside

    if derivation.renames or catalog.is_whole or catalog.strategy is None:
        derived = derive_from(wanted, WholeStrategy(), {0: schema})
    else:
        schemas = {
            rank: group.schema
            for groups in catalog.groups
            for group in groups
            for rank in group.ranks
        }
        named = derivation.schemas(schemas)
        derived = derive_from(wanted, derivation.strategy(_without_followers(catalog)), named)
    strategy = derived.strategy
    if asked.request.dst is not None:
        strategy = replace(strategy, label=label_beside(asked.request.dst))
    return derived, strategy


def _without_followers(catalog: Catalog) -> Strategy:
    """Return the source's strategy as it was given, without states that follow parameters."""
    strategy = catalog.strategy
    assert strategy is not None
    more = {p.name for p in catalog.parameters if p.follows is not None}
    if not more:
        return strategy
    stages = tuple({n: one for n, one in some.items() if n not in more} for some in strategy.stages)
    return replace(strategy, stages=stages)


# -- names ----------------------------------------------------------------------------------------


def _check_extra_names(source: Source, stated: Strategy | None) -> None:
    """Refuse ranks beyond the strategy's if they hold parameters that nobody else has."""
    known = {name for one in source.indexes.values() for name in one.schema.names}
    for rank, one in source.extra.items():
        new = [n for n in one.schema.names if n not in known and not (stated and n in stated)]
        if new:
            raise CheckpointError(
                f"{source.paths[rank]}: holds {summarize_names(new, 2)}, which "
                f"{source.table.label} does not list"
            )


def _matchless_types(request: Request, tensors: Sequence[Tensor]) -> Iterator[tuple[str, str]]:
    """Yield patterns of types that match nothing of which the type would change or stay."""
    written = [one.name for one in tensors if not one.dropped]
    states = [name for name in written if is_state(name)]
    for option, names, what in (
        ("keep_dtype", written, "parameter"),
        ("cast_states", states, "optimizer state or counter"),
    ):
        for pattern in drop.unmatched(getattr(request, option), names):
            yield option, f"{flag_of(option)} {pattern!r} matches no {what}"


def _matchless(
    request: Request, catalog: Catalog, derivation: Derivation, tensors: Sequence[Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield options, and texts on their patterns that match no parameter of files or strategy."""
    yield from _matchless_types(request, tensors)
    if not (request.rename or request.include or request.exclude):
        return
    own = [parameter.name for parameter in catalog.parameters]
    own += catalog.strategy.stages_of if catalog.strategy is not None else ()
    names = set(map(derivation.name_of, own))
    if derivation.renames:  # a source tensor that is left out keeps its name
        names = {one.name for one in tensors}
    for rule in rename.unmatched(request.rename, own):
        yield (
            "rename",
            f"--rename {rule!r} renames nothing: no parameter matches it (an optimizer state is "
            "matched without its prefix, such as adam_m.)",
        )
    for option in ("include", "exclude"):
        for pattern in drop.unmatched(getattr(request, option), names):
            yield option, f"--{option} {pattern!r} matches no parameter"
