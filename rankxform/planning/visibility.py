"""Who sees what: which processes can read which source files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

Processes = tuple[int, ...]
"""Numbers of processes, ascending."""


@dataclass(frozen=True)
class Sight:
    """Who sees what. node: by process its node; seen: by node the source ranks whose files it has.

    A file that several nodes see is the same on all.
    """

    node: tuple[int, ...]
    seen: tuple[frozenset[int], ...]

    @classmethod
    def full(cls, node: tuple[int, ...], ranks: Iterable[int]) -> Sight:
        """Every node sees the files of all `ranks`."""
        return cls(node, (frozenset(ranks),) * (max(node) + 1))

    def of(self, process: int) -> frozenset[int]:
        """Return the source ranks whose files `process` can read."""
        return self.seen[self.node[process]]

    @cached_property
    def is_full(self) -> bool:
        """Whether every node sees every file."""
        return len(set(self.seen)) == 1

    def seers(self, ranks: Iterable[int]) -> Processes:
        """Return the processes that can read the file of one of `ranks`."""
        nodes = {node for rank in ranks for node in self._nodes.get(rank, ())}
        return tuple(sorted(p for node in nodes for p in self._processes[node]))

    @cached_property
    def _nodes(self) -> Mapping[int, Sequence[int]]:
        """By source rank the nodes that see its file."""
        found: dict[int, list[int]] = {}
        for node, seen in enumerate(self.seen):
            for rank in seen:
                found.setdefault(rank, []).append(node)
        return found

    @cached_property
    def _processes(self) -> Sequence[Sequence[int]]:
        """By node its processes."""
        found: list[list[int]] = [[] for _ in self.seen]
        for process, node in enumerate(self.node):
            found[node].append(process)
        return found

    def dealt(self, ranks: Iterable[int]) -> list[list[int]]:
        """Deal the files of `ranks` to processes that see them, in even numbers.

        >>> Sight((0, 1), (frozenset({0, 1, 2}), frozenset({2}))).dealt((0, 1, 2))
        [[0, 1], [2]]
        """
        dealt: list[list[int]] = [[] for _ in self.node]
        able: dict[tuple[int, ...], Processes] = {}
        for position, rank in enumerate(ranks):
            if self.is_full:
                dealt[position % len(dealt)].append(rank)
                continue
            nodes = tuple(self._nodes.get(rank, ()))
            if nodes not in able:
                able[nodes] = self.seers((rank,))
            dealt[min(able[nodes], key=lambda process: len(dealt[process]))].append(rank)
        return dealt
