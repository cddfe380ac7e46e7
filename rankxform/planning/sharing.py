"""Who writes what: destination files dealt to processes by bytes.

One file is written by one process where that balances; otherwise files are cut between
parameters. Ranks that hold the same boxes stand next to each other, so that one process reads
their bytes once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rankxform.formats.dtype import content_bytes

from .moves import Portion, bytes_to_read
from .plan import Planner

_TOLERANCE = 1.08
"""Whole files are kept while the largest share is within this of the mean."""

_REPEATED = 1.5
"""Parameters are dealt instead of files where bytes would be read more often than this."""


def share(planner: Planner, ranks: Sequence[int], processes: int) -> list[list[Portion]]:
    """Return for each process the portions of destination files that it writes.

    Every slice of every rank is in exactly one portion. Three ways, the first that serves: whole
    files; files cut where that balances; the same parameters of all files to each process, where
    otherwise most bytes would be read by several processes.
    """
    ordered = sorted(ranks, key=lambda rank: (planner.likeness(rank), rank))
    alike: dict[int, list[int]] = {}
    sizes = {}
    for rank in ordered:
        slices = planner.slices(rank)  # one list for all ranks with the same
        sizes[rank] = alike.setdefault(id(slices), [])
        if not sizes[rank]:
            sizes[rank] += [content_bytes(p.dtype, shape) + _SLICE_COST for p, shape in slices]
    weights = [sum(sizes[rank]) for rank in ordered]
    runs = share_out(weights, processes)
    shares = [[Portion(ordered[i], 0, len(sizes[ordered[i]])) for i in run] for run in runs]
    largest = max(sum(weights[i] for i in run) for run in runs)
    if largest * processes > _TOLERANCE * sum(weights):
        pieces = [(rank, i) for rank in ordered for i in range(len(sizes[rank]))]
        runs = share_out([sizes[rank][i] for rank, i in pieces], processes)
        shares = [_portions([pieces[i] for i in run]) for run in runs]
    if processes > 1 and _times_read(planner, ranks, shares) > _REPEATED:
        return _by_parameter(planner, ranks, sizes, processes)
    return shares


def _times_read(planner: Planner, ranks: Sequence[int], shares: list[list[Portion]]) -> float:
    """Return how often the average byte is read if each process reads for itself."""
    whole = [Portion(rank, 0, len(planner.names(rank))) for rank in ranks]
    least = bytes_to_read(planner.moves(whole))
    return sum(bytes_to_read(planner.moves(portions)) for portions in shares) / max(1, least)


def _by_parameter(
    planner: Planner, ranks: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> list[list[Portion]]:
    """Give each process a run of the parameters, in all files of a pipeline stage."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in ranks:
        alike.setdefault(tuple(planner.names(rank)), []).append(rank)
    pieces = [(group, i) for names, group in alike.items() for i in range(len(names))]
    weights = [sum(sizes[rank][i] for rank in group) for group, i in pieces]
    return [
        _portions(sorted((rank, pieces[at][1]) for at in run for rank in pieces[at][0]))
        for run in share_out(weights, processes)
    ]


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
