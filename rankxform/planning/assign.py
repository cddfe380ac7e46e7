"""Who writes what: destination files dealt to processes by bytes.

One file is written by one process where that balances; otherwise files are cut between
parameters. Ranks that hold the same boxes stand next to each other, so that one process reads
their bytes once.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set

from rankxform.formats.dtype import content_bytes

from .plan import Planner
from .transfers import Portion, bytes_to_read, bytes_to_write
from .visibility import Sight

_TOLERANCE = 1.08
"""A simpler way to share is kept while it costs no more than this over a better one."""

_WRITING = 1
"""What it costs to write a byte, over what it costs to read one: on a device about the same.
(From a warm page cache writing costs three times as much; who has terabytes has none.)"""

Shares = list[list[Portion]]
Done = Mapping[int, Set[str]]
"""Names whose slices are complete already, by destination rank."""

NOTHING: Done = {}


def share(planner: Planner, ranks: Sequence[int], processes: int, done: Done = NOTHING) -> Shares:
    """Return for each process the portions of destination files that it serves.

    Every slice of every rank is in exactly one portion. Three ways, from the simplest: whole
    files; files cut between parameters; the same parameters of all files to each process, so
    that what all of them are cut from is read once. The first is taken that no other betters.
    """
    ordered = sorted(ranks, key=lambda rank: (planner.likeness(rank), rank))
    sizes = _sizes(planner, ordered, done)
    whole = [Portion(rank, 0, len(sizes[rank])) for rank in ordered]
    if processes == 1:
        return [whole]
    least = _cost(planner, whole, done) / processes
    best: Shares = []
    lowest = 0.0
    for way in (_whole_files, _cut_files, _by_parameter):
        found = way(planner, ordered, sizes, processes)
        cost = max(_cost(planner, portions, done) for portions in found)
        if not best or cost * _TOLERANCE < lowest:
            best, lowest = found, cost
        if lowest <= _TOLERANCE * least:
            break
    return best


def share_seen(
    planner: Planner, ranks: Sequence[int], sight: Sight, done: Done = NOTHING
) -> Shares:
    """Return what `share` does where a process serves only files of ranks that its node has.

    `sight` is of destination files.
    """
    if sight.is_full:
        return share(planner, ranks, len(sight.node), done)
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        alike.setdefault(sight.seers((rank,)), []).append(rank)
    shares: Shares = [[] for _ in sight.node]
    for processes, some in alike.items():
        for process, portions in zip(processes, share(planner, some, len(processes), done)):
            shares[process] += portions
    return shares


def remaining(planner: Planner, portions: Iterable[Portion], done: Done) -> list[Portion]:
    """Return what is left of `portions` without what is done."""
    found = []
    for portion in portions:
        if not done.get(portion.rank):
            found.append(portion)
            continue
        names = list(planner.names(portion.rank))
        left = [i for i in range(portion.first, portion.stop) if names[i] not in done[portion.rank]]
        found += runs_of(portion.rank, left)
    return found


def runs_of(rank: int, positions: Iterable[int]) -> list[Portion]:
    """Return the slices at ascending `positions` of a rank's file, as runs."""
    return _portions([(rank, i) for i in positions])


def _sizes(planner: Planner, ranks: Sequence[int], done: Done) -> dict[int, list[int]]:
    """Return what each slice of each rank weighs; ranks with the same slices share a list."""
    alike: dict[int, list[int]] = {}
    found = {}
    for rank in ranks:
        slices = planner.slices(rank)  # one list for all ranks with the same
        found[rank] = alike.setdefault(id(slices), [])
        if not found[rank]:
            found[rank] += [content_bytes(p.dtype, shape) + _SLICE_COST for p, shape in slices]
    for rank in set(done).intersection(found):
        names = planner.names(rank)
        found[rank] = [0 if n in done[rank] else size for n, size in zip(names, found[rank])]
    return found


def _cost(planner: Planner, portions: Sequence[Portion], done: Done) -> float:
    """Return what one process has to do for `portions`, in bytes read."""
    moves = planner.moves(remaining(planner, portions, done))
    return bytes_to_read(moves) + _WRITING * bytes_to_write(moves)


def _whole_files(
    _: Planner, ranks: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> Shares:
    runs = share_out([sum(sizes[rank]) for rank in ranks], processes)
    return [[Portion(ranks[i], 0, len(sizes[ranks[i]])) for i in run] for run in runs]


def _cut_files(
    _: Planner, ranks: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> Shares:
    pieces = [(rank, i) for rank in ranks for i in range(len(sizes[rank]))]
    runs = share_out([sizes[rank][i] for rank, i in pieces], processes)
    return [_portions([pieces[i] for i in run]) for run in runs]


def _by_parameter(
    planner: Planner, ranks: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> Shares:
    """Give each process a run of the parameters, in all files of a pipeline stage."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(ranks):
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
        if found and (found[-1].rank, found[-1].stop) == (rank, i):
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
