"""MindFormers' Checkpoint 2.0: an iteration's files, and a metadata.json instead of a strategy.

::

    ROOT/latest_checkpointed_iteration.txt             the number, which is written last
    ROOT/iteration_00000100/metadata.json              layouts, and which file holds which slice
                            common.json                global_step and the like
                            [PREFIX-]model-0000003-0000008.safetensors     of rank 3 of 8
                            [PREFIX-]opt-0000003-0000008.safetensors       its optimizer states

In a deduplicated checkpoint each slice is in one file, and the number in a file's name need not be
a rank: metadata.json says which it is. What is written here can be loaded by every version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from rankxform.checkpoints import folders
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.checkpoint2_metadata import MOST_STEPS, format_common
from rankxform.formats.container import Index, Schema
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout, repair_misstated_layout
from rankxform.layout.names import and_more, first_texts
from rankxform.planning.catalog import Description
from rankxform.planning.plan import FileContent, Planner
from rankxform.statements import ITERATION, Statement, as_notice
from rankxform.storage.checkpoint2_metadata import (
    Checkpoint2Writer,
    begins_metadata,
    parse_checkpoint2,
)
from rankxform.storage.store import FOLDER, Listing, Store
from rankxform.values import pattern_on_use

from .base import ADAPTER_MANIFEST, CheckpointRef, DestinationFiles, Form, RankFilter, SelectedFiles
from .folders import COMMON, SelectedIteration, StepFolders, iteration_of
from .unified import FIRST, MAP

TRACKER, METADATA = "latest_checkpointed_iteration.txt", "metadata.json"
OTHERS_STEPS = "iter_"
"""How the folders of Megatron-Core's iterations begin, whose tracker has the same name."""
_ITERATION = pattern_on_use(r"iteration_(\d{8,18})")
STEPS_OF = StepFolders("iteration", _ITERATION(), "iteration_{:08}", TRACKER, folders.tensor_files)
_FILE = pattern_on_use(
    r"(?P<prefix>.*-)?(?P<kind>model|opt)-(?P<rank>[0-9]{7,9})-(?P<of>[0-9]{7,9})\.safetensors"
)
_END = len("-0000008.safetensors")
KINDS = ("model", "opt")


