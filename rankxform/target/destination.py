"""Kinds of destination.

A folder (`rankxform.target.folder`) is the kind whose addresses are paths; other kinds are found
by the scheme of their addresses. Files that exist (`rankxform.target.existing`) are compared.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from posixpath import splitext
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from rankxform.engine.copier import Operands
from rankxform.engine.pipeline import Messenger, Traffic, WorkInputs, execute
from rankxform.engine.sinks import ArraySink, OutputFile, check_apart
from rankxform.errors import UsageError
from rankxform.formats.container import BLOCK, FileLayout, Index, TensorSpec, container_of
from rankxform.layout.names import compile_regex
from rankxform.layout.strategy import Strategy
from rankxform.operations.base import BlockScale
from rankxform.planning.assign import Assignment, Due, runs_of
from rankxform.planning.catalog import Parameter
from rankxform.planning.exchange import WorkPlan
from rankxform.planning.plan import Planner
from rankxform.planning.transfers import SliceRange
from rankxform.publish.journal import write_parts
from rankxform.request import Request
from rankxform.statements import Finding
from rankxform.storage.identity import is_same_file
from rankxform.storage.posix import (
    create,
    make_folder,
    publish_file,
    remove_if_possible,
    sync,
    unique_name,
)
from rankxform.storage.source_reader import SourceReader, check_content
from rankxform.storage.store import scheme_of
from rankxform.transport import Team
from rankxform.transport.team import OnProgress
from rankxform.values import NamedTuple

from .target import Conversion, Target

if TYPE_CHECKING:
    from rankxform.planning.certificate import PlanProof


class StoredFiles(NamedTuple):
    """What a destination had already, and how its files are stored; for reports."""

    linked: int = 0  # files that share another one's bytes
    kept: int = 0  # files that were complete before
    resumed: bool = False  # whether a stopped run is continued
    continued: int = 0  # files that an earlier run had begun
    bytes_before: int = 0  # bytes of tensors that an earlier run had written
    compared: int = 0  # complete files that were compared with their fingerprints
    # Which nodes have which files, or write them, for people; None: all have one folder.
    placement: str | None = None


class Destination(ABC):
    """Where a target is stored, as one process has it; made for one conversion.

    `verbs.convert.convert` makes these calls in this order; all but `fill` are collective. A
    subclass may leave calls out, and never reorders them.
    """

    is_ascending: ClassVar[bool] = False
    """Whether files take their bytes from the first to the last. What a process has to do is then
    done file by file, so that `left` had best be whole files."""

    is_memory: ClassVar[bool] = False
    """Whether content stays in memory, where writing costs nothing beside reading."""

    files_at_once: int | None = None
    """How many files a process had best fill at a time; None: any number, in any order."""

    left: Assignment
    """By process the slices that are to be put; `claim` sets it."""

    due: Due | None = None
    """All that is to be put, whoever does it; `claim` sets it where plans are proved."""

    proof: PlanProof | None = None
    """What proves the plan, where it was proved."""

    def prepare(self, request: Request, team: Team) -> Request:
        """Return the request with what the destination itself declares, or other processes ask."""
        return request

    def check_free(self, conversion: Conversion, team: Team) -> Sequence[Finding]:
        """See that storing harms nothing; return what lies there.

        Raises UsageError or StorageError.
        """
        return ()

    @abstractmethod
    def claim(self, conversion: Conversion, team: Team) -> AbstractContextManager[Conversion]:
        """Take the place, set `left`, and yield the conversion as it is stored here.

        No other run writes there meanwhile. Where the block fails, what can be continued is kept,
        and the rest abandoned.
        """

    def begin(self, team: Team) -> None:  # noqa: B027
        """Make room, before the first byte."""

    @abstractmethod
    def fill(self, work: WorkPlan, inputs: WorkInputs, on_progress: OnProgress) -> Traffic:
        """Carry out this process's work, and note what is complete.

        Work that a failure or a stop ended can be continued by a later run.
        """

    def publish(self, team: Team) -> None:  # noqa: B027
        """Let readers find what is complete, and say that it is."""

    def findings(self, team: Team) -> Sequence[Finding]:
        """Return what is noticed when all is stored, such as others' files that may be loaded."""
        return ()

    @property
    def stored_before(self) -> StoredFiles:
        """What was there already. Local."""
        return StoredFiles()

    def remove_unfinished(self, dst: str) -> Sequence[str]:
        """Remove what stopped runs left at an address; return what that was, in words.

        Raises StorageError where a run is at work.
        """
        return ()

    def remove_conversion(self, place: str) -> bool:
        """Remove the files of a conversion that its records list; return whether there was one.

        Raises StorageError where a run is at work.
        """
        return False

    def change_record(
        self, place: str, name: str, change: Callable[[bytes | None], bytes | None]
    ) -> None:
        """Write a small file anew, or remove it, by what it holds; no other run changes it
        meanwhile. None: it is not there. Raises UsageError where nothing keeps such a file."""
        text = f"nothing keeps {name} there"
        raise UsageError(text, "rankxform transform, for one step", where=place)


