"""Whether a destination holds the same model as the source, whatever tool wrote it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rankxform.checkpoints.rank_folders import Listing, Shards, choose, look
from rankxform.engine.checksum import Fingerprint, sum_of_file
from rankxform.engine.compare_sink import Comparison, Difference, Expected, mismatches
from rankxform.engine.pipeline import Mail, Traffic, carry
from rankxform.errors import CheckpointError, StorageError
from rankxform.formats.base import Index
from rankxform.planning.assign import share_seen
from rankxform.planning.transfers import Portion, bytes_to_write
from rankxform.planning.visibility import Sight
from rankxform.publish.target import MANIFEST_NAME, manifest
from rankxform.storage import samples
from rankxform.storage.identity import digest
from rankxform.storage.index import Indexer
from rankxform.storage.posix import Tick
from rankxform.storage.sources import Sources
from rankxform.transport import Team
from rankxform.transport.team import Show

from .checks import compare_ranks, foreign_files
from .contents import expected
from .manifest import verify_command
from .measure import Task, task
from .prepare import Conversion, prepare
from .request import Request
from .visibility import asked, look_on_all, sight_of


def _quiet(_: int) -> Show:
    return lambda done, end: None


@dataclass(frozen=True)
class Verdict:
    """What a verification found, over all processes.

    differences: by parameter and rank. files, compared: how many destination files, and how many
    bytes of them, were compared. by_manifest: differences are of files, not of parameters; with
    `sizes_only` no byte but the headers was compared, and `command` is what would. warnings: what
    may not be what was meant; notices: what to know.
    """

    differences: tuple[Difference, ...]
    files: int
    compared: int
    seconds: float
    processes: int
    notices: tuple[str, ...]
    by_manifest: bool = False
    sizes_only: bool = False
    warnings: tuple[str, ...] = ()
    command: str | None = None

    @property
    def checked(self) -> str:
        """What was compared: "bytes" with the source, "fingerprints" or "sizes" with a manifest."""
        return "sizes" if self.sizes_only else "fingerprints" if self.by_manifest else "bytes"

    @property
    def same(self) -> bool | None:
        """Whether both sides hold the same; None where no difference was found and no byte of
        content compared."""
        if self.differences:
            return False
        return None if self.sizes_only else True


def verify(
    request: Request,
    team: Team,
    begin: Callable[[Conversion, int], Show] = lambda conversion, nbytes: lambda done, end: None,
) -> Verdict:
    """Compare every byte of ``request.dst`` with what the source and the strategies make of it.

    Both are streamed, in the memory that `request` allows; nothing is written.
    """
    began = time.monotonic()
    conversion = prepare(request, team)
    _, notices = compare_ranks(conversion, team)
    assert conversion.request.dst is not None
    there, as_first = look_on_all(team, Path(conversion.request.dst))
    shards = team.share(lambda: _choose(conversion, there, asked(team)))
    sight, _ = sight_of(team, shards, as_first)
    indexes, found = _indexes(shards.paths, team, sight)
    with team.together():
        none: list[list[Portion]] = [[] for _ in range(team.size)]
        shares = share_seen(conversion.planner, list(indexes), sight) if indexes else none
    mine, work = shares[team.rank], task(conversion, shares, team)
    mail = team.mail() if work.trades else None
    total = sum(team.gather(lambda: bytes_to_write(work.moves)))
    show = begin(conversion, total) if team.rank == 0 else lambda done, end: None
    traffic = team.work(
        lambda tick: _compare(conversion, shards.paths, indexes, mine, work, tick, found, mail),
        show,
    )
    checked = sight.dealt(indexes)[team.rank]
    found += team.work(lambda tick: _checksums(shards.paths, indexes, checked, tick), _quiet(0))
    every = team.gather(lambda: (traffic.written, found))
    differences = {(one.name, one.rank): one for _, some in every for one in some}
    for one in _extra_ranks(conversion, there):
        differences[one.name, one.rank] = one
    return Verdict(
        tuple(sorted(differences.values(), key=lambda one: (one.name, one.rank))),
        len(indexes),
        sum(nbytes for nbytes, _ in every),
        time.monotonic() - began,
        team.size,
        (*conversion.notices, *notices),
        warnings=(*conversion.warnings, *foreign_files(shards.paths.values(), team)),
    )


def _extra_ranks(conversion: Conversion, there: Listing) -> list[Difference]:
    """Return what is wrong with rank folders beyond the destination's ranks."""
    last = conversion.dst.ranks - 1
    why = f"should not be here: {conversion.dst.label} has rank{f's 0 to {last}' if last else ' 0'}"
    return [
        Difference(str(path), rank, f"{why} only", whole_file=True)
        for rank, paths in there.files.items()
        for path in paths
        if rank > last
    ]


