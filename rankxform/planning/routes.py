"""Routes: which piece of an exchanged parameter goes from whom to whom."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import field
from functools import cached_property

from rankxform.geometry.tiling import Cell, overlaps
from rankxform.values import dataclass

from .transfers import Exchange

CellPair = tuple[Cell, Cell]
"""(source cell, destination cell): the region that both hold."""

Peers = dict[int, list[CellPair]]
"""By process the pieces that go to it, or come from it, in order."""


@dataclass
class Routes:
    """Which pieces one process reads for itself, and exchanges with each other process.

    read_here: read for itself. sends, recvs: sent by the process that reads them. forwards,
    forwarded: sent by the process of the same node that received them from another node.
    """

    read_here: list[CellPair] = field(default_factory=list)
    sends: Peers = field(default_factory=dict)
    recvs: Peers = field(default_factory=dict)
    forwards: Peers = field(default_factory=dict)
    forwarded: Peers = field(default_factory=dict)

    @property
    def read(self) -> list[CellPair]:
        """What is read here, in part for others."""
        return [*self.read_here, *(piece for pieces in self.sends.values() for piece in pieces)]

    @property
    def in_messages(self) -> list[CellPair]:
        """What messages from and to here hold, once for each message."""
        all_peers = (self.sends, self.recvs, self.forwards, self.forwarded)
        return [piece for peers in all_peers for pieces in peers.values() for piece in pieces]

    @cached_property
    def every(self) -> list[CellPair]:
        """All that passes through this process."""
        return [*dict.fromkeys([*self.read_here, *self.in_messages])]


def routes_of(exchange: Exchange) -> dict[int, Routes]:
    """Sort all pieces of an exchange by process."""
    routes_by_process: dict[int, Routes] = {}
    for piece, sender, receiver, first in message_hops(exchange):
        if sender == receiver:
            routes_by_process.setdefault(sender, Routes()).read_here.append(piece)
        elif first == receiver:
            _route(routes_by_process, sender, receiver).sends.setdefault(receiver, []).append(piece)
            routes_by_process[receiver].recvs.setdefault(sender, []).append(piece)
        else:
            _route(routes_by_process, first, receiver).forwards.setdefault(receiver, []).append(
                piece
            )
            routes_by_process[receiver].forwarded.setdefault(first, []).append(piece)
    return routes_by_process


def message_hops(exchange: Exchange) -> Iterator[tuple[CellPair, int, int, int]]:
    """Yield (piece, process that reads it, process that wants it, process that gets it from the
    reader).

    Where several processes of another node want a piece, one of them gets it, and passes it on to
    the others, each in a hop of its own; it comes last.
    """
    src, dst, node = exchange.parameter.grid, exchange.grid, exchange.node
    for turn, (cell, ranks_by_process) in enumerate(
        sorted(exchange.receivers.items()), exchange.forwarder
    ):
        for number, (src_cell, _) in enumerate(overlaps(src, dst, cell), turn):
            piece = src_cell, cell
            for sender, receivers in _by_sender_and_node(exchange, src_cell, ranks_by_process):
                if sender in receivers:
                    yield piece, sender, sender, sender
                other_receivers = [process for process in receivers if process != sender]
                if other_receivers and node[other_receivers[0]] != node[sender]:
                    first = other_receivers[number % len(other_receivers)]
                    for other_receiver in other_receivers:
                        if other_receiver != first:
                            yield piece, sender, other_receiver, first
                    other_receivers = [first]
                for other_receiver in other_receivers:
                    yield piece, sender, other_receiver, other_receiver


def _route(routes_by_process: dict[int, Routes], sender: int, receiver: int) -> Routes:
    routes_by_process.setdefault(receiver, Routes())
    return routes_by_process.setdefault(sender, Routes())


def _by_sender_and_node(
    exchange: Exchange, src_cell: Cell, receivers: Collection[int]
) -> Iterable[tuple[int, Sequence[int]]]:
    """Return (sender, processes of one node that get what they want of a source cell from it)."""
    senders, node = exchange.senders[src_cell], exchange.node
    if len(receivers) == 1:
        (process,) = receivers
        return ((senders[process][0], (process,)),)
    processes_by_sender: dict[tuple[int, int], list[int]] = {}
    for process in receivers:
        processes_by_sender.setdefault((senders[process][0], node[process]), []).append(process)
    return [(sender, processes) for (sender, _), processes in processes_by_sender.items()]
