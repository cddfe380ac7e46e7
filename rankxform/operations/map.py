"""`--map`: another naming of the same model.

A table (`rankxform.formats.map_table`) and the sizes in config.json say which tensors either naming
has, with their shapes; all of them are compared with the checkpoint's before anything is planned.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any

from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.formats.map_table import (
    HUGGINGFACE,
    MINDFORMERS,
    NAMINGS,
    NOTHING,
    OTHER_NAMING,
    MapRule,
    MapTable,
    SizeExpression,
    TiedTensor,
    VariableRange,
    parse_size_expression,
)
from rankxform.geometry.box import Shape
from rankxform.geometry.pieces import (
    Assembly,
    concatenate,
    concatenate_by_group,
    interleave_rows,
    invert,
    of_views,
    pile,
)
from rankxform.layout.names import (
    and_more,
    compile_regex,
    first_texts,
    is_extra_state,
    option_to_exclude,
    summarize_names,
)
from rankxform.layout.states import COUNTERS, MODEL, State
from rankxform.options import flag_of
from rankxform.statements import (
    MODEL_SIZE,
    Finding,
    Statement,
    as_notice,
    as_warning,
    contradictions,
    quote,
    require,
)
from rankxform.values import dataclass, pattern_on_use

from .base import ModelOperation, OperationContext, SourceTensor, Tensor
from .experts import shapes_apart
from .prefixes import Prefixes, language_name, text_sizes, treat_towers, whole_name
from .vocabulary import is_padding

_MOST_GROUPS = 1 << 14


class ModelSizes:
    """The sizes of a model: what its config.json states, and what a table makes of that."""

    def __init__(
        self,
        table: MapTable,
        config: Mapping[str, Any],
        label: str,
        prefixes: Prefixes | None = None,
    ) -> None:
        """`label` is what messages call the configuration. prefixes: of a model that holds the
        table's. Raises UsageError."""
        self.table, self.label, self.prefixes = table, label, prefixes
        self._stated = {
            k: v for k, v in config.items() if isinstance(v, (int, str, list, type(None)))
        }
        self._made: dict[str, Any] = {}
        for name, expression in table.sizes.items():
            self._made[name] = expression.value({**self._stated, **self._made})
        self.known: Mapping[str, Any] = {**self._stated, **self._made}
        for expression in table.requires:
            if not expression.value(self.known):
                raise UsageError(
                    f"says otherwise than {expression.text!r}, which {table.label} is for",
                    "give a table of your own (--map FILE.toml)",
                    where=label,
                )

    def without(self, name: str) -> ModelSizes:
        """Return the sizes where the configuration states 0 of something."""
        return ModelSizes(self.table, {**self._stated, name: 0}, self.label)

    def number(self, expression: SizeExpression, variables: Mapping[str, int]) -> int:
        """Return a number, from 0 on. Raises UsageError."""
        size = expression.value(self.known, variables)
        if size is None:
            missing_names = [n for n in self._names([expression]) if self._stated.get(n) is None]
            keys = [name for name in missing_names if name not in self.table.sizes]
            raise UsageError(
                f"{' and '.join(keys) or expression.text} is missing, from which "
                f"{self.table.label} works out shapes",
                where=self.label,
            )
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise UsageError(
                f"{self.stated([expression])} make {expression.text!r} {size!r}; "
                f"{self.table.label} needs a number",
                where=self.label,
            )
        return size

    def holds(
        self, condition: SizeExpression | None, variables: Mapping[str, int] = NOTHING
    ) -> bool:
        return condition is None or bool(condition.value(self.known, variables))

    def stated(self, expressions: Iterable[SizeExpression]) -> str:
        """Return, for messages, what the configuration states of what expressions depend on."""
        names = self._names(expressions)
        stated_names = [name for name in names if self._stated.get(name) is not None]
        in_words = ", ".join(f"{name} {self._stated[name]}" for name in stated_names)
        entries = [name for name in names if name not in self.table.sizes]
        return in_words or f"no {' and no '.join(entries) or 'sizes'}"

    def _names(self, expressions: Iterable[SizeExpression]) -> list[str]:
        """Return all names that expressions depend on, of sizes and of the configuration."""
        todo = [name for expression in expressions for name in expression.names]
        dependencies: dict[str, None] = {}
        while todo:
            name = todo.pop(0)
            if name not in dependencies:
                dependencies[name] = None
                if name in self.table.sizes:
                    todo += self.table.sizes[name].names
        return list(dependencies)


