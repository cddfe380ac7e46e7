"""Rules files: the presets of networks, and users' own, in TOML.

::

    [preset]                 # all of it optional in a file of one's own
    version = 1              # number
    proven = true            # whether compiled strategy files agree in every entry
    networks = "Llama-2"     # what it was proven on
    evidence = "..."         # how
    layers = "model.layers"  # the numbered list that pipeline stages divide
    complete = true          # whether the rules name every parameter (default: false)
    [[preset.requires]]      # what must hold where mp is above 1: field, value, why

    [[rules]]                # the first that matches and says a thing is used
    names = 'wq\\.weight$'    # a regular expression, searched for in the parameter's name
    mesh = "layout"          # tuple (default), layout, expert or flat
    spec = "(tp, None)"      # for each tensor axis what shards it
    optimizer = true         # takes part in the optimizer's shard
    stage = "layer"          # first, last, layer, shared
    shape = ["2 * ffn", "hidden"]
    replicated_if = ["vocab_emb_dp", "indivisible"]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rankxform.errors import UsageError
from rankxform.formats.toml_document import toml_document

from .rules import Preset, rule_of

_KINDS = {
    "version": int, "proven": bool, "networks": str, "evidence": str, "layers": str,
    "complete": bool, "requires": list,
}  # fmt: skip


def parse(data: bytes, label: str) -> Preset:
    """Read a rules file; `label` is what messages call it. Raises UsageError."""
    document = toml_document(data, label)
    for key in document:
        if key not in ("preset", "rules"):
            raise UsageError(f"{label}: {key!r} is neither preset nor rules")
    facts, tables = document.get("preset", {}), document.get("rules", [])
    if not isinstance(facts, dict) or not isinstance(tables, list) or not tables:
        raise UsageError(f"{label}: expected [[rules]], and [preset] with what is known of them")
    for key, value in facts.items():
        kind = _KINDS.get(key)
        if kind is None or type(value) is not kind:
            expected = f"a value of type {kind.__name__}" if kind else " or ".join(_KINDS)
            raise UsageError(f"{label}: preset.{key} is {value!r}; expected {expected}")
    rules = []
    for number, table in enumerate(tables, 1):
        where = f"{label}, rule {number}"
        if not isinstance(table, dict):
            raise UsageError(f"{where}: expected a table")
        rules.append(rule_of(table, where))
    return Preset(
        label,
        version=facts.get("version", 1),
        proven=facts.get("proven", True),
        networks=facts.get("networks", ""),
        evidence=facts.get("evidence", "it says nothing of its evidence"),
        rules=tuple(rules),
        requires=tuple(_required(one, label) for one in facts.get("requires", [])),
        layers=facts.get("layers"),
        complete=facts.get("complete", False),
    )


def _required(facts: Any, label: str) -> tuple[str, bool, str]:
    known = ("vocab_emb_dp", "use_seq_parallel")
    if (
        not isinstance(facts, Mapping)
        or facts.get("field") not in known
        or not isinstance(facts.get("value"), bool)
        or not isinstance(facts.get("why"), str)
    ):
        raise UsageError(f"{label}: preset.requires {facts!r}: expected field, value and why")
    return facts["field"], facts["value"], facts["why"]
