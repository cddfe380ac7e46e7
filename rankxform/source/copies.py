"""Which copies of a source's files there are, on which nodes and in which places; which is read.

A node is processes with one host name and one mount namespace; its first process looks for all of
them. Files of one name on several nodes must be the same: on network file systems size, time and
inode number show it; on local disks inode numbers mean nothing, so that 64 samples of the bytes are
compared too, and all bytes if only the times differ.

A source may lie in several places, the best first: a job that lost a node has some of its ranks'
files in the memory or on the disks of the nodes that are left, and all of them, at a price, in
shared storage. A name that several places have is one file. Of its copies the one in the first
place is read, by the nodes that have it there; the others get by MPI what they need of it. Storage,
named last, is asked for nothing that a node still has, and for the rest by one node.

A copy that is cut off, or has a wrong header, is what a crash leaves: it is dropped with a warning
where another place, or another node, has the file whole. Two that are whole and differ, by size,
header or a few samples of their bytes, are an error: nothing says which of them is meant.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import MappingProxyType

from rankxform.checkpoints.base import CheckpointRef, SelectedFiles
from rankxform.checkpoints.rank_folders import LATEST
from rankxform.errors import CheckpointError, Message, RankxformError, StorageError
from rankxform.formats.container import DeclaredFile, Index, Schema
from rankxform.layout.names import format_ranges
from rankxform.layout.states import may_relate
from rankxform.planning.transfers import Reach
from rankxform.statements import FILE_IDENTITY, HEADERS, Finding, as_notice, as_warning, quote
from rankxform.storage import identity
from rankxform.storage.identity import FileIdentity
from rankxform.storage.source_reader import Indexer, find_holes, wait_for_newer_mtime
from rankxform.storage.store import NOTHING, Listing, address_of, storage_of
from rankxform.transport import Team
from rankxform.transport.team import OnProgress, show_nothing
from rankxform.values import NamedTuple

from .checks import changed_manifest_file
from .place import PlaceListing, searched_nodes
from .source import Source, SourceManifest


def find_reach(
    team: Team,
    paths: Mapping[int, str],
    declared_files: Mapping[int, DeclaredFile],
    same_as_node0: frozenset[int] = frozenset(),
) -> tuple[Reach, list[Finding]]:
    """Find out which nodes have which of the chosen files; return also what was noticed.

    The nodes `same_as_node0` have what node 0 has. Raises CheckpointError where two nodes have
    different files under one name that can be read.
    """
    nodes = team.nodes
    if nodes.count == 1 or not paths:
        return Reach.full(nodes.node_of, paths), []
    address = next(iter(paths.values()))
    if storage_of(address).is_shared:
        return reach_of_storage(team, address, paths)

    def identify_files() -> dict[int, FileIdentity]:
        if not nodes.is_leader(team.rank) or nodes.node_of[team.rank] in same_as_node0:
            return {}
        return {
            file: file_identity
            for file, path in paths.items()
            if (file_identity := identity.file_identity(Path(path)))
        }

    by_process = team.allgather(identify_files)
    identities_by_node = [
        dict(by_process[p[0]] if n not in same_as_node0 else by_process[0])
        for n, p in enumerate(nodes.processes)
    ]
    groups_by_file = {}
    for file in paths:
        identities = {n: ids[file] for n, ids in enumerate(identities_by_node) if file in ids}
        if len(groups := identity.group_by_file(identities)) > 1:
            groups_by_file[file] = groups
    findings = _drop_unreadable(team, paths, declared_files, identities_by_node, groups_by_file)
    if groups_by_file:
        findings.append(as_notice(_compare(team, paths, identities_by_node, groups_by_file)))
    for file, groups in groups_by_file.items():
        for node in (node for group in groups[1:] for node in group):
            del identities_by_node[node][file]
    missing_files = [file for file in paths if not any(file in ids for ids in identities_by_node)]
    if missing_files:
        raise CheckpointError(
            f"there is no such file{searched_nodes(team)}", where=paths[missing_files[0]]
        )
    return Reach(nodes.node_of, tuple(map(frozenset, identities_by_node))), findings


def reach_of_storage(team: Team, address: str, files: Iterable[int]) -> tuple[Reach, list[Finding]]:
    """Find out which nodes get answers from the storage where all `files` are, as process 0 does;
    return also what was noticed. Collective."""
    nodes = team.nodes
    answers = team.allgather(
        lambda: not nodes.is_leader(team.rank) or storage_of(address).is_reached(address)
    )
    by_node, all_files = [answers[processes[0]] for processes in nodes.processes], frozenset(files)
    reach = Reach(nodes.node_of, tuple(all_files if able else frozenset() for able in by_node))
    names = [name for name, able in zip(nodes.names, by_node) if not able]
    if not names or not by_node[0]:  # process 0 has said, or says, what is wrong
        return Reach.full(nodes.node_of, all_files), []
    text = f"{len(names)} of {nodes.count} nodes do not reach it ({', '.join(names[:4])}"
    text += f"{', ...' if names[4:] else ''}); the others do that for them"
    return reach, [as_notice(f"{'/'.join(address.split('/')[:3])}: {text}")]


def _drop_unreadable(
    team: Team,
    paths: Mapping[int, str],
    declared_files: Mapping[int, DeclaredFile],
    identities_by_node: list[dict[int, FileIdentity]],
    groups_by_file: dict[int, list[list[int]]],
) -> list[Finding]:
    """Drop from both tables copies that cannot be read, of files that another node has whole.

    groups_by_file: the nodes that have the same copy, of each file with several. Where none can be
    read, the first is left, which is an error then. Returns warnings. Collective.
    """
    if not groups_by_file:
        return []

    def faults() -> dict[int, str]:
        texts = {}
        for file in _files_to_look_at(team, groups_by_file):
            try:
                Indexer().index(paths[file], declared_files.get(file, _NOTHING))
            except (CheckpointError, StorageError) as error:
                texts[file] = error.parts.line
        return texts

    by_process, findings, names = team.allgather(faults), [], team.nodes.names
    faults_by_node = [by_process[processes[0]] for processes in team.nodes.processes]
    for file, groups in [*groups_by_file.items()]:
        whole_groups = [group for group in groups if file not in faults_by_node[group[0]]]
        kept_groups = whole_groups or groups[:1]
        for group in (group for group in groups if group not in kept_groups):
            if whole_groups:
                fault, host = faults_by_node[group[0]][file], names[whole_groups[0][0]]
                text = f"{names[group[0]]}: {fault}; the copy on {host} takes its place"
                findings.append(as_warning(text))
            for node in group:
                del identities_by_node[node][file]
        groups_by_file[file] = kept_groups
        if len(kept_groups) == 1:
            del groups_by_file[file]
    return findings


def _files_to_look_at(team: Team, groups_by_file: Mapping[int, list[list[int]]]) -> list[int]:
    """Return the files of which this process looks at its node's copy, for all nodes with it."""
    node, is_leader = team.nodes.node_of[team.rank], team.nodes.is_leader(team.rank)
    return [
        f for f, groups in groups_by_file.items() if is_leader and node in (g[0] for g in groups)
    ]


