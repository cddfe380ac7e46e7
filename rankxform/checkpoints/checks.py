"""What a checkpoint says of its files, compared with their headers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod

from rankxform.errors import CheckpointError
from rankxform.formats.base import Index, Schema
from rankxform.geometry.box import Shape
from rankxform.layout.folded import without_defect
from rankxform.layout.layout import Layout
from rankxform.layout.names import COUNTERS, NEVER_SAVED, NOT_SAVED, state_of

from .base import Shards

_SHOWN = 3

Dropped = Callable[[str], bool]
"""Tells the parameters that are not converted."""


def own_names(shards: Shards, indexes: Mapping[int, Index]) -> dict[int, Schema]:
    """Return what files hold, without what a file of loose values repeats.

    MindSpore puts one rank's slices there, of what it was told to leave out.
    """
    schemas = {file: one.schema for file, one in indexes.items()}
    said = shards.said
    if said is None or said.loose is None or said.loose not in schemas:
        return schemas
    known = {n for file, one in schemas.items() if file != said.loose for n in one.names}
    one = schemas[said.loose]
    kept = [i for i, n in enumerate(one.names) if n not in known and state_of(n) is None]
    schemas[said.loose] = Schema(
        *(tuple(some[i] for i in kept) for some in (one.names, one.dtypes, one.shapes))  # type: ignore[arg-type]
    )
    return schemas


def repaired(shards: Shards, schemas: Mapping[int, Schema]) -> Shards:
    """Return what a checkpoint means where MindSpore states a wrong layout and the files decide.

    `schemas` are by file. What stays wrong is found by `file_faults`.
    """
    said = shards.said
    if said is None or said.strategy is None:
        return shards
    stages = [dict(layouts) for layouts in said.strategy.stages]
    known: dict[tuple[Layout, Shape], Layout | None] = {}
    names: dict[str, None] = {}
    for file, schema in schemas.items():
        layouts = stages[said.strategy.stage_of(said.ranks[file])]
        for name in said.listed.get(file, ()):
            at, (_, shape) = schema.position.get(name), said.stated[name]
            if at is None or len(shape) != len(schema.shapes[at]) or 0 in schema.shapes[at]:
                continue
            counts = tuple(n // own for n, own in zip(shape, schema.shapes[at]))
            layout = layouts[name]
            if counts == layout.counts:
                continue
            if (layout, counts) not in known:
                known[layout, counts] = without_defect(layout, counts)
            meant = known[layout, counts]
            if meant is not None:
                layouts[name], names[name] = meant, None
    if not names:
        return shards
    notice = (
        f"{said.source}: states wrong layouts of {_named(list(names))}, as MindSpore does where an "
        "optimizer shards in groups that are not along device axes; the shapes in the files decide"
    )
    strategy = replace(said.strategy, stages=tuple(stages))
    return replace(shards, said=replace(said, strategy=strategy, notices=(*said.notices, notice)))


def check_files(shards: Shards, schemas: Mapping[int, Schema], dropped: Dropped) -> None:
    """Raise CheckpointError for the first thing that a checkpoint says wrongly of its files."""
    faults = list(file_faults(shards, schemas, dropped))
    if faults:
        more = len(faults) - 1
        also = f" ({more} more such fault{'s' if more > 1 else ''}; inspect lists them)"
        raise CheckpointError(faults[0] + (also if more else ""))


def file_faults(shards: Shards, schemas: Mapping[int, Schema], dropped: Dropped) -> Iterator[str]:
    """Yield what a checkpoint says wrongly of its files, in words. `schemas` are by file."""
    said = shards.said
    if said is None:
        return
    if said.strategy is None:
        yield from _twice(shards, schemas)
    if said.loose is not None and said.loose in schemas:
        yield from _large_among_loose(shards, schemas[said.loose], dropped)
    there = {name for one in schemas.values() for name in one.names}
    misplaced = _misplaced(shards, schemas) if said.strategy is None else {}
    for name, (listed, held) in misplaced.items():
        yield (
            f"{said.source}: lists {name!r} in {shards.paths[listed].name}, and "
            f"{shards.paths[held].name} holds it; correct the index"
        )
    for file, names in said.listed.items():
        if file not in schemas:
            continue
        position = schemas[file].position
        excused = _is_never_saved if said.strategy is not None else lambda name: False
        gone = [
            n
            for n in names
            if n not in position
            and (n in there or not excused(n))
            and n not in misplaced
            and not dropped(n)
        ]
        if gone:
            yield (
                f"{shards.paths[file]}: does not hold {_named(gone)}, which {said.source} "
                "lists in it; copy the file again, or correct the list"
            )
        if said.strategy is None:
            known = {*names, *misplaced}
            yield from _unlisted(shards, file, schemas[file], known, dropped)
        else:
            yield from _slices(shards, file, schemas[file], names)
    if said.strategy is not None:
        yield from _copies(shards, schemas, dropped)


def _misplaced(shards: Shards, schemas: Mapping[int, Schema]) -> dict[str, tuple[int, int]]:
    """Return tensors that an index lists in a file other than the one that has them: both files."""
    assert shards.said is not None
    holder = {name: file for file, one in schemas.items() for name in one.names}
    return {
        name: (file, holder[name])
        for file, names in shards.said.listed.items()
        for name in names
        if file in schemas and name in holder and name not in schemas[file].position
    }


def _is_never_saved(name: str) -> bool:
    return state_of(name) == NEVER_SAVED or any(
        part.endswith(NOT_SAVED) for part in name.split(".")
    )


def _large_among_loose(shards: Shards, schema: Schema, dropped: Dropped) -> Iterator[str]:
    """Yield tensors among loose values that may be one rank's slices."""
    assert shards.said is not None
    assert shards.said.loose is not None
    large = [
        name
        for name, shape in zip(schema.names, schema.shapes)
        if prod(shape) > 1 and name not in COUNTERS and not dropped(name)
    ]
    if large:
        yield (
            f"{shards.paths[shards.said.loose]}: holds {_named(large)}, which may be one rank's "
            "slice: MindSpore leaves there what it was told not to unify; leave it out (--exclude)"
        )