def read(context: OperationContext) -> ModelSizes | None:
    """Return the table that is asked for, with the model's sizes. Raises UsageError."""
    options = context.options
    if options["map"] is None:
        has_use = options["dtype"] is not None or options["lora"] is not None
        is_copied = context.is_configured  # along with the tensors
        for name in ("config", "like", *CHOICES, "variant", "towers"):
            if (
                options[name]
                and not (name == "config" and has_use)
                and (name not in ("config", "like") or not is_copied)
            ):
                raise UsageError(f"{flag_of(name)} is for --map", "give both")
        return None
    table = context.map_table(options["map"])
    for name in CHOICES:
        if options[name] is not None and name not in table.choices:
            raise UsageError(f"{table.label} has no such choice", f"leave out {flag_of(name)}")
    for name in requested_variants(options):
        if name not in table.variants:
            variants_text = ", ".join(table.variants) or "none"
            raise UsageError(f"--variant {name}: {table.label} has {variants_text}")
    if context.config is None:
        raise UsageError(
            f"{table.label} needs its sizes, and {context.model_folder} has none",
            "give --config, the model's config.json",
        )
    config, label = context.config
    configs_by_label = {label: config, **{place: other for other, place in context.other_configs()}}
    facts = (
        Statement(MODEL_SIZE, key, value, place)
        for place, stated_config in configs_by_label.items()
        for key, value in stated_config.items()
        if type(value) is int and _IS_SIZE().fullmatch(key)
    )
    require(pair.finding._replace(error=UsageError) for pair in contradictions(facts))
    architectures = config.get("architectures")
    named = [str(name) for name in architectures] if isinstance(architectures, list) else []
    before_names = next((table.prefixes[n] for n in named if n in table.prefixes), None)
    if before_names is not None:
        prefixes = Prefixes(next(n for n in named if n in table.prefixes), before_names)
        return ModelSizes(table, text_sizes(config, prefixes), label, prefixes)
    if table.architectures and named and not set(named) & set(table.architectures):
        is_of_parts = isinstance(config.get("text_config"), dict)  # as vision-language models are
        raise UsageError(
            f"is of a {named[0]}; {table.label} is for {' and '.join(table.architectures)}",
            *(_TEXT_ALONE if is_of_parts else ()),
            where=label,
            details="the text's part alone can be translated" if is_of_parts else "",
        )
    return ModelSizes(table, config, label)


def requested_variants(options: Mapping[str, Any]) -> dict[str, str]:
    """Return the ways that are asked for, by variant. Raises UsageError."""
    pairs = [text.partition("=") for text in options["variant"]]
    for name, equals, way in pairs:
        if not (name and equals and way):
            raise UsageError(f"--variant {name!r}: expected NAME=WAY, such as mla=apart")
    return {name: way for name, _, way in pairs}


def make(options: Mapping[str, Any]) -> NameMap:
    """Return the operation. Raises UsageError."""
    return NameMap.of(options, options["inputs"]["map"])


# A table says only how the one tensor of a rule is made of its parts: the other direction inverts
# the pieces. Names are worked out from the sizes, not matched by patterns, so that what is
# missing or too much is known by name.

CHOICES = ("qkv", "gate_up")
"""The options that choose a step of a map."""

_TEXT_ALONE = (
    "--config FILE, the text_config of that as a file of its own, with --exclude visual and "
    r"--rename '^model\.language_model\.=model.'",
    "leave out --map for a copy of all parts",
)
_IS_SIZE = pattern_on_use(
    r"hidden_size|num_(?!nextn).*(heads|layers)|.*head_dim|.*intermediate_size|.*_lora_rank|.*experts"
)
"""Keys of a config.json whose values say how tensors are taken apart."""
_PLACE = pattern_on_use(r"\{([^{}]+)\}")
_MOST = 1_000_000
"""Values of a variable."""

_JOINING = ("concat", "interleave", "groups")
_OTHER_STEPS = ("transpose", "halves", "stack", "pile")
_TITLES = {MINDFORMERS: "MindFormers'", HUGGINGFACE: "Hugging Face's"}


@dataclass(frozen=True)
class MappedGroup:
    """Tensors that are each other: one on `rule.side`, made of parts on the other.

    assembly: the one, made of the parts, which are its sources in order.
    """

    rule: MapRule
    whole_name: str
    parts: tuple[str, ...]
    shapes: tuple[Shape, ...]
    assembly: Assembly

    def names(self, side: str) -> tuple[str, ...]:
        """Return what one side calls them."""
        return (self.whole_name,) if side == self.rule.side else self.parts


