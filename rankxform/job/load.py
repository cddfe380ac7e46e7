"""A checkpoint in memory: each process gets the slices of its own destination rank."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from rankxform.engine.array_sink import Arrays
from rankxform.engine.pipeline import Mail, Traffic, carry
from rankxform.errors import UsageError
from rankxform.layout.strategy import Strategy
from rankxform.planning.assign import runs_of
from rankxform.planning.transfers import Portion
from rankxform.storage.posix import Tick
from rankxform.storage.sources import Sources
from rankxform.transport import Team
from rankxform.transport.launcher import workers

from .checks import compare_ranks
from .measure import Task, task
from .prepare import Conversion, prepare
from .request import Request


class Parameters(dict[str, Any]):
    """The slices of one destination rank: numpy arrays by name, in the order of its file.

    bfloat16 has the type of `ml_dtypes` if that is installed, else its words as ``uint16``; Int4
    its bytes, two values in each, as ``int8``. The text of an `append_dict` entry is a str.

    rank: whose slices. dtypes: MindSpore's names of the element types. full_shapes: of the
    parameters before they are cut. left_over: names in the checkpoint that were not wanted.
    read: bytes that this process read. notices: what to know; warnings: what may not be what was
    meant.
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
        warnings: Sequence[str],
    ) -> None:
        super().__init__(arrays)
        self.rank, self.dtypes, self.full_shapes = rank, dtypes, full_shapes
        self.left_over, self.read = tuple(left_over), read
        self.notices, self.warnings = tuple(notices), tuple(warnings)

    def __repr__(self) -> str:
        return f"Parameters({len(self)} slices of rank {self.rank}, read={self.read})"


def load(request: Request, team: Team, rank: int) -> Parameters:
    """Return the slices of destination `rank`.

    All processes call this together, each with a rank and an `include` of its own; two may ask
    for the same. Only the byte ranges that the slices need are read, in the memory that
    `request` allows. Raises UsageError where processes ask otherwise for different things.
    """
    wanted = team.gather(lambda: (rank, request.include, _question(request)))
    ranks, includes, questions = zip(*wanted)
    if len(set(questions)) > 1:
        raise UsageError(
            "the processes of one load ask for different things (sources, strategies, options); "
            "only rank and include may differ"
        )
    every = () if () in includes else tuple(dict.fromkeys(p for some in includes for p in some))
    request_of_all = replace(request, dst=None, ranks=tuple(sorted(set(ranks))), include=every)
    conversion = prepare(request_of_all, team)
    _, notices = compare_ranks(conversion, team)
    with team.together():
        shares = [_portions(conversion, *one) for one in zip(ranks, includes)]
    work = task(conversion, shares, team)
    with team.together():
        every_slice = conversion.planner.slices(rank)
        mine = [every_slice[at] for one in shares[team.rank] for at in range(one.first, one.stop)]
        arrays = Arrays((p.name, p.dtype, shape) for p, shape in mine)
    mail = team.mail() if work.trades else None
    traffic = team.work(
        lambda tick: _fill(conversion, work, {rank: arrays}, tick, mail), lambda done, end: None
    )
    with team.together():
        values = arrays.take()
    known = {p.name: p for p, _ in mine}
    selection = conversion.selection
    left = [name for left in selection.left_out for name in left.names]
    return Parameters(
        values,
        rank,
        {name: p.dtype for name, p in known.items()},
        {name: p.shape for name, p in known.items()},
        [*left, *(n for n in (*selection.cut, *selection.everywhere) if n not in known)],
        traffic.read,
        (*conversion.notices, *notices),
        conversion.warnings,
    )


def _question(request: Request) -> str:
    """Return what all processes of a load must ask alike."""
    src, dst = request.src_strategy, request.dst_strategy
    named = [s.label if isinstance(s, Strategy) else s for s in (src, dst)]
    return repr((named, replace(request, include=(), src_strategy=None, dst_strategy=None)))


def _portions(conversion: Conversion, rank: int, include: Sequence[str]) -> list[Portion]:
    """Return which slices of `rank` a process wants that includes only some names."""
    patterns = [re.compile(pattern) for pattern in include]
    slices = conversion.planner.slices(rank)
    return runs_of(
        rank,
        [
            at
            for at, (p, _) in enumerate(slices)
            if not patterns or any(pattern.search(p.name) for pattern in patterns)
        ],
    )


def _fill(
    conversion: Conversion,
    work: Task,
    arrays: Mapping[int, Arrays],
    tick: Tick,
    mail: Mail | None,
) -> Traffic:
    request = conversion.request
    with Sources(conversion.shards.paths, conversion.indexes) as sources:
        return carry(
            work.moves, arrays, sources, request.memory // 2, tick, mail=mail, call=work.choice.call
        )


def own_rank(team: Team, environ: Mapping[str, str]) -> int:
    """Return the destination rank of this process: its number in the team, or in the job.

    A process that no MPI launcher started may be one of msrun's or of a script's: these say its
    number in RANK_ID. Raises UsageError where that is none, or it is one of several without.
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
