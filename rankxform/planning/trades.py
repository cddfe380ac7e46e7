"""Trades: parameters whose bytes cross from the processes that read to those that write.

A process reads for itself what its node sees, and what it does not see another process reads and
sends. Every process works out all trades, alike, and takes its part in those that concern it, in
one order that is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, TypeVar

from rankxform.formats.dtype import content_bytes, item_size
from rankxform.geometry.grid import Cell
from rankxform.geometry.runs import CALL_BYTES
from rankxform.layout.layout import Layout

from .costs import Choice, Reading, reading_of
from .level import Dealer, level
from .moves import Copies, Move, Portion, bytes_to_write, copies_of
from .plan import Planner
from .sight import Processes, Sight
from .source import Parameter

T = TypeVar("T")

Servers = Mapping[Cell, Mapping[int, "tuple[int, ...]"]]
"""By destination cell the processes that put it into files, each with its global ranks."""

Senders = Mapping[Cell, Mapping[int, "tuple[int, int]"]]
"""By source cell, for each process that wants of it: (process that reads it, source rank)."""


@dataclass(frozen=True)
class Trade:
    """One parameter, from processes that read it to processes that serve destination ranks.

    node: by process its node. place: when its turn is, from 0 to 1 of the whole.
    """

    parameter: Parameter
    layout: Layout
    servers: Servers
    senders: Senders
    node: tuple[int, ...]
    place: float = 0.0

    def copies(self, cell: Cell) -> Copies:
        """Return (source cell, region) for all that makes up destination `cell`."""
        return copies_of(self.parameter, self.layout, cell)

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter."""
        return content_bytes(self.parameter.dtype, self.parameter.shape)

    def part(self, process: int) -> Traded | None:
        """Return what `process` has to do with it, if anything."""
        targets = {cell: by[process] for cell, by in self.servers.items() if process in by}
        readers = {
            cell: rank
            for cell, by in self.senders.items()
            for reader, rank in by.values()
            if reader == process
        }
        if not targets and not readers:
            return None
        return Traded(self.parameter, self.layout, targets, readers, self, process)


@dataclass(frozen=True)
class Traded(Move):
    """One process's part in a trade.

    targets: the destination cells that it serves; readers: the source cells that it reads, for
    itself or others.
    """

    trade: Trade
    process: int


Order = Callable[[Parameter], Any]
"""Where a parameter stands among others, as a key to sort by."""


def work_of(
    process: int, alone: Sequence[Move], trades: Sequence[Trade], order: Order | None = None
) -> list[Move]:
    """Return what `process` has to do, if all `trades` are made.

    `alone` is what it would do by itself. What is left of that comes in between its parts in
    trades, so that it has something to do while letters are on their way.
    """
    moves = list(alone)
    if order is not None:
        moves.sort(key=lambda move: order(move.parameter))
    if not trades:
        return moves
    parts: list[Traded] = [part for trade in trades if (part := trade.part(process))]
    traded = {
        (part.parameter.name, part.layout, rank)
        for part in parts
        for ranks in part.targets.values()
        for rank in ranks
    }
    rest = [
        move for move in moves if (move.parameter.name, move.layout, _first(move)) not in traded
    ]
    placed = [(place, 0, move) for place, move in paced([(bytes_to_write([m]), m) for m in rest])]
    placed += [(part.trade.place, 1, part) for part in parts]
    return [move for *_, move in sorted(placed, key=lambda one: one[:2])]


def _first(move: Move) -> int:
    return next(iter(move.targets.values()))[0]


def demand(
    planner: Planner, shares: Sequence[Sequence[Portion]], sight: Sight, choice: Choice
) -> list[Draft]:
    """Return what is to be traded in a conversion in which process p serves ``shares[p]``.

    A process takes part as a receiver where it needs a file that it does not see; and, if the
    `choice` weighs costs, where an exchange is cheaper than that all nodes read a file that all of
    them see. If it says always, each distinct byte is read by one process for all. Raises
    CheckpointError where nobody has what is needed.
    """
    if len(shares) == 1 or (sight.is_full and not choice.always and not choice.weighed):
        return []
    return list(_drafts(planner, shares, sight, choice))


