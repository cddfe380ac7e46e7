"""All layouts of a job by pipeline stage; how two strategies differ.

A training job saves one file for each stage (or one for each rank, all of a stage the same).
`merge_records` merges the records of such files, or says which two contradict each other and
which stage is missing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import cached_property, lru_cache
from itertools import chain, pairwise
from math import prod

from rankxform.errors import RequestError, StrategyError
from rankxform.geometry.box import Shape
from rankxform.results import NORMAL, Result, Section, lines
from rankxform.values import NamedTuple, dataclass, pattern_on_use

from .layout import MOST_RANKS, Layout, same_boxes, whole_layout, without_optimizer
from .names import pattern_of
from .states import NEVER_SAVED, States, find_states

SHARD_PREFIX = "shard:"
_PART = pattern_on_use(r"([1-9][0-9]{0,17})(r?)")
DERIVED = "rankxform-derived"
"""The operator in a strategy file that no compiler wrote, which has no other."""

_PREFIXED = pattern_on_use(r"(\d{1,9})-(.*)", re.DOTALL)


@dataclass(frozen=True)
class StrategyRecord:
    """What one strategy file says, before stages are merged."""

    label: str  # where it came from, for messages
    current_stage: int  # the file's own field; 1 after merging, never the pipeline stage
    operator_stages: tuple[int, ...]  # stage of each operator strategy, in file order
    layouts: Mapping[str, Layout]  # by name as written, in file order
    json: bool = False  # whether the file is JSON, which lists nested maps in their expanded form
    derived: bool = False  # whether rankxform derived it, and no compiler wrote it

    @property
    def merged(self) -> bool:
        """Whether this is a merged file, whose names start with their stage and a dash."""
        return (
            self.current_stage == 1
            and bool(self.layouts)
            and all(_PREFIXED().fullmatch(name) for name in self.layouts)
        )

    @property
    def stage(self) -> int:
        """Pipeline stage of an un-merged file: that of its first operator strategy."""
        return self.operator_stages[0] if self.operator_stages else 0

    def by_stage(self) -> dict[int, dict[str, Layout]]:
        """Return the layouts of each stage the file speaks of, under their plain names."""
        if not self.merged:
            return {self.stage: dict(self.layouts)}
        stages: dict[int, dict[str, Layout]] = {}
        for written, layout in self.layouts.items():
            match = _PREFIXED().fullmatch(written)
            assert match
            stages.setdefault(int(match[1]), {})[match[2]] = layout
        return stages


@dataclass(frozen=True, repr=False)
class Strategy(Result):
    """The layouts of all parameters of a job, by pipeline stage."""

    stages: tuple[Mapping[str, Layout], ...]  # for each stage its layouts by parameter name
    stage_size: int  # ranks of a stage; global rank = stage * stage_size + stage-local rank
    label: str  # where it came from, for messages
    derived: bool = False  # whether rankxform derived it, and no compiler wrote it
    # Full shapes, in elements, as far as it states any; JSON states one axis for each device axis
    # of a nested map.
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict, compare=False)

    def in_short(self) -> str:
        return f"{self.label}: {self.extent}, {len(self.stages_of):,} parameters"

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        for stage, layouts in enumerate(self.stages):
            yield lines(f"stage {stage}", f"{len(layouts):,} parameters")

    @property
    def ranks(self) -> int:
        """Number of ranks of the job."""
        return self.stage_size * len(self.stages)

    @property
    def facts(self) -> dict[str, int | bool]:
        """Its numbers, for JSON."""
        return {
            "stages": len(self.stages),
            "stage_size": self.stage_size,
            "ranks": self.ranks,
            "parameters": len(self.stages_of),
            "derived": self.derived,
        }

    @property
    def extent(self) -> str:
        """Stages and ranks in words.

        >>> Strategy(({}, {}), 4, "a").extent, Strategy(({},), 1, "b").extent
        ('2 stages of 4 ranks', '1 rank')
        """
        ranks = f"{self.stage_size:,} rank" + ("s" if self.stage_size > 1 else "")
        return f"{len(self.stages)} stages of {ranks}" if len(self.stages) > 1 else ranks

    def stage_of(self, rank: int) -> int:
        """Return the pipeline stage of global `rank`."""
        return rank // self.stage_size

    def ranks_in(self, stage: int) -> range:
        """Return the global ranks of `stage`."""
        return range(stage * self.stage_size, (stage + 1) * self.stage_size)

    @cached_property
    def stages_of(self) -> Mapping[str, tuple[int, ...]]:
        """For each listed parameter the stages that list it, ascending."""
        stages_of: dict[str, tuple[int, ...]] = {}
        for stage, layouts in enumerate(self.stages):
            for name in layouts:
                stages_of[name] = (*stages_of.get(name, ()), stage)
        return stages_of

    @cached_property
    def states(self) -> States:
        """Which of the listed parameters are optimizer states, by their names alone."""
        return _states_of(tuple(self.stages_of))

    def __contains__(self, name: str) -> bool:
        return name in self.stages_of

    def layout(self, name: str, stage: int, ndim: int) -> Layout:
        """Return the layout of a listed parameter in `stage`; `ndim` is its number of axes."""
        return self.stages[stage][name]


@dataclass(frozen=True)
class WholeStrategy(Strategy):
    """The strategy "none": one rank holds every parameter, whole."""

    stages: tuple[Mapping[str, Layout], ...] = field(default=({},))
    stage_size: int = 1
    label: str = "none"
    derived: bool = False

    def __contains__(self, name: str) -> bool:
        return True

    def layout(self, name: str, stage: int, ndim: int) -> Layout:
        return whole_layout(ndim)


class Part(NamedTuple):
    """A part of a tensor's first axis: so many rows in the whole."""

    rows: int
    is_whole: bool = False  # every rank has all of them


