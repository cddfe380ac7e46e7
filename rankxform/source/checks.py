"""What metadata and manifests declare, compared with headers."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import pairwise
from math import prod
from posixpath import basename, dirname
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, DEFAULT_PATTERN, CheckpointRef, Form
from rankxform.checkpoints.rank_folders import LATEST
from rankxform.errors import FormatError, Message, RankxformError, StorageError, UsageError
from rankxform.formats.container import Index, Schema
from rankxform.geometry.box import Shape
from rankxform.geometry.tiling import Grid
from rankxform.layout.names import and_more, first_texts, summarize_names
from rankxform.layout.states import NEVER_SAVED, find_states, is_never_saved
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy, first_differing_name
from rankxform.planning.build_catalog import catalog_statements, following
from rankxform.planning.catalog import Description
from rankxform.publish.files import changed_model_files, is_unchanged, stat_at, wrong_companions
from rankxform.publish.folder_records import MANIFEST_NAME, read_manifest
from rankxform.publish.records import manifest_sharding
from rankxform.statements import (
    ACCEPT_CONTRADICTIONS,
    CATALOG,
    HEADERS,
    Finding,
    as_notice,
    contradictions,
    rule,
)
from rankxform.storage.store import Listing, address_of, store_at

from .hints import as_ranks
from .source import Source, SourceManifest

# A checkpoint that describes itself is believed only where its files agree. What is listed and
# absent, present twice, or present and unlisted is a fault, because each has two meanings.

_FOLDERS = "put each into its rank_N folder if these are ranks' files"
_AGAIN = "copy both again from one checkpoint"


def schemas_without_repeats(
    description: Description, indexes: Mapping[int, Index]
) -> dict[int, Schema]:
    """Return what files hold, without what a file of loose values repeats, and without what an
    index lists in other files, where it decides.

    MindSpore puts one rank's slices there, of what it was told to leave out. An index decides if it
    lists all tensors, each where it is, and of a file with copies less than half.
    """
    schemas = {file: index.schema for file, index in indexes.items()}
    file_of = {name: file for file, names in description.listed.items() for name in names}
    if description.is_whole and len(file_of) < sum(len(s.names) for s in schemas.values()):
        are_listed = all(name in file_of for s in schemas.values() for name in s.names)
        are_there = all(f in schemas and name in schemas[f].position for name, f in file_of.items())
        for file, schema in schemas.items() if are_listed and are_there else ():
            named = [name for name in schema.names if file_of[name] == file]
            if 2 * len(named) < len(schema.names):
                schemas[file] = schema.of(named)
    if description.untracked is None or description.untracked not in schemas:
        return schemas
    tracked_names = {
        n for file, schema in schemas.items() if file != description.untracked for n in schema.names
    }
    schema = schemas[description.untracked]
    states = find_states(dict.fromkeys([*description.declared, *tracked_names, *schema.names]))
    rows = [
        i for i, n in enumerate(schema.names) if n not in tracked_names and states.of(n) is None
    ]
    schemas[description.untracked] = schema.of([schema.names[i] for i in rows])
    return schemas


def _listed(source: Source) -> Iterator[tuple[int, Schema, tuple[str, ...]]]:
    """Yield each file with its schema, and the names that the description lists in it."""
    for file, names in source.description.listed.items():
        if file in source.schemas:
            yield file, source.schemas[file], tuple(names)


def _misplaced(source: Source) -> Mapping[str, tuple[int, int]]:
    """Return tensor -> the file in which an index lists it, and the one that has it."""
    if not (source.description.is_whole and source.description.listed):
        return {}
    holder = {name: file for file, schema in source.schemas.items() for name in schema.names}
    return {
        name: (file, holder[name])
        for file, schema, names in _listed(source)
        for name in names
        if name in holder and name not in schema.position
    }


@rule(HEADERS)
def a_whole_tensor_is_in_one_file(source: Source) -> Iterator[Finding]:
    """If tensors are whole, each is in one file: else it is not known which is meant."""
    if not (source.form.described and source.description.is_whole):
        return
    paths, first = source.paths, dict[str, int]()
    names_by_pair: dict[tuple[int, int], list[str]] = {}
    for file, schema in source.schemas.items():
        for name in schema.names:
            first_file = first.setdefault(name, file)
            if first_file != file:
                names_by_pair.setdefault((first_file, file), []).append(name)
    for (a, b), names in names_by_pair.items():
        yield Finding(
            Message(
                f"both hold {_names_text(names)}",
                (as_ranks([paths[a], paths[b]]) or _FOLDERS, "remove one"),
                where=f"{paths[a]} and {paths[b]}",
                details="of whole tensors each is in one file",
            )
        )


@rule(HEADERS)
def loose_values_are_counters(source: Source) -> Iterator[Finding]:
    """The file of loose values has no tensor that may be one rank's slice."""
    file = source.description.untracked
    if file is None or file not in source.schemas:
        return
    schema = source.schemas[file]
    counters = find_states(dict(zip(schema.names, schema.shapes))).counters
    large = [
        name
        for name, shape in zip(schema.names, schema.shapes)
        if prod(shape) > 1 and name not in counters and not source.dropped(name)
    ]
    if large:
        yield Finding(
            Message(
                f"holds {_names_text(large)}, which may be one rank's slice",
                ("leave it out (--exclude)",),
                where=source.paths[file],
                details="MindSpore leaves there what it was told not to unify",
            )
        )


