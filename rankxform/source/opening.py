"""`open_source`: the only way in. Whatever is read as a checkpoint is opened here.

What is found wrong is collected and not raised: `require` raises the first fault, `inspect` and
`verify` report all. A source is the same on every process.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field, replace
from itertools import chain
from posixpath import dirname
from types import MappingProxyType
from typing import Any

from rankxform.checkpoints.base import (
    FORMS,
    Form,
    Selected,
    Where,
)
from rankxform.errors import (
    CheckpointError,
    Parts,
    RequestError,
    StrategyError,
    UsageError,
)
from rankxform.facts import FILES, contradictions
from rankxform.formats.base import Index, Schema, Stated
from rankxform.layout.states import States, find_states
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.planning.catalog import Catalog
from rankxform.planning.description import Description
from rankxform.planning.reach import Reach
from rankxform.planning.table import catalog_of, facts_of
from rankxform.storage.index import Indexer, outwait
from rankxform.storage.store import Listing, absolute, address_of
from rankxform.transport import Team
from rankxform.values import dataclass

from . import faults
from .by_node import list_on_all, reach_of
from .choice import Chosen, Fault, Narrow, choose, entered, form_at
from .own import Own, changed
from .whole import whole_strategy

_NOTHING = Stated()


@dataclass(frozen=True)
class Source:
    """A checkpoint opened for reading.

    where: which; its path is absolute. form: its convention. selected: which files were chosen.
    paths: of these, by id. indexes: of those that belong to it and can be read; extra: of one file
    beyond the strategy's ranks, if any is there. catalog: None where nothing states how files are
    sharded, or it cannot be made. reach: which process can open which file. wanted: ids that were
    looked for. faults: what is wrong. notices: what to know; warnings: what may not be what was
    meant. own: what rankxform noted when it wrote the files, if it did. listing: what lies at the
    place; on process 0, or where there are several nodes, alone.
    """

    where: Where
    form: Form
    selected: Selected
    paths: Mapping[int, str]
    indexes: Mapping[int, Index]
    extra: Mapping[int, Index]
    catalog: Catalog | None
    reach: Reach
    wanted: tuple[int, ...] = ()
    faults: tuple[Fault, ...] = ()
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    searched: str = ""
    own: Own | None = None
    listing: Listing | None = field(default=None, compare=False)

    def require(self) -> Source:
        """Return the source. Raises its first fault."""
        if not self.faults:
            return self
        first, more = self.faults[0], len(self.faults) - 1
        also = f"{more} more such fault{'s' if more > 1 else ''}; inspect lists them"
        raise first.error(also if more and self.form.described else "")

    @property
    def table(self) -> Catalog:
        """The catalog of a source without faults."""
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


def open_source(where: Where, team: Team, narrow: Narrow | None = None) -> Source:
    """List, choose, describe, and read the headers that are needed. Collective."""
    narrow = narrow or Narrow()
    where, inside = team.bcast(lambda: entered(replace(where, path=absolute(where.path))))
    form = FORMS[team.bcast(lambda: form_at(where).name)]
    listing, same_as_node0 = None, frozenset[int]()
    if where.files is None:
        listing, same_as_node0 = list_on_all(team, where.path, form.pattern(where))
    if len(same_as_node0) < team.nodes.count - 1:  # each node has a manifest of its own files
        narrow = replace(narrow, manifest=False)
    chosen, there = choose(where, form, listing, narrow, team)
    paths = {file: address_of(where.path, name) for file, name in sorted(chosen.names.items())}
    reach, notices = reach_of(team, paths, same_as_node0)
    stated = chosen.selected.description.stated if chosen.selected.description else {}
    found, unreadable = index_all(paths, reach, team, chosen.own, stated)
    source = Source(
        where, form, chosen.selected, paths, found, {}, None, reach, chosen.wanted,
        (*chosen.faults, *unreadable), (*filter(None, [inside]), *chosen.notices, *notices),
        chosen.warnings,
        listing.searched if listing else "", chosen.own, there,
    )  # fmt: skip
    return team.agree(lambda: _tabulated(source, chosen, narrow))


def index_all(
    paths: Mapping[int, str],
    reach: Reach,
    team: Team,
    own: Own | None = None,
    stated: Mapping[int, Stated] = MappingProxyType({}),
) -> tuple[dict[int, Index], list[Fault]]:
    """Index the files, each process its part, and give every process all of them. Collective.

    What cannot be read as a checkpoint is a fault, and what is not as rankxform wrote it.
    """
    noted = _noted(paths, own)

    def mine() -> tuple[dict[int, Index], list[Fault]]:
        found, wrong, indexer = {}, list[Fault](), Indexer()
        for file in reach.partition(paths)[team.rank]:
            why = changed(paths[file], noted[file], own.label) if own and file in noted else None
            if why is not None:
                wrong.append(Fault(why, CheckpointError, file, inside=True, id=FILES))
                continue
            try:
                found[file] = indexer.index(paths[file], stated.get(file, _NOTHING))
            except CheckpointError as error:
                wrong.append(Fault(error.parts, CheckpointError, file, inside=True))
        outwait(found.values())
        return found, wrong

    parts = team.allgather(mine)
    found = {file: one for part, _ in parts for file, one in part.items()}
    wrong = sorted((one for _, some in parts for one in some), key=lambda one: one.file or 0)
    same: dict[Schema, Schema] = {}  # what several processes found is kept once
    for one in found.values():
        one.schema = same.setdefault(one.schema, one.schema)
    return dict(sorted(found.items())), wrong


def _noted(paths: Mapping[int, str], own: Own | None) -> dict[int, Mapping[str, Any]]:
    """Return what a manifest says of each file, by id."""
    if own is None:
        return {}
    known = {address_of(dirname(own.label), name): facts for name, facts in own.files.items()}
    return {file: known[path] for file, path in paths.items() if path in known}


def _states_of(description: Description, schemas: Mapping[int, Schema]) -> States:
    """Return which tensors of files and description are states, as far as names tell."""
    names = (name for one in dict.fromkeys(schemas.values()) for name in one.names)
    return find_states(dict.fromkeys([*names, *description.declared, *description.refused]))


def _of_ranks(source: Source, strategy: Strategy | None) -> Description:
    """Return what is stated of files of ranks, which say nothing themselves."""
    ranks = {} if isinstance(strategy, WholeStrategy) else source.selected.ranks
    return Description(strategy.label if strategy else source.where.path, strategy, ranks=ranks)


def _tabulated(source: Source, chosen: Chosen, narrow: Narrow) -> Source:
    """Return a source with its catalog, or with what prevents that; pure."""
    found, description = [*source.faults], chosen.selected.description
    strategy, notices = chosen.strategy, [*source.notices]
    described = description is not None
    if not described and not found and (strategy is None or isinstance(strategy, WholeStrategy)):
        try:
            strategy, more = whole_strategy(
                source.paths, source.indexes, source.where.path, chosen.siblings
            )
            notices += more
        except (UsageError, CheckpointError) as error:
            found.append(Fault(error.parts, type(error), inside=True))
    inside = {
        file: one
        for file, one in source.indexes.items()
        if described or strategy is None or source.selected.rank_of(file) < strategy.ranks
    }
    extra = {file: one for file, one in source.indexes.items() if file not in inside}
    source = replace(source, indexes=inside, extra=extra, notices=tuple(notices))
    paths = source.paths
    if description is None:
        meant = _of_ranks(source, strategy)
        schemas = {file: one.schema for file, one in inside.items()}
        wrong = faults.in_two_files(meant.ranks, schemas, paths)
    else:
        schemas = faults.own_names(description, inside)
        meant = faults.repaired(description, schemas)
        notices += meant.notices[len(description.notices) :]
        drops = narrow.drops(_states_of(meant, schemas))
        refused = (Parts(why) for name, why in meant.refused.items() if not drops(name))
        wrong = chain(faults.file_faults(meant, schemas, paths, drops), refused)
    found += (Fault(parts, inside=True) for parts in wrong)
    if (
        description is not None and meant.is_whole
    ):  # an id stands for a rank with all that it holds whole
        size = max(chosen.selected.names, default=0) + 1
        meant = replace(meant, strategy=WholeStrategy(stage_size=size))
    catalog = None
    if not found:
        try:
            catalog = catalog_of(meant, schemas, paths, source.wanted, source.searched)
        except (CheckpointError, RequestError, StrategyError) as error:
            found.append(Fault(error.parts, type(error), inside=True))
    if catalog is not None:
        own = source.own.facts if source.own is not None else ()
        differing = [*contradictions([*meant.facts, *own, *facts_of(catalog)])]
        found += (Fault(one.parts, inside=True, id=one.id) for one in differing if one.refused)
        doubts = tuple(str(one) for one in differing if not one.refused)
        source = replace(source, warnings=source.warnings + doubts)
    return replace(source, catalog=catalog, faults=tuple(found), notices=tuple(notices))
