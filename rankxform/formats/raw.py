"""``.bytes``: items that are no tensors, one behind the other, as HyperParallel keeps them.

Only the checkpoint's ``.metadata`` says where each begins and ends; the file itself is one entry.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence

from .base import Blocks, FileLayout, Index, Patch, ReadAt, Schema, Span, TensorSpec
from .dtype import BYTES, content_bytes


class Raw:
    """Bytes without a table of contents (`rankxform.formats.base.Container`)."""

    name = "bytes"
    alone = False
    has_equal_headers = True

    def read_index(self, read_at: ReadAt, size: int) -> Index:
        return Index(Schema(("",), (BYTES,), ((size,),)), array("q", (0,)), {}, size)

    def order(self, name: str, dtype: str) -> int:
        return 0

    def lay_out(
        self,
        tensors: Sequence[TensorSpec],
        metadata: Mapping[str, str],
        checksum: bool,
        begins: int = 0,
    ) -> FileLayout:
        spans, offset = {}, 0
        for name, dtype, shape in tensors:
            spans[name] = (Span(offset, content_bytes(dtype, shape)),)
            offset += content_bytes(dtype, shape)
        return FileLayout((), spans, offset)

    def checksum(self, layout: FileLayout, blocks: Blocks) -> Patch:
        return 0, b""

    def checksums(
        self, index: Index, read_at: ReadAt, blocks: Blocks
    ) -> Sequence[tuple[str, str, str]]:
        return ()
