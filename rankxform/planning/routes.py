"""Who sends which piece of a parameter to whom."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

from rankxform.geometry.grid import Cell

from .exchange import Trade

Piece = tuple[Cell, Cell]
"""(source cell, destination cell): the region that both hold."""

Post = dict[int, list[Piece]]
"""By process the pieces that go to it, or come from it, in order."""


@dataclass
class Posts:
    """Which pieces one process reads for itself, and exchanges with each other process.

    own: read for itself. out, into: sent by the one that reads them. passing, passed: by the one
    of the same node that got them from another.
    """

    own: list[Piece] = field(default_factory=list)
    out: Post = field(default_factory=dict)
    into: Post = field(default_factory=dict)
    passing: Post = field(default_factory=dict)
    passed: Post = field(default_factory=dict)

    @property
    def read(self) -> list[Piece]:
        """What is read here, in part for others."""
        return [*self.own, *(piece for some in self.out.values() for piece in some)]

    @cached_property
    def every(self) -> list[Piece]:
        """All that passes through this process."""
        received = [*self.into.values(), *self.passed.values()]
        return [*dict.fromkeys([*self.read, *(piece for some in received for piece in some)])]


def posts(trade: Trade) -> dict[int, Posts]:
    """Sort all pieces of a trade by process.

    Where several processes of another node want a piece, one of them gets it and passes it on.
    """
    found: dict[int, Posts] = {}
    for turn, (cell, served) in enumerate(sorted(trade.servers.items()), trade.turn):
        for number, (at, _) in enumerate(trade.copies(cell), turn):
            piece = at, cell
            for sender, receivers in _receivers(trade, at, served):
                if sender in receivers:
                    found.setdefault(sender, Posts()).own.append(piece)
                others = [process for process in receivers if process != sender]
                if others and trade.node[others[0]] != trade.node[sender]:
                    first = others[number % len(others)]
                    _give(found, piece, first, [p for p in others if p != first], passing=True)
                    others = [first]
                _give(found, piece, sender, others, passing=False)
    return found


def _receivers(trade: Trade, at: Cell, served: Iterable[int]) -> Iterable[tuple[int, list[int]]]:
    """Return (sender, processes of one node that get what they want of a source cell from it)."""
    found: dict[tuple[int, int], list[int]] = {}
    for process in served:
        sender, _ = trade.senders[at][process]
        found.setdefault((sender, trade.node[process]), []).append(process)
    return [(sender, processes) for (sender, _), processes in found.items()]


def _give(
    found: dict[int, Posts], piece: Piece, sender: int, receivers: Iterable[int], *, passing: bool
) -> None:
    for receiver in receivers:
        source = found.setdefault(sender, Posts())
        target = found.setdefault(receiver, Posts())
        (source.passing if passing else source.out).setdefault(receiver, []).append(piece)
        (target.passed if passing else target.into).setdefault(sender, []).append(piece)
