"""The index of a checkpoint file: what it holds and where, found from headers alone."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from .dtype import content_bytes
from .wire import FormatError

ReadAt = Callable[[int, int], bytes]
"""``read_at(offset, nbytes)`` of one file; shorter only where the file ends."""

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Span:
    """One byte interval of a file."""

    offset: int
    nbytes: int


@dataclass(frozen=True)
class Contents:
    """What a file holds, without the where: the same for most ranks of a stage.

    Three parallel tuples, in file order; `shapes` are slice shapes, in elements.
    """

    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[Shape, ...]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.names, self.dtypes, self.shapes))

    @cached_property
    def position(self) -> Mapping[str, int]:
        return {name: i for i, name in enumerate(self.names)}

    def nbytes(self, i: int) -> int:
        """Bytes that the shape and type of entry `i` call for."""
        return content_bytes(self.dtypes[i], self.shapes[i])


@dataclass
class Index:
    """Table of contents of one checkpoint file.

    offsets: for each entry the byte at which its content starts.
    pieces: entries whose content lies in several spans of the file, by position.
    size, modified: the file's bytes and modification time (ns) when it was read.
    crc: byte at which the trailing checksum starts, or None.
    metadata: what safetensors keeps beside tensors.
    """

    contents: Contents
    offsets: array[int]
    pieces: dict[int, tuple[Span, ...]]
    size: int
    modified: int = 0
    crc: int | None = None
    metadata: Mapping[str, str] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        return name in self.contents.position

    def dtype(self, name: str) -> str:
        return self.contents.dtypes[self.contents.position[name]]

    def shape(self, name: str) -> Shape:
        return self.contents.shapes[self.contents.position[name]]

    def nbytes(self, name: str) -> int:
        i = self.contents.position[name]
        pieces = self.pieces.get(i)
        return sum(p.nbytes for p in pieces) if pieces else self.contents.nbytes(i)

    def spans(self, name: str) -> tuple[Span, ...]:
        """Return where the content of `name` lies, in order."""
        i = self.contents.position[name]
        return self.pieces.get(i) or (Span(self.offsets[i], self.contents.nbytes(i)),)


@dataclass(frozen=True)
class Entry:
    """One parameter as a format's reader finds it."""

    name: str
    dtype: str
    shape: Shape
    spans: tuple[Span, ...]


def build(entries: Sequence[Entry], size: int, **rest: object) -> Index:
    """Check entries against their shapes and make the index. Raises FormatError."""
    for entry in entries:
        _check(entry)
    contents = Contents(
        tuple(e.name for e in entries),
        tuple(e.dtype for e in entries),
        tuple(e.shape for e in entries),
    )
    offsets = array("q", (e.spans[0].offset if e.spans else 0 for e in entries))
    pieces = {i: e.spans for i, e in enumerate(entries) if len(e.spans) != 1 and contents.nbytes(i)}
    return Index(contents, offsets, pieces, size, **rest)  # type: ignore[arg-type]


def _check(entry: Entry) -> None:
    if any(n < 0 for n in entry.shape):
        raise FormatError(f"{entry.name!r} has a negative dimension: {list(entry.shape)}")
    if any(n >> 48 for n in entry.shape):
        raise FormatError(f"{entry.name!r} has an axis of over 2**48; the file is damaged")
    have = sum(span.nbytes for span in entry.spans)
    want = content_bytes(entry.dtype, entry.shape)
    if have != want:
        raise FormatError(
            f"{entry.name!r} is {entry.dtype} {list(entry.shape)}, which takes {want} bytes, "
            f"but the file holds {have}; copy or save the file again"
        )


def gaps(index: Index) -> Iterator[Span]:
    """Yield what of a file is no parameter's content: its headers, in order.

    A checksum behind the last parameter is of the content, and left out.
    """
    spans = sorted(
        (span for name in index.contents.names for span in index.spans(name)),
        key=lambda span: (span.offset, span.nbytes),
    )
    end = index.size if index.crc is None else index.crc
    at = 0
    for span in [*spans, Span(end, 0)]:
        if span.offset > at:
            yield Span(at, span.offset - at)
        at = max(at, span.offset + span.nbytes)


def locate(spans: Sequence[Span], start: int, nbytes: int) -> Iterator[Span]:
    """Yield the file intervals of ``nbytes`` content bytes from content byte `start` on.

    >>> list(locate((Span(100, 10), Span(200, 10)), 8, 4))
    [Span(offset=108, nbytes=2), Span(offset=200, nbytes=2)]
    """
    for span in spans:
        if not nbytes:
            return
        if start >= span.nbytes:
            start -= span.nbytes
            continue
        take = min(nbytes, span.nbytes - start)
        yield Span(span.offset + start, take)
        start, nbytes = 0, nbytes - take
