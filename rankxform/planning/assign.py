"""Who writes what, and who reads what several could read: even loads.

Destination files are assigned to processes by bytes.

One file is written by one process where that balances; otherwise files are split between
parameters. Files that hold the same boxes stand next to each other, so that one process reads
their bytes once.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from itertools import accumulate, pairwise

from rankxform.formats.container import content_bytes, item_size
from rankxform.layout.layout import Layout
from rankxform.values import NamedTuple

from .catalog import Parameter
from .plan import Planner
from .reads import AUTO, READ_METHODS, ReadCounter
from .transfers import Processes, Reach, SliceRange

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
"""Names whose slices are complete already, by destination file."""

NOTHING: Done = {}

Units = Mapping[int, Sequence[Sequence[int]]]
"""By destination file the positions of slices that one process must write."""


class Writers(NamedTuple):
    """Which processes may write which files of a destination."""

    reach: Reach  # of the destination's files: by node those that it may write
    one_node: bool = False  # whether all processes that write one file are of one node

    @classmethod
    def of_one_folder(cls, node: tuple[int, ...], files: Iterable[int]) -> Writers:
        """All processes may write all files; `node` is by process."""
        return cls(Reach.full(node, files))


class Due(NamedTuple):
    """What is to be written, whoever does it."""

    files: Sequence[int]  # of the destination
    complete_names: Done  # tensors that they have already
    writers: Writers


def assignment_of(
    planner: Planner,
    files: Sequence[int],
    writers: Writers,
    complete_names: Done = NOTHING,
    units: Units | None = None,
) -> Assignment:
    """Return for each process the slice ranges of destination `files` that it writes.

    The only place where that is decided, for plans, simulations and conversions. Every slice of
    every file is in exactly one range. units: what is not divided between processes, if files may
    not be cut anywhere.
    """
    if units is not None:
        anywhere = assignment_of(planner, files, writers, complete_names)
        return _in_units(anywhere, units, _sizes(planner, files, complete_names))
    reach = (
        _share_among_nodes(planner, files, writers.reach, complete_names)
        if writers.one_node
        else writers.reach
    )
    if reach.is_full:
        return _assign(planner, files, len(reach.node), complete_names)
    files_by_processes: dict[tuple[int, ...], list[int]] = {}
    for file in files:
        files_by_processes.setdefault(reach.processes_seeing((file,)), []).append(file)
    assignment: Assignment = [[] for _ in reach.node]
    for processes, group_files in files_by_processes.items():
        local = _assign(planner, group_files, len(processes), complete_names)
        for process, slice_ranges in zip(processes, local):
            assignment[process] += slice_ranges
    return assignment


def _assign(
    planner: Planner, files: Sequence[int], processes: int, complete_names: Done
) -> Assignment:
    """Divide files among processes that may all write all of them.

    There are three kinds of assignment, the simplest first: whole files; files split between
    parameters; a run of the parameters in all files to each process, so that each process reads a
    source tensor once for all files. A later kind is used only if it is cheaper by more than
    `_TOLERANCE`.
    """
    ordered = sorted(files, key=lambda file: (planner.replica_key(file), file))
    sizes = _sizes(planner, ordered, complete_names)
    all_slices = [SliceRange(file, 0, len(sizes[file])) for file in ordered]
    if processes == 1:
        return [all_slices]
    cost_of = _Costs(planner, complete_names)
    lower_bound = cost_of(all_slices) / processes
    best: Assignment = []
    lowest = 0.0
    for split in (_whole_files, _split_files, _by_parameter):
        candidate, cost = list[list[SliceRange]](), 0.0
        for slice_ranges in split(planner, ordered, sizes, processes):
            candidate.append(slice_ranges)
            cost = max(cost, cost_of(slice_ranges))
            if best and cost * _TOLERANCE >= lowest:
                break  # what is left of it need not be made
        else:
            best, lowest = candidate, cost
        if lowest <= _TOLERANCE * lower_bound:
            break
    return best


def _in_units(assignment: Assignment, units: Units, sizes: Mapping[int, list[int]]) -> Assignment:
    """Return an assignment that gives each unit to the process that has most of it."""
    ranges_by_file: dict[int, list[tuple[SliceRange, int]]] = {}
    for process, slice_ranges in enumerate(assignment):
        for slice_range in slice_ranges:
            ranges_by_file.setdefault(slice_range.file, []).append((slice_range, process))
    pieces: list[list[tuple[int, int]]] = [[] for _ in assignment]
    for file, ranges in ranges_by_file.items():
        process_of = dict[int, int]()
        for part, process in ranges:
            process_of.update(dict.fromkeys(range(part.first, part.stop), process))
        whole_units = list[tuple[int, int]]()
        for positions in units[file]:
            weights = Counter[int]()
            for position in positions:
                weights[process_of[position]] += sizes[file][position] + 1
            owner = max(sorted(weights), key=weights.__getitem__)
            whole_units += ((position, owner) for position in positions)
        for position, owner in sorted(whole_units):
            pieces[owner].append((file, position))
    return [*map(_slice_ranges, pieces)]


def _share_among_nodes(
    planner: Planner, files: Sequence[int], reach: Reach, complete_names: Done
) -> Reach:
    """Return the reach in which each file is written by one of the nodes that may write it: each
    gets as many bytes as it has processes.

    Files that hold the same boxes stand next to each other.
    """
    files_by_nodes: dict[tuple[int, ...], list[int]] = {}
    for file in files:
        files_by_nodes.setdefault(tuple(sorted(reach.nodes_with((file,)))), []).append(file)
    shared_files: list[set[int]] = [set() for _ in reach.files]
    for nodes, group_files in files_by_nodes.items():
        ordered = sorted(group_files, key=lambda file: (planner.replica_key(file), file))
        weights = [sum(sizes) for sizes in _sizes(planner, ordered, complete_names).values()]
        ends = list(accumulate(len(reach.processes_on(node)) for node in nodes))
        weight_before, total = 0, max(1, sum(weights))
        for file, weight in zip(ordered, weights):
            middle = (weight_before + weight / 2) * ends[-1] / total
            shared_files[nodes[min(bisect_right(ends, middle), len(ends) - 1)]].add(file)
            weight_before += weight
    return Reach(reach.node, tuple(map(frozenset, shared_files)))


def remaining(
    planner: Planner, slice_ranges: Iterable[SliceRange], complete_names: Done
) -> list[SliceRange]:
    """Return what is left of `slice_ranges` without what is done."""
    remaining_ranges = []
    for slice_range in slice_ranges:
        if not complete_names.get(slice_range.file):
            remaining_ranges.append(slice_range)
            continue
        names = list(planner.layouts_of_file(slice_range.file))
        positions = [
            i
            for i in range(slice_range.first, slice_range.stop)
            if names[i] not in complete_names[slice_range.file]
        ]
        remaining_ranges += runs_of(slice_range.file, positions)
    return remaining_ranges


def runs_of(file: int, positions: Iterable[int]) -> list[SliceRange]:
    """Return the slices at ascending `positions` of a file, as runs."""
    return _slice_ranges([(file, i) for i in positions])


def _sizes(planner: Planner, files: Sequence[int], complete_names: Done) -> dict[int, list[int]]:
    """Return what each slice of each file weighs; files with the same slices share a list."""
    shared_sizes: dict[int, list[int]] = {}
    sizes_by_file = {}
    for file in files:
        slices = planner.slices(file)  # one list for all files with the same
        sizes_by_file[file] = shared_sizes.setdefault(id(slices), [])
        if not sizes_by_file[file]:
            sizes_by_file[file] += [content_bytes(p.dtype, s) + _SLICE_COST for p, s in slices]
    for file in set(complete_names).intersection(sizes_by_file):
        names = planner.layouts_of_file(file)
        sizes_by_file[file] = [
            0 if n in complete_names[file] else size for n, size in zip(names, sizes_by_file[file])
        ]
    return sizes_by_file


class _Costs:
    """What one process has to do for parts of files, in bytes read.

    Tensors that lie in equal cells and are wanted alike cost the same, on whatever stage they are;
    they are counted, and the cost of each kind is worked out once for each set of cells. (One that
    two pipeline stages share counts for both.)
    """

    def __init__(self, planner: Planner, complete_names: Done) -> None:
        self._planner, self._done = planner, complete_names
        self._counter = ReadCounter(READ_METHODS[AUTO])
        self._numbers: dict[object, int] = {}  # of the kinds
        self._examples: list[tuple[Parameter, Layout]] = []  # by number, a tensor
        self._kinds: dict[int, list[int]] = {}  # of the tensors of alike files, in their order
        self._counts: dict[tuple[int, int, int], Counter[int]] = {}
        self._known: dict[object, float] = {}

    def __call__(self, slice_ranges: Sequence[SliceRange]) -> float:
        ranges_by_names: dict[int, list[SliceRange]] = {}
        for slice_range in remaining(self._planner, slice_ranges, self._done):
            ranges_by_names.setdefault(
                id(self._planner.layouts_of_file(slice_range.file)), []
            ).append(slice_range)
        return sum(map(self._cost, ranges_by_names.values()))

    def _cost(self, slice_ranges: Sequence[SliceRange]) -> float:
        """Return the cost of parts of files that hold the same tensors."""
        names = id(self._planner.layouts_of_file(slice_ranges[0].file))
        edges = sorted(
            {edge for slice_range in slice_ranges for edge in (slice_range.first, slice_range.stop)}
        )
        total = 0.0
        for a, b in pairwise(edges):
            files = [r.file for r in slice_ranges if r.first <= a and b <= r.stop]
            if files:
                if (names, a, b) not in self._counts:
                    self._counts[names, a, b] = Counter(self._kinds_of(files[0])[a:b])
                total += sum(c * self._unit(k, files) for k, c in self._counts[names, a, b].items())
        return total

    def _kinds_of(self, file: int) -> list[int]:
        names = self._planner.layouts_of_file(file)
        if id(names) not in self._kinds:
            kind_numbers = []
            for name, layout in names.items():
                parameter = self._planner.parameter(name)
                sharding_id = id(parameter.sharding) if self._planner.is_own(parameter) else None
                kind = parameter.grid, parameter.src_dtype, parameter.dtype, layout, sharding_id
                number = self._numbers.setdefault(kind, len(self._examples))
                if number == len(self._examples):
                    self._examples.append((parameter, layout))
                kind_numbers.append(number)
            self._kinds[id(names)] = kind_numbers
        return self._kinds[id(names)]

    def _unit(self, kind: int, files: Sequence[int]) -> float:
        """Return what a tensor of a kind costs in some files."""
        parameter, layout = self._examples[kind]
        cells = tuple(sorted(self._planner.cell(layout, file) for file in files))
        copies = 1
        if self._planner.is_own(parameter):
            copies = len({self._planner.file_for_own_values(parameter, file) for file in files})
        key = kind, cells, copies
        if key not in self._known:
            grid = layout.grid(parameter.shape)
            item, dst_item = item_size(parameter.src_dtype), item_size(parameter.dtype)
            reads = self._counter.of_cells(parameter.grid, grid, tuple(dict.fromkeys(cells)), item)
            written = sum(grid.box(cell).size for cell in cells) * dst_item
            self._known[key] = copies * sum(r.nbytes for r in reads) + _WRITING * written
        return self._known[key]


def _whole_files(
    _: Planner, files: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> Iterator[list[SliceRange]]:
    for run in partition_evenly([sum(sizes[file]) for file in files], processes):
        yield [SliceRange(files[i], 0, len(sizes[files[i]])) for i in run]


def _split_files(
    _: Planner, files: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> Iterator[list[SliceRange]]:
    starts = [0, *accumulate(len(sizes[file]) for file in files)]
    for run in partition_evenly([size for file in files for size in sizes[file]], processes):
        first = bisect_right(starts, run.start) - 1
        stop = bisect_left(starts, run.stop, first)
        yield [
            SliceRange(file, max(run.start - start, 0), min(run.stop, end) - start)
            for file, start, end in zip(files[first:stop], starts[first:], starts[first + 1 :])
            if max(run.start, start) < min(run.stop, end)
        ]


def _by_parameter(
    planner: Planner, files: Sequence[int], sizes: Mapping[int, list[int]], processes: int
) -> Iterator[list[SliceRange]]:
    """Give each process a run of the parameters, in all files of a pipeline stage."""
    files_by_names: dict[tuple[str, ...], list[int]] = {}
    for file in sorted(files):
        files_by_names.setdefault(tuple(planner.layouts_of_file(file)), []).append(file)
    pieces = [(group, i) for names, group in files_by_names.items() for i in range(len(names))]
    weights = [sum(sizes[file][i] for file in group) for group, i in pieces]
    for run in partition_evenly(weights, processes):
        yield _slice_ranges(
            sorted((file, pieces[position][1]) for position in run for file in pieces[position][0])
        )


_SLICE_COST = 4096
"""Bytes that could be moved in the time that a slice takes beside its bytes."""


def _slice_ranges(slices: Iterable[tuple[int, int]]) -> list[SliceRange]:
    """Return (file, position) as runs."""
    runs: list[list[int]] = []
    for file, position in slices:
        if runs and runs[-1][0] == file and runs[-1][2] == position:
            runs[-1][2] += 1
        else:
            runs.append([file, position, position + 1])
    return [SliceRange(*run) for run in runs]


def partition_evenly(weights: Sequence[int], processes: int) -> list[range]:
    """Divide `weights` into a run of neighbours for each process, the largest as small as can be.

    Returns for each process its positions in `weights`; there may be none.

    >>> partition_evenly([5, 5, 5, 5], 3)
    [range(0, 2), range(2, 4), range(4, 4)]
    >>> partition_evenly([9, 1, 1, 1], 2)
    [range(0, 1), range(1, 4)]
    """
    # As machine words, for they may be those of a million slices.
    all_sums, is_large = accumulate(weights, initial=0), sum(weights) >> 63
    sums: Sequence[int] = [*all_sums] if is_large else array("q", all_sums)
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
    runs, start = [], 0
    while start + 1 < len(sums):
        end = bisect_right(sums, sums[start] + limit, start) - 1
        runs.append(range(start, end))
        start = end
    return runs


# -- work that one of several processes may do -----------------------------------------------

_SWEEPS = 100
_STILL = 1e-3
LARGE_READ_BYTES = 16 << 20
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
            previous_shares = assigned[members]
            other_loads = [total[p] - share for p, share in zip(members, previous_shares)]
            after = water_fill(amount, other_loads, [speeds[p] for p in members])
            for p, load, share in zip(members, other_loads, after):
                total[p] = load + share
            change = max(change, *(abs(a - b) for a, b in zip(after, previous_shares)))
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


class WorkAssigner:
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
        remaining_bytes = self._left[members]
        position, run = self._run.get(members, (0, float(LARGE_READ_BYTES)))
        if run + nbytes > LARGE_READ_BYTES or remaining_bytes[position] < nbytes / 2:
            able = [i for i, amount in enumerate(remaining_bytes) if amount >= nbytes / 2]
            parts_done = [self._done[member] / max(self._all[member], 1e-9) for member in members]
            position = min(able or range(len(members)), key=lambda i: (parts_done[i], i))
            run = 0.0
        remaining_bytes[position] -= nbytes
        self._done[members[position]] += nbytes
        self._run[members] = position, run + nbytes
        return members[position]
