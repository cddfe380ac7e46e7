"""Who reads, who sends, and when that is cheaper, without a process or a file."""

from __future__ import annotations

import random
from dataclasses import replace
from graphlib import TopologicalSorter
from itertools import groupby, pairwise, product
from math import inf

import pytest

from rankxform.engine.pipeline import ScheduleCache, _tiles_in_order
from rankxform.geometry.box import Box
from rankxform.geometry.tiling import overlaps
from rankxform.planning import plan as planning_plan
from rankxform.planning import transfers
from rankxform.planning.assign import WorkAssigner, Writers, assignment_of, balance
from rankxform.planning.budget import MemoryBudget
from rankxform.planning.exchange import (
    WorkPlan,
    _balanced_readers,
    assign_readers,
    estimate_reads,
    find_exchanges,
    order_transfers,
    routes_of,
)
from rankxform.planning.plan import transfer_groups
from rankxform.planning.reads import (
    READ_METHODS,
    AutoReadMethod,
    Costs,
    IoEstimate,
    IoVolume,
    ReadCount,
    ReadCounter,
    ReadPolicy,
    count_reads,
    estimate_io,
)
from rankxform.planning.simulate import simulate_work
from rankxform.planning.transfers import Reach, SliceRange
from tests.planning import assigned
from tests.planning.test_plan import planner

ROW, COLUMN, WHOLE = [0, -1], [-1, 0], [-1, -1]


def of(tmp, src, dst, names=("w",), shape=(24, 24)):
    """Return a planner of equal parameters; `src` and `dst` are (device matrix, tensor map)."""
    layouts = [[dict.fromkeys(names, (*side, 0, 0))] for side in (src, dst)]
    return planner(tmp, *layouts, dict.fromkeys(names, (shape, "Float32")))


def spread(nodes, ranks, each=1):
    """Return the reach of `each` processes on every node, which have the ranks in runs."""
    per = ranks // nodes
    node = tuple(n for n in range(nodes) for _ in range(each))
    return Reach(node, tuple(frozenset(range(n * per, (n + 1) * per)) for n in range(nodes)))


AUTO = ReadPolicy(READ_METHODS["auto"], writing=1.0)
TWO_PHASE = ReadPolicy(READ_METHODS["two-phase"])


def exchanges_of(plan, assignment, reach, policy=AUTO):
    return assign_readers(find_exchanges(plan, assignment, reach, policy), reach)


def _transfers_of(process, plan, assignment, reach):
    alone = plan.transfers(assignment[process], reach.of(process))
    exchanges = exchanges_of(plan, assignment, reach)
    return order_transfers(process, alone, exchanges), bool(exchanges)


def test_exchanges_worked_out_by_hand(tmp_path):
    """4 columns on 2 nodes become 2 rows: each node sends half of each of its columns."""
    plan, reach = of(tmp_path, ([4], COLUMN), ([2], ROW)), spread(2, 4)
    assignment = [[SliceRange(0, 0, 1)], [SliceRange(1, 0, 1)]]
    (exchange,) = exchanges_of(plan, assignment, reach)
    assert {cell: dict(by) for cell, by in exchange.receivers.items()} == {
        (0, 0): {0: (0,)},
        (1, 0): {1: (1,)},
    }
    assert dict(exchange.senders) == {
        (0, 0): {0: (0, 0), 1: (0, 0)},
        (0, 1): {0: (0, 1), 1: (0, 1)},
        (0, 2): {1: (1, 2), 0: (1, 2)},
        (0, 3): {1: (1, 3), 0: (1, 3)},
    }
    mine = routes_of(exchange)[0]
    assert mine.read_here == [((0, 0), (0, 0)), ((0, 1), (0, 0))]
    assert mine.sends == {1: [((0, 0), (1, 0)), ((0, 1), (1, 0))]}
    assert mine.recvs == {1: [((0, 2), (0, 0)), ((0, 3), (0, 0))]}


