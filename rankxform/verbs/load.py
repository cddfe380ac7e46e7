"""`load`: a checkpoint in memory; each process gets the slices of its own destination rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, NamedTuple

from rankxform.engine.pipeline import Traffic, execute
from rankxform.engine.sinks import ArraySink
from rankxform.errors import UsageError
from rankxform.formats.container import TensorSpec
from rankxform.layout.names import compile_regex
from rankxform.layout.strategy import Strategy
from rankxform.planning.assign import Assignment, runs_of
from rankxform.planning.catalog import Parameter
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange
from rankxform.request import Request
from rankxform.results import as_table
from rankxform.source.open import Source
from rankxform.statements import as_warning
from rankxform.storage.posix import OnProgress
from rankxform.target.destination import open_work_inputs
from rankxform.target.resolve import prepare
from rankxform.target.target import Target
from rankxform.transport import Team
from rankxform.transport.launcher import msrun_workers
from rankxform.transport.team import ShowProgress, show_nothing

from .evidence import examine
from .report import lost_values
from .work import plan_work

_SHOWN = 20
"""Slices that a notebook shows."""


class Parameters(dict[str, Any]):
    """The slices of one destination rank: numpy arrays by name, in the order of its file.

    bfloat16 has the type of `ml_dtypes` if that is installed, else its words as ``uint16``; Int4
    its bytes, two values in each, as ``int8``. The text of an `append_dict` entry is a str.

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
        return f"Parameters({len(self)} slices of rank {self.rank}, bytes_read={self.bytes_read})"

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
            [*rows, *([(f"and {hidden_count} more", "", "")] if hidden_count > 0 else [])],
        )


class RankRequest(NamedTuple):
    """What one process wants: the slices of a rank, of some names."""

    rank: int
    include: tuple[str, ...]


def load(
    request: Request,
    team: Team,
    rank: int,
    begin: Callable[[int], ShowProgress] = lambda total: show_nothing,
) -> Parameters:
    """Return the slices of destination `rank`.

    Every process calls this, each with a rank and an `include` of its own; two may ask
    for the same. Only the byte ranges that the slices need are read, in the memory that
    `request` allows. Raises UsageError where processes ask otherwise for different things.
    """
    request, rank_requests = _join_requests(request, rank, team)
    resolved, source, target = prepare(request, team)
    target = target.with_evidence(examine(resolved, source, target, team))
    assignment = _wanted_of(target.planner, rank_requests, team)
    work = plan_work(resolved.request, source, target, assignment, team)
    show = begin(work.nbytes)
    arrays, traffic_by_process = fill_arrays(
        work, source, target, assignment[team.rank], team, show
    )
    target = target.with_findings(map(as_warning, lost_values(traffic_by_process)))
    return _parameters(target, arrays, traffic_by_process[team.rank], rank)


def _join_requests(request: Request, rank: int, team: Team) -> tuple[Request, list[RankRequest]]:
    """Return the request of all processes, and what each of them wants. Collective."""
    by_process = team.allgather(lambda: (RankRequest(rank, request.include), _question(request)))
    rank_requests, questions = zip(*by_process)
    if len(set(questions)) > 1:
        raise UsageError(
            "the processes of one load ask for different things; only rank and include may differ"
        )
    ranks = tuple(sorted({rank_request.rank for rank_request in rank_requests}))
    include = tuple(
        dict.fromkeys(pattern for rank_request in rank_requests for pattern in rank_request.include)
    )
    if any(not rank_request.include for rank_request in rank_requests):
        include = ()
    return replace(request, dst=None, ranks=ranks, include=include), list(rank_requests)


def fill_arrays(
    work: WorkPlan,
    source: Source,
    target: Target,
    slice_ranges: Sequence[SliceRange],
    team: Team,
    show: ShowProgress = show_nothing,
) -> tuple[dict[str, Any], list[Traffic]]:
    """Read the slices of this process, which are of one rank, into arrays. Collective.

    What every process moved is returned too.
    """
    slices_of = target.planner.slices
    slices = [slices_of(r.rank)[p] for r in slice_ranges for p in range(r.first, r.stop)]
    arrays = team.agree(
        lambda: ArraySink(TensorSpec(p.name, p.dtype, shape) for p, shape in slices)
    )
    messenger = team.p2p() if work.exchanges else None

    def read(on_progress: OnProgress) -> Traffic:
        with open_work_inputs(source, target, work, messenger, on_progress) as inputs:
            return execute(
                work,
                inputs,
                {slice_range.rank: arrays for slice_range in slice_ranges},
                on_progress,
            )

    traffic = team.work(read, show)
    arrays_by_name: dict[str, Any] = {}

    def take() -> Traffic:
        arrays_by_name.update(arrays.take())
        return traffic

    return arrays_by_name, team.allgather(take)


def _parameters(
    target: Target, arrays: Mapping[str, Any], traffic: Traffic, rank: int
) -> Parameters:
    selection = target.planner.selection
    parameters_by_name = {name: target.planner.parameter(name) for name in arrays}
    dropped = [name for omitted in selection.left_out for name in omitted.names]
    return Parameters(
        arrays,
        rank,
        parameters_by_name,
        [*dropped, *(p.name for p in selection.parameters if p.name not in parameters_by_name)],
        traffic.read,
        target.notices,
        target.warnings,
    )


def _question(request: Request) -> str:
    """Return what all processes of a load must ask alike."""
    src, dst = request.src_strategy, request.dst_strategy
    named = [s.label if isinstance(s, Strategy) else s for s in (src, dst)]
    return repr((named, replace(request, include=(), src_strategy=None, dst_strategy=None)))


def _wanted_of(planner: Planner, rank_requests: Sequence[RankRequest], team: Team) -> Assignment:
    """Return the slices that each process wants. Collective."""
    return team.agree(lambda: [_slices_of_names(planner, r.rank, r.include) for r in rank_requests])


def _slices_of_names(planner: Planner, rank: int, include: Sequence[str]) -> list[SliceRange]:
    """Return which slices of `rank` a process wants that includes only some names."""
    expressions = [compile_regex(pattern, "--include") for pattern in include]
    return runs_of(
        rank,
        [
            position
            for position, (p, _) in enumerate(planner.slices(rank))
            if not expressions or any(expression.search(p.name) for expression in expressions)
        ],
    )


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
