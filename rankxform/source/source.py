"""A checkpoint that is opened, and what is told and found on the way there; values alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field
from posixpath import dirname
from types import MappingProxyType
from typing import Any

from rankxform.checkpoints.base import CheckpointRef, Form, SelectedFiles
from rankxform.display.text import format_size, shown_path
from rankxform.errors import Message
from rankxform.formats.container import Index, Schema
from rankxform.layout.names import format_ranges
from rankxform.layout.strategy import Strategy
from rankxform.operations.base import OperationChain
from rankxform.planning.catalog import Catalog, Description
from rankxform.planning.plan import Planner, needed_bytes_by_file
from rankxform.planning.transfers import Reach, SliceRange
from rankxform.statements import STEP, TYPE, Finding, HasFindings, Statement, require
from rankxform.storage.store import Listing, address_of
from rankxform.values import NamedTuple, dataclass


@dataclass(frozen=True)
class SourceManifest:
    """What a manifest states of a checkpoint."""

    label: str  # the manifest's path
    # How its ranks shard; None where it does not say so of all pipeline stages, or the form does.
    strategy: Strategy | None = None
    dtypes: Mapping[str, str] = field(default_factory=dict)  # by name
    # What is noted of each, by name relative to the folder.
    files: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    steps: Mapping[str, int] = field(default_factory=dict)  # how far the training was
    applied: tuple[str, ...] = ()  # digests of the adapters that were added
    wrong: tuple[Message, ...] = ()  # companion files that are not as written
    # Files that are not there, of a form that describes itself, in words.
    missing_files: tuple[Message, ...] = ()
    doubts: tuple[str, ...] = ()  # a model's small files that are not as they were copied
    notice: str = ""  # why the manifest could not be read

    def entries(self, paths: Mapping[int, str]) -> dict[int, Mapping[str, Any]]:
        """Return what is noted of each file, by id."""
        folder = dirname(self.label)
        entries_by_path = {address_of(folder, name): f for name, f in self.files.items()}
        return {f: entries_by_path[path] for f, path in paths.items() if path in entries_by_path}

    @property
    def statements(self) -> Iterator[Statement]:
        """What it states that files may contradict."""
        for name, dtype in self.dtypes.items():
            yield Statement(TYPE, name, dtype, self.label)
        for name, value in self.steps.items():
            yield Statement(STEP, name, value, self.label)


def accept_nothing(doubt: str) -> bool:
    """Tell that no doubt was accepted."""
    return False


class SourceNeed(NamedTuple):
    """Which part of a source is read, and with which checks; the same on every process.

    Default: all of it, with all checks.
    """

    ranks: tuple[int, ...] | None = None  # None: all
    operations: OperationChain | None = None  # faults of what they drop do not count
    preferred: Mapping[int, str] = MappingProxyType({})  # names by id: taken if all are there
    accepts: Callable[[str], bool] = accept_nothing  # as `Request.accepts`


ALL = SourceNeed()
"""What is needed of a source that is read whole, with all checks."""


class PlaceUse(NamedTuple):
    """What a conversion needs of one place."""

    place: str
    bytes_needed: int
    ranks_read: tuple[int, ...]  # or files of no rank

    @property
    def in_words(self) -> str:
        """Bytes, and of which ranks."""
        name = "ranks" if self.ranks_read[1:] else "rank"
        ranks = f" of {name} {format_ranges(self.ranks_read)}" if self.ranks_read else ""
        size = format_size(self.bytes_needed) if self.bytes_needed else "nothing was needed of it"
        return f"{shown_path(self.place)}: {size}{ranks}"


@dataclass(frozen=True, kw_only=True)
class Source(HasFindings):
    """A checkpoint opened for reading."""

    where: CheckpointRef  # the checkpoint; its path is absolute
    form: Form
    need: SourceNeed = ALL
    # What lies at the place; on process 0, or on one process of each node.
    listing: Listing | None = field(default=None, compare=False)
    searched: str = ""  # for messages, which nodes and places were searched
    # What rankxform noted when it wrote the files; None: it did not.
    manifest: SourceManifest | None = None
    findings: tuple[Finding, ...] = ()  # what was noticed; the first error refuses
    # Of its files, by `choose_files`:
    selected: SelectedFiles
    strategy: Strategy | None = None  # how its ranks shard; None: nothing says so
    siblings: int = 0  # how many rank folders there are, if one file in one of them was named
    needed_files: tuple[int, ...] = ()  # ids of the files that were looked for
    paths: Mapping[int, str]  # file id -> path, of those that are read
    # Of what each of them holds, by `read_headers`:
    indexes: Mapping[int, Index] = field(default_factory=dict)  # by file id, where it can be read
    reach: Reach = Reach((), ())  # which process can open which file
    # File id -> number of its place in `where.places`; {}: there is one place.
    place_of: Mapping[int, int] = field(default_factory=dict)
    # File id -> index, of files of ranks beyond the strategy's.
    extra_rank_index: Mapping[int, Index] = field(default_factory=dict)
    # Of what all of them hold together, by `describe` and `tabulate`:
    description: Description = Description()  # what is stated of it
    schemas: Mapping[int, Schema] = field(default_factory=dict)  # file id -> what of it counts
    dropped: Callable[[str], bool] = accept_nothing  # tells which tensors are not converted
    catalog: Catalog | None = None  # None: nothing declares how files are sharded, or an error

    def require(self) -> Source:
        """Return the source. Raises its first error."""
        require(self.findings, is_counted=self.form.described)
        return self

    def require_catalog(self) -> Catalog:
        """Return the catalog of a source without errors."""
        assert self.catalog is not None
        return self.catalog

    @property
    def folder(self) -> str:
        """The folder to which the names of its files are relative, or the file itself."""
        if not self.form.described:
            return self.where.path
        return next((dirname(path) for path in self.paths.values()), self.where.path)

    def places_used(
        self, planner: Planner, slice_ranges: Sequence[SliceRange]
    ) -> tuple[PlaceUse, ...]:
        """Return what parts of destination files need of each place, if there are several."""
        if not self.place_of:
            return ()
        ranks: list[set[int]] = [set() for _ in self.where.places]
        nbytes = [0] * len(ranks)
        for file, file_bytes in needed_bytes_by_file(planner, slice_ranges).items():
            nbytes[self.place_of[file]] += file_bytes
            ranks[self.place_of[file]].add(planner.catalog.rank_of(file))
        return tuple(
            PlaceUse(place, size, tuple(sorted(ranks_read)))
            for place, size, ranks_read in zip(self.where.places, nbytes, ranks)
        )