def _compare(
    team: Team,
    paths: Mapping[int, str],
    identities_by_node: list[dict[int, FileIdentity]],
    groups_by_file: Mapping[int, list[list[int]]],
) -> str:
    """Compare files that nodes have under one name and that are not the same by their times.

    Returns what to note. Raises CheckpointError. Collective.
    """
    nodes = team.nodes
    for file, groups in groups_by_file.items():
        sizes = {nodes.names[group[0]]: identities_by_node[group[0]][file].size for group in groups}
        if len(set(sizes.values())) > 1:
            places = [f"{name} ({size} bytes)" for name, size in sizes.items()]
            raise _different(paths[file], file, places)
    files_to_digest = _files_to_look_at(team, groups_by_file)
    digests = team.allgather_work(
        lambda on_progress: {
            file: identity.file_digest(Path(paths[file]), on_progress) for file in files_to_digest
        }
    )
    for file, groups in groups_by_file.items():
        leaders = [nodes.processes[group[0]][0] for group in groups]
        if len({digests[process][file] for process in leaders}) > 1:
            names = [nodes.names[group[0]] for group in groups]
            raise _different(paths[file], file, names)
    total = sum(identities_by_node[g[0][0]][f].size * len(g) for f, g in groups_by_file.items())
    return (
        f"{len(groups_by_file)} source files are on several nodes with other times (such as "
        f"{paths[min(groups_by_file)]}); their {total} bytes were compared, and one copy was used. "
        "Copies that keep times (cp -p, rsync -t) need no comparing"
    )


def _different(path: str, rank: int, places: list[str]) -> CheckpointError:
    return CheckpointError(
        f"differs between {' and '.join(places)}",
        f"remove the copy that does not belong to rank {rank}",
        where=path,
    )


