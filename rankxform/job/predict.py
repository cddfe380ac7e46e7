"""How long a conversion will take, from what was planned and a moment's measurement."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rankxform.execution.speed import Speed, measure
from rankxform.planning.moves import bytes_to_read, bytes_to_write
from rankxform.transport import Team

from .prepare import Conversion

_SECONDS_A_SLICE = 8e-6
"""What a slice costs beside its bytes."""


@dataclass(frozen=True)
class Prediction:
    """seconds: from the finished plan to the last file; speeds: of each process."""

    seconds: float
    speeds: tuple[Speed, ...]


def predict(conversion: Conversion, team: Team) -> Prediction:
    """Measure storage on every process at once, and predict how long the move will take.

    The slowest process counts. Writes and removes a file of 64 MiB a process.
    """
    request = conversion.request
    assert request.dst is not None
    seen = sorted(conversion.sight.of(team.rank))
    source = conversion.shards.paths[seen[team.rank % len(seen)]] if seen else None
    target = Path(request.dst)
    with team.together():
        pass  # so that all measure at the same time
    speeds = team.gather(lambda: measure(source, target, durable=request.fsync))
    moves = [conversion.planner.moves(share) for share in conversion.shares(team.size)]
    seconds = [
        bytes_to_read(some) / speed.read
        + bytes_to_write(some) / speed.write
        + _SECONDS_A_SLICE * sum(len(ranks) for m in some for ranks in m.targets.values())
        for some, speed in zip(moves, speeds)
    ]
    return Prediction(max(seconds), tuple(speeds))
