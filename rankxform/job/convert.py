"""The whole story: read the strategies, plan in integers, move each byte once."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from rankxform.engine.checksum import MODULUS, Witness
from rankxform.engine.file_sink import Output, add_crc, part_descriptors, part_of
from rankxform.engine.pipeline import Mail, Traffic, write_parts
from rankxform.errors import DifferenceError, RankxformError, StoppedError, StorageError
from rankxform.planning.assign import remaining
from rankxform.planning.transfers import Portion, bytes_to_write, needed_bytes
from rankxform.publish.journal import Journal
from rankxform.publish.links import HARD, link_all
from rankxform.publish.target import Facts, State, Target, facts_of, known_facts
from rankxform.storage.posix import Tick, create, make_folder, publish, remove, sync
from rankxform.storage.sources import Sources
from rankxform.transport import Team
from rankxform.transport.team import Show

from .checks import check_target, compare_ranks, foreign_files
from .contents import contents
from .manifest import identity, verify_options
from .measure import Task, task
from .memory import peak_memory
from .metrics import Phases
from .outputs import Layouts, alike, outputs
from .placement import Placement, Root, place
from .prepare import Conversion, prepare
from .replicas import check_replicas
from .request import Request

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Report:
    """What a transform did, over all processes.

    files: all destination files; linked: how many of them share another's bytes; kept: how many
    were complete before; continued: how many an earlier run had begun.

    read, written: bytes of tensor content and files. needed: distinct source bytes. compared:
    bytes of unlisted parameters that were read to compare ranks. seconds: of the whole call;
    move_seconds: from the finished plan to the last file's name. peak_memory: of the largest
    process, in bytes. phases: of each process, seconds by name. placement: which ranks are on which
    nodes, if these have folders of their own. sent: bytes from one process to another. warnings:
    what may not be what was meant; notices: what to know.
    """

    conversion: Conversion
    files: tuple[str, ...]
    linked: int
    kept: int
    continued: int
    read: int
    needed: int
    written: int
    compared: int
    seconds: float
    move_seconds: float
    processes: int
    peak_memory: int
    notices: tuple[str, ...]
    phases: tuple[Mapping[str, float], ...]
    placement: str | None
    sent: int
    warnings: tuple[str, ...]

    def __repr__(self) -> str:
        return (
            f"Report({len(self.files)} files, read={self.read}, written={self.written}, "
            f"seconds={self.seconds:.3f}, processes={self.processes})"
        )


def transform(
    request: Request,
    team: Team,
    begin: Callable[[Conversion, int], Show] = lambda conversion, nbytes: lambda done, end: None,
) -> Report:
    """Convert a checkpoint, or continue where a stopped run left off; return what was done.

    `begin` is called on process 0 with the prepared conversion and the bytes to write, before
    the first is; it returns the function that is shown the progress.
    """
    phases = Phases()
    began = time.monotonic()
    conversion = prepare(request, team, phases)
    with phases.phase("compare"):
        check_target(conversion, team)
        compared, notices = compare_ranks(conversion, team)
        if request.check_replicas != "no":
            notices += check_replicas(conversion, team)
    with phases.phase("plan"):
        placement = place(conversion, team)
    with _target(conversion, team, placement) as (target, state):
        with phases.phase("plan"):
            work = _work(conversion, team, state, placement, agreed=not notices)
        total = sum(team.gather(lambda: bytes_to_write(work.task.moves)))
        show = begin(conversion, total) if team.rank == 0 else lambda done, end: None
        moving = time.monotonic()
        traffic = _carry_out(work, team, target, show, phases)
        moved = time.monotonic() - moving
    for name, seconds in traffic.seconds.items():
        phases.seconds[name] += seconds
    phases.seconds["wait"] = phases.seconds["start"] + time.monotonic() - began - phases.total
    finals = [conversion.final(rank) for rank in conversion.ranks]
    foreign = foreign_files(finals, team)
    every = team.gather(lambda: (traffic, peak_memory(), phases.seconds))
    return Report(
        conversion,
        tuple(map(str, finals)),
        linked=work.linked,
        kept=len(work.state.kept),
        continued=len(work.state.progress.done),
        read=sum(t.read for t, _, _ in every),
        needed=needed_bytes(conversion.planner.moves(work.everything)),
        written=sum(t.written for t, _, _ in every),
        compared=compared,
        seconds=time.monotonic() - began,
        move_seconds=moved,
        processes=team.size,
        peak_memory=max(peak for _, peak, _ in every),
        notices=(*conversion.notices, *notices),
        placement=placement.told(),
        sent=sum(t.sent for t, _, _ in every),
        phases=tuple(seconds for _, _, seconds in every),
        warnings=(*conversion.warnings, *foreign),
    )


@contextmanager
def _target(
    conversion: Conversion, team: Team, placement: Placement
) -> Iterator[tuple[Target | None, State]]:
    """Hold the destination folders; the first process of each gets its Target.

    Every process gets what is in its own folder, with the progress of all. What a failure of
    storage or a stop leaves is kept, to be continued; of any other failure nothing stays, but for
    what an earlier run had done.
    """
    request = conversion.request
    root = placement.of(team.rank)
    held: list[Target] = []

    def claim() -> State | None:
        assert request.dst is not None
        if team.rank != root.processes[0]:
            return None
        finals = {rank: conversion.final(rank) for rank in conversion.ranks if rank in root.ranks}
        target = Target(
            Path(request.dst),
            identity(conversion),
            finals,
            overwrite=request.overwrite,
            durable=request.fsync,
        )
        held.append(target)
        return target.state

    try:
        states = team.gather(claim)
        own = states[root.processes[0]]
        assert own is not None
        yield (held[0] if held else None), own.with_all(s for s in states if s is not None)
    except BaseException as error:
        keep = isinstance(error, (StorageError, StoppedError)) or not isinstance(error, Exception)
        for target in held:
            target.close(keep or (target.resumed and not isinstance(error, DifferenceError)))
            if keep and target.begun and isinstance(error, RankxformError):
                error.resumable = True
        raise


@dataclass(frozen=True)
class _Work:
    """What one process does: its outputs, and the moves into them that are not done yet.

    everything: all portions that are left, of all processes. groups: ranks whose files are equal,
    by the one whose file is written. root: the folder that the process writes to.
    """

    conversion: Conversion
    state: State
    task: Task
    outputs: Mapping[int, Output]
    everything: Sequence[Portion]
    groups: Mapping[int, Sequence[int]]
    root: Root

    @property
    def linked(self) -> int:
        return sum(len(ranks) - 1 for ranks in self.groups.values())

    def in_root(self, found: Sequence[Mapping[Path, T]]) -> dict[Path, T]:
        """Return, of what all processes found of their files, what is of this folder's."""
        mine = [found[process] for process in self.root.processes]
        return {path: one for some in mine for path, one in some.items()}

    @property
    def owned(self) -> dict[int, Output]:
        """The outputs that this process creates, finishes and publishes."""
        return {rank: output for rank, output in self.outputs.items() if output.owned}


