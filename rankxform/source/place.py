"""What lies at a checkpoint's place, before its files are chosen: its form, names, its manifest.

`look_at` tells it to all processes; the other functions tell what this process sees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import reduce
from pathlib import Path
from posixpath import dirname

from rankxform.checkpoints.base import (
    DEFAULT_FORM,
    DEFAULT_PATTERN,
    FORMS,
    CheckpointRef,
    Form,
    RankFilter,
    SelectedFiles,
    form_named,
    recognize_form,
)
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.errors import CheckpointError, RankxformError, UsageError
from rankxform.layout.strategy import Strategy
from rankxform.publish.folder_records import FOLDER_NAME, JOB_NAME
from rankxform.storage import identity
from rankxform.storage.posix import AnyPath
from rankxform.storage.store import (
    FILE,
    NOTHING,
    JoinedStore,
    Listing,
    Store,
    address_of,
    storage_of,
    store_at,
)
from rankxform.transport import Team
from rankxform.values import NamedTuple

from .checks import adapters_in_places, read_source_manifest, strategy_contradictions
from .source import SourceManifest


class PlaceListing(NamedTuple):
    """What lies at one place, and the nodes that process 0 lists for."""

    listing: Listing | None  # None: process 0 alone lists
    same_as_node0: frozenset[int]


class PlaceRead(NamedTuple):
    """What lies at a checkpoint's place, before its files are chosen.

    The fields from `manifest` on are process 0's, but for `strategy` and `selected`.
    """

    ref: CheckpointRef  # absolute
    form: Form
    listings: tuple[PlaceListing, ...]  # of each place; (): the files are given
    listing: Listing | None  # of all places as one, where it is known
    entered: str = ""  # why another folder is read than the one that is named
    manifest: SourceManifest | None = None  # what rankxform noted when it wrote the files
    stopped_in: str = ""  # folder in which a conversion was stopped
    # How its ranks shard, as is given, or as its manifest or its metadata states; None too where
    # these contradict each other.
    strategy: Strategy | None = None
    selected: SelectedFiles = SelectedFiles({})  # of a form that describes itself, or of all ranks
    failure: RankxformError | None = None  # why none could be selected


def look_at(where: CheckpointRef, team: Team, *, uses_manifest: bool = True) -> PlaceRead:
    """Return what lies at a place, and what it says of itself; no header is read. Collective.

    uses_manifest: whether what rankxform noted of its own files is believed; never where each node,
    or each place, has a manifest of its own.
    """
    where, entered = team.bcast(lambda: _find_place(where.absolute()))
    if where.files is not None and where.fallbacks:
        raise UsageError("files= names the file of each rank already", "leave out fallback=")
    form = FORMS[where.form or DEFAULT_FORM]
    pattern, is_joined = form.pattern(where), bool(where.fallbacks)
    places = where.places if where.files is None else ()
    listings = tuple(list_place(team, place, pattern, is_told=is_joined) for place in places)
    listing = _joined(listings) if is_joined else listings[0].listing if listings else None
    place = PlaceRead(where, form, listings, listing, entered)
    same_as_node0 = listings[0].same_as_node0 if listings else ()
    if where.fallbacks or len(same_as_node0) < team.nodes.count - 1:
        uses_manifest = False
    places_read = [place]  # process 0 keeps what the others need not know

    def read_here() -> tuple[Strategy | None, SelectedFiles]:
        places_read.append(_read_place(place, uses_manifest=uses_manifest))
        return places_read[-1].strategy, places_read[-1].selected

    strategy, selected = team.bcast(read_here)
    return places_read[-1]._replace(strategy=strategy, selected=selected)


def _find_place(where: CheckpointRef) -> tuple[CheckpointRef, str]:
    """Return where a checkpoint lies, as this process sees it, and of which form it is; and why it
    is not where it was named."""
    path = _only_folder(where) or where.path
    ref = replace(where, path=path)
    entered = f"{where.path}: the only checkpoint in it is {path}" if path != where.path else ""
    return replace(ref, form=form_at(ref).name), entered


def _only_folder(where: CheckpointRef) -> str:
    """Return the only folder of rank folders inside one that holds none, else ""."""
    is_said = where.files is not None or where.form is not None or where.fallbacks
    if is_said or where.pattern != DEFAULT_PATTERN:
        return ""
    if any(name.startswith("rank") for name in store_of(where).list("*").folders):
        return ""
    listing = store_of(where).list(where.pattern)
    inside = [folder for folder, files in listing.inside.items() if files]
    is_only = len(inside) == 1 and not listing.files and not form_at(where).described
    return address_of(where.path, inside[0]) if is_only else ""


def list_place(team: Team, path: str, pattern: str, *, is_told: bool = False) -> PlaceListing:
    """Return the merged listings of all nodes, and the nodes that process 0 lists for. Collective.

    Those are the nodes that see process 0's own folder over the network. With one node, process 0
    lists when it needs to, or tells the others now if `is_told`.
    """
    nodes = team.nodes
    if nodes.count == 1 or storage_of(path).is_shared:
        listing = team.bcast(lambda: store_at(path).list(pattern)) if is_told else None
        return PlaceListing(listing, frozenset(range(1, nodes.count)))
    leader = nodes.is_leader(team.rank)
    folders = team.allgather(lambda: identity.network_folder(Path(path)) if leader else None)
    same_as_process0 = {p for p, f in enumerate(folders) if f is not None and f == folders[0]} - {0}

    def list_here() -> Listing:
        if leader and team.rank not in same_as_process0:
            return store_at(path).list(pattern)
        return Listing(path)

    listing = reduce(Listing.joined, team.allgather(list_here))
    listing = replace(listing, searched=searched_nodes(team))
    return PlaceListing(listing, frozenset(map(nodes.node_of.__getitem__, same_as_process0)))


def _joined(listings: Sequence[PlaceListing]) -> Listing:
    """Return the listing of several places as one; a message that says where was searched names
    all. Raises UsageError for one that is a file."""
    first, *others = (place.listing for place in listings if place.listing is not None)
    for listing in (first, *others):
        if listing.kind == FILE:
            text = "is a file; with --fallback, a folder is expected"
            raise UsageError(text, where=listing.path)
    names = ", ".join(
        listing.path + (", where nothing is" if listing.kind == NOTHING else "")
        for listing in others
    )
    joined = reduce(Listing.joined, others, first)
    return replace(joined, searched=f"{joined.searched} (and in {names})")


def searched_nodes(team: Team) -> str:
    """Return, for messages, which nodes were searched, if there are several."""
    names = team.nodes.names
    if len(names) == 1:
        return ""
    return f" (looked on {', '.join(names[:8])}{', ...' if names[8:] else ''})"


def _read_place(place: PlaceRead, *, uses_manifest: bool) -> PlaceRead:
    """Return what this process sees at a place, files of a form that describes itself included.

    Raises UsageError for options of rank folders.
    """
    ref, form = place.ref, place.form
    listing = place.listing
    if listing is None and ref.files is None:
        listing = store_of(ref).list(form.pattern(ref))
        place = place._replace(listing=listing)
    if form.described:
        if listing is None or ref.pattern != DEFAULT_PATTERN:
            raise UsageError(
                f"--src-pattern and files are for rank folders; {ref.path} is {form.name}"
            )
        try:
            selected = form.select(listing, ref, store_of(ref), RankFilter())
            place = place._replace(selected=selected)
        except (UsageError, CheckpointError) as error:
            place = place._replace(failure=error)
    below = dirname(next(iter(place.selected.names.values()), ""))
    manifest = (
        read_source_manifest(ref, form, listing, below)
        if uses_manifest
        else adapters_in_places(ref)
    )
    stopped_in = _stopped_in(ref, below) if ref.files is None else ""
    place = place._replace(manifest=manifest, stopped_in=stopped_in)
    if not form.described:
        declared_strategy = manifest.strategy if manifest is not None else None
        return place._replace(strategy=ref.strategy or declared_strategy)
    description = place.selected.description
    if description is None or stopped_in:
        return place
    is_contradicted = ref.strategy and any(strategy_contradictions(description, ref.strategy))
    return place if is_contradicted else place._replace(strategy=description.strategy)


def _stopped_in(where: CheckpointRef, below: str) -> str:
    """Return the folder in which a run of rankxform was stopped, whatever it holds, else ""."""
    folders = [
        address_of(place, name) for name in dict.fromkeys(["", below]) for place in where.places
    ]
    return next((f for f in folders if store_at(f).has(f"{FOLDER_NAME}/{JOB_NAME}")), "")


# -- as this process sees it ----------------------------------------------------------------------


def form_at(where: CheckpointRef, option: str = "--src-form") -> Form:
    """Return the form of a checkpoint, as this process sees it.

    Raises UsageError where two are recognized, which `option` tells apart.
    """
    if where.form is None and (where.files is not None or where.pattern != DEFAULT_PATTERN):
        return FORMS[DEFAULT_FORM]
    if where.form is not None:
        return form_named(where.form)
    return recognize_form(store_of(where).list("*"), store_of(where), option)


def store_of(where: CheckpointRef) -> Store:
    """Return what lies in the places of a checkpoint."""
    stores = tuple(map(store_at, where.places))
    return JoinedStore(stores) if where.fallbacks else stores[0]


def list_and_select(
    where: CheckpointRef, option: str = "--src-form", missing_names: Iterable[str] = ()
) -> PlaceRead:
    """Return what lies at a place, as this process sees it, with its files; no header is read.

    missing_names: files that are taken to lie there, whether or not they do. Raises UsageError,
    CheckpointError.
    """
    form, store = form_at(where, option), store_at(where.path)
    listing = store.list(form.pattern(where))
    if names := (*missing_names,):
        listing = listing.joined(Listing(listing.path, files=names, entries=names))
    selected = form.select(listing, where, store, RankFilter())
    return PlaceRead(where, form, (), listing, selected=selected)


def steps_at(where: CheckpointRef) -> tuple[list[str], Callable[[str], SelectedFiles]]:
    """Return the steps at a place, the oldest first, and what finds the files of one.

    It raises CheckpointError where some rank lacks the step. The place is listed once. Raises
    UsageError where no name states a step, CheckpointError where there is no checkpoint.
    """
    place = list_and_select(where)
    selected = place.selected
    if selected.step is None:
        raise UsageError("no file's name states a step", "rankxform transform", where=where.path)

    def files_of(step_name: str) -> SelectedFiles:
        if (step := steps_by_name[step_name]) in selected.missing_ranks:
            problem = f"step {step_name} is not complete: {selected.lacking_in_words(step)}"
            raise CheckpointError(problem, "bring what is missing", where=where.path)
        ref, listing = replace(where, step=step_name), place.listing
        assert listing is not None
        return place.form.select(listing, ref, store_at(where.path), RankFilter())

    steps = {selected.step, *selected.skipped_steps, *selected.missing_ranks}
    steps_by_name = {"_".join(map(str, step)): step for step in sorted(steps)}
    return [*steps_by_name], files_of


def listing_at(folder: AnyPath, form: Form, where: CheckpointRef | None = None) -> Listing:
    """Return what lies in a folder of a form, as this process sees it."""
    return store_at(str(folder)).list(form.pattern(where or CheckpointRef()))


def rank_files_at(folder: Path) -> dict[int, list[str]]:
    """Return the files of rank folders at a place, by rank."""
    return by_rank(store_at(str(folder)).list(DEFAULT_PATTERN), DEFAULT_PATTERN)


def ranks_at(folder: Path) -> int:
    """Return how many ranks the rank folders at a place are of; 0 if there are none."""
    return max(rank_files_at(folder), default=-1) + 1
