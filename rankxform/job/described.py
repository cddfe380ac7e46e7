"""Checkpoints that describe themselves: what they say, checked against files and strategies."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import FORMS, USUAL, Description, Form, Naming, Shards
from rankxform.errors import CheckpointError, RequestError, UsageError
from rankxform.formats.base import Format, Index, Schema
from rankxform.formats.dtype import item_size
from rankxform.layout.names import NEVER_SAVED, NOT_SAVED, state_of, summarize_names
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.ops.base import Derivation, Tensor
from rankxform.planning.selection import Selection
from rankxform.planning.visibility import Visibility
from rankxform.storage.sources import Sources
from rankxform.transport import Team

from .request import Request, is_default

if TYPE_CHECKING:
    from .inputs import Inputs

_STEP_KEY = "global_step"


def check_described(said: Description, given: Strategy) -> None:
    """Refuse a source strategy that contradicts what the checkpoint says. Raises UsageError."""
    if said.strategy is None:
        if not isinstance(given, WholeStrategy):
            raise UsageError(
                f"leave out --src-strategy: {said.source} says that its tensors are whole, and "
                f"{given.label} shards them"
            )
        return
    if isinstance(given, WholeStrategy):
        raise UsageError(
            f"leave out --src-strategy: {said.source} says how its parameters are sharded, and "
            "none says that they are not"
        )
    from rankxform.layout.explain import same_boxes

    own = said.strategy
    both = [name for name in own.stages_of if name in given.stages_of]
    if not both:
        raise UsageError(
            f"leave out --src-strategy: {given.label} lists no parameter of {said.source}"
        )
    for name in both:
        mine, theirs = own.stages_of[name], given.stages_of[name]
        a, b = own.stages[mine[0]][name], given.stages[theirs[0]][name]
        shape = said.stated[name][1]
        try:
            same = same_boxes(a, b.fold(shape, slices=False))
        except RequestError:
            same = False
        if not same or (len(own.stages) == len(given.stages) and mine[0] != theirs[0]):
            raise UsageError(
                f"leave out --src-strategy: {given.label} and {said.source} shard {name!r} in two "
                "ways, and the latter is the checkpoint's own"
            )


# -- files ----------------------------------------------------------------------------------------


def own_names(shards: Shards, indexes: Mapping[int, Index]) -> dict[int, Schema]:
    """Return what files hold, without what a file of loose values repeats.

    MindSpore puts one rank's slices there, of what it was told to leave out.
    """
    schemas = {file: one.schema for file, one in indexes.items()}
    said = shards.said
    if said is None or said.loose is None or said.loose not in schemas:
        return schemas
    known = {n for file, one in schemas.items() if file != said.loose for n in one.names}
    one = schemas[said.loose]
    kept = [i for i, n in enumerate(one.names) if n not in known and state_of(n) is None]
    schemas[said.loose] = Schema(
        *(tuple(some[i] for i in kept) for some in (one.names, one.dtypes, one.shapes))  # type: ignore[arg-type]
    )
    return schemas


def check_loose(
    shards: Shards, indexes: Mapping[int, Index], selection: Selection, dst: Strategy
) -> None:
    """Refuse to shard what lies among loose values: it may be one rank's slice already."""
    said = shards.said
    if said is None or said.loose is None or isinstance(dst, WholeStrategy):
        return
    names = [
        name
        for name, one in selection.sharded.items()
        if name in dst and one.src_name in indexes[said.loose] and one.holders == (said.loose,)
    ]
    if names:
        raise RequestError(
            f"{shards.paths[said.loose]}: holds {summarize_names(names, 3)}, which {dst.label} "
            "shards: MindSpore leaves one rank's slices there; leave them out "
            "(--exclude), or convert the checkpoint that they come from"
        )


def check_files(shards: Shards, schemas: Mapping[int, Schema], derivation: Derivation) -> None:
    """Compare what a checkpoint says of its files with their headers. Raises CheckpointError."""
    said = shards.said
    if said is None:
        return
    if said.strategy is None:
        _check_once(shards, schemas)
    there = {name for one in schemas.values() for name in one.names}
    for file, names in said.listed.items():
        if file not in schemas:
            continue
        position = schemas[file].position
        gone = [n for n in names if n not in position and (n in there or not _is_never_saved(n))]
        if gone:
            raise CheckpointError(
                f"{shards.paths[file]}: does not hold {_named(gone)}, which {said.source} "
                "says is in it; save the checkpoint again, or mend that list"
            )
        if said.strategy is None:
            _check_listed(shards, file, schemas[file], names, derivation)
        else:
            _check_slices(shards, file, schemas[file], names)


def _is_never_saved(name: str) -> bool:
    return state_of(name) == NEVER_SAVED or any(part in name for part in NOT_SAVED)


def _check_once(shards: Shards, schemas: Mapping[int, Schema]) -> None:
    """Refuse whole tensors of one name in two files: it is not known which is meant."""
    first: dict[str, int] = {}
    for file, one in schemas.items():
        for name in one.names:
            other = first.setdefault(name, file)
            if other != file:
                raise CheckpointError(
                    f"{shards.paths[other]} and {shards.paths[file]}: both hold {name!r}; of whole "
                    "tensors each is in one file. Remove one, or, if these are ranks' files, put "
                    "each into its rank_N folder"
                )


