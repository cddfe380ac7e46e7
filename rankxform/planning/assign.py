"""Who writes what, and who reads what several could read: even loads.

Destination files are assigned to processes by bytes.

One file is written by one process where that balances; otherwise files are split between
parameters. Ranks that hold the same boxes stand next to each other, so that one process reads
their bytes once.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from itertools import accumulate, pairwise

from rankxform.formats.dtype import content_bytes, item_size
from rankxform.layout.layout import Layout

from .catalog import Parameter
from .plan import Planner
from .reach import Processes, Reach
from .read_method import AUTO, READ_METHODS
from .reads import ReadCounter
from .transfers import SliceRange

# An assignment costs what its busiest process reads and writes. The simpler one stays unless
# another is cheaper by this: where each process would read most of what the others read (one file
# sharded into eight by columns), every one takes a run of the parameters in all files instead.
_TOLERANCE = 1.08
"""A simpler assignment is kept if it costs at most this many times as much as a better one."""

_WRITING = 1
"""The cost of writing a byte over that of reading one: on a device about the same. (With a warm
page cache writing costs three times as much, but terabytes do not fit into one.)"""

Assignment = list[list[SliceRange]]
"""By process the slices that it writes."""

Done = Mapping[int, Set[str]]
"""Names whose slices are complete already, by destination rank."""

NOTHING: Done = {}


def assign(
    planner: Planner, ranks: Sequence[int], processes: int, done: Done = NOTHING
) -> Assignment:
    """Return for each process the slice ranges of destination files that it serves.

    Every slice of every rank is in exactly one of them. There are three kinds of assignment, the
    simplest first: whole files; files split between parameters; a run of the parameters in all
    files to each process, so that each process reads a source tensor once for all files. A later
    kind is used only if it is cheaper by more than `_TOLERANCE`.
    """
    ordered = sorted(ranks, key=lambda rank: (planner.replica_key(rank), rank))
    sizes = _sizes(planner, ordered, done)
    whole = [SliceRange(rank, 0, len(sizes[rank])) for rank in ordered]
    if processes == 1:
        return [whole]
    cost_of = _Costs(planner, done)
    least = cost_of(whole) / processes
    best: Assignment = []
    lowest = 0.0
    for split in (_whole_files, _split_files, _by_parameter):
        found = split(planner, ordered, sizes, processes)
        cost = max(map(cost_of, found))
        if not best or cost * _TOLERANCE < lowest:
            best, lowest = found, cost
        if lowest <= _TOLERANCE * least:
            break
    return best


def assign_visible(
    planner: Planner, ranks: Sequence[int], reach: Reach, done: Done = NOTHING
) -> Assignment:
    """Return what `assign` does where a process serves only files of ranks that its node has.

    `reach` is of destination files.
    """
    if reach.is_full:
        return assign(planner, ranks, len(reach.node), done)
    alike: dict[tuple[int, ...], list[int]] = {}
    for rank in ranks:
        alike.setdefault(reach.processes_seeing((rank,)), []).append(rank)
    assignment: Assignment = [[] for _ in reach.node]
    for processes, some in alike.items():
        for process, slice_ranges in zip(processes, assign(planner, some, len(processes), done)):
            assignment[process] += slice_ranges
    return assignment


def share_among_nodes(
    planner: Planner, ranks: Sequence[int], node: Sequence[int], done: Done = NOTHING
) -> dict[int, int]:
    """Return for each file the node that writes it: as many bytes as it has processes.

    `node` is by process. Files that hold the same boxes stand next to each other.
    """
    ordered = sorted(ranks, key=lambda rank: (planner.replica_key(rank), rank))
    weights = [sum(one) for one in _sizes(planner, ordered, done).values()]
    ends = list(accumulate(node.count(one) for one in range(max(node) + 1)))
    found, before, total = {}, 0, max(1, sum(weights))
    for rank, weight in zip(ordered, weights):
        middle = (before + weight / 2) * ends[-1] / total
        found[rank] = min(bisect_right(ends, middle), len(ends) - 1)
        before += weight
    return found


def remaining(planner: Planner, slice_ranges: Iterable[SliceRange], done: Done) -> list[SliceRange]:
    """Return what is left of `slice_ranges` without what is done."""
    found = []
    for slice_range in slice_ranges:
        if not done.get(slice_range.rank):
            found.append(slice_range)
            continue
        names = list(planner.names(slice_range.rank))
        left = [
            i
            for i in range(slice_range.first, slice_range.stop)
            if names[i] not in done[slice_range.rank]
        ]
        found += runs_of(slice_range.rank, left)
    return found


def runs_of(rank: int, positions: Iterable[int]) -> list[SliceRange]:
    """Return the slices at ascending `positions` of a rank's file, as runs."""
    return _slice_ranges([(rank, i) for i in positions])


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


