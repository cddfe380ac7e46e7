"""Which of equal source copies is read."""

from __future__ import annotations

from collections.abc import Iterable

from rankxform.formats.dtype import content_bytes
from rankxform.layout.layout import Layout

from .catalog import Parameter


def replicas_to_read(parameters: Iterable[Parameter]) -> dict[str, int]:
    """Tell for each parameter which of its equal copies is read.

    The parameters of one stage and layout are taken in file order and divided into as many runs of
    equal bytes as there are copies, so that each file is read in long stretches: what is skipped
    in between would be read ahead by the system for nothing.
    """
    kinds: dict[tuple[int, Layout], list[Parameter]] = {}
    for p in parameters:
        kinds.setdefault((p.sharding.first_rank, p.layout), []).append(p)
    replicas = {}
    for (_, layout), alike in kinds.items():
        sizes = [content_bytes(p.src_dtype, p.shape) + 1 for p in alike]
        total, before = sum(sizes), 0
        copies = layout.free_ranks // layout.opt_shards
        for p, nbytes in zip(alike, sizes):
            replicas[p.name] = (2 * before + nbytes) * copies // (2 * total)
            before += nbytes
    return replicas
