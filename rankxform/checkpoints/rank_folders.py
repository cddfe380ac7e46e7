"""Rank folders: which file belongs to rank N, and to which step.

MindSpore's callbacks write ``SRC/rank_N/<name>-<epoch>_<step>.ckpt``; the user may give another
pattern, or one complete file in place of a folder. Where a rank folder holds
several steps, the newest that every rank has is taken; a newer one that some rank lacks is
reported. Which file is meant is never guessed from modification times or the order of names.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from posixpath import basename, dirname, normpath, splitext
from typing import Any

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.base import suffixes
from rankxform.planning.plan import Planner
from rankxform.storage.store import FILE, FOLDER, RANK, Listing, Store, expression_of
from rankxform.values import dataclass

from .base import DEFAULT_FORM, DEFAULT_PATTERN, Arrangement, Naming, Needed, Selected, Step, Where

DEFAULT_PREFIX = "checkpoint_"
LATEST = "latest"
_STEP = re.compile(r"(?P<family>.*?)-(?P<epoch>\d+)_(?P<step>\d+)")
_SHOWN = 2
_FOLDER = re.compile(r"rank_(\d+)")


class RankFolders:
    """A folder for each rank, with its files; or one complete file (`checkpoints.base.Form`).

    A single file stands for rank 0.
    """

    name = DEFAULT_FORM
    title = "rank folders"
    options: tuple[str, ...] = ("prefix",)
    container: str | None = None
    described = False
    training: str | None = None
    counters = True
    configured = False
    items = ""
    is_written = True

    def pattern(self, where: Where) -> str:
        return where.pattern

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        """Rank folders; a source is taken for some that are spelled otherwise if nothing else."""
        return next((name for name in listing.entries if _FOLDER.fullmatch(name)), None)

    def select(self, listing: Listing, where: Where, store: Store, needed: Needed) -> Selected:
        path, searched = listing.path, listing.searched
        if listing.kind == FILE and path.endswith(".json"):
            raise UsageError(
                "is no checkpoint file", f"name its folder, {dirname(path)}", where=path
            )
        if listing.kind == FILE:
            return Selected({0: ""})
        if listing.kind != FOLDER:
            raise UsageError(f"no such checkpoint file or folder{searched}", where=path)
        candidates = {
            rank: [_candidate(name, rank, listing) for name in names]
            for rank, names in by_rank(listing, where.pattern).items()
        }
        if not candidates and _FOLDER.fullmatch(listing.name):
            raise CheckpointError(
                "is one rank's folder", f"name the folder above it, {dirname(path)}", where=path
            )
        if not candidates:
            inside = [(listing.at(one), n) for one, n in listing.inside.items() if n][:_SHOWN]
            named = " or ".join(f"{folder} ({n} ranks)" for folder, n in inside)
            raise CheckpointError(
                f"holds no checkpoint at {where.pattern} ({' or '.join(suffixes())}){searched}",
                f"name {named or 'the right folder'}",
                "--src-pattern, such as 'ckpt_{rank}/*.ckpt'",
                where=path,
            )
        wanted = candidates if needed.ranks is None else needed.ranks
        ranks = [rank for rank in wanted if rank in candidates]
        others = candidates if needed.among is None else needed.among
        step = _step(where.step, candidates)
        found = _choose(candidates, ranks, others, step, where.suffix, where.pattern)
        if where.step == LATEST and found.newer:
            assert found.step is not None
            epoch, number = found.step
            raise CheckpointError(
                found.newer,
                "bring it",
                f"--step {epoch}_{number}, which is there for all that is wanted here",
                where=path,
            )
        return found if where.step in (None, LATEST) else replace(found, incomplete={})

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
        self, planner: Planner, arrangement: Arrangement, training: Mapping[str, Any]
    ) -> Mapping[str, Iterable[bytes]]:
        return {}

    def foreign_files(self, listing: Listing, own: Collection[str]) -> list[str]:
        """Other files in rank folders, among which MindSpore chooses by name or time, and ranks
        beyond the last, which would be taken for ranks of this checkpoint."""
        mine, folders = set(own), {dirname(name) for name in own}
        numbers = [int(match[1]) for folder in folders if (match := _FOLDER.fullmatch(folder))]
        last = max(numbers, default=-1)

        def is_taken(folder: str) -> bool:
            match = _FOLDER.fullmatch(folder)
            return folder in folders or (match is not None and int(match[1]) > last >= 0)

        return [
            name
            for name in listing.files
            if name not in mine and is_taken(dirname(name)) and name.endswith(suffixes())
        ]


@dataclass(frozen=True)
class _Candidate:
    """A file, where it is, for messages, its step, and its family of names: as written, and with
    the rank's number starred.

    ``checkpoint_1-10_73`` may be rank 1's file, or the second run's on any rank.
    """

    name: str
    path: str
    family: str
    starred: str
    numbered: str  # the family with a star for every number that is the rank's, padded or not
    step: Step | None


def by_rank(listing: Listing, pattern: str) -> dict[int, list[str]]:
    """Return the checkpoint files of each rank, by names. Raises UsageError, CheckpointError."""
    pattern = normpath(pattern)
    if RANK not in pattern:
        raise UsageError(f"--src-pattern {pattern!r}: {{rank}} must stand for the rank's number")
    parts = [expression_of(part) for part in pattern.split("/")]
    ends = suffixes()
    found: dict[int, list[str]] = {}
    spelled: dict[int, tuple[str, ...]] = {}
    for name in listing.files:
        matches = (part and part.fullmatch(own) for part, own in zip(parts, name.split("/")))
        numbers = [number for match in matches if match for number in match.groups()]
        ranks = set(map(int, numbers))
        if len(ranks) != 1 or not name.endswith(ends):
            continue
        rank = ranks.pop()
        spellings = {spelled.setdefault(rank, tuple(numbers)), tuple(numbers)}
        if len(spellings) > 1:
            a, b = listing.at(name), listing.at(found[rank][0])
            raise CheckpointError(f"{a} and {b} are both rank {rank}'s", "remove one")
        found.setdefault(rank, []).append(name)
    return found


def _candidate(name: str, rank: int, listing: Listing) -> _Candidate:
    stem, suffix = splitext(basename(name))
    match = _STEP.fullmatch(stem)
    family = match["family"] if match else stem
    step = (int(match["epoch"]), int(match["step"])) if match else None
    starred = re.sub(rf"(rank_?){rank}(?!\d)", r"\1*", family)
    starred = re.sub(rf"(?<!\d){rank}$", "*", starred)
    numbered = re.sub(rf"(?<!\d)0*{rank}(?!\d)", "*", family)
    families = family + suffix, starred + suffix, numbered + suffix
    return _Candidate(name, listing.at(name), *families, step)


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
    pattern: str,
) -> Selected:
    """Choose one file for each rank, or all that a pattern of the user's means."""
    is_given = pattern != DEFAULT_PATTERN
    has_parts = is_given and "*" in pattern.rpartition(RANK)[2]
    kept = {
        rank: [
            c
            for c in files
            if (step is None or c.step == step)
            and (suffix is None or splitext(c.name)[0].endswith(suffix))
        ]
        for rank, files in candidates.items()
    }
    if has_parts:
        kept = {rank: _whole_steps(files) for rank, files in kept.items()}
    for rank in needed:
        if not kept[rank]:
            own = {c.step for c in candidates[rank] if c.step}
            if suffix is None and own:
                raise CheckpointError(f"rank {rank} lacks that step (--step); {_steps(own)}")
            raise CheckpointError(
                f"rank {rank} has no checkpoint that matches --step and --suffix; "
                + _listing(candidates[rank])
            )
    every = [c for rank in needed or kept for c in kept[rank]]
    is_given = has_parts or (is_given and len(every) == len(needed or kept))
    families = _one_family(every, is_given=is_given)
    newest = _common_step(kept, needed)
    chosen: dict[int, list[str]] = {}
    for rank, files in kept.items():
        match = [
            c for c in files if c.step == newest and families & {c.family, c.starred, c.numbered}
        ]
        if len(match) > 1 and rank in needed and not has_parts:
            raise CheckpointError(f"rank {rank}: several files of one step; {_listing(match)}")
        if match:
            chosen[rank] = [c.name for c in match[: None if has_parts else 1]]
    names, ranks = _identified(chosen, 1 + max((*candidates, *needed, *among), default=0))
    others = sorted({c.step for r in needed for c in kept[r] if c.step and c.step != newest})
    have = {r: {c.step for c in some} for r, some in kept.items() if r in needed or r in among}
    there = [c.step for r in have for c in candidates[r] if has_parts]
    seen = [*there, *(step for some in have.values() for step in some)]
    known = {step for step in seen if step and newest and step >= newest}
    lacking = {step: tuple(r for r, some in have.items() if step not in some) for step in known}
    incomplete = {step: lost for step, lost in lacking.items() if lost}
    return Selected(names, newest, tuple(others), incomplete, ranks=ranks)


