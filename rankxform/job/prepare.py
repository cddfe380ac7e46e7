"""Everything before a tensor byte is touched: strategies, folders, headers, checks, plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import FORMS, USUAL, Form, Shards, Target
from rankxform.checkpoints.checks import check_files, own_names, repaired
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.base import FORMATS, Format, Index, Schema
from rankxform.layout.names import summarize_names
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.ops import drop, rename
from rankxform.ops.base import Derivation, Tensor
from rankxform.planning.catalog import Catalog
from rankxform.planning.consistency import sharded_by_pattern
from rankxform.planning.derived import tensors_of
from rankxform.planning.description import Description
from rankxform.planning.plan import Planner
from rankxform.planning.selection import select, with_followers
from rankxform.planning.stages import check_ranks
from rankxform.planning.table import catalog_of, written_out
from rankxform.planning.visibility import Visibility
from rankxform.storage.index import Indexer, container
from rankxform.transport import Team
from rankxform.values import dataclass

from .described import check_loose, naming, training_facts, unplaced
from .inputs import Inputs, inputs, source_form, wish
from .metrics import Phases
from .operation_inputs import assumptions, check_steps, cut_rows, derivation_of, repeated, taken
from .request import Request
from .unsharded import unsharded
from .visibility import look_on_all, searched_nodes, visibility_of
from .which_strategy import explained

if TYPE_CHECKING:
    from rankxform.derivation.request import Derived


_ALLOWED = ("check_crc", "allow_extra_ranks", "allow_equal_slices")


@dataclass
class SourceFiles:
    """The source's files, before their tensors are read.

    where: the folder, for messages. shards: which files were chosen. indexes: by id; extra: of one
    file beyond the strategy's ranks, if any. visibility: which process can open which.
    """

    where: str
    form: Form
    shards: Shards
    indexes: Mapping[int, Index]
    extra: Mapping[int, Index]
    visibility: Visibility

    @property
    def paths(self) -> Mapping[int, Path]:
        return self.shards.paths


@dataclass
class Conversion:
    """A prepared request: all that is known before tensor bytes are read.

    planner: the plan, with the catalog, the destination's strategy and the selection. ranks: the
    destination ranks to make; made: the ids of their files. target: where these belong, if the
    request names a folder.
    warnings: what may not be what was meant, to be said first and last; notices: what to know.
    derived: how the destination's strategy came about, if it was derived. common: facts on the
    training, such as its global_step. adapter: what is added to the source's matrices, if anything
    is. cut: source tensors that lose rows of the vocabulary. repeated: source tensors that are left
    out, because each is said to be the same as another. companions: small files that go with
    the destination, by name. naming: the map that is applied, with what it takes, in words.
    """

    request: Request
    files: SourceFiles
    planner: Planner
    ranks: tuple[int, ...]
    made: tuple[int, ...]
    target: Target
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    derived: Derived | None = None
    common: Mapping[str, Any] = field(default_factory=dict)
    adapter: Conversion | None = None
    cut: tuple[str, ...] = ()
    repeated: tuple[tuple[str, str], ...] = ()
    companions: Mapping[str, bytes] = field(default_factory=dict)
    naming: str | None = None

    @property
    def finals(self) -> dict[int, Path]:
        """The path of each destination file that is made, by its id."""
        return self.target.paths(self.made)

    def explained(self, team: Team) -> AbstractContextManager[None]:
        """Where a check inside fails, say what else than the given strategies may be meant."""
        src, dst = self.planner.catalog.strategy, self.planner.dst
        return explained(team, self.request, self.files.shards, src, dst)


def prepare(request: Request, team: Team, phases: Phases | None = None) -> Conversion:
    """Do everything that needs no tensor byte; every process gets the same."""
    phases = phases or Phases()
    searched = searched_nodes(team)
    with phases.phase("plan"):
        there, as_first = None, frozenset[int]()
        if team.nodes.count > 1 and request.shapes is None and request.files is None:
            form = team.bcast(lambda: source_form(request, Path(request.src)).name)
            there, as_first = look_on_all(team, Path(request.src), wish(request), FORMS[form])
        found = team.bcast(lambda: inputs(request, there, searched))
    with phases.phase("index"):
        if found.imagined:
            visibility = Visibility.full(team.nodes.of, found.shards.paths)
        else:
            visibility, notices = visibility_of(team, found.shards.paths, as_first)
            found.notices.extend(notices)
        indexes = found.imagined or index_all(team, found.shards.paths, visibility)
        common = training_facts(found, indexes, visibility, team)
    adapter = _adapter(request, found, team, phases)
    found = _compared(found, indexes, visibility, searched, team)
    meant = explained(team, found.request, found.shards, found.src, found.dst)
    with phases.phase("plan"), meant:
        return team.agree(lambda: _planned(found, indexes, visibility, common, searched, adapter))


# -- on every process ---------------------------------------------------------------------------


def index_all(team: Team, paths: Mapping[int, Path], visibility: Visibility) -> dict[int, Index]:
    """Index the files, each process its part, and give every process all of them."""
    mine = visibility.partition(paths)[team.rank]
    indexer = Indexer()
    parts = team.allgather(lambda: {file: indexer.index(paths[file]) for file in mine})
    found = {file: one for part in parts for file, one in part.items()}
    same: dict[Schema, Schema] = {}  # what several processes found is kept once
    for one in found.values():
        one.schema = same.setdefault(one.schema, one.schema)
    return dict(sorted(found.items()))


def _planned(
    found: Inputs,
    indexes: Mapping[int, Index],
    visibility: Visibility,
    common: Mapping[str, Any],
    searched: str,
    adapter: Conversion | None,
) -> Conversion:
    """Plan; pure, and the same on every process."""
    request, notices = found.request, found.notices
    src, files = _source_files(found, indexes, visibility)
    inside = files.indexes
    derivation = derivation_of(
        request, found.operation, adapter.planner.catalog if adapter else None
    )
    catalog = _catalog(found, src, files, derivation, searched)
    _check_extra_names(found, files, catalog.label)
    tensors = tensors_of(catalog, derivation)
    listed = catalog.strategy.stages_of if catalog.strategy is not None else ()
    derivation.check_names([*listed, *(one.name for one in catalog.parameters)])
    derived, dst = _wanted(found, catalog, tensors, derivation)
    check_steps(tensors, visibility, adapter.files.visibility if adapter else visibility)
    if derived is not None:
        request = replace(request, dst_strategy=dst.label if request.dst else dst)
    ranks = check_ranks(request.ranks, dst)
    dst, apart = with_followers(catalog, dst, derivation)
    selection = select(catalog, dst, derivation, request.unmatched, ranks, tensors, apart)
    check_loose(found.shards, inside, selection, dst)
    planner = Planner(catalog, dst, selection)
    for rank in ranks:
        planner.names(rank)  # raises if a shape does not divide, or the rank gets nothing
    by_pattern = sharded_by_pattern(selection, catalog)
    if by_pattern:
        notices.append(f"{catalog.label} shards {summarize_names(by_pattern)}")
    target = _target(request, planner, files, common)
    if target.arrangement.parts:
        planner = planner.with_parts(target.arrangement.parts)
    made = tuple(f for f in target.arrangement.names if planner.part(f).rank in set(ranks))
    notices.extend(unplaced(request, found.shards, inside))
    notices.extend(assumptions(request, found.operation, derivation))
    if request.dst_form == "huggingface" != found.form and request.like is None:
        names = "" if found.operation.table else "tensors keep their names, and "
        notices.append(
            f"{names}the destination gets no config.json; for a model that Transformers reads, "
            f"give {'' if found.operation.table else '--map and '}--like"
        )
    warnings = list(_warnings(found.shards))
    for option, text in _unmatched(request, catalog, derivation, tensors):
        (notices if option == "exclude" else warnings).append(text)
    return Conversion(
        request, files, planner, ranks, made, target, notices, warnings, derived, common,
        adapter, cut_rows(derivation, tensors), repeated(tensors), found.operation.companions,
        taken(found.operation, derivation),
    )  # fmt: skip


def _compared(
    found: Inputs,
    indexes: Mapping[int, Index],
    visibility: Visibility,
    searched: str,
    team: Team,
) -> Inputs:
    """Find out by a reference how tensors are joined, if one is given. Collective."""
    request = found.request
    if request.like is None or found.operation.table is None or found.imagined:
        return found
    from .likeness import chosen

    reference = prepare(Request(request.like, None, None, "none", memory=request.memory), team)

    def catalog() -> tuple[SourceFiles, Catalog]:
        src, files = _source_files(found, indexes, visibility)
        return files, _catalog(found, src, files, Derivation(), searched)

    files, known = team.agree(catalog)
    operation = chosen(request, found.operation, known, files, reference, team)
    return replace(found, operation=operation)


def _adapter(request: Request, found: Inputs, team: Team, phases: Phases) -> Conversion | None:
    """Prepare to read an adapter, if one is to be added. Collective."""
    if found.operation.lora is None:
        return None
    strategy = found.operation.lora_strategy
    own = Request(found.operation.lora, None, strategy, "none", memory=request.memory)
    if found.operation.inside:  # the same files as the source's
        same = ("src_form", "src_pattern", "step", "suffix", "files", "unlisted", *_ALLOWED)
        strategy = request.lora_strategy or request.src_strategy
        own = replace(own, src_strategy=strategy, **{n: getattr(request, n) for n in same})
    return prepare(own, team, phases)


def _source_files(
    found: Inputs, indexes: Mapping[int, Index], visibility: Visibility
) -> tuple[Strategy, SourceFiles]:
    """Return the source's strategy, and its files: those of its ranks, and others."""
    src, described = found.src, found.shards.said is not None
    if isinstance(src, WholeStrategy) and not found.imagined and not described:
        src, more = unsharded(found.shards, indexes, found.request.src)
        found.notices.extend(one for one in more if one not in found.notices)
    inside = {file: one for file, one in indexes.items() if described or file < src.ranks}
    outside = {file: one for file, one in indexes.items() if file not in inside}
    where, form = found.request.src, FORMS[found.form]
    return src, SourceFiles(where, form, found.shards, inside, outside, visibility)


