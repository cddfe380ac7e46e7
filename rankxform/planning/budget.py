"""What ``--memory`` of a process is for; the only place where it is divided."""

from __future__ import annotations

from collections.abc import Iterator

from rankxform.display.text import format_buffer
from rankxform.values import NamedTuple

_LARGEST_ARENA, _LEAST_ARENA = 8 << 20, 64 << 10
_ARENA_IN_FLIGHT = 512 << 10
_MOST_IN_FLIGHT, _MOST_IN_MEMORY = 12, 4
"""How many tiles are in flight at a time, if each has an arena of so many bytes; between slices in
memory fewer and larger ones, of which a tile takes longer to work out than to read."""

_FILE_BUFFER, _LEAST_FILE_BUFFER = 64 << 10, 4 << 10


class MemoryBudget(NamedTuple):
    """Bytes of a process. The same on every process of an exchange, whose tiles follow from it."""

    total: int
    arenas: int  # in which tiles are assembled, together
    arena: int  # of one tile
    in_flight: int  # number of tiles that are under way at a time
    announced: int  # for what storage reads ahead; 0: it does not
    file_buffers: int  # of all destination files, at most

    @classmethod
    def of(
        cls, total: int, *, exchanges: bool, is_announced: bool = False, in_memory: bool = False
    ) -> MemoryBudget:
        """Divide `total`, which is what operands leave.

        exchanges: whether tiles wait for messages. is_announced: whether storage is told what is
        read next. in_memory: whether the source's slices lie in memory.
        """
        arenas = total // (4 if is_announced else 2)
        most = _MOST_IN_MEMORY if in_memory else _MOST_IN_FLIGHT
        in_flight = max(2, min(most, arenas // _ARENA_IN_FLIGHT)) if exchanges else 1
        arena = min(_LARGEST_ARENA, max(arenas // in_flight, _LEAST_ARENA))
        announced = total // 2 if is_announced else 0
        return cls(total, arenas, arena, in_flight, announced, total - arenas - announced)

    @property
    def large_arena(self) -> int:
        """Of one tile that is better large, with the other: it exchanges axes."""
        return max(self.arena, self.arenas - self.arena)

    def file_buffer(self, files: int) -> int:
        """Return the size of one file's buffer, of so many files that a process writes."""
        return min(_FILE_BUFFER, max(_LEAST_FILE_BUFFER, self.file_buffers // max(1, files)))

    def in_words(self, files: int) -> Iterator[str]:
        """Yield what the memory is for, if a process writes so many files."""
        tiles = f"{self.in_flight} tiles" if self.in_flight > 1 else "a tile"
        yield f"{format_buffer(self.arena * self.in_flight)} for {tiles} at a time"
        if self.announced:
            yield f"{format_buffer(self.announced)} for what storage reads ahead"
        buffer = self.file_buffer(files)
        yield f"{format_buffer(buffer * files)} for the {files:,} files that it writes"
