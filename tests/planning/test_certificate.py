"""A certificate takes every plan that is right, and no plan that was changed."""

from __future__ import annotations

import copy
import os
import random
from dataclasses import replace
from itertools import pairwise

import pytest

from rankxform.engine.coverage import Coverage
from rankxform.errors import RankxformError
from rankxform.geometry.box import Box
from rankxform.planning.assign import Due, Writers
from rankxform.planning.catalog import IdentityDict
from rankxform.planning.certificate import Certificate
from rankxform.planning.exchange import order_transfers, routes_of
from rankxform.planning.transfers import Reach, Transfer
from rankxform.request import Request
from rankxform.target.resolve import resolve
from rankxform.transport import SerialTeam
from rankxform.verbs.proof import (
    add_files,
    check_writers,
    exchange_key,
    exchanged_share,
    proof_of,
    prove_all,
    share_of,
)
from tests.checkpoints import DATA
from tests.planning.test_exchange import AUTO, TWO_PHASE, exchanges_of, of, random_work

PLANS = int(os.environ.get("RANKXFORM_MUTATIONS", "300")) // 5
"""For each, a change of each kind; 10,000 changes at night."""


class Case:
    """What all processes of a random plan do, and what is said of it; may be changed."""

    def __init__(self, tmp_path, rng):
        self.plan, self.assignment, self.reach, always = random_work(tmp_path, rng)
        self.assignment = [[*ranges] for ranges in self.assignment]
        policy = TWO_PHASE if always else AUTO
        self.exchanges = exchanges_of(self.plan, self.assignment, self.reach, policy)
        self.work = [
            order_transfers(p, self.plan.transfers(ranges, self.reach.of(p)), self.exchanges)
            for p, ranges in enumerate(self.assignment)
        ]
        files = range(self.plan.dst.ranks)
        node = self.reach.node
        written = tuple(
            frozenset(f for f in files if f in {r.file for r in self._ranges_on(n)})
            for n in range(max(node) + 1)
        )
        self.due = Due(files, {}, Writers(Reach(node, written), self._is_one()))
        self.routes = {}

    def _ranges_on(self, node):
        return [r for p, rs in enumerate(self.assignment) if self.reach.node[p] == node for r in rs]

    def _is_one(self):
        nodes = {}
        for p, ranges in enumerate(self.assignment):
            for r in ranges:
                nodes.setdefault(r.file, set()).add(self.reach.node[p])
        return all(len(found) == 1 for found in nodes.values())

    def prove(self):
        check_writers(self.assignment, self.due)
        certificate = Certificate(self.plan.catalog, self.reach, 7)
        for process, transfers in enumerate(self.work):
            for transfer in transfers:
                if transfer.exchange is None:
                    share = share_of(certificate, process, transfer, {})
                else:
                    routes = self.routes_in(transfer.exchange)
                    share = exchanged_share(certificate, process, transfer, routes)
                certificate.add(transfer.parameter, share)
        add_files(certificate, self.plan, self.due, self.due.files)
        return proof_of([certificate.totals])

    def routes_in(self, exchange):
        return self.routes.setdefault(exchange_key(exchange), routes_of(exchange))

    def some_transfer(self, rng, fits):
        """Return (process, place) of some transfer that fits."""
        found = [
            (p, n) for p, ts in enumerate(self.work) for n, t in enumerate(ts) if fits(t)
        ]  # fmt: skip
        return rng.choice(found) if found else None

    def change_routes(self, rng, change):
        """Change a copy of the routes of some exchange; tell whether there was something to change."""
        for exchange in rng.sample(self.exchanges, len(self.exchanges)):
            routes = copy.deepcopy(self.routes_in(exchange))
            if change(routes):
                self.routes[exchange_key(exchange)] = routes
                return True
        return False


class Changed(Transfer):
    """A transfer of which the pieces of one destination cell are others."""

    def copies(self, cell):
        at, pieces = vars(self)["pieces"]
        return pieces if cell == at else super().copies(cell)


