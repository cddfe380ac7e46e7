"""Everything before a tensor byte is touched: strategies, folders, headers, checks, plan."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankxform.checkpoints.rank_folders import Listing, Shards, choose, look, ranges
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.base import Contents, Index
from rankxform.formats.shapes import parse as parse_shapes
from rankxform.formats.wire import FormatError
from rankxform.layout.names import followed, in_few_words
from rankxform.layout.strategy import HandCut, Strategy, WholeStrategy
from rankxform.planning.assign import NOTHING, Done, share
from rankxform.planning.catalog import Source, survey
from rankxform.planning.consistency import cut_by_hand
from rankxform.planning.infer import complete
from rankxform.planning.plan import Planner, check_ranks, needed_stages
from rankxform.planning.selection import Selection, select
from rankxform.planning.transfers import Portion
from rankxform.planning.visibility import Sight
from rankxform.storage import strategies
from rankxform.storage.index import Indexer, container
from rankxform.storage.posix import read_bytes
from rankxform.transport import Team

from .metrics import Phases
from .request import Request
from .unsharded import check_stated, unsharded
from .visibility import asked, look_on_all, sight_of


@dataclass
class Conversion:
    """A prepared request: all that is known before tensor bytes are read.

    indexes: of the source files, by rank; extra: of one file beyond the strategy's ranks, if any.
    warnings: what may not be what was meant, to be said first and last; notices: what to know.
    """

    request: Request
    source: Source
    dst: Strategy
    shards: Shards
    indexes: Mapping[int, Index]
    extra: Mapping[int, Index]
    selection: Selection
    ranks: tuple[int, ...]
    planner: Planner
    sight: Sight
    notices: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    @property
    def format(self) -> str:
        return self.request.format or container(next(iter(self.shards.paths.values())))

    def final(self, rank: int) -> Path:
        """Return the file of a destination rank."""
        assert self.request.dst is not None
        return (
            Path(self.request.dst) / f"rank_{rank}" / f"{self.request.prefix}{rank}.{self.format}"
        )

    def shares(
        self, processes: int, ranks: Sequence[int] | None = None, done: Done = NOTHING
    ) -> list[list[Portion]]:
        """Return the portions of the files of `ranks` (None: all) that each process serves.

        What is `done` of them weighs nothing.
        """
        return share(self.planner, self.ranks if ranks is None else ranks, processes, done)

    def alike(self, ranks: Sequence[int]) -> dict[int, list[int]]:
        """Return `ranks` by the first one whose file has the same boxes."""
        first: dict[object, int] = {}
        found: dict[int, list[int]] = {}
        for rank in ranks:
            found.setdefault(first.setdefault(self.planner.likeness(rank), rank), []).append(rank)
        return found

    @property
    def everything(self) -> list[Portion]:
        """All files, whole."""
        return [Portion(rank, 0, len(self.planner.names(rank))) for rank in self.ranks]


def prepare(request: Request, team: Team, phases: Phases | None = None) -> Conversion:
    """Do everything that needs no tensor byte; every process gets the same."""
    phases = phases or Phases()
    looked = asked(team)
    with phases.phase("plan"):
        there, as_first = None, frozenset[int]()
        if _is_spread(request, team):
            there, as_first = look_on_all(team, Path(request.src), request.src_pattern)
        found = team.share(lambda: _inputs(request, there, looked))
    with phases.phase("index"):
        sight, more = _sight(team, found, as_first)
        found.notices.extend(more)
        indexes = found.imagined or gather_indexes(team, found.shards.paths, sight)
    with phases.phase("plan"), team.together():
        src = found.src
        if isinstance(src, WholeStrategy) and not found.imagined:
            src, more = unsharded(found.shards, indexes, found.request.src)
            found.notices.extend(more)
        contents = {rank: one.contents for rank, one in indexes.items() if rank < src.ranks}
        src, dst = complete(src, found.dst, contents)
        inside = {rank: one for rank, one in indexes.items() if rank < src.ranks}
        outside = {rank: one for rank, one in indexes.items() if rank >= src.ranks}
        _check_extra_names(found, inside, outside)
        paths = {rank: str(path) for rank, path in found.shards.paths.items()}
        source = survey(src, inside, paths, found.wanted, looked)
        chosen = found.request
        ranks = check_ranks(chosen.ranks, dst)
        selection = select(source, dst, chosen.include, chosen.exclude, chosen.one_sided, ranks)
        planner = Planner(source, dst, selection, chosen.replicas)
        for rank in ranks:
            planner.names(rank)  # raises where a shape does not divide, or nothing lands
        by_hand = cut_by_hand(selection, source)
        if by_hand:
            found.notices.append(f"{src.label} cuts {in_few_words(by_hand)}")
        return Conversion(
            chosen, source, dst, found.shards, inside, outside, selection, ranks, planner, sight,
            found.notices, list(_warnings(found.shards)),
        )  # fmt: skip
    raise AssertionError("together() raises or returns")


def _is_spread(request: Request, team: Team) -> bool:
    """Tell whether source files may be on several nodes."""
    return team.nodes.count > 1 and request.shapes is None and request.files is None


def _sight(team: Team, found: _Found, as_first: frozenset[int]) -> tuple[Sight, list[str]]:
    if found.imagined:
        return Sight.full(team.nodes.of, found.shards.paths), []
    return sight_of(team, found.shards, as_first)


@dataclass(frozen=True)
class _Found:
    """What process 0 finds before headers are read; `wanted` are the source ranks to look at."""

    request: Request
    src: Strategy
    dst: Strategy
    shards: Shards
    wanted: tuple[int, ...]
    notices: list[str]
    imagined: Mapping[int, Index] = field(default_factory=dict)


def _imagined(request: Request, src: Strategy, dst: Strategy, shapes: Path) -> _Found:
    """Imagine the checkpoint that `src` cuts of parameters with the given full shapes."""
    try:
        known = parse_shapes(read_bytes(shapes))
    except FormatError as error:
        raise UsageError(f"{shapes}: {error}") from error
    if isinstance(src, HandCut):
        src = src.over({name: shape for name, (shape, _) in known.items()}, followed, states=True)
    indexes: dict[int, Index] = {}
    for stage in range(len(src.stages)):
        names = [n for n in known if n in src and stage in src.stages_of.get(n, (0,))]
        sliced = []
        for name in names:
            shape, _ = known[name]
            layout = src.layout(name, stage, len(shape)).fold(shape, slices=False)
            sliced.append(layout.grid(shape).box(layout.cell(0)).shape)
        types = tuple(known[name][1] for name in names)
        contents = Contents(tuple(names), types, tuple(sliced))
        indexes.update((rank, Index(contents, array("q"), {}, 0)) for rank in src.ranks_in(stage))
    shards = Shards({rank: Path(f"rank_{rank}") for rank in indexes}, None)
    return _Found(request, src, dst, shards, tuple(indexes), [], indexes)


def _inputs(request: Request, there: Listing | None, looked: str) -> _Found:
    """Read strategies and folders; process 0 alone does this.

    `there` is what all nodes have; `looked` says which they are, if there are several.
    """
    src = strategies.load(request.src_strategy)
    dst = strategies.load(request.dst_strategy)
    if request.shapes is not None:
        return _imagined(request, src, dst, Path(request.shapes))
    where = Path(request.src).absolute()
    whole = isinstance(src, WholeStrategy)
    wanted = None if whole else _needed_ranks(src, dst, request)
    among = None if whole else range(src.ranks)
    shards = _shards(request, where, wanted, there, looked, among)
    check_stated(request, where, shards)
    if wanted is None:
        wanted = sorted(shards.paths)
    elif not any(rank in shards.paths for rank in wanted):
        raise CheckpointError(f"{where}: none of the ranks {ranges(wanted)} is there{looked}")
    outside = [] if whole else [rank for rank in shards.paths if rank >= src.ranks]
    keep = {*wanted, *outside[-1:]}  # of the ranks beyond the strategy's, one is looked at
    kept = {rank: path for rank, path in sorted(shards.paths.items()) if rank in keep}
    dst_path = str(Path(request.dst).absolute()) if request.dst is not None else None
    return _Found(
        replace(request, src=str(where), dst=dst_path),
        src,
        dst,
        replace(shards, paths=kept),
        tuple(wanted),
        list(_notices(where, src, shards, wanted, outside, looked)),
    )


def _shards(
    request: Request,
    where: Path,
    wanted: Sequence[int] | None,
    there: Listing | None,
    looked: str,
    among: range | None,
) -> Shards:
    if request.files is None:
        pattern = request.src_pattern
        there = there or look(where, pattern)
        return choose(where, there, wanted, pattern, request.step, request.suffix, looked, among)
    paths = {rank: Path(path).absolute() for rank, path in request.files.items()}
    for rank, path in paths.items():
        if not path.is_file() and not looked:
            raise UsageError(f"{path}: there is no such file, which is to be rank {rank}'s")
    return Shards(paths, None)


def _notices(
    where: Path,
    src: Strategy,
    shards: Shards,
    wanted: Sequence[int],
    outside: Sequence[int],
    looked: str,
) -> Iterator[str]:
    if outside:
        yield (
            f"{where}: {len(outside)} ranks from {min(outside)} on are beyond the {src.ranks} of "
            f"{src.label} and were not used"
        )
    missing = [rank for rank in wanted if rank not in shards.paths]
    if missing:
        yield f"{where}: no file of rank {ranges(missing)}{looked}; copies on other ranks serve"


def _warnings(shards: Shards) -> Iterator[str]:
    if shards.newer and shards.step:
        epoch, step = shards.step
        yield (
            f"{shards.newer}. What is converted is epoch {epoch} step {step} "
            f"(--step {epoch}_{step} says that it is meant, --step latest refuses)"
        )


def _needed_ranks(src: Strategy, dst: Strategy, request: Request) -> list[int]:
    """Return the source ranks of the stages that the wanted destination ranks draw on.

    What no source stage lists may be in the files of any, if it is to be taken as whole.
    """
    if request.one_sided == "whole":
        return list(range(src.ranks))
    stages = {dst.stage_of(rank) for rank in check_ranks(request.ranks, dst)}
    needed = {s for stage in stages for s in needed_stages(src, dst, stage)}
    return [rank for stage in sorted(needed) for rank in src.ranks_in(stage)]


def gather_indexes(team: Team, paths: Mapping[int, Path], sight: Sight) -> dict[int, Index]:
    """Index the files, each process its share, and give every process all of them."""
    mine = sight.dealt(paths)[team.rank]
    indexer = Indexer()
    shares = team.gather(lambda: {rank: indexer.index(paths[rank]) for rank in mine})
    found = {rank: one for share in shares for rank, one in share.items()}
    same: dict[Contents, Contents] = {}  # what several processes found is kept once
    for one in found.values():
        one.contents = same.setdefault(one.contents, one.contents)
    return dict(sorted(found.items()))


def _check_extra_names(
    found: _Found, inside: Mapping[int, Index], outside: Mapping[int, Index]
) -> None:
    """Refuse ranks beyond the strategy's if they hold parameters that nobody else has."""
    known = {name for one in inside.values() for name in one.contents.names}
    for rank, one in outside.items():
        new = [name for name in one.contents.names if name not in known and name not in found.src]
        if new:
            raise CheckpointError(
                f"{found.shards.paths[rank]}: holds {in_few_words(new)}, which {found.src.label} "
                f"does not list; it describes {found.src.ranks} ranks, and the checkpoint has "
                "more. Give the folder with the strategy files of all pipeline stages"
            )
