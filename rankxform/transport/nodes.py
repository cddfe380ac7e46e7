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
    """Processes by node. Those of one node have one host and one view of its file systems.

    node_of: by process the number of its node; nodes are numbered as processes meet them.
    names: the host's, by node.
    """

    node_of: tuple[int, ...]
    names: tuple[str, ...]

    @classmethod
    def of_processes(cls, found: Sequence[tuple[str, Hashable]]) -> Nodes:
        """Number the nodes; `found` is by process (name of the host, what distinguishes nodes).

        >>> Nodes.of_processes([("a", 1), ("b", 1), ("a", 1)])
        Nodes(node_of=(0, 1, 0), names=('a', 'b'))
        """
        numbers: dict[tuple[str, Hashable], int] = {}
        of = tuple(numbers.setdefault(one, len(numbers)) for one in found)
        return cls(of, tuple(name for name, _ in numbers))

    @property
    def count(self) -> int:
        return len(self.names)

    @cached_property
    def processes(self) -> tuple[tuple[int, ...], ...]:
        """The processes of each node, ascending; the first one speaks for it."""
        found: list[list[int]] = [[] for _ in self.names]
        for process, node in enumerate(self.node_of):
            found[node].append(process)
        return tuple(map(tuple, found))

    def is_leader(self, process: int) -> bool:
        """Tell whether `process` is the first of its node."""
        return self.processes[self.node_of[process]][0] == process


ALONE = Nodes((0,), ("this host",))


def this_node(host: str) -> tuple[str, Hashable]:
    """Return what `Nodes.of_processes` needs of this process."""
    mounts = ""
    with suppress(OSError):  # without /proc the name alone has to do
        mounts = os.readlink(_MOUNT_NAMESPACE)
    return host, mounts
