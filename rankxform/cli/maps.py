"""The verb ``maps``: list mapping tables, print one, or apply one to a checkpoint's headers."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from rankxform.layout.names import pattern_of
from rankxform.request import Request
from rankxform.results import DictResult, Group, Section, Table, lines
from rankxform.transport import Team

from .options import Parsed, request_options
from .screen import Screen

if TYPE_CHECKING:
    from rankxform.formats.map_table import MapTable
    from rankxform.planning.catalog import Parameter
    from rankxform.source.source import Source
    from rankxform.target.target import Target


def run(options: Parsed, team: Team) -> int:
    screen = Screen(options, team)
    if options.action == "check":
        places = options.src, None, options.src_strategy, "none"

        def read() -> Request:
            return Request(*places, **{**request_options(options), "map": options.map})

        return show_names(team.bcast(read), team, screen)
    show = partial(_shown, options.map) if options.action == "show" else _list_maps
    return screen.show(f"maps {options.action}", show)


def show_names(request: Request, team: Team, screen: Screen) -> int:
    """Print what becomes of each name by a map. Collective."""
    from rankxform.target.resolve import resolve

    _, source, target = resolve(request, team)
    return screen.show("maps check", lambda: _apply_to_checkpoint(source, target))


def _list_maps() -> DictResult:
    """Return the tables that come with rankxform."""
    from rankxform.storage.user_files import load_map_table, map_names

    tables_by_name = {name: load_map_table(name) for name in map_names()}
    rows = [(name, map_table.title) for name, map_table in tables_by_name.items()]
    fields = [
        {"name": name, "title": map_table.title, "architectures": map_table.architectures}
        for name, map_table in tables_by_name.items()
    ]
    return DictResult({"maps": fields}, (Table(("map", "what for"), rows, ""),))


def _shown(name: str) -> DictResult:
    """Return a table."""
    from rankxform.storage.user_files import load_map_table

    map_table = load_map_table(name)
    shown: list[Section] = [lines("", f"{map_table.label}: {map_table.title or 'a table'}")]
    if map_table.architectures:
        shown.append(lines("", f"config.json: {', '.join(map_table.architectures)}"))
    if map_table.sizes:
        expressions = [(size, expression.text) for size, expression in map_table.sizes.items()]
        shown.append(Table(("size", "expression"), expressions, ""))
    for choice, steps_by_value in map_table.choices.items():
        values = [f"{value} ({step})" for value, step in steps_by_value.items()]
        shown.append(Group(f"--{choice.replace('_', '-')}, the first is the default", values))
    if map_table.variants:
        values = [
            " or ".join(f"{variant}={alternative}" for alternative in alternatives)
            for variant, alternatives in map_table.variants.items()
        ]
        shown.append(Group("--variant, the first of each is the default", values))
    rules = list(_rules(map_table))
    for rule in rules:
        parts = [f"{part} [{', '.join(shape)}]" for part, shape in rule["tensors"].items()]
        properties = ", ".join([*rule["operations"], *rule["marks"]])
        shown.append(Group(rule["tensor"], [*parts, *([f"({properties})"] if properties else [])]))
    for ignored in map_table.ignored:
        shown.append(Group(ignored.name, [f"in {', '.join(ignored.blocks)}: no weight, left out"]))
    for copy in map_table.copies:
        condition = f", if {copy.condition.text}" if copy.condition else ""
        shown.append(Group(copy.name, [f"the same as {copy.tied_to}{condition}"]))
    fields = {"map": map_table.label, "title": map_table.title, "rules": rules}
    return DictResult(fields, (*shown,))


def _rules(table: MapTable) -> Iterable[dict[str, Any]]:
    from rankxform.formats.map_table import OTHER_NAMING

    for rule in table.rules:
        for block in [rule_block.names for rule_block in table.blocks_of(rule)] or [{}]:
            marks = [f"{variant}={alternative}" for variant, alternative in rule.where.items()]
            marks += [f"if {rule.condition.text}"] if rule.condition else []
            if not isinstance(rule.optional, bool):
                marks.append(f"optional if {rule.optional.text}")
            marks += ["optional"] if rule.optional is True else []
            marks += [word for word in ("vocabulary", "keep_dtype") if getattr(rule, word)]
            yield {
                "tensor": rule.whole.replace("{block}", block.get(rule.side, "")),
                "tensors": {
                    p.replace("{block}", block.get(OTHER_NAMING[rule.side], "")): [
                        n.text for n in s
                    ]
                    for p, s in rule.parts.items()
                },
                "operations": [
                    f"{step}({argument})" if argument else step for step, argument in rule.steps
                ],
                "marks": marks,
            }


def _apply_to_checkpoint(source: Source, target: Target) -> DictResult:
    """Return what becomes of a checkpoint's tensors."""
    selection = target.planner.selection
    parameters_by_pattern: dict[tuple[str, ...], list[Parameter]] = {}
    for parameter in selection.parameters:
        sources = dict.fromkeys(pattern_of(n) for n in parameter.src_names or (parameter.src_name,))
        parameters_by_pattern.setdefault((pattern_of(parameter.name), *sources), []).append(
            parameter
        )
    shown: list[Section] = [
        lines("", f"{source.where.path}: fits {target.map_in_words}"),
        lines("", f"{len(selection.parameters):,} tensors are made:"),
    ]
    for (name, *src_patterns), parameters in parameters_by_pattern.items():
        first = parameters[0]
        count = f" ({len(parameters):,})" if len(parameters) > 1 else ""
        origins = [f"of {source}" for source in src_patterns[:4]]
        if src_patterns[4:]:
            origins.append(f"and {len(src_patterns) - 4} more")
        shown.append(Group(f"{name}{count}  {first.dtype} {list(first.shape)}", origins))
    shown += [lines("note", text) for text in target.notices]
    entries = [
        {
            "name": parameter.name,
            "dtype": parameter.dtype,
            "shape": parameter.shape,
            "src_names": parameter.src_names or (parameter.src_name,),
        }
        for parameter in selection.parameters
    ]
    fields = {
        "src": source.where.path, "map": target.map_in_words, "entries": entries,
        "notices": target.notices, "warnings": target.warnings,
    }  # fmt: skip
    return DictResult(fields, (*shown,))