def _copies(shards: Shards, schemas: Mapping[int, Schema], dropped: Dropped) -> Iterator[str]:
    """Yield what is in a file and not said to be: copies, and states that cannot be placed."""
    said = shards.said
    assert said is not None
    of_rank: dict[tuple[int, str], int] = {}
    for file, schema in schemas.items():
        listed = set(said.listed.get(file, ()))
        rank = said.ranks[file]
        more = [
            n
            for n in schema.names
            if n not in listed and (n in said.stated or state_of(n) is not None) and not dropped(n)
        ]
        if more:
            yield (
                f"{shards.paths[file]}: holds {_named(more)}, which {said.source} does not "
                "list in it; copy both again from one checkpoint"
            )
        for name in schema.names:
            other = of_rank.setdefault((rank, name), file)
            if other != file:
                yield (
                    f"{shards.paths[other]} and {shards.paths[file]}: both are rank {rank}'s and "
                    f"hold {name!r}; remove the one that does not belong there"
                )


def _twice(shards: Shards, schemas: Mapping[int, Schema]) -> Iterator[str]:
    """Yield whole tensors of one name in two files: it is not known which is meant."""
    first: dict[str, int] = {}
    found: dict[tuple[int, int], list[str]] = {}
    for file, one in schemas.items():
        for name in one.names:
            other = first.setdefault(name, file)
            if other != file:
                found.setdefault((other, file), []).append(name)
    for (a, b), names in found.items():
        yield (
            f"{shards.paths[a]} and {shards.paths[b]}: both hold {_named(names)}; of whole tensors "
            "each is in one file. Remove one, or, if these are ranks' files, put each into its "
            "rank_N folder"
        )


def _unlisted(
    shards: Shards, file: int, schema: Schema, names: Iterable[str], dropped: Dropped
) -> Iterator[str]:
    """Yield tensors that the index does not list, if they are to be converted."""
    assert shards.said is not None
    listed = set(names)
    more = [n for n in schema.names if n not in listed and not dropped(n)]
    if more:
        yield (
            f"{shards.paths[file]}: holds {_named(more)}, which {shards.said.source} does not "
            "list; correct the index, or leave it out (--exclude)"
        )


def _slices(shards: Shards, file: int, schema: Schema, names: Iterable[str]) -> Iterator[str]:
    """Compare type and shape of slices with what metadata says of them."""
    said = shards.said
    assert said is not None
    assert said.strategy is not None
    layouts = said.strategy.stages[said.strategy.stage_of(said.ranks[file])]
    other_shapes, other_types = [], []
    for name in names:
        at = schema.position.get(name)
        if at is None:
            continue
        dtype, shape = said.stated[name]
        local = tuple(n // count for n, count in zip(shape, layouts[name].counts))
        if schema.shapes[at] != local:
            other_shapes.append((name, schema.shapes[at], local))
        if schema.dtypes[at] != dtype:
            other_types.append((name, schema.dtypes[at], dtype))
    if other_shapes:
        name, have, want = other_shapes[0]
        more = f", and so for {len(other_shapes) - 1} more" if other_shapes[1:] else ""
        yield (
            f"{shards.paths[file]}: the slice of {name!r} has shape {list(have)}, and "
            f"{said.source} says {list(want)}{more}. MindSpore states a wrong layout where the "
            "optimizer shards in groups that are not along the axes of the device matrix "
            "(optimizer_weight_shard_size); if this job has such groups, save it as rank folders "
            "and convert these, otherwise copy the file again"
        )
    if other_types:
        name, a, b = other_types[0]
        yield (
            f"{shards.paths[file]}: {name!r} is {a}, and {said.source} says {b}; copy both "
            "again from one checkpoint"
        )


def _named(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:_SHOWN]))
    return shown + (f" and {len(names) - _SHOWN} more" if names[_SHOWN:] else "")