def _work(
    conversion: Conversion, team: Team, state: State, placement: Placement, *, agreed: bool
) -> _Work:
    planner, layouts = conversion.planner, Layouts(conversion)
    ranks = [rank for rank in conversion.ranks if rank not in state.kept]
    groups = alike(conversion, team, placement, ranks, agreed=agreed)
    state = _with_same_layouts(state, team, layouts)
    done = state.progress.done
    with team.together():
        shares = placement.shares(conversion, list(groups), done)
        left = [remaining(planner, share, done) for share in shares]
    mine = task(conversion, left, team)
    with team.together():
        return _Work(
            conversion,
            state,
            mine,
            outputs(conversion, shares[team.rank], groups, layouts),
            [portion for share in left for portion in share],
            groups,
            placement.of(team.rank),
        )
    raise AssertionError("together() raises or returns")


def _with_same_layouts(state: State, team: Team, layouts: Layouts) -> State:
    """Leave out part files that were laid out in another way, as when a shard came back."""
    parts = state.progress.parts
    mine = sorted(parts)[team.rank :: team.size]
    same = team.gather(lambda: [r for r in mine if layouts.of(r).digest == parts[r].layout])
    return replace(state, progress=state.progress.only(rank for some in same for rank in some))


def _carry_out(
    work: _Work, team: Team, target: Target | None, show: Show, phases: Phases
) -> Traffic:
    """Write this process's share; give the files their names when all are complete."""
    request = work.conversion.request
    sizes = team.gather(lambda: {o.part: o.layout.size for o in work.owned.values()})
    with team.together():
        if target is not None:
            target.check_room(work.in_root(sizes))
            target.forget_all_but(work.state.progress.done)
    with team.together():
        for rank, output in work.owned.items():
            if rank not in work.state.progress.done:
                make_folder(output.final.parent)
                create(output.part)
        parts = {rank: (one.part, one.layout.digest) for rank, one in work.owned.items()}
        journal = Journal(work.state, team.rank, parts, durable=request.fsync)
    mail = team.mail() if work.task.trades else None
    traffic = team.work(lambda tick: _write(work, journal, tick, mail), show)
    if request.crc:
        team.work(lambda tick: _add_checksums(work, tick), lambda done, end: None)
    sums = team.gather(lambda: journal.sums) if request.verify else []
    with phases.phase("publish"):
        seen = _seen(work, team)
        facts = team.gather(lambda: _link(work, journal, seen))
        with team.together():
            if target is not None:
                _complete(work, target, work.in_root(facts), sums)
        seen = _seen(work, team)
        with team.together():
            for rank, output in work.owned.items():
                for final in output.finals:
                    noted = facts[team.rank][final]
                    found = _known(work, output, final, seen[rank])
                    _check_part(part_of(final), found, noted["inode"], noted["size"])
                    publish(part_of(final), final, durable=request.fsync)
        with team.together():
            if target is not None and team.rank != 0:
                _finish(work, target)
        team.share(lambda: _finish(work, target))
    return traffic


