"""Who reads, who sends, and when that is cheaper, without a process or a file."""

from __future__ import annotations

import random
from itertools import product
from math import inf

import pytest

from rankxform.geometry.box import Box
from rankxform.planning.assign import share, share_seen
from rankxform.planning.cost_model import Choice, Costs, Reading, Side, reading_of
from rankxform.planning.demand import both_ways, demand
from rankxform.planning.exchange import deal, work_of
from rankxform.planning.level import Dealer, level
from rankxform.planning.routes import posts
from rankxform.planning.simulate import simulate
from rankxform.planning.transfers import Portion, Read, read_of
from rankxform.planning.visibility import Sight
from tests.planning.test_plan import planner

ROW, COLUMN, WHOLE = [0, -1], [-1, 0], [-1, -1]


def of(tmp, src, dst, names=("w",), shape=(24, 24)):
    """Return a planner of equal parameters; `src` and `dst` are (device matrix, tensor map)."""
    layouts = [[dict.fromkeys(names, (*side, 0, 0))] for side in (src, dst)]
    return planner(tmp, *layouts, dict.fromkeys(names, (shape, "Float32")))


def spread(nodes, ranks, each=1):
    """Return the sight of `each` processes on every node, which have the ranks in runs."""
    per = ranks // nodes
    node = tuple(n for n in range(nodes) for _ in range(each))
    return Sight(node, tuple(frozenset(range(n * per, (n + 1) * per)) for n in range(nodes)))


def _work_of(process, plan, shares, sight):
    alone = plan.moves(shares[process], sight.of(process))
    trades = deal(demand(plan, shares, sight, Choice()), sight)
    return work_of(process, alone, trades), bool(trades)


def test_trades_worked_out_by_hand(tmp_path):
    """4 columns on 2 nodes become 2 rows: each node sends half of each of its columns."""
    plan, sight = of(tmp_path, ([4], COLUMN), ([2], ROW)), spread(2, 4)
    shares = [[Portion(0, 0, 1)], [Portion(1, 0, 1)]]
    (trade,) = deal(demand(plan, shares, sight, Choice()), sight)
    assert {cell: dict(by) for cell, by in trade.servers.items()} == {
        (0, 0): {0: (0,)},
        (1, 0): {1: (1,)},
    }
    assert trade.senders == {
        (0, 0): {0: (0, 0), 1: (0, 0)},
        (0, 1): {0: (0, 1), 1: (0, 1)},
        (0, 2): {1: (1, 2), 0: (1, 2)},
        (0, 3): {1: (1, 3), 0: (1, 3)},
    }
    mine = posts(trade)[0]
    assert mine.own == [((0, 0), (0, 0)), ((0, 1), (0, 0))]
    assert mine.out == {1: [((0, 0), (1, 0)), ((0, 1), (1, 0))]}
    assert mine.into == {1: [((0, 2), (0, 0)), ((0, 3), (0, 0))]}


def test_what_a_node_sees_is_not_sent_to_it(tmp_path):
    """Each node holds a replica of everything, so nothing is traded."""
    plan, sight = of(tmp_path, ([2, 2], ROW), ([4], COLUMN)), spread(2, 4, each=2)
    assert deal(demand(plan, share(plan, range(4), 4), sight, Choice()), sight) == []
    work, trades = _work_of(3, plan, share(plan, range(4), 4), sight)
    assert not trades
    assert {rank for move in work for rank in move.readers.values()} <= {2, 3}


def test_one_process_of_a_node_passes_on_what_others_want(tmp_path):
    plan, sight = of(tmp_path, ([2], ROW), ([4], WHOLE)), spread(2, 2, each=2)
    shares = [[Portion(rank, 0, 1)] for rank in range(4)]
    (trade,) = deal(demand(plan, shares, sight, Choice()), sight)
    every = posts(trade)
    crossing = [
        (sender, receiver, piece)
        for sender, own in every.items()
        for receiver, pieces in own.out.items()
        for piece in pieces
        if sight.node[sender] != sight.node[receiver]
    ]
    assert len(crossing) == 2  # each half crosses once
    assert len({piece for *_, piece in crossing}) == 2
    assert sum(len(some) for own in every.values() for some in own.passing.values()) == 2


