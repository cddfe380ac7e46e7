"""The whole story: read the strategies, plan in integers, move each byte once."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from rankxform.engine.checksum import IntegrityChecker
from rankxform.engine.file_sink import Output, add_checksum, part_descriptors
from rankxform.engine.pipeline import Messenger, Traffic
from rankxform.errors import (
    DifferenceError,
    RankxformError,
    StoppedError,
    StorageError,
    UsageError,
)
from rankxform.layout.names import patterns
from rankxform.metrics import Phases, peak_memory
from rankxform.planning.assign import remaining
from rankxform.planning.movement import needed_bytes
from rankxform.planning.transfers import SliceRange, bytes_to_write
from rankxform.publish.journal import Journal
from rankxform.publish.state import State
from rankxform.publish.target import TargetFolder
from rankxform.publish.write import write_parts
from rankxform.request import Request
from rankxform.storage.posix import (
    OnProgress,
    create,
    is_same,
    make_folder,
    own_name,
    publish,
    remove,
    sync,
)
from rankxform.target.aim import Conversion, prepare
from rankxform.target.outputs import FileLayouts, equal_files, outputs
from rankxform.target.placement import Placement, place
from rankxform.target.reading import opened
from rankxform.target.strategy_file import check_strategy_file
from rankxform.transport import Serial, Team
from rankxform.transport.team import Show, quiet

from .checks import check_foreign_files, check_target, compare_ranks, foreign_files, warn_of
from .finish import Work, publish_all
from .manifest import identity
from .measure import plan_work
from .replicas import check_replicas
from .report import Report

Begin = Callable[[Conversion, int], Show]
"""Called on process 0 with the prepared conversion and the bytes to move, before the first is;
returns the function that is shown the progress."""


def transform(request: Request, team: Team, begin: Begin = lambda conversion, n: quiet) -> Report:
    """Convert a checkpoint, or continue where a stopped run left off; return what was done."""
    phases = Phases()
    return convert(prepare(request, team, phases), team, begin, phases)


def convert(conversion: Conversion, team: Team, begin: Begin, phases: Phases) -> Report:
    """Carry out a conversion that is prepared. The request is its own, with absolute paths."""
    request = conversion.request
    with phases.phase("compare"), conversion.suggesting(team):
        conversion, compared, notices = _check(conversion, team)
    with phases.phase("plan"):
        target, all_ranks = conversion.target, conversion.planner.dst.ranks
        one = target.form.title if target.arrangement.parts else None
        placement = place(
            target.folder,
            request.dst_placement,
            conversion.output_paths,
            all_ranks,
            team,
            one_folder=one,
        )
    with _target_folder(conversion, team, placement) as (folder, state):
        with phases.phase("plan"), conversion.suggesting(team):
            work = _work(conversion, team, state, placement)
        first = team.rank == placement.of(team.rank).processes[0]
        team.agree(lambda: check_strategy_file(conversion) if first else None)
        total = sum(team.allgather(lambda: bytes_to_write(work.plan.transfers)))
        show = begin(conversion, total) if team.rank == 0 else quiet
        moving = time.monotonic()
        traffic = _carry_out(work, team, folder, show, phases)
        moved = time.monotonic() - moving
    foreign = warn_of(foreign_files(target, conversion.output_paths.values(), team))
    return replace(
        _report(work, team, traffic, phases, compared),
        move_seconds=moved,
        placement=placement.describe(),
        notices=(*conversion.notices, *notices),
        warnings=(*conversion.warnings, *foreign),
    )


def _check_root(conversion: Conversion) -> None:
    """Refuse one iteration's folder as the root of iterations."""
    dst = Path(conversion.request.dst or "")
    folder = conversion.target.arrangement.folder
    if folder and re.fullmatch(re.sub(r"[0-9]+", "[0-9]+", folder), dst.name):
        raise UsageError(
            f"{dst}: is one iteration's folder; name the folder above it, {dst.parent}"
        )


def _check(conversion: Conversion, team: Team) -> tuple[Conversion, int, list[str]]:
    """See that the source fits and the target is free; return as `compare_ranks` does."""
    request, files = conversion.request, conversion.source
    team.agree(lambda: _check_root(conversion))
    check_target(request, files.paths.values(), conversion.output_paths.values(), team)
    check_foreign_files(request, conversion.target, conversion.output_paths.values(), team)
    conversion, compared, notices = compare_ranks(conversion, team)
    if request.check_replicas != "no":
        notices += check_replicas(request, files, team)
    return conversion, compared, notices


