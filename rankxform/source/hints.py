"""Which strategies lie where a checkpoint is, in words, for messages."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from shlex import quote

from rankxform.checkpoints.base import Where
from rankxform.errors import Parts
from rankxform.formats.base import suffixes
from rankxform.layout.strategy import Strategy
from rankxform.storage import strategies
from rankxform.storage.store import is_path

_SHOWN = 2
_FOLDER = re.compile(r"rank_(\d+)")


_LOST = "--src-config FILE and --preset NAME, that job's YAML, if its strategy is lost"


def which_strategy(where: Where, names: Mapping[int, str], siblings: Sequence[int]) -> Parts:
    """Say that files of several ranks need a strategy, and which lie beside the checkpoint.

    siblings: the ranks whose folders lie beside the one file that was named.
    """
    folder, ranks = Path(where.path), max(names) + 1
    what = f"holds the files of {len(names)} ranks"
    if where.files is not None:
        what = f"{len(names)} files are given, of as many ranks"
    if siblings:
        ranks, folder = max(siblings) + 1, folder.resolve().parent.parent
        what = f"is the file of one of {len(siblings)} rank folders"
    beside = strategies.beside(folder, ranks) if is_path(where.path) else []
    found = [option_for(path, one) for path, one in beside if is_tied(path, folder)]
    others = [f"{shortly(path)} ({one.extent})" for path, one in beside][:_SHOWN]
    found = found[:_SHOWN] or ["--src-strategy FILE or FOLDER (MindFormers: output/strategy)"]
    there = f"beside it lies {' and '.join(others)}, of this checkpoint or of another"
    none = "--src-strategy none if every rank holds whole parameters (data parallel, "
    above = (f"name the folder of them all, {quote(shortly(folder))}",) if siblings else ()
    return Parts(
        f"{what}, and no --src-strategy says how they were sharded",
        (*above, *found, _LOST, f"{none}remove_redundancy)"),
        where="" if where.files is not None else where.path,
        details=there if others and not any(is_tied(path, folder) for path, _ in beside) else "",
    )


def one_of_ranks(where: Where, strategy: Strategy, siblings: Sequence[int]) -> Parts:
    """Say that one rank's file was named, and the strategy is of all ranks that lie beside it."""
    folder = Path(where.path).resolve().parent.parent
    return Parts(
        f"is the file of one of {len(siblings)} rank folders, and {strategy.label} of "
        f"{strategy.extent}",
        (f"name the folder of them all, {quote(shortly(folder))}",
         "--src-strategy none if the file holds whole parameters"),
        where=where.path,
    )  # fmt: skip


def is_tied(path: Path, folder: Path) -> bool:
    """Tell whether a strategy is a checkpoint's by where it lies, and not just near it.

    In the folder itself; as MindFormers leaves it, ``output/strategy`` beside
    ``output/checkpoint``; or under the folder's name, as rankxform keeps one.
    """
    path, folder = path.absolute(), folder.absolute()
    mindformers = folder.name == "checkpoint" and path == folder.parent / "strategy"
    return path.parent == folder or mindformers or path.name.startswith(f"{folder.name}_strategy")


def with_checkpoint(path: str, given: Strategy) -> Strategy | None:
    """Return the strategy that MindFormers leaves with a checkpoint: ``output/strategy`` beside
    ``output/checkpoint``.

    None where there is none that can be read, or it is the `given` one.
    """
    folder = Path(path)
    if folder.name != "checkpoint" or not is_path(path):
        return None
    beside = folder.parent / "strategy"
    if Path(given.label).absolute().is_relative_to(beside.absolute()):
        return None
    found = strategies.loadable([beside] if beside.is_dir() else [])
    return found[0][1] if found else None


def siblings_of(path: Path) -> list[int]:
    """Return the ranks of the folder of `path` and of those beside it; none if it is alone."""
    path = path.resolve()
    if not _FOLDER.fullmatch(path.parent.name):
        return []
    found = []
    for folder in path.parent.parent.glob("rank_*"):
        match = _FOLDER.fullmatch(folder.name)
        with suppress(OSError):  # skip a folder that cannot be listed
            if match and any(one.suffix in suffixes() for one in folder.iterdir()):
                found.append(int(match[1]))
    return found if len(found) > 1 else []


def option_for(path: Path, strategy: Strategy) -> str:
    return f"--src-strategy {quote(shortly(path))} (found there: {strategy.extent})"


def shortly(path: Path) -> str:
    """Write a path as it is named from here, if it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here)) if path.is_relative_to(here) else str(path)
