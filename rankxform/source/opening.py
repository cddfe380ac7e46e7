"""`open_source`: the only way in. Whatever is read as a checkpoint is opened here.

What is found wrong is collected and not raised: `require` raises the first fault, `inspect` and
`verify` report all. A source is the same on every process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from posixpath import dirname
from typing import Any, NamedTuple

from rankxform.checkpoints.base import (
    DEFAULT_FORM,
    DEFAULT_PATTERN,
    FORMS,
    Form,
    Needed,
    Selected,
    Where,
    form_called,
    recognized,
)
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.errors import (
    CheckpointError,
    RankxformError,
    RequestError,
    StrategyError,
    UsageError,
)
from rankxform.facts import BOXES, FILES, contradictions
from rankxform.formats.base import Index, Schema
from rankxform.layout.differences import first_difference
from rankxform.layout.names import ranges
from rankxform.layout.strategy import PatternStrategy, Strategy, WholeStrategy
from rankxform.planning.catalog import Catalog
from rankxform.planning.description import Description
from rankxform.planning.reach import Reach
from rankxform.planning.table import catalog_of, facts_of, with_uneven_states
from rankxform.publish.target import FOLDER_NAME, JOB_NAME
from rankxform.storage.index import Indexer, outwait
from rankxform.storage.store import FILE, Listing, Store, absolute, address_of, is_path, store_at
from rankxform.transport import Team
from rankxform.values import dataclass

from . import faults
from .by_node import list_on_all, reach_of
from .hints import siblings_of, which_strategy
from .own import Own, changed, gone, own_of
from .whole import whole_strategy


class Fault(NamedTuple):
    """What is wrong with a checkpoint: in words, the error that it is, and the file, if of one.

    inside: it is of what files hold; which files belong to the checkpoint is known nonetheless.
    id: the stable name of such faults; of statements that contradict each other, the fact's.
    """

    text: str
    kind: type[RankxformError] = CheckpointError
    file: int | None = None
    inside: bool = False
    id: str = "unfit"


@dataclass(frozen=True)
class Narrow:
    """What of a source is wanted; by default everything.

    ranks: tells the ranks that are needed under a strategy, None if all are. drops: tells the
    tensors that are not wanted, by name. preferred: names of ranks' files, which are chosen where
    all of them are there. manifest: whether what rankxform noted of its own files is wanted.
    extra_ranks: whether ranks beyond the strategy's are known to be there.
    """

    ranks: Callable[[Strategy], Sequence[int] | None] = lambda strategy: None
    drops: Callable[[str], bool] = lambda name: False
    preferred: Mapping[int, str] = field(default_factory=dict)
    manifest: bool = True
    extra_ranks: bool = False


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
        also = f" ({more} more such fault{'s' if more > 1 else ''}; inspect lists them)"
        raise first.kind(first.text + (also if more and self.form.described else ""))

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
    where = team.bcast(lambda: replace(where, path=absolute(where.path)))
    form = FORMS[team.bcast(lambda: form_at(where).name)]
    listing, same_as_node0 = None, frozenset[int]()
    if where.files is None:
        listing, same_as_node0 = list_on_all(team, where.path, form.pattern(where))
    if len(same_as_node0) < team.nodes.count - 1:  # each node has a manifest of its own files
        narrow = replace(narrow, manifest=False)
    chosen, there = _choose_on_one(where, form, listing, narrow, team)
    paths = {file: address_of(where.path, name) for file, name in sorted(chosen.names.items())}
    reach, notices = reach_of(team, paths, same_as_node0)
    found, unreadable = index_all(paths, reach, team, chosen.own)
    source = Source(
        where, form, chosen.selected, paths, found, {}, None, reach, chosen.wanted,
        (*chosen.faults, *unreadable), (*chosen.notices, *notices), chosen.warnings,
        listing.searched if listing else "", chosen.own, there,
    )  # fmt: skip
    return team.agree(lambda: _tabulated(source, chosen, narrow))


# -- on process 0 ---------------------------------------------------------------------------------


class _Chosen(NamedTuple):
    """What process 0 finds before headers are read.

    names: of the files that are wanted. siblings: how many rank folders lie beside a file that was
    named itself.
    """

    selected: Selected
    names: Mapping[int, str]
    wanted: tuple[int, ...]
    strategy: Strategy | None
    faults: tuple[Fault, ...] = ()
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    siblings: int = 0
    own: Own | None = None


def form_at(where: Where, option: str = "--src-form") -> Form:
    """Return the form of a checkpoint, as this process sees it.

    Raises UsageError where two are recognized, which `option` tells apart.
    """
    if where.form is None and (where.files is not None or where.pattern != DEFAULT_PATTERN):
        return FORMS[DEFAULT_FORM]
    if where.form is not None:
        return form_called(where.form)
    store = store_at(where.path)
    return recognized(store.list("*"), store, option)


def look_at(where: Where, option: str = "--src-form") -> tuple[Form, Listing, Selected]:
    """Return what lies at a place, as this process sees it, and its files; no header is read.

    Raises UsageError, CheckpointError.
    """
    form, store = form_at(where, option), store_at(where.path)
    listing = store.list(form.pattern(where))
    return form, listing, form.select(listing, where, store, Needed())


def listing_at(folder: Path, form: Form, where: Where | None = None) -> Listing:
    """Return what lies in a folder of a form, as this process sees it."""
    return store_at(str(folder)).list(form.pattern(where or Where()))


def _choose_on_one(
    where: Where, form: Form, listing: Listing | None, narrow: Narrow, team: Team
) -> tuple[_Chosen, Listing | None]:
    """Choose the files, on process 0. Returns also the listing, where it is known."""
    seen: list[Listing] = [] if listing is None else [listing]

    def choose() -> _Chosen:
        store = store_at(where.path)
        if where.files is None and not seen:
            seen.append(store.list(form.pattern(where)))
        there = seen[0] if seen else None
        if form.described:
            chosen = _described(where, form, there, store, narrow)
            below = dirname(next(iter(chosen.names.values()), ""))
            own = own_of(where, form, there, below) if narrow.manifest else None
            return chosen if own is None else _with_own(chosen, own, where, there)
        own = own_of(where, form, there) if narrow.manifest else None
        if own is None:
            return _of_ranks(where, form, there, store, narrow)
        stated = where if where.strategy is not None else replace(where, strategy=own.strategy)
        return _with_own(_of_ranks(stated, form, there, store, narrow), own, where, there)

    chosen = team.bcast(choose)
    return chosen, (seen[0] if seen else None)


def _with_own(chosen: _Chosen, own: Own, where: Where, listing: Listing | None) -> _Chosen:
    """Compare what was chosen with what rankxform noted of the files when it wrote them."""
    if own.notice:
        return chosen._replace(notices=(own.notice, *chosen.notices))
    wrong = [*own.wrong, *own.gone]
    found = list[Fault]()
    if own.strategy is not None:
        if where.strategy is not None:
            stated = _stated_by(own, own.strategy)
            for one in _contradictions(stated, with_uneven_states(where.strategy)):
                found.append(one._replace(kind=StrategyError, id=BOXES))
        assert listing is not None
        wrong += gone(own, listing.files, chosen.wanted if not found else ())
    found += (Fault(text, id=FILES) for text in wrong)
    notices = (*chosen.notices, *own.doubts)
    return chosen._replace(faults=(*found, *chosen.faults), notices=notices, own=own)


def _stated_by(own: Own, strategy: Strategy) -> Description:
    """Return what a manifest states, as a checkpoint's own description."""
    shapes = strategy.shapes
    declared = {name: (own.dtypes[name], shape) for name, shape in shapes.items()}
    return Description(own.label, strategy, declared=declared)


