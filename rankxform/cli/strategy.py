"""The command `strategy`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.derivation.request import role_groups, stage_groups
from rankxform.errors import DifferenceError, UsageError
from rankxform.layout.names import and_more_patterns, patterns
from rankxform.layout.states import States, find_states
from rankxform.layout.strategy import Strategy, StrategyDifference
from rankxform.request import Request
from rankxform.results import DictResult, Group, Section, Table, lines
from rankxform.transport import Team
from rankxform.verbs.strategies import strategy_facts, strategy_sections

from .options import Parsed, request_options
from .screen import Screen

if TYPE_CHECKING:
    from rankxform.derivation.rules import Preset


def _derive(options: Parsed) -> DictResult:
    from rankxform.derivation.inputs import derive_request
    from rankxform.storage.user_files import load_strategy, save_strategy
    from rankxform.verbs.strategies import derive_strategy

    derivation = derive_request(Request("", None, **request_options(options)))
    if derivation is None:
        raise UsageError(
            "the sizes of the destination's job are not given",
            "--dst-parallel, such as dp=2,mp=4,pp=2",
            "--dst-config FILE",
        )
    target = _target(options.output)
    source = load_strategy(options.source)
    derived = derive_strategy(derivation, source, options.shapes)
    files = list(map(str, save_strategy(derived.strategy, target)))
    fields = {"files": files, **derived.strategy.facts, **derived.facts}
    done = lines("done", f"{target}: {derived.strategy.extent}")
    return DictResult(fields, (*derived.sections(), done))


def _target(text: str) -> Path:
    from rankxform.storage.user_files import output_path

    path = output_path(text)
    if text.endswith("/") and path.suffix:
        raise UsageError("is it a file or a folder? Leave out the slash or the suffix", where=text)
    if path.suffix and path.suffix not in (".ckpt", ".json"):
        raise UsageError("expected a file .ckpt or .json, or a folder without a suffix", where=text)
    return path


def _explain(options: Parsed) -> DictResult:
    from rankxform.storage.user_files import load_strategy
    from rankxform.verbs.strategies import explain_strategy, sizes_of

    source = load_strategy(options.source)
    sizes = sizes_of(Request("", None, **request_options(options)))
    roles = explain_strategy(source, sizes, options.preset, options.shapes)
    fields = {**source.facts, "roles": [vars(role) for role in roles]}
    head = lines("", f"{options.source}: {source.extent}, as {sizes}")
    return DictResult(fields, (head, *role_groups(roles), *stage_groups(source)))


def _show(options: Parsed) -> DictResult:
    from rankxform.storage.user_files import load_strategy

    strategy = load_strategy(options.source)
    if not strategy.stages_of:
        raise UsageError(
            "lists no parameter; expected a file or folder", where=f"{options.source!r}"
        )
    fields = strategy_facts(options.source, strategy)
    return DictResult(fields, (*strategy_sections(options.source, strategy, options.raw),))


def _convert(options: Parsed) -> DictResult:
    from rankxform.storage.user_files import load_strategy, rewrite_strategy
    from rankxform.verbs.strategies import extents_at

    shapes = {}
    if options.shapes is not None:
        extents = extents_at(options.shapes, load_strategy(options.source))
        shapes = {name: extent.shape for name, extent in extents.items()}
    files = rewrite_strategy(options.source, _target(options.output), shapes)
    written = load_strategy(str(files[0] if not files[1:] else files[0].parent))
    fields = {"files": list(map(str, files)), **written.facts}
    suffix = f", with {len(files) - 1} files of other stages" if files[1:] else ""
    return DictResult(fields, (lines("done", f"{files[0]}: {written.extent}{suffix}"),))


def _diff(options: Parsed) -> DictResult:
    from rankxform.layout.strategy import strategy_differences
    from rankxform.storage.user_files import load_strategy

    first = load_strategy(options.source)
    second = load_strategy(options.other)
    differences = strategy_differences(first, second)
    code = DifferenceError.exit_code if differences else 0
    fields = {"same": not differences, "differences": list(map(vars, differences))}
    return DictResult(fields, (*difference_sections(differences, first, second),), code)


def _presets(options: Parsed) -> DictResult:
    from rankxform.derivation.rules import load_preset, preset_names

    if options.name is None:
        presets_by_name = {name: load_preset(name) for name in preset_names()}
        listed = [
            (
                name,
                preset.version,
                len(preset.rules),
                "yes" if preset.proven else "no",
                preset.networks,
            )
            for name, preset in presets_by_name.items()
        ]
        fields = {
            "presets": [_preset_facts(name, preset) for name, preset in presets_by_name.items()]
        }
        titles = ("preset", "version", "rules", "proven", "networks")
        return DictResult(fields, (Table(titles, listed, ""),))
    preset = load_preset(options.name)
    rows = [
        (rule["pattern"], rule["spec"] or "", rule["optimizer"] or "", rule["on_stage"] or "")
        for rule in _preset_rules(preset)
    ]
    proof = preset.networks or "not proven"
    head = f"{preset.label}, version {preset.version}: {proof}\n{preset.evidence}"
    fields = {"presets": [_preset_facts(options.name, preset)]}
    columns = ("names", "spec", "optimizer", "stage")
    return DictResult(fields, (lines("", *head.splitlines()), Table(columns, rows, "")))


def _preset_facts(name: str, preset: Preset) -> dict[str, Any]:
    return {
        "name": name,
        "preset_version": preset.version,
        "proven": preset.proven,
        "networks": preset.networks,
        "rules": _preset_rules(preset),
    }


def _preset_rules(preset: Preset) -> list[dict[str, Any]]:
    from rankxform.derivation.mesh import print_spec

    words = {True: "yes", False: "no", None: None}
    return [
        {
            "pattern": rule.names.pattern,
            "spec": None if rule.spec is None else (rule.mesh or "") + print_spec(rule.spec),
            "optimizer": words[rule.optimizer],
            "on_stage": rule.stage,
        }
        for rule in preset.rules
    ]


def _merge(options: Parsed) -> DictResult:
    from rankxform.storage.user_files import merge_stage_files

    merged = merge_stage_files(options.folder, options.target, overwrite=options.overwrite)
    shown = [lines("done", f"{options.target}: {merged.extent}")]
    if dashes := [name for name in merged.stages_of if "-" in name]:
        note = "MindSpore's own reader does not take names with a dash, such as "
        shown.append(lines("note", f"{note}{dashes[0]!r}; rankxform does"))
    return DictResult({"files": [options.target], **merged.facts}, (*shown,))


_ACTIONS = {
    "merge": _merge, "derive": _derive, "explain": _explain, "show": _show, "convert": _convert,
    "diff": _diff, "presets": _presets,
}  # fmt: skip


def run(options: Parsed, team: Team) -> int:
    action = _ACTIONS[options.action or options.verb]
    name = f"{options.verb} {options.action}".strip()
    return Screen(options, team).show(name, lambda: action(options))


_FEW = 6


def difference_sections(
    differences: Sequence[StrategyDifference], a: Strategy, b: Strategy
) -> Iterator[Section]:
    """Yield where two strategies differ."""
    if not differences:
        yield lines("", "the same: every rank holds the same boxes of the same parameters")
        return
    states = find_states(dict.fromkeys([*a.stages_of, *b.stages_of]))
    for difference in differences:
        names = _with_states(difference.names, states)
        ending = [f"and {and_more_patterns(len(names) - _FEW)}"] if names[_FEW:] else []
        yield Group(difference.why, [*names[:_FEW], *ending])
    differing = {name for difference in differences for name in difference.names}
    parameters = sum(states.of(name) is None for name in differing)
    counts = f"{parameters:,} parameters, {len(differing) - parameters:,} optimizer states"
    yield lines("DIFFERENT:", counts if differing else "the number of ranks or stages")


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
