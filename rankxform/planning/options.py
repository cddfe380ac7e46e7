"""What of a checkpoint is converted: options."""

from __future__ import annotations

from rankxform.options import BYTES, COMPARE, FIT, LOAD, RANKS, WHAT, one_of, option
from rankxform.values import dataclass

from .selection import ERROR, UNMATCHED


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """What of a checkpoint is converted. See the help of each."""

    ranks: tuple[int, ...] = option(
        (), WHAT, "destination ranks (default: all)", FIT, kind=RANKS, metavar="N,N-N"
    )
    unmatched: str = option(
        ERROR, WHAT, "parameters that only one strategy lists: drop them, or treat them as "
        "replicated on the other side (default: error)",
        BYTES, COMPARE, FIT, LOAD, kind=one_of(UNMATCHED),
    )  # fmt: skip
