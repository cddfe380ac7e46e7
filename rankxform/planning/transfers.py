"""Transfers as data, and which process can read which file.

A model has many parameters and few ways to shard them, so a transfer names a parameter and shares
everything else with all parameters that are sharded alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property

from rankxform.formats.container import content_bytes, item_size
from rankxform.geometry.tiling import Cell, Grid, Overlaps, overlaps
from rankxform.values import dataclass

from .catalog import IdentityDict, IdsByCell, Parameter

Receivers = IdentityDict[Cell, "Mapping[int, tuple[int, ...]]"]
"""By destination cell the processes that put it into files, each with its files."""

Senders = IdentityDict[Cell, "dict[int, tuple[int, int]]"]
"""By source cell, for each process that wants of it: (process that reads it, id of the file)."""


@dataclass(frozen=True)
class SliceRange:
    """Consecutive slices of one destination file: those from `first` to `stop` - 1."""

    file: int
    first: int
    stop: int


@dataclass(frozen=True)
class Exchange:
    """One parameter's way between processes: who reads it, and who puts it into files."""

    parameter: Parameter
    grid: Grid  # the destination's
    receivers: Receivers
    senders: Senders
    node: tuple[int, ...]  # by process its node
    # Which of a node's processes that want the same piece receives it for all, modulo their number.
    forwarder: int = 0
    # When it is made, from 0 to 1 of the whole; the tiles of those of one position in turn.
    position: float = 0.0

    @property
    def nbytes(self) -> int:
        """Bytes of the full parameter."""
        return content_bytes(self.parameter.src_dtype, self.parameter.shape)

    @property
    def parts(self) -> dict[int, Transfer]:
        """What each process has to do with it."""
        targets = dict[int, IdsByCell]()
        readers = dict[int, dict[Cell, int]]()
        for cell, files_by_process in self.receivers.items():
            for process, files in files_by_process.items():
                targets.setdefault(process, IdentityDict())[cell] = files
        for cell, senders_by_process in self.senders.items():
            for reader, file in senders_by_process.values():
                readers.setdefault(reader, {})[cell] = file
        return {
            process: Transfer(
                self.parameter, self.grid, targets.get(process, IdentityDict()),
                readers.get(process, {}), self, process,
            )
            for process in {**targets, **readers}
        }  # fmt: skip

    def part(self, process: int) -> Transfer | None:
        """Return what `process` has to do with it, if anything."""
        targets = {c: p[process] for c, p in self.receivers.items() if process in p}
        readers = {
            cell: file
            for cell, senders_by_process in self.senders.items()
            for reader, file in senders_by_process.values()
            if reader == process
        }
        if not targets and not readers:
            return None
        return Transfer(self.parameter, self.grid, IdentityDict(targets), readers, self, process)


@dataclass(frozen=True)
class Transfer:
    """One process's part in one parameter's way from its source grid to a destination grid."""

    parameter: Parameter
    grid: Grid
    targets: IdsByCell  # by cell of the destination's grid the ids of the files of this process
    readers: Mapping[Cell, int]  # by cell of the source's grid the id of the file to read it from
    # All processes' part, if any takes part beside this one; `process` is this one's number there.
    exchange: Exchange | None = None
    process: int = 0

    def copies(self, cell: Cell) -> Overlaps:
        """Return (source cell, region) for all that makes up destination `cell`."""
        return overlaps(self.parameter.grid, self.grid, cell)

    def whole_exchange(self) -> Exchange:
        """Return the exchange that this is part of; a local transfer has one of its own."""
        if self.exchange is not None:
            return self.exchange
        receivers = {cell: {0: files} for cell, files in self.targets.items()}
        senders = {cell: {0: (0, file)} for cell, file in self.readers.items()}
        return Exchange(
            self.parameter, self.grid, IdentityDict(receivers), IdentityDict(senders), (0,)
        )


def bytes_to_write(transfers: Iterable[Transfer]) -> int:
    """Return the content bytes that `transfers` write, in all destination files."""
    elements: dict[tuple[Grid, IdsByCell], int] = {}
    total = 0
    for transfer in transfers:
        grid, targets = transfer.grid, transfer.targets
        if (grid, targets) not in elements:
            sizes = (grid.box(cell).size * len(files) for cell, files in targets.items())
            elements[grid, targets] = sum(sizes)
        total += elements[grid, targets] * item_size(transfer.parameter.dtype)
    return total


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

    def files_in_reach(self, process: int, files: Sequence[int]) -> Sequence[int]:
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
