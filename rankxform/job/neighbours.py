"""Whether one rank's file that was named holds whole parameters, by another rank's beside it."""

from __future__ import annotations

import re
from pathlib import Path

from rankxform.errors import CheckpointError, RankxformError
from rankxform.layout.strategy import WholeStrategy
from rankxform.source.hints import shortly, siblings_of
from rankxform.source.opening import Source
from rankxform.storage.index import index
from rankxform.storage.samples import sample
from rankxform.storage.store import is_path

_LOOKED_AT = 32
_COUNTER = 8
"""Bytes of a counter, which may be a rank's own."""
_STEP = re.compile(r"-\d+_\d+(?=\.\w+$)")


def check_neighbour(source: Source) -> None:
    """Refuse one rank's file that was taken as complete, and of which another rank's differs.

    Ranks of a data-parallel job hold the same, but for statistics of their own. Raises
    CheckpointError.
    """
    [(file, path)] = source.paths.items()
    if not isinstance(source.table.strategy, WholeStrategy) or not is_path(path):
        return
    own = source.indexes[file]
    try:
        other = _neighbour(Path(path))
        if other is None:
            return
        theirs = index(other)
        is_weight = source.table.states.is_weight
        names = [n for n in own.schema.names if n in theirs and is_weight(n)]
        names = [n for n in names if own.nbytes(n) > _COUNTER]
        names = sorted(names, key=own.nbytes, reverse=True)[:_LOOKED_AT]
        there = sample(str(other), theirs, names)
    except (RankxformError, OSError):
        return  # what cannot be read says nothing
    here = sample(path, own, names)
    told = [n for n in names if not (here[n].constant and there[n].constant)]
    differing = [n for n in told if here[n].digest != there[n].digest]
    if 2 * len(differing) > len(told):
        folder = shortly(other.parent.parent)
        raise CheckpointError(
            f"is one rank's file, and {other.parent.name}'s holds other bytes of {differing[0]!r}",
            f"name the folder of all ranks, {folder}, with --src-strategy",
            "--accept contradictions takes the file for a complete checkpoint",
            where=path,
            details=f"so it is with {len(differing)} of {len(told)} tensors looked at",
        )


def _neighbour(path: Path) -> Path | None:
    """Return the file of another rank that goes with a rank folder's, if it is plain which."""
    ranks = siblings_of(path)
    own = path.resolve().parent.name.removeprefix("rank_")
    for rank in ranks:
        if str(rank) != own:
            folder = path.resolve().parent.parent / f"rank_{rank}"
            step = _STEP.search(path.name)
            found = [
                one
                for one in folder.iterdir()
                if one.suffix == path.suffix and one.is_file()
                and ((theirs := _STEP.search(one.name)) and theirs[0]) == (step and step[0])
            ]  # fmt: skip
            return found[0] if len(found) == 1 else None
    return None