def _check_listed(
    shards: Shards, file: int, schema: Schema, names: Iterable[str], derivation: Derivation
) -> None:
    """Refuse tensors that the index does not list, if they are to be converted."""
    assert shards.said is not None
    listed = set(names)
    more = [n for n in schema.names if n not in listed]
    more = [n for n in more if not derivation(Tensor(n, n, "", "", ())).dropped]
    if more:
        raise CheckpointError(
            f"{shards.paths[file]}: holds {_named(more)}, which {shards.said.source} does not "
            "list; leave it out (--exclude), or mend the index"
        )


def _check_slices(shards: Shards, file: int, schema: Schema, names: Iterable[str]) -> None:
    """Compare type and shape of slices with what metadata says of them."""
    said = shards.said
    assert said is not None
    assert said.strategy is not None
    stage = said.strategy.stage_of(said.ranks[file])
    layouts = said.strategy.stages[stage]
    for name in names:
        at = schema.position.get(name)
        if at is None:
            continue
        dtype, shape = said.stated[name]
        local = tuple(n // count for n, count in zip(shape, layouts[name].counts))
        if schema.shapes[at] != local:
            raise CheckpointError(
                f"{shards.paths[file]}: the slice of {name!r} has shape {list(schema.shapes[at])}, "
                f"and {said.source} says {list(local)}. MindSpore states a wrong layout where the "
                "optimizer shards in groups that are not along the axes of the device matrix "
                "(optimizer_weight_shard_size). Convert the rank folders of this job with their "
                "strategy instead"
            )
        if schema.dtypes[at] != dtype:
            raise CheckpointError(
                f"{shards.paths[file]}: {name!r} is {schema.dtypes[at]}, and {said.source} says "
                f"{dtype}; these are not of one checkpoint"
            )


def _named(names: list[str]) -> str:
    shown = ", ".join(map(repr, names[:3]))
    return shown + (f" and {len(names) - 3} more" if names[3:] else "")


# -- what is known of the training ----------------------------------------------------------------


def training_facts(
    found: Inputs, indexes: Mapping[int, Index], visibility: Visibility, team: Team
) -> dict[str, Any]:
    """Return facts on the training that a destination's companion files state. Collective.

    They are the source's own; global_step is read from the tensor of that name otherwise.
    """
    form = FORMS[found.request.dst_form or USUAL]
    if "iteration" not in form.options or found.imagined:
        return {}
    shards = found.shards
    common = dict(shards.said.common) if shards.said else {}
    if shards.step is not None and len(shards.step) > 1:
        common.update(zip(("epoch_num", "step_num"), shards.step))
    if common.get(_STEP_KEY) is None:
        common[_STEP_KEY] = _global_step(shards, indexes, visibility, team)
    if common[_STEP_KEY] is None and shards.step is not None and len(shards.step) == 1:
        common[_STEP_KEY] = shards.step[0]
    return common


def _global_step(
    shards: Shards, indexes: Mapping[int, Index], visibility: Visibility, team: Team
) -> int | None:
    """Return the value of global_step; None where no file has one number of that name."""
    files = (f for f, one in indexes.items() if _STEP_KEY in one and _is_number(one))
    file = next(files, None)
    if file is None:
        return None
    reader = visibility.processes_seeing((file,))[0]

    def value() -> int | None:
        if team.rank != reader:
            return None
        room = memoryview(bytearray(indexes[file].nbytes(_STEP_KEY)))
        with Sources(shards.paths, indexes) as sources:
            sources.read(file, _STEP_KEY, 0, room)
        return int.from_bytes(room, "little", signed=True)

    return next((n for n in team.allgather(value) if n is not None and n >= 0), None)


def _is_number(index: Index) -> bool:
    dtype = index.dtype(_STEP_KEY)
    return "Int" in dtype and index.nbytes(_STEP_KEY) == item_size(dtype)


def naming(request: Request, form: Form, container: Format, common: Mapping[str, Any]) -> Naming:
    """Return how a destination's files are to be made. Raises UsageError for others' options."""
    for other in FORMS.values():
        for name in other.options:
            if name not in form.options and not is_default(request, name):
                raise UsageError(
                    f"--{name.replace('_', '-')} is for --dst-form {other.name}, and the "
                    f"destination is {form.name}"
                )
    sizes = [size for size in (request.max_part, request.max_shard) if size is not None]
    iteration = request.iteration
    if iteration is None:
        iteration = common.get(_STEP_KEY)
    return Naming(
        request.prefix,
        "." + container.name,
        sizes[0] if sizes else None,
        request.dedup,
        iteration,
    )


def dst_form(request: Request) -> Form:
    """Return the form of a destination that is there. Raises UsageError."""
    from rankxform.checkpoints.base import form_of

    return form_of(Path(request.dst or ""), request.dst_form, "--dst-form")
