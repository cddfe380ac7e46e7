"""Whether source ranks that should hold the same bytes do."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from rankxform.errors import DifferenceError
from rankxform.planning.consistency import (
    ReplicaDifference,
    TensorsToRead,
    replicas_to_compare,
    unequal_replicas,
)
from rankxform.request import Request
from rankxform.target.asked import resolve_request
from rankxform.target.asked_source import open_asked
from rankxform.transport import Team
from rankxform.transport.team import ShowProgress, show_nothing
from rankxform.values import dataclass

from .evidence import read_samples


@dataclass(frozen=True)
class ReplicaVerdict:
    """What a comparison of replicas found.

    differences: regions that not all ranks hold alike. files_compared: source files;
    bytes_compared: read by all processes; seconds: of the whole call. warnings: what may not be
    what was meant.
    """

    differences: tuple[ReplicaDifference, ...]
    files_compared: int
    bytes_compared: int
    seconds: float
    warnings: tuple[str, ...]

    @property
    def same(self) -> bool | None:
        """Whether all copies are the same; None where nothing is held by several ranks."""
        return not self.differences if self.bytes_compared else None

    def __bool__(self) -> bool:
        """Whether all copies are the same. Raises DifferenceError where there are none."""
        if self.same is None:
            raise DifferenceError("no bytes are held by several ranks; nothing was compared")
        return self.same

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as ``inspect --replicas --json`` prints it."""
        return {"same": self.same, **asdict(self)}


def compare_replicas(
    request: Request, team: Team, begin: Callable[[int], ShowProgress] = lambda total: show_nothing
) -> ReplicaVerdict:
    """Read every byte that more than one source rank should hold, and compare.

    `request` names the source and its strategy; it has no destination.
    """
    began = time.monotonic()
    source = open_asked(resolve_request(request, team), team, all_files=True)
    names = replicas_to_compare(source.table, source.indexes)
    total = sum(
        source.indexes[file].nbytes(n) for file, tensor_names in names.items() for n in tensor_names
    )
    show = begin(total) if team.rank == 0 else show_nothing
    digests = read_samples(source, [TensorsToRead(names, True)], team, show).samples[True]
    differences = team.agree(lambda: tuple(unequal_replicas(source.table, digests)))
    seconds = time.monotonic() - began
    return ReplicaVerdict(differences, len(source.indexes), total, seconds, source.warnings)
