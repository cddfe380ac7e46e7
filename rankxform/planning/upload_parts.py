"""How a file is divided that is uploaded in parts.

A part is sent once, by one process. So a file is cut between its tensors into units, each of one
part at least, and one process writes a unit: no part has bytes of two processes. Where the cuts are
follows from the file alone, and not from who writes it: a run that continues another one, by more
processes or fewer, has the same parts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from rankxform.formats.container import FileLayout
from rankxform.values import NamedTuple

LEAST_PART, MOST_PARTS = 5 << 20, 10_000
"""Bytes of a part, but for the last of a file, and the parts of a file, that stores take."""
_USUAL_PART = 8 << 20


class UploadUnit(NamedTuple):
    """Tensors that lie together in a file, and fill some of its parts alone."""

    names: tuple[str, ...]  # in the order of their bytes
    parts: range  # numbers of its parts, which count from 1


class UploadParts(NamedTuple):
    """How a file is divided: where each part begins, and which tensors fill which parts."""

    starts: tuple[int, ...]  # in bytes, ascending, the first 0
    size: int  # of the file, in bytes
    units: tuple[UploadUnit, ...]

    @property
    def nbytes(self) -> dict[int, int]:
        """Bytes of each part, by its number."""
        edges = pairwise((*self.starts, self.size))
        return {number: stop - start for number, (start, stop) in enumerate(edges, 1)}

    def complete_names(self, present_bytes: Mapping[int, int]) -> set[str]:
        """Return the tensors of which nothing is left to be sent. present_bytes: by part."""
        complete = {n for n, nbytes in self.nbytes.items() if present_bytes.get(n) == nbytes}
        return {
            name for unit in self.units if complete.issuperset(unit.parts) for name in unit.names
        }


def divide(layout: FileLayout, part_bytes: int) -> UploadParts:
    """Divide a file into parts of so many bytes at least, and less than twice as many."""
    part_bytes = max(part_bytes, -(-layout.size // (MOST_PARTS - 1)))
    units, starts = list[UploadUnit](), list[int]()
    for names, start, stop in _runs_of(layout, part_bytes):
        count = max(1, (stop - start) // part_bytes)
        first = len(starts) + 1
        starts += [start + (stop - start) * number // count for number in range(count)]
        units.append(UploadUnit(tuple(names), range(first, first + count)))
    return UploadParts(tuple(starts), layout.size, tuple(units))


def _runs_of(layout: FileLayout, least: int) -> list[tuple[list[str], int, int]]:
    """Return runs of tensors with their first byte and that behind their last, of so many bytes
    each but for the last."""
    extents = sorted(
        (spans[0].offset - len(layout.heads.get(spans[0].offset, b"")), position, name)
        for position, (name, spans) in enumerate(layout.spans.items())
    )
    runs: list[tuple[list[str], int, int]] = []
    begins = [*(start for start, _, _ in extents[1:]), layout.size]
    names, first = list[str](), 0
    for (_, _, name), stop in zip(extents, begins):
        names.append(name)
        if stop - first >= least:
            runs.append((names, first, stop))
            names, first = [], stop
    if names and first == layout.size and runs:  # without bytes, at the file's end
        runs[-1][0].extend(names)
    elif names:
        runs.append((names, first, layout.size))
    return runs


class UploadMemory(NamedTuple):
    """What a process's memory is for, while it uploads."""

    nbytes: int  # for parts that fill, or are sent
    part_bytes: int  # of the smallest parts

    @classmethod
    def of(cls, total: int, most_files: int) -> UploadMemory:
        """Divide memory for a process that writes so many files."""
        nbytes = total // 4
        largest = nbytes // (2 * (most_files + _SENT))
        part_bytes = max(LEAST_PART, min(_USUAL_PART, largest))
        return cls(nbytes, part_bytes)

    @property
    def files(self) -> int:
        """How many are filled at a time, each by its parts in order."""
        return max(1, self.nbytes // (2 * self.part_bytes) - _SENT)


_SENT = 2
"""Parts that are sent while others fill, at least."""
