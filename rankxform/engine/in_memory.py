"""Transfers between slices in memory: nothing is read, and what is made is put where it belongs.

Of a transfer from arrays to arrays the arena holds messages alone. A part of a slice that lies in
one piece there is sent from it, or received into it; what stays in a process is copied once.

To work out a tile takes longer than to copy a megabyte. Tensors that are sharded alike differ in
where their slices lie, so a tile is worked out once, and its views are made anew for each tensor.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rankxform.errors import UsageError
from rankxform.formats.container import item_size
from rankxform.geometry.box import Shape
from rankxform.planning.transfers import Transfer
from rankxform.storage.posix import Buffer
from rankxform.storage.source_reader import SourceReader, TensorRead
from rankxform.values import NamedTuple

from .schedule import SlicesInMemory, TileMessages, TileWork
from .sinks import ArraySink

if TYPE_CHECKING:
    from .pipeline import Sink
    from .schedule import Bytes, View, Words

_LEAST_BYTES = 512 << 10
"""Bytes of a tensor from which on it pays to make views for it."""
_NOTHING = memoryview(b"")


class InMemory:
    """Which slices lie in memory: arrays that are read, arrays that are made."""

    def __init__(self, sources: SourceReader, sinks: Mapping[int, Sink]) -> None:
        self._sources = sources
        self._sinks = {rank: sink for rank, sink in sinks.items() if isinstance(sink, ArraySink)}
        # Of the transfer whose tiles are started; no step keeps them, for then they are let go of.
        self._of_transfer: tuple[Transfer, SlicesInMemory] | None = None

    def has(self, transfer: Transfer) -> bool:
        """Whether a transfer is of slices in memory, on one side at least."""
        in_memory = self._sources.is_memory or bool(self._sinks)
        return in_memory and _is_moved_in_memory(transfer)

    def is_between(self, transfer: Transfer) -> bool:
        """Whether slices of both sides lie in memory; the same on all processes."""
        return self._sources.is_memory and _is_moved_in_memory(transfer)

    def reads_of(self, transfer: Transfer) -> Iterator[TensorRead]:
        """Yield of which source slices `slices` takes the content."""
        for cell, file in transfer.readers.items():
            yield self._sources.whole(file, transfer.parameter.entry(cell, file))

    def slices(self, transfer: Transfer) -> SlicesInMemory:
        """Return a transfer's slices; they are taken once, with its first tile."""
        if self._of_transfer is None or self._of_transfer[0] is not transfer:
            name, entry, contents = transfer.parameter.name, transfer.parameter.entry, {}
            if self._sources.is_memory:
                for cell, file in transfer.readers.items():
                    contents[cell] = self._sources.memory_of(file, entry(cell, file))
            rooms = {
                cell: self._sinks[files[0]].memory_of(name)
                for cell, files in transfer.targets.items()
                if files[0] in self._sinks
            }
            self._of_transfer = transfer, SlicesInMemory(contents, rooms)
        return self._of_transfer[1]


def _is_moved_in_memory(transfer: Transfer) -> bool:
    """Whether a tensor is as large as it pays for, and moved as it is."""
    parameter = transfer.parameter
    nbytes = prod(parameter.shape) * item_size(parameter.src_dtype)
    return nbytes >= _LEAST_BYTES and parameter.composed_sharding is None


class _View(NamedTuple):
    """A view of bytes of a slice, whichever it is, or of the arena; of the first of some tiles."""

    base: Any  # the view, of the arena; else the type of its words
    number: int = -1  # of the slice in the order of `_arrays`; -1: of the arena
    offset: int = 0  # bytes
    step: int = 0  # bytes from one tile to the next
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()  # bytes

    def of(self, arrays: Sequence[Bytes], repeat: int) -> Words:
        """Return the view where the slices are `arrays`, for the tile of this number."""
        words: Words = self.base
        if self.number >= 0:
            array, offset = arrays[self.number], self.offset + repeat * self.step
            words = np.ndarray(self.shape, self.base, array, offset, self.strides)
        return words


