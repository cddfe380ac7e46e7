"""What a schedule names for one tile: reads, messages, copies, writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from rankxform.geometry.box import Box
from rankxform.geometry.tiling import Cell
from rankxform.storage.posix import Buffer
from rankxform.values import dataclass

from .arena import Region

if TYPE_CHECKING:
    from .arena import SourceIndices, View
    from .convert import Convert


class TileRead(NamedTuple):
    """A read of source `cell` from content byte `start` on, `step` bytes further with every
    repetition, into `room` in the arena; `sparse` if bytes in between are skipped.

    run, stride: `room` is filled by runs of so many bytes, each so many behind the start of the
    last; 0: it is one.
    """

    cell: Cell
    start: int
    step: int
    room: Buffer
    sparse: bool
    run: int = 0
    stride: int = 0


class TileWrite(NamedTuple):
    """A write to destination `cell` from content byte `start` on, `step` bytes further with every
    repetition: `data` in the arena, once `copies` have assembled it. places: of each copy, which
    source elements it takes, where steps change them."""

    cell: Cell
    start: int
    step: int
    data: Buffer
    copies: Sequence[View]
    places: Sequence[SourceIndices] = ()


@dataclass(frozen=True)
class TileMessages:
    """What crosses between this process and others in one tile, as (process, message).

    packs: copies to do before sending. sends, recvs: messages sent by the process that reads.
    repacks, forwards: copies and messages for other processes of the node, once the received
    messages are there; forwarded: such messages that this process receives.
    """

    packs: Sequence[View]
    sends: Sequence[tuple[int, Buffer]]
    recvs: Sequence[tuple[int, Buffer]]
    repacks: Sequence[View]
    forwards: Sequence[tuple[int, Buffer]]
    forwarded: Sequence[tuple[int, Buffer]]


@dataclass(frozen=True)
class TileWork:
    """What is done for one tile of a parameter, and `count` - 1 times more further on.

    All `writes` are assembled one after another in the same memory, which therefore stays in the
    cache. sources, targets: what is read and wanted, and what is stored, for the integrity check;
    the sources' parts tile what the targets tile. They are those of the first tile, and move on by
    `step` elements of `axis` with every repetition. messages: None of a local transfer. convert:
    makes each copy, if that is more than an assignment. arena: tells apart the arenas; 0
    where what is read is of no use to the next tile. direct: if every store is just what one fetch
    reads, these pairs.
    """

    count: int
    fetches: Sequence[TileRead]
    writes: Sequence[TileWrite]
    sources: Sequence[Region] = ()
    targets: Sequence[Region] = ()
    axis: int = 0
    step: int = 0
    messages: TileMessages | None = None
    convert: Convert | None = None
    arena: int = 0
    direct: Sequence[tuple[TileRead, TileWrite]] = ()

    def at(self, repeat: int, box: Box) -> Box:
        """Return where a box of the first tile is in the repetition of this number."""
        return box.shifted(self.axis, repeat * self.step) if repeat else box