class PatternRule(NamedTuple):
    """How the parameters are sharded whose name matches an expression."""

    pattern: re.Pattern[str]
    axis: int
    parts: tuple[Part, ...] = ()  # of rows that each rank holds one after another


@dataclass(frozen=True)
class PatternStrategy(Strategy):
    """A strategy given as text: ``shard:REGEX=AXIS,REGEX=AXIS@RANKS``.

    Parameters whose name matches an expression are sharded into equal slices on that axis, one for
    each rank in order; the first expression that matches is used. All others are in no strategy.
    This describes jobs that users shard by hand (layerwise_parallel). An optimizer state is sharded
    if its parameter is and has the same shape, or if an expression matches the state and not its
    parameter.
    """

    patterns: tuple[PatternRule, ...] = ()

    @classmethod
    def parse(cls, text: str) -> PatternStrategy:
        """Read the words. Raises StrategyError.

        >>> PatternStrategy.parse("shard:weight=0@4").ranks
        4
        """
        rules, mark, ranks = text[len(SHARD_PREFIX) :].rpartition("@")
        patterns = []
        for rule in rules.split(","):
            name, equals, number = rule.rpartition("=")
            axis, colon, parts_text = number.partition(":")
            count = int(ranks) if ranks.isdecimal() and len(ranks) < 8 else 0
            if not mark or not 1 <= count <= MOST_RANKS or not name or not equals:
                raise StrategyError(
                    "expected shard:REGEX=AXIS,REGEX=AXIS@RANKS, such as shard:q_proj=0,o_proj=1@2",
                    where=f"{text!r}",
                )
            parts = [_PART().fullmatch(part) for part in parts_text.split("/")] if colon else []
            if not all(parts) or (parts and axis != "0"):
                raise StrategyError(
                    f"{rule!r}: expected rows of parts of axis 0, such as qkv_proj=0:32/16/16",
                    where=f"{text!r}",
                    details="16r are rows that every rank has whole",
                )
            try:
                rows = tuple(Part(int(part[1]), bool(part[2])) for part in parts if part)
                patterns.append(PatternRule(re.compile(name), int(axis), rows))
            except (re.error, ValueError, OverflowError, RecursionError) as error:
                again = "@RANKS stands once, at the end of all" if "@" in axis else ""
                raise StrategyError(
                    f"{rule!r}: {error}", where=f"{text!r}", details=again
                ) from error
        return cls(({},), int(ranks), text, patterns=tuple(patterns))

    def over(self, shapes: Mapping[str, tuple[int, ...]], *, states: bool) -> Strategy:
        """Return the strategy with the layouts of the parameters that have these names.

        Without `states`, optimizer states that follow their parameter are not listed. With `states`
        they are; one that differs from its parameter in shape is whole on every rank.
        """
        layouts = {}
        for name, rule, is_of_parameter, base in self._matches(shapes):
            if is_of_parameter and not states:
                continue
            if is_of_parameter and shapes[base] != shapes[name]:
                layouts[name] = Layout((self.stage_size,), ((),) * len(shapes[name]))
            else:
                layouts[name] = self._sharded(name, rule.axis, len(shapes[name]))
        return Strategy((layouts,), self.stage_size, self.label)

    @property
    def has_parts(self) -> bool:
        """Whether parts of a tensor's rows are stated: files then hold boxes, not slices."""
        return any(rule.parts for rule in self.patterns)

    def rules_of(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, PatternRule]:
        """Return by name how parameters are sharded, and states of their shape."""
        rules = {}
        for name, rule, is_of_parameter, base in self._matches(shapes):
            if not (is_of_parameter and shapes[base] != shapes[name]):
                self._sharded(name, rule.axis, len(shapes[name]))  # raises if it has no such axis
                rules[name] = rule
        return rules

    def _matches(
        self, shapes: Mapping[str, tuple[int, ...]]
    ) -> Iterator[tuple[str, PatternRule, bool, str]]:
        """Yield what an expression matches: its name, the rule, whether that is its parameter's,
        and the name of its parameter. Raises StrategyError if one matches nothing."""
        states = find_states(shapes)
        for rule in self.patterns:
            if not any(map(rule.pattern.search, shapes)):
                raise StrategyError(
                    f"no parameter of the checkpoint has a name like {rule.pattern.pattern!r}",
                    where=f"{self.label!r}",
                )
        for name in shapes:
            base = states.base_name(name)
            for rule in self.patterns:
                generic = base != name and base in shapes and bool(rule.pattern.search(base))
                if generic or rule.pattern.search(name):
                    yield name, rule, generic, base
                    break

    def _sharded(self, name: str, axis: int, ndim: int) -> Layout:
        if not -ndim <= axis < ndim:
            raise StrategyError(
                f"{name!r} has {ndim} axes, and no axis {axis}", where=f"{self.label!r}"
            )
        axes: list[tuple[int, ...]] = [()] * ndim
        axes[axis] = (0,)
        return Layout((self.stage_size,), tuple(axes))


