"""Kinds of destination, and whether writing harms anything.

A folder (`rankxform.target.folder`) is the kind whose addresses are paths; other kinds are found
by the scheme of their addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from posixpath import relpath
from typing import TYPE_CHECKING, Protocol

from rankxform.engine.copier import Operands
from rankxform.engine.pipeline import Messenger, WorkInputs, execute
from rankxform.engine.sinks import ArraySink
from rankxform.errors import StorageError, UsageError
from rankxform.formats.container import TensorSpec
from rankxform.layout.names import first_texts
from rankxform.planning.catalog import Parameter
from rankxform.planning.exchange import WorkPlan
from rankxform.publish.folder_records import FOLDER_NAME, JOB_NAME, MANIFEST_NAME
from rankxform.request import Request
from rankxform.source.choose import listing_at
from rankxform.source.open import Source
from rankxform.storage.posix import (
    OnProgress,
    inode,
    is_below,
    is_below_any,
    is_same_file,
    read_bytes,
)
from rankxform.storage.source_reader import SourceReader, check_content
from rankxform.storage.store import is_path, scheme_of
from rankxform.transport import Team

from .model_files import check_model_files
from .target import Target

if TYPE_CHECKING:
    from rankxform.engine.pipeline import Traffic, WorkInputs
    from rankxform.planning.assign import Assignment
    from rankxform.planning.exchange import WorkPlan
    from rankxform.request import Request
    from rankxform.source.open import Source
    from rankxform.storage.posix import OnProgress
    from rankxform.transport import Team

    from .target import Target


class Destination(Protocol):
    """A destination while it is made, as one process has it."""

    source: Source
    target: Target
    request: Request
    remaining_slices: Assignment  # by process the slices that it writes

    @property
    def files_linked(self) -> int:
        """How many files share another one's bytes."""

    @property
    def files_kept(self) -> int:
        """How many files were complete before."""

    @property
    def files_continued(self) -> int:
        """How many files an earlier run had begun."""

    @property
    def bytes_before(self) -> int:
        """Bytes of tensors that an earlier run had written."""

    @property
    def placement(self) -> str | None:
        """Which nodes have which files, or write them, for people. None: all have one folder."""

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


# Checkpoint files that rankxform did not write, where it has written nothing yet, mean one of two
# things: SRC and DST were exchanged, or files are to be put beside others. Both are for the user
# to say.


def check_free(request: Request, source: Source, target: Target, team: Team) -> list[str]:
    """See that writing will harm nothing, on every node; return notices of what lies there.
    Collective.

    Raises UsageError or StorageError.
    """
    is_leader = team.nodes.is_leader(team.rank)

    def check() -> None:
        _check_root(request, target)
        if is_leader:
            _check_apart(request, source, target.paths.values())

    team.agree(check)
    _check_foreign_files(request, target, team)
    return team.bcast(lambda: check_model_files(request, source, target))


def _check_root(request: Request, target: Target) -> None:
    """Refuse one iteration's folder as the root of iterations."""
    dst, folder = Path(request.dst or ""), target.arrangement.folder
    if folder and re.fullmatch(re.sub(r"[0-9]+", "[0-9]+", folder), dst.name):
        raise UsageError(
            "is one iteration's folder", f"name the folder above it, {dst.parent}", where=dst
        )


def _check_foreign_files(request: Request, target: Target, team: Team) -> None:
    """Refuse a destination that holds another's checkpoint files, and nothing of rankxform's.

    Raises StorageError. Collective.
    """
    dst = Path(request.dst or "")
    folders = dst, target.folder  # which is one iteration's
    marks = [
        folder / name for folder in folders for name in (MANIFEST_NAME, f"{FOLDER_NAME}/{JOB_NAME}")
    ]
    if request.overwrite or any(team.allgather(lambda: any(mark.exists() for mark in marks))):
        return
    foreign_paths = _foreign_files(target, target.paths.values(), team)
    if foreign_paths:
        raise StorageError(
            "holds checkpoint files that rankxform did not write "
            f"({first_texts(foreign_paths, 1)})",
            "name an empty folder",
            "move them away" if target.form.described else "say --overwrite to write beside them",
            "exchange SRC and DST, if they are in another order than meant",
            where=dst,
        )


