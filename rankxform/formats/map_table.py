"""Mapping tables: how one naming of a model's tensors becomes another, in TOML.

::

    [map]
    title = "Qwen3"
    architectures = ["Qwen3ForCausalLM"]   # what config.json may call the model
    model_types = ["qwen3"]                # and its type, of each of these
    extends = ["_mcore"]                   # tables whose entries come first
    requires = ["not mlp_only_layers"]     # what must hold, else the table does not know the model

    [prefixes]                             # of models that hold this one, what stands for `model.`
    Qwen3VLForConditionalGeneration = ["model.language_model."]  # the published one first
    Qwen3Model = [""]

    [sizes]                                # numbers, from the keys of config.json
    head_dim = "head_dim or hidden_size // num_attention_heads"

    [choices.qkv]                          # what no file records: a step by name, the default first
    grouped = "groups(kv_heads)"
    contiguous = "concat"

    [variants]                             # in how many ways MindFormers has it, the default first
    mla = ["concat", "apart"]              # which, names and numbers of axes tell

    [blocks.decoder]                       # what many rules have in common
    mindformers = "decoder.layers.{layer}"
    huggingface = "model.layers.{layer}"
    layer = ["0", "num_hidden_layers"]     # from, up to but without
    also = ["dense"]                       # rules of these blocks hold here too
    unless = "num_mtp_layers"              # what counts as 0 where no tensor of the block is there

    [[rules]]
    blocks = ["decoder"]
    mindformers = "{block}.self_attention.linear_qkv.weight"
    steps = ["qkv"]
    [rules.huggingface]                    # the parts, with their shapes
    "{block}.self_attn.q_proj.weight" = ["heads * head_dim", "hidden_size"]

One side of a rule is one tensor, the other is its parts. The steps make the one of the parts:
``concat``, ``interleave`` and ``groups(n)`` join them along the first axis, ``transpose`` exchanges
the axes, ``halves(n)`` has of each of n groups of rows its two halves row by row,
``stack(variable)`` puts what was made for each value of a variable one after another, and
``pile(variable)`` along a first axis of its own. Read backwards, they take it apart. A rule with
``optional = true``, or an expression that holds, may find none of its tensors, in any layer; one
with ``if`` holds where the expression does, in the layers where it does
(``ratios[layer] == 4``); one with ``where = { mla = "concat" }`` in that variant.
``vocabulary = true`` marks tensors whose rows are the vocabulary's, ``keep_dtype = true`` those
that are never cast. ``[[copies]]`` say that a tensor of one side is the same as another of that
side, and ``[[ignored]]`` which tensors are no weights and are left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import field
from functools import cache
from types import CodeType, MappingProxyType
from typing import Any

from rankxform.errors import UsageError
from rankxform.values import dataclass

from .documents import check_value, parse_toml

NAMINGS = MINDFORMERS, HUGGINGFACE = "mindformers", "huggingface"
OTHER_NAMING = dict(zip(NAMINGS, reversed(NAMINGS)))

_DOCUMENT = {
    "map": {
        "title": str, "architectures": [str], "model_types": [str], "extends": [str],
        "requires": list,
    },
    "prefixes": dict, "sizes": dict, "choices": dict, "variants": dict, "blocks": dict,
    "rules": [dict], "copies": [dict], "ignored": [dict],
}  # fmt: skip
_RULE = {
    "mindformers", "huggingface", "blocks", "steps", "for", "optional", "if", "vocabulary",
    "keep_dtype", "where",
}  # fmt: skip
_NODES = (
    "Expression", "BinOp", "UnaryOp", "BoolOp", "Compare", "Name", "Constant", "Load", "Add", "Sub",
    "Mult", "FloorDiv", "Not", "And", "Or", "Eq", "Lt", "Subscript",
)  # fmt: skip
"""What expressions may be made of, by the names of Python's syntax tree."""


