"""Tensors of several parts, of which each rank holds its rows of each, one part after another.

A fused matrix, such as queries, keys and values in one, is sharded part by part: slices joined rank
by rank are not the model's. ``shard:qkv=0:32/16/16@2`` states the rows that each part has in the
whole, ``1/1`` shares of any size, and ``16r`` a part that every rank has whole. What ranks hold is
stated as boxes, of parts of entries, and not as a layout, which has one box in a rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod

from rankxform.errors import CheckpointError, RequestError
from rankxform.formats.container import BOX_MARK, EntryView, Schema
from rankxform.geometry.box import Box, Shape
from rankxform.layout.strategy import Part, PatternStrategy
from rankxform.values import NamedTuple

from .catalog import DeclaredBox, Description

_Views = dict[int, tuple[EntryView, ...]]
"""By file its entries, under the names that boxes have."""


class _PlacedPart(NamedTuple):
    """One part of a tensor, or all of it: where rows lie in the whole, and in each rank's slice."""

    first: int  # row of the whole
    rows: int  # of each rank
    local: int  # row of a slice
    is_whole: bool  # each rank has all of its rows


def describe_parts(
    strategy: PatternStrategy, schemas: Mapping[int, Schema], rank_of: Callable[[int], int]
) -> tuple[Description, _Views]:
    """Return what files hold of tensors that are sharded by expressions, box by box.

    Optimizer states are sharded as their parameters. Raises StrategyError; RequestError for rows
    that are not those of the files; CheckpointError where ranks hold slices of several shapes.
    """
    types: dict[str, tuple[str, Shape]] = {}
    holders: dict[tuple[str, int], int] = {}
    for file, schema in schemas.items():
        for name, dtype, shape in zip(schema.names, schema.dtypes, schema.shapes):
            if types.setdefault(name, (dtype, shape))[1] != shape:
                text = f"ranks hold {name!r} as {list(types[name][1])} and as {list(shape)}"
                raise CheckpointError(text, details=f"{strategy.label} is for equal slices")
            holders[name, rank_of(file)] = file
    ranks, boxes = range(strategy.ranks), dict[str, tuple[DeclaredBox, ...]]()
    views: dict[int, list[EntryView]] = {file: [] for file in schemas}
    declared: dict[str, tuple[str, Shape]] = {}
    for name, rule in strategy.rules_of({n: shape for n, (_, shape) in types.items()}).items():
        dtype, shape = types[name]
        axis = rule.axis % len(shape)
        placed_parts = _place_parts(name, shape[axis], rule.parts, strategy)
        last, row_size = placed_parts[-1], prod(shape[axis + 1 :])
        whole_rows = last.first + last.rows * (1 if last.is_whole else len(ranks))
        declared[name] = dtype, (*shape[:axis], whole_rows, *shape[axis + 1 :])
        name_boxes = []
        for rank in ranks:
            missing = rank if rank not in schemas else -1 - rank
            file = holders.get((name, rank), missing)
            for part in placed_parts:
                start = part.first + (0 if part.is_whole else rank * part.rows)
                box = Box(
                    (*(0 for _ in shape[:axis]), start, *(0 for _ in shape[axis + 1 :])),
                    (*shape[:axis], start + part.rows, *shape[axis + 1 :]),
                )
                suffix = f"{BOX_MARK}{str(box.start)[1:]}" if placed_parts[1:] else ""
                name_boxes.append(DeclaredBox(file, box, suffix))
                if file in views:
                    first = part.local * row_size
                    views[file].append(EntryView(name, shape, name + suffix, box.shape, first))
        boxes[name] = tuple(name_boxes)
    for file, schema in schemas.items():
        unsharded = ((n, s) for n, s in zip(schema.names, schema.shapes) if n not in boxes)
        views[file] += (EntryView(name, shape, name, shape) for name, shape in unsharded)
    description = Description(strategy.label, boxes=boxes, declared=declared)
    return description, {file: tuple(file_views) for file, file_views in views.items()}


def _place_parts(
    name: str, slice_rows: int, parts: Sequence[Part], strategy: PatternStrategy
) -> list[_PlacedPart]:
    """Return the parts of a tensor whose slices have so many rows. Raises RequestError."""
    ranks = strategy.ranks
    if not parts:
        return [_PlacedPart(0, slice_rows, 0, is_whole=False)]
    if all(part == Part(1) for part in parts) and slice_rows % len(parts) == 0:
        parts = [Part(slice_rows // len(parts) * ranks)] * len(parts)
    stated_rows = sum(part.rows for part in parts)
    have = (slice_rows - sum(p.rows for p in parts if p.is_whole)) * ranks
    have += sum(p.rows for p in parts if p.is_whole)
    shown = "/".join(f"{p.rows}{'r' if p.is_whole else ''}" for p in parts)
    if stated_rows != have:
        count = f"slices of {slice_rows:,} rows of {name!r} make {have:,}"
        raise RequestError(
            f"{strategy.label!r}: {shown} are {stated_rows:,} rows, and {count}",
            "the rows of each part in the whole (16r: of one that every rank has whole)",
            "1/1 for parts of equal rows",
        )
    indivisible = [part.rows for part in parts if not part.is_whole and part.rows % ranks]
    if indivisible:
        text = (
            f"{strategy.label!r}: {indivisible[0]:,} rows of {name!r} cannot be divided by {ranks}"
        )
        raise RequestError(text, f"{indivisible[0]}r if every rank has them whole")
    placed_parts, first, local = [], 0, 0
    for part in parts:
        rows = part.rows if part.is_whole else part.rows // ranks
        placed_parts.append(_PlacedPart(first, rows, local, part.is_whole))
        first, local = first + part.rows, local + rows
    return placed_parts
