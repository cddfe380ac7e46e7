"""Everything before a tensor byte is touched: strategies, folders, headers, checks, plan."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from rankxform.checkpoints.base import FORMS, Form, Listing, Shards, Target, Wish, form_of
from rankxform.errors import CheckpointError, FormatError, RequestError, UsageError
from rankxform.formats.base import FORMATS, Index, Schema
from rankxform.formats.shapes import parse as parse_shapes
from rankxform.layout.layout import whole
from rankxform.layout.names import ranges, summarize_names
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.ops import drop, rename
from rankxform.ops.base import Derivation
from rankxform.planning.catalog import Catalog, build_catalog
from rankxform.planning.consistency import sharded_by_pattern
from rankxform.planning.infer import complete, resolve
from rankxform.planning.plan import Planner
from rankxform.planning.stages import check_ranks, needed_stages
from rankxform.planning.selection import REPLICATE, select
from rankxform.planning.visibility import Visibility
from rankxform.storage import strategies
from rankxform.storage.index import Indexer, container
from rankxform.storage.posix import read_bytes
from rankxform.transport import Team

from .metrics import Phases
from .request import Request
from .unsharded import check_stated, unsharded
from .visibility import look_on_all, searched_nodes, visibility_of

if TYPE_CHECKING:
    from rankxform.layout.given import Derived, Given


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
    destination ranks to make. target: where their files belong, if the request names a folder.
    warnings: what may not be what was meant, to be said first and last; notices: what to know.
    derived: how the destination's strategy came about, if it was derived.
    """

    request: Request
    files: SourceFiles
    planner: Planner
    ranks: tuple[int, ...]
    target: Target
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    derived: Derived | None = None

    @property
    def finals(self) -> dict[int, Path]:
        """The path of each destination rank's file."""
        return self.target.paths(self.ranks)


def prepare(request: Request, team: Team, phases: Phases | None = None) -> Conversion:
    """Do everything that needs no tensor byte; every process gets the same."""
    phases = phases or Phases()
    searched = searched_nodes(team)
    with phases.phase("plan"):
        there, as_first = None, frozenset[int]()
        if team.nodes.count > 1 and request.shapes is None and request.files is None:
            form = team.bcast(lambda: form_of(Path(request.src), request.src_form).name)
            there, as_first = look_on_all(team, Path(request.src), _wish(request), FORMS[form])
        found = team.bcast(lambda: _inputs(request, there, searched))
    with phases.phase("index"):
        if found.imagined:
            visibility = Visibility.full(team.nodes.of, found.shards.paths)
        else:
            visibility, notices = visibility_of(team, found.shards.paths, as_first)
            found.notices.extend(notices)
        indexes = found.imagined or index_all(team, found.shards.paths, visibility)
    with phases.phase("plan"):
        return team.agree(lambda: _planned(found, indexes, visibility, searched))


@dataclass(frozen=True)
class _Inputs:
    """What process 0 finds before headers are read; `wanted` are the source ranks to look at.

    dst: the destination's strategy, or what it is to be derived from.
    """

    request: Request
    src: Strategy
    dst: Strategy | Given
    form: str
    shards: Shards
    wanted: tuple[int, ...]
    notices: list[str]
    imagined: Mapping[int, Index] = field(default_factory=dict)


def _inputs(request: Request, there: Listing | None, searched: str) -> _Inputs:
    """Read strategies and folders; process 0 alone does this.

    `there` is what all nodes have; `searched` says which they are, if there are several.
    """
    src = strategies.load(request.src_strategy)
    dst = _question(request) or strategies.load(request.dst_strategy)
    if request.shapes is not None:
        return _imagined(request, src, dst, Path(request.shapes))
    where = Path(request.src).absolute()
    is_whole = isinstance(src, WholeStrategy)
    wanted = None if is_whole else _needed_ranks(src, dst, request)
    among = None if is_whole else range(src.ranks)
    form = form_of(where, request.src_form)
    shards = _shards(request, form, where, wanted, there, searched, among)
    check_stated(request, where, shards)
    if wanted is None:
        wanted = sorted(shards.paths)
    elif not any(rank in shards.paths for rank in wanted):
        raise CheckpointError(f"{where}: none of the ranks {ranges(wanted)} is there{searched}")
    outside = [] if is_whole else [rank for rank in shards.paths if rank >= src.ranks]
    keep = {*wanted, *outside[-1:]}  # of the ranks beyond the strategy's, one is looked at
    kept = {rank: path for rank, path in sorted(shards.paths.items()) if rank in keep}
    dst_path = str(Path(request.dst).absolute()) if request.dst is not None else None
    return _Inputs(
        replace(request, src=str(where), dst=dst_path),
        src,
        dst,
        form.name,
        replace(shards, paths=kept),
        tuple(wanted),
        list(_notices(where, src, shards, wanted, outside, searched)),
    )


