"""Whether one rank's file that was named holds whole parameters, by another rank's beside it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from rankxform.errors import CheckpointError, RankxformError
from rankxform.layout.strategy import WholeStrategy
from rankxform.ops.weights import is_state
from rankxform.source.hints import shortly, siblings_of
from rankxform.source.opening import Source
from rankxform.storage.index import index
from rankxform.storage.samples import sample
from rankxform.storage.store import is_path

_LOOKED_AT = 32
_STEP = re.compile(r"-\d+_\d+(?=\.\w+$)")


def check_neighbour(source: Source) -> None:
    """Refuse one rank's file that was taken as complete, and of which another rank's differs.

    Ranks of a data-parallel job hold the same, but for statistics of their own. Raises
    CheckpointError.
    """
    if len(source.paths) != 1 or not isinstance(source.table.strategy, WholeStrategy):
        return
    [(file, path)] = source.paths.items()
    other, own = None, source.indexes[file]
    with suppress(RankxformError, OSError):  # what cannot be read says nothing
        other = _neighbour(Path(path)) if is_path(path) else None
        theirs = index(other) if other is not None else own
    if other is None:
        return
    names = [n for n in own.schema.names if n in theirs and not is_state(n) and own.nbytes(n) > 8]
    names = sorted(names, key=own.nbytes, reverse=True)[:_LOOKED_AT]
    here = sample(path, own, names, _quiet)
    try:
        there = sample(str(other), theirs, names, _quiet)
    except RankxformError:
        return
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


def _quiet(nbytes: int) -> None:
    """Report no progress: some hundred kilobytes are read."""