def deal(
    drafts: Sequence[Draft],
    sight: Sight,
    speeds: Sequence[float] = (),
    order: Order | None = None,
) -> list[Trade]:
    """Say who reads what is to be traded, and when.

    Where several processes could read the same, none has much longer to read than another, by
    their `speeds` (without: equal ones); see `rankxform.planning.level`.
    """
    if order is not None:
        drafts = sorted(drafts, key=lambda draft: order(draft.parameter))
    amounts = _amounts(drafts)
    dealer = Dealer(level(amounts, speeds or [1.0] * len(sight.node)))
    known: dict[object, tuple[Servers, Senders]] = {}
    trades = []
    for draft in drafts:
        chosen = {
            cell: dealer.next(asked.able, draft.nbytes(cell))
            for cell, asked in draft.kind.asked.items()
        }
        key = id(draft.kind), draft.turn, tuple(chosen.values())
        if key not in known:
            known[key] = _with_readers(draft, chosen, sight)
        trades.append(Trade(draft.parameter, draft.layout, *known[key], sight.node))
    return _in_turn(trades)


def freedom(drafts: Iterable[Draft], sight: Sight) -> float:
    """Return the bytes to be sent that processes of more than one node could read."""
    amounts = _amounts(drafts)
    return sum(nbytes for able, nbytes in amounts.items() if len({sight.node[p] for p in able}) > 1)


def _amounts(drafts: Iterable[Draft]) -> dict[Processes, float]:
    """Return the bytes that are asked for, by who could read them."""
    amounts: dict[Processes, float] = {}
    for draft in drafts:
        for cell, asked in draft.kind.asked.items():
            amounts[asked.able] = amounts.get(asked.able, 0.0) + draft.nbytes(cell)
    return amounts


def _with_readers(
    draft: Draft, chosen: Mapping[Cell, int], sight: Sight
) -> tuple[Servers, Senders]:
    """Return who serves what, and who sends what to whom, or reads it for itself.

    Who reads for others, and sees all that it needs itself, takes part as a server too, so that it
    reads what it needs in the same pass.
    """
    kind, senders = draft.kind, _senders(draft, chosen, sight)
    members = {process for by in kind.servers.values() for process in by}
    more = {
        process
        for process in set(chosen.values()) - members
        if any(process in by for by in kind.served.values())
    }
    if not more:
        return kind.servers, senders
    for cell, by in kind.needs.items():
        for process in more.intersection(by):
            ranks = [rank for rank in kind.held[cell] if rank in sight.of(process)]
            read = {rank for reader, rank in senders.get(cell, {}).values() if reader == process}
            rank = min(read) if read else ranks[draft.turn % len(ranks)]
            senders.setdefault(cell, {})[process] = process, rank
    servers = {
        cell: {p: ranks for p, ranks in by.items() if p in members or p in more}
        for cell, by in kind.served.items()
    }
    return {cell: by for cell, by in servers.items() if by}, senders


def _senders(
    draft: Draft, chosen: Mapping[Cell, int], sight: Sight
) -> dict[Cell, dict[int, tuple[int, int]]]:
    """Return who sends what to whom, or reads it for itself."""
    senders = {cell: dict(own) for cell, own in draft.kind.own.items()}
    for cell, asked in draft.kind.asked.items():
        seen = sight.of(chosen[cell])
        ranks = [rank for rank in asked.ranks if rank in seen]
        sender = chosen[cell], ranks[draft.turn % len(ranks)]
        senders.setdefault(cell, {}).update(dict.fromkeys(asked.by, sender))
    return senders


@dataclass(frozen=True)
class _Asked:
    """Of a source cell: who wants it, of which ranks' files, and who could read one of these."""

    by: tuple[int, ...]
    ranks: tuple[int, ...]
    able: Processes


@dataclass(frozen=True)
class _Kind:
    """What trades have in common that are cut alike.

    served: by all processes, and needs: by source cell, who wants of it; servers: those that
    cannot do without a trade; own: what these read for themselves.
    """

    served: Servers
    needs: Mapping[Cell, Mapping[int, None]]
    held: Mapping[Cell, tuple[int, ...]]
    servers: Servers
    own: Senders
    asked: Mapping[Cell, _Asked]


@dataclass(frozen=True)
class Draft:
    """A trade before readers are chosen. turn: which of equal copies is read."""

    parameter: Parameter
    layout: Layout
    turn: int
    kind: _Kind

    def nbytes(self, cell: Cell) -> int:
        parameter = self.parameter
        return prod(parameter.grid.box(cell).shape) * item_size(parameter.dtype)


def _drafts(
    planner: Planner,
    shares: Sequence[Sequence[Portion]],
    sight: Sight,
    choice: Choice,
) -> Iterator[Draft]:
    known: dict[object, _Kind | None] = {}
    for (name, layout), every in planner.wanted(shares).items():
        parameter = planner.parameter(name)
        turn = planner.turn(parameter)
        for held, pairs in planner.held_alike(parameter, layout, every):
            key = (
                parameter.layout, parameter.shape, parameter.listed, item_size(parameter.dtype),
                layout, id(held), pairs, turn,
            )  # fmt: skip
            if key not in known:
                served = _served(planner, layout, pairs)
                needs = _needs(parameter, layout, served)
                for cell in needs:
                    if not held.get(cell):
                        planner.nobody(parameter, cell)
                together = choice.always
                if choice.weighed and choice.costs and not together:
                    reading = reading_of(parameter, layout, served, sight.node, choice.call)
                    together = reading.exchanges(choice.costs, len(sight.node), len(sight.seen))
                known[key] = _kind(served, needs, held, turn, sight, together)
            kind = known[key]
            if kind is not None:
                yield Draft(parameter, layout, turn, kind)


