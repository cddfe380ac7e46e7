"""The verb ``maps``: list mapping tables, print one, or apply one to a checkpoint's headers."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any

from rankxform.layout.names import pattern_of
from rankxform.request import Request
from rankxform.transport import Team

from .options import add_json, add_option, given, option
from .report import notes, warnings
from .screen import Screen

if TYPE_CHECKING:
    from rankxform.formats.map_toml import MapTable
    from rankxform.planning.catalog import Parameter
    from rankxform.source.opening import Source
    from rankxform.target.target import Target

SUMMARY = "List, print or check the tables of names that --map uses."
EXAMPLE = ""
LIST, SHOW, CHECK = ("list", "show", "check")
_CHECKING = ("config", "qkv", "gate_up", "weights_only", "exclude", "vocab", "step", "src_form")


def add_options(verb: argparse.ArgumentParser) -> None:
    """Add the actions of the verb, each with its options."""
    actions = verb.add_subparsers(dest="action", metavar="ACTION", parser_class=type(verb))
    for name, summary in (
        (LIST, "List the tables that come with rankxform."),
        (SHOW, "Print a table: what becomes what, and with which shapes."),
        (CHECK, "Compare a table and config.json with a checkpoint's headers; print each name."),
    ):
        action = actions.add_parser(name, help=summary, description=summary, allow_abbrev=False)
        if name != LIST:
            action.add_argument("map", metavar="NAME", help="a table's name, or a file (*.toml)")
        if name == CHECK:
            action.add_argument("src", metavar="CKPT", help="the checkpoint")
            action.add_argument("--src-strategy", metavar="STRATEGY", help="how it is sharded")
            for one in _CHECKING:
                add_option(action, option(one))
        add_json(action)
    verb.set_defaults(json=False)


def run(options: argparse.Namespace, team: Team) -> int:
    screen = Screen(options, team)
    if options.action == CHECK:
        return show_names(team.bcast(lambda: _request(options)), team, screen)
    show = partial(_shown, options.map) if options.action == SHOW else _listed
    text, facts = team.bcast(show)
    screen.result(f"maps {options.action}", lambda: facts, lambda: text)
    return 0


def _request(options: argparse.Namespace) -> Request:
    """Return the request of a check: whole tensors under the other names."""
    facts = {**given(options), "map": options.map}
    return Request(options.src, None, options.src_strategy, "none", **facts)


def show_names(request: Request, team: Team, screen: Screen) -> int:
    """Print what becomes of each name by a map. Collective."""
    from rankxform.target.aim import prepare

    _, source, target = prepare(request, team)
    text, facts = _checked(source, target)
    lines = [text, *notes(target.notices), *warnings(target.warnings)]
    screen.result("maps check", lambda: facts, lambda: "\n".join(lines))
    return 0


def _listed() -> tuple[str, Any]:
    """Return the tables that come with rankxform, as text and as facts."""
    from rankxform.display.units import table
    from rankxform.storage import maps

    known = {name: maps.load(name) for name in maps.names()}
    rows = [(name, one.title) for name, one in known.items()]
    facts = [
        {"name": name, "title": one.title, "architectures": one.architectures}
        for name, one in known.items()
    ]
    return table(("map", "what for"), rows), {"maps": facts}


def _shown(name: str) -> tuple[str, Any]:
    """Return a table, as text and as facts."""
    from rankxform.storage import maps

    one = maps.load(name)
    lines = [f"{one.label}: {one.title or 'a table'}"]
    if one.architectures:
        lines.append(f"config.json: {', '.join(one.architectures)}")
    if one.sizes:
        width = max(map(len, one.sizes))
        lines += ["", "sizes"]
        lines += [f"  {size:{width}}  {made.text}" for size, made in one.sizes.items()]
    for choice, ways in one.choices.items():
        listed = ", ".join(f"{way} ({step})" for way, step in ways.items())
        lines += ["", f"--{choice.replace('_', '-')}: {listed}; the first is the default"]
    for variant, found in one.variants.items():
        lines += ["", f"--variant {variant}={' or '.join(found)}; the first is the default"]
    rules = list(_rules(one))
    for rule in rules:
        lines += ["", rule["tensor"]]
        for part, shape in rule["tensors"].items():
            lines += [f"  {part}", f"      [{', '.join(shape)}]"]
        more = [*rule["operations"], *rule["marks"]]
        if more:
            lines.append("  " + ", ".join(more))
    for ignored in one.ignored:
        lines += ["", ignored.name, f"  in {', '.join(ignored.blocks)}: no weight, left out"]
    for copy in one.copies:
        condition = f", if {copy.condition.text}" if copy.condition else ""
        lines += ["", copy.name, f"  the same as {copy.of}{condition}"]
    return "\n".join(lines), {"map": one.label, "title": one.title, "rules": rules}


def _rules(table: MapTable) -> Iterable[dict[str, Any]]:
    from rankxform.formats.map_toml import OTHER

    for rule in table.rules:
        for block in [one.names for one in table.blocks_of(rule)] or [{}]:
            marks = [f"{variant}={way}" for variant, way in rule.where.items()]
            marks += [f"if {rule.condition.text}"] if rule.condition else []
            if not isinstance(rule.optional, bool):
                marks.append(f"optional if {rule.optional.text}")
            marks += ["optional"] if rule.optional is True else []
            marks += [word for word in ("vocabulary", "keep_dtype") if getattr(rule, word)]
            yield {
                "tensor": rule.whole.replace("{block}", block.get(rule.side, "")),
                "tensors": {
                    part.replace("{block}", block.get(OTHER[rule.side], "")): [
                        n.text for n in shape
                    ]
                    for part, shape in rule.parts.items()
                },
                "operations": [f"{step}({of})" if of else step for step, of in rule.steps],
                "marks": marks,
            }


def _checked(source: Source, target: Target) -> tuple[str, Any]:
    """Return what becomes of a checkpoint's tensors, as text and as facts."""
    selection = target.planner.selection
    alike: dict[tuple[str, ...], list[Parameter]] = {}
    for one in selection.parameters:
        sources = dict.fromkeys(pattern_of(name) for name in one.src_names or (one.src_name,))
        alike.setdefault((pattern_of(one.name), *sources), []).append(one)
    lines = [
        f"{source.where.path}: fits {target.map_in_words}",
        f"{len(selection.parameters):,} tensors are made:",
    ]
    for (name, *others), some in alike.items():
        first = some[0]
        count = f" ({len(some):,})" if len(some) > 1 else ""
        lines += ["", f"{name}{count}  {first.dtype} {list(first.shape)}"]
        lines += [f"  of {source}" for source in others[:4]]
        if others[4:]:
            lines.append(f"  and {len(others) - 4} more")
    entries = [
        {
            "name": one.name,
            "dtype": one.dtype,
            "shape": one.shape,
            "src_names": one.src_names or (one.src_name,),
        }
        for one in selection.parameters
    ]
    facts = {
        "src": source.where.path, "map": target.map_in_words, "entries": entries,
        "notices": target.notices, "warnings": target.warnings,
    }  # fmt: skip
    return "\n".join(lines), facts
