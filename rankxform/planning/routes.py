"""Routes: which piece of an exchanged parameter goes from whom to whom."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property

from rankxform.geometry.tiling import Cell, overlaps
from rankxform.values import dataclass

from .transfers import Exchange

Piece = tuple[Cell, Cell]
"""(source cell, destination cell): the region that both hold."""

Peers = dict[int, list[Piece]]
"""By process the pieces that go to it, or come from it, in order."""


@dataclass
class Routes:
    """Which pieces one process reads for itself, and exchanges with each other process.

    own: read for itself. sends, recvs: sent by the process that reads them. forwards, forwarded:
    sent by the process of the same node that received them from another node.
    """

    own: list[Piece] = field(default_factory=list)
    sends: Peers = field(default_factory=dict)
    recvs: Peers = field(default_factory=dict)
    forwards: Peers = field(default_factory=dict)
    forwarded: Peers = field(default_factory=dict)

    @property
    def read(self) -> list[Piece]:
        """What is read here, in part for others."""
        return [*self.own, *(piece for some in self.sends.values() for piece in some)]

    @property
    def in_messages(self) -> list[Piece]:
        """What messages from and to here hold, once for each message."""
        every = (self.sends, self.recvs, self.forwards, self.forwarded)
        return [piece for peers in every for some in peers.values() for piece in some]

    @cached_property
    def every(self) -> list[Piece]:
        """All that passes through this process."""
        return [*dict.fromkeys([*self.own, *self.in_messages])]


def routes_of(exchange: Exchange) -> dict[int, Routes]:
    """Sort all pieces of an exchange by process."""
    found: dict[int, Routes] = {}
    for piece, sender, receiver, first in hops_of(exchange):
        if sender == receiver:
            found.setdefault(sender, Routes()).own.append(piece)
        elif first == receiver:
            _route(found, sender, receiver).sends.setdefault(receiver, []).append(piece)
            found[receiver].recvs.setdefault(sender, []).append(piece)
        else:
            _route(found, first, receiver).forwards.setdefault(receiver, []).append(piece)
            found[receiver].forwarded.setdefault(first, []).append(piece)
    return found


def hops_of(exchange: Exchange) -> Iterator[tuple[Piece, int, int, int]]:
    """Yield (piece, process that reads it, process that wants it, process that gets it from the
    reader).

    Where several processes of another node want a piece, one of them gets it, and passes it on to
    the others, each in a hop of its own; it comes last.
    """
    src, dst, node = exchange.parameter.grid, exchange.grid, exchange.node
    for turn, (cell, by) in enumerate(sorted(exchange.receivers.items()), exchange.forwarder):
        for number, (at, _) in enumerate(overlaps(src, dst, cell), turn):
            piece = at, cell
            for sender, receivers in _by_sender_and_node(exchange, at, by):
                if sender in receivers:
                    yield piece, sender, sender, sender
                others = [process for process in receivers if process != sender]
                if others and node[others[0]] != node[sender]:
                    first = others[number % len(others)]
                    for other in others:
                        if other != first:
                            yield piece, sender, other, first
                    others = [first]
                for other in others:
                    yield piece, sender, other, other


def _route(found: dict[int, Routes], sender: int, receiver: int) -> Routes:
    found.setdefault(receiver, Routes())
    return found.setdefault(sender, Routes())


def _by_sender_and_node(
    exchange: Exchange, at: Cell, receivers: Collection[int]
) -> Iterable[tuple[int, Sequence[int]]]:
    """Return (sender, processes of one node that get what they want of a source cell from it)."""
    senders, node = exchange.senders[at], exchange.node
    if len(receivers) == 1:
        (process,) = receivers
        return ((senders[process][0], (process,)),)
    found: dict[tuple[int, int], list[int]] = {}
    for process in receivers:
        found.setdefault((senders[process][0], node[process]), []).append(process)
    return [(sender, processes) for (sender, _), processes in found.items()]
