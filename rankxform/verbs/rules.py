"""All rules: for documents and tests. Who has a rule's subject knows the modules of its rules."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType

from rankxform.source import checks, choose, written
from rankxform.statements import (
    CATALOG,
    CONTENT,
    HEADERS,
    NAMES,
    PLAN,
    SAMPLES,
    WRITTEN,
    Rule,
    rules_of,
)
from rankxform.target import findings

from . import check, evidence

MODULES: Mapping[str, Sequence[ModuleType]] = {
    NAMES: (choose,),
    HEADERS: (checks,),
    CATALOG: (checks,),
    SAMPLES: evidence.RULE_MODULES,
    PLAN: (findings,),
    CONTENT: (check,),
    WRITTEN: (written,),
}
"""What rules need to know -> the modules with these rules, which are run in their order."""


def all_rules() -> Iterator[Rule]:
    """Yield the rules, in the order in which they are run."""
    for need, modules in MODULES.items():
        yield from rules_of(need, modules)
