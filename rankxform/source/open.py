"""`open_source`, the only way into a checkpoint: which files it is, and what each of them holds.

A source, an adapter, a reference, a destination that is compared, a folder that is inspected: all
of them are opened here, so that each is checked in the same way. Nothing wrong with files is raised
here; it is collected. A conversion requires that there is nothing (`Source.require`), a
verification makes differences of it, and `inspect` shows all of it.

A source is the same on every process; `rankxform.source.copies` finds its files on all nodes.

Collective, in this order: process 0 resolves the place and recognizes the form (two broadcasts);
the first process of each node lists the names (gathered), and process 0 selects the files
(broadcast); each node says which of them it reaches (gathered); every process reads the headers of
its share of the files (gathered); then each makes the same catalog, and they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import field, replace
from itertools import pairwise
from posixpath import dirname
from types import MappingProxyType

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, CheckpointRef, Form, SelectedFiles
from rankxform.errors import CheckpointError, RequestError, StrategyError, UsageError
from rankxform.formats.container import Index, Schema
from rankxform.layout.states import find_states
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.planning.build_catalog import catalog_of
from rankxform.planning.catalog import Catalog, Description
from rankxform.planning.plan import Planner, needed_bytes_by_file
from rankxform.planning.transfers import Reach, SliceRange
from rankxform.statements import (
    CATALOG,
    HEADERS,
    Finding,
    HasFindings,
    as_notice,
    errors_of,
    require,
    run_rules,
)
from rankxform.storage.store import Listing, address_of
from rankxform.transport import Team
from rankxform.values import dataclass

from . import checks
from .checks import HeadersRead, SourceManifest, schemas_without_repeats
from .choose import (
    ChosenFiles,
    SourceScope,
    choose_files,
    enter_single_folder,
    form_at,
    infer_whole_strategy,
)
from .copies import (
    ChosenCopies,
    PlaceListing,
    PlaceUse,
    choose_copies,
    find_reach,
    index_all,
    joined_listing,
    list_on_all_nodes,
    list_places,
    schemas_elsewhere,
)


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
    # File id -> number of its place in `where.places`; {}: there is one place.
    place_of: Mapping[int, int] = field(default_factory=dict)

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

    def places_used(
        self, planner: Planner, slice_ranges: Sequence[SliceRange]
    ) -> tuple[PlaceUse, ...]:
        """Return what parts of destination files need of each place, if there are several."""
        if not self.place_of:
            return ()
        ranks: list[set[int]] = [set() for _ in self.where.places]
        nbytes = [0] * len(ranks)
        for file, file_bytes in needed_bytes_by_file(planner, slice_ranges).items():
            nbytes[self.place_of[file]] += file_bytes
            ranks[self.place_of[file]].add(planner.catalog.rank_of(file))
        return tuple(
            PlaceUse(place, size, tuple(sorted(ranks_read)))
            for place, size, ranks_read in zip(self.where.places, nbytes, ranks)
        )

    @property
    def folder(self) -> str:
        """The folder to which the names of its files are relative, or the file itself."""
        if not self.form.described:
            return self.where.path
        return next((dirname(path) for path in self.paths.values()), self.where.path)


def open_source(where: CheckpointRef, team: Team, narrow: SourceScope | None = None) -> Source:
    """List, choose, describe, and read the headers that are needed. Collective."""
    narrow = narrow or SourceScope()
    where, inside = team.bcast(lambda: enter_single_folder(where.absolute()))
    form = FORMS[team.bcast(lambda: form_at(where).name)]
    listing, same_as_node0, listings = None, frozenset[int](), list[PlaceListing]()
    if where.fallbacks:
        listings = list_places(team, where, form.pattern(where))
        listing = joined_listing(listings)
    elif where.files is None:
        listing, same_as_node0 = list_on_all_nodes(team, where.path, form.pattern(where))
    # Not where each node, or each place, has a manifest of its own files.
    if where.fallbacks or len(same_as_node0) < team.nodes.count - 1:
        narrow = replace(narrow, manifest=False)
    chosen_files, src_listing = choose_files(where, form, listing, narrow, team)
    names, description = chosen_files.names, chosen_files.selected.description
    declared_files = description.declared_files if description else {}
    if where.fallbacks:
        copies = choose_copies(where, listings, chosen_files, declared_files, team)
    else:
        paths = {f: address_of(where.path, n) for f, n in sorted(names.items())}
        reach, noticed = find_reach(team, paths, declared_files, same_as_node0)
        manifest = chosen_files.manifest
        indexes, unreadable = index_all(paths, reach, team, manifest, declared_files)
        copies = ChosenCopies(paths, reach, indexes, (*unreadable.values(), *noticed))
    elsewhere, noticed = schemas_elsewhere(where, chosen_files, copies.indexes, team)
    source = Source(
        where, form, chosen_files.selected, copies.paths, copies.indexes, {}, None, copies.reach,
        chosen_files.needed_files,
        (*map(as_notice, filter(None, [inside])), *chosen_files.findings, *copies.findings,
         *noticed),
        listing.searched if listing else "", chosen_files.manifest, src_listing, copies.place_of,
    )  # fmt: skip
    if touched := _touched_files(source):
        from .written import compare_fingerprints

        changed = compare_fingerprints(source, touched, team)
        source = replace(source, findings=(*source.findings, *changed))
    return team.agree(lambda: _with_catalog(source, chosen_files, narrow, elsewhere))


def _touched_files(source: Source) -> list[int]:
    """Return the files with another time than their manifest states, and a fingerprint there.

    Samples do not see a change of few bytes, and such a file is read whole. A time is kept where a
    file is copied with its times (cp -p, rsync -t) or moved, and changed where it is written.
    """
    if source.manifest is None:
        return []
    entries = source.manifest.entries(source.paths)
    return [
        file
        for file, index in source.indexes.items()
        if "digest" in entries.get(file, {}) and index.modified != entries[file].get("modified")
    ]


def _describe_parts(
    source: Source, strategy: PatternStrategy, indexes: Mapping[int, Index]
) -> tuple[Description, dict[int, Index]]:
    """Return what files hold part by part, and their tables under the names of parts."""
    from rankxform.planning.parts import describe_parts

    schemas = {file: index.schema for file, index in indexes.items()}
    description, views = describe_parts(strategy, schemas, source.selected.rank_of)
    return description, {file: index.viewed(views[file]) for file, index in indexes.items()}


def _passed_over(
    source: Source, description: Description, schemas: Mapping[int, Schema]
) -> dict[str, dict[str, str]]:
    """Return by file the tensors that its index lists in others, each with that file."""
    names, passed_over = source.selected.names, dict[str, dict[str, str]]()
    for file, index in source.indexes.items():
        if len(schemas[file].names) < len(index.schema.names) and file != description.untracked:
            file_of = {name: f for f, listed in description.listed.items() for name in listed}
            others = (name for name in index.schema.names if name not in schemas[file].position)
            passed_over[names[file]] = {name: names[file_of[name]] for name in others}
    return passed_over


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
    if isinstance(strategy, PatternStrategy) and strategy.has_parts:
        raise UsageError("parts of rows are for files, and these are arrays", where=strategy.label)
    by_process = team.allgather(lambda: index_by_rank)

    def assemble_source() -> Source:
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

    return team.agree(assemble_source)


def arrays_name(rank: int) -> str:
    """Return the name of a rank's arrays at their place."""
    return f"rank_{rank}.safetensors"


