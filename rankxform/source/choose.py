"""Which files a checkpoint is, and which strategies lie near it.

Process 0 alone looks, and tells the others; no header is read here.

rankxform never assumes that every rank holds whole parameters: the stages of a pipeline hold
different names too, and shards may hold the same ones. The user must say so, and it is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rankxform.checkpoints.base import DEFAULT_PATTERN, RankFilter, SelectedFiles
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.errors import CheckpointError, Message, RankxformError, StrategyError, UsageError
from rankxform.geometry.box import Shape
from rankxform.layout.names import and_more, format_ranges, summarize_names
from rankxform.layout.states import NEVER_SAVED
from rankxform.layout.strategy import Strategy, WholeStrategy, first_differing_name
from rankxform.planning.build_catalog import with_uneven_states
from rankxform.planning.catalog import Description
from rankxform.statements import (
    ACCEPT_CONTRADICTIONS,
    ACCEPT_EXTRA_RANKS,
    BOXES,
    FILE_IDENTITY,
    NAMES,
    Finding,
    as_notice,
    as_warning,
    rule,
    run_rules,
)
from rankxform.storage.store import FILE, absolute, address_of
from rankxform.transport import Team
from rankxform.values import NamedTuple

from .checks import missing_manifest_files, strategy_contradictions
from .hints import (
    as_ranks,
    one_of_ranks,
    saved_strategy,
    siblings_of,
    which_strategy,
    with_what_lies_there,
)
from .place import PlaceRead, store_of
from .source import Source, SourceNeed


class NamesRead(NamedTuple):
    """What is known of a checkpoint before headers are read, and what is wanted of it; the subject
    of rules over names. On process 0."""

    place: PlaceRead
    need: SourceNeed
    selected: SelectedFiles
    failure: RankxformError | None = None  # why no files could be selected
    saved_strategy: Strategy | None = None  # that MindFormers left with it
    siblings: Sequence[int] = ()  # ranks whose folders lie beside the one file that was named
    names: Mapping[int, str] = MappingProxyType({})  # of the files to be read, by id
    needed_ranks: Sequence[int] = ()  # of files of ranks; the others are not looked for
    needed_files: tuple[int, ...] = ()  # files that are looked for, there or not

    @property
    def strategy(self) -> Strategy | None:
        """Of files of ranks, the one that is given, or that their manifest states."""
        return self.place.ref.strategy if self.place.form.described else self.place.strategy

    @property
    def description(self) -> Description | None:
        """What a checkpoint says itself of how it is sharded; None if it is of files of ranks."""
        return self.selected.description

    @property
    def searched(self) -> str:
        """For messages, which nodes were searched."""
        return self.place.listing.searched if self.place.listing is not None else ""

    @property
    def is_whole(self) -> bool:
        """Whether no strategy shards it."""
        return self.strategy is None or isinstance(self.strategy, WholeStrategy)

    @property
    def present_ranks(self) -> dict[int, None]:
        """The ranks of which there are files."""
        return dict.fromkeys(map(self.selected.rank_of, self.selected.names))

    @property
    def ranks_beyond(self) -> list[int]:
        """The ranks that have files and are none of the strategy's."""
        if self.description is not None or self.strategy is None or self.is_whole:
            return []
        return [rank for rank in self.present_ranks if rank >= self.strategy.ranks]


def choose_files(place: PlaceRead, need: SourceNeed, team: Team) -> Source:
    """Return a source whose files are chosen, by process 0. Collective."""

    def choose() -> dict[str, Any]:
        read = _described_files(place, need) if place.form.described else _rank_files(place, need)
        findings = [*run_rules(NAMES, [sys.modules[__name__]], read, need.accepts)]
        findings += read.description.findings if read.description else ()
        manifest = place.manifest
        if manifest is not None:
            findings += map(as_notice, manifest.doubts)
        return {
            "selected": read.selected if read.description is None else None,
            "paths": {f: address_of(read.place.ref.path, n) for f, n in sorted(read.names.items())},
            "needed_files": read.needed_files,
            "searched": read.searched,
            "siblings": len(read.siblings),
            "manifest": None if manifest is None or manifest.notice else manifest,
            "findings": (*map(as_notice, filter(None, [place.entered])), *findings),
        }

    fields = team.bcast(choose)
    fields["selected"] = fields["selected"] or place.selected  # that of a described one is known
    fields |= {"strategy": place.strategy, "listing": place.listing}
    return Source(where=place.ref, form=place.form, need=need, **fields)


