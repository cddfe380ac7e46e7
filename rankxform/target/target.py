"""The destination as it shall be."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from math import isfinite
from pathlib import Path
from shlex import quote
from struct import unpack
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DEFAULT_FORM, FORMS, DestinationFiles, Form
from rankxform.errors import CheckpointError
from rankxform.formats.container import Container, Index, item_size
from rankxform.layout.names import CONSUMED, STEPS, TRAINING_FACTS
from rankxform.planning.evidence import Evidence
from rankxform.planning.plan import Planner
from rankxform.request import Request
from rankxform.source.open import Source
from rankxform.statements import Finding, HasFindings
from rankxform.storage.source_reader import SourceReader
from rankxform.storage.store import address_of
from rankxform.transport import Team
from rankxform.values import NamedTuple, dataclass

if TYPE_CHECKING:
    from rankxform.derivation.request import Derived

    from .inputs import ResolvedRequest


@dataclass(frozen=True)
class Target(HasFindings):
    """What a conversion makes of a source. The same on every process."""

    planner: Planner  # what each file holds, and of what it is made
    ranks: tuple[int, ...]  # destination ranks that are made
    files: tuple[int, ...]  # ids of their files
    dst: str | None  # the destination that was named; None: nothing is written
    place: str  # folder or address that the files' names are relative to
    form: Form  # form of the destination
    container: Container  # container of its files
    arrangement: DestinationFiles  # names and contents of its files
    derived: Derived | None = None  # how its strategy was derived; None: it was given
    adapter: Source | None = None  # checkpoint that is added to the source's matrices
    training: Mapping[str, Any] = field(default_factory=dict)  # facts such as its global_step
    # Name -> content of small files that go with it.
    companions: Mapping[str, bytes] = field(default_factory=dict)
    own_companions: frozenset[str] = frozenset()  # of these what is the source's own
    truncated_vocab: tuple[str, ...] = ()  # source tensors that lose rows of the vocabulary
    # Tensors that are left out because each repeats another one.
    tied_duplicates: tuple[tuple[str, str], ...] = ()
    map_in_words: str | None = None  # the map that is applied, for people
    findings: tuple[Finding, ...] = ()  # what was noticed, of the source too
    evidence: Evidence = Evidence()  # what the bytes of the source say about its strategy
    accepted: tuple[str, ...] = ()  # doubts that do not refuse the source

    def address(self, file: int) -> str:
        """Return the address of a file."""
        return address_of(self.place, self.arrangement.names[file])

    @property
    def folder(self) -> Path:
        """The place of the files, where it is a folder."""
        return Path(self.place)

    def path(self, file: int) -> Path:
        """Return the path of a file, where the place is a folder."""
        return self.folder / self.arrangement.names[file]

    @property
    def paths(self) -> dict[int, Path]:
        """The path of each file that is made, by its id, where the place is a folder."""
        return {file: self.path(file) for file in self.files}

    def with_findings(self, findings: Iterable[Finding]) -> Target:
        """Return the same with more that was noticed."""
        return replace(self, findings=(*self.findings, *findings))

    def with_evidence(
        self,
        evidence: Evidence,
        findings: Sequence[Finding] = (),
        place_of: Mapping[int, int] = MappingProxyType({}),
    ) -> Target:
        """Return what is made where bytes were found to say this of the source; with findings.

        place_of: source file -> number of its place, the best first, if there are several.
        """
        names = evidence.per_rank_tensors
        planner = self.planner.with_per_rank_tensors(names) if names else self.planner
        for name, files in evidence.taken_from.items():
            planner = planner.taking_of(name, files)
        planner = planner.preferring(place_of)
        target = replace(self, planner=planner, evidence=evidence)
        return target.with_findings((*findings, *evidence.findings))


class Conversion(NamedTuple):
    """A request, what it reads, and what is made of that. The same on every process."""

    resolved: ResolvedRequest
    source: Source
    target: Target

    @property
    def request(self) -> Request:
        """The request, with absolute paths."""
        return self.resolved.request

    @property
    def planner(self) -> Planner:
        """What each file of the target holds, and of what it is made."""
        return self.target.planner

    def with_findings(self, findings: Iterable[Finding]) -> Conversion:
        """Return the same with more that was noticed."""
        return self._replace(target=self.target.with_findings(findings))


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