@lru_cache(maxsize=8)
def _states_of(names: tuple[str, ...]) -> States:
    """Return the states among names: a job's strategies, the source's and others, list the same."""
    return find_states(dict.fromkeys(names))


def merge_records(records: Sequence[StrategyRecord], label: str) -> Strategy:
    """Merge the records of a job's strategy files, found at `label`.

    Files of one stage must agree, every stage from 0 on must be there, and a merged file must
    agree with the parts beside it. Raises StrategyError, which names the files.
    """
    chosen: dict[int, tuple[dict[str, Layout], StrategyRecord]] = {}
    for record in sorted(records, key=lambda r: (r.json, not r.merged)):
        if not record.layouts:
            raise StrategyError(
                "lists no parameter layout", "save the strategy again", where=record.label
            )
        for stage, layouts in record.by_stage().items():
            if stage in chosen:
                _must_agree(stage, *chosen[stage], layouts, record)
            else:
                chosen[stage] = layouts, record
    if min(chosen) < 0 or max(chosen) != len(chosen) - 1:
        missing = [s for s in range(len(chosen)) if s not in chosen]
        have = ", ".join(f"stage {s} in {chosen[s][1].label}" for s in sorted(chosen))
        raise StrategyError(
            f"no strategy of pipeline {stages_in_words(missing)} (found {have})",
            "put the file of every stage into one folder and name the folder",
            where=label,
        )
    stages = tuple(chosen[s][0] for s in range(len(chosen)))
    _check_one_job(stages, [chosen[s][1].label for s in range(len(chosen))])
    derived = any(record.derived for record in records)
    shapes = {
        name: _join_axes(layout.expanded_shape, chosen[stage][0][name])
        for record in records
        for stage, layouts in record.by_stage().items()
        for name, layout in layouts.items()
        if layout.expanded_shape and prod(layout.expanded_shape) and not layout.split_rows
    }
    return Strategy(stages, _stage_size(stages, label), label, derived, shapes)