def with_pieces(transfer, cell, pieces):
    """Return a transfer with other pieces in one place."""
    changed = Changed(*(getattr(transfer, name) for name in Transfer.__dataclass_fields__))
    vars(changed)["pieces"] = cell, tuple(pieces)
    return changed


def shift_a_box(case, rng):
    """By one element along an axis, or one of its edges alone."""
    at = case.some_transfer(rng, lambda t: any(t.copies(c) for c in t.targets))
    if at is None:
        return False
    transfer = case.work[at[0]][at[1]]
    cell = rng.choice([c for c in transfer.targets if transfer.copies(c)])
    pieces = [*transfer.copies(cell)]
    number = rng.randrange(len(pieces))
    src_cell, box = pieces[number]
    axis, by, how = rng.randrange(box.ndim), rng.choice((-1, 1)), rng.randrange(3)
    start, stop = [*box.start], [*box.stop]
    start[axis] += by if how != 1 else 0
    stop[axis] += by if how != 0 else 0
    pieces[number] = src_cell, Box(tuple(start), tuple(stop))
    case.work[at[0]][at[1]] = with_pieces(transfer, cell, pieces)
    return True


def read_another_cell(case, rng):
    """In its place: of another rank, of the same stage or of none."""
    at = case.some_transfer(rng, lambda t: t.readers)
    if at is None:
        return False
    transfer = case.work[at[0]][at[1]]
    cell = rng.choice([*transfer.readers])
    right = transfer.parameter.sharding.files[cell]
    others = [f for f in case.reach.of(at[0]) if f not in right]
    if not others:
        return False
    readers = {**transfer.readers, cell: rng.choice(sorted(others))}
    case.work[at[0]][at[1]] = replace(transfer, readers=readers)
    return True


def read_what_cannot_be_opened(case, rng):
    at = case.some_transfer(rng, lambda t: t.readers)
    if at is None:
        return False
    transfer = case.work[at[0]][at[1]]
    cell = rng.choice([*transfer.readers])
    hidden = [f for f in transfer.parameter.sharding.files[cell] if f not in case.reach.of(at[0])]
    if not hidden:
        return False
    readers = {**transfer.readers, cell: rng.choice(hidden)}
    case.work[at[0]][at[1]] = replace(transfer, readers=readers)
    return True


def _some_post(routes, rng, names):
    posts = [
        pieces
        for own in routes.values()
        for name in names
        for pieces in getattr(own, name).values()
        if pieces
    ]
    return rng.choice(posts) if posts else None


def drop_a_message(case, rng):
    """On one side, or on both."""

    def change(routes):
        pieces = _some_post(routes, rng, ("sends", "recvs", "forwards", "forwarded"))
        if pieces is None:
            return False
        pieces.pop(rng.randrange(len(pieces)))
        return True

    return case.change_routes(rng, change)


def drop_a_message_on_both_sides(case, rng):
    def change(routes):
        pairs = [
            (p, peer, a, b)
            for a, b in (("sends", "recvs"), ("forwards", "forwarded"))
            for p, own in routes.items()
            for peer, pieces in getattr(own, a).items()
            if pieces
        ]
        if not pairs:
            return False
        sender, receiver, a, b = rng.choice(pairs)
        sent = getattr(routes[sender], a)[receiver]
        piece = sent.pop(rng.randrange(len(sent)))
        getattr(routes[receiver], b)[sender].remove(piece)
        return True

    return case.change_routes(rng, change)


def send_twice(case, rng):
    def change(routes):
        pieces = _some_post(routes, rng, ("sends", "recvs", "forwards", "forwarded"))
        if pieces is None:
            return False
        pieces.append(rng.choice(pieces))
        return True

    return case.change_routes(rng, change)


def read_twice(case, rng):
    """A piece for itself that it reads already."""

    def change(routes):
        own = [own for own in routes.values() if own.read_here]
        if not own:
            return False
        pieces = rng.choice(own).read_here
        pieces.append(rng.choice(pieces))
        return True

    return case.change_routes(rng, change)


