"""Routes: which piece of an exchanged parameter goes from whom to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import field
from functools import cached_property

from rankxform.geometry.grid import Cell, overlaps
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
    """Sort all pieces of an exchange by process.

    Where several processes of another node want a piece, one of them receives and forwards it.
    """
    found: dict[int, Routes] = {}
    parameter, node = exchange.parameter, exchange.node
    for turn, (cell, by) in enumerate(sorted(exchange.receivers.items()), exchange.forwarder):
        for number, (at, _) in enumerate(overlaps(parameter.grid, exchange.grid, cell), turn):
            piece = at, cell
            for sender, receivers in _by_sender_and_node(exchange, at, by):
                if sender in receivers:
                    found.setdefault(sender, Routes()).own.append(piece)
                others = [process for process in receivers if process != sender]
                if others and node[others[0]] != node[sender]:
                    first = others[number % len(others)]
                    for other in others:
                        if other != first:
                            _route(found, first, other).forwards.setdefault(other, []).append(piece)
                            found[other].forwarded.setdefault(first, []).append(piece)
                    others = [first]
                for other in others:
                    _route(found, sender, other).sends.setdefault(other, []).append(piece)
                    found[other].recvs.setdefault(sender, []).append(piece)
    return found


def _route(found: dict[int, Routes], sender: int, receiver: int) -> Routes:
    found.setdefault(receiver, Routes())
    return found.setdefault(sender, Routes())


def _by_sender_and_node(
    exchange: Exchange, at: Cell, receivers: Iterable[int]
) -> list[tuple[int, list[int]]]:
    """Return (sender, processes of one node that get what they want of a source cell from it)."""
    found: dict[tuple[int, int], list[int]] = {}
    for process in receivers:
        sender, _ = exchange.senders[at][process]
        found.setdefault((sender, exchange.node[process]), []).append(process)
    return [(sender, processes) for (sender, _), processes in found.items()]