def _check_apart(request: Request, source: Source, output_paths: Iterable[Path]) -> None:
    """Refuse destination files that are, or lie among, source files, whatever their paths."""
    src, dst = Path(request.src), Path(request.dst or "")
    if dst.exists() and not dst.is_dir():
        raise StorageError("is a file, and DST must be a folder", "name another", where=dst)
    sources = [Path(path) for path in source.paths.values() if is_path(path)]
    files = {inode(path): path for path in sources}
    folders = {inode(path.parent) for path in sources}
    inside = src.is_dir() and (is_below(dst, src) or is_below_any(dst, folders))
    for option in ("lora", "like"):
        option_path = getattr(request, option)
        if option_path is not None and (
            is_same_file(Path(option_path), dst) or is_below(dst, Path(option_path))
        ):
            raise UsageError(
                f"is the folder of --{option}, which is never written to",
                "choose another destination",
                where=dst,
            )
    for final in output_paths:
        final_inode, folder = inode(final), inode(final.parent)
        if inside or (folder is not None and folder in folders):
            raise UsageError(
                f"lies in the source folder {src}, which is never written to",
                "choose another destination",
                where=final,
            )
        if final_inode is not None and final_inode in files:
            raise UsageError(
                f"is the source file {files[final_inode]} under another name, which is never "
                "replaced",
                "choose another destination",
                where=final,
            )
        if final.is_dir():
            raise StorageError("is a folder, where a checkpoint file is to be written", where=final)
    if any(is_same_file(path.parent.parent, dst) for path in sources if path.parent != src):
        raise UsageError(
            "holds the source in its rank folders, which are never written to",
            "choose another destination",
            where=dst,
        )


def foreign_warnings(target: Target, dst_paths: Iterable[Path | str], team: Team) -> list[str]:
    """Return a warning of checkpoint files beside a destination's own, if any. Collective."""
    foreign_paths = _foreign_files(target, dst_paths, team)
    marked = team.bcast(lambda: _later_mark(target))
    if not foreign_paths:
        return marked
    return [
        *marked,
        f"{first_texts(foreign_paths, 1)}: another checkpoint file lies beside those of this "
        "destination, and may be loaded instead; remove what does not belong there",
    ]


def _later_mark(target: Target) -> list[str]:
    """Return, as a warning, that a mark tells readers to take a later checkpoint than this."""
    if target.arrangement.mark is None or target.dst is None:
        return []
    name, content = target.arrangement.mark
    path, number = Path(target.dst) / name, int(content)
    text = read_bytes(path).strip() if path.is_file() else b""
    if not text.isdigit() or int(text) <= number:
        return []
    return [f"{path}: says {int(text)}, and {number} was written: a job takes {int(text)}"]


def _foreign_files(target: Target, dst_paths: Iterable[Path | str], team: Team) -> list[str]:
    """Return other checkpoint files that may be taken for a destination's own. Collective."""
    form, folder = target.form, target.folder
    names = [*(relpath(path, folder) for path in dst_paths), *target.arrangement.names.values()]

    def look() -> list[str]:
        if not team.nodes.is_leader(team.rank) or not folder.is_dir():
            return []
        listing = listing_at(folder, form)
        return [str(folder / name) for name in form.foreign_files(listing, names)]

    paths_by_process = team.allgather(look)
    return sorted({path for paths in paths_by_process for path in paths})


@contextmanager
def open_work_inputs(
    source: Source,
    target: Target,
    work: WorkPlan | None = None,
    messenger: Messenger | None = None,
    on_progress: OnProgress = lambda nbytes: None,
) -> Iterator[WorkInputs]:
    """Open the source's files, and those of an adapter, to do `work` (None: to look at tensors).

    Operands that processes send each other are in memory when it returns; where `work` has such,
    every process calls it, with messages.
    """
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
            tensors.update(
                (p.src_name, (p, operand_reader))
                for p in adapter_parameters
                if "lora" in p.src_name
            )
        first = work.operands if work is not None else None
        if first is None:
            yield WorkInputs(sources, messenger, Operands(tensors))
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
