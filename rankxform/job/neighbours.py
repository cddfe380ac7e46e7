"""Whether one rank's file that was named holds whole parameters, by another rank's beside it."""

from __future__ import annotations

import re
from pathlib import Path

from rankxform.errors import CheckpointError, RankxformError
from rankxform.layout.strategy import WholeStrategy
from rankxform.source.hints import short_path, siblings_of
from rankxform.source.opening import Source
from rankxform.storage.index import index_file
from rankxform.storage.samples import digest_samples
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
    file_index = source.indexes[file]
    try:
        peer = _neighbour(Path(path))
        if peer is None:
            return
        theirs = index_file(peer)
        is_weight = source.table.states.is_weight
        names = [n for n in file_index.schema.names if n in theirs and is_weight(n)]
        names = [n for n in names if file_index.nbytes(n) > _COUNTER]
        names = sorted(names, key=file_index.nbytes, reverse=True)[:_LOOKED_AT]
        peer_digests = digest_samples(str(peer), theirs, names)
    except (RankxformError, OSError):
        return  # what cannot be read says nothing
    digests = digest_samples(path, file_index, names)
    telling_names = [n for n in names if not (digests[n].constant and peer_digests[n].constant)]
    differing = [n for n in telling_names if digests[n].digest != peer_digests[n].digest]
    if 2 * len(differing) > len(telling_names):
        folder = short_path(peer.parent.parent)
        raise CheckpointError(
            f"is one rank's file, and {peer.parent.name}'s holds other bytes of {differing[0]!r}",
            f"name the folder of all ranks, {folder}, with --src-strategy",
            "--accept contradictions takes the file for a complete checkpoint",
            where=path,
            details=f"so it is with {len(differing)} of {len(telling_names)} tensors looked at",
        )


def _neighbour(path: Path) -> Path | None:
    """Return the file of another rank that goes with a rank folder's, if it is plain which."""
    ranks = siblings_of(path)
    rank_digits = path.resolve().parent.name.removeprefix("rank_")
    for rank in ranks:
        if str(rank) != rank_digits:
            folder = path.resolve().parent.parent / f"rank_{rank}"
            step = _STEP.search(path.name)
            matches = [
                candidate
                for candidate in folder.iterdir()
                if candidate.suffix == path.suffix and candidate.is_file()
                and ((theirs := _STEP.search(candidate.name)) and theirs[0]) == (step and step[0])
            ]  # fmt: skip
            return matches[0] if len(matches) == 1 else None
    return None
