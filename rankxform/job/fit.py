"""Whether a checkpoint is sharded as a strategy wants it, so that nothing need be converted."""

from __future__ import annotations

from dataclasses import replace

from rankxform.checkpoints.rank_folders import LATEST
from rankxform.options import AFFECTS_FIT, is_default
from rankxform.planning.plan import Planner
from rankxform.planning.reach import Reach
from rankxform.planning.sharding import Sharding
from rankxform.request import Request, options_affecting
from rankxform.source.opening import Source
from rankxform.storage.index import container_of_path
from rankxform.target.placement import ranks_to_nodes_in_order
from rankxform.target.target import Target
from rankxform.transport import Team
from rankxform.transport.nodes import Nodes


def already_fits(request: Request, source: Source, target: Target, team: Team) -> bool:
    """Tell whether every destination rank would find its own slices in its own source file, and at
    home. Collective.

    Anything else in the file does not matter, because loading ignores it. But nothing fits if the
    request selects files or parameters, or asks for another form: only a conversion does that. A
    folder with other files beside the rank's does not fit, because a file had to be chosen. Nor
    does a file that is on another node than the processes of its rank.
    """
    return team.bcast(
        lambda: (
            not (source.form.described or source.selected.ranks)
            and not _is_choice(request, source, target)
            and _same_slices(target.planner)
            and _at_home(target.planner.dst.ranks, source.reach, team.nodes)
            and not _others(source)
        )
    )


def _others(source: Source) -> list[str]:
    """Return other checkpoint files beside the chosen ones."""
    if source.listing is None:
        return []
    return source.form.foreign_files(source.listing, list(source.selected.names.values()))


def _at_home(ranks: int, reach: Reach, nodes: Nodes) -> bool:
    """Tell whether each rank's file is where the rank will be, as the processes are assigned."""
    home = ranks_to_nodes_in_order(ranks, nodes)
    return all(rank in reach.files[node] for rank, node in home.items())


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
        for (parameter, _), layout in zip(planner.slices(rank), planner.names(rank).values()):
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


def _is_choice(request: Request, source: Source, target: Target) -> bool:
    if request.step == LATEST:  # what is taken where nothing is asked for
        request = replace(request, step=None)
    return (
        not all(is_default(request, name) for name in options_affecting(AFFECTS_FIT))
        or bool(source.selected.skipped_steps)
        or any(container_of_path(path) is not target.container for path in source.paths.values())
    )
