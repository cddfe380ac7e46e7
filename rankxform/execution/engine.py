"""The engine: read each needed byte once, assemble, write in file order.

A parameter moves band by band. For each band every source file is read in one piece, every
destination file written in one piece, and between the two lies one strided numpy copy in words
as wide as the cut allows; where a destination wants just what was read, there is none. All
destination ranks that one process serves take their share from the same read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path

import numpy as np
import numpy.typing as npt

from rankxform.errors import CheckpointError
from rankxform.formats.dtype import item_size
from rankxform.formats.index import Index, locate
from rankxform.geometry.bands import bands
from rankxform.geometry.box import Box
from rankxform.geometry.runs import contiguous_runs, first_element
from rankxform.planning.plan import RankPlan, Slice

from .files import Buffer, Descriptors, Tick, create, make_folder, read_into
from .output import Output, Writer, ordered, part_descriptors

DEFAULT_MEMORY = 64 << 20
_BLOCK = 8 << 20
_WRITE_BUFFER = 256 << 10
_LONG_RUN = 64 << 10
_MEDIUM_RUN = 4 << 10
_SMALL_SHARE = 8
_LEAST_BLOCK = 64 << 10
_LEAST_BUFFER = 4 << 10
_ALIGN = 64

Bytes = npt.NDArray[np.uint8]


@dataclass
class Traffic:
    """Bytes that one process moved: read from source files, written to destination files."""

    read: int = 0
    written: int = 0


def write_parts(
    plans: Sequence[RankPlan],
    outputs: Mapping[int, Output],
    paths: Mapping[int, Path],
    indexes: Mapping[int, Index],
    memory: int,
    tick: Tick,
) -> Traffic:
    """Write the files of `plans` under their part names, complete but for a checksum.

    outputs: by destination rank; paths, indexes: by source rank. `memory` bounds the buffers,
    in bytes. `tick` is told the bytes written since the last call, and may raise to stop.
    """
    parts = part_descriptors()
    sources = _Sources(paths, indexes)
    try:
        for plan in plans:
            make_folder(outputs[plan.rank].final.parent)
            create(outputs[plan.rank].part)
        streams = _streams(plans, outputs, parts, memory // 4)
        arena = np.empty(min(_BLOCK, max(memory // 2, _LEAST_BLOCK)), np.uint8)
        for wanted in _by_parameter(plans, outputs):
            _Transfer(wanted, sources, streams, arena).run(tick)
        for stream in streams.values():
            stream.finish()
        return Traffic(sources.nbytes, sum(s.written for s in streams.values()))
    finally:
        parts.close()
        sources.close()


def _streams(
    plans: Sequence[RankPlan],
    outputs: Mapping[int, Output],
    parts: Descriptors,
    memory: int,
) -> dict[int, _Stream]:
    share = min(_WRITE_BUFFER, max(_LEAST_BUFFER, memory // max(1, len(plans))))
    buffers = memoryview(bytearray(share * len(plans)))
    return {
        plan.rank: _Stream(outputs[plan.rank], parts, buffers[i * share : (i + 1) * share])
        for i, plan in enumerate(plans)
    }


def _by_parameter(
    plans: Sequence[RankPlan], outputs: Mapping[int, Output]
) -> Iterator[list[tuple[int, Slice]]]:
    """Yield, parameter by parameter in file order, the (destination rank, slice) that want it."""
    found: dict[str, list[tuple[int, Slice]]] = {}
    for plan in plans:
        for piece in ordered(plan, outputs[plan.rank]):
            found.setdefault(piece.parameter.name, []).append((plan.rank, piece))
    return iter(found.values())


class _Stream:
    """One destination file while it is written: tensor content in, headers in between."""

    def __init__(self, output: Output, parts: Descriptors, buffer: Buffer) -> None:
        self._output = output
        self._writer = Writer(output.part, parts, buffer)
        self._headers = iter(output.headers)
        self._next = next(self._headers, None)

    @property
    def written(self) -> int:
        return self._writer.written

    def put(self, name: str, start: int, data: Buffer) -> None:
        """Write content of `name` from its content byte `start` on."""
        done = 0
        for span in locate(self._output.spans[name], start, len(data)):
            self._headers_before(span.offset)
            self._writer.put(span.offset, data[done : done + span.nbytes])
            done += span.nbytes

    def finish(self) -> None:
        self._headers_before(self._output.size + 1)
        self._writer.flush()

    def _headers_before(self, offset: int) -> None:
        while self._next and self._next[0] < offset:
            self._writer.put(self._next[0], memoryview(self._next[1]))
            self._next = next(self._headers, None)


class _Sources:
    """The source files, read by rank, parameter and content byte."""

    def __init__(self, paths: Mapping[int, Path], indexes: Mapping[int, Index]) -> None:
        self._paths, self._indexes = paths, indexes
        self._descriptors = Descriptors(os.O_RDONLY)
        self._checked: set[int] = set()
        self.nbytes = 0

    def read(self, rank: int, name: str, start: int, target: Buffer) -> None:
        """Fill `target` with the content of rank's `name` from content byte `start` on."""
        path = self._paths[rank]
        fd = self._descriptors.get(path)
        if rank not in self._checked:
            check_unchanged(path, os.fstat(fd), self._indexes[rank])
            self._checked.add(rank)
        done = 0
        for span in locate(self._indexes[rank].spans(name), start, len(target)):
            read_into(fd, path, span.offset, target[done : done + span.nbytes])
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


