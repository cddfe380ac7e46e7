"""The engine: read each needed byte once, assemble, write in file order.

A parameter moves band by band. For each band every source file is read in one piece, every
destination file written in one piece, and between the two lies one strided numpy copy in words
as wide as the cut allows; where a destination wants just what was read, there is none. All
destination ranks that one process serves take their share from the same read.

Parameters that are cut alike move alike: a recipe, with every byte range and every numpy view
worked out, is made once and used for all of them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import gcd, prod
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from rankxform.errors import CheckpointError
from rankxform.formats.dtype import item_size
from rankxform.formats.index import Index, locate
from rankxform.geometry.bands import bands
from rankxform.geometry.box import Box
from rankxform.geometry.grid import Cell
from rankxform.geometry.runs import contiguous_runs, first_element
from rankxform.planning.moves import Move

from .files import Buffer, Descriptors, Tick, read_into
from .output import Output, Writer, part_descriptors

DEFAULT_MEMORY = 64 << 20
_BLOCK = 8 << 20
_SMALL_BAND = 4 << 20
_WRITE_BUFFER = 64 << 10
_LONG_RUN = 64 << 10
_MEDIUM_RUN = 4 << 10
_SMALL_SHARE = 8
_LEAST_BLOCK = 64 << 10
_LEAST_BUFFER = 4 << 10
_ALIGN = 64
_MANY_BANDS = 64
_MANY_RECIPES = 256

if TYPE_CHECKING:  # numpy.typing is a tenth of the start-up
    import numpy.typing as npt

    Bytes = npt.NDArray[np.uint8]
    _Words = npt.NDArray[np.unsignedinteger[Any]]


@dataclass
class Traffic:
    """What one process moved: bytes read from source files and written to destination files, and
    the seconds it took to read, to gather in memory, and to write."""

    read: int = 0
    written: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


def write_parts(
    moves: Iterable[Move],
    outputs: Mapping[int, Output],
    paths: Mapping[int, Path],
    indexes: Mapping[int, Index],
    memory: int,
    tick: Tick,
    behind: bool = False,
) -> Traffic:
    """Carry out `moves` into the part files of `outputs`, which are there.

    outputs: by destination rank; paths, indexes: by source rank. `memory` bounds the buffers,
    in bytes. With `behind` the device writes while the work goes on, for files that are synced
    in the end. `tick` is told the bytes written since the last call, and may raise to stop.
    """
    parts = part_descriptors()
    sources = _Sources(paths, indexes)
    try:
        streams = _streams(outputs, parts, memory // 4, behind)
        kitchen = _Kitchen(memory // 2)
        reading = gathering = writing = 0.0
        clock = perf_counter
        for move in moves:
            name, readers, targets = move.parameter.name, move.readers, move.targets
            for band in kitchen.recipe(move):
                began = clock()
                for cell, start, room in band.loads:
                    sources.read(readers[cell], name, start, room)
                before = clock()
                reading += before - began
                done = 0
                for cell, start, data, copies in band.stores:
                    for into, out in copies:
                        into[...] = out
                    gathered = clock()
                    for rank in targets[cell]:
                        streams[rank].put(name, start, data)
                        done += len(data)
                    written = clock()
                    gathering += gathered - before
                    writing += written - gathered
                    before = written
                tick(done)
        began = clock()
        for stream in streams.values():
            stream.finish()
        writing += clock() - began
        seconds = {"read": reading, "gather": gathering, "write": writing}
        return Traffic(sources.nbytes, sum(s.written for s in streams.values()), seconds)
    finally:
        parts.close()
        sources.close()


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


# -- source files ---------------------------------------------------------------------------


class _Sources:
    """The source files, read by rank, parameter and content byte."""

    def __init__(self, paths: Mapping[int, Path], indexes: Mapping[int, Index]) -> None:
        self._paths, self._indexes = paths, indexes
        self._descriptors = Descriptors(os.O_RDONLY)
        self._checked: set[int] = set()
        self.nbytes = 0

    def read(self, rank: int, name: str, start: int, room: Buffer) -> None:
        """Fill `room` with the content of rank's `name` from content byte `start` on."""
        path, index = self._paths[rank], self._indexes[rank]
        fd = self._descriptors.get(path)
        if rank not in self._checked:
            check_unchanged(path, os.fstat(fd), index)
            self._checked.add(rank)
        done = 0
        for span in locate(index.spans(name), start, len(room)):
            read_into(fd, path, span.offset, room[done : done + span.nbytes])
            done += span.nbytes
        self.nbytes += done

    def close(self) -> None:
        self._descriptors.close()