def _question(request: Request) -> Given | None:
    """Return what the destination's strategy is to be derived from, if it is."""
    if not request.derives:
        request.check_derives()
        return None
    from .derived import question

    return question(request)


def _imagined(request: Request, src: Strategy, dst: Strategy | Given, shapes: Path) -> _Inputs:
    """Imagine the checkpoint that `src` makes of parameters with the given full shapes."""
    try:
        known = parse_shapes(read_bytes(shapes))
    except FormatError as error:
        raise UsageError(f"{shapes}: {error}") from error
    if isinstance(src, PatternStrategy):
        src = src.over({name: shape for name, (shape, _) in known.items()}, states=True)
    indexes: dict[int, Index] = {}
    for stage in range(len(src.stages)):
        names = [n for n in known if n not in src or stage in src.stages_of.get(n, (0,))]
        sliced = []
        for name in names:
            shape, _ = known[name]
            try:
                layout = src.layout(name, stage, len(shape)) if name in src else whole(len(shape))
                layout = layout.fold(shape, slices=False)
                sliced.append(layout.grid(shape).box(layout.cell(0)).shape)
            except RequestError as error:
                raise RequestError(f"{shapes}: {name!r} in {src.label}: {error}") from error
        types = tuple(known[name][1] for name in names)
        schema = Schema(tuple(names), types, tuple(sliced))
        indexes.update((rank, Index(schema, array("q"), {}, 0)) for rank in src.ranks_in(stage))
    form = form_of(Path(request.src), request.src_form)
    paths = {rank: Path(form.path(rank, request.prefix, ".ckpt")) for rank in indexes}
    return _Inputs(request, src, dst, form.name, Shards(paths), tuple(indexes), [], indexes)


def _wish(request: Request) -> Wish:
    return Wish(request.src_pattern, request.step, request.suffix)


def _shards(
    request: Request,
    form: Form,
    where: Path,
    wanted: Sequence[int] | None,
    there: Listing | None,
    searched: str,
    among: range | None,
) -> Shards:
    if request.files is None:
        wish = _wish(request)
        return form.choose(where, there or form.look(where, wish), wanted, wish, searched, among)
    paths = {rank: Path(path).absolute() for rank, path in request.files.items()}
    for rank, path in paths.items():
        if not path.is_file() and not searched:
            raise UsageError(f"{path}: there is no such file, which is to be rank {rank}'s")
    return Shards(paths)


def _needed_ranks(src: Strategy, dst: Strategy | Given, request: Request) -> list[int]:
    """Return the source ranks of the stages that the wanted destination ranks draw on.

    With `unmatched` "replicate" these are all ranks: any file may hold a parameter that no source
    stage lists. So are they where the destination's strategy has to be derived first.
    """
    if request.unmatched == REPLICATE or not isinstance(dst, Strategy):
        return list(range(src.ranks))
    src = Derivation.of(vars(request)).strategy(src)
    stages = {dst.stage_of(rank) for rank in check_ranks(request.ranks, dst)}
    needed = {s for stage in stages for s in needed_stages(src, dst, stage)}
    return [rank for stage in sorted(needed) for rank in src.ranks_in(stage)]


