"""What a page draws of a conversion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import islice
from math import ceil, prod
from typing import Any

from rankxform.display.text import format_count, format_size
from rankxform.formats.container import content_bytes, item_size
from rankxform.geometry.box import Box, Shape, count_runs
from rankxform.geometry.tiling import Cell
from rankxform.layout.names import and_more_patterns, format_ranges, pattern_of, patterns
from rankxform.layout.strategy import describe_layout
from rankxform.planning.catalog import Parameter, Sharding
from rankxform.planning.plan import Planner
from rankxform.planning.simulate import NodeTraffic
from rankxform.planning.transfers import Transfer
from rankxform.target.target import Target
from rankxform.values import dataclass

from .plan import Plan
from .transform import Report

_MOST_ROWS = 64
_LARGEST = 4
_HUES = 8
_MOST_BANDS = 16


@dataclass(frozen=True)
class FlowMatrix:
    """Bytes that destination files or ranks take from source ranks, or groups of both."""

    row: str  # what a row is: "rank", "file", "stage", or "ranks by N"
    column: str  # what a column is
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    cells: Mapping[tuple[int, int], int]  # (row, column) -> bytes
    stages: tuple[int, ...]  # column -> its pipeline stage
    sizes: tuple[int, ...]  # row -> number of files
    written: tuple[int, ...]  # row -> bytes that its files get
    row_stages: tuple[int, ...] = ()  # row -> its pipeline stage

    def as_dict(self) -> dict[str, Any]:
        """Return the matrix for JSON: its cells as rows of numbers."""
        row_sums, column_sums = marginals(self)
        return {
            **{name: getattr(self, name) for name in ("row", "column", "rows", "columns")},
            "cells": [[*position, nbytes] for position, nbytes in sorted(self.cells.items())],
            "stages": self.stages,
            "row_stages": self.row_stages,
            "row_sums": row_sums,
            "column_sums": column_sums,
        }


@dataclass(frozen=True)
class DrawnSharding:
    """How one side shards a kind of tensor: boxes in the full tensor, each with its ranks."""

    boxes: tuple[tuple[Box, tuple[int, ...]], ...]

    @property
    def pieces(self) -> int:
        """How many different slices there are."""
        return len(self.boxes)

    def is_whole(self, shape: Shape) -> bool:
        """Whether it is the tensor of this shape in one piece."""
        return self.pieces == 1 and self.boxes[0][0].shape == shape

    @property
    def copies(self) -> int:
        """How many ranks hold each; the most, where they differ."""
        return max((len(ranks) for _, ranks in self.boxes), default=0)


@dataclass(frozen=True)
class TensorKind:
    """Tensors of one shape that are sharded alike on both sides."""

    name: str  # the commonest pattern of their names, and how many more there are
    states: tuple[str, ...]  # optimizer states that are among them
    count: int  # of parameters
    nbytes: int  # of all
    dtype: str
    shape: Shape
    src: DrawnSharding | None
    dst: DrawnSharding
    # src_holds, dst_holds: what each rank holds of one, in words; src_holds is None if it is made
    # of several.
    src_holds: str | None
    dst_holds: str
    # Contiguous bytes of a copy in the source's slice, and in the destination's; the shortest of a
    # slice. src is None for a tensor that is made of several.
    runs: tuple[int, int] | None

    @property
    def change(self) -> str:
        """What each rank holds of one, before and after, in words."""
        if self.src_holds == self.dst_holds:
            return f"{self.dst_holds}, before and after"
        return f"{self.src_holds or 'made of several'} -> {self.dst_holds}"

    @property
    def whole(self) -> bool:
        """Whether no side shards it."""
        return all(side is None or side.is_whole(self.shape) for side in (self.src, self.dst))

    @property
    def changed(self) -> bool:
        """Whether it is sharded otherwise than before, on whichever ranks and stages."""
        return self.src_holds != self.dst_holds


def byte_flow(plan: Plan, target: Target) -> FlowMatrix:
    """Return who takes how many bytes from whom; above 64 ranks, by stages or groups of ranks."""
    src, dst = target.planner.catalog, target.planner.dst
    rows = [shard.file or f"{shard.rank}" for shard in plan.shards]
    row_of: list[int] = list(range(len(rows)))
    row = "file" if any(shard.file for shard in plan.shards) else "rank"
    if len(rows) > _MOST_ROWS:
        stages = sorted({dst.stage_of(shard.rank) for shard in plan.shards})
        if 1 < len(stages) <= _MOST_ROWS:
            row, rows = "stage", [str(stage) for stage in stages]
            row_of = [stages.index(dst.stage_of(shard.rank)) for shard in plan.shards]
        else:
            row, rows, row_of = _group_neighbours(rows, row)
    ranks = list(range(src.ranks))
    column, columns, column_of = "rank", [str(rank) for rank in ranks], ranks
    stage_of = [src.strategy.stage_of(rank) if src.strategy else 0 for rank in ranks]
    if src.ranks > _MOST_ROWS:
        if 1 < src.stages <= _MOST_ROWS:
            column, columns = "stage", [str(stage) for stage in range(src.stages)]
            column_of, stage_of = stage_of, list(range(src.stages))
        else:
            column, columns, column_of = _group_neighbours(columns, column)
            stage_of = [0] * len(columns)
    cells: dict[tuple[int, int], int] = {}
    for number, shard in enumerate(plan.shards):
        for rank, nbytes in shard.bytes_from.items():
            key = row_of[number], column_of[int(rank)]
            cells[key] = cells.get(key, 0) + nbytes
    sizes = tuple(map(row_of.count, range(len(rows))))
    written = [0] * len(rows)
    for row_number, shard in zip(row_of, plan.shards):
        written[row_number] += shard.bytes_written
    of_rank = dst.stages and row == "rank"
    row_stages = tuple(dst.stage_of(shard.rank) for shard in plan.shards) if of_rank else ()
    return FlowMatrix(
        row, column, tuple(rows), tuple(columns), cells, tuple(stage_of), sizes, tuple(written),
        row_stages,
    )  # fmt: skip


def in_words(plan: Plan, target: Target) -> Plan:
    """Return a plan with how the largest kinds of tensor are sharded, and with a row for each
    destination stage if there are many ranks."""
    sharding = []
    for kind in kinds_to_draw(kinds(target))[0]:
        states = f", with {', '.join(kind.states)}" if kind.states else ""
        runs = f"; runs of {format_size(min(kind.runs))} or more" if kind.runs else ""
        sharding.append(
            (f"{kind.name} ({format_size(kind.nbytes)}{states}):", f"{kind.change}{runs}")
        )
    flow, rows = byte_flow(plan, target), list[tuple[str, ...]]()
    if flow.row == "stage":
        rows.append(("stage", "ranks", "writes", "a rank", f"from source {flow.column}s"))
        for row, (stage, nbytes, size) in enumerate(zip(flow.rows, flow.written, flow.sizes)):
            columns = [name for n, name in enumerate(flow.columns) if (row, n) in flow.cells]
            shares = format_size(nbytes), format_size(nbytes / size)
            rows.append((stage, f"{size:,}", *shares, ", ".join(columns)))
    return replace(plan, sharding=tuple(sharding), stage_rows=tuple(rows))


def node_flow(between: Sequence[NodeTraffic], nodes: int) -> FlowMatrix:
    """Return what nodes (columns) send to nodes (rows); above 64, groups of them."""
    unit, names, group_of = "node", [str(node) for node in range(nodes)], list(range(nodes))
    if nodes > _MOST_ROWS:
        unit, names, group_of = _group_neighbours(names, unit)
    cells: dict[tuple[int, int], int] = {}
    for traffic in between:
        key = group_of[traffic.dst_node], group_of[traffic.src_node]
        cells[key] = cells.get(key, 0) + traffic.nbytes
    sizes = tuple(map(group_of.count, range(len(names))))
    zeros = (0,) * len(names)
    return FlowMatrix(unit, unit, tuple(names), tuple(names), cells, zeros, sizes, zeros)


def _group_neighbours(names: Sequence[str], unit: str) -> tuple[str, list[str], list[int]]:
    """Put so many neighbours into a group that there are few groups."""
    size = 1
    while len(names) > size * _MOST_ROWS:
        size *= 2
    starts = range(0, len(names), size)
    shown = [f"{names[a]}-{names[min(a + size, len(names)) - 1]}" for a in starts]
    return f"{unit}s by {size}", shown, [number // size for number in range(len(names))]


def kinds(target: Target) -> list[TensorKind]:
    """Return all kinds of tensor, those with most bytes first, and last those that nobody shards.

    Optimizer states are of their parameter's kind.
    """
    planner = target.planner
    files = [planner.whole_file(file) for file in target.files]
    transfers_by_key: dict[object, list[Transfer]] = {}
    for transfer in planner.transfers(files):
        parameter = transfer.parameter
        cells = islice(transfer.targets.items(), 8)
        first = [
            (cell, planner.content_of_file(r[0]).rank % planner.dst.stage_size) for cell, r in cells
        ]
        key = parameter.sharding, transfer.grid, tuple(first)
        transfers_by_key.setdefault(key, []).append(transfer)
    all_kinds = [_kind(planner, transfers) for transfers in transfers_by_key.values()]
    return sorted(all_kinds, key=lambda kind: (kind.whole, -kind.nbytes))


def kinds_to_draw(all_kinds: Sequence[TensorKind]) -> tuple[list[TensorKind], list[TensorKind]]:
    """Return the largest of the kinds, and then the one in the shortest runs; and the others.

    Of kinds that differ by their pipeline stage alone, the first.
    """
    kinds_by_key: dict[object, TensorKind] = {}
    for tensor_kind in all_kinds:
        name = pattern_of(tensor_kind.name.partition(" (")[0])
        kinds_by_key.setdefault((name, tensor_kind.shape, tensor_kind.change), tensor_kind)
    all_kinds = [*kinds_by_key.values()]
    drawn_kinds = all_kinds[:_LARGEST]
    cut = [kind for kind in all_kinds if kind.runs and kind.src and kind.src.pieces > 1]
    if cut:
        shortest = min(cut, key=lambda kind: min(kind.runs or (0,)))
        drawn_kinds += [] if shortest in drawn_kinds else [shortest]
    return drawn_kinds, [kind for kind in all_kinds if kind not in drawn_kinds]


def _kind(planner: Planner, transfers: Sequence[Transfer]) -> TensorKind:
    first = transfers[0]
    parameter, grid = first.parameter, first.grid
    parameters = {transfer.parameter.name: transfer.parameter for transfer in transfers}
    names = dict.fromkeys(tensor.base_name for tensor in parameters.values())
    nbytes = sum(content_bytes(tensor.dtype, tensor.shape) for tensor in parameters.values())
    item = item_size(parameter.dtype)
    ranks_by_cell: dict[Cell, tuple[int, ...]] = {}
    for transfer in transfers:
        if transfer.parameter is parameter:
            for cell, files in transfer.targets.items():
                ranks = (planner.content_of_file(file).rank for file in files)
                ranks_by_cell[cell] = tuple(sorted({*ranks_by_cell.get(cell, ()), *ranks}))
    dst = DrawnSharding(
        tuple((grid.box(cell), ranks) for cell, ranks in sorted(ranks_by_cell.items()))
    )
    src = _source(planner, parameter)
    shown = patterns(names)
    name = shown[0] + (f" and {and_more_patterns(len(shown) - 1)}" if shown[1:] else "")
    states = tuple(sorted({tensor.state.kind for tensor in parameters.values() if tensor.state}))
    runs = _runs(first, item) if src else None
    return TensorKind(
        name, states, len(names), nbytes, parameter.dtype, parameter.shape, src, dst,
        _src_words(planner, parameter, src),
        describe_layout(planner.layouts_of_rank(dst.boxes[0][1][0])[parameter.name]), runs,
    )  # fmt: skip


def _source(planner: Planner, parameter: Parameter) -> DrawnSharding | None:
    """Return how the source shards a tensor; None if it is made of several."""
    sharding, rank_of = parameter.sharding, planner.catalog.rank_of
    if not isinstance(sharding, Sharding):
        return None
    files_by_cell = sorted(sharding.files.items())
    return DrawnSharding(
        tuple((sharding.grid.box(c), tuple(map(rank_of, f))) for c, f in files_by_cell)
    )


def _src_words(planner: Planner, parameter: Parameter, src: DrawnSharding | None) -> str | None:
    """Say what each source rank holds of a tensor; None if it is made of several."""
    strategy, name = planner.catalog.strategy, parameter.src_name
    if src is None:
        return None
    if strategy is None or name not in strategy.stages_of:
        copies = f"{src.copies} cop" + ("y" if src.copies == 1 else "ies")
        return f"{'whole' if src.pieces == 1 else f'{src.pieces} boxes'}, {copies}"
    layout = strategy.stages[strategy.stages_of[name][0]][name]
    return describe_layout(layout.fold(parameter.shape, slices=False))


def _runs(transfer: Transfer, item: int) -> tuple[int, int]:
    """Return the shortest runs of a slice's copies, in bytes: as they are read, as written."""
    cell = next(iter(transfer.targets))
    target = transfer.grid.box(cell)
    source_box = transfer.parameter.grid.source_box
    pairs = [(r, source_box(c)) for c, r in transfer.copies(cell) if r.size]
    return (
        min((_run(region, source_box) for region, source_box in pairs), default=0) * item,
        min((_run(region, target) for region, _ in pairs), default=0) * item,
    )


