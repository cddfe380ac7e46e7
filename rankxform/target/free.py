"""Whether a destination is free: what is written there harms no source and no other checkpoint."""

# Checkpoint files that rankxform did not write, where it has written nothing yet, mean one of two
# things: SRC and DST were exchanged, or files are to be put beside others. Both are for the user
# to say.

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from posixpath import relpath

from rankxform.errors import StorageError, UsageError
from rankxform.publish.target import FOLDER_NAME, JOB_NAME, MANIFEST_NAME
from rankxform.request import Request
from rankxform.source.choice import listing_at
from rankxform.source.opening import Source
from rankxform.storage.posix import inode, is_below, is_below_any, is_same_file, read_bytes
from rankxform.storage.store import is_path
from rankxform.transport import Team

from .model_files import check_model_files
from .target import Target


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
            f"holds checkpoint files that rankxform did not write ({_few(foreign_paths)})",
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
        f"{_few(foreign_paths)}: another checkpoint file lies beside those of this destination, "
        "and may "
        "be loaded instead; remove what does not belong there",
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


def _few(paths: Sequence[str]) -> str:
    return paths[0] + (f" and {len(paths) - 1} more" if paths[1:] else "")
