"""`verify`: whether a destination holds the same model as the source, whatever tool wrote it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from posixpath import basename

from rankxform.engine.compare_sink import ComparingSink, Difference, Expected
from rankxform.engine.pipeline import execute
from rankxform.planning.assign import Assignment, assign_visible
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.storage.posix import OnProgress
from rankxform.storage.sources import Sources
from rankxform.target.aim import prepare
from rankxform.target.free import foreign_warnings
from rankxform.target.reading import reading
from rankxform.target.target import Target
from rankxform.transport import Team
from rankxform.transport.team import ShowProgress, show_nothing

from .evidence import examine
from .measure import plan_work
from .transform import Begin, silent
from .verdict import Verdict, wrong_checksums
from .verify_beside import compare_beside
from .verify_files import check_apart, files_there, open_described
from .verify_manifest import notice_of_other_options


def verify(request: Request, team: Team, begin: Begin = silent) -> Verdict:
    """Compare every byte of ``request.dst`` with what the source and the strategies make of it.

    Both are streamed, in the memory that `request` allows; nothing is written. Collective.
    """
    began = time.monotonic()
    request, described = open_described(request, team)
    asked, source, target = prepare(request, team)
    evidence = examine(asked, source, target, team)
    target = target.with_evidence(evidence)
    there, files_of, faults = files_there(target, described, team)
    check_apart(source, there, team)
    assignment = _share_out(files_of, there, team)
    work = plan_work(asked.request, source, files_of, assignment, team)
    show = begin(source, target, work.nbytes)
    differing, nbytes = compare(work, source, files_of, there, assignment, team, show)
    lacking, notices = compare_beside(asked.request, source, target, there, team)
    differences = _each_once([*faults, *lacking, *differing])
    named = [*there.paths.values(), *(one.name for one in differences if one.whole_file)]
    other = notice_of_other_options(asked.request, source, target, team) if differences else []
    return Verdict(
        src=request.src,
        dst=str(target.folder),
        differences=differences,
        files_compared=len(there.indexes),
        bytes_compared=nbytes,
        seconds=time.monotonic() - began,
        processes=team.size,
        notices=(*target.notices, *there.notices, *notices, *other),
        warnings=(*target.warnings, *foreign_warnings(target, named, team)),
        step=source.selected.step_name,
        evidence=evidence.facts,
        names={file: basename(path) for file, path in there.paths.items()} if described else {},
    )


def _each_once(found: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return one difference for each name and rank, in their order."""
    known = {(one.name, one.rank): one for one in found}
    return tuple(known[key] for key in sorted(known))


def _share_out(target: Target, there: Source, team: Team) -> Assignment:
    """Say which process compares what of the files that are there. Collective."""
    if not there.indexes:
        return [[] for _ in there.reach.node]
    return team.agree(lambda: assign_visible(target.planner, list(there.indexes), there.reach))


def compare(
    work: WorkPlan,
    source: Source,
    target: Target,
    there: Source,
    assignment: Assignment,
    team: Team,
    show: ShowProgress,
) -> tuple[list[Difference], int]:
    """Compare files, and the checksums that they carry; return differences, and bytes.

    Collective.
    """
    p2p = team.p2p() if work.exchanges else None
    mine = dict.fromkeys(one.rank for one in assignment[team.rank])

    def own(on_progress: OnProgress) -> tuple[int, list[Difference]]:
        with Sources(there.paths, there.indexes) as destination:
            sinks = {
                file: ComparingSink(
                    file, destination, there.indexes[file], _expected(target.planner, file)
                )
                for file in mine
            }
            with reading(source, target, work, p2p, on_progress) as inputs:
                traffic = execute(work, inputs, sinks, on_progress)
            destination.check_unchanged()
        return traffic.written, [one for s in sinks.values() for one in s.differences.values()]

    nbytes, differing = team.work(own, show)
    carrying = there.reach.partition(there.indexes)[team.rank]
    differing += team.work(
        lambda tick: wrong_checksums(there.paths, there.indexes, carrying, tick), show_nothing
    )
    every = team.allgather(lambda: (nbytes, differing))
    return [one for _, some in every for one in some], sum(nbytes for nbytes, _ in every)


def _expected(planner: Planner, file: int) -> Mapping[str, Expected]:
    layouts = planner.names(file).values()
    return {
        p.name: Expected(p.dtype, layout.grid(p.shape).box(planner.cell(layout, file)))
        for (p, _), layout in zip(planner.slices(file), layouts)
    }
