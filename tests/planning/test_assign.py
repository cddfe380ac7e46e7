"""Who writes which files: every slice once, within what processes may write, evenly."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from rankxform.planning.assign import Writers, assignment_of
from rankxform.planning.transfers import Reach
from tests.planning.test_exchange import ROW, of


def slices_of(plan, assignment):
    """Return by (file, position) the processes that write the slice."""
    return {
        (r.file, position): process
        for process, slice_ranges in enumerate(assignment)
        for r in slice_ranges
        for position in range(r.first, r.stop)
    }


@pytest.mark.parametrize("seed", range(30))
def test_every_slice_is_written_once_by_a_process_that_may_write_it(seed, tmp_path):
    rng = random.Random(seed)
    files, nodes = rng.choice((1, 4, 6)), rng.randint(1, 3)
    plan = of(tmp_path, ([4], ROW), ([files], ROW), ("a", "b", "c"))
    node = tuple(sorted([*range(nodes), *(rng.randrange(nodes) for _ in range(3))]))
    home = [{rng.randrange(nodes), rng.randrange(nodes)} for _ in range(files)]
    reach = Reach(
        node, tuple(frozenset(f for f in range(files) if n in home[f]) for n in range(nodes))
    )
    for one_node in (False, True):
        assignment = assignment_of(plan, range(files), Writers(reach, one_node))
        total = sum(r.stop - r.first for slice_ranges in assignment for r in slice_ranges)
        writers = slices_of(plan, assignment)
        assert len(writers) == total == 3 * files
        for (file, _), process in writers.items():
            assert node[process] in home[file]
        nodes_of_file = [{node[p] for (f, _), p in writers.items() if f == n} for n in range(files)]
        if one_node:
            assert all(len(found) == 1 for found in nodes_of_file)


@pytest.mark.parametrize("node", [(0, 0, 1), (0, 1, 1, 1), (0, 0, 1, 1, 2, 2, 2)])
def test_nodes_write_as_many_bytes_as_they_have_processes(node, tmp_path):
    plan = of(tmp_path, ([4], ROW), ([60], ROW), ("a", "b"), (240, 24))
    writers = Writers(Reach.full(node, range(60)), one_node=True)
    assignment = assignment_of(plan, range(60), writers)
    by_node = [0] * (max(node) + 1)
    for process, slice_ranges in enumerate(assignment):
        by_node[node[process]] += sum(r.stop - r.first for r in slice_ranges)
    for number, written in enumerate(by_node):
        share = 120 * node.count(number) / len(node)
        assert abs(written - share) <= 0.1 * share


@pytest.mark.parametrize("seed", range(10))
def test_what_is_not_divided_has_one_writer(seed, tmp_path):
    rng = random.Random(seed)
    names, files, processes = "abcdefgh", rng.choice((1, 4)), rng.randint(1, 5)
    plan = of(tmp_path, ([4], ROW), ([files], ROW), names)
    units = {}
    for file in range(files):
        positions = rng.sample(range(len(names)), len(names))
        cuts = sorted(rng.sample(range(1, len(names)), rng.randrange(len(names))))
        edges = [0, *cuts, len(names)]
        units[file] = [positions[a:b] for a, b in pairwise(edges)]
    writers = Writers.of_one_folder((0,) * processes, range(files))
    done = {0: {"a", "c"}}
    written = slices_of(plan, assignment_of(plan, range(files), writers, done, units))
    assert len(written) == len(names) * files
    for file, of_file in units.items():
        for positions in of_file:
            assert len({written[file, position] for position in positions}) == 1
    if processes > 1 and all(len(unit) == 1 for unit in units[0]):
        assert len({*written.values()}) > 1
