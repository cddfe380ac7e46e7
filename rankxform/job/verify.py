"""Whether a destination holds the same model as the source, whatever tool wrote it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rankxform.checkpoints.base import Listing, Shards, Wish
from rankxform.engine.compare_sink import Comparison, Difference, Expected
from rankxform.engine.pipeline import Messenger, Traffic, carry
from rankxform.errors import CheckpointError
from rankxform.formats.base import Index
from rankxform.planning.assign import Assignment, assign_visible
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange, bytes_to_write
from rankxform.planning.visibility import Visibility
from rankxform.storage.index import Indexer
from rankxform.storage.posix import OnProgress
from rankxform.storage.sources import Sources
from rankxform.transport import Team
from rankxform.transport.team import Show, quiet

from .checks import compare_ranks, strangers, warn_of
from .measure import plan_work
from .opened import opened
from .prepare import Conversion, prepare
from .request import Request
from .standing import compare_files, standing_files
from .verdict import Verdict, unreadable, wrong_checksums
from .verify_manifest import made_with
from .visibility import searched_nodes, visibility_of


def verify(
    request: Request,
    team: Team,
    begin: Callable[[Conversion, int], Show] = lambda conversion, nbytes: quiet,
) -> Verdict:
    """Compare every byte of ``request.dst`` with what the source and the strategies make of it.

    Both are streamed, in the memory that `request` allows; nothing is written.
    """
    began = time.monotonic()
    request, standing, as_first = standing_files(request, team)
    conversion = prepare(request, team)
    with conversion.explained(team):
        conversion, _, notices = compare_ranks(conversion, team)
    files, planner, target = conversion.files, conversion.planner, conversion.target
    there, searched = standing.there, searched_nodes(team)
    paths = (standing.shards or team.bcast(lambda: _choose(conversion, there, searched))).paths
    visibility, _ = visibility_of(team, paths, as_first)
    indexes, found = _indexes(paths, team, visibility)
    if standing.shards is not None:
        planner, faults = compare_files(conversion, standing.shards, indexes, team)
        conversion = replace(conversion, planner=planner, made=tuple(indexes))
        found += faults
    assignment = team.agree(lambda: _assigned(planner, indexes, visibility))
    plan = plan_work(request, files, planner, assignment, team)
    p2p = team.p2p() if plan.exchanges else None
    total = sum(team.allgather(lambda: bytes_to_write(plan.transfers)))
    show = begin(conversion, total) if team.rank == 0 else quiet

    def compare(on_progress: OnProgress) -> tuple[Traffic, list[Difference]]:
        with Sources(paths, indexes) as destination:
            sinks = _sinks(planner, destination, indexes, assignment[team.rank])
            memory = request.memory // 2
            traffic = _compare(conversion, plan, sinks, memory, on_progress, p2p)
        return traffic, [one for sink in sinks.values() for one in sink.differences.values()]

    traffic, differing = team.work(compare, show)
    checked = visibility.partition(indexes)[team.rank]
    sums = team.work(lambda tick: wrong_checksums(paths, indexes, checked, tick), quiet)
    found += [*differing, *sums]
    every = team.allgather(lambda: (traffic.written, found))
    everything = [some for _, some in every]
    everything += [_extra_ranks(planner, there)] if standing.shards is None else []
    differences = {(one.name, one.rank): one for some in everything for one in some}
    if differences:
        notices += made_with(standing.folder, conversion.request, files.shards, team)
    return Verdict(
        request.src,
        str(target.folder),
        tuple(sorted(differences.values(), key=lambda one: (one.name, one.rank))),
        len(indexes),
        sum(nbytes for nbytes, _ in every),
        time.monotonic() - began,
        team.size,
        (*conversion.notices, *notices, *standing.notices),
        warnings=(*conversion.warnings, *warn_of(strangers(target.form, paths.values(), team))),
        step=files.shards.step_name,
        names=standing.names,
    )


def _assigned(planner: Planner, indexes: Mapping[int, Index], visibility: Visibility) -> Assignment:
    if not indexes:
        return [[] for _ in visibility.node]
    return assign_visible(planner, list(indexes), visibility)


def _extra_ranks(planner: Planner, there: Listing) -> list[Difference]:
    """Return what is wrong with rank folders beyond the destination's ranks."""
    last = planner.dst.ranks - 1
    why = f"should not be here: {planner.dst.label} has rank{f's 0 to {last}' if last else ' 0'}"
    return [
        Difference(str(path), rank, f"{why} only", whole_file=True)
        for rank, paths in there.files.items()
        for path in paths
        if rank > last
    ]


def _sinks(
    planner: Planner,
    destination: Sources,
    indexes: Mapping[int, Index],
    mine: Sequence[SliceRange],
) -> dict[int, Comparison]:
    ranks = dict.fromkeys(one.rank for one in mine)
    return {
        rank: Comparison(rank, destination, indexes[rank], _expected(planner, rank))
        for rank in ranks
    }


def _compare(
    conversion: Conversion,
    plan: WorkPlan,
    sinks: Mapping[int, Comparison],
    memory: int,
    on_progress: OnProgress,
    p2p: Messenger | None,
) -> Traffic:
    with opened(conversion) as (sources, operands):
        return carry(plan, sinks, sources, memory, on_progress, p2p=p2p, operands=operands)


def _expected(planner: Planner, rank: int) -> dict[str, Expected]:
    layouts = planner.names(rank).values()
    return {
        p.name: Expected(p.dtype, layout.grid(p.shape).box(planner.cell(layout, rank)))
        for (p, _), layout in zip(planner.slices(rank), layouts)
    }


def _choose(conversion: Conversion, there: Listing, searched: str) -> Shards:
    """Return the files to compare, of what is there. Raises CheckpointError if one is missing."""
    target, dst, ranks = conversion.target, conversion.planner.dst, conversion.ranks
    own = conversion.finals
    if all(path in there.files.get(rank, ()) for rank, path in own.items()):
        return Shards(own)
    found = target.form.choose(target.folder, there, ranks, Wish(), searched)
    missing = [rank for rank in ranks if rank not in found.paths]
    if missing:
        raise CheckpointError(
            f"{target.folder}: has no file of destination rank {missing[0]}"
            + (f" and of {len(missing) - 1} more" if missing[1:] else "")
            + f"{searched}; {dst.label} has ranks 0 to {dst.ranks - 1}"
        )
    return replace(found, paths={rank: found.paths[rank] for rank in ranks})


def _indexes(
    paths: Mapping[int, Path], team: Team, visibility: Visibility
) -> tuple[dict[int, Index], list[Difference]]:
    """Return the indexes of all destination files, and the files that this process cannot read."""
    wrong: dict[int, Difference] = {}

    def look() -> dict[int, Index]:
        found, indexer = {}, Indexer()
        for rank in visibility.partition(paths)[team.rank]:
            try:
                found[rank] = indexer.index(paths[rank])
            except CheckpointError as error:
                wrong[rank] = unreadable(paths[rank], rank, error)
        return found

    every = team.allgather(look)
    return dict(sorted(one for some in every for one in some.items())), list(wrong.values())
