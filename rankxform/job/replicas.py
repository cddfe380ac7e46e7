"""Whether source ranks that should hold the same bytes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rankxform.errors import CheckpointError
from rankxform.planning.consistency import Unequal, unequal_replicas
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.storage import samples
from rankxform.storage.posix import OnProgress
from rankxform.target.asked import read_request
from rankxform.target.asked_source import open_asked
from rankxform.transport import Team
from rankxform.transport.team import Show, quiet
from rankxform.values import dataclass


@dataclass(frozen=True)
class ReplicaVerdict:
    """What a comparison of replicas found.

    differences: regions that not all ranks hold alike. files_compared: source files;
    bytes_compared: read by all processes; seconds: of the whole call. warnings: what may not be
    what was meant.
    """

    differences: tuple[Unequal, ...]
    files_compared: int
    bytes_compared: int
    seconds: float
    warnings: tuple[str, ...]

    @property
    def same(self) -> bool | None:
        """Whether all copies are the same; None where nothing is held by several ranks."""
        return not self.differences if self.bytes_compared else None

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as ``inspect --replicas --json`` prints it."""
        return {"same": self.same, **asdict(self)}


def compare_replicas(
    request: Request, team: Team, begin: Callable[[int], Show] = lambda total: quiet
) -> ReplicaVerdict:
    """Read every byte that more than one source rank should hold, and compare.

    `request` names the source and its strategy; it has no destination.
    """
    began = time.monotonic()
    source = open_asked(read_request(request, team), team, every=True)
    found, total = _compare(source, team, begin)
    seconds = time.monotonic() - began
    return ReplicaVerdict(found, len(source.indexes), total, seconds, source.warnings)


def check_replicas(request: Request, source: Source, team: Team) -> list[str]:
    """Compare the source's replicas before a conversion; return notices.

    Raises CheckpointError where they differ and the request says that this is an error.
    """
    found, _ = _compare(source, team, lambda total: quiet)
    texts = [
        f"{one.name!r} {one.box}: rank {_ranks(one.groups[1])} and rank {_ranks(one.groups[0])} "
        "should hold the same bytes and do not"
        for one in found[:8]
    ]
    if found and request.check_replicas == "error":
        raise CheckpointError(
            f"{source.where.path}: {texts[0]}, one of {len(found)} such places; `inspect "
            "--replicas` lists them. Use another checkpoint, or --check-replicas warn"
        )
    return texts + ([f"and {len(found) - 8} more replicas that differ"] if found[8:] else [])


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if ranks[8:] else "")


def _compare(
    source: Source, team: Team, begin: Callable[[int], Show]
) -> tuple[tuple[Unequal, ...], int]:
    """Return where replicas differ, and the bytes that were compared."""
    catalog, indexes = source.table, source.indexes
    wanted: dict[int, list[str]] = {file: [] for file in indexes}
    for parameter in catalog.parameters:
        for holders in parameter.sharding.files.values():
            for file in holders if len(holders) > 1 else ():
                wanted[file].append(parameter.name)
    mine = source.reach.partition(indexes)[team.rank]
    total = sum(indexes[file].nbytes(n) for file, some in wanted.items() for n in some)
    show = begin(total) if team.rank == 0 else quiet

    def digest(on_progress: OnProgress) -> dict[int, dict[str, bytes]]:
        return {
            file: samples.digest_all(source.paths[file], indexes[file], wanted[file], on_progress)
            for file in mine
        }

    digests = team.work(digest, show)
    every = {file: some for part in team.allgather(lambda: digests) for file, some in part.items()}
    alone = {parameter.name: b"" for parameter in catalog.parameters}
    return team.agree(
        lambda: tuple(
            unequal_replicas(catalog, {file: {**alone, **some} for file, some in every.items()})
        )
    ), total
