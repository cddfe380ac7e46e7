"""Transfers between slices in memory: nothing is read, and what is made is put where it belongs.

Of a transfer from arrays to arrays the arena holds messages alone. A part of a slice that lies in
one piece there is sent from it, or received into it; what stays in a process is copied once.

To work out a tile takes longer than to copy a megabyte. Tensors that are sharded alike differ in
where their slices lie, so a tile is worked out once, and bound anew for each tensor
(`schedule.bind_tile`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from rankxform.errors import UsageError
from rankxform.formats.container import item_size
from rankxform.geometry.box import Shape
from rankxform.planning.transfers import Transfer
from rankxform.storage.source_reader import SourceReader, TensorRead

from .schedule import SlicesInMemory
from .sinks import ArraySink

if TYPE_CHECKING:
    from .pipeline import Sink

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