def _report(work: Work, team: Team, traffic: Traffic, phases: Phases, compared: int) -> Report:
    """Sum what all processes did. Collective."""
    planner, state = work.conversion.planner, work.state
    seconds = time.monotonic() - phases.began
    for name, passed in traffic.seconds.items():
        phases.seconds[name] += passed
    phases.seconds["wait"] = phases.seconds["start"] + seconds - phases.total
    every = team.allgather(lambda: (traffic, peak_memory(), phases.seconds))
    needed = team.bcast(lambda: needed_bytes(planner, work.everything))
    catalog, selection = planner.catalog, planner.selection
    derived, compared_ones = work.conversion.derived, catalog.undeclared or catalog.declared
    return Report(
        src=work.request.src,
        dst=str(work.request.dst),
        step=work.conversion.source.selected.step_name,
        src_ranks=catalog.ranks,
        dst_ranks=planner.dst.ranks,
        parameters=len(selection.parameters),
        files=tuple(map(str, work.conversion.output_paths.values())),
        files_linked=work.linked,
        files_kept=len(state.kept),
        files_continued=len(state.completed.done),
        bytes_read=sum(one.read for one, _, _ in every),
        bytes_needed=needed,
        bytes_written=sum(one.written for one, _, _ in every),
        bytes_sent=sum(one.sent for one, _, _ in every),
        bytes_compared=compared,
        compared_names=tuple(patterns(compared_ones.keys())) if compared else (),
        seconds=seconds,
        processes=team.size,
        peak_memory_bytes=max(peak for _, peak, _ in every),
        phases=tuple(passed for _, _, passed in every),
        left_out=selection.left_out,
        absent=selection.absent,
        strategy=str(work.request.dst_strategy) if derived else None,
        derivation=derived.facts if derived else None,
        form=work.conversion.target.form.name,
        fingerprints=work.request.verify,
    )


@contextmanager
def _target_folder(
    conversion: Conversion, team: Team, placement: Placement
) -> Iterator[tuple[TargetFolder | None, State]]:
    """Lock the destination folders; yield the folder on its first process, and the state on all.

    The state is that of the process's own folder, with what is complete in all folders. After a
    storage failure or a stop, everything is kept so that it can be continued; after any other
    failure, only what an earlier run had done.
    """
    request, target = conversion.request, conversion.target
    root = placement.of(team.rank)
    held: list[TargetFolder] = []

    def claim() -> State | None:
        if team.rank != root.processes[0]:
            return None
        folder = TargetFolder(
            target.folder,
            identity(conversion),
            {rank: final for rank, final in conversion.output_paths.items() if rank in root.ranks},
            form=target.form.name,
            mark=_mark(conversion),
            overwrite=request.overwrite,
            durable=request.fsync,
        )
        held.append(folder)
        return folder.state

    try:
        states = team.allgather(claim)
        own = states[root.processes[0]]
        assert own is not None
        yield (held[0] if held else None), own.with_all(s for s in states if s is not None)
    except BaseException as error:
        keep = isinstance(error, (StorageError, StoppedError)) or not isinstance(error, Exception)
        for folder in held:
            folder.close(keep or (folder.resumed and not isinstance(error, DifferenceError)))
            if keep and folder.begun and isinstance(error, RankxformError):
                error.resumable = True
        raise


def _mark(conversion: Conversion) -> tuple[Path, bytes] | None:
    mark = conversion.target.arrangement.mark
    return None if mark is None else (Path(conversion.request.dst or "") / mark[0], mark[1])


def _work(conversion: Conversion, team: Team, state: State, placement: Placement) -> Work:
    """Plan what every process does."""
    request, files, planner = conversion.request, conversion.source, conversion.planner
    layouts = FileLayouts(planner, files.indexes, conversion.target, request.crc)
    ranks = [file for file in conversion.output_files if file not in state.kept]
    groups = equal_files(request, planner, placement, ranks, team)
    state = _with_same_layouts(state, team, layouts)
    done = state.completed.done

    def assign() -> tuple[list[list[SliceRange]], list[list[SliceRange]]]:
        assignment = placement.assign(planner, list(groups), done)
        return assignment, [remaining(planner, one, done) for one in assignment]

    assignment, left = team.agree(assign)
    plan = plan_work(request, files, planner, left, team, conversion.target.container)
    mine = team.agree(lambda: outputs(conversion.target, assignment[team.rank], groups, layouts))
    everything = [one for some in left for one in some]
    return Work(conversion, state, plan, mine, everything, groups, placement.of(team.rank))