def send_to_another(case, rng):
    """What one is sent, another gets."""

    def change(routes):
        senders = [own for own in routes.values() if len(own.sends) > 1]
        if not senders:
            return False
        sends = rng.choice(senders).sends
        a, b = rng.sample(sorted(sends), 2)
        if sends[a] == sends[b]:
            return False
        sends[a], sends[b] = sends[b], sends[a]
        return True

    return case.change_routes(rng, change)


def leave_out_a_tensor(case, rng):
    at = case.some_transfer(rng, lambda t: t.targets)
    if (
        at is None
        or not case.work[at[0]][at[1]].grid.box(next(iter(case.work[at[0]][at[1]].targets))).size
    ):
        return False
    del case.work[at[0]][at[1]]
    return True


def make_a_tensor_twice(case, rng):
    at = case.some_transfer(rng, lambda t: t.exchange is None and t.targets)
    if at is None:
        return False
    case.work[rng.randrange(len(case.work))].append(case.work[at[0]][at[1]])
    return True


def put_into_another_file(case, rng):
    """A cell into a file that is to get another one."""
    at = case.some_transfer(rng, lambda t: t.exchange is None and len(t.targets) > 1)
    if at is None:
        return False
    transfer = case.work[at[0]][at[1]]
    a, b = rng.sample(sorted(transfer.targets), 2)
    targets = IdentityDict({**transfer.targets, a: transfer.targets[b], b: transfer.targets[a]})
    case.work[at[0]][at[1]] = replace(transfer, targets=targets)
    return True


def give_a_file_to_another_node(case, rng):
    node, writers = case.reach.node, case.due.writers
    givers = [
        (p, n, other)
        for p, ranges in enumerate(case.assignment)
        for n, r in enumerate(ranges)
        for other in range(len(node))
        if r.file not in writers.reach.of(other)
    ]
    if not givers:
        return False
    process, number, other = rng.choice(givers)
    case.assignment[other].append(case.assignment[process].pop(number))
    return True