def test_what_a_node_sees_is_not_sent_to_it(tmp_path):
    """Each node holds a replica of everything, so nothing is exchanged."""
    plan, reach = of(tmp_path, ([2, 2], ROW), ([4], COLUMN)), spread(2, 4, each=2)
    assert exchanges_of(plan, assigned(plan, 4, 4), reach) == []
    work, exchanges = _transfers_of(3, plan, assigned(plan, 4, 4), reach)
    assert not exchanges
    assert {rank for transfer in work for rank in transfer.readers.values()} <= {2, 3}


def test_one_process_of_a_node_passes_on_what_others_want(tmp_path):
    plan, reach = of(tmp_path, ([2], ROW), ([4], WHOLE)), spread(2, 2, each=2)
    assignment = [[SliceRange(rank, 0, 1)] for rank in range(4)]
    (exchange,) = exchanges_of(plan, assignment, reach)
    every = routes_of(exchange)
    crossing = [
        (sender, receiver, piece)
        for sender, own in every.items()
        for receiver, pieces in own.sends.items()
        for piece in pieces
        if reach.node[sender] != reach.node[receiver]
    ]
    assert len(crossing) == 2  # each half crosses once
    assert len({piece for *_, piece in crossing}) == 2
    assert sum(len(some) for own in every.values() for some in own.forwards.values()) == 2


def test_own_work_comes_in_between_what_is_read_for_others(tmp_path):
    """Process 0 alone sees the source; it writes half of the parameters, process 1 the others."""
    names = tuple(f"w{n}" for n in range(8))
    plan = of(tmp_path, ([1], WHOLE), ([1], WHOLE), names)
    assignment = [[SliceRange(0, 0, 4)], [SliceRange(0, 4, 8)]]
    reach = Reach((0, 1), (frozenset({0}), frozenset()))
    work, exchanges = _transfers_of(0, plan, assignment, reach)
    assert exchanges
    assert [bool(transfer.targets) for transfer in work] == [True, False] * 4


def random_work(tmp_path, rng):
    """Return a planner, the processes' slices and reach, and whether they always exchange."""
    kinds = [([m], t) for m in (1, 2, 3, 4, 6) for t in (ROW, COLUMN)] + [
        ([2, 3], ROW), ([3, 2], COLUMN), ([4], WHOLE), ([2, 2], ROW),
    ]  # fmt: skip
    src, dst = rng.choice(kinds), rng.choice(kinds)
    plan = of(tmp_path, src, dst, ("a", "b", "c"))
    ranks = [m[0] * (m[1] if len(m) > 1 else 1) for m, _ in (src, dst)]
    nodes = rng.randint(1, 4)
    node = tuple(sorted(rng.randrange(nodes) for _ in range(6)))
    node = tuple(sorted({n: i for i, n in enumerate(dict.fromkeys(node))}[n] for n in node))
    home = [rng.randrange(max(node) + 1) for _ in range(ranks[0])]
    seen = tuple(
        frozenset(r for r, h in enumerate(home) if h == n or rng.random() < 0.2)
        for n in range(max(node) + 1)
    )
    assignment = assigned(plan, ranks[1], len(node))
    return plan, assignment, Reach(node, seen), rng.random() < 0.3


@pytest.mark.parametrize("seed", range(30))
def test_every_piece_reaches_everyone_who_serves_it_once(seed, tmp_path):
    plan, assignment, reach, always = random_work(tmp_path, random.Random(seed))
    for exchange in exchanges_of(plan, assignment, reach, TWO_PHASE if always else AUTO):
        had = {}
        for process, own in routes_of(exchange).items():
            for piece in own.read_here:
                had.setdefault((process, piece), []).append(process)
            for post in (own.recvs, own.forwarded):
                for sender, pieces in post.items():
                    for piece in pieces:
                        had.setdefault((process, piece), []).append(sender)
        for cell, by in exchange.receivers.items():
            for (at, _), process in product(
                overlaps(exchange.parameter.grid, exchange.grid, cell), by
            ):
                assert len(had[process, (at, cell)]) == 1
                reader, rank = exchange.senders[at][process]
                assert rank in reach.of(reader)
        if always:
            readers = {at: {p for p, _ in by.values()} for at, by in exchange.senders.items()}
            assert all(len(processes) == 1 for processes in readers.values())