@rule(HEADERS)
def an_index_names_the_file(source: Source) -> Iterator[Finding]:
    """An index lists each tensor in the file that has it."""
    for name, (listed, holder) in _misplaced(source).items():
        a, b = basename(source.paths[listed]), basename(source.paths[holder])
        text, where = f"lists {name!r} in {a}, and {b} holds it", source.description.source
        yield Finding(Message(text, ("correct the index",), where=where))


@rule(HEADERS)
def what_is_listed_is_there(source: Source) -> Iterator[Finding]:
    """A file has every tensor that the description lists in it."""
    description, misplaced = source.description, _misplaced(source)
    listed_schemas = dict.fromkeys(source.schemas.values()) if description.listed else ()
    present_names = {name for schema in listed_schemas for name in schema.names}
    is_strategy = description.strategy is not None
    for file, schema, names in _listed(source):
        missing_names = [
            n
            for n in names
            if n not in schema.position
            and (
                n in present_names
                or not (is_strategy and (n.startswith(f"{NEVER_SAVED}.") or is_never_saved(n)))
            )
            and n not in misplaced
            and not source.dropped(n)
        ]
        if missing_names:
            names_text = _names_text(missing_names)
            text = f"does not hold {names_text}, which {description.source} lists in it"
            tries = ("copy the file again", "correct the list")
            yield Finding(Message(text, tries, where=source.paths[file]))


@rule(HEADERS)
def what_is_there_is_listed(source: Source) -> Iterator[Finding]:
    """The description lists each tensor that a file has and that is converted."""
    description, misplaced = source.description, _misplaced(source)
    for file, schema, names in _listed(source) if description.is_whole else ():
        listed = {*names, *misplaced}
        unlisted_names = [n for n in schema.names if n not in listed and not source.dropped(n)]
        if unlisted_names:
            text = f"holds {_names_text(unlisted_names)}, which {description.source} does not list"
            tries = ("correct the index", "leave it out (--exclude)")
            yield Finding(Message(text, tries, where=source.paths[file]))


