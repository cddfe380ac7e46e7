"""What metadata and manifests declare, compared with headers."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import field, replace
from math import prod
from pathlib import Path
from posixpath import basename
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, DEFAULT_PATTERN, CheckpointRef, Form
from rankxform.checkpoints.rank_folders import LATEST
from rankxform.errors import FormatError, Message, RankxformError, StorageError
from rankxform.formats.container import Index, Schema
from rankxform.geometry.box import Shape
from rankxform.layout.layout import Layout, repair_misstated_layout
from rankxform.layout.states import NEVER_SAVED, find_states, is_never_saved
from rankxform.layout.strategy import Strategy
from rankxform.planning.build_catalog import following
from rankxform.planning.catalog import Description
from rankxform.publish.files import (
    changed_model_files,
    is_unchanged,
    stat_or_none,
    wrong_companions,
)
from rankxform.publish.folder_records import MANIFEST_NAME, read_manifest
from rankxform.publish.records import manifest_sharding
from rankxform.statements import MANIFEST, STEP, TYPE, Statement, as_notice
from rankxform.storage.store import Listing, address_of, is_path
from rankxform.values import dataclass

from .hints import as_ranks

# A checkpoint that describes itself is believed only where its files agree. What is listed and
# absent, present twice, or present and unlisted is a fault, because each has two meanings.

_SHOWN = 3
_FOLDERS = "put each into its rank_N folder if these are ranks' files"
_AGAIN = "copy both again from one checkpoint"

Dropped = Callable[[str], bool]
"""Tells the parameters that are not converted."""


def schemas_without_repeats(
    description: Description, indexes: Mapping[int, Index]
) -> dict[int, Schema]:
    """Return what files hold, without what a file of loose values repeats.

    MindSpore puts one rank's slices there, of what it was told to leave out.
    """
    schemas = {file: index.schema for file, index in indexes.items()}
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
    schemas[description.untracked] = Schema(
        *(tuple(column[i] for i in rows) for column in (schema.names, schema.dtypes, schema.shapes))  # type: ignore[arg-type]
    )
    return schemas


def repair_description(description: Description, schemas: Mapping[int, Schema]) -> Description:
    """Return what a checkpoint means where MindSpore states a wrong layout and the files decide.

    `schemas` are by file. What stays wrong is found by `check_files`.
    """
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
    notice = (
        f"{description.source}: states wrong layouts of {_names_text(list(names))}, as MindSpore "
        "does "
        "where an optimizer shards in groups that are not along device axes; the shapes in the "
        "files decide"
    )
    strategy = replace(description.strategy, stages=tuple(stages))
    findings = (*description.findings, as_notice(notice))
    return replace(description, strategy=strategy, findings=findings)


def check_files(
    description: Description,
    schemas: Mapping[int, Schema],
    paths: Mapping[int, str],
    dropped: Dropped,
) -> Iterator[Message]:
    """Yield what a checkpoint says wrongly of its files. `schemas` are by file.

    dropped: tells the parameters that are not converted.
    """
    if description.is_whole:
        yield from _twice(paths, schemas)
    if description.untracked is not None and description.untracked in schemas:
        yield from _large_among_untracked(
            paths[description.untracked], schemas[description.untracked], dropped
        )
    present_names = {name for schema in schemas.values() for name in schema.names}
    misplaced = _find_misplaced(description, schemas) if description.is_whole else {}
    for name, (listed, holder) in misplaced.items():
        a, b = basename(paths[listed]), basename(paths[holder])
        problem_text = f"lists {name!r} in {a}, and {b} holds it"
        yield Message(problem_text, ("correct the index",), where=description.source)
    for file, names in description.listed.items():
        if file not in schemas:
            continue
        position = schemas[file].position
        excused = _is_never_saved if description.strategy is not None else lambda name: False
        missing_names = [
            n
            for n in names
            if n not in position
            and (n in present_names or not excused(n))
            and n not in misplaced
            and not dropped(n)
        ]
        if missing_names:
            index = description.source
            problem_text = f"does not hold {_names_text(missing_names)}, which {index} lists in it"
            yield Message(
                problem_text, ("copy the file again", "correct the list"), where=paths[file]
            )
        if description.is_whole:
            listed_names = {*names, *misplaced}
            yield from _find_unlisted(
                description, paths[file], schemas[file], listed_names, dropped
            )
        else:
            yield from _slices(description, file, paths[file], schemas[file], names)
    if description.strategy is not None:
        yield from _copies(description, schemas, paths, dropped)


def _find_misplaced(
    description: Description, schemas: Mapping[int, Schema]
) -> dict[str, tuple[int, int]]:
    """Return tensors that an index lists in a file other than the one that has them: both files."""
    holder = {name: file for file, schema in schemas.items() for name in schema.names}
    return {
        name: (file, holder[name])
        for file, names in description.listed.items()
        for name in names
        if file in schemas and name in holder and name not in schemas[file].position
    }


def _is_never_saved(name: str) -> bool:
    return name.startswith(f"{NEVER_SAVED}.") or is_never_saved(name)


def _large_among_untracked(path: str, schema: Schema, dropped: Dropped) -> Iterator[Message]:
    """Yield tensors among loose values that may be one rank's slices."""
    counters = find_states(dict(zip(schema.names, schema.shapes))).counters
    large = [
        name
        for name, shape in zip(schema.names, schema.shapes)
        if prod(shape) > 1 and name not in counters and not dropped(name)
    ]
    if large:
        yield Message(
            f"holds {_names_text(large)}, which may be one rank's slice",
            ("leave it out (--exclude)",),
            where=path,
            details="MindSpore leaves there what it was told not to unify",
        )


