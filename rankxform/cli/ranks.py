"""The verb ``ranks``."""

from __future__ import annotations

from collections.abc import Sequence

from rankxform.request import Request
from rankxform.results import DictResult, Table
from rankxform.transport import Team

from .options import Parsed, refuse_given_options, request_options
from .screen import Screen

_Needed = tuple[dict[int, tuple[int, ...]], Sequence[str]]


def run(options: Parsed, team: Team) -> int:
    find = _of_checkpoint if options.src else _of_strategies
    src_ranks_by_rank, warnings = find(options, team)
    rows = [(rank, ", ".join(map(str, ranks))) for rank, ranks in src_ranks_by_rank.items()]
    shown = (Table(("rank", "needs source ranks"), rows, ""),)
    facts = {"needed_ranks": src_ranks_by_rank, "warnings": warnings}
    return Screen(options, team).show("ranks", lambda: DictResult(facts, shown))


def _of_checkpoint(options: Parsed, team: Team) -> _Needed:
    """Return the ranks that are read, by destination rank, and warnings. Collective."""
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
    totals = target.planner.file_totals(target.ranks)
    needed = {rank: tuple(sorted(total.read_by_rank)) for rank, total in totals.items()}
    return needed, target.warnings


def _of_strategies(options: Parsed, team: Team) -> _Needed:
    """Return the ranks that are needed by the strategies alone. Collective."""
    from rankxform.operations.base import OperationChain
    from rankxform.planning.selection import source_ranks_needed
    from rankxform.storage.user_files import load_strategy

    def find() -> _Needed:
        refuse_given_options(options, "needs SRC", ("ranks", "rename"))
        src = load_strategy(options.src_strategy)
        renamed = OperationChain.of({"rename": options.rename}, src.states)
        dst = load_strategy(options.dst_strategy)
        return source_ranks_needed(renamed.strategy(src), dst, options.ranks), ()

    return team.bcast(find)
