"""What it costs to move bytes, and which way of reading is cheaper by that.

Where all nodes see the same storage, two nodes that want the same rows of a source slice either
both read them, or one reads them and sends the other its part. The first costs storage, the
second the network and two more copies in memory. Files on a node's own disk leave no choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rankxform.formats.dtype import item_size
from rankxform.geometry.box import Box, hulls
from rankxform.geometry.grid import Cell
from rankxform.layout.layout import Layout

from .moves import copies_of, read_of
from .source import Parameter

_GAIN = 0.9
"""What an exchange may cost over reading for oneself: of the two its estimate is the rougher."""


@dataclass(frozen=True)
class Costs:
    """Bytes a second. read: from storage, by all processes at once; network: out of a node while it
    receives as much; copy: in memory, by one process."""

    read: float
    network: float
    copy: float


@dataclass(frozen=True)
class Bandwidth:
    """Bytes a second. read, write: of one process, while all are at work; network: out of one node,
    and into it; copy: in memory, by one process."""

    read: float = 1e9
    write: float = 1e9
    network: float = 10e9
    copy: float = 5e9

    def costs(self, processes: int) -> Costs:
        """Return what bytes cost to that many processes."""
        return Costs(self.read * processes, self.network, self.copy)


@dataclass(frozen=True)
class Reading:
    """What two ways to read one parameter come to, in bytes.

    each: read where every node reads for itself; once: where each byte is read by one process;
    crossing: sent from node to node then.
    """

    each: int
    once: int
    crossing: int

    def plus(self, other: Reading) -> Reading:
        return Reading(
            self.each + other.each, self.once + other.once, self.crossing + other.crossing
        )

    def exchanges(self, costs: Costs, processes: int, nodes: int) -> bool:
        """Tell whether it is cheaper to exchange."""
        if self.each <= self.once:
            return False
        alone = self.each / costs.read
        copied = 2 * (self.once + self.crossing) / (costs.copy * processes)
        together = self.once / costs.read + self.crossing / (costs.network * nodes) + copied
        return together < _GAIN * alone


def reading_of(
    parameter: Parameter,
    layout: Layout,
    served: Mapping[Cell, Iterable[int]],
    node: tuple[int, ...],
) -> Reading:
    """Count both ways, for processes that serve the cells of a destination `layout`.

    node: by process its node.
    """
    item = item_size(parameter.dtype)
    parts: list[tuple[tuple[Cell, int | None], Box]] = []  # of a source cell, for a node or all
    wanted: dict[Cell, dict[int, int]] = {}
    for cell, processes in served.items():
        nodes = {node[process] for process in processes}
        for at, box in copies_of(parameter, layout, cell):
            parts += [((at, where), box) for where in (None, *nodes)]
            by_node = wanted.setdefault(at, {})
            for one in nodes:
                by_node[one] = by_node.get(one, 0) + box.size
    each = once = 0
    for (at, where), hull in hulls(parts).items():
        elements = read_of(hull, parameter.grid.box(at), item)
        if where is None:
            once += elements
        else:
            each += elements
    crossing = sum(sum(by.values()) * (len(by) - 1) // len(by) for by in wanted.values())
    return Reading(each * item, once * item, crossing * item)
