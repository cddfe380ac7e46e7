"""Whether a checkpoint is cut as a strategy wants it, so that nothing need be converted."""

from __future__ import annotations

from dataclasses import replace

from rankxform.checkpoints.rank_folders import LATEST, files_beside
from rankxform.layout.layout import Layout
from rankxform.planning.catalog import Parameter
from rankxform.storage.index import container
from rankxform.transport import Team
from rankxform.transport.nodes import Nodes

from .checks import compare_ranks
from .placement import in_order
from .prepare import Conversion, prepare
from .request import Request


def already_fits(request: Request, team: Team) -> bool:
    """Tell whether nothing need be converted; looks at the source as a conversion would.

    A folder with other files beside the rank's does not fit: which one is meant was a choice. Nor
    does a file that is on another node than the processes of its rank.
    """
    conversion = prepare(request, team)
    compare_ranks(conversion, team)
    paths = conversion.shards.paths
    mine = [paths[rank] for rank in conversion.sight.dealt(paths)[team.rank]]
    alone = team.gather(lambda: all(len(files_beside(path)) == 1 for path in mine))
    nodes = team.nodes
    return all(alone) and team.share(lambda: fits(conversion) and _at_home(conversion, nodes))


def _at_home(conversion: Conversion, nodes: Nodes) -> bool:
    """Tell whether each rank's file, which there is, is where the rank will be, as the processes
    are dealt."""
    home = in_order(conversion.dst.ranks, nodes)
    seen = conversion.sight.seen
    return all(rank in seen[node] for rank, node in home.items())


def fits(conversion: Conversion) -> bool:
    """Tell whether every destination rank would find its own slices in its own source file.

    What else the file holds does not matter: loading leaves it. But nothing fits where a choice
    among files or parameters, or another form, was asked for: only a conversion heeds that.
    """
    if _is_choice(conversion):
        return False
    src, dst = conversion.source.strategy, conversion.dst
    if (src.ranks, src.stage_size) != (dst.ranks, dst.stage_size):
        return False
    known: dict[tuple[Layout, Layout, tuple[int, ...]], bool] = {}
    for rank in range(0, dst.ranks, dst.stage_size):  # all ranks of a stage hold the same names
        names = conversion.planner.names(rank)
        for (parameter, _), wanted in zip(conversion.planner.slices(rank), names.values()):
            key = parameter.layout, wanted, parameter.shape
            if key not in known:
                known[key] = _same_boxes(parameter, wanted, dst.stage_size)
            if not known[key] or not set(dst.ranks_in(rank // dst.stage_size)) <= set(
                parameter.holders
            ):
                return False
    return True


def _is_choice(conversion: Conversion) -> bool:
    request, plain = conversion.request, Request("", None)
    if request.step == LATEST:  # what is taken where nothing is asked for
        request = replace(request, step=None)
    chosen = ("include", "exclude", "step", "suffix", "src_pattern", "crc", "ranks", "one_sided")
    return (
        any(getattr(request, name) != getattr(plain, name) for name in chosen)
        or bool(conversion.shards.skipped_steps)
        or any(conversion.format != container(p) for p in conversion.shards.paths.values())
    )


def _same_boxes(parameter: Parameter, wanted: Layout, ranks: int) -> bool:
    have, want = parameter.layout.grid(parameter.shape), wanted.grid(parameter.shape)
    return all(
        have.box(parameter.layout.cell(rank)) == want.box(wanted.cell(rank))
        for rank in range(ranks)
    )
