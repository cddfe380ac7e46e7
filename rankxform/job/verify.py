"""`verify`: whether a destination holds the same model as the source, whatever tool wrote it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from posixpath import basename

from rankxform.engine.compare_sink import ComparingSink, Difference, ExpectedSlice
from rankxform.engine.pipeline import execute
from rankxform.planning.assign import Assignment, assign_within_nodes
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.storage.posix import OnProgress
from rankxform.storage.sources import SourceReader
from rankxform.target.aim import prepare
from rankxform.target.free import foreign_warnings
from rankxform.target.reading import open_work_inputs
from rankxform.target.target import Target
from rankxform.transport import Team
from rankxform.transport.team import ShowProgress, show_nothing

from .evidence import examine
from .measure import plan_work
from .transform import OnStart, start_silently
from .verdict import Verdict, wrong_checksums
from .verify_beside import compare_beside
from .verify_files import check_apart, open_described, open_existing_files
from .verify_manifest import notice_of_other_options


def verify(request: Request, team: Team, begin: OnStart = start_silently) -> Verdict:
    """Compare every byte of ``request.dst`` with what the source and the strategies make of it.

    Both are streamed, in the memory that `request` allows; nothing is written. Collective.
    """
    began = time.monotonic()
    request, described = open_described(request, team)
    resolved, source, target = prepare(request, team)
    evidence = examine(resolved, source, target, team)
    target = target.with_evidence(evidence)
    dst_source, files_of, faults = open_existing_files(target, described, team)
    check_apart(source, dst_source, team)
    assignment = _share_out(files_of, dst_source, team)
    work = plan_work(resolved.request, source, files_of, assignment, team)
    show = begin(source, target, work.nbytes)
    differing, nbytes = compare(work, source, files_of, dst_source, assignment, team, show)
    lacking, notices = compare_beside(resolved.request, source, target, dst_source, team)
    differences = _each_once([*faults, *lacking, *differing])
    named = [*dst_source.paths.values(), *(d.name for d in differences if d.whole_file)]
    if differences:
        notices += notice_of_other_options(resolved.request, source, target, team)
    return Verdict(
        src=request.src,
        dst=str(target.folder),
        differences=differences,
        files_compared=len(dst_source.indexes),
        bytes_compared=nbytes,
        seconds=time.monotonic() - began,
        processes=team.size,
        notices=(*target.notices, *dst_source.notices, *notices),
        warnings=(*target.warnings, *foreign_warnings(target, named, team)),
        step=source.selected.step_name,
        evidence=evidence.facts,
        names={file: basename(p) for file, p in dst_source.paths.items()} if described else {},
    )


def _each_once(differences: Sequence[Difference]) -> tuple[Difference, ...]:
    """Return one difference for each name and rank, in their order."""
    differences_by_key = {(d.name, d.rank): d for d in differences}
    return tuple(differences_by_key[key] for key in sorted(differences_by_key))


def _share_out(target: Target, dst_source: Source, team: Team) -> Assignment:
    """Say which process compares what of the files that are there. Collective."""
    if not dst_source.indexes:
        return [[] for _ in dst_source.reach.node]
    return team.agree(
        lambda: assign_within_nodes(target.planner, list(dst_source.indexes), dst_source.reach)
    )


def compare(
    work: WorkPlan,
    source: Source,
    target: Target,
    dst_source: Source,
    assignment: Assignment,
    team: Team,
    show: ShowProgress,
) -> tuple[list[Difference], int]:
    """Compare files, and the checksums that they carry; return differences, and bytes.

    Collective.
    """
    p2p = team.p2p() if work.exchanges else None
    local_files = dict.fromkeys(slice_range.rank for slice_range in assignment[team.rank])

    def own(on_progress: OnProgress) -> tuple[int, list[Difference]]:
        with SourceReader(dst_source.paths, dst_source.indexes) as destination:
            sinks = {
                file: ComparingSink(
                    file, destination, dst_source.indexes[file], _expected(target.planner, file)
                )
                for file in local_files
            }
            with open_work_inputs(source, target, work, p2p, on_progress) as inputs:
                traffic = execute(work, inputs, sinks, on_progress)
            destination.check_unchanged()
        return traffic.written, [d for s in sinks.values() for d in s.differences.values()]

    nbytes, differing = team.work(own, show)
    carrying = dst_source.reach.partition(dst_source.indexes)[team.rank]
    differing += team.work(
        lambda tick: wrong_checksums(dst_source.paths, dst_source.indexes, carrying, tick),
        show_nothing,
    )
    by_process = team.allgather(lambda: (nbytes, differing))
    return [difference for _, differences in by_process for difference in differences], sum(
        nbytes for nbytes, _ in by_process
    )


def _expected(planner: Planner, file: int) -> Mapping[str, ExpectedSlice]:
    layouts = planner.names(file).values()
    return {
        p.name: ExpectedSlice(p.dtype, layout.grid(p.shape).box(planner.cell(layout, file)))
        for (p, _), layout in zip(planner.slices(file), layouts)
    }
