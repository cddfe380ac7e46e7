"""`launch`: a conversion, then a program."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.rank_folders import LATEST
from rankxform.errors import StorageError, UsageError
from rankxform.layout.strategy import Strategy
from rankxform.options import AFFECTS_FIT, GROUP_DERIVATION, is_default
from rankxform.planning.catalog import Sharding
from rankxform.planning.plan import Planner
from rankxform.request import Request, default_of, options_affecting, options_in_group
from rankxform.statements import quote
from rankxform.storage.identity import inode, inodes_of, is_below_any, is_same_file
from rankxform.storage.posix import read_bytes, remove_if_possible, write_atomically
from rankxform.storage.source_reader import container_of_path
from rankxform.storage.user_files import (
    encode_strategy,
    is_strategy,
    merge_in_memory,
    path_of,
    read_strategy_file,
    strategy_candidates,
    strategy_files_at,
)
from rankxform.target.node_folders import ranks_to_nodes_in_order
from rankxform.target.resolve import resolve
from rankxform.target.target import Conversion, Target
from rankxform.transport import Team
from rankxform.values import dataclass

from .convert import OnStart, Prepared, start_silently
from .evidence import with_evidence
from .transform import Report, transform

if TYPE_CHECKING:
    from rankxform.derivation.request import Derived


def already_fits(conversion: Conversion, team: Team) -> bool:
    """Tell whether every destination rank would find its own slices in its own source file, and at
    home. Collective.

    Anything else in the file does not matter, because loading ignores it. But nothing fits if the
    request selects files or parameters, or asks for another form: only a conversion does that. A
    folder with other files beside the rank's does not fit, because a file had to be chosen. Nor
    does a file that is on another node than the processes of its rank.
    """
    source, target = conversion.source, conversion.target
    listing, names = source.listing, [*source.selected.names.values()]
    home = ranks_to_nodes_in_order(target.planner.dst.ranks, team.nodes)  # as they are assigned
    return team.bcast(
        lambda: (
            not (source.form.described or source.selected.ranks)
            and not _is_choice(conversion)
            and _same_slices(target.planner)
            and all(rank in source.reach.files[node] for rank, node in home.items())
            and not (listing is not None and source.form.foreign_files(listing, names))
        )
    )


def _same_slices(planner: Planner) -> bool:
    """Tell whether every rank holds the boxes that it is to get."""
    catalog, dst = planner.catalog, planner.dst
    src = catalog.strategy
    if src is None or (src.ranks, src.stage_size) != (dst.ranks, dst.stage_size):
        return False
    file_of = {catalog.rank_of(file): file for file in catalog.paths}
    fits_by_key: dict[object, bool] = {}
    for rank in range(0, dst.ranks, dst.stage_size):  # all ranks of a stage hold the same names
        ranks = dst.ranks_in(rank // dst.stage_size)
        for (parameter, _), layout in zip(
            planner.slices(rank), planner.layouts_of_file(rank).values()
        ):
            sharding = parameter.sharding
            if not isinstance(sharding, Sharding):
                return False
            key = sharding, layout, ranks
            if key not in fits_by_key:
                grid, cells_of = layout.grid(parameter.shape), sharding.placement.cells_of
                fits_by_key[key] = all(
                    [sharding.grid.box(c) for c in cells_of.get(file_of.get(stage_rank, -1), ())]
                    == [grid.box(layout.cell(stage_rank - ranks.start))]
                    for stage_rank in ranks
                )
            if not fits_by_key[key]:
                return False
    return True


def _is_choice(conversion: Conversion) -> bool:
    request, source, target = conversion.request, conversion.source, conversion.target
    if request.step == LATEST:  # what is taken where nothing is asked for
        request = replace(request, step=None)
    return (
        not all(is_default(request, name) for name in options_affecting(AFFECTS_FIT))
        or bool(source.selected.skipped_steps)
        or any(container_of_path(path) is not target.container for path in source.paths.values())
    )


CHECKPOINT, STRATEGY = "transformed_checkpoint", "strategy"
MERGED = "merged_ckpt_strategy"

Announce = Callable[[Target, bool], None]
"""Called with what the job needs, and whether the checkpoint fits as it is, before anything is
written."""


def launch(
    request: Request,
    output: Path,
    team: Team,
    announce: Announce = lambda target, fits: None,
    on_start: OnStart = start_silently,
) -> tuple[Report | None, str]:
    """Convert a checkpoint if the job needs other shards; return what was done, and where what the
    job loads is. Collective.

    The result and its strategy are made in `output`. A step older than the newest is never taken,
    because training would continue from it.
    """
    dst = str(output / CHECKPOINT)  # whose records state more samples than are compared
    request = replace(request, step=request.step or LATEST, dst=dst)
    conversion = with_evidence(resolve(request, team), team)
    fits = already_fits(conversion, team)
    announce(conversion.target, fits)
    if fits:
        return None, conversion.source.where.path
    request = with_derived(request, conversion.target.derived, output / STRATEGY)
    strategy_folder = keep_strategy(request, output / STRATEGY, team)
    prepared = Prepared(conversion.source, evidence=conversion.target.evidence)
    report = transform(request, team, on_start, prepared)
    strategy_folder.write(team)
    return report, dst


def with_derived(request: Request, derived: Derived | None, folder: Path) -> Request:
    """Return a request with a derived strategy, which is to be kept in the folder of strategies."""
    if derived is None:
        return request
    kept: tuple[str, ...] = ()
    if request.src_strategy is None and request.src_config is not None:  # derived by these
        kept = ("src_config", "src_threshold", "preset", "unproven", "rule", "opt_on", "opt_off",
                "unsharded")  # fmt: skip
    names = [name for name in options_in_group(GROUP_DERIVATION) if name not in kept]
    plain: dict[str, Any] = {name: default_of(name) for name in names}
    name = MERGED if len(derived.strategy.stages) > 1 else "ckpt_strategy_rank_0"
    strategy = replace(derived.strategy, label=str(folder / f"{name}.ckpt"))
    return replace(request, **plain, dst_strategy=strategy)


# -- the strategy that the result is sharded by: the next job's source strategy -------------------


def keep_strategy(request: Request, folder: Path, team: Team) -> StrategyFolder:
    """See that the strategy may be kept in a folder, whose others it replaces. Collective.

    Raises StorageError where the source's own would be replaced, or another without being told to.
    """
    strategy_folder = StrategyFolder(
        folder, team.bcast(lambda: _strategy_contents(request, folder))
    )
    team.bcast(lambda: strategy_folder.check_source(request))
    if_other = team.nodes.is_leader(team.rank) and not request.overwrite
    team.agree(lambda: strategy_folder.check_others(request) if if_other else None)
    return strategy_folder


def _strategy_contents(request: Request, folder: Path) -> dict[Path, bytes]:
    """Return what belongs in the folder of strategies, if it is not there already.

    Stage files are merged too, as MindFormers does.
    """
    strategy = request.dst_strategy
    if isinstance(strategy, Strategy) and strategy.derived:
        return encode_strategy(strategy, Path(strategy.label))
    strategy_path = path_of(strategy)
    if strategy_path is None:
        return {}
    paths = strategy_files_at(strategy_path)
    if is_same_file(paths[0].parent, folder):
        return {}
    content_by_path = {folder / path.name: read_bytes(path) for path in paths}
    stages = [read_strategy_file(path) for path in paths]
    has_stage_files = len({record.stage for record in stages}) > 1 and not any(
        record.merged for record in stages
    )
    kinds = {record.json for record in stages}
    if has_stage_files and len(kinds) == 1:
        merged = folder / (MERGED + (".json" if kinds.pop() else ".ckpt"))
        content_by_path[merged] = merge_in_memory(strategy_path, merged)[1]
    return content_by_path


@dataclass(frozen=True)
class StrategyFolder:
    """The strategy files that belong in a folder, with their content; {}: none has to be kept."""

    folder: Path
    files: Mapping[Path, bytes]

    def check_source(self, request: Request) -> None:
        """Refuse a folder in which the source's own strategy would be replaced by another."""
        if not self.files:
            return
        if is_below_any(self.folder, inodes_of(Path(request.src), with_folders=True)):
            raise UsageError(
                f"lies in the source folder {request.src}, which is never written to",
                "choose another --output",
                where=self.folder,
            )
        strategy_path = path_of(request.src_strategy)
        if strategy_path is None:
            return
        src_inodes = {inode(path) for path in strategy_files_at(strategy_path)}
        for old in self._other_strategy_files():
            if inode(old) in src_inodes:
                raise StorageError(
                    f"is the source's strategy, and another belongs in {self.folder} now",
                    f"choose another folder, such as --output {quote(f'{self.folder.parent}_new')}",
                    where=old,
                )

    def check_others(self, request: Request) -> None:
        """Refuse a folder that holds another strategy than what is wanted there."""
        dst_strategy = request.dst_strategy
        name = dst_strategy.label if isinstance(dst_strategy, Strategy) else str(dst_strategy)
        for old in self._other_strategy_files() if self.files else ():
            raise StorageError(
                f"is of another strategy than {name}, which belongs here now",
                "remove it",
                "choose another --output",
                "say --overwrite",
                where=old,
            )

    def _other_strategy_files(self) -> list[Path]:
        candidates = strategy_candidates(self.folder) if self.folder.is_dir() else []
        strategy_paths = [path for path in candidates if is_strategy(path)]
        return [old for old in strategy_paths if read_bytes(old) != self.files.get(old)]

    def write(self, team: Team) -> None:
        """Write the files on every node, and remove other strategies from the folder. Collective.

        Where the folder is process 0's, all is there after it.
        """
        leader = team.nodes.is_leader(team.rank)
        team.bcast(self._write)
        team.agree(lambda: self._write() if leader and team.rank != 0 else None)

    def _write(self) -> None:
        if not self.files:
            return
        if self.folder.is_symlink():
            raise StorageError(
                "is a link, through which nothing is removed", "remove it", where=self.folder
            )
        for old in self._other_strategy_files():
            remove_if_possible(old)
        for path, data in self.files.items():
            if not path.exists():
                write_atomically(path, data, shared=True)
