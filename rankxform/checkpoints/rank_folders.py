"""Source folders as people have them: which file is rank N's, of which step.

``SRC/rank_N/<name>-<epoch>_<step>.ckpt`` is what MindSpore's callbacks leave; other patterns are
given by the user, and one complete file may stand for a folder. Where a rank folder holds
several steps, the newest that every rank has is taken; a newer one that some rank lacks is told.
Which file is meant is never guessed from modification times or the order of names.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from posixpath import normpath

from rankxform.errors import CheckpointError, UsageError

SUFFIXES = (".ckpt", ".safetensors")
DEFAULT_PATTERN = "rank_{rank}/*"
LATEST = "latest"
_STEP = re.compile(r"(?P<family>.*?)-(?P<epoch>\d+)_(?P<step>\d+)")

Step = tuple[int, int]


@dataclass(frozen=True)
class Shards:
    """The chosen file of each rank, by global rank, and the (epoch, step) they were saved at.

    skipped_steps: others that are there. incomplete: steps from this one on that some rank lacks,
    with these ranks.
    """

    paths: Mapping[int, Path]
    step: Step | None
    skipped_steps: tuple[Step, ...] = ()
    incomplete: Mapping[Step, tuple[int, ...]] = field(default_factory=dict)

    @property
    def newer(self) -> str | None:
        """Which step, this or a newer one, some rank lacks, in words; None if there is none."""
        if not self.incomplete:
            return None
        step, lacking = max(self.incomplete.items())
        which = f"rank {lacking[0]} has" if len(lacking) == 1 else f"ranks {ranges(lacking)} have"
        newer = "newer but " if step != self.step else ""
        return f"epoch {step[0]} step {step[1]} is {newer}not complete: {which} no file of it"


def ranges(numbers: Iterable[int]) -> str:
    """Write ascending numbers shortly.

    >>> ranges([0, 1, 2, 5])
    '0-2, 5'
    """
    runs: list[list[int]] = []
    for n in numbers:
        if runs and runs[-1][1] == n - 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


@dataclass(frozen=True)
class _Candidate:
    """A file, its step, and its family of names: as written, and with the rank's number starred.

    ``checkpoint_1-10_73`` may be rank 1's file, or the second run's on any rank.
    """

    path: Path
    family: str
    starred: str
    step: Step | None


@dataclass(frozen=True)
class Listing:
    """What is at the place of a source: a file, or a folder with files by rank; or nothing."""

    is_file: bool = False
    is_folder: bool = False
    files: Mapping[int, tuple[Path, ...]] = field(default_factory=dict)

    def joined(self, other: Listing) -> Listing:
        """Return what is there or, of the same place on another node, there."""
        files = {
            rank: tuple(dict.fromkeys((*self.files.get(rank, ()), *other.files.get(rank, ()))))
            for rank in sorted({*self.files, *other.files})
        }
        return Listing(self.is_file or other.is_file, self.is_folder or other.is_folder, files)


def look(where: Path, pattern: str = DEFAULT_PATTERN) -> Listing:
    """List the files at `where` that `pattern` means.

    `pattern` is relative to `where`, with ``{rank}`` for the rank's number and ``*``. A single
    file stands for rank 0.
    """
    if where.is_file():
        return Listing(is_file=True)
    if not where.is_dir():
        return Listing()
    files = {rank: tuple(paths) for rank, paths in _by_rank(where, pattern).items()}
    return Listing(is_folder=True, files=files)


def find(
    where: Path,
    ranks: Iterable[int] | None,
    pattern: str = DEFAULT_PATTERN,
    step: str | None = None,
    suffix: str | None = None,
) -> Shards:
    """Choose, of what this process sees, the file of each rank; see `choose`."""
    return choose(where, look(where, pattern), ranks, pattern, step, suffix)


def choose(
    where: Path,
    there: Listing,
    ranks: Iterable[int] | None,
    pattern: str = DEFAULT_PATTERN,
    step: str | None = None,
    suffix: str | None = None,
    looked: str = "",
    among: Collection[int] | None = None,
) -> Shards:
    """Choose the file of each rank that saved: of `ranks` (None: all that are there), and others.

    `among` are the ranks that belong to the checkpoint (None: all that are there): one that is not
    needed and lacks the step, or has a newer one, is told as well, for others may need it.
    `looked` says, for messages, on which nodes was looked. `step` is ``E_S``, or ``latest``, which
    accepts no older step than the newest of all; `suffix` is the end of the file's name before its
    extension. Raises UsageError or CheckpointError that lists the candidates.
    """
    if there.is_file:
        return Shards({0: where}, None)
    if not there.is_folder:
        raise UsageError(f"{where}: no such checkpoint file or folder{looked}")
    candidates = {
        rank: [_candidate(path, rank) for path in paths] for rank, paths in there.files.items()
    }
    if not candidates and re.fullmatch(r"rank_\d+", where.name):
        raise CheckpointError(
            f"{where}: is one rank's folder; name the folder above it, {where.parent}"
        )
    if not candidates:
        raise CheckpointError(
            f"{where}: holds no checkpoint at {pattern} ({' or '.join(SUFFIXES)}){looked}; "
            "name the right folder, or give --src-pattern, such as 'ckpt_{rank}/*.ckpt'"
        )
    needed = [r for r in ranks if r in candidates] if ranks is not None else list(candidates)
    others = candidates if among is None else among
    found = _choose(candidates, needed, others, _step(step), suffix)
    if step == LATEST and found.newer:
        assert found.step is not None
        epoch, number = found.step
        raise CheckpointError(
            f"{where}: {found.newer}. Bring it, or say --step {epoch}_{number}, which is there for "
            "all that is wanted here"
        )
    return found if step in (None, LATEST) else replace(found, incomplete={})  # it was meant


def _by_rank(where: Path, pattern: str) -> dict[int, list[Path]]:
    pattern = normpath(pattern)
    if "{rank}" not in pattern:
        raise UsageError(f"--src-pattern {pattern!r}: {{rank}} must stand for the rank's number")
    found: dict[int, list[Path]] = {}
    spelled: dict[int, set[str]] = {}
    for path, numbers in _walk(where, pattern.split("/"), ()):
        ranks = set(map(int, numbers))
        if len(ranks) > 1 or path.suffix not in SUFFIXES:
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
        path = Path(entry.path)  # whose questions a link to itself answers with no
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


def _step(text: str | None) -> Step | None:
    if text in (None, LATEST):
        return None
    match = re.fullmatch(r"(\d+)_(\d+)", text)
    if not match:
        raise UsageError(
            f"--step {text!r}: an epoch and a step are wanted, such as 10_73, or {LATEST}"
        )
    return int(match[1]), int(match[2])


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
            raise CheckpointError(
                f"rank {rank} has no checkpoint that --step or --suffix means; "
                + _listing(candidates[rank])
            )
    every = [c for rank in needed or kept for c in kept[rank]]
    if len({c.step is None for c in every}) > 1:
        raise CheckpointError(
            "some of the files state an epoch and a step and some do not; say which are meant by "
            "--suffix, --step or --src-pattern; " + _listing(every)
        )
    families = min({c.starred for c in every}, {c.family for c in every}, key=len)
    if len(families) > 1:
        raise CheckpointError(
            f"the rank folders hold {len(families)} families of checkpoints "
            f"({', '.join(sorted(families)[:6])}); say which by --suffix, --step or --src-pattern; "
            + _listing(every)
        )
    every_rank = [rank for rank in kept if rank in needed or rank in among]
    steps = [{c.step for c in kept[rank]} for rank in needed]
    common = set.intersection(*steps) if steps else {c.step for c in every}
    if not common:
        rank = next(r for i, r in enumerate(needed) if not set.intersection(*steps[: i + 1]))
        raise CheckpointError(
            f"no step is there for every rank; rank {needed[0]}: {_listing(kept[needed[0]])}; "
            f"rank {rank}: {_listing(kept[rank])}"
        )
    newest = max(common, key=lambda s: s or (-1, -1))
    paths = {}
    for rank, files in kept.items():
        match = [c for c in files if c.step == newest and families & {c.family, c.starred}]
        if len(match) > 1 and rank in needed:
            raise CheckpointError(f"rank {rank}: several files of one step; {_listing(match)}")
        if match:
            paths[rank] = match[0].path
    others = sorted({s for rank_steps in steps for s in rank_steps if s and s != newest})
    have = {rank: {c.step for c in kept[rank]} for rank in every_rank}
    known = {step for some in have.values() for step in some if step and newest and step >= newest}
    lacking = {step: tuple(r for r, some in have.items() if step not in some) for step in known}
    return Shards(paths, newest, tuple(others), {s: r for s, r in lacking.items() if r})


def _listing(candidates: Iterable[_Candidate]) -> str:
    paths = [str(c.path) for c in candidates]
    more = f" and {len(paths) - 8} more" if len(paths) > 8 else ""
    return "found " + (", ".join(paths[:8]) + more if paths else "nothing")


def files_beside(path: Path) -> list[Path]:
    """Return the checkpoint files in the folder of one, itself too."""
    return [p for p in path.parent.iterdir() if p.suffix in SUFFIXES]
