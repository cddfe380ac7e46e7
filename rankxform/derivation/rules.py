r"""Rules, rules files, presets.

A rule may say four things of a parameter: the mesh and spec by which it is sharded
(`derivation.mesh`), whether it takes part in the optimizer's shard, on which pipeline stage
it is, and how its shape goes with the others'. The first matching rule that says a thing is used.

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
    names = 'wq\.weight$'    # a regular expression, searched for in the parameter's name
    mesh = "layout"          # tuple (default), layout, expert or flat
    spec = "(mp, None)"      # for each tensor axis what shards it
    optimizer = true         # takes part in the optimizer's shard
    stage = "layer"          # first, last, layer, shared
    shape = ["2 * ffn", "hidden"]
    replicated_if = ["vocab_emb_dp", "indivisible"]
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

from rankxform.errors import RequestError, UsageError, did_you_mean
from rankxform.formats.documents import check_value, parse_toml
from rankxform.geometry.box import Shape
from rankxform.layout.names import compile_regex
from rankxform.storage.posix import read_bytes
from rankxform.values import dataclass

from .mesh import EXPERT, MESHES, TUPLE, MeshSpec, Parallel, Spec, parse_spec, validate_spec

# Networks change their `shard()` calls between versions, so a preset is held against the source:
# it must know every name, and agree on every axis that is longer than 1.

FIRST, LAST, LAYER, SHARED = "first", "last", "layer", "shared"
STAGES = (FIRST, LAST, LAYER, SHARED)
"""On the first stage, the last, its layer's, or both the first and the last (tied)."""

VOCABULARY, INDIVISIBLE = "vocab_emb_dp", "indivisible"
CONDITIONS = (VOCABULARY, INDIVISIBLE)
"""Where a parameter is replicated in spite of its spec: the job says vocab_emb_dp; axis 0 does not
divide by mp * cp."""


@dataclass(frozen=True)
class ShardingRule:
    """What is known of the parameters whose name matches."""

    names: re.Pattern[str]  # searched for in the parameter's name
    label: str  # the rule as it was written
    # mesh, spec: None if the rule does not say.
    mesh: str | None = None
    spec: Spec | None = None
    optimizer: bool | None = None  # whether the parameter takes part in the optimizer's shard
    stage: str | None = None  # one of `STAGES`
    shape: tuple[str, ...] = ()  # for each axis a product of sizes, such as ``2 * ffn``
    replicated_if: tuple[str, ...] = ()  # of `CONDITIONS`

    def __post_init__(self) -> None:
        if self.mesh is not None and self.mesh not in MESHES:
            raise UsageError(
                f"mesh {self.mesh!r} is none of {', '.join(MESHES)}", where=f"{self.label!r}"
            )
        if self.stage is not None and self.stage not in STAGES:
            raise UsageError(
                f"stage {self.stage!r}: expected {' or '.join(STAGES)}", where=f"{self.label!r}"
            )
        unknown = set(self.replicated_if).difference(CONDITIONS)
        if unknown:
            raise UsageError(
                f"replicated_if {sorted(unknown)[0]!r}: expected {' or '.join(CONDITIONS)}",
                where=f"{self.label!r}",
            )

    def meshes(self, likely: Iterable[str] = ()) -> tuple[str, ...]:
        """Return the meshes that the spec may be of; `likely` are those that a source shows."""
        if self.mesh is not None:
            return (self.mesh,)
        if any(axis in ("ep", "edp") for axes in self.spec or () for axis in axes):
            return (EXPERT,)
        return (*dict.fromkeys((*likely, TUPLE)),)

    def meaning(self, mesh: str, parallel: Parallel, shape: Shape | None) -> MeshSpec:
        """Return what the rule means for a job of these sizes.

        Raises RequestError where it depends on what is not known of the job.
        """
        assert self.spec is not None
        if self.replicated_if and self._is_replicated(parallel, shape):
            return MeshSpec(mesh, ((),) * len(self.spec))
        return MeshSpec(mesh, self.spec)

    def _is_replicated(self, parallel: Parallel, shape: Shape | None) -> bool:
        parts = parallel.mp * parallel.cp
        if parts == 1:  # but what is derived from this for more parts has to know
            return VOCABULARY in self.replicated_if and bool(parallel.vocab_emb_dp)
        if VOCABULARY in self.replicated_if:
            if parallel.vocab_emb_dp is None:
                raise RequestError("its sharding depends on vocab_emb_dp, which is not stated")
            if parallel.vocab_emb_dp:
                return True
            if parallel.cp > 1:
                raise RequestError("its sharding with cp and without vocab_emb_dp is not proven")
        if INDIVISIBLE in self.replicated_if:
            if shape is None:
                raise RequestError("its sharding depends on its shape, which is not known")
            return bool(shape[0] % parts)
        return False


