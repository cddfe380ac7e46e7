"""Sources without a strategy: complete files, and parameters that remove_redundancy distributed.

rankxform never assumes that every rank holds whole parameters: the stages of a pipeline hold
different names too, and shards may hold the same ones. The user must say so, and it is checked.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.base import Index
from rankxform.geometry.box import Shape
from rankxform.layout.names import summarize_names
from rankxform.layout.strategy import Strategy, WholeStrategy


def infer_whole_strategy(
    paths: Mapping[int, str], indexes: Mapping[int, Index], where: str, siblings: int
) -> tuple[Strategy, list[str]]:
    """Return the strategy of a source without one, and notices.

    A data-parallel job leaves complete files, or with remove_redundancy each parameter, whole, on
    one of its ranks. Copies must have one shape here; their bytes are compared before anything is
    converted (`rankxform.job.evidence`). siblings: how many rank folders there are, if one
    file in one of them was named. Raises UsageError.
    """
    ranks = sorted(indexes)
    if len(ranks) == 1:
        path = paths[ranks[0]]
        if indexes[ranks[0]].is_partial:
            raise UsageError(
                "was saved with remove_redundancy and holds one rank's share of the parameters",
                "name the folder with all ranks",
                where=path,
            )
        notice_start = f"{path}: was taken for a complete checkpoint, and {siblings - 1} more rank "
        return WholeStrategy(), [f"{notice_start}folders lie beside it"] if siblings else []
    shapes: dict[str, dict[Shape, int]] = {}
    repeated: dict[str, None] = {}  # in the files' order, so that messages are the same each time
    for rank in ranks:
        schema = indexes[rank].schema
        for name, shape in zip(schema.names, schema.shapes):
            if name in shapes:
                repeated[name] = None
            shapes.setdefault(name, {}).setdefault(shape, rank)
    sharded = [name for name in repeated if len(shapes[name]) > 1]
    if sharded:
        (a, rank_a), (b, rank_b), *_ = shapes[sharded[0]].items()
        raise UsageError(
            f"{sharded[0]!r} has shape {list(a)} in {paths[rank_a]} and {list(b)} in "
            f"{paths[rank_b]}, and --src-strategy none says that it is whole",
            "--src-strategy FILE of the job that wrote them",
            where=where,
        )
    copies = [name for name in repeated if prod(next(iter(shapes[name]))) > 1]
    missing_ranks = sorted(set(range(ranks[-1])).difference(ranks))
    if missing_ranks and len(copies) < sum(prod(next(iter(s))) > 1 for s in shapes.values()):
        raise CheckpointError(
            f"rank {missing_ranks[0]} has no file, and would hold parameters of its own as the "
            "other ranks do",
            "bring its folder",
            "name one complete file",
            where=where,
        )
    notice = (
        f"{where}: no strategy; the parameters of {len(ranks)} ranks were taken as whole, each on "
        "one rank as remove_redundancy leaves them"
    )
    if copies:
        notice = (
            f"{where}: no strategy; the parameters of {len(ranks)} ranks were taken as whole; a "
            f"conversion compares all copies of {summarize_names(copies, 2)}"
        )
    return WholeStrategy(stage_size=ranks[-1] + 1), [notice]
