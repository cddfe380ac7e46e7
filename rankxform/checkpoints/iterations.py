"""Folders of a training's steps, and the file that names the last complete one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from rankxform.errors import CheckpointError, UsageError
from rankxform.layout.names import format_ranges
from rankxform.storage.store import FOLDER, Listing, Store
from rankxform.values import dataclass

from .base import CheckpointRef
from .rank_folders import LATEST


@dataclass(frozen=True)
class StepFolders:
    """How a form names the folders of steps.

    word: what a step is called. expression: of a folder's name, with the number as its group; name:
    the same, to be filled in. tracker: the file that names the last complete one. files: picks
    checkpoint files among names, which lie in a step's own folder. is_complete: tells by the names
    in its folder whether a step is complete, where that does not depend on the tracker.
    """

    word: str
    expression: re.Pattern[str]
    name: str
    tracker: str
    files: Callable[[Iterable[str]], list[str]]
    is_complete: Callable[[Iterable[str]], bool] | None = None


@dataclass(frozen=True)
class SelectedIteration:
    """An iteration: its number, the names of its files, and other iterations.

    below: its folder in the place, with a slash; "" if it is the place itself.
    """

    listing: Listing
    below: str
    number: int | None
    names: tuple[str, ...]
    skipped_steps: tuple[tuple[int, ...], ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return self.listing.at(self.below.rstrip("/"))

    def at(self, name: str) -> str:
        return self.listing.at(self.below + name)

    @property
    def step(self) -> tuple[int, ...] | None:
        return None if self.number is None else (self.number,)


def iteration_of(
    listing: Listing, where: CheckpointRef, store: Store, kind: StepFolders
) -> SelectedIteration:
    """Return the iteration that is meant. Raises UsageError, CheckpointError."""
    if listing.kind != FOLDER:
        raise UsageError(f"no such checkpoint folder{listing.searched}", where=listing.path)
    names_by_number: dict[int, list[str]] = {}
    folders: dict[int, str] = {}
    for name in listing.files:
        parent, _, file_name = name.rpartition("/")
        match = kind.expression.fullmatch(parent)
        if match:
            names_by_number.setdefault(int(match[1]), []).append(file_name)
            folders[int(match[1])] = parent + "/"
    direct = tuple(name for name in listing.entries if name not in listing.folders)
    if kind.files(direct):
        match = kind.expression.fullmatch(listing.name)
        number = int(match[1]) if match else None
        if names_by_number or (where.step not in (None, LATEST) and where.step != str(number)):
            raise UsageError(
                f"{listing.path}: is one {kind.word}'s folder; --step chooses one in the folder "
                "above it"
                if not names_by_number
                else f"{listing.path}: holds files of a checkpoint beside folders of {kind.word}s; "
                "name one"
            )
        return SelectedIteration(listing, "", number, direct)
    if not names_by_number:
        raise CheckpointError(
            f"holds no {re.sub('{.*}', 'N', kind.name)} folder with files{listing.searched}",
            where=listing.path,
        )
    if kind.is_complete is not None and where.step in (None, LATEST):
        names_by_number = {
            n: names for n, names in names_by_number.items() if kind.is_complete(names)
        } or names_by_number
        tracker_number = _stated(listing, store, kind)
        number, notices = (
            tracker_number if tracker_number in names_by_number else max(names_by_number),
            _doubts(listing, kind, names_by_number, tracker_number),
        )
    else:
        number, notices = _number(listing, where, store, sorted(names_by_number), kind)
    skipped_steps = tuple((n,) for n in sorted(names_by_number) if n != number)
    return SelectedIteration(
        listing, folders[number], number, tuple(names_by_number[number]), skipped_steps, notices
    )


def _doubts(
    listing: Listing, kind: StepFolders, complete: Collection[int], tracker_number: int
) -> tuple[str, ...]:
    """Return that a tracker names no complete step, or not the newest."""
    if kind.tracker not in listing.entries or tracker_number == max(complete):
        return ()
    named = (
        f"names {kind.word} {tracker_number}" if tracker_number >= 0 else f"names no {kind.word}"
    )
    selected_number = tracker_number if tracker_number in complete else max(complete)
    return (
        f"{listing.at(kind.tracker)}: {named}, and complete are {format_ranges(sorted(complete))}; "
        f"{kind.word} {selected_number} is taken (--step says which)",
    )


def _stated(listing: Listing, store: Store, kind: StepFolders) -> int:
    """Return the number that a tracker states; -1 if it states none."""
    if kind.tracker not in listing.entries:
        return -1
    text = store.read(kind.tracker, listing.searched).decode(errors="replace").strip()
    return int(text) if _is_number(text) else -1


def _number(
    listing: Listing, where: CheckpointRef, store: Store, numbers: list[int], kind: StepFolders
) -> tuple[int, tuple[str, ...]]:
    if where.step not in (None, LATEST):
        assert where.step is not None
        if not _is_number(where.step) or int(where.step) not in numbers:
            raise UsageError(
                f"--step {where.step!r}: {listing.path} has {kind.word}s {format_ranges(numbers)}",
                "say one of them",
            )
        return int(where.step), ()
    if kind.tracker not in listing.entries:
        raise CheckpointError(
            f"has no {kind.tracker}, by which a complete {kind.word} is known",
            "name the folder of the one that is meant, such as "
            f"{listing.at(kind.name.format(numbers[-1]))}",
            where=listing.path,
        )
    text = store.read(kind.tracker, listing.searched).decode(errors="replace").strip()
    if not _is_number(text) or int(text) not in numbers:
        raise CheckpointError(
            f"says {text[:20]!r}, and the {kind.word}s that are there are {format_ranges(numbers)}",
            "name the folder of one of them",
            where=listing.at(kind.tracker),
        )
    newer = [n for n in numbers if n > int(text)]
    if newer and where.step == LATEST:
        raise CheckpointError(
            f"{kind.word} {newer[-1]} is newer than {text}, the last complete one by "
            f"{kind.tracker}",
            f"say --step {text} if that is meant",
            where=listing.path,
        )
    notices = (
        (
            f"{listing.path}: {kind.word} {newer[-1]} is newer, and {kind.tracker} does not call "
            "it complete",
        )
        if newer
        else ()
    )
    return int(text), notices


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,18}", text) is not None
