"""What a verification found, and what both kinds of verification look at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, field
from posixpath import basename
from typing import Any

from rankxform.display.units import format_count, format_seconds, format_size
from rankxform.engine.compare_sink import Difference
from rankxform.errors import DifferenceError
from rankxform.formats.base import Index
from rankxform.results import Result
from rankxform.storage.posix import OnProgress
from rankxform.storage.samples import describe_wrong_crc
from rankxform.values import dataclass

_SHOWN = 5
"""Differences that a line or a table names."""


@dataclass(frozen=True, repr=False)
class Verdict(Result):
    """What a verification found, over all processes.

    src, dst: what was compared; src is None with a manifest. differences: by parameter and rank.
    files_compared, bytes_compared: how many destination files, and how many bytes of them, were
    compared. seconds: of the whole call. by_manifest: differences are of files, not of parameters;
    with `sizes_only` headers and samples alone were compared, and `command` is what would compare
    all. step: of the source, if its files' names state one. evidence: on how many comparisons of
    samples the source's strategy stands, and the reads and bytes that this took. names: of
    destination files by id, where a difference's rank is the id of a file (in rank folders it is a
    rank). warnings: what may not be what was meant; notices: what to know.
    """

    src: str | None
    dst: str
    differences: tuple[Difference, ...]
    files_compared: int
    bytes_compared: int
    seconds: float
    processes: int
    notices: tuple[str, ...]
    by_manifest: bool = False
    sizes_only: bool = False
    warnings: tuple[str, ...] = ()
    command: str | None = None
    step: str | None = None
    evidence: Mapping[str, int | None] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)

    @property
    def checked(self) -> str:
        """What was compared: "bytes" with the source, "fingerprints" or "sizes" with a manifest."""
        return "sizes" if self.sizes_only else "fingerprints" if self.by_manifest else "bytes"

    @property
    def same(self) -> bool | None:
        """Whether both sides hold the same; None where no difference was found and no byte of
        content compared."""
        if self.differences:
            return False
        return None if self.sizes_only else True

    def __bool__(self) -> bool:
        """Whether every byte was compared and is the same.

        Raises DifferenceError where nothing was found to differ and not every byte was compared.
        """
        if self.same is None:
            raise DifferenceError(
                "not every byte was compared, so it is not known whether it is the same",
                "look at `same` and `checked`",
                where=self.dst,
            )
        return self.same

    def in_short(self) -> str:
        text_by_verdict = {
            True: "the same",
            False: "DIFFERENT",
            None: "not every byte was compared",
        }
        compared = (
            f"{format_size(self.bytes_compared)} in {format_count(self.files_compared, 'file')}"
        )
        return f"{text_by_verdict[self.same]}: {compared}, {format_seconds(self.seconds)}"

    def amounts(self) -> dict[str, str]:
        text_by_checked = {
            "bytes": "bytes",
            "fingerprints": "fingerprints",
            "sizes": "sizes and samples",
        }
        return {
            "compared": f"{text_by_checked[self.checked]} of {self.dst}",
            "with": self.src or "its own manifest",
            "differences": f"{len(self.differences):,}",
            **{difference.name: difference.why for difference in self.differences[:_SHOWN]},
            **({"compare all": self.command} if self.command else {}),
        }

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as ``verify --json`` prints it.

        A difference has the name of its file where that is not the file of a rank.
        """
        facts = {"same": self.same, "checked": self.checked, **asdict(self)}
        names = facts.pop("names")
        del facts["by_manifest"], facts["sizes_only"]  # what `checked` says
        for difference in facts["differences"]:
            difference["file"] = names.get(difference["rank"])
            difference["rank"] = None if names else difference["rank"]
        return facts


def wrong_checksums(
    paths: Mapping[int, str],
    indexes: Mapping[int, Index],
    ranks: Sequence[int],
    on_progress: OnProgress,
) -> list[Difference]:
    """Compare the files of `ranks` with the checksums that they carry."""
    wrong = {r: describe_wrong_crc(paths[r], indexes[r], on_progress) for r in ranks}
    return [
        Difference(basename(paths[rank]), rank, reason, whole_file=True)
        for rank, reason in wrong.items()
        if reason
    ]


def unreadable_file(path: str, rank: int, reason: str) -> Difference:
    return Difference(basename(path), rank, f"cannot be read: {reason}", whole_file=True)
