"""The whole story: read the strategies, plan in integers, move each byte once."""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankxform.errors import StorageError, UsageError
from rankxform.execution import samples
from rankxform.execution.engine import Traffic, write_parts
from rankxform.execution.files import Tick, create, make_folder, publish, remove, sync
from rankxform.execution.headers import SAFETENSORS
from rankxform.execution.links import NONE, REFLINK, can_reflink, publish_alike
from rankxform.execution.output import (
    FileLayout,
    Output,
    add_crc,
    lay_out_ckpt,
    lay_out_safetensors,
    part_descriptors,
    part_of,
    safetensors_order,
)
from rankxform.formats.dtype import INT4
from rankxform.planning.agreement import (
    check_extra_rank,
    check_slices_differ,
    check_unlisted,
    extra_probes,
    probes,
    to_compare,
)
from rankxform.planning.moves import Move, Portion, bytes_to_write, needed_bytes
from rankxform.transport import Team
from rankxform.transport.team import Show

from .phases import Phases
from .prepare import Conversion, prepare
from .request import Request


@dataclass(frozen=True, repr=False)
class Report:
    """What a transform did, over all processes.

    files: all destination files; linked: how many of them share another's bytes.

    read, written: bytes of tensor content and files. needed: distinct source bytes. compared:
    bytes of unlisted parameters that were read to compare ranks. seconds: of the whole call;
    move_seconds: from the finished plan to the last file's name. peak_memory: of the largest
    process, in bytes. phases: of each process, seconds by name.
    """

    conversion: Conversion
    files: tuple[str, ...]
    linked: int
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
    """Convert a checkpoint; return on every process what was done.

    `begin` is called on process 0 with the prepared conversion and the bytes to write, before
    the first is; it returns the function that is shown the progress.
    """
    phases = Phases()
    began = time.monotonic()
    conversion = prepare(request, team, phases)
    with phases.phase("compare"):
        team.share(lambda: _check_target(conversion))
        compared, notices = _compare_ranks(conversion, team)
        alike = _alike(conversion, team, agreed=not notices)
    with phases.phase("plan"), team.together():
        mine = conversion.shares(team.size, list(alike))[team.rank]
        moves = _moves(conversion, mine)
        outputs = _outputs(conversion, mine, alike)
    total = sum(team.gather(lambda: bytes_to_write(moves)))
    show = begin(conversion, total) if team.rank == 0 else lambda done, end: None
    moving = time.monotonic()
    traffic = _carry_out(conversion, team, moves, outputs, show, phases)
    moved = time.monotonic() - moving
    for name, seconds in traffic.seconds.items():
        phases.seconds[name] += seconds
    phases.seconds["wait"] = phases.seconds["start"] + time.monotonic() - began - phases.total
    every = team.gather(lambda: (traffic, _peak_memory(), phases.seconds))
    return Report(
        conversion,
        tuple(str(conversion.final(rank)) for rank in conversion.ranks),
        len(conversion.ranks) - len(alike),
        sum(t.read for t, _, _ in every),
        needed_bytes(conversion.planner.moves(conversion.everything)),
        sum(t.written for t, _, _ in every),
        compared,
        time.monotonic() - began,
        moved,
        team.size,
        max(peak for _, peak, _ in every),
        (*conversion.notices, *notices),
        tuple(seconds for _, _, seconds in every),
    )


def _carry_out(
    conversion: Conversion,
    team: Team,
    moves: Sequence[Move],
    outputs: Mapping[int, Output],
    show: Show,
    phases: Phases,
) -> Traffic:
    """Write this process's share, and give the files their names when all are complete."""
    owned = [output for output in outputs.values() if output.owned]
    try:
        with team.together():
            for output in owned:
                make_folder(output.final.parent)
                create(output.part)
        traffic = team.work(lambda tick: _write(conversion, moves, outputs, tick, phases), show)
        if conversion.request.crc:
            quiet: Show = lambda done, end: None  # noqa: E731
            team.work(lambda tick: _add_checksums(conversion.request, owned, tick), quiet)
        with phases.phase("publish"), team.together():
            request = conversion.request
            for output in owned:
                publish_alike(output.part, output.alike, request.link, durable=request.fsync)
                publish(output.part, output.final, durable=request.fsync)
        return traffic
    finally:
        for output in owned:
            for final in (output.final, *output.alike):
                remove(part_of(final))


# -- after the plan -------------------------------------------------------------------------


def _check_target(conversion: Conversion) -> None:
    """See that writing will harm nothing. Raises UsageError or StorageError."""
    request = conversion.request
    if request.dst is None:
        raise UsageError("no destination folder")
    if request.shapes is not None:
        raise UsageError("shapes are for a plan; a transform reads a checkpoint")
    src = Path(request.src).resolve()
    source_folders = {path.resolve().parent for path in conversion.shards.paths.values()}
    for rank in conversion.ranks:
        final = conversion.final(rank)
        folder = final.parent.resolve()
        if folder in source_folders or (src.is_dir() and src in (folder, *folder.parents)):
            raise UsageError(
                f"{final}: lies in the source folder {src}, which is never written to; "
                "choose another destination"
            )
        if final.is_dir():
            raise StorageError(f"{final}: is a folder, where a checkpoint file is to be written")
        if final.exists() and not request.overwrite:
            raise StorageError(
                f"{final}: is already there; remove it, choose another folder, or say --overwrite"
            )


