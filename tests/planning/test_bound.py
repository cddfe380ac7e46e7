"""A bound is no more than any plan takes, and is reached where work is even."""

from __future__ import annotations

import json
import random

import pytest

from rankxform.planning.assign import Writers, assignment_of
from rankxform.planning.bound import bound_of
from rankxform.planning.reads import READ_METHODS, Costs, ReadPolicy
from rankxform.planning.simulate import simulate_work
from rankxform.planning.transfers import Reach
from rankxform.request import Request
from rankxform.transport import SerialTeam
from rankxform.verbs.plan import Cluster, simulate
from tests.planning.test_exchange import AUTO, ROW, TWO_PHASE, WHOLE, exchanges_of, of, random_work

COSTS = Costs(read=2.0, write=1.0, network=4.0, copy=4.0, read_latency=0.0, latency=0.0)


def simulated(plan, assignment, reach, costs, policy=AUTO):
    exchanges = exchanges_of(plan, assignment, reach, policy)
    return simulate_work(plan, assignment, reach, exchanges, costs, policy.method)


@pytest.mark.parametrize("seed", range(40))
def test_no_plan_is_faster(seed, tmp_path):
    rng = random.Random(seed)
    plan, assignment, reach, always = random_work(tmp_path, rng)
    costs = Costs(*(rng.choice([1e6, 1e8, 1e10]) for _ in range(4)), 1e-4, 3e-5, rng.random())
    policy = TWO_PHASE if always else ReadPolicy(READ_METHODS["auto"])
    total = simulated(plan, assignment, reach, costs, policy).total
    files, node = range(plan.dst.ranks), reach.node
    written = [
        {r.file for p, ranges in enumerate(assignment) if node[p] == n for r in ranges}
        for n in range(max(node) + 1)
    ]
    for places in ([set(files)] * (max(node) + 1), written):
        writers = Writers(Reach(node, tuple(map(frozenset, places))))
        bound = bound_of(plan, assignment, reach, writers, costs)
        assert 0 < bound.seconds <= total * (1 + 1e-9), bound


def test_what_is_repeated_is_no_more_than_is_read(tmp_path):
    """The last of 8 rows fills a vocabulary of 4,096."""
    shapes = {"model.embed_tokens.weight": {"shape": [8, 1024]}, "a.weight": {"shape": [8, 8]}}
    (tmp_path / "shapes.json").write_text(json.dumps(shapes))
    request = Request(
        "", None, None, None, shapes=str(tmp_path / "shapes.json"), vocab=4096,
        vocab_fill="repeat-last", costs=Costs(read=1e6, write=1e11, copy=1e11),
    )  # fmt: skip
    result = simulate(request, SerialTeam(), Cluster(2, 1))[2]
    assert 0 < result.balance <= 1


def test_even_work_on_one_file_system_reaches_it(tmp_path):
    """4 slices of 24 x 6 words for 4 processes: each reads and writes 576 bytes."""
    plan, node = of(tmp_path, ([4], ROW), ([4], ROW)), (0, 0, 1, 1)
    reach = Reach.full(node, range(4))
    writers = Writers.of_one_folder(node, range(4))
    assignment = assignment_of(plan, range(4), writers)
    bound = bound_of(plan, assignment, reach, writers, COSTS)
    assert bound == (576 / 2 + 576 / 1 + 576 / 4, "all processes")
    assert simulated(plan, assignment, reach, COSTS).total == pytest.approx(bound.seconds, rel=1e-3)


def test_a_node_whose_disk_has_all_is_the_bound(tmp_path):
    """Node 0 has the one source file, and sends its 2,304 bytes to node 1, whose file is another."""
    plan, node = of(tmp_path, ([1], WHOLE), ([2], WHOLE)), (0, 1)
    reach = Reach(node, (frozenset({0}), frozenset()))
    writers = Writers(Reach(node, (frozenset({0}), frozenset({1}))))
    assignment = assignment_of(plan, range(2), writers)
    bound = bound_of(plan, assignment, reach, writers, COSTS)
    assert bound == (2304 / 2 + 2304 / 1 + 2304 / 4 + 2304 / 4, "files of node 0")
    slow = bound_of(plan, assignment, reach, writers, Costs(2.0, 1.0, 0.1, 4.0))
    assert slow == (2304 / 0.1, "network of node 0")
