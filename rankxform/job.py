"""The whole story: read the strategies, plan in integers, move each byte once.

`prepare` is everything before a tensor byte is touched, the same on every process; `transform`
goes on to write. All processes call them together.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from rankxform.errors import CheckpointError, RequestError, StorageError, UsageError
from rankxform.execution import samples, strategies
from rankxform.execution.engine import DEFAULT_MEMORY, Traffic, write_parts
from rankxform.execution.files import publish, remove, sync
from rankxform.execution.folder import DEFAULT_PATTERN, Shards, find
from rankxform.execution.headers import CKPT, FORMATS, SAFETENSORS, container, index
from rankxform.execution.output import Output, add_crc, lay_out, part_descriptors
from rankxform.formats.index import Contents, Index
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.planning.agreement import (
    check_slices_differ,
    check_unlisted,
    probes,
    to_compare,
)
from rankxform.planning.plan import (
    REPLICAS,
    Planner,
    RankPlan,
    check_ranks,
    needed_stages,
    share_out,
)
from rankxform.planning.selection import ONE_SIDED, Selection, patterns, select
from rankxform.planning.source import Source, survey
from rankxform.transport import Team
from rankxform.transport.team import Show


@dataclass(frozen=True)
class Request:
    """What to convert, and how. Paths are resolved by process 0.

    src, dst: source folder or file; destination folder (None: only plan).
    src_strategy, dst_strategy: a file, a folder of stage files, or None for whole tensors.
    prefix, format: destination files are ``DST/rank_N/<prefix>N.<format>``; None: the source's.
    ranks: destination ranks to make; empty: all.
    src_pattern, step, suffix: which source files are meant.
    include, exclude: regular expressions that choose parameters.
    one_sided: "error", "leave-out" or "whole", for parameters that only one strategy lists.
    unlisted: "error" or "take-one", for unlisted parameters that differ between source ranks.
    replicas: "spread" reads each distinct box once; "mindspore" takes MindSpore's choice.
    memory: bytes of buffers on each process.
    """

    src: str
    dst: str | None
    src_strategy: str | None = None
    dst_strategy: str | None = None
    prefix: str = "checkpoint_"
    format: str | None = None
    ranks: tuple[int, ...] = ()
    src_pattern: str = DEFAULT_PATTERN
    step: str | None = None
    suffix: str | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    one_sided: str = "error"
    unlisted: str = "error"
    replicas: str = "spread"
    allow_equal_slices: bool = False
    check_crc: bool = False
    crc: bool = False
    overwrite: bool = False
    fsync: bool = True
    memory: int = DEFAULT_MEMORY

    def __post_init__(self) -> None:
        for option, value, allowed in (
            ("one_sided", self.one_sided, ONE_SIDED),
            ("unlisted", self.unlisted, ("error", "take-one")),
            ("replicas", self.replicas, REPLICAS),
            ("format", self.format, (None, *FORMATS)),
        ):
            if value not in allowed:
                raise UsageError(
                    f"{option} is {value!r}; {' or '.join(map(str, allowed))} is wanted"
                )
        if "/" in self.prefix or self.prefix.startswith("."):
            raise UsageError(f"prefix {self.prefix!r} must be the start of a file's name")
        if self.memory < 1 << 20:
            raise UsageError(f"memory of {self.memory} bytes is too little; 1 MiB is the least")


@dataclass
class Conversion:
    """A prepared request: all that is known before tensor bytes are read."""

    request: Request
    source: Source
    dst: Strategy
    shards: Shards
    indexes: Mapping[int, Index]
    selection: Selection
    ranks: tuple[int, ...]
    planner: Planner
    notices: list[str] = field(default_factory=list)

    @property
    def format(self) -> str:
        return self.request.format or container(next(iter(self.shards.paths.values())))

    def final(self, rank: int) -> Path:
        """Return the file of a destination rank."""
        assert self.request.dst is not None
        return (
            Path(self.request.dst) / f"rank_{rank}" / f"{self.request.prefix}{rank}.{self.format}"
        )

    def shares(self, processes: int) -> list[list[int]]:
        """Return the destination ranks that each process writes."""
        weights = [self.planner.nbytes(rank) + 1 for rank in self.ranks]
        return [[self.ranks[i] for i in run] for run in share_out(weights, processes)]

    def plans(self, ranks: Iterable[int]) -> list[RankPlan]:
        return [self.planner.plan(rank) for rank in ranks]


@dataclass(frozen=True)
class Report:
    """What a transform did, over all processes.

    read, written: bytes of tensor content and files; compared: bytes of unlisted parameters that
    were read to compare ranks; peak_memory: of the largest process, in bytes.
    """

    conversion: Conversion
    files: tuple[str, ...]
    read: int
    written: int
    compared: int
    seconds: float
    processes: int
    peak_memory: int
    notices: tuple[str, ...]


def prepare(request: Request, team: Team) -> Conversion:
    """Do everything that needs no tensor byte: strategies, folders, headers, checks, plan."""
    request, src, dst, shards, notices = team.share(lambda: _inputs(request))
    indexes = _gather_indexes(team, {**shards.paths})
    with team.together():
        _check_extra_ranks(src, shards, indexes, notices)
        inside = {rank: found for rank, found in indexes.items() if rank < src.ranks}
        paths = {rank: str(path) for rank, path in shards.paths.items()}
        source = survey(src, inside, paths)
        selection = select(source, dst, request.include, request.exclude, request.one_sided)
        ranks = check_ranks(request.ranks, dst)
        planner = Planner(source, dst, selection, ranks, request.replicas)
        return Conversion(request, source, dst, shards, inside, selection, ranks, planner, notices)
    raise AssertionError("together() raises or returns")


def transform(
    request: Request,
    team: Team,
    begin: Callable[[Conversion, int], Show] = lambda conversion, nbytes: lambda done, end: None,
) -> Report:
    """Convert a checkpoint; return on every process what was done.

    `begin` is called on process 0 with the prepared conversion and the bytes to write, before
    the first is; it returns the function that is shown the progress.
    """
    began = time.monotonic()
    conversion = prepare(request, team)
    team.share(lambda: _check_target(conversion))
    compared, notices = _compare_ranks(conversion, team)
    with team.together():
        mine = conversion.plans(conversion.shares(team.size)[team.rank])
        outputs = _lay_out(conversion, mine)
    totals = team.gather(lambda: sum(output.size for output in outputs.values()))
    show = begin(conversion, sum(totals)) if team.rank == 0 else lambda done, end: None
    try:
        traffic = team.work(lambda tick: _write(conversion, mine, outputs, tick), show)
        with team.together():
            for output in outputs.values():
                publish(output.part, output.final, durable=conversion.request.fsync)
    finally:
        for output in outputs.values():
            remove(output.part)
    every = team.gather(lambda: (traffic, _peak_memory()))
    return Report(
        conversion,
        tuple(str(conversion.final(rank)) for rank in conversion.ranks),
        sum(t.read for t, _ in every),
        sum(t.written for t, _ in every),
        compared,
        time.monotonic() - began,
        team.size,
        max(peak for _, peak in every),
        (*conversion.notices, *notices),
    )


# -- before the plan ------------------------------------------------------------------------


def _inputs(request: Request) -> tuple[Request, Strategy, Strategy, Shards, list[str]]:
    """Read strategies and folders; process 0 alone does this."""
    src = strategies.load(request.src_strategy)
    dst = strategies.load(request.dst_strategy)
    where = Path(request.src).absolute()
    wanted = _needed_ranks(src, dst, request)
    shards = find(where, wanted, request.src_pattern, request.step, request.suffix)
    if isinstance(src, WholeStrategy) and len(shards.paths) > 1:
        raise UsageError(
            f"{where}: holds the files of {len(shards.paths)} ranks, and --src-strategy none "
            "means one complete checkpoint; give the strategy that cut it, or name one file"
        )
    outside = [r for r in shards.paths if r >= src.ranks]
    keep = {*wanted, *outside[-1:]}
    notices = []
    if outside:
        notices.append(
            f"{where}: {len(outside)} ranks from {min(outside)} on are beyond the {src.ranks} of "
            f"{src.label} and were not used"
        )
    missing = [r for r in wanted if r not in shards.paths]
    if missing:
        if len(missing) == len(list(wanted)):
            raise CheckpointError(f"{where}: none of the ranks {_ranges(missing)} is there")
        notices.append(f"{where}: no file of rank {_ranges(missing)}; copies on other ranks serve")
    if shards.skipped_steps:
        others = ", ".join(f"{e}_{s}" for e, s in shards.skipped_steps)
        notices.append(f"other steps in the rank folders were not used: {others}")
    dst_path = str(Path(request.dst).absolute()) if request.dst is not None else None
    kept = {rank: path for rank, path in sorted(shards.paths.items()) if rank in keep}
    return (
        replace(request, src=str(where), dst=dst_path),
        src, dst, replace(shards, paths=kept), notices,
    )  # fmt: skip


def _needed_ranks(src: Strategy, dst: Strategy, request: Request) -> list[int]:
    """Return the source ranks of the stages that the wanted destination ranks draw on."""
    stages = {dst.stage_of(rank) for rank in check_ranks(request.ranks, dst)}
    needed = {s for stage in stages for s in needed_stages(src, dst, stage)}
    return [rank for stage in sorted(needed) for rank in src.ranks_in(stage)]


def _ranges(numbers: Sequence[int]) -> str:
    """Write ascending numbers shortly.

    >>> _ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _gather_indexes(team: Team, paths: Mapping[int, Path]) -> dict[int, Index]:
    """Index the files, each process its share, and give every process all of them."""
    mine = list(paths.items())[team.rank :: team.size]
    shares = team.gather(lambda: {rank: index(path) for rank, path in mine})
    found = {rank: one for share in shares for rank, one in share.items()}
    same: dict[Contents, Contents] = {}  # most ranks of a stage hold the same: keep it once
    for one in found.values():
        one.contents = same.setdefault(one.contents, one.contents)
    return dict(sorted(found.items()))


