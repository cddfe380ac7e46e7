"""Which files a checkpoint is, and which strategies lie near it.

Process 0 alone looks, and tells the others; no header is read here.

rankxform never assumes that every rank holds whole parameters: the stages of a pipeline hold
different names too, and shards may hold the same ones. The user must say so, and it is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import prod
from pathlib import Path
from posixpath import dirname
from typing import NamedTuple

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
from rankxform.checkpoints.folders import and_more
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.errors import CheckpointError, Message, StrategyError, UsageError
from rankxform.formats.container import Index
from rankxform.geometry.box import Shape
from rankxform.layout.names import format_ranges, summarize_names
from rankxform.layout.states import NEVER_SAVED, States
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy, first_differing_name
from rankxform.planning.build_catalog import with_uneven_states
from rankxform.planning.catalog import Description
from rankxform.publish.folder_records import FOLDER_NAME, JOB_NAME
from rankxform.statements import BOXES, FILE_IDENTITY, Finding, as_notice, as_warning
from rankxform.storage.store import FILE, Listing, Store, absolute, address_of, is_path, store_at
from rankxform.transport import Team
from rankxform.values import dataclass

from .checks import SourceManifest, missing_manifest_files, read_source_manifest
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
    extra_ranks: bool = False  # ranks beyond the strategy's are a notice, not a warning
    check_saved_strategy: bool = True  # compare --src-strategy with output/strategy nearby


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
    store = store_at(where.path)
    return recognize_form(store.list("*"), store, option)


def enter_single_folder(where: CheckpointRef) -> tuple[CheckpointRef, str]:
    """Return where a checkpoint lies, as this process sees it: the only folder of rank folders
    inside the one that is named, if that holds none; and what to say of it."""
    if where.files is not None or not is_path(where.path) or where.form is not None:
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
    where: CheckpointRef, option: str = "--src-form"
) -> tuple[Form, Listing, SelectedFiles]:
    """Return what lies at a place, as this process sees it, and its files; no header is read.

    Raises UsageError, CheckpointError.
    """
    form, store = form_at(where, option), store_at(where.path)
    listing = store.list(form.pattern(where))
    return form, listing, form.select(listing, where, store, RankFilter())


def listing_at(folder: Path, form: Form, where: CheckpointRef | None = None) -> Listing:
    """Return what lies in a folder of a form, as this process sees it."""
    return store_at(str(folder)).list(form.pattern(where or CheckpointRef()))


def choose_files(
    where: CheckpointRef, form: Form, listing: Listing | None, narrow: SourceScope, team: Team
) -> tuple[ChosenFiles, Listing | None]:
    """Choose the files, on process 0. Returns also the listing, where it is known."""
    listings: list[Listing] = [] if listing is None else [listing]

    def found() -> ChosenFiles:
        store = store_at(where.path)
        if where.files is None and not listings:
            listings.append(store.list(form.pattern(where)))
        src_listing = listings[0] if listings else None
        if form.described:
            chosen_files = _choose_described(where, form, src_listing, store, narrow)
            below = dirname(next(iter(chosen_files.names.values()), ""))
            manifest = (
                read_source_manifest(where, form, src_listing, below) if narrow.manifest else None
            )
            if manifest is None:
                return chosen_files
            return _with_own(chosen_files, manifest, where, src_listing)
        manifest = read_source_manifest(where, form, src_listing) if narrow.manifest else None
        if manifest is None:
            return _of_ranks(where, form, src_listing, store, narrow)
        declared_ref = replace(where, strategy=where.strategy or manifest.strategy)
        # The manifest declares more than what lies beside the checkpoint.
        manifest_scope = replace(narrow, check_saved_strategy=False)
        chosen_files = _of_ranks(declared_ref, form, src_listing, store, manifest_scope)
        return _with_own(chosen_files, manifest, where, src_listing)

    chosen_files = team.bcast(found)
    return chosen_files, (listings[0] if listings else None)


def _with_own(
    chosen_files: ChosenFiles,
    manifest: SourceManifest,
    where: CheckpointRef,
    listing: Listing | None,
) -> ChosenFiles:
    """Compare what was chosen with what rankxform noted of the files when it wrote them."""
    if manifest.notice:
        return chosen_files._replace(findings=(as_notice(manifest.notice), *chosen_files.findings))
    wrong = [*manifest.wrong, *manifest.missing_files]
    findings = list[Finding]()
    if manifest.strategy is not None:
        if where.strategy is not None:
            description = _stated_by(manifest, manifest.strategy)
            for contradiction in _contradictions(description, with_uneven_states(where.strategy)):
                findings.append(contradiction._replace(error=StrategyError, id=BOXES))
        assert listing is not None
        wrong += missing_manifest_files(
            manifest, listing.files, chosen_files.needed_files if not findings else ()
        )
    findings += (Finding(message, id=FILE_IDENTITY) for message in wrong)
    doubts = map(as_notice, manifest.doubts)
    return chosen_files._replace(
        findings=(*findings, *chosen_files.findings, *doubts), manifest=manifest
    )


def _stated_by(manifest: SourceManifest, strategy: Strategy) -> Description:
    """Return what a manifest states, as a checkpoint's own description."""
    shapes = strategy.shapes
    declared = {name: (manifest.dtypes[name], shape) for name, shape in shapes.items()}
    return Description(manifest.label, strategy, declared=declared)


