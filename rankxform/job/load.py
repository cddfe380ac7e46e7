"""A checkpoint in memory: each process gets the slices of its own destination rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.errors import UsageError
from rankxform.execution.arrays import Arrays
from rankxform.execution.engine import Sources, Traffic, carry
from rankxform.execution.files import Tick
from rankxform.planning.moves import Portion
from rankxform.transport import Team

from .checks import compare_ranks
from .prepare import Conversion, prepare
from .request import Request


class Parameters(dict[str, Any]):
    """The slices of one destination rank: numpy arrays by name, in the order of its file.

    bfloat16 has the type of `ml_dtypes` if that is installed, else its words as ``uint16``; Int4
    its bytes, two values in each, as ``int8``. The text of an `append_dict` entry is a str.

    rank: whose slices. dtypes: MindSpore's names of the element types. full_shapes: of the
    parameters before they are cut. left_over: names in the checkpoint that were not wanted.
    read: bytes that this process read. notices: what to know.
    """

    def __init__(
        self,
        arrays: Mapping[str, Any],
        rank: int,
        dtypes: Mapping[str, str],
        full_shapes: Mapping[str, tuple[int, ...]],
        left_over: Sequence[str],
        read: int,
        notices: Sequence[str],
    ) -> None:
        super().__init__(arrays)
        self.rank, self.dtypes, self.full_shapes = rank, dtypes, full_shapes
        self.left_over, self.read, self.notices = tuple(left_over), read, tuple(notices)

    def __repr__(self) -> str:
        return f"Parameters({len(self)} slices of rank {self.rank}, read={self.read})"


def load(request: Request, team: Team, rank: int) -> Parameters:
    """Return the slices of destination `rank`.

    All processes call this together, each with a rank of its own; two may ask for the same. Only
    the byte ranges that the slices need are read, in the memory that `request` allows.
    """
    wanted = team.gather(lambda: rank)
    conversion = prepare(replace(request, dst=None, ranks=tuple(sorted(set(wanted)))), team)
    _, notices = compare_ranks(conversion, team)
    slices = conversion.planner.slices(rank)
    with team.together():
        arrays = Arrays((p.name, p.dtype, shape) for p, shape in slices)
    traffic = team.work(lambda tick: _fill(conversion, rank, arrays, tick), lambda done, end: None)
    return Parameters(
        arrays.take(),
        rank,
        {p.name: p.dtype for p, _ in slices},
        {p.name: p.shape for p, _ in slices},
        [name for left in conversion.selection.left_out for name in left.names],
        traffic.read,
        (*conversion.notices, *notices),
    )


def _fill(conversion: Conversion, rank: int, arrays: Arrays, tick: Tick) -> Traffic:
    planner = conversion.planner
    moves = planner.moves([Portion(rank, 0, len(planner.names(rank)))])
    with Sources(conversion.shards.paths, conversion.indexes) as sources:
        return carry(moves, {rank: arrays}, sources, conversion.request.memory // 2, tick)


def own_rank(team: Team, environ: Mapping[str, str]) -> int:
    """Return the destination rank of this process: its number in the team, or in the job.

    A process that no MPI launcher started may be one of msrun's or of a script's: these say its
    number in RANK_ID. Raises UsageError where that is none.
    """
    if team.size > 1 or not environ.get("RANK_ID"):
        return team.rank
    text = environ["RANK_ID"]
    if not text.isdigit():
        raise UsageError(f"RANK_ID is {text!r} in the environment; a rank is a number from 0 on")
    return int(text)