def _check_extra_ranks(
    src: Strategy, shards: Shards, indexes: Mapping[int, Index], notices: list[str]
) -> None:
    """Refuse ranks beyond the strategy's if they hold parameters that nobody else has."""
    extra = [rank for rank in indexes if rank >= src.ranks]
    if not extra:
        return
    known = {n for r, one in indexes.items() if r < src.ranks for n in one.contents.names}
    new = [n for n in indexes[extra[0]].contents.names if n not in known and n not in src]
    if new:
        raise CheckpointError(
            f"{shards.paths[extra[0]]}: holds {', '.join(patterns(new)[:8])}, which {src.label} "
            f"does not list; it describes {src.ranks} ranks, and the checkpoint has more. Give "
            "the folder with the strategy files of all pipeline stages"
        )


# -- after the plan -------------------------------------------------------------------------


def _check_target(conversion: Conversion) -> None:
    """See that writing will harm nothing. Raises UsageError or StorageError."""
    request = conversion.request
    if request.dst is None:
        raise UsageError("no destination folder")
    src, dst = Path(request.src).resolve(), Path(request.dst).resolve()
    inside = src if src.is_dir() else src.parent
    if dst == inside or (inside in dst.parents and src.is_dir()):
        raise UsageError(f"{dst}: lies in the source folder {inside}, which is never written to")
    for rank in conversion.ranks:
        final = conversion.final(rank)
        if final.is_dir():
            raise StorageError(f"{final}: is a folder, where a checkpoint file is to be written")
        if final.exists() and not request.overwrite:
            raise StorageError(
                f"{final}: is already there; remove it, choose another folder, or say --overwrite"
            )