def _choose_described(
    where: CheckpointRef, form: Form, listing: Listing | None, store: Store, narrow: SourceScope
) -> ChosenFiles:
    """Choose the files of a checkpoint that says itself how it is sharded."""
    if listing is None or where.pattern != DEFAULT_PATTERN:
        raise UsageError(
            f"--src-pattern and files are for rank folders; {where.path} is {form.name}"
        )
    findings = [*_find_unfinished(where.path)]
    try:
        selected = form.select(listing, where, store, RankFilter())
    except (UsageError, CheckpointError) as error:
        is_empty = not listing.files and error.parts.what.startswith("holds no")
        parts = with_what_lies_there(error.parts, where, listing, is_empty=is_empty)
        return ChosenFiles(
            SelectedFiles({}), {}, (), None, (*findings, Finding(parts, error=type(error)))
        )
    description = selected.description
    assert description is not None
    names = selected.names
    folder = dirname(address_of(where.path, next(iter(names.values()), "")))
    findings = findings or [*_find_unfinished(folder)]
    strategy = description.strategy
    if where.strategy is not None:
        findings += _contradictions(description, where.strategy, as_ranks(names.values()))
    needed_files: set[int] = {*names, *description.ranks}
    needed_ranks = narrow.ranks(strategy) if strategy is not None and not findings else None
    if needed_ranks is not None:
        ranks = set(needed_ranks)
        needed_files = {file for file in needed_files if description.ranks[file] in ranks}
    names_to_read = {file: name for file, name in names.items() if file in needed_files}
    if not names_to_read:
        missing_names = [*description.missing_files.values()]
        named = f": {missing_names[0]}{and_more(missing_names, 'file')}" if missing_names else ""
        problem_text = f"none of the files that are needed is there{listing.searched}{named}"
        findings.append(Finding(Message(problem_text, ("bring them",), where=where.path)))
    return ChosenFiles(
        selected, names_to_read, tuple(sorted(needed_files)), strategy,
        (*findings, *description.findings),
    )  # fmt: skip


