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
from rankxform.layout.names import parameter_of
from rankxform.layout.strategy import Strategy
from rankxform.storage import strategies
from rankxform.storage.posix import is_same, read_bytes, remove, write_small

from .aim import Conversion


def path_beside(dst: str) -> Path:
    """Return where a derived strategy is kept: beside the destination folder, under its name.

    Raises UsageError for a folder without a name.
    """
    folder = Path(dst)
    folder = folder.resolve() if folder.name == ".." else folder
    if not folder.name:
        raise UsageError(f"{dst}: has no name by which its strategy could be kept beside it")
    return folder.with_name(folder.name + "_strategy.ckpt")


def _path(conversion: Conversion) -> Path | None:
    """Return where the strategy belongs; None where none was derived and none can be there."""
    if conversion.request.dst is None:
        return None
    try:
        path = path_beside(conversion.request.dst)
        path.exists()
    except (OSError, UsageError):  # a name that is too long, or none
        if conversion.derived is not None:
            raise
        return None
    return path


def check_strategy_file(conversion: Conversion) -> None:
    """Refuse what lies where the destination's strategy belongs, if it describes another.

    One that rankxform derived is replaced if the user says so; the source's, a compiler's and any
    other file never. Raises StorageError.
    """
    _check_companions(conversion)
    request, path = conversion.request, _path(conversion)
    if path is None or (not path.exists() and not path.is_symlink()):
        return
    ours = _derived(path)
    if conversion.derived is None:
        if ours is None or _describes(ours, conversion):
            return
    elif path.is_file() and _content(conversion, path) == read_bytes(path):
        return
    source = strategies.path_of(request.src_strategy)
    if (
        source is not None
        and source.exists()
        and any(is_same(path, one) for one in strategies.files(source))
    ):
        raise StorageError(
            f"{path}: is the source's strategy, and the destination's belongs there; choose "
            "another destination"
        )
    if ours is None:
        raise StorageError(
            f"{path}: is no strategy that rankxform derived, and the destination's belongs there; "
            "move it away"
        )
    if not request.overwrite:
        raise StorageError(
            f"{path}: is the derived strategy of another destination than this one will be; remove "
            "it, or say --overwrite"
        )


def keep_beside(conversion: Conversion) -> None:
    """Write a derived strategy beside its destination; remove one that described another.

    A model's small files are copied into it.
    """
    for path, content in _companions(conversion):
        if not path.is_file() or read_bytes(path) != content:
            write_small(path, content, shared=True)
    _keep_strategy(conversion)


def _keep_strategy(conversion: Conversion) -> None:
    path = _path(conversion)
    if path is None:
        return
    if conversion.derived is not None:
        data = _content(conversion, path)
        if not path.is_file() or read_bytes(path) != data:
            write_small(path, data, shared=True)
    elif path.is_file():
        ours = _derived(path)
        if ours is not None and not _describes(ours, conversion):
            remove(path)


def _companions(conversion: Conversion) -> Iterator[tuple[Path, bytes]]:
    for name, content in conversion.companions.items():
        yield conversion.target.folder / name, content


def _check_companions(conversion: Conversion) -> None:
    """Refuse to replace a model's small files by others. Raises StorageError."""
    for path, content in _companions(conversion):
        there = path.exists() or path.is_symlink()
        if there and not conversion.request.overwrite and read_bytes(path) != content:
            raise StorageError(
                f"{path}: is already there, and not that of --like; remove it, or say --overwrite"
            )


def _content(conversion: Conversion, path: Path) -> bytes:
    assert conversion.derived is not None
    return strategies.encoded(conversion.derived.strategy, path)[path]


def _derived(path: Path) -> Strategy | None:
    """Return the strategy at `path` if rankxform derived it and it is a file of its own."""
    try:
        if path.is_symlink() or not path.is_file() or not strategies.is_strategy(path):
            return None
        found = strategies.load(str(path))
    except RankxformError:
        return None
    return found if found.derived else None


def _describes(ours: Strategy, conversion: Conversion) -> bool:
    """Tell whether a strategy gives every rank of the destination the boxes that it gets.

    The destination's may list more optimizer states, which follow their parameters.
    """
    dst = conversion.planner.dst
    if (ours.stage_size, len(ours.stages)) != (dst.stage_size, len(dst.stages)):
        return False
    for mine, theirs in zip(ours.stages, dst.stages):
        if any(name not in mine for name in theirs if parameter_of(name) == name):
            return False
        if any(name not in theirs or not same_boxes(mine[name], theirs[name]) for name in mine):
            return False
    return True