def _checksums(
    paths: Mapping[int, Path], indexes: Mapping[int, Index], ranks: Sequence[int], tick: Tick
) -> list[Difference]:
    """Compare the files of `ranks` with the checksums that they carry."""
    wrong = {rank: samples.wrong_crc(paths[rank], indexes[rank], tick) for rank in ranks}
    return [
        Difference(paths[rank].name, rank, why, whole_file=True)
        for rank, why in wrong.items()
        if why
    ]


def verify_alone(folder: str, team: Team, begin: Callable[[int], Show] = _quiet) -> Verdict:
    """Compare a destination with its own manifest: sizes and headers, and fingerprints if kept.

    Where nodes have folders of their own, each is compared with its own manifest. Checkpoint files
    in rank folders that no manifest lists are differences.
    """
    began = time.monotonic()
    where = team.share(lambda: Path(folder).absolute())
    manifests, speakers = _manifests(where, team)
    with_digests = all("stages" in told for told in manifests)
    mine = []
    strange: list[Difference] = []
    for told, processes in zip(manifests, speakers):
        files = sorted(told["files"].items(), key=lambda item: item[1]["rank"])
        if team.rank in processes:
            own = files[processes.index(team.rank) :: len(processes)]
            mine += [(name, facts, told) for name, facts in own]
        if team.rank == processes[0]:
            strange += _not_listed(where, told)
    every_file = [facts["size"] for told in manifests for facts in told["files"].values()]
    total = sum(every_file) if with_digests else 0
    show = begin(total) if team.rank == 0 else _quiet(0)
    found: list[Difference] = []

    def look(tick: Tick) -> int:
        done = 0
        for name, facts, told in mine:
            done += facts["size"]
            found.extend(_look_at(where / name, facts, told, tick))
        return done

    compared = team.work(look, show)
    every = team.gather(lambda: (compared, found + strange))
    return Verdict(
        tuple(sorted((one for _, some in every for one in some), key=lambda one: one.rank)),
        len(every_file),
        sum(nbytes for nbytes, _ in every) if with_digests else 0,
        time.monotonic() - began,
        team.size,
        (),
        by_manifest=True,
        sizes_only=not with_digests,
        command=verify_command(manifests[0], folder),
    )


def _not_listed(folder: Path, told: Mapping[str, Any]) -> list[Difference]:
    """Return the checkpoint files in rank folders that a manifest does not know."""
    return [
        Difference(name, rank, "is in no manifest of this folder", whole_file=True)
        for rank, paths in look(folder).files.items()
        for path in paths
        if (name := str(path.relative_to(folder))) not in told["files"]
    ]


def _manifests(folder: Path, team: Team) -> tuple[list[dict[str, Any]], list[list[int]]]:
    """Return the manifests that nodes have, and for each the processes that have it."""
    nodes, path = team.nodes, folder / MANIFEST_NAME
    there = team.gather(lambda: nodes.speaks(team.rank) and path.is_file())
    known = team.gather(lambda: digest(path) if there[team.rank] else b"")
    groups: dict[bytes, list[int]] = {}
    for node, processes in enumerate(nodes.processes):
        if known[processes[0]]:
            groups.setdefault(known[processes[0]], []).append(node)
    alike = list(groups.values()) or [[0]]  # whose error says that there is none
    speakers = [[p for node in group for p in nodes.processes[node]] for group in alike]
    firsts = {processes[0] for processes in speakers}
    told = team.gather(lambda: manifest(folder) if team.rank in firsts else None)
    return [one for one in told if one is not None], sorted(speakers)