@dataclass
class _Held:
    """A region of the parameter in memory, row-major."""

    box: Box
    data: Bytes


class _Transfer:
    """Moves one parameter from the source files to all slices that this process writes."""

    def __init__(
        self,
        wanted: Sequence[tuple[int, Slice]],
        sources: _Sources,
        streams: Mapping[int, _Stream],
        arena: Bytes,
    ) -> None:
        self._parameter = wanted[0][1].parameter
        self._item = item_size(self._parameter.dtype)
        self._sources, self._streams, self._arena = sources, streams, arena
        self._used = 0
        self._targets: dict[Slice, list[int]] = {}
        self._wanted: dict[int, Box] = {}  # by source rank, the hull of what is wanted from it
        for rank, piece in wanted:
            self._targets.setdefault(piece, []).append(rank)
            for copy in piece.copies:
                hull = self._wanted.get(copy.src_rank)
                self._wanted[copy.src_rank] = hull.hull(copy.box) if hull else copy.box

    def run(self, tick: Tick) -> None:
        held = {rank: self._parameter.box(rank) for rank in self._wanted}
        shards = [*held.values(), *(piece.box for piece in self._targets)]
        region = shards[len(held)]
        for box in shards[len(held) + 1 :]:
            region = region.hull(box)
        limit = (len(self._arena) - _ALIGN * len(shards)) // self._item
        for band in bands(self._parameter.shape, region, shards, max(1, limit)):
            self._used = 0
            loaded = {
                rank: self._load(rank, box, band)
                for rank, box in held.items()
                if band.intersect(self._wanted[rank])
            }
            tick(sum(self._store(piece, band, loaded) for piece in self._targets))

    def _load(self, rank: int, box: Box, band: Box) -> _Held:
        """Read what is wanted of `band` from source `rank`, which holds `box` of the parameter."""
        mine, need = band.intersect(box), band.intersect(self._wanted[rank])
        assert mine is not None
        assert need is not None
        name, frame = self._parameter.name, need.relative_to(mine)
        if need == mine or not self._worth_picking(frame, mine.shape):
            data = self._take(mine.size)
            start = first_element(mine.relative_to(box), box.shape) * self._item
            self._sources.read(rank, name, start, data.data)
            return _Held(mine, data)
        data, done = self._take(need.size), 0
        base = first_element(mine.relative_to(box), box.shape)
        for start, count in contiguous_runs(frame, mine.shape):
            nbytes = count * self._item
            part = data[done : done + nbytes]
            self._sources.read(rank, name, (base + start) * self._item, part.data)
            done += nbytes
        return _Held(need, data)

    def _worth_picking(self, frame: Box, shape: tuple[int, ...]) -> bool:
        """Whether to read the wanted runs one by one rather than all rows that hold them."""
        first_run = next(contiguous_runs(frame, shape))[1] * self._item
        share = prod(shape) // frame.size
        return first_run >= _LONG_RUN or (first_run >= _MEDIUM_RUN and share >= _SMALL_SHARE)

    def _store(self, piece: Slice, band: Box, loaded: Mapping[int, _Held]) -> int:
        """Write the part of `piece` that lies in `band`; return its bytes, over all its ranks."""
        target = band.intersect(piece.box)
        if target is None:
            return 0
        parts = [
            (copy.src_rank, part)
            for copy in piece.copies
            if (part := copy.box.intersect(target)) is not None
        ]
        if len(parts) == 1 and loaded[parts[0][0]].box == target:
            data = loaded[parts[0][0]].data
        else:
            data = self._take(target.size)
            for rank, part in parts:
                _copy(_Held(target, data), loaded[rank], part, self._item)
        start = first_element(target.relative_to(piece.box), piece.box.shape) * self._item
        ranks = self._targets[piece]
        for rank in ranks:
            self._streams[rank].put(self._parameter.name, start, data.data)
        return data.nbytes * len(ranks)

    def _take(self, elements: int) -> Bytes:
        """Return aligned room for `elements` in the arena, which is used anew for each band."""
        start = -(-self._used // _ALIGN) * _ALIGN
        self._used = start + elements * self._item
        assert self._used <= len(self._arena), "a band's cost was planned too low"
        return self._arena[start : self._used]


def _copy(target: _Held, source: _Held, part: Box, item: int) -> None:
    """Copy `part`, a box of the full parameter, from one region in memory to another."""
    if not part.ndim:
        target.data[:] = source.data
        return
    word = _word(target.box, source.box, part, item)
    into = _view(target, item, word)[_index(part, target.box, item, word)]
    into[...] = _view(source, item, word)[_index(part, source.box, item, word)]


def _word(a: Box, b: Box, part: Box, item: int) -> int:
    """Return the widest of 8, 4, 2, 1 bytes that divides every position on the last axis."""
    last = (a.start[-1] - b.start[-1], part.start[-1] - a.start[-1], part.shape[-1])
    return gcd(8, *(n * item for n in (*last, a.shape[-1], b.shape[-1])))


def _view(held: _Held, item: int, word: int) -> npt.NDArray[np.unsignedinteger]:
    shape = held.box.shape
    return held.data.view(f"u{word}").reshape(*shape[:-1], shape[-1] * item // word)


def _index(part: Box, frame: Box, item: int, word: int) -> tuple[slice, ...]:
    *outer, last = part.relative_to(frame).slices()
    return (*outer, slice(last.start * item // word, last.stop * item // word))
