"""The one counter of what is read: for the plan, for costs, for a simulation and for reports.

Counts depend on where cells lie and not on tensors' names, so tensors that are stored alike and
wanted alike are counted once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rankxform.formats.dtype import item_size
from rankxform.geometry.box import Box, bounding_boxes
from rankxform.geometry.tiling import Cell, SourceTiling, Tiling, overlaps

from .read_method import ReadCount, ReadMethod, count_reads
from .transfers import Transfer


class ReadCounter:
    """Counts what a process reads of source cells, by one method."""

    def __init__(self, method: ReadMethod) -> None:
        self._method = method
        self._cells: dict[object, tuple[ReadCount, ...]] = {}
        self._parts: dict[object, ReadCount] = {}

    def of_box(self, src: SourceTiling, cell: Cell, box: Box, item: int) -> ReadCount:
        """Count what is read of a source cell for a region of it. `item`: bytes of an element."""
        return count_reads(self._method, src.box_in_source(cell, box), src.source_box(cell), item)

    def of_part(
        self, src: SourceTiling, src_cell: Cell, dst: Tiling, cells: Sequence[Cell], item: int
    ) -> ReadCount:
        """Count what is read of a source cell, in one read, for all of some destination cells."""
        key = src, src_cell, dst, tuple(cells), item
        if key not in self._parts:
            common = (pair for cell in cells for pair in overlaps(src, dst, cell))
            bounds = bounding_boxes(pair for pair in common if pair[0] == src_cell)
            self._parts[key] = self.of_box(src, src_cell, bounds[src_cell], item)
        return self._parts[key]

    def of_cells(
        self, src: SourceTiling, dst: Tiling, cells: Sequence[Cell], item: int
    ) -> tuple[ReadCount, ...]:
        """Count what a process reads that makes some destination cells.

        It reads each source cell once, for all of them.
        """
        key = src, dst, tuple(cells), item
        if key not in self._cells:
            bounds = bounding_boxes(pair for cell in cells for pair in overlaps(src, dst, cell))
            self._cells[key] = tuple(self.of_box(src, c, box, item) for c, box in bounds.items())
        return self._cells[key]

    def of_transfers(
        self, transfers: Iterable[Transfer]
    ) -> Iterator[tuple[Transfer, tuple[ReadCount, ...]]]:
        """Yield with each transfer what its process reads for it."""
        for transfer in transfers:
            parameter = transfer.parameter
            item = item_size(parameter.src_dtype)
            yield (
                transfer,
                self.of_cells(parameter.grid, transfer.grid, tuple(transfer.targets), item),
            )


def bytes_to_read(transfers: Iterable[Transfer], method: ReadMethod) -> int:
    """Return the bytes that one process reads to carry out `transfers`."""
    counted = ReadCounter(method).of_transfers(transfers)
    return sum(read.nbytes for _, reads in counted for read in reads)
