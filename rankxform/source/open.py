"""`open_source`, the only way into a checkpoint: which files it is, and what each of them holds.

A source, an adapter, a reference, a destination that is compared, a folder that is inspected: all
of them are opened here, so that each is checked in the same way. Nothing wrong with files is raised
here; it is collected. A conversion requires that there is nothing (`Source.require`), a
verification makes differences of it, and `inspect` shows all of it.

A source is the same on every process. A node is processes with one host name and one mount
namespace; its first process looks for all of them. Files of one name on several nodes must be the
same: on network file systems size, time and inode number show it; on local disks inode numbers mean
nothing, so that 16 samples of the bytes are compared too, and all bytes if only the times differ.

Collective, in this order: process 0 resolves the place and recognizes the form (two broadcasts);
the first process of each node lists the names (gathered), and process 0 selects the files
(broadcast); each node says which of them it reaches (gathered); every process reads the headers of
its share of the files (gathered); then each makes the same catalog, and they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import field, replace
from functools import reduce
from itertools import pairwise
from pathlib import Path
from posixpath import dirname
from types import MappingProxyType
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, CheckpointRef, Form, SelectedFiles
from rankxform.errors import CheckpointError, RequestError, StrategyError, UsageError
from rankxform.formats.container import DeclaredFile, Index, Schema
from rankxform.layout.states import States, find_states
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.planning.build_catalog import catalog_of
from rankxform.planning.catalog import Catalog, Description
from rankxform.planning.transfers import Reach
from rankxform.statements import (
    CATALOG,
    FILE_IDENTITY,
    HEADERS,
    Finding,
    HasFindings,
    as_notice,
    errors_of,
    require,
    run_rules,
)
from rankxform.storage import identity
from rankxform.storage.identity import FileIdentity
from rankxform.storage.source_reader import Indexer, wait_for_newer_mtime
from rankxform.storage.store import Listing, absolute, address_of, is_path, store_at
from rankxform.transport import Team
from rankxform.values import dataclass

from .checks import (
    HeadersRead,
    SourceManifest,
    changed_manifest_file,
    repair_description,
    schemas_without_repeats,
)
from .choose import (
    ChosenFiles,
    SourceScope,
    choose_files,
    enter_single_folder,
    form_at,
    infer_whole_strategy,
)


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


_NOTHING = DeclaredFile()


@dataclass(frozen=True)
class Source(HasFindings):
    """A checkpoint opened for reading."""

    where: CheckpointRef  # the checkpoint; its path is absolute
    form: Form  # its form
    selected: SelectedFiles  # the files that were selected
    paths: Mapping[int, str]  # file id -> path
    indexes: Mapping[int, Index]  # file id -> index of each file that belongs to it and can be read
    extra_rank_index: Mapping[int, Index]  # file id -> index, of one beyond the strategy's ranks
    catalog: Catalog | None  # None: nothing declares how files are sharded, or an error prevents it
    reach: Reach  # which process can open which file
    needed_files: tuple[int, ...] = ()  # ids of the files that were looked for
    findings: tuple[Finding, ...] = ()  # what was noticed; the first error refuses
    searched: str = ""
    # What rankxform noted when it wrote the files; None: it did not.
    manifest: SourceManifest | None = None
    # What lies at the place; on process 0, or on one process of each node.
    listing: Listing | None = field(default=None, compare=False)

    def require(self) -> Source:
        """Return the source. Raises its first error."""
        require(self.findings, is_counted=self.form.described)
        return self

    def require_catalog(self) -> Catalog:
        """Return the catalog of a source without errors."""
        assert self.catalog is not None
        return self.catalog

    @property
    def description(self) -> Description:
        """What is stated of it."""
        if self.catalog is not None:
            return self.catalog.description
        return self.selected.description or Description()

    @property
    def folder(self) -> str:
        """The folder to which the names of its files are relative, or the file itself."""
        if not self.form.described:
            return self.where.path
        return next((dirname(path) for path in self.paths.values()), self.where.path)


def open_source(where: CheckpointRef, team: Team, narrow: SourceScope | None = None) -> Source:
    """List, choose, describe, and read the headers that are needed. Collective."""
    narrow = narrow or SourceScope()
    where, inside = team.bcast(
        lambda: enter_single_folder(replace(where, path=absolute(where.path)))
    )
    form = FORMS[team.bcast(lambda: form_at(where).name)]
    listing, same_as_node0 = None, frozenset[int]()
    if where.files is None:
        listing, same_as_node0 = list_on_all_nodes(team, where.path, form.pattern(where))
    if len(same_as_node0) < team.nodes.count - 1:  # each node has a manifest of its own files
        narrow = replace(narrow, manifest=False)
    chosen_files, src_listing = choose_files(where, form, listing, narrow, team)
    paths = {f: address_of(where.path, n) for f, n in sorted(chosen_files.names.items())}
    reach, notices = find_reach(team, paths, same_as_node0)
    declared_files = (
        chosen_files.selected.description.declared_files
        if chosen_files.selected.description
        else {}
    )
    indexes, unreadable = index_all(paths, reach, team, chosen_files.manifest, declared_files)
    source = Source(
        where, form, chosen_files.selected, paths, indexes, {}, None, reach,
        chosen_files.needed_files,
        (*map(as_notice, filter(None, [inside])), *chosen_files.findings, *unreadable,
         *map(as_notice, notices)),
        listing.searched if listing else "", chosen_files.manifest, src_listing,
    )  # fmt: skip
    return team.agree(lambda: _with_catalog(source, chosen_files, narrow))


def open_arrays(
    place: str,
    index_by_rank: Mapping[int, Index],
    strategy: Strategy | None,
    team: Team,
    accepts: Callable[[str], bool],
) -> Source:
    """Take what processes hold in memory as a checkpoint of rank folders at `place`. Collective.

    index_by_rank: the arrays of this process, by the rank of `strategy` that they are of; at most
    one. Raises the first error.
    """
    by_process = team.allgather(lambda: index_by_rank)

    def own() -> Source:
        pairs = sorted((r, p) for p, held_indexes in enumerate(by_process) for r in held_indexes)
        holders = dict(pairs)
        if len(holders) < len(pairs):
            rank = next(rank for (rank, _), (other, _) in pairwise(pairs) if rank == other)
            first, second, *_ = (process for r, process in pairs if r == rank)
            raise UsageError(f"processes {first} and {second} both hold rank {rank}")
        indexes = {rank: by_process[process][rank] for rank, process in holders.items()}
        names = {rank: arrays_name(rank) for rank in indexes}
        files = tuple(map(frozenset, by_process))
        selected = SelectedFiles(names)
        needed = tuple(range(strategy.ranks)) if strategy else (*indexes,)
        source = Source(
            CheckpointRef(place, DEFAULT_FORM, strategy=strategy), FORMS[DEFAULT_FORM], selected,
            {rank: address_of(place, name) for rank, name in names.items()}, indexes, {}, None,
            Reach((*range(team.size),), files), needed,
        )  # fmt: skip
        chosen_files = ChosenFiles(selected, names, needed, strategy)
        return _with_catalog(source, chosen_files, SourceScope(accepts=accepts)).require()

    return team.agree(own)


def arrays_name(rank: int) -> str:
    """Return the name of a rank's arrays at their place."""
    return f"rank_{rank}.safetensors"


