"""Evidence from bytes: whether ranks that hold the same elements agree, and others differ.

A strategy is believed as far as the files bear it out. Before anything is written a little of what
several ranks hold is compared, and parameters that no strategy lists are compared whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from posixpath import basename
from typing import NamedTuple

from rankxform.errors import CheckpointError, DifferenceError
from rankxform.facts import FILE_NAME, NAMED_STEP, SCALAR, STEP, Fact, contradictions
from rankxform.formats.dtype import content_bytes
from rankxform.layout.names import STEPS, pattern_of, summarize_names
from rankxform.layout.states import States
from rankxform.planning.catalog import Parameter
from rankxform.planning.consistency import (
    Comparison,
    Evidence,
    Sample,
    Samples,
    Wanted,
    check_each_differs,
    check_extra_ranks,
    check_no_slices,
    check_undeclared,
    differing_values,
    extra_to_sample,
    own_candidates,
    replicas_to_compare,
    sharded_by_pattern,
    to_compare,
    unequal_replicas,
)
from rankxform.planning.sampling import (
    check_boxes_differ,
    check_replicas_agree,
    entries_of,
    to_know_again,
    to_look_at,
)
from rankxform.planning.selection import sources_of
from rankxform.request import Request
from rankxform.source.opening import Source
from rankxform.source.options import CONTRADICTIONS, EQUAL_SLICES, EXTRA_RANKS
from rankxform.source.options import STEP as STEP_DOUBT
from rankxform.storage import samples
from rankxform.storage.posix import OnProgress
from rankxform.target.aim import prepare
from rankxform.target.asked import Asked
from rankxform.target.suggestions import suggesting
from rankxform.target.target import Target
from rankxform.transport import Team
from rankxform.transport.team import ShowProgress, show_nothing

from .rows import check_values

_SHOWN = 3
_SECOND = 8
_FEW = 50
"""Of a hundred bytes; where less is of kinds that were compared, it is said."""


def examine(asked: Asked, source: Source, target: Target, team: Team) -> Evidence:
    """Compare what ranks hold of the same elements, and of different ones. Collective.

    Raises CheckpointError where that contradicts what is said of the source, or of an adapter, with
    what else may be meant.
    """
    if asked.shapes is not None:  # there are no files
        return Evidence()
    with suggesting(asked, source, team):
        return _examined(asked.request, source, target, team)


def examine_source(request: Request, team: Team) -> tuple[Source, Evidence]:
    """Open a source, and compare what its ranks hold, as a conversion would. Collective."""
    asked, source, target = prepare(request, team)
    return source, examine(asked, source, target, team)


def _examined(request: Request, source: Source, target: Target, team: Team) -> Evidence:
    selection, adapter = target.planner.selection, target.adapter
    is_named = len(source.paths) == 1 and request.files is None
    if is_named and not request.accepts(CONTRADICTIONS):
        from .neighbours import check_neighbour

        team.bcast(lambda: check_neighbour(source))
    chosen = sources_of(selection.parameters, source.table)
    rules = [*_comparisons(request, source, chosen, selection.name_of)]
    if request.check_replicas != "no":
        names = replicas_to_compare(source.table, source.indexes)
        if not any(names.values()):
            raise DifferenceError(
                f"{source.where.path}: no two files hold the same bytes, so nothing would "
                "be compared",
                "leave out --check-replicas",
            )
        rules.append(Comparison(Wanted(names, True), partial(_judge_replicas, request, source)))
    found = _checksums(request, source) + _judged(request, source, rules, team)
    if adapter is not None:
        every = adapter.table.parameters
        rules = [*_comparisons(request, adapter, every, selection.name_of), _untrained(adapter)]
        found += replace(_judged(request, adapter, rules, team), own=frozenset(), seen={}, steps=())
    percent = _percent(source.table.states, chosen, found.sampled)
    found = replace(found, percent=percent)
    if 0 < percent < _FEW and source.table.strategy is not None and not source.form.described:
        text = f"{source.table.label}: was compared with samples of kinds that hold {percent} % of "
        found += Evidence(notices=(f"{text}the bytes; of the others there was nothing to compare",))
    return found + check_values(request, source, target, team)


def _percent(states: States, chosen: Iterable[Parameter], sampled: Collection[str]) -> int:
    """Return how much of what is converted is of kinds that were compared, by bytes."""
    kinds = {pattern_of(states.base_name(name)) for name in sampled}
    sizes = [(pattern_of(one.base_name), content_bytes(one.dtype, one.shape)) for one in chosen]
    known = sum(nbytes for kind, nbytes in sizes if kind in kinds)
    return 100 * known // max(1, sum(nbytes for _, nbytes in sizes))


def _untrained(adapter: Source) -> Comparison:
    """Return what tells an adapter that adds nothing: its second matrices begin with zeros."""
    names = {
        file: [name for name in index.schema.names if "lora_b" in name.lower()][:_SECOND]
        for file, index in adapter.indexes.items()
    }

    def judge(seen: Samples) -> Evidence:
        looked = [seen[file][name] for file, some in names.items() for name in some]
        if not looked or not all(one.constant for one in looked):
            return Evidence()
        text = f"{adapter.where.path}: each of {len(looked)} B matrices looked at is constant, as "
        return Evidence(warnings=(f"{text}before the training: nothing may be added",))

    return Comparison(Wanted(names, False), judge)


def _checksums(request: Request, source: Source) -> Evidence:
    """Say which files carry checksums, where that is not what was asked for.

    Raises DifferenceError where a comparison was asked for and none does.
    """
    carrying = {file for file, index in source.indexes.items() if index.has_checksum}
    others = [source.paths[file] for file in source.indexes if file not in carrying]
    if not request.check_crc:
        text = f"{source.where.path}: {len(carrying)} files carry checksums; --check-crc compares"
        return Evidence(notices=(text,) if carrying else ())
    if not carrying:
        raise DifferenceError(
            f"{source.where.path}: no file carries a checksum, so nothing would be compared",
            "leave out --check-crc",
        )
    if not others:
        return Evidence()
    text = f"{others[0]}: carries no checksum, as {len(others)} of the files do not"
    return Evidence(warnings=(text,))


def _comparisons(
    request: Request, source: Source, chosen: Sequence[Parameter], name_of: Callable[[str], str]
) -> Iterator[Comparison]:
    """Yield what is compared of the `chosen` tensors, in the order in which it is judged."""
    catalog, every = source.table, (*source.indexes, *source.extra)
    steps = {file: [n for n in STEPS if n in one] for file, one in source.indexes.items()}
    yield Comparison(Wanted(steps, True), partial(_judge_steps, request, source))
    by_pattern = sharded_by_pattern(chosen, catalog)
    if by_pattern and not request.accepts(EQUAL_SLICES):
        judge = partial(check_each_differs, catalog, names=by_pattern)
        yield Comparison(Wanted(dict.fromkeys(every, by_pattern), False), judge)
    looked = to_look_at(chosen, catalog, source.indexes)
    entries = entries_of(looked)
    if request.dst is not None:  # whose records say what was read
        entries = to_know_again(source.indexes, entries)
    wanted = Wanted(entries, False)
    accepted = [one.name for one in looked if request.accepts(CONTRADICTIONS, one.name)]
    agree = partial(check_replicas_agree, catalog, looked, accepted)
    yield Comparison(wanted, agree)
    if not request.accepts(EQUAL_SLICES):
        yield Comparison(wanted, partial(check_boxes_differ, catalog, looked))
    if not request.accepts(EXTRA_RANKS):
        names = extra_to_sample(catalog, source.extra)
        judge = partial(
            check_extra_ranks, catalog, paths={f: source.paths[f] for f in source.extra}
        )
        yield Comparison(Wanted(dict.fromkeys(every, names), False), judge)
    compared, own = to_compare(chosen, catalog), own_candidates(chosen, catalog)
    names = [*compared, *own]
    values = partial(_judge_values, request, source, {*compared}, {*own}, name_of)
    yield Comparison(Wanted(dict.fromkeys(source.indexes, names), True), values)


def _judged(request: Request, source: Source, rules: Sequence[Comparison], team: Team) -> Evidence:
    """Read what is to be compared, and judge it by one rule after the other. Collective."""
    seen = look(source, [rule.wanted for rule in rules], team, crc=request.check_crc)
    every = {**source.indexes, **source.extra}

    def judge() -> Evidence:
        found = (rule.judge(seen.samples[rule.wanted.whole]) for rule in rules)
        sampled = seen.samples[False]
        sizes = [
            min(samples.SAMPLE, every[file].nbytes(name))
            for file, some in sampled.items()
            for name in some
        ]
        cost = Evidence(reads=len(sizes), bytes_read=sum(sizes), seen=sampled)
        noticed = cost + _judge_holes(source, seen) + _judge_content(source, sampled)
        return sum((one for one in found if one is not None), noticed)

    return team.agree(judge)


class Seen(NamedTuple):
    """What files hold of tensors, whole (True) or in samples (False); and by file the tensors of
    which long parts were never written, with their bytes."""

    samples: Mapping[bool, Samples]
    holes: Mapping[int, Mapping[str, int]]


def look(
    source: Source,
    wanted: Sequence[Wanted],
    team: Team,
    show: ShowProgress = show_nothing,
    *,
    crc: bool = False,
) -> Seen:
    """Return what files hold of tensors. Collective.

    Each file is read by one process. With `crc`, files are compared with the checksums that they
    carry.
    """
    every = {**source.indexes, **source.extra}

    holes: dict[int, dict[str, int]] = {}

    def own(on_progress: OnProgress) -> dict[bool, dict[int, dict[str, Sample]]]:
        seen: dict[bool, dict[int, dict[str, Sample]]] = {True: {}, False: {}}
        for file in source.reach.partition(every)[team.rank]:
            path, index = source.paths[file], every[file]
            if crc:
                samples.check_crc(path, index, on_progress)
            if lost := samples.holes(path, index):
                holes[file] = lost
            for whole, read in ((True, samples.digest_all), (False, samples.sample)):
                some = (one.names.get(file, ()) for one in wanted if one.whole is whole)
                names = dict.fromkeys(name for names in some for name in names)
                if names:
                    seen[whole][file] = read(path, index, names, on_progress)
            on_progress(0)
        return seen

    mine = team.work(own, show)
    found = team.allgather(lambda: (mine, holes))
    return Seen(
        {
            whole: {file: some for one, _ in found for file, some in one[whole].items()}
            for whole in (True, False)
        },
        {file: some for _, lost in found for file, some in lost.items()},
    )


def _judge_steps(request: Request, source: Source, seen: Samples) -> Evidence:
    """Refuse files that are of two steps of a training, by what they say of it."""
    step = source.selected.step or ()
    stated = (*source.description.facts, *(source.own.facts if source.own is not None else ()))
    facts = [fact for fact in stated if fact.kind == STEP]
    for file, some in seen.items():
        schema = source.indexes[file].schema
        known = {
            name: int.from_bytes(some[name].content, "little")
            for name in STEPS
            if name in some and some[name].content and "Int" in schema.dtypes[schema.position[name]]
        }
        path = source.paths[file]
        facts += (Fact(STEP, name, value, SCALAR, path) for name, value in known.items())
        if len(step) > 1 and {"epoch_num", "step_num"} <= {*known}:
            of = f"epoch and step of {basename(path)}"
            stated = known["epoch_num"], known["step_num"]
            facts.append(Fact(NAMED_STEP, of, step, FILE_NAME, path))
            facts.append(Fact(NAMED_STEP, of, stated, SCALAR, "what it holds"))
    warnings = []
    for one in contradictions(facts):
        if one.refused and not request.accepts(STEP_DOUBT, one.first.of):
            raise CheckpointError(f"{one}", "--accept step converts them as they are")
        warnings.append(str(one))
    steps = {fact.of: fact for fact in facts if fact.kind == STEP}
    return Evidence(warnings=tuple(warnings[:1]), steps=tuple(steps.values()))


def _judge_holes(source: Source, seen: Seen) -> Evidence:
    """Refuse files of whose weights nothing was ever written; say where much was not.

    A weight that is zero everywhere may lie on a file system that stores no zeros.
    """
    if not seen.holes:
        return Evidence()
    telling = {
        pattern_of(name)
        for some in seen.samples[False].values()
        for name, one in some.items()
        if not one.constant
    }
    found = []
    for file, lost in seen.holes.items():
        weights = [name for name in lost if source.table.states.is_weight(name)]
        looked = seen.samples[False].get(file, {})
        if weights and looked and all(one.constant for one in looked.values()) and telling:
            raise CheckpointError(
                f"nothing was ever written of what was looked at ({sum(lost.values()):,} "
                "bytes are holes)",
                "copy the file again",
                where=source.paths[file],
            )
        doubted = [name for name in weights if pattern_of(name) in telling]
        if doubted:
            found.append(
                f"{source.paths[file]}: of {summarize_names(doubted, 2)} long parts were never "
                f"written ({sum(lost[name] for name in doubted):,} bytes are holes)"
            )
    return Evidence(warnings=tuple(found[:_SHOWN]))


def _judge_content(source: Source, sampled: Samples) -> Evidence:
    """Warn of weights that are all zero, and of values that are infinite or no numbers."""
    is_weight = source.table.states.is_weight
    weights = [(name, seen[name]) for seen in sampled.values() for name in seen if is_weight(name)]
    count, warnings = len({name for name, _ in weights}), []
    if count > 1 and all(one.is_zero for _, one in weights):
        warnings.append(
            f"{source.where.path}: all {count} sampled weights are zero, as before they are loaded"
        )
    wrong = {name for seen in sampled.values() for name, one in seen.items() if not one.is_finite}
    if wrong:
        warnings.append(
            f"{source.where.path}: {summarize_names(sorted(wrong), 2)} hold values that are "
            "infinite or no numbers"
        )
    return Evidence(warnings=tuple(warnings))


def _judge_values(
    request: Request,
    source: Source,
    compared: Collection[str],
    listed: Collection[str],
    name_of: Callable[[str], str],
    seen: Samples,
) -> Evidence:
    """Tell which of the values that were compared whole are ranks' own.

    compared: those that no strategy lists; listed: those that one does.
    """
    names = {*compared, *listed}
    differing = differing_values(source.table, seen, names)
    others = {name: files for name, files in differing.items() if name not in listed}
    take_one = request.unlisted == "take-one"
    notices = check_undeclared(source.table, others, take_one, name_of)
    if not take_one:
        check_no_slices(source.table, seen, compared, name_of)
    if len(others) < len(differing):
        own = [name for name in differing if name in listed]
        notices.append(
            f"{summarize_names(own, 2)} differ between ranks, as running statistics do; "
            "each destination rank gets one source rank's"
        )
    held = [(file, name) for file, found in seen.items() for name in found if name in names]
    return Evidence(
        frozenset(differing),
        tuple(dict.fromkeys(name for _, name in held)),
        sum(source.indexes[file].nbytes(name) for file, name in held),
        notices=tuple(notices),
    )


def _judge_replicas(request: Request, source: Source, seen: Samples) -> Evidence:
    """Say where replicas differ; raise CheckpointError if the request says that this is an
    error."""
    found = list(unequal_replicas(source.table, seen))
    texts = [
        f"{one.name!r} {one.box}: rank {_ranks(one.groups[1])} and rank {_ranks(one.groups[0])} "
        "should hold the same bytes and do not"
        for one in found[:8]
    ]
    if found and request.check_replicas == "error":
        raise CheckpointError(
            f"{texts[0]}, one of {len(found)} such places",
            "use another checkpoint",
            "--check-replicas warn",
            "inspect --replicas, which lists them",
            where=source.where.path,
        )
    more = [f"and {len(found) - 8} more replicas that differ"] if found[8:] else []
    return Evidence(notices=(*texts, *more))


def _ranks(ranks: tuple[int, ...]) -> str:
    return ", ".join(map(str, ranks[:8])) + (", ..." if ranks[8:] else "")


# -- rows of whole tensors ------------------------------------------------------------------------