def _folder() -> Destination:
    from .folder import FolderDestination

    return FolderDestination()


def _objects() -> Destination:
    from .objects import ObjectDestination

    return ObjectDestination()


DESTINATIONS: dict[str, Callable[[], Destination]] = {
    "": _folder, **dict.fromkeys(("s3", "obs", "gs", "az"), _objects)
}  # fmt: skip
"""What makes a destination, by the scheme of addresses; "" are folders of a file system."""


def destination_at(request: Request, team: Team) -> Destination:
    """Return the destination of process 0's request. Collective.

    Raises UsageError where none is named, or nothing can be stored there.
    """

    def scheme() -> str:
        if request.dst is None:
            raise UsageError("no destination folder")
        if request.shapes is not None:
            raise UsageError("shapes are for a plan; a transform reads a checkpoint")
        check_scheme(request.dst)
        return scheme_of(request.dst)

    return DESTINATIONS[team.bcast(scheme)]()


def check_scheme(dst: str) -> None:
    """Raise UsageError for an address that nothing writes to."""
    scheme = scheme_of(dst)
    if scheme not in DESTINATIONS:
        raise UsageError(f"nothing writes {scheme}:// addresses", "name a folder as DST", where=dst)


def destination_of(dst: str) -> Destination:
    """Return what writes to an address. Raises UsageError where nothing does."""
    check_scheme(dst)
    return DESTINATIONS[scheme_of(dst)]()