def _with_catalog(
    source: Source,
    chosen_files: ChosenFiles,
    narrow: SourceScope,
    elsewhere: Mapping[int, Schema] = MappingProxyType({}),
) -> Source:
    """Return a source with its catalog, or with what prevents that; pure."""
    description, findings = chosen_files.selected.description, [*source.findings]
    if description is None:
        source, read = _headers_of_ranks(source, chosen_files, findings)
    else:
        read = _headers_as_described(source, description, narrow, findings)
    findings += run_rules(HEADERS, [checks], read, narrow.accepts)
    # An id stands for a rank with all that it holds whole.
    if description is not None and read.description.is_whole:
        size = max(chosen_files.selected.names, default=0) + 1
        whole_strategy = WholeStrategy(stage_size=size)
        read = read._replace(description=replace(read.description, strategy=whole_strategy))
    catalog = None
    if not errors_of(findings):
        try:
            catalog = catalog_of(
                read.description,
                read.schemas,
                source.paths,
                source.needed_files,
                source.searched,
                elsewhere,
                read.dropped if read.is_described else None,
            )
        except (CheckpointError, RequestError, StrategyError) as error:
            findings.append(Finding.of_error(error))
    if catalog is not None:
        read = read._replace(catalog=catalog, manifest=source.manifest)
        findings += run_rules(CATALOG, [checks], read, narrow.accepts)
    return replace(source, catalog=catalog, findings=tuple(findings))


def _headers_of_ranks(
    source: Source, chosen_files: ChosenFiles, findings: list[Finding]
) -> tuple[Source, HeadersRead]:
    """Return what files of ranks hold, by the strategy that is given or that whole tensors show;
    those of a rank beyond it are set apart in the source. Adds to `findings`."""
    strategy = chosen_files.strategy
    if not source.errors and (strategy is None or isinstance(strategy, WholeStrategy)):
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
        if strategy is None or source.selected.rank_of(file) < strategy.ranks
    }
    extra = {file: index for file, index in source.indexes.items() if file not in inside}
    ranks = {} if isinstance(strategy, WholeStrategy) else source.selected.ranks
    label = strategy.label if strategy else source.where.path  # files of ranks say nothing
    description = Description(label, strategy, ranks=ranks)
    if isinstance(strategy, PatternStrategy) and strategy.has_parts:
        try:
            description, inside = _describe_parts(source, strategy, inside)
        except (CheckpointError, RequestError, StrategyError) as error:
            findings.append(Finding.of_error(error))
    source = replace(source, indexes=inside, extra_rank_index=extra)
    schemas = {file: index.schema for file, index in inside.items()}
    extra_schemas = {file: index.schema for file, index in extra.items()}
    read = HeadersRead(description, schemas, source.paths, is_described=False, extra=extra_schemas)
    return source, read


def _headers_as_described(
    source: Source, description: Description, narrow: SourceScope, findings: list[Finding]
) -> HeadersRead:
    """Return what files hold, and what the checkpoint says of it itself. Adds to `findings`."""
    schemas = schemas_without_repeats(description, source.indexes)
    if description.is_whole and description.listed:
        description = replace(description, passed_over={
            **description.passed_over, **_passed_over(source, description, schemas)
        })  # fmt: skip
    headers = {
        file: index if index.schema is schemas[file] else index.with_schema(schemas[file])
        for file, index in source.indexes.items()
    }
    final_description = source.form.describe(description, headers)
    findings += final_description.findings[len(description.findings) :]
    names = [name for schema in dict.fromkeys(schemas.values()) for name in schema.names]
    names += [*final_description.declared, *final_description.refused]
    dropped = narrow.drops(find_states(dict.fromkeys(names)))
    return HeadersRead(final_description, schemas, source.paths, dropped)
