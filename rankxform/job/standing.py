"""A destination that is there, in whatever files: which slices of which ranks each holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

from rankxform.checkpoints.base import FORMS, Listing, Shards, Wish, form_of
from rankxform.checkpoints.checks import file_faults, own_names
from rankxform.engine.compare_sink import Difference
from rankxform.formats.base import Index, Schema
from rankxform.geometry.grid import Cell
from rankxform.planning.description import Description
from rankxform.planning.parts import Part
from rankxform.planning.plan import Planner
from rankxform.publish.target import MANIFEST_NAME
from rankxform.storage.metadata import is_stated
from rankxform.transport import Team
from rankxform.values import dataclass

from .inputs import check_finished
from .prepare import Conversion
from .request import Request
from .visibility import look_on_all, searched_nodes


@dataclass(frozen=True)
class Standing:
    """What is at a destination. shards: its files, if their form says what they hold; rank folders
    do not, and their files are chosen when the ranks are known."""

    folder: Path
    there: Listing
    shards: Shards | None

    @property
    def names(self) -> dict[int, str]:
        """The names of its files, by id, if ids are no ranks."""
        return {n: path.name for n, path in self.shards.paths.items()} if self.shards else {}

    @property
    def notices(self) -> tuple[str, ...]:
        return self.shards.said.notices if self.shards and self.shards.said else ()


def record_folder(folder: Path) -> Path:
    """Return where the records of a destination are: in it, or with the files that readers find."""
    if (folder / MANIFEST_NAME).exists() or not folder.is_dir():
        return folder
    form = form_of(folder, None, "--dst-form")
    if not form.described:
        return folder
    shards = form.choose(folder, form.look(folder, Wish()), None, Wish())
    return next((path.parent for path in shards.paths.values()), folder)


def standing_files(request: Request, team: Team) -> tuple[Request, Standing, frozenset[int]]:
    """Find the files of a destination, of any form; collective.

    The request is returned with the form, and with the strategy that the destination itself says,
    if none was given; and the nodes that see what node 0 sees.
    """
    folder = team.bcast(lambda: Path(request.dst or "").absolute())
    team.bcast(lambda: check_finished(folder))
    name = team.bcast(lambda: form_of(folder, request.dst_form, "--dst-form").name)
    request = replace(request, dst_form=name)
    there, as_first = look_on_all(team, folder, Wish(), FORMS[name])
    if not FORMS[name].described:
        return request, Standing(folder, there, None), as_first
    step = None if request.iteration is None else str(request.iteration)
    searched = searched_nodes(team)
    shards = team.bcast(lambda: FORMS[name].choose(folder, there, None, Wish(step=step), searched))
    assert shards.said is not None
    if request.dst_strategy is None and not request.derives:
        request = replace(request, dst_strategy=shards.said.strategy)
    if request.iteration is None and "iteration" in FORMS[name].options:
        number = shards.step[0] if shards.step else 0
        request = replace(request, iteration=number)
    parent = next((path.parent for path in shards.paths.values()), folder)
    return request, Standing(parent, there, shards), as_first


def compare_files(
    conversion: Conversion, shards: Shards, indexes: dict[int, Index], team: Team
) -> tuple[Planner, list[Difference]]:
    """Return the plan of the files that are there, and, on process 0, what is missing or too much.

    What is not to be compared is taken out of `indexes`.
    """
    schemas = own_names(shards, indexes)
    for file, schema in schemas.items():
        if schema is not indexes[file].schema:
            indexes[file] = indexes[file].only(schema)
    planner, found = team.agree(lambda: _compare(conversion, shards, schemas))
    return planner, found if team.rank == 0 else []


def _compare(
    conversion: Conversion, shards: Shards, schemas: Mapping[int, Schema]
) -> tuple[Planner, list[Difference]]:
    planner, said = conversion.planner, shards.said
    assert said is not None
    found: list[Difference] = []
    source = Path(said.source).name
    faults = [
        *((source, fault) for fault in file_faults(shards, schemas, lambda name: False)),
        *(
            (Path(path).name, f"is missing, though {source} lists it")
            for path in said.missing_files.values()
        ),
        *(("common.json", fault) for fault in _common_faults(conversion, said)),
    ]
    for number, (name, fault) in enumerate(faults, 1):
        found.append(Difference(name, -number, fault, whole_file=True))
    parts: dict[int, Part] = {}
    ranks = set(conversion.ranks)
    same: dict[frozenset[str], frozenset[str]] = {}
    held: set[tuple[str, Cell]] = set()
    for file, schema in schemas.items():
        rank = said.ranks.get(file, 0)
        if rank >= planner.dst.ranks:
            why = f"is rank {rank}'s, and {planner.dst.label} has {planner.dst.ranks}"
            found.append(Difference(shards.paths[file].name, file, why, whole_file=True))
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
    there = planner.with_parts(parts)
    for file in schemas:
        held |= {(name, there.cell(one, file)) for name, one in there.names(file).items()}
    missing: dict[str, None] = {}
    for rank in ranks:
        local = rank % planner.dst.stage_size
        for name, layout in planner.names_of(rank).items():
            if (name, layout.cell(local)) not in held:
                missing[name] = None
    found += [Difference(name, -1, "is missing, or some of its slices are") for name in missing]
    if said.strategy is not None:
        found += _stated(planner, said, missing)
    return there, found


def _common_faults(conversion: Conversion, said: Description) -> Iterator[str]:
    """Yield what is wrong with the facts on the training, of a form that states some."""
    if "iteration" not in conversion.target.form.options:
        return
    want, have = (one.get("global_step") for one in (conversion.common, said.common))
    if not said.common:
        yield "is missing; a training job knows its step by it"
    elif want is not None and have != want:
        yield f"states global_step {have}, and the source's is {want}"


def _stated(
    planner: Planner, said: Description, missing: Mapping[str, None]
) -> Iterator[Difference]:
    """Yield parameters that metadata does not state, or states otherwise: loaders believe it."""
    assert said.strategy is not None
    own = said.strategy
    for stage in range(len(planner.dst.stages)):
        for name, layout in planner.names_of(stage * planner.dst.stage_size).items():
            shape = planner.parameter(name).shape
            if name in missing or not shape or not is_stated(planner, name):
                continue
            if name not in own.stages_of:
                yield Difference(name, -1, "is not stated in metadata.json")
                continue
            stated = own.stages[own.stages_of[name][0]][name]
            ranks = range(planner.dst.stage_size)
            if said.stated[name][1] != shape or any(
                stated.grid(shape).box(stated.cell(r)) != layout.grid(shape).box(layout.cell(r))
                for r in ranks
            ):
                yield Difference(name, -1, "is stated otherwise in metadata.json")