def index_all(
    paths: Mapping[int, str],
    reach: Reach,
    team: Team,
    manifest: SourceManifest | None = None,
    declared_files: Mapping[int, DeclaredFile] = MappingProxyType({}),
) -> tuple[dict[int, Index], list[Finding]]:
    """Index the files, each process its part, and give every process all of them. Collective.

    What cannot be read as a checkpoint is an error, and what is not as rankxform wrote it.
    """
    manifest_entries = _manifest_entries(paths, manifest)

    def mine() -> tuple[dict[int, Index], list[Finding]]:
        local_indexes, wrong, indexer = {}, list[Finding](), Indexer()
        for file in reach.partition(paths)[team.rank]:
            message = (
                changed_manifest_file(paths[file], manifest_entries[file], manifest.label)
                if manifest and file in manifest_entries
                else None
            )
            if message is not None:
                wrong.append(Finding(message, id=FILE_IDENTITY, file=file, need=HEADERS))
                continue
            try:
                local_indexes[file] = indexer.index(paths[file], declared_files.get(file, _NOTHING))
            except CheckpointError as error:
                wrong.append(Finding(error.parts, file=file, need=HEADERS))
        wait_for_newer_mtime(local_indexes.values())
        return local_indexes, wrong

    parts = team.allgather(mine)
    indexes = {file: index for part, _ in parts for file, index in part.items()}
    wrong = sorted(
        (finding for _, local_findings in parts for finding in local_findings),
        key=lambda finding: finding.file or 0,
    )
    schema_cache: dict[Schema, Schema] = {}  # what several processes found is kept once
    for index in indexes.values():
        index.schema = schema_cache.setdefault(index.schema, index.schema)
    return dict(sorted(indexes.items())), wrong