def _target(
    request: Request, planner: Planner, files: SourceFiles, common: Mapping[str, Any]
) -> Target:
    """Return the destination's files. Raises UsageError for what its form does not have."""
    form = FORMS[request.dst_form or USUAL]
    if request.ranks and form.described:
        raise UsageError(f"leave out --ranks: a {form.name} checkpoint is made and compared whole")
    written = _container(request, form, files)
    arrangement = form.arrange(planner, naming(request, form, written, common))
    folder = Path(request.dst or "") / arrangement.folder
    return Target(folder, form, written, arrangement)


def _container(request: Request, form: Form, files: SourceFiles) -> Format:
    if form.container is not None:
        if request.format not in (None, form.container):
            raise UsageError(f"{form.name} is made of {form.container} files; leave out --format")
        return FORMATS[form.container]
    if request.format is not None:
        return FORMATS[request.format]
    return container(next(iter(files.paths.values())))


def _catalog(
    found: Inputs, src: Strategy, files: SourceFiles, derivation: Derivation, searched: str
) -> Catalog:
    """Return the source's catalog, in the source's names."""
    read = own_names(found.shards, files.indexes)
    shards = repaired(found.shards, read)
    check_files(shards, read, derivation.drops)
    said = shards.said or Description()
    if shards is not found.shards:
        found.notices.extend(one for one in said.notices[-1:] if one not in found.notices)
    paths = {file: str(path) for file, path in files.paths.items()}
    if not said.boxes and said.strategy is None:
        said = replace(said, strategy=src)
    return catalog_of(said, read, paths, found.wanted, searched)


