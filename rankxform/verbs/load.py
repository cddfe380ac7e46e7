"""`load`: a checkpoint in memory; each process gets the slices of its own destination rank."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count, islice
from types import MappingProxyType
from typing import Any

from rankxform.display.text import format_count
from rankxform.errors import RankxformError, UsageError
from rankxform.formats.container import Index, Schema
from rankxform.geometry.box import Shape
from rankxform.layout.names import format_ranges
from rankxform.planning.catalog import Parameter
from rankxform.planning.exchange import WorkPlan
from rankxform.request import Request
from rankxform.results import as_table
from rankxform.source.open import arrays_name, open_arrays
from rankxform.storage.arrays import ArrayFile, array_file, holding
from rankxform.storage.store import address_of
from rankxform.storage.user_files import load_strategy
from rankxform.target.destination import ArrayDestination, RankRequest
from rankxform.target.resolve import resolve
from rankxform.target.target import Conversion
from rankxform.transport import Team
from rankxform.transport.launcher import msrun_workers
from rankxform.values import NamedTuple

from .convert import OnStart, Outcome, Prepared, convert, plan_moves, start_silently
from .evidence import with_evidence

_SHOWN = 20
"""Slices that a notebook shows."""


class Parameters(dict[str, Any]):
    """The slices of one destination rank: numpy arrays by name, in the order of its file.

    bfloat16 has the type of `ml_dtypes`; Int4 its bytes, two values in each, as ``int8``. The text
    of an `append_dict` entry is a str.

    rank: whose slices. dtypes: MindSpore's names of the element types. full_shapes: of the
    parameters, in elements. left_over: names in the checkpoint that were not wanted. bytes_read:
    bytes that this process read. notices: what to know; warnings: what may not be what was meant.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        rank: int,
        parameters: Mapping[str, Parameter],
        left_over: Sequence[str],
        bytes_read: int,
        notices: Sequence[str],
        warnings: Sequence[str],
    ) -> None:
        super().__init__(arrays)
        self.rank = rank
        self.dtypes = {name: parameter.dtype for name, parameter in parameters.items()}
        self.full_shapes = {name: parameter.shape for name, parameter in parameters.items()}
        self.left_over, self.bytes_read = tuple(left_over), bytes_read
        self.notices, self.warnings = tuple(notices), tuple(warnings)

    def __repr__(self) -> str:
        slices = format_count(len(self), "slice")
        return f"Parameters({slices} of rank {self.rank}, bytes_read={self.bytes_read})"

    def _repr_html_(self) -> str:
        """Return what a notebook shows: the first slices, with their types and shapes."""
        rows = [
            (name, self.dtypes[name], f"{list(array.shape)} of {list(self.full_shapes[name])}")
            for name, array in islice(self.items(), _SHOWN)
            if name in self.dtypes
        ]
        hidden_count = len(self) - _SHOWN
        return as_table(
            repr(self),
            [
                *rows,
                *([(f"and {hidden_count} more", "", "")] if hidden_count > 0 else []),
                *(("note", text, "") for text in self.notices),
                *(("warning", text, "") for text in self.warnings),
            ],
        )


def load(
    request: Request,
    rank: int,
    team: Team,
    on_start: OnStart = start_silently,
    into: Mapping[str, Any] = MappingProxyType({}),
) -> Parameters:
    """Return the slices of destination `rank`; those that `into` has are put into its arrays.

    Every process calls this, each with a rank and an `include` of its own; two may ask
    for the same. Only the byte ranges that the slices need are read, in the memory that
    `request` allows. Raises UsageError where processes give different options.
    """
    destination = ArrayDestination(rank, into)
    outcome = convert(request, destination, team, on_start)
    return _parameters(outcome, destination, team)


def _parameters(outcome: Outcome, destination: ArrayDestination, team: Team) -> Parameters:
    """Return what this process got."""
    planner, arrays = outcome.conversion.planner, destination.arrays
    parameters_by_name = {name: planner.parameter(name) for name in arrays}
    dropped = [name for omitted in planner.selection.left_out for name in omitted.names]
    ranks, count = {request.rank for request in destination.rank_requests}, planner.dst.ranks
    notices = [*outcome.notices]
    if len(ranks) < count:
        shown = f"rank {format_ranges(sorted(ranks))} of {count:,} ranks was loaded"
        notices.append(f"{shown}; as many processes as ranks load all")
    return Parameters(
        arrays,
        destination.rank,
        parameters_by_name,
        [*dropped, *(p.name for p in planner.selection.parameters if p.name not in arrays)],
        outcome.processes[team.rank].traffic.read,
        notices,
        outcome.warnings,
    )


