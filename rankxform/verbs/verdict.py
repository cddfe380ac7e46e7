"""What a comparison found: findings, and of what nothing was found."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from posixpath import relpath
from typing import Any, ClassVar

from rankxform.display.text import (
    first_of_ranks,
    format_count,
    format_seconds,
    format_size,
    from_here,
)
from rankxform.errors import DifferenceError
from rankxform.layout.names import format_ranges, pattern_of
from rankxform.planning.evidence import samples_text
from rankxform.results import NORMAL, QUIET, VERBOSE, Result, Section, Table, lines
from rankxform.source.written import BYTES, DIGESTS, FINGERPRINTS, SAMPLES_ALONE
from rankxform.statements import Finding, HasFindings, join
from rankxform.values import dataclass


class Comparison(Result):
    """A result that tells whether things are the same, as far as they were compared."""

    difference_code: ClassVar[int] = DifferenceError.exit_code  # exit code where they are not
    unknown: ClassVar[tuple[str, ...]]  # why that is not known, and what to look at
    json_first: ClassVar[tuple[str, ...]] = ("same",)

    @property
    @abstractmethod
    def same(self) -> bool | None:
        """Whether they are the same; None: nothing differs, and not enough was compared."""

    def __bool__(self) -> bool:
        """Whether they are the same. Raises DifferenceError where that is not known."""
        if self.same is None:
            place = getattr(self, "dst", None) or getattr(self, "src", None) or ""
            raise DifferenceError(*self.unknown, where=place)
        return self.same

    @property
    def exit_code(self) -> int:
        """Exit code of the command that shows it."""
        if self.same is None:
            return DifferenceError.exit_code
        return 0 if self.same else self.difference_code


@dataclass(frozen=True, repr=False)
class Verdict(HasFindings, Comparison):
    """What a verification of a destination found, over all processes."""

    src: str | None  # the source, as it was named; None: compared with the manifest
    dst: str  # the destination
    # What was compared of the file of which least was: "bytes" with the source, "fingerprints",
    # "samples" or "headers" with the manifest. None: there is no file.
    checked: str | None
    findings: tuple[Finding, ...]  # errors: what differs, by file and tensor
    # Address of a file in a rank folder -> its rank; {}: files are of no ranks.
    ranks: Mapping[str, int] = field(default_factory=dict)
    files_compared: int = 0  # number of destination files
    bytes_compared: int = 0  # bytes of destination files, by all processes
    bytes_sampled: int = 0  # bytes of samples that were compared with the manifest
    total_bytes: int = 0  # size of all files; 0: compared with the source
    seconds: float = 0.0  # of the whole call
    processes: int = 1  # number of processes that it ran on
    command: str | None = None  # what would compare all
    repair: str | None = None  # what would write the destination again, if something differs
    step: str | None = None  # training step of the source; None: no name declares one
    # Samples of the source that were compared, with the reads and bytes that it took.
    evidence: Mapping[str, int | None] = field(default_factory=dict)
    fingerprints_kept: bool = False  # whether the manifest has got fingerprints of the files
    # Digest of what proved the plan by which it was made; None: none was proved, or SRC was named.
    proof: str | None = None
    subset: str | None = None  # the share of files of which bytes were compared; None: all

    unknown: ClassVar[tuple[str, ...]] = (
        "not every byte was compared, so it is not known whether it is the same",
        "look at `same` and `checked`",
    )
    json_first = ("same", "checked")
    json_without = ("findings", "ranks", "checked")

    @property
    def differences(self) -> tuple[Finding, ...]:
        """What differs."""
        return self.errors

    @property
    def same(self) -> bool | None:
        """Whether both sides hold the same; None where no difference was found, and samples or
        headers alone were compared."""
        if self.errors:
            return False
        return True if self._is_read and self.subset is None else None

    @property
    def _is_read(self) -> bool:
        """Whether every byte was compared of the files that were to be read."""
        return self.checked in (BYTES, FINGERPRINTS, DIGESTS)

    @property
    def exit_code(self) -> int:
        """Exit code of the command: 0 for a share of the files too, if nothing in it differs."""
        is_right_share = self.subset is not None and self._is_read and not self.errors
        return 0 if is_right_share else super().exit_code

    @property
    def _compared(self) -> str:
        return f"{format_size(self.bytes_compared)} in {format_count(self.files_compared, 'file')}"

    def in_short(self) -> str:
        text_by_verdict = {
            True: "the same",
            False: "DIFFERENT",
            None: "not every byte was compared",
        }
        return f"{text_by_verdict[self.same]}: {self._compared}, {format_seconds(self.seconds)}"

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as ``verify --json`` prints it."""
        facts = super().as_dict()
        facts["differences"] = [self._as_fact(difference) for difference in self.differences]
        return {**facts, "notices": [*self.notices], "warnings": [*self.warnings]}

    def _as_fact(self, difference: Finding) -> dict[str, Any]:
        file, elements = difference.file, difference.elements
        facts: dict[str, Any] = {
            "rule": difference.rule or None,
            "file": file and self.shown_file(file),
            "rank": self.ranks.get(file or ""),
            "text": difference.text,
        }
        if elements is not None:
            index = None if elements.index is None else [*elements.index]
            facts |= {"tensor": elements.tensor, "index": index}
            facts |= {"count": elements.count, "size": elements.size}
        return facts

    def shown_file(self, address: str) -> str:
        """Return a file's name relative to the destination, if it is in it."""
        inside = address.startswith(f"{self.dst.rstrip('/')}/")
        return relpath(address, self.dst) if inside else address

    def sections(self, level: int = NORMAL) -> Iterator[Section]:
        """Yield whether both sides hold the same, and where they do not; at `VERBOSE` a row for
        each slice."""
        compared = f"{self._compared}, {format_seconds(self.seconds)}"
        is_right_share = self.same is None and self._is_read
        if is_right_share:
            text = (
                f"the same: every byte compared, {compared}; of the other files sizes and samples"
            )
            yield lines(f"share {self.subset}", text)
        elif self.same is None:
            yield lines("NOT VERIFIED:", self._not_compared())
            text = "its source is not there any more, without which not every byte can be compared"
            yield lines("", f"to compare every byte: {self.command}" if self.command else text)
        if self.same is False and level > QUIET:
            yield self._rows(level)
        if level > QUIET:
            yield from self.notes()
        if self.same:
            stands = samples_text(self.evidence) if self.evidence.get("samples") else ""
            basis = f"; SRC's strategy stands on {stands}" if stands else ""
            if self.checked == FINGERPRINTS:
                basis = "; with the fingerprints in its manifest"
                basis += "; plan proved" if self.proof else ""
            if self.checked == DIGESTS:
                basis = "; with the digests beside its manifest"
            yield lines("same", f"every byte compared, {compared}{basis}")
        if self.fingerprints_kept:
            command = join(["rankxform", "verify", from_here(self.dst)])
            yield lines("kept", f"fingerprints, by which SRC is not needed: {command}")
        if self.same is False:
            yield lines("DIFFERENT:", f"{self._where()}; compared {compared}")
            elsewhere = "copy what differs from where it is whole, or convert again"
            if level > QUIET and (self.repair or self.src is None):
                yield lines("", f"to repair: {self.repair or elsewhere}")

    def _not_compared(self) -> str:
        """Return what was compared of files of which not all bytes were."""
        sizes = f"{format_size(self.bytes_sampled)} of {format_size(self.total_bytes)}"
        alone = f"samples alone were compared ({sizes})"
        if self.checked != SAMPLES_ALONE:
            alone = "headers alone were compared"
        return (
            f"{alone}. {format_count(self.files_compared, 'file')} of the right size; the manifest "
            "has no fingerprints (verify SRC DST --keep-fingerprints adds them)"
        )

    def _where(self) -> str:
        slices = [difference for difference in self.differences if difference.elements]
        names = {difference.elements.tensor for difference in slices if difference.elements}
        by_manifest = self.src is None
        files = {d.file for d in self.differences if d.file and (by_manifest or not d.elements)}
        count_texts = [format_count(len(names), "parameter"), format_count(len(slices), "slice")]
        return ", ".join(
            ([] if by_manifest or not slices else count_texts)
            + ([format_count(len(files), "file")] if files else [])
        )

    def _rows(self, level: int) -> Table:
        """Return a row for each difference, or for all of one kind."""
        by_key: dict[object, list[Finding]] = {}
        for difference in self.differences:
            elements = difference.elements
            key: object = difference.file
            if elements is not None:
                key = pattern_of(elements.tensor), elements.index is None
            is_apart = level == VERBOSE
            by_key.setdefault(id(difference) if is_apart else (key, difference.text), []).append(
                difference
            )
        head = ("rank" if self.ranks else "file", "first at", "elements", "what differs")
        noun = "slices" if level == VERBOSE else "kinds of difference"
        return Table(head, [*map(self._row, by_key.values())], noun)

    def _row(self, differences: Sequence[Finding]) -> tuple[object, ...]:
        first = differences[0]
        where = self._files_in_words(difference.file for difference in differences)
        all_elements = [d.elements for d in differences if d.elements is not None]
        if not all_elements:
            is_named = first.file is None or first.file not in self.ranks
            name = "" if is_named else f"{self.shown_file(first.file or '')}: "
            return where, "", "", f"{name}{first.text}"
        names = {elements.tensor for elements in all_elements}
        tensor, index = all_elements[0].tensor, all_elements[0].index
        title = tensor if len(names) == 1 else f"{pattern_of(tensor)} ({len(names):,})"
        if index is None:
            return where, "", "", f"{title}: {first.text}"
        differ = sum(elements.count for elements in all_elements)
        size = sum(elements.size for elements in all_elements)
        return where, str([*index]), f"{differ:,} of {size:,}", title

    def _files_in_words(self, addresses: Iterable[str | None]) -> str:
        """Return the ranks of files, or their names; "-" for what is of no file."""
        files = sorted({address or "" for address in addresses})
        if all(file in self.ranks for file in files):
            return format_ranges(sorted({self.ranks[file] for file in files}))
        return first_of_ranks([self.shown_file(file) if file else "-" for file in files])
