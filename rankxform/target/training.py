"""How far a training was: what a source says of it, and what a destination's files state.

`read_training` is collective; a number that only a tensor holds is read by one process.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from math import isfinite
from struct import unpack
from typing import Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, DestinationFiles, Form
from rankxform.errors import CheckpointError
from rankxform.formats.container import Index, item_size
from rankxform.layout.names import CONSUMED, STEPS, TRAINING_FACTS
from rankxform.request import Request
from rankxform.source.source import Source
from rankxform.statements import ITERATION, Finding, Statement, contradictions, quote
from rankxform.storage.source_reader import SourceReader
from rankxform.transport import Team

STEP_KEY = "global_step"
_FLOATS = {"Float32": "<f", "Float64": "<d"}
_STEP = "iteration"
"""The option of forms whose folders bear the step's number."""


def read_training(request: Request, source: Source, team: Team) -> dict[str, Any]:
    """Return facts on the training that a destination's companion files state. Collective.

    They are what the source's manifest and companion files state, else tensors of these names, else
    the names of files and folders.
    """
    form = FORMS[request.dst_form or DEFAULT_FORM]
    has_files = form.training is not None or _STEP in form.options
    has_tensors = form.counters and not source.form.counters
    if not (has_files or has_tensors) or request.shapes is not None:
        return {}
    step = source.selected.step
    manifest_steps = source.manifest.steps if source.manifest is not None else {}
    description = source.description
    training = {**manifest_steps, **description.training}
    if _is_excluded(request, CONSUMED):
        training.pop(CONSUMED, None)
    for name in TRAINING_FACTS:
        if name in STEPS and training.get(name) is not None:
            continue  # they are compared with what files hold elsewhere
        number = _number(source, name, team)
        if training.get(name) is None:
            training[name] = number
        elif number not in (None, training[name]):
            raise CheckpointError(
                f"{name} is {training[name]}, and {number} by a tensor of that name",
                "take files of one step",
                where=description.source,
            )
    of_names = (STEP_KEY,) if step and len(step) == 1 else ("epoch_num", "step_num")
    for name, number in zip(of_names, step or ()):
        training[name] = number if training[name] is None else training[name]
    if training[STEP_KEY] is None:
        training[STEP_KEY] = request.iteration
    return training


def kept_facts(request: Request, training: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the facts of `training` that a destination's companion files state.

    If the destination keeps them as tensors too, `--exclude` leaves both out.
    """
    if not FORMS[request.dst_form or DEFAULT_FORM].counters:
        return training
    return {name: value for name, value in training.items() if not _is_excluded(request, name)}


def training_notices(request: Request, source: Source, written: Collection[str]) -> Iterator[str]:
    """Yield what the source says of the training and the destination has no place for.

    `written` are the names of the tensors that the destination gets.
    """
    description = source.description
    if request.dst is None:
        return
    step, form = description.training.get(STEP_KEY), FORMS[request.dst_form or DEFAULT_FORM]
    consumed = description.training.get(CONSUMED)
    # a form that keeps the step as a tensor has a companion file for it with that tensor alone
    has_place = form.training is not None and (not form.counters or STEP_KEY in written)
    if consumed is not None and not _is_excluded(request, CONSUMED):
        yield _of_consumed(form, has_place, description.source, consumed)
    if step is None or form.training is not None or _STEP in form.options:
        return
    if STEP_KEY in written:
        return
    if not any(STEP_KEY in index for index in source.indexes.values()):
        yield (
            f"{description.source}: the training's global_step is {step}, which no tensor file "
            f"holds; it is not written, for {form.title} can hold it only as a tensor"
        )


def iteration_findings(
    source: Source, training: Mapping[str, Any], arrangement: DestinationFiles
) -> Iterator[Finding]:
    """Yield that the source is of another step than the number that is written."""
    step = training.get(STEP_KEY)
    if arrangement.mark is None or step is None:
        return
    number = int(arrangement.mark[1])
    statements = (
        Statement(ITERATION, "", frozenset({step}), source.where.path),
        Statement(ITERATION, "", frozenset({number}), f"--iteration {number}"),
    )
    yield from (contradiction.finding for contradiction in contradictions(statements))


def _is_excluded(request: Request, name: str) -> bool:
    return any(re.search(pattern, name) for pattern in request.exclude)


def _of_consumed(form: Form, has_place: bool, source: str, consumed: int) -> str:
    """Return what becomes of the number of samples that a training has consumed."""
    text = f"{source}: the training has consumed {consumed:,} samples"
    if not has_place:
        return f"{text}, for which {form.title} has no place"
    leave = f"--exclude {quote(f'^{CONSUMED}$')}"
    return f"{text}, which {form.training} says too; MindFormers before 2.1 wants {leave}"


def _number(source: Source, name: str, team: Team) -> float | None:
    """Return the value of a tensor of one number; None where no file has one of that name.

    Collective.
    """
    indexes = source.indexes
    files = (f for f, index in indexes.items() if name in index and _is_number(index, name))
    file = next(files, None)
    if file is None:
        return None
    reader = source.reach.processes_seeing((file,))[0]

    def value() -> float | None:
        if team.rank != reader:
            return None
        room = memoryview(bytearray(indexes[file].nbytes(name)))
        with SourceReader(source.paths, indexes) as sources:
            sources.read(file, name, 0, room)
        dtype = indexes[file].dtype(name)
        if dtype in _FLOATS:
            (number,) = unpack(_FLOATS[dtype], room)
            return number if isfinite(number) else None
        return int.from_bytes(room, "little", signed=True)

    return next((n for n in team.allgather(value) if n is not None and n >= 0), None)


def _is_number(index: Index, name: str) -> bool:
    dtype = index.dtype(name)
    return ("Int" in dtype or dtype in _FLOATS) and index.nbytes(name) == item_size(dtype)
