"""Which files a checkpoint is, and which strategies lie near it.

Process 0 alone looks, and tells the others; no header is read here.

rankxform never assumes that every rank holds whole parameters: the stages of a pipeline hold
different names too, and shards may hold the same ones. The user must say so, and it is checked.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import prod
from pathlib import Path
from posixpath import dirname
from types import MappingProxyType

from rankxform.checkpoints.base import (
    DEFAULT_FORM,
    DEFAULT_PATTERN,
    FORMS,
    CheckpointRef,
    Form,
    RankFilter,
    SelectedFiles,
    form_named,
    recognize_form,
)
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.errors import CheckpointError, Message, RankxformError, StrategyError, UsageError
from rankxform.formats.container import Index
from rankxform.geometry.box import Shape
from rankxform.layout.names import and_more, format_ranges, summarize_names
from rankxform.layout.states import NEVER_SAVED, States
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy, first_differing_name
from rankxform.planning.build_catalog import with_uneven_states
from rankxform.planning.catalog import Description
from rankxform.publish.folder_records import FOLDER_NAME, JOB_NAME
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
from rankxform.storage.store import (
    FILE,
    JoinedStore,
    Listing,
    Store,
    absolute,
    address_of,
    is_path,
    store_at,
)
from rankxform.transport import Team
from rankxform.values import NamedTuple, dataclass

from .checks import SourceManifest, adapters_in_places, missing_manifest_files, read_source_manifest
from .hints import (
    as_ranks,
    one_of_ranks,
    saved_strategy,
    siblings_of,
    which_strategy,
    with_what_lies_there,
)


@dataclass(frozen=True)
class SourceScope:
    """Which part of a source is opened, and with which checks. Default: all of it, all checks."""

    # Strategy of the source -> ranks that are needed; None: all.
    ranks: Callable[[Strategy], Sequence[int] | None] = lambda strategy: None
    # Its states -> whether a name is not converted, so that what is wrong with it does not count.
    drops: Callable[[States], Callable[[str], bool]] = lambda states: lambda name: False
    preferred: Mapping[int, str] = field(default_factory=dict)  # chosen if all of them exist
    manifest: bool = True  # use what rankxform noted of its own files
    accepts: Callable[[str], bool] = lambda doubt: False  # as `Request.accepts`


class ChosenFiles(NamedTuple):
    """What process 0 finds before headers are read.

    names: of the files that are wanted. siblings: how many rank folders lie beside a file that was
    named itself.
    """

    selected: SelectedFiles
    names: Mapping[int, str]
    needed_files: tuple[int, ...]
    strategy: Strategy | None
    findings: tuple[Finding, ...] = ()
    siblings: int = 0
    manifest: SourceManifest | None = None


def form_at(where: CheckpointRef, option: str = "--src-form") -> Form:
    """Return the form of a checkpoint, as this process sees it.

    Raises UsageError where two are recognized, which `option` tells apart.
    """
    if where.form is None and (where.files is not None or where.pattern != DEFAULT_PATTERN):
        return FORMS[DEFAULT_FORM]
    if where.form is not None:
        return form_named(where.form)
    store = _store_of(where)
    return recognize_form(store.list("*"), store, option)


def _store_of(where: CheckpointRef) -> Store:
    """Return what lies in the places of a checkpoint."""
    stores = tuple(map(store_at, where.places))
    return JoinedStore(stores) if where.fallbacks else stores[0]


def enter_single_folder(where: CheckpointRef) -> tuple[CheckpointRef, str]:
    """Return where a checkpoint lies, as this process sees it: the only folder of rank folders
    inside the one that is named, if that holds none; and what to say of it."""
    is_said = where.files is not None or where.form is not None or where.fallbacks
    if is_said or not is_path(where.path):
        return where, ""
    folders = store_at(where.path).list("*").folders
    if where.pattern != DEFAULT_PATTERN or any(name.startswith("rank") for name in folders):
        return where, ""
    listing = store_at(where.path).list(where.pattern)
    inside = [folder for folder, files in listing.inside.items() if files]
    if listing.files or len(inside) != 1 or form_at(where).described:
        return where, ""
    path = address_of(where.path, inside[0])
    return replace(where, path=path), f"{where.path}: the only checkpoint in it is {path}"


def list_and_select(
    where: CheckpointRef, option: str = "--src-form", missing_names: Iterable[str] = ()
) -> tuple[Form, Listing, SelectedFiles]:
    """Return what lies at a place, as this process sees it, and its files; no header is read.

    missing_names: files that are taken to lie there, whether or not they do. Raises UsageError,
    CheckpointError.
    """
    form, store = form_at(where, option), store_at(where.path)
    listing = store.list(form.pattern(where))
    if names := (*missing_names,):
        listing = listing.joined(Listing(listing.path, files=names, entries=names))
    return form, listing, form.select(listing, where, store, RankFilter())


def steps_at(where: CheckpointRef) -> tuple[list[str], Callable[[str], SelectedFiles]]:
    """Return the steps at a place, the oldest first, and what finds the files of one.

    It raises CheckpointError where some rank lacks the step. The place is listed once. Raises
    UsageError where no name states a step, CheckpointError where there is no checkpoint.
    """
    form, listing, selected = list_and_select(where)
    if selected.step is None:
        raise UsageError("no file's name states a step", "rankxform transform", where=where.path)

    def files_of(step_name: str) -> SelectedFiles:
        if (step := steps_by_name[step_name]) in selected.missing_ranks:
            problem = f"step {step_name} is not complete: {selected.lacking_in_words(step)}"
            raise CheckpointError(problem, "bring what is missing", where=where.path)
        ref = replace(where, step=step_name)
        return form.select(listing, ref, store_at(where.path), RankFilter())

    steps = {selected.step, *selected.skipped_steps, *selected.missing_ranks}
    steps_by_name = {"_".join(map(str, step)): step for step in sorted(steps)}
    return [*steps_by_name], files_of


def listing_at(folder: Path, form: Form, where: CheckpointRef | None = None) -> Listing:
    """Return what lies in a folder of a form, as this process sees it."""
    return store_at(str(folder)).list(form.pattern(where or CheckpointRef()))


class NamesRead(NamedTuple):
    """What is known of a checkpoint before headers are read, and what is wanted of it; the subject
    of rules over names. On process 0."""

    where: CheckpointRef  # with the strategy that is given
    form: Form
    scope: SourceScope
    listing: Listing | None  # None: files are given
    strategy: Strategy | None  # the one that is given, or that its manifest states
    manifest: SourceManifest | None = None  # what rankxform noted when it wrote the files
    stopped_in: str = ""  # folder in which a conversion was stopped
    saved_strategy: Strategy | None = None  # that MindFormers left with it
    siblings: Sequence[int] = ()  # ranks whose folders lie beside the one file that was named
    failure: RankxformError | None = None  # why no files could be selected
    selected: SelectedFiles = SelectedFiles({})
    names: Mapping[int, str] = MappingProxyType({})  # of the files to be read, by id
    needed_ranks: Sequence[int] = ()  # of files of ranks; the others are not looked for

    def selecting(self, select: Callable[[], SelectedFiles]) -> NamesRead:
        """Return the same with the files that are selected, or the reason why there are none."""
        try:
            return self._replace(selected=select())
        except (UsageError, CheckpointError) as error:
            return self._replace(failure=error)

    @property
    def description(self) -> Description | None:
        """What a checkpoint says itself of how it is sharded; None if it is of files of ranks."""
        return self.selected.description

    @property
    def searched(self) -> str:
        """For messages, which nodes were searched."""
        return self.listing.searched if self.listing is not None else ""

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


def choose_files(
    where: CheckpointRef, form: Form, listing: Listing | None, narrow: SourceScope, team: Team
) -> tuple[ChosenFiles, Listing | None]:
    """Choose the files, on process 0. Returns also the listing, where it is known."""
    listings: list[Listing] = [] if listing is None else [listing]

    def list_and_choose() -> ChosenFiles:
        store = _store_of(where)
        if where.files is None and not listings:
            listings.append(store.list(form.pattern(where)))
        src_listing = listings[0] if listings else None
        if form.described:
            return _choose_described(where, form, src_listing, store, narrow)
        return _choose_of_ranks(where, form, src_listing, store, narrow)

    chosen_files = team.bcast(list_and_choose)
    return chosen_files, (listings[0] if listings else None)


def _choose_described(
    where: CheckpointRef, form: Form, listing: Listing | None, store: Store, narrow: SourceScope
) -> ChosenFiles:
    """Choose the files of a checkpoint that says itself how it is sharded."""
    if listing is None or where.pattern != DEFAULT_PATTERN:
        raise UsageError(
            f"--src-pattern and files are for rank folders; {where.path} is {form.name}"
        )
    read = NamesRead(where, form, narrow, listing, where.strategy)
    read = read.selecting(lambda: form.select(listing, where, store, RankFilter()))
    description, names = read.description, read.selected.names
    below = dirname(next(iter(names.values()), ""))
    read = read._replace(
        stopped_in=_stopped_in(where) or _stopped_in(where, below),
        manifest=read_source_manifest(where, form, listing, below)
        if narrow.manifest
        else adapters_in_places(where),
    )
    if description is None:
        return _chosen(read)
    needed_files, strategy = {*names, *description.ranks}, description.strategy
    if strategy is not None and not read.stopped_in and not any(given_strategy_agrees(read)):
        needed_ranks = narrow.ranks(strategy)
        if needed_ranks is not None:
            ranks = {*needed_ranks}
            needed_files = {file for file in needed_files if description.ranks[file] in ranks}
    names_to_read = {file: name for file, name in names.items() if file in needed_files}
    return _chosen(read._replace(names=names_to_read), tuple(sorted(needed_files)), strategy)


def _choose_of_ranks(
    where: CheckpointRef, form: Form, listing: Listing | None, store: Store, narrow: SourceScope
) -> ChosenFiles:
    """Choose the files of ranks, which say nothing of how they are sharded."""
    manifest = (
        read_source_manifest(where, form, listing) if narrow.manifest else adapters_in_places(where)
    )
    src = where.strategy or (manifest.strategy if manifest is not None else None)
    read = NamesRead(where, form, narrow, listing, src, manifest)
    requested_ranks, rank_filter = None if src is None else narrow.ranks(src), RankFilter()
    if src is not None and (requested_ranks is not None or not read.is_whole):
        rank_filter = RankFilter(requested_ranks or range(src.ranks), range(src.ranks))
    if where.files is None:
        read = read._replace(stopped_in=_stopped_in(where))
    # The manifest declares more than what lies beside the checkpoint.
    has_saved = where.files is None and manifest is None
    if has_saved and src is not None and not narrow.accepts(ACCEPT_CONTRADICTIONS):
        read = read._replace(saved_strategy=saved_strategy(where.path, src))
    ref = replace(where, strategy=src)
    read = read.selecting(
        lambda: _select_files(ref, form, listing, store, rank_filter, narrow.preferred)
    )
    if read.failure is not None:
        return _chosen(read)
    selected, names = read.selected, read.selected.names
    is_alone = listing is None or listing.kind == FILE  # files are given: one, or each rank's
    single_path = address_of(where.path, *names.values()) if is_alone and len(names) == 1 else ""
    siblings = siblings_of(Path(single_path)) if single_path and is_path(single_path) else []
    read = read._replace(siblings=siblings)
    present, beyond = read.present_ranks, read.ranks_beyond[-1:]  # of which one is looked at
    needed_ranks = sorted(present) if rank_filter.ranks is None else list(rank_filter.ranks)
    keep = {*needed_ranks, *beyond}
    names_to_read = {file: name for file, name in names.items() if selected.rank_of(file) in keep}
    files = [file for file in names_to_read if selected.rank_of(file) not in beyond]
    missing = [rank for rank in needed_ranks if rank not in present]
    return _chosen(
        read._replace(names=names_to_read, needed_ranks=needed_ranks), (*files, *missing), src
    )


def _chosen(
    read: NamesRead, needed_files: tuple[int, ...] = (), strategy: Strategy | None = None
) -> ChosenFiles:
    """Return what was chosen, with what all rules over names find."""
    description = read.description
    findings = [*run_rules(NAMES, [sys.modules[__name__]], read, read.scope.accepts)]
    findings += description.findings if description else ()
    if read.manifest is not None:
        findings += map(as_notice, read.manifest.doubts)
    return ChosenFiles(
        read.selected, {**read.names}, needed_files, strategy, tuple(findings), len(read.siblings),
        None if read.manifest is None or read.manifest.notice else read.manifest,
    )  # fmt: skip


def _select_files(
    where: CheckpointRef,
    form: Form,
    listing: Listing | None,
    store: Store,
    rank_filter: RankFilter,
    preferred: Mapping[int, str],
) -> SelectedFiles:
    if listing is not None and preferred and {*preferred.values()} <= {*listing.files}:
        return SelectedFiles(preferred)
    if listing is not None:
        return form.select(listing, where, store, rank_filter)
    assert where.files is not None
    return SelectedFiles({rank: absolute(path) for rank, path in where.files.items()})


def _stopped_in(where: CheckpointRef, below: str = "") -> str:
    """Return the folder in which a run of rankxform was stopped, whatever it holds, else ""."""
    folders = (address_of(place, below) for place in where.places)
    return next((f for f in folders if store_at(f).has(f"{FOLDER_NAME}/{JOB_NAME}")), "")


# -- rules over names ------------------------------------------------------------------------------


@rule(NAMES)
def a_manifest_can_be_read(read: NamesRead) -> Iterator[Finding]:
    """What rankxform noted of its files is of a version that is known."""
    if read.manifest is not None and read.manifest.notice:
        yield as_notice(read.manifest.notice)


@rule(NAMES)
def manifest_strategy_agrees(read: NamesRead) -> Iterator[Finding]:
    """A given strategy shards the files as their manifest says."""
    manifest = read.manifest
    if manifest is None or manifest.strategy is None or read.where.strategy is None:
        return
    shapes = manifest.strategy.shapes
    declared = {name: (manifest.dtypes[name], shape) for name, shape in shapes.items()}
    description = Description(manifest.label, manifest.strategy, declared=declared)
    for finding in _contradictions(description, with_uneven_states(read.where.strategy)):
        yield finding._replace(error=StrategyError, id=BOXES)


@rule(NAMES)
def manifest_files_are_there(read: NamesRead) -> Iterator[Finding]:
    """Files are there, and beside them what went with them, as their manifest says."""
    manifest = read.manifest
    if manifest is None or manifest.notice:
        return
    wrong = [*manifest.wrong, *manifest.missing_files]
    if manifest.strategy is not None:
        assert read.listing is not None
        agrees = not any(manifest_strategy_agrees(read))
        wrong += missing_manifest_files(
            manifest, read.listing.files, read.needed_ranks if agrees else ()
        )
    yield from (Finding(message, id=FILE_IDENTITY) for message in wrong)


@rule(NAMES)
def no_conversion_was_stopped(read: NamesRead) -> Iterator[Finding]:
    """No conversion into the folder was stopped, or is at work."""
    if read.stopped_in:
        tries = ("run its command again to complete it, unless it is at work",)
        problem_text = "a conversion into this folder was stopped, or is at work"
        yield Finding(Message(problem_text, tries, read.stopped_in))


@rule(NAMES)
def saved_strategy_agrees(read: NamesRead) -> Iterator[Finding]:
    """A given strategy is the one that MindFormers left with the checkpoint."""
    if read.saved_strategy is None or read.strategy is None:
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
        details = f"MindFormers left the latter with {read.where.path}"
        yield Finding(Message(problem_text, tries, details=details), id=BOXES, error=StrategyError)


@rule(NAMES)
def files_can_be_selected(read: NamesRead) -> Iterator[Finding]:
    """The place holds files of one checkpoint, of one form and one step."""
    if read.failure is None:
        return
    parts, listing, where = read.failure.parts, read.listing, read.where
    if read.form.described:
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
        yield from _contradictions(read.description, read.strategy, otherwise)


@rule(NAMES)
def a_strategy_is_given(read: NamesRead) -> Iterator[Finding]:
    """Files of several ranks have a strategy, which says how they were sharded."""
    is_of_ranks = read.description is None and read.failure is None
    if is_of_ranks and read.strategy is None and (len(read.selected.names) > 1 or read.siblings):
        message = which_strategy(read.where, read.selected, read.siblings)
        yield Finding(message, error=UsageError)


@rule(NAMES)
def all_ranks_are_named(read: NamesRead) -> Iterator[Finding]:
    """If a strategy shards the checkpoint, not one rank's file of several is named."""
    strategy = read.strategy
    if strategy is not None and not read.is_whole and read.siblings and read.where.files is None:
        yield Finding(one_of_ranks(read.where, strategy, read.siblings), error=UsageError)