CHANGES = [
    shift_a_box, read_another_cell, read_what_cannot_be_opened, drop_a_message,
    drop_a_message_on_both_sides, send_twice, read_twice, send_to_another, leave_out_a_tensor,
    make_a_tensor_twice, put_into_another_file, give_a_file_to_another_node,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_a_plan_that_was_changed_is_refused(change, tmp_path):
    changed = 0
    for seed in range(PLANS * 5):
        rng = random.Random(f"{change.__name__} {seed}")
        folder = tmp_path / str(seed)
        folder.mkdir()
        case = Case(folder, rng)
        case.prove()
        if change(case, rng):
            with pytest.raises(RankxformError, match="the plan is wrong"):
                case.prove()
            changed += 1
        if changed == PLANS:
            return
    assert changed > PLANS / 10, changed


def fused(form="torch_dist", **options):
    """Return the conversion of a Hugging Face checkpoint whose matrices are fused."""
    src = str(DATA / "hf_qwen3/hf")
    given = {"map": "qwen3", "transformer_impl": "transformer_engine", "iteration": 5, **options}
    return resolve(Request(src, "new", None, "none", dst_form=form, **given), SerialTeam())


def prove(conversion, change=lambda transfer: transfer):
    planner, reach = conversion.planner, conversion.source.reach
    certificate, shares = Certificate(planner.catalog, reach, 7), {}
    files = conversion.target.files
    for transfer in planner.transfers(map(planner.whole_file, files)):
        share = share_of(certificate, 0, change(transfer), shares)
        certificate.add(transfer.parameter, share)
    due = Due(files, {}, Writers.of_one_folder((0,), files))
    add_files(certificate, planner, due, files)
    return proof_of([certificate.totals])


def test_a_piece_of_a_fused_tensor_in_the_place_of_another_is_refused():
    """Keys where values belong, for example, of one shape: the bytes are as many."""
    conversion, changed = fused(), 0
    assert prove(conversion).boxes
    planner = conversion.planner
    for transfer in planner.transfers(map(planner.whole_file, conversion.target.files)):
        for cell in transfer.targets:
            pieces = transfer.copies(cell)
            by_shape = {}
            for number, (_, box) in enumerate(pieces):
                by_shape.setdefault((box.start, box.stop), []).append(number)
            for same in by_shape.values():
                if len(same) < 2 or changed > 40:
                    continue
                a, b = same[:2]
                doubled = with_pieces(transfer, cell, [*pieces[:a], pieces[b], *pieces[a + 1 :]])
                lacking = with_pieces(transfer, cell, [*pieces[:a], *pieces[a + 1 :]])
                for other in (doubled, lacking):
                    with pytest.raises(RankxformError, match="the plan is wrong"):
                        prove(conversion, lambda t, o=other, n=transfer: o if t == n else t)
                changed += 1
    assert changed


@pytest.mark.parametrize("seed", range(20))
def test_all_processes_are_proved_on_one_as_each_is_by_itself(seed, tmp_path):
    case = Case(tmp_path, random.Random(seed))
    by_each = case.prove()
    at_once = prove_all(case.plan, case.reach, case.due, case.assignment, case.exchanges)
    assert at_once.boxes == by_each.boxes  # the sums are under other seeds


@pytest.mark.parametrize("axes", [2, 17, 40])
def test_a_shift_along_the_last_of_many_axes_is_refused(axes, tmp_path):
    tensor_map = [*(-1 for _ in range(axes - 1)), 0]
    plan = of(tmp_path, ([4], tensor_map), ([2], tensor_map), shape=(*(1,) * (axes - 1), 24))
    (transfer,) = plan.transfers([plan.whole_file(0)])
    (cell,) = transfer.targets
    (src_cell, box), *others = transfer.copies(cell)
    certificate = Certificate(plan.catalog, Reach.full((0,), range(4)), 7)
    assert share_of(certificate, 0, transfer, {}).sums
    start, stop = [*box.start], [*box.stop]
    start[-1], stop[-1] = start[-1] + 1, stop[-1]
    wrong = with_pieces(transfer, cell, [(src_cell, Box((*start,), (*stop,))), *others])
    with pytest.raises(RankxformError, match="do not make"):
        share_of(certificate, 0, wrong, {})


SLICES = [(0, [("a", 1000), ("b", 0), ("c", 10)]), (3, [("a", 1 << 40)])]


def put_all(coverage, rng):
    """Put everything, in pieces, in any order; return the pieces."""
    puts = []
    for file, contents in SLICES:
        for name, nbytes in contents:
            cuts = sorted({0, nbytes, *(rng.randrange(nbytes) for _ in range(5) if nbytes)})
            puts += [(file, name, a, b - a) for a, b in pairwise(cuts)]
    rng.shuffle(puts)
    for put in puts:
        add(coverage, *put)
    return puts


def add(coverage, file, *put):
    coverage.add(coverage._files[file], *put)


@pytest.mark.parametrize("seed", range(20))
def test_what_is_put_twice_or_never_or_elsewhere_is_found(seed):
    rng = random.Random(seed)
    coverage = Coverage(SLICES)
    puts = put_all(coverage, rng)
    coverage.check()
    file, name, start, nbytes = rng.choice(puts)
    for wrong in (
        [(file, name, start, nbytes)],
        [(file, name, start, nbytes - 1)] if nbytes > 1 else [(3, "a", 0, 1)],
        [(3, "a", start + 1, 1)],
        [(1, "a", 0, 10)],
        [(0, "unknown", 0, 10)],
        [(0, "a", 0, 10), (0, "a", 10, -10 + 5)],
    ):
        coverage = Coverage(SLICES)
        put_all(coverage, rng)
        for put in wrong:
            add(coverage, *put)
        with pytest.raises(RankxformError, match="put twice, or never"):
            coverage.check()
    with pytest.raises(RankxformError, match="put twice, or never"):
        Coverage(SLICES).check()
    moved = Coverage(SLICES)
    for put_file, *put in puts:
        add(moved, 3 - put_file if put[0] == "c" else put_file, *put)
    with pytest.raises(RankxformError, match="into another file"):
        moved.check()
