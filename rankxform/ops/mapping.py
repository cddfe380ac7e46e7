"""``--map``: another naming of the same model, with tensors joined, taken apart and transposed.

A table (`rankxform.formats.map_toml`) and the sizes in config.json say which tensors either naming
has, with their shapes; all of them are compared with the checkpoint's before anything is planned.
"""

# A table says only how the one tensor of a rule is made of its parts: the other direction inverts
# the pieces. Names are worked out from the sizes, not matched by patterns, so that what is
# missing or too much is known by name.

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from shlex import quote

from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.formats.map_toml import (
    HUGGINGFACE,
    MINDFORMERS,
    OTHER,
    SIDES,
    Copied,
    Range,
    Rule,
    expression,
)
from rankxform.geometry.box import Shape
from rankxform.geometry.pieces import (
    Assembly,
    concatenate,
    concatenate_by_group,
    interleave_rows,
    invert,
    pile,
)
from rankxform.layout.names import summarize_names
from rankxform.layout.states import COUNTERS, State
from rankxform.values import dataclass

from .base import Composition, SourceTensor, Tensor
from .sizes import Sizes

_PLACE = re.compile(r"\{([^{}]+)\}")
_MOST = 1_000_000
"""Values of a variable."""

_JOINING = ("concat", "interleave", "groups")
_TITLES = {MINDFORMERS: "MindFormers'", HUGGINGFACE: "Hugging Face's"}


@dataclass(frozen=True)
class Link:
    """Tensors that are each other: one on `rule.side`, made of parts on the other.

    assembly: the one, made of the parts, which are its sources in order.
    """

    rule: Rule
    whole: str
    parts: tuple[str, ...]
    shapes: tuple[Shape, ...]
    assembly: Assembly

    def names(self, side: str) -> tuple[str, ...]:
        """Return what one side calls them."""
        return (self.whole,) if side == self.rule.side else self.parts


