"""Who writes what: destination files dealt to processes by bytes.

One file is written by one process where that balances; otherwise files are cut between
parameters. Ranks that hold the same boxes stand next to each other, so that one process reads
their bytes once.
"""

from __future__ import annotations

from collections.abc import Sequence

from rankxform.formats.dtype import content_bytes

from .plan import Planner, Portion

_TOLERANCE = 1.08
"""Whole files are kept while the largest share is within this of the mean."""


def share(planner: Planner, ranks: Sequence[int], processes: int) -> list[list[Portion]]:
    """Return for each process the portions of destination files that it writes.

    Every slice of every rank is in exactly one portion, and every file's first slice in the
    portion of the process that is to create and finish it.
    """
    ordered = sorted(ranks, key=lambda rank: (planner.likeness(rank), rank))
    sizes = {rank: _sizes(planner, rank) for rank in ordered}
    weights = [sum(sizes[rank]) for rank in ordered]
    runs = share_out(weights, processes)
    largest = max(sum(weights[i] for i in run) for run in runs)
    if largest * processes <= _TOLERANCE * sum(weights):
        return [[Portion(ordered[i], 0, len(sizes[ordered[i]])) for i in run] for run in runs]
    pieces = [(rank, i) for rank in ordered for i in range(len(sizes[rank]))]
    runs = share_out([sizes[rank][i] for rank, i in pieces], processes)
    return [_portions([pieces[i] for i in run]) for run in runs]


def _sizes(planner: Planner, rank: int) -> list[int]:
    """Return the weight of every slice of a rank's file: its bytes, and a little for itself."""
    return [content_bytes(p.dtype, shape) + _SLICE_COST for p, shape in planner.slices(rank)]


_SLICE_COST = 4096
"""Bytes that could be moved in the time that a slice takes beside its bytes."""


def _portions(pieces: Sequence[tuple[int, int]]) -> list[Portion]:
    found: list[Portion] = []
    for rank, i in pieces:
        if found and found[-1].rank == rank:
            found[-1] = Portion(rank, found[-1].first, i + 1)
        else:
            found.append(Portion(rank, i, i + 1))
    return found


def share_out(weights: Sequence[int], processes: int) -> list[list[int]]:
    """Cut `weights` into a run of neighbours for each process, the largest as small as can be.

    Returns for each process its positions in `weights`; there may be none.

    >>> share_out([5, 5, 5, 5], 3)
    [[0, 1], [2, 3], []]
    >>> share_out([9, 1, 1, 1], 2)
    [[0], [1, 2, 3]]
    """
    low, high = max(weights, default=0), sum(weights)
    while low < high:
        limit = (low + high) // 2
        if _runs_within(weights, limit) <= processes:
            high = limit
        else:
            low = limit + 1
    runs: list[list[int]] = [[] for _ in range(processes)]
    at, total = 0, 0
    for position, weight in enumerate(weights):
        if total + weight > low:
            at, total = at + 1, 0
        runs[at].append(position)
        total += weight
    return runs


def _runs_within(weights: Sequence[int], limit: int) -> int:
    runs, total = 0, limit
    for weight in weights:
        if total + weight > limit:
            runs, total = runs + 1, 0
        total += weight
    return runs
