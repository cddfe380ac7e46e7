"""The verb ``ranks``."""

from __future__ import annotations

import os

from rankxform.display.text import warning_lines
from rankxform.request import Request
from rankxform.results import DictResult, Table
from rankxform.transport import Team

from .options import Parsed, refuse_given_options, request_options
from .screen import Screen


def run(options: Parsed, team: Team) -> int:
    src_ranks_by_rank = (
        _of_checkpoint(options, team) if options.src else _of_strategies(options, team)
    )
    rows = [(rank, ", ".join(map(str, ranks))) for rank, ranks in src_ranks_by_rank.items()]
    shown = (Table(("rank", "needs source ranks"), rows, ""),)
    facts = {"needed_ranks": src_ranks_by_rank}
    return Screen(options, team).show("ranks", lambda: DictResult(facts, shown))


def _of_checkpoint(options: Parsed, team: Team) -> dict[int, tuple[int, ...]]:
    """Return the ranks that are read, by destination rank. Collective."""
    from rankxform.target.resolve import resolve

    request = team.bcast(
        lambda: Request(
            options.src,
            None,
            options.src_strategy,
            options.dst_strategy,
            **request_options(options),
        )
    )
    target = resolve(request, team).target
    if team.rank == 0:
        os.write(2, "".join(f"{line}\n" for line in warning_lines(target.warnings)).encode())
    totals = target.planner.file_totals(target.ranks)
    return {rank: tuple(sorted(total.read_by_rank)) for rank, total in totals.items()}


def _of_strategies(options: Parsed, team: Team) -> dict[int, tuple[int, ...]]:
    """Return the ranks that are needed by the strategies alone. Collective."""
    from rankxform.operations.base import OperationChain
    from rankxform.planning.selection import source_ranks_needed
    from rankxform.storage.user_files import load_strategy

    def find() -> dict[int, tuple[int, ...]]:
        refuse_given_options(options, "needs SRC", ("ranks", "rename"))
        src = load_strategy(options.src_strategy)
        renamed = OperationChain.of({"rename": options.rename}, src.states)
        return source_ranks_needed(
            renamed.strategy(src), load_strategy(options.dst_strategy), options.ranks
        )

    return team.bcast(find)