def check_unchanged(path: Path, status: os.stat_result, index: Index) -> None:
    """Raise CheckpointError where a source file is no longer the one that was indexed."""
    if (status.st_size, status.st_mtime_ns) != (index.size, index.modified):
        raise CheckpointError(
            f"{path}: was changed after it was first read ({index.size} bytes then, "
            f"{status.st_size} now); wait until the checkpoint is complete and run again"
        )


# -- recipes --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Band:
    """What is done for one band of a parameter.

    loads: (source cell, first content byte, where in the arena to put it).
    stores: (destination cell, first content byte, what of the arena to write, and the copies
    that put it together: view of the arena to write, view to read). All are put together in the
    same place, one after the other, which so stays in the cache.
    """

    loads: Sequence[tuple[Cell, int, Buffer]]
    stores: Sequence[tuple[Cell, int, Buffer, Sequence[tuple[_Words, _Words]]]]


class _Kitchen:
    """Makes recipes, and keeps those of parameters that are small enough to have many alike."""

    def __init__(self, memory: int) -> None:
        self._memory = memory
        self._arena = np.empty(min(_BLOCK, max(memory, _LEAST_BLOCK)), np.uint8)
        self._kept: dict[object, Sequence[_Band]] = {}

    def recipe(self, move: Move) -> Iterable[_Band]:
        parameter = move.parameter
        key = (
            parameter.layout, parameter.shape, item_size(parameter.dtype), move.layout,
            parameter.listed, tuple(move.targets),
        )  # fmt: skip
        if key in self._kept:
            return self._kept[key]
        made = _Recipe(move, self._arena).bands()
        first = []
        for band in made:
            first.append(band)
            if len(first) > _MANY_BANDS:
                return chain(first, made)
        if len(self._kept) >= _MANY_RECIPES:
            self._kept.clear()
        self._kept[key] = first
        return first


@dataclass(frozen=True)
class _Held:
    """A region of the parameter in the arena, row-major."""

    box: Box
    data: Bytes


