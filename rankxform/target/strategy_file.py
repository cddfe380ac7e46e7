"""The derived strategy that is kept beside a destination, and describes it.

A compiled strategy has its own place, which rankxform does not choose. One that was derived is
written beside the destination when the files have their names; a file of that name that describes
another destination never stays there unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from rankxform.errors import RankxformError, StorageError, UsageError
from rankxform.layout.layout import same_boxes
from rankxform.layout.strategy import Strategy
from rankxform.request import Request
from rankxform.storage.posix import is_same_file, read_bytes, remove, write_atomically
from rankxform.storage.store import scheme_of
from rankxform.storage.strategies import (
    encode_strategy,
    is_strategy,
    load_strategy,
    path_of,
    strategy_files_at,
)

from .target import Target

_SUFFIX = "_strategy.ckpt"


def strategy_path(dst: str) -> Path:
    """Return where a derived strategy is kept: beside the destination folder, under its name.

    Raises UsageError for a folder without a name.
    """
    folder = Path(dst)
    folder = folder.resolve() if folder.name == ".." else folder
    if not folder.name:
        raise UsageError("has no name by which its strategy could be kept beside it", where=dst)
    return folder.with_name(folder.name + _SUFFIX)


def label_beside(dst: str) -> str:
    """Return what the derived strategy of a destination is called, wherever it is kept."""
    return dst.rstrip("/") + _SUFFIX if scheme_of(dst) else str(strategy_path(dst))


def _path(target: Target) -> Path | None:
    """Return where the strategy belongs; None where none was derived and none can be there."""
    if target.dst is None:
        return None
    try:
        path = strategy_path(target.dst)
        path.exists()
    except (OSError, UsageError):  # a name that is too long, or none
        if target.derived is not None:
            raise
        return None
    return path


def check_strategy_file(request: Request, target: Target) -> None:
    """Refuse what lies where the destination's strategy belongs, if it describes another.

    One that rankxform derived is replaced if the user says so; the source's, a compiler's and any
    other file never. Raises StorageError.
    """
    _check_companions(request, target)
    path = _path(target)
    if path is None or (not path.exists() and not path.is_symlink()):
        return
    ours = _derived(path)
    if target.derived is None:
        if ours is None or _describes(ours, target):
            return
    elif path.is_file() and _content(target, path) == read_bytes(path):
        return
    source = path_of(request.src_strategy)
    if (
        source is not None
        and source.exists()
        and any(is_same_file(path, f) for f in strategy_files_at(source))
    ):
        raise StorageError(
            "is the source's strategy, and the destination's belongs there",
            "choose another destination",
            where=path,
        )
    if ours is None:
        raise StorageError(
            "is no strategy that rankxform derived, and the destination's belongs there",
            "move it away",
            where=path,
        )
    if not request.overwrite:
        raise StorageError(
            "is the derived strategy of another destination than this one will be",
            "remove it",
            "say --overwrite",
            where=path,
        )


def save_strategy_near(target: Target) -> list[str]:
    """Write a derived strategy beside its destination; remove one that described another.

    A model's small files are copied into it; returns the names of those that were not there.
    """
    copied = []
    for path, content in _companions(target):
        if not path.is_file() or read_bytes(path) != content:
            write_atomically(
                path, content
            )  # under the destination's lock: a killed run's is replaced
            copied.append(path.name)
    _keep_strategy(target)
    return copied


def _keep_strategy(target: Target) -> None:
    path = _path(target)
    if path is None:
        return
    if target.derived is not None:
        data = _content(target, path)
        if not path.is_file() or read_bytes(path) != data:
            write_atomically(path, data, shared=True)
    elif path.is_file():
        ours = _derived(path)
        if ours is not None and not _describes(ours, target):
            remove(path)


def _companions(target: Target) -> Iterator[tuple[Path, bytes]]:
    for name, content in target.companions.items():
        yield target.folder / name, content


def _check_companions(request: Request, target: Target) -> None:
    """Refuse to replace a model's small files by others. Raises StorageError."""
    for path, content in _companions(target):
        is_present = path.exists() or path.is_symlink()
        if is_present and not request.overwrite and read_bytes(path) != content:
            raise StorageError(
                "is already there, and another than would be written",
                "remove it",
                "say --overwrite",
                where=path,
            )


def _content(target: Target, path: Path) -> bytes:
    assert target.derived is not None
    return encode_strategy(target.derived.strategy, path)[path]


def _derived(path: Path) -> Strategy | None:
    """Return the strategy at `path` if rankxform derived it and it is a file of its own."""
    try:
        if path.is_symlink() or not path.is_file() or not is_strategy(path):
            return None
        strategy = load_strategy(str(path))
    except RankxformError:
        return None
    return strategy if strategy.derived else None


def _describes(ours: Strategy, target: Target) -> bool:
    """Tell whether a strategy gives every rank of the destination the boxes that it gets.

    The destination's may list more optimizer states, which follow their parameters.
    """
    dst = target.planner.dst
    if (ours.stage_size, len(ours.stages)) != (dst.stage_size, len(dst.stages)):
        return False
    for our_layouts, theirs in zip(ours.stages, dst.stages):
        if any(name not in our_layouts for name in theirs if dst.states.of(name) is None):
            return False
        if any(n not in theirs or not same_boxes(our_layouts[n], theirs[n]) for n in our_layouts):
            return False
    return True
