"""The destination as it shall be."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from rankxform.checkpoints.base import DestinationFiles, Form
from rankxform.formats.container import Container
from rankxform.planning.evidence import Evidence
from rankxform.planning.plan import Planner
from rankxform.request import Request
from rankxform.source.source import Source
from rankxform.statements import Finding, HasFindings
from rankxform.storage.store import address_of, scheme_of
from rankxform.values import NamedTuple, dataclass

if TYPE_CHECKING:
    from rankxform.derivation.request import Derived

    from .inputs import ResolvedRequest


@dataclass(frozen=True)
class Target(HasFindings):
    """What a conversion makes of a source. The same on every process."""

    planner: Planner  # what each file holds, and of what it is made
    ranks: tuple[int, ...]  # destination ranks that are made
    files: tuple[int, ...]  # ids of their files
    dst: str | None  # the destination that was named; None: nothing is written
    place: str  # folder or address that the files' names are relative to
    form: Form  # form of the destination
    container: Container  # container of its files
    arrangement: DestinationFiles  # names and contents of its files
    derived: Derived | None = None  # how its strategy was derived; None: it was given
    adapter: Source | None = None  # checkpoint that is added to the source's matrices
    training: Mapping[str, Any] = field(default_factory=dict)  # facts such as its global_step
    # Name -> content of small files that go with it.
    companions: Mapping[str, bytes] = field(default_factory=dict)
    own_companions: frozenset[str] = frozenset()  # of these what is the source's own
    truncated_vocab: tuple[str, ...] = ()  # source tensors that lose rows of the vocabulary
    # Tensors that are left out because each repeats another one.
    tied_duplicates: tuple[tuple[str, str], ...] = ()
    map_in_words: str | None = None  # the map that is applied, for people
    findings: tuple[Finding, ...] = ()  # what was noticed, of the source too
    evidence: Evidence = Evidence()  # what the bytes of the source say about its strategy
    accepted: tuple[str, ...] = ()  # doubts that do not refuse the source

    def address(self, file: int) -> str:
        """Return the address of a file."""
        return address_of(self.place, self.arrangement.names[file])

    @property
    def in_folder(self) -> bool:
        """Whether there is a destination, and it is a folder."""
        return self.dst is not None and not scheme_of(self.dst)

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

    def with_findings(self, findings: Iterable[Finding]) -> Target:
        """Return the same with more that was noticed."""
        return replace(self, findings=(*self.findings, *findings))

    def with_evidence(
        self,
        evidence: Evidence,
        findings: Sequence[Finding] = (),
        place_of: Mapping[int, int] = MappingProxyType({}),
    ) -> Target:
        """Return what is made where bytes were found to say this of the source; with findings.

        place_of: source file -> number of its place, the best first, if there are several.
        """
        names = evidence.per_rank_tensors
        planner = self.planner.with_per_rank_tensors(names) if names else self.planner
        for name, files in evidence.taken_from.items():
            planner = planner.taking_of(name, files)
        planner = planner.preferring(place_of)
        target = replace(self, planner=planner, evidence=evidence)
        return target.with_findings((*findings, *evidence.findings))


class Conversion(NamedTuple):
    """A request, what it reads, and what is made of that. The same on every process."""

    resolved: ResolvedRequest
    source: Source
    target: Target

    @property
    def request(self) -> Request:
        """The request, with absolute paths."""
        return self.resolved.request

    @property
    def planner(self) -> Planner:
        """What each file of the target holds, and of what it is made."""
        return self.target.planner

    def with_findings(self, findings: Iterable[Finding]) -> Conversion:
        """Return the same with more that was noticed."""
        return self._replace(target=self.target.with_findings(findings))
