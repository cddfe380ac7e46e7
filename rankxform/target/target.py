"""The files of a destination, with their paths."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from rankxform.checkpoints.base import Arrangement, Form
from rankxform.formats.base import Format
from rankxform.values import dataclass


@dataclass(frozen=True)
class Target:
    """The files of a destination: where they belong, and in which container."""

    folder: Path
    form: Form
    container: Format
    arrangement: Arrangement

    def path(self, file: int) -> Path:
        """Return the path of a file."""
        return self.folder / self.arrangement.names[file]

    def paths(self, files: Iterable[int]) -> dict[int, Path]:
        return {file: self.path(file) for file in files}
