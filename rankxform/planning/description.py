"""What is stated of a checkpoint before a header is read: by a strategy, metadata, an index.

A description is no table yet: a MindSpore strategy knows no shape, and what headers contradict is
a fault. `rankxform.planning.table` makes the catalog of a description and the files' headers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field
from typing import Any, NamedTuple

from rankxform.facts import Statement
from rankxform.formats.base import DeclaredFile
from rankxform.geometry.box import Box, Shape
from rankxform.layout.strategy import Strategy
from rankxform.values import dataclass


class DeclaredBox(NamedTuple):
    """A box of a tensor that a file is said to hold.

    suffix: what stands behind the tensor's name in the file's table of contents.
    """

    file: int
    box: Box
    suffix: str = ""


@dataclass(frozen=True)
class Description:
    """What is stated of a checkpoint, beside its files' headers.

    source: what states it, for messages. strategy: the rule by which ranks hold slices; None if
    there is none. boxes: by tensor what each file holds of it, where that is stated box by box.
    With neither, all tensors are whole, each in one file. ranks: by file the global rank that it is
    of; {}: ids are ranks, or files are of no rank. declared_files: by file the entries of its own
    table of contents under the names that boxes have. items: the kind of what is no tensor, which
    is carried to checkpoints that have the same. listed: by file the names that it is said to hold.
    declared: by name type and full shape, in elements. untracked: the file with values that are
    listed nowhere, if there is one. training: facts such as its global_step. refused: tensors that
    cannot be read, and why, which is a fault unless they are left out. missing_files: by rank a
    file that is spoken of and not there. facts: statements that others may contradict. warnings:
    what may not be what was meant; notices: what to know.
    """

    source: str = ""
    strategy: Strategy | None = None
    boxes: Mapping[str, tuple[DeclaredBox, ...]] = field(default_factory=dict)
    declared_files: Mapping[int, DeclaredFile] = field(default_factory=dict)
    items: str = ""
    ranks: Mapping[int, int] = field(default_factory=dict)
    listed: Mapping[int, tuple[str, ...]] = field(default_factory=dict)
    declared: Mapping[str, tuple[str, Shape]] = field(default_factory=dict)
    untracked: int | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    missing_files: Mapping[int, str] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    facts: tuple[Statement, ...] = ()
    warnings: tuple[str, ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def lists_files(self) -> bool:
        """Whether it says which file of which rank holds what, as Checkpoint 2.0 does."""
        return bool(self.ranks and self.listed)

    @property
    def is_whole(self) -> bool:
        """Whether all tensors are whole, each in one file."""
        return self.strategy is None and not self.boxes