def _notices(
    where: Path,
    src: Strategy,
    shards: Shards,
    wanted: Sequence[int],
    outside: Sequence[int],
    searched: str,
) -> Iterator[str]:
    if outside:
        yield (
            f"{where}: {len(outside)} ranks from {min(outside)} on are beyond the {src.ranks} of "
            f"{src.label} and were not used"
        )
    missing = [rank for rank in wanted if rank not in shards.paths]
    if missing:
        yield f"{where}: no file of rank {ranges(missing)}{searched}; copies on other ranks serve"


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
    found: _Inputs, indexes: Mapping[int, Index], visibility: Visibility, searched: str
) -> Conversion:
    """Plan; pure, and the same on every process."""
    request, src, notices = found.request, found.src, found.notices
    if isinstance(src, WholeStrategy) and not found.imagined:
        src, more = unsharded(found.shards, indexes, request.src)
        notices.extend(more)
    inside = {rank: one for rank, one in indexes.items() if rank < src.ranks}
    outside = {rank: one for rank, one in indexes.items() if rank >= src.ranks}
    files = SourceFiles(request.src, FORMS[found.form], found.shards, inside, outside, visibility)
    derivation = Derivation.of(vars(request))
    src, dst, catalog, derived = _catalog(found, src, files, derivation, searched)
    if derived is not None:
        request = replace(request, dst_strategy=dst.label if request.dst else dst)
    ranks = check_ranks(request.ranks, dst)
    selection = select(catalog, dst, derivation, request.unmatched, ranks)
    planner = Planner(catalog, dst, selection, request.replicas)
    try:
        for rank in ranks:
            planner.names(rank)  # raises if a shape does not divide, or the rank gets nothing
    except RequestError as error:
        if not outside:
            raise
        raise RequestError(
            f"{error}. {request.src} holds files of more ranks than the {src.ranks} of "
            f"{src.label}: is that this checkpoint's strategy?"
        ) from error
    by_pattern = sharded_by_pattern(selection, catalog)
    if by_pattern:
        notices.append(f"{src.label} shards {summarize_names(by_pattern)}")
    given = request.format
    written = FORMATS[given] if given else container(next(iter(files.paths.values())))
    target = Target(Path(request.dst or ""), FORMS[request.dst_form], written, request.prefix)
    warnings = list(_warnings(found.shards))
    for option, text in _unmatched(request, catalog):
        (notices if option == "exclude" else warnings).append(text)
    return Conversion(request, files, planner, ranks, target, notices, warnings, derived)


def _catalog(
    found: _Inputs, src: Strategy, files: SourceFiles, derivation: Derivation, searched: str
) -> tuple[Strategy, Strategy, Catalog, Derived | None]:
    """Return both strategies, completed by what the files hold, and the source's catalog.

    All use the names at the destination, but a pattern of the source matches the source's names.
    """
    derived = None
    read = {rank: one.schema for rank, one in files.indexes.items()}
    src = resolve(src, read)
    listed = list(src.stages_of)
    src = derivation.strategy(src)
    schemas, src_names = derivation.schemas(read, listed)
    wanted = found.dst
    if not isinstance(wanted, Strategy):
        from .beside import path_beside
        from .derived import derive_from

        derived = derive_from(wanted, src, schemas)
        wanted = derived.strategy
        if found.request.dst is not None:
            wanted = replace(wanted, label=str(path_beside(found.request.dst)))
    src, dst = complete(src, wanted, schemas)
    _check_extra_names(found, files, src)
    paths = {rank: str(path) for rank, path in files.paths.items()}
    catalog = build_catalog(src, schemas, paths, found.wanted, searched, src_names)
    return src, dst, catalog, derived


def _check_extra_names(found: _Inputs, files: SourceFiles, src: Strategy) -> None:
    """Refuse ranks beyond the strategy's if they hold parameters that nobody else has."""
    known = {name for one in files.indexes.values() for name in one.schema.names}
    for rank, one in files.extra.items():
        new = [n for n in one.schema.names if n not in known and n not in found.src]
        if new:
            raise CheckpointError(
                f"{files.paths[rank]}: holds {summarize_names(new)}, which {src.label} "
                f"does not list; it describes {src.ranks} ranks, and the checkpoint has "
                "more. Give the folder with the strategy files of all pipeline stages"
            )


def _unmatched(request: Request, catalog: Catalog) -> Iterator[tuple[str, str]]:
    """Yield options, and texts on their patterns that match no parameter of files or strategy."""
    if not (request.rename or request.include or request.exclude):
        return
    names = {*catalog.listed, *catalog.unlisted, *catalog.strategy.stages_of}
    own = [catalog.src_name(name) for name in names]
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
