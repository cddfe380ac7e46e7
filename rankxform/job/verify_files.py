"""A destination that is there, in whatever files: which slices of which ranks each holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from posixpath import basename, relpath

from rankxform.checkpoints.base import DEFAULT_PATTERN, FORMS, Where
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.engine.compare_sink import Difference
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.base import Schema
from rankxform.formats.checkpoint2 import COMMON
from rankxform.geometry.box import Box
from rankxform.geometry.tiling import Cell
from rankxform.layout.strategy import WholeStrategy
from rankxform.planning.description import Description
from rankxform.planning.parts import Part
from rankxform.planning.plan import Planner
from rankxform.publish.target import MANIFEST_NAME
from rankxform.request import Request
from rankxform.source.choice import Narrow, form_at, look_at
from rankxform.source.faults import file_faults, own_names
from rankxform.source.opening import Source, open_source
from rankxform.storage.metadata import is_stated
from rankxform.storage.posix import inode
from rankxform.storage.store import is_path
from rankxform.target.target import Target
from rankxform.transport import Team

from .verdict import unreadable

_AS_WHOLE = "convert both to whole tensors and compare these"


def record_folder(folder: Path) -> Path:
    """Return where the records of a destination are: in it, or with the files that readers find."""
    if (folder / MANIFEST_NAME).exists() or not folder.is_dir():
        return folder
    form, where = form_at(Where(str(folder)), "--dst-form"), Where(str(folder))
    if not form.described:
        return folder
    _, _, selected = look_at(replace(where, form=form.name))
    return (folder / next(iter(selected.names.values()), "")).parent


def open_described(request: Request, team: Team) -> tuple[Request, Source | None]:
    """Open a destination that says itself what its files hold; None of one that does not.

    The request is returned with its form, and with the strategy that the destination itself says,
    if none was given. Collective.
    """
    where = team.bcast(lambda: Where(str(Path(request.dst or "").absolute()), request.dst_form))
    form = FORMS[team.bcast(lambda: form_at(where, "--dst-form").name)]
    if not form.is_written:
        raise UsageError(
            f"is {form.name}, which is read as a source alone", _AS_WHOLE, where=request.dst
        )
    request = replace(request, dst_form=form.name)
    if not form.described:
        return request, None
    step = None if request.iteration is None else str(request.iteration)
    there = open_source(replace(where, form=form.name, step=step), team, Narrow(manifest=False))
    team.agree(lambda: _require_files(there))
    description = there.selected.description
    assert description is not None
    if request.dst_strategy is None and not request.derives:
        request = replace(request, dst_strategy=description.strategy)
    if request.iteration is None and form.training is not None and not form.counters:
        number = there.selected.step[0] if there.selected.step else 0
        request = replace(request, iteration=number)
    return request, there


def files_there(
    target: Target, described: Source | None, team: Team
) -> tuple[Source, Target, list[Difference]]:
    """Return the destination that is there, what of the target its files hold, and what is wrong
    with the files as such. Collective.

    Only what is to be compared is left in its indexes.
    """
    there = described or _open_ranks(target, team)
    wanted = {file: path for file, path in there.paths.items() if file in there.wanted}
    there = replace(there, paths=wanted, notices=there.notices if described else ())
    found = [
        unreadable(wanted[fault.file], fault.file, fault.text)
        for fault in there.faults
        if fault.file is not None and fault.file in wanted
    ]
    if described is None:
        return there, target, found + _extra_ranks(target.planner, there, team)
    return team.agree(lambda: _matched(target, there, found))


def check_apart(source: Source, there: Source, team: Team) -> None:
    """Refuse to compare files with themselves, under whatever names. Collective.

    Raises UsageError.
    """

    def mine() -> None:
        own = {inode(Path(path)): path for path in source.paths.values() if is_path(path)}
        own.pop(None, None)
        for file in there.reach.partition(there.indexes)[team.rank]:
            other = own.get(inode(Path(there.paths[file])))
            if other is not None:
                raise UsageError(
                    f"is the same file as {other}, and compared with itself it proves nothing",
                    "name another folder as DST",
                    where=there.paths[file],
                )

    team.agree(mine)


def _matched(
    target: Target, there: Source, found: list[Difference]
) -> tuple[Source, Target, list[Difference]]:
    """Compare which files a self-describing destination has, and what they hold; pure."""
    indexes = dict(there.indexes)
    description = there.selected.description
    assert description is not None
    if not description.is_whole and description.boxes:
        indexes = {file: one.unplaced() for file, one in indexes.items()}
        description = replace(description, ranks=_ranks_of(target.planner, description))
    schemas = own_names(description, indexes)
    for file, schema in schemas.items():
        if schema is not indexes[file].schema:
            indexes[file] = indexes[file].only(schema)
    planner, faults = _compare(target, there, description, schemas)
    there = replace(there, indexes=indexes)
    return there, replace(target, planner=planner, files=tuple(indexes)), found + faults


def _ranks_of(planner: Planner, description: Description) -> dict[int, int]:
    """Return whose slices each file of boxes holds, by a strategy; a file of another's holds rank
    0's. Raises UsageError for files with several boxes of a tensor, which no rank has."""
    held: dict[int, dict[str, Box]] = {}
    for name, boxes in description.boxes.items():
        for one in boxes:
            if one.box.size and held.setdefault(one.file, {}).setdefault(name, one.box) != one.box:
                raise UsageError(
                    f"a file has several boxes of {name}, as no rank of {planner.dst.label} has",
                    _AS_WHOLE,
                    where=description.source,
                )
    ours = (Path(description.source).parent / MANIFEST_NAME).is_file()  # which knows the options
    if isinstance(planner.dst, WholeStrategy) and not ours:
        for name, boxes in description.boxes.items():
            if len({one.box for one in boxes if one.box.size}) > 1:
                raise UsageError(
                    f"shards {name}, and no --dst-strategy says how",
                    "--dst-strategy FILE or FOLDER of the job that wrote it",
                    _AS_WHOLE,
                    where=description.source,
                )
    known: dict[tuple[int, str], Box | None] = {}

    def box_of(rank: int, name: str) -> Box | None:
        if (rank, name) not in known:
            layout = planner.names_of(rank).get(name)
            shape = planner.parameter(name).shape if layout is not None else ()
            local = rank % planner.dst.stage_size
            known[rank, name] = layout.grid(shape).box(layout.cell(local)) if layout else None
        return known[rank, name]

    def is_held(rank: int, boxes: Mapping[str, Box]) -> bool:
        return all(box_of(rank, name) == box for name, box in boxes.items())

    ranks = range(planner.dst.ranks)
    return {
        file: next((rank for rank in ranks if is_held(rank, boxes)), 0)
        for file, boxes in held.items()
    }