class OneFileDestination(Destination):
    """One complete file, written by one process: a part file beside it, then its name.

    It is written completely or not at all. An existing file is replaced, even by several processes
    at once. There is no manifest and no journal: a stopped conversion starts over.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._is_begun = path, False

    @contextmanager
    def claim(self, conversion: Conversion, team: Team) -> Iterator[Conversion]:
        source, target, request = conversion.source, conversion.target, conversion.request
        if any(is_same_file(self._path, Path(path)) for path in source.paths.values()):
            raise UsageError("is a source file, which is never written to", where=self._path)
        (self._rank,), self._durable = target.ranks, request.fsync
        layouts = FileLayoutCache(target.planner, source.indexes, target, request.crc)
        self._output = OutputFile(unique_name(self._path), layouts.of(self._rank))
        self.left = [[target.planner.whole_file(self._rank)]]
        try:
            yield conversion
        except BaseException:
            if self._is_begun:  # before, it is another thread's
                remove_if_possible(self._output.part)
            raise

    def begin(self, team: Team) -> None:
        make_folder(self._path.parent)
        create(self._output.part)
        self._is_begun = True

    def fill(self, work: WorkPlan, inputs: WorkInputs, on_progress: OnProgress) -> Traffic:
        return write_parts(work, inputs, {self._rank: self._output}, on_progress)

    def publish(self, team: Team) -> None:
        if self._durable:
            sync(self._output.part)
        publish_file(self._output.part, self._path, durable=self._durable)


class RankRequest(NamedTuple):
    """What one process wants: the slices of a rank, of some names."""

    rank: int
    include: tuple[str, ...]


class ArrayDestination(Destination):
    """Arrays in memory: each process gets the slices of a rank, of the names that it includes.

    arrays: by name, in the order of the rank's file, once they are published.
    """

    is_memory = True
    arrays: Mapping[str, Any]
    rank_requests: tuple[RankRequest, ...]

    def __init__(
        self,
        rank: int,
        into: Mapping[str, Any] = MappingProxyType({}),
        slices: Mapping[str, Any] = MappingProxyType({}),
        *,
        may_be_none: bool = False,
        in_huge_pages: bool = False,
        rank_requests: tuple[RankRequest, ...] = (),
    ) -> None:
        """into: the caller's arrays, by name, which are filled; others are made. slices: those that
        are read meanwhile. may_be_none: a process beyond the destination's ranks gets nothing.
        in_huge_pages: whether large arrays that are made begin with a huge page. rank_requests: of
        all processes, if they are known."""
        self.rank_requests = rank_requests
        self._into, self._slices = into, slices
        self.rank, self._may_be_none = rank, may_be_none
        self._in_huge_pages = in_huge_pages

    def prepare(self, request: Request, team: Team) -> Request:
        """Return the request of all processes, which may differ in rank and include alone.

        Raises UsageError.
        """
        if self.rank_requests:
            return request
        src, dst = request.src_strategy, request.dst_strategy
        common = {
            **vars(replace(request, include=(), src_strategy=None, dst_strategy=None)),
            "src_strategy": src.label if isinstance(src, Strategy) else src,
            "dst_strategy": dst.label if isinstance(dst, Strategy) else dst,
        }
        texts = {name: repr(value) for name, value in common.items()}  # which all must ask alike
        by_process = team.allgather(lambda: (RankRequest(self.rank, request.include), texts))
        self.rank_requests, all_texts = zip(*by_process)
        differing = [name for name in texts if len({other[name] for other in all_texts}) > 1]
        if differing:
            raise UsageError(
                f"the processes of one load differ in {', '.join(differing)}; only rank "
                "and include may differ"
            )
        ranks = tuple(sorted({rank_request.rank for rank_request in self.rank_requests}))
        include = tuple(
            dict.fromkeys(
                text for rank_request in self.rank_requests for text in rank_request.include
            )
        )
        if any(not rank_request.include for rank_request in self.rank_requests):
            include = ()
        ranks = () if self._may_be_none else ranks
        return replace(request, dst=None, ranks=ranks, include=include)

    @contextmanager
    def claim(self, conversion: Conversion, team: Team) -> Iterator[Conversion]:
        planner = conversion.planner

        def share() -> list[list[SliceRange]]:
            all_ranks = {rank_request.rank for rank_request in self.rank_requests}
            if self._may_be_none and (lacking := {*range(planner.dst.ranks)} - all_ranks):
                raise UsageError(
                    f"processes take {len(all_ranks)} of the {planner.dst.ranks} ranks of "
                    f"{planner.dst.label}, and nobody takes rank {min(lacking)}",
                    f"start {max(planner.dst.ranks, planner.catalog.ranks)} processes; those "
                    "that hold nothing pass None"
                    if team.size < planner.dst.ranks
                    else "rank=, another one on each process",
                )
            return [
                _slices_of_names(planner, rank_request)
                if rank_request.rank < planner.dst.ranks
                else []
                for rank_request in self.rank_requests
            ]

        self.left = team.agree(share)
        self._wanted_slices = [
            wanted_slice
            for slice_range in self.left[team.rank]
            for wanted_slice in planner.slices(self.rank)[slice_range.first : slice_range.stop]
        ]
        yield conversion

    def begin(self, team: Team) -> None:
        def make_sink() -> ArraySink:
            sink = ArraySink(
                (TensorSpec(p.name, p.dtype, shape) for p, shape in self._wanted_slices),
                self._in_huge_pages,
                self._into,
            )
            check_apart(self._into, self._slices)
            return sink

        self._sink = team.agree(make_sink)

    def fill(self, work: WorkPlan, inputs: WorkInputs, on_progress: OnProgress) -> Traffic:
        return execute(work, inputs, {self.rank: self._sink}, on_progress)

    def publish(self, team: Team) -> None:
        self.arrays = team.agree(self._sink.take)


def _slices_of_names(planner: Planner, rank_request: RankRequest) -> list[SliceRange]:
    """Return which slices of its rank a process wants that includes only some names."""
    expressions = [compile_regex(pattern, "--include") for pattern in rank_request.include]
    return runs_of(
        rank_request.rank,
        [
            position
            for position, (p, _) in enumerate(planner.slices(rank_request.rank))
            if not expressions or any(expression.search(p.name) for expression in expressions)
        ],
    )


class FileLayoutCache:
    """The layouts of destination files; those with slices of one shape share one.

    What is in a file depends on the source files of its pipeline stage, not on which other
    files are made in the same run.
    """

    def __init__(
        self, planner: Planner, indexes: Mapping[int, Index], target: Target, checksum: bool
    ) -> None:
        self._planner, self._indexes = planner, indexes
        self._target, self._checksum = target, checksum
        self._known: dict[int, FileLayout] = {}

    def of(self, file: int) -> FileLayout:
        """Return the layout of a destination file."""
        slices = self._planner.slices(file)  # one list for all ranks with the same
        if id(slices) not in self._known:
            arrangement = self._target.arrangement
            name, tensors = arrangement.names[file], self._planner.tensors(file)
            source = self._source(file)
            begins = min(source.offsets, default=0) % BLOCK
            # Entries named after a source tensor that the file does not get are left out.
            omitted = {*source.schema.names}.difference(tensor.name for tensor in tensors)
            metadata = {key: text for key, text in source.metadata.items() if key not in omitted}
            container = container_of(splitext(name)[1])  # some forms have two
            layout = container.lay_out(
                self._target.arrangement.as_in_files(tensors) if arrangement.stacked else tensors,
                self._target.form.metadata(metadata),
                self._checksum,
                begins,
            )
            self._known[id(slices)] = layout
        return self._known[id(slices)]

    def _source(self, file: int) -> Index:
        """Return the file of the lowest source rank of a destination file's stage."""
        planner = self._planner
        return next(
            index
            for stage in planner.source_stages(
                planner.dst.stage_of(planner.content_of_file(file).rank)
            )
            for src_file, index in self._indexes.items()
            if planner.catalog.stage_of(src_file) == stage
        )