def _described(
    where: Where, form: Form, listing: Listing | None, store: Store, narrow: Narrow
) -> _Chosen:
    """Choose the files of a checkpoint that says itself how it is sharded."""
    if listing is None or where.pattern != DEFAULT_PATTERN:
        raise UsageError(
            f"--src-pattern and files are for rank folders; {where.path} is {form.name}"
        )
    found = [*_unfinished(where.path)]
    try:
        selected = form.select(listing, where, store, Needed())
    except (UsageError, CheckpointError) as error:
        faults = *found, Fault(str(error), type(error))
        return _Chosen(Selected({}), {}, (), None, faults)
    description = selected.description
    assert description is not None
    names = selected.names
    folder = dirname(address_of(where.path, next(iter(names.values()), "")))
    found = found or [*_unfinished(folder)]
    strategy = description.strategy
    if where.strategy is not None:
        found += _contradictions(description, where.strategy)
    wanted: set[int] = {*names, *description.ranks}
    needed = narrow.ranks(strategy) if strategy is not None and not found else None
    if needed is not None:
        ranks = set(needed)
        wanted = {file for file in wanted if description.ranks[file] in ranks}
    kept = {file: name for file, name in names.items() if file in wanted}
    if not kept:
        text = f"{where.path}: none of the files that are needed is there{listing.searched}"
        found.append(Fault(text))
    return _Chosen(
        selected, kept, tuple(sorted(wanted)), strategy, tuple(found), description.notices,
        description.warnings,
    )  # fmt: skip