@pytest.mark.parametrize("seed", range(30))
def test_the_work_of_all_processes_makes_every_slice_once(seed, tmp_path):
    plan, assignment, reach, always = random_work(tmp_path, random.Random(seed))
    exchanges = exchanges_of(plan, assignment, reach, TWO_PHASE if always else AUTO)
    made = []
    for process, slices in enumerate(assignment):
        work = order_transfers(process, plan.transfers(slices, reach.of(process)), exchanges)
        for transfer in work:
            for cell, ranks in transfer.targets.items():
                made += [(transfer.parameter.name, cell, rank) for rank in ranks]
    wanted = [
        (name, plan.cell(layout, rank), rank)
        for rank in range(plan.dst.ranks)
        for name, layout in plan.layouts_of_file(rank).items()
    ]
    assert sorted(made) == sorted(wanted)


@pytest.mark.parametrize("exchanged", [False, True])
def test_a_process_makes_transfers_for_itself_alone(exchanged, tmp_path, monkeypatch):
    made = []

    class Counted(transfers.Transfer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            made.append(self)

    for module in (transfers, planning_plan):
        monkeypatch.setattr(module, "Transfer", Counted)
    plan = of(tmp_path, ([8], ROW), ([8], COLUMN), ("a", "b", "c"))
    assignment = assigned(plan, 8, 4)
    reach = Reach.full((0, 0, 1, 1), range(8))
    exchanges = exchanges_of(plan, assignment, reach, TWO_PHASE if exchanged else AUTO)
    assert not made and bool(exchanges) is exchanged
    work = order_transfers(1, plan.transfers(assignment[1]), exchanges)
    slices = sum(one.stop - one.first for one in assignment[1])
    assert sum(len(one.targets) for one in work) == slices < 24
    own = {plan.slices(one.file)[at][0].name for one in assignment[1]
           for at in range(one.first, one.stop)}  # fmt: skip
    in_exchanges = sum(exchange.part(1) is not None for exchange in exchanges)
    assert len(made) == len(own) + 2 * in_exchanges, "each by itself, and as a part, here too"


@pytest.mark.parametrize("seed", range(20))
def test_levels_are_as_low_as_can_be(seed):
    """Compare with the bound that any set of processes gives: what only they can do, over them."""
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    speeds = [rng.choice((1.0, 1.0, 0.25)) for _ in range(count)]
    classes = {tuple(sorted(rng.sample(range(count), rng.randint(1, count)))) for _ in range(5)}
    amounts = {members: float(rng.randint(1, 100)) for members in classes}
    assigned = balance(amounts, speeds)
    loads = [0.0] * count
    for members, assignment in assigned.items():
        assert sum(assignment) == pytest.approx(amounts[members])
        for process, part in zip(members, assignment):
            loads[process] += part
    longest = max(load / speed for load, speed in zip(loads, speeds))
    bound = 0.0
    for bits in range(1, 1 << count):
        some = {p for p in range(count) if bits >> p & 1}
        work = sum(amount for members, amount in amounts.items() if some.issuperset(members))
        bound = max(bound, work / sum(speeds[p] for p in some))
    assert longest <= 1.02 * bound


def test_pieces_are_assigned_in_runs():
    assigner = WorkAssigner(balance({(0, 1): 8.0}, (1.0, 1.0)))
    assert [assigner.next((0, 1), 1.0) for _ in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_large_pieces_are_assigned_so_that_all_are_as_far_at_any_time():
    """Three kinds of pieces that two of three processes can do: no process does two in a row."""
    kinds = [(0, 1), (0, 2), (1, 2)]
    size = float(1 << 25)
    assigner = WorkAssigner(balance(dict.fromkeys(kinds, 8 * size), (1.0, 1.0, 1.0)))
    for _ in range(8):
        assert sorted(assigner.next(members, size) for members in kinds) == [0, 1, 2]


def test_reading_is_counted_by_node(tmp_path):
    """One file of 24 rows, wanted by 4 columns on 2 nodes: both read all rows, or one does."""
    plan = of(tmp_path, ([1], WHOLE), ([4], COLUMN))
    reach = Reach((0, 0, 1, 1), (frozenset({0}),) * 2)
    found = estimate_reads(
        plan, [[SliceRange(rank, 0, 1)] for rank in range(4)], reach, READ_METHODS["auto"]
    )
    whole = 24 * 24 * 4
    assert (found.separate, found.once) == (IoVolume(2 * whole, 2), IoVolume(whole, 1))
    assert found.crossing == IoVolume(whole // 2, 2)


def test_who_passes_on_what_a_node_wants_whole_takes_turns(tmp_path):
    """Six parameters, all on the first node, are wanted by all four processes of the second."""
    plan = of(tmp_path, ([1], WHOLE), ([4], WHOLE), tuple("abcdef"))
    reach = Reach((0, 1, 1, 1, 1), (frozenset({0}), frozenset()))
    assignment = [[], *([SliceRange(rank, 0, 6)] for rank in range(4))]
    first = []
    for exchange in exchanges_of(plan, assignment, reach):
        sent = routes_of(exchange)[0].sends
        assert len(sent) == 1, "what crosses to a node crosses once"
        first += sent
    assert sorted(first) == [1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("storage", "network", "exchanged"), [(1e8, 1e10, True), (1e9, 1e7, False)]
)
def test_the_cheaper_way_is_taken(storage, network, exchanged, tmp_path):
    plan = of(tmp_path, ([1], WHOLE), ([4], COLUMN))
    reach = Reach((0, 0, 1, 1), (frozenset({0}),) * 2)
    assignment = [[SliceRange(rank, 0, 1)] for rank in range(4)]
    costs = Costs(read=storage / 4, network=network)
    policy = ReadPolicy(READ_METHODS["auto"], costs, may_exchange=True)
    assert bool(exchanges_of(plan, assignment, reach, policy)) == exchanged


@pytest.mark.parametrize(("overlap", "exchanged"), [(1.0, True), (0.0, False)])
def test_sending_counts_where_it_does_not_go_on_beside_reading(overlap, exchanged):
    """Two nodes read 2 s each for themselves; or 1 s and then send for 1 s."""
    found = IoEstimate(
        separate=IoVolume(4000, 4), once=IoVolume(2000, 2), crossing=IoVolume(2000, 2)
    )
    costs = Costs(read=1e3, network=1e3, copy=1e9, read_latency=0.0, latency=0.0, overlap=overlap)
    assert costs.overlapped(1.0, 0.5) == 1.5 - 0.5 * overlap
    assert found.exchange_is_cheaper(costs, 2, 2) == exchanged


def test_nothing_is_exchanged_that_every_node_reads_a_part_of(tmp_path):
    plan = of(tmp_path, ([1], WHOLE), ([4], ROW))
    (movement,) = transfer_groups(plan, [[plan.whole_file(rank)] for rank in range(4)])
    found = estimate_io(movement, (0, 0, 1, 1), ReadCounter(READ_METHODS["auto"]))
    assert found.separate.nbytes == found.once.nbytes
    assert not found.exchange_is_cheaper(Costs(read=1.0), 4, 2)


def test_a_simulation_counts_what_was_worked_out_by_hand(tmp_path):
    plan, reach = of(tmp_path, ([4], COLUMN), ([2], ROW)), spread(2, 4)
    assignment = assignment_of(
        plan, range(2), Writers(Reach((0, 1), (frozenset({0}), frozenset({1}))))
    )
    costs = Costs(read=1e3, write=1e3, network=1e2, copy=1e9)
    found = simulate_work(
        plan, assignment, reach, exchanges_of(plan, assignment, reach), costs, READ_METHODS["auto"]
    )
    half = 24 * 24 * 4 // 2
    for load in found.workloads:
        assert (load.read, load.sent, load.received, load.written) == (
            half,
            half // 2,
            half // 2,
            half,
        )
        assert (load.sent_nearby, load.messages, load.slices) == (0, 1, 1)
    assert found.network == (half / 2 / 1e2,) * 2
    assert found.total == max(*found.network, *found.seconds)


def test_one_run_is_read_in_one_piece_whatever_was_asked_for():
    wanted, held = Box((0, 2, 0), (1, 4, 4096)), Box((0, 0, 0), (1, 8, 4096))
    for method in READ_METHODS.values():
        assert count_reads(method, wanted, held, 4) == ReadCount("whole", 4 * wanted.size, 1)
    rows = Box((0, 2, 0), (2, 4, 4096)), Box((0, 0, 0), (2, 8, 4096))
    methods = [
        READ_METHODS["ranges"],
        READ_METHODS["sieving"],
        AutoReadMethod(0.0),
        AutoReadMethod(inf),
    ]
    used = [count_reads(method, *rows, 4).method for method in methods]
    assert used == ["ranges", "sieving"] * 2


@pytest.mark.parametrize("name", READ_METHODS)
@pytest.mark.parametrize("seed", range(20))
def test_a_read_method_reads_what_is_wanted_within_the_block(name, seed):
    """The contract of the protocol, for every method that is registered."""
    rng = random.Random(seed)
    shape = [rng.randint(1, 6) for _ in range(rng.randint(1, 3))]
    ends = [sorted(rng.sample(range(extent + 1), 2)) for extent in shape]
    wanted = Box(tuple(a for a, _ in ends), tuple(b for _, b in ends))
    block, method = Box.whole(tuple(shape)), READ_METHODS[name]
    box = method.box(wanted, block, 4)
    assert block.contains(box) and box.contains(wanted)
    assert method.with_latency(1e3).exchanges == method.exchanges


def test_disks_of_nodes_are_read_evenly_and_no_byte_twice_on_one(tmp_path):
    """4 nodes of 4 processes; half of the tensors are in rows, half are whole on every rank."""
    rows, whole = [f"r{n}" for n in range(40)], [f"w{n}" for n in range(40)]
    params = {name: ((160, 40 + 4 * n), "Float32") for n, name in enumerate([*rows, *whole])}
    layouts = [
        {**dict.fromkeys(rows, (counts, rank_of, 0, 0)), **dict.fromkeys(whole, (counts, WHOLE, 0, 0))}
        for counts, rank_of in (([8], ROW), ([16], ROW))
    ]  # fmt: skip
    plan, reach = planner(tmp_path, *([one] for one in layouts), params), spread(4, 8, 4)
    assignment = [[plan.whole_file(rank)] for rank in (*range(8, 16), *range(8))]
    method = READ_METHODS["auto"]
    requests = find_exchanges(plan, assignment, reach, AUTO)
    exchanges = assign_readers(requests, reach)
    found = simulate_work(plan, assignment, reach, exchanges, Costs(), method)
    read = [load.read for load in found.workloads]
    once, on_each = (
        sum(4 * params[name][0][0] * params[name][0][1] for name in some) for some in (rows, whole)
    )
    assert sum(read) == once + 4 * on_each
    assert max(read) <= 1.03 * sum(read) / 16


def test_tensors_that_other_nodes_send_are_made_in_turn(tmp_path):
    """Each of four nodes wants all rows of what two nodes have, and two others too."""
    names = [f"w{n}" for n in range(6)]
    plan, reach = of(tmp_path, ([2, 2], COLUMN), ([4], ROW), names), spread(4, 4)
    exchanges = exchanges_of(plan, assigned(plan, 4, 4), reach)
    senders = [
        {reader for by in one.senders.values() for to, (reader, _) in by.items() if reader != to}
        for one in exchanges
    ]
    assert senders == [{0, 1}, {2, 3}] * 3
    positions = [one.position for one in exchanges]
    assert positions == sorted(positions) and positions[::2] == positions[1::2]
    assert len(set(positions)) == 3


def test_what_one_process_sends_or_nobody_is_made_by_itself(tmp_path):
    """Each queue has one tensor, so that all would be in the middle of the whole."""
    names = [f"w{n}" for n in range(4)]
    plan = of(tmp_path, ([1], WHOLE), ([4], WHOLE), names)
    assignment = [[], *([SliceRange(n, n, n + 1)] for n in range(4))]
    alone = Reach((0, 1, 2, 3, 4), (frozenset({0}), *[frozenset()] * 4))
    full = Reach.full((0, 0, 0, 0, 0), [0])
    for reach, policy in ((alone, AUTO), (full, TWO_PHASE)):
        exchanges = exchanges_of(plan, assignment, reach, policy)
        positions = [one.position for one in exchanges]
        assert len(positions) == 4 and positions == sorted({*positions})


@pytest.mark.parametrize("seed", range(40))
def test_all_processes_have_tiles_in_one_order(seed, tmp_path):
    """Whatever they have no part in: an order that two see differently would be a deadlock."""
    rng = random.Random(seed)
    if seed % 2:
        plan, assignment, reach, always = random_work(tmp_path, rng)
    else:
        counts = rng.choice([[2, 2], [4, 2], [2, 4]])
        names = [f"w{n}" for n in range(rng.randint(2, 9))]
        plan = of(tmp_path, (counts, COLUMN), ([rng.choice([2, 3, 6])], ROW), names, (24, 32))
        reach, always = spread(counts[0] * counts[1], counts[0] * counts[1]), False
        assignment = assigned(plan, plan.dst.ranks, len(reach.node))
    policy = TWO_PHASE if always else AUTO
    exchanges = exchanges_of(plan, assignment, reach, policy)
    budget, before, several = MemoryBudget(0, 0, 3072, 3, 0, 0), {}, 0
    for process, slices in enumerate(assignment):
        work = order_transfers(process, plan.transfers(slices, reach.of(process)), exchanges)
        cache = ScheduleCache(budget, policy.method)
        tiles = [
            (tile.transfer.parameter.name, tile.transfer.exchange.position,
             tile.plan._alike.first.shifted(tile.plan._alike.axis, tile.repeat * tile.plan._alike.step))
            for tile in _tiles_in_order(WorkPlan(work, policy, True, 0), cache)
            if tile.plan is not None and tile.transfer.exchange is not None
        ]  # fmt: skip
        assert len({*tiles}) == len(tiles)
        several += len(tiles) > len({name for name, *_ in tiles})
        in_a_row = _tiles_in_order(WorkPlan(work, policy, True, 0), cache, in_turn=False)
        transfer_ids = [id(tile.transfer) for tile in in_a_row if tile.plan is not None]
        assert len([*groupby(transfer_ids)]) == len({*transfer_ids})
        for first, second in pairwise(tiles):
            before.setdefault(second, set()).add(first)
    TopologicalSorter(before).prepare()  # raises for a cycle
    assert several or seed % 2


def test_who_writes_more_reads_less_for_others(tmp_path):
    """Two nodes have all; the first writes two files of four, the third has none and writes one."""
    names = [f"w{n}" for n in range(8)]
    plan = of(tmp_path, ([2], WHOLE), ([4], WHOLE), names)
    reach = Reach((0, 1, 2), (frozenset({0}), frozenset({1}), frozenset()))
    files_of = (0, 1), (2,), (3,)
    assignment = [[SliceRange(file, 0, len(names)) for file in files] for files in files_of]
    senders = [
        exchange.senders[cell][2][0]
        for exchange in exchanges_of(plan, assignment, reach)
        for cell in exchange.senders
    ]
    assert senders == [1] * len(names)


@pytest.mark.parametrize("seed", range(30))
def test_the_busiest_process_is_done_no_later_for_what_is_written(seed, tmp_path):
    """Pieces that cannot be divided make a balance of all work worse than one of reads, at times."""
    plan, assignment, reach, _ = random_work(tmp_path, random.Random(seed))
    pending = find_exchanges(plan, assignment, reach, AUTO)
    requests, speeds = pending.requests, [1.0] * len(assignment)

    def longest(readers_of):
        total = [sum(both) for both in zip(pending.read, pending.written)]
        for request, readers in zip(requests, readers_of):
            for reader, nbytes in zip(readers, request.group.nbytes):
                total[reader] += nbytes
        return max(total)

    without_writes = replace(pending, written=[0.0] * len(assignment))
    chosen, others = (_balanced_readers(requests, p, speeds) for p in (pending, without_writes))
    assert longest(chosen) <= longest(others)