def _look_at(
    path: Path, facts: Mapping[str, Any], told: Mapping[str, Any], tick: Tick
) -> list[Difference]:
    """Compare one file with what the manifest says of it."""
    rank = facts["rank"]
    if not path.is_file():
        return [Difference(path.name, rank, "is missing")]
    if path.stat().st_size != facts["size"]:
        return [Difference(path.name, rank, f"is not of the {facts['size']} bytes written")]
    try:
        index = Indexer().index(path)
    except CheckpointError as error:
        return [_unreadable(path, rank, error)]
    if "digest" not in facts:
        return []
    slices = _expected_by(told, rank, path)
    wrong = mismatches(index, rank, {name: one for name, (_, one) in slices.items()})
    if wrong:
        return wrong
    with Sources({rank: path}, {rank: index}) as sources:
        total = sum_of_file(Fingerprint(told["seed"]), sources, rank, slices, tick)
    if f"{total:016x}" != facts["digest"]:
        return [Difference(path.name, rank, "was changed since it was written")]
    return _checksums({rank: path}, {rank: index}, [rank], tick)


def _indexes(
    paths: Mapping[int, Path], team: Team, sight: Sight
) -> tuple[dict[int, Index], list[Difference]]:
    """Index destination files; return also what this process found that cannot be."""
    wrong: dict[int, Difference] = {}

    def look() -> dict[int, Index]:
        found, indexer = {}, Indexer()
        for rank in sight.dealt(paths)[team.rank]:
            try:
                found[rank] = indexer.index(paths[rank])
            except CheckpointError as error:
                wrong[rank] = _unreadable(paths[rank], rank, error)
        return found

    every = team.gather(look)
    return dict(sorted(one for some in every for one in some.items())), list(wrong.values())


def _unreadable(path: Path, rank: int, error: CheckpointError) -> Difference:
    return Difference(path.name, rank, f"cannot be read: {error}", whole_file=True)


def _expected_by(told: Mapping[str, Any], rank: int, path: Path) -> Any:
    try:
        return expected(told, rank)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise StorageError(
            f"{MANIFEST_NAME}: damaged: what it says of {path} makes no sense ({error!r}); compare "
            "with the source instead (verify SRC DST)"
        ) from error


def _choose(conversion: Conversion, there: Listing, looked: str) -> Shards:
    """Return the files to compare, of what is there. Raises CheckpointError if one is missing."""
    request, ranks = conversion.request, conversion.ranks
    assert request.dst is not None
    own = {rank: conversion.final(rank) for rank in ranks}
    if all(path in there.files.get(rank, ()) for rank, path in own.items()):
        return Shards(own, None)
    found = choose(Path(request.dst), there, ranks, looked=looked)
    missing = [rank for rank in ranks if rank not in found.paths]
    if missing:
        raise CheckpointError(
            f"{request.dst}: has no file of destination rank {missing[0]}"
            + (f" and of {len(missing) - 1} more" if missing[1:] else "")
            + f"{looked}; {conversion.dst.label} has ranks 0 to {conversion.dst.ranks - 1}"
        )
    return replace(found, paths={rank: found.paths[rank] for rank in ranks})


def _compare(
    conversion: Conversion,
    paths: Mapping[int, Path],
    indexes: Mapping[int, Index],
    mine: Sequence[Portion],
    work: Task,
    tick: Tick,
    found: list[Difference],
    mail: Mail | None,
) -> Traffic:
    sources = Sources(conversion.shards.paths, conversion.indexes)
    with sources, Sources(paths, indexes) as files:
        sinks = {
            portion.rank: Comparison(
                portion.rank, files, indexes[portion.rank], _expected(conversion, portion.rank)
            )
            for portion in mine
        }
        request = conversion.request
        traffic = carry(
            work.moves, sinks, sources, request.memory // 2, tick, mail=mail, call=work.choice.call
        )
    found += [one for sink in sinks.values() for one in sink.differences.values()]
    return traffic


def _expected(conversion: Conversion, rank: int) -> dict[str, Expected]:
    planner, dst = conversion.planner, conversion.dst
    local = rank % dst.stage_size
    return {
        parameter.name: Expected(
            parameter.dtype, layout.grid(parameter.shape).box(layout.cell(local))
        )
        for (parameter, _), layout in zip(planner.slices(rank), planner.names(rank).values())
    }
