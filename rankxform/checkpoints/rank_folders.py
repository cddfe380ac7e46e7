"""Rank folders: which file belongs to rank N, and to which step.

MindSpore's callbacks write ``SRC/rank_N/<name>-<epoch>_<step>.ckpt``; the user may give another
pattern, or one complete file in place of a folder. Where a rank folder holds
several steps, the newest that every rank has is taken; a newer one that some rank lacks is
reported. Which file is meant is never guessed from modification times or the order of names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from posixpath import normpath
from typing import Any

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.base import suffixes
from rankxform.planning.plan import Planner
from rankxform.values import dataclass

from .base import FORMS, USUAL, Arrangement, Listing, Naming, Shards, Step, Wish

DEFAULT_PATTERN = "rank_{rank}/*"
DEFAULT_PREFIX = "checkpoint_"
LATEST = "latest"
_STEP = re.compile(r"(?P<family>.*?)-(?P<epoch>\d+)_(?P<step>\d+)")
_SHOWN = 2
_FOLDER = re.compile(r"rank_(\d+)")


def _inside(where: Path) -> list[tuple[Path, int]]:
    """Return the folders in a folder that hold rank folders, and how many."""
    with suppress(OSError):
        folders = [path for path in sorted(where.iterdir()) if path.is_dir()]
        found = [(path, len(_by_rank(path, DEFAULT_PATTERN))) for path in folders]
        return [(path, ranks) for path, ranks in found if ranks]
    return []


class RankFolders:
    """A folder for each rank, with its files; or one complete file (`checkpoints.base.Form`).

    `Wish.pattern` is relative to the source, with ``{rank}`` for the rank's number and ``*``; a
    single file stands for rank 0. `Wish.step` is ``E_S``, or ``latest``, which accepts no older
    step than the newest of all; `Wish.suffix` is the end of the file's name before its extension.
    """

    name = USUAL
    title = "rank folders"
    options: tuple[str, ...] = ("prefix",)
    container: str | None = None
    described = False

    def recognizes(self, where: Path) -> str | None:
        """Rank folders; a source is taken for some that are spelled otherwise if nothing else."""
        found = (path.name for path in where.glob("rank_*") if _FOLDER.fullmatch(path.name))
        return next(iter(sorted(found)), None)

    def look(self, where: Path, wish: Wish) -> Listing:
        if where.is_file():
            return Listing(is_file=True)
        if not where.is_dir():
            return Listing()
        by_rank = _by_rank(where, wish.pattern or DEFAULT_PATTERN)
        return Listing(is_folder=True, files={rank: tuple(some) for rank, some in by_rank.items()})

    def choose(
        self,
        where: Path,
        there: Listing,
        wanted: Iterable[int] | None,
        wish: Wish,
        searched: str = "",
        among: Collection[int] | None = None,
    ) -> Shards:
        if there.is_file and where.suffix == ".json":
            raise UsageError(
                f"{where}: give its folder, {where.parent}; this is no checkpoint file"
            )
        if there.is_file:
            return Shards({0: where})
        if not there.is_folder:
            raise UsageError(f"{where}: no such checkpoint file or folder{searched}")
        candidates = {
            rank: [_candidate(path, rank) for path in paths] for rank, paths in there.files.items()
        }
        if not candidates and _FOLDER.fullmatch(where.name):
            raise CheckpointError(
                f"{where}: is one rank's folder; name the folder above it, {where.parent}"
            )
        if not candidates:
            named = " or ".join(f"{path} ({n} ranks)" for path, n in _inside(where)[:_SHOWN])
            raise CheckpointError(
                f"name {named or 'the right folder'}, or give --src-pattern, such as "
                f"'ckpt_{{rank}}/*.ckpt': {where}: holds no checkpoint at "
                f"{wish.pattern or DEFAULT_PATTERN} ({' or '.join(suffixes())}){searched}"
            )
        needed = [r for r in wanted if r in candidates] if wanted is not None else list(candidates)
        others = candidates if among is None else among
        found = _choose(candidates, needed, others, _step(wish.step, candidates), wish.suffix)
        if wish.step == LATEST and found.newer:
            assert found.step is not None
            epoch, number = found.step
            raise CheckpointError(
                f"{where}: {found.newer}. Bring it, or say --step {epoch}_{number}, which is there "
                "for all that is wanted here"
            )
        return found if wish.step in (None, LATEST) else replace(found, incomplete={})

    def arrange(self, planner: Planner, naming: Naming) -> Arrangement:
        prefix = DEFAULT_PREFIX if naming.prefix is None else naming.prefix
        ranks = range(planner.dst.ranks)
        return Arrangement({r: f"rank_{r}/{prefix}{r}{naming.suffix}" for r in ranks})

    def metadata(self, source: Mapping[str, str]) -> Mapping[str, str]:
        """MindSpore's files say "ms" where others say "pt"."""
        return {key: text for key, text in source.items() if (key, text) != ("format", "pt")}

    def owns(self, name: str, file: int) -> bool:
        folder, _, rest = name.partition("/")
        return folder == f"rank_{file}" and rest not in ("", ".", "..") and not set("/\0") & {*rest}

    def companion_names(self, names: Collection[str]) -> tuple[str, ...]:
        return ()

    def companions(
        self, planner: Planner, arrangement: Arrangement, common: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        return {}

    def strangers(self, own: Iterable[Path]) -> list[Path]:
        """Return other files in rank folders: MindSpore chooses among them by name or time."""
        mine = {path: path.parent for path in own}
        return [
            path
            for folder in dict.fromkeys(mine.values())
            if _FOLDER.fullmatch(folder.name)
            for path in (sorted(folder.iterdir()) if folder.is_dir() else ())
            if path.suffix in suffixes() and path not in mine
        ]


def find(where: Path, ranks: Iterable[int] | None = None, wish: Wish | None = None) -> Shards:
    """Choose, of what this process sees, the file of each rank."""
    wish = wish or Wish()
    form = FORMS[USUAL]
    return form.choose(where, form.look(where, wish), ranks, wish)


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


@dataclass(frozen=True)
class _Candidate:
    """A file, its step, and its family of names: as written, and with the rank's number starred.

    ``checkpoint_1-10_73`` may be rank 1's file, or the second run's on any rank.
    """

    path: Path
    family: str
    starred: str
    step: Step | None


def _by_rank(where: Path, pattern: str) -> dict[int, list[Path]]:
    pattern = normpath(pattern)
    if "{rank}" not in pattern:
        raise UsageError(f"--src-pattern {pattern!r}: {{rank}} must stand for the rank's number")
    found: dict[int, list[Path]] = {}
    spelled: dict[int, set[str]] = {}
    for path, numbers in _walk(where, pattern.split("/"), ()):
        ranks = set(map(int, numbers))
        if len(ranks) > 1 or path.suffix not in suffixes():
            continue
        rank = ranks.pop()
        spelled.setdefault(rank, set()).update(numbers)
        if len(spelled[rank]) > 1:
            raise CheckpointError(f"{path} and {found[rank][0]} are both rank {rank}'s; remove one")
        found.setdefault(rank, []).append(path)
    return found


def _walk(
    folder: Path, parts: list[str], numbers: tuple[str, ...]
) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Yield files below `folder` that match the pattern's `parts`, with the rank as spelled."""
    part, *rest = parts
    if part == "..":
        yield from _walk(folder / part, rest, numbers)
        return
    literal = re.escape(part).replace(re.escape("{rank}"), r"(\d{1,9})").replace(r"\*", ".*")
    shape = re.compile(literal)
    for entry in sorted(os.scandir(folder), key=lambda e: e.name):
        match = shape.fullmatch(entry.name)
        path = Path(entry.path)  # its is_dir() and is_file() are False for a link to itself
        if match and rest and path.is_dir():
            yield from _walk(path, rest, numbers + match.groups())
        elif match and not rest and path.is_file():
            yield path, numbers + match.groups()


def _candidate(path: Path, rank: int) -> _Candidate:
    match = _STEP.fullmatch(path.stem)
    family = match["family"] if match else path.stem
    step = (int(match["epoch"]), int(match["step"])) if match else None
    starred = re.sub(rf"(rank_?){rank}(?!\d)", r"\1*", family)
    starred = re.sub(rf"(?<!\d){rank}$", "*", starred)
    return _Candidate(path, family + path.suffix, starred + path.suffix, step)


def _step(text: str | None, candidates: Mapping[int, Iterable[_Candidate]]) -> Step | None:
    """Read which step is wished for; one without its epoch must be of one epoch alone."""
    if text in (None, LATEST):
        return None
    match = re.fullmatch(r"(?:(\d{1,18})_)?(\d{1,18})", text)
    if not match:
        raise UsageError(
            f"--step {text!r}: expected an epoch and a step, such as 10_73, a step, or {LATEST}"
        )
    if match[1]:
        return int(match[1]), int(match[2])
    there = {one.step for some in candidates.values() for one in some if one.step}
    found = sorted(step for step in there if step[1] == int(match[2]))
    if len(found) > 1:
        raise UsageError(f"--step {text}: say which; there are {_names(found)}")
    if not found:
        raise CheckpointError(f"--step {text}: no such step; {_steps(there)}")
    return found[0]


def _names(steps: Iterable[Step]) -> str:
    return ", ".join(f"{epoch}_{step}" for epoch, step in steps)


def _steps(there: Iterable[Step]) -> str:
    """Say which steps the files' names state."""
    every = sorted(there)
    if not every:
        return "no file's name states one"
    return f"the steps are {'..., ' if every[8:] else ''}{_names(every[-8:])}"


def _choose(
    candidates: Mapping[int, list[_Candidate]],
    needed: list[int],
    among: Collection[int],
    step: Step | None,
    suffix: str | None,
) -> Shards:
    kept = {
        rank: [
            c
            for c in files
            if (step is None or c.step == step) and (suffix is None or c.path.stem.endswith(suffix))
        ]
        for rank, files in candidates.items()
    }
    for rank in needed:
        if not kept[rank]:
            own = {c.step for c in candidates[rank] if c.step}
            if suffix is None and own:
                raise CheckpointError(f"rank {rank} lacks that step (--step); {_steps(own)}")
            raise CheckpointError(
                f"rank {rank} has no checkpoint that matches --step and --suffix; "
                + _listing(candidates[rank])
            )
    families = _one_family([c for rank in needed or kept for c in kept[rank]])
    newest = _common_step(kept, needed)
    paths = {}
    for rank, files in kept.items():
        match = [c for c in files if c.step == newest and families & {c.family, c.starred}]
        if len(match) > 1 and rank in needed:
            raise CheckpointError(f"rank {rank}: several files of one step; {_listing(match)}")
        if match:
            paths[rank] = match[0].path
    others = sorted({c.step for r in needed for c in kept[r] if c.step and c.step != newest})
    have = {r: {c.step for c in some} for r, some in kept.items() if r in needed or r in among}
    known = {step for some in have.values() for step in some if step and newest and step >= newest}
    lacking = {step: tuple(r for r, some in have.items() if step not in some) for step in known}
    return Shards(paths, newest, tuple(others), {s: r for s, r in lacking.items() if r})


def _one_family(every: list[_Candidate]) -> set[str]:
    """Return the family of names that all files are of. Raises CheckpointError if there is none."""
    if len({c.step is None for c in every}) > 1:
        raise CheckpointError(
            "some of the files state an epoch and a step and some do not; choose by --suffix, "
            "--step or --src-pattern; " + _listing(every)
        )
    families = min({c.starred for c in every}, {c.family for c in every}, key=len)
    if len(families) > 1:
        raise CheckpointError(
            f"the rank folders hold {len(families)} families of checkpoints "
            f"({', '.join(sorted(families)[:6])}); say which by --suffix, --step or --src-pattern; "
            + _listing(every)
        )
    return families


def _common_step(kept: Mapping[int, list[_Candidate]], needed: list[int]) -> Step | None:
    """Return the newest step that all `needed` ranks have, None where files state none."""
    steps = [{c.step for c in kept[rank]} for rank in needed]
    common = set.intersection(*steps) if steps else {c.step for some in kept.values() for c in some}
    if not common:
        rank = next(r for i, r in enumerate(needed) if not set.intersection(*steps[: i + 1]))
        raise CheckpointError(
            f"no step is there for every rank; rank {needed[0]}: {_listing(kept[needed[0]])}; "
            f"rank {rank}: {_listing(kept[rank])}"
        )
    return max(common, key=lambda step: step or (-1, -1))


def _listing(candidates: Iterable[_Candidate]) -> str:
    paths = [str(c.path) for c in candidates]
    more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    return "found " + (", ".join(paths[:8]) + more if paths else "nothing")