_NOTHING = DeclaredFile()


# -- a source in several places --------------------------------------------------------------------


class _PlaceCopies(NamedTuple):
    """The copies of files that one place has."""

    paths: Mapping[int, str]
    reach: Reach
    indexes: dict[int, Index]  # of those that can be read


def read_headers(source: Source, listings: Sequence[PlaceListing], team: Team) -> Source:
    """Return a source whose files' headers were read, each from the copy that is chosen for it.
    Collective."""
    description = source.selected.description
    declared_files = description.declared_files if description else {}
    if source.where.fallbacks:
        return _choose_copies(source, listings, declared_files, team)
    same_as_node0 = listings[0].same_as_node0 if listings else frozenset[int]()
    reach, noticed = find_reach(team, source.paths, declared_files, same_as_node0)
    indexes, wrong = index_all(source.paths, reach, team, source.manifest, declared_files)
    findings = (*source.findings, *wrong.values(), *noticed)
    return replace(source, reach=reach, indexes=indexes, findings=findings)


def _choose_copies(
    source: Source,
    listings: Sequence[PlaceListing],
    declared_files: Mapping[int, DeclaredFile],
    team: Team,
) -> Source:
    """Read the headers of all copies, compare them, and choose. Collective.

    A file that no place has is looked for in the first, and missing there.
    """
    places = source.where.places
    names = {file: source.selected.names[file] for file in source.paths}
    place_listings = [place.listing for place in listings if place.listing]
    listed_names = [{*listing.files, *listing.entries} for listing in place_listings]
    nowhere = {f for f, name in names.items() if not any(name in names for names in listed_names)}
    copies: list[_PlaceCopies] = []
    unreadable: dict[int, list[Finding]] = {}
    findings = [*source.findings]
    findings += _step_of_fallbacks(source.where, place_listings[0], source.selected)
    for place, listing, listed, entry in zip(places, place_listings, listed_names, listings):
        if listing.kind == NOTHING:
            text = f"{place}: there is no such folder{listing.searched}; others are read"
            findings.append(as_warning(text))
        paths = {
            file: address_of(place, name)
            for file, name in names.items()
            if name in listed or (not copies and file in nowhere)
        }
        reach, noticed = find_reach(team, paths, declared_files, entry.same_as_node0)
        faults = CheckpointError, StorageError  # another place may have the file
        indexes, wrong = index_all(paths, reach, team, None, declared_files, faults)
        copies.append(_PlaceCopies(paths, reach, indexes))
        findings += noticed
        for file, finding in wrong.items():
            unreadable.setdefault(file, []).append(finding)
    findings += _drop_unwritten(team, copies)
    place_of = {
        file: next((n for n, copy in enumerate(copies) if file in copy.indexes), 0)
        for file in names
    }
    for file, faults_of_file in unreadable.items():
        copy = copies[place_of[file]]
        if file in copy.indexes:
            lines = [fault.message.line for fault in faults_of_file]
            texts = [f"{line}; {copy.paths[file]} takes its place" for line in lines]
            findings += map(as_warning, texts)
        else:
            findings.append(faults_of_file[0])
    nodes = team.nodes
    files_by_node: list[set[int]] = [set() for _ in range(nodes.count)]
    for number, copy in enumerate(copies):
        files_of_place = [file for file, n in place_of.items() if n == number]
        if number == 0:
            for files, reachable_files in zip(files_by_node, copy.reach.files):
                files |= reachable_files.intersection(files_of_place)
            continue
        # One node reads a file of a later place, or each of them would ask storage for its bytes.
        for process, part in enumerate(copy.reach.partition(files_of_place)):
            files_by_node[nodes.node_of[process]].update(part)
    return replace(
        source,
        paths={f: copies[n].paths.get(f, source.paths[f]) for f, n in place_of.items()},
        reach=Reach(nodes.node_of, tuple(map(frozenset, files_by_node))),
        indexes={f: copies[n].indexes[f] for f, n in place_of.items() if f in copies[n].indexes},
        findings=tuple(findings),
        place_of=place_of,
    )


def _step_of_fallbacks(
    where: CheckpointRef, first: Listing, selected: SelectedFiles
) -> Iterator[Finding]:
    """Yield that what was chosen is another step than those of the first place."""
    step_files = selected.names.values()  # of all ranks, whichever are needed
    is_chosen = selected.step is not None and where.step in (None, LATEST)
    if is_chosen and first.files and not {*first.files} & {*step_files}:
        name = next(iter(step_files), "")
        yield Finding(
            Message(
                f"has no file of the step that the other places have ({name})",
                ("--step says which is meant", "leave out --fallback"),
                where.path,
            ),
            id=FILE_IDENTITY,
        )