@contextmanager
def open_work_inputs(
    conversion: Conversion,
    work: WorkPlan | None = None,
    messenger: Messenger | None = None,
    on_progress: OnProgress = lambda nbytes: None,
) -> Iterator[WorkInputs]:
    """Open the source's files, and those of an adapter, to do `work` (None: to look at tensors).

    Operands that processes send each other are in memory when it returns; where `work` has such,
    every process calls it, with messages.
    """
    source, target = conversion.source, conversion.target
    with ExitStack() as stack:
        digests_by_file = target.evidence.digests_by_file

        def recheck(file: int) -> None:
            check_content(source.paths[file], source.indexes[file], digests_by_file.get(file, {}))

        sources = operand_reader = stack.enter_context(
            SourceReader(source.paths, source.indexes, recheck)
        )
        planner, adapter = target.planner, target.adapter
        tensors: dict[str, tuple[Parameter, SourceReader]] = {}
        if any(any(parameter.steps) for parameter in planner.selection.parameters):
            tensors = {p.src_name: (p, sources) for p in planner.catalog.parameters}
        if adapter is not None:
            operand_reader = stack.enter_context(SourceReader(adapter.paths, adapter.indexes))
            adapter_parameters: list[Parameter] = adapter.require_catalog().parameters
            steps = (step for p in planner.selection.parameters for step in p.steps)
            added_names = {
                name
                for step in steps
                if step is not None and not isinstance(step, BlockScale)
                for name in step.operands
            }
            tensors.update(
                (p.src_name, (p, operand_reader))
                for p in adapter_parameters
                if p.src_name in added_names
            )
        first = work.operands if work is not None else None
        if first is None:
            yield WorkInputs(sources, messenger, Operands(tensors) if tensors else None)
            operand_reader.check_unchanged()
            return
        parameters = (transfer.parameter for transfer in first.transfers if transfer.targets)
        arrays = ArraySink(TensorSpec(p.name, p.dtype, p.shape) for p in parameters)
        operand_traffic = execute(
            first, WorkInputs(operand_reader, messenger), {0: arrays}, lambda nbytes: on_progress(0)
        )
        # Otherwise it counts in what these read in all.
        read = 0 if operand_reader is sources else operand_traffic.read
        operand_traffic = replace(operand_traffic, read=read, written=0)
        yield WorkInputs(sources, messenger, Operands(tensors, arrays.take()), operand_traffic)