def _with_same_layouts(state: State, team: Team, layouts: FileLayouts) -> State:
    """Drop part files whose layout has changed, for example because a missing shard is back."""
    parts = state.completed.parts
    mine = sorted(parts)[team.rank :: team.size]
    same = team.allgather(lambda: [r for r in mine if layouts.of(r).digest == parts[r].layout])
    completed = state.completed.only(rank for some in same for rank in some)
    return replace(state, completed=completed)


def _carry_out(
    work: Work, team: Team, folder: TargetFolder | None, show: Show, phases: Phases
) -> Traffic:
    """Write this process's part; give the files their names when all are complete."""
    request = work.request
    sizes = team.allgather(lambda: {o.part: o.layout.size for o in work.owned.values()})
    team.agree(lambda: _make_room(work, folder, work.in_root(sizes)))
    journal = team.agree(lambda: _begin(work, team.rank))
    p2p = team.p2p() if work.plan.exchanges else None
    traffic = team.work(lambda on_progress: _write(work, journal, on_progress, p2p), show)
    if request.crc:
        team.work(lambda on_progress: _add_checksums(work, on_progress), quiet)
    sums = team.allgather(lambda: journal.sums) if request.verify else []
    with phases.phase("publish"):
        publish_all(work, team, folder, journal, sums)
    return traffic


def _make_room(work: Work, folder: TargetFolder | None, sizes: Mapping[Path, int]) -> None:
    if folder is not None:
        folder.check_room(sizes)
        folder.forget_all_but(work.state.completed.done)


def _begin(work: Work, process: int) -> Journal:
    """Create the part files that are not there yet, and a journal of all."""
    for rank, output in work.owned.items():
        if rank not in work.state.completed.done:
            make_folder(output.final.parent)
            create(output.part)
    parts = {rank: (one.part, one.layout.digest) for rank, one in work.owned.items()}
    return Journal(work.state, process, parts, durable=work.request.fsync)


def _write(work: Work, journal: Journal, on_progress: OnProgress, p2p: Messenger | None) -> Traffic:
    request = work.request
    with opened(work.conversion) as (sources, operands):
        return write_parts(
            work.plan,
            work.outputs,
            sources,
            request.memory,
            on_progress,
            journal=journal,
            behind=request.fsync,
            checker=IntegrityChecker(work.state.seed) if request.verify else None,
            p2p=p2p,
            operands=operands,
        )


def _add_checksums(work: Work, on_progress: OnProgress) -> None:
    """Add what needs the complete file, once every process has written its slices."""
    parts = part_descriptors()
    try:
        for output in work.owned.values():
            add_checksum(output, work.conversion.target.container, parts, on_progress)
            if work.request.fsync:
                sync(output.part)
    finally:
        parts.close()


# -- one file -----------------------------------------------------------------------------------


def convert_one(request: Request, path: Path) -> None:
    """Write the file of the one rank of `request` as `path`, by this process on its own.

    The file is written completely or not at all. An existing file is replaced, even by several
    processes at once. There is no manifest and no journal: a stopped conversion starts over.
    """
    team = Serial()
    conversion = prepare(request, team)
    conversion, _, _ = compare_ranks(conversion, team)
    files, planner = conversion.source, conversion.planner
    if any(is_same(path, source) for source in files.paths.values()):
        raise UsageError(f"{path}: is a source file, which is never written to")
    (rank,) = conversion.ranks
    layouts = FileLayouts(planner, files.indexes, conversion.target, request.crc)
    output = Output(own_name(path), layouts.of(rank))
    plan = plan_work(request, files, planner, [[planner.whole_file(rank)]], team)
    make_folder(path.parent)
    create(output.part)
    try:
        with opened(conversion) as (sources, operands):
            write_parts(
                plan, {rank: output}, sources, request.memory, lambda done: None, operands=operands
            )
        if request.fsync:
            sync(output.part)
        publish(output.part, path, durable=request.fsync)
    except BaseException:
        remove(output.part)
        raise