NOTHING: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True)
class SizeExpression:
    """An integer or a truth, of sizes by name; a size that is not there is None."""

    text: str
    names: tuple[str, ...]

    def value(self, sizes: Mapping[str, Any], variables: Mapping[str, int] = NOTHING) -> Any:
        """Return what it comes to; variables come first. Raises UsageError if a size is missing."""
        values_by_name = {name: variables.get(name, sizes.get(name)) for name in self.names}
        if self.text in values_by_name:
            return values_by_name[self.text]
        try:
            # only arithmetic on names and numbers; see `expression`
            return eval(_compile_expression(self.text), {"__builtins__": {}}, values_by_name)
        except (TypeError, ZeroDivisionError, IndexError) as error:
            missing = [name for name in self.names if values_by_name[name] is None]
            reason = f"{', '.join(missing)} is missing" if missing else str(error)
            if isinstance(error, IndexError):
                reason = "a list is too short"
            raise UsageError(f"the size {self.text!r} cannot be worked out: {reason}") from None


@cache
def _compile_expression(text: str) -> CodeType:
    return compile(text, "<expression>", "eval")


def parse_size_expression(text: Any, where: str) -> SizeExpression:
    """Read an expression. Raises UsageError."""
    return _expression(str(text).strip(), where)


@cache
def _expression(text: str, where: str) -> SizeExpression:
    import ast  # where a table is read, and not at every start

    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        raise UsageError(f"{text!r} is no expression", where=where) from None
    for node in ast.walk(tree):
        good = not isinstance(node, ast.Constant) or type(node.value) in (int, str)
        if type(node).__name__ not in _NODES or not good:
            raise UsageError(
                f"{text!r}: only names, integers, + - * // == < [] and or not", where=where
            )
    names = sorted({node.id for node in ast.walk(tree) if isinstance(node, ast.Name)})
    return SizeExpression(text, tuple(names))


@dataclass(frozen=True)
class VariableRange:
    """A variable, and the numbers that it stands for."""

    variable: str
    start: SizeExpression
    stop: SizeExpression


@dataclass(frozen=True)
class NameBlock:
    """What begins the names of many rules, on either side; and the variable in it.

    also: blocks whose rules hold for this one too. unless: the entry of the configuration that
    counts as 0 where a checkpoint has none of the tensors.
    """

    names: Mapping[str, str]
    range: VariableRange
    also: tuple[str, ...] = ()
    unless: str | None = None


@dataclass(frozen=True)
class MapRule:
    """One kind of tensor: the one tensor `whole` of side `side`, and its parts on the other."""

    side: str
    whole: str
    parts: Mapping[str, tuple[SizeExpression, ...]]  # by name, the shape
    blocks: tuple[str, ...] = ()  # names in the table, none for a rule of its own
    steps: tuple[tuple[str, str], ...] = ()  # as (name, argument)
    ranges: tuple[VariableRange, ...] = ()  # of variables that only the parts have
    condition: SizeExpression | None = None  # where it holds, a block's variable among its names
    optional: bool | SizeExpression = False  # whether its tensors may lack, or where they may
    vocabulary: bool = False
    keep_dtype: bool = False
    where: Mapping[str, str] = field(default_factory=dict)  # in which variant


@dataclass(frozen=True)
class TiedTensor:
    """A tensor of one side that is the same as another of that side.

    is_written: whether it is written, or only taken where it is there.
    """

    side: str
    name: str
    tied_to: str
    is_written: bool = True
    range: VariableRange | None = None
    condition: SizeExpression | None = None


@dataclass(frozen=True)
class Ignored:
    """Tensors of one side that are no weights, such as counters of experts' load."""

    side: str
    name: str
    blocks: tuple[str, ...] = ()


@dataclass(frozen=True)
class MapTable:
    """A mapping table, with what it extends. label: what messages call it."""

    label: str
    title: str = ""
    architectures: tuple[str, ...] = ()
    model_types: tuple[str, ...] = ()
    requires: tuple[SizeExpression, ...] = ()
    sizes: Mapping[str, SizeExpression] = field(default_factory=dict)
    choices: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    blocks: Mapping[str, NameBlock] = field(default_factory=dict)
    rules: tuple[MapRule, ...] = ()
    copies: tuple[TiedTensor, ...] = ()
    variants: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    ignored: tuple[Ignored, ...] = ()
    # Of architectures that hold the model, what may stand for `model.`, the published one first.
    prefixes: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def blocks_of(self, rule: MapRule | Ignored) -> list[NameBlock]:
        """Return the blocks that a rule holds for; [] of a rule of its own."""
        return [
            b for n, b in self.blocks.items() if n in rule.blocks or set(b.also) & set(rule.blocks)
        ]