class _CopySamples(NamedTuple):
    """What tells a copy of a file from another: bytes that were never written, and samples."""

    unwritten: int
    digest: str


def _drop_unwritten(team: Team, copies: Sequence[_PlaceCopies]) -> list[Finding]:
    """Drop copies with parts that were never written, of files that another place has whole.

    Returns what was dropped, and which copies that are left differ. Collective.
    """
    places_of_file: dict[int, list[int]] = {}
    for number, place in enumerate(copies):
        for file in place.indexes:
            places_of_file.setdefault(file, []).append(number)

    def sampled() -> dict[tuple[int, int], _CopySamples]:
        samples = {}
        for number, place in enumerate(copies):
            several = [file for file in place.indexes if len(places_of_file[file]) > 1]
            for file in place.reach.partition(several)[team.rank]:
                unwritten = sum(find_holes(place.paths[file], place.indexes[file]).values())
                digest = identity.sample_at(place.paths[file], _SAMPLES)
                samples[number, file] = _CopySamples(unwritten, digest)
        return samples

    samples = {key: copy for part in team.allgather(sampled) for key, copy in part.items()}
    findings = []
    for file, numbers in sorted(places_of_file.items()):
        if len(numbers) == 1:
            continue
        least = min(samples[number, file].unwritten for number in numbers)
        whole = [number for number in numbers if samples[number, file].unwritten == least]
        for number in {*numbers}.difference(whole):
            path, other_path = copies[number].paths[file], copies[whole[0]].paths[file]
            nbytes = samples[number, file].unwritten
            text = f"{path}: {nbytes:,} bytes were never written; {other_path} takes its place"
            findings.append(as_warning(text))
            del copies[number].indexes[file]
        kinds = {
            (samples[number, file].digest, copies[number].indexes[file].schema): number
            for number in reversed(whole)
        }
        if len(kinds) > 1:
            first, second, *_ = sorted(kinds.values())
            path, other_path = copies[first].paths[file], copies[second].paths[file]
            names, other_names = (
                {*copies[number].indexes[file].schema.names} for number in (first, second)
            )
            text = "is whole, as another place's copy is, and they differ"
            tries = (
                f"mv {quote(path)} {quote(path + '.aside')} if the other is meant",
                f"mv {quote(other_path)} {quote(other_path + '.aside')} if this one is",
            )
            if (only := sorted(names - other_names)) and (missing := sorted(other_names - names)):
                text = f"holds {only[0]!r}, and another place's copy {missing[0]!r} in its stead"
            if names < other_names or other_names < names:
                text = (
                    f"holds {len(names):,} tensors, and another place's copy {len(other_names):,}"
                )
                torn = min((names, path), (other_names, other_path), key=lambda pair: len(pair[0]))
                tries = (
                    f"mv {quote(torn[1])} {quote(torn[1] + '.torn')} if it was cut off",
                    tries[0],
                )
            message = Message(text, tries, path, f"the other: {other_path}")
            findings.append(Finding(message, id=FILE_IDENTITY, file=path, need=HEADERS))
    return findings


_SAMPLES = 8
"""Of a file in each place: what another step wrote differs nearly everywhere."""


# -- headers ---------------------------------------------------------------------------------------