def test_own_work_comes_in_between_what_is_read_for_others(tmp_path):
    """Process 0 alone sees the source; it writes half of the parameters, process 1 the others."""
    names = tuple(f"w{n}" for n in range(8))
    plan = of(tmp_path, ([1], WHOLE), ([1], WHOLE), names)
    shares = [[Portion(0, 0, 4)], [Portion(0, 4, 8)]]
    sight = Sight((0, 1), (frozenset({0}), frozenset()))
    work, trades = _work_of(0, plan, shares, sight)
    assert trades
    assert [bool(move.targets) for move in work] == [True, False] * 4


@pytest.mark.parametrize("seed", range(30))
def test_every_piece_reaches_everyone_who_serves_it_once(seed, tmp_path):
    rng = random.Random(seed)
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
    sight, always = Sight(node, seen), rng.random() < 0.3
    shares = share(plan, range(ranks[1]), len(node))
    for trade in deal(demand(plan, shares, sight, Choice(always=always)), sight):
        had = {}
        for process, own in posts(trade).items():
            for piece in own.own:
                had.setdefault((process, piece), []).append(process)
            for post in (own.into, own.passed):
                for sender, pieces in post.items():
                    for piece in pieces:
                        had.setdefault((process, piece), []).append(sender)
        for cell, by in trade.servers.items():
            for (at, _), process in product(trade.copies(cell), by):
                assert len(had[process, (at, cell)]) == 1
                reader, rank = trade.senders[at][process]
                assert rank in sight.of(reader)
        if always:
            readers = {at: {p for p, _ in by.values()} for at, by in trade.senders.items()}
            assert all(len(processes) == 1 for processes in readers.values())


@pytest.mark.parametrize("seed", range(20))
def test_levels_are_as_low_as_can_be(seed):
    """Compare with the bound that any set of processes gives: what only they can do, over them."""
    rng = random.Random(seed)
    count = rng.randint(2, 5)
    speeds = [rng.choice((1.0, 1.0, 0.25)) for _ in range(count)]
    classes = {tuple(sorted(rng.sample(range(count), rng.randint(1, count)))) for _ in range(5)}
    amounts = {members: float(rng.randint(1, 100)) for members in classes}
    dealt = level(amounts, speeds)
    loads = [0.0] * count
    for members, shares in dealt.items():
        assert sum(shares) == pytest.approx(amounts[members])
        for process, part in zip(members, shares):
            loads[process] += part
    longest = max(load / speed for load, speed in zip(loads, speeds))
    bound = 0.0
    for bits in range(1, 1 << count):
        some = {p for p in range(count) if bits >> p & 1}
        work = sum(amount for members, amount in amounts.items() if some.issuperset(members))
        bound = max(bound, work / sum(speeds[p] for p in some))
    assert longest <= 1.02 * bound


