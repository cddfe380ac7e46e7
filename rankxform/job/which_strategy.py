"""Which source strategy may be meant, where none was given or another checkpoint's."""

from __future__ import annotations

from pathlib import Path
from shlex import quote

from rankxform.checkpoints.base import Shards
from rankxform.checkpoints.rank_folders import siblings_of
from rankxform.errors import UsageError
from rankxform.layout.strategy import Strategy
from rankxform.storage import strategies

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


def other_strategy(
    request: Request, where: Path, shards: Shards, src: Strategy, dst: object
) -> str | None:
    """Return what to do if the source's strategy turns out to be another checkpoint's.

    It is of another number of ranks then; None where it is not, or nothing better is known.
    """
    ranks = max(shards.paths, default=-1) + 1
    given = strategies.path_of(request.src_strategy)
    if ranks == src.ranks or given is None:
        return None
    counts = f"{src.label} is of {src.ranks} ranks, and the checkpoint has {ranks}"
    if isinstance(dst, Strategy) and dst.ranks == ranks:
        return f"exchange --src-strategy and --dst-strategy? {counts}, as many as {dst.label} is of"
    beside = strategies.beside(where, ranks)
    if given.is_file():
        beside = [*strategies.loadable([given.parent]), *beside]
    fitting = [one for one in beside if one[1].ranks == ranks]
    if fitting:
        return f"give {_option(*fitting[0])}? {counts}"
    if ranks > src.ranks:
        return f"give the strategy of all {ranks} ranks, such as a folder of all stages: {counts}"
    return None


def _option(path: Path, strategy: Strategy) -> str:
    return f"--src-strategy {quote(_shortly(path))} (found there: {strategy.extent})"


def _shortly(path: Path) -> str:
    """Write a path as it is named from here, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
