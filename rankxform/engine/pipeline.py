"""The engine: read each needed byte once, assemble, write in file order.

A parameter moves band by band. For each band every source file is read in one piece, every
destination file written in one piece, and between the two lies one strided numpy copy in words
as wide as the cut allows; where a destination wants just what was read, there is none. All
destination ranks that one process serves take their share from the same read.

Parameters that are cut alike move alike: a recipe, with every byte range and every numpy view
worked out, is made once and used for all of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any, Protocol

from rankxform.errors import RankxformError, StorageError
from rankxform.formats.base import locate
from rankxform.geometry.runs import CALL_BYTES
from rankxform.planning.transfers import Move
from rankxform.publish.journal import Journal
from rankxform.storage.posix import Buffer, Descriptors, Tick
from rankxform.storage.sources import Sources

from .cache import Kitchen
from .checksum import Witness
from .file_sink import Output, Writer, part_descriptors
from .schedule import Band

if TYPE_CHECKING:
    from .schedule import Copies

DEFAULT_MEMORY = 64 << 20
_WRITE_BUFFER = 64 << 10
_LEAST_BUFFER = 4 << 10
_BANDS_ON_THE_WAY, _ARENA = 12, 512 << 10
"""How many bands are on their way at a time, if each has an arena of so many bytes."""

FROM_READER, PASSED_ON = 0, 1
"""Kinds of letters: from who reads, and from who got it first on a node."""


class Mail(Protocol):
    """Carries bytes to and from other processes, without blocking."""

    def send(self, peer: int, data: Buffer, kind: int = 0) -> Any:
        """Begin to send; return a request."""

    def receive(self, peer: int, room: Buffer, kind: int = 0) -> Any:
        """Begin to receive; return a request."""

    def settle(self, requests: Iterable[Any], tick: Tick) -> None:
        """Wait until requests are done; `tick` is called meanwhile, and may raise."""

    def poke(self) -> None:
        """Let what is on its way move on."""


@dataclass
class Traffic:
    """What one process moved: bytes read from source files and written to destination files, and
    the seconds it took to read, to exchange with others, to gather in memory, and to write; and the
    bytes that it sent."""

    read: int = 0
    written: int = 0
    sent: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Sink(Protocol):
    """Where the content of one destination rank's slices goes, in ascending order."""

    @property
    def written(self) -> int:
        """Bytes that came to their place."""

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Take content of `name` from its content byte `start` on."""

    def finish(self) -> None:
        """Take note that nothing more is in the way; all that was put must be where it belongs."""


def write_parts(
    moves: Iterable[Move],
    outputs: Mapping[int, Output],
    sources: Sources,
    memory: int,
    tick: Tick,
    journal: Journal | None = None,
    *,
    behind: bool = False,
    witness: Witness | None = None,
    mail: Mail | None = None,
    call: float = CALL_BYTES,
) -> Traffic:
    """Carry out `moves` into the part files of `outputs`, which are there.

    outputs: by destination rank. `memory` bounds the buffers, in bytes. With `behind` the device
    writes while the work goes on, for files that are synced in the end. `tick` is told the bytes
    written since the last call, and may raise to stop. What is complete is noted in the `journal`,
    if there is one, also when the work ends early. A `witness` compares what is written with what
    was read, and letters with what was sent. `call` is what a read of little costs, in bytes.
    """
    parts = part_descriptors()
    streams = _streams(outputs, parts, memory // 4, behind)

    def settle(tick: Tick = tick) -> None:
        for stream in streams.values():
            stream.finish()
        if journal:
            sums = witness.take() if witness else {}
            journal.settle({rank: one.part for rank, one in outputs.items()}, sums, tick)

    def between(move: Move) -> None:
        if journal and move.targets:
            journal.moved(move.parameter.name, move.targets)
            if journal.due:
                settle()

    try:
        traffic = carry(moves, streams, sources, memory // 2, tick, between, witness, mail, call)
        settle()
        traffic.seconds["fsync"] = journal.seconds if journal else 0.0
        return traffic
    except RankxformError:
        with suppress(StorageError):
            settle(lambda done: None)
        raise
    finally:
        parts.close()


def carry(
    moves: Iterable[Move],
    sinks: Mapping[int, Sink],
    sources: Sources,
    memory: int,
    tick: Tick,
    between: Callable[[Move], None] = lambda move: None,
    witness: Witness | None = None,
    mail: Mail | None = None,
    call: float = CALL_BYTES,
) -> Traffic:
    """Read what `moves` need, put it together, and put it into `sinks`, by destination rank.

    `between` is told of every move that is complete. Parts in trades need `mail`: then several
    bands are on their way at a time, and a process waits only for letters of the oldest. Whoever
    is to send those has nothing to wait for but letters of bands before it, in the order that all
    share; so the process that waits for the oldest of all never waits in vain.
    """
    depth = max(2, min(_BANDS_ON_THE_WAY, memory // _ARENA)) if mail else 1
    kitchen = Kitchen(memory, depth, call, sealed=witness is not None)
    crew = _Crew(sinks, sources, tick, between, witness, mail)
    number = 0
    for move in moves:
        for cut, turn in kitchen.recipe(move):
            if len(crew.flights) == depth:
                crew.land()
            crew.start(move, cut.on(number % depth), turn)
            number += 1
        crew.ends(move)
    while crew.flights:
        crew.land()
    crew.finish()
    written = sum(sink.written for sink in sinks.values())
    return Traffic(sources.nbytes, written, crew.sent, crew.seconds)


@dataclass
class _Flight:
    """A band on its way; `ended` are the moves that are complete with it."""

    move: Move
    band: Band
    turn: int
    receipts: Sequence[Any] = ()
    passed: Sequence[Any] = ()
    sends: Sequence[Any] = ()
    ended: list[Move] = field(default_factory=list)


class _Crew:
    """Carries out bands: starts them in order, and lands them in the same order."""

    def __init__(
        self,
        sinks: Mapping[int, Sink],
        sources: Sources,
        tick: Tick,
        between: Callable[[Move], None],
        witness: Witness | None,
        mail: Mail | None,
    ) -> None:
        self._sinks, self._sources, self._tick = sinks, sources, tick
        self._between, self._witness, self._mail = between, witness, mail
        self.flights: deque[_Flight] = deque()
        self.sent = 0
        self.seconds = {"read": 0.0, "exchange": 0.0, "gather": 0.0, "write": 0.0}

    def start(self, move: Move, band: Band, turn: int) -> None:
        """Make room for letters that come, read, and send."""
        flight = _Flight(move, band, turn)
        letters, mail = band.letters, self._mail
        began = perf_counter()
        if letters and mail:
            flight.receipts = [mail.receive(of, room) for of, room in letters.receipts]
            flight.passed = [mail.receive(of, room, PASSED_ON) for of, room in letters.passed]
        name, readers = move.parameter.name, move.readers
        for cell, start, step, room, picked in band.loads:
            self._sources.read(readers[cell], name, start + turn * step, room, picked)
        read = perf_counter()
        self.seconds["read"] += read - began
        if letters and mail:
            flight.sends = self._send(name, letters.packs, letters.sends, FROM_READER)
            self.seconds["exchange"] += perf_counter() - read
        self.flights.append(flight)

    def _send(
        self, name: str, packs: Sequence[Copies], letters: Sequence[tuple[int, Buffer]], kind: int
    ) -> list[Any]:
        assert self._mail is not None
        for into, out in packs:
            into[...] = out
        for _, letter in letters:
            self.sent += len(letter)
            if self._witness:
                self._witness.seal(letter, name)
        return [self._mail.send(to, letter, kind) for to, letter in letters]

    def land(self) -> None:
        """Take what was sent for the oldest band, pass on, put together, and put into sinks."""
        flight = self.flights.popleft()
        letters, mail = flight.band.letters, self._mail
        if letters and mail:
            began = perf_counter()
            self._receive(flight, flight.receipts, letters.receipts)
            passing = self._send(
                flight.move.parameter.name, letters.repacks, letters.passing, PASSED_ON
            )
            self._receive(flight, flight.passed, letters.passed)
            self.seconds["exchange"] += perf_counter() - began
            self._store(flight)
            began = perf_counter()
            mail.settle([*flight.sends, *passing], self._tick)
            self.seconds["exchange"] += perf_counter() - began
        else:
            self._store(flight)
        for move in flight.ended:
            self._end(move)

    def _receive(
        self, flight: _Flight, requests: Sequence[Any], letters: Sequence[tuple[int, Buffer]]
    ) -> None:
        """Wait until letters have come."""
        assert self._mail is not None
        self._mail.settle(requests, self._tick)
        if self._witness:
            for sender, letter in letters:
                self._witness.unseal(letter, sender, flight.move.parameter.name)

    def _store(self, flight: _Flight) -> None:
        move, band, turn, witness = flight.move, flight.band, flight.turn, self._witness
        name, targets, sinks = move.parameter.name, move.targets, self._sinks
        if witness:
            witness.read(move, band, turn)
        before = perf_counter()
        gathering = writing = 0.0
        done = 0
        for number, (cell, start, step, data, copies) in enumerate(band.stores):
            for into, out in copies:
                into[...] = out
            if witness:
                witness.put(move, band, turn, number)
            gathered = perf_counter()
            for rank in targets[cell]:
                sinks[rank].put(name, start + turn * step, data)
                done += len(data)
            written = perf_counter()
            gathering += gathered - before
            writing += written - gathered
            before = written
        self.seconds["gather"] += gathering
        self.seconds["write"] += writing
        self._tick(done)
        if self._mail:
            self._mail.poke()

    def ends(self, move: Move) -> None:
        """Take note that no more bands of `move` will be started."""
        if self.flights:
            self.flights[-1].ended.append(move)
        else:
            self._end(move)

    def _end(self, move: Move) -> None:
        if self._witness:
            self._witness.check(move)
        self._between(move)

    def finish(self) -> None:
        """Let nothing be kept back on its way into sinks."""
        began = perf_counter()
        for sink in self._sinks.values():
            sink.finish()
        self.seconds["write"] += perf_counter() - began


# -- destination files ----------------------------------------------------------------------


def _streams(
    outputs: Mapping[int, Output], parts: Descriptors, memory: int, behind: bool
) -> dict[int, _Stream]:
    share = min(_WRITE_BUFFER, max(_LEAST_BUFFER, memory // max(1, len(outputs))))
    buffers = memoryview(bytearray(share * len(outputs)))
    return {
        rank: _Stream(output, parts, buffers[i * share : (i + 1) * share], behind)
        for i, (rank, output) in enumerate(outputs.items())
    }


class _Stream:
    """One destination file while it is written: tensor content in, headers in between."""

    def __init__(self, output: Output, parts: Descriptors, buffer: Buffer, behind: bool) -> None:
        layout = output.layout
        self._spans = layout.spans
        self._heads: dict[int, Buffer] = {}  # by where they end, and content starts
        self._writer = Writer(output.part, parts, buffer, behind)
        if layout.metadata is None:
            self._heads = {at + len(head): memoryview(head) for at, head in layout.headers}
        elif output.owned:
            self._writer.put(0, memoryview(layout.headers[0][1]))

    @property
    def written(self) -> int:
        return self._writer.written

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Write content of `name` from its content byte `start` on, in ascending order."""
        spans = self._spans[name]
        done = 0
        for span in locate(spans, start, len(data)) if len(data) else spans:
            head = self._heads.get(span.offset)
            if head is not None:
                self._writer.put(span.offset - len(head), head)
            self._writer.put(span.offset, data[done : done + span.nbytes])
            done += span.nbytes

    def finish(self) -> None:
        self._writer.flush()