class _Recipe:
    """Works out the bands of one kind of move, in an arena that each band uses anew."""

    def __init__(self, move: Move, arena: Bytes) -> None:
        parameter = move.parameter
        self._shape, self._item, self._arena = parameter.shape, item_size(parameter.dtype), arena
        self._used = 0
        grid = move.layout.grid(parameter.shape)
        self._targets = {cell: grid.box(cell) for cell in move.targets}
        self._copies = {cell: move.copies(cell) for cell in move.targets}
        self._held: dict[Cell, Box] = {}
        self._wanted: dict[Cell, Box] = {}  # of a source cell, the hull of what is wanted
        for copies in self._copies.values():
            for cell, box in copies:
                hull = self._wanted.get(cell)
                self._wanted[cell] = hull.hull(box) if hull else box
                self._held[cell] = parameter.grid.box(cell)

    def bands(self) -> Iterator[_Band]:
        region, *others = self._targets.values()
        for box in others:
            region = region.hull(box)
        if not prod(self._shape):
            empty = self._arena[:0].data
            yield _Band((), [(cell, 0, empty, ()) for cell in self._targets])
            return
        shards = [*self._held.values(), *self._targets.values()]
        room = len(self._arena) - _ALIGN * len(shards)
        split = len(self._held) < len(self._targets)
        limit = (min(room, _SMALL_BAND) if split or self._straight() else room) // self._item
        for band in bands(self._shape, region, shards, max(1, limit)):
            yield self._band(band)

    def _straight(self) -> bool:
        """Whether only rows are cut, so that nothing needs gathering."""
        return all(
            box.shape[1:] == self._held[at].shape[1:] == self._targets[cell].shape[1:]
            for cell, copies in self._copies.items()
            for at, box in copies
        )

    def _band(self, band: Box) -> _Band:
        self._used = 0
        loads: list[tuple[Cell, int, Buffer]] = []
        loaded = {
            cell: self._load(cell, band, loads)
            for cell, wanted in self._wanted.items()
            if band.intersect(wanted)
        }
        stores = []
        behind = self._used
        for cell, box in self._targets.items():
            target = band.intersect(box)
            if target is not None:
                self._used = behind
                data, copies = self._assemble(cell, target, loaded)
                stores.append((cell, _offset(target, box, self._item), data.data, copies))
        return _Band(loads, stores)

    def _load(self, cell: Cell, band: Box, loads: list[tuple[Cell, int, Buffer]]) -> _Held:
        """Plan to read what is wanted of `band` from source `cell`; return where it will be."""
        box = self._held[cell]
        mine, need = band.intersect(box), band.intersect(self._wanted[cell])
        assert mine is not None
        assert need is not None
        frame, start = need.relative_to(mine), _offset(mine, box, self._item)
        if need == mine or not self._worth_picking(frame, mine.shape):
            data = self._take(mine.size)
            loads.append((cell, start, data.data))
            return _Held(mine, data)
        data, done = self._take(need.size), 0
        for first, count in contiguous_runs(frame, mine.shape):
            nbytes = count * self._item
            loads.append((cell, start + first * self._item, data[done : done + nbytes].data))
            done += nbytes
        return _Held(need, data)

    def _worth_picking(self, frame: Box, shape: tuple[int, ...]) -> bool:
        """Whether to read the wanted runs one by one rather than all rows that hold them."""
        first_run = next(contiguous_runs(frame, shape))[1] * self._item
        share = prod(shape) // frame.size
        return first_run >= _LONG_RUN or (first_run >= _MEDIUM_RUN and share >= _SMALL_SHARE)

    def _assemble(
        self, cell: Cell, target: Box, loaded: Mapping[Cell, _Held]
    ) -> tuple[Bytes, list[tuple[_Words, _Words]]]:
        """Plan to put `target`, of destination `cell`, together; return where, and the copies."""
        parts = [
            (at, part)
            for at, box in self._copies[cell]
            if (part := box.intersect(target)) is not None
        ]
        if len(parts) == 1 and loaded[parts[0][0]].box == target:
            return loaded[parts[0][0]].data, []
        data = self._take(target.size)
        held = _Held(target, data)
        return data, [_views(held, loaded[at], part, self._item) for at, part in parts]

    def _take(self, elements: int) -> Bytes:
        """Return aligned room for `elements` in the arena, which is used anew for each band."""
        start = -(-self._used // _ALIGN) * _ALIGN
        self._used = start + elements * self._item
        assert self._used <= len(self._arena), "a band's cost was planned too low"
        return self._arena[start : self._used]


def _offset(part: Box, box: Box, item: int) -> int:
    """Return the content byte at which `part` starts in a slice that holds `box`."""
    return first_element(part.relative_to(box), box.shape) * item


def _views(target: _Held, source: _Held, part: Box, item: int) -> tuple[_Words, _Words]:
    """Return `part`, a box of the full parameter, as it lies in two regions of the arena."""
    if not part.ndim:
        return target.data, source.data
    word = _word(target.box, source.box, part, item)
    return (
        _view(target, item, word)[_index(part, target.box, item, word)],
        _view(source, item, word)[_index(part, source.box, item, word)],
    )


def _word(a: Box, b: Box, part: Box, item: int) -> int:
    """Return the widest of 8, 4, 2, 1 bytes that divides every position on the last axis."""
    last = (a.start[-1] - b.start[-1], part.start[-1] - a.start[-1], part.shape[-1])
    return gcd(8, *(n * item for n in (*last, a.shape[-1], b.shape[-1])))


def _view(held: _Held, item: int, word: int) -> _Words:
    shape = held.box.shape
    return held.data.view(f"u{word}").reshape(*shape[:-1], shape[-1] * item // word)


def _index(part: Box, frame: Box, item: int, word: int) -> tuple[slice, ...]:
    *outer, last = part.relative_to(frame).slices()
    return (*outer, slice(last.start * item // word, last.stop * item // word))
