"""Sources without a strategy: complete files, and parameters that remove_redundancy distributed.

rankxform never assumes that every rank holds whole parameters: the stages of a pipeline hold
different names too, and shards may hold the same ones. The user must say so, and it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from pathlib import Path
from shlex import quote

from rankxform.checkpoints.base import Shards
from rankxform.checkpoints.rank_folders import siblings_of
from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.base import Index
from rankxform.geometry.box import Shape
from rankxform.layout.names import summarize_names
from rankxform.layout.strategy import Strategy, WholeStrategy
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
    found = [
        f"--src-strategy {quote(_shortly(path))} (found beside it: {strategy.extent})"
        for path, strategy in strategies.beside(folder, ranks)[:_SHOWN]
    ]
    found = found or ["--src-strategy FILE or FOLDER (MindFormers: output/strategy)"]
    raise UsageError(
        f"{what}, and no --src-strategy says how they were sharded. Give {' or '.join(found)}; or "
        "--src-strategy none, if every rank holds whole parameters (data parallel, "
        "remove_redundancy)"
    )


def _shortly(path: Path) -> str:
    """Write a path as it is named from here, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)


def unsharded(
    shards: Shards, indexes: Mapping[int, Index], where: str
) -> tuple[Strategy, list[str]]:
    """Return the strategy of a source without one, and notices.

    A data-parallel job leaves complete files, or with remove_redundancy each parameter, whole, on
    one of its ranks. Copies must have one shape here; their bytes are compared before anything is
    converted (`rankxform.job.checks`). Raises UsageError.
    """
    ranks = sorted(indexes)
    if len(ranks) == 1:
        path = shards.paths[ranks[0]]
        if indexes[ranks[0]].is_partial:
            raise UsageError(
                f"{path}: was saved with remove_redundancy and holds one "
                "rank's share of the parameters; name the folder with all ranks"
            )
        siblings = siblings_of(path)
        more = f"{path}: was taken for a complete checkpoint, and {len(siblings) - 1} more rank "
        return WholeStrategy(), [f"{more}folders lie beside it"] if siblings else []
    shapes: dict[str, dict[Shape, int]] = {}
    repeated: set[str] = set()
    for rank in ranks:
        schema = indexes[rank].schema
        for name, shape in zip(schema.names, schema.shapes):
            if name in shapes:
                repeated.add(name)
            shapes.setdefault(name, {}).setdefault(shape, rank)
    sharded = [name for name in repeated if len(shapes[name]) > 1]
    if sharded:
        (a, rank_a), (b, rank_b), *_ = shapes[sharded[0]].items()
        raise UsageError(
            f"{where}: give the strategy; --src-strategy none says that every rank holds whole "
            f"parameters, but {sharded[0]!r} has shape {list(a)} in {shards.paths[rank_a]} and "
            f"{list(b)} in {shards.paths[rank_b]}"
        )
    copies = [name for name in repeated if prod(next(iter(shapes[name]))) > 1]
    gone = sorted(set(range(ranks[-1])).difference(ranks))
    if gone and len(copies) < sum(prod(next(iter(some))) > 1 for some in shapes.values()):
        raise CheckpointError(
            f"{where}: rank {gone[0]} has no file, and would hold parameters of its own as the "
            "other ranks do; bring its folder, or name one complete file"
        )
    told = (
        f"{where}: no strategy; the parameters of {len(ranks)} ranks were taken as whole, each on "
        "one rank as remove_redundancy leaves them"
    )
    if copies:
        told = (
            f"{where}: no strategy; the parameters of {len(ranks)} ranks were taken as whole; a "
            f"conversion compares all copies of {summarize_names(copies, 2)}"
        )
    return WholeStrategy(stage_size=ranks[-1] + 1), [told]
