"""Everything before a tensor byte is touched: strategies, folders, headers, checks, plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, Form, Where
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.base import FORMATS, Format, Schema
from rankxform.layout.names import summarize_names
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.metrics import Phases
from rankxform.ops import drop, rename
from rankxform.ops.base import Derivation, Tensor
from rankxform.planning.catalog import Catalog
from rankxform.planning.consistency import sharded_by_pattern
from rankxform.planning.derived import tensors_of
from rankxform.planning.plan import Planner
from rankxform.planning.selection import select, with_followers
from rankxform.planning.stages import check_ranks
from rankxform.planning.table import written_out
from rankxform.request import Request
from rankxform.source.opening import Source, open_source
from rankxform.storage import strategies
from rankxform.storage.index import container
from rankxform.transport import Team
from rankxform.values import dataclass

from .asked import Asked, read_asked, source_of, where_of
from .naming import check_loose, naming, training_facts, unplaced
from .operation_inputs import (
    assumptions,
    check_steps,
    derivation_of,
    map_in_words,
    tied_duplicates,
    truncated_vocab,
)
from .suggestions import suggesting
from .target import Target

if TYPE_CHECKING:
    from rankxform.derivation.request import Derived


@dataclass
class Conversion:
    """A prepared request: all that is known before tensor bytes are read.

    source: what is read, opened. planner: the plan, with the catalog, the destination's strategy
    and the selection. ranks: the destination ranks to make; output_files: the ids of their files.
    target: where these belong, if the request names a folder. warnings: what may not be what was
    meant, to be said first and last; notices: what to know. derived: how the destination's strategy
    came about, if it was derived. common: facts on the training, such as its global_step. adapter:
    what is added to the source's matrices, if anything is. truncated_vocab: source tensors that
    lose rows of the vocabulary. tied_duplicates: source tensors that are left out, because each is
    said to be the same as another. companions: small files that go with the destination, by name.
    map_in_words: the map that is applied, with what it takes, in words.
    """

    request: Request
    source: Source
    planner: Planner
    ranks: tuple[int, ...]
    output_files: tuple[int, ...]
    target: Target
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    derived: Derived | None = None
    common: Mapping[str, Any] = field(default_factory=dict)
    adapter: Source | None = None
    truncated_vocab: tuple[str, ...] = ()
    tied_duplicates: tuple[tuple[str, str], ...] = ()
    companions: Mapping[str, bytes] = field(default_factory=dict)
    map_in_words: str | None = None

    @property
    def output_paths(self) -> dict[int, Path]:
        """The path of each destination file that is made, by its id."""
        return self.target.paths(self.output_files)

    def suggesting(self, team: Team) -> AbstractContextManager[None]:
        """Where a check inside fails, say what else than the given strategies may be meant."""
        return suggesting(team, self.request, self.source, self.planner.dst)


def prepare(request: Request, team: Team, phases: Phases | None = None) -> Conversion:
    """Do everything that needs no tensor byte; every process gets the same."""
    phases = phases or Phases()
    with phases.phase("plan"):
        asked = team.bcast(lambda: read_asked(request))
    with phases.phase("index"):
        source = source_of(asked, team)
        adapter = _adapter(asked, team)
    with phases.phase("plan"), suggesting(team, asked.request, source, asked.dst):
        team.agree(source.require)
    with phases.phase("index"):
        common = training_facts(asked.request, source, team)
    _check_arrangement(asked, source, team)
    with phases.phase("plan"), suggesting(team, asked.request, source, asked.dst):
        return team.agree(lambda: _planned(asked, source, common, adapter))


def _check_arrangement(asked: Asked, source: Source, team: Team) -> None:
    """Compare how tensors are joined with a reference, if one is given. Collective."""
    request = asked.request
    if request.like is None or asked.operation.table is None or asked.shapes is not None:
        return
    from .likeness import check_arrangement

    reference = open_source(Where(request.like), team).require()
    check_arrangement(request, asked.operation, source, reference, team)


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


# -- on every process ---------------------------------------------------------------------------


def _planned(
    asked: Asked, source: Source, common: Mapping[str, Any], adapter: Source | None
) -> Conversion:
    """Plan; pure, and the same on every process."""
    request, operation, catalog = asked.request, asked.operation, source.table
    notices = [*source.notices]
    derivation = derivation_of(request, operation, adapter.table if adapter else None)
    _check_extra_names(source, asked.src)
    tensors = tensors_of(catalog, derivation)
    listed = catalog.strategy.stages_of if catalog.strategy is not None else ()
    derivation.check_names([*listed, *(one.name for one in catalog.parameters)])
    derived, dst = _wanted(asked, catalog, tensors, derivation)
    check_steps(tensors, source.reach, adapter.reach if adapter else source.reach)
    if derived is not None:
        request = replace(request, dst_strategy=dst.label if request.dst else dst)
    ranks = check_ranks(request.ranks, dst)
    dst, apart = with_followers(catalog, dst, derivation)
    selection = select(catalog, dst, derivation, request.unmatched, ranks, tensors, apart)
    check_loose(source, selection, dst)
    planner = Planner(catalog, dst, selection)
    for rank in ranks:
        planner.names(rank)  # raises if a shape does not divide, or the rank gets nothing
    by_pattern = sharded_by_pattern(selection.sources(catalog), catalog)
    if by_pattern:
        notices.append(f"{catalog.label} shards {summarize_names(by_pattern)}")
    target = _target(request, planner, source, common)
    if target.arrangement.parts:
        planner = planner.with_parts(target.arrangement.parts)
    files = tuple(f for f in target.arrangement.names if planner.part(f).rank in set(ranks))
    notices.extend(unplaced(request, source))
    notices.extend(assumptions(request, operation, derivation))
    if request.dst_form == "huggingface" != source.form.name and request.like is None:
        names = "" if operation.table else "tensors keep their names, and "
        notices.append(
            f"{names}the destination gets no config.json; for a model that Transformers reads, "
            f"give {'' if operation.table else '--map and '}--like"
        )
    warnings = [*source.warnings]
    for option, text in _unmatched(request, catalog, derivation, tensors):
        (notices if option == "exclude" else warnings).append(text)
    return Conversion(
        request, source, planner, ranks, files, target, notices, warnings, derived, common,
        adapter, truncated_vocab(derivation, tensors), tied_duplicates(tensors),
        operation.companions, map_in_words(operation, derivation),
    )  # fmt: skip


def _target(
    request: Request, planner: Planner, source: Source, common: Mapping[str, Any]
) -> Target:
    """Return the destination's files. Raises UsageError for what its form does not have."""
    form = FORMS[request.dst_form or DEFAULT_FORM]
    if request.ranks and form.described:
        raise UsageError(f"leave out --ranks: a {form.name} checkpoint is made and compared whole")
    written = _container(request, form, source)
    arrangement = form.arrange(planner, naming(request, form, written, common))
    folder = Path(request.dst or "") / arrangement.folder
    return Target(folder, form, written, arrangement)


def _container(request: Request, form: Form, source: Source) -> Format:
    if form.container is not None:
        if request.format not in (None, form.container):
            raise UsageError(f"{form.name} is made of {form.container} files; leave out --format")
        return FORMATS[form.container]
    if request.format is not None:
        return FORMATS[request.format]
    return container(next(iter(source.paths.values())))


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

    from .strategy_file import path_beside

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
        strategy = replace(strategy, label=str(path_beside(asked.request.dst)))
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


def _unmatched(
    request: Request, catalog: Catalog, derivation: Derivation, tensors: Sequence[Tensor]
) -> Iterator[tuple[str, str]]:
    """Yield options, and texts on their patterns that match no parameter of files or strategy."""
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
