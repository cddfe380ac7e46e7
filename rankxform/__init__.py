"""rankxform: move a distributed MindSpore checkpoint between parallel strategies."""

from rankxform.api import inspect, load, merge, plan, ranks, transform, verify
from rankxform.errors import (
    CheckpointError,
    DifferenceError,
    PeerError,
    RankxformError,
    RankxformWarning,
    RequestError,
    StoppedError,
    StorageError,
    StrategyError,
    UsageError,
)

__all__ = [
    "CheckpointError",
    "DifferenceError",
    "PeerError",
    "RankxformError",
    "RankxformWarning",
    "RequestError",
    "StorageError",
    "StoppedError",
    "StrategyError",
    "UsageError",
    "inspect",
    "load",
    "merge",
    "plan",
    "ranks",
    "transform",
    "verify",
]