def _described_files(place: PlaceRead, need: SourceNeed) -> NamesRead:
    """Choose the files of a checkpoint that says itself how it is sharded."""
    read = NamesRead(place, need, place.selected, place.failure)
    if (description := read.description) is None:
        return read
    needed_files = {*read.selected.names, *description.ranks}
    if need.ranks is not None and place.strategy is not None:
        ranks = {*need.ranks}
        needed_files = {file for file in needed_files if description.ranks[file] in ranks}
    names = {file: name for file, name in read.selected.names.items() if file in needed_files}
    return read._replace(names=names, needed_files=tuple(sorted(needed_files)))


def _rank_files(place: PlaceRead, need: SourceNeed) -> NamesRead:
    """Choose the files of ranks, which say nothing of how they are sharded."""
    src, listing, where = place.strategy, place.listing, place.ref
    read = NamesRead(place, need, place.selected)
    rank_filter = RankFilter()
    if src is not None and (need.ranks is not None or not read.is_whole):
        rank_filter = RankFilter(need.ranks or range(src.ranks), range(src.ranks))
    # The manifest declares more than what lies beside the checkpoint.
    if src is not None and where.files is None and place.manifest is None:
        read = read._replace(saved_strategy=saved_strategy(where.path, src))
    try:
        selected = _select_files(place, need, rank_filter)
    except (UsageError, CheckpointError) as error:
        return read._replace(failure=error)
    is_alone = listing is None or listing.kind == FILE  # files are given: one, or each rank's
    is_single = is_alone and len(selected.names) == 1
    single_path = address_of(where.path, *selected.names.values()) if is_single else ""
    siblings = siblings_of(Path(single_path)) if single_path else []
    read = read._replace(selected=selected, siblings=siblings)
    present, beyond = read.present_ranks, read.ranks_beyond[-1:]  # of which one is looked at
    needed_ranks = sorted(present) if rank_filter.ranks is None else list(rank_filter.ranks)
    keep = {*needed_ranks, *beyond}
    names = {f: n for f, n in selected.names.items() if selected.rank_of(f) in keep}
    files = [file for file in names if selected.rank_of(file) not in beyond]
    missing = [rank for rank in needed_ranks if rank not in present]
    return read._replace(names=names, needed_ranks=needed_ranks, needed_files=(*files, *missing))


def _select_files(place: PlaceRead, need: SourceNeed, rank_filter: RankFilter) -> SelectedFiles:
    listing, where = place.listing, place.ref
    if listing is None:
        assert where.files is not None
        return SelectedFiles({rank: absolute(path) for rank, path in where.files.items()})
    if need.preferred and {*need.preferred.values()} <= {*listing.files}:
        return SelectedFiles(need.preferred)
    ref = replace(where, strategy=place.strategy)
    return place.form.select(listing, ref, store_of(where), rank_filter)


# -- rules over names ------------------------------------------------------------------------------


@rule(NAMES)
def a_manifest_can_be_read(read: NamesRead) -> Iterator[Finding]:
    """What rankxform noted of its files is of a version that is known."""
    if read.place.manifest is not None and read.place.manifest.notice:
        yield as_notice(read.place.manifest.notice)


@rule(NAMES)
def manifest_strategy_agrees(read: NamesRead) -> Iterator[Finding]:
    """A given strategy shards the files as their manifest says."""
    manifest, src = read.place.manifest, read.place.ref.strategy
    if src is None or manifest is None or manifest.strategy is None:
        return
    shapes = manifest.strategy.shapes
    declared = {name: (manifest.dtypes[name], shape) for name, shape in shapes.items()}
    description = Description(manifest.label, manifest.strategy, declared=declared)
    for finding in strategy_contradictions(description, with_uneven_states(src)):
        yield finding._replace(error=StrategyError, id=BOXES)


@rule(NAMES)
def manifest_files_are_there(read: NamesRead) -> Iterator[Finding]:
    """Files are there, and beside them what went with them, as their manifest says."""
    manifest = read.place.manifest
    if manifest is None or manifest.notice:
        return
    wrong = [*manifest.wrong, *manifest.missing_files]
    if manifest.strategy is not None:
        assert read.place.listing is not None
        agrees = not any(manifest_strategy_agrees(read))
        wrong += missing_manifest_files(
            manifest, read.place.listing.files, read.needed_ranks if agrees else ()
        )
    yield from (Finding(message, id=FILE_IDENTITY) for message in wrong)


