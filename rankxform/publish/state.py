"""What was found in a destination folder when it was opened."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from rankxform.values import dataclass

from .records import CompletedSlices


@dataclass(frozen=True)
class FolderState:
    """What was found in a target when it was opened; every process gets it.

    complete_files: ranks whose files are complete. completed: of those that are not. seed: of
    fingerprints.
    """

    folder: Path
    token: str
    seed: int
    complete_files: frozenset[int]
    completed: CompletedSlices

    def with_all(self, states: Iterable[FolderState]) -> FolderState:
        """Return this folder's state with what is complete in all folders, of which it is one."""
        complete_files, completed = self.complete_files, CompletedSlices()
        for state in states:
            complete_files |= state.complete_files
            completed.add(state.completed)
        return replace(self, complete_files=complete_files, completed=completed)