class NameMap(Composition):
    """A table with the sizes of one model, ready to be applied (`rankxform.ops.base`)."""

    renames = True

    def __init__(
        self,
        sizes: Sizes,
        choices: Mapping[str, str],
        excluded: Sequence[re.Pattern[str]] = (),
        *,
        free_rows: bool = False,
    ) -> None:
        """`choices`: by name, if not the default. excluded: names that need no rule. free_rows: the
        vocabulary may have any number of rows."""
        self.sizes, self.table = sizes, sizes.table
        self._excluded, self._free_rows = excluded, free_rows
        self.choices = {}
        for name, known in self.table.choices.items():
            chosen = choices.get(name) or next(iter(known))
            if chosen not in known:
                raise UsageError(f"{name} {chosen!r}: {self.table.label} has {', '.join(known)}")
            self.choices[name] = chosen
        self.variants = dict[str, str]()
        for name, ways in self.table.variants.items():
            way = choices.get(name) or ways[0]
            if way not in ways:
                there = ", ".join(ways)
                raise UsageError(f"--variant {name}={way}: {self.table.label} has {there}")
            self.variants[name] = way
        self._assemblies: dict[tuple[int, tuple[Shape, ...]], Assembly] = {}
        self._inverses: dict[int, list[Assembly]] = {}
        self._absent: list[str] = []
        self.links = [link for rule in self.table.rules for link in self._links(rule)]
        self.copies = [copy for one in self.table.copies for copy in self._copies(one)]
        self._ignored = {side: {*self._no_weights(side)} for side in SIDES}
        self._names = self._by_side()

    # -- what the table says ----------------------------------------------------------------------

    def _is_chosen(self, rule: Rule) -> bool:
        return all(self.variants[name] == way for name, way in rule.where.items())

    def _varies(self, rule: Rule) -> bool:
        """Whether a rule may hold in some layers and not in others."""
        variables = {block.range.variable for block in self.table.blocks_of(rule)}
        return rule.condition is not None and bool(variables.intersection(rule.condition.names))

    def _layers(self, rule: Rule, within: Range | None) -> Iterator[dict[str, int]]:
        """Yield values of a block's variable for which a rule holds."""
        for variables in self._values([within] if within else []):
            if self.sizes.holds(rule.condition, variables):
                yield variables

    def _no_weights(self, side: str) -> Iterator[str]:
        """Yield what one side calls tensors that are no weights."""
        for one in self.table.ignored:
            within = self.table.blocks_of(one) if one.side == side else []
            for block in within:
                for variables in self._values([block.range]):
                    yield self._name(one.name, block.names[side], variables)
            if one.side == side and not one.blocks:
                yield one.name

    def _links(self, rule: Rule) -> Iterator[Link]:
        if not self._is_chosen(rule):
            return
        for name in rule.blocks:
            if name not in self.table.blocks:
                known = ", ".join(self.table.blocks)
                raise UsageError(f"block {name!r} is none of {known}", where=self.table.label)
        blocks: list[tuple[Mapping[str, str], Range | None]] = [({}, None)]
        if rule.blocks:
            blocks = [(one.names, one.range) for one in self.table.blocks_of(rule)]
        other = OTHER[rule.side]
        for prefixes, within in blocks:
            for variables in self._layers(rule, within):
                whole = self._name(rule.whole, prefixes.get(rule.side), variables)
                parts, shapes = [], []
                for inner in self._values(rule.ranges):
                    every = {**variables, **inner}
                    for name, shape in rule.parts.items():
                        parts.append(self._name(name, prefixes.get(other), every))
                        shapes.append(tuple(self.sizes.number(n, every) for n in shape))
                if parts:
                    key = id(rule), tuple(shapes)
                    if key not in self._assemblies:  # one object for all layers that are alike
                        self._assemblies[key] = self._assembled(rule, shapes)
                    yield Link(rule, whole, tuple(parts), key[1], self._assemblies[key])

    def _values(self, ranges: Iterable[Range]) -> Iterator[dict[str, int]]:
        known: list[dict[str, int]] = [{}]
        for one in ranges:
            numbers = range(self.sizes.number(one.start, {}), self.sizes.number(one.stop, {}))
            count = max(0, numbers.stop - numbers.start)  # a range has no length beyond 2**63
            if count * len(known) > _MOST:
                stated = self.sizes.stated([one.start, one.stop])
                raise UsageError(
                    f"{stated}: that would be {count:,} values of {one.variable!r}; no model "
                    "has so many",
                    where=self.sizes.label,
                )
            known = [{**some, one.variable: n} for some in known for n in numbers]
        yield from known

    def _name(self, text: str, prefix: str | None, variables: Mapping[str, int]) -> str:
        if prefix is not None:
            text = text.replace("{block}", prefix)

        def number(match: re.Match[str]) -> str:
            return str(self.sizes.number(expression(match[1], self.table.label), variables))

        return _PLACE.sub(number, text)

    def _assembled(self, rule: Rule, shapes: Sequence[Shape]) -> Assembly:
        """Return the one tensor, made of its parts as the rule's steps say."""
        parts = [Assembly.of(shape, number) for number, shape in enumerate(shapes)]
        each = len(rule.parts)
        if len(rule.ranges) > 1:
            raise UsageError(
                f"{rule.whole!r} has two variables; one is known", where=self.table.label
            )
        for name, argument in rule.steps:
            if name in self.choices:
                chosen = self.table.choices[name][self.choices[name]]
                name, _, rest = chosen.partition("(")
                argument = rest.rstrip(")")
            if name == "transpose" and any(len(one.shape) < 2 for one in parts):
                raise UsageError(
                    f"{rule.whole!r} has no two axes to exchange", where=self.table.label
                )
            if name == "transpose":
                parts = [one.transposed() for one in parts]
                continue
            if name in ("stack", "pile"):
                if argument not in {one.variable for one in rule.ranges}:
                    raise UsageError(
                        f"{rule.whole!r}: {name}({argument}) is about no variable of `for`",
                        where=self.table.label,
                    )
                one = pile(parts) if name == "pile" else self._joined(rule, "concat", "", parts)
                parts = [one]
                continue
            if name not in _JOINING:
                raise UsageError(
                    f"{rule.whole!r} has a step {name!r}; expected "
                    f"{', '.join((*_JOINING, 'transpose', 'stack', 'pile', *self.table.choices))}",
                    where=self.table.label,
                )
            groups = [parts[at : at + each] for at in range(0, len(parts), each)]
            parts, each = [self._joined(rule, name, argument, some) for some in groups], 1
        if len(parts) != 1:
            raise UsageError(
                f"the steps of {rule.whole!r} leave {len(parts)} tensors, not one",
                where=self.table.label,
            )
        return parts[0]

    def _joined(self, rule: Rule, name: str, argument: str, parts: Sequence[Assembly]) -> Assembly:
        if not all(one.shape for one in parts) or len({one.shape[1:] for one in parts}) > 1:
            shapes = ", ".join(str(list(one.shape)) for one in parts)
            raise UsageError(
                f"parts of {rule.whole!r} have shapes {shapes}; joined are tensors that "
                "differ in the first axis only",
                where=self.sizes.label,
            )
        rows = [one.shape[0] for one in parts]
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
        groups = self.sizes.number(expression(argument, self.table.label), {})
        if not groups or any(n % groups for n in rows):
            stated = self.sizes.stated([expression(argument, self.table.label)])
            raise UsageError(
                f"{stated}: parts of {rule.whole!r} with {rows} rows do not make {groups} groups",
                where=self.sizes.label,
            )
        return concatenate_by_group(parts, groups)

    def _copies(self, one: Copied) -> Iterator[Copied]:
        if self.sizes.holds(one.condition):
            for variables in self._values([one.range] if one.range else []):
                name, of = (self._name(text, None, variables) for text in (one.name, one.of))
                yield replace(one, name=name, of=of)

    def _by_side(self) -> dict[str, dict[str, Link]]:
        names: dict[str, dict[str, Link]] = {side: {} for side in SIDES}
        for link in self.links:
            for side in SIDES:
                for name in link.names(side):
                    if name in names[side]:
                        raise UsageError(f"two rules speak of {name!r}", where=self.table.label)
                    names[side][name] = link
        return names

    def told(self, axes: Mapping[str, int]) -> dict[str, str]:
        """Return by variant which way MindFormers' names tell, and how many axes the tensors have.

        axes: of each tensor, by name. What is told by none, or by several alike, is not in it.
        """
        found = dict[str, str]()
        for variant, ways in self.table.variants.items():
            counts = dict.fromkeys(ways, 0)
            for rule in self.table.rules:
                way = rule.where.get(variant)
                if way is not None and rule.side == MINDFORMERS:
                    shape = next(iter(rule.parts.values()))
                    count = len(shape) + any(name == "pile" for name, _ in rule.steps)
                    counts[way] += sum(axes.get(name) == count for name in self._wholes(rule))
            best = max(ways, key=lambda way: counts[way])
            if counts[best] and [*counts.values()].count(counts[best]) == 1:
                found[variant] = best
        return found

    def _wholes(self, rule: Rule) -> Iterator[str]:
        """Yield the names of a rule's one tensor, in every layer."""
        for block in self.table.blocks_of(rule):
            for variables in self._layers(rule, block.range):
                yield self._name(rule.whole, block.names[rule.side], variables)

    # -- what it makes of a checkpoint ------------------------------------------------------------

    def side_of(self, names: Iterable[str]) -> str:
        """Return whose names a checkpoint has. Raises RequestError if it has neither's."""
        every = set(names)
        counts = {}
        for side in SIDES:
            counts[side] = len(every & (set(self._names[side]) - set(self._names[OTHER[side]])))
        best = max(SIDES, key=lambda side: counts[side])
        if not counts[best]:
            raise RequestError(
                f"{self.table.label} is another model's: none of its names is in the checkpoint, "
                f"which has {summarize_names(every, 3)}"
            )
        return best

    def knows(self, names: Iterable[str]) -> bool:
        """Tell whether at least half of some tensors have names of one side."""
        every = {*names}
        return any(2 * len(every & {*self._names[side]}) >= len(every) for side in SIDES)

    def _lacking(self, names: Iterable[str]) -> list[str]:
        """Return the entries of the configuration of whose blocks a checkpoint has no tensor."""
        if all(block.unless is None for block in self.table.blocks.values()):
            return []
        every = [*names]
        side = self.side_of(every)
        begins: dict[str, list[str]] = {}
        for block in self.table.blocks.values():
            if block.unless is not None:
                prefix = f"{block.names[side]}."
                some = [self._name(prefix, None, values) for values in self._values([block.range])]
                begins.setdefault(block.unless, []).extend(some)
        return [
            entry
            for entry, some in begins.items()
            if some and not any(name.startswith(tuple(some)) for name in every)
        ]

    def remarks(self, names: Iterable[str]) -> tuple[str, list[str]]:
        """Return what is to be known of how the table was applied, and doubts."""
        return "", [
            f"{self.sizes.label}: states {entry} {self.sizes.known.get(entry)}, and the checkpoint "
            "has none of these layers; the destination gets none"
            for entry in self._absent
        ]

    def compose(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        known = {one.name: one for one in tensors if not one.dropped}
        self._absent = self._lacking(known)
        if self._absent:
            sizes = self.sizes
            for entry in self._absent:
                sizes = sizes.without(entry)
            chosen = {**self.choices, **self.variants}
            reduced = NameMap(sizes, chosen, self._excluded, free_rows=self._free_rows)
            if reduced._lacking(known):
                raise UsageError(
                    f"unless {self._absent[0]!r}: a block is there even where that is 0; expected "
                    "an entry of the configuration that says so",
                    where=self.table.label,
                )
            return reduced.compose(tensors)
        states = [one for one in tensors if self._follows(one) and not one.dropped]
        if states:
            return self._with_states(tensors, states)
        return self._composed(tensors, known, self.side_of(known))

    def _follows(self, tensor: Tensor) -> bool:
        """Tell whether what is done to a tensor's parameter is done to it: to a state, and to a
        copy of which no rule speaks."""
        if tensor.state is not None:
            return True
        return tensor.related is not None and not any(
            tensor.name in self._names[side] for side in SIDES
        )

    def _with_states(self, tensors: Sequence[Tensor], states: Sequence[Tensor]) -> list[Tensor]:
        """Do to every state of the optimizer what is done to its parameter."""
        apart = {one.name for one in states} | COUNTERS
        rest = [one for one in tensors if one.name not in apart or one.dropped]
        counters = [one for one in tensors if one.name in COUNTERS and not one.dropped]
        weights = {one.name: one for one in rest if not one.dropped}
        side = self.side_of(weights)
        found = [*self._composed(rest, weights, side), *counters]
        families: dict[tuple[str, str, str], list[Tensor]] = {}
        for one in states:
            assert one.related is not None
            key = one.related.kind, one.related.before, one.related.after
            families.setdefault(key, []).append(one)
        for (kind, before, after), some in families.items():
            own = {}
            for one in some:
                assert one.related is not None
                parameter, is_copy = one.related.parameter, one.related.is_copy
                own[parameter] = replace(one, name=parameter, keeps_dtype=not is_copy)
            for one in self._composed([*own.values()], own, side, some=True):
                related = State(kind, one.name, before, after)
                found.append(
                    replace(
                        one, name=related.named(one.name), keeps_dtype=not related.is_copy,
                        related=related,
                        is_weight=related.is_copy,
                    )
                )  # fmt: skip
        return found

    def _composed(
        self,
        tensors: Sequence[Tensor],
        known: Mapping[str, Tensor],
        side: str,
        *,
        some: bool = False,
    ) -> list[Tensor]:
        """Return what tensors of one side become; some: those of rules that are not there may
        lack."""
        taken = set[str]()
        found: list[Tensor] = []
        for links in self._rules(side, known, some=some):
            for link in links:
                of = link.names(side)
                found += self._made(link, [known[name] for name in of], side)
                taken.update(of)
        found += self._copied(side, known, found, taken)
        rest = [one for one in tensors if one.name not in taken or one.dropped]
        return [*found, *self._left(side, rest)]

    def _rules(self, side: str, known: Mapping[str, Tensor], *, some: bool) -> Iterator[list[Link]]:
        """Yield the links of each rule, all of whose tensors are there; those optional may lack.

        some: of each rule there may be links all of whose tensors lack.
        """
        alike: dict[int, list[Link]] = {}
        for link in self.links:
            alike.setdefault(id(link.rule), []).append(link)
        for links in alike.values():
            rule = links[0].rule
            if some:
                links = [one for one in links if any(name in known for name in one.names(side))]
            names = [name for link in links for name in link.names(side)]
            missing = [name for name in names if name not in known]
            optional = rule.optional
            if not isinstance(optional, bool):
                is_left_out = all(any(p.search(n) for p in self._excluded) for n in missing)
                optional = self.sizes.holds(optional) or is_left_out
            if missing and not (optional and len(missing) == len(names)):
                self._check_model(known, side)
                raise self._missing(missing, len(names), rule)
            if names and not missing:
                yield links

    def _check_model(self, known: Mapping[str, Tensor], side: str) -> None:
        """Refuse a checkpoint that has few of the names. Raises RequestError."""
        wanted = self._names[side]
        there = sum(name in known for name in wanted)
        if 4 * there < len(wanted):
            raise RequestError(
                f"of the {len(wanted):,} names of {self.table.label} the checkpoint has "
                f"{there:,}, but {summarize_names(known, 2)}",
                "choose another map (`rankxform maps`)",
            )

    def _missing(self, missing: Sequence[str], count: int, rule: Rule) -> CheckpointError:
        names = [name for name in rule.blocks if name in self.table.blocks]
        stops = [self.table.blocks[name].range.stop for name in names]
        stops += [one.stop for one in rule.ranges]
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

    def _made(self, link: Link, of: Sequence[Tensor], side: str) -> list[Tensor]:
        """Return what the tensors of a link become. Raises CheckpointError for wrong shapes."""
        rule = link.rule
        to_parts = side == rule.side
        wanted = (link.assembly.shape,) if to_parts else link.shapes
        for tensor, shape in zip(of, wanted):
            free = 1 if self._free_rows and rule.vocabulary else 0
            if (len(tensor.shape), tensor.shape[free:]) != (len(shape), shape[free:]):
                every = [n for one in rule.parts.values() for n in one]
                raise CheckpointError(
                    f"{tensor.name!r} has shape {list(tensor.shape)}; {self.sizes.label} "
                    f"({self.sizes.stated(every)}) makes it {list(shape)}",
                    *((f"--vocab {shape[0]}",) if rule.vocabulary else ()),
                    "--config FILE of this model, if that is another's",
                )
        types = {f"{t.dtype} (stored as {t.sources[0].src_dtype})": t.name for t in of}
        if len(types) > 1:
            (a, first), (b, second), *_ = types.items()
            raise CheckpointError(
                f"{first!r} is {a} and {second!r} is {b}, but they become one tensor, "
                f"{link.whole!r}"
            )
        if not rule.steps and len(link.parts) == 1:
            new = link.parts[0] if to_parts else link.whole
            return [self._marked(replace(of[0], name=new), rule)]
        sources = tuple(source for tensor in of for source in tensor.sources)
        assert all(one.assembly is None for one in of)
        if to_parts:
            return self._taken_apart(link, of[0].dtype, sources)
        one = Tensor(link.whole, of[0].dtype, link.assembly.shape, sources, link.assembly)
        return [self._marked(one, rule)]

    def taken_apart(self, link: Link, dtype: str) -> list[Tensor]:
        """Return the parts of a link, made of its one tensor."""
        return self._taken_apart(
            link, dtype, (SourceTensor(link.whole, dtype, link.assembly.shape),)
        )

    def _taken_apart(
        self, link: Link, dtype: str, sources: tuple[SourceTensor, ...]
    ) -> list[Tensor]:
        key = id(link.assembly)
        if key not in self._inverses:
            self._inverses[key] = invert(link.assembly, link.shapes)
        return [
            self._marked(Tensor(name, dtype, one.shape, sources, one), link.rule)
            for name, one in zip(link.parts, self._inverses[key])
        ]

    def _marked(self, tensor: Tensor, rule: Rule) -> Tensor:
        return replace(tensor, keeps_dtype=rule.keep_dtype, vocabulary=rule.vocabulary)

    def _copied(
        self,
        side: str,
        known: Mapping[str, Tensor],
        found: Sequence[Tensor],
        taken: set[str],
    ) -> list[Tensor]:
        """Take what repeats another tensor, and make what is to be repeated."""
        made = {one.name: one for one in found}
        more = []
        for copy in self.copies:
            if copy.side == side:
                if copy.name in known:
                    taken.add(copy.name)
                    other = copy.of if copy.of in known else self._tied(copy.of)
                    why = f"the same as {other} ({self.table.label})"
                    left_out = any(one.search(copy.name) for one in self._excluded)
                    same_as = "" if left_out else other
                    more.append(replace(known[copy.name], dropped=why, same_as=same_as))
            elif copy.made:
                of = made.get(copy.of) or made.get(self._tied(copy.of))
                if of is not None:
                    more.append(replace(of, name=copy.name))
        return more

    def _tied(self, name: str) -> str:
        """Return what a tensor is a copy of that is not made itself."""
        return next((copy.of for copy in self.copies if copy.name == name), name)

    def _left(self, side: str, rest: Sequence[Tensor]) -> list[Tensor]:
        found = []
        for one in rest:
            if not one.dropped and one.name in self._ignored[side]:
                one = replace(one, dropped="left out: no weight of the model")
            if not one.dropped:
                if not any(pattern.search(one.name) for pattern in self._excluded):
                    raise self._unknown(side, one.name)
                one = replace(one, dropped="left out: no rule of the map takes it")
            found.append(one)
        return found

    def _unknown(self, side: str, name: str) -> CheckpointError:
        """Say why no rule takes a tensor: often its layer is beyond those of the configuration."""
        leave = f"--exclude {quote(f'^{re.escape(name)}$')}"
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
                        r"(\d+)" if at % 2 else re.escape(part)
                        for at, part in enumerate(_PLACE.split(full))
                    )
                    match = re.fullmatch(pattern, name)
                    if match is None:
                        continue
                    ranges = ([block.range] if block else []) + list(rule.ranges)
                    stops = [one.stop for one in ranges]
                    stops += [rule.condition] if rule.condition and of_layers else []
                    return CheckpointError(
                        f"{name!r} is beyond what {self.sizes.label} says "
                        f"({self.sizes.stated(stops)})",
                        "--config FILE of this model, if that is another's",
                        f"{leave} to leave it out",
                    )
        weights = ("--weights-only, without counters",) if name in COUNTERS else ()
        return CheckpointError(
            f"no rule of {self.table.label} takes {name!r}, of {_TITLES[side]} names",
            *weights,
            f"{leave} to leave it out",
            "--map FILE.toml, a table of your own",
        )