def _write(work: _Work, journal: Journal, tick: Tick, mail: Mail | None) -> Traffic:
    conversion, request = work.conversion, work.conversion.request
    with Sources(conversion.shards.paths, conversion.indexes) as sources:
        return write_parts(
            work.task.moves,
            work.outputs,
            sources,
            request.memory,
            tick,
            journal,
            behind=request.fsync,
            witness=Witness(work.state.seed) if request.verify else None,
            mail=mail,
            call=work.task.choice.call,
        )


def _add_checksums(work: _Work, tick: Tick) -> None:
    """Add what needs the complete file, once every process has written its portions."""
    parts = part_descriptors()
    try:
        for output in work.owned.values():
            add_crc(output, parts, tick)
            if work.conversion.request.fsync:
                sync(output.part)
    finally:
        parts.close()


def _seen(work: _Work, team: Team) -> dict[int, Facts]:
    """Return size and time of the part files, by rank, as the last to write has them. Collective.

    On a network file system a node may not know yet what another has written to the same file: it
    sees it shorter, and older.
    """

    def mine() -> dict[int, Facts]:
        found = {rank: known_facts(output.part) for rank, output in work.outputs.items()}
        return {rank: facts for rank, facts in found.items() if facts is not None}

    seen: dict[int, Facts] = {}
    for one in team.gather(mine):
        for rank, facts in one.items():
            known = seen.setdefault(rank, {"size": 0, "modified": 0})
            known.update((key, max(known[key], facts[key])) for key in known)
    return seen


def _known(work: _Work, output: Output, final: Path, seen: Facts) -> Facts:
    """Return how the part file of `final` is known; `seen` is what all know of the output's own."""
    own = final == output.final or work.conversion.request.link == HARD
    return {**facts_of(part_of(final)), **(seen if own else {})}


def _link(work: _Work, journal: Journal, seen: Mapping[int, Facts]) -> dict[Path, Facts]:
    """Put equal files beside their final names; return how each complete part file is known.

    Raises StorageError where a part file is not the one that was made, or not of its size.
    """
    request, found = work.conversion.request, {}
    for rank, output in work.owned.items():
        nbytes = output.nbytes(request.crc)
        facts = {**facts_of(output.part), **seen[rank]}
        _check_part(output.part, facts, journal.parts[rank].inode, nbytes)
        link_all(output.part, output.alike, request.link, durable=request.fsync)
        for final in output.finals:
            found[final] = facts = _known(work, output, final, seen[rank])
            _check_part(part_of(final), facts, facts["inode"], nbytes)
    return found


def _check_part(part: Path, found: Facts, inode: int, nbytes: int) -> None:
    """Raise StorageError for a part file that was changed; it is removed, to be made anew."""
    if (found["inode"], found["size"]) != (inode, nbytes):
        remove(part)
        raise StorageError(
            f"{part}: something else has changed or replaced it ({found['size']:,} bytes, "
            f"{nbytes:,} were written); it was removed, to be made anew"
        )


def _complete(
    work: _Work,
    target: Target,
    facts: Mapping[Path, Facts],
    sums: Sequence[Mapping[int, int]],
) -> None:
    """Note which files are complete, with the fingerprints of all processes and runs added up.

    On the first process of a folder.
    """
    every = [work.state.progress.sums, *sums]
    digests = {
        work.conversion.final(rank): f"{sum(some.get(first, 0) for some in every) % MODULUS:016x}"
        for first, ranks in work.groups.items()
        for rank in ranks
        if work.conversion.request.verify and rank in work.root.ranks
    }
    target.complete(facts, digests)


def _finish(work: _Work, target: Target | None) -> None:
    """Write a folder's manifest, on its first process; process 0's is the last."""
    assert target is not None
    conversion = work.conversion
    kept = contents(conversion) if conversion.request.verify else {}
    target.finish({**kept, "verify": verify_options(conversion)})
