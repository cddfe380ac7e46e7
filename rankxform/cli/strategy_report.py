"""What the command prints of strategies: derived, explained, shown and compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rankxform.derivation.derive import format_layout
from rankxform.derivation.pipeline import lists_of, places_in_lists
from rankxform.derivation.request import Derived, ShardingRow
from rankxform.display.terminal import shown_path, width, wrap_text
from rankxform.display.units import table
from rankxform.layout.differences import StrategyDifference, describe_layout
from rankxform.layout.layout import Layout
from rankxform.layout.names import and_more_patterns, format_ranges, patterns
from rankxform.layout.states import NEVER_SAVED, States, find_states
from rankxform.layout.strategy import Strategy

_FEW = 6


def derived_table(derived: Derived) -> str:
    """Write how a derived strategy shards what, by stage, and what it depends on."""
    return "\n".join(
        [
            "derived strategy: which mesh axes shard what",
            roles_table(derived.roles),
            *stage_lines(derived.strategy),
            *derived.assumptions,
        ]
    )


def roles_table(roles: Sequence[ShardingRow]) -> str:
    """Write the rows of a role table, grouped by how they are sharded, in words."""
    names_by_sharding: dict[tuple[str, str, str], list[str]] = {}
    for role in roles:
        key = role.spec, role.src_holds, role.dst_holds
        count = f" ({role.parameters})" if role.parameters > 1 else ""
        names_by_sharding.setdefault(key, []).append(role.pattern + count)
    lines = []
    for (spec, src, dst), names in names_by_sharding.items():
        lines += [f"  {f'{src} -> {dst}' if dst else src}; {spec}"]
        lines += [f"      {name}" for name in names]
    return "\n".join(lines)


def stage_lines(strategy: Strategy) -> list[str]:
    """Write what each pipeline stage holds; nothing where there is one stage."""
    if len(strategy.stages) == 1:
        return []
    lines = ["pipeline stages"]
    for stage, layouts in enumerate(strategy.stages):
        names = [name for name in layouts if strategy.states.of(name) is None]
        parts = [
            f"{prefix}.{format_ranges(sorted(n))}"
            for prefix, n in lists_of(names, outermost=True).items()
        ]
        parts += [name for name in names if not places_in_lists(name)]
        suffix = f", and {len(parts) - _FEW} more" if len(parts) > _FEW else ""
        lines.append(f"  {stage}: {len(names)} parameters: {', '.join(parts[:_FEW])}{suffix}")
    return lines


def describe_strategy(path: str, strategy: Strategy, raw: bool = False) -> str:
    """Describe a strategy: stages, ranks, and how many parameters are sharded how.

    raw: with device matrices, tensor maps and optimizer shards, as MindSpore has them.
    """
    mark = ", derived by rankxform" if strategy.derived else ""
    all_names = [name for layouts in strategy.stages for name in layouts]
    kinds = [kind for name in all_names if (kind := strategy.states.kind(name)) is not None]
    gradients = kinds.count(NEVER_SAVED)
    states = len(kinds) - gradients
    counted = f"{len(all_names) - states - gradients:,} parameters, {states:,} optimizer states"
    if gradients:
        counted += f", {gradients:,} gradients that no checkpoint holds"
    rows: list[tuple[object, ...]] = []
    names_by_words: dict[tuple[str, ...], list[str]] = {}
    for layout, layout_names in _by_layout(strategy).items():
        words = (describe_layout(layout), *((str(format_layout(layout)),) if raw else ()))
        names_by_words.setdefault(words, []).extend(layout_names)
    for words, names in sorted(names_by_words.items(), key=lambda group: -len(group[1])):
        rows.append((len(names), *words, _few(patterns(names))))
    head = ("parameters", "each rank holds", *(("layout",) if raw else ()), "such as")
    lines = [
        f"{shown_path(path)}: strategy, {strategy.extent}{mark}",
        counted,
        *stage_lines(strategy),
        "",
    ]
    wrapped_lines = [wrap_text(line, width(), 4) for line in lines]
    return "\n".join([*wrapped_lines, table(head, rows)])


def _by_layout(strategy: Strategy) -> Mapping[Layout, list[str]]:
    names_by_layout: dict[Layout, list[str]] = {}
    for layouts in strategy.stages:
        for name, layout in layouts.items():
            if strategy.states.of(name) is None:
                names_by_layout.setdefault(layout, []).append(name)
    return names_by_layout


def _few(name_patterns: Sequence[str]) -> str:
    return name_patterns[0] + (
        f" and {and_more_patterns(len(name_patterns) - 1)}" if len(name_patterns) > 1 else ""
    )


def strategy_facts(path: str, strategy: Strategy) -> dict[str, Any]:
    """Return what `shown` writes, for JSON."""
    return {
        "path": path,
        **strategy.facts,
        "kinds": [
            {"layout": format_layout(layout), "holds": describe_layout(layout), "names": names}
            for layout, names in _by_layout(strategy).items()
        ],
    }


def describe_differences(
    differences: Sequence[StrategyDifference], a: Strategy, b: Strategy
) -> str:
    """Write where two strategies differ."""
    states = find_states(dict.fromkeys([*a.stages_of, *b.stages_of]))
    if not differences:
        return "the same: every rank holds the same boxes of the same parameters"
    lines = []
    for difference in differences:
        summaries = _with_states(difference.names, states)
        ending_lines = (
            [f"      and {and_more_patterns(len(summaries) - _FEW)}"]
            if len(summaries) > _FEW
            else []
        )
        lines += [
            f"  {difference.why}",
            *(f"      {name}" for name in summaries[:_FEW]),
            *ending_lines,
        ]
    names = {name for difference in differences for name in difference.names}
    parameter_count = sum(states.of(name) is None for name in names)
    counts_text = (
        f"{parameter_count:,} parameters, {len(names) - parameter_count:,} optimizer states"
    )
    return "\n".join(
        [*lines, f"DIFFERENT: {counts_text if names else 'the number of ranks or stages'}"]
    )


def _with_states(names: Sequence[str], all_states: States) -> list[str]:
    """Summarize names by pattern, each parameter's states behind it."""
    states: dict[str, dict[str, None]] = {}
    for name in names:
        state_kinds = states.setdefault(all_states.base_name(name), {})
        if (kind := all_states.kind(name)) is not None:
            state_kinds[kind] = None
    listed, parameters_by_kinds = {*names}, dict[tuple[bool, tuple[str, ...]], list[str]]()
    for parameter, state_kinds in states.items():
        parameters_by_kinds.setdefault((parameter in listed, tuple(state_kinds)), []).append(
            parameter
        )
    summaries = []
    for (is_listed, kinds), parameters in parameters_by_kinds.items():
        suffix = f", with {', '.join(kinds)}" if kinds else ""
        prefix = "" if is_listed else f"{', '.join(kinds)} of "
        summaries += [
            f"{prefix}{pattern}{suffix if is_listed else ''}" for pattern in patterns(parameters)
        ]
    return summaries
