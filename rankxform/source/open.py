"""`open_source`, the only way into a checkpoint: which files it is, and what each of them holds.

A source, an adapter, a reference, a destination that is compared, a folder that is inspected: all
of them are opened here, so that each is checked in the same way. Nothing wrong with files is raised
here; it is collected. A conversion requires that there is nothing (`Source.require`), a
verification makes differences of it, and `inspect` shows all of it.

A source is the same on every process; `rankxform.source.copies` finds its files on all nodes.

Two sentences, because which ranks are needed may depend on what the checkpoint says of itself.
`look_at`: process 0 resolves the place and recognizes the form (broadcast); the first process of
each node lists the names (gathered); process 0 reads the manifest or the metadata (broadcast).
`open_place`: process 0 chooses the files (broadcast); each node says which of them it reaches
(gathered); every process reads the headers of its share of the files (gathered); then each makes
the same catalog, and they agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, CheckpointRef, SelectedFiles
from rankxform.errors import CheckpointError, FormatError, RequestError, StrategyError, UsageError
from rankxform.formats.container import Index, Schema
from rankxform.layout.states import find_states
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.planning.build_catalog import catalog_of
from rankxform.planning.catalog import Description
from rankxform.planning.transfers import Reach
from rankxform.statements import CATALOG, HEADERS, Finding, as_notice, run_rules
from rankxform.storage.store import address_of
from rankxform.transport import Team

from . import checks
from .checks import schemas_without_repeats
from .choose import choose_files, infer_whole_strategy
from .copies import read_headers, schemas_elsewhere
from .place import PlaceRead, look_at
from .source import ALL, Source, SourceNeed


def open_source(
    where: CheckpointRef, team: Team, need: SourceNeed = ALL, *, uses_manifest: bool = True
) -> Source:
    """Look at a place and open what is needed of it. Collective."""
    return open_place(look_at(where, team, uses_manifest=uses_manifest), team, need)


def open_place(place: PlaceRead, team: Team, need: SourceNeed = ALL) -> Source:
    """Choose the files that are needed, read their headers, and make the catalog. Collective."""
    source = read_headers(choose_files(place, need, team), place.listings, team)
    elsewhere, noticed = schemas_elsewhere(source, team)
    source = _with_findings(source, noticed)
    if touched := _touched_files(source):
        from .written import compare_fingerprints

        source = _with_findings(source, compare_fingerprints(source, touched, team))
    return team.agree(lambda: tabulate(describe(source), elsewhere))


def _with_findings(source: Source, findings: Iterable[Finding], **fields: Any) -> Source:
    return replace(source, findings=(*source.findings, *findings), **fields)


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
        names = {rank: arrays_name(rank) for rank in holders}
        source = Source(
            where=CheckpointRef(place, DEFAULT_FORM, strategy=strategy),
            form=FORMS[DEFAULT_FORM],
            need=SourceNeed(accepts=accepts),
            selected=SelectedFiles(names),
            strategy=strategy,
            needed_files=tuple(range(strategy.ranks)) if strategy else (*holders,),
            paths={rank: address_of(place, name) for rank, name in names.items()},
            indexes={rank: by_process[process][rank] for rank, process in holders.items()},
            reach=Reach((*range(team.size),), tuple(map(frozenset, by_process))),
        )
        return tabulate(describe(source)).require()

    return team.agree(assemble_source)


def arrays_name(rank: int) -> str:
    """Return the name of a rank's arrays at their place."""
    return f"rank_{rank}.safetensors"


# -- what all headers say together; pure -----------------------------------------------------------


def describe(source: Source) -> Source:
    """Return a source with what is stated of its files, and what of each of them counts."""
    is_of_ranks = source.selected.description is None
    return _as_ranks(source) if is_of_ranks else _as_described(source)


