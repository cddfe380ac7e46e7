"""Reach: which processes can read which files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from rankxform.values import dataclass

Processes = tuple[int, ...]
"""Numbers of processes, ascending."""


@dataclass(frozen=True)
class Reach:
    """Which files each process can open, by its node.

    node: by process its node; files: by node the ids of the files that it can open. A file that
    several nodes have is the same on all.
    """

    node: tuple[int, ...]
    files: tuple[frozenset[int], ...]

    @classmethod
    def full(cls, node: tuple[int, ...], files: Iterable[int]) -> Reach:
        """Every node can open all `files`."""
        return cls(node, (frozenset(files),) * (max(node) + 1))

    def of(self, process: int) -> frozenset[int]:
        """Return the files that `process` can read."""
        return self.files[self.node[process]]

    def sees(self, process: int, files: Sequence[int]) -> bool:
        """Return whether a process can read one of `files`."""
        return self.is_full or not self.of(process).isdisjoint(files)

    def seen(self, process: int, files: Sequence[int]) -> Sequence[int]:
        """Return those of `files` that a process can read."""
        if self.is_full:
            return files
        readable = self.of(process)
        return [file for file in files if file in readable]

    @cached_property
    def is_full(self) -> bool:
        """Whether every node can open every file."""
        return len(set(self.files)) == 1

    def nodes_with(self, files: Iterable[int]) -> set[int]:
        """Return the nodes that have one of `files`."""
        return {node for file in files for node in self._nodes.get(file, ())}

    def processes_on(self, node: int) -> Processes:
        """Return the processes of a node."""
        return tuple(self._processes[node])

    def processes_seeing(self, files: Iterable[int]) -> Processes:
        """Return the processes that can read one of `files`."""
        return tuple(sorted(p for node in self.nodes_with(files) for p in self._processes[node]))

    @cached_property
    def _nodes(self) -> Mapping[int, Sequence[int]]:
        """By file the nodes that can open it."""
        nodes_by_file: dict[int, list[int]] = {}
        for node, files in enumerate(self.files):
            for file in files:
                nodes_by_file.setdefault(file, []).append(node)
        return nodes_by_file

    @cached_property
    def _processes(self) -> Sequence[Sequence[int]]:
        """By node its processes."""
        processes: list[list[int]] = [[] for _ in self.files]
        for process, node in enumerate(self.node):
            processes[node].append(process)
        return processes

    def partition(self, files: Iterable[int]) -> list[list[int]]:
        """Assign `files` evenly to processes that can open them.

        >>> Reach((0, 1), (frozenset({0, 1, 2}), frozenset({2}))).partition((0, 1, 2))
        [[0, 1], [2]]
        """
        parts: list[list[int]] = [[] for _ in self.node]
        able: dict[tuple[int, ...], Processes] = {}
        for position, file in enumerate(files):
            if self.is_full:
                parts[position % len(parts)].append(file)
                continue
            nodes = tuple(self._nodes.get(file, ()))
            if nodes not in able:
                able[nodes] = self.processes_seeing((file,))
            parts[min(able[nodes], key=lambda process: len(parts[process]))].append(file)
        return parts
