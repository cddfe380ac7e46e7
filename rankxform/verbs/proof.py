"""A plan is proved: each process sums its share, and the sums of all are compared.

`rankxform.planning.certificate` sums by an arithmetic of its own; here it is told what processes
do, in the terms in which the engine is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from random import SystemRandom

from rankxform.planning.assign import Assignment, Due
from rankxform.planning.certificate import (
    PRIME,
    Certificate,
    ExpectedGroup,
    Hop,
    PlanProof,
    Share,
    Totals,
    wrong,
)
from rankxform.planning.exchange import ExchangeCoverage, Peers, Routes, routes_of
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import Exchange, Reach, Transfer
from rankxform.transport import Team
from rankxform.values import blake2b


def prove_plan(
    planner: Planner, reach: Reach, due: Due, assignment: Assignment,
    transfers: Sequence[Transfer], team: Team,
) -> PlanProof:  # fmt: skip
    """Compare what all processes do with what files are to hold. Collective.

    transfers: of this process. Raises RankxformError, on all processes, where the plan is wrong.
    """
    seed = team.bcast(lambda: SystemRandom().getrandbits(61))

    def of_process() -> Totals:
        check_writers(assignment, due)
        certificate, shares = Certificate(planner.catalog, reach, seed), Shares()
        for transfer in transfers:
            share = share_of(certificate, team.rank, transfer, shares)
            certificate.add(transfer.parameter, share)
        add_files(certificate, planner, due, due.files[team.rank :: team.size])
        return certificate.totals

    return proof_of(team.allgather(of_process))


def prove_all(
    planner: Planner, reach: Reach, due: Due, assignment: Assignment, exchanges: Sequence[Exchange]
) -> PlanProof:
    """Compare what all processes of a plan would do, on this one. Raises RankxformError."""
    check_writers(assignment, due)
    certificate = Certificate(planner.catalog, reach, SystemRandom().getrandbits(61))
    covered, all_shares = ExchangeCoverage(exchanges), dict[object, list[Share]]()
    for process, slice_ranges in enumerate(assignment):
        visible_files = None if reach.is_full else reach.of(process)
        separate, shares = planner.transfers(slice_ranges, visible_files), Shares()
        for transfer in covered.local(process, separate) if exchanges else separate:
            share = share_of(certificate, process, transfer, shares)
            certificate.add(transfer.parameter, share)
    for exchange in exchanges:
        key = exchange_key(exchange)
        if key not in all_shares:
            routes = routes_of(exchange)
            all_shares[key] = [
                exchanged_share(certificate, process, part, routes)
                for process, part in exchange.parts.items()
            ]
        for share in all_shares[key]:
            certificate.add(exchange.parameter, share)
    add_files(certificate, planner, due, due.files)
    return proof_of([certificate.totals])


AllRoutes = Mapping[int, Routes]
"""What each process of an exchange reads, sends and receives."""

Shares = dict[object, "tuple[Share, object]"]
"""What one process does of tensors alike, by what they have in common; with what is kept for it."""


def exchange_key(exchange: Exchange) -> tuple[object, ...]:
    """Return what is equal for exchanges of tensors that go the same ways."""
    return (
        id(exchange.parameter.sharding), id(exchange.grid), id(exchange.receivers),
        id(exchange.senders), exchange.forwarder,
    )  # fmt: skip


def check_writers(assignment: Assignment, due: Due) -> None:
    """Refuse a file that is given to a process that cannot write it, or to several nodes where it
    must be one node's. Raises RankxformError."""
    reach, nodes_by_file = due.writers.reach, dict[int, set[int]]()
    for process, slice_ranges in enumerate(assignment):
        for file in dict.fromkeys(slice_range.file for slice_range in slice_ranges):
            nodes_by_file.setdefault(file, set()).add(reach.node[process])
            if file not in reach.of(process):
                raise wrong(f"process {process} is to write file {file}, which it cannot")
    for file, nodes in nodes_by_file.items() if due.writers.one_node else ():
        if len(nodes) > 1:
            raise wrong(f"nodes {sorted(nodes)} are to write file {file}, which one may")


def share_of(certificate: Certificate, process: int, transfer: Transfer, shares: Shares) -> Share:
    """Return what a process does of a tensor."""
    exchange = transfer.exchange
    copies = [transfer.copies(cell) for cell in transfer.targets]
    shared = transfer.parameter.sharding, transfer.grid, transfer.targets, transfer.readers
    places = (*map(id, shared),) if exchange is None else exchange_key(exchange)
    key = *places, *map(id, copies)
    if key not in shares:
        if exchange is None:
            pieces = [(s, cell) for cell in transfer.targets for s, _ in transfer.copies(cell)]
            reads = dict.fromkeys(src_cell for src_cell, _ in pieces)
            share = certificate.share(process, transfer, pieces, reads)
        else:
            share = exchanged_share(certificate, process, transfer, routes_of(exchange))
        shares[key] = share, (transfer, copies)
    return shares[key][0]


def exchanged_share(
    certificate: Certificate, process: int, transfer: Transfer, routes_by_process: AllRoutes
) -> Share:
    """Return what a process does of a tensor that is exchanged."""
    routes = routes_by_process.get(process, Routes())
    received = [*chain.from_iterable(routes.recvs.values())]
    if not {*chain.from_iterable(routes.forwards.values())} <= {*received}:
        name = transfer.parameter.name
        raise wrong(f"process {process} is to pass on of {name} what it does not get")
    pieces = [*routes.read_here, *received, *chain.from_iterable(routes.forwarded.values())]
    reads = dict.fromkeys(src_cell for src_cell, _ in routes.read)
    sent = _hops(process, True, routes.sends, routes.forwards)
    got = _hops(process, False, routes.recvs, routes.forwarded)
    return certificate.share(process, transfer, pieces, reads, sent, got)


def _hops(process: int, is_sender: bool, direct: Peers, passed_on: Peers) -> Iterator[Hop]:
    """Yield the pieces that go between a process and its peers."""
    for kind, peers in (("direct", direct), ("passed on", passed_on)):
        for peer, pieces in peers.items():
            ends = (process, peer) if is_sender else (peer, process)
            yield from ((kind, *ends, *piece) for piece in pieces)


def add_files(certificate: Certificate, planner: Planner, due: Due, files: Iterable[int]) -> None:
    """Count what some destination files lack, by their layouts."""
    nothing: Set[str] = frozenset()
    groups: dict[object, list[ExpectedGroup]] = {}
    for file in files:
        names, complete_names = planner.layouts_of_file(file), due.complete_names.get(file, nothing)
        key = id(names), frozenset(complete_names)
        if key not in groups:
            lacking = (name for name in names if name not in complete_names)
            groups[key] = certificate.groups_of({planner.parameter(n): names[n] for n in lacking})
        place = planner.content_of_file(file).rank % planner.dst.stage_size
        certificate.add_expected(groups[key], file, place)


def proof_of(totals: Sequence[Totals]) -> PlanProof:
    """Compare the sums of all processes. Raises RankxformError where they differ."""
    assembled, expected, messages, boxes = map(sum, zip(*totals))
    if (assembled - expected) % PRIME:
        raise wrong("what processes make is not what files are to hold, once")
    if messages % PRIME:
        raise wrong("what is sent is not what is received")
    digest = blake2b(f"{boxes} {assembled % PRIME}".encode(), digest_size=8).hexdigest()
    return PlanProof(boxes, digest)