class HeldSlices(NamedTuple):
    """What one process holds in memory, which rank's it is, and what it wants filled."""

    slices: MutableMapping[str, Any]
    rank: int
    dtypes: Mapping[str, str]  # MindSpore's names of types that numpy's do not tell
    release: bool = False  # arrays are removed from `slices` when they are not needed any more
    into: Mapping[str, Any] = MappingProxyType({})  # arrays to fill, by name; others are made
    has_values: bool = True  # or they stand for such as there will be


class ReshardPlan(NamedTuple):
    """What `reshard` does with slices of the same names, shapes and types, on one process.

    unjudged: the conversion before samples of these slices were compared. digest: the same on all
    processes of one plan, and of no other.
    """

    unjudged: Conversion
    conversion: Conversion
    work: WorkPlan
    rank_requests: tuple[RankRequest, ...]
    rank: int  # destination rank of this process
    src_rank: int  # source rank of this process
    dtypes: Mapping[str, str]
    digest: str

    def __repr__(self) -> str:
        planner = self.conversion.planner
        ranks = f"{planner.catalog.ranks} -> {format_count(planner.dst.ranks, 'rank')}"
        return (
            f"ReshardPlan({ranks}, {format_count(len(planner.selection.parameters), 'parameter')})"
        )


def plan_reshard(request: Request, held_slices: HeldSlices, rank: int, team: Team) -> ReshardPlan:
    """Plan what `reshard` does; values are only compared where ranks hold replicas. Collective."""
    if team.size == 1 and msrun_workers() > 1:
        raise UsageError(
            f"{msrun_workers()} workers were started without MPI, as by msrun, and slices are "
            "exchanged over MPI",
            "start them by mpirun or srun, and pass comm=",
            "write a checkpoint, and let each worker call rankxform.load",
        )
    strategy = team.bcast(lambda: load_strategy(request.src_strategy))
    src_rank, dtypes = held_slices.rank, held_slices.dtypes
    by_process = team.allgather(lambda: ([*held_slices.slices], held_slices.has_values))
    all_names = {name for names, _ in by_process for name in names}

    def own_file() -> ArrayFile | None:
        if unknown := [name for name in dtypes if name not in all_names]:
            raise UsageError(f"dtypes: there is no slice {unknown[0]!r}")
        file = array_file(held_slices.slices, dtypes)
        if not all_names:
            raise UsageError("no process holds slices", "pass them to one process at least")
        if request.src_strategy is None and src_rank:
            raise UsageError(
                f"slices of rank {src_rank} are given, and no --src-strategy says how they were "
                "sharded",
                "--src-strategy FILE or FOLDER",
            )
        if file is not None and not 0 <= src_rank < strategy.ranks:
            raise UsageError(
                f"slices of rank {src_rank} are given, and {strategy.label} has {strategy.ranks}",
                "src_rank=, or no slices for a process that holds none",
            )
        return file

    file, scheme = team.agree(own_file), _new_scheme(team)
    with _speaking_of_arrays(), holding(scheme, file):
        indexes = {} if file is None else {src_rank: file.table}
        source = open_arrays(f"{scheme}://", indexes, strategy, team, request.accepts)
        destination = ArrayDestination(rank, may_be_none=True)
        request = destination.prepare(replace(request, src=f"{scheme}://"), team)
        unjudged = resolve(request, team, source=source)
        are_values = all(has_values for _, has_values in by_process)
        conversion = with_evidence(unjudged, team) if are_values else unjudged
        with destination.claim(conversion, team):
            work = plan_moves(conversion, destination, team)
    requests = destination.rank_requests
    return ReshardPlan(unjudged, conversion, work, requests, rank, src_rank, dtypes, scheme)


