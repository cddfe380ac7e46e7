"""Which process sees which source file, where processes are on several nodes.

The first process of every node looks for all. A file that several nodes have under one name must
be the same on all of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import reduce
from pathlib import Path

from rankxform.errors import CheckpointError
from rankxform.planning.reach import Reach
from rankxform.storage import identity
from rankxform.storage.identity import FileIdentity
from rankxform.storage.store import Listing, is_path, store_at
from rankxform.transport import Team


def list_on_all_nodes(team: Team, path: str, pattern: str) -> tuple[Listing | None, frozenset[int]]:
    """Return the merged listings of all nodes, and the nodes that process 0 lists for. Collective.

    Those are the nodes that see process 0's own folder over the network. With one node, process 0
    lists when it needs to: None.
    """
    nodes = team.nodes
    if nodes.count == 1 or not is_path(path):
        return None, frozenset()
    leader = nodes.is_leader(team.rank)
    folders = team.allgather(lambda: identity.network_folder(Path(path)) if leader else None)
    same_as_process0 = {p for p, f in enumerate(folders) if f is not None and f == folders[0]} - {0}

    def own() -> Listing:
        if leader and team.rank not in same_as_process0:
            return store_at(path).list(pattern)
        return Listing(path)

    listing = reduce(Listing.joined, team.allgather(own))
    searched = searched_nodes(team)
    return replace(listing, searched=searched), frozenset(
        nodes.node_of[process] for process in same_as_process0
    )


def find_reach(
    team: Team, paths: Mapping[int, str], same_as_node0: frozenset[int] = frozenset()
) -> tuple[Reach, list[str]]:
    """Find out which nodes have which of the chosen files; return also what deserves a notice.

    The nodes `same_as_node0` have what node 0 has. Raises CheckpointError where two nodes have
    different files under one name.
    """
    nodes = team.nodes
    if nodes.count == 1 or not any(is_path(path) for path in paths.values()):
        return Reach.full(nodes.node_of, paths), []

    def mine() -> dict[int, FileIdentity]:
        if not nodes.is_leader(team.rank) or nodes.node_of[team.rank] in same_as_node0:
            return {}
        return {
            rank: file_identity
            for rank, path in paths.items()
            if (file_identity := identity.file_identity(Path(path)))
        }

    by_process = team.allgather(mine)
    identities_by_node = [
        by_process[p[0]] if n not in same_as_node0 else by_process[0]
        for n, p in enumerate(nodes.processes)
    ]
    files_by_node = [set(identities) for identities in identities_by_node]
    twice = {
        rank: groups
        for rank in paths
        if len(
            groups := identity.group_by_file(
                {n: f[rank] for n, f in enumerate(identities_by_node) if rank in f}
            )
        )
        > 1
    }
    notices = _compare(team, paths, identities_by_node, twice) if twice else []
    for rank, groups in twice.items():
        for node in (node for group in groups[1:] for node in group):
            files_by_node[node].discard(rank)
    missing_files = [rank for rank in paths if not any(rank in files for files in files_by_node)]
    if missing_files:
        raise CheckpointError(
            f"there is no such file{searched_nodes(team)}", where=paths[missing_files[0]]
        )
    return Reach(nodes.node_of, tuple(map(frozenset, files_by_node))), notices


def _compare(
    team: Team,
    paths: Mapping[int, str],
    identities_by_node: list[dict[int, FileIdentity]],
    twice: Mapping[int, list[list[int]]],
) -> list[str]:
    """Compare files that nodes have under one name and that are not the same by their times."""
    nodes = team.nodes
    node = nodes.node_of[team.rank]
    for rank, groups in twice.items():
        sizes = {nodes.names[group[0]]: identities_by_node[group[0]][rank].size for group in groups}
        if len(set(sizes.values())) > 1:
            places = [f"{name} ({size} bytes)" for name, size in sizes.items()]
            raise _different(paths[rank], rank, places)
    files_to_digest = [
        rank
        for rank, groups in twice.items()
        if nodes.is_leader(team.rank) and any(group[0] == node for group in groups)
    ]
    digests = team.allgather_work(
        lambda on_progress: {
            r: identity.file_digest(Path(paths[r]), on_progress) for r in files_to_digest
        }
    )
    for rank, groups in twice.items():
        leaders = [nodes.processes[group[0]][0] for group in groups]
        if len({digests[process][rank] for process in leaders}) > 1:
            names = [nodes.names[group[0]] for group in groups]
            raise _different(paths[rank], rank, names)
    total = sum(identities_by_node[g[0][0]][r].size * len(g) for r, g in twice.items())
    return [
        f"{len(twice)} source files are on several nodes with other times (such as "
        f"{paths[min(twice)]}); their {total} bytes were compared, and one copy was used. Copies "
        "that keep times (cp -p, rsync -t) need no comparing"
    ]


def _different(path: str, rank: int, places: list[str]) -> CheckpointError:
    return CheckpointError(
        f"differs between {' and '.join(places)}",
        f"remove the copy that does not belong to rank {rank}",
        where=path,
    )


def searched_nodes(team: Team) -> str:
    """Return, for messages, which nodes were searched, if there are several."""
    names = team.nodes.names
    if len(names) == 1:
        return ""
    return f" (looked on {', '.join(names[:8])}{', ...' if names[8:] else ''})"
