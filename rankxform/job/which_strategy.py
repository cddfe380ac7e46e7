"""Which source strategy may be meant, where none was given or another checkpoint's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from shlex import quote

from rankxform.checkpoints.base import FORMS, USUAL, Shards, Wish
from rankxform.checkpoints.rank_folders import siblings_of
from rankxform.errors import (
    CheckpointError,
    RankxformError,
    RequestError,
    StrategyError,
    UsageError,
)
from rankxform.layout.strategy import Strategy
from rankxform.storage import strategies
from rankxform.transport import Team

from .request import Request

_SHOWN = 2


def check_stated(request: Request, where: Path, shards: Shards) -> None:
    """Refuse files of several ranks if no source strategy was given, not even "none".

    Raises UsageError, which names the strategies that lie beside the checkpoint.
    """
    if request.src_strategy is not None:
        return
    ranks, folder = max(shards.paths) + 1, where
    what = f"{where}: holds the files of {len(shards.paths)} ranks"
    if request.files is not None:
        what = f"{len(shards.paths)} files are given, of as many ranks"
    if len(shards.paths) == 1:
        path = next(iter(shards.paths.values()))
        named = where.is_file() or request.files is not None
        siblings = siblings_of(path) if named else []
        if not siblings:
            return
        ranks, folder = max(siblings) + 1, path.resolve().parent.parent
        what = f"{path}: is the file of one of {len(siblings)} rank folders"
    found = [_option(path, strategy) for path, strategy in strategies.beside(folder, ranks)]
    found = found[:_SHOWN] or ["--src-strategy FILE or FOLDER (MindFormers: output/strategy)"]
    raise UsageError(
        f"give {' or '.join(found)}, or --src-strategy none if every rank holds whole parameters "
        f"(data parallel, remove_redundancy): {what}, and no --src-strategy says how they were "
        "sharded"
    )


@contextmanager
def explained(
    team: Team, request: Request, shards: Shards, src: Strategy | None, dst: object
) -> Iterator[None]:
    """Where a check fails, say what else than the given strategies may be meant, if anything.

    Around what fails on every process alike; process 0 looks for other strategies only then.
    """
    try:
        yield
    except (CheckpointError, StrategyError, RequestError) as error:
        meant = team.bcast(lambda: _meant_if_readable(request, shards, src, dst))
        if meant is not None:
            first, text = meant
            error.args = (f"{text} {error}" if first else f"{error}. {text}",)
        raise


def _meant_if_readable(
    request: Request, shards: Shards, src: Strategy | None, dst: object
) -> tuple[bool, str] | None:
    with suppress(RankxformError, OSError):  # the check's own error is what counts
        return _meant(request, shards, src, dst)
    return None


def _meant(
    request: Request, shards: Shards, src: Strategy | None, dst: object
) -> tuple[bool, str] | None:
    """Return what may be meant, and whether that is likelier than what the error says."""
    if shards.said is not None or request.files is not None or src is None:
        return None
    ranks = max(shards.paths, default=-1) + 1
    given = strategies.path_of(request.src_strategy)
    fits = ranks == src.ranks or (request.allow_extra_ranks and ranks > src.ranks)
    if given is not None and not fits:
        found = _other_strategy(request, given, ranks, src, dst)
        if found is not None:  # fewer ranks may be lost ones as well
            return ranks > src.ranks, found
    found = _stage_file(request.dst_strategy, "--dst-strategy")
    return None if found is None else (True, found)


def _other_strategy(
    request: Request, given: Path, ranks: int, src: Strategy, dst: object
) -> str | None:
    counts = f"{src.label} is of {src.ranks} ranks, and the checkpoint has {ranks}"
    if request.dst is not None and _ranks_in(Path(request.dst)) == src.ranks:
        return f"exchange SRC and DST? {counts}; {request.dst} has {src.ranks}."
    around = strategies.loadable([given.parent]) if given.is_file() else []
    stages = [one for one in around if one[1].ranks == ranks]
    if stages:
        return f"give {_option(*stages[0])}? {counts}."
    if isinstance(dst, Strategy) and dst.ranks == ranks:
        return (
            f"exchange --src-strategy and --dst-strategy? {counts}, as many as {dst.label} is of."
        )
    beside = strategies.beside(Path(request.src), ranks)
    fitting = [one for one in beside if one[1].ranks == ranks]
    if fitting:
        return f"give {_option(*fitting[0])}? {counts}."
    if ranks > src.ranks:
        return f"give the strategy of all {ranks} ranks, such as a folder of all stages: {counts}."
    return None


def _stage_file(given: str | Strategy | None, flag: str) -> str | None:
    """Return what to do if a strategy's file is of one pipeline stage of several; else None."""
    path = strategies.path_of(given)
    if path is None or not path.is_file() or (record := strategies.read(path)).merged:
        return None
    for folder, whole in strategies.loadable([path.parent]):
        if len(whole.stages) > 1:
            return (
                f"give {flag} {quote(_shortly(folder))} (found there: {whole.extent})? {path} is "
                f"of pipeline stage {record.stage} alone."
            )
    return None


def _ranks_in(folder: Path) -> int:
    """Return how many ranks the rank folders there are of; 0 if there are none."""
    with suppress(RankxformError, OSError):
        return max(FORMS[USUAL].look(folder, Wish()).files, default=-1) + 1
    return 0


def _option(path: Path, strategy: Strategy) -> str:
    return f"--src-strategy {quote(_shortly(path))} (found there: {strategy.extent})"


def _shortly(path: Path) -> str:
    """Write a path as it is named from here, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
