"""rankxform: move a distributed MindSpore checkpoint between parallel strategies."""

from typing import TYPE_CHECKING, Any

from rankxform.api import derive, inspect, load, merge, plan, ranks, transform, verify
from rankxform.engine.compare_sink import Difference
from rankxform.errors import (
    CheckpointError,
    DerivationError,
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

if TYPE_CHECKING:
    from rankxform.layout.given import Derived, Role
    from rankxform.layout.mesh import Parallel

__version__ = "0.1.0"

_LATER = {"Derived": "given", "Parallel": "mesh", "Role": "given"}
"""What only `derive` needs, and the module of `rankxform.layout` that is imported for it."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'rankxform' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"rankxform.layout.{_LATER[name]}"), name)


__all__ = [
    "derive",
    "inspect",
    "load",
    "merge",
    "plan",
    "ranks",
    "transform",
    "verify",
    "Costs",
    "Derived",
    "Difference",
    "Parallel",
    "Parameters",
    "Plan",
    "Report",
    "Role",
    "Strategy",
    "Verdict",
    "CheckpointError",
    "DerivationError",
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
