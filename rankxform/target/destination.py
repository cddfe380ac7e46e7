"""Kinds of destination: how a target's files come to be at the place that was named.

A folder (`rankxform.target.folder`) is the kind of those whose address is a path; others are found
by the scheme of their addresses.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

from rankxform.errors import UsageError
from rankxform.storage.store import scheme_of

if TYPE_CHECKING:
    from rankxform.engine.pipeline import Traffic, WorkInputs
    from rankxform.planning.assign import Assignment
    from rankxform.planning.exchange import WorkPlan
    from rankxform.request import Request
    from rankxform.source.opening import Source
    from rankxform.storage.posix import OnProgress
    from rankxform.transport import Team

    from .target import Target


class Destination(Protocol):
    """A destination while it is made, as one process has it.

    source, target, request: what it is made of, and as it was asked for. remaining_slices: by
    process the slices that are to be written. files_linked, files_kept, files_continued: how many
    files share another's bytes, were complete before, and had been begun by an earlier run;
    bytes_before: of tensors that it had written. placement: in words, where the files are, if not
    at one place, and whose processes write them, if of one node each.
    """

    source: Source
    target: Target
    request: Request
    remaining_slices: Assignment

    @property
    def files_linked(self) -> int: ...
    @property
    def files_kept(self) -> int: ...
    @property
    def files_continued(self) -> int: ...
    @property
    def bytes_before(self) -> int: ...
    @property
    def placement(self) -> str | None: ...

    def begin(self, team: Team) -> None:
        """Prepare what is to be written, before the first byte. Collective."""

    def fill(self, work: WorkPlan, inputs: WorkInputs, on_progress: OnProgress) -> Traffic:
        """Carry out this process's work, and note what is complete.

        Work that a failure or a stop ended can be continued by a later run.
        """

    def publish(self, team: Team) -> None:
        """Let readers find the complete files, and say that they are. Collective."""

    def foreign_warnings(self, team: Team) -> Sequence[str]:
        """Return warnings of others' files, which readers may take for its own. Collective."""


class DestinationKind(Protocol):
    """Where files of one kind of address are made.

    ascending: whether files take their bytes from the first to the last. What a process has to do
    is then done file by file, so that `Destination.remaining_slices` had best be whole files.
    """

    ascending: bool

    def check_free(
        self, request: Request, source: Source, target: Target, team: Team
    ) -> Sequence[str]:
        """See that writing harms nothing; return, as notices, what lies there. Collective.

        Raises UsageError or StorageError.
        """

    def claim(
        self, request: Request, source: Source, target: Target, team: Team
    ) -> AbstractContextManager[Destination]:
        """Yield the destination, which no other run writes meanwhile, with what is left.
        Collective.

        Where the block fails, what can be continued is kept, and the rest abandoned.
        """


class FolderKind:
    """Folders of a file system; what makes them is imported when one is made."""

    ascending = False

    def check_free(
        self, request: Request, source: Source, target: Target, team: Team
    ) -> Sequence[str]:
        from .free import check_free

        return check_free(request, source, target, team)

    def claim(
        self, request: Request, source: Source, target: Target, team: Team
    ) -> AbstractContextManager[Destination]:
        from .folder import claim

        return claim(request, source, target, team)


DESTINATIONS: dict[str, DestinationKind] = {"": FolderKind()}
"""Kinds of destination, by scheme; "" are folders of a file system."""


def destination_of(request: Request) -> DestinationKind:
    """Return what makes the destination of a request.

    Raises UsageError where none is named, or none can be made there.
    """
    if request.dst is None:
        raise UsageError("no destination folder")
    if request.shapes is not None:
        raise UsageError("shapes are for a plan; a transform reads a checkpoint")
    check_scheme(request.dst)
    return DESTINATIONS[scheme_of(request.dst)]


def check_scheme(dst: str) -> None:
    """Raise UsageError for an address that nothing writes to."""
    scheme = scheme_of(dst)
    if scheme not in DESTINATIONS:
        raise UsageError(f"nothing writes {scheme}:// addresses", "name a folder as DST", where=dst)