def _of_ranks(
    where: Where, form: Form, listing: Listing | None, store: Store, narrow: Narrow
) -> _Chosen:
    """Choose the files of ranks, which say nothing of how they are sharded."""
    src, searched = where.strategy, listing.searched if listing else ""
    whole = src is None or isinstance(src, WholeStrategy)
    asked, needed = None if src is None else narrow.ranks(src), Needed()
    if src is not None and (asked is not None or not whole):
        needed = Needed(asked or range(src.ranks), range(src.ranks))
    found = [*_unfinished(where.path)] if where.files is None else []
    try:
        selected = _selected(where, form, listing, store, needed, narrow.preferred)
    except (UsageError, CheckpointError) as error:
        faults = *found, Fault(str(error), type(error))
        return _Chosen(Selected({}), {}, (), None, faults)
    names = selected.names
    alone = listing is None or listing.kind == FILE  # files are given: one, or that of each rank
    one = address_of(where.path, *names.values()) if alone and len(names) == 1 else ""
    siblings = siblings_of(Path(one)) if one and is_path(one) else []
    if src is None and (len(names) > 1 or siblings):
        found.append(Fault(which_strategy(where, names, siblings), UsageError))
    wanted = sorted(names) if needed.ranks is None else list(needed.ranks)
    if not any(rank in names for rank in wanted):
        found.append(Fault(f"{where.path}: none of the ranks {ranges(wanted)} is there{searched}"))
    outside = [] if src is None or whole else [rank for rank in names if rank >= src.ranks]
    keep = {*wanted, *outside[-1:]}  # of the ranks beyond the strategy's, one is looked at
    kept = {rank: name for rank, name in names.items() if rank in keep}
    notices, warnings = list[str](), [*_newer(selected)]
    if outside:
        assert src is not None
        (notices if narrow.extra_ranks else warnings).append(
            f"{where.path}: {len(outside)} ranks from {min(outside)} on are beyond the {src.ranks} "
            f"of {src.label} and were not used"
        )
    missing = [rank for rank in wanted if rank not in names]
    if missing:
        notices.append(
            f"{where.path}: no file of rank {ranges(missing)}{searched}; copies on other ranks "
            "serve"
        )
    return _Chosen(
        selected, kept, tuple(wanted), src, tuple(found), tuple(notices), tuple(warnings),
        len(siblings),
    )  # fmt: skip


def _selected(
    where: Where,
    form: Form,
    listing: Listing | None,
    store: Store,
    needed: Needed,
    preferred: Mapping[int, str],
) -> Selected:
    if listing is not None and preferred and {*preferred.values()} <= {*listing.files}:
        return Selected(preferred)
    if listing is not None:
        return form.select(listing, where, store, needed)
    assert where.files is not None
    return Selected({rank: absolute(path) for rank, path in where.files.items()})


def _newer(selected: Selected) -> tuple[str, ...]:
    if not selected.newer or not selected.step:
        return ()
    epoch, step = selected.step
    return (
        f"{selected.newer}. What is converted is epoch {epoch} step {step} "
        f"(--step {epoch}_{step} says that it is meant, --step latest refuses)",
    )