def _whole_steps(files: Sequence[_Candidate]) -> list[_Candidate]:
    """Return a rank's files but for those of steps of which it lacks one that another step has."""
    kinds = {one.family for one in files if one.step is not None}
    held: dict[Step | None, set[str]] = {}
    for one in files:
        held.setdefault(one.step, set()).add(one.family)
    return [one for one in files if held[one.step] == kinds or one.step is None]


def _identified(
    chosen: Mapping[int, Sequence[str]], free: int
) -> tuple[dict[int, str], dict[int, int]]:
    """Return files by id, and the rank of each where some rank has several.

    A rank's first file has the rank's number, and others have numbers from `free` on, which are no
    rank's, there or not.
    """
    names = {rank: files[0] for rank, files in chosen.items()}
    ranks = {rank: rank for rank in names}
    for rank, files in chosen.items():
        for name in files[1:]:
            names[free], ranks[free] = name, rank
            free += 1
    return names, ranks if len(names) > len(chosen) else {}


def _one_family(every: list[_Candidate], *, is_given: bool) -> set[str]:
    """Return the family of names that all files are of. Raises CheckpointError if there is none.

    `is_given`: the user's pattern matches one file for each rank, so that there is no question.
    """
    if len({c.step is None for c in every}) > 1:
        raise CheckpointError(
            "some of the files state an epoch and a step and some do not; choose by --suffix, "
            "--step or --src-pattern; " + _listing(every)
        )
    if is_given:
        return {c.family for c in every}
    families = min(
        {c.starred for c in every}, {c.family for c in every}, {c.numbered for c in every}, key=len
    )
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
    in_all = set.intersection(*steps) if steps else {c.step for some in kept.values() for c in some}
    if not in_all:
        rank = next(r for i, r in enumerate(needed) if not set.intersection(*steps[: i + 1]))
        raise CheckpointError(
            f"no step is there for every rank; rank {needed[0]}: {_listing(kept[needed[0]])}; "
            f"rank {rank}: {_listing(kept[rank])}"
        )
    return max(in_all, key=lambda step: step or (-1, -1))


def _listing(candidates: Iterable[_Candidate]) -> str:
    paths = [c.path for c in candidates]
    more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    return "found " + (", ".join(paths[:8]) + more if paths else "nothing")
