"""Trades: parameters whose bytes cross from the processes that read to those that write.

A process reads for itself what its node sees, and what it does not see another process reads and
sends. Every process works out all trades, alike, and takes its part in those that concern it, in
one order that is the same for all.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from rankxform.formats.dtype import content_bytes
from rankxform.geometry.grid import Cell
from rankxform.layout.layout import Layout

from .catalog import Parameter
from .demand import Draft, Senders, Servers, amounts_of
from .level import Dealer, level
from .transfers import Copies, Move, bytes_to_write, copies_of
from .visibility import Sight

T = TypeVar("T")


@dataclass(frozen=True)
class Trade:
    """One parameter, from processes that read it to processes that serve destination ranks.

    node: by process its node. turn: which of a node's processes that want the same gets it for
    all, as a number to be reduced. place: when it is made, from 0 to 1 of the whole.
    """

    parameter: Parameter
    layout: Layout
    servers: Servers
    senders: Senders
    node: tuple[int, ...]
    turn: int = 0
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


def deal(
    drafts: Sequence[Draft],
    sight: Sight,
    speeds: Sequence[float] = (),
    order: Order | None = None,
) -> list[Trade]:
    """Say who reads what is to be traded, and when.

    Where several processes could read the same, none has much longer to read than another, by
    their `speeds` (without: equal ones); see `rankxform.planning.level`. Parameters that are cut
    alike have turns.
    """
    if order is not None:
        drafts = sorted(drafts, key=lambda draft: order(draft.parameter))
    amounts = amounts_of(drafts)
    dealer = Dealer(level(amounts, speeds or [1.0] * len(sight.node)))
    known: dict[object, tuple[Servers, Senders]] = {}
    crowds: dict[int, int] = {}
    alike: dict[object, dict[str, int]] = {}  # by name, in their order
    trades = []
    for draft in drafts:
        parameter, kind = draft.parameter, draft.kind
        names = alike.setdefault((parameter.layout, parameter.shape, draft.layout), {})
        turn = names.setdefault(parameter.name, len(names))
        if id(kind) not in crowds:
            crowds[id(kind)] = _crowd(kind.servers, sight.node)
        chosen = {
            cell: dealer.next(asked.able, draft.nbytes(cell)) for cell, asked in kind.asked.items()
        }
        key = id(kind), draft.turn, tuple(chosen.values())
        if key not in known:
            known[key] = _with_readers(draft, chosen, sight)
        turn %= crowds[id(kind)]
        trades.append(Trade(parameter, draft.layout, *known[key], sight.node, turn))
    return _in_turn(trades)


def _crowd(servers: Servers, node: Sequence[int]) -> int:
    """Return how many processes of one node want the same, at most."""
    return max(max(Counter(node[p] for p in by).values()) for by in servers.values())


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