def _manifest_entries(
    paths: Mapping[int, str], manifest: SourceManifest | None
) -> dict[int, Mapping[str, Any]]:
    """Return what a manifest says of each file, by id."""
    if manifest is None:
        return {}
    entries_by_path = {address_of(dirname(manifest.label), n): f for n, f in manifest.files.items()}
    return {file: entries_by_path[path] for file, path in paths.items() if path in entries_by_path}


def _states_of(description: Description, schemas: Mapping[int, Schema]) -> States:
    """Return which tensors of files and description are states, as far as names tell."""
    names = (name for schema in dict.fromkeys(schemas.values()) for name in schema.names)
    return find_states(dict.fromkeys([*names, *description.declared, *description.refused]))


def _with_catalog(source: Source, chosen_files: ChosenFiles, narrow: SourceScope) -> Source:
    """Return a source with its catalog, or with what prevents that; pure."""
    findings, description = [*source.findings], chosen_files.selected.description
    strategy, described = chosen_files.strategy, description is not None
    is_whole = strategy is None or isinstance(strategy, WholeStrategy)
    if not described and not source.errors and is_whole:
        try:
            strategy, notices = infer_whole_strategy(
                source.paths, source.indexes, source.where.path, chosen_files.siblings
            )
            findings += map(as_notice, notices)
        except (UsageError, CheckpointError) as error:
            findings.append(Finding.of_error(error))
    inside = {
        file: index
        for file, index in source.indexes.items()
        if described or strategy is None or source.selected.rank_of(file) < strategy.ranks
    }
    extra = {file: index for file, index in source.indexes.items() if file not in inside}
    source = replace(source, indexes=inside, extra_rank_index=extra)
    paths = source.paths
    if description is None:
        ranks = {} if isinstance(strategy, WholeStrategy) else source.selected.ranks
        label = strategy.label if strategy else source.where.path  # files of ranks say nothing
        final_description = Description(label, strategy, ranks=ranks)
        schemas = {file: index.schema for file, index in inside.items()}
        extra_schemas = {file: index.schema for file, index in extra.items()}
        read = HeadersRead(
            final_description, schemas, paths, is_described=False, extra=extra_schemas
        )
    else:
        schemas = schemas_without_repeats(description, inside)
        final_description = repair_description(description, schemas)
        findings += final_description.findings[len(description.findings) :]
        dropped = narrow.drops(_states_of(final_description, schemas))
        read = HeadersRead(final_description, schemas, paths, dropped)
    findings += run_rules(HEADERS, read, narrow.accepts)
    # An id stands for a rank with all that it holds whole.
    if description is not None and final_description.is_whole:
        size = max(chosen_files.selected.names, default=0) + 1
        final_description = replace(final_description, strategy=WholeStrategy(stage_size=size))
    catalog = None
    if not errors_of(findings):
        try:
            catalog = catalog_of(
                final_description, schemas, paths, source.needed_files, source.searched
            )
        except (CheckpointError, RequestError, StrategyError) as error:
            findings.append(Finding.of_error(error))
    if catalog is not None:
        description, manifest = final_description, source.manifest
        read = read._replace(description=description, catalog=catalog, manifest=manifest)
        findings += run_rules(CATALOG, read, narrow.accepts)
    return replace(source, catalog=catalog, findings=tuple(findings))
