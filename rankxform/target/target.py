"""What is made of a source: a destination's files, what each holds, and what goes with them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DestinationFiles, Form
from rankxform.formats.base import Container
from rankxform.planning.consistency import Evidence
from rankxform.planning.plan import Planner
from rankxform.source.opening import Source
from rankxform.storage.store import address_of
from rankxform.values import dataclass

if TYPE_CHECKING:
    from rankxform.derivation.request import Derived


@dataclass(frozen=True)
class Target:
    """What a conversion makes of a source. The same on every process.

    planner: what each file holds, and of what it is made. ranks: the destination ranks that are
    made; files: the ids of their files. dst: the folder or other address that was named (None:
    nothing is written); place: in which the files' names are; form, container, arrangement: how
    they are made. derived: how the destination's strategy came about, if it was derived. adapter:
    what is added to the source's matrices, if anything is. training: facts such as its global_step.
    companions: small files that go with the destination, by name. truncated_vocab: source tensors
    that lose rows of the vocabulary; tied_duplicates: those that are left out, because each is said
    to be the same as another. map_in_words: the map that is applied, with what it takes. warnings:
    what may not be what was meant, to be said first and last; notices: what to know. evidence: what
    bytes were found to say of the source. accepted: doubts that do not refuse it.
    """

    planner: Planner
    ranks: tuple[int, ...]
    files: tuple[int, ...]
    dst: str | None
    place: str
    form: Form
    container: Container
    arrangement: DestinationFiles
    derived: Derived | None = None
    adapter: Source | None = None
    training: Mapping[str, Any] = field(default_factory=dict)
    companions: Mapping[str, bytes] = field(default_factory=dict)
    truncated_vocab: tuple[str, ...] = ()
    tied_duplicates: tuple[tuple[str, str], ...] = ()
    map_in_words: str | None = None
    notices: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()
    evidence: Evidence = Evidence()
    accepted: tuple[str, ...] = ()

    def address(self, file: int) -> str:
        """Return the address of a file."""
        return address_of(self.place, self.arrangement.names[file])

    @property
    def folder(self) -> Path:
        """The place of the files, where it is a folder."""
        return Path(self.place)

    def path(self, file: int) -> Path:
        """Return the path of a file, where the place is a folder."""
        return self.folder / self.arrangement.names[file]

    @property
    def paths(self) -> dict[int, Path]:
        """The path of each file that is made, by its id, where the place is a folder."""
        return {file: self.path(file) for file in self.files}

    def with_evidence(self, evidence: Evidence, notices: Sequence[str] = ()) -> Target:
        """Return what is made where bytes were found to say this of the source; with notices."""
        per_rank_names = evidence.per_rank_tensors
        return replace(
            self,
            planner=self.planner.with_own(per_rank_names) if per_rank_names else self.planner,
            evidence=evidence,
            notices=(*self.notices, *notices, *evidence.notices),
            warnings=self.warnings + evidence.warnings,
        )