class _Costs:
    """What one process has to do for parts of files, in bytes read.

    Tensors that lie in equal cells and are wanted alike cost the same, on whatever stage they are;
    they are counted, and the cost of each kind is worked out once for each set of cells. (One that
    two pipeline stages share counts for both.)
    """

    def __init__(self, planner: Planner, done: Done) -> None:
        self._planner, self._done = planner, done
        self._counter = ReadCounter(READ_METHODS[AUTO])
        self._numbers: dict[object, int] = {}  # of the kinds
        self._examples: list[tuple[Parameter, Layout]] = []  # by number, a tensor
        self._kinds: dict[int, list[int]] = {}  # of the tensors of alike files, in their order
        self._counts: dict[tuple[int, int, int], Counter[int]] = {}
        self._known: dict[object, float] = {}

    def __call__(self, slice_ranges: Sequence[SliceRange]) -> float:
        alike: dict[int, list[SliceRange]] = {}
        for one in remaining(self._planner, slice_ranges, self._done):
            alike.setdefault(id(self._planner.names(one.rank)), []).append(one)
        return sum(map(self._cost, alike.values()))

    def _cost(self, some: Sequence[SliceRange]) -> float:
        """Return the cost of parts of files that hold the same tensors."""
        names = id(self._planner.names(some[0].rank))
        edges = sorted({edge for one in some for edge in (one.first, one.stop)})
        total = 0.0
        for a, b in pairwise(edges):
            files = [one.rank for one in some if one.first <= a and b <= one.stop]
            if files:
                if (names, a, b) not in self._counts:
                    self._counts[names, a, b] = Counter(self._kinds_of(files[0])[a:b])
                total += sum(
                    count * self._unit(kind, files)
                    for kind, count in self._counts[names, a, b].items()
                )
        return total

    def _kinds_of(self, file: int) -> list[int]:
        names = self._planner.names(file)
        if id(names) not in self._kinds:
            found = []
            for name, layout in names.items():
                parameter = self._planner.parameter(name)
                own = id(parameter.sharding) if self._planner.is_own(parameter) else None
                kind = parameter.grid, parameter.src_dtype, parameter.dtype, layout, own
                number = self._numbers.setdefault(kind, len(self._examples))
                if number == len(self._examples):
                    self._examples.append((parameter, layout))
                found.append(number)
            self._kinds[id(names)] = found
        return self._kinds[id(names)]

    def _unit(self, kind: int, files: Sequence[int]) -> float:
        """Return what a tensor of a kind costs in some files."""
        parameter, layout = self._examples[kind]
        cells = tuple(sorted(self._planner.cell(layout, file) for file in files))
        copies = 1
        if self._planner.is_own(parameter):
            copies = len({self._planner.congruent_file(parameter, file) for file in files})
        key = kind, cells, copies
        if key not in self._known:
            grid = layout.grid(parameter.shape)
            item, dst_item = item_size(parameter.src_dtype), item_size(parameter.dtype)
            reads = self._counter.of_cells(parameter.grid, grid, tuple(dict.fromkeys(cells)), item)
            written = sum(grid.box(cell).size for cell in cells) * dst_item
            self._known[key] = copies * sum(r.nbytes for r in reads) + _WRITING * written
        return self._known[key]


