"""Samples of what files hold: which are looked at, and what they say of how tensors are sharded.

Files that hold one box of a tensor must agree, and files of different boxes differ. A few
kilobytes of every file are compared both ways. Which, is a fixed rule, the same for any number of
processes. Bytes that are all equal, such as a moment of zeros, prove nothing.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from itertools import islice
from typing import NamedTuple

from rankxform.errors import CheckpointError, RequestError
from rankxform.formats.base import Index, Schema
from rankxform.formats.dtype import content_bytes
from rankxform.geometry.box import Box
from rankxform.geometry.tiling import Cell
from rankxform.layout.names import format_ranges, pattern_of, summarize_names
from rankxform.values import dataclass

from .catalog import Catalog, Parameter
from .consistency import Evidence, Sample, Samples, is_small
from .table import effective_layout

_ALLOW_EQUAL = "say --allow-equal-slices if the slices really are equal"
_READS = 4096
"""Samples of all files together, where that is more than `_OF_FILE` of each."""
_OF_FILE, _MOST_OF_FILE = 4, 32
_OF_KIND = 4
"""Tensors of each kind of sharding, spread over the model."""
_MOST_KNOWN, _FEW_KNOWN, _ALL_KNOWN = 512, 1 << 11, 1 << 16
"""Tensors of a file by whose samples it is known again; of all files together, however small these
are, and however large."""
_BYTES_KNOWN = 2 << 20
"""For so many bytes of a file there may be one, so that looking takes little beside reading."""
_LEAST_SAMPLE = 64
_CELLS, _HOLDERS = 2, 2
"""Of tensors that not all of its files are looked at for: different boxes, and holders of each."""
_SHOWN = 3


class Looked(NamedTuple):
    """A tensor that is looked at: in which files, by the box that they hold.

    kind: tensors of one kind lie in the same files in the same way. weighty: each holder has the
    same for sure; a small tensor that no optimizer has states of may be a rank's own.
    """

    parameter: Parameter
    files: Mapping[Cell, tuple[int, ...]]
    kind: int
    weighty: bool

    @property
    def name(self) -> str:
        return self.parameter.name

    def samples(self, seen: Samples) -> Iterator[tuple[Cell, list[tuple[int, Sample]]]]:
        """Yield what was seen of each box, by file."""
        for cell, files in self.files.items():
            held = (
                (file, seen[file].get(self.parameter.entry(cell, file)))
                for file in files
                if file in seen
            )
            yield cell, [(file, one) for file, one in held if one is not None]


def to_look_at(
    chosen: Sequence[Parameter], catalog: Catalog, files: Iterable[int]
) -> tuple[Looked, ...]:
    """Return which tensors are looked at, and in which of `files`.

    Of every kind of sharding some, spread over the model. With many ranks only the first kinds are
    looked at in all files, and the others in two holders of two boxes each.
    """
    every = frozenset(files)
    if len(every) < 2:
        return ()
    most = _most_of(len(every))
    kinds = _kinds(chosen, catalog)
    of_file = Counter(file for some in kinds for file in some[0].holders)
    room, used = dict.fromkeys(every, most), Counter[int]()
    for file, count in of_file.items():
        if count > most:  # one sample is left for the kinds that not every file is asked about
            room[file] = most - 1
    owned = _may_be_own(chosen, catalog)
    found = []
    for number, parameter in _in_turn(kinds):
        held = {
            cell: kept
            for cell, some in parameter.sharding.files.items()
            if (kept := tuple(file for file in some if file in every))
        }
        asked = {file for some in held.values() for file in some}
        if any(used[file] >= room[file] for file in asked):
            held = _few(held, used, most, number)
            asked = {file for some in held.values() for file in some}
        if len(asked) > 1:
            used.update(asked)
            found.append(Looked(parameter, held, number, parameter.name not in owned))
    found += _tied(chosen, catalog, every, len(kinds), owned)
    return tuple(found)


def _tied(
    chosen: Sequence[Parameter],
    catalog: Catalog,
    every: Collection[int],
    kind: int,
    owned: Collection[str],
) -> Iterator[Looked]:
    """Yield tensors that files of several pipeline stages hold, such as a tied embedding.

    One stage's are read for all, so that the others' must be the same, where they lie alike.
    """
    strategy = catalog.strategy
    if (
        strategy is None
        or catalog.is_whole
        or catalog.stages == 1
        or catalog.description.lists_files
    ):
        return
    stages: dict[str, list[int]] = {}
    for stage, groups in enumerate(catalog.groups):
        for name in {name for group in groups for name in group.schema.names}:
            stages.setdefault(name, []).append(stage)
    for one in chosen:
        there = stages.get(one.name, ())
        large = content_bytes(one.src_dtype, one.shape) >= _LEAST_SAMPLE
        if len(there) < 2 or not one.declared or not large or not one.is_weight:
            continue
        own = strategy.stages_of[one.name][0]
        held: dict[Cell, list[int]] = {}
        for stage in there:
            listed = stage in strategy.stages_of[one.name]
            try:
                layout = effective_layout(
                    strategy, one.name, stage if listed else own, len(one.shape)
                ).fold(one.shape, slices=False)
                if layout.grid(one.shape) != one.grid:
                    continue
            except RequestError:  # shapes that it does not divide
                continue
            first = strategy.ranks_in(stage).start
            for group in catalog.groups[stage]:
                at = group.schema.position.get(one.name)
                for file, rank in zip(group.files, group.ranks) if at is not None else ():
                    cell = layout.cell(rank - first)
                    alike = one.grid.box(cell).shape == group.schema.shapes[at or 0]
                    if alike and file in every:
                        held.setdefault(cell, []).append(file)
        cells = {cell: tuple(sorted(some)) for cell, some in held.items()}
        yield Looked(one, cells, kind, weighty=one.name not in owned)


def _kinds(chosen: Sequence[Parameter], catalog: Catalog) -> list[list[Parameter]]:
    """Return the tensors that several files hold by how they lie in them, the most telling first.

    Weights apart from optimizer states.
    """
    found: dict[object, list[Parameter]] = {}
    for one in chosen:
        large = content_bytes(one.src_dtype, one.shape) >= _LEAST_SAMPLE
        if one.declared and large and len(one.holders) > 1 and not catalog.is_whole:
            key = id(one.sharding.files), one.state is not None
            found.setdefault(key, []).append(one)

    def telling(kind: list[Parameter]) -> tuple[bool, bool, bool]:
        files = kind[0].sharding.files
        replicated = any(len(some) > 1 for some in files.values())
        return kind[0].state is not None, not replicated, len(files) < 2

    return sorted(found.values(), key=telling)


def _in_turn(kinds: Sequence[Sequence[Parameter]]) -> Iterator[tuple[int, Parameter]]:
    """Yield one tensor of every kind, then another of every kind, and so on: first and last, and
    those between."""
    places = [_spread(len(kind)) for kind in kinds]
    for turn in range(_OF_KIND):
        for number, (kind, some) in enumerate(zip(kinds, places)):
            if turn < len(some):
                yield number, kind[some[turn]]


def _spread(count: int) -> list[int]:
    """Return up to `_OF_KIND` of `count` numbers, the first and the last before those between.

    >>> _spread(10), _spread(2)
    ([0, 9, 5, 2], [0, 1])
    """
    return list(dict.fromkeys((0, count - 1, count // 2, count // 4)))


def _few(
    held: Mapping[Cell, tuple[int, ...]], used: Counter[int], most: int, turn: int
) -> dict[Cell, tuple[int, ...]]:
    """Return a few holders of a few boxes, of those files of which not enough was looked at."""
    cells = list(held)
    first = turn * _CELLS % len(cells)
    found: dict[Cell, tuple[int, ...]] = {}
    for cell in (*cells[first:], *cells[:first]):
        free = tuple(file for file in held[cell] if used[file] < most)[:_HOLDERS]
        if free:
            found[cell] = free
        if len(found) == _CELLS:
            break
    return found


def _may_be_own(chosen: Sequence[Parameter], catalog: Catalog) -> set[str]:
    """Return the names of tensors of which each rank may have values of its own.

    Running statistics and counters of experts' load are small, and no optimizer has states of them.
    Where no states are there at all, a bias cannot be told from them.
    """
    with_states = {one.base_name for one in catalog.declared.values() if one.state is not None}
    return {
        one.name
        for one in chosen
        if one.base_name not in with_states
        and (len(one.shape) < 2 or (with_states and is_small(one)))
    }


def _most_of(files: int) -> int:
    """Return how many samples of each of so many files there are at most."""
    return min(_MOST_OF_FILE, max(_OF_FILE, _READS // max(1, files)))


def entries_of(looked: Iterable[Looked]) -> dict[int, list[str]]:
    """Return what is read: by file the entries that are looked at."""
    found: dict[int, dict[str, None]] = {}
    for one in looked:
        for cell, files in one.files.items():
            for file in files:
                found.setdefault(file, {})[one.parameter.entry(cell, file)] = None
    return {file: list(names) for file, names in found.items()}


def to_know_again(
    indexes: Mapping[int, Index], entries: Mapping[int, Sequence[str]]
) -> dict[int, list[str]]:
    """Return by file the entries that are looked at, and others, to know the file again by them.

    All, while there is room: whatever is done to a model may change few of its tensors. Else of
    every kind one.
    """
    count = max(1, len(indexes))
    least = max(_OF_FILE, min(_MOST_KNOWN, _FEW_KNOWN // count))
    each = min(_MOST_KNOWN, _ALL_KNOWN // count)
    kinds: dict[Schema, list[str]] = {}
    found = {}
    for file, index in indexes.items():
        schema, own = index.schema, entries.get(file, ())
        most = max(least, len(own), min(each, index.size // _BYTES_KNOWN))
        if len(schema.names) > most and schema not in kinds:
            kinds[schema] = _one_of_each(schema)
        others = kinds[schema] if len(schema.names) > most else schema.names
        found[file] = [*islice(dict.fromkeys([*own, *others]), most)]
    return found


def _one_of_each(schema: Schema) -> list[str]:
    """Return a tensor of every kind that a file holds."""
    kinds: dict[str, list[str]] = {}
    for name, nbytes in zip(schema.names, map(content_bytes, schema.dtypes, schema.shapes)):
        if nbytes >= _LEAST_SAMPLE:
            kinds.setdefault(pattern_of(name), []).append(name)
    return [some[len(some) // 2] for some in kinds.values()]


_MATRIX = 2
_EXPERTS = re.compile("expert|moe", re.IGNORECASE)
_REPEATED = re.compile(
    r"expert|moe|grouped|ffn\.|kv|attn|mask|rope|rotary|freqs|(?<![a-z])(key|value)(?!_head)"
    r"|(?<![a-z0-9])w?[kv](?![a-z0-9])",
    re.IGNORECASE,
)


def may_repeat(name: str, axes: int, *, is_weight: bool = True) -> bool:
    """Tell whether slices of a tensor may be equal, by its name and how many axes it has.

    Of experts that are made of one, which may be stacked, and of heads of keys and values, which
    are repeated where there are fewer than ranks; of vectors, tables, and optimizer states.
    """
    return axes != _MATRIX or not is_weight or bool(_REPEATED.search(name))


# -- what samples say -----------------------------------------------------------------------------


class Contradiction(NamedTuple):
    """Two files that should hold the same of a tensor, and do not."""

    looked: Looked
    cell: Cell
    files: tuple[int, int]


@dataclass(frozen=True)
class Agreement:
    """What samples of replicas say.

    compared: how many tensors were; differing: of these, one contradiction each. doubted: files of
    which every sample differs from other holders', and there are several.
    """

    compared: list[Looked] = field(default_factory=list)
    differing: list[Contradiction] = field(default_factory=list)
    doubted: tuple[int, ...] = ()

    @property
    def is_refuted(self) -> bool:
        """Whether half contradict, or all of a file or of a kind, of which there are several."""
        if self.doubted or (self.differing and 2 * len(self.differing) >= len(self.compared)):
            return True
        kinds = Counter(one.kind for one in self.compared)
        wrong = Counter(one.looked.kind for one in self.differing)
        return any(count == kinds[kind] > 1 for kind, count in wrong.items())


def replicas_agree(looked: Iterable[Looked], seen: Samples) -> Agreement:
    """Compare what files hold of the same boxes."""
    compared, differing = list[Looked](), list[Contradiction]()
    asked, wrong = Counter[int](), Counter[int]()
    for one in looked:
        first: Contradiction | None = None
        telling = False
        for cell, held in one.samples(seen):
            digests = Counter(sample.digest for _, sample in held)
            if len(held) < 2 or (len(digests) == 1 and held[0][1].constant):
                continue
            telling = True
            asked.update(file for file, _ in held)
            if len(digests) == 1:
                continue
            (digest, most), (_, second) = digests.most_common(2)
            minority = [file for file, own in held if own.digest != digest or most == second]
            wrong.update(minority)
            if first is None:
                other = next(file for file, own in held if own.digest == digest)
                last = next(file for file, own in held if own.digest != digest)
                first = Contradiction(one, cell, (min(other, last), max(other, last)))
        if telling:
            compared.append(one)
        if first is not None:
            differing.append(first)
    doubted = tuple(sorted(file for file, count in wrong.items() if count == asked[file] > 1))
    return Agreement(compared, differing, doubted)


def same_where_different(
    looked: Iterable[Looked], seen: Samples
) -> tuple[list[Looked], list[Looked], list[tuple[int, int]], list[str]]:
    """Compare what files hold of different boxes.

    Returns the tensors of which all boxes hold the same; those of which each box holds the same as
    some other; pairs of files that hold the same of everything else of which they should hold
    different boxes; and the tensors that were compared.
    """
    equal, copied, compared = list[Looked](), list[Looked](), list[str]()
    alike = Counter[tuple[int, int]]()
    boxes: list[dict[int, tuple[Cell, bytes]]] = []
    for one in looked:
        of: dict[int, tuple[Cell, bytes]] = {
            file: (cell, sample.digest)
            for cell, held in one.samples(seen)
            for file, sample in held
            if not sample.constant
        }
        cells = {cell for cell, _ in of.values()}
        if len(cells) < 2:
            continue
        compared.append(one.name)
        by_digest: dict[bytes, list[int]] = {}
        for file, (_, digest) in of.items():
            by_digest.setdefault(digest, []).append(file)
        if len(by_digest) == 1:
            equal.append(one)
            continue
        if all(len({of[file][0] for file in some}) > 1 for some in by_digest.values()):
            copied.append(one)  # along an axis, as heads are, and experts that are made of one
            continue
        boxes.append(of)
        for some in by_digest.values():
            first = some[0]
            alike.update((first, file) for file in some[1:] if of[file][0] != of[first][0])
    pairs = [
        pair
        for pair, count in alike.items()
        if count == sum(_are_apart(of, *pair) for of in boxes) > 1
    ]
    return equal, copied, sorted(pairs), compared


def _are_apart(of: Mapping[int, tuple[Cell, bytes]], a: int, b: int) -> bool:
    return a in of and b in of and of[a][0] != of[b][0]


def _is_derived(catalog: Catalog) -> bool:
    """Whether no compiler wrote the strategy, so that nothing but bytes bears it out."""
    return catalog.strategy is not None and catalog.strategy.derived


def check_boxes_differ(catalog: Catalog, looked: Sequence[Looked], seen: Samples) -> Evidence:
    """Refuse files that hold the same bytes of whatever they should hold different boxes of.

    All of them, or two, or files that hold one tensor which nobody repeats. Experts that were made
    of one, and heads of keys and values, are a notice; the latter not where rankxform derived the
    strategy, which may have taken replicas for slices. Raises CheckpointError.
    """
    equal, copied, pairs, compared = same_where_different(looked, seen)
    if compared and len(equal) == len(compared):
        raise _all_equal(catalog, equal)
    if pairs:
        a, b = pairs[0]
        more = f", and so for {len(pairs) - 1} more" if pairs[1:] else ""
        raise CheckpointError(
            f"{catalog.paths[a]} and {catalog.paths[b]}: hold the same bytes of all that was "
            f"looked at, and by {catalog.label} they hold different slices{more}",
            "copy the files again: one is a copy of the other",
            "give the strategy that this checkpoint was saved with",
            _ALLOW_EQUAL,
        )
    others = [
        one.name
        for one in (*equal, *copied)
        if not may_repeat(one.name, len(one.parameter.shape), is_weight=one.parameter.is_weight)
        or (_is_derived(catalog) and not _EXPERTS.search(one.name) and one.parameter.is_weight)
    ]
    if others:
        raise CheckpointError(
            f"{catalog.label} shards {summarize_names(others, 2)}, and files hold the same bytes "
            "of different slices",
            "give the strategy that this checkpoint was saved with",
            _ALLOW_EQUAL,
        )
    names = summarize_names([one.name for one in equal], 2)
    what = f"{names}: every rank holds the same bytes, though {catalog.label} shards "
    notices = (what + ("them" if equal[1:] else "it"),) if equal else ()
    return Evidence(notices=notices, samples=len(compared), sampled=frozenset(compared))


def _all_equal(catalog: Catalog, equal: Sequence[Looked]) -> CheckpointError:
    parameter = min((one.parameter for one in equal), key=lambda one: one.name)
    box = first_box(parameter)
    counts = " x ".join(str(n // own if own else 1) for n, own in zip(parameter.shape, box.shape))
    return CheckpointError(
        f"{catalog.label} shards {parameter.name!r} into {counts} slices of {list(box.shape)}, but "
        "every rank holds the same bytes",
        "give one of the files as SRC, with --src-strategy none: they seem to be complete",
        _ALLOW_EQUAL,
        where=catalog.paths[parameter.holders[0]],
        details=f"so it is with all {len(equal)} parameters looked at",
    )


def first_box(parameter: Parameter) -> Box:
    """Return the region that the first holder of a parameter has."""
    files, first = parameter.sharding.files, parameter.holders[0]
    cell = next(cell for cell, some in files.items() if first in some)
    return parameter.grid.box(cell)


def check_replicas_agree(
    catalog: Catalog, looked: Sequence[Looked], accepted: Sequence[str], seen: Samples
) -> Evidence:
    """Refuse a checkpoint most of whose replicas differ, or all of one file or kind.

    A few that differ are a warning, and so are the `accepted` ones, whatever they are. Values that
    may be ranks' own are none. Raises CheckpointError.
    """
    found = replicas_agree((one for one in looked if one.weighty), seen)
    others = replicas_agree((one for one in looked if not one.weighty), seen)
    compared = [one.name for one in (*found.compared, *others.compared)]
    if not found.compared and _all_differ(others):
        found, others = others, Agreement()
    refused = [one for one in found.differing if one.looked.name not in accepted]
    if (found.is_refuted or _is_derived(catalog)) and refused:
        raise CheckpointError(
            _in_words(catalog, found),
            "give the strategy that this checkpoint was saved with",
            "copy its files again",
            "--accept contradictions converts it as it is",
            details=_observed(catalog, found, seen),
        )
    warnings = (_in_words(catalog, found),) if found.differing else ()
    return Evidence(warnings=warnings, samples=len(compared), sampled=frozenset(compared))


def _all_differ(found: Agreement) -> bool:
    patterns = {pattern_of(one.looked.name) for one in found.differing}
    return len(found.differing) == len(found.compared) and len(patterns) > 1


def _in_words(catalog: Catalog, found: Agreement) -> str:
    shown = found.differing[:_SHOWN]
    texts = [
        f"{_who(catalog, one.files)} hold replicas of {one.looked.name!r} by {catalog.label}, "
        "and hold different bytes"
        for one in shown[:1]
    ]
    texts += [f"and so {_who(catalog, one.files)} of {one.looked.name!r}" for one in shown[1:]]
    count = f"{len(found.differing)} of {len(found.compared)} tensors compared contradict"
    return f"{', '.join(texts)} ({count})"


def _who(catalog: Catalog, files: Sequence[int]) -> str:
    if catalog.strategy is None:
        return " and ".join(catalog.paths[file] for file in files)
    return "ranks " + " and ".join(str(catalog.rank_of(file)) for file in files)


def _observed(catalog: Catalog, found: Agreement, seen: Samples) -> str:
    """Say which ranks do hold the same of the first tensor that contradicts."""
    if len(found.doubted) == 1:
        return f"{catalog.paths[found.doubted[0]]} differs from every other holder, in all samples"
    one = found.differing[0].looked
    groups: dict[bytes, list[int]] = {}
    for _, held in one.samples(seen):
        for file, sample in held:
            groups.setdefault(sample.digest, []).append(catalog.rank_of(file))
    alike = [sorted(some) for some in groups.values() if len(some) > 1]
    if not alike:
        return f"no two files hold the same of {one.name!r}"
    shown = " and ".join(f"({format_ranges(some)})" for some in sorted(alike)[:_SHOWN])
    return f"of {one.name!r} the same bytes are on ranks {shown}"