def _copies(
    description: Description,
    schemas: Mapping[int, Schema],
    paths: Mapping[int, str],
    dropped: Dropped,
) -> Iterator[Message]:
    """Yield what is in a file and not said to be: copies, and states that cannot be placed."""
    of_rank: dict[tuple[int, str], int] = {}
    all_names = (name for schema in dict.fromkeys(schemas.values()) for name in schema.names)
    states = find_states(dict.fromkeys([*description.declared, *all_names]))
    assert description.strategy is not None
    for file, schema in schemas.items():
        rank = description.ranks[file]
        listed = set(description.listed.get(file, ()))
        unlisted_names = [
            n
            for n in schema.names
            if n not in listed
            and (n in description.declared or states.of(n) is not None)
            and not dropped(n)
        ]
        if unlisted_names:  # rarely: what follows a parameter is worked out for these files alone
            layouts = description.strategy.stages[description.strategy.stage_of(rank)]
            follows = dict(following(schema, layouts, states, description.declared))
            unlisted_names = [name for name in unlisted_names if name not in follows]
        if unlisted_names:
            index, names = description.source, _names_text(unlisted_names)
            problem_text = f"holds {names}, which {index} does not list in it"
            yield Message(problem_text, (_AGAIN,), where=paths[file])
        for name in schema.names:
            first_file = of_rank.setdefault((rank, name), file)
            if first_file != file:
                problem_text = f"both are rank {rank}'s and hold {name!r}"
                paths_text = f"{paths[first_file]} and {paths[file]}"
                yield Message(
                    problem_text, ("remove the one that does not belong there",), where=paths_text
                )


def _twice(paths: Mapping[int, str], schemas: Mapping[int, Schema]) -> Iterator[Message]:
    """Yield whole tensors of one name in two files: it is not known which is meant."""
    first: dict[str, int] = {}
    names_by_pair: dict[tuple[int, int], list[str]] = {}
    for file, schema in schemas.items():
        for name in schema.names:
            first_file = first.setdefault(name, file)
            if first_file != file:
                names_by_pair.setdefault((first_file, file), []).append(name)
    for (a, b), names in names_by_pair.items():
        yield Message(
            f"both hold {_names_text(names)}",
            (as_ranks([paths[a], paths[b]]) or _FOLDERS, "remove one"),
            where=f"{paths[a]} and {paths[b]}",
            details="of whole tensors each is in one file",
        )


def _find_unlisted(
    description: Description, path: str, schema: Schema, names: Iterable[str], dropped: Dropped
) -> Iterator[Message]:
    """Yield tensors that the index does not list, if they are to be converted."""
    listed = set(names)
    unlisted_names = [n for n in schema.names if n not in listed and not dropped(n)]
    if unlisted_names:
        problem_text = (
            f"holds {_names_text(unlisted_names)}, which {description.source} does not list"
        )
        yield Message(problem_text, ("correct the index", "leave it out (--exclude)"), where=path)


def _slices(
    description: Description, file: int, path: str, schema: Schema, names: Iterable[str]
) -> Iterator[Message]:
    """Compare type and shape of slices with what metadata says of them."""
    assert description.strategy is not None
    layouts = description.strategy.stages[description.strategy.stage_of(description.ranks[file])]
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
        name, have, want = other_shapes[0]
        suffix = f", and so for {len(other_shapes) - 1} more" if other_shapes[1:] else ""
        yield Message(
            f"the slice of {name!r} has shape {list(have)}, and {description.source} says "
            f"{list(want)}{suffix}",
            (
                "copy the file again",
                "save rank folders and convert these, if the job has such groups of ranks",
            ),
            where=path,
            details="MindSpore states a wrong layout where the optimizer shards in groups that are "
            "not along the axes of the device matrix (optimizer_weight_shard_size)",
        )
    if other_types:
        name, a, b = other_types[0]
        problem_text = f"{name!r} is {a}, and {description.source} says {b}"
        yield Message(problem_text, (_AGAIN,), where=path)


