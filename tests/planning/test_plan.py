"""The plan as data: worked out by hand, counted, and at the size of the largest real model."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from rankxform.formats.container import Schema, item_size
from rankxform.geometry.box import Box
from rankxform.layout.names import patterns
from rankxform.planning import plan as plan_module
from rankxform.planning.assign import partition_evenly
from rankxform.planning.build_catalog import catalog_of
from rankxform.planning.catalog import Description
from rankxform.planning.plan import Planner, needed_bytes
from rankxform.planning.selection import select_parameters
from rankxform.planning.transfers import SliceRange
from rankxform.storage import user_files
from tests import reference
from tests.planning import assigned

DEEPSEEK = Path(__file__).parents[1] / "data" / "models" / "deepseek_v3"


def described(strategy, params):
    """Describe a checkpoint that holds `params` as `strategy` shards them, without any file."""
    schemas = {}
    for stage, layouts in enumerate(strategy.stages):
        held = [(n, layouts[n], *params[n]) for n in layouts if n in params]
        schema = Schema(
            tuple(n for n, *_ in held),
            tuple(dtype for *_, dtype in held),
            tuple(tuple(s // c for s, c in zip(shape, lay.counts)) for _, lay, shape, _ in held),
        )
        for rank in strategy.ranks_in(stage):
            schemas[rank] = schema
    paths = {rank: f"rank_{rank}" for rank in schemas}
    return catalog_of(Description(strategy.label, strategy), schemas, paths, schemas)


def planner(tmp, src, dst, params):
    a, b = (
        user_files.load_strategy(reference.write_strategy(tmp / n, s))
        for n, s in (("a", src), ("b", dst))
    )
    catalog = described(a, params)
    return Planner(catalog, b, select_parameters(catalog, b))


def slices(planner, file):
    """Return (name, box, [(source rank, box that is copied from it)]) of each slice of a file."""
    return [
        (
            transfer.parameter.name,
            transfer.grid.box(cell),
            [(transfer.readers[src_cell], box) for src_cell, box in transfer.copies(cell)],
        )
        for transfer in planner.transfers([planner.whole_file(file)])
        for cell in transfer.targets
    ]


def written_out(plan, rank):
    """Return a line for each slice of a rank: its box, and the boxes of source ranks in it."""
    lines = []
    for transfer in plan.transfers([plan.whole_file(rank)]):
        grid = transfer.parameter.grid
        for cell in transfer.targets:
            sources = "".join(
                f"  <- rank {transfer.readers[src_cell]} {grid.destination_box(src_cell, box)}"
                for src_cell, box in transfer.copies(cell)
            )
            lines.append(
                f"rank {rank}  {transfer.parameter.name} {transfer.grid.box(cell)}{sources}"
            )
    return "\n".join(lines)


def test_a_plan_worked_out_by_hand(tmp_path):
    """4x4 by rows on 2 ranks to columns on 2: the example in the module's docstring."""
    plan = planner(
        tmp_path,
        [{"w": ([2], [0, -1], 0, 0)}],
        [{"w": ([2], [-1, 0], 0, 0)}],
        {"w": ((4, 4), "Float32")},
    )
    regions = [(0, Box((0, 2), (2, 4))), (1, Box((2, 2), (4, 4)))]
    assert slices(plan, 1) == [("w", Box((0, 2), (4, 4)), regions)]
    assert (
        written_out(plan, 1) == "rank 1  w [0:4, 2:4]  <- rank 0 [0:2, 2:4]  <- rank 1 [2:4, 2:4]"
    )
    assert written_out(plan, 0) + "\n    " + written_out(plan, 1) in plan_module.__doc__
    total = plan.file_totals([1])[1]
    assert (total.slices, total.copies, total.written) == (1, 2, 32)
    assert total.read_by_rank == {0: 16, 1: 16}


def read_by_rank(transfers):
    """Return for each source rank the bytes that transfers read."""
    found = {}
    for transfer in transfers:
        item = item_size(transfer.parameter.src_dtype)
        for dst_cell in transfer.targets:
            for cell, box in transfer.copies(dst_cell):
                rank = transfer.readers[cell]
                found[rank] = found.get(rank, 0) + box.size * item
    return found


def test_replicas_share_the_load_and_each_box_has_one_reader(tmp_path):
    params = {f"p{i}": ((8, 8), "Float32") for i in range(12)}
    src = [dict.fromkeys(params, ([4], [-1, -1], 0, 0))]
    dst = [dict.fromkeys(params, ([2], [0, -1], 0, 0))]
    plan = planner(tmp_path, src, dst, params)
    read = read_by_rank(plan.transfers([SliceRange(rank, 0, 12) for rank in range(2)]))
    assert sum(read.values()) == 12 * 256
    assert set(read.values()) == {3 * 256}
    again = planner(tmp_path, src, dst, params)
    assert all(slices(again, rank) == slices(plan, rank) for rank in range(2))