@dataclass(frozen=True)
class Preset:
    """The rules of a network, with what they were proven on."""

    label: str  # where it came from
    version: int
    proven: bool
    networks: str
    evidence: str
    rules: tuple[ShardingRule, ...]
    # Values that fields of `Parallel` must have if the network is sharded over mp, with the reason.
    requires: tuple[tuple[str, bool, str], ...] = ()
    layers: str | None = None  # the numbered list that the pipeline divides
    complete: bool = True  # whether every parameter of the network matches a rule
    # offset, interleave: how, as in MindFormers (0: it is not said)
    offset: tuple[int, ...] = ()
    interleave: int = 0
    own_rule_count: int = 0  # how many of the rules, the first ones, are a file's own

    @property
    def stage_rules(self) -> tuple[ShardingRule, ...]:
        """The file's own rules that say on which stages parameters are."""
        return tuple(r for r in self.rules[: self.own_rule_count] if r.stage not in (None, LAYER))


def parse_rule(text: str, option: str = "--rule") -> ShardingRule:
    """Read ``REGEX=(mp, None)``, ``REGEX=MESH(ep, None)`` or ``REGEX=MESH``. Raises UsageError.

    >>> parse_rule("experts=expert(ep, None)").mesh
    'expert'
    """
    names, equals, mesh_and_spec = text.rpartition("=")
    mesh, bracket, spec = mesh_and_spec.partition("(")
    if not equals or not names or not mesh_and_spec.strip():
        raise UsageError(f"{option} {text!r}: expected REGEX=(mp, None) or REGEX=MESH")
    return ShardingRule(
        compile_regex(names, option),
        f"{option} {text!r}",
        mesh=mesh.strip() or None,
        spec=parse_spec(bracket + spec, f"{option} {text!r}") if bracket else None,
    )


_RULE = {
    "names": str, "mesh": str, "spec": object, "optimizer": bool, "stage": str, "shape": [str],
    "replicated_if": [str],
}  # fmt: skip


def rule_of(table: dict[str, Any], where: str) -> ShardingRule:
    """Make a rule of a table of a rules file. Raises UsageError, which names `where`."""
    check_value(table, _RULE, where)
    names, spec = table.get("names"), table.get("spec")
    if not names:
        raise UsageError("expected names, a regular expression", where=where)
    read_spec = parse_spec if isinstance(spec, str) else validate_spec
    return ShardingRule(
        compile_regex(names, where),
        where,
        mesh=table.get("mesh"),
        spec=None if spec is None else read_spec(spec, where),
        optimizer=table.get("optimizer"),
        stage=table.get("stage"),
        shape=tuple(table.get("shape", ())),
        replicated_if=tuple(table.get("replicated_if", ())),
    )


