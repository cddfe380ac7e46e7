"""How long a conversion will take, from what was planned and a moment's measurement."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from rankxform.planning.cost_model import Choice, Costs
from rankxform.planning.simulate import Simulation
from rankxform.storage.bandwidth import Speed, measure
from rankxform.transport import Team

from .prepare import Conversion


@dataclass(frozen=True)
class Prediction:
    """seconds: from the finished plan to the last file; speeds: of each process."""

    seconds: float
    speeds: tuple[Speed, ...]


def predict(conversion: Conversion, found: Simulation, choice: Choice, team: Team) -> Prediction:
    """Measure storage on every process at once, and predict how long the move will take.

    `found` is what they will do, read by `choice`. The slowest process counts. Writes and removes
    a file of 64 MiB a process.
    """
    request = conversion.request
    assert request.dst is not None
    seen = sorted(conversion.sight.of(team.rank))
    source = conversion.shards.paths[seen[team.rank % len(seen)]] if seen else None
    target = Path(request.dst)
    with team.together():
        pass  # so that all measure at the same time
    speeds = team.gather(lambda: measure(source, target, durable=request.fsync))
    costs = choice.costs or Costs()
    seconds = [
        load.seconds(replace(costs, read=speed.read, write=speed.write))
        for load, speed in zip(found.loads, speeds)
    ]
    return Prediction(costs.together(max(seconds), max(found.network)), tuple(speeds))