def index_all(
    paths: Mapping[int, str],
    reach: Reach,
    team: Team,
    manifest: SourceManifest | None = None,
    declared_files: Mapping[int, DeclaredFile] = MappingProxyType({}),
    faults: tuple[type[RankxformError], ...] = (CheckpointError,),
) -> tuple[dict[int, Index], dict[int, Finding]]:
    """Index the files, each process its part, and give every process all of them. Collective.

    faults: errors that are noted of a file; others are raised.

    Returns also by file why it cannot be read as a checkpoint, or is not as rankxform wrote it.
    """
    manifest_entries = manifest.entries(paths) if manifest is not None else {}
    local_indexes, local_wrong, indexer = dict[int, Index](), dict[int, Finding](), Indexer()
    local_files = reach.partition(paths)[team.rank]
    read_each = storage_of(paths[local_files[0]]).read_each if local_files else None

    def index_files(on_progress: OnProgress, files: Sequence[int] = local_files) -> None:
        if read_each is not None and len(files) > 1:  # all but the first may be like it
            index_files(on_progress, files[:1])
            read_each(files[1:], index_files, on_progress)
            return
        for file in files:
            path = paths[file]
            message = (
                changed_manifest_file(path, manifest_entries[file], manifest.label)
                if manifest and file in manifest_entries
                else None
            )
            if message is not None:
                local_wrong[file] = Finding(message, id=FILE_IDENTITY, file=path, need=HEADERS)
                continue
            try:
                local_indexes[file] = indexer.index(path, declared_files.get(file, _NOTHING))
            except faults as error:
                finding = Finding(error.parts, error=type(error), file=path, need=HEADERS)
                local_wrong[file] = finding
        if files is local_files:
            wait_for_newer_mtime(local_indexes.values())

    team.work(index_files, show_nothing)
    parts = team.allgather(lambda: (local_indexes, local_wrong))
    indexes = {file: index for part, _ in parts for file, index in part.items()}
    wrong = {file: finding for _, part in parts for file, finding in part.items()}
    schema_cache: dict[Schema, Schema] = {}  # what several processes found is kept once
    for index in indexes.values():
        index.schema = schema_cache.setdefault(index.schema, index.schema)
    return dict(sorted(indexes.items())), dict(sorted(wrong.items()))


def schemas_elsewhere(source: Source, team: Team) -> tuple[dict[int, Schema], list[Finding]]:
    """Return what the files of one rank hold, of each pipeline stage of which none is read; of all
    its ranks, where those of a stage that is read hold different names.

    Which tensors are states, or copies, is decided of all together, so that it does not depend on
    the ranks that are made. Stages whose files nobody can read are noticed. Collective.
    """
    strategy, selected, where = source.strategy, source.selected, source.where
    if strategy is None or len(strategy.stages) == 1 or source.form.described:
        return {}, []
    stage_of = {file: strategy.stage_of(selected.rank_of(file)) for file in selected.names}
    unread = {*range(len(strategy.stages))}.difference(stage_of[f] for f in source.paths)
    if not unread:
        return {}, []
    names_by_rank: dict[int, set[str]] = {}
    for file, index in source.indexes.items():
        names_by_rank.setdefault(selected.rank_of(file), set()).update(index.schema.names)
    names, listed = {*strategy.stages_of}.union(*names_by_rank.values()), strategy.stages_of
    if not may_relate(names) and names <= listed.keys():
        return {}, []
    kinds = {(strategy.stage_of(rank), *sorted(names)) for rank, names in names_by_rank.items()}
    are_alike = len(kinds) == len({stage for stage, *_ in kinds})
    files_by_rank: dict[int, list[int]] = {}
    for file in selected.names:
        files_by_rank.setdefault(selected.rank_of(file), []).append(file)

    def read(stages: Iterable[int]) -> dict[int, Schema]:
        indexer, schemas = Indexer(), dict[int, Schema]()
        for stage in stages:
            ranks = [rank for rank in strategy.ranks_in(stage) if rank in files_by_rank]
            read_ranks = set[int]()
            for rank, place in product(ranks, where.places):
                if rank in read_ranks or (read_ranks and are_alike):
                    continue
                with suppress(CheckpointError, StorageError):
                    paths = {f: address_of(place, selected.names[f]) for f in files_by_rank[rank]}
                    schemas |= {file: indexer.index(path).schema for file, path in paths.items()}
                    read_ranks.add(rank)
        return schemas

    schemas = team.bcast(lambda: read(unread))
    missing = unread.difference(stage_of[file] for file in schemas)
    lacking = {stage for f, stage in stage_of.items() if stage in unread and f not in schemas}
    stages = missing if are_alike else lacking
    if stages and team.nodes.count > 1:  # files that process 0 does not see
        sees_others = team.nodes.is_leader(team.rank)
        if storage_of(where.path).is_shared:
            sees_others = sees_others and bool(source.reach.of(team.rank))
        parts = team.allgather(lambda: read(stages) if sees_others else {})
        schemas = {file: schema for part in (*parts, schemas) for file, schema in part.items()}
        missing.difference_update(stage_of[file] for file in schemas)
    text = f"no file of pipeline stage {format_ranges(missing)} can be read; which tensors are "
    text += "optimizer states, or copies, is told by the other stages"
    return schemas, [as_notice(f"{where.path}: {text}")] if missing else []