def reshard(
    plan: ReshardPlan,
    held_slices: HeldSlices,
    team: Team,
    on_start: OnStart = start_silently,
    *,
    is_reused: bool,
) -> Parameters:
    """Return the slices of the plan's destination rank, of what processes hold. Collective.

    A process may hold nothing, and one beyond the destination's ranks gets nothing. is_reused: the
    plan was made of other values, so that replicas of these are compared. Raises UsageError where
    the plan is for other slices or processes.
    """
    src_rank = plan.src_rank
    states = team.allgather(lambda: (plan.digest, plan.rank, held_slices.release))
    digests, ranks, releasing = zip(*states)
    planned_ranks = tuple(rank_request.rank for rank_request in plan.rank_requests)
    is_mixed = len({*digests}) > 1 or ranks != planned_ranks
    scheme = _new_scheme(team)

    def own_file() -> ArrayFile | None:
        # An array is let go of in the dict of a process that asks for it alone.
        slices = held_slices.slices if held_slices.release else {**held_slices.slices}
        source, file = plan.conversion.source, array_file(slices, held_slices.dtypes)
        planned = source.indexes[src_rank] if src_rank in source.reach.of(team.rank) else None
        is_other = _described(planned) != _described(file and file.table)
        if is_mixed:
            raise UsageError("the plan is another's: each process passes its own of one plan")
        if is_other:
            raise UsageError(
                f"the slices of rank {src_rank} are not those that the plan was made for",
                "plan_reshard for them",
            )
        return file

    file = team.agree(own_file)
    source, place = plan.conversion.source, f"{scheme}://"
    paths = {rank: address_of(place, arrays_name(rank)) for rank in source.paths}
    indexes = source.indexes if file is None else {**source.indexes, src_rank: file.table}
    source = replace(source, paths=paths, indexes=indexes)
    evidence = plan.conversion.target.evidence
    prepared = Prepared(
        conversion=plan.unjudged._replace(source=source),
        evidence=None if is_reused else evidence,
        work=plan.work,
        per_rank_tensors=evidence.per_rank_tensors,
    )
    parameters = plan.conversion.planner.selection.parameters
    has_operands = any(any(parameter.steps) for parameter in parameters)  # which are read apart
    # Huge pages make the first call slower and later ones faster (docs/benchmarks.md), and memory
    # that is let go of meanwhile could not be taken for them.
    in_huge_pages = is_reused and not any(releasing)
    destination = ArrayDestination(
        plan.rank, held_slices.into, held_slices.slices, may_be_none=True,
        in_huge_pages=in_huge_pages, rank_requests=plan.rank_requests,
    )  # fmt: skip
    with holding(scheme, file, releases=any(releasing) and not has_operands):
        outcome = convert(plan.unjudged.request, destination, team, on_start, prepared)
    if held_slices.release and file is not None:
        for name in file.table.schema.names:
            held_slices.slices.pop(name, None)
    return _parameters(outcome, destination, team)


@contextmanager
def _speaking_of_arrays() -> Iterator[None]:
    """Speak of slices and not of files, and say what helps where no process holds some."""
    try:
        yield
    except RankxformError as error:
        if error.tries and error.tries[0].startswith("bring "):
            tries = "slices of these ranks, from other processes", "rankxform.load of a checkpoint"
            details = "here the file of a rank is what a process holds of it"
            error.say(error.parts._replace(tries=tries, details=details))
        address, words = r"arrays-\d+-\d+://rank_(\d+)\.safetensors", r"slices of rank \1"
        parts = error.parts
        error.say(
            parts._replace(
                what=re.sub(address, words, parts.what),
                where=re.sub(address, words, parts.where),
                details=re.sub(address, words, parts.details),
            )
        )
        raise


def _new_scheme(team: Team) -> str:
    """Return the scheme of the addresses of one call's arrays. Collective."""
    return team.bcast(lambda: f"arrays-{time.monotonic_ns()}-{next(_CALLS)}")


def _described(index: Index | None) -> dict[str, tuple[str, Shape]]:
    """Return type and shape of each entry."""
    schema = Schema((), (), ()) if index is None else index.schema
    return dict(zip(schema.names, zip(schema.dtypes, schema.shapes)))


_CALLS = count()


def own_rank(team: Team, environ: Mapping[str, str]) -> int:
    """Return the destination rank of this process: its number in the team, or in the job.

    Without an MPI launcher, msrun or a script may have started the process and set RANK_ID. Raises
    UsageError if RANK_ID is not a number, or is missing although there are several workers.
    """
    if team.size > 1:
        return team.rank
    if not environ.get("RANK_ID"):
        if msrun_workers(environ) > 1:
            raise UsageError(
                f"this is one of {msrun_workers(environ)} workers, and RANK_ID does not say which "
                "(msrun sets it where --node_rank is given)",
                "pass rank=",
            )
        return team.rank
    text = environ["RANK_ID"]
    if not text.isdecimal():
        raise UsageError(f"RANK_ID is {text!r} in the environment; a rank is a number from 0 on")
    return int(text)
