"""Folders of a training's steps, and the file that names the last complete one."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable

from rankxform.errors import CheckpointError, UsageError
from rankxform.layout.names import format_ranges
from rankxform.storage.store import FOLDER, Listing, Store
from rankxform.values import dataclass

from .base import Where
from .rank_folders import LATEST


@dataclass(frozen=True)
class Steps:
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
class Iteration:
    """An iteration: its number, the names of its files, and other iterations.

    below: its folder in the place, with a slash; "" if it is the place itself.
    """

    listing: Listing
    below: str
    number: int | None
    names: tuple[str, ...]
    others: tuple[tuple[int, ...], ...] = ()
    notices: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        return self.listing.at(self.below.rstrip("/"))

    def at(self, name: str) -> str:
        return self.listing.at(self.below + name)

    @property
    def step(self) -> tuple[int, ...] | None:
        return None if self.number is None else (self.number,)


def iteration_of(listing: Listing, where: Where, store: Store, kind: Steps) -> Iteration:
    """Return the iteration that is meant. Raises UsageError, CheckpointError."""
    if listing.kind != FOLDER:
        raise UsageError(f"no such checkpoint folder{listing.searched}", where=listing.path)
    found: dict[int, list[str]] = {}
    folders: dict[int, str] = {}
    for name in listing.files:
        parent, _, own = name.rpartition("/")
        match = kind.expression.fullmatch(parent)
        if match:
            found.setdefault(int(match[1]), []).append(own)
            folders[int(match[1])] = parent + "/"
    direct = tuple(name for name in listing.entries if name not in listing.folders)
    if kind.files(direct):
        match = kind.expression.fullmatch(listing.name)
        number = int(match[1]) if match else None
        if found or (where.step not in (None, LATEST) and where.step != str(number)):
            raise UsageError(
                f"{listing.path}: is one {kind.word}'s folder; --step chooses one in the folder "
                "above it"
                if not found
                else f"{listing.path}: holds files of a checkpoint beside folders of {kind.word}s; "
                "name one"
            )
        return Iteration(listing, "", number, direct)
    if not found:
        raise CheckpointError(
            f"holds no {re.sub('{.*}', 'N', kind.name)} folder with files{listing.searched}",
            where=listing.path,
        )
    if kind.is_complete is not None and where.step in (None, LATEST):
        found = {n: names for n, names in found.items() if kind.is_complete(names)} or found
        stated = _stated(listing, store, kind)
        number, notices = (
            stated if stated in found else max(found),
            _doubts(listing, kind, found, stated),
        )
    else:
        number, notices = _number(listing, where, store, sorted(found), kind)
    others = tuple((n,) for n in sorted(found) if n != number)
    return Iteration(listing, folders[number], number, tuple(found[number]), others, notices)


def _doubts(
    listing: Listing, kind: Steps, complete: Collection[int], stated: int
) -> tuple[str, ...]:
    """Return that a tracker names no complete step, or not the newest."""
    if kind.tracker not in listing.entries or stated == max(complete):
        return ()
    named = f"names {kind.word} {stated}" if stated >= 0 else f"names no {kind.word}"
    taken = stated if stated in complete else max(complete)
    return (
        f"{listing.at(kind.tracker)}: {named}, and complete are {format_ranges(sorted(complete))}; "
        f"{kind.word} {taken} is taken (--step says which)",
    )


def _stated(listing: Listing, store: Store, kind: Steps) -> int:
    """Return the number that a tracker states; -1 if it states none."""
    if kind.tracker not in listing.entries:
        return -1
    text = store.read(kind.tracker, listing.searched).decode(errors="replace").strip()
    return int(text) if _is_number(text) else -1


def _number(
    listing: Listing, where: Where, store: Store, known: list[int], kind: Steps
) -> tuple[int, tuple[str, ...]]:
    if where.step not in (None, LATEST):
        assert where.step is not None
        if not _is_number(where.step) or int(where.step) not in known:
            raise UsageError(
                f"--step {where.step!r}: {listing.path} has {kind.word}s {format_ranges(known)}",
                "say one of them",
            )
        return int(where.step), ()
    if kind.tracker not in listing.entries:
        raise CheckpointError(
            f"has no {kind.tracker}, by which a complete {kind.word} is known",
            "name the folder of the one that is meant, such as "
            f"{listing.at(kind.name.format(known[-1]))}",
            where=listing.path,
        )
    text = store.read(kind.tracker, listing.searched).decode(errors="replace").strip()
    if not _is_number(text) or int(text) not in known:
        raise CheckpointError(
            f"says {text[:20]!r}, and the {kind.word}s that are there are {format_ranges(known)}",
            "name the folder of one of them",
            where=listing.at(kind.tracker),
        )
    newer = [n for n in known if n > int(text)]
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