@rule(HEADERS)
def slices_are_as_declared(source: Source) -> Iterator[Finding]:
    """A slice has the type and the shape that metadata declares."""
    description, strategy = source.description, source.description.strategy
    for file, schema, names in _listed(source) if not description.is_whole else ():
        assert strategy is not None
        layouts = strategy.stages[strategy.stage_of(description.ranks[file])]
        other_shapes, other_types = [], []
        for name in names:
            position = schema.position.get(name)
            if position is None:
                continue
            dtype, shape = description.declared[name]
            local = tuple(n // count for n, count in zip(shape, layouts[name].counts))
            if schema.shapes[position] != local:
                other_shapes.append((name, schema.shapes[position], local))
            if schema.dtypes[position] != dtype:
                other_types.append((name, schema.dtypes[position], dtype))
        if other_shapes:
            yield _other_shapes(other_shapes, description.source, source.paths[file])
        if other_types:
            name, a, b = other_types[0]
            text = f"{name!r} is {a}, and {description.source} says {b}"
            yield Finding(Message(text, (_AGAIN,), where=source.paths[file]))


def _other_shapes(shapes: list[tuple[str, Shape, Shape]], source: str, path: str) -> Finding:
    """Return that slices have other shapes than declared, with what MindSpore may have done."""
    name, have, want = shapes[0]
    suffix = f", and so for {len(shapes) - 1} more" if shapes[1:] else ""
    return Finding(
        Message(
            f"the slice of {name!r} has shape {list(have)}, and {source} says {list(want)}{suffix}",
            (
                "copy the file again",
                "save rank folders and convert these, if the job has such groups of ranks",
            ),
            where=path,
            details="MindSpore states a wrong layout where the optimizer shards in groups that are "
            "not along the axes of the device matrix (optimizer_weight_shard_size)",
        )
    )


@rule(HEADERS)
def slices_are_listed(source: Source) -> Iterator[Finding]:
    """A file has no slice that its list leaves out: copies, and states that cannot be placed."""
    description, strategy = source.description, source.description.strategy
    if strategy is None or not source.form.described:
        return
    all_names = (name for schema in dict.fromkeys(source.schemas.values()) for name in schema.names)
    states = find_states(dict.fromkeys([*description.declared, *all_names]))
    for file, schema in source.schemas.items():
        listed = set(description.listed.get(file, ()))
        unlisted_names = [
            n
            for n, shape in zip(schema.names, schema.shapes)
            if n not in listed
            and (n in description.declared or (shape and states.of(n) is not None))
            and not source.dropped(n)
        ]
        if unlisted_names:  # rarely: what follows a parameter is worked out for these files alone
            layouts = strategy.stages[strategy.stage_of(description.ranks[file])]
            follows = dict(following(schema, layouts, states, description.declared))
            unlisted_names = [name for name in unlisted_names if name not in follows]
        if unlisted_names:
            names = _names_text(unlisted_names)
            text = f"holds {names}, which {description.source} does not list in it"
            yield Finding(Message(text, (_AGAIN,), where=source.paths[file]))


@rule(HEADERS)
def a_rank_has_a_tensor_once(source: Source) -> Iterator[Finding]:
    """Two files of one rank hold no tensor of one name."""
    description, paths = source.description, source.paths
    if source.form.described and description.strategy is None:
        return  # boxes are told apart by their places
    holders: dict[tuple[int, str], int] = {}
    pairs: dict[tuple[int, int], list[str]] = {}
    for file, rank in description.ranks.items():
        for name in source.schemas[file].names if file in source.schemas else ():
            first_file = holders.setdefault((rank, name), file)
            if first_file != file:
                pairs.setdefault((first_file, file), []).append(name)
    for (a, b), names in pairs.items():
        text = f"both are rank {description.ranks[a]}'s and hold {_names_text(names)}"
        tries: tuple[str, ...] = ("remove the one that does not belong there",)
        if not source.form.described:
            tries = ("--src-pattern that means one of them", "--suffix, the end of one's name")
        yield Finding(Message(text, tries, where=f"{paths[a]} and {paths[b]}"))


@rule(HEADERS)
def tensors_can_be_read(source: Source) -> Iterator[Finding]:
    """Neither the description nor a file names a tensor whose bytes cannot be understood."""
    for name, reason in source.description.refused.items():
        if not source.dropped(name):
            yield Finding(Message(reason))
    is_read = len(source.indexes) == len(source.selected.names)  # else others are not placed
    for file, index in source.indexes.items() if is_read else ():
        wrong = {n: index.wrong[n] for n in index.wrong if not source.dropped(n)}
        if wrong:
            name, reason = next(iter(wrong.items()))
            text = f"{name!r} {reason}{and_more([*wrong], 'such tensor')}"
            yield Finding(Message(text, where=source.paths[file]))


@rule(CATALOG)
def extra_names_are_known(source: Source) -> Iterator[Finding]:
    """A rank beyond the strategy's holds no parameter that nobody else has."""
    assert source.catalog is not None
    other_names = {
        name for schema in dict.fromkeys(source.schemas.values()) for name in schema.names
    }
    strategy, label = source.catalog.strategy, source.catalog.declared_by
    for file, index in source.extra_rank_index.items():
        names = [name for name in index.schema.names if name not in other_names]
        new = [name for name in names if strategy is None or name not in strategy]
        if new:
            text = f"holds {summarize_names(new, 2)}, which {label} does not list"
            yield Finding(Message(text, where=source.paths[file]))


@rule(CATALOG, ACCEPT_CONTRADICTIONS)
def no_name_is_damaged(source: Source) -> Iterator[Finding]:
    """No rank lacks what all others of its stage hold, and holds it under nearly that name."""
    catalog = source.catalog
    assert catalog is not None
    strategy, files_by_stage = catalog.strategy, dict[int, dict[Schema, list[int]]]()
    for file, schema in source.schemas.items() if strategy is not None else ():
        files_by_schema = files_by_stage.setdefault(catalog.stage_of(file), {})
        files_by_schema.setdefault(schema, []).append(file)
    for files_by_schema in files_by_stage.values():
        for schema, files in files_by_schema.items() if len(files_by_schema) > 1 else ():
            names_elsewhere = [s.names for s in files_by_schema if s is not schema]
            missing = {*names_elsewhere[0]}.intersection(*names_elsewhere) - {*schema.names}
            extra = {*schema.names}.difference(*names_elsewhere)
            assert strategy is not None
            for name in sorted(extra) if missing and len(files) == 1 else ():
                near_names = [near for near in missing if _is_nearly(name, near)]
                if near_names and name not in strategy:
                    text = f"holds {name!r}, which is no other rank's, and lacks {near_names[0]!r}"
                    yield Finding(Message(text, ("copy the file again",), source.paths[files[0]]))


def _is_nearly(name: str, near: str) -> bool:
    """Tell whether a name is another, but for a damaged byte or two that are no number."""
    pairs = [(a, b) for a, b in zip(name, near) if a != b]
    is_number = all(a.isdigit() and b.isdigit() for a, b in pairs)
    is_little = len(pairs) <= 2 and 2 * len(pairs) < len(name)
    return len(name) == len(near) and is_little and not is_number


@rule(CATALOG)
def statements_agree(source: Source) -> Iterator[Finding]:
    """Statements of one fact, by files, metadata, a manifest or a strategy, agree."""
    assert source.catalog is not None
    manifest_statements = source.manifest.statements if source.manifest is not None else ()
    statements = (
        *source.description.statements, *manifest_statements, *catalog_statements(source.catalog),
    )  # fmt: skip
    yield from (contradiction.finding for contradiction in contradictions(statements))


@rule(CATALOG)
def unequal_slices_are_said(source: Source) -> Iterator[Finding]:
    """Slices of unlike rows are joined as torch.chunk makes them, which is said."""
    catalog = source.catalog
    assert catalog is not None
    strategy, rows_by_name = catalog.strategy, {}
    for name, parameter in catalog.declared.items() if strategy is not None else ():
        edges = parameter.grid.edges[:1] if isinstance(parameter.grid, Grid) else ()
        rows = tuple(b - a for a, b in pairwise(edges[0])) if edges else ()
        if len({*rows}) > 1 and strategy is not None and name in strategy:
            stage = strategy.stages_of[name][0]
            base = strategy.states.base_name(name)
            layouts = strategy.stages[stage]
            if not layouts[name].split_rows and not layouts.get(base, layouts[name]).split_rows:
                rows_by_name[name] = rows
    if rows_by_name:
        name, rows = next(iter(rows_by_name.items()))
        text = f"{catalog.declared_by}: slices of {name!r} have {first_texts(rows, 8)} rows"
        yield as_notice(f"{text}{and_more([*rows_by_name], 'such tensor')}; joined in this order")


def _names_text(names: Sequence[str]) -> str:
    return first_texts([*map(repr, names)])


def strategy_contradictions(
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


def read_source_manifest(
    where: CheckpointRef, form: Form, listing: Listing | None, below: str = ""
) -> SourceManifest | None:
    """Return what the manifest beside a checkpoint's files says of them; None if there is none.

    It speaks of the files that it lists: where others lie among them, or are chosen, nothing is
    known. A manifest that cannot be read is said, and is no reason to
    refuse the files. below: the folder of the files, relative to the place.
    """
    if listing is None or where.files is not None:
        return None
    folder = address_of(where.path, below)
    is_choice = (where.pattern, where.suffix) != (DEFAULT_PATTERN, None)
    is_choice = is_choice or where.step not in (None, LATEST)
    if (is_choice and not form.described) or not store_at(folder).has(MANIFEST_NAME):
        return None
    try:
        return _read(folder, form, listing)
    except RankxformError as error:
        label = address_of(folder, MANIFEST_NAME)
        return SourceManifest(label, notice=f"{error}; the files were taken as any others")


def adapters_in_places(where: CheckpointRef) -> SourceManifest | None:
    """Return which adapters the manifests of several places say were added; None if none was.

    Each speaks of its own files, so that nothing else of them holds for all.
    """
    applied: dict[str, str] = {}
    for place in where.places if where.fallbacks else ():
        with suppress(RankxformError):
            for digest in read_manifest(place).get("applied", ()):
                applied[str(digest)] = address_of(place, MANIFEST_NAME)
    return SourceManifest(next(iter(applied.values())), applied=(*applied,)) if applied else None


def _read(folder: str, form: Form, listing: Listing) -> SourceManifest | None:
    record, path = read_manifest(folder), address_of(folder, MANIFEST_NAME)
    names = list(record["files"])
    if record.get("form", DEFAULT_FORM) != form.name:
        return None
    if not form.described and form.foreign_files(listing, names):
        return None
    strategy: Strategy | None = None
    dtypes: Mapping[str, str] = {}
    if not form.described:
        try:
            sharding = manifest_sharding(record, path)
        except FormatError as error:
            raise StorageError(f"damaged: {error}", where=path) from error
        strategy, dtypes = sharding.strategy, sharding.dtypes
    steps, label, store = record.get("step"), path, store_at(folder)
    present_names = [name for name in names if store.has(name)] if form.described else names
    return SourceManifest(
        path,
        strategy,
        dtypes,
        record["files"],
        {n: v for n, v in steps.items() if isinstance(v, int)} if isinstance(steps, dict) else {},
        tuple(digest for digest in record.get("applied", ()) if isinstance(digest, str)),
        tuple(Message(text, where=path) for path, text in wrong_companions(folder, record).items()),
        tuple(_find_missing(label, names, present_names)),
        tuple(changed_model_files(folder, record)),
    )


def missing_manifest_files(
    src_manifest: SourceManifest, present_names: Collection[str], ranks: Collection[int] | None
) -> Iterator[Message]:
    """Yield what a manifest lists and is not there. ranks: those that are needed."""
    needed_names = [n for n, f in src_manifest.files.items() if ranks is None or f["id"] in ranks]
    yield from _find_missing(src_manifest.label, needed_names, present_names)


def _find_missing(
    label: str, expected_names: Collection[str], present_names: Collection[str]
) -> Iterator[Message]:
    present_set = {*present_names}
    missing_names = [name for name in expected_names if name not in present_set]
    if missing_names:
        suffix = f", and {len(missing_names) - 1} files more" if missing_names[1:] else ""
        yield Message(
            f"is gone, and {label} lists it",
            ("bring it back", "convert the original again"),
            f"{address_of(dirname(label), missing_names[0])}{suffix}",
        )


def changed_manifest_file(
    path: str, manifest_entry: Mapping[str, Any], label: str
) -> Message | None:
    """Return that a file is not the one that a manifest lists; None if it is."""
    with suppress(RankxformError):
        file_stat = stat_at(path)
        if file_stat is None or is_unchanged(path, manifest_entry, file_stat):
            return None
    return changed_file_message(path, label)


def changed_file_message(path: str, label: str) -> Message:
    """Return that a file is not the one that a manifest lists."""
    return Message(
        f"is not the file that {label} lists: it was changed or replaced since",
        ("bring the right one", "remove the manifest if it is meant"),
        path,
    )
