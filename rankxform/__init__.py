"""rankxform: move a distributed MindSpore checkpoint between parallel strategies."""

from typing import TYPE_CHECKING, Any

from .errors import (
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

if TYPE_CHECKING:
    from rankxform.derivation.mesh import Parallel
    from rankxform.derivation.request import Derived, ShardingRow
    from rankxform.layout.strategy import Strategy
    from rankxform.planning.reads import Costs
    from rankxform.statements import Finding, Where
    from rankxform.verbs.check import Check
    from rankxform.verbs.contents import Contents, Inspection
    from rankxform.verbs.follow import Followed
    from rankxform.verbs.load import Parameters
    from rankxform.verbs.plan import Plan
    from rankxform.verbs.transform import Report
    from rankxform.verbs.verdict import Verdict

    from .api import (
        check,
        contents,
        derive,
        follow,
        inspect,
        load,
        merge,
        plan,
        plan_reshard,
        ranks,
        reshard,
        transform,
        verify,
    )

__version__ = "0.1.0"

_MODULES = {
    "verbs.check": ("Check",),
    "verbs.contents": ("Contents", "Inspection"),
    "verbs.follow": ("Followed",),
    "verbs.load": ("Parameters",),
    "verbs.plan": ("Plan",),
    "verbs.transform": ("Report",),
    "verbs.verdict": ("Verdict",),
    "statements": ("Finding", "Where"),
    "derivation.request": ("Derived", "ShardingRow"),
    "derivation.mesh": ("Parallel",),
    "layout.strategy": ("Strategy",),
    "planning.reads": ("Costs",),
}
"""Names by the module that is imported when one is first asked for; others are of `api`."""


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'rankxform' has no attribute {name!r}")
    from importlib import import_module

    module = next((module for module, names in _MODULES.items() if name in names), "api")
    exported = globals()[name] = getattr(import_module(f"rankxform.{module}"), name)
    return exported


__all__ = [
    "check",
    "contents",
    "derive",
    "follow",
    "inspect",
    "load",
    "merge",
    "plan",
    "plan_reshard",
    "ranks",
    "reshard",
    "transform",
    "verify",
    "Check",
    "Contents",
    "Costs",
    "Derived",
    "Finding",
    "Followed",
    "Inspection",
    "Parallel",
    "Parameters",
    "Plan",
    "Report",
    "ShardingRow",
    "Strategy",
    "Verdict",
    "Where",
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
