"""A file in parts that carries a checksum: what is put is summed, and the sum put where it belongs.

What was sent cannot be read back. So content is summed while it is put, and the part that has the
checksum, the first or the last one, is full when that was put too.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping
from functools import partial

from rankxform.formats.container import Container, FileLayout, Span
from rankxform.planning.upload_parts import UploadParts
from rankxform.storage.posix import Buffer, Position
from rankxform.values import NamedTuple, ScatteredCrc, crc32, crc_with

from .part_writer import NOTHING, PartBuffers, PartWriter, Send

_SCALAR_BYTES = 8


class SpanSum(NamedTuple):
    """What is known of a span that was put: its CRC-32, and its content, if it may be a scalar."""

    crc: int
    scalar: bytes


class SummedWriter:
    """The parts that this process sends of a file with a checksum (`engine.sinks.FileWriter`).

    sums: of spans that this process has put, by the byte where each begins.
    """

    def __init__(
        self,
        layout: FileLayout,
        container: Container,
        parts: UploadParts,
        buffers: PartBuffers,
        send: Send,
        *,
        is_alone: bool,
    ) -> None:
        """is_alone: whether no other process sends parts of the file."""
        self._layout, self._container, self._is_alone = layout, container, is_alone
        offset, patch = container.checksum(layout, lambda _, crc: crc, lambda _: iter(()))
        # A header is put with the content behind it, and again with the checksum.
        again = 0 if layout.trailer else offset + len(patch)
        self._writer = PartWriter(parts, buffers, send, put_again=again)
        self._heads = dict(layout.headers)
        spans = (span for spans in layout.spans.values() for span in spans if span.nbytes)
        self._nbytes = {span.offset: span.nbytes for span in spans}
        self._starts = sorted(self._nbytes)
        self._begun: dict[int, ScatteredCrc] = {}  # of spans of which a part was put
        self.sums: dict[int, SpanSum] = {}
        self._is_complete = False
        self.written = 0

    def put(self, offset: int, data: Buffer, head: Buffer = NOTHING) -> None:
        self._writer.put(offset, data, head)
        self.written = self._writer.written + self._writer.open_bytes
        start = self._starts[bisect_right(self._starts, offset) - 1] if self._starts else 0
        if not len(data) or not start <= offset < start + self._nbytes[start]:
            return  # a header alone
        begun, nbytes = self._begun.setdefault(start, ScatteredCrc()), self._nbytes[start]
        begun.add(offset, data)
        if begun.nbytes == nbytes:
            scalar = bytes(data) if len(data) == nbytes <= _SCALAR_BYTES else b""
            self.sums[start] = SpanSum(self._begun.pop(start).whole, scalar)
            if self._is_alone and len(self.sums) == len(self._starts):
                self.complete(self.sums)

    def share(self, offset: int, source: Position, nbytes: int) -> int:
        return 0

    def complete(self, sums: Mapping[int, SpanSum]) -> None:
        """Put the checksum, if its part is this process's. sums: of all spans."""
        if self._is_complete:
            return
        offset, patch = self._container.checksum(
            self._layout,
            partial(self._crc_of, sums),
            lambda spans: (memoryview(sums[span.offset].scalar) for span in spans),
        )
        is_open = self._writer.is_open(offset)
        if is_open:
            self._writer.put(offset, memoryview(patch))
        # The last part of a file may begin with what an empty tensor has before it, put later.
        self._is_complete = is_open or not self._is_alone

    def flush(self) -> None:
        """See that all was sent, if others need not put theirs before."""
        if self._is_alone:
            self.complete(self.sums)
        if self._is_complete or self._is_alone:
            self._writer.flush()

    def _crc_of(self, sums: Mapping[int, SpanSum], spans: Iterable[Span], crc: int) -> int:
        """Return the CRC-32 of spans, which may hold headers, continued from `crc`."""
        for offset, nbytes in spans:
            end = offset + nbytes
            while offset < end:
                head = self._heads.get(offset)
                if head is not None:
                    crc, offset = crc32(head, crc), offset + len(head)
                else:
                    crc = crc_with(crc, sums[offset].crc, self._nbytes[offset])
                    offset += self._nbytes[offset]
        return crc
