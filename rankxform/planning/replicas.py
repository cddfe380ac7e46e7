"""Which of equal source copies is read."""

from __future__ import annotations

from collections.abc import Iterable

from rankxform.formats.dtype import content_bytes

from .catalog import Parameter
from .sharding import Holders, Sharding


def replicas_to_read(parameters: Iterable[Parameter]) -> dict[str, int]:
    """Tell for each parameter which of its equal copies is read.

    The parameters that lie in the same files are taken in file order and divided into as many runs
    of equal bytes as there are copies, so that each file is read in long stretches: what is skipped
    in between would be read ahead by the system for nothing.
    """
    # Runs need no search and are even. (Changing files with every parameter read twice as much from
    # a cold disk.)
    kinds: dict[Holders, list[Parameter]] = {}
    for p in parameters:
        assert isinstance(p.sharding, Sharding), "a tensor of the catalog lies in the files"
        kinds.setdefault(p.sharding.placement, []).append(p)
    replicas = {}
    for placement, placed in kinds.items():
        sizes = [content_bytes(p.src_dtype, p.shape) + 1 for p in placed]
        total, bytes_before = sum(sizes), 0
        for p, nbytes in zip(placed, sizes):
            replicas[p.name] = (2 * bytes_before + nbytes) * placement.copies // (2 * total)
            bytes_before += nbytes
    return replicas