@rule(NAMES)
def no_conversion_was_stopped(read: NamesRead) -> Iterator[Finding]:
    """No conversion into the folder was stopped, or is at work."""
    if read.place.stopped_in:
        tries = ("run its command again to complete it, unless it is at work",)
        problem_text = "a conversion into this folder was stopped, or is at work"
        yield Finding(Message(problem_text, tries, read.place.stopped_in))


@rule(NAMES)
def saved_strategy_agrees(read: NamesRead) -> Iterator[Finding]:
    """A given strategy is the one that MindFormers left with the checkpoint."""
    if read.saved_strategy is None or read.strategy is None:
        return
    if read.need.accepts(ACCEPT_CONTRADICTIONS):  # then the given one is right, and nothing is said
        return
    strategy, saved = read.strategy, with_uneven_states(read.saved_strategy)
    kind = strategy.states.kind
    common_names = [
        n for n in saved.stages_of if n in strategy.stages_of and kind(n) != NEVER_SAVED
    ]
    if saved.ranks != strategy.ranks or not common_names:
        return  # it is another job's
    name = first_differing_name(saved, with_uneven_states(strategy), common_names, {})
    if name is not None:
        tries = (
            "give the one that the checkpoint was saved with",
            "say --accept contradictions if --src-strategy is right",
        )
        problem_text = f"{strategy.label} and {saved.label} shard {name!r} in two ways"
        details = f"MindFormers left the latter with {read.place.ref.path}"
        yield Finding(Message(problem_text, tries, details=details), id=BOXES, error=StrategyError)


@rule(NAMES)
def files_can_be_selected(read: NamesRead) -> Iterator[Finding]:
    """The place holds files of one checkpoint, of one form and one step."""
    if read.failure is None:
        return
    parts, listing, where = read.failure.parts, read.place.listing, read.place.ref
    if read.place.form.described:
        is_empty = not (listing and listing.files) and parts.what.startswith("holds no")
    else:
        is_empty = listing is not None and not by_rank(listing, where.pattern)
        is_empty = is_empty and where.pattern == DEFAULT_PATTERN
    parts = with_what_lies_there(parts, where, listing, is_empty=is_empty)
    yield Finding(parts, error=type(read.failure))


@rule(NAMES)
def given_strategy_agrees(read: NamesRead) -> Iterator[Finding]:
    """A given strategy shards a checkpoint as that itself says."""
    if read.description is not None and read.strategy is not None:
        otherwise = as_ranks(read.selected.names.values())
        yield from strategy_contradictions(read.description, read.strategy, otherwise)


@rule(NAMES)
def a_strategy_is_given(read: NamesRead) -> Iterator[Finding]:
    """Files of several ranks have a strategy, which says how they were sharded."""
    is_of_ranks = read.description is None and read.failure is None
    if is_of_ranks and read.strategy is None and (len(read.selected.names) > 1 or read.siblings):
        message = which_strategy(read.place.ref, read.selected, read.siblings)
        yield Finding(message, error=UsageError)


@rule(NAMES)
def all_ranks_are_named(read: NamesRead) -> Iterator[Finding]:
    """If a strategy shards the checkpoint, not one rank's file of several is named."""
    strategy = read.strategy
    if (
        strategy is not None
        and not read.is_whole
        and read.siblings
        and read.place.ref.files is None
    ):
        yield Finding(one_of_ranks(read.place.ref, strategy, read.siblings), error=UsageError)


@rule(NAMES)
def needed_files_are_there(read: NamesRead) -> Iterator[Finding]:
    """At least one file that is needed is there."""
    if read.failure is not None:
        return
    if read.description is None:
        if read.present_ranks.keys().isdisjoint(read.needed_ranks):
            ranks = format_ranges(read.needed_ranks)
            text = f"none of the ranks {ranks} is there{read.searched}"
            yield Finding(Message(text, where=read.place.ref.path))
    elif not read.names:
        missing_names = [*read.description.missing_files.values()]
        named = f": {missing_names[0]}{and_more(missing_names, 'file')}" if missing_names else ""
        text = f"none of the files that are needed is there{read.searched}{named}"
        yield Finding(Message(text, ("bring them",), where=read.place.ref.path))