def test_pieces_are_dealt_in_runs():
    dealer = Dealer(level({(0, 1): 8.0}, (1.0, 1.0)))
    assert [dealer.next((0, 1), 1.0) for _ in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


def test_large_pieces_are_dealt_so_that_all_are_as_far_at_any_time():
    """Three kinds of pieces that two of three processes can do: no process does two in a row."""
    kinds = [(0, 1), (0, 2), (1, 2)]
    size = float(1 << 25)
    dealer = Dealer(level(dict.fromkeys(kinds, 8 * size), (1.0, 1.0, 1.0)))
    for _ in range(8):
        assert sorted(dealer.next(members, size) for members in kinds) == [0, 1, 2]


def test_reading_is_counted_by_node(tmp_path):
    """One file of 24 rows, wanted by 4 columns on 2 nodes: both read all rows, or one does."""
    plan = of(tmp_path, ([1], WHOLE), ([4], COLUMN))
    sight = Sight((0, 0, 1, 1), (frozenset({0}),) * 2)
    found = both_ways(plan, [[Portion(rank, 0, 1)] for rank in range(4)], sight)
    whole = 24 * 24 * 4
    assert (found.each, found.once) == (Side(2 * whole, 2), Side(whole, 1))
    assert found.crossing == Side(whole // 2, 2)


def test_who_passes_on_what_a_node_wants_whole_takes_turns(tmp_path):
    """Six parameters, all on the first node, are wanted by all four processes of the second."""
    plan = of(tmp_path, ([1], WHOLE), ([4], WHOLE), tuple("abcdef"))
    sight = Sight((0, 1, 1, 1, 1), (frozenset({0}), frozenset()))
    shares = [[], *([Portion(rank, 0, 6)] for rank in range(4))]
    first = []
    for trade in deal(demand(plan, shares, sight, Choice()), sight):
        sent = posts(trade)[0].out
        assert len(sent) == 1, "what crosses to a node crosses once"
        first += sent
    assert sorted(first) == [1, 1, 2, 2, 3, 4]


@pytest.mark.parametrize(
    ("storage", "network", "exchanged"), [(1e8, 1e10, True), (1e9, 1e7, False)]
)
def test_the_cheaper_way_is_taken(storage, network, exchanged, tmp_path):
    plan = of(tmp_path, ([1], WHOLE), ([4], COLUMN))
    sight = Sight((0, 0, 1, 1), (frozenset({0}),) * 2)
    shares = [[Portion(rank, 0, 1)] for rank in range(4)]
    costs = Costs(read=storage / 4, network=network)
    assert (
        bool(deal(demand(plan, shares, sight, Choice(costs=costs, weighed=True)), sight))
        == exchanged
    )


@pytest.mark.parametrize(("overlap", "exchanged"), [(1.0, True), (0.0, False)])
def test_sending_counts_where_it_does_not_go_on_beside_reading(overlap, exchanged):
    """Two nodes read 2 s each for themselves; or 1 s and then send for 1 s."""
    found = Reading(each=Side(4000, 4), once=Side(2000, 2), crossing=Side(2000, 2))
    costs = Costs(read=1e3, network=1e3, copy=1e9, call=0.0, letter=0.0, overlap=overlap)
    assert costs.together(1.0, 0.5) == 1.5 - 0.5 * overlap
    assert found.exchanges(costs, 2, 2) == exchanged


def test_nothing_is_exchanged_that_every_node_reads_a_part_of(tmp_path):
    plan = of(tmp_path, ([1], WHOLE), ([4], ROW))
    served = {(rank, 0): [rank] for rank in range(4)}
    found = reading_of(plan.parameter("w"), plan.names(0)["w"], served, (0, 0, 1, 1))
    assert found.each.nbytes == found.once.nbytes
    assert not found.exchanges(Costs(read=1.0), 4, 2)


def test_a_simulation_counts_what_was_worked_out_by_hand(tmp_path):
    plan, sight = of(tmp_path, ([4], COLUMN), ([2], ROW)), spread(2, 4)
    shares = share_seen(plan, range(2), Sight((0, 1), (frozenset({0}), frozenset({1}))))
    costs = Costs(read=1e3, write=1e3, network=1e2, copy=1e9)
    found = simulate(plan, shares, sight, deal(demand(plan, shares, sight, Choice()), sight), costs)
    half = 24 * 24 * 4 // 2
    for load in found.loads:
        assert (load.read, load.sent, load.received, load.written) == (
            half,
            half // 2,
            half // 2,
            half,
        )
        assert (load.passed, load.letters, load.slices) == (0, 1, 1)
    assert found.network == (half / 2 / 1e2,) * 2
    assert found.total == max(*found.network, *found.seconds)


def test_one_run_is_read_in_one_piece_whatever_was_asked_for():
    hull, held = Box((0, 2, 0), (1, 4, 4096)), Box((0, 0, 0), (1, 8, 4096))
    for call in (0.0, 6e4, inf):
        assert read_of(hull, held, 4, call) == Read("whole", 4 * hull.size, 1)
    rows = Box((0, 2, 0), (2, 4, 4096)), Box((0, 0, 0), (2, 8, 4096))
    assert [read_of(*rows, 4, call).way for call in (0.0, inf)] == ["ranges", "rows"]
