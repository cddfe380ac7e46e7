"""A checkpoint in memory: each process gets the slices of its own destination rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.engine.array_sink import Arrays
from rankxform.engine.pipeline import Messenger, Traffic, execute
from rankxform.errors import UsageError
from rankxform.formats.base import TensorSpec
from rankxform.layout.names import expression
from rankxform.layout.strategy import Strategy
from rankxform.planning.assign import runs_of
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange
from rankxform.request import Request
from rankxform.storage.posix import OnProgress
from rankxform.target.aim import Conversion, prepare
from rankxform.target.reading import opened
from rankxform.transport import Team
from rankxform.transport.launcher import workers
from rankxform.transport.team import quiet

from .checks import compare_ranks
from .measure import plan_work


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
        dtypes: Mapping[str, str],
        full_shapes: Mapping[str, tuple[int, ...]],
        left_over: Sequence[str],
        bytes_read: int,
        notices: Sequence[str],
        warnings: Sequence[str],
    ) -> None:
        super().__init__(arrays)
        self.rank, self.dtypes, self.full_shapes = rank, dtypes, full_shapes
        self.left_over, self.bytes_read = tuple(left_over), bytes_read
        self.notices, self.warnings = tuple(notices), tuple(warnings)

    def __repr__(self) -> str:
        return f"Parameters({len(self)} slices of rank {self.rank}, bytes_read={self.bytes_read})"


def load(request: Request, team: Team, rank: int) -> Parameters:
    """Return the slices of destination `rank`.

    Every process calls this, each with a rank and an `include` of its own; two may ask
    for the same. Only the byte ranges that the slices need are read, in the memory that
    `request` allows. Raises UsageError where processes ask otherwise for different things.
    """
    wanted = team.allgather(lambda: (rank, request.include, _question(request)))
    ranks, includes, questions = zip(*wanted)
    if len(set(questions)) > 1:
        raise UsageError(
            "the processes of one load ask for different things (sources, strategies, options); "
            "only rank and include may differ"
        )
    every = () if () in includes else tuple(dict.fromkeys(p for some in includes for p in some))
    of_all = replace(request, dst=None, ranks=tuple(sorted(set(ranks))), include=every)
    conversion, _, notices = compare_ranks(prepare(of_all, team), team)
    files, planner = conversion.source, conversion.planner
    assignment = team.agree(lambda: [_wanted(planner, *one) for one in zip(ranks, includes)])
    plan = plan_work(of_all, files, planner, assignment, team)
    slices = planner.slices(rank)
    mine = [slices[at] for one in assignment[team.rank] for at in range(one.first, one.stop)]
    arrays = team.agree(lambda: Arrays(TensorSpec(p.name, p.dtype, shape) for p, shape in mine))
    p2p = team.p2p() if plan.exchanges else None
    traffic = team.work(
        lambda on_progress: _fill(conversion, plan, {rank: arrays}, on_progress, p2p), quiet
    )
    values = team.agree(arrays.take)
    known = {p.name: p for p, _ in mine}
    selection = planner.selection
    dropped = [name for left in selection.left_out for name in left.names]
    return Parameters(
        values,
        rank,
        {name: p.dtype for name, p in known.items()},
        {name: p.shape for name, p in known.items()},
        [*dropped, *(p.name for p in selection.parameters if p.name not in known)],
        traffic.read,
        (*conversion.notices, *notices),
        conversion.warnings,
    )


def _question(request: Request) -> str:
    """Return what all processes of a load must ask alike."""
    src, dst = request.src_strategy, request.dst_strategy
    named = [s.label if isinstance(s, Strategy) else s for s in (src, dst)]
    return repr((named, replace(request, include=(), src_strategy=None, dst_strategy=None)))


def _wanted(planner: Planner, rank: int, include: Sequence[str]) -> list[SliceRange]:
    """Return which slices of `rank` a process wants that includes only some names."""
    expressions = [expression(pattern, "--include") for pattern in include]
    return runs_of(
        rank,
        [
            at
            for at, (p, _) in enumerate(planner.slices(rank))
            if not expressions or any(one.search(p.name) for one in expressions)
        ],
    )


def _fill(
    conversion: Conversion,
    plan: WorkPlan,
    arrays: Mapping[int, Arrays],
    on_progress: OnProgress,
    p2p: Messenger | None,
) -> Traffic:
    memory = conversion.request.memory // 2
    with opened(conversion) as (sources, operands):
        return execute(plan, arrays, sources, memory, on_progress, p2p=p2p, operands=operands)


def own_rank(team: Team, environ: Mapping[str, str]) -> int:
    """Return the destination rank of this process: its number in the team, or in the job.

    Without an MPI launcher, msrun or a script may have started the process and set RANK_ID. Raises
    UsageError if RANK_ID is not a number, or is missing although there are several workers.
    """
    if team.size > 1:
        return team.rank
    if not environ.get("RANK_ID"):
        if workers(environ) > 1:
            raise UsageError(
                f"this is one of {workers(environ)} workers, and RANK_ID does not say which (msrun "
                "sets it where --node_rank is given); pass rank="
            )
        return team.rank
    text = environ["RANK_ID"]
    if not text.isdecimal():
        raise UsageError(f"RANK_ID is {text!r} in the environment; a rank is a number from 0 on")
    return int(text)