def test_a_parameter_and_its_states_are_read_of_one_replica(tmp_path):
    """In whatever order they lie; the ranks share the bytes all the same."""
    names = [f"{state}p{i}" for state in ("", "adam_m.", "adam_v.") for i in range(8)]
    params = dict.fromkeys(names, ((8, 8), "Float32"))
    src, dst = ([dict.fromkeys(params, ([n], [-1, -1], 0, 0))] for n in (4, 1))
    plan = planner(tmp_path, src, dst, params)
    read = read_by_rank(plan.transfers([SliceRange(0, 0, len(names))]))
    assert {*read.values()} == {6 * 256}
    ranks = {n: plan.replica(p) for n, p in plan.selection.sharded.items()}
    assert all(ranks[f"adam_{k}.p{i}"] == ranks[f"p{i}"] for k in "mv" for i in range(8))


def test_destination_replicas_are_copied_from_one_source(tmp_path):
    plan = planner(
        tmp_path, [{"w": ([4], [-1], 0, 0)}], [{"w": ([4], [-1], 0, 0)}], {"w": ((8,), "Float32")}
    )
    assert all(slices(plan, rank) == slices(plan, 0) for rank in range(4))


def test_ranks_own_values_come_from_the_congruent_rank(tmp_path):
    """All of them from one rank, so that no file mixes the statistics of several."""
    params = dict.fromkeys(("mean", "variance", "w"), ((8,), "Float32"))
    src, dst = ([dict.fromkeys(params, ([n], [-1], 0, 0))] for n in (4, 2))
    plan = planner(tmp_path, src, dst, params).with_per_rank_tensors(
        frozenset({"mean", "variance"})
    )
    for rank in range(2):
        mean, variance, _ = slices(plan, rank)
        assert [src_rank for src_rank, _ in mean[2] + variance[2]] == [rank, rank]
    assert plan.equal_files((0, 1)) == {0: [0], 1: [1]}


def test_copies_tile_every_slice(tmp_path):
    params = {"w": ((24, 30), "Int8")}
    src, dst = [{"w": ([2, 3], [1, 0], 0, 0)}], [{"w": ([5], [-1, 0], 0, 0)}]
    for rank in range(5):
        ((_, slice_box, copies),) = slices(planner(tmp_path, src, dst, params), rank)
        marks = np.zeros((24, 30), int)
        for _, box in copies:
            marks[box.slices()] += 1
        assert (marks[slice_box.slices()] == 1).all() and marks.sum() == slice_box.size


@pytest.mark.parametrize(
    "weights", [[], [1], [5, 5, 5, 5], [9, 1, 1, 1], [1, 1, 1, 9], [3, 1, 4, 1, 5, 9]]
)
@pytest.mark.parametrize("processes", [1, 2, 3, 8])
def test_work_is_assigned_in_runs_whose_largest_is_smallest(weights, processes):
    assignment = partition_evenly(weights, processes)
    assert len(assignment) == processes
    assert [i for assign in assignment for i in assign] == list(range(len(weights)))
    largest = max((sum(weights[i] for i in assign) for assign in assignment), default=0)

    def fits(limit, at=0, left=processes):
        total = 0
        while at < len(weights) and total + weights[at] <= limit:
            total += weights[at]
            at += 1
        return at == len(weights) or (left > 1 and fits(limit, at, left - 1))

    assert not weights or not fits(largest - 1)


