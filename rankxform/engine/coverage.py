"""Whether each byte of a process's slices is put into its file, and once.

Byte i of a slice counts ``x**i`` times a random number for its file and tensor, modulo the prime
2**61 - 1, with an x that is drawn for each run. A range that is put is the difference of two
powers, whatever its size; all ranges together must make the difference of the slices' ends. What
is put twice, or not at all, is found but with a probability of 2**-20 for a slice of a terabyte.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import SystemRandom

from rankxform.formats.container import content_bytes
from rankxform.planning.certificate import PRIME, wrong
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange
from rankxform.storage.posix import Buffer, Position

from .pipeline import Sink


class CoveredSink:
    """A file's sink, of which is noted what is put (`pipeline.Sink`)."""

    def __init__(self, sink: Sink, file: int, coverage: Coverage) -> None:
        self._sink, self._file, self._coverage = sink, file, coverage

    @property
    def bytes_put(self) -> int:
        return self._sink.bytes_put

    def put(self, name: str, start: int, data: Buffer) -> None:
        self._sink.put(name, start, data)
        self._coverage.add(self._file, name, start, len(data))

    def share(self, name: str, start: int, source: Position, nbytes: int) -> bool:
        is_shared = self._sink.share(name, start, source, nbytes)
        if is_shared:
            self._coverage.add(self._file, name, start, nbytes)
        return is_shared

    def finish(self) -> None:
        self._sink.finish()


class Coverage:
    """What one process puts, of what it is to."""

    @classmethod
    def of(cls, planner: Planner, slice_ranges: Iterable[SliceRange]) -> Coverage:
        """Return what notes whether slices of destination files are put, each byte once."""
        return cls(
            (part.file, p.name, content_bytes(p.dtype, shape))
            for part in slice_ranges
            for p, shape in planner.slices(part.file)[part.first : part.stop]
        )

    def __init__(self, slices: Iterable[tuple[int, str, int]]) -> None:
        """slices: (file, tensor, bytes of its content) of each slice that the process puts."""
        random = SystemRandom()
        self._x, self._total = random.randrange(2, PRIME), 0
        self._weights: dict[tuple[int, str], int] = {}
        for file, name, nbytes in slices:
            weight = self._weights[file, name] = random.randrange(1, PRIME)
            self._total -= weight * (pow(self._x, nbytes, PRIME) - 1)
        self._end, self._power = 0, 1  # where the last range ended, and x to that power

    def over(self, sinks: Mapping[int, Sink]) -> dict[int, Sink]:
        """Return sinks of which is noted what is put."""
        return {file: CoveredSink(sink, file, self) for file, sink in sinks.items()}

    def add(self, file: int, name: str, start: int, nbytes: int) -> None:
        """Note a range of a slice. Raises RankxformError for a slice that is none of these."""
        weight = self._weights.get((file, name))
        if weight is None:
            raise wrong(f"a slice of {name} is put into file {file}, which is not to get it")
        before = self._power if start == self._end else pow(self._x, start, PRIME)
        self._end, self._power = start + nbytes, pow(self._x, start + nbytes, PRIME)
        self._total += weight * (self._power - before)

    def check(self) -> None:
        """Raise RankxformError unless every byte was put once."""
        if self._total % PRIME:
            raise wrong("bytes of slices were put twice, or never")
