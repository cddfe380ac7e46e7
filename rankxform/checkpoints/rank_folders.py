"""Rank folders: which file belongs to rank N, and to which step.

MindSpore's callbacks write ``SRC/rank_N/<name>-<epoch>_<step>.ckpt``; the user may give another
pattern, or one complete file in place of a folder. Where a rank folder holds
several steps, the newest that every rank has is taken; a newer one that some rank lacks is
reported. Which file is meant is never guessed from modification times or the order of names.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from posixpath import basename, dirname, normpath, splitext
from types import MappingProxyType
from typing import Any

from rankxform.errors import CheckpointError, UsageError
from rankxform.formats.container import container_suffixes
from rankxform.layout.names import and_more, first_texts, format_ranges
from rankxform.planning.plan import Planner
from rankxform.statements import quote
from rankxform.storage.store import FILE, FOLDER, RANK, Listing, Store, expression_of
from rankxform.values import dataclass, pattern_on_use

from .base import (
    DEFAULT_FORM,
    DEFAULT_PATTERN,
    CheckpointRef,
    DestinationFiles,
    Form,
    RankFilter,
    SelectedFiles,
    TrainingStep,
)

DEFAULT_PREFIX = "checkpoint_"
LATEST = "latest"
_STEP = pattern_on_use(r"(?s)(?P<family>.*?)-(?P<epoch>\d+)_(?P<step>\d+)")
_AFTER_RANK = pattern_on_use(r"(rank_?)(\d+)")
_AT_THE_END = pattern_on_use(r"\d+$")
_NUMBER = pattern_on_use(r"\d+")
_SHOWN = 2
_FOLDER = pattern_on_use(r"rank_(\d+)")
_OWN_FOLDER = pattern_on_use(r"(rank_)\d+$")


class RankFoldersForm(Form):
    """A folder for each rank, with its files; or one complete file (`checkpoints.base.Form`).

    A single file stands for rank 0.
    """

    name = DEFAULT_FORM
    title = "rank folders"
    options = ("prefix",)
    described = False
    counters = True
    is_written = True
    joins = MappingProxyType({})
    is_named_in_yaml = True

    def pattern(self, where: CheckpointRef) -> str:
        return where.pattern

    def recognizes(self, listing: Listing, store: Store) -> str | None:
        """Rank folders; a source is taken for some that are spelled otherwise if nothing else."""
        return next((name for name in listing.entries if _FOLDER().fullmatch(name)), None)

    def select(
        self, listing: Listing, where: CheckpointRef, store: Store, rank_filter: RankFilter
    ) -> SelectedFiles:
        path, searched = listing.path, listing.searched
        if listing.kind == FILE and path.endswith(".json"):
            raise UsageError(
                "is no checkpoint file",
                f"name its folder, {dirname(path)}",
                f"plan --shapes {quote(path)}, if it states full shapes",
                where=path,
            )
        if listing.kind == FILE:
            return SelectedFiles({0: ""})
        if listing.kind != FOLDER:
            raise UsageError(f"no such checkpoint file or folder{searched}", where=path)
        candidates = {
            rank: [_candidate(name, rank, listing) for name in names]
            for rank, names in by_rank(listing, where.pattern).items()
        }
        if not candidates and _FOLDER().fullmatch(listing.name):
            raise CheckpointError(
                "is one rank's folder", f"name the folder above it, {dirname(path)}", where=path
            )
        if not candidates:
            inside = [
                (listing.at(folder_name), n) for folder_name, n in listing.inside.items() if n
            ][:_SHOWN]
            named = " or ".join(f"{folder} ({n} ranks)" for folder, n in inside)
            raise CheckpointError(
                f"holds no checkpoint at {where.pattern} "
                f"({' or '.join(container_suffixes())}){searched}",
                f"name {named or 'the right folder'}",
                "--src-pattern, such as 'ckpt_{rank}/*.ckpt'",
                where=path,
            )
        needed_ranks = candidates if rank_filter.ranks is None else rank_filter.ranks
        ranks = [rank for rank in needed_ranks if rank in candidates]
        checkpoint_ranks = candidates if rank_filter.among is None else rank_filter.among
        step = _step(where.step, candidates)
        selected = _choose(candidates, ranks, checkpoint_ranks, step, where.suffix, where.pattern)
        if where.step == LATEST and selected.incomplete_step:
            assert selected.step is not None
            epoch, number = selected.step
            raise CheckpointError(
                selected.incomplete_step,
                "bring it",
                f"--step {epoch}_{number}, which is there for all that is wanted here",
                where=path,
            )
        return selected if where.step in (None, LATEST) else replace(selected, missing_ranks={})

    def destination_files(
        self, planner: Planner, options: Mapping[str, Any], step: int | None, suffix: str
    ) -> DestinationFiles:
        prefix = DEFAULT_PREFIX if options["prefix"] is None else options["prefix"]
        ranks = range(planner.dst.ranks)
        return DestinationFiles({r: f"rank_{r}/{prefix}{r}{suffix}" for r in ranks})

    def metadata(self, source: Mapping[str, str]) -> Mapping[str, str]:
        """MindSpore's files say "ms" where others say "pt"."""
        return {key: text for key, text in source.items() if (key, text) != ("format", "pt")}

    def owns(self, name: str, file: int) -> bool:
        folder, _, file_name = name.partition("/")
        return (
            folder == f"rank_{file}"
            and file_name not in ("", ".", "..")
            and not set("/\0") & {*file_name}
        )

    def foreign_files(self, listing: Listing, dst_names: Collection[str]) -> list[str]:
        """Other files in rank folders, among which MindSpore chooses by name or time, and ranks
        beyond the last, which would be taken for ranks of this checkpoint."""
        own_names, folders = set(dst_names), {dirname(name) for name in dst_names}
        numbers = [int(match[1]) for folder in folders if (match := _FOLDER().fullmatch(folder))]
        last_rank = max(numbers, default=-1)

        def is_taken(folder: str) -> bool:
            match = _FOLDER().fullmatch(folder)
            return folder in folders or (match is not None and int(match[1]) > last_rank >= 0)

        return [
            n
            for n in listing.files
            if n not in own_names and is_taken(dirname(n)) and n.endswith(container_suffixes())
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
    step: TrainingStep | None


def by_rank(listing: Listing, pattern: str) -> dict[int, list[str]]:
    """Return the checkpoint files of each rank, by names. Raises UsageError, CheckpointError."""
    pattern = normpath(pattern)
    if RANK not in pattern:
        raise UsageError(f"--src-pattern {pattern!r}: {{rank}} must stand for the rank's number")
    parts = [expression_of(part) for part in pattern.split("/")]
    ends = container_suffixes()
    names_by_rank: dict[int, list[str]] = {}
    spelled: dict[int, tuple[str, ...]] = {}
    for name in listing.files:
        matches = (p and p.fullmatch(c) for p, c in zip(parts, name.split("/")))
        numbers = [number for match in matches if match for number in match.groups()]
        ranks = set(map(int, numbers))
        if len(ranks) != 1 or not name.endswith(ends):
            continue
        rank = ranks.pop()
        spellings = {spelled.setdefault(rank, tuple(numbers)), tuple(numbers)}
        if len(spellings) > 1:
            a, b = listing.at(name), listing.at(names_by_rank[rank][0])
            raise CheckpointError(f"{a} and {b} are both rank {rank}'s", "remove one")
        names_by_rank.setdefault(rank, []).append(name)
    return names_by_rank


def _candidate(name: str, rank: int, listing: Listing) -> _Candidate:
    stem, suffix = splitext(basename(name))
    match = _STEP().fullmatch(stem)
    family = match["family"] if match else stem
    step = (int(match["epoch"]), int(match["step"])) if match else None
    # One pattern for all ranks: to compile one for each takes 0.3 ms, or 2 s for 8,192.
    starred = _AFTER_RANK().sub(lambda m: m[1] + ("*" if m[2] == str(rank) else m[2]), family)
    starred = _AT_THE_END().sub(lambda m: "*" if m[0] == str(rank) else m[0], starred)
    numbered = _NUMBER().sub(lambda m: "*" if int(m[0]) == rank else m[0], family)
    families = family + suffix, starred + suffix, numbered + suffix
    return _Candidate(name, listing.at(name), *families, step)


def _step(text: str | None, candidates: Mapping[int, Iterable[_Candidate]]) -> TrainingStep | None:
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
    steps = {
        candidate.step
        for rank_candidates in candidates.values()
        for candidate in rank_candidates
        if candidate.step
    }
    matching_steps = sorted(step for step in steps if step[1] == int(match[2]))
    if len(matching_steps) > 1:
        raise UsageError(f"--step {text}: say which; there are {_names(matching_steps)}")
    if not matching_steps:
        raise CheckpointError(f"--step {text}: no such step; {_steps(steps)}")
    return matching_steps[0]


def _names(steps: Iterable[TrainingStep]) -> str:
    return ", ".join(f"{epoch}_{step}" for epoch, step in steps)


def _steps(steps: Iterable[TrainingStep]) -> str:
    """Say which steps the files' names state."""
    sorted_steps = sorted(steps)
    if not sorted_steps:
        return "no file's name states one"
    return f"the steps are {'..., ' if sorted_steps[8:] else ''}{_names(sorted_steps[-8:])}"


def _choose(
    candidates: Mapping[int, list[_Candidate]],
    needed_ranks: list[int],
    among: Collection[int],
    step: TrainingStep | None,
    suffix: str | None,
    pattern: str,
) -> SelectedFiles:
    """Choose one file for each rank, or all that a pattern of the user's means."""
    is_given = pattern != DEFAULT_PATTERN
    has_parts = is_given and "*" in pattern.rpartition(RANK)[2]
    files_by_rank = {
        rank: [
            c
            for c in files
            if (step is None or c.step == step)
            and (suffix is None or splitext(c.name)[0].endswith(suffix))
        ]
        for rank, files in candidates.items()
    }
    if has_parts:
        files_by_rank = {rank: _whole_steps(files) for rank, files in files_by_rank.items()}
    for rank in needed_ranks:
        if not files_by_rank[rank]:
            present_steps = {c.step for c in candidates[rank] if c.step}
            if suffix is None and present_steps:
                lacking_ranks = [r for r in needed_ranks if not files_by_rank[r]]
                others = [r for r in needed_ranks if files_by_rank[r]]
                ranks_text = format_ranges(lacking_ranks)
                who = f"ranks {ranks_text} lack" if lacking_ranks[1:] else f"rank {rank} lacks"
                others_text = f", which {format_ranges(others)} have" if others else ""
                step_text = "that step" if step is None else f"step {_names([step])}"
                raise CheckpointError(
                    f"{who} {step_text}{others_text}; of rank {rank} {_steps(present_steps)}"
                )
            raise CheckpointError(
                f"rank {rank} has no checkpoint that matches --step and --suffix; "
                + _listing(candidates[rank])
            )
    needed_files = [c for rank in needed_ranks or files_by_rank for c in files_by_rank[rank]]
    is_given = has_parts or (is_given and len(needed_files) == len(needed_ranks or files_by_rank))
    families = _one_family(needed_files, is_given=is_given)
    newest = _common_step(files_by_rank, needed_ranks)
    names_by_rank: dict[int, list[str]] = {}
    for rank, files in files_by_rank.items():
        match = [
            c for c in files if c.step == newest and families & {c.family, c.starred, c.numbered}
        ]
        if len(match) > 1 and rank in needed_ranks and not has_parts:
            raise CheckpointError(f"rank {rank}: several files of one step; {_listing(match)}")
        if match:
            names_by_rank[rank] = [c.name for c in match[: None if has_parts else 1]]
    names, ranks = _files_by_id(
        names_by_rank, 1 + max((*candidates, *needed_ranks, *among), default=0)
    )
    skipped_steps = sorted(
        {c.step for r in needed_ranks for c in files_by_rank[r] if c.step and c.step != newest}
    )
    counted = {*needed_ranks, *among}
    have = {r: {c.step for c in f} for r, f in files_by_rank.items() if r in counted}
    candidate_steps = [c.step for r in have for c in candidates[r] if has_parts]
    all_steps = [*candidate_steps, *(step for steps in have.values() for step in steps)]
    recent_steps = {step for step in all_steps if step and newest and step >= newest}
    lacking = {s: tuple(r for r, steps in have.items() if s not in steps) for s in recent_steps}
    incomplete = {step: lacking_ranks for step, lacking_ranks in lacking.items() if lacking_ranks}
    return SelectedFiles(names, newest, tuple(skipped_steps), incomplete, ranks=ranks)


def _whole_steps(files: Sequence[_Candidate]) -> list[_Candidate]:
    """Return a rank's files but for those of steps of which it lacks one that another step has."""
    kinds = {file.family for file in files if file.step is not None}
    families_by_step: dict[TrainingStep | None, set[str]] = {}
    for file in files:
        families_by_step.setdefault(file.step, set()).add(file.family)
    return [file for file in files if families_by_step[file.step] == kinds or file.step is None]


def _files_by_id(
    names_by_rank: Mapping[int, Sequence[str]], free: int
) -> tuple[dict[int, str], dict[int, int]]:
    """Return files by id, and the rank of each where some rank has several.

    A rank's first file has the rank's number, and others have numbers from `free` on, which are no
    rank's, there or not.
    """
    names = {rank: files[0] for rank, files in names_by_rank.items()}
    ranks = {rank: rank for rank in names}
    for rank, files in names_by_rank.items():
        for name in files[1:]:
            names[free], ranks[free] = name, rank
            free += 1
    return names, ranks if len(names) > len(names_by_rank) else {}


def _one_family(files: list[_Candidate], *, is_given: bool) -> set[str]:
    """Return the family of names that all files are of. Raises CheckpointError if there is none.

    `is_given`: the user's pattern matches one file for each rank, so that there is no question.
    """
    if len({c.step is None for c in files}) > 1:
        raise CheckpointError(
            "some of the files state an epoch and a step and some do not; choose by --suffix, "
            "--step or --src-pattern; " + _listing(files)
        )
    if is_given:
        return {c.family for c in files}
    families = min(
        {c.starred for c in files}, {c.family for c in files}, {c.numbered for c in files}, key=len
    )
    if len(families) > 1:
        _refuse_exchanged(files)
        raise CheckpointError(
            f"the rank folders hold {len(families)} families of checkpoints "
            f"({', '.join(sorted(families)[:6])}); say which by --suffix, --step or --src-pattern; "
            + _listing(files)
        )
    return families


def _refuse_exchanged(files: Sequence[_Candidate]) -> None:
    """Refuse files that by their names belong in each other's folders. Raises CheckpointError."""
    usual, _ = Counter(file.numbered for file in files).most_common(1)[0]
    expression = re.compile(re.escape(usual).replace(r"\*", r"(\d+)"))
    moves: dict[str, str] = {}
    for file in files:
        folder, match = dirname(file.path), expression.fullmatch(file.family)
        if file.numbered != usual:
            numbers = {*match.groups()} if match else set()
            if len(numbers) != 1 or not _OWN_FOLDER().search(folder):
                return
            moves[file.path] = _OWN_FOLDER().sub(rf"\g<1>{int(numbers.pop())}", folder)
    if not {*moves.values()}.symmetric_difference(map(dirname, moves)):
        first, paths = min(moves), [*moves]
        folders = dict.fromkeys(basename(dirname(path)) for path in sorted(paths))
        raise CheckpointError(
            f"{basename(first)} lies in {basename(dirname(first))}{and_more(paths, 'such file')}: "
            f"by their names the files of {' and '.join(folders)} were exchanged",
            " && ".join(f"mv {quote(path)} {quote(to)}/" for path, to in moves.items()),
            where=dirname(dirname(first)),
        )
    folders = {dirname(file.path): file for file in files if file.numbered == usual}
    if moves and {*moves.values()} <= folders.keys():  # copied, or saved, into another's
        first, paths = min(moves), [*moves]
        aside = " && ".join(f"mv {quote(path)} {quote(path)}.aside" for path in paths)
        lacking = sorted(
            {basename(dirname(path)) for path in paths if dirname(path) not in folders}
        )
        raise CheckpointError(
            f"{basename(first)} lies in {basename(dirname(first))}{and_more(paths, 'such file')}, "
            f"and by its name is {basename(moves[first])}'s",
            f"{aside}, and copy the file of {' and '.join(lacking)} again" if lacking else aside,
            where=dirname(dirname(first)),
        )


def _common_step(
    files_by_rank: Mapping[int, list[_Candidate]], needed_ranks: list[int]
) -> TrainingStep | None:
    """Return the newest step that all `needed_ranks` have, None where files state none."""
    steps = [{c.step for c in files_by_rank[rank]} for rank in needed_ranks]
    in_all = (
        set.intersection(*steps)
        if steps
        else {c.step for files in files_by_rank.values() for c in files}
    )
    if not in_all:
        rank = next(r for i, r in enumerate(needed_ranks) if not set.intersection(*steps[: i + 1]))
        raise CheckpointError(
            f"no step is there for every rank; rank {needed_ranks[0]}: "
            f"{_listing(files_by_rank[needed_ranks[0]])}; "
            f"rank {rank}: {_listing(files_by_rank[rank])}"
        )
    return max(in_all, key=lambda step: step or (-1, -1))


def _listing(candidates: Iterable[_Candidate]) -> str:
    paths = [c.path for c in candidates]
    return f"found {first_texts(paths, 8) or 'nothing'}"
