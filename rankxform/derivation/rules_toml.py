"""Rules files: the presets of networks, and users' own, in TOML.

::

    [preset]                 # all of it optional in a file of one's own
    version = 1              # number
    proven = true            # whether compiled strategy files agree in every entry
    networks = "Llama-2"     # what it was proven on
    evidence = "..."         # how
    extends = "llama"        # a preset whose rules are tried after these, and whose facts hold too
    layers = "model.layers"  # the numbered list that pipeline stages divide
    offset = [0, 1, 0]       # extra layers of each stage, as in MindFormers
    interleave = 2           # rounds in which stages get layers (pp_interleave_num)
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

from collections.abc import Callable, Mapping
from typing import Any

from rankxform.errors import UsageError
from rankxform.formats.toml_document import parse_toml

from .rules import Preset, rule_of

_KINDS = {
    "version": int, "proven": bool, "networks": str, "evidence": str, "layers": str,
    "complete": bool, "requires": list, "extends": str, "offset": list, "interleave": int,
}  # fmt: skip


def parse_rules(data: bytes, label: str, preset: Callable[[str], Preset] | None = None) -> Preset:
    """Read a rules file of a user, or with `preset` None one that comes with rankxform.

    label: what messages call it; preset: returns the one of a name. Raises UsageError.
    """
    document = parse_toml(data, label)
    for key in document:
        if key not in ("preset", "rules"):
            raise UsageError(f"{key!r} is neither preset nor rules", where=label)
    facts, tables = document.get("preset", {}), document.get("rules", [])
    has_content = isinstance(facts, dict) and (tables or set(facts) & _ALONE)
    if not isinstance(facts, dict) or not isinstance(tables, list) or not has_content:
        raise UsageError("expected [[rules]], and [preset] with what is known of them", where=label)
    for key, value in facts.items():
        kind = _KINDS.get(key)
        if kind is None or type(value) is not kind:
            expected = f"a value of type {kind.__name__}" if kind else " or ".join(_KINDS)
            raise UsageError(f"preset.{key} is {value!r}; expected {expected}", where=label)
    rules = []
    for number, table in enumerate(tables, 1):
        where = f"{label}, rule {number}"
        if not isinstance(table, dict):
            raise UsageError("expected a table", where=where)
        rules.append(rule_of(table, where))
    base = _NOTHING
    if "extends" in facts:
        if preset is None or facts["extends"].endswith(".toml"):
            raise UsageError("preset.extends is the name of a preset of rankxform's", where=label)
        base = preset(facts["extends"])
    return Preset(
        label,
        version=facts.get("version", 1),
        proven=facts.get("proven", base.proven),
        networks=facts.get("networks", base.networks),
        evidence=facts.get("evidence", base.evidence),
        rules=(*rules, *base.rules),
        requires=(
            *(_required(requirement, label) for requirement in facts.get("requires", [])),
            *base.requires,
        ),
        layers=facts.get("layers", base.layers),
        complete=facts.get("complete", base.complete),
        offset=_offset(facts, label) or base.offset,
        interleave=_interleave(facts, label) or base.interleave,
        own_rule_count=len(rules) if preset is not None else 0,
    )


_ALONE = {"extends", "layers", "offset", "interleave"}
"""What may be said without rules."""

_NOTHING = Preset("", 1, True, "", "it says nothing of its evidence", rules=(), complete=False)
"""What holds where a file says nothing, and extends nothing."""


def _offset(facts: Mapping[str, Any], label: str) -> tuple[int, ...]:
    offset = facts.get("offset", [])
    if not all(type(number) is int for number in offset):
        raise UsageError(f"preset.offset is {offset!r}; expected a list of numbers", where=label)
    return tuple(offset)


def _interleave(facts: Mapping[str, Any], label: str) -> int:
    rounds: int = facts.get("interleave", 0)
    if "interleave" in facts and rounds < 1:
        raise UsageError(f"preset.interleave is {rounds}; expected a number from 1 on", where=label)
    return rounds


def _required(facts: Any, label: str) -> tuple[str, bool, str]:
    flag_names = ("vocab_emb_dp", "use_seq_parallel")
    if (
        not isinstance(facts, Mapping)
        or facts.get("field") not in flag_names
        or not isinstance(facts.get("value"), bool)
        or not isinstance(facts.get("why"), str)
    ):
        raise UsageError(f"preset.requires {facts!r}: expected field, value and why", where=label)
    return facts["field"], facts["value"], facts["why"]
