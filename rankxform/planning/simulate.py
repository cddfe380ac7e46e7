"""What each of any number of processes would have to do, worked out without one of them.

Reads, letters and bytes follow from the plan; times follow from bandwidths that are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, fields

from rankxform.formats.dtype import item_size
from rankxform.geometry.box import hulls
from rankxform.geometry.grid import Cell

from .costs import Bandwidth
from .moves import Move, Portion, bytes_to_read, bytes_to_write, read_of
from .plan import Planner
from .posts import Post, posts
from .sight import Sight
from .trades import Trade, deal

_LETTER = 2 << 20
_SECONDS_A_SLICE = 8e-6
_SECONDS_A_LETTER = 30e-6


@dataclass
class Load:
    """What one process does, in bytes: read from files, sent to other nodes and to processes of its
    own, received, written; and in numbers: letters, at least, and slices."""

    read: int = 0
    sent: int = 0
    passed: int = 0
    received: int = 0
    written: int = 0
    letters: int = 0
    slices: int = 0

    def add(self, other: Load, times: int) -> None:
        """Take on what `other` is, so many times."""
        for field in fields(self):
            name = field.name
            setattr(self, name, getattr(self, name) + times * getattr(other, name))


@dataclass(frozen=True)
class Simulation:
    """loads: of each process; seconds: each would take by itself; network: each node's, to send or
    receive all that it must. `exchanged`: bytes of parameters that are traded."""

    loads: tuple[Load, ...]
    seconds: tuple[float, ...]
    network: tuple[float, ...]
    exchanged: int

    @property
    def total(self) -> float:
        """The seconds from the finished plan to the last file: letters travel while others work."""
        return max(*self.seconds, *self.network)


def simulate(
    planner: Planner,
    shares: Sequence[Sequence[Portion]],
    sight: Sight,
    bandwidth: Bandwidth,
    *,
    always: bool,
) -> Simulation:
    """Work out what every process does for ``shares``, by process, if `sight` is who sees what."""
    processes = len(shares)
    costs = bandwidth.costs(processes) if sight.is_full and len(sight.seen) > 1 else None
    trades = deal(planner, shares, sight, always, None, costs) if processes > 1 else []
    loads = [Load() for _ in shares]
    traded = _trade(trades, loads)
    for process, portions in enumerate(shares):
        moves = planner.moves(portions, None if sight.is_full else sight.of(process))
        alone = [move for move in moves if not traded.covers(process, move)]
        loads[process].read += bytes_to_read(alone)
        loads[process].written += bytes_to_write(moves)
        loads[process].slices += sum(len(r) for move in moves for r in move.targets.values())
    network = [0.0] * len(sight.seen)
    arriving = [0.0] * len(sight.seen)
    for process, load in enumerate(loads):
        network[sight.node[process]] += load.sent
        arriving[sight.node[process]] += load.received - traded.near[process]
    return Simulation(
        tuple(loads),
        tuple(_seconds(load, bandwidth) for load in loads),
        tuple(max(a, b) / bandwidth.network for a, b in zip(network, arriving)),
        sum(trade.nbytes for trade in trades),
    )


def _seconds(load: Load, bandwidth: Bandwidth) -> float:
    copied = load.sent + load.passed + load.received + load.written
    return (
        load.read / bandwidth.read
        + load.written / bandwidth.write
        + copied / bandwidth.copy
        + load.slices * _SECONDS_A_SLICE
        + load.letters * _SECONDS_A_LETTER
    )


class _Traded:
    """Which slices are traded, and what each process received from its own node."""

    def __init__(self, processes: int) -> None:
        self.near = [0] * processes
        self._members: dict[tuple[str, object], list[Mapping[Cell, Mapping[int, object]]]] = {}

    def note(self, trade: Trade) -> None:
        self._members.setdefault((trade.parameter.name, trade.layout), []).append(trade.servers)

    def covers(self, process: int, move: Move) -> bool:
        """Tell whether `move`, of `process`, is done by trades."""
        cell, ranks = next(iter(move.targets.items()))
        return any(
            ranks[0] in servers.get(cell, {}).get(process, ())  # type: ignore[operator]
            for servers in self._members.get((move.parameter.name, move.layout), ())
        )


def _trade(trades: Iterable[Trade], loads: Sequence[Load]) -> _Traded:
    """Add to `loads` what trades come to."""
    known: dict[object, tuple[dict[int, Load], dict[int, int]]] = {}
    traded = _Traded(len(loads))
    for trade in trades:
        traded.note(trade)
        key = id(trade.servers), id(trade.senders), trade.parameter.shape
        if key not in known:
            known[key] = _loads_of(trade)
        found, near = known[key]
        item = item_size(trade.parameter.dtype)
        for process, load in found.items():
            loads[process].add(load, item)
            loads[process].letters += load.letters * (1 - item)
        for process, elements in near.items():
            traded.near[process] += elements * item
    return traded


def _loads_of(trade: Trade) -> tuple[dict[int, Load], dict[int, int]]:
    """Return, in elements, what each process does, and what of it comes from its own node."""
    item = item_size(trade.parameter.dtype)
    boxes = {(at, cell): box for cell in trade.servers for at, box in trade.copies(cell)}
    grid, node = trade.parameter.grid, trade.node
    found: dict[int, Load] = {}
    near: dict[int, int] = {}

    def elements(post: Post, far: bool, process: int) -> int:
        chosen = [some for peer, some in post.items() if (node[peer] != node[process]) == far]
        return sum(boxes[piece].size for some in chosen for piece in some)

    for process, own in posts(trade).items():
        wanted = hulls((piece[0], boxes[piece]) for piece in own.read)
        inside = elements(own.into, False, process) + elements(own.passed, False, process)
        letters = 0
        for post in (own.out, own.passing):
            for some in post.values():
                letters += max(1, -(-sum(boxes[p].size for p in some) * item // _LETTER))
        found[process] = Load(
            read=sum(read_of(hull, grid.box(at), item) for at, hull in wanted.items()),
            sent=elements(own.out, True, process),
            passed=elements(own.out, False, process) + elements(own.passing, False, process),
            received=elements(own.into, True, process) + inside,
            letters=letters,
        )
        near[process] = inside
    return found, near


def spread_of(loads: Sequence[Load]) -> dict[str, tuple[int, float, int]]:
    """Return for every number of a load the least, the mean and the largest."""
    columns = zip(*(astuple(load) for load in loads))
    return {
        field.name: (min(column), sum(column) / len(loads), max(column))
        for field, column in zip(fields(Load), columns)
    }
