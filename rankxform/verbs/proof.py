"""A plan is proved: each process sums its share, and the sums of all are compared.

`rankxform.planning.certificate` sums by an arithmetic of its own; here it is told what processes
do, in the terms in which the engine is told.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import chain
from random import SystemRandom

from rankxform.formats.container import content_bytes
from rankxform.layout.layout import whole_layout
from rankxform.planning.assign import Assignment, Due
from rankxform.planning.catalog import Catalog, Parameter
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
from rankxform.planning.exchange import (
    ExchangeCoverage,
    OperandPlan,
    Peers,
    Routes,
    WorkPlan,
    routes_of,
)
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import Exchange, Reach, SliceRange, Transfer
from rankxform.target.target import Conversion
from rankxform.transport import Team
from rankxform.values import blake2b, no_garbage_collection


def prove_plan(
    conversion: Conversion, due: Due, assignment: Assignment, work: WorkPlan, team: Team
) -> PlanProof:
    """Compare what all processes do with what files are to hold. Collective.

    work: of this process. Raises RankxformError, on all processes, where the plan is wrong.
    """
    seed = team.bcast(lambda: SystemRandom().getrandbits(61))
    planner, source = conversion.planner, conversion.source
    operand_source, memory = conversion.target.adapter or source, conversion.request.buffers

    def of_process() -> list[Totals]:
        check_writers(assignment, due)
        certificate, shares = Certificate(planner.catalog, source.reach, seed), Shares()
        for transfer in work.transfers:
            share = share_of(certificate, team.rank, transfer, shares)
            certificate.add(transfer.parameter, share)
        add_files(certificate, planner, due, due.files[team.rank :: team.size])
        if operand_source.reach.is_full:  # files are read where an operand is needed
            return [certificate.totals]
        catalog, brought = operand_source.require_catalog(), work.operands
        operands = needed_operands(planner, assignment[team.rank], catalog)
        nbytes = sum(content_bytes(p.dtype, p.shape) for p in operands)
        if operands and nbytes + work.memory > memory:
            raise wrong(f"process {team.rank} would hold {nbytes:,} bytes beside {work.memory:,}")
        transfers = brought.transfers if brought is not None else ()
        certificate_of_operands = Certificate(catalog, operand_source.reach, seed)
        totals = operand_totals(certificate_of_operands, team.rank, operands, transfers)
        return [certificate.totals, totals]

    return proof_of([*chain.from_iterable(team.allgather(of_process))])


@no_garbage_collection()
def prove_all(
    planner: Planner, reach: Reach, due: Due, assignment: Assignment,
    exchanges: Sequence[Exchange], moves: OperandPlan | None = None,
) -> PlanProof:  # fmt: skip
    """Compare what all processes of a plan would do, on this one. Raises RankxformError.

    moves: what brings them their operands first, if anything does.
    """
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
    of_moves = () if moves is None else _totals_of_moves(planner, assignment, moves)
    return proof_of([certificate.totals, *of_moves])


def _totals_of_moves(
    planner: Planner, assignment: Assignment, moves: OperandPlan
) -> Iterator[Totals]:
    """Yield by process the sums of what brings it its operands."""
    catalog, reach = moves.planner.catalog, moves.reach
    certificate = Certificate(catalog, reach, SystemRandom().getrandbits(61))
    covered, parts = ExchangeCoverage(moves.exchanges), dict[int, list[Transfer]]()
    for exchange in moves.exchanges:
        for process, part in exchange.parts.items():
            parts.setdefault(process, []).append(part)
    for process, slice_ranges in enumerate(assignment):
        operands = needed_operands(planner, slice_ranges, catalog)
        separate = moves.planner.transfers(moves.assignment[process], reach.of(process))
        transfers = [*covered.local(process, separate), *parts.get(process, ())]
        yield operand_totals(certificate, process, operands, transfers)


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


def needed_operands(
    planner: Planner, slice_ranges: Iterable[SliceRange], catalog: Catalog
) -> list[Parameter]:
    """Return the tensors that the steps of some slices take, such as an adapter's factors; worked
    out here apart from `operand_moves`, which is what is proved.

    catalog: of the checkpoint that holds them. Raises RankxformError where it does not.
    """
    names = set[str]()
    for slice_range in slice_ranges:
        layouts = [*planner.layouts_of_file(slice_range.file)]
        for name in layouts[slice_range.first : slice_range.stop]:
            for step in planner.parameter(name).steps:
                names.update(step.operands if step is not None else ())
    operands = [parameter for parameter in catalog.parameters if parameter.src_name in names]
    if lacking := names - {operand.src_name for operand in operands}:
        raise wrong(f"{min(lacking)}, which slices need, is in no file of the adapter or source")
    return operands


def operand_totals(
    certificate: Certificate, process: int, operands: Iterable[Parameter],
    transfers: Iterable[Transfer],
) -> Totals:  # fmt: skip
    """Compare what a process is brought first with the `operands` that it needs, whole.

    certificate: of operands alone. Raises RankxformError where they differ.
    """
    shares, before = Shares(), certificate.totals
    for transfer in transfers:
        certificate.add(transfer.parameter, share_of(certificate, process, transfer, shares))
    layouts = {operand: whole_layout(len(operand.shape)) for operand in operands}
    certificate.add_expected(certificate.groups_of(layouts), 0, 0)
    assembled, expected, messages, _ = (b - a for a, b in zip(before, certificate.totals))
    if (assembled - expected) % PRIME:
        raise wrong(f"process {process} is not brought the factors that its slices need")
    return Totals(0, 0, messages, certificate.totals.boxes - before.boxes)


def proof_of(totals: Sequence[Totals]) -> PlanProof:
    """Compare the sums of all processes. Raises RankxformError where they differ."""
    assembled, expected, messages, boxes = map(sum, zip(*totals))
    if (assembled - expected) % PRIME:
        raise wrong("what processes make is not what files are to hold, once")
    if messages % PRIME:
        raise wrong("what is sent is not what is received")
    digest = blake2b(f"{boxes} {assembled % PRIME}".encode(), digest_size=8).hexdigest()
    return PlanProof(boxes, digest)