def parse_extends(data: bytes, label: str) -> tuple[str, ...]:
    """Return the tables that a table extends. Raises UsageError."""
    document = check_value(parse_toml(data, label), _DOCUMENT, label)
    return tuple(document.get("map", {}).get("extends", ()))


def parse_map_table(data: bytes, label: str, bases: tuple[MapTable, ...] = ()) -> MapTable:
    """Read a mapping table; `bases` are those that it extends. Raises UsageError."""
    document = check_value(parse_toml(data, label), _DOCUMENT, label)
    map_fields = document.get("map", {})
    sizes = {n: e for base in bases for n, e in base.sizes.items()}
    for name, text in document.get("sizes", {}).items():
        sizes[name] = parse_size_expression(text, f"{label}: sizes.{name}")
    choices = {n: c for base in bases for n, c in base.choices.items()}
    for name, steps in document.get("choices", {}).items():
        if (
            not isinstance(steps, dict)
            or not all(isinstance(s, str) for s in steps.values())
            or not steps
        ):
            raise UsageError(f"choices.{name}: expected a step for each way, as texts", where=label)
        choices[name] = steps
    variants = _read_variants(document, label, bases)
    prefixes = {n: p for base in bases for n, p in base.prefixes.items()}
    for name, before_names in document.get("prefixes", {}).items():
        prefixes[name] = tuple(check_value(before_names, [str], f"{label}: prefixes.{name}"))
        if not prefixes[name]:
            raise UsageError(f"prefixes.{name}: expected a list of texts", where=label)
    blocks = {n: b for base in bases for n, b in base.blocks.items()}
    for name, table in document.get("blocks", {}).items():
        where = f"{label}: blocks.{name}"
        blocks[name] = _block(check_value(table, dict, where), where)
    rules = [rule for base in bases for rule in base.rules]
    for number, table in enumerate(document.get("rules", []), 1):
        rules.append(_rule(table, f"{label}, rule {number}"))
    copies = [tied_tensor for base in bases for tied_tensor in base.copies]
    for number, table in enumerate(document.get("copies", []), 1):
        copies.append(_parse_tied(table, f"{label}, copy {number}"))
    ignored = [entry for base in bases for entry in base.ignored]
    for number, table in enumerate(document.get("ignored", []), 1):
        ignored.append(_parse_ignored(table, f"{label}, ignored {number}"))
    _check_where(rules, variants, label)
    requires = [condition for base in bases for condition in base.requires]
    requires += [
        parse_size_expression(t, f"{label}: requires") for t in map_fields.get("requires", [])
    ]
    return MapTable(
        label,
        map_fields.get("title", ""),
        tuple(map_fields.get("architectures", ())),
        tuple(map_fields.get("model_types", ())),
        tuple(requires),
        sizes,
        choices,
        blocks,
        tuple(rules),
        tuple(copies),
        variants,
        tuple(ignored),
        prefixes,
    )


def _read_variants(
    document: Mapping[str, Any], label: str, bases: tuple[MapTable, ...]
) -> dict[str, tuple[str, ...]]:
    variants = {n: v for base in bases for n, v in base.variants.items()}
    for name, variant_names in document.get("variants", {}).items():
        variants[name] = tuple(check_value(variant_names, [str], f"{label}: variants.{name}"))
        if not variants[name]:
            raise UsageError(f"variants.{name}: expected a list of names", where=label)
    return variants


def _check_where(
    rules: Iterable[MapRule], variants: Mapping[str, tuple[str, ...]], label: str
) -> None:
    for rule in rules:
        for name, variant in rule.where.items():
            if variant not in variants.get(name, ()):
                raise UsageError(f"where {name} = {variant!r}: no such variant", where=label)