def in_two_files(
    ranks: Mapping[int, int], schemas: Mapping[int, Schema], paths: Mapping[int, str]
) -> Iterator[Message]:
    """Yield where two files of one rank hold a tensor of one name. ranks: by file, of its rank."""
    holders: dict[tuple[int, str], int] = {}
    pairs: dict[tuple[int, int], list[str]] = {}
    for file, rank in ranks.items():
        for name in schemas[file].names if file in schemas else ():
            if (rank, name) in holders:
                pairs.setdefault((holders[rank, name], file), []).append(name)
            holders.setdefault((rank, name), file)
    for (a, b), names in pairs.items():
        yield Message(
            f"{paths[a]} and {paths[b]} are both rank {ranks[a]}'s and both hold "
            f"{_names_text(names)}",
            ("--src-pattern that means one of them", "--suffix, the end of one's name"),
        )


def _names_text(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")


@dataclass(frozen=True)
class SourceManifest:
    """What a manifest states of a checkpoint."""

    label: str  # the manifest's path
    # How its ranks shard; None where it does not say so of all pipeline stages, or the form does.
    strategy: Strategy | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)  # by name
    # What is noted of each, by name relative to the folder.
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)  # how far the training was
    applied: tuple[str, ...] = ()  # digests of the adapters that were added
    wrong: tuple[Message, ...] = ()  # companion files that are not as written
    # Files that are not there, of a form that describes itself, in words.
    missing_files: tuple[Message, ...] = ()
    doubts: tuple[str, ...] = ()  # a model's small files that are not as they were copied
    notice: str = ""  # why the manifest could not be read

    @property
    def facts(self) -> Iterator[Statement]:
        """What it states that files may contradict."""
        for name, dtype in self.dtypes.items():
            yield Statement(TYPE, name, dtype, MANIFEST, self.label)
        for name, value in self.steps.items():
            yield Statement(STEP, name, value, MANIFEST, self.label)


def read_source_manifest(
    where: CheckpointRef, form: Form, listing: Listing | None, below: str = ""
) -> SourceManifest | None:
    """Return what the manifest beside a checkpoint's files says of them; None if there is none.

    It speaks of the files that it lists: where others lie among them, or are chosen, nothing is
    known. A manifest that cannot be read is said, and is no reason to
    refuse the files. below: the folder of the files, relative to the place.
    """
    if listing is None or where.files is not None or not is_path(where.path):
        return None
    folder = Path(where.path) / below
    path = folder / MANIFEST_NAME
    if (not form.described and _is_choice(where)) or not path.is_file():
        return None
    try:
        return _read(folder, form, listing)
    except RankxformError as error:
        return SourceManifest(str(path), notice=f"{error}; the files were taken as any others")


def _is_choice(where: CheckpointRef) -> bool:
    default = (where.pattern, where.suffix) == (DEFAULT_PATTERN, None)
    return not default or where.step not in (None, LATEST)


def _read(folder: Path, form: Form, listing: Listing) -> SourceManifest | None:
    record, path = read_manifest(folder), folder / MANIFEST_NAME
    names = list(record["files"])
    if record.get("form", DEFAULT_FORM) != form.name:
        return None
    if not form.described and form.foreign_files(listing, names):
        return None
    strategy: Strategy | None = None
    dtypes: Mapping[str, str] = {}
    if not form.described:
        try:
            sharding = manifest_sharding(record, str(path))
        except FormatError as error:
            raise StorageError(f"damaged: {error}", where=path) from error
        strategy, dtypes = sharding.strategy, sharding.dtypes
    steps, label = record.get("step"), str(path)
    present_names = (
        [name for name in names if (folder / name).exists()] if form.described else names
    )
    return SourceManifest(
        str(path),
        strategy,
        dtypes,
        record["files"],
        {n: v for n, v in steps.items() if isinstance(v, int)} if isinstance(steps, dict) else {},
        tuple(digest for digest in record.get("applied", ()) if isinstance(digest, str)),
        tuple(
            Message(r, where=str(folder / n)) for n, r in wrong_companions(folder, record).items()
        ),
        tuple(_find_missing(label, names, present_names)),
        tuple(changed_model_files(folder, record)),
    )


def missing_manifest_files(
    src_manifest: SourceManifest, present_names: Collection[str], ranks: Collection[int] | None
) -> Iterator[Message]:
    """Yield what a manifest lists and is not there. ranks: those that are needed."""
    needed_names = [n for n, f in src_manifest.files.items() if ranks is None or f["rank"] in ranks]
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
            f"{address_of(str(Path(label).parent), missing_names[0])}{suffix}",
        )


def changed_manifest_file(
    path: str, manifest_entry: Mapping[str, Any], label: str
) -> Message | None:
    """Return that a file is not the one that a manifest lists; None if it is."""
    facts = stat_or_none(Path(path).resolve())
    with suppress(RankxformError):
        if facts is None or is_unchanged(Path(path), manifest_entry, facts):
            return None
    return Message(
        f"is not the file that {label} lists: it was changed or replaced since",
        ("bring the right one", "remove the manifest if it is meant"),
        path,
    )
