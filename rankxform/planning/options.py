"""What of a checkpoint is converted: options."""

from __future__ import annotations

from rankxform.options import (
    AFFECTS_BYTES,
    AFFECTS_COMPARISON,
    AFFECTS_FIT,
    AFFECTS_LOAD,
    GROUP_SELECTION,
    TYPE_RANKS,
    choice_of,
    option,
)
from rankxform.values import dataclass

from .selection import ERROR, UNMATCHED


@dataclass(frozen=True, kw_only=True)
class SelectionOptions:
    """What of a checkpoint is converted. See the help of each."""

    ranks: tuple[int, ...] = option(
        (),
        GROUP_SELECTION,
        "destination ranks (default: all)",
        AFFECTS_FIT,
        kind=TYPE_RANKS,
        metavar="N,N-N",
    )
    unmatched: str = option(
        ERROR, GROUP_SELECTION, "parameters that only one strategy lists: drop them, or treat "
        "them as replicated on the other side (default: error)", AFFECTS_BYTES, AFFECTS_COMPARISON,
        AFFECTS_FIT, AFFECTS_LOAD, kind=choice_of(UNMATCHED),
    )  # fmt: skip