@dataclass(frozen=True)
class _Looks:
    """What one process read of its share of the source files, before the conversion.

    digests: of unlisted parameters, complete; samples: of others, (digest, all bytes equal). By
    rank and name.
    """

    nbytes: int
    digests: dict[int, dict[str, bytes]]
    samples: dict[int, dict[str, samples.Sample]]


def _compare_ranks(conversion: Conversion, team: Team) -> tuple[int, list[str]]:
    """Read what tells whether the folder fits its strategy; return the bytes read, and notices."""
    request, source = conversion.request, conversion.source
    looks = team.gather_work(lambda tick: _look(conversion, team, tick))
    with team.together():
        sampled = {rank: found for look in looks for rank, found in look.samples.items()}
        if not request.allow_equal_slices:
            check_slices_differ(source, sampled, probes(conversion.selection))
        for rank in () if request.allow_extra_ranks else conversion.extra:
            check_extra_rank(source, sampled, rank, str(conversion.shards.paths[rank]))
        digests = {rank: found for look in looks for rank, found in look.digests.items()}
        notices = check_unlisted(source, digests, request.unlisted == "take-one")
    return sum(look.nbytes for look in looks), notices


def _look(conversion: Conversion, team: Team, tick: Tick) -> _Looks:
    every = {**conversion.indexes, **conversion.extra}
    unlisted = to_compare(conversion.selection)
    extra = extra_probes(conversion.source, conversion.extra)
    sampled = [*dict.fromkeys([*probes(conversion.selection), *extra])]
    found = _Looks(0, {}, {})
    nbytes = 0
    for rank in list(every)[team.rank :: team.size]:
        path, index = conversion.shards.paths[rank], every[rank]
        if conversion.request.check_crc:
            samples.check_crc(path, index, tick)
        if unlisted and rank in conversion.indexes:
            found.digests[rank] = samples.digest_all(path, index, unlisted, tick)
            nbytes += sum(index.nbytes(name) for name in found.digests[rank])
        if sampled:
            found.samples[rank] = samples.sample(path, index, sampled)
        tick(0)
    return replace(found, nbytes=nbytes)


def _moves(conversion: Conversion, mine: Sequence[Portion]) -> list[Move]:
    """Return the moves of this process's share, in the order of the destination files."""
    moves = conversion.planner.moves(mine)
    if conversion.format == SAFETENSORS:
        moves.sort(key=lambda m: safetensors_order((m.parameter.name, m.parameter.dtype, ())))
    return moves


def _alike(conversion: Conversion, team: Team, agreed: bool) -> dict[int, list[int]]:
    """Return which destination files are written, each with the ranks that get its bytes.

    `agreed` is whether parameters in no strategy are the same on all source ranks; where they
    are not, or MindSpore's replicas are wanted, ranks with equal boxes may differ.
    """
    request = conversion.request
    each = {rank: [rank] for rank in conversion.ranks}
    if request.link == NONE or not agreed or request.replicas != "spread":
        return each
    alike = conversion.alike()
    if len(alike) == len(each) or request.dst is None:
        return each
    dst = Path(request.dst)
    if request.link == REFLINK and not team.share(lambda: can_reflink(dst)):
        return each
    return alike


def _outputs(
    conversion: Conversion, mine: Sequence[Portion], alike: Mapping[int, Sequence[int]]
) -> dict[int, Output]:
    """Plan the files of this process's share; ranks with slices of one shape share a layout."""
    request, planner = conversion.request, conversion.planner
    first = conversion.indexes[min(conversion.indexes)]
    metadata = {
        key: value
        for key, value in first.metadata.items()
        if not (value == INT4 and key in first)  # a mark of the source's; the output has its own
    }
    layouts: dict[int, FileLayout] = {}
    outputs = {}
    for portion in mine:
        slices = planner.slices(portion.rank)  # one list for all ranks with the same
        if id(slices) not in layouts:
            entries = [(p.name, p.dtype, shape) for p, shape in slices]
            layouts[id(slices)] = (
                lay_out_safetensors(entries, metadata, request.crc)
                if conversion.format == SAFETENSORS
                else lay_out_ckpt(entries)
            )
        final, *others = map(conversion.final, alike[portion.rank])
        outputs[portion.rank] = Output(
            final, layouts[id(slices)], owned=portion.first == 0, alike=tuple(others)
        )
    return outputs


def _write(
    conversion: Conversion,
    moves: Sequence[Move],
    outputs: Mapping[int, Output],
    tick: Tick,
    phases: Phases,
) -> Traffic:
    request, paths = conversion.request, conversion.shards.paths
    traffic = write_parts(
        moves, outputs, paths, conversion.indexes, request.memory, tick, behind=request.fsync
    )
    if request.fsync:
        with phases.phase("fsync"):
            for output in outputs.values():
                sync(output.part)
                tick(0)
    return traffic


def _add_checksums(request: Request, owned: Sequence[Output], tick: Tick) -> None:
    """Add what needs the complete file, once every process has written its portions."""
    parts = part_descriptors()
    try:
        for output in owned:
            add_crc(output, parts, tick)
            if request.fsync:
                sync(output.part)
    finally:
        parts.close()


def _peak_memory() -> int:
    """Return the largest resident size this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
