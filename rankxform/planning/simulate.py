"""What each of any number of processes would have to do, worked out without one of them.

Reads, letters and bytes follow from the plan; times follow from costs that are given.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field, fields

from rankxform.formats.dtype import item_size
from rankxform.geometry.box import hulls
from rankxform.geometry.grid import Cell
from rankxform.geometry.runs import CALL_BYTES

from .cost_model import Costs
from .exchange import Trade
from .plan import Planner
from .routes import Post, posts
from .transfers import EXCHANGE, WAYS, Move, Portion, bytes_to_write, read_of, reads_of
from .visibility import Sight

_LETTER = 2 << 20
_SECONDS_A_SLICE = 8e-6


@dataclass
class Load:
    """What one process does, in bytes: read from files, sent to other nodes and to processes of its
    own, received, written; and in numbers: reads and letters, at least, and slices."""

    read: int = 0
    sent: int = 0
    passed: int = 0
    received: int = 0
    written: int = 0
    reads: int = 0
    letters: int = 0
    slices: int = 0

    def add(self, other: Load) -> None:
        for one in fields(self):
            setattr(self, one.name, getattr(self, one.name) + getattr(other, one.name))

    def seconds(self, costs: Costs) -> float:
        """Return how long it takes, if nothing is waited for."""
        copied = self.sent + self.passed + self.received + self.written
        return (
            self.read / costs.read
            + self.reads * costs.call
            + self.written / costs.write
            + copied / costs.copy
            + self.slices * _SECONDS_A_SLICE
            + self.letters * costs.letter
        )


@dataclass
class Way:
    """A way of reading. names: parameters of which something is read so; nbytes: read so, by all
    processes."""

    names: dict[str, None] = field(default_factory=dict)
    nbytes: int = 0

    def add(self, name: str, nbytes: int) -> None:
        self.names[name] = None
        self.nbytes += nbytes


@dataclass(frozen=True)
class Simulation:
    """loads: of each process; seconds: each would take by itself; network: each node's, to send or
    receive all that it must; ways: how files are read, by the name of the way; costs: what was
    reckoned with; memory: most bytes that a process takes, where that is known."""

    loads: tuple[Load, ...]
    seconds: tuple[float, ...]
    network: tuple[float, ...]
    ways: Mapping[str, Way]
    costs: Costs
    memory: int = 0

    @property
    def total(self) -> float:
        """The seconds from the finished plan to the last file: letters travel while processes work,
        as far as one hides the other."""
        return self.costs.together(max(self.seconds), max(self.network))


def simulate(
    planner: Planner,
    shares: Sequence[Sequence[Portion]],
    sight: Sight,
    trades: Sequence[Trade],
    costs: Costs,
    call: float = CALL_BYTES,
) -> Simulation:
    """Work out what every process does for ``shares``, by process, if `sight` is who sees what.

    `trades` are those of the same shares and sight; `call` is what a read of little costs where
    the way of reading is chosen, in bytes; `costs`, what everything costs.
    """
    loads = [Load() for _ in shares]
    ways = {way: Way() for way in WAYS}
    traded = _trade(trades, loads, ways[EXCHANGE], call)
    for process, portions in enumerate(shares):
        load = loads[process]
        moves = planner.moves(portions, None if sight.is_full else sight.of(process))
        alone = [move for move in moves if not traded.covers(process, move)]
        for move, reads in reads_of(alone, call):
            for read in reads:
                load.read += read.nbytes
                load.reads += read.calls
                ways[read.way].add(move.parameter.name, read.nbytes)
        load.written += bytes_to_write(moves)
        load.slices += sum(len(r) for move in moves for r in move.targets.values())
    network = [0] * len(sight.seen)
    arriving = [0] * len(sight.seen)
    for process, load in enumerate(loads):
        network[sight.node[process]] += load.sent
        arriving[sight.node[process]] += load.received - traded.near[process]
    return Simulation(
        tuple(loads),
        tuple(load.seconds(costs) for load in loads),
        tuple(max(a, b) / costs.network for a, b in zip(network, arriving)),
        {name: way for name, way in ways.items() if way.names},
        costs,
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


def _trade(trades: Iterable[Trade], loads: Sequence[Load], way: Way, call: float) -> _Traded:
    """Add to `loads` and `way` what trades come to."""
    known: dict[object, tuple[dict[int, Load], dict[int, int]]] = {}
    traded = _Traded(len(loads))
    for trade in trades:
        traded.note(trade)
        parameter = trade.parameter
        key = (
            id(trade.servers), id(trade.senders), trade.turn, parameter.shape,
            item_size(parameter.dtype),
        )  # fmt: skip
        if key not in known:
            known[key] = _loads_of(trade, call)
        found, near = known[key]
        for process, load in found.items():
            loads[process].add(load)
            way.add(parameter.name, load.read)
        for process, nbytes in near.items():
            traded.near[process] += nbytes
    return traded


def _loads_of(trade: Trade, call: float) -> tuple[dict[int, Load], dict[int, int]]:
    """Return what each process does, and the bytes that come from its own node."""
    item = item_size(trade.parameter.dtype)
    boxes = {(at, cell): box for cell in trade.servers for at, box in trade.copies(cell)}
    grid, node = trade.parameter.grid, trade.node
    found: dict[int, Load] = {}
    near: dict[int, int] = {}

    def nbytes(post: Post, far: bool, process: int) -> int:
        chosen = [some for peer, some in post.items() if (node[peer] != node[process]) == far]
        return sum(boxes[piece].size for some in chosen for piece in some) * item

    for process, own in posts(trade).items():
        wanted = hulls((piece[0], boxes[piece]) for piece in own.read)
        reads = [read_of(hull, grid.box(at), item, call) for at, hull in wanted.items()]
        inside = nbytes(own.into, False, process) + nbytes(own.passed, False, process)
        letters = 0
        for post in (own.out, own.passing):
            for some in post.values():
                letters += max(1, -(-sum(boxes[p].size for p in some) * item // _LETTER))
        found[process] = Load(
            read=sum(read.nbytes for read in reads),
            sent=nbytes(own.out, True, process),
            passed=nbytes(own.out, False, process) + nbytes(own.passing, False, process),
            received=nbytes(own.into, True, process) + inside,
            reads=sum(read.calls for read in reads),
            letters=letters,
        )
        near[process] = inside
    return found, near


def spread_of(loads: Sequence[Load]) -> dict[str, tuple[int, float, int]]:
    """Return for every number of a load the least, the mean and the largest."""
    columns = zip(*(astuple(load) for load in loads))
    return {
        one.name: (min(column), sum(column) / len(loads), max(column))
        for one, column in zip(fields(Load), columns)
    }
