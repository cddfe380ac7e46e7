"""rankxform: move a distributed MindSpore checkpoint between parallel strategies."""

from rankxform.api import inspect, load, merge, plan, ranks, transform, verify
from rankxform.engine.compare_sink import Difference
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
from rankxform.job.load import Parameters
from rankxform.job.plan import Plan
from rankxform.job.transform import Report
from rankxform.job.verify import Verdict
from rankxform.layout.strategy import Strategy
from rankxform.planning.cost_model import Costs

__version__ = "0.1.0"

__all__ = [
    "inspect",
    "load",
    "merge",
    "plan",
    "ranks",
    "transform",
    "verify",
    "Costs",
    "Difference",
    "Parameters",
    "Plan",
    "Report",
    "Strategy",
    "Verdict",
    "CheckpointError",
    "DifferenceError",
    "PeerError",
    "RankxformError",
    "RankxformWarning",
    "RequestError",
    "StoppedError",
    "StorageError",
    "StrategyError",
    "UsageError",
]