def _run(region: Box, slice_box: Box) -> int:
    return region.size // count_runs(region.relative_to(slice_box), slice_box.shape)


def marginals(matrix: FlowMatrix) -> tuple[list[int], list[int]]:
    """Return the sums of rows and of columns, in bytes."""
    rows, columns = [0] * len(matrix.rows), [0] * len(matrix.columns)
    for (row, column), nbytes in matrix.cells.items():
        rows[row] += nbytes
        columns[column] += nbytes
    return rows, columns


def axes_of(kind: TensorKind) -> tuple[int, int]:
    """Return the axes that are drawn down and across: those that are sharded most."""
    ndim = len(kind.shape)
    if ndim < 2:
        return 0, -1
    sides = [kind.dst, *([kind.src] if kind.src else [])]
    counts = [
        sum(len({box.start[a] for box, _ in side.boxes}) for side in sides) for a in range(ndim)
    ]
    largest = sorted(range(ndim), key=lambda axis: (-counts[axis], axis))[:2]
    if counts[largest[1]] == len(sides):  # sharded on one axis alone: the last is drawn with it
        largest = [largest[0], ndim - 1 if largest[0] != ndim - 1 else 0]
    down, across = sorted(largest)
    return down, across


def as_drawn(kind: TensorKind) -> dict[str, Any]:
    """Return for JSON how a kind is sharded before and after, as a drawing shows it."""
    shape = " x ".join(map(str, kind.shape)) or "one value"
    states = f"; with {', '.join(kind.states)}" if kind.states else ""
    axes = axes_of(kind)
    also = f"; axes {axes[0]} and {axes[1]} are drawn" if len(kind.shape) > 2 else ""
    many = format_count(kind.count, "tensor")
    runs = ""
    if kind.runs:
        read, written = map(format_size, kind.runs)
        runs = f"; contiguous: {read} or more a read, {written} or more a write"
    sides = {"before": kind.src, "after": kind.dst}
    ranks = [
        rank for side in sides.values() if side for _, box_ranks in side.boxes for rank in box_ranks
    ]
    return {
        "title": kind.name,
        "about": f"{many} of {kind.dtype} {shape}; {format_size(kind.nbytes)}{states}{also}{runs}",
        "shape": kind.shape,
        "axes": [axis if 0 <= axis < len(kind.shape) else None for axis in axes],
        "change": kind.change,
        "sides": [
            {
                "name": name,
                "holds": _held_by(side, kind.shape) if side else "made of several",
                "bands": _bands(side, axes, min(ranks), max(ranks)) if side and side.boxes else [],
            }
            for name, side in sides.items()
        ],
    }


