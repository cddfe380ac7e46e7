"""Whether a destination holds the same model as the source, whatever tool wrote it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from rankxform.checkpoints.base import DEFAULT_PATTERN
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.engine.compare_sink import Comparison, Difference, Expected
from rankxform.engine.pipeline import Messenger, Traffic, execute
from rankxform.formats.base import Index
from rankxform.planning.assign import Assignment, assign_visible
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange, bytes_to_write
from rankxform.planning.visibility import Visibility
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.storage.posix import OnProgress
from rankxform.storage.sources import Sources
from rankxform.target.aim import Conversion, prepare
from rankxform.target.reading import opened
from rankxform.transport import Team
from rankxform.transport.team import Show, quiet

from .checks import compare_ranks, foreign_files, warn_of
from .measure import plan_work
from .standing import compare_files, open_described, open_ranks
from .verdict import Verdict, unreadable, wrong_checksums
from .verify_manifest import notice_of_other_options


def verify(
    request: Request,
    team: Team,
    begin: Callable[[Conversion, int], Show] = lambda conversion, nbytes: quiet,
) -> Verdict:
    """Compare every byte of ``request.dst`` with what the source and the strategies make of it.

    Both are streamed, in the memory that `request` allows; nothing is written.
    """
    began = time.monotonic()
    request, described = open_described(request, team)
    conversion = prepare(request, team)
    with conversion.suggesting(team):
        conversion, _, notices = compare_ranks(conversion, team)
    files, planner, target = conversion.source, conversion.planner, conversion.target
    standing = described or open_ranks(conversion, team)
    paths = {file: path for file, path in standing.paths.items() if file in standing.wanted}
    indexes, found = standing.indexes, _unreadable(standing, paths, team)
    if described:
        planner, indexes, faults = compare_files(conversion, standing, team)
        conversion = replace(conversion, planner=planner, output_files=tuple(indexes))
        found += faults
    else:
        found += _extra_ranks(planner, standing, team)
    assignment = team.agree(lambda: _assigned(planner, indexes, standing.reach))
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
    checked = standing.reach.partition(indexes)[team.rank]
    sums = team.work(lambda tick: wrong_checksums(paths, indexes, checked, tick), quiet)
    found += [*differing, *sums]
    every = team.allgather(lambda: (traffic.written, found))
    differences = {(one.name, one.rank): one for _, some in every for one in some}
    if differences:
        notices += notice_of_other_options(standing.folder, conversion.request, files, team)
    foreign = warn_of(foreign_files(target, paths.values(), team))
    return Verdict(
        request.src,
        str(target.folder),
        tuple(sorted(differences.values(), key=lambda one: (one.name, one.rank))),
        len(indexes),
        sum(nbytes for nbytes, _ in every),
        time.monotonic() - began,
        team.size,
        (*conversion.notices, *notices, *(standing.notices if described else ())),
        warnings=(*conversion.warnings, *foreign),
        step=files.selected.step_name,
        names={file: path.name for file, path in paths.items()} if described else {},
    )


def _assigned(planner: Planner, indexes: Mapping[int, Index], visibility: Visibility) -> Assignment:
    if not indexes:
        return [[] for _ in visibility.node]
    return assign_visible(planner, list(indexes), visibility)


def _unreadable(standing: Source, paths: Mapping[int, Path], team: Team) -> list[Difference]:
    """Return, on process 0, the files that cannot be read."""
    return [
        unreadable(paths[fault.file], fault.file, fault.text)
        for fault in standing.faults
        if fault.file is not None and fault.file in paths and team.rank == 0
    ]


def _extra_ranks(planner: Planner, standing: Source, team: Team) -> list[Difference]:
    """Return, on process 0, what is wrong with rank folders beyond the destination's ranks."""
    last = planner.dst.ranks - 1
    why = f"should not be here: {planner.dst.label} has rank{f's 0 to {last}' if last else ' 0'}"

    def look() -> list[Difference]:
        if team.rank or standing.listing is None:
            return []
        return [
            Difference(standing.listing.at(name), rank, f"{why} only", whole_file=True)
            for rank, names in by_rank(standing.listing, DEFAULT_PATTERN).items()
            for name in names
            if rank > last
        ]

    return team.allgather(look)[team.rank]


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
        return execute(plan, sinks, sources, memory, on_progress, p2p=p2p, operands=operands)


def _expected(planner: Planner, rank: int) -> dict[str, Expected]:
    layouts = planner.names(rank).values()
    return {
        p.name: Expected(p.dtype, layout.grid(p.shape).box(planner.cell(layout, rank)))
        for (p, _), layout in zip(planner.slices(rank), layouts)
    }