def _of_ranks(
    where: CheckpointRef, form: Form, listing: Listing | None, store: Store, narrow: SourceScope
) -> ChosenFiles:
    """Choose the files of ranks, which say nothing of how they are sharded."""
    src, searched = where.strategy, listing.searched if listing else ""
    is_whole = src is None or isinstance(src, WholeStrategy)
    requested_ranks, rank_filter = None if src is None else narrow.ranks(src), RankFilter()
    if src is not None and (requested_ranks is not None or not is_whole):
        rank_filter = RankFilter(requested_ranks or range(src.ranks), range(src.ranks))
    findings = [*_find_unfinished(where.path)] if where.files is None else []
    if narrow.check_saved_strategy and where.files is None and src is not None:
        findings += _contradicted_beside(where.path, src)
    try:
        selected = _select_files(where, form, listing, store, rank_filter, narrow.preferred)
    except (UsageError, CheckpointError) as error:
        is_empty = listing is not None and not by_rank(listing, where.pattern)
        is_empty = is_empty and where.pattern == DEFAULT_PATTERN
        parts = with_what_lies_there(error.parts, where, listing, is_empty=is_empty)
        return ChosenFiles(
            SelectedFiles({}), {}, (), None, (*findings, Finding(parts, error=type(error)))
        )
    names = selected.names
    alone = listing is None or listing.kind == FILE  # files are given: one, or that of each rank
    single_path = address_of(where.path, *names.values()) if alone and len(names) == 1 else ""
    siblings = siblings_of(Path(single_path)) if single_path and is_path(single_path) else []
    if src is None and (len(names) > 1 or siblings):
        message = which_strategy(where, selected, siblings)
        findings.append(Finding(message, error=UsageError))
    if src is not None and not is_whole and siblings and where.files is None:
        findings.append(Finding(one_of_ranks(where, src, siblings), error=UsageError))
    present_ranks = dict.fromkeys(map(selected.rank_of, names))
    needed_ranks = sorted(present_ranks) if rank_filter.ranks is None else list(rank_filter.ranks)
    if not any(rank in present_ranks for rank in needed_ranks):
        problem_text = f"none of the ranks {format_ranges(needed_ranks)} is there{searched}"
        findings.append(Finding(Message(problem_text, where=where.path)))
    outside = (
        [] if src is None or is_whole else [rank for rank in present_ranks if rank >= src.ranks]
    )
    keep = {*needed_ranks, *outside[-1:]}  # of the ranks beyond the strategy's, one is looked at
    names_to_read = {file: name for file, name in names.items() if selected.rank_of(file) in keep}
    findings += map(as_warning, _newer(selected))
    if outside:
        assert src is not None
        as_finding = as_notice if narrow.extra_ranks else as_warning
        findings.append(
            as_finding(
                f"{where.path}: {len(outside)} ranks from {min(outside)} on are beyond the "
                f"{src.ranks} of {src.label} and were not used"
            )
        )
    missing = [rank for rank in needed_ranks if rank not in present_ranks]
    if missing:
        findings.append(
            as_notice(
                f"{where.path}: no file of rank {format_ranges(missing)}{searched}; "
                "copies on other ranks serve"
            )
        )
    files = [file for file in names_to_read if selected.rank_of(file) not in {*outside[-1:]}]
    return ChosenFiles(
        selected, names_to_read, (*files, *missing), src, tuple(findings), len(siblings)
    )  # fmt: skip


def _contradicted_beside(path: str, src_strategy: Strategy) -> Iterator[Finding]:
    """Yield that a strategy contradicts the one that MindFormers left with the checkpoint."""
    loaded_strategy = saved_strategy(path, src_strategy)
    mindformers_strategy = (
        with_uneven_states(loaded_strategy) if loaded_strategy is not None else None
    )
    listed = mindformers_strategy.stages_of if mindformers_strategy is not None else ()
    kind = src_strategy.states.kind
    common_names = [n for n in listed if n in src_strategy.stages_of and kind(n) != NEVER_SAVED]
    if (
        mindformers_strategy is None
        or mindformers_strategy.ranks != src_strategy.ranks
        or not common_names
    ):
        return  # it is another job's
    name = first_differing_name(
        mindformers_strategy, with_uneven_states(src_strategy), common_names, {}
    )
    if name is not None:
        tries = (
            "give the one that the checkpoint was saved with",
            "say --accept contradictions if --src-strategy is right",
        )
        problem_text = (
            f"{src_strategy.label} and {mindformers_strategy.label} shard {name!r} in two ways"
        )
        details = f"MindFormers left the latter with {path}"
        yield Finding(Message(problem_text, tries, details=details), id=BOXES, error=StrategyError)


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


def _newer(selected: SelectedFiles) -> tuple[str, ...]:
    if not selected.incomplete_step or not selected.step:
        return ()
    epoch, step = selected.step
    return (
        f"{selected.incomplete_step}. What is converted is epoch {epoch} step {step} "
        f"(--step {epoch}_{step} says that it is meant, --step latest refuses)",
    )


def _find_unfinished(folder: str) -> Iterator[Finding]:
    """Yield that a run of rankxform was stopped in a folder, whatever it holds."""
    if store_at(folder).has(f"{FOLDER_NAME}/{JOB_NAME}"):
        tries = ("run its command again to complete it, unless it is at work",)
        problem_text = "a conversion into this folder was stopped, or is at work"
        yield Finding(Message(problem_text, tries, folder))


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


def ranks_at(folder: Path) -> int:
    """Return how many ranks the rank folders at a place are of; 0 if there are none."""
    listing = store_at(str(folder)).list(DEFAULT_PATTERN)
    return max(by_rank(listing, DEFAULT_PATTERN), default=-1) + 1


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