def _as_ranks(source: Source) -> Source:
    """Describe files of ranks by the strategy that is given, or that whole tensors show; those of a
    rank beyond it are set apart."""
    strategy, findings = source.strategy, list[Finding]()
    if not source.errors and (strategy is None or isinstance(strategy, WholeStrategy)):
        try:
            strategy, notices = infer_whole_strategy(source)
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
        from rankxform.planning.parts import describe_parts

        schemas = {file: index.schema for file, index in inside.items()}
        try:
            description, views = describe_parts(strategy, schemas, source.selected.rank_of)
            inside = {file: index.viewed(views[file]) for file, index in inside.items()}
        except (CheckpointError, RequestError, StrategyError) as error:
            findings.append(Finding.of_error(error))
    schemas = {file: index.schema for file, index in inside.items()}
    return _with_findings(
        source,
        findings,
        indexes=inside,
        extra_rank_index=extra,
        description=description,
        schemas=schemas,
    )


def _as_described(source: Source) -> Source:
    """Describe files by what the checkpoint says of them itself."""
    description = source.selected.description or Description()
    schemas = schemas_without_repeats(description, source.indexes)
    if description.is_whole and description.listed:
        passed_over = {**description.passed_over, **_passed_over(source, schemas)}
        description = replace(description, passed_over=passed_over)
    headers = {
        file: index if index.schema is schemas[file] else index.with_schema(schemas[file])
        for file, index in source.indexes.items()
    }
    first = len(description.findings)  # those before are the source's already
    findings, indexes = list[Finding](), source.indexes
    try:
        described = source.form.describe(description, headers, source.selected.names)
        if described.declared_files is not description.declared_files:
            views = {file: d.views for file, d in described.declared_files.items()}
            indexes = {
                file: index.viewed(views[file]) if views[file] else index.emptied()
                for file, index in indexes.items()
            }
            schemas = {file: index.schema for file, index in indexes.items()}
        description = described
    except CheckpointError as error:
        findings.append(Finding.of_error(error))
    except FormatError as error:
        message = error.at(source.where.path)
        findings.append(Finding.of_error(CheckpointError.of_parts(message)))
    dropped = source.dropped
    if (operations := source.need.operations) is not None:
        names = [name for schema in dict.fromkeys(schemas.values()) for name in schema.names]
        names += [*description.declared, *description.refused]
        dropped = operations.with_states(find_states(dict.fromkeys(names))).drops
    return _with_findings(
        source,
        (*description.findings[first:], *findings),
        description=description,
        indexes=indexes,
        schemas=schemas,
        dropped=dropped,
    )


def _passed_over(source: Source, schemas: Mapping[int, Schema]) -> dict[str, dict[str, str]]:
    """Return by file the tensors that its index lists in others, each with that file."""
    description, names = source.selected.description or Description(), source.selected.names
    passed_over = dict[str, dict[str, str]]()
    for file, index in source.indexes.items():
        if len(schemas[file].names) < len(index.schema.names) and file != description.untracked:
            file_of = {name: f for f, listed in description.listed.items() for name in listed}
            others = (name for name in index.schema.names if name not in schemas[file].position)
            passed_over[names[file]] = {name: names[file_of[name]] for name in others}
    return passed_over


def tabulate(source: Source, elsewhere: Mapping[int, Schema] = MappingProxyType({})) -> Source:
    """Return a source that is described with its catalog, or with what prevents that.

    elsewhere: what files of other pipeline stages hold, of which nothing is read.
    """
    source = _with_findings(source, run_rules(HEADERS, [checks], source, source.need.accepts))
    description = source.description
    # An id stands for a rank with all that it holds whole.
    if source.form.described and description.is_whole:
        whole_strategy = WholeStrategy(stage_size=max(source.selected.names, default=0) + 1)
        description = replace(description, strategy=whole_strategy)
        source = replace(source, description=description)
    if source.errors:
        return source
    try:
        catalog = catalog_of(
            description,
            source.schemas,
            source.paths,
            source.needed_files,
            source.searched,
            elsewhere,
            source.dropped if source.form.described else None,
        )
    except (CheckpointError, RequestError, StrategyError) as error:
        return _with_findings(source, [Finding.of_error(error)])
    source = replace(source, catalog=catalog)
    return _with_findings(source, run_rules(CATALOG, [checks], source, source.need.accepts))
