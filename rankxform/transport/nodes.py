"""Which processes see the same files."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from contextlib import suppress
from functools import cached_property

from rankxform.values import dataclass

_MOUNT_NAMESPACE = "/proc/self/ns/mnt"


@dataclass(frozen=True)
class Nodes:
    """The nodes of a run. Processes of one node share a host and see the same file systems."""

    node_of: tuple[int, ...]  # by process the number of its node, in the order of the processes
    names: tuple[str, ...]  # by node the name of its host

    @classmethod
    def of_processes(cls, hosts_and_mounts: Sequence[tuple[str, Hashable]]) -> Nodes:
        """Number the nodes. `hosts_and_mounts`: by process what `this_node` returns.

        >>> Nodes.of_processes([("a", 1), ("b", 1), ("a", 1)])
        Nodes(node_of=(0, 1, 0), names=('a', 'b'))
        """
        numbers: dict[tuple[str, Hashable], int] = {}
        node_of = tuple(numbers.setdefault(node, len(numbers)) for node in hosts_and_mounts)
        return cls(node_of, tuple(name for name, _ in numbers))

    @property
    def count(self) -> int:
        return len(self.names)

    @cached_property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """By node its processes, ascending. The first one is the node's leader."""
        processes: list[list[int]] = [[] for _ in self.names]
        for process, node in enumerate(self.node_of):
            processes[node].append(process)
        return tuple(map(tuple, processes))

    def is_leader(self, process: int) -> bool:
        """Return whether `process` is the first of its node."""
        return self.processes[self.node_of[process]][0] == process


ALONE = Nodes((0,), ("this host",))


def this_node(host: str) -> tuple[str, Hashable]:
    """Return this process's host and its mount namespace: containers of a host may differ."""
    mounts = ""
    with suppress(OSError):  # without /proc the host's name must suffice
        mounts = os.readlink(_MOUNT_NAMESPACE)
    return host, mounts