def _check_one_job(stages: Sequence[Mapping[str, Layout]], labels: Sequence[str]) -> None:
    """Raise StrategyError where stages are of two jobs, one of which ran in the other's folder.

    All stages of a job have as many ranks, and no layer is in two of them; what has no number may
    be, such as tied embeddings. labels: of each stage the file that describes it.
    """
    ranks = [max(layout.ranks for layout in layouts.values()) for layouts in stages]
    other = next((stage for stage in range(1, len(stages)) if ranks[stage] != ranks[0]), 0)
    why, pair = f"of {ranks[0]} and {ranks[other]} ranks", (0, other)
    owners: dict[str, int] = {}
    both = Counter[tuple[int, int]]()
    for stage, layouts in enumerate(stages):
        shared = (name for name in layouts if name in owners and pattern_of(name) != name)
        both.update((owners[name], stage) for name in shared)
        owners.update(dict.fromkeys(layouts, stage))
    for (a, b), _ in both.most_common(1) if not other else ():
        states = find_states(dict.fromkeys([*stages[a], *stages[b]]))
        weights_a, weights_b = (
            {base for name in stages[stage] if pattern_of(base := states.base_name(name)) != base}
            for stage in (a, b)
        )
        shared_count = len(weights_a & weights_b)
        if 4 * shared_count >= min(len(weights_a), len(weights_b)):
            pair, other, why = (a, b), b, f"which both list {shared_count} parameters"
    if other:
        files = " and ".join(dict.fromkeys(labels[stage] for stage in pair))
        raise StrategyError(
            f"pipeline stages {pair[0]} and {pair[1]} are of two jobs, {why}",
            "name a folder with the files of one job",
            "save the strategy again",
            where=files,
        )


def _join_axes(expanded: tuple[int, ...], layout: Layout) -> tuple[int, ...]:
    """Return a shape without the axes that JSON adds for a nested map, if the layout has that.

    >>> _join_axes((2, 4, 8), Layout((2, 4), ((1, 0), ())))
    (8, 8)
    """
    sizes = layout.device_matrix[::-1]
    counts = [max(1, sum(sizes[axis] > 1 for axis in axes)) for axes in layout.tensor_map]
    if sum(counts) != len(expanded):
        return expanded
    ends = [sum(counts[:axis]) for axis in range(len(counts) + 1)]
    return tuple(prod(expanded[a:b]) for a, b in pairwise(ends))


def _must_agree(
    stage: int,
    layouts: dict[str, Layout],
    record: StrategyRecord,
    others: dict[str, Layout],
    other: StrategyRecord,
) -> None:
    if set(layouts) != set(others):
        name = sorted(set(layouts) ^ set(others))[0]
        why = f"only one of them lists {name!r}"
    else:
        expanded = record.json != other.json
        differing = (
            n for n in layouts if _facts(layouts[n], expanded) != _facts(others[n], expanded)
        )
        name = next(differing, "")
        if not name:
            return
        why = f"they differ at {name!r}"
    raise StrategyError(
        f"{record.label} and {other.label} both describe pipeline stage {stage}, and {why}",
        "name the file that is meant, or a folder with the files of one job alone",
    )


def _facts(layout: Layout, expanded: bool) -> object:
    """What must be equal in two descriptions of one layout.

    JSON expands nested maps, so `expanded` compares the device axes in order, without those of one
    rank, which the JSON form leaves out.
    """
    common = (layout.opt_step, layout.opt_size, layout.field, layout.split_rows)
    if not expanded:
        return layout.device_matrix, layout.tensor_map, common
    sizes = layout.device_matrix[::-1]
    flat = [a for axes in layout.tensor_map for a in ([a for a in axes if sizes[a] > 1] or [-1])]
    return layout.device_matrix, flat, common


def _stage_size(stages: Iterable[Mapping[str, Layout]], label: str) -> int:
    size = max(layout.ranks for layouts in stages for layout in layouts.values())
    for layouts in stages:
        for name, layout in layouts.items():
            if size % layout.ranks:
                raise StrategyError(
                    f"{name!r} is laid out on {layout.ranks} ranks, another parameter on {size}; "
                    "one must divide the other",
                    where=label,
                )
    return size


def stages_in_words(numbers: Sequence[int]) -> str:
    """Return the numbers of pipeline stages, for messages."""
    return ("stage " if len(numbers) == 1 else "stages ") + ", ".join(map(str, numbers))


@dataclass(frozen=True)
class StrategyDifference:
    """Parameters of which two strategies differ alike: why, in words, and their names."""

    why: str
    names: tuple[str, ...]