class _Views:
    """Recognizes in which slice a view lies, from those of two tiles that follow each other."""

    def __init__(self, slices: SlicesInMemory) -> None:
        arrays = enumerate(_arrays(slices))
        self._ranges = [(_address(data), data.nbytes, number) for number, data in arrays]

    def find(self, words: Words, next_words: Words) -> _View:
        address, step = _address(words), _address(next_words) - _address(words)
        for start, nbytes, number in self._ranges:
            if words.size and start <= address < start + nbytes:
                offset = address - start
                return _View(words.dtype, number, offset, step, words.shape, words.strides)
        return _View(words)

    def copies(self, copies: Iterable[View], next_copies: Iterable[View]) -> list[_Copy]:
        pairs = zip(copies, next_copies)
        return [(self.find(a, next_a), self.find(b, next_b)) for (a, b), (next_a, next_b) in pairs]

    def messages(
        self, messages: Iterable[tuple[int, Buffer]], next_messages: Iterable[tuple[int, Buffer]]
    ) -> list[tuple[int, _View]]:
        buffers = ((peer, a, b) for (peer, a), (_, b) in zip(messages, next_messages))
        return [
            (n, self.find(np.frombuffer(a, "u1"), np.frombuffer(b, "u1"))) for n, a, b in buffers
        ]


_Copy = tuple[_View, _View]


class WorkInMemory:
    """The work of tiles that are alike, without the slices that it was worked out for."""

    def __init__(self, work: TileWork, next_work: TileWork, slices: SlicesInMemory) -> None:
        """work, next_work: of the first two tiles, or twice of the only one."""
        views, messages, next_messages = _Views(slices), work.messages, next_work.messages
        self._work = replace(work, fetches=(), writes=(), sources=(), targets=(), messages=None)
        self._fetches = [fetch._replace(room=_NOTHING) for fetch in work.fetches]
        self._rooms = views.messages(
            enumerate(fetch.room for fetch in work.fetches),
            enumerate(fetch.room for fetch in next_work.fetches),
        )
        self._writes = [write._replace(copies=()) for write in work.writes]
        self._copies = [
            views.copies(a.copies, b.copies) for a, b in zip(work.writes, next_work.writes)
        ]
        self._packs: list[list[_Copy]] = []
        self._messages: list[list[tuple[int, _View]]] = []
        if messages is not None and next_messages is not None:
            sides = _packs(messages), _packs(next_messages)
            self._packs = [views.copies(*pair) for pair in zip(*sides)]
            peers = _peers(messages), _peers(next_messages)
            self._messages = [views.messages(*pair) for pair in zip(*peers)]

    def on(self, slices: SlicesInMemory, repeat: int) -> TileWork:
        """Return the work for other slices, of the same boxes, and the tile of this number."""
        arrays, messages = _arrays(slices), None

        def copies(pairs: Iterable[_Copy]) -> list[View]:
            return [(a.of(arrays, repeat), b.of(arrays, repeat)) for a, b in pairs]

        def buffers(peers: Iterable[tuple[int, _View]]) -> list[tuple[int, Buffer]]:
            return [(peer, view.of(arrays, repeat).data) for peer, view in peers]

        if self._messages:
            packs, repacks = map(copies, self._packs)
            sends, recvs, forwards, forwarded = map(buffers, self._messages)
            messages = TileMessages(packs, sends, recvs, repacks, forwards, forwarded)
        fetches = [f._replace(room=r) for f, (_, r) in zip(self._fetches, buffers(self._rooms))]
        writes = [w._replace(copies=copies(p)) for w, p in zip(self._writes, self._copies)]
        return replace(self._work, fetches=fetches, writes=writes, messages=messages)


def _packs(messages: TileMessages) -> tuple[Sequence[View], ...]:
    return messages.packs, messages.repacks


def _peers(messages: TileMessages) -> tuple[Sequence[tuple[int, Buffer]], ...]:
    return messages.sends, messages.recvs, messages.forwards, messages.forwarded


def _arrays(slices: SlicesInMemory) -> list[Bytes]:
    """Return slices in an order that is the same for all tensors that are sharded alike."""
    return [sides[cell] for sides in slices for cell in sorted(sides)]


def _address(words: Words) -> int:
    address: int = words.__array_interface__["data"][0]
    return address


def stand_ins(shapes: Mapping[str, tuple[Shape, Any]]) -> dict[str, Any]:
    """Return arrays of these shapes and numpy types that take no memory and have no values.

    Raises UsageError for what is no shape, or no type.
    """
    try:
        return {
            name: np.broadcast_to(np.empty((), dtype), shape)
            for name, (shape, dtype) in shapes.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        example = 'shapes={"w": ((128, 64), "float16")}'
        raise UsageError(f"shapes: {error}; expected shape and type by name", example) from error
