"""Whether a destination holds the same model as the source, whatever tool wrote it."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rankxform.errors import CheckpointError
from rankxform.execution.compare import Comparison, Difference, Expected
from rankxform.execution.engine import Sources, Traffic, carry
from rankxform.execution.files import Tick
from rankxform.execution.folder import Shards, find
from rankxform.formats.index import Index
from rankxform.planning.moves import Move, Portion, bytes_to_write
from rankxform.transport import Team
from rankxform.transport.team import Show

from .checks import compare_ranks
from .prepare import Conversion, gather_indexes, prepare
from .request import Request


@dataclass(frozen=True)
class Verdict:
    """What a verification found, over all processes.

    differences: by parameter and rank. files, compared: how many destination files, and how many
    bytes of them, were compared.
    """

    conversion: Conversion
    differences: tuple[Difference, ...]
    files: int
    compared: int
    seconds: float
    processes: int
    notices: tuple[str, ...]


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
    shards = team.share(lambda: _find(conversion))
    indexes = gather_indexes(team, dict(shards.paths))
    with team.together():
        mine = conversion.shares(team.size)[team.rank]
        moves = conversion.planner.moves(mine)
    total = sum(team.gather(lambda: bytes_to_write(moves)))
    show = begin(conversion, total) if team.rank == 0 else lambda done, end: None
    found: list[Difference] = []
    traffic = team.work(
        lambda tick: _compare(conversion, shards.paths, indexes, mine, moves, tick, found), show
    )
    every = team.gather(lambda: (traffic.written, found))
    differences = {(one.name, one.rank): one for _, some in every for one in some}
    return Verdict(
        conversion,
        tuple(sorted(differences.values(), key=lambda one: (one.name, one.rank))),
        len(conversion.ranks),
        sum(nbytes for nbytes, _ in every),
        time.monotonic() - began,
        team.size,
        (*conversion.notices, *notices),
    )


def _find(conversion: Conversion) -> Shards:
    """Return the files to compare. Raises CheckpointError where one is missing."""
    request, ranks = conversion.request, conversion.ranks
    assert request.dst is not None
    own = {rank: conversion.final(rank) for rank in ranks}
    if all(path.is_file() for path in own.values()):
        return Shards(own, None)
    found = find(Path(request.dst), ranks)
    missing = [rank for rank in ranks if rank not in found.paths]
    if missing:
        raise CheckpointError(
            f"{request.dst}: has no file of destination rank {missing[0]}"
            + (f" and of {len(missing) - 1} more" if missing[1:] else "")
            + f"; {conversion.dst.label} has ranks 0 to {conversion.dst.ranks - 1}"
        )
    return replace(found, paths={rank: found.paths[rank] for rank in ranks})


def _compare(
    conversion: Conversion,
    paths: Mapping[int, Path],
    indexes: Mapping[int, Index],
    mine: Sequence[Portion],
    moves: Sequence[Move],
    tick: Tick,
    found: list[Difference],
) -> Traffic:
    sources = Sources(conversion.shards.paths, conversion.indexes)
    with sources, Sources(paths, indexes) as files:
        sinks = {
            portion.rank: Comparison(
                portion.rank, files, indexes[portion.rank], _expected(conversion, portion.rank)
            )
            for portion in mine
        }
        traffic = carry(moves, sinks, sources, conversion.request.memory // 2, tick)
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