@pytest.mark.parametrize("processes", [1, 2, 3, 4, 5, 7])
def test_every_slice_is_written_by_one_process(processes, tmp_path):
    params = {f"p{i}": ((8, 1024), "Float32") for i in range(10)}
    stages = [dict.fromkeys(params, ([4], [0, -1], 0, 0))]
    plan = planner(tmp_path, stages, stages, params)
    assignment = assigned(plan, 4, processes)
    assert len(assignment) == processes
    written = [
        (p.file, i)
        for slice_ranges in assignment
        for p in slice_ranges
        for i in range(p.first, p.stop)
    ]
    assert sorted(written) == [(rank, i) for rank in range(4) for i in range(10)]
    loads = [sum(p.stop - p.first for p in slice_ranges) for slice_ranges in assignment]
    assert max(loads) <= -(-40 // processes)
    whole = [p for slice_ranges in assignment for p in slice_ranges if p.stop - p.first == 10]
    assert len(whole) == 4 or 4 % processes, (
        "files are sharded only where whole ones do not balance"
    )


def test_parameters_are_assigned_where_files_would_read_everything_often(tmp_path):
    """One file sharded into eight by columns: each of two processes would read all rows."""
    params = {f"w{i}": ((8, 1024), "Float32") for i in range(4)}
    plan = planner(
        tmp_path,
        [dict.fromkeys(params, ([1], [-1, -1], 0, 0))],
        [dict.fromkeys(params, ([8], [-1, 0], 0, 0))],
        params,
    )
    assignment = assigned(plan, 8, 2)
    assert [[(p.file, p.first, p.stop) for p in slice_ranges] for slice_ranges in assignment] == [
        [(rank, 0, 2) for rank in range(8)],
        [(rank, 2, 4) for rank in range(8)],
    ]


def test_one_large_parameter_is_not_left_to_one_process(tmp_path):
    """Reading its rows twice costs less than letting half of the processes idle."""
    params = {"w": ((8, 1024), "Float32")}
    sharded = [{"w": ([8], [-1, 0], 0, 0)}]
    plan = planner(tmp_path, [{"w": ([1], [-1, -1], 0, 0)}], sharded, params)
    assert [len(slice_ranges) for slice_ranges in assigned(plan, 8, 2)] == [4, 4]


def test_ranks_with_equal_boxes_are_written_by_one_process(tmp_path):
    params = {"w": ((8, 1024), "Float32")}
    stages = [dict.fromkeys(params, ([2, 2], [0, -1], 0, 0))]
    assignment = assigned(planner(tmp_path, stages, stages, params), 4, 2)
    assert [[p.file for p in slice_ranges] for slice_ranges in assignment] == [[0, 2], [1, 3]]


def test_names_are_summed_up_by_pattern():
    names = [f"layers.{i}.w.{j}" for i in range(3) for j in range(2)] + ["head2"]
    assert patterns(names) == ["layers.*.w.* (6)", "head2"]


@pytest.fixture(scope="module")
def deepseek():
    src = user_files.load_strategy(
        str(DEEPSEEK / "full671b_1024p_dp16mp4pp16ep8" / "merged_ckpt_strategy.ckpt")
    )
    dst = user_files.load_strategy(
        str(DEEPSEEK / "dst_512p_dp16mp4pp8ep32" / "merged_ckpt_strategy.ckpt")
    )
    params = {}
    text = (DEEPSEEK / "full671b_1024p_dp16mp4pp16ep8" / "params.txt").read_text()
    for name, shape in re.findall(r"PARAM (\S+) \(([\d, ]*)\)", text):
        full = tuple(int(n) for n in shape.split(",") if n.strip())
        for state in ("", "adam_m.", "adam_v."):
            if state + name in src and "expert_load" not in name:
                params[state + name] = full, "Float32"
    catalog = described(src, params)
    return src, dst, params, Planner(catalog, dst, select_parameters(catalog, dst))


def test_deepseek_v3_reads_what_it_needs_once(deepseek):
    _, dst, params, plan = deepseek
    assert dst.ranks == 512
    total = sum(int(np.prod(shape, dtype=object)) * item_size(t) for shape, t in params.values())
    everything = [SliceRange(rank, 0, len(plan.layouts_of_file(rank))) for rank in range(512)]
    transfers = plan.transfers(everything)
    assert needed_bytes(plan, everything) == sum(read_by_rank(transfers).values()) == total
    assert 8.1e12 < total < 8.3e12


@pytest.mark.parametrize("rank", [0, 37, 200, 511])
def test_deepseek_v3_plans_equal_the_slow_reference(rank, deepseek):
    """Ranks by their coordinates alone: who holds which part is told by cutting index ranges."""
    src, dst, params, plan = deepseek
    planned = slices(plan, rank)
    held = dst.stages[dst.stage_of(rank)]
    assert {name for name, _, _ in planned} == set(held) & set(params)
    for name, slice_box, copies in planned:
        shape = plan.parameter(name).shape
        assert ranges(held[name], shape, rank % dst.stage_size) == list(
            zip(slice_box.start, slice_box.stop)
        )
        stage = src.stages_of[name][0]
        volume = 0
        for src_rank, box in copies:
            assert src.stage_of(src_rank) == stage
            there = ranges(src.stages[stage][name], shape, src_rank % src.stage_size)
            assert all(a <= c and d <= b for (a, b), c, d in zip(there, box.start, box.stop))
            assert slice_box.contains(box)
            volume += box.size
        assert volume == slice_box.size
        assert len({box for _, box in copies}) == len(copies)


def ranges(layout, shape, rank):
    """Shard each axis by itself with the reference, as an array of the indexes along it."""
    found = []
    for axis, extent in enumerate(shape):
        alone = [-1] * len(shape)
        alone[axis] = list(layout.tensor_map[axis]) or -1
        indexes = np.arange(extent).reshape([extent if j == axis else 1 for j in range(len(shape))])
        part = reference.shard(indexes, (layout.device_matrix, alone, 0, 0), rank)
        if axis == 0 and layout.opt_step and layout.opt_size:
            whole = (layout.device_matrix, layout.printable_map, 0, 0)
            group = [
                r
                for r in range(layout.ranks)
                if reference._place(r, whole) == reference._place(rank, whole)
            ]
            shards = len(group) if layout.opt_size == -1 else layout.opt_size
            part = np.split(part, shards, 0)[group.index(rank) % shards]
        flat = part.ravel()
        assert flat[-1] - flat[0] + 1 == flat.size
        found.append((int(flat[0]), int(flat[-1]) + 1))
    return found