@rule(NAMES)
def needed_files_are_there(read: NamesRead) -> Iterator[Finding]:
    """At least one file that is needed is there."""
    if read.failure is not None:
        return
    if read.description is None:
        if read.present_ranks.keys().isdisjoint(read.needed_ranks):
            ranks = format_ranges(read.needed_ranks)
            text = f"none of the ranks {ranks} is there{read.searched}"
            yield Finding(Message(text, where=read.where.path))
    elif not read.names:
        missing_names = [*read.description.missing_files.values()]
        named = f": {missing_names[0]}{and_more(missing_names, 'file')}" if missing_names else ""
        text = f"none of the files that are needed is there{read.searched}{named}"
        yield Finding(Message(text, ("bring them",), where=read.where.path))


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
        as_finding = as_notice if read.scope.accepts(ACCEPT_EXTRA_RANKS) else as_warning
        yield as_finding(
            f"{read.where.path}: {len(beyond)} ranks from {min(beyond)} on are beyond the "
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
        yield as_notice(f"{read.where.path}: {text}")


def _contradictions(
    description: Description, src_strategy: Strategy, otherwise: str = ""
) -> Iterator[Finding]:
    """Yield where a given strategy contradicts what a checkpoint says of itself.

    otherwise: the option by which it is another checkpoint, "" if there is none.
    """
    declared_strategy = description.strategy

    def wrong(problem_text: str) -> Finding:
        tries = filter(None, (otherwise, "leave out --src-strategy"))
        return Finding(Message(problem_text, (*tries,)), error=UsageError)

    if declared_strategy is None:
        if not isinstance(src_strategy, WholeStrategy):
            declared_text = (
                "that its tensors are whole" if description.is_whole else "where each box is"
            )
            yield wrong(
                f"{description.source} says {declared_text}, and {src_strategy.label} shards them"
            )
        return
    layouts = (
        layout for stage_layouts in declared_strategy.stages for layout in stage_layouts.values()
    )
    if isinstance(src_strategy, WholeStrategy) and all(
        {*layout.counts} <= {1} for layout in layouts
    ):
        return
    if isinstance(src_strategy, WholeStrategy):
        yield wrong(
            f"{description.source} says how its parameters are sharded, and 'none' means whole "
            "tensors"
        )
        return
    if isinstance(src_strategy, PatternStrategy):
        shapes = {name: shape for name, (_, shape) in description.declared.items()}
        src_strategy = src_strategy.over(shapes, states=True)
    if declared_strategy.ranks != src_strategy.ranks:
        yield wrong(
            f"{src_strategy.label} is of {src_strategy.ranks} ranks, and {description.source}, "
            f"which is the checkpoint's own, of {declared_strategy.ranks}"
        )
        return
    common_names = [name for name in declared_strategy.stages_of if name in src_strategy.stages_of]
    if not common_names:
        yield wrong(f"{src_strategy.label} lists no parameter of {description.source}")
        return
    shapes = {name: shape for name, (_, shape) in description.declared.items()}
    name = first_differing_name(declared_strategy, src_strategy, common_names, shapes)
    if name is not None:
        yield wrong(
            f"{src_strategy.label} and {description.source} shard {name!r} in two ways, and the "
            "latter is the checkpoint's own"
        )


def rank_files_at(folder: Path) -> dict[int, list[str]]:
    """Return the files of rank folders at a place, by rank."""
    return by_rank(store_at(str(folder)).list(DEFAULT_PATTERN), DEFAULT_PATTERN)


def ranks_at(folder: Path) -> int:
    """Return how many ranks the rank folders at a place are of; 0 if there are none."""
    return max(rank_files_at(folder), default=-1) + 1


def infer_whole_strategy(
    paths: Mapping[int, str], indexes: Mapping[int, Index], where: str, siblings: int
) -> tuple[Strategy, list[str]]:
    """Return the strategy of a source without one, and notices.

    A data-parallel job leaves complete files, or with remove_redundancy each parameter, whole, on
    one of its ranks. Copies must have one shape here; their bytes are compared before anything is
    converted (`rankxform.verbs.evidence`). siblings: how many rank folders there are, if one
    file in one of them was named. Raises UsageError.
    """
    ranks = sorted(indexes)
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