def strategy_differences(a: Strategy, b: Strategy) -> list[StrategyDifference]:
    """Return the parameters of which two strategies give a rank different boxes, or one lists none.

    Two layouts are equal if they give every rank the same box, however they are written.
    Accumulated gradients, which no checkpoint holds, are left out.
    """
    names_by_reason: dict[str, list[str]] = {}
    if (a.stage_size, len(a.stages)) != (b.stage_size, len(b.stages)):
        names_by_reason[f"the first is of {a.extent}, the second of {b.extent}"] = []
    if max(len(a.stages), len(b.stages)) > 1 and len(a.stages) != len(b.stages):
        first, second = (
            ", ".join(
                f"{sum(strategy.states.of(name) is None for name in layouts):,}"
                for layouts in strategy.stages
            )
            for strategy in (a, b)
        )
        names_by_reason[f"stages hold {first} parameters, in the second {second}"] = []
    for name in sorted({*a.stages_of, *b.stages_of}):
        if NEVER_SAVED in (a.states.kind(name), b.states.kind(name)):
            continue
        reason = _difference(a, b, name)
        if reason:
            names_by_reason.setdefault(reason, []).append(name)
    return [StrategyDifference(reason, tuple(names)) for reason, names in names_by_reason.items()]


def first_differing_name(
    a: Strategy, b: Strategy, names: Iterable[str], shapes: Mapping[str, Shape]
) -> str | None:
    """Return the first of `names` that the two strategies shard differently. None: there is none.

    Both list all of `names`. `shapes`: full shapes, by which the expanded axes of the JSON strategy
    `b` are folded. Without its shape a parameter is compared only if both layouts have as many
    axes.
    """
    same_stages = len(a.stages) == len(b.stages)
    for name in names:
        stage_a, stage_b = a.stages_of[name][0], b.stages_of[name][0]
        layout_a, layout_b = a.stages[stage_a][name], b.stages[stage_b][name]
        if name in shapes:
            try:
                layout_b = layout_b.fold(shapes[name], slices=False)
            except RequestError:
                return name
        elif len(layout_b.tensor_map) != len(layout_a.tensor_map):
            continue
        if (same_stages and stage_a != stage_b) or not same_boxes(layout_a, layout_b):
            return name
    return None


def _difference(a: Strategy, b: Strategy, name: str) -> str | None:
    if name not in a or name not in b:
        return f"only the {'first' if name in a else 'second'} lists it"
    stages_a, stages_b = a.stages_of[name], b.stages_of[name]
    if len(a.stages) == len(b.stages) and stages_a != stages_b:
        return f"on {stages_in_words(stages_a)}, in the second on {stages_in_words(stages_b)}"
    layout_a, layout_b = a.stages[stages_a[0]][name], b.stages[stages_b[0]][name]
    if same_boxes(_as_listed_by(layout_b, layout_a), _as_listed_by(layout_a, layout_b)):
        return None
    if layout_a.ranks == layout_b.ranks and layout_a.counts == layout_b.counts:
        return f"{describe_layout(layout_a)}; in the second other ranks hold these slices"
    return f"{describe_layout(layout_a)}; in the second {describe_layout(layout_b)}"


def _as_listed_by(peer: Layout, layout: Layout) -> Layout:
    """Return a layout with one axis for each of a nested map, if that is how its peer was read."""
    if peer.expanded_shape is None:
        return layout
    expanded = [tuple((axis,) for axis in axes) or ((),) for axes in layout.tensor_map]
    return replace(layout, tensor_map=tuple(chain.from_iterable(expanded)))


def describe_layout(layout: Layout) -> str:
    """Return in words how a layout shards a parameter.

    >>> describe_layout(Layout((2, 4), ((0,), ()), 4, -1))
    'axis 0 into 8 (4 x 2 by the optimizer), 1 copy'
    >>> describe_layout(Layout((8,), ((),)))
    'whole, 8 copies'
    """
    parts = []
    plain = without_optimizer(layout)
    for axis, (count, plain_count) in enumerate(zip(layout.counts, plain.counts)):
        if count > 1:
            by_optimizer = ""
            if count != plain_count:
                by_optimizer = " by the optimizer"
            if count != plain_count > 1:
                by_optimizer = f" ({plain_count} x {count // plain_count} by the optimizer)"
            parts.append(f"axis {axis} into {count}{by_optimizer}")
    copies = layout.free_ranks // layout.opt_shards
    copies_text = f"{copies} cop" + ("y" if copies == 1 else "ies")
    return f"{' and '.join(parts) or 'whole'}, {copies_text}"
