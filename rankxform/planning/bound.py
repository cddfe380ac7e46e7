"""What no division of a conversion's work could be faster than, by the same costs.

It is compared with what a plan takes: each needed byte is read once, each slice written once. Work
that only one node can do, because the files are its own, is that node's; all other work is shared
evenly among all processes.
"""

from __future__ import annotations

from rankxform.formats.container import item_size
from rankxform.geometry.pieces import PieceTiling
from rankxform.values import NamedTuple

from .assign import Assignment, Writers
from .plan import Planner, TransferGroup, transfer_groups
from .reads import Costs
from .simulate import Workload
from .transfers import Reach


class Bound(NamedTuple):
    """Seconds from the finished plan to the last file, at least, and what is busy for so long."""

    seconds: float
    resource: str


def bound_of(
    planner: Planner, assignment: Assignment, reach: Reach, writers: Writers, costs: Costs
) -> Bound:
    """Return the bound for the files that `assignment` makes, by process.

    reach: of the source's files. Bytes are counted as a simulation counts them, without latencies.
    Raises CheckpointError if no file holds a slice that is needed.
    """
    node, of_all = reach.node, Workload()
    by_node = [Workload() for _ in reach.files]  # whichever of its processes does it
    is_fixed = not writers.reach.is_full  # on which node a file is written
    for transfers in transfer_groups(planner, assignment):
        planner.require_holders(transfers)
        item = item_size(transfers.first.dtype) * len(transfers.parameters)
        for cell, files_by_process in transfers.receivers.items():
            nbytes = transfers.grid.box(cell).size * item
            for process, files in files_by_process.items():
                by_node[node[process]].written += nbytes * len(files)
        _add_reads(transfers, reach, is_fixed, by_node, of_all)
    of_all.written = sum(work.written for work in by_node)
    bounds = [Bound(of_all.seconds(costs) / len(assignment), "all processes")]
    for number, work in enumerate(by_node):
        if not is_fixed:
            work.written = 0
        seconds = work.seconds(costs) / len(reach.processes_on(number))
        bounds.append(Bound(seconds, f"files of node {number}"))
        crossing = max(work.received, work.sent) / costs.network
        bounds.append(Bound(crossing, f"network of node {number}"))
    return max(bounds, key=lambda bound: bound.seconds)


def _add_reads(
    transfers: TransferGroup,
    reach: Reach,
    is_fixed: bool,
    by_node: list[Workload],
    of_all: Workload,
) -> None:
    """Add what must be read, at least what one process needs of each source slice, and what must
    cross between nodes.

    is_fixed: whether no other node could write what a process writes.
    """
    item = transfers.item * len(transfers.parameters)
    for cell, elements_by_process in transfers.needs.items():
        if isinstance(transfers.src, PieceTiling) and transfers.src.piece(cell).is_broadcast:
            continue  # a few elements are read for many
        nbytes = item * max(elements_by_process.values())
        of_all.read += nbytes
        if reach.is_full:
            continue
        holders = reach.nodes_with(transfers.files[cell])
        far_elements = dict[int, int]()
        for process, elements in elements_by_process.items() if is_fixed else ():
            node = reach.node[process]
            if node not in holders:
                far_elements[node] = max(elements, far_elements.get(node, 0))
        for node, elements in far_elements.items():
            by_node[node].received += elements * item
        if len(holders) == 1:
            (holder,) = holders
            by_node[holder].read += nbytes
            by_node[holder].sent += item * max(far_elements.values(), default=0)