def mismatched_shapes(rules: Sequence[ShardingRule], shapes: Mapping[str, Shape]) -> dict[str, str]:
    """Return the parameters whose shape contradicts the rules', each with what was expected.

    A name such as ``hidden`` has one value in the whole network: that of the axis where it stands
    alone, or alone with a number.
    """
    values: dict[str, tuple[int, str]] = {}
    expected_by_name: dict[str, str] = {}
    checked = []
    for name, shape in shapes.items():
        matching_rules = (rule for rule in rules if rule.shape and rule.names.search(name))
        rule = next(matching_rules, None)
        if rule is None:
            continue
        if len(shape) != len(rule.shape):
            expected_by_name[name] = f"({', '.join(rule.shape)})"
            continue
        for extent, text in zip(shape, rule.shape):
            checked.append((name, extent, text))
            number, words = _product(text)
            if len(words) == 1 and number and extent % number == 0:
                values.setdefault(words[0], (extent // number, name))
    for name, extent, text in checked:
        number, words = _product(text)
        if all(word in values for word in words):
            expected_extent = number * prod(values[word][0] for word in words)
            if expected_extent != extent and name not in expected_by_name:
                sizes_text = "; ".join(f"{word} is {values[word][0]} in {values[word][1]!r}"
                                 for word in words)  # fmt: skip
                expected_by_name[name] = f"{text} = {expected_extent} ({sizes_text})"
    return expected_by_name


def sizes_by_name(rules: Sequence[ShardingRule], shapes: Mapping[str, Shape]) -> dict[str, int]:
    """Return the sizes that rules name, such as ``experts``, as the shapes have them."""
    sizes_by_word: dict[str, int] = {}
    for name, shape in shapes.items():
        matching_rules = (rule for rule in rules if rule.shape and rule.names.search(name))
        rule = next(matching_rules, None)
        for extent, text in zip(shape, rule.shape if rule else ()):
            number, words = _product(text)
            if len(words) == 1 and number == 1:
                sizes_by_word.setdefault(words[0], extent)
    return sizes_by_word


def _product(text: str) -> tuple[int, list[str]]:
    """Split ``2 * ffn`` into its number and its names."""
    parts = [part.strip() for part in text.split("*")]
    number = prod(int(part) for part in parts if part.isdecimal())
    return number, [part for part in parts if not part.isdecimal()]


_KINDS = {
    "version": int, "proven": bool, "networks": str, "evidence": str, "layers": str,
    "complete": bool, "requires": [{"field": str, "value": bool, "why": str}], "extends": str,
    "offset": [int], "interleave": int,
}  # fmt: skip


def parse_rules(data: bytes, label: str, preset: Callable[[str], Preset] | None = None) -> Preset:
    """Read a rules file of a user, or with `preset` None one that comes with rankxform.

    label: what messages call it; preset: returns the one of a name. Raises UsageError.
    """
    document = parse_toml(data, label)
    check_value(document, {"preset": _KINDS, "rules": [dict]}, label)
    preset_table, tables = document.get("preset", {}), document.get("rules", [])
    if not (tables or set(preset_table) & _ALONE):
        raise UsageError("expected [[rules]], and [preset] with what is known of them", where=label)
    rules = [rule_of(table, f"{label}, rule {number}") for number, table in enumerate(tables, 1)]
    base = _NOTHING
    if "extends" in preset_table:
        if preset is None or preset_table["extends"].endswith(".toml"):
            raise UsageError("preset.extends is the name of a preset of rankxform's", where=label)
        base = preset(preset_table["extends"])
    return Preset(
        label,
        version=preset_table.get("version", 1),
        proven=preset_table.get("proven", base.proven),
        networks=preset_table.get("networks", base.networks),
        evidence=preset_table.get("evidence", base.evidence),
        rules=(*rules, *base.rules),
        requires=(
            *(
                _parse_requirement(requirement, label)
                for requirement in preset_table.get("requires", [])
            ),
            *base.requires,
        ),
        layers=preset_table.get("layers", base.layers),
        complete=preset_table.get("complete", base.complete),
        offset=tuple(preset_table.get("offset", ())) or base.offset,
        interleave=_interleave(preset_table, label) or base.interleave,
        own_rule_count=len(rules) if preset is not None else 0,
    )


_ALONE = {"extends", "layers", "offset", "interleave"}
"""What may be said without rules."""

_NOTHING = Preset("", 1, True, "", "it says nothing of its evidence", rules=(), complete=False)
"""What holds where a file says nothing, and extends nothing."""


def _interleave(preset_table: Mapping[str, Any], label: str) -> int:
    rounds: int = preset_table.get("interleave", 0)
    if "interleave" in preset_table and rounds < 1:
        raise UsageError(f"preset.interleave is {rounds}; expected a number from 1 on", where=label)
    return rounds


def _parse_requirement(table: Any, label: str) -> tuple[str, bool, str]:
    if len(table) < 3 or table["field"] not in ("vocab_emb_dp", "use_seq_parallel"):
        raise UsageError(f"preset.requires {table!r}: expected field, value and why", where=label)
    return table["field"], table["value"], table["why"]


FOLDER = Path(__file__).resolve().parent.parent / "presets"


def preset_names() -> list[str]:
    """Return the names of the presets that come with rankxform."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def matching_presets(parameters: Collection[str]) -> list[str]:
    """Return the built-in presets with a rule for each parameter, as --preset takes them; of these
    the ones with fewest rules that are for none, as another network's are."""
    idle_rules: dict[str, int] = {}
    for name in preset_names() if parameters else ():
        preset = load_preset(name)
        if all(any(r.names.search(parameter) for r in preset.rules) for parameter in parameters):
            idle_rules[name + " --unproven" * (not preset.proven)] = sum(
                not any(rule.names.search(parameter) for parameter in parameters)
                for rule in preset.rules
            )
    least = min(idle_rules.values(), default=0)
    return [name for name, count in idle_rules.items() if count == least]


def load_preset(name: str) -> Preset:
    """Return the preset of that name, or of a file whose name ends in ``.toml``."""
    if name.endswith(".toml"):
        path = Path(name)
        if not path.is_file():
            raise UsageError("no such rules file", where=path)
        return parse_rules(read_bytes(path), str(path), load_preset)
    if name not in preset_names():
        raise UsageError(
            f"there is no preset {name!r}{did_you_mean(name, preset_names())}",
            details=f"there are {', '.join(preset_names())}, and your own rules files (*.toml)",
        )
    return parse_rules(read_bytes(FOLDER / f"{name}.toml"), f"preset {name}")