def _wanted(
    found: Inputs, catalog: Catalog, tensors: Sequence[Tensor], derivation: Derivation
) -> tuple[Derived | None, Strategy]:
    """Return the destination's strategy, and how it was derived if it was not given."""
    made = [one for one in tensors if not (one.dropped and derivation.renames)]
    schema = Schema(
        tuple(one.name for one in made),
        tuple(one.dtype for one in made),
        tuple(one.shape for one in made),
    )
    wanted = found.dst
    if isinstance(wanted, Strategy):
        states = catalog.is_whole and not derivation.renames
        return None, written_out(wanted, [schema], states=states)
    from .beside import path_beside
    from .derived import derive_from

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
    if found.request.dst is not None:
        strategy = replace(strategy, label=str(path_beside(found.request.dst)))
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


def _check_extra_names(found: Inputs, files: SourceFiles, label: str) -> None:
    """Refuse ranks beyond the strategy's if they hold parameters that nobody else has."""
    known = {name for one in files.indexes.values() for name in one.schema.names}
    for rank, one in files.extra.items():
        new = [n for n in one.schema.names if n not in known and n not in found.src]
        if new:
            raise CheckpointError(
                f"{files.paths[rank]}: holds {summarize_names(new, 2)}, which {label} does not list"
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


def _warnings(shards: Shards) -> Iterator[str]:
    if shards.newer and shards.step:
        epoch, step = shards.step
        yield (
            f"{shards.newer}. What is converted is epoch {epoch} step {step} "
            f"(--step {epoch}_{step} says that it is meant, --step latest refuses)"
        )