def _unfinished(folder: str) -> Iterator[Fault]:
    """Yield that a run of rankxform was stopped in a folder, whatever it holds."""
    if store_at(folder).has(f"{FOLDER_NAME}/{JOB_NAME}"):
        yield Fault(
            f"{folder}: a conversion into this folder was stopped; run its command again to "
            "complete it"
        )


def _contradictions(description: Description, given: Strategy) -> Iterator[Fault]:
    """Yield where a given strategy contradicts what a checkpoint says of itself."""
    own, leave = description.strategy, "leave out --src-strategy:"
    if own is None:
        if not isinstance(given, WholeStrategy):
            what = "that its tensors are whole" if description.is_whole else "where each box is"
            yield Fault(
                f"{leave} {description.source} says {what}, and {given.label} shards them",
                UsageError,
            )
        return
    layouts = (layout for some in own.stages for layout in some.values())
    if isinstance(given, WholeStrategy) and all({*one.counts} <= {1} for one in layouts):
        return
    if isinstance(given, WholeStrategy):
        yield Fault(
            f"{leave} {description.source} says how its parameters are sharded, and 'none' means "
            "whole tensors",
            UsageError,
        )
        return
    if isinstance(given, PatternStrategy):
        shapes = {name: shape for name, (_, shape) in description.declared.items()}
        given = given.over(shapes, states=True)
    if own.ranks != given.ranks:
        yield Fault(
            f"{leave} {given.label} is of {given.ranks} ranks, and {description.source}, which is "
            f"the checkpoint's own, of {own.ranks}",
            UsageError,
        )
        return
    both = [name for name in own.stages_of if name in given.stages_of]
    if not both:
        yield Fault(f"{leave} {given.label} lists no parameter of {description.source}", UsageError)
        return
    shapes = {name: shape for name, (_, shape) in description.declared.items()}
    name = first_difference(own, given, both, shapes)
    if name is not None:
        yield Fault(
            f"{leave} {given.label} and {description.source} shard {name!r} in two ways, and the "
            "latter is the checkpoint's own",
            UsageError,
        )


def ranks_at(folder: Path) -> int:
    """Return how many ranks the rank folders at a place are of; 0 if there are none."""
    listing = store_at(str(folder)).list(DEFAULT_PATTERN)
    return max(by_rank(listing, DEFAULT_PATTERN), default=-1) + 1


# -- on every process -----------------------------------------------------------------------------


def index_all(
    paths: Mapping[int, str], reach: Reach, team: Team, own: Own | None = None
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
                found[file] = indexer.index(paths[file])
            except CheckpointError as error:
                wrong.append(Fault(str(error), CheckpointError, file, inside=True))
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


def _tabulated(source: Source, chosen: _Chosen, narrow: Narrow) -> Source:
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
            found.append(Fault(str(error), type(error), inside=True))
    inside = {
        file: one
        for file, one in source.indexes.items()
        if described or strategy is None or file < strategy.ranks
    }
    extra = {file: one for file, one in source.indexes.items() if file not in inside}
    source = replace(source, indexes=inside, extra=extra, notices=tuple(notices))
    paths = source.paths
    if description is None:
        meant = Description(strategy.label if strategy else source.where.path, strategy)
        schemas = {file: one.schema for file, one in inside.items()}
    else:
        schemas = faults.own_names(description, inside)
        meant = faults.repaired(description, schemas)
        notices += meant.notices[len(description.notices) :]
        wrong = faults.file_faults(meant, schemas, paths, narrow.drops)
        found += (Fault(text, inside=True) for text in wrong)
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
            found.append(Fault(str(error), type(error), inside=True))
    if catalog is not None:
        own = source.own.facts if source.own is not None else ()
        differing = [*contradictions([*meant.facts, *own, *facts_of(catalog)])]
        found += (Fault(str(one), inside=True, id=one.id) for one in differing if one.refused)
        doubts = tuple(str(one) for one in differing if not one.refused)
        source = replace(source, warnings=source.warnings + doubts)
    return replace(source, catalog=catalog, faults=tuple(found), notices=tuple(notices))