def both_ways(
    planner: Planner,
    shares: Sequence[Sequence[Portion]],
    sight: Sight,
    call: float = CALL_BYTES,
) -> Reading:
    """Return what it comes to if every node reads for itself, and if each byte is read once.

    `call` is what a read of little costs, in bytes.
    """
    known: dict[object, Reading] = {}
    total = Reading()
    for (name, layout), pairs in planner.wanted(shares).items():
        parameter = planner.parameter(name)
        key = parameter.layout, parameter.shape, parameter.dtype, parameter.listed, layout, pairs
        if key not in known:
            served = _served(planner, layout, pairs)
            known[key] = reading_of(parameter, layout, served, sight.node, call)
        total += known[key]
    return total


def _served(
    planner: Planner, layout: Layout, pairs: tuple[tuple[int, int], ...]
) -> dict[Cell, dict[int, tuple[int, ...]]]:
    served: dict[Cell, dict[int, tuple[int, ...]]] = {}
    for process, rank in pairs:
        by = served.setdefault(planner.cell(layout, rank), {})
        by[process] = (*by.get(process, ()), rank)
    return served


def _needs(parameter: Parameter, layout: Layout, served: Servers) -> dict[Cell, dict[int, None]]:
    """Return by source cell the processes that need of it."""
    needs: dict[Cell, dict[int, None]] = {}
    for cell, by in served.items():
        for at, _ in copies_of(parameter, layout, cell):
            needs.setdefault(at, {}).update(dict.fromkeys(by))
    return needs


def _kind(
    served: Servers,
    needs: Mapping[Cell, Mapping[int, None]],
    held: Mapping[Cell, tuple[int, ...]],
    turn: int,
    sight: Sight,
    always: bool,
) -> _Kind | None:
    """Sort out who serves, who reads for itself, and what is asked of others."""
    members = {process for by in served.values() for process in by}
    if not always:
        members = {p for at, by in needs.items() for p in by if sight.of(p).isdisjoint(held[at])}
    if not members:
        return None
    servers = {
        cell: mine
        for cell, by in served.items()
        if (mine := {process: ranks for process, ranks in by.items() if process in members})
    }
    own: dict[Cell, dict[int, tuple[int, int]]] = {}
    asked: dict[Cell, _Asked] = {}
    for at, by in needs.items():
        wanting = [process for process in by if process in members]
        near = {p: [r for r in held[at] if r in sight.of(p)] for p in wanting}
        if not always:
            own[at] = {p: (p, ranks[turn % len(ranks)]) for p, ranks in near.items() if ranks}
            wanting = [p for p in wanting if not near[p]]
        if wanting:
            able = tuple(sorted(p for p in wanting if near[p])) or sight.seers(held[at])
            asked[at] = _Asked(tuple(wanting), held[at], able)
    return _Kind(served, needs, held, servers, own, asked)


def _in_turn(trades: Sequence[Trade]) -> list[Trade]:
    """Order trades so that all who read or write have something to do until the end.

    Trades of the same readers and servers stay in their order, and each such row is drawn on at
    the pace that ends them all together.
    """
    rows: dict[object, list[tuple[int, Trade]]] = {}
    for trade in trades:
        readers = frozenset(p for by in trade.senders.values() for p, _ in by.values())
        servers = frozenset(p for by in trade.servers.values() for p in by)
        rows.setdefault((readers, servers), []).append((trade.nbytes, trade))
    placed = []
    for number, row in enumerate(rows.values()):
        for at, (middle, trade) in enumerate(paced(row)):
            placed.append((middle, number, at, trade))
    return [replace(trade, place=place) for place, *_, trade in sorted(placed, key=lambda o: o[:3])]


def paced(row: Sequence[tuple[int, T]]) -> Iterator[tuple[float, T]]:
    """Yield for things of some bytes each at which part of the whole its middle stands.

    >>> list(paced([(1, "a"), (3, "b")]))
    [(0.125, 'a'), (0.625, 'b')]
    """
    total, before = sum(nbytes for nbytes, _ in row) or 1, 0
    for nbytes, thing in row:
        yield (before + nbytes / 2) / total, thing
        before += nbytes
