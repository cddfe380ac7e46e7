"""Whether each byte of a process's slices is put into its file, and once.

Byte i of a slice counts ``x**i`` times random numbers for its file and its tensor, modulo the prime
2**61 - 1, with an x that is drawn for each run. A range that is put is the difference of two
powers, whatever its size; all ranges together must make the difference of the slices' ends. What
is put twice, or not at all, is found but with a probability of 2**-20 for a slice of a terabyte.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from random import Random, SystemRandom

from rankxform.formats.container import content_bytes
from rankxform.planning.certificate import PRIME, wrong
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange
from rankxform.storage.posix import Buffer, Position

from .pipeline import Sink


class CoveredSink:
    """A file's sink, of which is noted what is put (`pipeline.Sink`)."""

    def __init__(self, sink: Sink, weight: int, coverage: Coverage) -> None:
        self._sink, self._put, self._weight, self._coverage = sink, sink.put, weight, coverage
        self._name, self._start, self._end = "", 0, 0  # ranges that follow each other are one

    @property
    def bytes_put(self) -> int:
        return self._sink.bytes_put

    def put(self, name: str, start: int, data: Buffer) -> None:
        self._put(name, start, data)
        if start == self._end and name == self._name:
            self._end = start + len(data)
        else:
            self._begin(name, start, len(data))

    def share(self, name: str, start: int, source: Position, nbytes: int) -> int:
        shared_bytes = self._sink.share(name, start, source, nbytes)
        if shared_bytes:
            self._begin(name, start, nbytes)
        return shared_bytes

    def finish(self) -> None:
        self._begin("", 0, 0)
        self._sink.finish()

    def _begin(self, name: str, start: int, nbytes: int) -> None:
        """Note the range that ends, and begin another."""
        if self._end > self._start:
            self._coverage.add(self._weight, self._name, self._start, self._end - self._start)
        self._name, self._start, self._end = name, start, start + nbytes


Contents = Sequence[tuple[str, int]]
"""Tensors, each with the bytes of its slice; one object for all files with the same."""


class Coverage:
    """What one process puts, of what it is to."""

    @classmethod
    def of(cls, planner: Planner, slice_ranges: Iterable[SliceRange]) -> Coverage:
        """Return what notes whether slices of destination files are put, each byte once."""
        contents_cache: dict[object, Contents] = {}

        def contents(part: SliceRange) -> Contents:
            slices = planner.slices(part.file)  # one list for all files with the same
            key = id(slices), part.first, part.stop
            if key not in contents_cache:
                contents_cache[key] = [
                    (parameter.name, content_bytes(parameter.dtype, shape))
                    for parameter, shape in slices[part.first : part.stop]
                ]
            return contents_cache[key]

        return cls((part.file, contents(part)) for part in slice_ranges)

    def __init__(self, parts: Iterable[tuple[int, Contents]]) -> None:
        """parts: of each file what the process puts into it."""
        self._draw = Random(SystemRandom().getrandbits(128))
        self._power = lru_cache(1 << 14)(partial(pow, self._draw.randrange(2, PRIME), mod=PRIME))
        self._files = defaultdict[int, int](partial(self._draw.randrange, 1, PRIME))
        self._names = defaultdict[str, int](partial(self._draw.randrange, 1, PRIME))
        self._total, sums = 0, dict[int, tuple[int, Contents]]()
        for file, contents in parts:
            if id(contents) not in sums:
                terms = (self._names[name] * (self._power(n) - 1) for name, n in contents)
                sums[id(contents)] = sum(terms), contents
            self._total -= self._files[file] * sums[id(contents)][0]

    def over(self, sinks: Mapping[int, Sink]) -> dict[int, Sink]:
        """Return sinks of which is noted what is put; of one that files share, for all of them."""
        weights = dict[Sink, int]()
        for file, sink in sinks.items():
            weights[sink] = weights.get(sink, 0) + self._files[file]
        covered = {sink: CoveredSink(sink, weight, self) for sink, weight in weights.items()}
        return {file: covered[sink] for file, sink in sinks.items()}

    def add(self, weight: int, name: str, start: int, nbytes: int) -> None:
        """Note a range of a slice. weight: its file's."""
        power = self._power
        self._total += weight * self._names[name] * (power(start + nbytes) - power(start))

    def check(self) -> None:
        """Raise RankxformError unless every byte was put once, and none elsewhere."""
        if self._total % PRIME:
            raise wrong("bytes of slices were put twice, or never, or into another file")