def _held_by(side: DrawnSharding, shape: Shape) -> str:
    slices_text = "whole" if side.is_whole(shape) else format_count(side.pieces, "slice")
    if side.copies < 2:
        return slices_text
    return f"{slices_text} on {side.copies:,} ranks" + (" each" if side.pieces > 1 else "")


def _bands(
    side: DrawnSharding, axes: tuple[int, int], first: int, last_rank: int
) -> list[dict[str, Any]]:
    """Return boxes, those next to each other as one where they are more than a drawing can show.

    hue: a number below 8, of the first rank that holds one.
    """
    drawn = [axis for axis in axes if 0 <= axis < len(side.boxes[0][0].start)]
    starts = [
        {s: n for n, s in enumerate(sorted({box.start[a] for box, _ in side.boxes}))} for a in drawn
    ]
    merged = [1] * len(drawn)
    while (
        prod(counts := [ceil(len(s) / factor) for s, factor in zip(starts, merged)]) > _MOST_BANDS
    ):
        merged[counts.index(max(counts))] *= 2
    bands: dict[tuple[int, ...], list[tuple[Box, tuple[int, ...]]]] = {}
    for box, ranks in side.boxes:
        position = (s[box.start[a]] // factor for s, a, factor in zip(starts, drawn, merged))
        bands.setdefault(tuple(position), []).append((box, ranks))
    drawn_bands, span = [], last_rank - first + 1
    for boxes in bands.values():
        holders = sorted({rank for _, box_ranks in boxes for rank in box_ranks})
        drawn_bands.append({
            "start": [*map(min, zip(*(box.start for box, _ in boxes)))],
            "stop": [*map(max, zip(*(box.stop for box, _ in boxes)))],
            "slices": len(boxes),
            "ranks": format_ranges(holders),
            "holders": len(holders),
            "hue": (holders[0] - first) * _HUES // span if span > _HUES else holders[0] - first,
        })  # fmt: skip
    return drawn_bands


def storage_notes(report: Report) -> list[str]:
    """Say where memory stood in for storage; nothing of a run whose files were there before."""
    if report.files_kept or report.files_continued or not report.bytes_written:
        return []
    notes = []
    if report.bytes_fetched is not None and report.bytes_fetched < report.bytes_read:
        cached = format_size(report.bytes_read - report.bytes_fetched)
        notes.append(
            f"At least {cached} of what was read came from memory, as the system counts; not all "
            "network file systems are in its count."
        )
    if not any(phases.get("fsync") for phases in report.phases):
        notes.append("What was written was not waited for: it may still be on its way to storage.")
    return notes