def _compare_ranks(conversion: Conversion, team: Team) -> tuple[int, list[str]]:
    """Read what tells whether the folder fits its strategy; return the bytes read, and notices."""
    request, source, indexes = conversion.request, conversion.source, conversion.indexes
    mine = list(indexes)[team.rank :: team.size]
    unlisted = to_compare(conversion.selection)
    probed = [] if request.allow_equal_slices else probes(conversion.selection)

    def look() -> tuple[int, dict[int, dict[str, bytes]], dict[int, dict[str, tuple[bytes, bool]]]]:
        nbytes, digests, sampled = 0, {}, {}
        for rank in mine:
            path = conversion.shards.paths[rank]
            if request.check_crc:
                samples.check_crc(path, indexes[rank])
            if unlisted:
                digests[rank] = samples.digest_all(path, indexes[rank], unlisted)
                nbytes += sum(indexes[rank].nbytes(name) for name in digests[rank])
            if probed:
                found = samples.sample(path, indexes[rank], probed)
                sampled[rank] = {name: (s.digest, s.constant) for name, s in found.items()}
        return nbytes, digests, sampled

    parts = team.gather(look)
    with team.together():
        check_slices_differ(source, {r: s for _, _, sampled in parts for r, s in sampled.items()})
        digests = {r: d for _, found, _ in parts for r, d in found.items()}
        notices = check_unlisted(source, digests, request.unlisted == "take-one")
    return sum(nbytes for nbytes, _, _ in parts), notices


def _lay_out(conversion: Conversion, plans: Sequence[RankPlan]) -> dict[int, Output]:
    indexes = conversion.indexes
    metadata = indexes[min(indexes)].metadata if indexes else {}
    crc = conversion.request.crc
    return {p.rank: lay_out(p, conversion.final(p.rank), metadata, crc) for p in plans}


def _write(
    conversion: Conversion,
    plans: Sequence[RankPlan],
    outputs: Mapping[int, Output],
    tick: Callable[[int], None],
) -> Traffic:
    request = conversion.request
    traffic = write_parts(
        plans, outputs, conversion.shards.paths, conversion.indexes, request.memory, tick
    )
    if request.crc:
        parts = part_descriptors()
        try:
            for output in outputs.values():
                add_crc(output, parts)
                tick(0)
        finally:
            parts.close()
    if request.fsync:
        for output in outputs.values():
            sync(output.part)
            tick(0)
    return traffic


def _peak_memory() -> int:
    """Return the largest resident size this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


__all__ = [
    "CKPT",
    "SAFETENSORS",
    "Conversion",
    "Report",
    "Request",
    "RequestError",
    "prepare",
    "transform",
]