def _rule(table: Mapping[str, Any], where: str) -> MapRule:
    for key in table:
        if key not in _RULE:
            raise UsageError(f"{key!r} is none of {', '.join(sorted(_RULE))}", where=where)
    sides = {side: table.get(side) for side in NAMINGS}
    single_sides = [side for side, value in sides.items() if isinstance(value, str)]
    parts = [side for side, value in sides.items() if isinstance(value, dict) and value]
    if len(single_sides) != 1 or len(parts) != 1:
        raise UsageError(
            "expected a name on one side, and on the other a table of names and shapes",
            where=where,
            details="the sides are mindformers and huggingface",
        )
    shapes = {
        name: tuple(
            parse_size_expression(text, where)
            for text in check_value(shape, list, f"{where}: {name!r}")
        )
        for name, shape in table[parts[0]].items()
    }
    block_names = tuple(check_value(table.get("blocks", []), [str], f"{where}: blocks"))
    condition = parse_size_expression(table["if"], where) if "if" in table else None
    steps = tuple(_step(text, where) for text in check_value(table.get("steps", []), [str], where))
    ranges = tuple(
        _range(n, b, where) for n, b in check_value(table.get("for", {}), dict, where).items()
    )
    flags: dict[str, Any] = {}
    for name in ("optional", "vocabulary", "keep_dtype"):
        flags[name] = table.get(name, False)
        if name == "optional" and isinstance(flags[name], str):
            flags[name] = parse_size_expression(flags[name], where)
        elif not isinstance(flags[name], bool):
            raise UsageError(f"{name} is {flags[name]!r}; expected true or false", where=where)
    side, variant = single_sides[0], check_value(table.get("where", {}), dict, f"{where}: where")
    return MapRule(
        side, table[side], shapes, block_names, steps, ranges, condition, where=variant, **flags
    )


def _parse_ignored(table: Mapping[str, Any], where: str) -> Ignored:
    side = next((side for side in NAMINGS if isinstance(table.get(side), str)), None)
    if side is None or set(table) - {side, "blocks"}:
        raise UsageError("expected mindformers or huggingface, and blocks", where=where)
    return Ignored(side, table[side], tuple(check_value(table.get("blocks", []), [str], where)))


def _step(text: str, where: str) -> tuple[str, str]:
    name, opening, argument = text.partition("(")
    if opening and not argument.endswith(")"):
        raise UsageError(f"step {text!r} has no closing bracket", where=where)
    return name.strip(), argument[:-1].strip()


def _parse_tied(table: Mapping[str, Any], where: str) -> TiedTensor:
    side = next((side for side in NAMINGS if side in table), None)
    unknown = set(table) - {"mindformers", "huggingface", "of", "made", "if", "for"}
    texts = side is not None and isinstance(table[side], str) and isinstance(table.get("of"), str)
    if side is None or unknown or not texts:
        raise UsageError("expected mindformers or huggingface, of, made, if, for", where=where)
    ranges = [
        _range(n, bounds, where)
        for n, bounds in check_value(table.get("for", {}), dict, where).items()
    ]
    condition = parse_size_expression(table["if"], where) if "if" in table else None
    is_written = table.get("made", True)
    return TiedTensor(
        side, table[side], table["of"], bool(is_written), next(iter(ranges), None), condition
    )


def _block(table: Mapping[str, Any], where: str) -> NameBlock:
    names = {side: table.get(side) for side in NAMINGS}
    variables = [key for key in table if key not in (*NAMINGS, "also", "unless")]
    also = tuple(check_value(table.get("also", []), [str], f"{where}.also"))
    unless = table.get("unless")
    if unless is not None and not isinstance(unless, str):
        raise UsageError(f"{where}.unless: expected a name of the configuration")
    if not all(isinstance(name, str) for name in names.values()) or len(variables) != 1:
        raise UsageError("expected mindformers, huggingface, and a variable's range", where=where)
    names_by_side = {side: str(name) for side, name in names.items()}
    (variable,) = variables
    return NameBlock(names_by_side, _range(variable, table[variable], where), also, unless)


def _range(name: str, value: Any, where: str) -> VariableRange:
    if not isinstance(value, list) or len(value) != 2:
        raise UsageError(f"{name} is {value!r}; expected [first, last + 1]", where=where)
    return VariableRange(
        name, parse_size_expression(value[0], where), parse_size_expression(value[1], where)
    )
