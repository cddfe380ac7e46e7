"""What each destination file holds: some slices of one destination rank.

In rank folders a file holds all slices of the rank that is its id. Other forms divide a rank's
slices among files, or leave out those that another file holds.
"""

from __future__ import annotations

from rankxform.values import dataclass


@dataclass(frozen=True)
class FileContent:
    """One destination file: whose slices, of which parameters (None: of all that the rank gets)."""

    rank: int
    names: frozenset[str] | None = None