class Checkpoint2Form(Form):
    """A Checkpoint 2.0 (`checkpoints.base.Form`): the root of its iterations, or one of them."""

    name = "checkpoint2"
    title = "Checkpoint 2.0"
    options = ("dedup", "iteration", "prefix")
    tracker = TRACKER
    container = "safetensors"
    training = COMMON
    is_written = True
    joins = MappingProxyType({})
    adapter_manifest = ADAPTER_MANIFEST

    def pattern(self, where: CheckpointRef) -> str:
        return "iteration_*/*"

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        if listing.kind != FOLDER:
            return None
        marks = [TRACKER, COMMON]
        if any(name.startswith(OTHERS_STEPS) for name in listing.folders):
            marks.remove(TRACKER)
        if {MAP, FIRST} & {*listing.files}:  # which has a common.json too
            marks.remove(COMMON)
        for name in marks:
            if name in listing.files:
                return name
        if METADATA in listing.files:
            with store.open(METADATA) as file:
                if begins_metadata(file.read_at):
                    return METADATA
        return next(
            (n for n in listing.entries if _ITERATION().fullmatch(n) or _FILE().fullmatch(n)), None
        )

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        if where.suffix is not None:
            raise UsageError("--suffix chooses among rank files; Checkpoint 2.0 has --step N")
        iteration = iteration_of(listing, where, store, STEPS_OF)
        if METADATA not in iteration.names:  # a job of one device has none
            _check_one_device(iteration)
            if COMMON not in iteration.names and not any(map(_FILE().fullmatch, iteration.names)):
                raise UsageError(
                    "has no file of a Checkpoint 2.0", "leave out the form", where=iteration.path
                )
            iteration_listing = replace(
                listing, files=tuple(iteration.below + name for name in iteration.names)
            )
            selected = folders.whole_tensors(iteration_listing, store, None, below=iteration.below)
            assert selected.description is not None
            training = _training(iteration, store)
            description = replace(
                selected.description, training=training, statements=_statements(iteration, training)
            )
            return SelectedFiles(
                selected.names, iteration.step, iteration.skipped_steps, description=description
            )
        return _select_by_metadata(iteration, store)

    def describe(
        self, description: Description, indexes: Mapping[int, Index], names: Mapping[int, str]
    ) -> Description:
        """What stays wrong is found by the rules."""
        return _repaired(description, {file: index.schema for file, index in indexes.items()})

    def destination_files(
        self, planner: Planner, options: Mapping[str, Any], step: int | None, suffix: str
    ) -> DestinationFiles:
        """Two files for each rank; with `dedup` each slice in that of the lowest rank with it."""
        iteration = options["iteration"]
        if iteration is None:
            iteration = step
        if iteration is None:
            raise UsageError(
                "the source does not tell its global_step",
                "say which iteration is written (--iteration N)",
            )
        if iteration >= MOST_STEPS:
            raise UsageError(f"iteration {iteration} has too many digits")
        ranks = planner.dst.ranks
        slice_keys: set[object] = set()
        split: dict[int, tuple[frozenset[str], ...]] = {}
        names, parts = {}, {}
        prefix = f"{options['prefix']}-" if options["prefix"] else ""
        for rank in range(ranks):
            layouts = planner.layouts_of_file(rank)
            if options["dedup"]:
                first = [
                    n
                    for n in layouts
                    if not folders.is_repeated_slice(planner, n, layouts[n], rank, slice_keys)
                ]
                kinds = _kinds(planner, first)
            else:
                kinds = split.get(id(layouts)) or split.setdefault(
                    id(layouts), _kinds(planner, layouts)
                )
            for kind, kind_names in enumerate(kinds):
                if kind_names:
                    names[2 * rank + kind] = (
                        f"{prefix}{KINDS[kind]}-{rank:07}-{ranks:07}.safetensors"
                    )
                    parts[2 * rank + kind] = FileContent(rank, kind_names)
        mark = TRACKER, str(iteration).encode()
        return DestinationFiles(names, parts, f"iteration_{iteration:08}", mark)

    def metadata(self, source: Mapping[str, str]) -> Mapping[str, str]:
        return folders.plain_metadata(source, "ms")

    def owns(self, name: str, file: int) -> bool:
        match = _FILE().fullmatch(name)
        if match is None or "/" in name or "\0" in name:
            return False
        return 2 * int(match["rank"]) + KINDS.index(match["kind"]) == file

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        return (METADATA, COMMON)

    def companions(
        self, planner: Planner, arrangement: DestinationFiles, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        slices = Checkpoint2Writer.of(planner, arrangement.names)
        return {METADATA: slices.document(), COMMON: [format_common(training)]}

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        return folders.foreign_files(listing, dst_names)


# -- written --------------------------------------------------------------------------------------


def _kinds(planner: Planner, names: Iterable[str]) -> tuple[frozenset[str], ...]:
    """Divide names into those of the network and those of its optimizer.

    Counters go into the optimizer's file if the rank has one: a file that metadata.json does not
    list would not be looked for.
    """
    all_names = list(names)
    parameters = {name: planner.parameter(name) for name in all_names}
    states = [name for name, parameter in parameters.items() if parameter.state is not None]
    counters = [n for n, p in parameters.items() if not p.is_weight and p.state is None]
    weights = [name for name in all_names if name not in {*states, *counters}]
    names_by_kind = (
        (weights, [*states, *counters]) if states or not weights else ([*weights, *counters], [])
    )
    return tuple(map(frozenset, names_by_kind))


# -- found ----------------------------------------------------------------------------------------


def _check_one_device(iteration: SelectedIteration) -> None:
    """Refuse files of several ranks without metadata, which alone says how they are sharded."""
    for name in folders.tensor_files(iteration.names):
        match = _FILE().fullmatch(name)
        if match and int(match["of"]) > 1:
            raise CheckpointError(
                f"has no {METADATA}, and {name} is one of {int(match['of'])} ranks'",
                f"copy {METADATA} from the original checkpoint",
                "save that again",
                where=iteration.path,
            )


def _training(iteration: SelectedIteration, store: Store) -> dict[str, Any]:
    if COMMON not in iteration.names:
        return {}
    listed = iteration.listing
    return folders.training(store, iteration.below + COMMON, iteration.at(COMMON), listed.searched)


def _statements(iteration: SelectedIteration, training: Mapping[str, Any]) -> tuple[Statement, ...]:
    """Return how far the training was, by common.json and by the folder's name.

    The folder counts what common.json calls step_num or global_step; they differ where steps were
    skipped because a loss was infinite.
    """
    common = iteration.at(COMMON)
    step_statements = folders.steps(training, common)
    step_statements = [f for f in step_statements if f.value]  # 0 where a trainer does not count so
    counted = frozenset(fact.value for fact in step_statements if fact.subject != "epoch_num")
    if counted and iteration.number is not None:
        number = frozenset({iteration.number})
        step_statements.append(Statement(ITERATION, "", counted, common))
        step_statements.append(Statement(ITERATION, "", number, iteration.path))
    return tuple(step_statements)


def _more_of_ranks(ranks: Mapping[str, int], named: Collection[str]) -> dict[str, int]:
    """Return files that belong to the same ranks by their names, and hold nothing that is listed.

    Such a file has counters. Only where the numbers in the files' names are ranks can that be told.
    """
    matches = {name: match for name in named if (match := _FILE().fullmatch(name))}
    if any(name not in matches or int(matches[name]["rank"]) != ranks[name] for name in ranks):
        return {}
    ends = {(matches[name]["prefix"], name[-_END:]) for name in ranks}
    return {
        name: int(match["rank"])
        for name, match in matches.items()
        if name not in ranks
        and (match["prefix"], name[-_END:]) in ends
        and int(match["rank"]) in set(ranks.values())
    }


def _select_by_metadata(iteration: SelectedIteration, store: Store) -> SelectedFiles:
    """Return the files that metadata.json speaks of, and what it says of them."""
    path, name = iteration.at(METADATA), iteration.below + METADATA
    if not store.has(name):
        store.read(name, iteration.listing.searched)  # says on which node it is not
    with store.open(name) as file:
        description = parse_checkpoint2(file.read_at, path)
    for name in description.ranks:
        folders.name_in_folder(name, path)
    ranks = {**description.ranks, **_more_of_ranks(description.ranks, iteration.names)}
    files = sorted(ranks, key=lambda name: (ranks[name], name))
    ids = {name: number for number, name in enumerate(files)}
    present_names = set(iteration.names)
    missing_files = [name for name in files if name not in present_names]
    unlisted_files = [name for name in folders.tensor_files(iteration.names) if name not in ids]
    notices, training = list[str](), _training(iteration, store)
    if missing_files:
        notices.append(
            f"{iteration.at(missing_files[0])}{and_more(missing_files, 'file')}: is "
            f"missing, though {METADATA} lists it; its slices can be "
            "read only where other files hold copies"
        )
    if unlisted_files:
        notices.append(
            f"{iteration.at(unlisted_files[0])}{and_more(unlisted_files, 'file')}: was not "
            f"used: {METADATA} does not list it"
        )
    return SelectedFiles(
        {ids[name]: iteration.below + name for name in files if name in present_names},
        iteration.step,
        iteration.skipped_steps,
        description=Description(
            path,
            description.strategy,
            ranks={ids[name]: rank for name, rank in ranks.items()},
            listed={ids[name]: listed for name, listed in description.listed.items()},
            declared=description.declared,
            training=training,
            statements=_statements(iteration, training),
            missing_files={ranks[name]: iteration.at(name) for name in missing_files},
            findings=(*iteration.findings, *map(as_notice, notices)),
        ),
    )


def _repaired(description: Description, schemas: Mapping[int, Schema]) -> Description:
    """Return what metadata mean where MindSpore states a wrong layout and the files decide."""
    if description.strategy is None or not description.listed:
        return description
    stages = [dict(layouts) for layouts in description.strategy.stages]
    layout_cache: dict[tuple[Layout, Shape], Layout | None] = {}
    names: dict[str, None] = {}
    for file, schema in schemas.items():
        layouts = stages[description.strategy.stage_of(description.ranks[file])]
        for name in description.listed.get(file, ()):
            position, (_, shape) = schema.position.get(name), description.declared[name]
            if (
                position is None
                or len(shape) != len(schema.shapes[position])
                or 0 in schema.shapes[position]
            ):
                continue
            counts = tuple(n // slice_size for n, slice_size in zip(shape, schema.shapes[position]))
            layout = layouts[name]
            if counts == layout.counts:
                continue
            if (layout, counts) not in layout_cache:
                layout_cache[layout, counts] = repair_misstated_layout(layout, counts)
            repaired_layout = layout_cache[layout, counts]
            if repaired_layout is not None:
                layouts[name], names[name] = repaired_layout, None
    if not names:
        return description
    names_text = first_texts([*map(repr, names)])
    notice = (
        f"{description.source}: states wrong layouts of {names_text}, as MindSpore does where an "
        "optimizer shards in groups that are not along device axes; the shapes in the files decide"
    )
    strategy = replace(description.strategy, stages=tuple(stages))
    findings = (*description.findings, as_notice(notice))
    return replace(description, strategy=strategy, findings=findings)