class NameMap(ModelOperation):
    """A table with the sizes of one model, ready to be applied (`rankxform.operations.base`)."""

    renames = True

    def __init__(
        self,
        sizes: ModelSizes,
        choices: Mapping[str, str],
        excluded: Sequence[re.Pattern[str]] = (),
        *,
        free_rows: bool = False,
        has_reference: bool = False,
        towers: str | None = None,
    ) -> None:
        """`choices`: by name, if not the default. excluded: names that need no rule. free_rows: the
        vocabulary may have any number of rows. has_reference: one decides on choices."""
        self.sizes, self.table = sizes, sizes.table
        self._requested, self._has_reference = choices.keys(), has_reference
        self._excluded, self._free_rows, self._towers = excluded, free_rows, towers
        self.choices = {}
        for name, alternatives in self.table.choices.items():
            choice = choices.get(name) or next(iter(alternatives))
            if choice not in alternatives:
                raise UsageError(
                    f"{name} {choice!r}: {self.table.label} has {', '.join(alternatives)}"
                )
            self.choices[name] = choice
        self.variants = dict[str, str]()
        for name, settings in self.table.variants.items():
            setting = choices.get(name) or settings[0]
            if setting not in settings:
                settings_text = ", ".join(settings)
                raise UsageError(
                    f"--variant {name}={setting}: {self.table.label} has {settings_text}"
                )
            self.variants[name] = setting
        self._assemblies: dict[tuple[int, tuple[Shape, ...]], Assembly] = {}
        self._inverses: dict[int, list[Assembly]] = {}
        self._of_views: dict[object, Assembly] = {}
        self._absent: list[str] = []
        self._lacks_tower = False
        self.links = [link for rule in self.table.rules for link in self._links(rule)]
        self.copies = [c for t in self.table.copies for c in self._copies(t)]
        self._ignored = {side: {*self._no_weights(side)} for side in NAMINGS}
        self._names = self._by_side()

    @classmethod
    def of(cls, options: Mapping[str, Any], sizes: ModelSizes) -> NameMap:
        """Return the map that the options of a conversion ask for. Raises UsageError."""
        choices = {name: options[name] for name in CHOICES if options[name]}
        choices |= requested_variants(options)
        excluded = [compile_regex(text, "--exclude") for text in options["exclude"]]
        return cls(
            sizes, choices, excluded,
            free_rows=options["vocab"] is not None,
            has_reference=options["like"] is not None,
            towers=options["towers"],
        )  # fmt: skip

    # -- what the table says ----------------------------------------------------------------------

    def _is_chosen(self, rule: MapRule) -> bool:
        return all(self.variants[name] == setting for name, setting in rule.where.items())

    def _varies(self, rule: MapRule) -> bool:
        """Whether a rule may hold in some layers and not in others."""
        variables = {block.range.variable for block in self.table.blocks_of(rule)}
        return rule.condition is not None and bool(variables.intersection(rule.condition.names))

    def _layers(self, rule: MapRule, within: VariableRange | None) -> Iterator[dict[str, int]]:
        """Yield values of a block's variable for which a rule holds."""
        for variables in self._values([within] if within else []):
            if self.sizes.holds(rule.condition, variables):
                yield variables

    def _no_weights(self, side: str) -> Iterator[str]:
        """Yield what one side calls tensors that are no weights."""
        for ignored in self.table.ignored:
            within = self.table.blocks_of(ignored) if ignored.side == side else []
            for block in within:
                for variables in self._values([block.range]):
                    yield self._name(ignored.name, block.names[side], variables)
            if ignored.side == side and not ignored.blocks:
                yield ignored.name

    def _links(self, rule: MapRule) -> Iterator[MappedGroup]:
        if not self._is_chosen(rule):
            return
        for name in rule.blocks:
            if name not in self.table.blocks:
                block_names = ", ".join(self.table.blocks)
                raise UsageError(f"block {name!r} is none of {block_names}", where=self.table.label)
        blocks: list[tuple[Mapping[str, str], VariableRange | None]] = [({}, None)]
        if rule.blocks:
            blocks = [(block.names, block.range) for block in self.table.blocks_of(rule)]
        other_side = OTHER_NAMING[rule.side]
        for prefixes, within in blocks:
            for variables in self._layers(rule, within):
                whole_name = self._name(rule.whole, prefixes.get(rule.side), variables)
                parts, shapes = [], []
                for inner in self._values(rule.ranges):
                    all_variables = {**variables, **inner}
                    for name, shape in rule.parts.items():
                        parts.append(self._name(name, prefixes.get(other_side), all_variables))
                        shapes.append(tuple(self.sizes.number(n, all_variables) for n in shape))
                if parts:
                    key = id(rule), tuple(shapes)
                    if key not in self._assemblies:  # one object for all layers that are alike
                        self._assemblies[key] = self._assembled(rule, shapes)
                    yield MappedGroup(rule, whole_name, tuple(parts), key[1], self._assemblies[key])

    def _values(self, ranges: Iterable[VariableRange]) -> Iterator[dict[str, int]]:
        combinations: list[dict[str, int]] = [{}]
        for variable_range in ranges:
            numbers = range(
                self.sizes.number(variable_range.start, {}),
                self.sizes.number(variable_range.stop, {}),
            )
            count = max(0, numbers.stop - numbers.start)  # a range has no length beyond 2**63
            if count * len(combinations) > _MOST:
                sizes_text = self.sizes.stated([variable_range.start, variable_range.stop])
                raise UsageError(
                    f"{sizes_text}: that would be {count:,} values of {variable_range.variable!r}; "
                    "no model has so many",
                    where=self.sizes.label,
                )
            combinations = [
                {**c, variable_range.variable: n} for c in combinations for n in numbers
            ]
        yield from combinations

    def _name(self, text: str, prefix: str | None, variables: Mapping[str, int]) -> str:
        if prefix is not None:
            text = text.replace("{block}", prefix)

        def number(match: re.Match[str]) -> str:
            return str(
                self.sizes.number(parse_size_expression(match[1], self.table.label), variables)
            )

        return _PLACE().sub(number, text)

    def _assembled(self, rule: MapRule, shapes: Sequence[Shape]) -> Assembly:
        """Return the one tensor, made of its parts as the rule's steps say."""
        parts = [Assembly.of(shape, number) for number, shape in enumerate(shapes)]
        group_size = len(rule.parts)
        if len(rule.ranges) > 1:
            raise UsageError(
                f"{rule.whole!r} has two variables; one is known", where=self.table.label
            )
        for name, argument in rule.steps:
            if name in self.choices:
                step_text = self.table.choices[name][self.choices[name]]
                name, _, argument_text = step_text.partition("(")
                argument = argument_text.rstrip(")")
            if name == "transpose" and any(len(part.shape) < 2 for part in parts):
                raise UsageError(
                    f"{rule.whole!r} has no two axes to exchange", where=self.table.label
                )
            if name == "transpose":
                parts = [part.transposed() for part in parts]
                continue
            if name == "halves":
                parts = [self._halves_in_turn(rule, argument, part) for part in parts]
                continue
            if name in ("stack", "pile"):
                if argument not in {variable_range.variable for variable_range in rule.ranges}:
                    raise UsageError(
                        f"{rule.whole!r}: {name}({argument}) is about no variable of `for`",
                        where=self.table.label,
                    )
                joined = pile(parts) if name == "pile" else self._joined(rule, "concat", "", parts)
                parts = [joined]
                continue
            if name not in _JOINING:
                raise UsageError(
                    f"{rule.whole!r} has a step {name!r}; expected "
                    f"{', '.join((*_JOINING, *_OTHER_STEPS, *self.table.choices))}",
                    where=self.table.label,
                )
            groups = [parts[s : s + group_size] for s in range(0, len(parts), group_size)]
            parts, group_size = [self._joined(rule, name, argument, group) for group in groups], 1
        if len(parts) != 1:
            raise UsageError(
                f"the steps of {rule.whole!r} leave {len(parts)} tensors, not one",
                where=self.table.label,
            )
        return parts[0]

    def _joined(
        self, rule: MapRule, name: str, argument: str, parts: Sequence[Assembly]
    ) -> Assembly:
        if not all(part.shape for part in parts) or len({part.shape[1:] for part in parts}) > 1:
            shapes = ", ".join(str(list(part.shape)) for part in parts)
            raise UsageError(
                f"parts of {rule.whole!r} have shapes {shapes}; joined are tensors that "
                "differ in the first axis only",
                where=self.sizes.label,
            )
        rows = [part.shape[0] for part in parts]
        if name == "concat":
            return concatenate(parts)
        if name == "interleave":
            if len(set(rows)) > 1:
                raise UsageError(
                    f"parts of {rule.whole!r} with {rows} rows are interleaved; expected equal "
                    "numbers",
                    where=self.sizes.label,
                )
            return interleave_rows(parts)
        return concatenate_by_group(parts, self._groups(rule, argument, rows))

    def _groups(self, rule: MapRule, argument: str, rows: Sequence[int], of: int = 1) -> int:
        """Return the number of groups, each of a multiple of `of` rows. Raises UsageError."""
        groups = self.sizes.number(parse_size_expression(argument, self.table.label), {})
        if not 0 < groups <= _MOST_GROUPS or any(n % (groups * of) for n in rows):
            sizes_text = self.sizes.stated([parse_size_expression(argument, self.table.label)])
            raise UsageError(
                f"{sizes_text}: parts of {rule.whole!r} with {rows} rows do not make {groups} "
                "groups",
                where=self.sizes.label,
            )
        return groups

    def _halves_in_turn(self, rule: MapRule, argument: str, part: Assembly) -> Assembly:
        """Return of each group of rows a row of its first half and one of its second in turn."""
        rows = part.shape[0]
        half = rows // self._groups(rule, argument, [rows], 2) // 2
        if not half:
            raise UsageError(f"{rule.whole!r} has no rows", where=self.sizes.label)
        starts = range(0, rows, 2 * half)
        halves = ([part.rows(a, a + half), part.rows(a + half, a + 2 * half)] for a in starts)
        return concatenate([interleave_rows(pair) for pair in halves])

    def _copies(self, tied_tensor: TiedTensor) -> Iterator[TiedTensor]:
        if self.sizes.holds(tied_tensor.condition):
            for variables in self._values([tied_tensor.range] if tied_tensor.range else []):
                name, original_name = (
                    self._name(t, None, variables) for t in (tied_tensor.name, tied_tensor.tied_to)
                )
                yield replace(tied_tensor, name=name, tied_to=original_name)

    def _by_side(self) -> dict[str, dict[str, MappedGroup]]:
        names: dict[str, dict[str, MappedGroup]] = {side: {} for side in NAMINGS}
        for link in self.links:
            for side in NAMINGS:
                for name in link.names(side):
                    if name in names[side]:
                        raise UsageError(f"two rules speak of {name!r}", where=self.table.label)
                    names[side][name] = link
        return names

    def variants_by_names(self, axes: Mapping[str, int]) -> dict[str, str]:
        """Return by variant which way MindFormers' names tell, and how many axes the tensors have.

        axes: of each tensor, by name. What is told by none, or by several alike, is not in it.
        """
        settings_by_variant = dict[str, str]()
        for variant, settings in self.table.variants.items():
            counts = dict.fromkeys(settings, 0)
            for rule in self.table.rules:
                setting = rule.where.get(variant)
                if setting is not None and rule.side == MINDFORMERS:
                    shape = next(iter(rule.parts.values()))
                    count = len(shape) + any(name == "pile" for name, _ in rule.steps)
                    counts[setting] += sum(axes.get(name) == count for name in self._wholes(rule))
            best = max(settings, key=lambda setting: counts[setting])
            if counts[best] and [*counts.values()].count(counts[best]) == 1:
                settings_by_variant[variant] = best
        return settings_by_variant

    def _wholes(self, rule: MapRule) -> Iterator[str]:
        """Yield the names of a rule's one tensor, in every layer."""
        for block in self.table.blocks_of(rule):
            for variables in self._layers(rule, block.range):
                yield self._name(rule.whole, block.names[rule.side], variables)

    def contradictions_of(self, shapes: Mapping[str, Shape]) -> Iterator[str]:
        """Yield how tensors under Hugging Face's names are otherwise than the sizes make them.

        shapes: of all tensors, by name. A few rows of a vocabulary may lack, or be padding.
        """
        try:
            shapes = shapes_apart(shapes, self.sizes.known)
        except CheckpointError as error:
            yield error.parts.line
            return
        present_names, expected = {*shapes}, dict[str, tuple[Shape, MapRule]]()
        mapping = self
        for entry in self._entries_without_blocks(shapes):
            mapping = NameMap(mapping.sizes.without(entry), {})
        for link in mapping.links:
            is_whole = link.rule.side == HUGGINGFACE
            link_shapes = (link.assembly.shape,) if is_whole else link.shapes
            expected |= {
                name: (shape, link.rule)
                for name, shape in zip(link.names(HUGGINGFACE), link_shapes)
            }
        missing, unlike, absent_count = list[str](), list[str](), 0
        for name, (shape, rule) in expected.items():
            optional = rule.optional
            is_optional = optional if isinstance(optional, bool) else self.sizes.holds(optional)
            if name not in present_names:
                missing += [] if is_optional else [name]
                absent_count += is_optional
                continue
            free = 1 if rule.vocabulary and is_padding(shapes[name][0], shape[0]) else 0
            if shapes[name][free:] != shape[free:]:
                unlike.append(name)
        label = self.sizes.label
        is_other_head = any("layers" not in name and name not in expected for name in present_names)
        if is_other_head and all(expected[name][1].vocabulary for name in missing):
            missing = []  # it has another head, such as a reward model's
        if missing:
            stops = self.sizes.stated(block.range.stop for block in self.table.blocks.values())
            text = f"{label} ({stops}) makes {len(expected) - absent_count:,} tensors, and "
            yield f"{text}{len(missing):,} of them are in no file: {first_texts(missing, 2)}"
        if unlike:
            shape, rule = expected[unlike[0]]
            sizes_text = self.sizes.stated(
                n for part_shape in rule.parts.values() for n in part_shape
            )
            have = f"{unlike[0]!r} has shape {list(shapes[unlike[0]])}"
            is_less = prod(shapes[unlike[0]]) < prod(shape)
            perhaps = "; perhaps one rank's slice" if is_less else ""
            yield (
                f"{have}, and {label} ({sizes_text}) makes it {list(shape)}"
                f"{and_more(unlike, 'such tensor')}{perhaps}"
            )
        unexpected = sorted(present_names.difference(expected))
        beyond = [text for name in unexpected if (text := self._why_beyond(HUGGINGFACE, name))]
        if beyond:
            yield beyond[0] + (f"; so are {len(beyond) - 1:,} more" if beyond[1:] else "")

    # -- what it makes of a checkpoint ------------------------------------------------------------

    def naming_of(self, names: Iterable[str]) -> str:
        """Return whose names a checkpoint has. Raises RequestError if it has neither's."""
        all_names = set(names)
        prefix = self._prefix_among(all_names)
        if prefix is not None:
            all_names = {language_name(name, prefix) or name for name in all_names}
        counts = {}
        for side in NAMINGS:
            counts[side] = len(
                all_names & (set(self._names[side]) - set(self._names[OTHER_NAMING[side]]))
            )
        best = max(NAMINGS, key=lambda side: counts[side])
        if not counts[best]:
            raise RequestError(
                f"{self.table.label} is another model's: none of its names is in the checkpoint, "
                f"which has {summarize_names(all_names, 3)}",
                *self._missing_prefix(all_names),
            )
        return best

    def _missing_prefix(self, names: Collection[str]) -> list[str]:
        """Return what to try where names lack what stands before the model's: `model.`."""
        expected_names = {*self._names[HUGGINGFACE]}
        prefixed = [name for name in names if f"{MODEL}{name}" in expected_names]
        tied_names = {copy.name for copy in self.copies}
        others = [name for name in names if name in expected_names | tied_names]
        if 2 * len(prefixed) < len(names):
            return []
        but = f"(?!{'|'.join(f'{re.escape(name)}$' for name in others)})" if others else ""
        return [f"--rename {quote(f'^{but}={MODEL}')} puts before names what is missing there"]

    def knows(self, names: Iterable[str]) -> bool:
        """Tell whether at least half of some tensors have names of one side."""
        all_names = {*names}
        return any(2 * len(all_names & {*self._names[side]}) >= len(all_names) for side in NAMINGS)

    def _entries_without_blocks(self, names: Iterable[str]) -> list[str]:
        """Return the entries of the configuration of whose blocks a checkpoint has no tensor."""
        if all(block.unless is None for block in self.table.blocks.values()):
            return []
        all_names = [*names]
        side = self.naming_of(all_names)
        begins: dict[str, list[str]] = {}
        for block in self.table.blocks.values():
            if block.unless is not None:
                prefix = f"{block.names[side]}."
                block_prefixes = [self._name(prefix, None, v) for v in self._values([block.range])]
                begins.setdefault(block.unless, []).extend(block_prefixes)
        return [
            entry
            for entry, prefixes in begins.items()
            if prefixes and not any(name.startswith(tuple(prefixes)) for name in all_names)
        ]

    def findings(self, names: Sequence[str]) -> Iterator[Finding]:
        for entry in self._absent:
            yield as_warning(
                f"{self.sizes.label}: states {entry} {self.sizes.known.get(entry)}, and the "
                "checkpoint has none of these layers; the destination gets none"
            )
        if self._lacks_tower and self.sizes.prefixes is not None:
            yield as_warning(
                f"{self.sizes.label}: is of a {self.sizes.prefixes.architecture}, and the "
                "destination has its language model alone, without a tower"
            )
        untold = [f"{n}={way}" for n, way in self.variants.items() if n not in self._requested]
        if untold:
            yield as_notice(
                f"{self.table.label}: MindFormers gets {', '.join(untold)}, as in its "
                "configurations (--variant chooses; a destination's strategy tells)"
            )
        unsaid = [name for name in self.choices if name not in self._requested]
        if unsaid and not self._has_reference:
            in_words = ", ".join(f"{name} {self.choices[name]}" for name in unsaid)
            flags = " and ".join(map(flag_of, unsaid))
            yield as_notice(
                f"{self.table.label}: takes {in_words}, as MindFormers does by default; no file "
                f"records it ({flags} choose; on the way to Hugging Face, --like compares)"
            )

    def in_words(self) -> str:
        """Return which map is applied, and what it takes that no file records."""
        choices = ", ".join(f"{name} {value}" for name, value in self.choices.items())
        return f"{self.table.label} by {self.sizes.label}" + (f": {choices}" if choices else "")

    def _prefix_among(self, names: Collection[str]) -> str | None:
        """Return what stands before the language model's names; None where it is all, or absent."""
        prefixes = self.sizes.prefixes
        return prefixes.told_by(names, self._names[HUGGINGFACE]) if prefixes else None

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        prefixes = self.sizes.prefixes
        if prefixes is None:
            return self._compose(tensors)
        prefix = self._prefix_among([tensor.name for tensor in tensors if not tensor.dropped])
        if prefix is not None:
            new_names = {tensor.name: language_name(tensor.name, prefix) for tensor in tensors}
        else:
            roots = {name.partition(".")[0] for name in self._names[MINDFORMERS]}
            new_names = {t.name: t.name for t in tensors if t.name.partition(".")[0] in roots}
        own_tensors, towers = list[Tensor](), list[Tensor]()
        for tensor in tensors:
            new = new_names.get(tensor.name)
            if new is None and not tensor.dropped and tensor.is_weight:
                towers.append(tensor)
            else:
                own_tensors.append(tensor if new is None else tensor.renamed(new))
        new_tensors = self._compose(own_tensors)
        if prefix is None:
            of_modules = any(tower.name.startswith(MODEL) for tower in towers)
            written = prefixes.before_names[-1 if of_modules else 0]
            self._lacks_tower = prefixes.has_head and not towers
            new_tensors = [
                t if t.dropped else t.renamed(whole_name(t.name, written)) for t in new_tensors
            ]
        return [*new_tensors, *treat_towers(towers, self._towers, prefixes.architecture)]

    def _compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        tensors_by_name = {tensor.name: tensor for tensor in tensors if not tensor.dropped}
        self._absent = self._entries_without_blocks(tensors_by_name)
        if self._absent:
            sizes = self.sizes
            for entry in self._absent:
                sizes = sizes.without(entry)
            choices = {**self.choices, **self.variants}
            reduced = NameMap(sizes, choices, self._excluded, free_rows=self._free_rows)
            if reduced._entries_without_blocks(tensors_by_name):
                raise UsageError(
                    f"unless {self._absent[0]!r}: a block is there even where that is 0; expected "
                    "an entry of the configuration that says so",
                    where=self.table.label,
                )
            return reduced._compose(tensors)
        states = [tensor for tensor in tensors if self._follows(tensor) and not tensor.dropped]
        if states:
            return self._with_states(tensors, states)
        return self._composed(tensors, tensors_by_name, self.naming_of(tensors_by_name))

    def _follows(self, tensor: Tensor) -> bool:
        """Tell whether what is done to a tensor's parameter is done to it: to a state, and to a
        copy of which no rule speaks."""
        if tensor.state is not None:
            return True
        return tensor.related is not None and not any(
            tensor.name in self._names[s] for s in NAMINGS
        )

    def _with_states(self, tensors: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        """Do to every state of the optimizer what is done to its parameter."""
        separate_names = {state.name for state in states} | COUNTERS
        other_tensors = [t for t in tensors if t.name not in separate_names or t.dropped]
        counters = [tensor for tensor in tensors if tensor.name in COUNTERS and not tensor.dropped]
        weights = {tensor.name: tensor for tensor in other_tensors if not tensor.dropped}
        side = self.naming_of(weights)
        new_tensors = [*self._composed(other_tensors, weights, side), *counters]
        families: dict[tuple[str, str, str], list[Tensor]] = {}
        for state in states:
            assert state.related is not None
            key = state.related.kind, state.related.before, state.related.after
            families.setdefault(key, []).append(state)
        for (kind, before, after), family_states in families.items():
            states_by_weight = {}
            for state in family_states:
                assert state.related is not None
                states_by_weight[state.related.parameter] = replace(
                    state, name=state.related.parameter
                )
            for state in self._composed(
                [*states_by_weight.values()], states_by_weight, side, allow_missing=True
            ):
                related = State(kind, state.name, before, after)
                original_name = related.name_for(state.same_as) if state.same_as else ""
                new_tensors.append(
                    replace(
                        state, name=related.name_for(state.name), keeps_dtype=False,
                        related=related, is_weight=related.is_copy, same_as=original_name,
                    )
                )  # fmt: skip
        return new_tensors

    def _composed(
        self,
        tensors: Sequence[Tensor],
        tensors_by_name: Mapping[str, Tensor],
        side: str,
        *,
        allow_missing: bool = False,
    ) -> list[Tensor]:
        """Return what tensors of one side become. `allow_missing`: a rule may lack some."""
        mapped_names = set[str]()
        new_tensors: list[Tensor] = []
        for links in self._rules(side, tensors_by_name, allow_missing=allow_missing):
            for link in links:
                link_names = link.names(side)
                new_tensors += self._tensors_of_link(
                    link, [tensors_by_name[name] for name in link_names], side
                )
                mapped_names.update(link_names)
        new_tensors += self._copied(side, tensors_by_name, new_tensors, mapped_names)
        remaining_tensors = [t for t in tensors if t.name not in mapped_names or t.dropped]
        return [*new_tensors, *self._tensors_without_link(side, remaining_tensors)]

    def _rules(
        self, side: str, tensors_by_name: Mapping[str, Tensor], *, allow_missing: bool
    ) -> Iterator[list[MappedGroup]]:
        """Yield the links of each rule, all of whose tensors are there; those optional may lack.

        allow_missing: of each rule there may be links all of whose tensors lack.
        """
        links_by_rule: dict[int, list[MappedGroup]] = {}
        for link in self.links:
            links_by_rule.setdefault(id(link.rule), []).append(link)
        for links in links_by_rule.values():
            rule = links[0].rule
            if allow_missing:
                links = [
                    link
                    for link in links
                    if any(name in tensors_by_name for name in link.names(side))
                ]
            names = [name for link in links for name in link.names(side)]
            missing = [name for name in names if name not in tensors_by_name]
            optional = rule.optional
            if not isinstance(optional, bool):
                is_left_out = all(any(p.search(n) for p in self._excluded) for n in missing)
                optional = self.sizes.holds(optional) or is_left_out
            if missing and not (optional and len(missing) == len(names)):
                self._check_model(tensors_by_name, side)
                raise self._missing_tensors_error(missing, len(names), rule)
            if names and not missing:
                yield links

    def _check_model(self, tensors_by_name: Mapping[str, Tensor], side: str) -> None:
        """Refuse a checkpoint that has few of the names. Raises RequestError."""
        expected_names = self._names[side]
        present_count = sum(name in tensors_by_name for name in expected_names)
        if 4 * present_count < len(expected_names):
            raise RequestError(
                f"of the {len(expected_names):,} names of {self.table.label} the checkpoint has "
                f"{present_count:,}, but {summarize_names(tensors_by_name, 2)}",
                *self._missing_prefix(tensors_by_name),
                "choose another map (`rankxform maps`)",
            )

    def _missing_tensors_error(
        self, missing: Sequence[str], count: int, rule: MapRule
    ) -> CheckpointError:
        names = [name for name in rule.blocks if name in self.table.blocks]
        stops = [self.table.blocks[name].range.stop for name in names]
        stops += [variable_range.stop for variable_range in rule.ranges]
        sizes = f" ({self.sizes.stated(stops)})" if stops else ""
        kind = f", one of {len(missing)} of {count} of its kind" if count > 1 else ""
        pattern = re.escape(missing[0].rpartition(".")[2])
        leave = (f"--exclude {quote(pattern + '$')} if the model has none",)
        return CheckpointError(
            f"the checkpoint lacks {missing[0]!r}{kind}",
            "--config FILE of this model, if that is another's",
            *(leave if not isinstance(rule.optional, bool) else ()),
            details=f"{self.table.label} needs it by {self.sizes.label}{sizes}",
        )

    def _tensors_of_link(
        self, link: MappedGroup, tensors: Sequence[Tensor], side: str
    ) -> list[Tensor]:
        """Return what the tensors of a link become. Raises CheckpointError for wrong shapes."""
        rule = link.rule
        to_parts = side == rule.side
        expected_shapes = (link.assembly.shape,) if to_parts else link.shapes
        for tensor, shape in zip(tensors, expected_shapes):
            free = 1 if self._free_rows and rule.vocabulary else 0
            if (len(tensor.shape), tensor.shape[free:]) != (len(shape), shape[free:]):
                expressions = [n for part_shape in rule.parts.values() for n in part_shape]
                rows, words = (*tensor.shape, 0)[0], (*shape, 0)[0]
                is_resized = rule.vocabulary and tensor.shape[1:] == shape[1:]
                is_resized = is_resized and (rows > words or is_padding(rows, words))
                raise CheckpointError(
                    f"{tensor.name!r} has shape {list(tensor.shape)}; {self.sizes.label} "
                    f"({self.sizes.stated(expressions)}) makes it {list(shape)}",
                    *((f"--vocab {words}",) if is_resized else ()),
                    "--config FILE of this model, if that is another's",
                    details="" if rows >= words or is_resized else "perhaps it is one rank's slice",
                )
        types = {f"{t.dtype} (stored as {t.sources[0].src_dtype})": t.name for t in tensors}
        if len(types) > 1:
            (a, first), (b, second), *_ = types.items()
            raise CheckpointError(
                f"{first!r} is {a} and {second!r} is {b}, but they become one tensor, "
                f"{link.whole_name!r}"
            )
        if not rule.steps and len(link.parts) == 1:
            new = link.parts[0] if to_parts else link.whole_name
            return [self._marked(replace(tensors[0], name=new), rule)]
        if to_parts:
            (tensor,) = tensors
            assert tensor.assembly is None
            return self._split_group(link, tensor.dtype, tensor.sources)
        sources, assembly = self._joined_sources(link.assembly, tensors)
        joined = Tensor(link.whole_name, tensors[0].dtype, assembly.shape, sources, assembly)
        return [self._marked(joined, rule)]

    def _joined_sources(
        self, assembly: Assembly, tensors: Sequence[Tensor]
    ) -> tuple[tuple[SourceTensor, ...], Assembly]:
        """Return of what an assembly of tensors is made, of which some are boxes of others."""
        sources = tuple(source for tensor in tensors for source in tensor.sources)
        if all(tensor.assembly is None for tensor in tensors):
            return sources, assembly
        numbers = {source: number for number, source in enumerate(dict.fromkeys(sources))}
        assert all(len(tensor.made_of.pieces) == 1 for tensor in tensors)
        views = tuple(tensor.made_of.pieces[0] for tensor in tensors)
        key = id(assembly), views, tuple(numbers[source] for source in sources)
        if key not in self._of_views:  # one object for all layers that are alike
            self._of_views[key] = of_views(assembly, views, key[2])
        return tuple(numbers), self._of_views[key]

    def split_group(self, link: MappedGroup, dtype: str) -> list[Tensor]:
        """Return the parts of a link, made of its one tensor."""
        return self._split_group(
            link, dtype, (SourceTensor(link.whole_name, dtype, link.assembly.shape),)
        )

    def _split_group(
        self, link: MappedGroup, dtype: str, sources: tuple[SourceTensor, ...]
    ) -> list[Tensor]:
        key = id(link.assembly)
        if key not in self._inverses:
            self._inverses[key] = invert(link.assembly, link.shapes)
        return [
            self._marked(Tensor(name, dtype, assembly.shape, sources, assembly), link.rule)
            for name, assembly in zip(link.parts, self._inverses[key])
        ]

    def _marked(self, tensor: Tensor, rule: MapRule) -> Tensor:
        return replace(tensor, keeps_dtype=rule.keep_dtype, vocabulary=rule.vocabulary)

    def _copied(
        self,
        side: str,
        tensors_by_name: Mapping[str, Tensor],
        new_tensors: Sequence[Tensor],
        mapped_names: set[str],
    ) -> list[Tensor]:
        """Take what repeats another tensor, and make what is to be repeated."""
        new_by_name = {tensor.name: tensor for tensor in new_tensors}
        repeated_tensors = []
        for copy in self.copies:
            if copy.side == side:
                if copy.name in tensors_by_name:
                    mapped_names.add(copy.name)
                    original_name = (
                        copy.tied_to
                        if copy.tied_to in tensors_by_name
                        else self._tied(copy.tied_to)
                    )
                    reason = f"the same as {original_name} ({self.table.label})"
                    left_out = any(pattern.search(copy.name) for pattern in self._excluded)
                    same_as = "" if left_out else original_name
                    repeated_tensors.append(
                        replace(tensors_by_name[copy.name], dropped=reason, same_as=same_as)
                    )
            elif copy.is_written:
                original = new_by_name.get(copy.tied_to) or new_by_name.get(
                    self._tied(copy.tied_to)
                )
                if original is not None:
                    repeated_tensors.append(replace(original, name=copy.name))
        return repeated_tensors

    def _tied(self, name: str) -> str:
        """Return what a tensor is a copy of that is not made itself."""
        return next((copy.tied_to for copy in self.copies if copy.name == name), name)

    def _tensors_without_link(self, side: str, remaining_tensors: Sequence[Tensor]) -> list[Tensor]:
        dropped_tensors, unknown_names = [], list[str]()
        for tensor in remaining_tensors:
            is_ignored = tensor.name in self._ignored[side] or is_extra_state(tensor.name)
            if not tensor.dropped and is_ignored:
                tensor = replace(tensor, dropped="left out: no weight of the model")
            if not tensor.dropped:
                if not any(pattern.search(tensor.name) for pattern in self._excluded):
                    unknown_names.append(tensor.name)
                tensor = replace(tensor, dropped="left out: no rule of the map takes it")
            dropped_tensors.append(tensor)
        if unknown_names:
            known_names = {t.name for t in remaining_tensors} - {*unknown_names}
            raise self._unknown(side, unknown_names, known_names.union(self._names[side]))
        return dropped_tensors

    def _unknown(
        self, side: str, names: Sequence[str], known_names: Collection[str]
    ) -> CheckpointError:
        """Say why no rule takes tensors: often a layer is beyond those of the configuration."""
        name, leave = names[0], option_to_exclude(names, known_names)
        if text := self._why_beyond(side, name):
            config = "--config FILE of this model, if that is another's"
            beyond_names = [other for other in names if self._why_beyond(side, other)]
            leave = option_to_exclude(beyond_names, known_names)
            return CheckpointError(text, config, f"{leave} leaves these out")
        weights = ("--weights-only, without counters",) if name in COUNTERS else ()
        if conditions := self._conditions_of(side, name):
            return CheckpointError(
                f"{self.sizes.label} says that the model has no {name!r} of its own, and it is "
                f"there ({self.sizes.stated(conditions)})",
                "--config FILE of this model, if that is another's",
                f"{leave} leaves it out, if it is a copy",
            )
        return CheckpointError(
            f"no rule of {self.table.label} takes {name!r}, of {_TITLES[side]} names",
            *weights,
            f"{leave} leaves such tensors out",
            "--map FILE.toml, a table of your own",
        )

    def _conditions_of(self, side: str, name: str) -> list[SizeExpression]:
        """Return on what it depends that no rule takes a tensor of a name without a number."""
        return [
            rule.condition
            for rule in self.table.rules
            if rule.condition
            and self._is_chosen(rule)
            and name in ([rule.whole] if side == rule.side else [*rule.parts])
            and not self.sizes.holds(rule.condition)
        ]

    def _why_beyond(self, side: str, name: str) -> str:
        """Say that the configuration has no such layer, or expert, as a tensor is of; else ""."""
        for rule in self.table.rules:
            of_layers = self._varies(rule)
            if not self._is_chosen(rule) or not (of_layers or self.sizes.holds(rule.condition)):
                continue
            names = [rule.whole] if side == rule.side else list(rule.parts)
            for block_name in rule.blocks or ("",):
                block = self.table.blocks.get(block_name)
                for text in names:
                    full = text.replace("{block}", block.names[side]) if block else text
                    pattern = "".join(
                        r"(\d+)" if position % 2 else re.escape(part)
                        for position, part in enumerate(_PLACE().split(full))
                    )
                    match = re.fullmatch(pattern, name)
                    if match is None:
                        continue
                    ranges = ([block.range] if block else []) + list(rule.ranges)
                    stops = [variable_range.stop for variable_range in ranges]
                    stops += [rule.condition] if rule.condition and of_layers else []
                    return (
                        f"{name!r} is beyond what {self.sizes.label} says "
                        f"({self.sizes.stated(stops)})"
                    )
        return ""