def _whole_files(
    _: Planner, ranks: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> Assignment:
    runs = partition_evenly([sum(sizes[rank]) for rank in ranks], processes)
    return [[SliceRange(ranks[i], 0, len(sizes[ranks[i]])) for i in run] for run in runs]


def _split_files(
    _: Planner, ranks: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> Assignment:
    starts = [0, *accumulate(len(sizes[rank]) for rank in ranks)]
    runs = partition_evenly([size for rank in ranks for size in sizes[rank]], processes)
    found: Assignment = []
    for run in runs:
        first = bisect_right(starts, run.start) - 1
        last = bisect_left(starts, run.stop, first)
        found.append(
            [
                SliceRange(rank, max(run.start - at, 0), min(run.stop, end) - at)
                for rank, at, end in zip(ranks[first:last], starts[first:], starts[first + 1 :])
                if max(run.start, at) < min(run.stop, end)
            ]
        )
    return found


def _by_parameter(
    planner: Planner, ranks: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> Assignment:
    """Give each process a run of the parameters, in all files of a pipeline stage."""
    alike: dict[tuple[str, ...], list[int]] = {}
    for rank in sorted(ranks):
        alike.setdefault(tuple(planner.names(rank)), []).append(rank)
    pieces = [(group, i) for names, group in alike.items() for i in range(len(names))]
    weights = [sum(sizes[rank][i] for rank in group) for group, i in pieces]
    return [
        _slice_ranges(sorted((rank, pieces[at][1]) for at in run for rank in pieces[at][0]))
        for run in partition_evenly(weights, processes)
    ]


_SLICE_COST = 4096
"""Bytes that could be moved in the time that a slice takes beside its bytes."""


def _slice_ranges(pieces: Sequence[tuple[int, int]]) -> list[SliceRange]:
    found: list[SliceRange] = []
    for rank, i in pieces:
        if found and (found[-1].rank, found[-1].stop) == (rank, i):
            found[-1] = SliceRange(rank, found[-1].first, i + 1)
        else:
            found.append(SliceRange(rank, i, i + 1))
    return found


def partition_evenly(weights: Sequence[int], processes: int) -> list[range]:
    """Divide `weights` into a run of neighbours for each process, the largest as small as can be.

    Returns for each process its positions in `weights`; there may be none.

    >>> partition_evenly([5, 5, 5, 5], 3)
    [range(0, 2), range(2, 4), range(4, 4)]
    >>> partition_evenly([9, 1, 1, 1], 2)
    [range(0, 1), range(1, 4)]
    """
    sums = [0, *accumulate(weights)]
    low, high = max(weights, default=0), sums[-1]
    while low < high:
        limit = (low + high) // 2
        if len(_runs_within(sums, limit)) <= processes:
            high = limit
        else:
            low = limit + 1
    runs = _runs_within(sums, low)
    return runs + [range(len(weights), len(weights))] * (processes - len(runs))


def _runs_within(sums: Sequence[int], limit: int) -> list[range]:
    """Return the longest runs whose weights add up to no more than `limit`, one after another.

    `sums` are those of the weights before each, and of all; none weighs more than `limit`.
    """
    runs, at = [], 0
    while at + 1 < len(sums):
        end = bisect_right(sums, sums[at] + limit, at) - 1
        runs.append(range(at, end))
        at = end
    return runs


# -- work that one of several processes may do -----------------------------------------------

_SWEEPS = 100
_STILL = 1e-3
RUN = 16 << 20
"""Bytes of small pieces that one process reads in a row."""


def balance(
    amounts: Mapping[Processes, float], speeds: Sequence[float], loads: Sequence[float] = ()
) -> dict[Processes, list[float]]:
    """Return how much of the work of each class of processes each of them does.

    amounts: in bytes, by the processes that could do the work; speeds: by process, in bytes a
    second; loads: what each process has to do anyway, in bytes. Each class in turn is shared by
    water-filling among its processes, until nothing changes. That is coordinate descent on the sum
    of load squared over speed, a convex function over a product of simplices, so it ends at its
    minimum, where the longest time is as short as it can be. (With work in pieces, a process gets
    at most half a piece of each class more than here.)

    >>> balance({(0,): 6.0, (0, 1): 10.0}, (1.0, 1.0))
    {(0,): [6.0], (0, 1): [2.0, 8.0]}
    """
    total = list(loads) or [0.0] * len(speeds)
    assigned = {}
    for members, amount in amounts.items():  # begin evenly, so that what is alike ends alike
        width = sum(speeds[p] for p in members)
        assigned[members] = [amount * speeds[p] / width for p in members]
        for process, part in zip(members, assigned[members]):
            total[process] += part
    for _ in range(_SWEEPS):
        change = 0.0
        for members, amount in amounts.items():
            before = assigned[members]
            others = [total[p] - own for p, own in zip(members, before)]
            after = water_fill(amount, others, [speeds[p] for p in members])
            for p, other, own in zip(members, others, after):
                total[p] = other + own
            change = max(change, *(abs(a - b) for a, b in zip(after, before)))
            assigned[members] = after
        if change <= _STILL * max(total):
            break
    return assigned


def water_fill(amount: float, loads: Sequence[float], speeds: Sequence[float]) -> list[float]:
    """Share `amount` among processes with `loads` so that all that get some finish at once."""
    order = sorted(range(len(loads)), key=lambda i: loads[i] / speeds[i])
    width, filled, height = 0.0, amount, 0.0
    for n, i in enumerate(order):
        width += speeds[i]
        filled += loads[i]
        height = filled / width
        if n + 1 == len(order) or height <= loads[order[n + 1]] / speeds[order[n + 1]]:
            break
    return [max(0.0, height * v - load) for load, v in zip(loads, speeds)]


class Assigner:
    """Assigns pieces of work in order, so that all processes advance at the same rate, and gives
    small pieces in runs, because the system's read-ahead over skipped pieces would be wasted."""

    def __init__(self, assigned: Mapping[Processes, Sequence[float]]) -> None:
        """`assigned` is what `balance` found: how much each process does of each class."""
        self._left = {members: list(assignment) for members, assignment in assigned.items()}
        self._all: dict[int, float] = {}
        for members, assignment in assigned.items():
            for process, share in zip(members, assignment):
                self._all[process] = self._all.get(process, 0.0) + share
        self._done = dict.fromkeys(self._all, 0.0)
        self._run: dict[Processes, tuple[int, float]] = {}

    def next(self, members: Processes, nbytes: float) -> int:
        """Return the process that does the next piece of a class."""
        left = self._left[members]
        at, run = self._run.get(members, (0, float(RUN)))
        if run + nbytes > RUN or left[at] < nbytes / 2:
            able = [i for i, rest in enumerate(left) if rest >= nbytes / 2]
            at, run = min(able or range(len(left)), key=lambda i: (self._part(members[i]), i)), 0.0
        left[at] -= nbytes
        self._done[members[at]] += nbytes
        self._run[members] = at, run + nbytes
        return members[at]

    def _part(self, process: int) -> float:
        """Return which part of its work a process has been assigned so far."""
        return self._done[process] / max(self._all[process], 1e-9)