def _extra_ranks(planner: Planner, there: Source, team: Team) -> list[Difference]:
    """Return what is wrong with rank folders beyond the destination's ranks. Collective."""
    last = planner.dst.ranks - 1
    why = f"should not be here: {planner.dst.label} has rank{f's 0 to {last}' if last else ' 0'}"

    def look() -> list[Difference]:
        if there.listing is None:
            return []
        return [
            Difference(there.listing.at(name), rank, f"{why} only", whole_file=True)
            for rank, names in by_rank(there.listing, DEFAULT_PATTERN).items()
            for name in names
            if rank > last
        ]

    return team.bcast(look)


def _open_ranks(target: Target, team: Team) -> Source:
    """Open the rank folders of a destination. Raises CheckpointError if a file is missing."""
    dst, ranks = target.planner.dst, target.ranks
    names = {rank: relpath(path, target.folder) for rank, path in target.paths.items()}
    where = Where(str(target.folder), target.form.name, strategy=dst)
    there = open_source(
        where, team, Narrow(lambda strategy: ranks, preferred=names, manifest=False)
    )

    def check() -> None:
        missing = [rank for rank in ranks if rank not in there.selected.names]
        if missing and there.selected.names:
            raise CheckpointError(
                f"{target.folder}: has no file of destination rank {missing[0]}"
                + (f" and of {len(missing) - 1} more" if missing[1:] else "")
                + f"{there.searched}; {dst.label} has ranks 0 to {dst.ranks - 1}"
            )
        _require_files(there)

    team.agree(check)
    return there


