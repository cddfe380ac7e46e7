"""Whether source ranks that should hold the same bytes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from rankxform.errors import CheckpointError
from rankxform.planning.consistency import Unequal, unequal_replicas
from rankxform.storage import samples
from rankxform.storage.posix import Tick
from rankxform.transport import Team
from rankxform.transport.team import Show

from .prepare import Conversion, prepare
from .request import Request


@dataclass(frozen=True)
class Agreement:
    """What a comparison of replicas found; bytes read by all processes, and seconds. warnings: what
    may not be what was meant."""

    unequal: tuple[Unequal, ...]
    files: int
    compared: int
    seconds: float
    warnings: tuple[str, ...]


def compare_replicas(
    request: Request, team: Team, begin: Callable[[int], Show] = lambda total: lambda d, e: None
) -> Agreement:
    """Read every byte that more than one source rank should hold, and compare.

    `request` names the source and its strategy; it has no destination.
    """
    return _compare(prepare(request, team), team, begin)


def check_replicas(conversion: Conversion, team: Team) -> list[str]:
    """Compare the source's replicas before a conversion; return notices.

    Raises CheckpointError where they differ and the request says that this is an error.
    """
    found = _compare(conversion, team, lambda total: lambda done, end: None).unequal
    told = [
        f"{one.name!r} {one.box}: rank {_ranks(one.groups[1])} and rank {_ranks(one.groups[0])} "
        "should hold the same bytes and do not"
        for one in found[:8]
    ]
    if found and conversion.request.check_replicas == "error":
        raise CheckpointError(
            f"{conversion.request.src}: {told[0]}, one of {len(found)} such places; `inspect "
            "--replicas` lists them. Use another checkpoint, or --check-replicas warn"
        )
    return told + ([f"and {len(found) - 8} more replicas that differ"] if found[8:] else [])


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if ranks[8:] else "")


def _compare(conversion: Conversion, team: Team, begin: Callable[[int], Show]) -> Agreement:
    began = time.monotonic()
    source, indexes = conversion.source, conversion.indexes
    wanted: dict[int, list[str]] = {rank: [] for rank in indexes}
    for parameter in (*source.listed.values(), *source.unlisted.values()):
        for ranks in parameter.ranks_by_cell.values():
            for rank in ranks if len(ranks) > 1 else ():
                wanted[rank].append(parameter.name)
    mine = conversion.sight.dealt(indexes)[team.rank]
    total = sum(indexes[rank].nbytes(name) for rank, names in wanted.items() for name in names)
    show = begin(total) if team.rank == 0 else lambda done, end: None

    def digest(tick: Tick) -> dict[int, dict[str, bytes]]:
        return {
            rank: samples.digest_all(
                conversion.shards.paths[rank], indexes[rank], wanted[rank], tick
            )
            for rank in mine
        }

    digests = team.work(digest, show)
    every = {rank: some for share in team.gather(lambda: digests) for rank, some in share.items()}
    with team.together():
        alone = {rank: dict.fromkeys(indexes[rank].contents.names, b"") for rank in indexes}
        found = unequal_replicas(source, {rank: {**alone[rank], **every[rank]} for rank in every})
        seconds = time.monotonic() - began
        return Agreement(tuple(found), len(indexes), total, seconds, tuple(conversion.warnings))
    raise AssertionError("together() raises or returns")
