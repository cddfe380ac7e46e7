"""Checkpoints that describe themselves: what they say, checked against files and strategies."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import FORMS, USUAL, Form, Naming, Shards
from rankxform.errors import RequestError, UsageError
from rankxform.formats.base import Format, Index
from rankxform.formats.dtype import item_size
from rankxform.layout.layout import same_boxes
from rankxform.layout.names import summarize_names
from rankxform.layout.strategy import Strategy, WholeStrategy
from rankxform.planning.description import Description
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
            "'none' means whole tensors"
        )
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
    if common[_STEP_KEY] is None:
        common[_STEP_KEY] = found.request.iteration
    return common


def unplaced(request: Request, shards: Shards, indexes: Mapping[int, Index]) -> Iterator[str]:
    """Yield what the source says of the training and the destination has no place for."""
    said = shards.said
    if said is None or request.dst is None:
        return
    step, form = said.common.get(_STEP_KEY), FORMS[request.dst_form or USUAL]
    if step is None or "iteration" in form.options:
        return
    if not any(_STEP_KEY in one for one in indexes.values()):
        yield (
            f"{said.source}: the common.json beside it states global_step {step}, which no tensor "
            f"file holds; it is not written, for {form.title} can hold it only as a tensor"
        )


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