def _require_files(there: Source) -> None:
    """Raise the first fault of which files there are; what they hold is to be compared."""
    replace(there, faults=tuple(one for one in there.faults if not one.inside)).require()


def _compare(
    target: Target, there: Source, description: Description, schemas: Mapping[int, Schema]
) -> tuple[Planner, list[Difference]]:
    planner = target.planner
    found: list[Difference] = []
    source = Path(description.source).name
    faults = [
        *(
            (source, fault.line)
            for fault in file_faults(description, schemas, there.paths, lambda name: False)
        ),
        *(
            (Path(path).name, f"is missing, though {source} lists it")
            for path in description.missing_files.values()
        ),
        *((target.form.training or "", one) for one in _training_faults(target, description)),
    ]
    found += (Difference(n, -at, why, whole_file=True) for at, (n, why) in enumerate(faults, 1))
    parts: dict[int, Part] = {}
    ranks = set(target.ranks)
    same: dict[frozenset[str], frozenset[str]] = {}
    held: set[tuple[str, Cell]] = set()
    for file, schema in schemas.items():
        rank = description.ranks.get(file, 0)
        if rank >= planner.dst.ranks:
            why = f"is rank {rank}'s, and {planner.dst.label} has {planner.dst.ranks}"
            found.append(Difference(basename(there.paths[file]), file, why, whole_file=True))
            parts[file] = Part(0, frozenset())
            continue
        names = frozenset(schema.names)
        parts[file] = Part(rank, same.setdefault(names, names))
        known = planner.names_of(rank)
        found += [
            Difference(name, file, "should not be here")
            for name in schema.names
            if name not in known
        ]
    own = planner.with_parts(parts)
    for file in schemas:
        held |= {(name, own.cell(one, file)) for name, one in own.names(file).items()}
    missing: dict[str, None] = {}
    for rank in ranks:
        local = rank % planner.dst.stage_size
        for name, layout in planner.names_of(rank).items():
            if (name, layout.cell(local)) not in held:
                missing[name] = None
    found += [Difference(name, -1, "is missing, or some of its slices are") for name in missing]
    if description.strategy is not None:
        found += _stated(planner, description, missing)
    return own, found


def _training_faults(target: Target, description: Description) -> Iterator[str]:
    """Yield what is wrong with the facts on the training, of a form that states some."""
    if target.form.training is None:
        return
    if not description.training and not target.form.counters:
        yield "is missing; a training job knows its step by it"
    for name in COMMON:
        want, have = (one.get(name) for one in (target.training, description.training))
        must = name == "global_step" and not target.form.counters and description.training
        if want is not None and have != want and (have is not None or must):
            yield f"states {name} {have}, and the source's is {want}"


def _stated(
    planner: Planner, description: Description, missing: Mapping[str, None]
) -> Iterator[Difference]:
    """Yield parameters that metadata does not state, or states otherwise: loaders believe it."""
    assert description.strategy is not None
    own, stating = description.strategy, Path(description.source).name
    for stage in range(len(planner.dst.stages)):
        for name, layout in planner.names_of(stage * planner.dst.stage_size).items():
            shape = planner.parameter(name).shape
            if name in missing or not shape or not is_stated(planner, name):
                continue
            if name not in own.stages_of:
                yield Difference(name, -1, f"is not stated in {stating}")
                continue
            declared = own.stages[own.stages_of[name][0]][name]
            ranks = range(planner.dst.stage_size)
            if description.declared[name][1] != shape or any(
                declared.grid(shape).box(declared.cell(r)) != layout.grid(shape).box(layout.cell(r))
                for r in ranks
            ):
                yield Difference(name, -1, f"is stated otherwise in {stating}")
