"""Which transfers are made in turn, tile by tile, because they pick from the same rows.

Two tensors may be made of alternate rows, or of the halves of the rows, of one source tensor. Made
one after the other they would each read all of it; made in turn, the second finds what the first
has read in the arena.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rankxform.geometry.pieces import Piece
from rankxform.planning.transfers import Transfer

_MOST = 4


def group_by_shared_rows(transfers: Iterable[Transfer]) -> Iterator[list[Transfer]]:
    """Yield transfers in their order: those that are made in turn as one list."""
    row_group: list[Transfer] = []
    for transfer in transfers:
        if row_group and not (len(row_group) < _MOST and _share_rows(row_group[-1], transfer)):
            yield row_group
            row_group = []
        row_group.append(transfer)
    if row_group:
        yield row_group


def _share_rows(a: Transfer, b: Transfer) -> bool:
    composed_a, composed_b = a.parameter.composed, b.parameter.composed
    if composed_a is None or composed_b is None or a.exchange or b.exchange:
        return False
    if a.parameter.src_names != b.parameter.src_names or a.readers.items() != b.readers.items():
        return False
    pieces = composed_a.pieces.assembly.pieces, composed_b.pieces.assembly.pieces
    return len(pieces[0]) == len(pieces[1]) and all(map(_overlap, *pieces))


def _overlap(a: Piece, b: Piece) -> bool:
    """Whether two pieces of the same shape take elements of the same rows of the same source."""
    if a.source != b.source or a.shape != b.shape or a.axes != b.axes or not a.src_start:
        return False
    rows, other_rows = a.src_box(a.box), b.src_box(b.box)
    return rows.start[0] < other_rows.stop[0] and other_rows.start[0] < rows.stop[0]
