"""Which strategies lie where a checkpoint is, in words, for messages."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from posixpath import basename

from rankxform.checkpoints.base import (
    DEFAULT_PATTERN,
    CheckpointRef,
    RankFilter,
    SelectedFiles,
    recognize_form,
)
from rankxform.checkpoints.rank_folders import by_rank
from rankxform.display.text import format_count, from_here
from rankxform.errors import CheckpointError, Message, RankxformError, StorageError, UsageError
from rankxform.formats.container import container_suffixes, folder_signature
from rankxform.layout.names import first_texts, natural_sort_key
from rankxform.layout.strategy import Strategy
from rankxform.statements import quote
from rankxform.storage.posix import read_bytes, suggest_similar_path
from rankxform.storage.store import FOLDER, RANK, Listing, is_litter, store_at
from rankxform.storage.user_files import load_readable, strategies_near
from rankxform.values import pattern_on_use

_SHOWN = 2
_MOST_CHILDREN, _MOST_LOOKED_AT, _MOST_DEEPER = 3, 300, 20
_FOLDER = pattern_on_use(r"rank_(\d+)")
_RANK = pattern_on_use(r"(rank[-_]?)\d+", re.IGNORECASE)
_NUMBER = pattern_on_use(r"\d+(?=\D)")


_LOST = "--src-config FILE and --preset NAME, that job's YAML, if its strategy is lost"


def which_strategy(
    where: CheckpointRef, selected: SelectedFiles, siblings: Sequence[int]
) -> Message:
    """Say that files of several ranks need a strategy, and which lie beside the checkpoint.

    siblings: the ranks whose folders lie beside the one file that was named.
    """
    folder, ranks = Path(where.path), selected.rank_count
    count = len({*map(selected.rank_of, selected.names)})
    problem_text = f"holds the files of {count} ranks"
    if where.files is not None:
        problem_text = f"{count} files are given, of as many ranks"
    if siblings:
        ranks, folder = max(siblings) + 1, folder.resolve().parent.parent
        problem_text = f"is the file of one of {len(siblings)} rank folders"
    candidates = strategies_near(folder, ranks)
    options = [option_for(path, strategy) for path, strategy in candidates if is_tied(path, folder)]
    candidate_texts = [f"{short_path(path)} ({strategy.extent})" for path, strategy in candidates][
        :_SHOWN
    ]
    options = options[:_SHOWN] or ["--src-strategy FILE or FOLDER (MindFormers: output/strategy)"]
    details = f"beside it lies {' and '.join(candidate_texts)}, of this checkpoint or of another"
    none_option = "--src-strategy none if every rank holds whole parameters (data parallel, "
    above = (f"name the folder of them all, {quote(short_path(folder))}",) if siblings else ()
    return Message(
        f"{problem_text}, and no --src-strategy says how they were sharded",
        (*above, *options, _LOST, f"{none_option}remove_redundancy)"),
        where="" if where.files is not None else where.path,
        details=details
        if candidate_texts and not any(is_tied(path, folder) for path, _ in candidates)
        else "",
    )


def as_ranks(paths: Iterable[str]) -> str:
    """Return the option by which files are ranks', if their names say so; "" if they do not.

    >>> as_ranks(["model-rank-0-part-1.pt", "model-rank-1-part-0.pt"]).partition(" if ")[0]
    "--src-pattern 'model-rank-{rank}-part-*.pt'"
    """
    numbered = (_RANK().sub(r"\g<1>{rank}", basename(path)) for path in paths)
    split = (name.rpartition(RANK) for name in numbered)
    patterns = {
        prefix + rank + _NUMBER().sub("*", suffix) if rank else "" for prefix, rank, suffix in split
    }
    pattern = patterns.pop() if len(patterns) == 1 else ""
    return f"--src-pattern {quote(pattern)} if these are ranks' files" if pattern else ""


def with_what_lies_there(
    parts: Message, where: CheckpointRef, listing: Listing | None, *, is_empty: bool
) -> Message:
    """Return what is wrong with a place, with what lies there instead of a checkpoint.

    `is_empty`: no file was found that could be one of a checkpoint.
    """
    if listing is None or not is_empty:
        return parts
    if listing.kind == FOLDER:
        return what_lies_at(Path(where.path)) or parts
    nearby_tries = suggest_similar_path(Path(where.path), holds_checkpoint)
    return parts._replace(tries=(*nearby_tries, *parts.tries))


def one_of_ranks(where: CheckpointRef, strategy: Strategy, siblings: Sequence[int]) -> Message:
    """Say that one rank's file was named, and the strategy is of all ranks that lie beside it."""
    folder = Path(where.path).resolve().parent.parent
    return Message(
        f"is the file of one of {len(siblings)} rank folders, and {strategy.label} of "
        f"{strategy.extent}",
        (f"name the folder of them all, {quote(short_path(folder))}",
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


def saved_strategy(path: str, src_strategy: Strategy) -> Strategy | None:
    """Return the strategy that MindFormers leaves with a checkpoint: ``output/strategy`` beside
    ``output/checkpoint``.

    None where there is none that can be read, or it is `src_strategy`.
    """
    folder = Path(path)
    if folder.name != "checkpoint":
        return None
    strategy_folder = folder.parent / "strategy"
    if Path(src_strategy.label).absolute().is_relative_to(strategy_folder.absolute()):
        return None
    loaded_strategies = load_readable([strategy_folder] if strategy_folder.is_dir() else [])
    return loaded_strategies[0][1] if loaded_strategies else None


def what_lies_at(folder: Path) -> Message | None:
    """Say what a folder without a checkpoint of its own holds: checkpoints below it, or another
    tool's files. None if that is not known.
    """
    children = checkpoints_below(folder) or [
        path for child in _folders_in(folder)[-_MOST_DEEPER:] for path in checkpoints_below(child)
    ]
    if children:
        inside = "a checkpoint" if len(children) == 1 else f"{len(children)} checkpoints"
        torn = [child for child in children[: 2 * _MOST_CHILDREN] if _is_torn(child)]
        whole_children = [child for child in children if child not in torn]
        tries = tuple(map(_folder_to_try, whole_children[:_MOST_CHILDREN]))
        return Message(
            f"holds no checkpoint itself, and {inside} in its folders",
            tries or ("save again",),
            where=str(folder),
            details=f"{first_texts([c.name for c in torn])}: was not saved whole" if torn else "",
        )
    for place in (folder, *_folders_in(folder)):
        with suppress(OSError):
            match = folder_signature([entry.name for entry in place.iterdir()])
            if match is not None:
                name, signature = match
                title = f"{signature.title}: {short_path(place / name)}"
                problem_text = f"expected a checkpoint that rankxform reads, found {title}"
                return Message(problem_text, signature.tries, where=str(folder))
    return None


def _is_torn(folder: Path) -> bool:
    """Tell whether a checkpoint's files cannot be selected, as what is written last is missing."""
    where, store = CheckpointRef(str(folder)), store_at(str(folder))
    try:
        form = recognize_form(store.list("*"), store)
        form.select(store.list(form.pattern(where)), where, store, RankFilter())
    except CheckpointError:
        return True
    except (RankxformError, OSError):
        return False  # it is not clear which are meant
    return False


def _folder_to_try(child: Path) -> str:
    """Return what to try: a folder, with how many ranks it has if these are rank folders."""
    with suppress(RankxformError):
        ranks = by_rank(store_at(str(child)).list(DEFAULT_PATTERN), DEFAULT_PATTERN)
        if ranks:
            return f"name {quote(short_path(child))} ({format_count(len(ranks), 'rank')})"
    return f"name {quote(short_path(child))}"


def checkpoints_below(folder: Path) -> list[Path]:
    """Return the folders in a folder, or in its ``snapshots``, that are checkpoints.

    Numbered ones the newest first; of a Hugging Face cache first the one that ``refs/main`` names.
    """
    caches = [child for child in _folders_in(folder) if (child / "snapshots").is_dir()]
    if caches:
        return [child for cache in caches for child in checkpoints_below(cache)]
    cache = folder.parent if folder.name == "snapshots" else folder
    snapshots = cache / "snapshots"
    children = _folders_in(snapshots if snapshots.is_dir() else folder)
    main = ""
    with suppress(StorageError):
        main = read_bytes(cache / "refs" / "main").decode(errors="replace").strip()
    by_number = sorted(children, key=lambda child: natural_sort_key(child.name), reverse=True)
    ordered = children if snapshots.is_dir() else by_number
    return sorted(filter(_is_checkpoint, ordered), key=lambda child: child.name != main)


def _folders_in(folder: Path) -> list[Path]:
    """Return the folders in a folder, by name; a few hundred at most."""
    with suppress(OSError):
        return sorted(
            child for child in folder.iterdir() if child.is_dir() and not is_litter(child.name)
        )[-_MOST_LOOKED_AT:]
    return []


def holds_checkpoint(path: Path) -> bool:
    """Tell whether a path is a checkpoint's file, a checkpoint, or a folder of some."""
    if not path.is_dir():
        return path.suffix in container_suffixes()
    return _is_checkpoint(path) or bool(checkpoints_below(path))


def _is_checkpoint(folder: Path) -> bool:
    store = store_at(str(folder))
    try:
        if recognize_form(store.list("*"), store).described:
            return True
        return bool(by_rank(store.list(DEFAULT_PATTERN), DEFAULT_PATTERN))
    except UsageError:
        return True  # of two forms
    except RankxformError:
        return False


def siblings_of(path: Path) -> list[int]:
    """Return the ranks of the folder of `path` and of those beside it; none if it is alone."""
    path = path.resolve()
    if not _FOLDER().fullmatch(path.parent.name):
        return []
    ranks = []
    for folder in path.parent.parent.glob("rank_*"):
        match = _FOLDER().fullmatch(folder.name)
        with suppress(OSError):  # skip a folder that cannot be listed
            if match and any(file.suffix in container_suffixes() for file in folder.iterdir()):
                ranks.append(int(match[1]))
    return ranks if len(ranks) > 1 else []


def option_for(path: Path, strategy: Strategy) -> str:
    return f"--src-strategy {quote(short_path(path))} (found there: {strategy.extent})"


def short_path(path: Path) -> str:
    """Write a path as it is named from here, if it lies below."""
    return from_here(str(path))
