"""Forms: what a folder with a checkpoint looks like, apart from the bytes of its files.

The rest of the package finds a form by its entry in `FORMS`. Files have ids; in forms with one file
for each rank, a file's id is its rank.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from rankxform.errors import UsageError
from rankxform.formats.base import Format
from rankxform.layout.names import ranges

Step = tuple[int, int]
"""Epoch and step."""


@dataclass(frozen=True)
class Listing:
    """What exists at a path: a file, a folder with files by id, or nothing."""

    is_file: bool = False
    is_folder: bool = False
    files: Mapping[int, tuple[Path, ...]] = field(default_factory=dict)

    def joined(self, other: Listing) -> Listing:
        """Return this listing merged with that of the same path on another node."""
        files = {
            file: tuple(dict.fromkeys((*self.files.get(file, ()), *other.files.get(file, ()))))
            for file in sorted({*self.files, *other.files})
        }
        return Listing(self.is_file or other.is_file, self.is_folder or other.is_folder, files)


@dataclass(frozen=True)
class Shards:
    """The chosen files, by id, and the (epoch, step) they were saved at.

    skipped_steps: other steps that exist. incomplete: of this step and newer ones, those that some
    ranks lack, with these ranks.
    """

    paths: Mapping[int, Path]
    step: Step | None = None
    skipped_steps: tuple[Step, ...] = ()
    incomplete: Mapping[Step, tuple[int, ...]] = field(default_factory=dict)

    @property
    def step_name(self) -> str | None:
        """The step as `--step` takes it, such as 10_73; None if the files' names state none."""
        return "_".join(map(str, self.step)) if self.step else None

    @property
    def newer(self) -> str | None:
        """Which step, this or a newer one, some rank lacks, in words; None if there is none."""
        if not self.incomplete:
            return None
        step, lacking = max(self.incomplete.items())
        which = f"rank {lacking[0]} has" if len(lacking) == 1 else f"ranks {ranges(lacking)} have"
        newer = "newer but " if step != self.step else ""
        return f"epoch {step[0]} step {step[1]} is {newer}not complete: {which} no file of it"


@dataclass(frozen=True)
class Wish:
    """Which files of a source are meant, as the user says; see `rankxform.job.request.Request`."""

    pattern: str | None = None
    step: str | None = None
    suffix: str | None = None


class Form(Protocol):
    """One folder convention. It looks at folders, and opens no checkpoint file."""

    name: str

    def recognizes(self, where: Path) -> bool:
        """Tell whether the folder `where` can only be of this form."""

    def look(self, where: Path, wish: Wish) -> Listing:
        """List the checkpoint files at `where`, as this node has them."""

    def choose(
        self,
        where: Path,
        there: Listing,
        wanted: Iterable[int] | None,
        wish: Wish,
        searched: str = "",
        among: Collection[int] | None = None,
    ) -> Shards:
        """Choose one file for each id: of those `wanted` (None: all that are there), and others.

        `among` are the ids that belong to the checkpoint (None: all that are there): one that is
        not wanted and lacks the step, or has a newer one, is reported too. `searched` says, for
        messages, which nodes were searched. Raises UsageError or CheckpointError that lists the
        candidates; never guesses.
        """

    def path(self, file: int, prefix: str, suffix: str) -> str:
        """Return where a file belongs in a destination, relative to it; `suffix` has a dot."""

    def owns(self, name: str, file: int) -> bool:
        """Tell whether `name`, relative to a destination, may be that file, whatever its prefix."""

    def companions(self, files: Mapping[int, str]) -> Mapping[str, bytes]:
        """Return small files that belong to a complete destination, by their relative names.

        `files` are all that are there, by id. They are written when all these are complete.
        """

    def strangers(self, own: Iterable[Path]) -> list[Path]:
        """Return checkpoint files that a reader may take for one of a destination's `own`."""


FORMS: dict[str, Form] = {}
"""All forms by name; filled in the package's `__init__`."""

USUAL = "ranks"


def form_of(where: Path, name: str | None) -> Form:
    """Return the form called `name`, or if that is None the form of `where`. Raises UsageError."""
    if name is not None:
        if name not in FORMS:
            raise UsageError(f"form {name!r} is none of {', '.join(FORMS)}")
        return FORMS[name]
    known = (form for form in FORMS.values() if form.recognizes(where))
    return next(known, FORMS[USUAL])


@dataclass(frozen=True)
class Target:
    """The files of a destination: where they belong, and in which container."""

    folder: Path
    form: Form
    container: Format
    prefix: str

    def path(self, file: int) -> Path:
        """Return the path of a file."""
        return self.folder / self.form.path(file, self.prefix, "." + self.container.name)

    def paths(self, files: Iterable[int]) -> dict[int, Path]:
        return {file: self.path(file) for file in files}