@rule(NAMES)
def the_newest_step_is_complete(read: NamesRead) -> Iterator[Finding]:
    """The step that is taken is the newest, of which all ranks have files."""
    selected = read.selected
    if selected.incomplete_step and selected.step and read.description is None:
        epoch, step = selected.step
        yield as_warning(
            f"{selected.incomplete_step}. What is converted is epoch {epoch} step {step} "
            f"(--step {epoch}_{step} says that it is meant, --step latest refuses)"
        )


@rule(NAMES)
def no_ranks_are_beyond(read: NamesRead) -> Iterator[Finding]:
    """No rank that has files is beyond the strategy's ranks."""
    beyond, strategy = read.ranks_beyond, read.strategy
    if beyond and strategy is not None:
        as_finding = as_notice if read.need.accepts(ACCEPT_EXTRA_RANKS) else as_warning
        yield as_finding(
            f"{read.place.ref.path}: {len(beyond)} ranks from {min(beyond)} on are beyond the "
            f"{strategy.ranks} of {strategy.label} and were not used"
        )


@rule(NAMES)
def every_rank_has_a_file(read: NamesRead) -> Iterator[Finding]:
    """Each rank that is needed has a file; copies on other ranks may serve."""
    present = read.present_ranks
    missing = [rank for rank in read.needed_ranks if rank not in present]
    if missing:
        stage_of = read.strategy.stage_of if read.strategy is not None else lambda rank: 0
        is_stage = not {*map(stage_of, missing)} <= {*map(stage_of, present)}
        way = (
            "what a pipeline stage alone holds is left out"
            if is_stage
            else "copies on other ranks have to serve"
        )
        text = f"no file of rank {format_ranges(missing)}{read.searched}; {way}"
        yield as_notice(f"{read.place.ref.path}: {text}")


def infer_whole_strategy(source: Source) -> tuple[Strategy, list[str]]:
    """Return the strategy of a source without one, and notices.

    A data-parallel job leaves complete files, or with remove_redundancy each parameter, whole, on
    one of its ranks. Copies must have one shape here; their bytes are compared before anything is
    converted (`rankxform.verbs.evidence`). Raises UsageError.
    """
    paths, indexes, siblings = source.paths, source.indexes, source.siblings
    where, ranks = source.where.path, sorted(indexes)
    if len(ranks) == 1:
        path = paths[ranks[0]]
        if indexes[ranks[0]].is_partial:
            raise UsageError(
                "was saved with remove_redundancy and holds one rank's share of the parameters",
                "name the folder with all ranks",
                where=path,
            )
        notice_start = f"{path}: was taken for a complete checkpoint, and {siblings - 1} more rank "
        return WholeStrategy(), [f"{notice_start}folders lie beside it"] if siblings else []
    shapes: dict[str, dict[Shape, int]] = {}
    repeated: dict[str, None] = {}  # in the files' order, so that messages are the same each time
    for rank in ranks:
        schema = indexes[rank].schema
        for name, shape in zip(schema.names, schema.shapes):
            if name in shapes:
                repeated[name] = None
            shapes.setdefault(name, {}).setdefault(shape, rank)
    sharded = [name for name in repeated if len(shapes[name]) > 1]
    if sharded:
        (a, rank_a), (b, rank_b), *_ = shapes[sharded[0]].items()
        raise UsageError(
            f"{sharded[0]!r} has shape {list(a)} in {paths[rank_a]} and {list(b)} in "
            f"{paths[rank_b]}, and --src-strategy none says that it is whole",
            "--src-strategy FILE of the job that wrote them",
            where=where,
        )
    copies = [name for name in repeated if prod(next(iter(shapes[name]))) > 1]
    missing_ranks = sorted(set(range(ranks[-1])).difference(ranks))
    if missing_ranks and len(copies) < sum(prod(next(iter(s))) > 1 for s in shapes.values()):
        raise CheckpointError(
            f"rank {missing_ranks[0]} has no file, and would hold parameters of its own as the "
            "other ranks do",
            "bring its folder",
            "name one complete file",
            where=where,
        )
    notice = (
        f"{where}: no strategy; the parameters of {len(ranks)} ranks were taken as whole, each on "
        "one rank as remove_redundancy leaves them"
    )
    if copies:
        notice = (
            f"{where}: no strategy; the parameters of {len(ranks)} ranks were taken as whole; a "
            f"conversion compares all copies of {summarize_names(copies, 2)}"
        )
    return WholeStrategy(stage_size=ranks[-1] + 1), [notice]
