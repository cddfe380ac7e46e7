"""`transform`: convert a checkpoint, or continue where a stopped run left off."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rankxform.engine.pipeline import Traffic
from rankxform.engine.sinks import OutputFile
from rankxform.errors import UsageError
from rankxform.planning.exchange import WorkPlan
from rankxform.process import Phases
from rankxform.publish.journal import write_parts
from rankxform.request import Request
from rankxform.source.open import Source
from rankxform.statements import as_notice
from rankxform.storage.posix import (
    OnProgress,
    create,
    is_same_file,
    make_folder,
    publish_file,
    remove_if_possible,
    sync,
    unique_name,
)
from rankxform.target.destination import Destination, destination_of, open_work_inputs
from rankxform.target.findings import adding_suggestions
from rankxform.target.folder import FileLayoutCache
from rankxform.target.inputs import resolve_request
from rankxform.target.resolve import open_asked, prepare, resolve_target
from rankxform.target.target import Target
from rankxform.transport import SerialTeam, Team
from rankxform.transport.team import ShowProgress, show_nothing

from .evidence import examine
from .report import Report, report_of
from .work import plan_work

OnStart = Callable[[Source, Target, int], ShowProgress]
"""Called with what is read, what is made of it, and the bytes to move, before the first is; returns
the function that is shown the progress. Process 0's is shown it."""


def start_silently(source: Source, target: Target, nbytes: int) -> ShowProgress:
    """Show nothing."""
    return show_nothing


def transform(request: Request, team: Team, begin: OnStart = start_silently) -> Report:
    """Convert a checkpoint; return what was done. Collective."""
    phases = Phases("plan")
    resolved = resolve_request(request, team)
    phases.enter("index")
    source = open_asked(resolved, team)
    phases.enter("plan")
    target = resolve_target(resolved, source, team)
    phases.enter("compare")
    kind = destination_of(resolved.request)
    lying_there = kind.check_free(resolved.request, source, target, team)
    evidence = examine(resolved, source, target, team)
    phases.enter("plan")
    target = target.with_evidence(evidence, [as_notice(text) for text in lying_there])
    with kind.claim(resolved.request, source, target, team) as destination:
        with adding_suggestions(resolved, source, team):
            work = plan_work(
                resolved.request, source, target, destination.remaining_slices, team, kind.ascending
            )
        show = begin(source, target, work.nbytes)
        phases.enter("move")
        destination.begin(team)
        traffic = move(work, source, target, destination, team, show)
        phases.enter("publish")
        destination.publish(team)
    phases.enter("wait")
    return report_of(destination, evidence, traffic, phases, team)


def move(
    work: WorkPlan,
    source: Source,
    target: Target,
    destination: Destination,
    team: Team,
    show: ShowProgress,
) -> Traffic:
    """Read, exchange, assemble and write what every process has to. Collective."""
    messenger = team.p2p() if work.exchanges else None

    def fill(on_progress: OnProgress) -> Traffic:
        with open_work_inputs(source, target, work, messenger, on_progress) as inputs:
            return destination.fill(work, inputs, on_progress)

    return team.work(fill, show)


def transform_one_rank(request: Request, path: Path) -> None:
    """Write the file of the one rank of `request` as `path`, by this process on its own.

    The file is written completely or not at all. An existing file is replaced, even by several
    processes at once. There is no manifest and no journal: a stopped conversion starts over.
    """
    team = SerialTeam()
    resolved, source, target = prepare(request, team)
    target = target.with_evidence(examine(resolved, source, target, team))
    if any(is_same_file(path, Path(source_path)) for source_path in source.paths.values()):
        raise UsageError("is a source file, which is never written to", where=path)
    (rank,), planner = target.ranks, target.planner
    layouts = FileLayoutCache(planner, source.indexes, target, request.crc)
    output = OutputFile(unique_name(path), layouts.of(rank))
    work = plan_work(resolved.request, source, target, [[planner.whole_file(rank)]], team)
    make_folder(path.parent)
    create(output.part)
    try:
        with open_work_inputs(source, target, work) as inputs:
            write_parts(work, inputs, {rank: output}, lambda nbytes: None)
        if request.fsync:
            sync(output.part)
        publish_file(output.part, path, durable=request.fsync)
    except BaseException:
        remove_if_possible(output.part)
        raise
