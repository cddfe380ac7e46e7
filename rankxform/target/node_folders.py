"""Where destination files go: into one folder that all nodes see, or into a folder of each node.

Whether nodes see one folder is detected, not configured: every node creates an empty file there,
and looks for those of the others. If they do not, the ranks of a node are written by its own
processes. Ranks are assigned to nodes in order and evenly, as they will be in the next job, or as a
hostfile or rank table says. What an earlier run left on a node is continued there.

In a folder of several nodes all processes that write a file are of one node, unless the file system
keeps what nodes cache coherent: on others, writes of two nodes to one file may undo each other.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from rankxform.engine.sinks import part_of
from rankxform.errors import StorageError, UsageError
from rankxform.layout.names import format_ranges
from rankxform.planning.assign import Writers
from rankxform.planning.transfers import Reach
from rankxform.publish.options import WRITERS_ANY
from rankxform.request import Request
from rankxform.storage.identity import FolderMarker, addresses_of_this_host, is_coherent
from rankxform.storage.posix import random_hex, read_bytes
from rankxform.transport import Team
from rankxform.transport.team import Nodes
from rankxform.values import dataclass

from .target import Target

PLACEMENT_AUTO, PLACEMENT_SHARED, PLACEMENT_NODE = PLACEMENTS = ("auto", "shared", "node")


@dataclass(frozen=True)
class NodeFolder:
    """A destination folder as some nodes have it."""

    processes: tuple[int, ...]  # those of these nodes; the first one keeps the folder's records
    files: frozenset[int]  # that are made there
    hosts: tuple[str, ...]  # the nodes' names


@dataclass(frozen=True)
class Placement:
    """All folders that a destination consists of; they share a name.

    nodes: those of the processes. one_node: whether all that write a file are of one node.
    """

    roots: tuple[NodeFolder, ...]
    nodes: Nodes
    one_node: bool = False

    def of(self, process: int) -> NodeFolder:
        """Return the folder that `process` has."""
        return next(root for root in self.roots if process in root.processes)

    @property
    def writers(self) -> Writers:
        """Who may write which file."""
        files_by_node: list[frozenset[int]] = [frozenset()] * self.nodes.count
        for root in self.roots:
            for process in root.processes:
                files_by_node[self.nodes.node_of[process]] = root.files
        return Writers(Reach(self.nodes.node_of, tuple(files_by_node)), self.one_node)

    def describe(self) -> str | None:
        """Say which ranks are where, if nodes have folders of their own, or who writes a file."""
        if len(self.roots) == 1:
            return "one node writes each file" if self.one_node else None
        parts = [
            f"{format_ranges(sorted(root.files)) or 'none'} on {', '.join(root.hosts)}"
            for root in self.roots
        ]
        return f"on several nodes, a folder of each: ranks {'; '.join(parts)}"


def find_placement(request: Request, target: Target, team: Team) -> Placement:
    """Find out which nodes share the destination folder; say who writes which ranks. Collective.

    Raises UsageError or StorageError where a placement that was asked for cannot be.
    """
    dst, dst_placement, paths = target.folder, request.dst_placement, target.paths
    all_ranks, nodes = target.planner.dst.ranks, team.nodes
    if nodes.count == 1:
        return Placement((NodeFolder(nodes.processes[0], frozenset(paths), nodes.names),), nodes)
    groups = _groups(team, dst)
    hosts = team.bcast(lambda: hosts_of(dst_placement, all_ranks))
    # an index lists all files: it must be in a folder that all nodes see
    one_folder = target.form.title if target.arrangement.parts else None
    if len(groups) > 1 and one_folder:
        nodes_text = " and ".join(nodes.names[group[0]] for group in groups[:2])
        raise StorageError(
            f"is not one folder on {nodes_text}, which a {one_folder} checkpoint needs",
            "name a folder that all nodes share",
            "write rank folders",
            where=dst,
        )
    if len(groups) > 1 and dst_placement == PLACEMENT_SHARED:
        nodes_text = " and ".join(nodes.names[group[0]] for group in groups[:2])
        raise StorageError(
            f"is not one folder on {nodes_text}, as --dst-placement shared says",
            "name a folder that all nodes share",
            "leave the option out",
            where=dst,
        )
    if hosts and len(groups) > 1:
        node_of = _by_host(team, hosts)
    else:
        begun = _begun(paths, team) if len(groups) > 1 else {}
        node_of = {**ranks_to_nodes_in_order(all_ranks, nodes), **begun}
    roots = []
    for group in groups:
        processes = sorted(p for node in group for p in nodes.processes[node])
        files = frozenset(f for f in paths if len(groups) == 1 or node_of[f] in group)
        roots.append(
            NodeFolder(tuple(processes), files, tuple(nodes.names[node] for node in group))
        )
    one_node = team.bcast(lambda: writers_of(request, target) == PLACEMENT_NODE)
    return Placement(tuple(roots), nodes, one_node and len(groups) < nodes.count)


def writers_of(request: Request, target: Target) -> str | None:
    """Return whose processes may write one file of a folder of several nodes: "node" or "any".

    None where the destination is no folder, or none is named and the request leaves it open.
    """
    if target.dst is not None and not target.in_folder:
        return None
    if request.writers != PLACEMENT_AUTO:
        return request.writers
    if target.dst is None:
        return None
    return WRITERS_ANY if is_coherent(target.folder) else PLACEMENT_NODE


def expected_writers(request: Request, target: Target, node: tuple[int, ...]) -> Writers:
    """Return who will write which file, if processes are on nodes so; no folder is touched.

    node: by process its node. Where nodes may share a folder, or not ("auto"), they are taken to
    share one. Raises UsageError for a hostfile of another number of nodes.
    """
    placement, ranks, count = request.dst_placement, target.planner.dst.ranks, max(node) + 1
    if placement in (PLACEMENT_AUTO, PLACEMENT_SHARED):
        one_node = count > 1 and writers_of(request, target) == PLACEMENT_NODE
        return Writers(Reach.full(node, target.files), one_node)
    hosts = hosts_of(placement, ranks)
    if hosts is None:
        node_of = ranks_to_nodes_in_order(ranks, Nodes(node, tuple(map(str, range(count)))))
    else:
        numbers = {host: number for number, host in enumerate(dict.fromkeys(hosts))}
        if len(numbers) != count:
            text = f"names {len(numbers)} hosts, and there are {count} nodes"
            raise UsageError(text, where=placement)
        node_of = {rank: numbers[host] for rank, host in enumerate(hosts)}
    return Writers(Reach(node, files_by_node(node_of, count)))


def files_by_node(node_of: Mapping[int, int], nodes: int) -> tuple[frozenset[int], ...]:
    """Return by node its files; node_of: file -> its node."""
    files: list[set[int]] = [set() for _ in range(nodes)]
    for file, node in node_of.items():
        files[node].add(file)
    return tuple(map(frozenset, files))


def unsafe_writers(request: Request, target: Target, team: Team) -> str | None:
    """Return what to warn of where nodes are to write one file together and may not. Collective."""
    is_asked = request.writers == WRITERS_ANY and target.dst is not None
    if not is_asked or writers_of(request, target) is None or team.nodes.count == 1:
        return None
    if team.bcast(lambda: is_coherent(target.folder)):
        return None
    return (
        f"{target.folder}: --writers any: on this file system writes of two nodes to one file may "
        "undo each other, and not all of what was lost is noticed; compare the result with verify"
    )


def ranks_to_nodes_in_order(ranks: int, nodes: Nodes) -> Mapping[int, int]:
    """Assign ranks to nodes in order: evenly to their processes, or else evenly to the nodes."""
    processes = len(nodes.node_of)
    if ranks % processes == 0:
        return {rank: nodes.node_of[rank * processes // ranks] for rank in range(ranks)}
    return {rank: rank * nodes.count // ranks for rank in range(ranks)}


def _begun(paths: Mapping[int, Path], team: Team) -> Mapping[int, int]:
    """Return the nodes that have files of ranks from an earlier run, where only one has."""
    nodes = team.nodes

    def list_begun_files() -> list[int]:
        if not nodes.is_leader(team.rank):
            return []
        return [r for r, path in paths.items() if path.exists() or part_of(path).exists()]

    files_by_process = team.allgather(list_begun_files)
    nodes_by_file: dict[int, list[int]] = {}
    for node, processes in enumerate(nodes.processes):
        for rank in files_by_process[processes[0]]:
            nodes_by_file.setdefault(rank, []).append(node)
    return {r: n[0] for r, n in nodes_by_file.items() if len(n) == 1}


def _groups(team: Team, folder: Path) -> list[list[int]]:
    """Return the nodes in groups that see one folder."""
    nodes = team.nodes
    markers: list[FolderMarker] = []
    token = team.bcast(lambda: random_hex(8))
    leader, node = nodes.is_leader(team.rank), nodes.node_of[team.rank]
    try:
        team.agree(lambda: markers.append(FolderMarker(folder, token, node)) if leader else None)
        nodes_by_process = team.allgather(
            lambda: markers[0].nodes_with_marker(nodes.count) if markers else ()
        )
        team.barrier()  # nobody removes a marker that another looks for
    finally:
        for marker in markers:
            marker.remove()
    first = [min(nodes_by_process[processes[0]]) for processes in nodes.processes]
    groups: dict[int, list[int]] = {}
    for number, lowest in enumerate(first):
        groups.setdefault(lowest, []).append(number)
    return list(groups.values())


def hosts_of(placement: str, ranks: int) -> list[str] | None:
    """Read a hostfile or rank table; return the host of each destination rank."""
    from rankxform.transport.hostfile import parse_hostfile, parse_rank_table

    if placement in PLACEMENTS:
        return None
    if not Path(placement).is_file():
        raise UsageError(
            f"--dst-placement {placement!r}: is none of {', '.join(PLACEMENTS)}, and no hostfile "
            "or rank table of this name is there"
        )
    data = read_bytes(Path(placement))
    parse = parse_rank_table if data.lstrip()[:1] == b"{" else parse_hostfile
    hosts = [host.address for host in parse(data, placement) for _ in range(host.devices)]
    if len(hosts) != ranks:
        raise UsageError(
            f"has places for {len(hosts)} ranks, and the destination has {ranks}", where=placement
        )
    return hosts


def _by_host(team: Team, hosts: Sequence[str]) -> Mapping[int, int]:
    nodes = team.nodes
    name = nodes.names[nodes.node_of[team.rank]]

    def find_addresses() -> Iterable[str]:
        return addresses_of_this_host(set(hosts), name) if nodes.is_leader(team.rank) else ()

    nodes_by_host = {
        host: nodes.node_of[p]
        for p, local_hosts in enumerate(team.allgather(find_addresses))
        for host in local_hosts
    }
    for rank, host in enumerate(hosts):
        if host not in nodes_by_host:
            raise UsageError(
                f"--dst-placement: destination rank {rank} belongs on {host}, where no process "
                f"runs; the processes are on {', '.join(nodes.names)}"
            )
    return {rank: nodes_by_host[host] for rank, host in enumerate(hosts)}
